"""When a job is asked to stop: all ranks stop at the same step boundary, with no collective added to the steps before it.

A signal sets a flag and does nothing else. At its next boundary the rank says so in the store, and every rank looks there
once a step. A rank that hears of it posts where it stands and waits a moment for the others. If they do not all come, it
posts that it may come to the next boundary, and goes on to it, because a step of somebody's may need it; there it waits
again. The last rank to hear of it finds all of these, and all stop at the newest.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import msgspec

from keepstep.errors import CommitTimeoutError, Preempted, UsageError
from keepstep.format.manifest import Lineage
from keepstep.ranks import Ranks
from keepstep.storage.base import Closing

__all__ = ["Preempt", "StopWatch", "watch_for", "what_fits"]

_log = logging.getLogger("keepstep")
PATIENCE_S = 0.25
MARGIN = 1.5
"""How much longer than usual a save may take that still has to fit."""
_GONE_ON = 1 << 32
"""Added to the count of ranks by one that goes on: if by then all have been counted, it waits for their decision instead."""


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
        self._end: int | None = None
        self._came_s: float | None = None
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
        if self._came_s is None:
            if self._asked:
                self._ranks.post(f"{self._key}/asked", b"1")
            elif not self._ranks.has(f"{self._key}/asked"):
                return False
            self._note_time()
        if self._end is None:
            self._end = self._meet(step)
        return self._end is not None and step >= self._end

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

    def leave(self, step: int, saved: int | None, reason: str) -> NoReturn:
        """Ends this rank's training as ``Preempt`` says.

        Raises:
            Preempted: always, unless an exit status was chosen.
        """
        if self.preempt.exit_status is not None:
            _log.warning("%s", reason)
            raise SystemExit(self.preempt.exit_status)
        raise Preempted(step, saved, reason)

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

    def _meet(self, step: int) -> int | None:
        """The boundary where all stop; None when they have not all heard of it yet, and this rank goes on."""
        ranks = self._ranks
        if self._came_s is None:
            self._came_s = time.monotonic()
            self._post(step)
            if ranks.count(f"{self._key}/count", 1) % _GONE_ON == ranks.world:
                # From here on nobody passes the boundary that it has posted, so all stop at the newest of them.
                stands = [int(ranks.read(f"{self._key}/at/{rank}")) for rank in range(ranks.world)]
                ranks.post(f"{self._key}/end", str(max(stands)).encode())
        end = self._verdict(PATIENCE_S)
        left_s = self._deadline_s - (time.monotonic() - self._came_s)
        if end is None and left_s > 0:
            self._post(step + 1)
            if ranks.count(f"{self._key}/count", _GONE_ON) % _GONE_ON < ranks.world:
                return None
            end = self._verdict(left_s)
        if end is None:
            raise CommitTimeoutError(
                f"the job was asked to stop, and not every rank came to a step boundary within {self._deadline_s:g} s",
                (),
            )
        return end

    def _post(self, step: int) -> None:
        self._ranks.post(f"{self._key}/at/{self._ranks.rank}", str(step).encode())

    def _verdict(self, patience_s: float) -> int | None:
        key = f"{self._key}/end"
        return int(self._ranks.read(key)) if self._ranks.wait(key, patience_s) else None


def watch_for(ranks: Ranks, preempt: Preempt | None, lineage: Lineage, deadline_s: float) -> StopWatch | None:
    """The watch of this start of the job, for whoever closes it; None when signals are left alone."""
    if preempt is None:
        return None
    return StopWatch(ranks, preempt, f"{lineage.run}/{lineage.incarnation}", deadline_s)


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
