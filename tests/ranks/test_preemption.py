"""A job that is asked to stop: all ranks stop at the same step, it is committed, and the steps before cost nothing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import keepstep as ks
from keepstep.checkpointer.preemption import what_fits
from tests.agent.gate import WRITING, Gate
from tests.conftest import SEED
from tests.helpers.agents import wait_until
from tests.helpers.jobs import Job, alone
from tests.helpers.storages import Watched
from tests.ranks.calls import attempt, group_works
from tests.ranks.test_traffic import counted

STEPS = 4000
TERM = ks.Preempt(signals=("SIGTERM",))


@dataclass(frozen=True)
class Loop:
    """A training loop: an all-reduce every ``sync`` steps (0: never), and seconds a step takes, by rank."""

    sync: int = 1
    pace_s: tuple[float, ...] = (0.0,)
    steps: int = STEPS


@dataclass(frozen=True)
class Stop:
    """How the loop ended on one rank: the step it stopped at, the step that is saved, and why."""

    step: int
    saved: int | None
    reason: str


def state_of(rank):
    return ks.TrainState(weights={"w": torch.zeros(8)}, mine=ks.per_rank({"rank": rank}, "same_rank"))


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


def train(rank, ckpt, state, loop, when=lambda step: None):
    """Trains until the job is asked to stop. ``when`` is told of every step, in the middle of it."""
    pace_s = loop.pace_s[rank % len(loop.pace_s)]
    try:
        for step in range(state.progress.step + 1, loop.steps + 1):
            if loop.sync and step % loop.sync == 0:
                total = torch.ones(4)
                dist.all_reduce(total)
                assert total[0] == dist.get_world_size()
            when(step)
            time.sleep(pace_s)
            state["weights"]["w"].fill_(step)
            ckpt.step(loss=float(step))
    except ks.Preempted as stop:
        return Stop(stop.step, stop.saved, str(stop))
    return None


def preempted(rank, folder, loop, asked, options):
    """``asked`` are the ranks that get the signal, in their step 7; afterwards a new job goes on from there."""
    state = state_of(rank)
    with ks.Checkpointer(folder, state, **{"preempt": TERM, "deadline_s": 20} | options) as ckpt:
        stop = train(rank, ckpt, state, loop, lambda step: ask() if step == 7 and rank in asked else None)
        assert stop is not None, "the loop was not stopped"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert group_works()
    fresh = state_of(-1)
    with ks.Checkpointer(folder, fresh, **options) as ckpt:
        assert ckpt.restore().step == stop.step == stop.saved
    assert fresh["weights"]["w"].tolist() == [float(stop.step)] * 8
    assert fresh["mine"].value == {"rank": rank}
    return stop


def stops_of(rank, folder, cases):
    return [preempted(rank, f"{folder}/{number}", *case) for number, case in enumerate(cases)]


THREAD = {"background": "thread"}
OFF = {"background": "off"}
SPEEDS = (0.001, 0.02, 0.003, 0.008)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_stop_at_one_step_which_is_committed(rank_pool, tmp_path, world):
    everybody = tuple(range(world))
    cases = [
        (Loop(), (0,), {}),
        (Loop(), (world - 1,), THREAD),
        (Loop(), everybody, THREAD),
        (Loop(), (world - 1,), OFF),
        (Loop(), everybody, THREAD | {"every": ks.Every(steps=1)}),
        (Loop(), (1,), THREAD | {"every": ks.Every(seconds=0.02), "when_busy": "skip"}),
        (Loop(sync=0, pace_s=SPEEDS), (0,), THREAD),
        (Loop(sync=0, pace_s=SPEEDS), (1,), THREAD),
        (Loop(sync=0, pace_s=SPEEDS), everybody, THREAD),
        (Loop(sync=5, pace_s=SPEEDS), (1,), THREAD),
    ]
    results = rank_pool(world)(stops_of, str(tmp_path), cases)
    for case, stops in zip(cases, zip(*results, strict=True), strict=True):
        assert len(set(stops)) == 1, (case, stops)
        assert stops[0].step >= 7, case
        assert stops[0].reason == f"asked to stop at step {stops[0].step}; it is committed", case
        if case[0].sync == 1:
            # Nobody goes on for longer than it takes to hear of it.
            assert stops[0].step <= 9, (case, stops)


def one_ahead(rank, folder):
    """Ranks that meet every ten steps only: one waits for the other there, and that one is asked to stop long before."""
    state = state_of(rank)
    ahead = Path(folder, "ahead")

    def when(step):
        if rank == 1 and step == 19:
            ahead.touch()
        if rank == 0 and step == 13:
            wait_until(ahead.exists)
            ask()

    with ks.Checkpointer(f"{folder}/run", state, background="thread", preempt=TERM, deadline_s=20) as ckpt:
        began = time.monotonic()
        stop = train(rank, ckpt, state, Loop(sync=10), when)
        took_s = time.monotonic() - began
    return stop, took_s


@pytest.mark.slow
def test_a_rank_that_is_waited_for_goes_on_until_all_can_stop(rank_pool, tmp_path):
    (first, took_s), (second, _) = rank_pool(2)(one_ahead, str(tmp_path))
    assert first == second
    assert first.step == first.saved
    assert 19 <= first.step <= 22
    assert took_s < 15


def fifty_signals(rank, folder, seed):
    """Signals at random points: in steps, in waits for others, in the last save, and while it all ends."""
    rng = random.Random(f"{seed}-{rank}")
    state = state_of(rank)
    left = [50]
    over = threading.Event()

    def shower():
        while left[0] and not over.wait(rng.random() * 0.004):
            left[0] -= 1
            ask()

    first = rng.randrange(3, 12)
    thread = threading.Thread(target=shower)

    def when(step):
        if step == first:
            thread.start()

    options = {"every": ks.Every(steps=2), "preempt": TERM, "deadline_s": 20}
    with ks.Checkpointer(folder, state, background="thread", **options) as ckpt:
        stop = train(rank, ckpt, state, Loop(pace_s=(0.001, 0.002)), when)
        if thread.ident is None:
            # It was stopped by the others before it had any of its own.
            thread.start()
        wait_until(lambda: not left[0])
        over.set()
        thread.join()
    assert group_works()
    return stop


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_fifty_signals_at_random_points(rank_pool, tmp_path, world):
    for round_ in range(3):
        seed = f"{SEED}-{world}-{round_}"
        print(f"seed {seed}")
        stops = rank_pool(world)(fifty_signals, str(tmp_path / f"run{round_}"), seed)
        assert len(set(stops)) == 1, stops
        assert stops[0].step == stops[0].saved
        with ks.open(tmp_path / f"run{round_}" / f"step-{stops[0].step:08d}") as checkpoint:
            assert checkpoint["weights/w"].tolist() == [float(stops[0].step)] * 8


def costs(rank, folder):
    """What a step costs more when signals are watched: one look at the store, and nothing on the trainer's group."""
    told = []
    for preempt in (None, TERM):
        with pytest.MonkeyPatch.context() as patch:
            store = counted(patch)
            state = state_of(rank)
            with ks.Checkpointer(f"{folder}/{len(told)}", state, background="off", preempt=preempt) as ckpt:
                dist.barrier()
                before, used = dict(store.calls), dist.group.WORLD._get_sequence_number_for_group()
                for _ in range(100):
                    ckpt.step()
                new = {name: count - before.get(name, 0) for name, count in store.calls.items()}
                collectives = dist.group.WORLD._get_sequence_number_for_group() - used
                told.append(({name: count for name, count in new.items() if count}, collectives))
                dist.barrier()
    return told


