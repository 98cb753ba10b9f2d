"""Saves in the background over several ranks: the values of the boundary, one outcome for all, and no rank left waiting."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import keepstep as ks
from tests.helpers.agents import agent_of, kill_agent, wait_until
from tests.helpers.gates import Gate, slow_copies
from tests.helpers.jobs import Job, alone
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched, failing
from tests.ranks.calls import attempt, group_works, training_state
from tests.ranks.test_traffic import counted
from tests.resharding.models import Net, Run, differences, forget_meshes

PATIENCE_S = 30.0


def committed(pending):
    """How the save went, on this rank."""
    return attempt(pending.wait_committed, PATIENCE_S)


def steps_in(root):
    return sorted(int(path.parent.name[5:]) for path in Path(root).glob("step-*/.metadata"))


def saved(ckpt, step):
    """Saves a step that has to be committed."""
    ckpt.progress.step = step
    pending = ckpt.save()
    pending.wait_committed(PATIENCE_S)
    return pending


def records(root):
    return [json.loads(line) for line in Path(root, "saves.jsonl").read_text().splitlines()]


# --- what is saved --------------------------------------------------------------------------------------------------


class Wide(Net):
    """Layers large enough to be copied while training goes on, on each of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 16384)
        self.down = nn.Linear(16384, 5, bias=False)


def with_own(run, own):
    """The run with something of each rank's own beside it."""
    parts = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    run.state = ks.TrainState(**parts, mine=ks.per_rank(own, "same_rank"))
    return run


def boundary_values(rank, folder, layouts, manner):
    """Training goes on at once after each save; what was saved is what stood at the boundary, and it resumes exactly."""
    forget_meshes()
    for layout in layouts:
        own = {"rank": rank, "log": [rank] * (rank + 1)}
        run = with_own(Run(layout, make=Wide), own).train(2)
        with ks.Checkpointer(f"{folder}/{layout}", run.state, check_staging=True, **manner) as ckpt:
            boundary, mine = run.whole(), json.dumps(own)
            pending = ckpt.save()
            own["log"].append("after")
            own["rank"] = -1
            run.train(2)
            after = run.whole()
            assert pending.wait_committed(PATIENCE_S).step == 2
        again = {"rank": -2, "log": []}
        fresh = with_own(Run(layout, seed=5, make=Wide), again)
        with ks.Checkpointer(f"{folder}/{layout}", fresh.state, **manner) as ckpt:
            assert ckpt.restore().step == 2
        assert differences(fresh.whole(), boundary) == [], layout
        assert json.dumps(fresh.state["mine"].value) == mine
        fresh.train(2)
        assert differences(fresh.whole(), after) == [], layout


@pytest.mark.slow
@pytest.mark.case(57)
@pytest.mark.parametrize(
    "manner", [{}, {"staging": "block"}, {"background": "thread"}], ids=["overlap", "block", "thread"]
)
def test_two_ranks_save_the_boundary_in_every_layout(rank_pool, tmp_path, manner):
    rank_pool(2)(boundary_values, str(tmp_path), ["ddp", "fsdp", "tp"], manner)


@pytest.mark.slow
@pytest.mark.case(57)
def test_four_ranks_save_the_boundary(rank_pool, tmp_path):
    rank_pool(4)(boundary_values, str(tmp_path), ["ddp", "fsdp", "2d", "hsdp"], {})


def replicas_that_differ(rank, folder, manner):
    """One rank has another value in a parameter (copied late), then in a buffer (copied at the boundary)."""
    told = []
    run = Run("none", make=Wide).train(1)
    with ks.Checkpointer(folder, run.state, **manner) as ckpt:
        saved(ckpt, 1)
        for step, key in ((2, "up.weight"), (3, "seen")):
            tensor = run.model.state_dict()[key]
            good = tensor.clone()
            tensor.add_(int(rank == 1))
            ckpt.progress.step = step
            told.append(committed(ckpt.save()))
            tensor.copy_(good)
        assert group_works()
        saved(ckpt, 4)
    return told


