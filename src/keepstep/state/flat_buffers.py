"""Flat buffers: slices of many parameters in one tensor, stored under the parameters' names.

A distributed optimizer keeps its state as a part of one long buffer, padded so that ranks get equal parts. In: such a
buffer and which slice of which parameter lies where in it. Out: for each parameter the boxes that this rank holds, as views
of the buffer. A slice of a flattened parameter is a few boxes of it, so what is stored is an ordinary sharded tensor that
any layout can take. Padding is in no slice, and so in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.format.box import Box, range_boxes, whole
from keepstep.format.layout import Mesh, parts
from keepstep.state.marks import Flat, Sharded
from keepstep.state.shard import LayoutTable, is_dtensor

__all__ = ["FlatPiece", "flat", "flat_pieces"]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """``buffer[at : at + elements]`` holds elements [start, start + elements) of a parameter, counted row by row.

    ``shape`` is the parameter's. Where that is one box of a larger tensor, as under tensor parallelism, ``global_shape``
    and ``offsets`` say of which. A piece without elements says that there is such a parameter, held by other ranks.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    elements: int
    at: int
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None


def flat(
    buffers: torch.Tensor | Mapping[str, torch.Tensor], pieces: Iterable[FlatPiece], *, in_place: bool = False
) -> Flat:
    """Marks a flat buffer as slices of named parameters, each to be stored under its name.

    The result stands in a state: ``{"master": flat(buffer, pieces)}``. Nothing is copied; a load fills the buffer, from
    whatever layout was saved. With several buffers that are divided alike, as ``{"exp_avg": ..., "exp_avg_sq": ...}``, each
    parameter has one entry for each, as optimizers of torch have it. The slices of all ranks must cover every parameter
    without overlap, or be held by several ranks alike; a save checks it. Not collective.

    Args:
        buffers: dense tensors with one dimension.
        pieces: what lies where in them; see ``flat_pieces``.
        in_place: for what an object's ``state_dict`` returns: a load reads into the buffers, not into new memory that
            ``load_state_dict`` is to copy from. A load that fails on its way then leaves something of both in them.

    Raises:
        UsageError: lists every piece that does not fit its parameter, the buffer, or the other pieces.
    """
    listed = list(pieces)
    single = isinstance(buffers, torch.Tensor)
    kinds: dict[str, torch.Tensor] = {"": buffers} if isinstance(buffers, torch.Tensor) else dict(buffers)
    problems = _problems(kinds, listed)
    if problems:
        raise UsageError("a flat buffer and its pieces do not fit:\n" + "\n".join(f"  {text}" for text in problems))
    by_name: dict[str, list[FlatPiece]] = {}
    for piece in listed:
        if piece.elements:
            by_name.setdefault(piece.name, []).append(piece)
    held: dict[str, Any] = {}
    for name, here in by_name.items():
        made = {kind: _boxes_of(buffer, here, in_place=in_place) for kind, buffer in kinds.items()}
        held[name] = made[""] if single else made
    return Flat(held, frozenset(piece.name for piece in listed))


