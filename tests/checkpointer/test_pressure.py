"""More saves than memory for them, saves that fail, and what is written down about each."""

from __future__ import annotations

import errno
import json
import logging
import threading

import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.agent import inside
from keepstep.commit.records import read_records
from tests.helpers.agents import agent_of, wait_until
from tests.helpers.gates import Gate, slow_copies
from tests.helpers.runs import latest, restored, run, steps_in, train
from tests.helpers.storages import Watched, failing

BOTH = ["agent", "thread"]
# An agent of its own takes a test half a second.
SLOW_AGENT = [pytest.param("agent", marks=pytest.mark.slow), "thread"]
STAGINGS = ["overlap", "block"]


@pytest.fixture
def copies(monkeypatch):
    with slow_copies(monkeypatch) as gate:
        yield gate


# --- more saves than arenas -----------------------------------------------------------------------------------------


def test_with_one_arena_the_next_save_waits_for_the_last(tmp_path):
    gate = Gate("commit", name="step-00000001")
    state = run()
    with ks.Checkpointer(Watched(tmp_path, gate), state, every=ks.Every(steps=1)) as ckpt:
        train(state)
        first = ckpt.step()
        gate.wait_reached()
        train(state)
        threading.Timer(0.05, gate.open).start()
        second = ckpt.step()
        assert first.committed.done()
        assert second.wait_committed(30).seconds["wait"] > 0
    assert steps_in(tmp_path) == [1, 2]


def test_a_busy_arena_may_mean_that_a_save_is_skipped(caplog, tmp_path):
    gate = Gate("commit", name="step-00000001")
    state = run()
    options = {"every": ks.Every(steps=1), "when_busy": "skip", "keep": ks.Keep(last=None)}
    with ks.Checkpointer(Watched(tmp_path, gate), state, **options) as ckpt:
        began = []
        for _ in range(3):
            train(state)
            began.append(ckpt.step())
        assert began[1:] == [None, None]
        gate.open()
        began[0].wait_committed(30)
        wait_until(lambda: ckpt._saves.busy() == [])
        train(state)
        assert ckpt.step() is not None
    assert steps_in(tmp_path) == [1, 4]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "step 2 was not saved: an earlier save is still in progress (1 skipped so far)",
        "step 3 was not saved: an earlier save is still in progress (2 skipped so far)",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_two_saves_at_once_are_committed_in_their_order(fails, caplog, tmp_path):
    gate = Gate("write", name="step-00000001/model")
    done = []

    def before(kind, name):
        done.append((kind, name))
        gate(kind, name)
        if fails:
            failing("write", name="step-00000001/model")(kind, name)

    state = run()
    options = {"every": ks.Every(steps=1), "arenas": 2, "keep": ks.Keep(last=None), "check_staging": True}
    with ks.Checkpointer(Watched(tmp_path, before), state, **options) as ckpt:
        pending = []
        for _ in range(2):
            train(state)
            pending.append(ckpt.step())
        pending[1].wait_staged(30)
        gate.wait_reached()
        # The second one is all written, and waits for the first.
        wait_until(lambda: ("commit", "step-00000002") in {(kind, name[:13]) for kind, name in done})
        wait_until(
            lambda: {p.parent.name for p in tmp_path.glob("step-00000002/*/*.safetensors")} >= {"model", "state"}
        )
        assert not steps_in(tmp_path)
        assert not pending[1].committed.done()
        train(state)
        threading.Timer(0.05, gate.open).start()
        third = ckpt.step()  # no arena is free: waits for the oldest
        assert pending[0].committed.done()
        third.wait_committed(30)
    manifests = [name for kind, name in done if kind == "put_new" and name.endswith(".metadata")]
    steps = [2, 3] if fails else [1, 2, 3]
    assert manifests == [f"step-{step:08d}/.metadata" for step in steps]
    assert steps_in(tmp_path) == steps
    assert [len(restored(tmp_path, step=step)["log"]) for step in steps] == steps


