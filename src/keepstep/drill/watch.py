"""What a running job has written to its trace so far, and whether the moment has come to kill it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.check.trace import Began, Record, Saved, Stepped
from keepstep.drill.plan import Moment, target_step
from keepstep.errors import CorruptError

__all__ = ["Seen", "Tail", "Trigger"]


class Seen:
    """What is known of one start of the job, from the records of its ranks so far."""

    def __init__(self) -> None:
        self.began: dict[int, Began] = {}
        self.step = -1
        self._events: dict[tuple[str, int], set[int]] = {}

    @property
    def begun(self) -> bool:
        """Whether every rank has begun."""
        return bool(self.began) and len(self.began) == max(one.world for one in self.began.values())

    @property
    def begin(self) -> int:
        """The step it began at; -1 when it did not."""
        return max((one.step for one in self.began.values()), default=-1)

    def add(self, rank: int, record: Record) -> None:
        """Takes note of one more record."""
        if isinstance(record, Began):
            self.began[rank] = record
            self.step = max(self.step, record.step)
        elif isinstance(record, Stepped):
            self.step = max(self.step, record.step)
        elif isinstance(record, Saved):
            self._events.setdefault((record.event, record.step), set()).add(rank)

    def newest(self, event: str, *, all_ranks: bool = False) -> int:
        """The newest step whose save has come this far on a rank, or on all, and has not failed; -1 for none."""
        needed = len(self.began) if all_ranks else 1
        return max(
            (
                step
                for (name, step), ranks in self._events.items()
                if name == event and len(ranks) >= needed and ("failed", step) not in self._events
            ),
            default=-1,
        )


class Tail:
    """The trace's files from where they end now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # A torn line at the end will be cut off by whoever writes next.
        self._read = {path: path.read_bytes().rfind(b"\n") + 1 for path in self._paths()}
        self._decoder = msgspec.json.Decoder(Record)

    def look(self, seen: Seen) -> bool:
        """Adds what is new to ``seen``; whether there was anything.

        Raises:
            CorruptError: a line is no record.
        """
        news = False
        for path in self._paths():
            begin = self._read.get(path, 0)
            if path.stat().st_size <= begin:
                continue
            with path.open("rb") as stream:
                stream.seek(begin)
                data = stream.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = begin + whole
            for line in data[:whole].splitlines():
                news = True
                try:
                    seen.add(int(path.stem.removeprefix("rank-")), self._decoder.decode(line))
                except (msgspec.MsgspecError, ValueError) as err:
                    raise CorruptError(f"{path}: {line[:80]!r} is no record of a trace: {err}") from err
        return news

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("rank-*.jsonl"))


class Trigger:
    """Says when one start of the job is to be killed.

    Args:
        moment: what is wanted.
        last: the step at which every run ends.
        left: how many kills are to come, this one included.
        dues: the steps at which the reference saved.
        pace: how long the reference's steps and its saves took, in seconds.
        first: whether nothing was committed yet. Then the first save is left to finish: a run of which there is nothing but
            an attempt asks a person before it starts from zero beside it, and this drill is not one.
    """

    def __init__(
        self, moment: Moment, *, last: int, left: int, dues: tuple[int, ...], pace: tuple[float, float], first: bool
    ) -> None:
        self._moment, self._last, self._left, self._dues = moment, last, left, dues
        self._first = first
        self._step_s, self._save_s = pace
        self._at: float | None = None
        self.why = ""
        self.takes_agent = moment.agent

    def is_due(self, seen: Seen, now_s: float) -> bool:
        """Whether now is the moment. Call it often."""
        if self._at is None and seen.begun:
            self._aim(seen, now_s)
        if self._at is None or now_s < self._at:
            return False
        if not self._is_safe(seen):
            self.why = "once the first step was committed"
            return False
        return True

    def _is_safe(self, seen: Seen) -> bool:
        """Whether something is committed, or nothing was begun and nothing is about to be."""
        if not self._first or seen.newest("committed") >= 0:
            return True
        return seen.newest("due") < 0 and not (self._dues and seen.step >= self._dues[0] - 1)

    def _aim(self, seen: Seen, now_s: float) -> None:
        """Sets the time, once what was waited for has come."""
        dues = self._dues[1:] if self._first else self._dues
        kind, step = target_step(self._moment, begin=seen.begin, last=self._last, left=self._left, dues=dues)
        due = seen.newest("due")
        if kind == "save" and due >= step:
            self._at, self.why = now_s + self._moment.late * self._save_s, f"inside the save of step {due}"
        elif kind == "staged" and (staged := seen.newest("staged", all_ranks=True)) >= step:
            self._at, self.why = now_s, f"when the copy of step {staged} was complete"
        elif kind == "step" and seen.step >= step:
            self._at, self.why = now_s + self._moment.late * self._step_s, f"after step {seen.step}"
        elif seen.step >= self._last - 1:
            # It would end by itself: better now than not at all.
            self._at, self.why = now_s, f"after step {seen.step}"