def flat_pieces(
    parameters: Mapping[str, Sequence[int] | torch.Tensor], *, start: int, elements: int, align: int = 1
) -> list[FlatPiece]:
    """What a buffer holds that is a part of all parameters flattened and laid one after another.

    One piece for every parameter, in their order; those that the buffer does not reach have no elements. Not collective.

    Args:
        parameters: shapes or tensors by name, in the order of the buffer; the same on every rank. Of a DTensor its local
            part is what was flattened.
        start: where the buffer begins in that row of all parameters, in elements: ``rank * elements`` for equal parts.
        elements: the length of the buffer. What lies behind the last parameter is padding.
        align: every parameter begins at a multiple of so many elements; what lies between is padding.

    Raises:
        UsageError: an ``align`` below 1, or a DTensor whose local part is more than one box.
    """
    if align < 1:
        raise UsageError(f"align={align}; it is a number of elements, 1 or more")
    found = []
    begin = 0
    for name, parameter in parameters.items():
        shape, global_shape, offsets = _place(name, parameter)
        begin = -(-begin // align) * align
        size = prod(shape)
        low, high = max(start, begin), min(start + elements, begin + size)
        count = max(high - low, 0)
        first, at = (low - begin, low - start) if count else (0, 0)
        found.append(FlatPiece(name, shape, first, count, at, global_shape, offsets))
        begin += size
    return found


def _place(
    name: str, parameter: Sequence[int] | torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    """The shape of what was flattened and, where it is a part of a tensor, the shape of that and where the part begins."""
    if not isinstance(parameter, torch.Tensor):
        return tuple(map(int, parameter)), None, None
    if not is_dtensor(parameter):
        return tuple(parameter.shape), None, None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    table = LayoutTable(mesh.get_rank(), 1, [Mesh((1,))])
    shard = table.describe(parameter)
    held = parts(table.layouts[shard.layout], table.meshes, table.rank)
    if len(held) > 1:
        raise UsageError(f"{name}: the local part of this DTensor is {len(held)} boxes; give FlatPiece by hand")
    shape = tuple(shard.locals[0].shape)
    return shape, shard.shape, held[0].box.offsets if held else (0,) * len(shape)


def _boxes_of(buffer: torch.Tensor, pieces: list[FlatPiece], *, in_place: bool) -> Sharded:
    """One parameter's pieces as views of the buffer, one for each box."""
    views, offsets = [], []
    for piece in pieces:
        at = piece.at
        inside = piece.offsets or (0,) * len(piece.shape)
        for box in range_boxes(piece.shape, piece.start, piece.start + piece.elements):
            views.append(buffer[at : at + box.elements].view(box.sizes))
            offsets.append(tuple(a + b for a, b in zip(inside, box.offsets, strict=True)))
            at += box.elements
    return Sharded(tuple(views), pieces[0].global_shape or pieces[0].shape, tuple(offsets), in_place)


def _problems(buffers: Mapping[str, torch.Tensor], pieces: list[FlatPiece]) -> list[str]:
    problems = []
    for kind, buffer in buffers.items():
        if buffer.dim() != 1 or not buffer.is_contiguous() or is_dtensor(buffer):
            problems.append(
                f"the buffer{f' {kind!r}' if kind else ''} is no dense tensor of one dimension of this rank alone"
            )
    sizes = {buffer.numel() for buffer in buffers.values()}
    if len(sizes) != 1:
        problems.append(f"there must be buffers, all of one length; these have {sorted(sizes)} elements")
    length = min(sizes, default=0)
    shapes: dict[str, tuple[Any, Any]] = {}
    for piece in pieces:
        name, stop = piece.name, piece.start + piece.elements
        if piece.start < 0 or piece.elements < 0 or stop > prod(piece.shape):
            problems.append(f"{name}: elements [{piece.start}, {stop}) of a parameter of shape {list(piece.shape)}")
        if piece.at < 0 or piece.at + piece.elements > length:
            problems.append(f"{name}: at [{piece.at}, {piece.at + piece.elements}) of a buffer of {length} elements")
        if shapes.setdefault(name, (piece.shape, piece.global_shape)) != (piece.shape, piece.global_shape):
            problems.append(f"{name}: given with the shapes {list(shapes[name][0])} and {list(piece.shape)}")
        limit = piece.global_shape or piece.shape
        box = whole(piece.shape) if piece.offsets is None else Box(piece.offsets, piece.shape)
        if not box.inside(limit):
            problems.append(f"{name}: a part {box} does not lie in a tensor of shape {list(limit)}")
    filled = [piece for piece in pieces if piece.elements > 0]
    in_buffer = sorted((piece.at, piece.elements, piece.name) for piece in filled)
    for (at, elements, name), (then, _, other) in pairwise(in_buffer):
        if at + elements > then:
            problems.append(f"{name} and {other}: both at {then} of the buffer")
    in_name = sorted((piece.name, piece.offsets or (), piece.start, piece.elements) for piece in filled)
    for (name, where, start, elements), (other, there, then, _) in pairwise(in_name):
        if name == other and where == there and start + elements > then:
            problems.append(f"{name}: element {then} is in two pieces")
    return problems
