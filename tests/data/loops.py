"""Data sets that tell their samples apart, and loops that consume them as a training would."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import keepstep as ks


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number)


class Noisy(Numbers):
    """Sample i is i and what three generators give, as an augmentation draws it."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Together(Noisy):
    """Makes all samples of a batch in one call."""

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        noise = torch.rand(()).item()
        return [torch.tensor([number, noise], dtype=torch.float64) for number in numbers]


def consume(root: Path, loader: Any, batches: int, *, component: Any = None, **options: Any) -> list[Any]:
    """What the loop gets: so many batches from where the run stands, as lists; then a save, and the job ends."""
    state = ks.TrainState(data=loader if component is None else component)
    seen: list[Any] = []
    with ks.Checkpointer(root, state, background="off", **options) as ckpt:
        ckpt.restore()
        while len(seen) < batches:
            for batch in loader:
                seen.append(batch.tolist())
                ckpt.step(samples=getattr(loader, "batch_samples", 0))
                if len(seen) == batches:
                    break
        ckpt.save()
    return seen


def flat(batches: list[list[int]]) -> list[int]:
    """All samples of these batches, in order."""
    return [number for batch in batches for number in batch]
