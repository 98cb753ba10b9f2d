"""A training script in which every kind of state has a part in every update; used under ``keepstep drill``."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from parts import Scaled, ScaledInExtraState, Shuffled, WarmUp
from torch import nn
from torch.optim.swa_utils import AveragedModel

import keepstep as ks

STEPS = 8


def build():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 4),
        Scaled("not persistent"), nn.Linear(3, 4), ScaledInExtraState("extra_state"),
    )  # fmt: skip
    groups = [{"params": [*model[:4].parameters()], "decay": 0.9}, {"params": [*model[4:].parameters()], "decay": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return {
        "model": model,
        "average": AveragedModel(model),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, WarmUp()),
        "scaler": torch.amp.GradScaler("cpu", init_scale=999.0, growth_factor=1.7, growth_interval=3),
        "data": Shuffled(7),
        "noise": np.random.default_rng(8),
        "counters": {"seen": 0},
    }


def update(parts, step):
    """One step; the loss."""
    model, optimizer, scaler, counters = (parts[name] for name in ("model", "optimizer", "scaler", "counters"))
    ids = next(iter(parts["data"]))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(ids[0]))
    x = x + 0.1 * (random.gauss(0, 1) + float(np.random.standard_normal()) + float(parts["noise"].standard_normal()))
    with torch.no_grad():
        aim = parts["average"](x)
        still = model.eval()(x)
    model.train()
    loss = (model(x) - aim + 0.1 * still + 0.1).square().mean() / (1 + counters["seen"])
    counters["seen"] += 1
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * group["decay"] * group.setdefault("first_loss", loss.item())
        group["decay"] *= group["decay"] - 0.01 * step
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    parts["scheduler"].step()
    parts["average"].update_parameters(model)
    return loss.item()


def main():
    torch.set_num_threads(1)
    parts = build()
    state = ks.TrainState(**parts, non_persistent_buffers=True)
    with ks.Checkpointer(Path(sys.argv[1]), state, background="off") as checkpointer:
        checkpointer.restore()
        while checkpointer.progress.step < STEPS:
            loss = update(parts, checkpointer.progress.step)
            checkpointer.step(loss=loss)


if __name__ == "__main__":
    main()
