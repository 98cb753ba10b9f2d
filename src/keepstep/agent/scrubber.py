"""Has old steps read again while the agent has no save in hand, if some trainer asked for that.

In a process of its own, which gives way to everybody and is not missed when it dies: its memory and its waiting for the disk
are not the agent's. It is started by the name of its command, so nothing is imported from the floors above.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

__all__ = ["Scrubber"]

RATE_MIB_PER_S = 64
FAR_RATE_MIB_PER_S = 16
"""Of a store behind a network, which the training may need; and what is read of one may cost."""
_log = logging.getLogger("keepstep")


class Scrubber:
    """The scrubs of one root, one at a time. Off until it is asked for."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._every_s = 0.0
        self._due = 0.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, every_s: float) -> None:
        """A trainer wants each step to be read so often; 0 for one that wants nothing."""
        if every_s > 0:
            self._every_s = every_s

    def look(self, *, idle: bool) -> None:
        """Starts a round if one is due and the agent is idle. Never raises; what was found goes to the log."""
        with self._lock:
            if not idle or not self._every_s or self._process is not None or time.monotonic() < self._due:
                return
            self._due = time.monotonic() + self._every_s
            rate = FAR_RATE_MIB_PER_S if "://" in self._root else RATE_MIB_PER_S
            options = ["--once", "--every", f"{self._every_s / 3600:.9f}", "--rate", str(rate)]
            script = (
                f"import sys; sys.path[:0] = {[*filter(None, sys.path)]!r}; from keepstep.cli.main import main; main()"
            )
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", script, "scrub", self._root, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            except OSError as err:
                _log.warning("no scrub: %s", err)
                return
        threading.Thread(target=self._hear, args=(self._process,), name="keepstep-scrub", daemon=True).start()

    def close(self) -> None:
        """Ends a round that is going on; the next one goes on where it was."""
        with self._lock:
            self._every_s = 0.0
            if self._process is not None:
                # (What ends a job is ignored here, and so by whatever is started from here.)
                self._process.kill()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        lines = [] if process.stdout is None else [line.rstrip() for line in process.stdout]
        status = process.wait()
        with self._lock:
            self._process = None
        if status == 0:
            for line in lines:
                _log.info("scrub: %s", line)
        elif status > 0:
            _log.warning("scrub: it found damage, or could not read (exit status %d):\n%s", status, "\n".join(lines))
