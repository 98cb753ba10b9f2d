"""Where a step that is to be copied comes from, and whether it may come into another root.

A root holds the steps of one run, told by ``run.json``; the starts of its job are told by the notes of its incarnations.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import msgspec

from keepstep.commit.catalog import MAX_MANIFEST_BYTES, read_catalog, step_storage
from keepstep.commit.publish import INCARNATIONS, RUN_NAME, put_note, run_of
from keepstep.commit.records import now_text
from keepstep.commit.transfer import ShardName
from keepstep.errors import CorruptError, MismatchError, StepNotFoundError, StorageError
from keepstep.format.manifest import FORMAT_MAJOR, MANIFEST_NAME, Manifest, parse_manifest, promised_files
from keepstep.storage.base import Storage, read_blob

__all__ = ["NOTHING", "Origin", "check_run", "introduce", "manifest_at", "read_origin"]

MAX_NOTE_BYTES = 1 << 16
NOTHING = ".nothing"
"""A name that no blob has. Removing it makes durable what is seen in its folder."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What is copied: the manifest as it is stored and as it is read, its files, and what the source says beside it.

    ``root`` is None for a step outside of any run; ``runs`` are the ids by which the source is known.
    """

    storage: Storage
    root: Storage | None
    raw: bytes
    manifest: Manifest
    files: tuple[ShardName, ...]
    runs: frozenset[str]


def read_origin(source: Storage, step: int | None) -> Origin:
    """Reads and proves the manifest of a committed step: of the root ``source``, or without a number of ``source`` itself.

    Raises:
        StepNotFoundError, CorruptError, FormatError, StorageError: there is none that can be copied.
    """
    storage = source if step is None else step_storage(source, step)
    raw = manifest_at(storage)
    if raw is None:
        raise StepNotFoundError(f"{storage.url}: no step is committed there; nothing was copied")
    manifest = parse_manifest(raw, f"{storage.url}/{MANIFEST_NAME}")
    if step is not None and manifest.step != step:
        raise CorruptError(f"{storage.url} holds the manifest of step {manifest.step}; nothing was copied")
    # (Proves that the files can hold every tensor, and lists them.)
    promised_files(manifest)
    files = tuple(
        ShardName(manifest.file_name(folder, record.rank), record)
        for folder, records in manifest.files.items()
        for record in records
    )
    run = run_of(source) if step is not None else None
    runs = frozenset({manifest.lineage.run} | ({run} if run else set()))
    return Origin(storage, None if step is None else source, raw, manifest, files, runs)


def check_run(origin: Origin, target: Storage) -> None:
    """Steps of two runs do not come into one root.

    Raises:
        MismatchError: the target is another run's, or has gone on apart from the source.
    """
    run = run_of(target) or ""
    if run not in origin.runs:
        runs = {found.run for found in read_catalog(target).steps if not found.damage}
        if (run or runs) and origin.manifest.lineage.run not in runs:
            lines = [
                f"{origin.storage.url}: run {origin.manifest.lineage.run}",
                f"{target.url}: run {', '.join(sorted(runs | ({run} if run else set())))}",
            ]
            raise MismatchError("a root holds the steps of one run; nothing was copied:", lines)
    if origin.root is not None:
        _check_line(origin.root, target, sorted(_starts(origin.root) & _starts(target)))


def _check_line(source: Storage, target: Storage, shared: list[int]) -> None:
    """The newest start of the job that both roots know is the same one; else their numbers mean different things."""
    for number in reversed(shared):
        here, there = (_note_at(root, number) or b"" for root in (source, target))
        if here != there and _tells(here) and _tells(there):
            lines = [f"{root.url}: {note.decode(errors='replace').strip()}"
                     for root, note in ((source, here), (target, there))]  # fmt: skip
            raise MismatchError(
                f"both roots have gone on apart from each other: incarnation {number} is another start of the job in each."
                " Which steps are newer cannot be told; nothing was copied:",
                lines,
            )
        if here == there and b'"id"' in here:
            return


def _tells(note: bytes) -> bool:
    """Whether it is what a start has written, and not what a repair or a copy has put in the place of a lost one."""
    try:
        fields = msgspec.json.decode(note, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return not fields.keys() & {"rebuilt", "copied"}


def _starts(root: Storage) -> set[int]:
    return {int(name[-6:]) for name, _ in root.list(INCARNATIONS) if name[-6:].isdigit()}


def _note_at(root: Storage, number: int) -> bytes | None:
    try:
        return read_blob(root, f"{INCARNATIONS}/{number:06d}", MAX_NOTE_BYTES)
    except CorruptError:
        return None
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return None


def introduce(origin: Origin, target: Storage) -> None:
    """The run and the start of the job are known at the target before there is a step of them.

    Raises:
        MismatchError: another run, or another start of the same number, has come there meanwhile.
    """
    lineage, found = origin.manifest.lineage, run_of(target) is not None
    if not found:
        raw = None
        if origin.root is not None and run_of(origin.root) is not None:
            raw = read_blob(origin.root, RUN_NAME, MAX_NOTE_BYTES)
        about = {"run": lineage.run, "created": now_text(), "format": FORMAT_MAJOR}
        if not put_note(target, RUN_NAME, raw or msgspec.json.encode(about) + b"\n"):
            check_run(origin, target)
            found = True
    if lineage.incarnation:
        note = _note_at(origin.root, lineage.incarnation) if origin.root is not None else None
        made = note or msgspec.json.encode({"copied": now_text(), "save": origin.manifest.save_id}) + b"\n"
        if not put_note(target, f"{INCARNATIONS}/{lineage.incarnation:06d}", made):
            if origin.root is not None:
                _check_line(origin.root, target, [lineage.incarnation])
            found = True
    if found:
        # Whoever put them there may have been killed before they were durable.
        target.delete([NOTHING, f"{INCARNATIONS}/{NOTHING}"])


def manifest_at(storage: Storage) -> bytes | None:
    """The manifest as it is stored; None where no step is committed."""
    try:
        return read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except StorageError as err:
        if err.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
