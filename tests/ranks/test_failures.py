"""One rank fails, is missing or differs: all ranks hear of it in time, nothing is committed, and the next save works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import keepstep as ks
from keepstep.errors import StepNotFoundError, StorageError
from tests.helpers.jobs import Job, alone
from tests.helpers.storages import Watched, failing
from tests.ranks.calls import attempt, group_works, training_state


def failed_write(rank, folder):
    storage = Watched(folder, failing("write", nth=3) if rank == 2 else None)
    first = attempt(ks.save, storage, training_state(rank), step=7)
    with pytest.raises(StepNotFoundError):
        ks.open(folder)
    works = group_works()
    storage.before = None
    ks.save(storage, training_state(rank, 5.0), step=7)
    target = training_state(rank)
    ks.load(folder, into=target)
    assert torch.all(target["model"].weight == 5.0)
    return first, works


@pytest.mark.case(60)
def test_one_failing_write_fails_all_and_the_next_save_works(rank_pool, tmp_path):
    outcomes = rank_pool(4)(failed_write, str(tmp_path / "ck"))
    for rank, (outcome, works) in enumerate(outcomes):
        assert works
        assert outcome.kind == ("StorageError" if rank == 2 else "RankFailedError")
        assert outcome.seconds < 10
        assert "rank 2" in outcome.text
        assert "write step 7" in outcome.text
        assert f"errno {errno.ENOSPC}" in outcome.text
    assert set(outcomes[0][0].failures) == {2}
    # What the failed attempt wrote was swept when the step was committed.
    assert len({path.name.split(".")[1] for path in (tmp_path / "ck").rglob("*.safetensors")}) == 1


class Refuses:
    """Something that cannot be stored."""


def everywhere_and_at_every_phase(rank, folder):
    """(where it fails, the rank, what is done there): tried one after the other, with good saves in between."""
    world = dist.get_world_size()
    root = Watched(folder)
    state = training_state(rank)
    told = {}
    with ks.Checkpointer(root, state, deadline_s=20, background="off") as checkpointer:
        state.progress.step = 1
        checkpointer.save()
        good = 1
        for failing_rank in range(world):
            steps = {
                "capture": None,
                "create": failing("create"),
                "write": failing("write"),
                "commit": failing("commit"),
            }
            if failing_rank == 0:
                steps |= {
                    "list": failing("list"),
                    "publish": failing("put_new", name=".metadata"),
                }
            for where, before in steps.items():
                state.progress.step = good + 1
                if failing_rank == rank:
                    root.before = before
                    if before is None:
                        state["mine"].value["bad"] = Refuses()
                outcome = attempt(checkpointer.save)
                root.before = None
                state["mine"].value.pop("bad", None)
                told[where, failing_rank] = outcome
                assert not Path(f"{folder}/step-{good + 1:08d}/.metadata").exists(), (where, failing_rank)
                checkpointer.save()
                good += 1
    fresh = training_state(rank)
    with ks.Checkpointer(folder, fresh) as checkpointer:
        assert checkpointer.restore().step == good
    assert group_works()
    return told


def test_a_failure_on_any_rank_at_any_phase_reaches_all(rank_pool, tmp_path):
    results = rank_pool(3)(everywhere_and_at_every_phase, str(tmp_path / "run"))
    assert len(results[0]) == 3 * 4 + 2
    for rank, told in enumerate(results):
        for (where, failing_rank), outcome in told.items():
            at = (rank, where, failing_rank, outcome)
            own = "UnsafeValueError" if where == "capture" else "StorageError"
            assert outcome.kind == (own if rank == failing_rank else "RankFailedError"), at
            assert f"rank {failing_rank}" in outcome.text, at
            assert ("mine" if where == "capture" else "as the test wants it") in outcome.text, at
            assert outcome.seconds < 10, at
            if rank != failing_rank:
                assert set(outcome.failures) == {failing_rank}, at


def cleaning_fails(rank, folder):
    """A save fails and its leftovers cannot be removed: the next save still works, on all ranks."""
    root = Watched(folder)
    state = training_state(rank)
    with ks.Checkpointer(root, state, deadline_s=20, background="off") as checkpointer:
        state.progress.step = 1
        root.before = failing("write") if rank == 1 else failing("delete", times=1000)
        failed = attempt(checkpointer.save)
        state.progress.step = 2
        if rank == 1:
            root.before = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = attempt(checkpointer.save)
        root.before = None
        state.progress.step = 3
        checkpointer.save()
    return failed.kind, saved, [str(warning.message) for warning in caught]


def test_leftovers_that_cannot_be_removed_stop_nothing(rank_pool, tmp_path):
    results = rank_pool(2)(cleaning_fails, str(tmp_path / "run"))
    assert [failed for failed, *_ in results] == ["RankFailedError", "StorageError"]
    for _, saved, _ in results:
        assert saved.kind == "ok"
        assert saved.seconds < 10
    assert "tidying up failed" in results[0][2][0]
    assert "step-00000001" in results[0][2][0]
    assert results[1][2] == []
    with ks.open(tmp_path / "run/step-00000003") as checkpoint:
        assert checkpoint.step == 3


# --- missing ranks --------------------------------------------------------------------------------------------------


def only_one_saves(rank, folder, lonely, same_step):
    state = training_state(rank)
    outcome = None
    if rank == lonely:
        outcome = attempt(ks.save, folder, state, step=3, deadline_s=0.6)
    works = group_works()
    again = [attempt(ks.save, folder, state, step=3 if same_step else 4, deadline_s=8, overwrite=True)]
    again.append(attempt(ks.save, folder, state, step=5, deadline_s=8, overwrite=True))
    return outcome, works, again


@pytest.mark.case(63)
def test_a_save_on_one_rank_only_fails_in_time_and_sets_nobody_apart(rank_pool, tmp_path):
    for lonely in (0, 1):
        for same_step in (False, True):
            folder = tmp_path / f"{lonely}{same_step}"
            results = rank_pool(2)(only_one_saves, str(folder), lonely, same_step)
            outcome, _, _ = results[lonely]
            assert outcome.kind == "CommitTimeoutError"
            assert outcome.missing == (1 - lonely,)
            assert f"rank {1 - lonely}" in outcome.text
            assert "save step 3" in outcome.text
            assert outcome.seconds < 0.6 + 2
            assert all(works for _, works, _ in results)
            assert [[call.kind for call in again] for _, _, again in results] == [["ok", "ok"]] * 2, results
            with ks.open(folder) as checkpoint:
                assert checkpoint.step == 5


def late_rank(rank, folder):
    """Rank 1 comes to the same save after the others gave up: it fails too, and the next save works."""
    state = training_state(rank)
    if rank == 1:
        time.sleep(1.2)
    outcome = attempt(ks.save, folder, state, step=3, deadline_s=0.4)
    group_works()
    return outcome, attempt(ks.save, folder, state, step=4, deadline_s=8)


def test_a_rank_that_comes_too_late_fails_as_well(rank_pool, tmp_path):
    for rank, (outcome, following) in enumerate(rank_pool(3)(late_rank, str(tmp_path / "ck"))):
        assert outcome.kind == "CommitTimeoutError"
        assert outcome.missing == ((1,) if rank != 2 else outcome.missing)
        assert following.kind == "ok", following
    with ks.open(tmp_path / "ck") as checkpoint:
        assert checkpoint.step == 4


def missed_some(rank, folder):
    """Rank 1 misses two saves in a row; at the third all meet again."""
    state = training_state(rank)
    missed = []
    for step in (1, 2):
        if rank != 1:
            missed.append(attempt(ks.save, f"{folder}/{step}", state, step=step, deadline_s=0.4))
        group_works()
    third = attempt(ks.save, f"{folder}/3", state, step=3, deadline_s=8)
    # And when the rank that comes back has an error of its own, the others hear of it at once.
    if rank != 1:
        missed.append(attempt(ks.save, f"{folder}/4", state, step=4, deadline_s=0.4))
    group_works()
    bad = {"x": Refuses()} if rank == 1 else {"x": 1}
    return missed, third, attempt(ks.save, f"{folder}/5", bad, step=5, deadline_s=8)


def test_ranks_meet_again_after_missed_saves(rank_pool, tmp_path):
    for rank, (missed, third, fifth) in enumerate(rank_pool(3)(missed_some, str(tmp_path))):
        assert [outcome.kind for outcome in missed] == ([] if rank == 1 else ["CommitTimeoutError"] * 3)
        assert third.kind == "ok", third
        assert fifth.kind == ("UnsafeValueError" if rank == 1 else "RankFailedError")
        assert fifth.seconds < 5


def dies_within(rank, folder, dying, where):
    storage = Watched(folder)
    state = training_state(rank)
    ks.save(storage, state, step=1)

    def die(operation, name):
        if operation == where:
            os.kill(os.getpid(), signal.SIGKILL)

    storage.before = die if rank == dying else None
    return attempt(ks.save, storage, state, step=2, overwrite=True, deadline_s=1.0)


def deaths(folder):
    told = {}
    for dying, where in ((2, "create"), (1, "commit"), (0, "put"), (0, "create")):
        job = Job(folder / f"job-{dying}-{where}", 3, dies_within, str(folder / f"{dying}{where}"), dying, where)
        told[dying, where] = job.wait(30)
    return told


def test_a_rank_that_dies_in_a_save_is_named_in_time(rank_pool, tmp_path):
    for (dying, where), ends in rank_pool(1)(alone, deaths, tmp_path)[0].items():
        assert ends[dying].status == -signal.SIGKILL
        for rank, end in enumerate(ends):
            if rank != dying:
                assert end.value.kind == "CommitTimeoutError", (dying, where, end)
                assert end.value.missing == (dying,)
                assert f"rank {dying}" in end.value.text
                assert end.value.seconds < 1.0 + 2
        with ks.open(tmp_path / f"{dying}{where}") as checkpoint:
            assert checkpoint.step == 1


# --- differing calls ------------------------------------------------------------------------------------------------


def other_places(rank, folder):
    state = training_state(rank)
    mine = f"{folder}/{'other' if rank == 1 else 'run'}"
    outcomes = [
        attempt(ks.Checkpointer, mine, state, deadline_s=10),
        attempt(ks.save, mine, state, deadline_s=10),
        attempt(ks.save, f"{folder}/same", state, step=rank, deadline_s=10),
        attempt(ks.load, mine, into=state, deadline_s=10),
        attempt(ks.Checkpointer, f"{folder}/file" if rank == 1 else f"{folder}/run", state, deadline_s=10),
        attempt(ks.Checkpointer, f"{folder}/run", state if rank else dict(state), deadline_s=10),
    ]
    assert group_works()
    return outcomes


@pytest.mark.case(65)
def test_ranks_with_other_places_or_steps_are_told(rank_pool, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for rank, outcomes in enumerate(rank_pool(3)(other_places, str(tmp_path))):
        start, save, step, load, file, kind = outcomes
        for outcome in (start, save, load):
            assert outcome.kind == "MismatchError"
            assert str(tmp_path / "run") in outcome.text
            assert str(tmp_path / "other") in outcome.text
            assert "rank 1" in outcome.text
        assert step.kind == "MismatchError"
        assert [f"rank {r}" in step.text for r in range(3)] == [True] * 3
        assert [f"step {r}" in step.text for r in range(3)] == [True] * 3
        assert any("rank 1" in line for line in save.mismatches)
        assert file.kind == ("UsageError" if rank == 1 else "RankFailedError")
        assert "is a file" in file.text
        assert kind.kind == "UsageError"
        assert "TrainState" in kind.text
    assert not any((tmp_path / name).exists() for name in ("run", "other", "same"))


def other_calls(rank, folder):
    state = training_state(rank)
    with ks.Checkpointer(folder, state, deadline_s=10, background="off") as checkpointer:
        state.progress.step = 1
        checkpointer.save()
        state.progress.step = 2 + (rank == 1)
        ahead = attempt(checkpointer.save)
        state.progress.step = 4
        mixed = attempt(checkpointer.save if rank != 1 else checkpointer.restore)
        options = attempt(checkpointer.restore, on_damage="raise" if rank == 2 else "fall_back")
        which = attempt(checkpointer.restore, step=1 if rank else None)
        state.progress.step = 4
        saved = attempt(checkpointer.save)
    assert group_works()
    return ahead, mixed, options, which, saved


def test_ranks_in_other_calls_are_told_which(rank_pool, tmp_path):
    for ahead, mixed, options, which, saved in rank_pool(3)(other_calls, str(tmp_path / "run")):
        assert ahead.kind == mixed.kind == options.kind == which.kind == "MismatchError"
        assert "rank 0: save step 2" in ahead.text
        assert "rank 1: save step 3" in ahead.text
        assert "rank 0: save step 4" in mixed.text
        assert "rank 1: restore" in mixed.text
        assert "raise" in options.text
        assert "rank" in options.text
        assert "rank" in which.text
        assert saved.kind == "ok"


# --- slow ranks -----------------------------------------------------------------------------------------------------


def slow_storage(rank, folder):
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))

    def wait(operation, name):
        if operation == "commit" and rank == 0 and name.startswith("state"):
            time.sleep(2.5)

    outcome = attempt(ks.save, Watched(f"{folder}/ck", wait), training_state(rank), step=1)
    works = group_works()
    # A wait for another rank, too, is not bounded by the group's timeout.
    time.sleep(2.5 * rank)
    return outcome, works, attempt(ks.load, f"{folder}/ck", into=training_state(rank))


@pytest.mark.case(68)
def test_a_slow_save_outlives_the_groups_short_timeout(rank_pool, tmp_path):
    for saved, works, loaded in rank_pool(2)(slow_storage, str(tmp_path)):
        assert saved.kind == "ok", saved
        assert saved.seconds > 2
        assert works
        assert loaded.kind == "ok", loaded


def over_tcp(rank, folder):
    """The same over the store that a launcher makes; the tests above use a file as the store."""
    dist.destroy_process_group()
    place = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        while not place.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), 3, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    lonely = None
    if rank == 0:
        lonely = attempt(ks.save, f"{folder}/ck", training_state(rank), step=1, deadline_s=0.5)
    group_works()
    storage = Watched(f"{folder}/ck", failing("create") if rank == 2 else None)
    failed = attempt(ks.save, storage, training_state(rank), step=2, deadline_s=10)
    saved = attempt(ks.save, f"{folder}/ck", training_state(rank, 4.0), step=2, deadline_s=10)
    target = training_state(rank)
    loaded = attempt(ks.load, f"{folder}/ck", into=target, deadline_s=10)
    assert torch.all(target["model"].weight == 4.0)
    group_works()
    return lonely, failed, saved, loaded


def test_the_store_of_a_launcher_works_the_same(rank_pool, tmp_path):
    for rank, (lonely, failed, saved, loaded) in enumerate(rank_pool(3)(over_tcp, str(tmp_path))):
        assert rank or (lonely.kind, lonely.missing) == ("CommitTimeoutError", (1, 2))
        assert failed.kind == ("StorageError" if rank == 2 else "RankFailedError"), failed
        assert "rank 2" in failed.text
        assert saved.kind == loaded.kind == "ok", (saved, loaded)


def raising_storage(rank, folder):
    """A storage of the user's that raises what it likes."""

    def refuse(operation, name):
        if operation == "create" and rank == 1:
            raise ValueError("not in the mood")

    outcome = attempt(ks.save, Watched(folder, refuse), training_state(rank), deadline_s=10)
    return outcome, attempt(ks.save, folder, training_state(rank), deadline_s=10)


