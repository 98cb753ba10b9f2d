"""Killed anywhere: afterwards the old step or the new one is there, whole; nothing has to be removed by hand."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import keepstep as ks
from keepstep.errors import StepNotFoundError
from tests.conftest import SEED
from tests.crash.work import Fuse, advanced, made, newest, train, whole
from tests.helpers.jobs import Job, alone, run_job
from tests.helpers.storages import Watched, failing
from tests.ranks.calls import attempt

ROUNDS = 15


def warm(folder):
    """Whatever a process does once: what is forked from it need not."""
    save_first(0, folder / "warm")
    assert newest(folder / "warm") == 1


def save_first(rank, root):
    state = made(rank, dist.get_world_size() if dist.is_initialized() else 1, 1)
    with ks.Checkpointer(root, state, background="off") as checkpointer:
        checkpointer.save()


# --- at random instants ---------------------------------------------------------------------------------------------


def killed_again_and_again(folder, seed):
    warm(folder)
    rng = random.Random(seed)
    root, notes = folder / "run", folder / "notes"
    notes.mkdir()
    began = time.monotonic()
    run_job(folder / "measure", 2, train, str(folder / "measured"), str(folder), 3)
    three_saves_s = time.monotonic() - began
    history = []
    for round_ in range(ROUNDS):
        job = Job(folder / f"job{round_}", 2, train, str(root), str(notes), 10_000)
        job.wait_ready()
        time.sleep(rng.uniform(0.0, 1.5 * three_saves_s))
        victims = ((0,), (1,))[round_ % 2] if round_ % 5 == 4 else (0, 1)
        job.kill(*victims)
        ends = job.wait(30)
        for rank, end in enumerate(ends):
            if rank in victims:
                assert end.status == -signal.SIGKILL, end
            else:
                # Whoever is left is told that the other is missing, and does not hang.
                assert "CommitTimeoutError" in end.error, end
                assert f"rank {victims[0]}" in end.error
        promised = [int(path.read_text()) for path in notes.glob("committed-?")]
        if promised:
            step = newest(root)
            assert step >= max(promised)
            assert step >= max(history, default=0)
            history.append(step)
        elif root.exists():
            with pytest.raises(StepNotFoundError), ks.Checkpointer(root, made(0, 1), background="off") as checkpointer:
                if checkpointer.restore().fresh:
                    raise StepNotFoundError("nothing was there at all")
    last = run_job(folder / "last", 2, train, str(root), str(notes), 2)
    assert last == [newest(root)] * 2
    return history


@pytest.mark.case(72)
@pytest.mark.timeout(180)
def test_killed_at_random_instants(rank_pool, tmp_path):
    print(f"seed {SEED}")
    (history,) = rank_pool(1)(alone, killed_again_and_again, tmp_path, SEED, timeout_s=150)
    assert len(history) >= ROUNDS // 3
    assert history[-1] >= 3


# --- at every change of the file system -----------------------------------------------------------------------------


def save_next(rank, root, victim, at):
    """Restores step 1, saves step 2 and keeps no other; the victim dies ahead of its ``at``-th change."""
    state = made(rank, dist.get_world_size())
    with ks.Checkpointer(root, state, keep=ks.Keep(last=1), deadline_s=1.0, background="off") as checkpointer:
        checkpointer.restore()
        advanced(state, 2)
        fuse = Fuse(at).arm() if rank == victim else Fuse(0)
        outcome = attempt(checkpointer.save)
    return outcome.kind, fuse.count


def killed_at_every_change(folder, victim):
    warm(folder)
    steps = []
    run_job(folder / "first", 2, save_first, str(folder / "run0"))
    while True:
        at = len(steps) + 1
        root = str(folder / f"run{at}")
        shutil.copytree(folder / "run0", root)
        end = Job(folder / f"job{at}", 2, save_next, root, victim, at).wait_for(victim)
        step = newest(root)
        if end.status == 0:
            # The save made fewer changes than that: every one of them has been tried.
            assert (end.value[0], step) == ("ok", 2)
            return steps
        assert end.status == -signal.SIGKILL
        steps.append(step)
        if at % 6 == 0 and step == 1:
            # The same step is saved again over whatever was left.
            assert [kind for kind, _ in run_job(folder / f"again{at}", 2, save_next, root, -1, 0)] == ["ok", "ok"]
            assert newest(root) == 2


@pytest.mark.case(59)
@pytest.mark.case(72)
@pytest.mark.case(79)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_change_of_the_file_system(rank_pool, tmp_path, victim):
    (steps,) = rank_pool(1)(alone, killed_at_every_change, tmp_path, victim, timeout_s=150)
    assert steps[0] == 1
    assert len(steps) > (15 if victim == 0 else 8)
    if victim == 0:
        # Once the coordinator has committed, its death changes nothing any more.
        assert steps[-3:] == [2, 2, 2]


def overwrite(rank, path, victim, at):
    state = {"parts": made(rank, dist.get_world_size(), 2)["parts"], "step": 2}
    fuse = Fuse(at).arm() if rank == victim else Fuse(0)
    outcome = attempt(ks.save, path, state, overwrite=True, deadline_s=1.0)
    return outcome.kind, fuse.count


def overwriting(folder):
    warm(folder)
    seen = []
    for at in range(1, 100):
        path = str(folder / f"last{at}")
        ks.save(path, {"parts": made(0, 1, 1)["parts"], "step": 1})
        end = Job(folder / f"job{at}", 2, overwrite, path, 0, at).wait_for(0)
        target = {"parts": made(0, 1)["parts"], "step": 0}
        ks.load(path, into=target)
        expected = made(0, 1, target["step"])["parts"]["shard"].local
        assert target["parts"]["shard"].local.equal(expected)
        if end.status == 0:
            assert (end.value[0], target["step"]) == ("ok", 2)
            return seen
        assert end.status == -signal.SIGKILL
        seen.append(target["step"])
    raise AssertionError("the save never came to its end")


@pytest.mark.case(76)
@pytest.mark.timeout(180)
def test_killed_while_overwriting(rank_pool, tmp_path):
    (seen,) = rank_pool(1)(alone, overwriting, tmp_path, timeout_s=150)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


# --- failures instead of deaths -------------------------------------------------------------------------------------


COMPONENTS = ("a", "b", "c", "d")


def four(rank, step):
    """Four components, each of which every rank writes a file of."""
    shards = {name: ks.sharded(torch.empty(50), global_shape=(100,), offsets=(50 * rank,)) for name in COMPONENTS}
    for shard in shards.values():
        shard.local.fill_(step)
    state = ks.TrainState(**{name: {"w": shard} for name, shard in shards.items()})
    state.progress.step = 7
    return state


def overwriting_fails(rank, root):
    """Each of the eight shard writes fails in turn."""
    told = []
    storage = Watched(root)
    with ks.Checkpointer(storage, four(rank, 1.0), deadline_s=20, background="off") as checkpointer:
        checkpointer.save()
    for victim in (0, 1):
        for name in COMPONENTS:
            with ks.Checkpointer(
                storage, four(rank, 2.0), overwrite=True, deadline_s=20, background="off"
            ) as checkpointer:
                storage.before = failing("commit", name=f"/{name}/") if rank == victim else None
                told.append((victim, name, attempt(checkpointer.save)))
                storage.before = None
            left = four(rank, 0.0)
            with ks.Checkpointer(root, left, deadline_s=20, background="off") as checkpointer:
                assert checkpointer.restore().step == 7
            assert all(torch.all(left[part]["w"].local == 1.0) for part in COMPONENTS), (victim, name)
            dist.barrier()
            ids = {path.name.split(".")[1] for path in Path(root).rglob("*.safetensors*")}
            assert len(ids) == 1, "what the failed attempt wrote was not cleaned up at the start"
            dist.barrier()
    return told


@pytest.mark.case(76)
def test_a_failed_overwrite_keeps_the_former_step(rank_pool, tmp_path):
    for rank, told in enumerate(rank_pool(2)(overwriting_fails, str(tmp_path / "run"))):
        assert len(told) == 8
        for victim, name, outcome in told:
            assert outcome.kind == ("StorageError" if rank == victim else "RankFailedError")
            assert f"rank {victim}" in outcome.text
            assert f"{name}/rank-0000{victim}" in outcome.text or f"rank-0000{victim}" in outcome.text


def no_space(rank, root):
    world = dist.get_world_size()
    storage = Watched(root)
    state = made(rank, world, 1)
    with ks.Checkpointer(storage, state, keep=ks.Keep(last=1), deadline_s=20, background="off") as checkpointer:
        checkpointer.save()
        outcomes = []
        for step in (2, 3):
            advanced(state, step)
            storage.before = failing("write", nth=2, code=errno.ENOSPC, times=100) if rank == 1 else None
            outcomes.append(attempt(checkpointer.save))
            fresh = made(rank, world)
            ks.load(f"{root}/step-00000001", into=fresh, deadline_s=20)
            assert whole(fresh) == 1
        storage.before = None
        checkpointer.save()
    return outcomes


@pytest.mark.case(79)
def test_no_space_for_the_new_step_keeps_the_old_one(rank_pool, tmp_path):
    for rank, outcomes in enumerate(rank_pool(2)(no_space, str(tmp_path / "run"))):
        for outcome in outcomes:
            assert outcome.kind == ("StorageError" if rank == 1 else "RankFailedError")
            assert "rank 1" in outcome.text
            assert f"errno {errno.ENOSPC}" in outcome.text
    # Once there is space again, the new step comes and only then the old one goes; the failed one left nothing.
    assert [path.name for path in Path(tmp_path / "run").glob("step-*")] == ["step-00000003"]
    assert newest(tmp_path / "run") == 3


def resume_over_partial(folder):
    warm(folder)
    root = str(folder / "run")
    run_job(folder / "first", 2, save_first, root)
    # Both ranks die with half of step 2 on the disk.
    ends = Job(folder / "killed", 2, die_half_way, root).wait(30)
    assert [end.status for end in ends] == [-signal.SIGKILL] * 2
    left = sorted(path.name for path in Path(root, "step-00000002").rglob("*") if path.is_file())
    assert left
    assert not Path(root, "step-00000002/.metadata").exists()
    began = time.monotonic()
    assert [kind for kind, _ in run_job(folder / "again", 2, save_next, root, -1, 0)] == ["ok", "ok"]
    took = time.monotonic() - began
    return took, newest(root)


def die_half_way(rank, root):
    def die(operation, name):
        if operation == "commit" and "step-00000002/state" in name:
            time.sleep(0.2)
            signal.raise_signal(signal.SIGKILL)

    state = made(rank, dist.get_world_size())
    with ks.Checkpointer(Watched(root, die), state, deadline_s=5, background="off") as checkpointer:
        checkpointer.restore()
        advanced(state, 2)
        checkpointer.save()


@pytest.mark.case(59)
def test_a_partial_folder_is_replaced_within_seconds(rank_pool, tmp_path):
    ((took, step),) = rank_pool(1)(alone, resume_over_partial, tmp_path)
    assert step == 2
    assert took < 10
