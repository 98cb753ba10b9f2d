"""Layouts: how one global tensor lies on the ranks of a mesh, and the structure of a whole state: its tensors and layouts.

A layout is a global shape and a list of cuts, applied in order. Each cut belongs to one dimension of the mesh:

    S  dim          split into equal chunks of ceil(n / ranks); the last ones may be short or empty
    SS dim, arg     first into ``arg`` chunks, each of them into ``ranks`` chunks; rank i takes the i-th of every one
    B  dim          split as evenly as possible; the first n mod ranks parts have one element more
    R               every rank along this mesh dimension holds the same
    O  arg          only the rank at index ``arg`` along this mesh dimension holds it

``S``, ``SS`` and ``R`` describe a live tensor; on disk ``R`` has become ``B`` or ``O``, so that every element is written
once. A layout of shards that follow no mesh lists its boxes one by one. The same rules are read back from the manifest,
so they are part of the format.
"""

from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from keepstep.errors import CorruptError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES

__all__ = ["Cut", "Layout", "Mesh", "Part", "Structure", "TensorSpec", "Want", "fingerprint", "parts", "rank_elements"]

Run = tuple[int, int, int]
"""(start, stop) in the global dimension and the position of ``start`` in the local tensor, all in elements."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """Ranks arranged in a grid, row-major. ``ranks`` is None for the consecutive ranks from ``first``."""

    shape: tuple[int, ...]
    first: int = 0
    ranks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.shape)

    def members(self) -> tuple[int, ...]:
        """Every rank of the mesh, row-major."""
        return self.ranks if self.ranks is not None else tuple(range(self.first, self.first + self.size))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The position of ``rank`` along each mesh dimension, or None when it is not a member."""
        if self.ranks is None:
            position = rank - self.first
            if not 0 <= position < math.prod(self.shape):
                return None
        elif rank in self.ranks:
            position = self.ranks.index(rank)
        else:
            return None
        where = []
        for size in reversed(self.shape):
            where.append(position % size)
            position //= size
        return tuple(reversed(where))

    @classmethod
    def of(cls, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
        """A mesh of these ranks, in the compact form where they are consecutive."""
        if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            return cls(shape, ranks[0])
        return cls(shape, 0, ranks)


class Cut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of dividing a tensor along mesh dimension ``axis``; see the table above."""

    axis: int
    kind: str
    dim: int = 0
    arg: int = 0


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """A global shape (in elements) and who holds which part of it.

    ``mesh`` is an index into the list of meshes that goes with the layout. ``boxes`` is set instead of cuts where shards
    follow no mesh: (rank, box) pairs.
    """

    shape: tuple[int, ...]
    mesh: int = 0
    cuts: tuple[Cut, ...] = ()
    boxes: tuple[tuple[int, Box], ...] | None = None


class Part(msgspec.Struct, frozen=True, gc=False):
    """A box of the global tensor, and where its first element sits in the rank's local tensor (in elements)."""

    box: Box
    local: tuple[int, ...]


class Want(msgspec.Struct, frozen=True, gc=False):
    """A box of a stored tensor that this rank needs. ``dense`` says that the target's memory for it has no gaps."""

    key: str
    box: Box
    dense: bool = True


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: key, dtype name, index of its layout, and the folder (component) its bytes go to.

    ``rule`` is ``same`` when ranks that hold the same part must hold the same bytes, ``first`` when the first of them is
    the truth (buffers that DistributedDataParallel broadcasts before every forward).
    """

    key: str
    dtype: str
    layout: int
    folder: str
    rule: str = "same"


class Structure(msgspec.Struct, frozen=True):
    """All tensors of a state as one rank sees them, with the meshes and layouts they share."""

    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]
    tensors: tuple[TensorSpec, ...]

    def tensor_bytes(self, spec: TensorSpec) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.layouts[spec.layout].shape) * ITEM_BYTES[spec.dtype]


def parts(layout: Layout, meshes: list[Mesh], rank: int) -> list[Part]:
    """What ``rank`` holds of the tensor: non-empty parts in row-major order of the local tensor; pure and cheap."""
    if layout.boxes is not None:
        zero = (0,) * len(layout.shape)
        return [Part(box, zero) for owner, box in layout.boxes if owner == rank and box.elements]
    mesh = meshes[layout.mesh]
    where = mesh.coordinate(rank)
    if where is None:
        return []
    if not layout.cuts:
        if 0 in layout.shape:
            return []
        zero = (0,) * len(layout.shape)
        return [Part(Box(zero, layout.shape), zero)]
    runs: list[list[Run]] = [[(0, size, 0)] for size in layout.shape]
    for cut in layout.cuts:
        index, ranks = where[cut.axis], mesh.shape[cut.axis]
        if cut.kind == "R":
            continue
        if cut.kind == "O":
            if index != cut.arg:
                return []
            continue
        runs[cut.dim] = _cut_runs(runs[cut.dim], cut, index, ranks)
    found = []
    for combination in product(*runs):
        sizes = tuple(stop - start for start, stop, _ in combination)
        if 0 not in sizes:
            box = Box(tuple(start for start, _, _ in combination), sizes)
            found.append(Part(box, tuple(local for _, _, local in combination)))
    return found


def _cut_runs(runs: list[Run], cut: Cut, index: int, ranks: int) -> list[Run]:
    """The runs that remain for position ``index`` of ``ranks`` after one cut along their dimension."""
    length = sum(stop - start for start, stop, _ in runs)
    if cut.kind == "B":
        share, extra = divmod(length, ranks)
        start = index * share + min(index, extra)
        return _slice_runs(runs, start, start + share + (index < extra), rebase=False)
    if cut.kind == "S":
        chunk = -(-length // ranks)
        return _slice_runs(runs, min(index * chunk, length), min((index + 1) * chunk, length), rebase=True)
    if cut.kind == "SS":
        outer = -(-length // cut.arg)
        taken: list[Run] = []
        local = 0
        for piece in range(cut.arg):
            begin, end = min(piece * outer, length), min((piece + 1) * outer, length)
            chunk = -(-(end - begin) // ranks)
            first = min(begin + index * chunk, end)
            last = min(begin + (index + 1) * chunk, end)
            taken.extend((start, stop, local + at) for start, stop, at in _slice_runs(runs, first, last, rebase=True))
            local += last - first
        return taken
    raise CorruptError(f"unknown kind of cut {cut.kind!r} in a layout")


def _slice_runs(runs: list[Run], first: int, last: int, *, rebase: bool) -> list[Run]:
    """Positions [first, last) of the concatenated runs; local positions restart at 0 when ``rebase``."""
    taken: list[Run] = []
    position = 0
    local = 0
    for start, stop, at in runs:
        length = stop - start
        low, high = max(first - position, 0), min(last - position, length)
        if low < high:
            taken.append((start + low, start + high, local if rebase else at + low))
            local += high - low
        position += length
    return taken


def fingerprint(structure: Structure) -> str:
    """16 hex digits that change whenever keys, order, shapes, dtypes, meshes, placements or folders change."""
    return f"{xxhash.xxh3_64_intdigest(msgspec.json.encode(structure)):016x}"


def rank_elements(layout: Layout, meshes: list[Mesh], world_size: int) -> npt.NDArray[np.int64]:
    """How many elements each of ``world_size`` ranks holds, computed for all ranks at once."""
    counts = np.zeros(world_size, dtype=np.int64)
    if layout.boxes is not None:
        for rank, box in layout.boxes:
            counts[rank] += box.elements
        return counts
    mesh = meshes[layout.mesh]
    lengths: list[npt.NDArray[np.int64]] = [np.full((1,) * len(mesh.shape), n, dtype=np.int64) for n in layout.shape]
    held = np.ones((1,) * len(mesh.shape), dtype=np.int64)
    for cut in layout.cuts:
        ranks = mesh.shape[cut.axis]
        index = np.arange(ranks, dtype=np.int64).reshape([-1 if a == cut.axis else 1 for a in range(len(mesh.shape))])
        if cut.kind == "O":
            held = held * (index == cut.arg)
        elif cut.kind != "R":
            lengths[cut.dim] = _cut_lengths(lengths[cut.dim], cut, index, ranks)
    for length in lengths:
        held = held * length
    grid = np.broadcast_to(held, mesh.shape).reshape(-1)
    if mesh.ranks is None:
        counts[mesh.first : mesh.first + len(grid)] = grid
    else:
        counts[list(mesh.ranks)] = grid
    return counts


def _cut_lengths(
    length: npt.NDArray[np.int64], cut: Cut, index: npt.NDArray[np.int64], ranks: int
) -> npt.NDArray[np.int64]:
    """The lengths that remain after one cut, for every index along the mesh dimension at once."""
    if cut.kind == "B":
        return length // ranks + (index < length % ranks)
    if cut.kind == "S":
        chunk = -(-length // ranks)
        return np.clip(length - index * chunk, 0, chunk)
    total = np.zeros(np.broadcast_shapes(length.shape, index.shape), dtype=np.int64)
    outer = -(-length // cut.arg)
    for piece in range(cut.arg):
        inner = np.clip(length - piece * outer, 0, outer)
        chunk = -(-inner // ranks)
        total = total + np.clip(inner - index * chunk, 0, chunk)
    return total