def test_errors_that_are_not_keepsteps_reach_all_ranks_too(rank_pool, tmp_path):
    for rank, (outcome, following) in enumerate(rank_pool(2)(raising_storage, str(tmp_path / "ck"))):
        assert outcome.kind == ("ValueError" if rank == 1 else "RankFailedError")
        assert "not in the mood" in outcome.text
        assert following.kind == "ok"


def test_the_storage_error_of_a_test_is_one(tmp_path):
    with pytest.raises(StorageError, match="wants it"):
        Watched(tmp_path, failing("put")).put("name", b"")


HOSTED = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import keepstep as ks
from keepstep.ranks import Ranks

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
note = folder / "port"
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    note.with_name("half").write_text(str(store.port))
    note.with_name("half").rename(note)
else:
    while not note.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(note.read_text()), 2, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ks.save(folder / "first", {"x": torch.ones(2)})
ranks = Ranks.current()
dist.barrier()
if rank == 0:
    before = store.num_keys()
    while store.num_keys() <= before:
        time.sleep(0.01)
    os._exit(0)  # as a machine that goes, with the store of the group in it
for name in ("second", "third"):
    try:
        ks.save(folder / name, {"x": torch.ones(2)})
    except ks.errors.RankFailedError as err:
        print(name, err, flush=True)
try:
    ranks.has("news")
except ks.errors.RankFailedError as err:
    print("news", err, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_store_of_the_group_goes_with_rank_0(tmp_path):
    """Without a launcher that has it, as under ``mp.spawn``: the others say so, in errors of ours, and do not hang."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HOSTED, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (_, _), (told, failed) = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[1].returncode == 0, failed
    for name in ("second", "third", "news"):
        (line,) = [line for line in told.splitlines() if line.startswith(f"{name} ")]
        assert "the store of the process group is gone" in line
        assert "only committed steps exist" in line
    assert ks.open(tmp_path / "first")["x"].tolist() == [1, 1]
    assert not (tmp_path / "third").exists()
