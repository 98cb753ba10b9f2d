"""What a run leaves out of its steps is demanded back: from a base of any kind, that has the values the run had."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import keepstep as ks
from keepstep.errors import MismatchError
from keepstep.interop.torch_save import show_file
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched

KINDS = ("keepstep", "safetensors", "torch.save", "dcp")


class Base(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


class Adapted(Base):
    """A base and a low-rank adapter for each of its layers."""

    def __init__(self, width=8):
        super().__init__(width)
        self.lora = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.layers.requires_grad_(False)

    def forward(self, x):
        for layer, lora in zip(self.layers, self.lora, strict=True):
            x = layer(x) + lora(x)
        return x


class Wrapped(nn.Module):
    """The same one level down, as libraries for adapters have it."""

    def __init__(self):
        super().__init__()
        self.inner = Base()
        self.inner.requires_grad_(False)
        self.lora = nn.Linear(8, 8)


def base_of(seed):
    torch.manual_seed(seed)
    return Base()


def state_of(seed, leave_out=("model/layers.**",)):
    torch.manual_seed(seed)
    model = Adapted()
    optimizer = torch.optim.AdamW(model.lora.parameters(), lr=0.1)
    return ks.TrainState(model=model, optimizer=optimizer, leave_out=leave_out)


def train(state, steps=2):
    for _ in range(steps):
        state["model"](torch.ones(8)).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def everything(state):
    return copy.deepcopy([state["model"].state_dict(), state["optimizer"].state_dict()])


def put(model, kind, path):
    """The model on its own, in a format; gives what a load takes for it."""
    path.mkdir(parents=True)
    if kind == "keepstep":
        ks.save(path / "step", {"model": model})
    elif kind == "safetensors":
        save_file({name: value.clone() for name, value in model.state_dict().items()}, path / "model.safetensors")
    elif kind == "torch.save":
        torch.save(model.state_dict(), path / "model.pt")
        return show_file(path / "model.pt")
    else:
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    return path / "step" if kind == "keepstep" else path


@pytest.fixture
def bases(tmp_path):
    return {kind: put(base_of(0), kind, tmp_path / f"base.{kind}") for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_of_any_kind_is_known_again_in_every_other(kind, bases, tmp_path):
    state = state_of(1)
    report = ks.load(bases[kind], state, only=["model"], allow_missing=["model/lora.**"])
    assert len(report.base) == 16
    assert_same(dict(state["model"].layers.state_dict()), dict(base_of(0).layers.state_dict()))
    train(state)
    ks.save(tmp_path / "s", state, step=5)
    with ks.open(tmp_path / "s") as opened:
        assert [key for key in opened if key.startswith("model/layers")] == []
        assert opened.manifest.components["model"].left_out_from == report.base
        assert opened.manifest.components["optimizer"].left_out_from == ""
    for other in KINDS:
        again = state_of(2)
        assert ks.load(tmp_path / "s", again, left_out=bases[other]).step == 5
        assert_same(everything(again), everything(state))
        assert again.left_out_from == report.base
    # One that was trained on, with the same names and shapes, in each kind.
    target = state_of(3)
    before = everything(target)
    tuned = base_of(0)
    with torch.no_grad():
        tuned.layers[1].bias += 1e-3
    for other in KINDS:
        source = put(tuned, other, tmp_path / f"tuned.{other}")
        for dry_run in (True, False):
            with pytest.raises(MismatchError, match=r"step 5 in .*names another base than the one it had") as caught:
                ks.load(tmp_path / "s", target, left_out=source, dry_run=dry_run)
            assert report.base in caught.value.mismatches[0]
            assert "model/layers.**" in str(caught.value)
    assert_same(everything(target), before)


def test_the_base_goes_on_from_start_to_start(tmp_path):
    ks.save(tmp_path / "base", {"model": base_of(0)})
    ks.save(tmp_path / "other", {"model": base_of(7)})
    state = state_of(1)
    with ks.Checkpointer(tmp_path / "run", state, background="off") as keeper:
        assert keeper.restore(left_out=tmp_path / "base").fresh
        ks.load(tmp_path / "base", state, only=["model/layers.**"])
        train(state, 1)
        keeper.step()
        keeper.save()
    for step in (1, 2):
        state = state_of(10 + step)
        with ks.Checkpointer(tmp_path / "run", state, background="off") as keeper:
            with pytest.raises(MismatchError, match="another base"):
                keeper.restore(left_out=tmp_path / "other")
            with pytest.raises(MismatchError, match=r"model/layers\.0\.weight: left out when it was saved"):
                keeper.restore()
            assert keeper.restore(left_out=tmp_path / "base").step == step
            keeper.step()
            keeper.save()
    assert torch.equal(state["model"].layers[0].weight, base_of(0).layers[0].weight)
    # Whoever means the other one says so in two calls.
    ks.load(tmp_path / "other", state, only=["model/layers.**"])
    ks.load(tmp_path / "run/step-00000003", state, allow_missing=["model/layers.**"])
    ks.save(tmp_path / "moved", state)
    assert ks.load(tmp_path / "moved", state_of(4), left_out=tmp_path / "other").base == ""


def test_shapes_and_dtypes_of_a_base_that_was_not_written_down(tmp_path):
    state = state_of(1)
    train(state)
    ks.save(tmp_path / "s", state)
    wide = Base(16)
    ks.save(tmp_path / "wide", {"model": wide})
    ks.save(tmp_path / "half", {"model": base_of(0).half()})
    target = state_of(2)
    before = everything(target)
    with pytest.raises(MismatchError) as caught:
        ks.load(tmp_path / "s", target, left_out=tmp_path / "wide")
    assert caught.value.mismatches[0] == ("model/layers.0.weight: saved with shape [16, 16], the target has [8, 8]")
    assert len(caught.value.mismatches) == 4
    with pytest.raises(MismatchError, match=r"model/layers\.1\.bias: saved as float16, the target is float32"):
        ks.load(tmp_path / "s", target, left_out=tmp_path / "half")
    assert_same(everything(target), before)
    casts = {"optimizer": None, "model/layers.**": torch.float32}
    ks.load(tmp_path / "s", target, left_out=tmp_path / "half", cast=casts)
    assert torch.equal(target["model"].layers[0].weight, base_of(0).half().float().layers[0].weight)


def test_a_base_with_other_names_is_renamed(tmp_path):
    def wrapped(seed):
        torch.manual_seed(seed)
        return ks.TrainState(model=Wrapped(), leave_out=["model/inner.**"])

    names = {r"^model/layers\.": "model/inner.layers."}
    ks.save(tmp_path / "base", {"model": base_of(0)})
    state = wrapped(1)
    mark = ks.load(tmp_path / "base", state, rename=names, allow_missing=["model/lora.*"], only=["model"]).base
    ks.save(tmp_path / "s", state)
    again = wrapped(2)
    report = ks.load(tmp_path / "s", again, left_out=tmp_path / "base", rename=names)
    assert_same(dict(again["model"].state_dict()), dict(state["model"].state_dict()))
    assert (mark, again.left_out_from) == (state.left_out_from, mark)
    assert report.notes == (f"what was left out came from {tmp_path / 'base'}",)


# --- together with only= --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_only_chooses_from_both(known, tmp_path):
    ks.save(tmp_path / "base", {"model": base_of(0)})
    state = state_of(1)
    if known:
        ks.load(tmp_path / "base", state, only=["model/layers.**"])
    train(state)
    ks.save(tmp_path / "s", state)
    mark = state.left_out_from
    assert bool(mark) is known
    for only, from_base, from_step in (
        (["model"], {"0", "1"}, True),
        (["model/layers.0.*"], {"0"}, False),
        (["model/lora.**"], set(), True),
        (["optimizer"], set(), False),
        (["model/layers.1.*", "model/lora.*", "optimizer"], {"1"}, True),
    ):
        target = state_of(2)
        before = everything(target)
        source = Watched(tmp_path / "base")
        look = ks.load(tmp_path / "s", target, only=only, left_out=tmp_path / "base", dry_run=True)
        assert_same(everything(target), before)
        report = ks.load(tmp_path / "s", target, only=only, left_out=source)
        needed = len(from_base) * (64 + 8) * 4
        assert report.bytes_needed == look.bytes_needed
        assert sum(count for name, count in look.files.items() if name.startswith(f"{tmp_path / 'base'}/")) == needed
        for layer in "01":
            taken = base_of(0) if layer in from_base else state_of(2)["model"]
            name = f"layers.{layer}.weight"
            assert torch.equal(target["model"].state_dict()[name], taken.state_dict()[name])
        lora = state if from_step else state_of(2)
        assert torch.equal(target["model"].lora[1].weight, lora["model"].lora[1].weight)
        assert bool(target["optimizer"].state) is ("optimizer" in only)
        # What a target has of a part of the base is not that base.
        assert bool(target.left_out_from) is (from_base == {"0", "1"})
        assert target.left_out_from in ("", mark) or not known
        if not from_base and not known:
            assert {name.partition("/")[0] for name in source.names["open"]} <= {".metadata", "state"}
    with pytest.raises(ks.errors.UsageError, match=r"only=model/lyers\.\*: the checkpoint has"):
        ks.load(tmp_path / "s", state_of(2), only=["model/lyers.*"], left_out=tmp_path / "base")
    with pytest.raises(MismatchError, match=r"model/layers\.0\.weight: left out when it was saved; left_out= names"):
        ks.load(tmp_path / "s", state_of(2), only=["model"])
