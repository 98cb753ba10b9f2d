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


class Rows:
    """Items of one shard, as an iterator that knows where it stands."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.at = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shards:
    """Item i of shard s is 1000 s + i."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def shards(self) -> list[str]:
        return [f"shard-{number}" for number in range(len(self.lengths))]

    def open(self, shard: str) -> Any:
        number = int(shard.removeprefix("shard-"))
        return Rows([1000 * number + item for item in range(self.lengths[number])])

    def everything(self) -> list[int]:
        return [1000 * number + item for number, length in enumerate(self.lengths) for item in range(length)]


class Forgetful(Shards):
    """Its iterators cannot say where they stand."""

    def open(self, shard: str) -> Any:
        return iter(super().open(shard).items)


class Documents(Shards):
    """Item i of shard s is a row of tokens, of a length of its own."""

    def open(self, shard: str) -> Any:
        rows = super().open(shard)
        rows.items = [torch.arange(item, item + 1 + item % 7) for item in rows.items]
        return rows
