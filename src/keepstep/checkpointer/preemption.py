"""When a job is asked to stop: all ranks stop at the same step boundary, with no collective added to the steps before it.

A signal sets a flag and does nothing else. At its next boundary the rank says so in the store, and every rank looks there
once a step. A rank that hears of it posts where it stands and waits a moment for the others; if they all come, they stop
at the newest of these boundaries, else, because a step of somebody's may need the others, at the one after it.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec

from keepstep.errors import CommitTimeoutError, UsageError
from keepstep.ranks import Ranks
from keepstep.storage.base import Closing

__all__ = ["Preempt", "StopWatch", "what_fits"]

PATIENCE_S = 0.25
MARGIN = 1.5
"""How much longer than usual a save may take that still has to fit."""
_GONE_ON = 1 << 32
"""Added to the count of ranks by one that waits no longer: the order of additions decides what all ranks do."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """What to do when the job is asked to stop.

    Args:
        signals: by name. Their handlers are replaced while the Checkpointer is open.
        grace_s: how long after the first signal the job may still run; None for as long as a save takes. What fits is
            chosen from how long earlier saves took: a committed save, or one that the agent commits after the trainer has
            gone, or only waiting for the save in progress.
        exit_status: leave with this status instead of raising Preempted.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    grace_s: float | None = None
    exit_status: int | None = None

    def __post_init__(self) -> None:
        """Refuses what means nothing.

        Raises:
            UsageError: an unknown signal, or no time at all.
        """
        unknown = [name for name in self.signals if not hasattr(signal, name)]
        if unknown or not self.signals or (self.grace_s is not None and self.grace_s <= 0):
            raise UsageError(f"Preempt: signals {unknown or self.signals}, grace_s={self.grace_s} mean nothing")


class StopWatch(Closing):
    """Watches for signals, and finds the boundary at which all ranks stop.

    Args:
        ranks: of the job.
        preempt: which signals, and what is done about them.
        name: of this start of the job, the same on every rank.
        deadline_s: how long ranks wait for each other, in seconds.

    Raises:
        UsageError: made on another thread than the main one, on which alone Python handles signals.
    """

    def __init__(self, ranks: Ranks, preempt: Preempt, name: str, deadline_s: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("preempt= needs a Checkpointer that is made on the main thread: others get no signals")
        self.preempt = preempt
        self.since: float | None = None
        self._ranks = ranks
        self._key = f"keepstep/stop/{name}"
        self._deadline_s = deadline_s
        self._asked = False
        self._posted = -1
        self._before: dict[int, Any] = {}
        for each in preempt.signals:
            number = getattr(signal, each)
            self._before[number] = signal.signal(number, self._on_signal)

    def is_over(self, step: int) -> bool:
        """Whether all ranks stop at this boundary. Call it once at every boundary; not collective.

        Raises:
            CommitTimeoutError: ranks did not come to a boundary before the deadline.
        """
        if self._ranks.world == 1:
            return self._asked
        if self._posted < 0:
            if self._asked:
                self._ranks.post(f"{self._key}/asked", b"1")
            elif not self._ranks.has(f"{self._key}/asked"):
                return False
            self._note_time()
            return self._first(step)
        end = self._verdict(self._deadline_s)
        if end is None:
            raise CommitTimeoutError(
                f"the job was asked to stop, and not every rank came to a step boundary within {self._deadline_s:g} s",
                (),
            )
        return step >= end

    def left_s(self) -> float | None:
        """Seconds until the job may be killed, as far as this rank knows; None when there is no limit."""
        if self.preempt.grace_s is None:
            return None
        return self.preempt.grace_s - (time.monotonic() - (self.since or time.monotonic()))

    def plan(self, step: int, usual_s: tuple[float, float], *, outlives: bool) -> tuple[str, float | None]:
        """What all ranks do at the boundary where they stop, and the seconds left; see ``what_fits``. Collective."""
        with self._ranks.phase(f"stop at step {step}", self._deadline_s) as phase:
            posted = phase.gather(msgspec.json.encode((self.left_s(), *usual_s)))
            answer = b""
            if posted is not None:
                heard = [msgspec.json.decode(raw, type=tuple[float | None, float, float]) for raw in posted]
                answer = msgspec.json.encode(what_fits(heard, outlives))
            return msgspec.json.decode(phase.broadcast(answer), type=tuple[str, float | None])

    def close(self) -> None:
        """Gives the signals back to whoever handled them before. Idempotent."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._note_time()

    def _note_time(self) -> None:
        if self.since is None:
            self.since = time.monotonic()

    def _first(self, step: int) -> bool:
        """Posts where this rank stands; stops here if the others are there too."""
        ranks = self._ranks
        ranks.post(f"{self._key}/at/{ranks.rank}", str(step).encode())
        self._posted = step
        count = ranks.count(f"{self._key}/count", 1)
        if count % _GONE_ON == ranks.world:
            # The last one to come decides: it alone knows whether somebody has gone on before.
            stands = [int(ranks.read(f"{self._key}/at/{rank}")) for rank in range(ranks.world)]
            end = max(stands) + (1 if count >= _GONE_ON else 0)
            ranks.post(f"{self._key}/end", str(end).encode())
        found = self._verdict(PATIENCE_S)
        if found is None:
            if ranks.count(f"{self._key}/count", _GONE_ON) % _GONE_ON < ranks.world:
                return False
            found = self._verdict(self._deadline_s)
        return found is not None and step >= found

    def _verdict(self, patience_s: float) -> int | None:
        key = f"{self._key}/end"
        return int(self._ranks.read(key)) if self._ranks.wait(key, patience_s) else None


def what_fits(heard: list[tuple[float | None, float, float]], outlives: bool) -> tuple[str, float | None]:
    """What all ranks do with the time that is left: ``commit`` a save, ``stage`` one, or ``leave`` as it is. Pure.

    Args:
        heard: of each rank the seconds left (None for no limit), and those that staging and committing usually take.
        outlives: whether what is staged is committed although the trainer is gone.

    Returns:
        The choice, and the seconds left.
    """
    limits = [left for left, _, _ in heard if left is not None]
    if not limits:
        return "commit", None
    left_s = max(0.0, min(limits))
    stage_s = MARGIN * max(stage for _, stage, _ in heard)
    commit_s = MARGIN * max(commit for _, _, commit in heard)
    if commit_s <= left_s:
        return "commit", left_s
    if outlives and stage_s <= left_s:
        return "stage", left_s
    return "leave", left_s