@pytest.mark.parametrize("manner", [{}, {"staging": "block", "background": "thread"}], ids=["agent", "thread"])
def test_replicas_that_differ_fail_the_save_on_all_ranks_and_are_named(rank_pool, tmp_path, manner):
    for told in rank_pool(2)(replicas_that_differ, str(tmp_path / "run"), manner):
        for outcome, key in zip(told, ("up.weight", "seen"), strict=True):
            assert outcome.kind == "MismatchError"
            assert [line.partition(":")[0] for line in outcome.mismatches] == [f"model/{key}"]
            assert "1 from 0" in outcome.text
            assert "nothing was committed" in outcome.text
    assert steps_in(tmp_path / "run") == [1, 4]
    assert [record["outcome"] for record in records(tmp_path / "run")] == ["committed", "failed", "failed", "committed"]


def large_state(rank, value=0.0):
    """Weights that are copied while training goes on, some by each rank, beside something of each rank's own."""
    model = nn.Sequential(*(nn.Linear(128, 160) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return ks.TrainState(model=model, optimizer=optimizer, mine=ks.per_rank({"rank": rank}, "same_rank"))


# --- one rank fails -------------------------------------------------------------------------------------------------


def failing_write(rank, folder):
    """The third write of rank 2 fails; every rank is its own hub."""
    root = Watched(folder)
    state = training_state(rank)
    with ks.Checkpointer(root, state, background="thread", deadline_s=20) as ckpt:
        saved(ckpt, 1)
        root.before = failing("write", nth=3) if rank == 2 else None
        state.progress.step = 2
        outcome = committed(ckpt.save())
        root.before = None
        left = steps_in(folder)
        works = group_works()
        with torch.no_grad():
            state["model"].weight.fill_(5.0)
        saved(ckpt, 3)
    target = training_state(rank)
    with ks.Checkpointer(folder, target, background="thread") as ckpt:
        assert ckpt.restore().step == 3
    assert torch.all(target["model"].weight == 5.0)
    return outcome, left, works


@pytest.mark.case(60)
def test_a_failing_write_of_one_rank_fails_all_and_the_next_save_works(rank_pool, tmp_path):
    for outcome, left, works in rank_pool(4)(failing_write, str(tmp_path / "run")):
        assert outcome.kind == "RankFailedError"
        assert set(outcome.failures) == {2}
        assert "rank 2" in outcome.text
        assert f"errno {errno.ENOSPC}" in outcome.text
        assert "nothing of it was committed (newest on disk: step 1)" in outcome.text
        assert outcome.seconds < 10
        assert left == [1]
        assert works
    assert [(one["step"], one["outcome"]) for one in records(tmp_path / "run")] == [
        (1, "committed"),
        (2, "failed"),
        (3, "committed"),
    ]


def failing_staging(rank, folder, culprit):
    """A rank that has no memory for its part; then one whose tensor is changed while it is copied."""
    told = []
    state = large_state(rank)
    budget = 1 if rank == culprit else None
    with ks.Checkpointer(f"{folder}/small", state, memory_budget_bytes=budget, deadline_s=20) as ckpt:
        told.append(committed(ckpt.save()))
        assert group_works()
    with pytest.MonkeyPatch.context() as patch, ks.Checkpointer(f"{folder}/run", state, deadline_s=20) as ckpt:
        saved(ckpt, 1)
        state.progress.step = 2
        with slow_copies(patch) as gate:
            pending = ckpt.save()
            if rank == culprit:
                gate.wait_reached()
                with torch.no_grad():
                    state["model"][0].weight.add_(1)
            gate.open()
            told.append(committed(pending))
        with torch.no_grad():
            state["model"][0].weight.fill_(2.0)
        assert group_works()
        saved(ckpt, 3)
    return told


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_stage_its_part_fails_all(rank_pool, tmp_path, culprit):
    for told in rank_pool(2)(failing_staging, str(tmp_path), culprit):
        for outcome in told:
            assert outcome.kind == "RankFailedError"
            assert set(outcome.failures) == {culprit}
            assert outcome.seconds < 10
        assert "StagingError" in told[0].text
        assert "the budget of this machine is 1 byte" in told[0].text
        assert "model/0.weight" in told[1].text
    assert steps_in(tmp_path / "small") == []
    assert steps_in(tmp_path / "run") == [1, 3]


def hanging(rank, folder, where, culprit):
    """One rank's storage, or its copy, does not come to an end: all hear of it at the deadline."""
    deadline_s = 1.0
    root, gate = Watched(folder), Gate("write")
    state = large_state(rank)
    with (
        pytest.MonkeyPatch.context() as patch,
        ks.Checkpointer(root, state, background="thread", deadline_s=deadline_s) as ckpt,
    ):
        saved(ckpt, 1)
        state.progress.step = 2
        if where == "storage":
            root.before = gate if rank == culprit else None
            outcome = committed(ckpt.save())
            works = group_works()
            gate.open()
            root.before = None
        else:
            with slow_copies(patch) as gate:
                if rank != culprit:
                    gate.open()
                outcome = committed(ckpt.save())
                works = group_works()
        assert group_works()
        assert steps_in(folder) == [1]
        dist.barrier()
        saved(ckpt, 3)
    return outcome, works


@pytest.mark.slow
@pytest.mark.case(60)
@pytest.mark.parametrize("where", ["storage", "copy"])
def test_a_rank_that_hangs_is_named_at_the_deadline(rank_pool, tmp_path, where):
    for culprit in (0, 1):
        for outcome, works in rank_pool(2)(hanging, str(tmp_path / f"run{culprit}"), where, culprit):
            assert outcome.kind == "CommitTimeoutError", outcome
            assert outcome.missing == (culprit,)
            assert f"nothing came from rank {culprit} within 1 s" in outcome.text
            assert outcome.seconds < 1.0 + 1.5
            assert works
        assert steps_in(tmp_path / f"run{culprit}") == [1, 3]


def slow_storage(rank, folder):
    """The storage takes longer than the timeout of the trainer's group."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))

    def wait(operation, name):
        if operation == "commit" and rank == 0 and "/state/" in name:
            time.sleep(2.0)

    state = training_state(rank)
    with ks.Checkpointer(Watched(f"{folder}/run", wait), state, background="thread") as ckpt:
        first = saved(ckpt, 1)
        # The second save waits for the first, and all ranks with it.
        state.progress.step = 2
        ckpt.save()
        began = time.monotonic()
        state.progress.step = 3
        ckpt.save()
        waited_s = time.monotonic() - began
        works = group_works()
    return first.committed_s, waited_s, works


@pytest.mark.slow
@pytest.mark.case(68)
def test_a_save_outlives_the_groups_short_timeout(rank_pool, tmp_path):
    for committed_s, waited_s, works in rank_pool(2)(slow_storage, str(tmp_path)):
        assert committed_s > 1.5
        assert waited_s > 1.0
        assert works
    assert steps_in(tmp_path / "run") == [1, 2, 3]


# --- one rank dies --------------------------------------------------------------------------------------------------


def dies(rank, folder, dying, moment, background):
    """SIGKILL on one rank, while it copies or right after ``.staged``; what the others are told."""
    root, held = Watched(folder), Gate("commit")
    state = large_state(rank)
    with pytest.MonkeyPatch.context() as patch:
        ckpt = ks.Checkpointer(folder if background == "agent" else root, state, background=background, deadline_s=30)
        saved(ckpt, 1)
        state.progress.step = 2
        if rank == dying and background == "thread":
            root.before = held
        with slow_copies(patch) as gate:
            if rank != dying or moment == "staged":
                gate.open()
            pending = ckpt.save()
            if rank == dying:
                if moment == "staged":
                    pending.wait_staged(PATIENCE_S)
                else:
                    gate.wait_reached()
                os.kill(os.getpid(), signal.SIGKILL)
            # A job without one of its ranks is for its launcher to end: nothing is closed here.
            return committed(pending)


def deaths(folder):
    told = {}
    for background in ("agent", "thread"):
        for moment in ("copying", "staged"):
            for dying in (0, 1):
                name = f"{background}-{moment}-{dying}"
                root = str(folder / name)
                job = Job(folder / f"job-{name}", 2, dies, root, dying, moment, background)
                told[background, moment, dying] = job.wait(30), steps_in(root)
    return told


@pytest.mark.slow
def test_a_rank_that_dies_before_or_after_staged(rank_pool, tmp_path):
    for (background, moment, dying), (ends, steps) in rank_pool(1)(alone, deaths, tmp_path)[0].items():
        at = (background, moment, dying, ends)
        assert ends[dying].status == -signal.SIGKILL, at
        outcome = ends[1 - dying].value
        assert outcome is not None, at
        assert outcome.seconds < 10, at
        if background == "agent" and moment == "staged":
            # The agent has its part: the step is finished without it.
            assert outcome.kind == "ok", at
            assert steps == [1, 2], at
            continue
        assert steps == [1], at
        if background == "thread" and dying == 0:
            assert outcome.kind == "AgentError", at
            # Noticed by whoever listens, or by whoever sends: whichever comes first.
            assert re.search("the coordinator.s agent (is gone|cannot be reached)", outcome.text), at
        else:
            assert outcome.kind == "RankFailedError", at
            assert set(outcome.failures) == {dying}, at
        if background == "agent":
            assert f"the trainer of rank {dying}" in outcome.text, at
            assert "ended while it was copying" in outcome.text, at
        elif dying == 1:
            assert "the agent of rank 1 at 127." in outcome.text, at


def all_die(rank, folder):
    ckpt = ks.Checkpointer(folder, training_state(rank))
    ckpt.progress.step = 4
    ckpt.save().wait_staged(PATIENCE_S)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def whole_job_dies(folder):
    return [end.status for end in Job(folder / "job", 2, all_die, str(folder / "run")).wait(30)]


def test_a_whole_job_that_dies_after_staged_has_saved_its_step(rank_pool, tmp_path):
    assert rank_pool(1)(alone, whole_job_dies, tmp_path)[0] == [-signal.SIGKILL] * 2
    wait_until(lambda: steps_in(tmp_path / "run") == [4], what="the commit by the agent")
    wait_until((tmp_path / "run/saves.jsonl").exists)
    assert records(tmp_path / "run")[0]["world"] == 2


# --- agents ---------------------------------------------------------------------------------------------------------


def agent_dies_between_saves(rank, folder):
    state = training_state(rank)
    with ks.Checkpointer(folder, state, deadline_s=20) as ckpt:
        saved(ckpt, 1)
        dist.barrier()
        before = kill_agent(folder) if rank == 1 else 0
        dist.barrier()
        state.progress.step = 2
        second = committed(ckpt.save())
        third = saved(ckpt, 3).committed.result().step
        assert group_works()
        dist.barrier()
        after = agent_of(folder).pid
    return before, after, second, third


def test_all_ranks_join_a_new_agent_when_theirs_has_died(rank_pool, tmp_path):
    results = rank_pool(2)(agent_dies_between_saves, str(tmp_path / "run"))
    assert results[0][1] == results[1][1] != results[1][0]
    kinds = {second.kind for _, _, second, _ in results}
    # A rank that had not noticed yet may lose this save; then all do.
    assert kinds in ({"ok"}, {"AgentError"}), results
    assert [third for *_, third in results] == [3, 3]
    assert steps_in(tmp_path / "run") == [1, 2, 3] if kinds == {"ok"} else [1, 3]


def hubs(rank, folder):
    """Every process is its own hub: receipts go to rank 0 over TCP, one line of the log is about all of them."""
    state = training_state(rank)
    root = Watched(folder)
    with ks.Checkpointer(root, state, background="thread") as ckpt:
        for step in (1, 2, 3):
            with torch.no_grad():
                state["model"].weight.fill_(step)
            saved(ckpt, step)
        made = root.names.get("put_new", [])
    target = training_state(rank)
    with ks.Checkpointer(folder, target, background="thread") as ckpt:
        ckpt.restore()
    assert_same(target["mine"].value, {"rank": rank})
    assert torch.all(target["model"].weight == 3.0)
    return [name for name in made if name.endswith(".metadata")]


@pytest.mark.parametrize("world", [2, 3])
def test_threads_of_several_ranks_commit_together(rank_pool, tmp_path, world):
    made = rank_pool(world)(hubs, str(tmp_path / "run"))
    # The coordinator alone puts manifests in place.
    assert [len(names) for names in made] == [3] + [0] * (world - 1)
    assert steps_in(tmp_path / "run") == [1, 2, 3]
    lines = records(tmp_path / "run")
    assert [(one["step"], one["outcome"], one["background"], one["world"]) for one in lines] == [
        (step, "committed", "thread", world) for step in (1, 2, 3)
    ]
    assert all(one["ranks"]["write"]["most"] > 0 for one in lines)


def skipping(rank, folder):
    """Rank 1's storage is slow: while a save is in progress, the next is skipped by all ranks alike."""
    root, gate = Watched(folder), Gate("commit")
    state = training_state(rank)
    if rank == 1:
        root.before = gate
    with ks.Checkpointer(root, state, background="thread", when_busy="skip") as ckpt:
        state.progress.step = 1
        first = ckpt.save()
        skipped = []
        for step in (2, 3):
            state.progress.step = step
            skipped.append(ckpt.save())
        dist.barrier()
        gate.open()
        first.wait_committed(PATIENCE_S)
        dist.barrier()
        saved(ckpt, 4)
    return skipped


def test_a_busy_rank_makes_all_ranks_skip(rank_pool, tmp_path):
    assert rank_pool(2)(skipping, str(tmp_path / "run")) == [[None, None]] * 2
    assert [one["step"] for one in records(tmp_path / "run")] == [1, 4]


# --- traffic --------------------------------------------------------------------------------------------------------


def beside_collectives(rank, folder):
    """Ten saves back to back while the main thread uses its group without a pause; keepstep adds nothing to it."""
    group = dist.group.WORLD
    state = training_state(rank)
    mine = 0
    pending = []
    with ks.Checkpointer(folder, state, keep=ks.Keep(last=None)) as ckpt:
        before = group._get_sequence_number_for_group()
        for step in range(1, 11):
            state.progress.step = step
            state["model"].weight.data.fill_(step)
            pending.append(ckpt.save())
            for _ in range(3):
                total = torch.ones(64)
                dist.all_reduce(total)
                dist.barrier()
                mine += 2
                assert total[0] == 2
            pending[-1].wait_staged(PATIENCE_S)
        for one in pending:
            one.wait_committed(PATIENCE_S)
        used = group._get_sequence_number_for_group() - before
    for step in (1, 10):
        target = training_state(rank)
        ks.load(f"{folder}/step-{step:08d}", into=target)
        assert torch.all(target["model"].weight == step)
    return mine, used


@pytest.mark.case(58)
def test_ten_saves_beside_collectives_of_the_main_thread(rank_pool, tmp_path):
    for mine, used in rank_pool(2)(beside_collectives, str(tmp_path / "run")):
        assert used == mine > 0
    assert steps_in(tmp_path / "run") == list(range(1, 11))


def store_operations(rank, folder, tensors, background):
    with pytest.MonkeyPatch.context() as patch:
        store = counted(patch)
        state = ks.TrainState(weights={f"tensor {i}": torch.full((3,), float(i)) for i in range(tensors)})

        def cost(call):
            calls, moved = dict(store.calls), store.bytes
            result = call()
            # Waiting is asking again and again: that is counted in time, not in requests.
            new = {name: count - calls.get(name, 0) for name, count in store.calls.items() if name != "check"}
            return sum(new.values()), store.bytes - moved, result

        opening, _, ckpt = cost(lambda: ks.Checkpointer(folder, state, background=background))
        with ckpt:
            figures = []
            for step in (1, 2, 3):
                state.progress.step = step
                calls, moved, pending = cost(ckpt.save)
                figures.append((calls, moved))
                again, _, _ = cost(lambda pending=pending: pending.wait_committed(PATIENCE_S))
                assert again == 0, "a save that goes on in the background asks nothing of the store"
    return opening, figures


@pytest.mark.slow
@pytest.mark.case(71)
def test_ranks_talk_as_little_for_many_tensors_as_for_few(rank_pool, tmp_path):
    for background in ("agent", "thread"):
        few = rank_pool(2)(store_operations, str(tmp_path / f"few-{background}"), 3, background)
        many = rank_pool(2)(store_operations, str(tmp_path / f"many-{background}"), 1000, background)
        for rank in range(2):
            opening, ((first, _), (second, _), (third, moved)) = many[rank]
            assert [calls for calls, _ in few[rank][1]] == [first, second, third]
            assert moved < few[rank][1][2][1] + 100
            assert second == third <= first
            assert opening + first > second
            assert second <= 10
            assert moved < 1536


# --- what everybody is told -----------------------------------------------------------------------------------------


def failures_in_a_row(rank, folder):
    """A rank whose storage is full: training goes on until too many saves have failed, then ends on all ranks."""
    root = Watched(folder)
    state = training_state(rank)
    told = []
    ckpt = ks.Checkpointer(root, state, every=ks.Every(steps=1), background="thread", tolerate_failures=2)
    ckpt.step().wait_committed(PATIENCE_S)
    root.before = failing("create", times=1000) if rank == 1 else None
    for _ in range(3):
        told.append(committed(ckpt.step()))
    told.append(attempt(ckpt.step))
    works = group_works()
    ckpt.close()
    fresh = training_state(rank, 9.0)
    with ks.Checkpointer(folder, fresh, background="thread") as ckpt:
        restored = ckpt.restore().step
    last = ks.Checkpointer(root, state, background="thread")
    state.progress.step = 9
    last.save()
    told.append(attempt(last.close))
    return told, works, restored


@pytest.mark.case(66)
def test_failures_reach_every_rank_and_all_restore_the_same_step(rank_pool, tmp_path):
    results = rank_pool(2)(failures_in_a_row, str(tmp_path / "run"))
    for told, works, restored in results:
        assert [outcome.kind for outcome in told] == ["RankFailedError"] * 5
        assert all(set(outcome.failures) == {1} for outcome in told[:3])
        assert "3 saves in a row have failed" in told[3].text
        assert "rank 1" in told[3].text
        assert "as the test wants it" in told[3].text
        assert "save of step 9 failed" in told[4].text
        assert works
        assert restored == 1


def two_at_once(rank, folder):
    """Two arenas: an older step never becomes visible after a newer one, whoever is slow."""
    root, gate = Watched(folder), Gate("commit", name=".safetensors")
    state = training_state(rank)
    order = []
    with ks.Checkpointer(root, state, background="thread", arenas=2, keep=ks.Keep(last=None)) as ckpt:
        if rank == 1:
            root.before = gate
        pending = []
        for step in (1, 2):
            state.progress.step = step
            pending.append(ckpt.save())
            pending[-1].committed.add_done_callback(lambda done: order.append(done.result().step))
        for one in pending:
            one.wait_staged(PATIENCE_S)
        assert order == []
        gate.open()
        for one in pending:
            one.wait_committed(PATIENCE_S)
    wait_until(lambda: len(order) == 2)
    return order


def test_two_saves_at_once_are_committed_in_order(rank_pool, tmp_path):
    assert rank_pool(2)(two_at_once, str(tmp_path / "run")) == [[1, 2]] * 2


def three_saves(rank, folder):
    outcomes = []
    for step in (1, 2, 3):
        pending = ks.async_save(f"{folder}/{step}", training_state(rank), step=step, background="thread")
        outcomes.append(committed(pending))
    return outcomes


def test_async_save_of_several_ranks(rank_pool, tmp_path):
    for outcomes in rank_pool(3)(three_saves, str(tmp_path)):
        assert [outcome.kind for outcome in outcomes] == ["ok"] * 3, outcomes
    with ks.open(tmp_path / "3") as checkpoint:
        assert checkpoint.step == 3


LEAVES = """
import sys, torch, torch.distributed as dist, keepstep as ks
rank, folder, background = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
dist.barrier()
ks.async_save(folder + "/ck", {"w": torch.full((4,), 7.0), "mine": ks.per_rank(rank)}, step=7, background=background)
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", ["agent", "thread"])
def test_ranks_that_leave_at_once_finish_their_save_first(tmp_path, background):
    """Rank 0 commits in its own process: it does not end before the others have heard of it."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", LEAVES]
    place = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), background], stderr=subprocess.PIPE, text=True, env=place)
        for rank in range(3)
    ]
    told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told
    assert not any("the save of" in text or "Traceback" in text for text in told), told
    with ks.open(tmp_path / "ck") as checkpoint:
        assert checkpoint.step == 7
        assert checkpoint["w"].tolist() == [7.0] * 4
