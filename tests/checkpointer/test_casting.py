"""cast= by patterns: which tensors a load converts, and to what."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.errors import MismatchError, UsageError
from tests.helpers.same import assert_same


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        return self.norm(self.lin(x).float())


def state_of(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Net(dtype)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


@pytest.fixture
def step(tmp_path):
    state = state_of()
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    state["model"].seen += 3
    ks.save(tmp_path / "s", state, step=3)
    return tmp_path / "s", state


def test_patterns_say_what_is_converted_and_what_is_made_anew(step):
    path, saved = step
    target = state_of(torch.bfloat16, seed=1)
    rules = {"optimizer/state/**/exp_avg": torch.bfloat16, "optimizer": None, "model/lin.*": torch.bfloat16}
    look = ks.load(path, target, cast=rules, dry_run=True)
    report = ks.load(path, target, cast=rules)
    moments = [f"optimizer/state/{name}/exp_avg" for name, _ in saved["model"].named_parameters()]
    for told in (look, report):
        assert told.components["model"].cast == ["model/lin.weight", "model/lin.bias"]
        assert told.components["optimizer"].cast == moments
        assert told.components["model"].conversions == {"float32 as bfloat16": 2}
        assert "2 cast (model/lin.weight, model/lin.bias)" in str(told)
        assert "4 float32 as bfloat16" in str(told)
    assert torch.equal(target["model"].lin.weight, saved["model"].lin.weight.bfloat16())
    assert torch.equal(target["model"].norm.weight, saved["model"].norm.weight)
    assert_same(target["model"].seen, saved["model"].seen)
    for mine, theirs in zip(target["model"].parameters(), saved["model"].parameters(), strict=True):
        here, there = target["optimizer"].state[mine], saved["optimizer"].state[theirs]
        assert_same(here["exp_avg"], there["exp_avg"].bfloat16())
        assert_same(here["exp_avg_sq"], there["exp_avg_sq"])
        assert_same(here["step"], there["step"])
    # A second time, into the moments that are there now: the same, in place.
    held = [target["optimizer"].state[p]["exp_avg"] for p in target["model"].parameters()]
    before = copy.deepcopy(held)
    ks.load(path, target, cast=rules)
    after = [target["optimizer"].state[p]["exp_avg"] for p in target["model"].parameters()]
    assert all(a is b for a, b in zip(held, after, strict=True))
    assert_same(after, before)


def test_the_first_pattern_that_fits_decides(step):
    path, _ = step
    target = {"model": Net(torch.bfloat16)}
    ks.load(path, target, only=["model"], cast={"model/lin.*": True, "**": None})
    with pytest.raises(MismatchError) as caught:
        ks.load(path, target, only=["model"], cast={"**/*.bias": None, "model/lin.*": True})
    assert caught.value.mismatches == ("model/lin.bias: saved as float32, the target is bfloat16 (cast=True converts)",)


def test_a_dtype_is_one_for_all_floating_tensors_and_leaves_counters_alone(step):
    path, saved = step
    target = {"model": {}, "optimizer": {}}
    report = ks.load(path, target, cast=torch.float16)
    assert {name: value.dtype for name, value in target["model"].items()} == {
        **dict.fromkeys(["lin.weight", "lin.bias", "norm.weight", "norm.bias"], torch.float16),
        "seen": torch.int64,
    }
    assert_same(target["model"]["lin.weight"], saved["model"].lin.weight.detach().half())
    one = target["optimizer"]["state"]["lin.weight"]
    assert (one["step"].dtype, one["exp_avg"].dtype) == (torch.float32, torch.float16)
    assert report.components["model"].conversions == {"float32 as float16": 4}
    # What is there already has the last word on itself: nothing is changed on the quiet, nor left as it was.
    mixed = {"model": Net(torch.float16)}
    before = copy.deepcopy(mixed["model"].state_dict())
    with pytest.raises(MismatchError) as caught:
        ks.load(path, mixed, only=["model"], cast=torch.float16)
    assert caught.value.mismatches == tuple(
        f"model/norm.{name}: cast= makes it float16, the target is float32" for name in ("weight", "bias")
    )
    assert_same(dict(mixed["model"].state_dict()), dict(before))


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (
            {"model/lni.*": torch.bfloat16, "optimizer/**": None, "model.*.weight": True},
            r"cast='model/lni\.\*': no tensor of the checkpoint fits; did you mean .*cast='model\.\*\.weight': no tensor",
        ),
        ({"model/seen": torch.bfloat16}, "cast='model/seen': no tensor of the checkpoint that can be bfloat16 fits"),
        ({"model": "bf16"}, r"cast=\{'model': 'bf16'\}: a pattern has a torch.dtype, True or None"),
        ({"model": torch.qint8}, r"cast=\{'model': torch.qint8\}: a pattern has"),
        ("bfloat16", r"cast='bfloat16': True, a torch\.dtype, or \{pattern: "),
        (1, "cast=1: True, a torch.dtype, or"),
        ({"": True}, "cast='': a pattern is a text"),
    ],
)
def test_casts_that_mean_nothing_are_said_and_change_nothing(step, cast, message):
    path, _ = step
    target = state_of(torch.bfloat16, seed=1)
    before = copy.deepcopy(dict(target["model"].state_dict()))
    with pytest.raises(UsageError, match=message):
        ks.load(path, target, cast=cast)
    assert_same(dict(target["model"].state_dict()), before)
    assert not target["optimizer"].state


def test_a_restore_takes_them_too(tmp_path):
    def run(dtype, **options):
        state = ks.TrainState(model=Net(dtype))
        with ks.Checkpointer(tmp_path / "run", state, background="off") as keeper:
            report = keeper.restore(**options)
            keeper.step()
            keeper.save()
        return state["model"], report

    first, _ = run(torch.float32)
    second, report = run(torch.bfloat16, cast={"model/lin.*": torch.bfloat16})
    assert report.components["model"].conversions == {"float32 as bfloat16": 2}
    assert torch.equal(second.lin.weight, first.lin.weight.bfloat16())
    third, _ = run(torch.float32, cast={"model/lin.*": torch.float32})
    assert torch.equal(third.lin.weight, second.lin.weight.float())
