"""What a capture gives: a state at one step boundary, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keepstep.format.layout import Structure
from keepstep.format.manifest import Component

__all__ = ["SharedValue", "Snapshot"]


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A value that this rank holds together with others, at one place of a mesh; only the first of them stores it."""

    key: str
    place: int
    value: Any
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at one step boundary.

    ``tree`` and ``own_tree`` are encoded plain values: shared by all ranks, and this rank's own. ``locals`` holds, for
    each tensor of ``structure``, the live local tensors of this rank; ``own`` holds tensors that belong to this rank alone.
    ``late`` are the indices of tensors that nothing but an optimizer's step changes: they may be copied until then.
    ``shared`` are values that a few ranks hold together.
    ``config`` is JSON for the record; empty for a state that is no TrainState, of which nothing is recorded.
    """

    tree: bytes
    own_tree: bytes
    structure: Structure
    locals: tuple[tuple[torch.Tensor, ...], ...]
    own: tuple[tuple[str, str, torch.Tensor], ...]
    aliases: dict[str, str]
    components: dict[str, Component]
    late: frozenset[int]
    shared: tuple[SharedValue, ...] = ()
    config: bytes = b""
