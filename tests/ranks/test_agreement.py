"""Ranks decide together: which step to restore, whether the target fits, and from one rank's view of the storage only."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.errors import CorruptError, DamageWarning, StorageError
from tests.helpers.storages import Watched
from tests.ranks.calls import attempt, group_works, training_state


def restored(folder, state, **options):
    """The report, the DamageWarnings, and what came back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ks.Checkpointer(folder, state, deadline_s=20) as checkpointer:
            report = checkpointer.restore(**options)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, DamageWarning)]
    return report, said, state["parts"]["shard"].local[0].item(), state["mine"].value["rank"]


def save_three(rank, folder):
    state = training_state(rank)
    with ks.Checkpointer(folder, state, keep=ks.Keep(last=None)) as checkpointer:
        for step in (1, 2, 3):
            state.progress.step = step
            state["parts"]["shard"].local.fill_(step + rank / 10)
            checkpointer.save()


def fall_back(rank, folder, options):
    return attempt(restored, folder, training_state(rank), on_damage="raise"), restored(
        folder, training_state(rank), **options
    )


def damage(path, how):
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = bytearray(path.read_bytes())
        data[-300] ^= 1
        path.write_bytes(data)


@pytest.mark.case(16)
@pytest.mark.parametrize("how", ["gone", "short", "flipped"])
def test_one_ranks_damage_makes_all_fall_back_together(rank_pool, tmp_path, how):
    rank_pool(4)(save_three, str(tmp_path))
    (path,) = (tmp_path / "step-00000003/parts").glob("rank-00003.*")
    damage(path, how)
    results = rank_pool(4)(fall_back, str(tmp_path), {})
    for rank, (raised, (report, said, value, mine)) in enumerate(results):
        assert raised.kind in ("CorruptError", "RankFailedError"), raised
        assert path.name in raised.text
        assert report.step == 2
        assert value == pytest.approx(2 + rank / 10)
        assert mine == rank
        assert any(path.name in text for text in report.skipped)
        if rank == 0:
            assert any("step-00000003" in text and path.name in text for text in said)


def test_two_damaged_steps_on_different_ranks(rank_pool, tmp_path):
    rank_pool(2)(save_three, str(tmp_path))
    for step, rank in ((3, 1), (2, 0)):
        (path,) = (tmp_path / f"step-{step:08d}/parts").glob(f"rank-{rank:05d}.*")
        damage(path, "flipped")
    for rank, (_, (report, _, value, _)) in enumerate(rank_pool(2)(fall_back, str(tmp_path), {})):
        assert report.step == 1
        assert len(report.skipped) == 2
        assert value == pytest.approx(1 + rank / 10)


def distinct(rank, folder):
    """Optimizer values that differ by rank, as sharded optimizers have them."""
    state = training_state(rank)
    state["mine"].value["exp_avg"] = torch.full((300,), float(rank))
    ks.save(folder, state)
    target = training_state(rank)
    target["mine"].value["exp_avg"] = torch.zeros(300)
    ks.load(folder, into=target)
    assert torch.equal(target["mine"].value["exp_avg"], torch.full((300,), float(rank)))
    assert torch.equal(target["parts"]["shard"].local, state["parts"]["shard"].local)
    group_works()
    if rank == 0:
        next(Path(folder).glob("parts/rank-00001.*")).unlink()
    group_works()
    return attempt(ks.load, folder, into=target)


@pytest.mark.case(10)
def test_each_rank_gets_its_own_back_or_all_fail(rank_pool, tmp_path):
    for outcome in rank_pool(2)(distinct, str(tmp_path / "ck")):
        assert outcome.kind == "CorruptError"
        assert "parts/rank-00001" in outcome.text


# --- one view of the storage ----------------------------------------------------------------------------------------


class Lagging(Watched):
    """What other ranks wrote is not to be seen yet: no listing shows it, no manifest opens."""

    def list(self, prefix):
        self.note("list", prefix)
        return iter([])

    def folders(self):
        self.note("folders", "")
        return []

    def open(self, name):
        if not name.endswith(".safetensors"):
            raise StorageError("open", name, FileNotFoundError(2, "not to be seen yet"))
        return super().open(name)


