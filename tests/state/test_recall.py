"""What is remembered of a state's structure never shows: a capture that recalls equals one that does not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.state.capture import capture
from keepstep.state.recall import Recall


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("empty", torch.zeros(0, 4))

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(layer(x)).relu()
        return self.head(x)


def run():
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = ks.TrainState(model=model, optimizer=optimizer, extra={"a": torch.zeros(3)}, log=[1])
    train(state)
    return state


def train(state):
    state["model"](torch.randn(8, 4)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def same(state, recall, *, overlap=True):
    """Captures with and without recall, and compares everything; returns whether something was recalled."""
    kept = dict(recall.kept)
    recalled = capture(state, rank=0, world=1, overlap=overlap, recall=recall)
    afresh = capture(state, rank=0, world=1, overlap=overlap)
    for name in ("tree", "own_tree", "structure", "aliases", "components", "late"):
        assert getattr(recalled, name) == getattr(afresh, name), name
    for spec, ours, theirs in zip(recalled.structure.tensors, recalled.locals, afresh.locals, strict=True):
        # (A lazy negation is carried out at every capture, in new memory.)
        assert spec.key == "model/odd" or [t.data_ptr() for t in ours] == [t.data_ptr() for t in theirs]
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))
    return bool(kept) and all(recall.kept.get(key) is value for key, value in kept.items())


def tie(state):
    state["model"].layers[2].weight = state["model"].layers[1].weight


def untie(state):
    state["model"].head.weight = nn.Parameter(state["model"].head.weight.detach().clone())


def tie_outside(state):
    state["extra"]["a"] = state["model"].layers[3].bias.detach()


def view(state):
    state["model"].layers[4].weight = nn.Parameter(state["model"].layers[4].weight.detach().t())


def tie_moments(state):
    moments = list(state["optimizer"].state.values())
    moments[1]["exp_avg"] = moments[0]["exp_avg"]


CHANGES = {
    "contents": train,
    "memory": lambda s: [setattr(p, "data", p.data.clone()) for p in s["model"].parameters()],
    "plain value": lambda s: s["log"].append(2),
    "rate": lambda s: s["optimizer"].param_groups[0].update(lr=0.5),
    "dtype": lambda s: s["model"].double(),
    "shape": lambda s: setattr(s["model"], "layers", nn.ModuleList(nn.Linear(4, 4) for _ in range(5))),
    "key": lambda s: s["model"].register_buffer("more", torch.ones(2)),
    "moments gone": lambda s: s["optimizer"].state.clear(),
    "tied": tie,
    "tied elsewhere": tie_outside,
    "moments tied": tie_moments,
    "untied": untie,
    "a view": view,
    "guarded no more": lambda s: s.replace_value("optimizer", None),
    "no longer empty": lambda s: setattr(s["model"], "empty", torch.zeros(1, 4)),
    "negated": lambda s: s["model"].register_buffer("odd", torch.zeros(3, dtype=torch.complex64).conj().imag),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_captured_as_it_is(change):
    state, recall = run(), Recall()
    same(state, recall)
    assert same(state, recall), "nothing was recalled of an unchanged state"
    CHANGES[change](state)
    recalled = same(state, recall)
    assert recalled == (change in ("contents", "memory", "plain value", "rate", "guarded no more")), (
        "recalled, or not, against expectation"
    )
    same(state, recall)


@pytest.mark.case(89)
def test_what_is_recalled_is_structure_and_never_contents():
    state, recall = run(), Recall()
    seen = []
    for _ in range(4):
        train(state)
        snapshot = capture(state, rank=0, world=1, overlap=True, recall=recall)
        seen.append([held[0].clone() for held in snapshot.locals])
    assert recall.kept
    assert all(not torch.equal(a[1], b[1]) for a, b in itertools.pairwise(seen))


def test_another_state_is_not_taken_for_the_remembered_one():
    first, second, recall = run(), run(), Recall()
    second["model"].layers[5] = nn.Linear(4, 8)
    for _ in range(2):
        same(first, recall)
        same(second, recall)
    for state in (first, copy.deepcopy(first["model"])):
        same({"model": state} if isinstance(state, nn.Module) else state, recall)


def test_a_dictionary_that_changes_all_the_time_is_let_be():
    model = Tied()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train(state)
    recall = Recall()
    for step in range(8):
        for each in state["optimizer"].state.values():
            each["count"] = step
        same(state, recall)
    assert "optimizer/state" not in recall.kept
    assert same(state, recall)
