"""Something happens at a named point of a save or a load: in this process, while a with-block lasts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from keepstep.failpoints import EVENT, POINTS

_lock = threading.Lock()
_watchers: list[Callable[[str], None]] = []


def _at_point(event: str, args: tuple) -> None:
    if event == EVENT:
        for watcher in tuple(_watchers):
            watcher(args[0])


# An audit hook can never be taken away again: one for the process, which asks whoever watches now.
sys.addaudithook(_at_point)


@contextlib.contextmanager
def watching(watcher: Callable[[str], None]) -> Iterator[None]:
    """Calls ``watcher(point)`` at every point that any thread reaches."""
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)


class Planted(Exception):
    """What a test raises at a point: an error that nobody expects there."""


@contextlib.contextmanager
def failing_at(point: str, nth: int = 1, error: BaseException | None = None) -> Iterator[list[str]]:
    """Raises at the ``nth`` time that a point is reached; yields the list of all points reached."""
    assert point in POINTS
    seen: list[str] = []

    def watcher(name: str) -> None:
        seen.append(name)
        if name == point and seen.count(point) == nth:
            raise error or Planted(f"planted at {point}")

    with watching(watcher):
        yield seen
