"""Which bytes of which files go where.

In: a manifest's structure and what this rank wants. Out: the pieces to read, then, once the headers of their files are
known, byte ranges and the parts of the target they fill. Everything that does not fit is listed before anything is read.
"""

from __future__ import annotations

import math

import msgspec

from keepstep.errors import CorruptError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Part, Structure, Want, parts
from keepstep.format.shardfile import Entry

__all__ = ["Piece", "Read", "find_pieces", "plan_reads"]

SPAN_BYTES = 1 << 22
"""The most bytes read at once where only some of them are needed."""
RUN_BYTES = 1 << 16
"""Runs at least this long are read one by one instead of together with what lies between them."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The part ``overlap`` of want number ``want`` lies in the piece ``stored`` in the file of ``rank``."""

    folder: str
    rank: int
    key: str
    stored: Box
    overlap: Box
    want: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, stop) of a data section, and what they fill.

    ``at`` is the position in bytes in the target of want ``want`` when the bytes go there as they are. Otherwise ``at`` is
    -1, ``box`` is the part of the global tensor they hold, and ``strides`` (elements) say how it lies in the bytes.
    """

    start: int
    stop: int
    want: int
    at: int
    box: Box | None = None
    strides: tuple[int, ...] = ()


def find_pieces(stored: Structure, wants: list[Want], rank: int) -> list[Piece]:
    """The pieces that hold what is wanted; looks at the rank's own files first, so that an unchanged world reads no others.

    Raises:
        CorruptError: part of a wanted box is stored nowhere; names the key and the box.
    """
    specs = {spec.key: spec for spec in stored.tensors}
    meshes = list(stored.meshes)
    own = [parts(layout, meshes, rank) if rank >= 0 else [] for layout in stored.layouts]
    everywhere: dict[int, list[tuple[int, Part]]] = {}
    found: list[Piece] = []
    for index, want in enumerate(wants):
        spec = specs[want.key]
        wanted = math.prod(want.box.sizes)
        here = _overlaps(spec.folder, [(rank, part) for part in own[spec.layout]], want, index)
        if sum(math.prod(piece.overlap.sizes) for piece in here) != wanted:
            holders = everywhere.get(spec.layout)
            if holders is None:
                layout = stored.layouts[spec.layout]
                ranks = (
                    sorted({owner for owner, _ in layout.boxes})
                    if layout.boxes is not None
                    else meshes[layout.mesh].members()
                )
                holders = [(owner, part) for owner in ranks for part in parts(layout, meshes, owner)]
                everywhere[spec.layout] = holders
            here = _overlaps(spec.folder, holders, want, index)
            covered = sum(math.prod(piece.overlap.sizes) for piece in here)
            if covered != wanted:
                raise CorruptError(
                    f"{want.key!r}: {covered:,} of {wanted:,} elements of {want.box} are stored, the rest is missing"
                )
        found.extend(here)
    return found


def _overlaps(folder: str, holders: list[tuple[int, Part]], want: Want, index: int) -> list[Piece]:
    found = []
    for rank, part in holders:
        if part.box == want.box:
            return [Piece(folder, rank, want.key, part.box, want.box, index)]
        overlap = part.box.intersect(want.box) if 0 not in want.box.sizes else None
        if overlap is not None:
            found.append(Piece(folder, rank, want.key, part.box, overlap, index))
    return found


def plan_reads(piece: Piece, entry: Entry, want: Want) -> list[Read]:
    """The byte ranges for one piece, each no longer than needed and no shorter than useful."""
    item = ITEM_BYTES[entry.dtype]
    if piece.stored == piece.overlap == want.box and want.dense:
        return [Read(entry.start, entry.stop, piece.want, 0)]
    reads: list[Read] = []
    _divide(piece.overlap, piece, entry, want, item, reads)
    return reads


def _divide(box: Box, piece: Piece, entry: Entry, want: Want, item: int, reads: list[Read]) -> None:
    """Halves the box until it is one range of bytes, or a span small enough to read with its gaps."""
    strides = _strides(piece.stored.sizes)
    first = sum((o - s) * step for o, s, step in zip(box.offsets, piece.stored.offsets, strides, strict=True))
    last = first + sum((size - 1) * step for size, step in zip(box.sizes, strides, strict=True))
    start, stop = entry.start + first * item, entry.start + (last + 1) * item
    together = stop - start == box.elements * item
    if together and want.dense and _is_dense(box, want.box):
        position = sum(
            (o - w) * step for o, w, step in zip(box.offsets, want.box.offsets, _strides(want.box.sizes), strict=True)
        )
        reads.append(Read(start, stop, piece.want, position * item))
        return
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    run_bytes = item * math.prod(box.sizes[_first_dense(box, piece.stored) :])
    small = stop - start <= (SPAN_BYTES if run_bytes < RUN_BYTES or together else run_bytes)
    if small or dim is None:
        reads.append(Read(start, stop, piece.want, -1, box, strides))
        return
    half = box.sizes[dim] // 2
    for offset, size in ((0, half), (half, box.sizes[dim] - half)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + offset, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
        _divide(Box(offsets, sizes), piece, entry, want, item, reads)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _first_dense(box: Box, outer: Box) -> int:
    """The first dimension from which the box is one run of ``outer``'s memory."""
    dim = len(box.sizes)
    while dim > 0 and (dim == len(box.sizes) or box.sizes[dim] == outer.sizes[dim]):
        dim -= 1
    return dim


def _is_dense(box: Box, outer: Box) -> bool:
    """Whether the box is one range of ``outer``'s row-major memory."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    return dim is None or box.sizes[dim + 1 :] == outer.sizes[dim + 1 :]
