"""A directory of torch's DCP, shown as a step."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import CorruptError, UnsafeFileError, UsageError
from keepstep.foreign.dcp.items import Extent, find_extent, prove, read_value
from keepstep.foreign.dcp.metadata import METADATA_NAME, Chunk, Directory, SavedTensor, SavedValue, parse_metadata
from keepstep.foreign.paths import key_of, place
from keepstep.foreign.shown import OpenFiles, Piece, ShownStep, ShownTensor, Source
from keepstep.format.box import whole
from keepstep.format.globs import near
from keepstep.format.objects import TensorRef
from keepstep.format.shardfile import digest
from keepstep.storage.base import Storage

__all__ = ["show_directory"]

HELD = 8
"""How many tensors that torch had to read are kept in memory for the next part of them that is asked for."""
_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def show_directory(
    storage: Storage, raw: bytes, only: Sequence[str] = (), *, registry: Any = None, apart: bool = False
) -> ShownStep:
    """The step that a directory holds: read are its metadata and its plain values, and tensors when they are asked for.

    Args:
        storage: the directory.
        raw: its ``.metadata``.
        only: the components to show, of those at the top of the state; all of them when it is empty.
        registry: torch's ``ExtensionRegistry`` that knows what it was written through; by default torch's own.
        apart: shows each part of a tensor as a tensor of its own, below its name: what one rank saved alone has no more.

    Raises:
        UsageError: a component that is not there.
        UnsafeFileError: its metadata or its values name a class that is not plain; lists every value.
        CorruptError: files are missing or too short, or it contradicts itself; lists everything.
    """
    directory = parse_metadata(raw, f"{storage.url}/{METADATA_NAME}")
    if only:
        directory = _chosen(storage, directory, only)
    if apart:
        directory = Directory(tuple(part for entry in directory.entries for part in _parts(entry)))
    _check_files(storage, directory)
    ranks = _ranks(directory)
    extents = _Extents(registry)
    tree: dict[str, Any] = {}
    tensors = []
    refused: list[str] = []
    damaged: list[str] = []
    files = OpenFiles(storage)
    try:
        for entry in directory.entries:
            if isinstance(entry, SavedTensor):
                key = key_of(entry.path)
                pieces = tuple(
                    Piece(ranks[chunk.item.file], chunk.box, _Bytes(extents, entry, chunk)) for chunk in entry.chunks
                )
                tensors.append(ShownTensor(key, entry.dtype, entry.shape, pieces))
                place(tree, entry.path, TensorRef(key, entry.dtype, entry.shape), len(directory.entries))
                continue
            try:
                value = read_value(files.of(entry.item.file), entry, registry)
            except UnsafeFileError as err:
                refused.extend(err.refused)
            except CorruptError as err:
                damaged.append(str(err))
            else:
                place(tree, entry.path, value, len(directory.entries))
    finally:
        files.close()
    if refused:
        raise UnsafeFileError(refused)
    if damaged:
        raise CorruptError(f"{storage.url}: {'; '.join(damaged[:20])}")
    world = max(ranks.values(), default=0) + 1
    tree = {name: _with_positions(value) for name, value in tree.items()}
    return ShownStep(storage, tree, tensors, name=f"{digest(raw):016x}", world=world)


def _with_positions(value: Any) -> Any:
    """The state of an optimizer by positions, which torch has written as text, as it was: they are numbers again."""
    if not isinstance(value, dict):
        return value
    state, groups = value.get("state"), value.get("param_groups")
    if isinstance(state, dict) and isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        positions = {str(index) for group in groups for index in group.get("params") or () if type(index) is int}
        if positions and positions.issuperset(state):
            return {**value, "state": {int(name): item for name, item in state.items()}}
    return {name: _with_positions(item) for name, item in value.items()}


def _chosen(storage: Storage, directory: Directory, only: Sequence[str]) -> Directory:
    names = dict.fromkeys(str(entry.path[0]) for entry in directory.entries)
    unknown = sorted(set(only) - set(names))
    if unknown:
        hint = "".join(near(name, list(names)) for name in unknown)
        raise UsageError(f"{', '.join(unknown)}: {storage.url} has {', '.join(names)}{hint}. Nothing was written")
    return Directory(tuple(entry for entry in directory.entries if entry.path[0] in only))


def _parts(entry: SavedTensor | SavedValue) -> Iterator[SavedTensor | SavedValue]:
    if isinstance(entry, SavedValue) or [chunk.box.sizes for chunk in entry.chunks] == [entry.shape]:
        yield entry
        return
    for chunk in entry.chunks:
        name, path = f"{entry.name}{chunk.box}", (*entry.path, str(chunk.box))
        sizes = chunk.box.sizes
        yield SavedTensor(name, path, entry.dtype, sizes, (Chunk(whole(sizes), chunk.item),))


def _check_files(storage: Storage, directory: Directory) -> None:
    """Every file is there and long enough."""
    there = dict(storage.list(""))
    wrong = []
    for name, needed in directory.files.items():
        if name not in there:
            wrong.append(f"{name} is missing")
        elif there[name] < needed:
            wrong.append(f"{name} has {there[name]:,} bytes, and entries up to byte {needed:,}")
    if wrong:
        more = f"; and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise CorruptError(f"{storage.url}: the checkpoint is not whole: {'; '.join(wrong[:20])}{more}")


def _ranks(directory: Directory) -> dict[str, int]:
    """The rank that wrote each file, by its name; by the order of the names, where they do not tell."""
    names = sorted(directory.files)
    found = [_FILE.fullmatch(name) for name in names]
    if all(found):
        return {name: int(match[1]) for name, match in zip(names, found, strict=True) if match}
    return {name: number for number, name in enumerate(names)}


@dataclass(slots=True)
class _Extents:
    """Where chunks lie, found and proved when the first byte of one is asked for. Any thread."""

    registry: Any = None
    _known: dict[tuple[str, tuple[int, ...]], Extent] = field(default_factory=dict)
    _held: OrderedDict[tuple[str, tuple[int, ...]], Extent] = field(default_factory=OrderedDict)
    _locks: dict[tuple[str, tuple[int, ...]], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, files: OpenFiles, tensor: SavedTensor, chunk: Chunk) -> Extent:
        """The extent of one chunk."""
        key = tensor.name, chunk.box.offsets
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                found = self._known.get(key) or self._held.get(key)
            if found is not None:
                return found
            blob = files.of(chunk.item.file)
            extent = find_extent(blob, tensor, chunk, self.registry)
            prove(blob, extent, f"{chunk.item.file}: {tensor.name!r}{chunk.box}")
            with self._lock:
                if extent.held is None:
                    self._known[key] = extent
                else:
                    self._held[key] = extent
                    while len(self._held) > HELD:
                        self._held.popitem(last=False)
            return extent


@dataclass(frozen=True, slots=True)
class _Bytes(Source):
    extents: _Extents
    tensor: SavedTensor
    chunk: Chunk

    def read_into(self, files: OpenFiles, offset: int, buffer: memoryview) -> None:
        extent = self.extents.of(files, self.tensor, self.chunk)
        if extent.held is not None:
            buffer[:] = extent.held[offset : offset + len(buffer)]
        else:
            files.of(self.chunk.item.file).read_into(extent.start + offset, buffer)
