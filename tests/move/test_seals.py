"""Digests made during the copy are those that a writer would make afterwards."""

from __future__ import annotations

import random

import pytest

from keepstep.format.shardfile import block_size, digest
from keepstep.move.arena import Arena, bases_of
from keepstep.move.seals import Seals

SIZES = {
    "one block and a bit": [70_000],
    "exact blocks": [1 << 17, 1 << 16],
    "small and empty": [5, 0, 4096, 1, 300_000, 0],
    "nothing": [],
}


@pytest.mark.parametrize("name", SIZES)
def test_any_way_of_filling_gives_the_same_digests(name):
    sizes = SIZES[name]
    bases, total = bases_of(sizes)
    arena = Arena(max(total, 1), ring=False)
    random.seed(11)
    arena.memory[:total] = random.randbytes(total)
    expected = tuple(
        b"".join(
            digest(arena.memory[base + at : base + min(at + block_size(size), size)]).to_bytes(8, "little")
            for at in range(0, size, block_size(size))
        )
        for base, size in zip(bases, sizes, strict=True)
    )
    for steps in ([], [total], *(sorted(random.sample(range(total + 1), min(9, total))) for _ in range(20))):
        seals = Seals(arena, sizes)
        for filled in steps:
            seals.advance(filled)
        assert seals.finish() == expected, steps
    arena.close()


def test_what_is_not_filled_yet_is_not_looked_at():
    sizes = [200_000, 100_000]
    _, total = bases_of(sizes)
    arena = Arena(total, ring=False)
    arena.memory[:total] = bytes(total)
    seals = Seals(arena, sizes)
    for filled in range(0, total, 10_000):
        arena.memory[filled : min(filled + 10_000, total)] = b"x" * min(10_000, total - filled)
        seals.advance(min(filled + 10_000, total))
    whole = Seals(arena, sizes)
    assert seals.finish() == whole.finish()
    arena.close()
