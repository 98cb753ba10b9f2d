"""A save in progress: two futures, and the waiting for them that must not be forgotten."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from keepstep.errors import CheckpointError, CommitTimeoutError

if TYPE_CHECKING:
    from keepstep.checkpointer.saving import Saved

__all__ = ["SAVES", "Pending"]

EXIT_S = 600.0
_log = logging.getLogger("keepstep")
SAVES: weakref.WeakSet[Pending] = weakref.WeakSet()
"""The saves of this process that somebody still holds; those in progress are held by whoever works on them."""


class Pending:
    """A save that goes on in the background.

    ``staged`` is done when nothing live is read any more: everything may be changed. ``committed`` is done when the step is
    durable and exists; its result is a ``Saved``. When the save fails, on whichever rank, both carry the exception with the
    cause, on every rank (``staged`` only when it was not done before).

    ``step`` and ``url`` say what is saved and where; ``staged_s`` and ``committed_s`` how long it took from the boundary, in
    seconds; ``bytes_written`` how much of it this rank has to write. The futures may be waited for on any thread.
    """

    def __init__(self, step: int, url: str) -> None:
        self.step = step
        self.url = url
        self.staged: Future[None] = Future()
        self.committed: Future[Saved] = Future()
        self.seen = self.logged = False
        self.bytes_written = 0
        self.staged_s = self.committed_s = 0.0
        self._began = time.monotonic()
        self._lock = threading.RLock()
        SAVES.add(self)

    @property
    def may_appear(self) -> bool:
        """Whether a save that failed may still be committed by whoever hangs: then nothing of it may be tidied up."""
        error = self.committed.exception() if self.committed.done() else None
        return isinstance(error, CommitTimeoutError)

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Waits until nothing live is read any more. Not collective.

        Raises:
            CheckpointError: the save has failed before that.
            CommitTimeoutError: it is not staged yet.
        """
        self._wait(self.staged, timeout_s, "staged")

    def wait_committed(self, timeout_s: float | None = None) -> Saved:
        """Waits until the step is durable and committed. Not collective.

        Raises:
            CheckpointError: the save has failed; nothing of it was committed unless the message says otherwise.
            CommitTimeoutError: it is not committed yet; it goes on.
        """
        self._wait(self.committed, timeout_s, "committed")
        return self.committed.result()

    def copied(self) -> None:
        """Nothing live is read any more, and the part is with whoever finishes it. Any thread, like the two below."""
        with self._lock:
            if not self.staged.done():
                self.staged_s = time.monotonic() - self._began
                self.staged.set_result(None)

    def succeed(self, saved: Saved) -> None:
        """The step is committed."""
        self.copied()
        with self._lock:
            if not self.committed.done():
                self.committed_s = time.monotonic() - self._began
                self.committed.set_result(saved)

    def fail(self, error: CheckpointError) -> None:
        """Ends both futures with this error, as far as they are open."""
        with self._lock:
            for future in (self.staged, self.committed):
                if not future.done():
                    future.set_exception(error)

    def _wait(self, future: Future[None] | Future[Saved], timeout_s: float | None, what: str) -> None:
        try:
            error = future.exception(timeout_s)
        except TimeoutError as err:
            raise CommitTimeoutError(
                f"step {self.step} in {self.url} was not {what} within {timeout_s:g} s; the save goes on", ()
            ) from err
        if error is not None:
            self.seen = True
            raise error

    def __repr__(self) -> str:
        """Step, place and how far it is."""
        if self.committed.done():
            state = "failed" if self.committed.exception() else "committed"
        else:
            state = "staged" if self.staged.done() else "staging"
        return f"Pending(step={self.step}, url={self.url!r}, {state})"


def _at_exit() -> None:
    """The interpreter ends: what was begun is finished first, and what failed is said."""
    for pending in list(SAVES):
        try:
            error = pending.committed.exception(EXIT_S)
        except TimeoutError:
            error = CommitTimeoutError("it did not end before the interpreter had to", ())
        if error is not None and not (pending.seen or pending.logged):
            pending.seen = True
            _log.error("the save of step %d to %s failed: %s", pending.step, pending.url, error)


# Before the interpreter stops threads: a save in this process still needs some.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
# A forked child, such as a data loader's worker, has no saves of its own to wait for.
os.register_at_fork(after_in_child=SAVES.clear)
