"""Whether anything on this machine may be writing to a run, for whoever is about to tidy or repair it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from keepstep.agent.client import call_agent
from keepstep.agent.node import Owner, agent_names, listener_at, socket_path
from keepstep.agent.protocol import Status, StatusReport
from keepstep.errors import AgentError, RunOwnedError

__all__ = ["sole_writer"]

ANSWER_S = 5.0


@contextlib.contextmanager
def sole_writer(root: str) -> Iterator[None]:
    """While this is held, no job on this machine writes to the run or starts to: one that wants to waits, and is refused.

    What other machines do is not known here.

    Raises:
        RunOwnedError: a job that is alive owns the root, or an agent still has a save of it in hand, or does not say.
    """
    owner = Owner(root, patience_s=0.0)
    try:
        for path in agent_names():
            _refuse_busy(path, root)
        yield
    finally:
        owner.release()


def _refuse_busy(path: Path, root: str) -> None:
    try:
        report = call_agent(path, Status(), ANSWER_S)
    except AgentError as err:
        pid = listener_at(path)
        if pid and path == socket_path(root):
            raise RunOwnedError(
                f"{root}: its agent (process {pid}) does not answer, and may have a save in hand; nothing was changed"
            ) from err
        return
    if not isinstance(report, StatusReport):
        return
    here = Path(root).resolve()
    steps = sorted({job.step for job in report.jobs if Path(job.url).resolve().is_relative_to(here)})
    if steps:
        text = ", ".join(map(str, steps))
        raise RunOwnedError(
            f"{root}: an agent (process {report.pid}) still has the save of step {text} in hand; nothing was changed."
            " `keepstep agent status` shows it"
        )
