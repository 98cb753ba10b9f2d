"""What dead attempts have left below a root, and how it goes.

An attempt is dead when nobody can commit it any more. That cannot be read off its files: whoever removes them makes sure
first (see ``fence``), or goes by their age.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from keepstep.commit.aside import QUARANTINE, set_aside
from keepstep.commit.catalog import Catalog
from keepstep.commit.pins import PINS
from keepstep.commit.publish import (
    INCARNATIONS,
    LATEST_NAME,
    ORDER_NAME,
    RUN_NAME,
    TALLY_NAME,
    new_incarnation,
    newest_incarnation,
)
from keepstep.commit.records import RECORDS_NAME
from keepstep.commit.retention import strays
from keepstep.errors import CorruptError, FormatError, StorageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, step_name
from keepstep.storage.base import Storage, Subfolder, read_blob
from keepstep.storage.local import PARTIAL

__all__ = ["SCRUBBED_NAME", "Garbage", "Start", "fence", "find_garbage", "newest_start", "remove_garbage"]

SCRUBBED_NAME = "scrub.json"
MAX_NOTE_BYTES = 1 << 16
_NOTHING = ".nothing"
_ATTEMPT = re.compile(r"/rank-\d{5,}\.([0-9a-f]{8,32})\.safetensors")
_RECORDS = (LATEST_NAME, RUN_NAME, RECORDS_NAME, SCRUBBED_NAME, ORDER_NAME, TALLY_NAME)
_FOLDERS = (INCARNATIONS, PINS, QUARANTINE)


@dataclass(frozen=True, slots=True)
class Garbage:
    """The files of one attempt, or a record that was never finished. ``names`` are relative to the root.

    ``kind`` is ``unfinished`` (a step's folder without a manifest: never committed, or its removal was interrupted),
    ``stray`` (beside a committed step), or ``partial`` (a record of the run). ``attempt`` is the save id, where the names
    tell it.
    """

    kind: str
    folder: str
    attempt: str
    names: tuple[str, ...]
    bytes: int


def find_garbage(root: Storage, catalog: Catalog) -> tuple[Garbage, ...]:
    """Everything below the root that belongs to no committed step, none put aside, and to no record. Changes nothing.

    Damaged steps are no garbage, nor is what lies beside one. Blobs that no keepstep writes are, within a step's folder.
    """
    below: dict[str, list[tuple[str, int]]] = {}
    for name, size in root.list(""):
        below.setdefault(name.partition("/")[0], []).append((name, size))
    steps = {step_name(found.step): found for found in catalog.steps}
    aside = {step_name(note.step) for note in catalog.aside}
    found: list[Garbage] = []
    for folder, sized in sorted(below.items()):
        step = parse_step_name(folder)
        if step is None:
            found.extend(
                Garbage("partial", folder, "", (name,), size) for name, size in sized if _half_written(folder, name)
            )
            continue
        inside = [name.partition("/")[2] for name, _ in sized]
        if folder in steps:
            inside = [] if steps[folder].damage else _strays(root, step, inside, catalog)
            found.extend(_by_attempt("stray", folder, inside, dict(sized)))
        elif folder in catalog.unfinished or folder in aside:
            kept = set_aside(catalog.aside, step, inside)
            found.extend(_by_attempt("unfinished", folder, [name for name in inside if name not in kept], dict(sized)))
    return tuple(found)


class Start(msgspec.Struct, frozen=True):
    """Who took an incarnation: the machine of a job's coordinator, or somebody who only wanted to ``fence``."""

    host: str = ""
    fence: bool = False


def newest_start(root: Storage) -> Start | None:
    """Who took the newest incarnation; None without any. Nothing is known of one whose note cannot be read."""
    number = newest_incarnation(root)
    if not number:
        return None
    try:
        return msgspec.json.decode(read_blob(root, f"{INCARNATIONS}/{number:06d}", MAX_NOTE_BYTES), type=Start)
    except (CorruptError, msgspec.MsgspecError, UnicodeDecodeError):
        return Start()


def fence(root: Storage, host: str) -> int:
    """Takes an incarnation: no start of the job before it can commit any more. Returns its number.

    Raises:
        StorageError: it could not be taken.
    """
    return new_incarnation(root, msgspec.json.encode(Start(host, fence=True)) + b"\n")


def remove_garbage(root: Storage, doomed: Iterable[Garbage]) -> Iterator[Garbage]:
    """Removes garbage, one piece after the other; yields what has gone. Killed at any point, the next call finishes it.

    Call only for attempts that are dead. One that has been committed since it was found stays, and is not yielded.

    Raises:
        StorageError: something could not be removed.
    """
    # Of whoever took a manifest away, or was about to put one there, it is not known that it was durable: first that
    # there is none, then the data. Folders that hold nothing go with this, too.
    root.delete([f"{folder}/{_NOTHING}" for folder in root.folders() if parse_step_name(folder) is not None])
    for one in doomed:
        if one.kind == "partial" or _still_dead(root, one):
            root.delete(list(one.names))
            yield one


def _still_dead(root: Storage, one: Garbage) -> bool:
    """Whether nobody has committed it since, nor anything else in its folder."""
    inside = [name for name, _ in Subfolder(root, one.folder).list("")]
    if one.kind == "unfinished":
        return MANIFEST_NAME not in inside
    step = parse_step_name(one.folder)
    names = [name.partition("/")[2] for name in one.names]
    return step is not None and MANIFEST_NAME in inside and len(strays(root, step, names, ())) == len(names)


def _strays(root: Storage, step: int, names: list[str], catalog: Catalog) -> list[str]:
    """What lies beside a committed step; nothing where its manifest does not prove itself, or has gone meanwhile."""
    try:
        return strays(root, step, names, catalog.aside)
    except (CorruptError, FormatError):
        return []
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return []


def _by_attempt(kind: str, folder: str, names: Iterable[str], sizes: dict[str, int]) -> Iterator[Garbage]:
    by_attempt: dict[str, list[str]] = {}
    for name in sorted(names):
        whole = f"{folder}/{name}"
        match = _ATTEMPT.search(whole)
        by_attempt.setdefault(match[1] if match else "", []).append(whole)
    for attempt, each in sorted(by_attempt.items()):
        yield Garbage(kind, folder, attempt, tuple(each), sum(sizes[name] for name in each))


def _half_written(folder: str, name: str) -> bool:
    """Whether it is a record of the run that was being written by somebody who was killed."""
    known = folder in _FOLDERS or name.startswith(tuple(f"{record}." for record in _RECORDS))
    return known and name.endswith(PARTIAL)
