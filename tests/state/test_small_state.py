"""Schedulers, the loss scaler, averages, random streams and plain values: small, and wrong for a whole run if wrong once."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import enum
import math
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import keepstep as ks
from keepstep.errors import UnsafeValueError
from tests.helpers.same import assert_same, rng_state


class WarmUp:
    """A learning-rate rule with a state of its own, as LambdaLR accepts it."""

    def __init__(self, steps):
        self.steps = steps
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return min(1.0, (step + 1) / self.steps)


def chained(optimizer):
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.1, 4), schedulers.ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    )


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.CosineAnnealingLR(optimizer, 8)]
    return schedulers.SequentialLR(optimizer, parts, [4])


def plateau(optimizer):
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)


SCHEDULERS = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, WarmUp(6)),
    "LambdaLR, a function": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, WarmUp(6)),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 7], gamma=0.5),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, 0.1, 4),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 0.1, total_iters=7),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "SequentialLR": sequential,
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 9, 2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": plateau,
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    "CyclicLR, with momentum": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 3, mode="exp_range"),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=12),
    "OneCycleLR, three phases": lambda optimizer: schedulers.OneCycleLR(
        optimizer, 0.1, total_steps=12, anneal_strategy="linear", three_phase=True
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=5),
}


def test_every_scheduler_of_torch_is_here():
    known = {name.partition(",")[0] for name in SCHEDULERS}
    there = {
        name
        for name, cls in vars(schedulers).items()
        if isinstance(cls, type) and issubclass(cls, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert there - {"LRScheduler"} <= known


def build(make, lr=0.1):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, make(optimizer)


def advance(optimizer, scheduler, steps, first=0):
    """Learning rates and momenta over some steps; a plateau scheduler sees a loss that stops falling."""
    seen = []
    with warnings.catch_warnings():
        # SequentialLR and ChainedScheduler pass the epoch on, which torch itself has deprecated.
        warnings.simplefilter("ignore", UserWarning)
        for step in range(first, first + steps):
            optimizer.step()
            args = (1.0 / min(step + 1, 4),) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()
            scheduler.step(*args)
            seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    return seen


@pytest.mark.case(24)
@pytest.mark.case(26)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name, tmp_path):
    make = SCHEDULERS[name]
    model, optimizer, scheduler = build(make)
    advance(optimizer, scheduler, 5)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    saved = copy.deepcopy(scheduler.state_dict())
    expected = advance(optimizer, scheduler, 6, first=5)

    fresh, restored, schedule = build(make, lr=0.3)
    target = {"model": fresh, "optimizer": restored, "scheduler": schedule}
    ks.load(tmp_path / "s", target)
    ks.load(tmp_path / "s", target)
    assert_same(schedule.state_dict(), saved)
    assert target["scheduler"] is schedule
    assert advance(restored, schedule, 6, first=5) == expected


def test_a_function_of_torchs_own_stays_the_one_that_the_target_was_made_with(tmp_path):
    """As in ``SWALR`` of torch 2.9: how it anneals was chosen by name, and is a function in its state."""
    saved, fresh = (build(lambda optimizer: schedulers.StepLR(optimizer, 2)) for _ in range(2))
    saved[2].rule, fresh[2].rule = torch.optim.swa_utils.update_bn, torch.optim.swa_utils.get_ema_avg_fn
    advance(*saved[1:], 3)
    ks.save(tmp_path / "s", dict(zip(("model", "optimizer", "scheduler"), saved, strict=True)))
    ks.load(tmp_path / "s", dict(zip(("model", "optimizer", "scheduler"), fresh, strict=True)))
    assert fresh[2].rule is torch.optim.swa_utils.get_ema_avg_fn
    assert fresh[2].last_epoch == 3
    saved[2].rule = advance
    with pytest.raises(UnsafeValueError, match="scheduler/rule"):
        ks.save(tmp_path / "t", {"scheduler": saved[2]})


def test_a_rule_with_a_state_comes_back_into_its_own_object(tmp_path):
    rules = [WarmUp(6), WarmUp(9)]
    model, optimizer, scheduler = build(lambda optimizer: schedulers.LambdaLR(optimizer, rules[0]))
    advance(optimizer, scheduler, 3)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    fresh, restored, schedule = build(lambda optimizer: schedulers.LambdaLR(optimizer, rules[1]))
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored, "scheduler": schedule})
    assert schedule.lr_lambdas[0] is rules[1]
    assert vars(rules[1]) == vars(rules[0])


@pytest.mark.case(24)
def test_warm_up_and_cosine_over_a_hundred_steps(tmp_path):
    def rule(optimizer):
        def factor(step):
            return (step + 1) / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))

        return schedulers.LambdaLR(optimizer, factor)

    whole = build(rule)
    expected = advance(*whole[1:], 100)
    model, optimizer, scheduler = build(rule)
    advance(optimizer, scheduler, 37)
    ks.save(tmp_path / "with", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    ks.save(tmp_path / "without", {"model": model, "optimizer": optimizer})
    model, optimizer, scheduler = build(rule)
    ks.load(tmp_path / "with", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    assert advance(optimizer, scheduler, 63, first=37) == expected[37:]

    assert list(ks.open(tmp_path / "without").describe()["components"]) == ["model", "optimizer"]
    with pytest.raises(ks.errors.MismatchError, match="scheduler: in the target, not in the checkpoint"):
        ks.load(tmp_path / "without", {"model": model, "optimizer": optimizer, "scheduler": scheduler})


@pytest.mark.case(22)
def test_a_scheduler_goes_on_changing_a_learning_rate_that_is_a_tensor(tmp_path):
    def make(lr):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr, dtype=torch.float64))
        return model, optimizer, schedulers.ExponentialLR(optimizer, 0.5)

    def rates(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"].item())
        return seen

    model, optimizer, scheduler = make(0.1)
    rates(optimizer, scheduler, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    expected = rates(optimizer, scheduler, 3)
    fresh, restored, schedule = make(0.7)
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored, "scheduler": schedule})
    assert rates(restored, schedule, 3) == expected


# --- loss scaler ----------------------------------------------------------------------------------------------------


def scaled(used):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1234.0, growth_interval=50)
    if used:
        scaled_steps(model, optimizer, scaler, 7)
    return model, optimizer, scaler


def scaled_steps(model, optimizer, scaler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.case(29)
@pytest.mark.parametrize("used", [False, True], ids=["fresh process", "used process"])
@pytest.mark.parametrize("order", [("scaler", "optimizer"), ("optimizer", "scaler")], ids="-".join)
def test_the_loss_scaler_comes_back_in_any_order(order, used, tmp_path):
    model, optimizer, scaler = scaled(used=True)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1234.0, 7)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "scaler": scaler})
    fresh, restored, target = scaled(used)
    if used:
        scaled_steps(fresh, restored, target, 4)
        target.update(77.0)
    parts = {"model": fresh, "optimizer": restored, "scaler": target}
    for name in order:
        ks.load(tmp_path / "s", parts, only=[name])
    assert_same(target.state_dict(), scaler.state_dict())
    ks.load(tmp_path / "s", {name: parts[name] for name in ("model", *order)})
    assert_same(target.state_dict(), scaler.state_dict())
    scaled_steps(model, optimizer, scaler, 2)
    scaled_steps(fresh, restored, target, 2)
    assert_same((target.state_dict(), dict(fresh.state_dict())), (scaler.state_dict(), dict(model.state_dict())))


# --- averages -------------------------------------------------------------------------------------------------------


@pytest.mark.case(34)
def test_a_model_and_its_average_come_back_to_their_owners(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "average": average, "optimizer": optimizer, "decay": {"updates": 0}}

    def run(state, steps, first=0):
        for step in range(first, first + steps):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            state["optimizer"].zero_grad()
            state["model"](x).square().mean().backward()
            state["optimizer"].step()
            state["average"].update_parameters(state["model"])
            state["decay"]["updates"] += 1

    state = make(0)
    run(state, 3)
    ks.save(tmp_path / "s", state)
    fresh = make(1)
    ks.load(tmp_path / "s", fresh)
    run(state, 5, first=3)
    run(fresh, 5, first=3)
    for name in ("model", "average"):
        assert_same(dict(fresh[name].state_dict()), dict(state[name].state_dict()), name)
    assert fresh["average"].n_averaged.item() == 8
    assert fresh["decay"] == {"updates": 8}
    weights = [fresh[name].state_dict()[key] for name, key in (("model", "0.weight"), ("average", "module.0.weight"))]
    assert not torch.equal(*weights)


# --- random streams -------------------------------------------------------------------------------------------------


def draws(count=3):
    return [(random.random(), float(np.random.rand()), torch.rand(1).item()) for _ in range(count)]


@pytest.mark.case(31)
def test_random_streams_repeat_after_a_load(tmp_path):
    random.gauss(0, 1)  # leaves half a pair behind, which is part of the state
    np.random.standard_normal()
    state = ks.TrainState()
    ks.save(tmp_path / "s", state)
    first = (random.gauss(0, 1), np.random.standard_normal(), draws())
    draws(10)
    ks.load(tmp_path / "s", state)
    assert (random.gauss(0, 1), np.random.standard_normal(), draws()) == first


def test_a_load_draws_no_random_numbers_of_its_own(tmp_path):
    model = nn.Linear(3, 3)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "note": 1}
    ks.save(tmp_path / "s", state)
    before = rng_state()
    ks.load(tmp_path / "s", state)
    ks.save(tmp_path / "s", state, overwrite=True)
    assert rng_state() == before


def own_streams(rank, path):
    """Each rank has streams of its own; new ranks get new ones, the same at every load."""
    seed = 100 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    ks.save(path, ks.TrainState())
    first = draws()
    ks.load(path, ks.TrainState())
    assert draws() == first
    return first


def other_world(rank, path):
    results = []
    for _ in range(2):
        draws(rank + 1)
        report = ks.load(path, ks.TrainState())
        results.append(draws())
    assert results[0] == results[1]
    part = report.components["rng"]
    return results[0], part.rederived, part.noted


@pytest.mark.case(31)
@pytest.mark.case(32)
def test_random_streams_over_ranks(rank_pool, tmp_path):
    four = rank_pool(4)(own_streams, tmp_path / "four")
    assert len({str(drawn) for drawn in four}) == 4
    two = rank_pool(2)(own_streams, tmp_path / "two")
    grown = rank_pool(4)(other_world, tmp_path / "two")
    assert [drawn for drawn, _, _ in grown[:2]] == two
    assert len({str(drawn) for drawn, _, _ in grown}) == 4
    # Every rank's report tells of all ranks: that of rank 0 is the one that people see.
    assert [rederived for _, rederived, _ in grown] == [["rng: new on ranks 2..3"]] * 4
    shrunk = rank_pool(2)(other_world, tmp_path / "four")
    assert [drawn for drawn, _, _ in shrunk] == four[:2]
    assert [noted for *_, noted in shrunk] == [["rng: nothing here stands for ranks 2..3"]] * 2


# --- plain values ---------------------------------------------------------------------------------------------------


@pytest.mark.case(23)
def test_plain_values_come_back_with_their_types(tmp_path):
    saved = {"epoch": 20, "name": "a", "ok": True, "f": 1.5, "none": None, "b": b"x", "big": 2**70}
    ks.save(tmp_path / "s", saved)
    target = {"epoch": 1, "name": "", "ok": 0, "f": 2, "none": 3, "b": "y", "big": 1}
    ks.load(tmp_path / "s", target)
    assert_same(target, saved)


@pytest.mark.case(23)
def test_plain_values_of_a_train_state(tmp_path):
    ks.save(tmp_path / "s", ks.TrainState(epoch=20, ok=True, table={"a": (1, 2)}), step=4)
    state = ks.TrainState(epoch=1, ok=False, table={"b": 0})
    table = state["table"]
    ks.load(tmp_path / "s", state)
    assert (state["epoch"], state["ok"], state["table"]) == (20, True, {"a": (1, 2)})
    assert state["table"] is table


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: int
    tags: list


@dataclasses.dataclass(frozen=True)
class Fixed:
    at: tuple


class Own:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Own and other.value == self.value

    __hash__ = None

    def to_state(self):
        return {"value": self.value}

    @classmethod
    def from_state(cls, state):
        return cls(state["value"])


for registered in (Colour, Level, Point, Fixed, Own):
    ks.register(registered)

PLAIN = {
    "floats": [math.inf, -math.inf, math.nan, -0.0, 0.1, 5e-324, 1e308],
    "ints": [0, -1, 2**63, -(2**63), 2**64, -(2**200)],
    "texts": ["", "ü☃", "a\0b", "\ud800" if False else "x", '"quoted"\n'],
    "tuple": (1, (2, [3, (4,)])),
    "sets": [{1, 2, "a"}, frozenset({(1, 2), None}), set()],
    "keys": {1: "int", "1": "text", True and 2: "two", None: "none", (1, 2): "pair", 1.5: "float", b"x": "bytes"},
    "dollar": {"$": "tensor", "key": "x"},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter("hello"),
    "default": defaultdict(list, {"a": [1]}),
    "no default": defaultdict(None, {"a": 1}),
    "deque": deque([1, [2]], maxlen=5),
    "endless": deque([1, 2]),
    "path": Path("a/b"),
    "when": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    "day": dt.date(2026, 1, 2),
    "span": dt.timedelta(days=-1, seconds=3, microseconds=5),
    "complex": complex(1.5, -0.0),
    "bytes": bytes(range(256)),
    "bytearray": bytearray(b"abc"),
    "enum": [Colour.RED, Colour.BLUE, Level.HIGH],
    "point": Point(1, [Fixed((1, 2)), None]),
    "own": Own([1, (2,)]),
    "torch": [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda", 1),
    ],
}


@pytest.mark.case(23)
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_comes_back_as_it_was(name, tmp_path):
    saved = {"v": PLAIN[name]}
    ks.save(tmp_path / "s", saved)
    target = {"v": None}
    ks.load(tmp_path / "s", target)
    assert_same(target, saved)
    ks.load(tmp_path / "s", target)
    assert_same(target, saved)


@pytest.mark.case(161)
@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5),
        np.int32(-7),
        np.bool_(True),
        np.array(3.25),
        np.array([]),
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.array([1 + 2j], dtype=np.complex64),
        np.array([1, 2], dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.arange(100_000, dtype=np.float32).reshape(100, 1000),
        np.arange(100_000, dtype=np.float32).reshape(100, 1000).T,
        np.arange(100_000, dtype=np.float32)[::-1],
        np.arange(40_000, dtype=np.uint16),
        np.arange(20_000, dtype=">f8"),
        np.random.RandomState(3).get_state(),
        np.random.RandomState(3).get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state,
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'size', '')}",
)
def test_numpy_values_come_back_without_pickle(value, tmp_path):
    ks.save(tmp_path / "s", {"v": value, "inside": [value]})
    target = {"v": None, "inside": None}
    ks.load(tmp_path / "s", target)
    assert_same(target, {"v": value, "inside": [value]})
    assert not any(b"numpy" in path.read_bytes() for path in (tmp_path / "s").rglob("*.safetensors"))


def test_an_array_that_cannot_be_written_is_saved_without_a_word(tmp_path):
    array = np.arange(20_000.0)
    array.flags.writeable = False
    ks.save(tmp_path / "s", {"v": array})
    target = {"v": None}
    ks.load(tmp_path / "s", target)
    assert_same(target["v"], np.arange(20_000.0))
    assert target["v"].flags.writeable


def test_a_large_array_goes_into_a_live_one_of_the_same_kind(tmp_path):
    ks.save(tmp_path / "s", {"v": np.arange(100_000.0)})
    target = {"v": np.zeros(100_000)}
    ks.load(tmp_path / "s", target)
    assert_same(target["v"], np.arange(100_000.0))
    target["v"][0] = 5  # its memory is its own, and can be written


@pytest.mark.case(124)
def test_the_structure_is_the_saved_one_not_the_targets(tmp_path):
    saved = {"m": [{"a": 1}, {"b": 2}], "e": {}, "n": [{}, [], (), None]}
    ks.save(tmp_path / "s", saved)
    target = {"m": [], "e": {"x": 1}, "n": [None, None]}
    lists = target["m"], target["e"], target["n"]
    ks.load(tmp_path / "s", target)
    assert_same(target, saved)
    assert all(a is b for a, b in zip(lists, target.values(), strict=True))


@pytest.mark.case(124)
@pytest.mark.parametrize("empty", [{}, [], (), None, "", b"", set(), 0, False])
def test_empty_values_stay_apart(empty, tmp_path):
    ks.save(tmp_path / "s", {"v": {"inner": empty}})
    for other in ({}, [], (), None, 1, {"x": 1}, [1]):
        target = {"v": {"inner": copy.copy(other)}}
        ks.load(tmp_path / "s", target)
        assert_same(target, {"v": {"inner": empty}})


def test_the_order_of_keys_is_the_saved_one(tmp_path):
    ks.save(tmp_path / "s", {"v": {"b": 1, "a": 2, "c": {"y": 1, "x": 2}}})
    target = {"v": {"a": 0, "c": {"x": 0, "y": 0}, "b": 0}}
    ks.load(tmp_path / "s", target)
    assert_same(target["v"], {"b": 1, "a": 2, "c": {"y": 1, "x": 2}})


class Loader:
    """A component with a state_dict that grows, and that looks at what it is given."""

    def __init__(self, state=None):
        self.state = state
        self.given = []

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.given.append(state)
        self.state = state


def test_an_object_with_a_state_dict_is_given_the_whole_saved_state_once(tmp_path):
    state = {"position": 7, "buffer": [torch.arange(3), {"ids": (1, 2)}], "table": np.arange(20_000)}
    saved = Loader(state)
    ks.save(tmp_path / "s", {"data": saved})
    target = Loader({"position": 0})
    ks.load(tmp_path / "s", {"data": target})
    assert len(target.given) == 1
    assert_same(target.state, state)


def test_what_was_saved_is_a_copy(tmp_path):
    values = {"list": [1, 2], "array": np.zeros(3)}
    tensor = torch.zeros(3)
    ks.save(tmp_path / "s", {"values": values, "tensor": tensor})
    values["list"].append(3)
    values["array"] += 1
    tensor += 1
    target = {"values": {}, "tensor": torch.ones(3)}
    ks.load(tmp_path / "s", target)
    assert_same(target, {"values": {"list": [1, 2], "array": np.zeros(3)}, "tensor": torch.zeros(3)})


def test_per_rank_values_of_one_process(tmp_path):
    tensor = torch.arange(4.0)
    state = {
        "mine": ks.per_rank({"n": 1, "t": tensor}),
        "deep": {"seed": ks.per_rank(7)},
        "loader": ks.per_rank(Loader(5)),
    }
    ks.save(tmp_path / "s", state)
    target = {
        "mine": ks.per_rank({"n": 0, "t": torch.zeros(4)}),
        "deep": {"seed": ks.per_rank(0)},
        "loader": ks.per_rank(Loader()),
    }
    ks.load(tmp_path / "s", target)
    assert target["mine"].value["n"] == 1
    assert torch.equal(target["mine"].value["t"], tensor)
    assert target["deep"]["seed"].value == 7
    assert target["loader"].value.given == [5]


def test_a_value_that_is_per_rank_only_in_the_target_is_an_error(tmp_path):
    ks.save(tmp_path / "s", {"seed": 1})
    with pytest.raises(ks.errors.MismatchError, match="seed: the target is per_rank, the checkpoint has one value"):
        ks.load(tmp_path / "s", {"seed": ks.per_rank(2)})


def test_a_component_that_refuses_what_was_saved_is_named(tmp_path):
    ks.save(tmp_path / "step", {"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    with pytest.raises(ks.errors.MismatchError, match="component 'scaler' refused what was saved for it: RuntimeError"):
        ks.load(tmp_path / "step", into={"scaler": torch.amp.GradScaler("cpu")})


def test_the_key_of_a_refused_value_inside_per_rank_is_the_users(tmp_path):
    with pytest.raises(ks.errors.UnsafeValueError, match="deep/seed: builtins"):
        ks.save(tmp_path / "step", {"deep": {"seed": ks.per_rank(lambda: 1)}})
