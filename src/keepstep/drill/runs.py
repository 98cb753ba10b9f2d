"""One start of the user's command, watched from its beginning to its end, or to the moment at which it is killed."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.check.trace import DrillOrders
from keepstep.drill.jobs import Job, agent_pid, kill_agent, log_tail
from keepstep.drill.watch import Seen, Tail, Trigger

__all__ = ["Ended", "Progress", "Site", "Start", "run"]

POLL_S, KILL_POLL_S = 0.02, 0.001


@dataclass(frozen=True, slots=True)
class Site:
    """The folders of one scenario: a root and a trace of its own, and a log for each start."""

    folder: Path

    @property
    def root(self) -> Path:
        """In place of the script's own."""
        return self.folder / "root"

    @property
    def trace(self) -> Path:
        """Where all its starts write."""
        return self.folder / "trace"


@dataclass(frozen=True, slots=True)
class Start:
    """One start. ``stop_at`` as in DrillOrders; ``number`` counts the starts of the scenario from 1."""

    scenario: str
    number: int
    command: tuple[str, ...]
    site: Site
    environment: Mapping[str, str]
    timeout_s: float
    stop_at: int | None = None

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.site.folder / f"start-{self.number}.log"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the drill is: which start of which scenario, the step it stands at (-1: not yet begun), and what goes on."""

    scenario: str
    start: int
    step: int
    doing: str = "training"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a start ended. ``status`` is None where it was killed, by the plan or because it took too long.

    Steps are -1 for none: ``begin`` where it began, ``staged`` the newest whose copy was complete on all ranks,
    ``committed`` the newest that a rank knew to be committed. ``agent``, when the job was killed: ``none``, ``left`` alive
    or ``killed``.
    """

    log: Path
    status: int | None
    seconds: float
    timed_out: bool = False
    killed: str = ""
    agent: str = "none"
    begin: int = -1
    begun: bool = False
    step: int = -1
    staged: int = -1
    committed: int = -1

    @property
    def failure(self) -> str:
        """Why it is not as it should be; empty when it is."""
        if self.timed_out:
            return f"did not end within {self.seconds:.0f} s and was killed at step {max(0, self.step)}"
        if self.status:
            signal = f"was ended by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
            return f"{signal} at step {self.step}" if self.step >= 0 else f"{signal} before it began"
        return ""

    @property
    def tail(self) -> str:
        """The last lines of its log."""
        return log_tail(self.log)


def run(start: Start, trigger: Trigger | None = None) -> Generator[Progress, None, Ended]:
    """Runs one start, tells how it goes, and returns how it ended. Nothing of it runs any more then, except its agent.

    Raises:
        UsageError: there is no such command.
        CorruptError: what it writes to its trace is none.
    """
    start.site.trace.mkdir(parents=True, exist_ok=True)
    orders = DrillOrders(str(start.site.root), str(start.site.trace), start.stop_at)
    tail, seen, began_s = Tail(start.site.trace), Seen(), time.monotonic()
    status: int | None = None
    timed_out = killed = False
    agent = "none"
    yield Progress(start.scenario, start.number, -1, "starting")
    with Job(start.command, orders, environment=start.environment, log=start.log) as job:
        while (status := job.poll()) is None:
            if tail.look(seen):
                yield Progress(start.scenario, start.number, seen.step)
            now_s = time.monotonic()
            timed_out = now_s - began_s > start.timeout_s
            killed = trigger is not None and trigger.is_due(seen, now_s)
            if timed_out or killed:
                agent = _kill(job, orders.root, takes_agent=trigger is not None and trigger.takes_agent)
                break
            time.sleep(KILL_POLL_S if trigger else POLL_S)
    tail.look(seen)
    return Ended(
        start.log,
        status,
        time.monotonic() - began_s,
        timed_out=timed_out,
        killed=trigger.why if killed and trigger is not None else "",
        agent=agent,
        begin=seen.begin,
        begun=seen.begun,
        step=seen.step,
        staged=seen.newest("staged", all_ranks=True),
        committed=seen.newest("committed"),
    )


def _kill(job: Job, root: str, *, takes_agent: bool) -> str:
    """Kills the job, and its agent where that is wanted; what became of the agent."""
    pid = agent_pid(root)
    if pid and takes_agent:
        # Before the job: what it is writing now must stay as it is.
        kill_agent(root)
    job.kill()
    if takes_agent:
        # A trainer may have started another one in between.
        pid = kill_agent(root) or pid
    return "none" if not pid else "killed" if takes_agent else "left"
