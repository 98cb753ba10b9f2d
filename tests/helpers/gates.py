"""Places where a save stops until a test lets it go on: in the storage, or in the copy that goes on while training does."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from keepstep.state import fence

WAIT_S = 30.0


class Gate:
    """Stops whoever comes to it while it is closed. Made closed; ``reached`` is set when somebody has come."""

    def __init__(self, *operations: str, name: str = "") -> None:
        self.operations, self.name = operations, name
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        """As ``before`` of a Watched storage: stops these operations on names that contain ``name``."""
        if operation in self.operations and self.name in name:
            self.stop()

    def stop(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S), "nobody opened the gate"

    def wait_reached(self) -> None:
        assert self.reached.wait(WAIT_S), "nobody came to the gate"

    def open(self) -> None:
        self.opened.set()

    def close(self) -> None:
        self.opened.clear()
        self.reached.clear()


@contextlib.contextmanager
def slow_copies(monkeypatch) -> Iterator[Gate]:
    """A gate in front of every copy that is made after the boundary; those at the boundary pass. Open at the end."""
    gate, copy = Gate(), ctypes.memmove

    def stopped(*args):
        if threading.current_thread().name.startswith("keepstep-copy"):
            gate.stop()
        return copy(*args)

    monkeypatch.setattr("keepstep.move.staging.ctypes.memmove", stopped)
    try:
        yield gate
    finally:
        gate.open()


def is_waiting() -> bool:
    """Whether training stands still at the fence now."""
    return any(hold._since is not None for hold in tuple(fence._holds))


@contextlib.contextmanager
def waits_for(gate: Gate) -> Iterator[None]:
    """What runs inside must wait at the fence: only when it does the gate opens. Fails when it never waited."""
    waited, over = threading.Event(), threading.Event()

    def open_when_waited_for() -> None:
        while not over.wait(0.001):
            if is_waiting():
                waited.set()
                gate.open()
                return

    watcher = threading.Thread(target=open_when_waited_for)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert waited.is_set(), "nothing waited at the fence"
