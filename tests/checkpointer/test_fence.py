"""The fence: training goes on while large tensors are copied, and waits exactly before something changes them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.commit.catalog import step_storage
from keepstep.commit.records import read_records
from keepstep.move.staging import Stager
from tests.helpers.gates import Gate, slow_copies, waits_for
from tests.helpers.same import assert_same, bits
from tests.helpers.storages import Watched

WIDE = 128


@pytest.fixture
def copies(monkeypatch):
    with slow_copies(monkeypatch) as gate:
        yield gate


def contents(path):
    """Every tensor of a committed step, by key, as bytes."""
    with ks.open(path) as step:
        return {key: bits(step[key]) for key in step}


def live(state):
    """Every tensor of a model and optimizer, as bytes."""
    found = {f"model/{name}": bits(value) for name, value in state["model"].state_dict().items()}
    names = {id(p): name for name, p in state["model"].named_parameters()}
    optimizer = state.get("optimizer")
    for parameter, items in (optimizer.state if optimizer is not None else {}).items():
        for name, value in items.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/state/{names[id(parameter)]}/{name}"] = bits(value)
    return found


def run(optimizer=torch.optim.AdamW, **options):
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    made = optimizer(model.parameters(), lr=0.1, **options)
    return ks.TrainState(model=model, optimizer=made)


def backward(state):
    state["optimizer"].zero_grad()
    loss = state["model"](torch.ones(2, WIDE)).square().mean()
    loss.backward()
    return loss.detach()


def checkpointer(root, state, **options):
    """A Checkpointer that proves what it copies. In this process, where a test can stop the copy."""
    return ks.Checkpointer(root, state, **{"background": "thread", "check_staging": True} | options)


# --- it waits exactly when it must ----------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [pytest.param("agent", marks=pytest.mark.slow), "thread"])
def test_forward_and_backward_run_while_the_copy_is_stopped_and_the_step_waits(background, copies, tmp_path):
    state = run()
    backward(state)
    state["optimizer"].step()
    with checkpointer(tmp_path, state, background=background) as ckpt:
        before = live(state)
        pending = ckpt.save()
        copies.wait_reached()
        backward(state)
        state["model"].eval()
        state["model"](torch.ones(2, WIDE))
        assert not pending.staged.done()
        assert repr(pending) == f"Pending(step=0, url={str(tmp_path / 'step-00000000')!r}, staging)"
        with waits_for(copies):
            state["optimizer"].step()
        pending.wait_committed(timeout_s=30)
        assert live(state) != before
    assert contents(tmp_path / "step-00000000") == before


def test_nothing_waits_when_everything_was_copied_at_the_boundary(copies, tmp_path):
    state = run()
    with checkpointer(tmp_path, state, staging="block") as ckpt:
        before = live(state)
        pending = ckpt.save()
        backward(state)
        state["optimizer"].step()
        pending.wait_committed(timeout_s=30)
    assert not copies.reached.is_set()
    assert contents(tmp_path / "step-00000000") == before


def test_nothing_waits_once_it_is_copied_although_it_is_not_written(tmp_path):
    gate = Gate("commit", name="step-")
    state = run()
    with checkpointer(Watched(tmp_path, gate), state) as ckpt:
        before = live(state)
        pending = ckpt.save()
        pending.wait_staged(30)
        for _ in range(3):
            backward(state)
            state["optimizer"].step()
        assert not pending.committed.done()
        assert repr(pending).endswith("staged)")
        gate.open()
        pending.wait_committed(timeout_s=30)
    assert contents(tmp_path / "step-00000000") == before


def test_an_optimizer_that_is_no_part_of_the_state_waits_too(copies, tmp_path):
    """It may share parameters with one that is."""
    state = run()
    other = torch.optim.SGD(state["model"].parameters(), lr=1.0)
    with checkpointer(tmp_path, state) as ckpt:
        before = live(state)
        pending = ckpt.save()
        backward(state)
        with waits_for(copies):
            other.step()
        pending.wait_committed(30)
    assert contents(tmp_path / "step-00000000") == before


def test_the_wait_is_part_of_the_record(copies, tmp_path):
    state = run()
    backward(state)
    with checkpointer(tmp_path, state) as ckpt:
        ckpt.save()
        copies.wait_reached()
        with waits_for(copies):
            state["optimizer"].step()
    (record,) = read_records(ks.LocalStorage(tmp_path))
    fence = record.ranks["fence"].most
    assert fence > 0
    assert record.stall_s >= fence
    assert [span for span in record.spans if span[:2] == ("training", "fence")]


# --- every optimizer ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "LBFGS": {"max_iter": 2},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.001},
    "SGD": {"momentum": 0.9},
    "SparseAdam": {},
}


def test_every_optimizer_of_torch_is_tried():
    found = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert found <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name)])
@pytest.mark.parametrize("staging", ["overlap", "block"])
def test_the_step_of_every_optimizer_leaves_the_save_alone(name, staging, copies):
    sparse = name == "SparseAdam"
    model = nn.Embedding(WIDE, WIDE, sparse=True) if sparse else nn.Linear(WIDE, WIDE, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), **{"lr": 0.1} | OPTIMIZERS[name])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(WIDE) if sparse else torch.eye(WIDE)).square().mean()
        loss.backward()
        return loss

    def step():
        if name == "LBFGS":
            return optimizer.step(closure)
        closure()
        return optimizer.step()

    step()
    state = ks.TrainState(model=model, optimizer=optimizer)
    root, before, after = (ks.MemoryStorage(name) for name in ("run", "before", "after"))
    with checkpointer(root, state, staging=staging) as ckpt:
        ks.save(before, state)
        pending = ckpt.save()
        if staging == "overlap":
            with waits_for(copies):
                step()
        else:
            step()
        pending.wait_committed(30)
    assert contents(step_storage(root, 0)) == contents(before)
    ks.save(after, state)
    changed = {key for key, value in contents(after).items() if value != contents(before)[key]}
    assert "model/weight" in changed
    assert name == "LBFGS" or any(key.startswith("optimizer/") for key in changed)


class Halving(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def test_an_optimizer_of_the_users_own_and_several_at_once(copies, tmp_path):
    one, two = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    optimizers = {"one": Halving(one.parameters(), lr=1.0), "two": torch.optim.SGD(two.parameters(), lr=1.0)}
    state = ks.TrainState(one=one, two=two, optimizers=optimizers)
    one(two(torch.ones(2, WIDE))).sum().backward()
    with checkpointer(tmp_path, state) as ckpt:
        ks.save(tmp_path / "before", state)
        pending = ckpt.save()
        with waits_for(copies):
            optimizers["two"].step()
        optimizers["one"].step()
        pending.wait_committed(30)
        copies.close()
        ks.save(tmp_path / "between", state)
        pending = ckpt.save() if ckpt.step() is None else None
        with waits_for(copies):
            optimizers["one"].step()
        pending.wait_committed(30)
    assert contents(tmp_path / "step-00000000") == contents(tmp_path / "before")
    assert contents(tmp_path / "step-00000001") == contents(tmp_path / "between")
    assert contents(tmp_path / "before") != contents(tmp_path / "between")


def test_a_gradient_scaler_and_a_scheduler_step_through_the_fence(copies, tmp_path):
    state = run()
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, 0.5)
    state = ks.TrainState(model=state["model"], optimizer=state["optimizer"], scaler=scaler, scheduler=scheduler)

    def train(step):
        scaler.scale(backward_loss(state)).backward()
        scaler.step(step)
        scaler.update()
        scheduler.step()

    train(state["optimizer"])
    with checkpointer(tmp_path, state) as ckpt:
        ks.save(tmp_path / "before", state)
        pending = ckpt.save()
        with waits_for(copies):
            train(state["optimizer"])
        pending.wait_committed(30)
    with ks.open(tmp_path / "before") as a, ks.open(tmp_path / "step-00000000") as b:
        for name in ("model", "optimizer", "scaler", "scheduler"):
            assert_same(a.values_of(name), b.values_of(name))


def backward_loss(state):
    state["optimizer"].zero_grad()
    return state["model"](torch.ones(2, WIDE)).square().mean()


# --- loops that change parameters by hand ---------------------------------------------------------------------------


def by_hand():
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))
    return ks.TrainState(model=model)


def update(state):
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter -= 1.0


def late_copies(monkeypatch):
    """How many tensors each save leaves for later."""
    counted = []
    copy = Stager.copy_sealed

    def noted(self, chosen):
        counted.append(len(chosen))
        return copy(self, chosen)

    monkeypatch.setattr(Stager, "copy_sealed", noted)
    return counted


def test_without_a_fence_parameters_are_copied_at_the_boundary(copies, monkeypatch, tmp_path):
    counted = late_copies(monkeypatch)
    state = by_hand()
    with checkpointer(tmp_path, state) as ckpt:
        before = live(state)
        pending = ckpt.save()
        update(state)
        pending.wait_committed(30)
    assert counted == []
    assert not copies.reached.is_set()
    assert contents(tmp_path / "step-00000000") == before


def test_with_a_fence_they_are_copied_later_and_the_fence_waits(copies, monkeypatch, tmp_path):
    counted = late_copies(monkeypatch)
    state = by_hand()
    state.fence()
    with checkpointer(tmp_path, state) as ckpt:
        before = live(state)
        pending = ckpt.save()
        copies.wait_reached()
        state["model"].train()
        state["model"](torch.ones(4, WIDE))  # changes the running statistics
        with waits_for(copies):
            state.fence()
        update(state)
        pending.wait_committed(30)
    assert counted == [4]  # a matrix and three vectors
    assert contents(tmp_path / "step-00000000") == before


@pytest.mark.parametrize("background", [pytest.param("agent", marks=pytest.mark.slow), "thread"])
@pytest.mark.parametrize("check_staging", [True, False])
def test_a_change_without_the_fence_fails_the_save_and_says_what_changed(background, check_staging, copies, tmp_path):
    state = by_hand()
    state.fence()
    state.progress.step = 6
    with checkpointer(tmp_path, state, background=background, check_staging=check_staging) as ckpt:
        assert ckpt.step() is None
        pending = ckpt.save()
        copies.wait_reached()
        update(state)
        copies.open()
        for wait in (pending.wait_staged, pending.wait_committed):
            with pytest.raises(ks.errors.StagingError) as caught:
                wait(30)
            text = str(caught.value)
            assert "step 7 was not saved: while it was being copied, something changed it in step 8:" in text
            assert "\n  - model/0.weight\n" in text
            assert "\n  - model/0.bias\n" in text  # whatever its size
            assert "state.fence()" in text
        assert pending.staged.exception() is pending.committed.exception()
        assert repr(pending).endswith("failed)")
        # The next one is right again.
        ckpt.step()
        before = live(state)
        again = ckpt.save()
        state.fence()
        update(state)
        assert again.wait_committed(30).step == 8
    assert contents(tmp_path / "step-00000008") == before
    assert not (tmp_path / "step-00000007").exists()


def test_a_write_that_torch_does_not_count_is_found_by_the_check(copies, tmp_path):
    state = run()
    with checkpointer(tmp_path, state, tolerate_failures=5) as ckpt:
        for step, change in enumerate((change_data, change_through_numpy, change_detached), 1):
            copies.close()
            ckpt.step()
            pending = ckpt.save()
            copies.wait_reached()
            change(state["model"][1].weight)
            copies.open()
            with pytest.raises(
                ks.errors.StagingError, match=rf"step {step} was not saved(.|\n)*model/1\.weight"
            ) as caught:
                pending.wait_committed(30)
            assert "model/0.weight" not in str(caught.value)
        assert ckpt.save() is not None
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def change_data(parameter):
    parameter.data.add_(1.0)


def change_through_numpy(parameter):
    parameter.detach().numpy()[0, 0] += 1.0


def change_detached(parameter):
    parameter.detach().mul_(2.0)


def test_new_storage_during_the_copy_leaves_the_save_right(copies, tmp_path):
    """``.data = other`` changes nothing in place: what is being copied is still what it was."""
    state = run()
    with checkpointer(tmp_path, state) as ckpt:
        before = live(state)
        pending = ckpt.save()
        copies.wait_reached()
        weight = state["model"][0].weight
        weight.data = torch.zeros_like(weight)
        copies.open()
        pending.wait_committed(30)
        after = live(state)
        again = ckpt.save() if ckpt.step() is None else None
        again.wait_committed(30)
    assert contents(tmp_path / "step-00000000") == before
    assert contents(tmp_path / "step-00000001") == after != before


def test_the_fence_may_be_used_on_any_thread_and_costs_nothing_without_a_save(copies, tmp_path):
    state = run()
    state.fence()
    with checkpointer(tmp_path, state) as ckpt:
        pending = ckpt.save()
        done = []
        with waits_for(copies):
            thread = threading.Thread(target=lambda: done.append(state.fence()))
            thread.start()
            thread.join(30)
        assert done == [None]
        assert pending.staged.exception(30) is None
        state.fence()
