"""Bytes that several ranks need, read by one of them and passed on.

In: what this rank wants, and what all of them need. Out: filled targets. Whoever reads a block proves it before it passes
it on, and whoever is given one proves it again before it is used. Memory is bounded: besides the targets, ``AHEAD`` portions
that this rank has read ahead, and two rounds of what others have read for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import torch

from keepstep.errors import CorruptError
from keepstep.format.layout import Want
from keepstep.format.manifest import FileRecord, Manifest, file_name
from keepstep.format.shardfile import MAX_HEADER_BYTES
from keepstep.move.reader import ShardFile, copy_box, open_shard, read_proved
from keepstep.plan.load_plan import Piece, Read, find_pieces, plan_reads
from keepstep.plan.share_plan import Extent, Needs, Team, clip, make_teams, rounds, segments
from keepstep.ranks import Exchange
from keepstep.storage.base import Blob, Storage, Subfolder

__all__ = ["Counts", "Told", "read_shared"]

ROUND_BYTES = 1 << 24
AHEAD = 8
"""So many portions are read ahead, by as many threads: they wait for the storage, not for the processor."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes that this rank has read from the storage, and bytes that other ranks have read for it."""

    read: int
    received: int


class Told(Subfolder):
    """A storage of which the beginnings of some files are known already, whole files among them.

    Such a file is opened only when more of it is read. Args: the storage, and by name its size and its first bytes.
    """

    def __init__(self, storage: Storage, known: Mapping[str, tuple[int, bytes]]) -> None:
        super().__init__(storage, "")
        self._prefix, self.url = "", storage.url
        self._known = known

    def open(self, name: str) -> Blob:
        """See Storage."""
        found = self._known.get(name)
        return self._parent.open(name) if found is None else _ToldBlob(self._parent, name, *found)


class _ToldBlob(Blob):
    def __init__(self, storage: Storage, name: str, size_bytes: int, first: bytes) -> None:
        self._storage, self._name, self._first = storage, name, first
        self._rest: Blob | None = None
        self._opening = threading.Lock()
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """From what is known, as far as that goes."""
        if offset + len(buffer) <= len(self._first):
            buffer[:] = self._first[offset : offset + len(buffer)]
            return
        with self._opening:
            if self._rest is None:
                self._rest = self._storage.open(self._name)
        self._rest.read_into(offset, buffer)

    def close(self) -> None:
        """Closes the file, if it was opened."""
        if self._rest is not None:
            self._rest.close()


@dataclass(slots=True)
class _Source:
    """A file that this rank needs something of: its reads by where they start, and up to where any of those goes."""

    shard: ShardFile
    reads: list[Read]
    tops: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads.sort(key=lambda read: read.start)
        self.tops = list(accumulate((read.stop for read in self.reads), max))

    def between(self, start: int, stop: int) -> Iterator[Read]:
        """The reads that have part in [start, stop)."""
        index = bisect_right(self.tops, start)
        while index < len(self.reads) and self.reads[index].start < stop:
            if self.reads[index].stop > start:
                yield self.reads[index]
            index += 1