def test_watching_costs_one_look_a_step_and_no_collective(rank_pool, tmp_path):
    for told in rank_pool(2)(costs, str(tmp_path)):
        assert told == [({}, 0), ({"check": 100}, 0)]


def never_there(rank, folder):
    """Rank 1 does not come to a boundary any more: whoever waits for it is told at the deadline."""
    state = state_of(rank)
    end = Path(folder, "end")
    with ks.Checkpointer(f"{folder}/run", state, background="thread", preempt=TERM, deadline_s=1.0) as ckpt:
        ckpt.step()
        outcome = None
        dist.barrier()
        if rank == 1:
            wait_until(end.exists)
        else:
            ask()
            outcome = attempt(train, rank, ckpt, state, Loop(sync=0))
            end.touch()
        works = group_works()
    return outcome, works


def test_a_rank_that_never_comes_ends_the_wait_by_the_deadline(rank_pool, tmp_path):
    (outcome, works), (_, also) = rank_pool(2)(never_there, str(tmp_path))
    assert outcome.kind == "CommitTimeoutError"
    assert "not every rank came to a step boundary within 1 s" in outcome.text
    assert 1.0 <= outcome.seconds < 3
    assert works
    assert also


def busy(rank, folder):
    """A save is in progress when all stop, and busy means skip: the last step is saved all the same."""
    state = state_of(rank)
    reached = threading.Event()

    def slow(operation, name):
        if operation == "commit" and "step-00000003" in name:
            reached.set()
            time.sleep(0.4)

    options = {"background": "thread", "when_busy": "skip", "preempt": TERM, "deadline_s": 20}
    with ks.Checkpointer(Watched(folder, slow), state, **options) as ckpt:

        def when(step):
            if step == 4:
                ckpt.save()
                assert reached.wait(20)
                ask()

        return train(rank, ckpt, state, Loop(), when)


