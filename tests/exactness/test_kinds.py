"""Every kind of state the next update may depend on: exact after a resume, and different as soon as it is left out.

Each kind is a program of a few lines that really depends on it. It is run through, and stopped half way and resumed in
objects that were built with other seeds: equal to the last bit. Then it is resumed by a keepstep that forgets this one kind,
and its losses or learning rates must differ.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import keepstep as ks
from keepstep.state.marks import PerRank
from tests.exactness.parts import Scaled, ScaledInExtraState, Shuffled, WarmUp
from tests.helpers.forgetful import MUTATIONS, forgetting
from tests.helpers.same import assert_same

HALF = 4

Parts = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """``build(seed)`` makes the objects, ``update(parts, step)`` does one step and returns what a user would log.

    ``forgotten`` names what is left out in the negative control; ``options`` are for the TrainState.
    """

    build: Callable[[int], Parts]
    update: Callable[[Parts, int], list[float]]
    forgotten: str
    options: Parts | None = None


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads that wait for each other on busy cores take longer than the sums they share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(kind, root, *, seed, steps):
    """Restores what is there, goes on to ``steps``, saves half way; without a root it is a loop that knows no keepstep.

    Returns what was logged on the way, and how everything ends.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    parts = kind.build(seed)
    logged = []
    if root is None:
        logged.extend(kind.update(parts, step) for step in range(steps))
        return logged, {name: contents(part) for name, part in parts.items()}, ends()
    state = ks.TrainState(**parts, **(kind.options or {}))
    with ks.Checkpointer(root, state, background="off") as checkpointer:
        checkpointer.restore()
        while checkpointer.progress.step < steps:
            logged.append(kind.update(parts, checkpointer.progress.step))
            checkpointer.step()
        if steps == HALF:
            checkpointer.save()
    return logged, {name: contents(part) for name, part in parts.items()}, ends()


def contents(part):
    """What a component holds, without keepstep's help."""
    if isinstance(part, PerRank):
        return contents(part.value)
    if isinstance(part, torch.Generator):
        return part.get_state().tolist()
    if isinstance(part, np.random.Generator):
        return str(part.bit_generator.state)
    if isinstance(part, random.Random):
        return part.getstate()
    if isinstance(part, np.random.RandomState):
        return str(part.get_state())
    if isinstance(part, nn.Module):
        return dict(part.state_dict()), [buffer.clone() for buffer in part.buffers()]
    return part.state_dict() if hasattr(part, "state_dict") else part


def ends():
    """The next number of each global stream."""
    return random.random(), float(np.random.rand()), torch.rand(1).item()


# --- programs -------------------------------------------------------------------------------------------------------


