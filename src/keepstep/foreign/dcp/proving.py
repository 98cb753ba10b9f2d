"""What can be proved about a directory of torch's DCP at rest. It has no digests, so that is less than for a step.

In: the directory. Out: a ``Proved``, again and again while entries are read; the last one is the result. Finds every fault
instead of stopping at the first one, changes nothing, and runs nothing of what it reads.

    manifest    the metadata can be read, and names a file for each chunk and each value
    coverage    the chunks of every tensor cover each of its elements once
    missing, size, entries    files are there, long enough, and no entry begins inside another
    blocks      each entry is what the metadata says of it, and its bytes match the CRC-32 that it has of its own
    values      plain values can be read
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.errors import CorruptError, StorageError, UnsafeFileError
from keepstep.foreign.dcp.items import find_extent, prove, read_value
from keepstep.foreign.dcp.metadata import METADATA_NAME, Chunk, Directory, Item, SavedTensor, SavedValue, parse_metadata
from keepstep.foreign.shown import OpenFiles
from keepstep.format.box import check_partition
from keepstep.storage.base import Storage

__all__ = ["Fault", "Proved", "proving"]

_LIMITS = (
    "a checkpoint of torch's DCP has no digests: its entries were compared with their own CRC-32, and with what the metadata"
    " says; whether they all belong to one save cannot be told"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind (see the module's text, or ``unreadable``), the file it is in, and what was found."""

    kind: str
    file: str
    text: str


@dataclass(slots=True)
class Proved:
    """What is known so far. ``bytes`` and ``entries`` were read and compared, of ``total_bytes``; ``notes`` are no faults.

    ``strays`` are names in the folder that the metadata does not name.
    """

    files: int = 0
    bytes: int = 0
    entries: int = 0
    total_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=lambda: [_LIMITS])
    strays: tuple[str, ...] = ()


def proving(storage: Storage, raw: bytes) -> Iterator[Proved]:
    """Proves what can be proved; one and the same record after each entry. Not collective; any thread.

    Args:
        storage: the directory.
        raw: its ``.metadata``.

    Raises:
        UnsafeFileError: the metadata names what is no part of torch's own records; nothing of it was run.
        StorageError: the folder cannot be read.
    """
    proved = Proved()
    yield proved
    try:
        directory = parse_metadata(raw, f"{storage.url}/{METADATA_NAME}")
    except CorruptError as err:
        proved.faults.append(Fault("manifest", METADATA_NAME, str(err)))
        return
    there = dict(storage.list(""))
    proved.files = len(directory.files)
    proved.strays = tuple(sorted(there.keys() - directory.files.keys() - {METADATA_NAME}))
    proved.faults.extend(_uncovered(directory))
    proved.faults.extend(_short(directory, there))
    proved.faults.extend(_entangled(directory))
    entries = [each for each in _entries(directory) if not _cut_off(each[1], there)]
    proved.total_bytes = sum(item.length for _, item, _ in entries)
    opened = OpenFiles(storage)
    unproved = 0
    try:
        for saved, item, chunk in entries:
            try:
                unproved += not _prove(opened, saved, chunk, proved)
            except StorageError as err:
                proved.faults.append(Fault("unreadable", item.file, str(err)))
            except CorruptError as err:
                proved.faults.append(Fault("blocks" if chunk else "values", item.file, str(err)))
            proved.bytes += item.length
            proved.entries += 1
            yield proved
    finally:
        opened.close()
    if unproved:
        proved.notes.append(
            f"{unproved:,} of {proved.entries:,} entries have no CRC-32, so their bytes were not compared"
        )


def _entries(directory: Directory) -> Iterator[tuple[SavedTensor | SavedValue, Item, Chunk | None]]:
    """Everything that lies in a file; in the order of the files."""
    found: list[tuple[SavedTensor | SavedValue, Item, Chunk | None]] = []
    for entry in directory.entries:
        if isinstance(entry, SavedValue):
            found.append((entry, entry.item, None))
        else:
            found.extend((entry, chunk.item, chunk) for chunk in entry.chunks)
    return iter(sorted(found, key=lambda each: (each[1].file, each[1].offset)))


def _prove(opened: OpenFiles, saved: SavedTensor | SavedValue, chunk: Chunk | None, proved: Proved) -> bool:
    """Whether there was a checksum to compare an entry with.

    Raises:
        CorruptError: the entry is not what it should be.
    """
    try:
        if isinstance(saved, SavedValue):
            read_value(opened.of(saved.item.file), saved)
            return True
        if chunk is None:
            return True
        blob = opened.of(chunk.item.file)
        extent = find_extent(blob, saved, chunk)
        prove(blob, extent, f"{chunk.item.file}: {saved.name!r}{chunk.box}")
    except UnsafeFileError as err:
        # Its checksums were compared before it was found out what it is.
        proved.notes.extend(f"not read: {text}" for text in err.refused)
        return True
    return extent.proof is not None or extent.held is not None


def _uncovered(directory: Directory) -> Iterator[Fault]:
    for tensor in directory.tensors:
        try:
            check_partition(tensor.name, tensor.shape, [chunk.box for chunk in tensor.chunks])
        except CorruptError as err:
            yield Fault("coverage", METADATA_NAME, str(err))


def _short(directory: Directory, there: dict[str, int]) -> Iterator[Fault]:
    for name, needed in directory.files.items():
        if name not in there:
            yield Fault("missing", name, f"{name} is missing")
        elif there[name] < needed:
            yield Fault("size", name, f"{name} has {there[name]:,} bytes, and entries up to byte {needed:,}")


def _cut_off(item: Item, there: dict[str, int]) -> bool:
    return there.get(item.file, 0) < item.offset + item.length


def _entangled(directory: Directory) -> Iterator[Fault]:
    """Entries that begin inside of others."""
    last: tuple[str, Item] | None = None
    for saved, item, _ in _entries(directory):
        if last is not None and last[1].file == item.file and item.offset < last[1].offset + last[1].length:
            text = f"{saved.name!r} begins at byte {item.offset:,}, inside of the entry of {last[0]!r}"
            yield Fault("entries", item.file, f"{item.file}: {text}")
        if last is None or last[1].file != item.file or item.offset + item.length >= last[1].offset + last[1].length:
            last = saved.name, item
