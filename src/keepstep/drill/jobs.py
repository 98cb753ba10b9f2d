"""One start of the user's command: started in a session of its own, with orders, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keepstep.agent.client import call_agent
from keepstep.agent.node import listener_at, socket_path
from keepstep.agent.protocol import Stop
from keepstep.check.trace import DRILL_VARIABLE, DrillOrders, encode_orders
from keepstep.errors import AgentError, UnprovenError, UsageError
from keepstep.storage.base import Closing

__all__ = ["Job", "agent_pid", "kill_agent", "log_tail", "stop_agent"]

GONE_S = 20.0
SETTLE_S = 120.0
LOOK_S = 0.002
TAIL_BYTES, TAIL_LINES, TAIL_ERRORS = 1 << 16, 12, 4
ERROR_LINES = 21
"""Of one error: its first line, and what it lists below."""
_ERROR = re.compile(r"^(\[\w+\]: ?)?[\w.]*(Error|Exception|Exit)\b.*:")
_LISTED = re.compile(r"^(\[\w+\]: ?)? +- ")
_AGENT = b"keepstep.agent.server"


class Job(Closing):
    """A running command. Closing it ends every process that it has started, except the agent, which outlives trainers.

    Args:
        command: what to run; output and errors go to ``log``.
        orders: what is wanted of the script.
        environment: the variables of the process, to which the orders are added.
        log: a file, which is made.

    Raises:
        UsageError: there is no such command.
    """

    def __init__(
        self, command: Sequence[str], orders: DrillOrders, *, environment: Mapping[str, str], log: Path
    ) -> None:
        self._mark = f"{DRILL_VARIABLE}={encode_orders(orders)}".encode()
        variables = {**environment, DRILL_VARIABLE: encode_orders(orders)}
        with log.open("wb") as stream:
            try:
                # Its own session: Ctrl-C at the terminal is for the drill, which ends the job itself.
                self._process = subprocess.Popen(
                    list(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as err:
                raise UsageError(f"{command[0]!r} cannot be started: {err.strerror or err}") from err

    def poll(self) -> int | None:
        """The exit status of the command, negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL to all of it at once, and to what is still started meanwhile; returns when nothing of it runs any more.

        Raises:
            UnprovenError: something of it does not die.
        """
        end = time.monotonic() + GONE_S
        while True:
            pids = self._processes()
            if self._process.poll() is None:
                # First whoever would start others in place of those that die.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if self._process.poll() is not None and not pids:
                return
            if time.monotonic() > end:
                raise UnprovenError(f"processes {pids} of the script did not die within {GONE_S:g} s of SIGKILL")
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Ends what still runs. Idempotent."""
        self.kill()

    def _processes(self) -> list[int]:
        """All that it has started and that runs, wherever it has gone; launchers give every rank a session of its own.

        By the orders in their environment: a process whose parent has died is no longer found below it.
        """
        own = os.getpid()
        return [pid for pid in _pids() if pid not in (own, self._process.pid) and self._is_mine(pid)]

    def _is_mine(self, pid: int) -> bool:
        try:
            folder = Path("/proc", str(pid))
            if self._mark not in (folder / "environ").read_bytes().split(b"\0"):
                return False
            if _AGENT in (folder / "cmdline").read_bytes():
                return False
            return (folder / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except (OSError, IndexError):
            # It has ended, or it is somebody else's.
            return False


def _pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                yield int(entry.name)


def agent_pid(root: str) -> int:
    """The agent that works for this root; 0 when none does."""
    return listener_at(socket_path(root))


def kill_agent(root: str) -> int:
    """SIGKILL to the agent of this root; returns when it is gone. Its process, or 0 when there was none."""
    pid = agent_pid(root)
    if not pid:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + GONE_S
    while agent_pid(root) == pid and time.monotonic() < end:
        time.sleep(LOOK_S)
    return pid


def stop_agent(root: str, *, now: bool) -> None:
    """Has the agent of this root leave, when there is one; returns when it has. ``now``: whatever it is doing."""
    pid = agent_pid(root)
    if not pid:
        return
    with contextlib.suppress(AgentError):
        call_agent(socket_path(root), Stop(now=now), GONE_S if now else SETTLE_S)
    end = time.monotonic() + GONE_S
    while agent_pid(root) == pid and time.monotonic() < end:
        time.sleep(LOOK_S)
    if agent_pid(root) == pid:
        # It does not answer, and nobody needs what it has.
        kill_agent(root)


def log_tail(log: Path) -> str:
    """The last lines of a log; before them the errors of ranks, which launchers bury below words of their own."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    begins = [at for at, line in enumerate(lines[:-TAIL_LINES]) if _ERROR.match(line)][:TAIL_ERRORS]
    errors = [line for at in begins for line in _whole_error(lines[at : len(lines) - TAIL_LINES])]
    return "\n".join([*errors, *(["…"] if errors else []), *lines[-TAIL_LINES:]])


def _whole_error(lines: list[str]) -> list[str]:
    """The error that begins here, with the list that it ends in, if it does."""
    more = itertools.takewhile(_LISTED.match, lines[1:ERROR_LINES])
    return [lines[0], *more]
