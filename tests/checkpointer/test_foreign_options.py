"""The options of a load do the same with what other programs have saved as with a step of the same state."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import keepstep as ks
from keepstep.errors import CheckpointError
from keepstep.interop.torch_save import show_file
from tests.helpers.same import assert_same

KINDS = ("dcp", "torch.save", "safetensors")


class Net(nn.Module):
    def __init__(self, *, head=False, dtype=torch.float32, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 4, dtype=dtype), nn.Linear(4, 4))
        if head:
            self.head = nn.Linear(4, 2)


def state_of(seed, *, optimizer=True, **shape):
    torch.manual_seed(seed)
    model = Net(**shape)
    if not optimizer:
        return {"model": model}
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1)),
        "note": {"n": seed},
    }


def saved_state(seed):
    state = state_of(seed)
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    return state


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same state as each program saves it, and as a step; of safetensors and its step, the model alone."""
    folder = tmp_path_factory.mktemp("sources")
    state = saved_state(0)
    plain = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict(), "note": state["note"]}
    ks.save(folder / "step", state)
    ks.save(folder / "weights", {"model": state["model"]})
    torch.save(plain, folder / "all.pt")
    (folder / "hub").mkdir()
    save_file(dict(plain["model"]), folder / "hub" / "model.safetensors")
    with warnings.catch_warnings(action="ignore"):
        dcp.save(plain, checkpoint_id=folder / "dcp", no_dist=True)
    return {
        "dcp": (folder / "dcp", folder / "step"),
        "torch.save": (show_file(folder / "all.pt"), folder / "step"),
        "safetensors": (folder / "hub", folder / "weights"),
    }


OF_MODELS = (
    ({}, {"only": ["model"]}),
    ({}, {"only": ["model/body.1.*"]}),
    ({"head": True}, {"only": ["model"], "allow_missing": ["model/head.*"]}),
    ({"head": True}, {"only": ["model"]}),
    ({"head": True}, {"only": ["model"], "allow_missing": ["model/haed.*"]}),
    ({}, {"only": ["model"], "rename": {r"^model/body\.0\.": None}, "allow_missing": ["model/body.0.*"]}),
    ({}, {"only": ["model"], "rename": lambda key: key.replace("body.", "boby.")}),
    ({"dtype": torch.bfloat16}, {"only": ["model"], "cast": {"model/body.0.*": torch.bfloat16}}),
    ({"dtype": torch.bfloat16}, {"only": ["model"]}),
    ({"width": 5}, {"only": ["model"]}),
    ({}, {"only": ["modle"]}),
)
OF_ALL = (
    ({}, {}),
    ({"head": True}, {}),
    ({"head": True}, {"allow_missing": ["model/head.*"]}),
    ({"optimizer": False}, {"allow_extra": ["optimizer", "note"]}),
    ({}, {"only": ["optimizer"]}),
    ({}, {"only": ["optimizer/state/body.0.*"]}),
    ({}, {"only": ["optimizer/param_groups/*/lr"]}),
    ({}, {"override": {"optimizer/param_groups/*/lr": 0.5, "note/n": 7}}),
    ({}, {"cast": {"optimizer/state/**/exp_avg": torch.float16, "**": None}}),
    ({}, {"override": {"optimizer/param_groups/*/rl": 0.5}}),
    ({}, {"cast": {"optimizer/state/body.7.*": None}}),
)


def outcome(source, shape, options):
    """What became of a target, and what was said of it; places and numbers of steps apart."""
    state = state_of(3, **shape)
    look = error = report = None
    for dry_run in (True, False):
        try:
            look, report = report, ks.load(source, state, dry_run=dry_run, **options)
        except CheckpointError as err:
            # (In another order: that of a folder of safetensors is that of the files.)
            error = type(err), sorted(getattr(err, "mismatches", str(err)))
    if report is not None:
        assert look.components == report.components
        assert look.bytes_needed == report.bytes_needed == sum(look.files.values())
    told = None
    if report is not None:
        told = {
            name: (sorted(part.cast), part.missing, part.unexpected, part.reset, part.overridden, part.conversions)
            for name, part in report.components.items()
        }
    held = [dict(state["model"].state_dict())]
    if "optimizer" in state:
        optimizer = state["optimizer"]
        held += [[dict(optimizer.state.get(p, {})) for p in state["model"].parameters()], state["note"]]
        held += [[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]]
    return error, told, held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(OF_MODELS) + len(OF_ALL)))
def test_the_same_as_with_a_step(kind, number, sources):
    shape, options = (*OF_MODELS, *OF_ALL)[number]
    if kind == "safetensors" and number >= len(OF_MODELS):
        shape, options = {**shape, "optimizer": False}, {k: v for k, v in options.items() if k == "allow_missing"}
    foreign, step = sources[kind]
    (error, told, held), (expected, told_of_step, held_of_step) = (
        outcome(source, shape, options) for source in (foreign, step)
    )
    assert error == expected
    assert_same(told, told_of_step)
    assert_same(held, held_of_step)


def test_all_kinds_of_outcomes_are_among_them(sources):
    outcomes = [outcome(sources["dcp"][1], *case)[0] for case in (*OF_MODELS, *OF_ALL)]
    assert {None if error is None else error[0].__name__ for error in outcomes} == {None, "MismatchError", "UsageError"}
    assert sum(error is None for error in outcomes) >= 10
