"""What a user says about a value that keepstep cannot see by itself: this rank's own, or a part of something larger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import UsageError

__all__ = ["RULES", "PerRank", "Sharded", "per_rank", "sharded"]

RULES = ("error", "same_rank", "derive")


@dataclass(slots=True)
class PerRank:
    """A value each rank has of its own under a shared key. Made by ``per_rank``; ``value`` is replaced by a load."""

    value: Any
    on_world_change: str = "error"


@dataclass(frozen=True, slots=True)
class Sharded:
    """A local tensor that is one box of a global one. Made by ``sharded``."""

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def per_rank(value: Any, on_world_change: str = "error") -> PerRank:
    """Marks a value as this rank's own: every rank stores and gets back its own one.

    Args:
        value: anything that may stand in a state, also an object with a state_dict.
        on_world_change: what a load on another number of ranks does. ``"error"`` refuses, ``"same_rank"`` gives old
            ranks theirs and leaves new ranks as they are, ``"derive"`` is for random number streams: old ranks get
            theirs, new ranks get new, distinct, repeatable ones.

    Raises:
        UsageError: an unknown rule.
    """
    if on_world_change not in RULES:
        raise UsageError(f"on_world_change={on_world_change!r}; it is one of {', '.join(map(repr, RULES))}")
    return PerRank(value, on_world_change)


def sharded(local: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> Sharded:
    """Marks a local tensor as the box at ``offsets`` (in elements) of a tensor of ``global_shape``.

    For shards that are not DTensors. The boxes of all ranks must cover the global tensor without overlap, or be held by
    several ranks alike; a save checks it. A rank with nothing to add passes a tensor with a zero in its shape.

    Raises:
        UsageError: the box does not fit into the global shape.
    """
    shape, start = tuple(map(int, global_shape)), tuple(map(int, offsets))
    fits = len(shape) == len(start) == local.dim() and all(
        offset >= 0 and offset + size <= limit
        for offset, size, limit in zip(start, local.shape, shape, strict=True)
        if local.numel()
    )
    if not fits:
        raise UsageError(
            f"a shard of shape {tuple(local.shape)} at {start} does not fit into a tensor of shape {shape}"
        )
    return Sharded(local, shape, start)
