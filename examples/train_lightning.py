"""A Lightning Trainer that goes on where it was killed, bit for bit.

    python examples/train_lightning.py                  # one process
    python examples/train_lightning.py --devices 2      # DistributedDataParallel on two

Everything that has to do with checkpoints is marked (1) and (2). Kill it as you like, and start it again.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep as ks
from keepstep.data import ResumableLoader
from keepstep.interop.lightning import StepCallback


def moons(samples: int, seed: int) -> TensorDataset:
    """Two half circles that reach into each other."""
    random = torch.Generator().manual_seed(seed)
    label = torch.arange(samples) % 2
    angle = torch.rand(samples, generator=random) * torch.pi
    x = torch.stack([angle.cos() + label, angle.sin() * (1 - 2 * label) + 0.5 * label], 1)
    return TensorDataset(x + 0.1 * torch.randn(samples, 2, generator=random), label)


class Net(LightningModule):
    """A perceptron with dropout, whose learning rate follows the loss of the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs what the learning rate follows."""
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, and a learning rate that falls when nothing gets better."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()

    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    seed_everything(1, verbose=False)
    # (1) A loader that knows which samples were used.
    loader = ResumableLoader(moons(300, 1), batch_size=16, seed=1)
    # (2) One callback. fit() goes on from the newest good step by itself.
    steps = StepCallback(options.checkpoints, every=ks.Every(steps=5), keep=ks.Keep(last=2))
    trainer = Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        accelerator="cpu",
        accumulate_grad_batches=options.accumulate,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, DataLoader(moons(64, 2), batch_size=64))


if __name__ == "__main__":
    main()
