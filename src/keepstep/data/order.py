"""The one order of an epoch, and how it is cut into batches and shares. Pure arithmetic, no torch.

The order of an epoch is a function of the seed, the epoch and the number of samples. Neither ranks nor workers nor the size
of a batch have a part in it, so a position in it is one number that means the same everywhere. It is computed where it is
asked for and never held as a whole: a data set of a billion samples costs nothing at the start and nothing at a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from keepstep.errors import UsageError

__all__ = ["Cut", "GlobalBatch", "Order", "Tail", "mix"]

Tail = Literal["short", "drop", "pad"]
"""What becomes of the samples at the end of an epoch that fill no whole global batch; see ``Cut``."""

_FEWEST_ROUNDS = 8
_ROUNDS_AND_BITS = 32
"""A network over few bits mixes less in a round: with so many rounds even five samples stand in each order equally often."""
_Positions = npt.NDArray[np.uint64]


def mix(*numbers: int) -> int:
    """64 bits that depend on 64 bits of each of these numbers, and on nothing else: no version, no platform."""
    return xxhash.xxh3_64_intdigest(b"".join((number % (1 << 64)).to_bytes(8, "little") for number in numbers))


@dataclass(frozen=True, slots=True)
class Order:
    """The order of ``samples`` samples in every epoch: shuffled anew by ``seed`` and epoch, or as they lie."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def ids(self, epoch: int, positions: npt.ArrayLike) -> list[int]:
        """The samples that stand at these positions, each in [0, samples), of the epoch."""
        places = np.asarray(positions, dtype=np.uint64)
        if not self.shuffle or self.samples < 2:
            return [int(place) for place in places]
        rounds = max(_FEWEST_ROUNDS, _ROUNDS_AND_BITS - self.samples.bit_length())
        keys = [mix(self.seed, epoch, number) for number in range(rounds)]
        moved = _scattered(places, self.samples, keys)
        # A position that was moved beyond the end is moved on until it is inside: that keeps the whole one to one.
        while (outside := moved >= self.samples).any():
            moved[outside] = _scattered(moved[outside], self.samples, keys)
        return [int(place) for place in moved]


def _scattered(places: _Positions, samples: int, keys: list[int]) -> _Positions:
    """Every place below the next power of two moved to another one, no two to the same: a Feistel network."""
    bits = max(2, (samples - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits) - low_bits
    high, low = places >> low_bits, places & ((np.uint64(1) << low_bits) - np.uint64(1))
    for number, key in enumerate(keys):
        # The halves differ by a bit when the number of bits is odd, so each is changed in its own place.
        if number % 2:
            low = low ^ (_stirred(high, key) >> (np.uint64(64) - low_bits))
        else:
            high = high ^ (_stirred(low, key) >> (np.uint64(64) - high_bits))
    return (high << low_bits) | low


def _stirred(values: _Positions, key: int) -> _Positions:
    """64 well mixed bits for each value: the finaliser of splitmix64, begun at the key."""
    stirred = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    stirred = (stirred ^ (stirred >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    stirred = (stirred ^ (stirred >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return stirred ^ (stirred >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """What all ranks consume together: positions [start, stop) of the order, filled up to ``size`` by repeats."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How the rest of an epoch is cut into global batches of ``size`` samples, and these into shares for ``world`` ranks.

    All ranks have the same number of batches, and no share is empty. The end of the epoch, where fewer samples are left
    than a global batch holds, is one of

    - ``"short"``: a smaller batch; every sample once. When fewer samples than ranks would be left over, they are added to
      the batch before. Should there be none before, because the run was resumed on more ranks just then, the ranks that
      would go without repeat samples from the beginning of the epoch.
    - ``"drop"``: left out; every sample at most once, all batches of one size.
    - ``"pad"``: filled up with samples from the beginning of the epoch; every sample at least once, all of one size.

    Raises:
        UsageError: lists everything that cannot be.
    """

    samples: int
    size: int
    world: int
    tail: Tail = "short"

    def __post_init__(self) -> None:
        wrong = []
        if self.tail not in get_args(Tail):
            wrong.append(f"tail={self.tail!r}; it is one of {', '.join(map(repr, get_args(Tail)))}")
        if self.samples < 1:
            wrong.append("the data set is empty")
        if self.size < self.world:
            wrong.append(f"a global batch of {self.size} samples leaves some of {self.world} ranks without one")
        if self.tail == "drop" and 1 <= self.samples < self.size:
            wrong.append(f"{self.samples} samples fill no global batch of {self.size}, and tail='drop' leaves them out")
        if self.tail == "short" and 1 <= self.samples < self.world:
            wrong.append(f"{self.samples} samples are too few for {self.world} ranks without repeats (tail='pad')")
        if wrong:
            raise UsageError("this data cannot be dealt: " + "; ".join(wrong))

    def next_batch(self, start: int) -> GlobalBatch | None:
        """The global batch at that position, or None at the end of the epoch."""
        left = self.samples - start
        if left <= 0 or (self.tail == "drop" and left < self.size):
            return None
        if self.tail == "short" and left < self.size + self.world and left != self.size:
            # The last one: it is short, or so few would come after it that a rank would get none.
            return GlobalBatch(start, self.samples, max(left, self.world))
        return GlobalBatch(start, min(start + self.size, self.samples), self.size)

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """The global batches from that position to the end of the epoch."""
        while (batch := self.next_batch(start)) is not None:
            yield batch
            start = batch.stop

    def count(self, start: int = 0) -> int:
        """How many global batches there are from that position to the end of the epoch."""
        whole, rest = divmod(max(self.samples - start, 0), self.size)
        if not rest or self.tail == "drop":
            return whole
        joins = self.tail == "short" and rest < self.world and whole > 0
        return whole if joins else whole + 1

    def share(self, batch: GlobalBatch, rank: int) -> range:
        """Positions in the epoch that a rank has of a global batch; those at and beyond ``samples`` begin again at 0.

        Shares differ by one sample at most; one after the other, by rank, they are the global batch in its order.
        """
        first, last = batch.size * rank // self.world, batch.size * (rank + 1) // self.world
        return range(batch.start + first, batch.start + last)
