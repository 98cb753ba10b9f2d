"""The record of a save: one JSON line in the run's folder, whether it was committed or not."""

from __future__ import annotations

import datetime as dt
import errno
from collections.abc import Iterable

import msgspec

from keepstep.errors import StorageError
from keepstep.storage.base import Storage, read_blob

__all__ = [
    "RECORDS_NAME",
    "RankTimes",
    "SaveRecord",
    "Span",
    "Tail",
    "append_record",
    "now_text",
    "read_records",
    "tails_of",
]

RECORDS_NAME = "saves.jsonl"
MAX_RECORDS_BYTES = 1 << 30

Span = tuple[str, str, float, float]
"""Who (``training``, ``copy``, ``agent`` or ``coordinator``), what, from and to, in seconds since the boundary."""


class RankTimes(msgspec.Struct):
    """Where the time of one rank went, in seconds by name, and the spans of it.

    ``wait`` for the save before, ``capture``, ``plan`` and ``copy`` at the boundary, and ``fence`` block training;
    ``stage`` is from the boundary to the last byte in the arena, ``write`` from there to durable files. ``boundary`` is
    when that was, on the monotonic clock of the machine.
    """

    seconds: dict[str, float] = {}
    spans: list[Span] = []
    bytes: int = 0
    host: str = ""
    boundary: float = 0.0


class Tail(msgspec.Struct, frozen=True):
    """One kind of time over all ranks: the mean, the most, and the rank that took the most."""

    mean: float
    most: float
    rank: int


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One save as the coordinator saw it. Times in seconds; ``durable_s`` is from the boundary to the commit.

    ``outcome`` is ``committed`` or ``failed``; of a failed save ``code`` and ``error`` say why. ``spans`` are those of the
    coordinator's rank.
    """

    step: int
    save_id: str
    ended: str
    outcome: str
    code: str = ""
    error: str = ""
    run: str = ""
    incarnation: int = 0
    world: int = 1
    bytes: int = 0
    background: str = ""
    staging: str = ""
    first: bool = False
    stall_s: float = 0.0
    staged_s: float = 0.0
    durable_s: float = 0.0
    receipts_s: float = 0.0
    commit_s: float = 0.0
    bytes_per_s: float = 0.0
    agent_memory_bytes: int = 0
    ranks: dict[str, Tail] = {}
    spans: list[Span] = []


BLOCKING = ("wait", "capture", "plan", "copy", "fence")
"""Times during which training stands still."""


def tails_of(ranks: dict[int, RankTimes]) -> dict[str, Tail]:
    """Mean and most of each kind of time, and of ``stall``: all that blocks training, together."""
    found = {}
    totals = {
        rank: {**times.seconds, "stall": sum(times.seconds.get(name, 0.0) for name in BLOCKING)}
        for rank, times in ranks.items()
    }
    names = {name: None for seconds in totals.values() for name in seconds}
    for name in names:
        values = {rank: seconds.get(name, 0.0) for rank, seconds in totals.items()}
        worst = max(values, key=lambda rank: values[rank])
        found[name] = Tail(sum(values.values()) / len(values), values[worst], worst)
    return found


def append_record(root: Storage, record: SaveRecord) -> None:
    """Adds the record to those of the run.

    Raises:
        StorageError: it could not be written; nothing else is affected.
    """
    root.append_line(RECORDS_NAME, msgspec.json.encode(record) + b"\n")


def read_records(root: Storage) -> list[SaveRecord]:
    """All records of a run, oldest first; lines that are no records (cut off by a crash) are left out."""
    try:
        raw = read_blob(root, RECORDS_NAME, MAX_RECORDS_BYTES)
    except StorageError as err:
        if err.errno == errno.ENOENT:
            return []
        raise
    return list(_parsed(raw.splitlines()))


def _parsed(lines: Iterable[bytes]) -> Iterable[SaveRecord]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=SaveRecord)
        except msgspec.MsgspecError:
            continue


def now_text() -> str:
    """The time, as records have it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
