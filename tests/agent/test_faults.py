"""Trainers and agents that die, disks that fill, storages that never answer: what is committed then, and what goes on."""

from __future__ import annotations

import errno
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import keepstep as ks
from keepstep.agent.node import agent_log
from keepstep.commit.records import read_records
from keepstep.errors import AgentError, CommitTimeoutError, StagingError, StorageError
from keepstep.storage.local import LocalStorage
from tests.agent.gate import COMMITTING, WRITING, Gate
from tests.agent.trainers import (
    BEGUN,
    MIB,
    RESTORED,
    STAGED,
    STARTS,
    advanced,
    dying,
    made,
    moved_on,
    owning,
    refused,
    restored,
    saving_often,
    saving_on,
    steps_in,
    warmed,
    whole,
)
from tests.conftest import SEED
from tests.helpers.agents import agent_of, is_alive, kill_agent, stop_agents, wait_until
from tests.helpers.jobs import Job, alone, run_job
from tests.helpers.storages import Watched

LARGE = 16 * MIB
"""Of parameters and as much of each of two other things: copying that takes milliseconds, in which something can die."""


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate").install()
    yield gate
    gate.remove()


# --- the agent dies -------------------------------------------------------------------------------------------------


@pytest.mark.case(69)
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "staging", WRITING, COMMITTING])
def test_a_killed_agent_costs_the_save_in_progress_and_no_more(tmp_path, gate, moment):
    root, size = tmp_path / "run", LARGE if moment == "staging" else MIB
    state = made(0, size)
    with ks.Checkpointer(root, state, background="agent") as ckpt:
        moved_on(ckpt, state, 10).wait_committed(30)
        pid, lost = agent_of(root).pid, 20
        if moment == "idle":
            kill_agent(root)
            pending = None
        elif moment == "staging":
            lost, pending = stopped_while_staging(ckpt, state, pid)
        else:
            gate.shut(moment)
            pending = moved_on(ckpt, state, lost)
            pending.wait_staged(20)
            gate.wait_reached(moment)
        killed = time.monotonic()
        if pending is not None:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(AgentError, match=f"process {pid}"):
                pending.wait_committed(10)
            if moment == "staging":
                assert isinstance(pending.staged.exception(), AgentError)
            else:
                gate.open(moment)
            assert time.monotonic() - killed < 3
        committed = steps_in(root)
        assert committed[-1] == lost - 10
        # Training goes on, and the next save has an agent again; of the lost one nothing stays.
        assert moved_on(ckpt, state, lost + 10).wait_committed(30).step == lost + 10
        assert agent_of(root).pid != pid
        assert steps_in(root)[-2:] == [lost - 10, lost + 10]
        assert not (root / f"step-{lost:08d}").exists()
        assert not is_alive(pid)
    assert restored(0, root, size) == lost + 10


def stopped_while_staging(ckpt, state, pid):
    """A save that has begun and is not staged, and cannot be any more; and its step."""
    for step in range(20, 1000, 10):
        pending = moved_on(ckpt, state, step)
        os.kill(pid, signal.SIGSTOP)
        if not pending.staged.done():
            return step, pending
        os.kill(pid, signal.SIGCONT)
        pending.wait_committed(30)
    raise AssertionError("staging was always faster")


@pytest.mark.case(69)
@pytest.mark.slow
def test_without_an_agent_a_trainer_can_still_save_synchronously(tmp_path, gate):
    root = tmp_path / "run"
    state = made(0)
    with ks.Checkpointer(root, state, background="agent") as ckpt:
        gate.shut(WRITING)
        pending = moved_on(ckpt, state, 10)
        gate.wait_reached(WRITING)
        pid = kill_agent(root)
        with pytest.raises(AgentError, match=f"process {pid}"):
            pending.wait_committed(5)
        ks.save(tmp_path / "beside", state)
        assert steps_in(root) == []
    copy = made(0)
    ks.load(tmp_path / "beside", into=copy)
    assert whole(copy) == 10


# --- the trainer dies -----------------------------------------------------------------------------------------------


def trainers_that_die(folder):
    root = folder / "run"
    for moment in ("idle", "staging", "staged"):
        before = steps_in(root)[-1] if root.exists() else 0
        (end,) = Job(folder / moment, 1, dying, root, moment, LARGE).wait()
        assert end.status == -signal.SIGKILL, end
        # The agent hears of it by itself, and ends what it has: no trainer is there any more.
        wait_until(lambda: not agent_of(root).trainers and not agent_of(root).jobs)
        step = steps_in(root)[-1]
        wait_until(partial(is_recorded, root, step))
        copying = "ended while it was copying" in agent_log(str(root)).read_text()
        if moment == "idle":
            assert step == before + 10
            assert not copying
        elif moment == "staging":
            assert step >= before + 10
            assert copying
        else:
            assert step == before + 20
        assert run_job(folder / f"{moment}-again", 1, restored, root, LARGE) == [step]


