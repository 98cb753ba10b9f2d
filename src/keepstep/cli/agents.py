"""``keepstep agent``: which agents of this user run on this machine, what they are doing, and how to have them leave."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.agent.client import call_agent
from keepstep.agent.node import agent_log, agent_names, listener_at, lock, socket_path
from keepstep.agent.protocol import Drain, JobStatus, Status, StatusReport, Stop
from keepstep.cli.places import shown_place
from keepstep.cli.words import age_words, plural, safe, size_words
from keepstep.commit.uploads import Tally
from keepstep.errors import AgentError, UsageError

__all__ = [
    "AgentLine",
    "Agents",
    "Silent",
    "Stopped",
    "Stopping",
    "print_agents",
    "print_stopped",
    "read_agents",
    "stop_agents",
]

STATUS_S = 5.0
SETTLE_S = 600.0
GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class CopiesLine:
    """The copies that an agent makes of its root's steps, at ``url``: which wait, how much that is, what went wrong last."""

    url: str
    waiting: tuple[int, ...]
    waiting_bytes: int
    trouble: str


@dataclass(frozen=True, slots=True)
class AgentLine:
    """One agent. ``jobs`` are the parts of saves that are not decided; sizes in bytes, times in seconds.

    ``copies`` is None where steps are not copied to another root.
    """

    pid: int
    root: str
    uptime_s: float
    trainers: tuple[int, ...]
    jobs: tuple[JobStatus, ...]
    arenas_bytes: int
    memory_bytes: int
    committed: int
    failed: int
    linger_s: float
    log: str
    copies: CopiesLine | None = None


