"""Optimizers: what comes back is what was there, in the same objects, without a step being taken for it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.same import assert_same

WIDTH = 4

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}

VARIANTS: list[tuple[str, dict]] = [
    *((name, {"lr": 0.01}) for name in OPTIMIZERS),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "foreach": True}),
    ("Adam", {"lr": 0.01, "foreach": False}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("Adam", {"lr": 0.01, "capturable": False, "maximize": True}),
    ("Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "fused": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ("Adadelta", {"lr": 0.5, "foreach": True}),
    ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.01, "fused": True}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01, "foreach": True}),
    ("ASGD", {"lr": 0.01, "t0": 2, "foreach": True}),
    ("LBFGS", {"lr": 0.1, "history_size": 3, "max_iter": 2}),
    ("LBFGS", {"lr": 0.1, "history_size": 3, "max_iter": 2, "line_search_fn": "strong_wolfe"}),
    ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01, "foreach": True}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    ("Rprop", {"lr": 0.01, "etas": (0.4, 1.3)}),
]


def name_of(value):
    return value if isinstance(value, str) else ",".join(f"{key}={item}" for key, item in value.items())


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def batch(step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = (model(batch(step)) - batch(step)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        losses.append(loss.item())
    return losses


def words(model, optimizer, steps, first=0):
    """The same for an embedding with sparse gradients."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        picked = torch.randint(0, 6, (5,), generator=torch.Generator().manual_seed(step))
        loss = model(picked).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(name, options, seed=0):
    """A model and its optimizer, and how to train them."""
    if name == "SparseAdam":
        torch.manual_seed(seed)
        model = nn.Embedding(6, WIDTH, sparse=True)
        return model, OPTIMIZERS[name](model.parameters(), **options), words
    model = network(seed)
    return model, OPTIMIZERS[name](model.parameters(), **options), train


@pytest.fixture
def no_steps(monkeypatch):
    """Fails when a load or a save takes an optimizer or scheduler step. Returns a switch to allow them again."""
    counted = {"steps": 0, "forbidden": False}

    def watch(cls):
        original = cls.step

        def step(self, *args, **kwargs):
            counted["steps"] += 1
            assert not counted["forbidden"], f"{cls.__name__}.step was called"
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, "step", step)

    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler):
        watch(cls)
    return counted


@pytest.mark.case(6)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=name_of)
def test_every_class_goes_on_as_if_it_had_never_stopped(name, options, tmp_path):
    model, optimizer, run = make(name, options)
    run(model, optimizer, 4)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    saved = copy.deepcopy(optimizer.state_dict())
    expected = run(model, optimizer, 4, first=4)

    fresh, restored, _ = make(name, options, seed=1)
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert_same(restored.state_dict(), saved)
    assert run(fresh, restored, 4, first=4) == expected
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert_same(restored.state_dict(), optimizer.state_dict())


@pytest.mark.case(22)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_learning_rate_that_is_a_tensor_stays_one(name, tmp_path):
    dtype = torch.float64
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=torch.tensor(0.1, dtype=dtype))
    train(model, optimizer, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, 3, first=2)

    fresh = network(1)
    restored = OPTIMIZERS[name](fresh.parameters(), lr=torch.tensor(0.5, dtype=dtype))
    live = restored.param_groups[0]["lr"]
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert restored.param_groups[0]["lr"] is live
    assert (live.item(), live.dtype, live.shape) == (0.1, dtype, ())
    assert train(fresh, restored, 3, first=2) == expected


@pytest.mark.case(22)
@pytest.mark.parametrize(("saved", "built"), [(0.1, 0.5), (torch.tensor(0.1), 0.5), (0.1, torch.tensor(0.5))])
def test_the_saved_learning_rate_wins_over_the_new_one(saved, built, tmp_path):
    model = network()
    ks.save(tmp_path / "s", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=saved)})
    restored = torch.optim.AdamW(model.parameters(), lr=built)
    ks.load(tmp_path / "s", {"model": model, "optimizer": restored})
    lr = restored.param_groups[0]["lr"]
    assert float(lr) == pytest.approx(0.1)
    assert isinstance(lr, torch.Tensor) is isinstance(saved, torch.Tensor) or isinstance(built, torch.Tensor)