@pytest.mark.case(73)
@pytest.mark.slow
def test_what_was_staged_is_committed_although_the_trainer_is_gone(rank_pool, tmp_path):
    rank_pool(1)(alone, warmed, tmp_path, trainers_that_die, timeout_s=60)


def is_recorded(root, step):
    return (step, "committed") in [(one.step, one.outcome) for one in read_records(LocalStorage(root))]


def killed_while_writing(folder, gate):
    """The trainer is killed while the agent writes; the next one waits for the agent, and goes on from that step."""
    root = folder / "run"
    assert run_job(folder / "first", 1, restored, root, MIB, 10) == [10]
    job = Job(folder / "writing", 1, dying, root, "writing", MIB, gate)
    gate.wait_reached(WRITING)
    job.kill()
    assert job.wait()[0].status == -signal.SIGKILL
    # The step before is what there is, until the new one is durable: nothing pointed to it, nothing was pruned for it.
    assert steps_in(root) == [10, 20]
    assert '"step": 20' in (root / "latest").read_text()
    starts, agent = len(list((root / "incarnations").iterdir())), agent_of(root).pid
    again = Job(folder / "again", 1, restored, root, MIB)
    wait_until(lambda: again.pids[0] in agent_of(root).trainers)
    assert [job.state for job in agent_of(root).jobs] == ["writing"]
    assert len(list((root / "incarnations").iterdir())) == starts
    gate.open(WRITING)
    (end,) = again.wait()
    assert (end.status, end.value) == (0, 30), end
    assert agent_of(root).pid == agent
    # (Step 10 stays because the run was resumed from it.)
    assert steps_in(root) == [10, 30]
    assert '"step": 30' in (root / "latest").read_text()


@pytest.mark.case(73)
@pytest.mark.slow
def test_a_trainer_that_starts_lets_the_old_agent_finish(rank_pool, tmp_path):
    rank_pool(1)(alone, warmed, tmp_path, gated, killed_while_writing, timeout_s=60)


def gated(folder, fn):
    """Runs it where agents stop at a gate."""
    gate = Gate(folder / "gate").install()
    try:
        fn(folder, gate)
    finally:
        gate.remove()


def both_killed(folder, gate):
    """Trainer and agent are killed while the agent writes: as if the machine had gone down."""
    root = folder / "run"
    job = Job(folder / "first", 1, dying, root, "writing", MIB, gate)
    gate.wait_reached(WRITING)
    job.kill()
    job.wait()
    kill_agent(root)
    gate.open(WRITING)
    assert steps_in(root) == [10]
    assert '"step": 10' in (root / "latest").read_text()
    assert run_job(folder / "second", 1, restored, root, MIB) == [10]
    assert not (root / "step-00000020").exists()
    assert not list(root.rglob("*.partial"))


@pytest.mark.case(73)
@pytest.mark.slow
def test_when_both_die_the_step_before_is_the_newest(rank_pool, tmp_path):
    rank_pool(1)(alone, warmed, tmp_path, gated, both_killed, timeout_s=60)


# --- two runs -------------------------------------------------------------------------------------------------------


def two_runs(folder):
    root = folder / "run"
    for number in range(2):
        first = Job(folder / f"first-{number}", 1, owning, root, folder / f"there-{number}")
        wait_until((folder / f"there-{number}").exists)
        if number == 0:
            wait_until(partial(is_recorded, root, 1))
            before = sorted(path.name for path in root.rglob("*"))
            text, took_s = run_job(folder / "second", 1, refused, root)[0]
            assert str(root) in text
            assert f'"pid": {first.pids[0]}' in text
            assert f'"host": "{platform.node()}"' in text
            assert took_s < 15
            assert sorted(path.name for path in root.rglob("*")) == before
        first.kill()
        killed = time.monotonic()
        assert first.wait()[0].status == -signal.SIGKILL
        # At once: nothing of the dead one has to be waited for or removed.
        assert run_job(folder / f"third-{number}", 1, restored, root, MIB) == [1]
        assert time.monotonic() - killed < 5
        # And after one that has ended by itself.
        assert run_job(folder / f"fourth-{number}", 1, restored, root, MIB) == [1]
        stop_agents(folder)
        root = folder / "other"


