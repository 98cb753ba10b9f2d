"""A manifest from the files of its attempt: what they keep of it, and a proof that they are all of it.

In: the storage of a step whose manifest is gone or damaged. Out: for each attempt that has files there, the manifest that it
had or would have had, byte for byte, or why it cannot be made again. Changes nothing. Whether an attempt was ever committed
its files do not say; see ``keepstep.check.repair``.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

import msgspec

from keepstep.check.verify import Problem, verify_files
from keepstep.commit.publish import collect_receipts
from keepstep.commit.transfer import read_header
from keepstep.commit.weights import droppable, stripped
from keepstep.errors import CorruptError, FormatError, StorageError
from keepstep.format.manifest import (
    MANIFEST_NAME,
    STATE_FOLDER,
    FileRecord,
    Manifest,
    Receipt,
    file_name,
    pack_manifest,
    parse_manifest,
    proves_itself,
)
from keepstep.format.shardfile import manifest_copy, parse_header
from keepstep.storage.base import Storage

__all__ = ["Rebuilt", "attempts_in", "rebuild"]

_FILE = re.compile(r"([^/]+)/rank-(\d{5,7})\.([0-9a-f]{8,32})\.safetensors")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the files of one attempt prove: a manifest, or problems. ``dropped`` are components whose files are gone."""

    save_id: str
    manifest: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    dropped: tuple[str, ...] = ()
    files: int = 0

    @property
    def data(self) -> bytes:
        """The bytes of the manifest."""
        return b"" if self.manifest is None else pack_manifest(self.manifest)


def attempts_in(storage: Storage) -> dict[str, dict[tuple[str, int], str]]:
    """The shard files in a step's folder: by save id, then by folder and rank, their names."""
    found: dict[str, dict[tuple[str, int], str]] = {}
    for name, _ in storage.list(""):
        match = _FILE.fullmatch(name)
        if match and name == file_name(match[1], int(match[2]), match[3]):
            found.setdefault(match[3], {})[match[1], int(match[2])] = name
    return found


def rebuild(storage: Storage, save_id: str, names: dict[tuple[str, int], str]) -> Rebuilt:
    """The manifest of one attempt, once every file, byte and value of it is proved to be there.

    Reads every byte. Files of optimizers may be missing, as they are of steps that keep their weights alone.

    Args:
        storage: the step's own storage.
        save_id: the attempt.
        names: its files, from ``attempts_in``.

    Raises:
        StorageError: the storage refused.
    """
    first = names.get((STATE_FOLDER, 0), file_name(STATE_FOLDER, 0, save_id))
    try:
        kept = _kept(storage, first, save_id)
    except (CorruptError, FormatError) as err:
        return Rebuilt(save_id, problems=(Problem("manifest", first, str(err)),), files=len(names))
    except StorageError as err:
        return Rebuilt(save_id, problems=(Problem("unreadable", first, str(err)),), files=len(names))
    receipts: dict[int, dict[str, FileRecord]] = {}
    problems = []
    for (folder, rank), name in sorted(names.items()):
        try:
            receipts.setdefault(rank, {})[folder] = _record(storage, name, rank)
        except CorruptError as err:
            problems.append(Problem("header", name, str(err)))
    if problems:
        return Rebuilt(save_id, problems=tuple(problems), files=len(names))
    try:
        manifest, dropped = _filled(kept, receipts)
        parse_manifest(pack_manifest(manifest), first)
    except CorruptError as err:
        return Rebuilt(
            save_id, problems=(Problem("missing", MANIFEST_NAME, str(err).partition(": ")[2]),), files=len(names)
        )
    *_, verified = verify_files(storage, manifest)
    if verified.problems:
        return Rebuilt(save_id, problems=verified.problems, files=len(names))
    return Rebuilt(save_id, manifest, dropped=dropped, files=len(names))


def _kept(storage: Storage, name: str, save_id: str) -> Manifest:
    """The manifest but for its files, as the state file of rank 0 keeps it."""
    try:
        with storage.open(name) as blob:
            copy = manifest_copy(read_header(blob, name), name)
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        raise CorruptError(f"{name}, which would keep a copy of the manifest, cannot be read: {err}") from err
    if not copy:
        raise CorruptError(f"{name} keeps no copy of the manifest: it was written in format 1.0")
    if not proves_itself(copy):
        raise CorruptError(f"{name}: the copy of the manifest does not match its own digest")
    try:
        manifest = msgspec.json.decode(copy, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: the copy is no manifest: {err}") from err
    if manifest.save_id != save_id or manifest.files:
        raise CorruptError(f"{name}: the copy is of attempt {manifest.save_id}, or not of a manifest before its commit")
    # The rest of its numbers is proved before anything is done by them. Folders without files do for that.
    folders: dict[str, tuple[FileRecord, ...]] = {spec.folder: () for spec in manifest.tensors}
    empty = msgspec.structs.replace(manifest, files=folders)
    parse_manifest(pack_manifest(empty), name)
    return empty


def _record(storage: Storage, name: str, rank: int) -> FileRecord:
    with storage.open(name) as blob:
        header = parse_header(read_header(blob, name), blob.size_bytes, name)
        return FileRecord(rank, blob.size_bytes, header.data_bytes, header.header_digest)


def _filled(kept: Manifest, receipts: dict[int, dict[str, FileRecord]]) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest with its files; where only optimizers' are missing, without those optimizers.

    Raises:
        CorruptError: other files are missing.
    """
    may_go = droppable(kept)
    for gone in ((), *((name,) for name in may_go), may_go):
        wanted = stripped(kept, gone) if gone else kept
        given = [
            Receipt(rank, kept.save_id, {folder: record for folder, record in files.items() if folder not in gone})
            for rank, files in sorted(receipts.items())
        ]
        try:
            return collect_receipts(given, msgspec.structs.replace(wanted, files={})), gone
        except CorruptError as err:
            reason = err
    raise reason
