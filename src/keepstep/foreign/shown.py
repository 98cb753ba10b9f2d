"""What another program saved, shown as a step: everything that reads steps reads it, and nothing is copied or written.

A ``ShownStep`` is a Storage with a manifest and shard files that are nowhere. Their headers are made here; the bytes behind
them come from wherever the other program put them, when they are asked for. There are no digests of them, so ``sealed`` is
False: what can be proved of them is for their source to prove.
"""

from __future__ import annotations

import bisect
import errno
import resource
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from keepstep.errors import CorruptError, StorageError
from keepstep.foreign.plain import row_major
from keepstep.format.box import Box, whole
from keepstep.format.layout import Layout, Mesh, Structure, TensorSpec
from keepstep.format.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MANIFEST_NAME,
    STATE_FOLDER,
    TREE_NAME,
    VERSION,
    Component,
    FileRecord,
    Lineage,
    Manifest,
    Versions,
    file_name,
    pack_manifest,
    promised_files,
    safe_folder,
)
from keepstep.format.objects import TensorRef, join
from keepstep.format.shardfile import digest, pack_header
from keepstep.plan.save_plan import Extra, FilePlan, rank_files
from keepstep.state.capture import Snapshot, capture
from keepstep.storage.base import Blob, Storage, Upload

__all__ = ["OpenFiles", "Piece", "ShownStep", "ShownTensor", "Source"]

MAX_FOLDERS = 12
MOST_OPEN = 256
OPEN_SHARE = 16
"""Files that one reader has open, and which part that may be of all that the process may have: there are several readers."""


