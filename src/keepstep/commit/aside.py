"""Damaged steps that were put aside: no reader takes them for steps any more, and nothing of them is deleted.

The manifest and a note go into one blob in the run's folder; then the manifest leaves the step's folder, and with it the
step. Its data stays where it is: whoever tidies up leaves alone what a note lists. Putting the manifest back undoes it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec

from keepstep.errors import CorruptError, StepExistsError, StepNotFoundError
from keepstep.format.manifest import MANIFEST_NAME, VERSION, parse_step_name, step_name
from keepstep.format.shardfile import digest
from keepstep.storage.base import Storage, Subfolder, read_blob

__all__ = ["QUARANTINE", "Note", "bring_back", "put_aside", "read_notes", "set_aside"]

QUARANTINE = "quarantine"
MAX_NOTE_BYTES = 1 << 30


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong with a step, when it was put aside, and by which version of keepstep.

    ``files`` are the names in its folder at that time, without the manifest, which is in ``manifest`` as base64. A note that
    cannot be read lists no files and has no manifest: then everything in the folder is left alone.
    """

    step: int
    at: str
    keepstep: str
    problems: tuple[str, ...]
    files: tuple[str, ...] | None
    manifest: str


def put_aside(root: Storage, step: int, problems: Sequence[str], at: str) -> Note:
    """Puts a step aside. Killed at any point, it is done by doing it again.

    Args:
        root: of the run.
        step: the step's number; its manifest may be damaged.
        problems: what is wrong with it, for whoever reads the note.
        at: the time, as the note is to have it.

    Raises:
        StorageError: something cannot be read or written; the step is as it was, or aside.
    """
    storage = Subfolder(root, step_name(step))
    raw = read_blob(storage, MANIFEST_NAME, MAX_NOTE_BYTES)
    files = tuple(sorted(name for name, _ in storage.list("") if name != MANIFEST_NAME))
    text = base64.b64encode(raw).decode()
    note = Note(step=step, at=at, keepstep=VERSION, problems=tuple(problems), files=files, manifest=text)
    # The note first: from the moment when the manifest is gone, only the note keeps the data from being swept.
    root.put(f"{QUARANTINE}/{step_name(step)}.{digest(raw):016x}.json", msgspec.json.encode(note) + b"\n")
    storage.delete([MANIFEST_NAME])
    return note


def bring_back(root: Storage, step: int) -> Note:
    """Gives a step that was put aside its manifest back; of several, the one that was put aside last.

    Raises:
        StepNotFoundError: no step of this number was put aside.
        StepExistsError: a step of this number has been committed since; nothing was changed.
        CorruptError: the note cannot be read.
    """
    named = [(note.at, name, note) for name, note in _named_notes(root) if note.step == step]
    if not named:
        raise StepNotFoundError(f"{root.url}: step {step} was not put aside")
    _, name, note = max(named, key=lambda each: each[:2])
    try:
        raw = base64.b64decode(note.manifest, validate=True)
    except binascii.Error:
        raw = b""
    if not raw:
        raise CorruptError(f"{root.url}/{name} cannot be read; nothing was changed")
    storage = Subfolder(root, step_name(step))
    if not storage.put_new(MANIFEST_NAME, raw) and read_blob(storage, MANIFEST_NAME, MAX_NOTE_BYTES) != raw:
        raise StepExistsError(f"{storage.url}: another step {step} is committed there; nothing was changed")
    root.delete([name])
    return note


def read_notes(root: Storage) -> tuple[Note, ...]:
    """All notes, in the order of their steps."""
    return tuple(sorted((note for _, note in _named_notes(root)), key=lambda note: (note.step, note.at)))


def set_aside(notes: Sequence[Note], step: int, names: Sequence[str]) -> set[str]:
    """Those names in a step's folder that belong to steps put aside, and stay."""
    mine = [note for note in notes if note.step == step]
    if any(note.files is None for note in mine):
        return {name for name in names if name != MANIFEST_NAME}
    kept = {name for note in mine for name in note.files or ()}
    return kept.intersection(names)


def _named_notes(root: Storage) -> list[tuple[str, Note]]:
    found = []
    for name, _ in root.list(QUARANTINE):
        step = parse_step_name(name.rpartition("/")[2].partition(".")[0])
        if step is None or not name.endswith(".json"):
            continue
        try:
            note = msgspec.json.decode(read_blob(root, name, MAX_NOTE_BYTES), type=Note)
        except (msgspec.MsgspecError, UnicodeDecodeError, CorruptError):
            note = Note(step=step, at="", keepstep="", problems=("the note cannot be read",), files=None, manifest="")
        found.append((name, note if note.step == step else msgspec.structs.replace(note, step=step, files=None)))
    return found