def test_the_last_save_is_not_skipped(rank_pool, tmp_path):
    stops = rank_pool(2)(busy, str(tmp_path / "run"))
    assert len(set(stops)) == 1
    assert stops[0].step == stops[0].saved >= 4
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [
        "step-00000003",
        f"step-{stops[0].step:08d}",
    ]


# --- how much time is left ------------------------------------------------------------------------------------------


def test_what_fits_is_what_the_slowest_rank_can_do():
    assert what_fits([(None, 9.0, 99.0)] * 2, True) == ("commit", None)
    assert what_fits([(10.0, 1.0, 6.0), (12.0, 1.0, 2.0)], True) == ("commit", 10.0)
    assert what_fits([(10.0, 1.0, 6.0), (12.0, 1.0, 8.0)], True) == ("stage", 10.0)
    assert what_fits([(10.0, 1.0, 6.0), (12.0, 1.0, 8.0)], False) == ("leave", 10.0)
    assert what_fits([(10.0, 7.0, 8.0), (None, 1.0, 1.0)], True) == ("leave", 10.0)
    assert what_fits([(-1.0, 0.1, 0.1), (5.0, 0.1, 0.1)], True) == ("leave", 0.0)
    # Nothing is known of earlier saves: it is tried.
    assert what_fits([(0.5, 0.0, 0.0)], False) == ("commit", 0.5)


def little_time(rank, folder, grace_s):
    """The storage takes half a second for a save, which is known from the one before."""
    state = state_of(rank)
    slow = {"on": True}

    def wait(operation, name):
        if slow["on"] and operation == "commit" and rank == 1 and "/state/" in name:
            time.sleep(0.5)

    preempt = ks.Preempt(signals=("SIGTERM",), grace_s=grace_s)
    with ks.Checkpointer(Watched(folder, wait), state, background="thread", preempt=preempt) as ckpt:
        train(rank, ckpt, state, Loop(steps=2))
        ckpt.save().wait_committed(30)
        began = time.monotonic()
        stop = train(rank, ckpt, state, Loop(), lambda step: ask() if step == 4 and rank == 0 else None)
        return stop, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.alone
def test_a_save_that_does_not_fit_is_not_begun(rank_pool, tmp_path):
    for stop, took_s in rank_pool(2)(little_time, str(tmp_path / "little"), 0.7):
        assert stop.step >= 4
        assert stop.saved == 2
        assert "s were too few for a save" in stop.reason
        assert took_s < 0.7
    for stop, _ in rank_pool(2)(little_time, str(tmp_path / "enough"), 20.0):
        assert stop.saved == stop.step


def left_to_the_agent(rank, folder, gates):
    """Committing takes longer than the job may live, copying does not: the agent finishes it."""
    gate = Gate(Path(gates, str(rank))).install()
    state = state_of(rank)
    preempt = ks.Preempt(signals=("SIGUSR1",), grace_s=1.0, exit_status=17)
    ckpt = ks.Checkpointer(folder, state, preempt=preempt)
    gate.remove()
    state.progress.step = 1
    if rank == 0:
        gate.shut(WRITING)
    dist.barrier()
    pending = ckpt.save()
    pending.wait_staged(30)
    time.sleep(1.0)
    if rank == 0:
        gate.open(WRITING)
    pending.wait_committed(30)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    train(rank, ckpt, state, Loop())


def leave_it(folder):
    (folder / "gates").mkdir()
    job = Job(folder / "job", 2, left_to_the_agent, str(folder / "run"), str(folder / "gates"))
    return job.wait(40)


@pytest.mark.slow
def test_a_save_that_can_only_be_copied_is_left_to_the_agent_and_the_status_is_chosen(rank_pool, tmp_path):
    for end in rank_pool(1)(alone, leave_it, tmp_path)[0]:
        assert "SystemExit: 17" in end.error
    [step] = {int(path.name[5:]) for path in (tmp_path / "run").glob("step-*")} - {1}
    wait_until((tmp_path / "run" / f"step-{step:08d}" / ".metadata").exists, what="the commit by the agent")


def exits(rank, folder):
    state = state_of(rank)
    preempt = ks.Preempt(exit_status=3)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with (
        pytest.raises(SystemExit) as left,
        ks.Checkpointer(folder, state, background="thread", preempt=preempt) as ckpt,
    ):
        train(rank, ckpt, state, Loop(), lambda step: ask() if step == 2 and rank == 1 else None)
    return left.value.code, [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def leaving(folder):
    return [end.value for end in Job(folder / "job", 2, exits, str(folder / "run")).wait(40)]


def test_the_job_leaves_with_the_chosen_status_and_gives_the_signals_back(rank_pool, tmp_path):
    assert rank_pool(1)(alone, leaving, tmp_path)[0] == [(3, True)] * 2
    [step] = [int(path.parent.name[5:]) for path in (tmp_path / "run").glob("step-*/.metadata")]
    assert 2 <= step <= 4
