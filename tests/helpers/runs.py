"""A small training run with tensors large enough to be copied late, and what is on disk of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import keepstep as ks
from tests.helpers.same import bits

WIDE = 128
"""A square of this width has 64 KiB."""


def run(seed: int = 0) -> ks.TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(WIDE, WIDE)
    return ks.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), log=[])


def train(state: ks.TrainState, times: int = 1) -> None:
    for _ in range(times):
        state["optimizer"].zero_grad()
        loss = state["model"](torch.ones(2, WIDE)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["log"].append(round(loss.item(), 6))


def contents(place) -> dict[str, bytes]:
    """Every tensor of a committed step, by key."""
    with ks.open(place) as step:
        return {key: bits(step[key]) for key in step}


def steps_in(root: Path) -> list[int]:
    """Steps whose manifest is in place."""
    return sorted(int(path.parent.name[5:]) for path in root.glob("step-*/.metadata"))


def latest(root: Path) -> int:
    """What the hint says."""
    return json.loads((root / "latest").read_text())["step"]


def restored(root: Path, **options) -> ks.TrainState:
    """What a new start of the job finds."""
    state = run(9)
    with ks.Checkpointer(root, state, background="off") as ckpt:
        ckpt.restore(**options)
    return state