@pytest.mark.parametrize("background", SLOW_AGENT)
def test_a_budget_is_checked_before_memory_is_taken(background, caplog, tmp_path):
    state = ks.TrainState(t=[torch.zeros(3 << 20, dtype=torch.uint8)])
    with ks.Checkpointer(tmp_path, state, background=background, memory_budget_bytes=1 << 20) as ckpt:
        pending = ckpt.save()
        for wait in (pending.wait_staged, pending.wait_committed):
            with pytest.raises(ks.errors.StagingError) as caught:
                wait(30)
        text = str(caught.value)
        assert "the budget of this machine is 1,048,576 bytes" in text
        assert "bytes was asked for" in text
        assert "of memory are free" in text
        assert "committed steps are untouched" in text
        if background == "agent":
            assert agent_of(tmp_path).arenas_bytes == 0
    assert not steps_in(tmp_path)


@pytest.mark.parametrize("background", SLOW_AGENT)
def test_a_budget_is_for_all_arenas_together(background, tmp_path):
    state = run()
    budget = 6 << 20  # one arena has 4 MiB
    options = {"background": background, "memory_budget_bytes": budget, "arenas": 2, "tolerate_failures": 9}
    gate = Gate("commit", name="step-00000001")
    root = Watched(tmp_path, gate) if background == "thread" else tmp_path
    if background == "agent":
        gate.open()
    with ks.Checkpointer(root, state, every=ks.Every(steps=1), **options) as ckpt:
        train(state)
        first = ckpt.step()
        first.wait_staged(30)
        train(state)
        second = ckpt.step()
        with pytest.raises(ks.errors.StagingError, match="of which arenas hold 4,194,304"):
            second.wait_staged(30)
        gate.open()
        assert first.wait_committed(30).step == 1
        if background == "agent":
            assert agent_of(tmp_path).arenas_bytes <= budget
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arenas": 3}, "arenas=3: it is one of 1, 2"),
        ({"when_busy": "drop"}, "when_busy='drop': it is one of 'wait', 'skip'"),
        ({"staging": "none", "background": "gpu"}, "staging='none'.*; background='gpu'"),
        ({"memory_budget_bytes": -1}, "memory_budget_bytes=-1: it is not negative"),
        ({"tolerate_failures": -1}, "tolerate_failures=-1"),
    ],
)
def test_options_that_mean_nothing(options, message, tmp_path):
    with pytest.raises(ks.errors.UsageError, match=message):
        ks.Checkpointer(tmp_path, run(), **options)
    assert not list(tmp_path.iterdir())


# --- memory is ready before it is needed ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arenas", [1, 2])
def test_the_arena_is_there_before_the_first_save(arenas, tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=2), arenas=arenas, background="agent") as ckpt:
        # Made at the start, although the optimizer has no state yet.
        wait_until(lambda: agent_of(tmp_path).arenas_bytes == arenas * (4 << 20), what="the arenas")
        sizes = []
        for _ in range(6):
            train(state)
            if (pending := ckpt.step()) is not None:
                pending.wait_committed(30)
            sizes.append(agent_of(tmp_path).arenas_bytes)
        assert set(sizes) == {arenas * (4 << 20)}


@pytest.mark.parametrize("kib", [2980, 3040, 3060, 3068, 3072])
def test_the_first_save_takes_no_memory_of_its_own(kib, monkeypatch, tmp_path):
    """Sizes at which little is left in the last chunk of the arena."""
    made, arena = [], inside.Arena
    monkeypatch.setattr(inside, "Arena", lambda *args, **options: made.append(args) or arena(*args, **options))
    state = ks.TrainState(t=[torch.zeros(kib << 10, dtype=torch.uint8)], model=nn.Linear(3, 3))
    with ks.Checkpointer(ks.MemoryStorage(), state, every=ks.Every(steps=2)) as ckpt:
        ckpt.step()
        for slot in ckpt._saves._slots:
            slot.warming.join()
        before = len(made)
        assert before >= 1
        ckpt.step().wait_committed(30)
        assert len(made) == before


