"""Model, optimizer and scheduler move between layouts and numbers of ranks as they are, with no conversion in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import keepstep as ks
from keepstep.errors import MismatchError
from tests.resharding.models import Adapted, Net, Run, differences, forget_meshes

LAYOUTS = ("ddp", "fsdp", "tp", "2d", "hsdp")


def visit(rank, folder, saves, loads, expected, make=Net):
    """Saves a trained run in each layout of ``saves``; loads (source, layout) pairs and compares with what was saved."""
    forget_meshes()
    wholes = {}
    for name, layout in saves.items():
        run = Run(layout, make=make).train(2)
        wholes[name] = run.whole()
        ks.save(f"{folder}/{name}", run.state)
    expected = {**expected, **wholes}
    wrong = []
    for source, layout in loads:
        run = Run(layout, seed=1, make=make)
        kept = [id(p) for p in run.model.parameters()], run.optimizer.param_groups
        report = ks.load(f"{folder}/{source}", into=run.state)
        assert kept == ([id(p) for p in run.model.parameters()], run.optimizer.param_groups)
        assert not report.components["optimizer"].missing
        wrong += [f"{source} -> {layout}, rank {rank}: {text}" for text in differences(run.whole(), expected[source])]
    return wholes, wrong


@pytest.mark.case(116)
@pytest.mark.case(123)
def test_between_all_layouts(rank_pool, tmp_path):
    folder = str(tmp_path)
    expected, wrong = visit(0, folder, {"none": "none"}, [("none", "none")], {})
    assert wrong == []

    def on(world, saves, loads):
        results = rank_pool(world)(visit, folder, saves, loads, expected, timeout_s=100)
        expected.update(results[0][0])
        assert [line for _, wrong in results for line in wrong] == []

    names = [f"{layout}4" for layout in LAYOUTS]
    on(4, dict(zip(names, LAYOUTS, strict=True)), [(n, layout) for n in ["none", *names] for layout in LAYOUTS])
    on(3, {"fsdp3": "fsdp", "ddp3": "ddp", "tp3": "tp"}, [(n, layout) for n in names for layout in ("fsdp", "tp")])
    on(2, {}, [(name, layout) for name in ("2d4", "fsdp3", "tp3", "none") for layout in ("ddp", "fsdp", "tp")])
    on(4, {}, [(name, layout) for name in ("fsdp3", "ddp3", "tp3") for layout in ("fsdp", "2d")])
    _, wrong = visit(0, folder, {}, [(name, "none") for name in expected], expected)
    assert wrong == []


def go_on(rank, folder, source, layout, steps):
    forget_meshes()
    run = Run(layout, seed=1)
    ks.load(f"{folder}/{source}", into=run.state)
    return run.train(steps).whole()


def start_and_go_on(rank, folder, layout, steps):
    forget_meshes()
    run = Run(layout).train(2)
    ks.save(f"{folder}/{layout}", run.state)
    return run.train(steps).whole()


@pytest.mark.case(116)
def test_training_goes_on_as_if_never_stopped(rank_pool, tmp_path):
    folder = str(tmp_path)
    reference = rank_pool(4)(start_and_go_on, folder, "fsdp", 5)
    same_layout = rank_pool(4)(go_on, folder, "fsdp", "fsdp", 5)
    for have, want in zip(same_layout, reference, strict=True):
        assert differences(have, want) == []
    for world, layout in ((3, "fsdp"), (2, "tp")):
        for have in rank_pool(world)(go_on, folder, "fsdp", layout, 5):
            assert differences(have, reference[0], close=True) == []
    assert differences(go_on(0, folder, "fsdp", "none", 5), reference[0], close=True) == []


@pytest.mark.case(123)
def test_a_trainable_part_beside_a_frozen_base(rank_pool, tmp_path):
    folder = str(tmp_path)
    saved = rank_pool(4)(visit, folder, {"four": "fsdp"}, [("four", "ddp")], {}, Adapted)
    expected = saved[0][0]
    assert [line for _, wrong in saved for line in wrong] == []
    assert sorted(k for k in expected["four"] if k.endswith("exp_avg")) == [
        f"optimizer/{name}/exp_avg" for name in ("a", "b", "scale_bias")
    ]
    for _, wrong in rank_pool(2)(visit, folder, {}, [("four", "fsdp"), ("four", "ddp")], expected, Adapted):
        assert wrong == []
    assert visit(0, folder, {}, [("four", "none")], expected, Adapted)[1] == []


# --- what belongs to a rank -----------------------------------------------------------------------------------------


def draws():
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def save_own_parts(rank, folder):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    state = ks.TrainState(
        model=torch.nn.Linear(2, 2),
        loader=ks.per_rank({"position": 10 + rank}, "same_rank"),
        strict=ks.per_rank([rank]),
    )
    torch.nn.init.constant_(state["model"].weight, 3.0)
    torch.nn.init.constant_(state["model"].bias, 4.0)
    ks.save(folder, state)
    return draws()


def load_own_parts(rank, folder):
    state = ks.TrainState(
        model=torch.nn.Linear(2, 2), loader=ks.per_rank({"position": -1}, "same_rank"), strict=ks.per_rank([-1])
    )
    before = state["model"].weight.clone()
    with pytest.raises(MismatchError, match=r"strict: saved per rank on 2 ranks, now there are \d") as caught:
        ks.load(folder, into=state)
    assert "only=" in str(caught.value)
    assert torch.equal(state["model"].weight, before)
    report = ks.load(folder, into=state, only=["model", "loader", "rng", "progress"])
    assert torch.all(state["model"].weight == 3.0)
    assert torch.all(state["model"].bias == 4.0)
    assert report.components["strict"].skipped
    first = draws()
    ks.load(folder, into=state, only=["rng"])
    assert draws() == first
    return state["loader"].value["position"], first, report.components["rng"], report.components["loader"]


@pytest.mark.case(31)
@pytest.mark.case(32)
@pytest.mark.case(115)
def test_what_belongs_to_a_rank_follows_its_rule(rank_pool, tmp_path):
    folder = str(tmp_path / "ck")
    streams = rank_pool(2)(save_own_parts, folder)
    assert streams[0] != streams[1]

    more = rank_pool(4)(load_own_parts, folder)
    assert [position for position, *_ in more] == [10, 11, -1, -1]
    assert [first for _, first, *_ in more[:2]] == streams
    assert len({repr(first) for _, first, *_ in more}) == 4
    assert [rng.rederived for *_, rng, _ in more] == [["rng: new on ranks 2..3"]] * 4
    assert [loader.reset for *_, loader in more] == [["loader: as before the load on ranks 2..3"]] * 4
    again = rank_pool(4)(load_own_parts, folder)
    assert [first for _, first, *_ in again] == [first for _, first, *_ in more]

    position, first, *_ = load_own_parts(0, folder)
    assert (position, first) == (10, streams[0])
