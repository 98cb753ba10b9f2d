"""Whoever tidies up is alone: no job of this machine, and no agent with a save in hand."""

from __future__ import annotations

import os
import signal

import pytest

from keepstep.agent import sole
from keepstep.agent.client import AgentClient
from keepstep.agent.node import Owner
from keepstep.agent.protocol import Abort, Begin, Join
from keepstep.agent.sole import sole_writer
from keepstep.errors import RunOwnedError
from keepstep.format.failure import Failure
from tests.helpers.agents import agent_of, wait_until


def begin(client, root, url):
    return client.begin(Begin("0badc0de", 7, 0, 1, str(url), 60.0, Join(), str(root)))


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["its own agent", "an agent of another root"])
def test_an_agent_with_a_save_in_hand_is_waited_for_by_a_person(tmp_path, elsewhere):
    """Also when the save goes into the run from outside: each place that is saved to has an agent of its own."""
    root = tmp_path / "run"
    root.mkdir()
    own = root / "step-00000007" if elsewhere else root
    client = AgentClient(str(own), 0, 60.0)
    decided = begin(client, own, root / "step-00000007")
    wait_until(lambda: [job.step for job in agent_of(own).jobs] == [7], what="a job")
    with (
        pytest.raises(RunOwnedError, match="still has the save of step 7 in hand; nothing was changed"),
        sole_writer(str(root)),
    ):
        pass
    with sole_writer(str(tmp_path / "other")):
        pass
    client.abort(Abort("0badc0de", 0, Failure("staging", "given up")))
    assert decided.result(30).failure is not None
    with sole_writer(str(root)):
        pass
    # It lets go of the root, whatever happened.
    Owner(str(root), patience_s=0.0).release()
    client.close()


@pytest.mark.slow
def test_an_agent_that_does_not_answer_may_have_a_save_in_hand(tmp_path, monkeypatch):
    client = AgentClient(str(tmp_path), 0, 60.0)
    monkeypatch.setattr(sole, "ANSWER_S", 0.2)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        with (
            pytest.raises(RunOwnedError, match="does not answer, and may have a save in hand"),
            sole_writer(str(tmp_path)),
        ):
            pass
    finally:
        os.kill(client.pid, signal.SIGCONT)
    client.close()
