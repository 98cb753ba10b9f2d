"""Digests made while data is copied, when it is still in the processor's cache: later it would have to be read again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepstep.format.shardfile import block_size, digest
from keepstep.move.arena import Arena, bases_of

__all__ = ["Seals"]


class Seals:
    """The digests of every block of the files in a whole arena, made from front to back. Imports no torch.

    Args:
        arena: where the files lie, see ``bases_of``.
        data_bytes: the size of each file's data.
    """

    def __init__(self, arena: Arena, data_bytes: Sequence[int]) -> None:
        bases, _ = bases_of(data_bytes)
        self._memory = arena.memory
        self._spans = [(base, base + size, block_size(size)) for base, size in zip(bases, data_bytes, strict=True)]
        self._digests = [np.zeros(-(-size // block_size(size)), np.uint64) for size in data_bytes]
        self._file = 0
        self._at = 0

    def advance(self, filled: int) -> None:
        """Everything below this byte of the arena is in place: makes the digests of the blocks that are complete."""
        while self._file < len(self._spans):
            base, end, block = self._spans[self._file]
            self._at = max(self._at, base)
            memory, digests, at = self._memory, self._digests[self._file], self._at
            stop = end if filled >= end else filled - (filled - base) % block
            for index, start in enumerate(range(at, stop, block), (at - base) // block):
                digests[index] = digest(memory[start : min(start + block, end)])
            self._at = max(at, stop)
            if filled < end:
                return
            self._file += 1

    def finish(self) -> tuple[bytes, ...]:
        """The digests of all files, as little-endian integers of 64 bits, once all is in place."""
        self.advance(self._spans[-1][1] if self._spans else 0)
        return tuple(each.astype("<u8").tobytes() for each in self._digests)
