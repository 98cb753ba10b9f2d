"""Which ranks need the same bytes of a step, and which of them reads what.

In: the structure of a step, and where each kind of rank puts what it loads. Out: teams of ranks that need the same blocks,
with a share of these blocks for each member. Every rank works it out for itself, for the files that it needs, and all come
to the same: nothing is sent but one description for each kind of rank.

A set of ranks is an integer here, with bit ``r`` set for rank ``r``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Layout, Mesh, Structure, TensorSpec, parts
from keepstep.plan.load_plan import Read

__all__ = ["Extent", "Need", "Needs", "Placed", "Team", "clip", "make_teams", "rounds", "segments"]

PORTION_BYTES = 1 << 22
"""The most that one rank reads at once for one round."""

Ranks = int


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where ranks of one kind put what they load: keys of stored tensors with the indices of the targets' layouts."""

    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]
    tensors: tuple[tuple[str, int], ...]


class Need(msgspec.Struct, frozen=True, gc=False):
    """The part ``overlap`` of a stored piece, which ``ranks`` need for the box ``wanted`` of the tensor."""

    key: str
    stored: Box
    wanted: Box
    overlap: Box
    ranks: Ranks


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, stop) of file number ``file``."""

    file: int
    start: int
    stop: int


class Team(msgspec.Struct, frozen=True):
    """Ranks that need the same blocks, in ascending order, and what each of them reads for all."""

    ranks: tuple[int, ...]
    shares: tuple[tuple[Extent, ...], ...]


@dataclass(slots=True)
class Needs:
    """Who needs which part of which file. Made from what all ranks know alike.

    Args:
        stored: the structure of the step.
        kinds: for each kind of rank its members and where they put what they load. No rank is of two kinds.
    """

    stored: Structure
    kinds: Sequence[tuple[Sequence[int], Placed]]
    _groups: list[list[dict[Box, Ranks]]] = field(default_factory=list)
    _targets: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _folders: dict[str, list[TensorSpec]] = field(default_factory=dict)
    _known: dict[tuple[int, int, int, int], list[tuple[Box, Box, Box, Ranks]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Finds out, once for each layout, which ranks want which box."""
        for number, (members, placed) in enumerate(self.kinds):
            meshes = list(placed.meshes)
            groups: list[dict[Box, Ranks]] = [{} for _ in placed.layouts]
            for index, layout in enumerate(placed.layouts):
                for rank in members:
                    for part in parts(layout, meshes, rank):
                        groups[index][part.box] = groups[index].get(part.box, 0) | 1 << rank
            self._groups.append(groups)
            for key, layout_index in placed.tensors:
                self._targets.setdefault(key, []).append((number, layout_index))
        for spec in self.stored.tensors:
            if spec.key in self._targets:
                self._folders.setdefault(spec.folder, []).append(spec)

    def totals(self) -> tuple[int, int]:
        """The bytes that all ranks need, added up, and the bytes of all different boxes among them."""
        known: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
        needed = different = 0
        for specs in self._folders.values():
            for spec in specs:
                targets = tuple(self._targets[spec.key])
                if targets not in known:
                    wanted: dict[Box, Ranks] = {}
                    for kind, layout in targets:
                        for box, ranks in self._groups[kind][layout].items():
                            wanted[box] = wanted.get(box, 0) | ranks
                    all_of_them = sum(math.prod(box.sizes) * ranks.bit_count() for box, ranks in wanted.items())
                    known[targets] = all_of_them, sum(math.prod(box.sizes) for box in wanted)
                item = ITEM_BYTES[spec.dtype]
                needed += known[targets][0] * item
                different += known[targets][1] * item
        return needed, different

    def of_file(self, folder: str, owner: int) -> Iterator[Need]:
        """What is needed of the file that rank ``owner`` of the step has written into a folder."""
        for spec in self._folders.get(folder, ()):
            for kind, layout in self._targets[spec.key]:
                for stored, wanted, overlap, ranks in self._overlaps(spec.layout, owner, kind, layout):
                    yield Need(spec.key, stored, wanted, overlap, ranks)

    def ranks_of_file(self, folder: str, owner: int) -> Ranks:
        """The ranks that need anything of that file."""
        found = 0
        for spec in self._folders.get(folder, ()):
            for kind, layout in self._targets[spec.key]:
                for *_, ranks in self._overlaps(spec.layout, owner, kind, layout):
                    found |= ranks
        return found

    def _overlaps(self, at: int, owner: int, kind: int, layout: int) -> list[tuple[Box, Box, Box, Ranks]]:
        """For tensors stored in layout ``at``: the piece of ``owner``, and all boxes wanted that have part in it."""
        known = self._known.get((at, owner, kind, layout))
        if known is None:
            known = self._known[at, owner, kind, layout] = []
            for part in parts(self.stored.layouts[at], list(self.stored.meshes), owner):
                for box, ranks in self._groups[kind][layout].items():
                    overlap = part.box.intersect(box)
                    if overlap is not None:
                        known.append((part.box, box, overlap, ranks))
        return known