def test_groups_that_share_no_learning_rate_tensor_each_get_their_own(tmp_path):
    def build(seed, low, high):
        model = network(seed)
        first, second = model.parameters()
        groups = [{"params": [first]}, {"params": [second]}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.3))
        for group, lr in zip(optimizer.param_groups, (low, high), strict=True):
            group["lr"] = torch.tensor(lr)
        return model, optimizer

    model, optimizer = build(0, 0.125, 0.25)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    first, second = fresh.parameters()
    restored = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.3))
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert [group["lr"].item() for group in restored.param_groups] == [0.125, 0.25]


def three_groups(model, lrs=(0.1, 0.2, 0.3)):
    first, second = model.parameters()
    fields = zip(lrs, ((0.9, 0.99), (0.8, 0.9), (0.7, 0.8)), (0.0, 0.5, 0.25), strict=True)
    groups = [{"lr": lr, "betas": betas, "weight_decay": decay} for lr, betas, decay in fields]
    return torch.optim.AdamW(
        [{"params": [first], **groups[0]}, {"params": [], **groups[1]}, {"params": [second], **groups[2]}]
    )


@pytest.mark.case(1)
def test_every_field_of_every_group_comes_back_also_of_an_empty_one(tmp_path):
    model = network()
    optimizer = three_groups(model)
    optimizer.param_groups[1]["note"] = "kept"
    train(model, optimizer, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    restored = three_groups(fresh, lrs=(1.0, 1.0, 1.0))
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert_same(restored.state_dict(), optimizer.state_dict())
    assert train(fresh, restored, 3, first=2) == train(model, optimizer, 3, first=2)


def load_three_groups(rank, path):
    fresh = network(1)
    restored = three_groups(fresh, lrs=(1.0, 1.0, 1.0))
    ks.load(path, {"model": fresh, "optimizer": restored})
    return restored.state_dict()["param_groups"], train(fresh, restored, 3, first=2)


@pytest.mark.case(2)
def test_fields_a_scheduler_added_come_back_before_there_is_a_scheduler(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(3):
        train(model, optimizer, 1, first=step)
        scheduler.step()
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})

    fresh = network(1)
    restored = torch.optim.SGD(fresh.parameters(), lr=0.5)
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert restored.param_groups[0]["initial_lr"] == 0.1
    again = torch.optim.lr_scheduler.StepLR(restored, 2, last_epoch=2)
    assert again.base_lrs == [0.1]