class OpenFiles:
    """The other program's files that one reader has open: the last that were used, as many as is good. Any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(2, min(MOST_OPEN, limit // OPEN_SHARE if limit > 0 else MOST_OPEN))
        self._open: OrderedDict[str, Blob] = OrderedDict()
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, name: str) -> Blob:
        """The file of that name; it is open while it is read, and closed with the others. Closing it does nothing."""
        with self.held(name) as blob:
            return _Lent(self, name, blob.size_bytes)

    @contextmanager
    def held(self, name: str) -> Iterator[Blob]:
        """The open file of that name, which stays open meanwhile."""
        with self._lock:
            if name not in self._open:
                # (Those that somebody reads from are no longer counted: readers are few.)
                for other in [each for each in self._open if not self._used[each]][: len(self._open) + 1 - self._most]:
                    self._open.pop(other).close()
                self._open[name] = self._storage.open(name)
            self._open.move_to_end(name)
            self._used[name] += 1
            blob = self._open[name]
        try:
            yield blob
        finally:
            with self._lock:
                self._used[name] -= 1

    def close(self) -> None:
        """Closes them all. Idempotent."""
        with self._lock:
            for blob in self._open.values():
                blob.close()
            self._open.clear()


class _Lent(Blob):
    """One of the files, which is opened again where it had to be closed for others."""

    def __init__(self, files: OpenFiles, name: str, size_bytes: int) -> None:
        self._files, self._name = files, name
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._files.held(self._name) as blob:
            blob.read_into(offset, buffer)

    def close(self) -> None:
        pass


class Source(ABC):
    """The bytes of one piece, row-major."""

    @abstractmethod
    def read_into(self, files: OpenFiles, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from ``offset`` bytes of the piece. Any thread, several at once.

        Raises:
            CorruptError: they are not what was written, as far as that can be told.
            StorageError: they cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor, the rank whose it was, and where its bytes are."""

    rank: int
    box: Box
    source: Source


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """A tensor by its key in a step, with its dtype's name, global shape and pieces, which cover it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Held(Source):
    data: memoryview

    def read_into(self, files: OpenFiles, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


class ShownStep(Storage):
    """See the module's text. ``manifest`` is the step's, and ``structure`` its tensors.

    Args:
        storage: where the other program's files are.
        tree: the state, nested: plain values as they are, and a TensorRef for each of ``tensors``.
        tensors: those that ``tree`` refers to. (Tensors in it that are in memory need no mention.)
        name: 16 hexadecimal digits that are the same for the same bytes: the step's save id.
        world: how many ranks have saved it.
        step: its number; 0 where that is not known.

    Raises:
        UnsafeValueError: ``tree`` holds something that a step cannot; lists all of it.
        CorruptError: pieces that leave a hole or overlap.
    """

    sealed = False

    def __init__(
        self,
        storage: Storage,
        tree: Mapping[str, Any],
        tensors: Sequence[ShownTensor],
        *,
        name: str,
        world: int = 1,
        step: int = 0,
    ) -> None:
        self.url = storage.url
        self.late_s = storage.late_s
        self.request_bytes, self.requests_at_once = storage.request_bytes, storage.requests_at_once
        self._storage = storage
        snapshot = capture(tree, rank=0, world=1)
        folders = _folders(tree)
        self.structure, self._sources = _structure(tensors, snapshot, folders, world)
        self._tree = _Held(memoryview(snapshot.tree))
        extra = (Extra(TREE_NAME, "uint8", (len(snapshot.tree),)),)
        self.plans: dict[int, tuple[FilePlan, ...]] = {
            rank: rank_files(self.structure, rank, live_index=None, extras=() if rank else extra)
            for rank in range(world)
        }
        self._files: dict[str, tuple[bytes, FilePlan]] = {}
        records = self._make_headers(name, step)
        self.manifest = Manifest(
            format=(FORMAT_MAJOR, FORMAT_MINOR),
            step=step,
            save_id=name,
            created="",
            lineage=Lineage(name),
            world_size=world,
            versions=Versions(VERSION, "", ""),
            components=_components(tree, self.structure, folders),
            aliases=snapshot.aliases,
            meshes=self.structure.meshes,
            layouts=self.structure.layouts,
            tensors=self.structure.tensors,
            files=records,
        )
        promised_files(self.manifest)
        self._raw = pack_manifest(self.manifest)

    def _make_headers(self, name: str, step: int) -> dict[str, tuple[FileRecord, ...]]:
        found: dict[str, list[FileRecord]] = {spec.folder: [] for spec in self.structure.tensors}
        for rank, plans in self.plans.items():
            for plan in plans:
                entries = tuple(slot.entry for slot in plan.slots)
                header = pack_header(entries, plan.data_bytes, save_id=name, step=step, rank=rank)
                size = len(header) + plan.data_bytes
                record = FileRecord(rank, size, plan.data_bytes, f"{digest(header):016x}")
                found.setdefault(plan.folder, []).append(record)
                self._files[file_name(plan.folder, rank, name)] = header, plan
        return {folder: tuple(records) for folder, records in found.items()}

    def open(self, name: str) -> Blob:
        """The manifest, or a shard file."""
        if name == MANIFEST_NAME:
            return _Whole(self._raw)
        found = self._files.get(name)
        if found is None:
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such file of the step that is shown"))
        header, plan = found
        sources = [
            self._tree if slot.tensor < 0 else self._sources[slot.entry.key, slot.entry.box.offsets]
            for slot in plan.slots
        ]
        return _Shard(header, plan, sources, OpenFiles(self._storage))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names and sizes of the files that are shown."""
        shown = {MANIFEST_NAME: len(self._raw), **{n: len(h) + p.data_bytes for n, (h, p) in self._files.items()}}
        return ((name, size) for name, size in shown.items() if not prefix or name.startswith(f"{prefix}/"))

    def folders(self) -> Sequence[str]:
        """The folders that are shown."""
        return sorted({name.partition("/")[0] for name in self._files})

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """Refuses."""
        self._refuse("create", name)

    def put(self, name: str, data: bytes) -> None:
        """Refuses."""
        self._refuse("put", name)

    def put_new(self, name: str, data: bytes) -> bool:
        """Refuses."""
        self._refuse("put_new", name)

    def delete(self, names: Sequence[str]) -> None:
        """Refuses."""
        self._refuse("delete", ", ".join(names))

    def _refuse(self, operation: str, name: str) -> NoReturn:
        reason = f"{self.url} is another program's: nothing is written there"
        raise StorageError(operation, name, OSError(errno.EROFS, reason))