class _Given(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a file that are here now; ``proved`` when this rank has read them."""

    extent: Extent
    data: torch.Tensor
    proved: bool


def read_shared(
    wire: Exchange,
    storage: Storage,
    manifest: Manifest,
    *,
    needs: Needs,
    wants: list[Want],
    targets: list[torch.Tensor],
) -> Counts:
    """Fills the targets, as ``read_pieces`` does. Collective, on the training thread.

    Args:
        wire: between all ranks; a rank that fails has to close it, or the others wait for the deadline.
        storage: the step's own storage.
        manifest: the step's manifest.
        needs: what all ranks need.
        wants: what this rank needs.
        targets: one tensor a want, with the want's shape and the stored dtype, on any device.

    Raises:
        CorruptError: a block, header or size that is not what was written; targets may hold part of the new bytes.
        StorageError: a file that cannot be read.
        RankFailedError: another rank broke off; why is for that one to say.
    """
    by_file: dict[tuple[str, int], list[Piece]] = {}
    for piece in find_pieces(needs.stored, wants, wire.rank):
        by_file.setdefault((piece.folder, piece.rank), []).append(piece)
    files = sorted(by_file)
    with contextlib.ExitStack() as held:
        shards, heads = _open_all(wire, storage, manifest, files=files, needs=needs)
        for shard in shards:
            held.enter_context(contextlib.closing(shard.blob))
        sources, found = [], []
        for shard, at in zip(shards, files, strict=True):
            reads: list[Read] = []
            for piece in by_file[at]:
                reads.extend(_reads(shard, piece, wants[piece.want], str(targets[piece.want].dtype)))
            sources.append(_Source(shard, reads))
            found.append(segments(_ranges(shard, at, needs)))
        blocks = [shard.header.block_bytes for shard in shards]
        teams = make_teams(found, blocks, wire.rank)
        missing = sum(_filled(read, targets) for source in sources for read in source.reads)
        counts = [heads.read, heads.received]
        with contextlib.closing(_pass_on(wire, teams, blocks, _Blocks(shards))) as given:
            for some in given:
                missing -= _place(sources[some.extent.file], some, wants=wants, targets=targets)
                counts[not some.proved] += some.data.numel()
    if missing:
        raise CorruptError(f"{storage.url}: {missing:,} bytes that are wanted lie in no file, or in more than one")
    return Counts(*counts)


def _reads(shard: ShardFile, piece: Piece, want: Want, dtype: str = "") -> list[Read]:
    entry = shard.by_piece.get((piece.key, piece.stored.offsets))
    if entry is None or entry.box != piece.stored or dtype not in ("", f"torch.{entry.dtype}"):
        where = f"{piece.key!r}{piece.stored}"
        raise CorruptError(f"{shard.name} does not hold {where}, which the manifest expects there")
    return plan_reads(piece, entry, want)


def _ranges(shard: ShardFile, at: tuple[str, int], needs: Needs) -> Iterator[tuple[int, int, int]]:
    """The whole blocks that are needed of a file, with the ranks that need them."""
    block, end = shard.header.block_bytes, shard.header.data_bytes
    for need in needs.of_file(*at):
        # Where a target has gaps the same bytes are read, only in other portions.
        for read in _reads(shard, Piece(*at, need.key, need.stored, need.overlap, 0), Want(need.key, need.wanted)):
            yield read.start // block * block, min(-(-read.stop // block) * block, end), need.ranks


# --- headers --------------------------------------------------------------------------------------------------------


def _open_all(
    wire: Exchange, storage: Storage, manifest: Manifest, *, files: Sequence[tuple[str, int]], needs: Needs
) -> tuple[list[ShardFile], Counts]:
    """Opens every file that this rank needs, with headers that one rank has read for all."""
    records: dict[str, dict[int, FileRecord]] = {}
    for folder, _ in files:
        if folder not in records:
            records[folder] = {record.rank: record for record in manifest.files.get(folder, ())}
    shares: dict[int, dict[int, list[Extent]]] = {}
    for number, (folder, owner) in enumerate(files):
        ranks, record = needs.ranks_of_file(folder, owner), records[folder].get(owner)
        length = record.size_bytes - record.data_bytes if record is not None else 0
        # What cannot be is told by whoever opens it.
        if 0 < length <= MAX_HEADER_BYTES and ranks.bit_count() > 1:
            members = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
            reader = members[owner % len(members)]
            shares.setdefault(ranks, {rank: [] for rank in members})[reader].append(Extent(number, 0, length))
    teams = [Team(tuple(found), tuple(map(tuple, found.values()))) for _, found in sorted(shares.items())]
    heads = _Heads(storage, manifest, files, records)
    known: dict[str, tuple[int, bytes]] = {}
    counts = [0, 0]
    with contextlib.ExitStack() as held:
        held.callback(heads.close)
        with contextlib.closing(_pass_on(wire, teams, [0] * len(files), heads)) as given:
            for some in given:
                folder, owner = files[some.extent.file]
                size = records[folder][owner].size_bytes
                known[file_name(folder, owner, manifest.save_id)] = size, some.data.numpy().tobytes()
                counts[not some.proved] += some.data.numel()
        told = Told(storage, known)
        for number, (folder, owner) in enumerate(files):
            if number not in heads.opened:
                heads.opened[number] = open_shard(told, manifest, folder, owner, records[folder])
                if file_name(folder, owner, manifest.save_id) not in known:
                    counts[0] += heads.opened[number].header.data_offset
        held.pop_all()
    return [heads.opened[number] for number in range(len(files))], Counts(*counts)


class _Readable(ABC):
    """What a portion is read from."""

    @abstractmethod
    def read(self, extent: Extent, view: memoryview) -> None:
        """Fills the view with proved bytes. Any thread."""


@dataclass(slots=True)
class _Heads(_Readable):
    """Headers of files; those that this rank has read stay open."""

    storage: Storage
    manifest: Manifest
    files: Sequence[tuple[str, int]]
    records: Mapping[str, dict[int, FileRecord]]
    opened: dict[int, ShardFile] = field(default_factory=dict)

    def read(self, extent: Extent, view: memoryview) -> None:
        """Opens the file, which proves the header."""
        folder, owner = self.files[extent.file]
        shard = self.opened[extent.file] = open_shard(self.storage, self.manifest, folder, owner, self.records[folder])
        shard.blob.read_into(0, view)

    def close(self) -> None:
        """Closes what was opened."""
        for shard in self.opened.values():
            shard.blob.close()


@dataclass(frozen=True, slots=True)
class _Blocks(_Readable):
    """The data of open files."""

    shards: Sequence[ShardFile]

    def read(self, extent: Extent, view: memoryview) -> None:
        """Reads whole blocks, and proves them."""
        read_proved(self.shards[extent.file], extent.start, view)


# --- rounds ---------------------------------------------------------------------------------------------------------


def _pass_on(
    wire: Exchange, teams: Sequence[Team], blocks: Sequence[int], source: _Readable
) -> Generator[_Given, None, None]:
    """Everything that the teams of this rank read, whoever reads it. Close it, or threads go on reading.

    What is given is good until the next but one of its round is asked for. All ranks go through their teams in one order, so
    the first round that is not over has all its members waiting for it.
    """
    coming = ((team, portions) for team in teams for portions in rounds(team, ROUND_BYTES, blocks))
    slabs = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
    waiting: deque[tuple[Team, tuple[tuple[Extent, ...], ...], Future[torch.Tensor] | None]] = deque()
    before: list[_Given] = []
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="keepstep-share") as pool:
        try:
            while True:
                while len(waiting) < AHEAD and (item := next(coming, None)) is not None:
                    mine = item[1][item[0].ranks.index(wire.rank)]
                    waiting.append((*item, pool.submit(_read, mine, source) if mine else None))
                if not waiting:
                    break
                team, portions, reading = waiting.popleft()
                own = reading.result() if reading is not None else None
                slabs.reverse()
                given, incoming = _laid_out(wire.rank, team, portions, slabs)
                outgoing = [(rank, own) for rank in team.ranks if rank != wire.rank] if own is not None else []
                wire.begin(outgoing, incoming)
                # While this round is on its way, the one before is put into its place.
                yield from before
                wire.finish()
                if own is not None:
                    given.extend(_sliced(portions[team.ranks.index(wire.rank)], own, proved=True))
                before = given
            yield from before
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read(portion: tuple[Extent, ...], source: _Readable) -> torch.Tensor:
    data = torch.empty(sum(extent.stop - extent.start for extent in portion), dtype=torch.uint8, device="cpu")
    for some in _sliced(portion, data, proved=True):
        source.read(some.extent, some.data.numpy().data)
    return data


def _laid_out(
    rank: int, team: Team, portions: tuple[tuple[Extent, ...], ...], slabs: list[torch.Tensor]
) -> tuple[list[_Given], list[tuple[int, torch.Tensor]]]:
    """Where the portions of the others come to lie in the first slab, and the tensors that take them."""
    lengths = [sum(extent.stop - extent.start for extent in portion) for portion in portions]
    total = sum(length for member, length in zip(team.ranks, lengths, strict=True) if member != rank)
    if slabs[0].numel() < total:
        slabs[0] = torch.empty(total, dtype=torch.uint8, device="cpu")
    given: list[_Given] = []
    incoming = []
    start = 0
    for member, portion, length in zip(team.ranks, portions, lengths, strict=True):
        if member != rank and length:
            data = slabs[0][start : start + length]
            incoming.append((member, data))
            given.extend(_sliced(portion, data, proved=False))
            start += length
    return given, incoming


def _sliced(portion: tuple[Extent, ...], data: torch.Tensor, *, proved: bool) -> Iterator[_Given]:
    start = 0
    for extent in portion:
        stop = start + extent.stop - extent.start
        yield _Given(extent, data[start:stop], proved)
        start = stop


# --- targets --------------------------------------------------------------------------------------------------------


def _filled(read: Read, targets: list[torch.Tensor]) -> int:
    """How many bytes of its target a read fills."""
    return read.stop - read.start if read.box is None else read.box.elements * targets[read.want].element_size()


def _place(source: _Source, some: _Given, *, wants: list[Want], targets: list[torch.Tensor]) -> int:
    """Puts bytes of a file wherever they are wanted here; returns how many bytes of targets they fill."""
    start, stop = some.extent.start, some.extent.stop
    if not some.proved:
        read_proved(source.shard, start, some.data.numpy().data, there=True)
    address, filled = some.data.data_ptr(), 0
    for wide in source.between(start, stop):
        target = targets[wide.want]
        for read in clip(wide, start, stop, target.element_size()):
            skip, length = read.start - start, read.stop - read.start
            filled += _filled(read, targets)
            if read.box is not None:
                copy_box(some.data[skip:], read, wants[read.want], target)
            elif target.device.type == "cpu":
                ctypes.memmove(target.data_ptr() + read.at, address + skip, length)
            else:
                flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
                flat[read.at : read.at + length].copy_(some.data[skip : skip + length])
    return filled