@pytest.mark.slow
def test_a_second_run_on_the_same_root_is_refused_while_the_first_lives(rank_pool, tmp_path):
    rank_pool(1)(alone, warmed, tmp_path, two_runs, timeout_s=60)


# --- no room --------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A folder with room for 20 MiB, and a call that makes more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield folder, lambda: subprocess.check_call(["mount", "-o", "remount,size=80m", folder])
    stop_agents(tmp_path)
    # (The agent's log lies there.)
    wait_until(lambda: subprocess.run(["umount", folder], capture_output=True).returncode == 0)


@pytest.mark.slow
def test_a_full_disk_fails_one_save_and_spares_the_step_before(disk):
    folder, make_room = disk
    root = folder / "run"
    state = made(0, 4 * MIB)
    with ks.Checkpointer(root, state, background="agent") as ckpt:
        moved_on(ckpt, state, 10).wait_committed(30)
        for step in (20, 30):
            pending = moved_on(ckpt, state, step)
            with pytest.raises(StorageError, match=r"No space left on device.* \(errno 28\)") as caught:
                pending.wait_committed(30)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.operation in ("create", "write", "commit")
            assert steps_in(root) == [10]
        make_room()
        assert moved_on(ckpt, state, 40).wait_committed(30).step == 40
        assert steps_in(root) == [10, 40]
        assert sorted(path.name for path in root.glob("step-*")) == ["step-00000010", "step-00000040"]
    assert restored(0, root, 4 * MIB) == 40


@pytest.mark.slow
@pytest.mark.parametrize("background", ["agent", "thread"])
def test_a_memory_budget_that_is_too_small_is_told_in_bytes(tmp_path, background):
    state = made(0, 4 * MIB)
    options = {"background": background, "memory_budget_bytes": 5_000_000}
    with ks.Checkpointer(tmp_path / "run", state, **options) as ckpt:
        pending = moved_on(ckpt, state, 10)
        with pytest.raises(StagingError) as caught:
            pending.wait_staged(20)
        text = str(caught.value)
        asked = int(text.partition("an arena of ")[2].partition(" bytes")[0].replace(",", ""))
        free = int(text.partition("; ")[2].partition("; ")[2].partition(" bytes")[0].replace(",", ""))
        assert 12 * MIB <= asked <= 24 * MIB
        assert "budget of this machine is 5,000,000 bytes" in text
        assert free > 12 * MIB
        with pytest.raises(StagingError, match="5,000,000"):
            pending.wait_committed(20)
        # Training goes on, and other saves do.
        assert whole(advanced(state, 11)) == 11
        ks.save(tmp_path / "beside", state)
    assert not list((tmp_path / "run").glob("step-*/.metadata"))


# --- a storage that does not answer ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_storage_that_never_answers_ends_by_the_deadline(tmp_path):
    shut, answers = threading.Event(), threading.Event()

    def before(operation, name):
        if operation == "write" and shut.is_set():
            answers.wait(60)

    storage = Watched(tmp_path / "run", before)
    state = made(0)
    with ks.Checkpointer(storage, state, background="thread", deadline_s=1.0) as ckpt:
        moved_on(ckpt, state, 10).wait_committed(20)
        shut.set()
        pending = moved_on(ckpt, state, 20)
        began = time.monotonic()
        with pytest.raises(CommitTimeoutError, match="rank 0 within 1 s") as caught:
            pending.wait_committed(20)
        assert time.monotonic() - began < 3
        assert caught.value.missing == (0,)
        assert steps_in(tmp_path / "run") == [10]
        # It answers again: what comes next is saved, and what was given up never appears.
        shut.clear()
        answers.set()
        assert moved_on(ckpt, state, 30).wait_committed(20).step == 30
    assert steps_in(tmp_path / "run") == [10, 30]


NEVER = """
import sys, threading
import keepstep as ks
from tests.agent.trainers import made, moved_on
from tests.helpers.storages import Watched
shut = threading.Event()
def before(operation, name):
    if operation == "write" and shut.is_set():
        threading.Event().wait()
state = made(0)
try:
    with ks.Checkpointer(Watched(sys.argv[1], before), state, background="thread", deadline_s=0.5) as ckpt:
        moved_on(ckpt, state, 10).wait_committed(20)
        shut.set()
        moved_on(ckpt, state, 20)
except TimeoutError as err:
    print(type(err).__name__)
"""