@dataclass(frozen=True, slots=True)
class Silent:
    """An agent that takes calls and answers nothing: it is stopped, or stuck."""

    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class Agents:
    """All agents of this user on this machine; the fields are those of the JSON output.

    ``stale`` are sockets that agents have left which died.
    """

    agents: tuple[AgentLine, ...]
    stale: tuple[str, ...]
    silent: tuple[Silent, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """One agent that was told to leave, and what became of what it had in hand.

    ``committed`` and ``failed`` count saves that ended while it was waited for; ``undecided`` the parts it left behind.
    """

    pid: int
    root: str
    trainers: tuple[int, ...]
    committed: int
    failed: int
    undecided: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Stopping:
    """All of it; the fields are those of the JSON output. ``removed`` are sockets of agents that had died before."""

    exit_status: int
    stopped: tuple[Stopped, ...]
    removed: tuple[str, ...]
    silent: tuple[Silent, ...]


def read_agents() -> Agents:
    """Asks every agent of this user on this machine."""
    lines: list[AgentLine] = []
    stale: list[str] = []
    silent: list[Silent] = []
    for path in agent_names():
        try:
            report = _ask(path)
        except AgentError:
            if pid := listener_at(path):
                silent.append(Silent(pid, str(path)))
            else:
                stale.append(str(path))
        else:
            lines.append(_line(report))
    return Agents(tuple(sorted(lines, key=lambda line: line.root)), tuple(stale), tuple(silent))


def stop_agents(root: str | None, *, everything: bool, now: bool) -> Stopping:
    """Has one agent leave, or all, after what was submitted to it has been decided; with ``now`` at once.

    Raises:
        UsageError: neither a root nor all, or both; or a root that cannot be one.
    """
    place = None if root is None else shown_place(root)
    if (root is None) == (not everything):
        running = ", ".join(safe(line.root) for line in read_agents().agents) or "none is running"
        raise UsageError(f"name the root of one agent, or give --all, not both; agents: {running}")
    paths = agent_names() if place is None else [socket_path(place)]
    stopped: list[Stopped] = []
    removed: list[str] = []
    silent: list[Silent] = []
    for path in paths:
        try:
            stopped.append(_stop(path, now=now))
        except AgentError:
            if pid := listener_at(path):
                silent.append(Silent(pid, str(path)))
            elif _remove(path):
                removed.append(str(path))
    return Stopping(_exit_status(stopped, silent, root), tuple(stopped), tuple(removed), tuple(silent))


def print_agents(found: Agents, console: Console) -> None:
    """What people want to know of each, 80 columns and more."""
    for line in found.agents:
        console.print(f"agent {line.pid} of {safe(line.root)}", soft_wrap=True)
        trainers = ", ".join(map(str, line.trainers))
        stays = f"none; it leaves {line.linger_s:g} s after the last one, when nothing is left to do"
        rows = {
            "up": age_words(line.uptime_s),
            "trainers": trainers or stays,
            "memory": f"{size_words(line.arenas_bytes)} of arenas, {size_words(line.memory_bytes)} of its own",
            "saves": f"{line.committed:,} committed, {line.failed:,} failed",
        }
        if line.copies is not None:
            rows["copies"] = _copies_words(line.copies)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in rows.items():
            grid.add_row(f"  {name}", text)
        console.print(grid)
        console.print(f"  log       {safe(line.log)}", soft_wrap=True)
        for job in line.jobs:
            console.print(f"  step {job.step}, rank {job.rank}: {_progress(job)}", soft_wrap=True)
    for path in found.stale:
        console.print(
            f"stale: {safe(path)}; its agent has died, and the next one of that root replaces it", soft_wrap=True
        )
    for one in found.silent:
        console.print(f"silent: {safe(one.socket)}; process {one.pid} takes calls and does not answer", soft_wrap=True)
    if not (found.agents or found.stale or found.silent):
        console.print("no agent of this user runs on this machine", soft_wrap=True)


def print_stopped(stopping: Stopping, root: str | None, console: Console) -> None:
    """A line for each agent."""
    for one in stopping.stopped:
        ended = [f"{count:,} {what}" for count, what in ((one.committed, "committed"), (one.failed, "FAILED")) if count]
        while_waiting = f"; while it was waited for: {', '.join(ended)}" if ended else ""
        left = f"; {plural(one.undecided, 'part')} of saves left undecided" if one.undecided else ""
        verb = "stopped" if one.gone else "told to leave, but still there:"
        console.print(f"{verb} agent {one.pid} of {safe(one.root)}{while_waiting}{left}", soft_wrap=True)
        if one.trainers:
            console.print(
                f"  {plural(len(one.trainers), 'trainer')} used it; the next save starts another one", soft_wrap=True
            )
    for path in stopping.removed:
        console.print(f"removed the stale socket {safe(path)}", soft_wrap=True)
    for silent in stopping.silent:
        console.print(f"agent {silent.pid} at {safe(silent.socket)} does not answer; end that process", soft_wrap=True)
    if not (stopping.stopped or stopping.removed or stopping.silent):
        console.print(f"no agent of {safe(root)} runs here" if root else "no agent runs here", soft_wrap=True)


def _ask(path: Path) -> StatusReport:
    report = call_agent(path, Status(), STATUS_S)
    if not isinstance(report, StatusReport):
        raise AgentError(f"the agent at {path} gave another answer than asked for")
    return report


def _line(report: StatusReport) -> AgentLine:
    return AgentLine(
        report.pid,
        report.root,
        max(0.0, time.time() - report.started),
        report.trainers,
        tuple(sorted(report.jobs, key=lambda job: (job.step, job.rank))),
        report.arenas_bytes,
        report.memory_bytes,
        report.committed,
        report.failed,
        report.linger_s,
        str(agent_log(report.root, make=False)),
        None if report.copies is None else _copies_line(report.copies),
    )


def _copies_line(tally: Tally) -> CopiesLine:
    steps = tuple(step for step, _ in tally.waiting)
    return CopiesLine(tally.url, steps, sum(size for _, size in tally.waiting), tally.trouble)


def _copies_words(copies: CopiesLine) -> str:
    if not copies.waiting:
        return f"all at {safe(copies.url)}"
    trouble = f"; the last try: {safe(copies.trouble)}" if copies.trouble else ""
    behind = f"{plural(len(copies.waiting), 'step')} ({size_words(copies.waiting_bytes)}) behind at {safe(copies.url)}"
    return behind + trouble


def _progress(job: JobStatus) -> str:
    if job.state != "writing" or not job.total_bytes:
        return f"{job.state}, {age_words(job.age_s)}"
    share = 100 * job.done_bytes // job.total_bytes
    return f"writing, {size_words(job.done_bytes)} of {size_words(job.total_bytes)} ({share} %), {age_words(job.age_s)}"


def _stop(path: Path, *, now: bool) -> Stopped:
    before = after = _ask(path)
    if now:
        undecided = len(before.jobs)
    else:
        undecided = call_agent(path, Drain(SETTLE_S), SETTLE_S + STATUS_S).left
        after = _ask(path)
    with contextlib.suppress(AgentError):
        # It may have left by itself meanwhile.
        call_agent(path, Stop(now=now), SETTLE_S + STATUS_S)
    return Stopped(
        before.pid,
        before.root,
        after.trainers,
        after.committed - before.committed,
        after.failed - before.failed,
        undecided,
        _is_gone(path, before.pid),
    )


def _is_gone(path: Path, pid: int) -> bool:
    """Whether it has left within a few seconds."""
    # By its socket: where nobody reaps it, its process stays as a zombie.
    end = time.monotonic() + GONE_S
    while listener_at(path) == pid:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _remove(path: Path) -> bool:
    """Removes the socket of an agent that died; under the lock, so that no new one has taken its place."""
    with lock():
        if path.exists() and not listener_at(path):
            path.unlink(missing_ok=True)
            return True
    return False


def _exit_status(stopped: list[Stopped], silent: list[Silent], root: str | None) -> int:
    """0 when everything that was submitted is committed and everybody has left."""
    if silent or any(one.failed or one.undecided or not one.gone for one in stopped):
        return AgentError.exit_status
    return 3 if root is not None and not stopped else 0
