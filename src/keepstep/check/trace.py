"""The trace of a run: what each rank did at every step, written as it happens, for comparison with another run.

A trace is a folder. Each rank appends to a file of its own, one JSON line a record; a kill may tear the last line, and
nothing else. Several starts of a job write into one trace, each beginning with ``Began``. Imports no torch: who writes
makes the digests, who reads needs none.
"""

from __future__ import annotations

import os
import threading
import time as clock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from keepstep.errors import ClosedError, CorruptError, UsageError
from keepstep.storage.base import Closing

__all__ = [
    "DRILL_VARIABLE",
    "Began",
    "DrillOrders",
    "Ended",
    "Record",
    "Run",
    "Saved",
    "Stepped",
    "Trace",
    "TraceWriter",
    "drill_orders",
    "encode_orders",
    "read_trace",
]

DRILL_VARIABLE = "KEEPSTEP_DRILL"
_PATTERN = "rank-*.jsonl"


class DrillOrders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a drill wants of the script it has started.

    ``root`` is used in place of the script's own, ``trace`` is the folder of the trace. At step ``stop_at`` the script
    saves, waits until that step is committed, and ends with status 0 on all ranks; None: it runs to its own end.
    """

    root: str
    trace: str
    stop_at: int | None = None


class Began(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="began"):
    """A rank stands where it begins: at ``step``, restored from there or fresh.

    ``skipped`` says which steps were damaged; ``parts`` has the digests of the state as it was brought back.
    """

    rank: int
    world: int
    incarnation: int
    step: int
    restored: bool
    skipped: tuple[str, ...] = ()
    torch: str = ""
    python: str = ""
    cpu: str = ""
    parts: dict[str, str] = {}
    time: float = msgspec.field(default_factory=clock.time)


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="stepped"):
    """A rank has made a step, or with ``micro`` above 0 a part of the one after ``step``.

    Numbers are written as ``float.hex()`` has them, so that equal means equal to the last bit. ``samples`` are the ids this
    rank has consumed since the record before; where there are none, ``batch`` may be a digest of what it was given. ``lr``
    has the learning rate of every group of each optimizer, ``parts`` a digest of this rank's live state for each component,
    taken at this boundary.
    """

    step: int
    micro: int = 0
    samples: tuple[int, ...] | None = None
    batch: str | None = None
    loss: str | None = None
    metrics: dict[str, str] = {}
    lr: dict[str, tuple[str, ...]] = {}
    norm: str | None = None
    parts: dict[str, str] = {}
    time: float = msgspec.field(default_factory=clock.time)

    @property
    def place(self) -> tuple[int, int]:
        """What later means."""
        return self.step, self.micro


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="saved"):
    """How far the save of a step has come, on this rank."""

    step: int
    event: Literal["due", "staged", "committed", "failed"]
    time: float = msgspec.field(default_factory=clock.time)


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="ended"):
    """The end as it should be: ``stopped`` where a drill wanted it, or ``closed``. One that was killed has none."""

    step: int
    why: Literal["stopped", "closed"]
    time: float = msgspec.field(default_factory=clock.time)


Record = Began | Stepped | Saved | Ended


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank did in one start of the job. ``records`` are those after ``began``, as they were written."""

    began: Began
    records: tuple[Stepped | Saved | Ended, ...]

    @property
    def steps(self) -> tuple[Stepped, ...]:
        """What it trained, in order; parts of a step included."""
        return tuple(record for record in self.records if isinstance(record, Stepped))

    @property
    def last_step(self) -> int:
        """The last step boundary that it stood at."""
        return max((record.step for record in self.steps if not record.micro), default=self.began.step)

    def saved(self, event: str) -> int:
        """The newest step whose save came as far as ``event``; -1 for none."""
        steps = (record.step for record in self.records if isinstance(record, Saved) and record.event == event)
        return max(steps, default=-1)