@pytest.mark.slow
def test_a_storage_that_never_answers_does_not_keep_the_interpreter(tmp_path):
    done = subprocess.run([sys.executable, "-c", NEVER, tmp_path / "run"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "CommitTimeoutError\n"), done
    assert "the save of step 20 failed" in done.stderr
    assert steps_in(tmp_path / "run") == [10]


@pytest.mark.slow
@pytest.mark.parametrize("instant", [WRITING, COMMITTING])
def test_an_agent_whose_storage_never_answers_says_so_by_the_deadline(tmp_path, gate, instant):
    root = tmp_path / "run"
    state = made(0)
    with ks.Checkpointer(root, state, background="agent", deadline_s=1.0) as ckpt:
        moved_on(ckpt, state, 10).wait_committed(20)
        gate.shut(instant)
        pending = moved_on(ckpt, state, 20)
        began = time.monotonic()
        with pytest.raises(CommitTimeoutError) as caught:
            pending.wait_committed(20)
        assert time.monotonic() - began < 3
        assert caught.value.missing == ((0,) if instant == WRITING else ())
        gate.wait_reached(instant)
        assert steps_in(root) == [10]
        gate.open(instant)
        wait_until(lambda: moved_on(ckpt, state, state.progress.step + 10).committed.exception(20) is None)
        last = state.progress.step
        found = steps_in(root)
        assert found[0] == 10
        assert found[-1] == last
        # What the message leaves open is one or the other, whole; what was given up while writing never appears.
        assert (20 in found) <= (instant == COMMITTING)


# --- at random instants ---------------------------------------------------------------------------------------------


def killed_at_random_instants(folder, world, kills, seed):
    rng = random.Random(seed)
    root, notes, size = folder / "run", folder / "notes", 256 << 10
    board = np.memmap(notes, np.int64, "w+", shape=(8,))
    restores = promises = 0
    for kill in range(kills):
        promised, starts = int(board[STAGED : STAGED + world].min()), board[STARTS : STARTS + world].copy()
        job = Job(folder / f"job-{kill}", world, saving_on, world, root, notes, size)
        if rng.random() < 0.8:
            wait_until(partial(began, board, starts, job))
            time.sleep(rng.uniform(0, 0.04 * world))
        else:
            time.sleep(rng.uniform(0, 0.15))
        job.kill()
        for end in job.wait(30):
            assert end.status == -signal.SIGKILL, (kill, end)
        if (board[STARTS : STARTS + world] > starts).all():
            # Every rank has checked what it restored, bit by bit; and it is no older than what was staged everywhere.
            restores += 1
            promises += promised > 0
            step = int(board[RESTORED])
            assert (board[RESTORED : RESTORED + world] == step).all(), (kill, board)
            assert promised <= step <= board[BEGUN : BEGUN + world].max(), (kill, promised, board)
    promised = int(board[STAGED : STAGED + world].min())
    (step,) = run_job(folder / "last", 1, restored, root, size)
    assert promised <= step <= board[BEGUN : BEGUN + world].max(), (promised, step, board)
    stop_agents(folder)
    return restores, promises, promised


def began(board, starts, job):
    """Whether every rank of the job has restored; or one has ended."""
    job._reap()
    return bool(job.ends) or (board[STARTS : STARTS + len(starts)] > starts).all()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_instant_what_all_ranks_have_staged_is_committed(rank_pool, tmp_path):
    print(f"seed {SEED}")
    for world, kills in ((1, 150), (2, 50)):
        (found,) = rank_pool(1)(
            alone, warmed, tmp_path / f"{world}", killed_at_random_instants, world, kills, SEED + world, timeout_s=120
        )
        print(f"{world} ranks: {kills} kills, {found[0]} starts that restored, the newest step {found[2]}")
        assert found[0] > kills // 2
        assert found[1] > kills // 2


# --- a thousand saves -----------------------------------------------------------------------------------------------


def saved_often(folder):
    return run_job(folder / "job", 1, saving_often, folder / "run", (250, 625, 1000), timeout_s=160)[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_thousand_saves_leave_nothing_behind(rank_pool, tmp_path):
    ((first, middle, last),) = rank_pool(1)(alone, warmed, tmp_path, saved_often, timeout_s=170)
    print(f"after 250, 625 and 1,000 saves: {first}, {middle}, {last}")
    for who in (0, 1):
        memory, descriptors, threads = zip(first[who], last[who], strict=True)
        assert memory[1] - memory[0] < 2 * MIB
        assert descriptors[1] <= descriptors[0]
        assert threads[1] <= threads[0]
    assert first[2] == middle[2] == last[2]