class _Whole(Blob):
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class _Shard(Blob):
    """A shard file: its header, and behind it the bytes of the sources, one after another."""

    def __init__(self, header: bytes, plan: FilePlan, sources: Sequence[Source], files: OpenFiles) -> None:
        self._header, self._sources, self._files = header, sources, files
        self._slots = [(slot.entry.start, slot.entry.stop) for slot in plan.slots]
        self._starts = [start for start, _ in self._slots]
        self.size_bytes = len(header) + plan.data_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{offset + len(buffer):,} bytes asked for of a file of {self.size_bytes:,}")
        done = 0
        if offset < len(self._header):
            part = self._header[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            done = len(part)
        while done < len(buffer):
            at = offset + done - len(self._header)
            # The last of those that start here: those before it are empty.
            index = bisect.bisect_right(self._starts, at) - 1
            start, stop = self._slots[index]
            count = min(len(buffer) - done, stop - at)
            self._sources[index].read_into(self._files, at - start, buffer[done : done + count])
            done += count

    def close(self) -> None:
        self._files.close()


def _structure(
    tensors: Sequence[ShownTensor], snapshot: Snapshot, folders: Mapping[str, str], world: int
) -> tuple[Structure, Mapping[tuple[str, tuple[int, ...]], Source]]:
    """All tensors, those that were among the plain values included, and where the bytes of each piece are."""
    sources: dict[tuple[str, tuple[int, ...]], Source] = {}
    table: dict[Layout, int] = {}
    specs = []
    for tensor in tensors:
        boxes = tuple((piece.rank, piece.box) for piece in tensor.pieces)
        layout = table.setdefault(Layout(tensor.shape, 0, (), boxes), len(table))
        specs.append(TensorSpec(tensor.key, tensor.dtype, layout, folders[tensor.key.partition("/")[0]]))
        sources.update(((tensor.key, piece.box.offsets), piece.source) for piece in tensor.pieces)
    for spec, (local,) in zip(snapshot.structure.tensors, snapshot.locals, strict=True):
        shape = tuple(local.shape)
        layout = table.setdefault(Layout(shape, 0, (), ((0, whole(shape)),)), len(table))
        specs.append(TensorSpec(spec.key, spec.dtype, layout, spec.folder))
        sources[spec.key, (0,) * len(shape)] = _Held(row_major(local))
    return Structure((Mesh((world,)),), tuple(table), tuple(specs)), sources


def _folders(tree: Mapping[str, Any]) -> dict[str, str]:
    """The folder of each component, by the rule of a capture: a few containers have their own."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        inside = type(value) is not TensorRef and not isinstance(value, torch.Tensor)
        crowded = len(set(found.values())) >= MAX_FOLDERS
        found[join("", name)] = name if inside and not crowded and safe_folder(name) else STATE_FOLDER
    return found


def _components(tree: Mapping[str, Any], structure: Structure, folders: Mapping[str, str]) -> dict[str, Component]:
    counts: dict[str, list[int]] = {}
    for spec in structure.tensors:
        count = counts.setdefault(spec.key.partition("/")[0], [0, 0])
        count[0] += 1
        count[1] += structure.tensor_bytes(spec)
    found = {}
    for name, value in tree.items():
        tensors, size = counts.get(join("", name), (0, 0))
        kind = "tensor" if type(value) is TensorRef or isinstance(value, torch.Tensor) else "values"
        folder = folders[join("", name)] if tensors else STATE_FOLDER
        found[name] = Component(kind, "Tensor" if kind == "tensor" else type(value).__name__, tensors, size, folder)
    return found
