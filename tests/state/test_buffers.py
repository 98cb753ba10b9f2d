"""Buffers that a module does not call persistent: left alone as PyTorch does, or saved and restored on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import keepstep as ks
from tests.helpers.same import assert_same


class Cached(nn.Module):
    def __init__(self, value=0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("mean", torch.full((2,), float(value)))
        self.register_buffer("cache", torch.full((3,), float(value)), persistent=False)
        self.register_buffer("unset", None, persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("table", torch.full((2, 2), int(value), dtype=torch.int32), persistent=False)


class Hooked(Cached):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("kind", [Cached, Hooked])
def test_they_are_saved_and_restored_on_request_only(kind, tmp_path):
    model, fresh = kind(3), kind()
    ks.save(tmp_path / "usual", ks.TrainState(model=model))
    ks.save(tmp_path / "all", ks.TrainState(model=model, non_persistent_buffers=True))
    ks.load(tmp_path / "usual", into=ks.TrainState(model=fresh))
    assert (fresh.cache.tolist(), fresh.inner.table.tolist()) == ([0.0] * 3, [[0, 0], [0, 0]])
    buffers = dict(fresh.named_buffers())
    ks.load(tmp_path / "all", into=ks.TrainState(model=fresh, non_persistent_buffers=True))
    assert {name: id(buffer) for name, buffer in fresh.named_buffers()} == {n: id(b) for n, b in buffers.items()}
    assert_same(dict(fresh.named_buffers()), dict(model.named_buffers()))
    assert list(ks.open(tmp_path / "all"))[-2:] == ["model/cache", "model/inner.table"]


def test_two_sides_that_do_not_agree_are_told_about_the_switch(tmp_path):
    model = Cached(3)
    ks.save(tmp_path / "usual", ks.TrainState(model=model))
    ks.save(tmp_path / "all", ks.TrainState(model=model, non_persistent_buffers=True))
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "all", into=ks.TrainState(model=Cached()))
    hint = "it is a buffer that is not persistent, which TrainState(non_persistent_buffers=True) saves and restores"
    assert [text for text in caught.value.mismatches if "(rename=" not in text] == [
        f"model/{name}: in the checkpoint, not in the target module; {hint}" for name in ("cache", "inner.table")
    ]
    with pytest.raises(
        ks.errors.MismatchError, match="model/cache: in the target module, not in the checkpoint; it is"
    ):
        ks.load(tmp_path / "usual", into=ks.TrainState(model=Cached(), non_persistent_buffers=True))
    report = ks.load(tmp_path / "all", into=ks.TrainState(model=Cached()), strict=False)
    assert report.components["model"].unexpected == ["model/cache", "model/inner.table"]


def test_names_are_those_without_wrappers(tmp_path):
    wrapped = nn.Sequential(checkpoint_wrapper(Cached(3)))
    ks.save(tmp_path / "step", ks.TrainState(model=wrapped, non_persistent_buffers=True))
    assert "model/0.inner.table" in ks.open(tmp_path / "step")
    plain = nn.Sequential(Cached())
    ks.load(tmp_path / "step", into=ks.TrainState(model=plain, non_persistent_buffers=True))
    assert plain[0].cache.tolist() == [3.0] * 3


def test_a_shared_module_stores_them_once_under_both_names(tmp_path):
    def pair(value):
        part = Cached(value)
        return nn.ModuleDict({"a": part, "b": part})

    model, fresh = pair(3), pair(0)
    ks.save(tmp_path / "step", ks.TrainState(model=model, non_persistent_buffers=True))
    assert ks.open(tmp_path / "step").manifest.aliases["model/b.cache"] == "model/a.cache"
    ks.load(tmp_path / "step", into=ks.TrainState(model=fresh, non_persistent_buffers=True))
    assert fresh["b"].cache.tolist() == [3.0] * 3


def test_a_background_save_has_them_as_they_were_at_the_boundary(tmp_path):
    model = Cached(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ks.TrainState(model=model, optimizer=optimizer, non_persistent_buffers=True)
    with ks.Checkpointer(tmp_path / "run", state, background="thread") as checkpointer:
        for value in (1.0, 2.0, 3.0):
            model.cache.fill_(value)
            checkpointer.step()
            checkpointer.save()
            model.cache.zero_()
    for step in (1, 2, 3):
        assert ks.open(tmp_path / "run" / f"step-{step:08d}")["model/cache"].tolist() == [float(step)] * 3


def replicated(rank, path):
    """Under DistributedDataParallel the first rank's buffers are everybody's."""
    wrapped = nn.parallel.DistributedDataParallel(Cached(1.0))
    wrapped.module.cache.fill_(rank)
    state = ks.TrainState(model=wrapped, non_persistent_buffers=True)
    ks.save(path, state)
    ks.load(path, into=state)
    return wrapped.module.cache.tolist()


def test_replicas_follow_the_rule_of_their_wrapper(rank_pool, tmp_path):
    assert rank_pool(2)(replicated, str(tmp_path / "step")) == [[0.0] * 3] * 2
