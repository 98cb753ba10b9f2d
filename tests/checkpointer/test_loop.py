"""The Checkpointer: when it saves, what it keeps, what it restores, and what it does when something is wrong."""

from __future__ import annotations

import errno
import json
import shutil
import warnings

import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched, failing


def run(seed=0):
    """A training run whose state is a function of its step, given the same seed."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return ks.TrainState(model=model, optimizer=optimizer, log=[])


def advance(state, ckpt, steps, **options):
    """Trains; returns what was saved."""
    saved = []
    for _ in range(steps):
        state["optimizer"].zero_grad()
        loss = (state["model"](torch.ones(3)) - 1).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["log"].append(round(loss.item(), 6))
        saved.append(ckpt.step(loss=loss, **options))
    return [item.step for item in saved if item]


def steps_in(root):
    """Steps whose manifest is in place."""
    return sorted(int(path.parent.name[5:]) for path in root.glob("step-*/.metadata"))


def restored_step(root, **options):
    state = run(9)
    with ks.Checkpointer(root, state) as ckpt:
        return ckpt.restore(**options).step


def run_to(root, *steps, keep=None):
    """A run saved at these steps; its state at the last one."""
    state = run()
    with ks.Checkpointer(root, state, keep=keep or ks.Keep(last=None)) as ckpt:
        ckpt.restore()
        for step in steps:
            advance(state, ckpt, 1)
            state.progress.step = step
            ckpt.save()
    return state


# --- when it saves --------------------------------------------------------------------------------------------------


def test_a_fresh_run_saves_by_steps_and_goes_on_where_it_was(tmp_path):
    whole = run()
    with ks.Checkpointer(tmp_path / "whole", whole) as ckpt:
        assert advance(whole, ckpt, 9) == []
    state = run()
    with ks.Checkpointer(tmp_path / "run", state, every=ks.Every(steps=2)) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.fresh) == (0, True)
        assert "fresh" in str(report)
        assert advance(state, ckpt, 5, samples=4, tokens=16) == [2, 4]
    state = run(1)
    log = state["log"]
    with ks.Checkpointer(tmp_path / "run", state, every=ks.Every(steps=2)) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.fresh) == (4, False)
        assert (ckpt.progress.step, ckpt.progress.samples, ckpt.progress.tokens) == (4, 16, 64)
        assert state["log"] is log
        assert advance(state, ckpt, 5, epoch=2) == [6, 8]
        assert ckpt.progress.epoch == 2
    assert state["log"] == whole["log"]
    assert_same(dict(state["model"].state_dict()), dict(whole["model"].state_dict()))


def test_a_save_is_due_by_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("keepstep.checkpointer.loop.time.monotonic", lambda: now[0])
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(seconds=10)) as ckpt:
        assert advance(state, ckpt, 2) == []
        now[0] += 10
        assert advance(state, ckpt, 2) == [3]
        now[0] += 9
        assert advance(state, ckpt, 1) == []
        now[0] += 2
        assert advance(state, ckpt, 1) == [6]
    with ks.Checkpointer(tmp_path / "both", run(), every=ks.Every(steps=5, seconds=1000)) as ckpt:
        assert [ckpt.step() is not None for _ in range(5)] == [False] * 4 + [True]
        now[0] += 1000
        assert ckpt.step() is not None


@pytest.mark.parametrize("options", [{}, {"steps": 0}, {"seconds": 0}, {"steps": -1, "seconds": 5}])
def test_intervals_that_mean_nothing(options):
    with pytest.raises(ks.errors.UsageError, match="give steps, seconds or both, each above zero"):
        ks.Every(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"last": 0}, "last=0"), ({"every": 0}, "every=0"), ({"best": -1}, "best=-1"), ({"mode": "up"}, "mode='up'")],
)
def test_rules_that_mean_nothing(options, message):
    with pytest.raises(ks.errors.UsageError, match=f"Keep: .*{message}.* means nothing"):
        ks.Keep(**options)


# --- what it keeps --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_kept(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 6.0, 6: 7.0, 7: 8.0}

    def kept(name, keep):
        state = ks.TrainState(x=1)
        with ks.Checkpointer(tmp_path / name, state, every=ks.Every(steps=1), keep=keep) as ckpt:
            for step in losses:
                ckpt.step(loss=losses[step], score=-losses[step])
        return steps_in(tmp_path / name)

    assert kept("default", None) == [5, 6, 7]
    assert kept("one", ks.Keep(last=1)) == [7]
    assert kept("all", ks.Keep(last=None)) == [1, 2, 3, 4, 5, 6, 7]
    assert kept("every", ks.Keep(last=1, every=3)) == [3, 6, 7]
    assert kept("best", ks.Keep(last=1, best=2)) == [2, 4, 7]
    assert kept("highest", ks.Keep(last=1, best=2, mode="max")) == [6, 7]
    assert kept("score", ks.Keep(last=1, best=2, metric="score", mode="max")) == [2, 4, 7]
    assert kept("no such metric", ks.Keep(last=2, best=2, metric="other")) == [6, 7]
    # What went, went whole.
    assert not [path for path in (tmp_path / "one").glob("step-*") if path.name != "step-00000007"]


@pytest.mark.case(79)
@pytest.mark.parametrize(
    ("operation", "name"), [("create", ""), ("write", ""), ("commit", ""), ("put_new", ".metadata")]
)
def test_the_only_step_survives_a_save_that_fails(operation, name, tmp_path):
    state = run()
    storage = Watched(tmp_path)
    with ks.Checkpointer(storage, state, keep=ks.Keep(last=1), background="off") as ckpt:
        advance(state, ckpt, 1)
        ckpt.save()
        advance(state, ckpt, 1)
        storage.before = failing(operation, name=name)
        with pytest.raises(ks.errors.StorageError) as caught:
            ckpt.save()
        assert caught.value.errno == errno.ENOSPC
        assert steps_in(tmp_path) == [1]
        assert restored_step(tmp_path) == 1


@pytest.mark.case(79)
def test_retention_runs_after_the_commit(tmp_path):
    storage = Watched(tmp_path)
    state = run()
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), keep=ks.Keep(last=1)) as ckpt:
        advance(state, ckpt, 2)
    done = [(kind, name) for kind, names in storage.names.items() for name in names]
    assert ("delete", "step-00000001/.metadata") in done
    order: list[tuple[str, str]] = []
    storage = Watched(tmp_path / "again", lambda kind, name: order.append((kind, name)))
    state = run()
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), keep=ks.Keep(last=1)) as ckpt:
        advance(state, ckpt, 2)
    committed = order.index(("put_new", "step-00000002/.metadata"))
    pointed = max(i for i, item in enumerate(order) if item == ("put", "latest"))
    removed = [i for i, (kind, name) in enumerate(order) if kind == "delete" and name.startswith("step-00000001/")]
    assert committed < pointed < min(removed)
    assert order[min(removed)] == ("delete", "step-00000001/.metadata")


def test_tidying_up_that_fails_loses_nothing(tmp_path):
    storage = Watched(tmp_path)
    state = run()
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), keep=ks.Keep(last=1), background="off") as ckpt:
        advance(state, ckpt, 1)
        storage.before = failing("delete", code=errno.EACCES)
        with pytest.warns(UserWarning, match="tidying up failed; committed steps are untouched: delete of"):
            assert advance(state, ckpt, 1) == [2]
        storage.before = None
        assert advance(state, ckpt, 1) == [3]
    assert steps_in(tmp_path) == [3]


@pytest.mark.case(81)
def test_after_a_rollback_the_new_line_is_the_newer_one(tmp_path):
    run_to(tmp_path, 300, 5000)
    state = run(1)
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1)) as ckpt:
        assert ckpt.restore(step=300).step == 300
        state.progress.step = 400
        ckpt.save()
    assert 400 in steps_in(tmp_path)
    assert restored_step(tmp_path) == 400
    assert json.loads((tmp_path / "latest").read_text())["step"] == 400
    lineage = json.loads((tmp_path / "step-00000400" / ".metadata").read_text())["lineage"]
    assert lineage["parent"]["step"] == 300


def test_a_step_left_behind_by_a_rollback_may_be_saved_again(tmp_path):
    first = run_to(tmp_path, 1, 2, 3)
    state = run(1)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), keep=ks.Keep(last=None)) as ckpt:
        ckpt.restore(step=1)
        state["log"].append("again")
        assert advance(state, ckpt, 2) == [2, 3]
    fresh = run(2)
    with ks.Checkpointer(tmp_path, fresh) as ckpt:
        assert ckpt.restore().step == 3
    assert "again" in fresh["log"]
    assert "again" not in first["log"]


@pytest.mark.case(82)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_another_runs_steps_are_never_removed(where, tmp_path):
    one = tmp_path / "one" if where == "disk" else ks.MemoryStorage("one")
    two = tmp_path / "two" if where == "disk" else ks.MemoryStorage("two")
    run_to(one, 5)
    state = run(1)
    with ks.Checkpointer(one, state, keep=ks.Keep(last=1)) as ckpt:
        ckpt.restore()
    with ks.Checkpointer(two, state, every=ks.Every(steps=1), keep=ks.Keep(last=1)) as ckpt:
        advance(state, ckpt, 3)
    assert restored_step(one) == 5
    assert restored_step(two) == 8


@pytest.mark.case(82)
def test_the_step_a_run_came_from_stays(tmp_path):
    run_to(tmp_path, 1)
    state = run(1)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), keep=ks.Keep(last=1)) as ckpt:
        ckpt.restore()
        advance(state, ckpt, 3)
    assert steps_in(tmp_path) == [1, 4]


@pytest.mark.case(87)
def test_a_run_that_did_not_restore_replaces_and_removes_nothing(tmp_path):
    before = run_to(tmp_path, 5)
    other = run(1)
    with ks.Checkpointer(tmp_path, other, every=ks.Every(steps=1), keep=ks.Keep(last=1)) as ckpt:
        assert advance(other, ckpt, 4) == [1, 2, 3, 4]
        with pytest.raises(ks.errors.StepExistsError, match="step-00000005 is already committed; it was left as it is"):
            advance(other, ckpt, 1)
    state = run(2)
    ks.load(tmp_path / "step-00000005", state)
    assert state["log"] == before["log"]
    with ks.Checkpointer(tmp_path, other, overwrite=True) as ckpt:
        ckpt.save()
    ks.load(tmp_path / "step-00000005", state)
    assert state["log"] == other["log"]


@pytest.mark.case(87)
def test_a_load_that_failed_does_not_open_the_way_to_overwriting(tmp_path):
    run_to(tmp_path, 5)
    other = ks.TrainState(model=nn.Linear(2, 2), other=1)
    with ks.Checkpointer(tmp_path, other) as ckpt:
        with pytest.raises(ks.errors.MismatchError):
            ckpt.restore()
        other.progress.step = 5
        with pytest.raises(ks.errors.StepExistsError):
            ckpt.save()
    assert restored_step(tmp_path) == 5


# --- what it restores -----------------------------------------------------------------------------------------------


@pytest.mark.case(84)
def test_newest_is_by_number_and_stray_folders_are_not_steps(tmp_path):
    run_to(tmp_path, 9, 10, 100, 1000)
    shutil.copytree(tmp_path / "step-00000100", tmp_path / "step-100-backup")
    shutil.copytree(tmp_path / "step-00001000", tmp_path / "step-2000.tmp")
    shutil.copytree(tmp_path / "step-00001000", tmp_path / "step-9999")
    (tmp_path / "step-00003000").write_text("a file")
    (tmp_path / "step-junk").mkdir()
    assert restored_step(tmp_path) == 1000
    assert restored_step(tmp_path, step=9) == 9
    with pytest.raises(ks.errors.StepNotFoundError) as caught:
        restored_step(tmp_path, step=7)
    assert f"{tmp_path} has no committed step 7; committed steps: 1000, 100, 10, 9" in str(caught.value)
    assert (tmp_path / "step-100-backup" / ".metadata").exists()


@pytest.mark.case(85)
@pytest.mark.parametrize("hint", [None, b"", b"{}", b'{"step": 999}', b"\xff"])
def test_the_record_of_the_latest_step_is_only_a_hint(hint, tmp_path):
    run_to(tmp_path, 3, 4)
    (tmp_path / "latest").unlink()
    if hint is not None:
        (tmp_path / "latest").write_bytes(hint)
    assert restored_step(tmp_path) == 4


def unfinished(root, step):
    """What a killed save leaves: files, no manifest."""
    ks.save(root / f"step-{step:08d}", run(5), step=step)
    (root / f"step-{step:08d}" / ".metadata").unlink()


@pytest.mark.case(74)
def test_only_an_unfinished_step_is_not_a_fresh_start(tmp_path):
    unfinished(tmp_path, 20)
    state = run()
    with ks.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(ks.errors.StepNotFoundError) as caught:
            ckpt.restore()
        text = str(caught.value)
        assert str(tmp_path) in text
        assert "never committed: step-00000020" in text
        assert "allow_fresh=True" in text
        assert (tmp_path / "step-00000020").exists()
        report = ckpt.restore(allow_fresh=True)
        assert (report.fresh, report.step) == (True, 0)
        assert not (tmp_path / "step-00000020").exists()


@pytest.mark.case(72)
def test_an_unfinished_step_beside_a_good_one_is_swept(tmp_path):
    run_to(tmp_path, 10)
    unfinished(tmp_path, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored_step(tmp_path) == 10
    assert not (tmp_path / "step-00000020").exists()


def damage(root, step, how):
    folder = root / f"step-{step:08d}"
    file = next(folder.glob("model/*"))
    raw = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(raw[:-3])
    elif how == "flipped":
        raw[-5] ^= 1
        file.write_bytes(raw)
    elif how == "manifest":
        manifest = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(manifest[: len(manifest) // 2])
    elif how == "empty manifest":
        (folder / ".metadata").write_bytes(b"")
    elif how == "other step":
        shutil.copy(root / "step-00000001" / ".metadata", folder / ".metadata")


DAMAGE = ["missing", "short", "flipped", "manifest", "empty manifest", "other step"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_skipped_with_a_warning_or_raised(how, tmp_path):
    run_to(tmp_path, 1, 2, 3)
    damage(tmp_path, 3, how)
    state = run(1)
    with ks.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(ks.errors.CheckpointError):
            ckpt.restore(on_damage="raise")
        with pytest.warns(ks.errors.DamageWarning, match="a damaged step was skipped: step-00000003: "):
            report = ckpt.restore()
        assert report.step == 2
        assert len(report.skipped) == 1
        assert "skipped step-00000003" in str(report)
        assert ckpt.progress.step == 2
    expected = run(2)
    ks.load(tmp_path / "step-00000002", expected)
    assert_same(dict(state["model"].state_dict()), dict(expected["model"].state_dict()))
    assert (tmp_path / "step-00000003").exists()


@pytest.mark.case(74)
@pytest.mark.filterwarnings("ignore::keepstep.errors.DamageWarning")
def test_only_damaged_steps_are_not_a_fresh_start(tmp_path):
    run_to(tmp_path, 1, 2)
    damage(tmp_path, 1, "flipped")
    damage(tmp_path, 2, "missing")
    state = run(1)
    with ks.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(ks.errors.StepNotFoundError) as caught:
            ckpt.restore()
        text = str(caught.value)
        assert "committed steps: 2, 1" in text
        assert "step-00000002: " in text
        assert "is missing" in text
        assert "step-00000001: " in text
        assert "does not match its digest" in text
        assert ckpt.restore(allow_fresh=True).fresh
        assert steps_in(tmp_path) == [1, 2]


def test_a_step_asked_for_by_number_is_not_replaced_by_another(tmp_path):
    run_to(tmp_path, 1, 2)
    damage(tmp_path, 2, "flipped")
    with pytest.raises(ks.errors.CorruptError, match="does not match its digest"):
        restored_step(tmp_path, step=2)
    with pytest.raises(ks.errors.UsageError, match="on_damage='ignore'; it is 'fall_back' or 'raise'"):
        restored_step(tmp_path, on_damage="ignore")


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_to_fall_back(tmp_path):
    run_to(tmp_path, 1, 2)
    state = ks.TrainState(model=nn.Linear(4, 4), log=[])
    with ks.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(ks.errors.MismatchError, match="step 2"):
            ckpt.restore()
        assert ckpt.progress.step == 0
    partly = ks.TrainState(model=nn.Linear(3, 3), log=[])
    with ks.Checkpointer(tmp_path, partly) as ckpt:
        report = ckpt.restore(strict=False)
        assert report.components["optimizer"].unexpected == ["optimizer"]


@pytest.mark.case(77)
def test_a_save_that_failed_is_not_a_step_and_lower_ones_are_accepted_after_a_rollback(tmp_path):
    storage = Watched(tmp_path)
    state = run()
    with ks.Checkpointer(storage, state, background="off") as ckpt:
        state.progress.step = 10
        ckpt.save()
        state.progress.step = 20
        storage.before = failing("commit", code=errno.EIO)
        with pytest.raises(ks.errors.StorageError):
            ckpt.save()
        storage.before = None
        assert ckpt.restore().step == 10
        state.progress.step = 15
        state["log"].append("fifteen")
        assert ckpt.save().step == 15
        assert steps_in(tmp_path) == [10, 15]
        assert not [path for path in (tmp_path / "step-00000020").rglob("*") if path.is_file()]
    assert restored_step(tmp_path) == 15


@pytest.mark.case(59)
def test_the_step_of_an_attempt_that_was_killed_can_be_saved_again(tmp_path):
    run_to(tmp_path, 10)
    unfinished(tmp_path, 20)
    state = run(1)
    with ks.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        state.progress.step = 20
        ckpt.save()
    assert restored_step(tmp_path) == 20
    names = [path.name for path in (tmp_path / "step-00000020").rglob("*.safetensors")]
    assert len({name.split(".")[1] for name in names}) == 1


@pytest.mark.case(76)
def test_partial_files_go_at_the_next_start(tmp_path):
    run_to(tmp_path, 10)
    stray = tmp_path / "step-00000010" / "model" / "rank-00000.aaaaaaaa.safetensors.partial"
    stray.write_bytes(b"half")
    records = [tmp_path / name for name in ("latest.0123abcd.partial", "incarnations/000002.0123abcd.partial")]
    mine = tmp_path / "notes.partial"
    for path in (*records, mine):
        path.write_bytes(b"half")
    unfinished(tmp_path, 20)
    assert restored_step(tmp_path) == 10
    assert not stray.exists()
    assert not [path for path in records if path.exists()]
    assert mine.exists()
    assert not (tmp_path / "step-00000020").exists()


@pytest.mark.case(14)
@pytest.mark.case(89)
def test_saves_in_a_row_hold_what_was_there_at_each(tmp_path):
    weight = nn.Parameter(torch.zeros(1000))
    model = nn.ParameterDict({"w": weight})
    state = ks.TrainState(model=model)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), keep=ks.Keep(last=None)) as ckpt:
        for _ in range(4):
            with torch.no_grad():
                weight += 1
            ckpt.step()
        weight.data = weight.data.clone() + 1
        ckpt.step()
        model["extra"] = nn.Parameter(torch.ones(3))
        ckpt.step()
    for step in range(1, 7):
        opened = ks.open(tmp_path / f"step-{step:08d}")
        assert torch.equal(opened["model/w"], torch.full((1000,), float(min(step, 5))))
        assert ("model/extra" in opened) == (step == 6)


def test_an_older_start_of_the_job_may_not_commit_any_more(tmp_path):
    old = run()
    with ks.Checkpointer(tmp_path, old, background="off") as ckpt:
        advance(old, ckpt, 1)
        with ks.Checkpointer(tmp_path, run(1), background="off"):
            with pytest.raises(ks.errors.RankFailedError, match="a later incarnation of this run has started"):
                ckpt.save()
            assert steps_in(tmp_path) == []


@pytest.mark.case(74)
def test_a_first_save_that_failed_and_was_cleaned_up_leaves_a_fresh_root(tmp_path):
    storage = Watched(tmp_path, failing("write"))
    state = run()
    with (
        ks.Checkpointer(storage, state, every=ks.Every(steps=1), background="off") as ckpt,
        pytest.raises(ks.errors.StorageError),
    ):
        advance(state, ckpt, 1)
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), background="off") as ckpt:
        assert ckpt.restore().fresh
        assert advance(state, ckpt, 1) == [1]


def test_metrics_are_numbers(tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), keep=ks.Keep(last=1, best=1)) as ckpt:
        for wrong in ("low", [1, 2], torch.ones(2), None):
            with pytest.raises(ks.errors.UsageError, match="metrics are numbers, one each"):
                ckpt.step(loss=wrong)
        assert ckpt.progress.step == 0
        for loss in (torch.tensor(2.0, requires_grad=True), 1, float("nan"), float("inf"), 3.0):
            ckpt.step(loss=loss)
    assert steps_in(tmp_path) == [2, 5]
    assert ks.open(tmp_path / "step-00000002").describe()["metrics"] == {"loss": 1.0}
    assert restored_step(tmp_path) == 5


# --- how it is used -------------------------------------------------------------------------------------------------


def test_closing(tmp_path):
    state = run()
    ckpt = ks.Checkpointer(tmp_path, state)
    ckpt.close()
    ckpt.close()
    for use in (ckpt.step, ckpt.save, ckpt.restore):
        with pytest.raises(ks.errors.ClosedError, match=f"the Checkpointer of {tmp_path} was closed"):
            use()
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("state", [{"model": 1}, None, nn.Linear(1, 1)])
def test_a_checkpointer_wants_a_train_state(state, tmp_path):
    with pytest.raises(
        ks.errors.UsageError, match=r"a Checkpointer keeps a TrainState, not a .*TrainState\(\*\*state\)"
    ):
        ks.Checkpointer(tmp_path / "r", state)
    assert not (tmp_path / "r").exists()


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "r").write_text("x")
    with pytest.raises(ks.errors.UsageError, match="is a file, not a folder"):
        ks.Checkpointer(tmp_path / "r", run())


def test_a_run_in_memory(tmp_path):
    storage = ks.MemoryStorage()
    state = run()
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1)) as ckpt:
        assert ckpt.restore().fresh
        advance(state, ckpt, 3)
    fresh = run(1)
    with ks.Checkpointer(storage, fresh) as ckpt:
        assert ckpt.restore().step == 3
    assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