def lagging(rank, folder):
    root = Watched(folder) if rank == 0 else Lagging(folder)
    state = training_state(rank, value=float(rank == 9))
    with ks.Checkpointer(root, state, deadline_s=20, every=ks.Every(steps=2)) as checkpointer:
        fresh = checkpointer.restore()
        saved = [checkpointer.step() for _ in range(4)]
    with ks.Checkpointer(root, training_state(rank), deadline_s=20) as checkpointer:
        again = checkpointer.restore()
        one = checkpointer.restore(step=2)
    loaded = ks.load(type(root)(f"{folder}/step-00000004"), into=training_state(rank), deadline_s=20)
    return fresh.fresh, [item.step for item in saved if item], again.step, one.step, loaded.step


@pytest.mark.case(62)
def test_ranks_whose_view_lags_follow_the_coordinator(rank_pool, tmp_path):
    for fresh, saved, again, one, loaded in rank_pool(3)(lagging, str(tmp_path / "run")):
        assert (fresh, saved, again, one, loaded) == (True, [2, 4], 4, 2, 4)


# --- targets --------------------------------------------------------------------------------------------------------


def wrong_target(rank, folder, through):
    """Rank 1's target has another shape: no rank is changed, nobody falls back to an older step, all say why."""
    target = training_state(rank, value=-5.0)
    if rank == 1:
        target["parts"]["extra"] = torch.zeros(2)
        target["parts"]["shard"] = ks.sharded(torch.zeros(5), global_shape=(10,), offsets=(5,))
    before = [parameter.clone() for parameter in target["model"].parameters()]
    if through == "load":
        outcome = attempt(ks.load, f"{folder}/step-00000003", into=target, deadline_s=20)
    else:
        outcome = attempt(restored, folder, target)
    same = all(torch.equal(a, b) for a, b in zip(before, target["model"].parameters(), strict=True))
    return outcome, same and target.progress.step == 0, group_works()


def test_a_target_that_fits_on_some_ranks_only_changes_nothing_anywhere(rank_pool, tmp_path):
    rank_pool(3)(save_three, str(tmp_path))
    for through in ("load", "restore"):
        for outcome, unchanged, works in rank_pool(3)(wrong_target, str(tmp_path), through):
            assert outcome.kind == "MismatchError", outcome
            assert "step 3" in outcome.text
            assert len(outcome.mismatches) == 2
            assert all("(on rank 1)" in line for line in outcome.mismatches)
            assert any("parts/extra" in line for line in outcome.mismatches)
            assert any("[1800]" in line and "[10]" in line for line in outcome.mismatches)
            assert outcome.seconds < 10
            assert unchanged
            assert works


def broken_object(rank, folder):
    """An object of the user's raises on one rank while a step is restored: that is no damage of the step."""

    class Source:
        def state_dict(self):
            return {"at": torch.ones(3)}

        def load_state_dict(self, state):
            self.state = state

    class Broken(Source):
        def state_dict(self):
            raise KeyError("never at hand")

    good = {"source": Source(), "model": torch.nn.Linear(2, 2)}
    with ks.Checkpointer(folder, ks.TrainState(**good)) as checkpointer:
        checkpointer.step()
        torch.nn.init.zeros_(good["model"].weight)
        torch.nn.init.zeros_(good["model"].bias)
        checkpointer.save()
    state = ks.TrainState(source=Broken() if rank == 1 else Source(), model=torch.nn.Linear(2, 2))
    return attempt(restored, folder, state)


def test_a_broken_object_on_one_rank_is_no_damage(rank_pool, tmp_path):
    outcomes = rank_pool(2)(broken_object, str(tmp_path / "run"))
    assert [outcome.kind for outcome in outcomes] == ["RankFailedError", "KeyError"]
    assert all("never at hand" in outcome.text and outcome.seconds < 10 for outcome in outcomes)


def test_nothing_usable_is_an_error_on_all(rank_pool, tmp_path):
    rank_pool(2)(save_three, str(tmp_path))
    for step in (1, 2, 3):
        next((tmp_path / f"step-{step:08d}/parts").glob("rank-00001.*")).unlink()
    for outcome in rank_pool(2)(restore_only, str(tmp_path)):
        assert outcome.kind == "StepNotFoundError"
        assert all(f"step-0000000{step}" in outcome.text for step in (1, 2, 3))


def restore_only(rank, folder):
    return attempt(restored, folder, training_state(rank))


def test_one_process_sees_the_damage_too(tmp_path):
    save_three(0, tmp_path)
    damage(next((tmp_path / "step-00000003/parts").glob("*")), "flipped")
    with pytest.raises(CorruptError, match="digest"):
        ks.load(tmp_path / "step-00000003", into=training_state())
    report, said, value, _ = restored(tmp_path, training_state())
    assert (report.step, value) == (2, 2.0)
    assert len(said) == 1
