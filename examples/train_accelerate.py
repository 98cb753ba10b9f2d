"""A loop with Accelerate that goes on where it was killed, bit for bit.

    python examples/train_accelerate.py
    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py

Everything that has to do with checkpoints is marked (1) to (3). Kill it as you like, and start it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import TensorDataset

import keepstep as ks
from keepstep.data import ResumableLoader
from keepstep.interop.accelerate import Checkpointer, PreparedLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=options.accumulate)
    set_seed(1)
    x = torch.linspace(-3, 3, 160).unsqueeze(1)
    # (1) A loader that knows which samples were used.
    loader = PreparedLoader(accelerator, ResumableLoader(TensorDataset(x, x.sin()), global_batch_size=6, seed=1))
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # (2) Around everything that was prepared. restore() goes on from the newest good step.
    every, keep = ks.Every(steps=4), ks.Keep(last=2)
    with Checkpointer(options.checkpoints, accelerator, data=loader, every=every, keep=keep) as checkpoints:
        checkpoints.restore()
        for _ in range(loader.epoch, options.epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                # (3) After every batch.
                checkpoints.passed(loss=loss.detach())
    accelerator.end_training()


if __name__ == "__main__":
    main()