def batch(step, *shape):
    return torch.randn(*(shape or (8, 4)), generator=torch.Generator().manual_seed(1000 + step))


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def learn(optimizer, loss):
    """One update; the loss, and the learning rate it was made with."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [loss.item(), *(float(group["lr"]) for group in optimizer.param_groups)]


def build_plain(seed):
    model = network(seed)
    return {"model": model, "optimizer": sgd(model)}


def update_plain(parts, step):
    return learn(parts["optimizer"], parts["model"](batch(step)).square().mean())


def build_normed(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return {"model": model, "optimizer": sgd(model)}


def update_normed(parts, step):
    """A term of the loss is computed with the running statistics."""
    model = parts["model"]
    loss = model.train()(batch(step)).square().mean()
    return learn(parts["optimizer"], loss + model.eval()(batch(step)).square().mean())


def build_scaled(keeper):
    def build(seed):
        torch.manual_seed(seed)
        model = (ScaledInExtraState if keeper == "extra_state" else Scaled)(keeper)
        return {"model": model, "optimizer": sgd(model)}

    return build


# --- optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Parts] = {
    "ASGD": {"lr": 0.05, "t0": 2},
    "Adadelta": {},
    "Adafactor": {"beta2_decay": -0.5},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.01},
    "Adam, amsgrad": {"lr": 0.01, "amsgrad": True},
    "AdamW, one call for all tensors": {"lr": 0.01, "foreach": True},
    "AdamW, fused": {"lr": 0.01, "fused": True},
    "SGD, fused": {"lr": 0.05, "momentum": 0.9, "fused": True},
    "Adagrad, fused": {"fused": True},
    "Adam, lr as a tensor": {"lr": 0.01, "capturable": False, "foreach": False},
    "ASGD, capturable arithmetic": {"lr": 0.05, "t0": 2, "maximize": True},
}


def optimizer_kind(name):
    cls = getattr(torch.optim, name.partition(",")[0])
    settings = OPTIMIZERS[name]

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Embedding(6, 3, sparse=True) if name == "SparseAdam" else nn.Linear(4, 3, bias=name != "Muon")
        tensor = {"lr": torch.tensor(settings["lr"])} if "as a tensor" in name else {}
        return {"model": model, "optimizer": cls(model.parameters(), **{**settings, **tensor})}

    def update(parts, step):
        model, optimizer = parts["model"], parts["optimizer"]
        x = torch.tensor([0, step % 6, 3]) if name == "SparseAdam" else batch(step)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item()]

    return Kind(build, update, "optimizer_state")


class Layered(torch.optim.Optimizer):
    """State in nested dictionaries with integer keys, and some of its own that belongs to no parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter].setdefault("slots", {})
                count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                slot = slots.setdefault(count % 3, {"sum": torch.zeros_like(parameter), "seen": (0, [])})
                slot["sum"].mul_(0.5).add_(parameter.grad)
                slots[count % 3]["seen"] = (count, [*slot["seen"][1], count])
                parameter.sub_(slot["sum"], alpha=group["lr"] / len(slot["seen"][1]))


class Packed(torch.optim.SGD):
    """Keeps its momentum in eight bits in checkpoints, as memory-saving optimizers do."""

    def state_dict(self):
        packed = super().state_dict()
        state = {}
        for key, slot in packed["state"].items():
            scale = slot["momentum_buffer"].abs().max() / 127
            state[key] = {"scale": scale, "bytes": (slot["momentum_buffer"] / scale).round().to(torch.int8)}
        return {**packed, "state": state}

    def load_state_dict(self, packed):
        whole = {key: {"momentum_buffer": slot["bytes"] * slot["scale"]} for key, slot in packed["state"].items()}
        super().load_state_dict({**packed, "state": whole})


def build_layered(seed):
    model = network(seed)
    return {"model": model, "optimizer": Layered(model.parameters())}


def build_packed(seed):
    model = network(seed)
    return {"model": model, "optimizer": Packed(model.parameters(), lr=0.05, momentum=0.9)}


def update_packed(parts, step):
    """As a run that keeps what its checkpoints keep: momentum goes through eight bits at the step that is saved."""
    logged = update_plain(parts, step)
    if step + 1 == HALF:
        parts["optimizer"].load_state_dict(parts["optimizer"].state_dict())
    return logged


def build_groups(seed):
    model = network(seed)
    groups = [{"params": [*model[0].parameters()], "decay": 0.9}, {"params": [*model[2].parameters()], "decay": 1.0}]
    return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.05 + 0.01 * seed)}


def update_groups(parts, step):
    """A schedule by hand: the rate falls by a field of its own, and changes in the middle."""
    for group in parts["optimizer"].param_groups:
        group["lr"] *= group["decay"]
    if step == 1:
        parts["optimizer"].param_groups[0]["decay"] = 0.5
    return update_plain(parts, step)


def build_packed_groups(seed):
    parts = build_packed(seed)
    parts["optimizer"].param_groups[0]["decay"] = 0.9
    return parts


def update_packed_groups(parts, step):
    for group in parts["optimizer"].param_groups:
        group["lr"] *= group["decay"]
    return update_packed(parts, step)


def update_added_fields(parts, step):
    """The first rate is a field that is there from the first step on, as schedulers add ``initial_lr``."""
    for group in parts["optimizer"].param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * 0.8**step
    return update_plain(parts, step)


# --- schedulers -----------------------------------------------------------------------------------------------------


