"""A load that is refused lists all that does not fit, the same on every rank, and has not touched a bit of the target."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import keepstep as ks
from keepstep.errors import CheckpointError, MismatchError
from tests.helpers.same import assert_same, bits, rng_state
from tests.resharding.models import forget_meshes, spread


class Net(nn.Module):
    """What is saved, and, with faults, what it is loaded into."""

    def __init__(self, faults=()):
        super().__init__()
        self.a = nn.Linear(4, 6 if "shape" in faults else 4)
        self.b = nn.Linear(4, 4, dtype=torch.float64 if "dtype" in faults else None)
        setattr(self, "renamed" if "name" in faults else "named", nn.Linear(4, 4))
        self.one = nn.Parameter(torch.ones(4))
        self.other = self.one if "tied" in faults else nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32 if "dtype" in faults else torch.int64))


@dataclass
class Closed:
    """Takes no state."""

    x: int = 1


def state_of(layout, seed, faults=()):
    torch.manual_seed(seed)
    model = Net(faults)
    model = spread(model, layout) if "dtype" not in faults or layout == "none" else model
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.2}]
    if "groups" in faults:
        groups = [{"params": parameters}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    cfg = {
        "tensor": 5 if "kind" in faults else torch.full((3,), float(seed)),
        "plain": torch.ones(2) if "kind" in faults else seed,
        "list": [torch.full((2,), float(seed)) for _ in range(3 if "longer" in faults else 2)],
        "view": torch.zeros(1).expand(4) if "view" in faults else torch.full((4,), float(seed)),
    }
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "cfg": cfg}
    parts |= {"new": torch.ones(1)} if "component" in faults else {"old": {"x": 1}}
    if "object" in faults:
        parts["scheduler"] = Closed()
    return ks.TrainState(**parts)


EXPECTED = {
    "shape": [
        "model/a.weight: saved with shape [4, 4], the target has [6, 4]",
        "model/a.bias: saved with shape [4], the target has [6]",
        "optimizer/state/a.weight/exp_avg: the state of a parameter that had the shape [4, 4], and has [6, 4] now",
    ],
    "dtype": [
        "model/b.weight: saved as float32, the target is float64 (cast=True converts)",
        "model/seen: saved as int64, the target is int32 (cast=True converts)",
    ],
    "name": [
        "model/renamed.weight: in the target module, not in the checkpoint",
        "model/named.bias: in the checkpoint, not in the target module",
        "optimizer/state/renamed.weight: a parameter of the target's groups, in no group of the checkpoint",
        "optimizer/state/named.weight: a parameter of the checkpoint's groups, in no group of the target",
        "model/renamed.weight may be model/named.weight under another name (rename= maps keys)",
    ],
    "tied": ["model/other: tied to model/one in the target, but saved as two separate tensors"],
    "groups": ["optimizer/param_groups/0: its parameters were saved in groups with different initial_lr, lr"],
    "kind": [
        "cfg/tensor: a int in the target, a tensor in the checkpoint",
        "cfg/plain: Tensor in the target, nothing of that name in the checkpoint",
    ],
    "longer": ["cfg/list/2: Tensor in the target, nothing of that name in the checkpoint"],
    "view": ["cfg/view: the target's elements share memory (an expanded or conjugated view)"],
    "component": [
        "new: in the target, not in the checkpoint, which has model, optimizer, scheduler, cfg, old, rng, progress",
        "old: in the checkpoint, not in the target (only=[...] leaves it out)",
    ],
    "object": ["scheduler: saved from a StepLR (stateful), the target is a Closed"],
}


def held(state):
    """Every bit a process holds of a state, the random numbers to come, and which objects are where."""

    def local(value):
        if isinstance(value, torch.Tensor):
            return bits(value.to_local() if isinstance(value, DTensor) else value)
        if isinstance(value, dict):
            return {key: local(item) for key, item in value.items()}
        return [local(item) for item in value] if isinstance(value, list | tuple) else copy.deepcopy(value)

    names = [name for name in state if name not in ("rng", "progress")]
    values = {
        name: local(state[name].state_dict() if hasattr(state[name], "state_dict") else state[name]) for name in names
    }
    optimizer = state["optimizer"]
    identities = [id(p) for g in optimizer.param_groups for p in g["params"]]
    identities += [id(v) for s in optimizer.state.values() for v in s.values()] + [
        id(g) for g in optimizer.param_groups
    ]
    identities += [id(state[name]) for name in names] + [id(value) for value in state["cfg"].values()]
    return values, identities, rng_state(), vars(state.progress).copy() if hasattr(state.progress, "__dict__") else None


def refused(folder, layout, faults, **options):
    """The lines of the error; nothing has changed."""
    state = state_of(layout, 1, faults)
    before = held(state)
    with pytest.raises(CheckpointError) as caught:
        ks.load(folder, state, **options)
    assert_same(held(state), before)
    assert "Nothing was changed" in str(caught.value)
    assert "{" not in str(caught.value)
    return caught.value.mismatches if isinstance(caught.value, MismatchError) else str(caught.value)


def all_faults(rank, folder, layout, faults=tuple(EXPECTED)):
    forget_meshes()
    told = [refused(folder, layout, {fault}) for fault in faults]
    told.append(refused(folder, layout, {*EXPECTED}))
    told += [
        refused(folder, layout, (), **options)
        for options in ({"only": ["modle"]}, {"cast": {"modle": None}}, {"override": {"cfg/plani": 1}})
    ]
    # What one rank alone finds is told to all.
    told.append(refused(folder, layout, {"longer"} if rank else {"view"}))
    return told


def save(rank, folder, layout):
    forget_meshes()
    ks.save(folder, state_of(layout, 0), step=9)


def check(told, faults=tuple(EXPECTED)):
    for fault, lines in zip(faults, told, strict=False):
        assert set(EXPECTED[fault]) <= set(lines), f"{fault}: {lines}"
    together = told[len(faults)]
    # A shape that does not fit hides nothing but what hangs on it: all are found in one go.
    assert {line for lines in EXPECTED.values() for line in lines} <= set(together)


@pytest.mark.slow
def test_every_fault_alone_and_all_at_once(tmp_path):
    save(0, tmp_path / "s", "none")
    check(all_faults(0, tmp_path / "s", "none"))


def test_the_same_on_all_ranks(rank_pool, tmp_path):
    save(0, str(tmp_path / "one"), "none")
    rank_pool(2)(save, str(tmp_path / "two"), "fsdp")
    for name in ("one", "two"):
        first, second = rank_pool(2)(all_faults, str(tmp_path / name), "fsdp", ("groups",))
        assert first == second
        check(first, ("groups",))
        assert [line.rpartition(" (on rank ")[2] for line in first[-1]] == ["0)", "1)"]
    check(all_faults(0, tmp_path / "two", "none", ("shape",)), ("shape",))
