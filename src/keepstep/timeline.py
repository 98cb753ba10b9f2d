"""Where the time of a save or a load goes: named spans and counters, handed in by whoever wants to know.

One Timeline belongs to one save or load. Spans may be opened from any thread; a span is wall-clock seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.failpoints import reach

__all__ = ["Timeline"]


class Timeline:
    """Sums seconds by span name. Time in an inner span is not counted again in the one around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._inner = threading.local()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside the block, but outside of spans within it, to ``seconds[name]``.

        The beginning of a span is a failpoint of that name.
        """
        reach(name)
        around = getattr(self._inner, "seconds", 0.0)
        self._inner.seconds = 0.0
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            own = took - self._inner.seconds
            self._inner.seconds = around + took
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + own