def chained(optimizer):
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.1, 6), schedulers.MultiStepLR(optimizer, [5])], optimizer=optimizer
    )


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 8)]
    return schedulers.SequentialLR(optimizer, parts, [3])


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR, a rule with a state": lambda o: schedulers.LambdaLR(o, WarmUp()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 7], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.1, 6),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=12),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=6),
}


def scheduler_kind(name):
    def build(seed):
        parts = build_plain(seed)
        return {**parts, "scheduler": SCHEDULERS[name](parts["optimizer"])}

    def update(parts, step):
        logged = update_plain(parts, step)
        scheduler = parts["scheduler"]
        with warnings.catch_warnings():
            # SequentialLR and ChainedScheduler pass the epoch on, which torch itself has deprecated.
            warnings.simplefilter("ignore", UserWarning)
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)
            elif name != "ExponentialLR" or scheduler.last_epoch < 6:
                # The rate of ExponentialLR follows from the rate before: what depends on it is when a program stops it.
                scheduler.step()
        return [*logged, *(group.get("momentum", 0.0) for group in parts["optimizer"].param_groups)]

    return Kind(build, update, "scheduler_rules" if "rule" in name else "scheduler")


# --- scaler, averages -----------------------------------------------------------------------------------------------


def build_scaler(seed):
    parts = build_plain(seed)
    return {**parts, "scaler": torch.amp.GradScaler("cpu", init_scale=999.0, growth_factor=1.7, growth_interval=3)}


def update_scaler(parts, step):
    """The scale is no power of two, so that it changes bits; at step 2 it is too large and the update is left out."""
    scaler, optimizer = parts["scaler"], parts["optimizer"]
    loss = parts["model"](batch(step)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss * float("inf") if step == 2 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [loss.item(), scaler.get_scale()]


def build_averaged(**settings):
    def build(seed):
        parts = build_plain(seed)
        return {**parts, "average": AveragedModel(parts["model"], **settings)}

    return build


def update_averaged(parts, step):
    """The model learns to agree with its own average."""
    x = batch(step)
    with torch.no_grad():
        aim = parts["average"](x)
    logged = learn(parts["optimizer"], (parts["model"](x) - aim + 0.1).square().mean())
    parts["average"].update_parameters(parts["model"])
    return logged


# --- streams, data, progress, counters ------------------------------------------------------------------------------


def update_jittered(draw):
    def update(parts, step):
        return learn(parts["optimizer"], parts["model"](batch(step) + draw(parts)).square().mean())

    return update


def build_dropout(seed):
    parts = build_plain(seed)
    return {**parts, "model": parts["model"].append(nn.Dropout(0.3))}


GENERATORS = {
    "random.Random": (random.Random, lambda own: own.gauss(0, 1)),
    "numpy PCG64": (np.random.default_rng, lambda own: float(own.standard_normal())),
    "numpy MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda own: float(own.random())),
    "numpy Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda own: int(own.integers(9))),
    "numpy SFC64": (lambda seed: np.random.Generator(np.random.SFC64(seed)), lambda own: float(own.random())),
    "numpy RandomState": (np.random.RandomState, lambda own: own.standard_normal()),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda own: torch.randn(1, generator=own).item(),
    ),
}


def generator_kind(name, mark=lambda own: own):
    make, draw = GENERATORS[name]

    def build(seed):
        return {**build_plain(seed), "noise": mark(make(seed))}

    def own(parts):
        return draw(getattr(parts["noise"], "value", parts["noise"]))

    return Kind(build, update_jittered(own), "generators")


def build_data(seed):
    return {**build_plain(seed), "data": Shuffled(seed)}


def update_data(parts, step):
    ids = next(iter(parts["data"]))
    return [*ids, *learn(parts["optimizer"], parts["model"](batch(ids[0])).square().mean())]


def build_counters(seed):
    return {**build_plain(seed), "counters": {"restarts": 0, "seen": [], "best": float("inf")}}


def update_counters(parts, step):
    """Weights the loss by what a user counts."""
    counters = parts["counters"]
    counters["seen"].append(step)
    loss = parts["model"](batch(step)).square().mean() / (1 + len(counters["seen"]))
    counters["best"] = min(counters["best"], loss.item())
    return [*learn(parts["optimizer"], loss), counters["best"]]