# --- failures -------------------------------------------------------------------------------------------------------


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.name == "keepstep" and record.levelno >= level]


@pytest.mark.case(92)
def test_training_goes_on_after_a_failed_save_and_the_next_one_tries_again(caplog, tmp_path):
    caplog.set_level(logging.INFO, "keepstep")
    state = run()
    storage = Watched(tmp_path)
    with ks.Checkpointer(storage, state, every=ks.Every(steps=10), keep=ks.Keep(last=1)) as ckpt:
        for step in range(1, 31):
            train(state)
            if step == 20:
                storage.before = failing("write", name="step-00000020")
            pending = ckpt.step()
            if step == 20:
                with pytest.raises(ks.errors.StorageError):
                    pending.committed.result(30)
                assert (latest(tmp_path), steps_in(tmp_path)) == (10, [10])
        (said,) = messages(caplog)
        assert "the save of step 20 failed, training goes on" in said
        assert "newest on disk: step 10" in said
        assert "write of 'step-00000020/" in said
        assert "rank-00000" in said
        assert f"errno {errno.ENOSPC}" in said
    # Told by log; the save after it was good, so closing has nothing to raise.
    assert (latest(tmp_path), steps_in(tmp_path)) == (30, [30])
    assert not [path for path in (tmp_path / "step-00000020").rglob("*") if path.is_file()]
    assert len(restored(tmp_path)["log"]) == 30


@pytest.mark.case(92)
@pytest.mark.parametrize("seen", [False, True])
def test_closing_raises_the_last_failure_once_and_only_if_nobody_was_told(seen, tmp_path):
    state = run()
    storage = Watched(tmp_path)
    ckpt = ks.Checkpointer(storage, state, every=ks.Every(steps=1))
    storage.before = failing("commit", name="step-")
    pending = ckpt.step()
    if seen:
        with pytest.raises(ks.errors.StorageError):
            pending.wait_committed(30)
        ckpt.close()
    else:
        with pytest.raises(ks.errors.StorageError, match="errno 28"):
            ckpt.close()
    ckpt.close()
    with pytest.raises(ks.errors.ClosedError):
        ckpt.step()


def test_closing_does_not_hide_another_exception(caplog, tmp_path):
    storage = Watched(tmp_path)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        ks.Checkpointer(storage, run(), every=ks.Every(steps=1)) as ckpt,
    ):
        storage.before = failing("commit", name="step-")
        ckpt.step()
        raise ZeroDivisionError
    assert caught.value.__context__ is None
    assert any("errno 28" in text for text in messages(caplog))


def test_too_many_failures_in_a_row_end_the_training(caplog, tmp_path):
    state = run()
    storage = Watched(tmp_path)
    options = {"every": ks.Every(steps=1), "tolerate_failures": 2, "keep": ks.Keep(last=None)}
    with ks.Checkpointer(storage, state, **options) as ckpt:
        ckpt.step().wait_committed(30)
        storage.before = failing("write", name="step-", times=100)
        for _ in range(2):
            ckpt.step().committed.exception(30)
        storage.before = None
        ckpt.step().wait_committed(30)  # resets the count
        storage.before = failing("write", name="step-", times=100)
        for _ in range(3):
            ckpt.step().committed.exception(30)
        with pytest.raises(ks.errors.RankFailedError) as caught:
            ckpt.step()
        text = str(caught.value)
        assert "3 saves in a row have failed; the last one: " in text
        assert f"errno {errno.ENOSPC}" in text
        # A loop that goes on all the same is told at every due save, until one is good: it cannot be missed.
        with pytest.raises(ks.errors.RankFailedError):
            ckpt.step()
    assert steps_in(tmp_path) == [1, 4]
    assert len(messages(caplog)) == 5