@pytest.mark.case(4)
def test_a_parameter_frozen_after_training_keeps_its_moments(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    model[0].requires_grad_(False)
    train(model, optimizer, 1, first=2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    fresh[0].requires_grad_(False)
    restored = torch.optim.AdamW(fresh.parameters())
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert restored.state[fresh[0].weight]["step"].item() == 2
    assert restored.state[fresh[2].weight]["step"].item() == 3
    assert_same(restored.state_dict(), optimizer.state_dict())


class Branches(nn.Module):
    """Only one of the two is used."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


@pytest.mark.case(4)
@pytest.mark.case(5)
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_parameter_without_state_gets_none(trained_before, tmp_path):
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, 3, first=3)

    fresh = Branches()
    restored = torch.optim.AdamW(fresh.parameters())
    if trained_before:
        (fresh.unused(batch(0)) + fresh.used(batch(0))).sum().backward()
        restored.step()
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    restored.zero_grad()
    assert set(restored.state) == {fresh.used.weight, fresh.used.bias}
    assert train(fresh, restored, 3, first=3) == expected
    assert fresh.unused.weight not in restored.state


@pytest.mark.case(6)
def test_a_saved_state_that_nobody_takes_is_an_error(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    before = copy.deepcopy(fresh.state_dict())
    restored = torch.optim.AdamW([fresh[0].weight])
    with pytest.raises(
        ks.errors.MismatchError, match=r"optimizer/state/2\.weight: a parameter of the checkpoint's groups"
    ):
        ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert not restored.state
    assert_same(dict(fresh.state_dict()), dict(before))


class MasterCopies(torch.optim.Optimizer):
    """Momentum in half precision, with the parameters themselves in full precision beside it."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
                state["momentum"] = torch.zeros(WIDTH, WIDTH, dtype=torch.float16 if index else torch.bfloat16)
                state["rows"] = torch.zeros(WIDTH, dtype=torch.float64)
                state["codes"] = torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)
            state["momentum"].mul_(0.9).add_(parameter.grad.to(state["momentum"].dtype))
            state["rows"] += parameter.grad.double().square().sum(1)
            state["master"] -= (
                self.param_groups[0]["lr"] * state["momentum"].float() / (1 + state["rows"][:, None].float())
            )
            parameter.copy_(state["master"])
        return loss


@pytest.mark.case(8)
def test_state_of_another_precision_than_its_parameter_keeps_dtype_and_bits(tmp_path):
    def build(seed):
        model = network(seed).to(torch.bfloat16)
        return model, MasterCopies(model.parameters())

    def go_on(model, optimizer, steps, first=0):
        losses = []
        for step in range(first, first + steps):

            def closure(step=step):
                optimizer.zero_grad()
                x = batch(step).to(torch.bfloat16)
                loss = (model(x) - x).float().square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    model, optimizer = build(0)
    go_on(model, optimizer, 3)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh, restored = build(1)
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert_same(
        [dict(restored.state[p]) for p in fresh.parameters()], [dict(optimizer.state[p]) for p in model.parameters()]
    )
    assert {value.dtype for p in fresh.parameters() for value in restored.state[p].values()} == {
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
    }
    expected = go_on(model, optimizer, 4, first=3)
    assert go_on(fresh, restored, 4, first=3) == expected
    # The masters matter: weights alone go on otherwise.
    bare, without = build(2)
    ks.load(tmp_path / "s", {"model": bare, "optimizer": without}, only=["model"])
    assert go_on(bare, without, 4, first=3) != expected


@pytest.mark.case(14)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_loading_and_saving_at_once_gives_the_same_again(how, tmp_path):
    def build(seed):
        model = network(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        return {"model": model, "optimizer": optimizer}

    first = build(0)
    train(*first.values(), 2)
    ks.save(tmp_path / "one", first)
    second = build(1)
    ks.load(tmp_path / "one", second)
    if how == "sync":
        ks.save(tmp_path / "two", second)
    else:
        ks.async_save(tmp_path / "two", second, background="thread").committed.result(30)
    one, two = ks.open(tmp_path / "one"), ks.open(tmp_path / "two")
    assert list(one) == list(two)
    for key in one:
        assert_same(one[key], two[key], key)
    assert_same(one.values_of("optimizer"), two.values_of("optimizer"))
    third = build(2)
    ks.load(tmp_path / "two", third)
    for name in ("model", "optimizer"):
        assert_same(dict(third[name].state_dict()), dict(first[name].state_dict()))
    assert train(*third.values(), 2, first=2) == train(*first.values(), 2, first=2)


@pytest.mark.case(20)
def test_deep_state_with_integer_keys_keeps_its_structure(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model.parameters()
    optimizer.state[first] = {
        "block_0": {
            "factors": {0: torch.randn(3, 3), 1: torch.randn(2, 2)},
            "idx": {},
            "hist": [torch.randn(4), (1, 2)],
        },
        7: torch.randn(1),
        "none": None,
        "flag": True,
    }
    optimizer.state[second] = {}
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    restored = torch.optim.SGD(fresh.parameters(), lr=0.1)
    for _ in range(2):
        ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
        for a, b in zip(fresh.parameters(), model.parameters(), strict=True):
            assert_same(restored.state[a], optimizer.state[b])


@pytest.mark.case(26)
@pytest.mark.case(27)
def test_groups_keep_their_identity_and_loading_twice_is_loading_once(no_steps, tmp_path):
    def build(seed):
        model = network(seed)
        optimizer = three_groups(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def run(model, optimizer, scheduler, steps, first=0):
        rates = []
        for step in range(first, first + steps):
            train(model, optimizer, 1, first=step)
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates

    model, optimizer, scheduler = build(0)
    run(model, optimizer, scheduler, 3)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    expected = run(model, optimizer, scheduler, 5, first=3)

    fresh, restored, schedule = build(1)
    list_before = restored.param_groups
    groups_before = list(restored.param_groups)
    identities = [id(fresh), id(restored), id(schedule), *map(id, fresh.parameters())]
    target = {"model": fresh, "optimizer": restored, "scheduler": schedule}
    no_steps["forbidden"] = True
    ks.load(tmp_path / "s", target)
    once = copy.deepcopy((restored.state_dict(), schedule.state_dict(), dict(fresh.state_dict())))
    ks.load(tmp_path / "s", target)
    no_steps["forbidden"] = False
    assert_same((restored.state_dict(), schedule.state_dict(), dict(fresh.state_dict())), once)
    assert schedule.last_epoch == 3
    assert schedule.optimizer.param_groups is restored.param_groups is list_before
    assert all(a is b for a, b in zip(groups_before, restored.param_groups, strict=True))
    assert identities == [id(fresh), id(restored), id(schedule), *map(id, fresh.parameters())]
    assert run(fresh, restored, schedule, 5, first=3) == expected


@pytest.mark.case(12)
def test_two_generations_of_resuming_equal_no_interruption(tmp_path):
    def build(seed):
        model = network(seed)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    whole = build(0)
    expected = train(*whole.values(), 15)
    losses = []
    now = build(0)
    losses += train(*now.values(), 5)
    for first in (5, 10):
        ks.save(tmp_path / f"{first}", now)
        now = build(first)
        before = [id(value) for value in now.values()]
        ks.load(tmp_path / f"{first}", now)
        assert before == [id(value) for value in now.values()]
        losses += train(*now.values(), 5, first=first)
    assert losses == expected
    assert_same(dict(now["model"].state_dict()), dict(whole["model"].state_dict()))


class Packed(torch.optim.SGD):
    """Keeps its momentum as int8 with a scale in what it saves, and counts how it is loaded."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.saves = 0
        self.loads = []

    def state_dict(self):
        self.saves += 1
        packed = super().state_dict()
        state = {}
        for key, item in packed["state"].items():
            scale = item["momentum_buffer"].abs().max().clamp_min(1e-12) / 127
            state[key] = {"codes": (item["momentum_buffer"] / scale).round().to(torch.int8), "scale": scale}
        return {"state": state, "param_groups": packed["param_groups"], "version": 3}

    def load_state_dict(self, state_dict):
        self.loads.append({key: sorted(item) for key, item in state_dict["state"].items()})
        assert state_dict["version"] == 3
        state = {
            key: {"momentum_buffer": item["codes"].float() * item["scale"]} for key, item in state_dict["state"].items()
        }
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})

    def settle(self):
        """Rounds the live momentum as a save does, so that a resumed run can be equal."""
        for item in self.state.values():
            momentum = item["momentum_buffer"]
            scale = momentum.abs().max().clamp_min(1e-12) / 127
            item["momentum_buffer"] = (momentum / scale).round().to(torch.int8).float() * scale


@pytest.mark.case(53)
def test_an_optimizer_with_its_own_way_of_loading_is_asked_once_with_everything(tmp_path):
    model = network()
    optimizer = Packed(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 3)
    optimizer.settle()
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    assert optimizer.saves == 1
    expected = train(model, optimizer, 5, first=3)

    fresh = network(1)
    restored = Packed(fresh.parameters(), lr=0.5, momentum=0.9)
    groups = restored.param_groups
    group = groups[0]
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert restored.loads == [{0: ["codes", "scale"], 1: ["codes", "scale"]}]
    assert restored.param_groups is groups
    assert groups[0] is group
    assert group["lr"] == 0.1
    assert train(fresh, restored, 5, first=3) == expected


def test_hooks_of_an_optimizer_run_once(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    restored = torch.optim.AdamW(fresh.parameters())
    seen = []
    restored.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    restored.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert seen == [2, "after"]
    assert_same(restored.state_dict(), optimizer.state_dict())


def test_several_optimizers_over_two_models(tmp_path):
    def build(seed):
        left, right = network(seed), network(seed + 1)
        return {
            "left": left,
            "right": right,
            "adam": torch.optim.AdamW(left.parameters(), lr=0.01),
            "sgd": torch.optim.SGD(right.parameters(), lr=0.02, momentum=0.9),
        }

    def run(state, steps, first=0):
        return [
            train(state["left"], state["adam"], steps, first),
            train(state["right"], state["sgd"], steps, first),
        ]

    state = build(0)
    run(state, 2)
    ks.save(tmp_path / "s", state)
    expected = run(state, 3, first=2)
    fresh = build(5)
    report = ks.load(tmp_path / "s", fresh)
    assert set(report.components) == set(state)
    assert run(fresh, 3, first=2) == expected


def test_one_optimizer_over_two_models_and_two_over_one(tmp_path):
    def build(seed):
        left, right = network(seed), network(seed + 1)
        return {
            "left": left,
            "right": right,
            "both": torch.optim.AdamW([*left.parameters(), *right.parameters()], lr=0.01),
            "head": torch.optim.SGD([right[2].weight], lr=0.02, momentum=0.9),
        }

    def run(state, steps, first=0):
        losses = []
        for step in range(first, first + steps):
            loss = (state["left"](batch(step)) + state["right"](batch(step))).square().mean()
            losses.append(loss.item())
            loss.backward()
            state["both"].step()
            state["head"].step()
            state["both"].zero_grad()
        return losses

    state = build(0)
    run(state, 2)
    ks.save(tmp_path / "s", state)
    expected = run(state, 3, first=2)
    fresh = build(5)
    ks.load(tmp_path / "s", fresh)
    assert run(fresh, 3, first=2) == expected


def test_groups_in_another_order_are_matched_by_their_parameters(tmp_path):
    def build(model, names):
        rates = {"0.weight": 0.1, "2.weight": 0.2}
        live = dict(model.named_parameters())
        return torch.optim.AdamW([{"params": [live[name]], "lr": rates[name]} for name in names])

    model = network()
    optimizer = build(model, ["0.weight", "2.weight"])
    train(model, optimizer, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    restored = build(fresh, ["2.weight", "0.weight"])
    for group in restored.param_groups:
        group["lr"] = 9.0
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert [group["lr"] for group in restored.param_groups] == [0.2, 0.1]
    assert train(fresh, restored, 3, first=2) == train(model, optimizer, 3, first=2)


@pytest.mark.case(168)
def test_a_group_over_parameters_of_different_groups_is_an_error(tmp_path):
    model = network()
    optimizer = three_groups(model)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = network(1)
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())})
    text = str(caught.value)
    assert "optimizer/param_groups/0" in text
    assert "betas, lr, weight_decay" in text
    assert "{" not in text


@pytest.mark.case(128)
@pytest.mark.parametrize("saved_wrapped", [False, True])
@pytest.mark.parametrize("loaded_wrapped", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_model_and_optimizer_in_one_call_or_two_wrapped_or_not(saved_wrapped, loaded_wrapped, calls, tmp_path):
    def build(seed, wrapped):
        model = network(seed)
        model = torch.compile(model, backend="eager") if wrapped else model
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    state = build(0, saved_wrapped)
    train(*state.values(), 2)
    ks.save(tmp_path / "s", state)
    expected = train(*state.values(), 3, first=2)
    fresh = build(1, loaded_wrapped)
    for only in (["model"], ["optimizer"]) if calls == 2 else (None,):
        ks.load(tmp_path / "s", fresh, only=only)
    assert train(*fresh.values(), 3, first=2) == expected


# --- two ranks ------------------------------------------------------------------------------------------------------


def groups_in_other_order(rank, path):
    """Rank 0 has [decay, nodecay], rank 1 the reverse: each parameter must get its own fields back on both."""

    def build(seed):
        model = network(seed)
        decay, plain = model.parameters()
        groups = [
            {"params": [decay], "weight_decay": 0.5, "lr": 0.1},
            {"params": [plain], "weight_decay": 0.0, "lr": 0.2},
        ]
        return model, torch.optim.AdamW(groups if rank == 0 else groups[::-1])

    model, optimizer = build(0)
    train(model, optimizer, 2)
    ks.save(path, {"model": model, "optimizer": optimizer})
    fresh, restored = build(1)
    for group in restored.param_groups:
        group.update(lr=9.0, weight_decay=9.0)
    ks.load(path, {"model": fresh, "optimizer": restored})
    assert train(fresh, restored, 2, first=2) == train(model, optimizer, 2, first=2)
    return [(group["lr"], group["weight_decay"]) for group in restored.param_groups]


def stage(rank, seed):
    """A pipeline stage: rank 0 has layer a with lr 0.1, rank 1 has layer b with lr 0.2."""
    torch.manual_seed(seed)
    name, lr = (("a", 0.1), ("b", 0.2))[rank]
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH)})
    return model, torch.optim.AdamW(model.parameters(), lr=lr), name


def step_stage(layer, optimizer, step):
    optimizer.zero_grad()
    layer(batch(step)).square().mean().backward()
    optimizer.step()


def stages(rank, path):
    model, optimizer, name = stage(rank, rank)
    step_stage(model[name], optimizer, 0)
    ks.save(path, {"model": model, "optimizer": optimizer})
    fresh, restored, _ = stage(rank, 10 + rank)
    restored.param_groups[0]["lr"] = 9.0
    ks.load(path, {"model": fresh, "optimizer": restored})
    step_stage(model[name], optimizer, 1)
    step_stage(fresh[name], restored, 1)
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    return restored.param_groups[0]["lr"], {key: value.numpy() for key, value in model.state_dict().items()}


@pytest.mark.case(1)
@pytest.mark.case(17)
@pytest.mark.case(19)
def test_groups_on_two_ranks(rank_pool, tmp_path):
    def two(fn, *args):
        return rank_pool(2)(fn, *args, timeout_s=60)

    assert two(groups_in_other_order, tmp_path / "order") == [[(0.1, 0.5), (0.2, 0.0)], [(0.2, 0.0), (0.1, 0.5)]]

    model = network()
    optimizer = three_groups(model)
    train(model, optimizer, 2)
    ks.save(tmp_path / "three", {"model": model, "optimizer": optimizer})
    fields = optimizer.state_dict()["param_groups"]
    expected = train(model, optimizer, 3, first=2)
    for groups, losses in two(load_three_groups, tmp_path / "three"):
        assert_same(groups, fields)
        assert losses == expected

    trained = two(stages, tmp_path / "stages")
    assert [lr for lr, _ in trained] == [0.1, 0.2]
    # One process that owns both layers, each in a group of its own.
    both = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    owner = torch.optim.AdamW([{"params": both[name].parameters(), "lr": 9.0} for name in ("b", "a")])
    ks.load(tmp_path / "stages", {"model": both, "optimizer": owner})
    assert [group["lr"] for group in owner.param_groups] == [0.2, 0.1]
    owner.zero_grad()
    (both["a"](batch(1)).square().mean() + both["b"](batch(1)).square().mean()).backward()
    owner.step()
    for _, values in trained:
        for key, value in values.items():
            assert torch.equal(both.state_dict()[key], torch.from_numpy(value)), key


def test_an_optimizer_alone_goes_by_the_names_it_was_given(tmp_path):
    def made():
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.named_parameters())

    model, optimizer = made()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    ks.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    _, alone = made()
    ks.load(tmp_path / "step", into={"optimizer": alone}, only=["optimizer"])
    for saved, restored in zip(optimizer.state.values(), alone.state.values(), strict=True):
        assert torch.equal(saved["exp_avg"], restored["exp_avg"])
