"""Killed at random moments, again and again in one folder: trainers, one of them or all, their agent, or everything."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from keepstep.agent.node import listener_at, socket_path
from tests.conftest import SEED
from tests.crash.campaign import DEADLINE_S, TIMES, Campaign, quick_folder
from tests.crash.test_kill import warm
from tests.helpers.agents import is_alive, wait_until
from tests.helpers.jobs import alone

FOREVER = 100_000


def killed_at_random(folder, world, background, rounds, seed):
    warm(folder)
    dice = random.Random(seed)
    campaign = Campaign(folder / "campaign", world, background)
    began = time.monotonic()
    campaign.counts(6, 0)
    six_saves_s = time.monotonic() - began
    agents = 0
    for round_ in range(rounds):
        job = campaign.start(FOREVER)
        job.wait_ready()
        time.sleep(dice.uniform(0.0, six_saves_s))
        victims = list(range(world))
        if background == "agent" and round_ % 3:
            agents += killed_agent(campaign.root)
            if round_ % 3 == 1:
                # Training goes on, with another agent: it commits again.
                wait_for_progress(campaign, job)
        elif world > 1 and round_ % 8 == 7:
            victims = [dice.randrange(world)]
        job.kill(*victims)
        ends = job.wait(DEADLINE_S + 20)
        for rank, end in enumerate(ends):
            assert rank in victims or end.error, f"rank {rank} went on without rank {victims}"
        # A job that was being greeted by its agent at that moment could not start, and has said so; and while a new agent
        # is started, ranks may come too late for each other.
        ended = ("the agent", "did not arrive within")
        told = [r for r in victims if background == "agent" and any(text in ends[r].error for text in ended)]
        campaign.died(ends, *(rank for rank in victims if rank not in told))
        campaign.check()
    return campaign.kills + agents, agents, campaign.last


def killed_agent(root):
    """Whether there was an agent to be killed, which is gone now."""
    pid = listener_at(socket_path(str(root)))
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), what="the agent's death")
    return bool(pid)


def wait_for_progress(campaign, job):
    """The next commit that every rank is told of."""
    notes = [campaign.notes / f"committed-{rank}" for rank in range(campaign.world)]

    def stamps():
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in notes]

    before = stamps()

    def is_over():
        job.wait_ready()  # looks who has ended
        return bool(job.ends) or all(new > old for new, old in zip(stamps(), before, strict=True))

    wait_until(is_over, what="a commit after the death of the agent")


@pytest.mark.case(69)
@pytest.mark.case(72)
@pytest.mark.slow
@pytest.mark.timeout(240 * TIMES)
@pytest.mark.parametrize(
    ("world", "background", "rounds"),
    [(1, "thread", 20), (1, "agent", 14), (2, "off", 12), (2, "agent", 12), (4, "thread", 6), (4, "agent", 6)],
)
def test_killed_at_random(rank_pool, world, background, rounds):
    print(f"seed {SEED}")
    with quick_folder() as folder:
        arguments = (folder, world, background, rounds * TIMES, SEED)
        ((kills, agents, last),) = rank_pool(1)(alone, killed_at_random, *arguments, timeout_s=220 * TIMES)
    print(f"{kills} kills, {agents} of them of agents, up to step {last}")
    # (Of agents as well; a job that has ended by itself before its kill is none.)
    assert kills >= rounds * TIMES
    assert (agents > rounds * TIMES / 3) == (background == "agent")
    assert last > rounds * TIMES / 2
