"""When a save is due."""

from __future__ import annotations

import time
from dataclasses import dataclass

from keepstep.errors import UsageError
from keepstep.ranks import Ranks

__all__ = ["Every"]


@dataclass(frozen=True, slots=True)
class Every:
    """When a save is due: after this many steps, or this many seconds, whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuses intervals that mean nothing.

        Raises:
            UsageError: an interval that is not positive, or none at all.
        """
        given = [value for value in (self.steps, self.seconds) if value is not None]
        if not given or any(value <= 0 for value in given):
            raise UsageError(f"{self}: give steps, seconds or both, each above zero")

    def is_due(self, ranks: Ranks, step: int, since: float, deadline_s: float, *, micro: bool = False) -> bool:
        """Whether to save at this step. Collective when seconds count: clocks differ between ranks, one of them decides.

        Args:
            ranks: of the job.
            step: that has just ended.
            since: when the last save began, on the clock of ``time.monotonic``.
            deadline_s: how long to wait for other ranks, in seconds.
            micro: inside the next update, where steps do not count.
        """
        if self.steps is not None and not micro and step % self.steps == 0:
            return True
        if self.seconds is None:
            return False
        with ranks.phase("due", deadline_s) as phase:
            posted = phase.gather(b"")
            mine = b"1" if time.monotonic() - since >= self.seconds else b"0"
            return phase.broadcast(mine if posted is not None else None) == b"1"
