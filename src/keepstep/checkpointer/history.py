"""What became of the saves of one Checkpointer: failures in a row, who was told, and how long a save usually takes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from keepstep.checkpointer.agree import Ready
from keepstep.checkpointer.pending import Pending

__all__ = ["History"]

REMEMBERED = 8


class History:
    """The saves in the order in which they began. ``newest`` is the newest step that is known to be committed."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self._open: deque[Pending] = deque()
        self._in_a_row = 0
        self._last: Pending | None = None
        self._staged_s: deque[float] = deque(maxlen=REMEMBERED)
        self._committed_s: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, pending: Pending) -> None:
        """One more has begun."""
        self._open.append(pending)

    def ended(self) -> Iterator[tuple[Pending, BaseException | None]]:
        """Those that have ended since the last call, with what made them fail."""
        while self._open and self._open[0].committed.done():
            pending = self._open.popleft()
            error = pending.committed.exception()
            if error is None:
                self._in_a_row = 0
                self.newest, self._last = pending.step, None
                self._staged_s.append(pending.staged_s)
                self._committed_s.append(pending.committed_s)
            else:
                self._in_a_row += 1
                self._last = pending
            yield pending, error

    def ready(self, tolerated: int) -> Ready:
        """What to tell the other ranks about failures."""
        last = self._last.committed.exception() if self._last is not None else None
        if self._in_a_row > tolerated and self._last is not None:
            self._last.seen = True
        return Ready(failed=self._in_a_row, failure="" if last is None else str(last), tolerated=tolerated)

    def usual_s(self) -> tuple[float, float]:
        """Seconds from boundary to staged and to committed, medians of the last few; zeros when none has ended yet."""
        if not self._staged_s:
            return 0.0, 0.0
        return statistics.median(self._staged_s), statistics.median(self._committed_s)

    def forgive(self) -> None:
        """Whoever had to know of the last failure knows."""
        if self._last is not None:
            self._last.seen = True

    def raise_last(self) -> None:
        """Raises what made the last save fail, unless it was raised before.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._last is not None and not self._last.seen:
            self._last.seen = True
            error = self._last.committed.exception()
            if error is not None:
                raise error