# --- the table ------------------------------------------------------------------------------------------------------

KINDS: dict[str, Kind] = {
    "parameters": Kind(build_plain, update_plain, "parameters"),
    "persistent buffers": Kind(build_normed, update_normed, "buffers"),
    "scaling factors as buffers": Kind(build_scaled("buffers"), update_plain, "buffers"),
    "buffers that are not persistent": Kind(
        build_scaled("not persistent"), update_plain, "non_persistent_buffers", {"non_persistent_buffers": True}
    ),
    "scaling factors as extra state": Kind(build_scaled("extra_state"), update_plain, "extra_state"),
    "optimizer state with integer keys": Kind(build_layered, update_plain, "optimizer_state"),
    "optimizer state that is packed": Kind(build_packed, update_packed, "optimizer_state"),
    "fields of parameter groups": Kind(build_groups, update_groups, "group_fields"),
    "fields of groups with packed state": Kind(build_packed_groups, update_packed_groups, "group_fields"),
    "fields that were added to groups": Kind(build_plain, update_added_fields, "added_group_fields"),
    "scale of a loss scaler": Kind(build_scaler, update_scaler, "scaler"),
    "growth tracker of a loss scaler": Kind(build_scaler, update_scaler, "growth_tracker"),
    "averaged parameters": Kind(
        build_averaged(multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True), update_averaged, "average"
    ),
    "number of averaged models": Kind(build_averaged(), update_averaged, "average_count"),
    "python's random": Kind(build_plain, update_jittered(lambda _: random.gauss(0, 1)), "rng_python"),
    "numpy's random": Kind(build_plain, update_jittered(lambda _: float(np.random.standard_normal())), "rng_numpy"),
    "torch's random": Kind(build_dropout, update_plain, "rng_torch"),
    "position in the data": Kind(build_data, update_data, "data"),
    "progress": Kind(build_plain, update_plain, "progress"),
    "a user's counters": Kind(build_counters, update_counters, "counters"),
}
KINDS |= {f"optimizer {name}": optimizer_kind(name) for name in OPTIMIZERS}
KINDS |= {f"scheduler {name}": scheduler_kind(name) for name in SCHEDULERS}
KINDS |= {f"generator {name}": generator_kind(name) for name in GENERATORS}
KINDS["generator of this rank alone"] = generator_kind("torch.Generator", lambda own: ks.per_rank(own, "derive"))


def subclasses_in(module, parent):
    return {
        name
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, parent) and cls is not parent and not name.startswith("_")
    }


def test_every_optimizer_and_scheduler_of_torch_is_a_kind():
    assert subclasses_in(torch.optim, torch.optim.Optimizer) == {name.partition(",")[0] for name in OPTIMIZERS}
    there = subclasses_in(schedulers, schedulers.LRScheduler) | {"SWALR"}
    assert there == {name.partition(",")[0] for name in SCHEDULERS}


def test_every_mutation_is_that_of_a_kind():
    assert {kind.forgotten for kind in KINDS.values()} == set(MUTATIONS)


@pytest.mark.slow  # a matrix: each program takes a moment, all of them seconds
@pytest.mark.parametrize("name", KINDS)
def test_a_run_depends_on_it_and_goes_on_exactly(name, tmp_path):
    kind = KINDS[name]
    logged, *rest = run(kind, None, seed=0, steps=2 * HALF)
    first = run(kind, tmp_path, seed=0, steps=HALF)[0]
    assert_same(first, logged[:HALF], "before the stop")
    then, *ended = run(kind, tmp_path, seed=1, steps=2 * HALF)
    assert_same(then, logged[HALF:], "after the resume")
    assert_same(ended, rest, "at the end")

    with forgetting(kind.forgotten):
        other = run(kind, tmp_path, seed=1, steps=2 * HALF)[0]
    assert repr(other) != repr(logged[HALF:]), f"nothing in this program depends on {kind.forgotten}"