def segments(ranges: Iterable[tuple[int, int, Ranks]]) -> list[tuple[int, int, Ranks]]:
    """Cuts ranges of bytes, each with the ranks that need it, where the set of ranks changes; neighbours differ."""
    edges: dict[int, tuple[list[Ranks], list[Ranks]]] = {}
    for start, stop, ranks in ranges:
        if start < stop:
            edges.setdefault(start, ([], []))[0].append(ranks)
            edges.setdefault(stop, ([], []))[1].append(ranks)
    found: list[tuple[int, int, Ranks]] = []
    active: Counter[Ranks] = Counter()
    before = needed = 0
    for position in sorted(edges):
        if needed and found and found[-1][1] == before and found[-1][2] == needed:
            found[-1] = found[-1][0], position, needed
        elif needed:
            found.append((before, position, needed))
        begin, end = edges[position]
        active.update(begin)
        active.subtract(end)
        needed, before = 0, position
        for ranks, count in list(active.items()):
            if count:
                needed |= ranks
            else:
                del active[ranks]
    return found


def make_teams(files: Sequence[Sequence[tuple[int, int, Ranks]]], blocks: Sequence[int], rank: int) -> list[Team]:
    """The teams that a rank is in, in the one order in which all ranks go through theirs.

    Args:
        files: the segments of each file, which begin at whole blocks.
        blocks: the bytes of a block of each file.
        rank: whose teams.
    """
    together: dict[Ranks, list[Extent]] = {}
    for number, found in enumerate(files):
        for start, stop, ranks in found:
            if ranks >> rank & 1:
                together.setdefault(ranks, []).append(Extent(number, start, stop))
    return [_team(ranks, together[ranks], blocks) for ranks in sorted(together)]


def _team(ranks: Ranks, extents: list[Extent], blocks: Sequence[int]) -> Team:
    """Divides what a team needs into runs of blocks, as equal as they can be, one for each member."""
    members = tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
    counts = [-(-(extent.stop - extent.start) // blocks[extent.file]) for extent in extents]
    total = sum(counts)
    # Where there are fewer blocks than members, it is not always the first ones who read.
    turn = extents[0].start // blocks[extents[0].file] % len(members)
    shares: list[tuple[Extent, ...]] = [()] * len(members)
    index, done = 0, 0
    for place in range(len(members)):
        left = (place + 1) * total // len(members) - place * total // len(members)
        share = []
        while left:
            extent, block = extents[index], blocks[extents[index].file]
            taken = min(left, counts[index] - done)
            start = extent.start + done * block
            share.append(Extent(extent.file, start, min(start + taken * block, extent.stop)))
            left, done = left - taken, done + taken
            if done == counts[index]:
                index, done = index + 1, 0
        shares[(place + turn) % len(members)] = tuple(share)
    return Team(members, tuple(shares))


def rounds(team: Team, most_bytes: int, blocks: Sequence[int]) -> Iterator[tuple[tuple[Extent, ...], ...]]:
    """What each member gives to the others, a little at a time: a round holds ``most_bytes``, or one block a member.

    Extents are cut at whole blocks; those of a file whose block is 0 are not cut.
    """
    each = min(most_bytes // len(team.ranks), PORTION_BYTES)
    yield from _zipped([_portions(share, each, blocks) for share in team.shares])


def _zipped(members: list[Iterator[tuple[Extent, ...]]]) -> Iterator[tuple[tuple[Extent, ...], ...]]:
    while any(portion := tuple(next(member, ()) for member in members)):
        yield portion


def _portions(share: tuple[Extent, ...], most_bytes: int, blocks: Sequence[int]) -> Iterator[tuple[Extent, ...]]:
    portion: list[Extent] = []
    room = most_bytes
    for extent in share:
        start, block = extent.start, blocks[extent.file]
        while start < extent.stop:
            length = extent.stop - start
            if length > room and block:
                length = room // block * block or (0 if portion else min(block, length))
            elif length > room and portion:
                length = 0
            if not length:
                yield tuple(portion)
                portion, room = [], most_bytes
                continue
            portion.append(Extent(extent.file, start, start + length))
            start, room = start + length, max(0, room - length)
    if portion:
        yield tuple(portion)


def clip(read: Read, start: int, stop: int, item: int) -> Iterator[Read]:
    """What a read fills from bytes [start, stop) alone; both are multiples of the element size ``item``."""
    if read.start >= start and read.stop <= stop:
        yield read
    elif read.box is None:
        first, last = max(start, read.start), min(stop, read.stop)
        if first < last:
            yield Read(first, last, read.want, read.at + first - read.start)
    elif read.start < stop and read.stop > start:
        dim = next(d for d, size in enumerate(read.box.sizes) if size > 1)
        half = read.box.sizes[dim] // 2
        for offset, size in ((0, half), (half, read.box.sizes[dim] - half)):
            offsets = (*read.box.offsets[:dim], read.box.offsets[dim] + offset, *read.box.offsets[dim + 1 :])
            box = Box(offsets, (*read.box.sizes[:dim], size, *read.box.sizes[dim + 1 :]))
            first = read.start + offset * read.strides[dim] * item
            span = 1 + sum((n - 1) * step for n, step in zip(box.sizes, read.strides, strict=True))
            yield from clip(Read(first, first + span * item, read.want, -1, box, read.strides), start, stop, item)