@dataclass(frozen=True, slots=True)
class Trace:
    """All ranks of a run: for each rank its starts, oldest first."""

    folder: str
    ranks: dict[int, tuple[Run, ...]]

    def starts(self) -> list[dict[int, Run]]:
        """The starts of the job, oldest first, each with the run of every rank that came as far as to begin."""
        found: dict[int, dict[int, Run]] = {}
        for rank, runs in self.ranks.items():
            for run in runs:
                found.setdefault(run.began.incarnation, {})[rank] = run
        return [dict(sorted(found[incarnation].items())) for incarnation in sorted(found)]


class TraceWriter(Closing):
    """Appends one rank's records to its file in the trace's folder, which is made when it is missing.

    Every record has left the process when ``write`` returns: what kills the process later does not lose it. Any thread.

    Raises:
        OSError: the folder cannot be made, or the file not written.
    """

    def __init__(self, folder: Path | str, rank: int) -> None:
        path = Path(folder) / f"rank-{rank:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        # Not inherited by what the trainer starts; O_APPEND so that nothing is ever overwritten.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._cut_torn_line(path)

    def write(self, record: Record) -> None:
        """Appends a record.

        Raises:
            ClosedError: the writer is closed.
        """
        line = memoryview(msgspec.json.encode(record) + b"\n")
        with self._lock:
            if self._descriptor < 0:
                raise ClosedError("the trace is closed; nothing can be written to it any more")
            while line:
                line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _cut_torn_line(self, path: Path) -> None:
        """Removes what a kill has left of a line, so that the next one does not become a part of it."""
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)


def drill_orders() -> DrillOrders | None:
    """What a drill wants of this process; None when no drill has started it.

    Raises:
        UsageError: the variable is set, and is not what a drill would write.
    """
    text = os.environ.get(DRILL_VARIABLE)
    if text is None:
        return None
    try:
        orders = msgspec.json.decode(text, type=DrillOrders)
    except msgspec.MsgspecError as err:
        raise UsageError(
            f"{DRILL_VARIABLE} is set to {text[:200]!r}, which is not what `keepstep drill` sets ({err}); unset it"
        ) from err
    wrong = [name for name in ("root", "trace") if not getattr(orders, name)]
    if wrong or (orders.stop_at is not None and orders.stop_at < 1):
        raise UsageError(
            f"{DRILL_VARIABLE} is set to {text[:200]!r}: it needs a root, a trace and a stop_at of 1 or more; unset it"
        )
    return orders


def encode_orders(orders: DrillOrders) -> str:
    """What the variable is set to for a script that shall follow these orders."""
    return msgspec.json.encode(orders).decode()


def read_trace(folder: Path | str) -> Trace:
    """Everything in a trace's folder; no rank where nothing was written. A torn last line of a file is left out.

    Raises:
        CorruptError: a line that is not the last one is no record, or records come before a beginning; lists all.
    """
    ranks: dict[int, tuple[Run, ...]] = {}
    problems: list[str] = []
    for path in sorted(Path(folder).glob(_PATTERN)):
        try:
            rank = int(path.stem.removeprefix("rank-"))
            ranks[rank] = tuple(_runs(path))
        except ValueError as err:
            problems.append(f"{path}: {err}")
    if problems:
        raise CorruptError("the trace is damaged: " + "; ".join(problems[:8]))
    return Trace(str(folder), ranks)


def _runs(path: Path) -> Iterator[Run]:
    began: Began | None = None
    records: list[Stepped | Saved | Ended] = []
    for number, record in enumerate(_records(path.read_bytes()), 1):
        if isinstance(record, Began):
            if began is not None:
                yield Run(began, tuple(records))
            began, records = record, []
        elif began is None:
            raise ValueError(f"line {number} comes before anything began")
        else:
            records.append(record)
    if began is not None:
        yield Run(began, tuple(records))


def _records(data: bytes) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as err:
            raise ValueError(f"line {number} is no record: {err}") from err
