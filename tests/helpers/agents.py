"""Agents as a test sees them from outside: found, asked, stopped, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from keepstep.agent.client import call_agent
from keepstep.agent.node import agent_names, socket_path
from keepstep.agent.protocol import Status, StatusReport, Stop
from keepstep.errors import AgentError


def agent_of(root: Path | str) -> StatusReport:
    """The agent of this root; fails when there is none."""
    return call_agent(socket_path(str(root)), Status())


def agents_running(root: Path | str) -> list[int]:
    """Every process that is an agent of this root, also one that does not listen yet, or no more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[1:2] == [b"-c"] and b"keepstep.agent" in words[2] and words[3] == os.fsencode(root):
                found.append(int(path.parent.name))
    return [pid for pid in found if is_alive(pid)]


def agents_below(folder: Path) -> list[StatusReport]:
    """Every agent whose root lies in the folder."""
    found = []
    for path in agent_names():
        with contextlib.suppress(AgentError):
            report = call_agent(path, Status())
            if Path(report.root).is_relative_to(folder.resolve()):
                found.append(report)
    return found


def stop_agents(folder: Path) -> None:
    """Ends every agent whose root lies in the folder, whatever it is doing."""
    for report in agents_below(folder):
        with contextlib.suppress(AgentError):
            call_agent(socket_path(report.root), Stop(now=True))


def kill_agent(root: Path | str) -> int:
    """Kills the agent of this root, and waits until it is gone. Returns what its process was."""
    pid = agent_of(root).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    return pid


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped; one whose threads still end holds its sockets."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def wait_until(holds, timeout_s: float = 20.0, what: str = "the condition") -> None:
    """Waits until ``holds()`` is true, looking often; fails after the timeout."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.005)
