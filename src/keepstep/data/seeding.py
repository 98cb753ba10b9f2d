"""Randomness of single samples: a function of the seed, the epoch and the sample, wherever and whenever it is made.

A data set that draws random numbers would otherwise give other samples with other workers, and after a resume. In: a data
set and a collate function of the user. Out: the same two, with the global generators of python, numpy and torch (host)
seeded around each call. In the trainer's own process the generators stand afterwards where they stood before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

from keepstep.data.order import mix

__all__ = ["Draw", "SeededCollate", "SeededDataset", "own_streams", "seed_streams"]

_BATCH = -1
"""Stands in the place of a sample's number for what is drawn for a whole batch."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A request for the samples of one batch: their numbers, in order, and the seed that their random numbers come from."""

    ids: tuple[int, ...]
    seed: int


def seed_streams(seed: int) -> None:
    """Seeds the global generators of this process by 64 bits. Devices are left alone: their numbers belong to training."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed % (1 << 63))


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Whatever is drawn inside is not missed outside. In a worker it does nothing: nobody else draws there."""
    if get_worker_info() is not None:
        yield
        return
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)


class SeededDataset:
    """A map-style data set that is asked for a ``Draw`` and gives it back together with its samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, draw: Draw) -> tuple[Draw, Sequence[Any]]:
        """The samples of a batch, each made with random numbers of its own.

        A data set that makes many samples in one call (``__getitems__``) is seeded once, by all of their numbers.
        """
        with own_streams():
            if _makes_many(self.dataset):
                seed_streams(mix(draw.seed, *draw.ids))
                return draw, self.dataset.__getitems__(list(draw.ids))
            return draw, [self._one(number, draw.seed) for number in draw.ids]

    def _one(self, number: int, seed: int) -> Any:
        seed_streams(mix(seed, number))
        return self.dataset[number]


def _makes_many(dataset: Any) -> bool:
    """Whether many samples in one call are more to this data set than one call for each."""
    if isinstance(dataset, Subset):
        # It always has __getitems__, and hands on to what is inside.
        return _makes_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


class SeededCollate:
    """A collate function with random numbers that depend on which samples it is given, as masking needs them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, drawn: tuple[Draw, Sequence[Any]]) -> Any:
        """The user's batch."""
        draw, samples = drawn
        with own_streams():
            seed_streams(mix(draw.seed, *draw.ids, _BATCH))
            return self.collate(samples)