@pytest.mark.slow
def test_an_agents_failed_save_says_the_same(caplog, tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), background="agent") as ckpt:
        ckpt.step().wait_committed(30)
        (tmp_path / "step-00000002").mkdir()
        (tmp_path / "step-00000002" / "model").write_text("in the way")
        pending = ckpt.step()
        with pytest.raises(ks.errors.StorageError) as caught:
            pending.committed.result(30)
        assert caught.value.errno == errno.ENOTDIR
        assert ckpt.step().wait_committed(30).step == 3
    (said,) = messages(caplog)
    assert "the save of step 2 failed, training goes on" in said
    assert "newest on disk: step 1" in said
    assert f"errno {errno.ENOTDIR}" in said
    records = read_records(ks.LocalStorage(tmp_path))
    assert [(record.step, record.outcome, record.code) for record in records] == [
        (1, "committed", ""),
        (2, "failed", "storage"),
        (3, "committed", ""),
    ]
    assert {record.background for record in records} == {"agent"}


# --- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", SLOW_AGENT)
@pytest.mark.parametrize("staging", STAGINGS)
def test_every_save_leaves_a_record(background, staging, tmp_path):
    state = run()
    options = {"background": background, "staging": staging, "check_staging": True}
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), **options) as ckpt:
        pending = []
        for _ in range(2):
            train(state)
            pending.append(ckpt.step())
    records = read_records(ks.LocalStorage(tmp_path))
    lines = (tmp_path / "saves.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    for record, one in zip(records, pending, strict=True):
        saved = one.wait_committed()
        assert (record.step, record.save_id, record.outcome) == (saved.step, saved.save_id, "committed")
        assert (record.bytes, record.world, record.incarnation) == (saved.total_bytes, 1, 1)
        assert (record.background, record.staging) == (background, staging)
        assert record.stall_s > 0
        ends = {what: until for who, what, _, until in record.spans}
        assert ends["write"] <= ends["commit"]
        assert 0 < record.staged_s <= record.receipts_s <= record.durable_s
        assert {"wait", "capture", "plan", "copy", "fence", "stage", "write", "stall"} <= record.ranks.keys()
        assert all(0 <= tail.mean <= tail.most and tail.rank == 0 for tail in record.ranks.values())
        kinds = {(who, what) for who, what, _, _ in record.spans}
        assert {("training", "copy"), ("agent", "write"), ("coordinator", "commit")} <= kinds
        assert (("copy", "stage") in kinds) == (staging == "overlap")
        assert all(since <= until for _, _, since, until in record.spans)
    assert [record.first for record in records] == [True, False]


def test_a_failed_save_leaves_a_record_too(copies, tmp_path):
    state = run()
    storage = Watched(tmp_path)
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), tolerate_failures=5) as ckpt:
        copies.open()
        storage.before = failing("write", name="step-")
        train(state)
        ckpt.step().committed.exception(30)
        train(state)
        copies.close()
        pending = ckpt.step()
        copies.wait_reached()
        with torch.no_grad():
            state["model"].weight += 1
        copies.open()
        pending.committed.exception(30)
        train(state)
        ckpt.step().wait_committed(30)
    found = [(record.step, record.outcome, record.code) for record in read_records(ks.LocalStorage(tmp_path))]
    assert found == [(1, "failed", "storage"), (2, "failed", "staging"), (3, "committed", "")]


# --- without a background -------------------------------------------------------------------------------------------


def test_without_a_background_a_save_is_durable_when_the_step_returns(tmp_path):
    state = run()
    storage = Watched(tmp_path)
    threads = set(threading.enumerate())
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), background="off", keep=ks.Keep(last=1)) as ckpt:
        train(state)
        pending = ckpt.step()
        assert pending.staged.done()
        assert pending.committed.result().step == 1
        assert steps_in(tmp_path) == [1]
        assert latest(tmp_path) == 1
        storage.before = failing("write", name="step-00000002")
        with pytest.raises(ks.errors.StorageError):
            ckpt.step()
        assert steps_in(tmp_path) == [1]
        storage.before = None
        ckpt.step()
        assert steps_in(tmp_path) == [3]
        assert set(threading.enumerate()) <= threads
    with pytest.raises(ks.errors.UsageError, match="background='off'"):
        ks.async_save(tmp_path / "s", {"x": 1}, background="off")
