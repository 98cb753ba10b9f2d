"""Trainings of many kinds under a StepCallback: ``lightning_script.py KIND [BATCH]``, which kills itself in that batch."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import keepstep as ks
from keepstep.data import ResumableBatchSampler, ResumableLoader
from keepstep.interop.lightning import StepCallback


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are drawn anew each time: what comes depends on who has drawn before."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4) + index / self.samples
        return x, x.sum(0, keepdim=True)


class Net(LightningModule):
    """A perceptron with dropout, whose hooks keep things that a checkpoint has to hold."""

    def __init__(self, die_in: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.die_in = die_in
        self.seen = 0
        self.register_buffer("mean", torch.zeros(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.die(batch_idx)
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log_dict({"sum": loss, "top": loss}, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train", loss, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("now_and_then", loss, on_step=False, on_epoch=True)
        return loss

    def die(self, batch_idx: int) -> None:
        if self.trainer.current_epoch * len(self.trainer.train_dataloader) + batch_idx == self.die_in:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, *_: Any) -> None:
        # Behind the callbacks' hooks.
        self.seen += 1
        self.mean.lerp_(self.layers[0].weight.detach(), 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.layers(batch[0]) + torch.rand(1), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen, checkpoint["global_step"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen, step = checkpoint["seen"]
        assert step == checkpoint["seen"][1]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        steps = {"scheduler": scheduler, "interval": "step"}
        return [optimizer], [steps, {"scheduler": plateau, "interval": "step", "monitor": "train_step"}]


class ByHand(Net):
    """Two optimizers, one of which moves at every other batch."""

    def __init__(self, die_in: int) -> None:
        super().__init__(die_in)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.die(batch_idx)
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layers[number].parameters(), lr=0.01) for number in (0, 3)]


class Data(LightningDataModule):
    """A data module with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return ResumableLoader(Noise(60), batch_size=4, seed=3)

    def val_dataloader(self) -> Any:
        return DataLoader(Noise(8), batch_size=8)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"asked": 1}


class Draws(Callback):
    """Random numbers in hooks: whoever calls them once more, or once less, gets another run."""

    def on_train_epoch_start(self, *_: Any) -> None:
        torch.rand(1)

    def on_train_start(self, *_: Any) -> None:
        torch.rand(1)

    def on_train_epoch_end(self, *_: Any) -> None:
        torch.rand(1)


def main(kind: str, die_in: int = -1) -> None:
    seed_everything(1, verbose=False)
    dataset = Noise(60)
    callbacks: list[Callback] = [Draws()]
    options: dict[str, Any] = {"max_epochs": 3}
    every: dict[str, Any] = {"every": ks.Every(steps=4)}
    model: LightningModule = Net(die_in)
    fit: dict[str, Any] = {"val_dataloaders": DataLoader(Noise(8), batch_size=8)}
    if kind == "validation inside":
        # 15 batches an epoch; it ends inside of one.
        options |= {"val_check_interval": 5, "max_steps": 37, "max_epochs": -1}
        callbacks += [EarlyStopping("val", patience=20)]
        fit["train_dataloaders"] = DataLoader(
            dataset, batch_sampler=ResumableBatchSampler(dataset, batch_size=4, seed=2)
        )
    elif kind == "inside an update":
        options |= {"accumulate_grad_batches": 4}
        every = {"every": ks.Every(seconds=1e-9), "background": "off"}
        fit = {"datamodule": Data()}
    elif kind == "part of the epoch":
        options |= {"limit_train_batches": 7, "check_val_every_n_epoch": 2, "max_epochs": 5}
        # It grows at every third step, and so has something to lose.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        options |= {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        fit["train_dataloaders"] = ResumableLoader(dataset, batch_size=4, seed=2, num_workers=1)
    elif kind == "by hand":
        model = ByHand(die_in)
        random = torch.Generator().manual_seed(5)
        sampler = RandomSampler(TensorData(), generator=random)
        fit["train_dataloaders"] = StatefulDataLoader(TensorData(), batch_size=4, sampler=sampler)
    steps = StepCallback("runs/none", **every)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, **fit)
    assert model.seen == trainer.fit_loop.epoch_loop.total_batch_idx + 1


class TensorData(Dataset[tuple[Tensor, Tensor]]):
    """The same samples each time."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, index / 60, 4)
        return x, x.sum(0, keepdim=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
