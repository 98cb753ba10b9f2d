"""Everything at one step, or somewhere inside an update that was declared: what is checked, and what comes back."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep as ks
from keepstep.errors import MismatchError, RankFailedError, UsageError
from tests.helpers.runs import steps_in
from tests.helpers.same import assert_same

MICRO = 4


class Loop:
    """A small model with dropout, an optimizer with momentum and a scheduler; one update is ``MICRO`` microbatches."""

    def __init__(self, seed: int, wrap=lambda model: model, rank: int = 0):
        torch.manual_seed(seed)
        self.model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 10)
        self.state = ks.TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        torch.manual_seed(100 * seed + rank)

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        loss = self.model(torch.randn(3, 4, generator=generator)).square().mean() / MICRO
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def finish(self, ckpt: ks.Checkpointer, until: int) -> None:
        """Trains on from wherever the Checkpointer stands."""
        for step in range(ckpt.progress.step, until):
            for micro in range(ckpt.micro, MICRO):
                self.backward(MICRO * step + micro)
                if micro < MICRO - 1:
                    ckpt.micro_step(samples=3)
            self.update()
            ckpt.step(samples=3)

    def result(self) -> dict[str, object]:
        model = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in self.model.named_parameters()}
        return {"model": model, "lr": self.scheduler.get_last_lr(), "rng": torch.get_rng_state()}


# --- inside an update -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", ["off", "thread"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_stopped_inside_an_update_finishes_it_to_the_last_bit(background, stop, tmp_path):
    straight = Loop(1)
    with ks.Checkpointer(tmp_path / "straight", straight.state, background=background) as ckpt:
        straight.finish(ckpt, 4)

    first = Loop(1)
    with ks.Checkpointer(tmp_path / "run", first.state, background=background) as ckpt:
        first.finish(ckpt, 2)
        for micro in range(stop):
            first.backward(2 * MICRO + micro)
            ckpt.micro_step(samples=3)
        ckpt.save()

    second = Loop(2)
    with ks.Checkpointer(tmp_path / "run", second.state, background=background) as ckpt:
        report = ckpt.restore()
        assert (ckpt.progress.step, ckpt.micro) == (2, stop)
        # The index, and two weights and two biases.
        assert report.components["accumulation"].restored == 5
        second.finish(ckpt, 4)
        assert (ckpt.micro, ckpt.progress.samples) == (0, 4 * MICRO * 3)
    assert_same(second.result(), straight.result())


def test_a_save_inside_an_update_takes_the_place_of_its_step(tmp_path):
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state, every=ks.Every(steps=1), keep=ks.Keep(last=None)) as ckpt:
        loop.finish(ckpt, 2)
        for micro in range(2):
            loop.backward(2 * MICRO + micro)
            ckpt.micro_step()
            ckpt.save().wait_committed(30)
        assert steps_in(tmp_path) == [1, 2]
    other = Loop(2)
    with ks.Checkpointer(tmp_path, other.state) as ckpt:
        ckpt.restore()
        assert (ckpt.progress.step, ckpt.micro) == (2, 2)
        other.backward(2 * MICRO + 2)
        ckpt.micro_step()
        ckpt.save().wait_committed(30)
    third = Loop(3)
    with ks.Checkpointer(tmp_path, third.state) as ckpt:
        ckpt.restore()
        assert (ckpt.progress.step, ckpt.micro) == (2, 3)
        for mine, theirs in zip(third.model.parameters(), other.model.parameters(), strict=True):
            assert_same(mine.grad, theirs.grad)


def test_an_older_step_between_two_updates_leaves_no_gradients_behind(tmp_path):
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state, every=ks.Every(steps=1)) as ckpt:
        loop.finish(ckpt, 1)
        loop.backward(MICRO)
        ckpt.micro_step()
        report = ckpt.restore()
        assert report.components["accumulation"].reset == ["accumulation: the gradients of 1 microbatches"]
        assert ckpt.micro == 0
        assert all(parameter.grad is None for parameter in loop.model.parameters())


@pytest.mark.parametrize("background", ["off", "thread"])
def test_gradients_that_nobody_declared_are_refused_with_both_choices(background, tmp_path):
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state, background=background) as ckpt:
        loop.finish(ckpt, 1)
        ckpt.save()
        loop.backward(MICRO)
        with pytest.raises(UsageError, match="step 1 cannot be saved here") as caught:
            ckpt.save()
        assert "right after optimizer.step() and Checkpointer.step()" in str(caught.value)
        assert "call Checkpointer.micro_step() after every microbatch" in str(caught.value)
        # It is no longer so once the update is made, or given up.
        loop.update()
        ckpt.step()
        ckpt.save()
        loop.backward(MICRO)
        loop.optimizer.zero_grad(set_to_none=False)
        ckpt.save()
    assert steps_in(tmp_path) == [1, 2]


def test_gradients_that_stay_after_their_update_are_no_hindrance(tmp_path):
    """Many loops clear them only before the next backward pass."""
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state) as ckpt:
        for number in range(3):
            loop.optimizer.zero_grad()
            loop.backward(number)
            loop.optimizer.step()
            loop.scheduler.step()
            ckpt.step()
            ckpt.save()
        # Nor where progress is counted by hand.
        loop.optimizer.zero_grad()
        loop.backward(3)
        loop.optimizer.step()
        ckpt.progress.step += 1
        ckpt.save()
    assert steps_in(tmp_path)[-1] == 4


def test_the_loss_scaler_comes_back_inside_an_update(tmp_path):
    loop = Loop(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1234.0, growth_interval=7)
    state = ks.TrainState(**{name: loop.state[name] for name in ("model", "optimizer")}, scaler=scaler)
    scaler.scale(loop.model(torch.ones(1, 4)).sum()).backward()
    with ks.Checkpointer(tmp_path, state) as ckpt:
        ckpt.micro_step()
        ckpt.save()
    other = Loop(2)
    fresh = torch.amp.GradScaler("cpu")
    into = ks.TrainState(**{name: other.state[name] for name in ("model", "optimizer")}, scaler=fresh)
    with ks.Checkpointer(tmp_path, into) as ckpt:
        ckpt.restore()
        assert (ckpt.micro, fresh.get_scale(), fresh.get_growth_interval()) == (1, 1234.0, 7)
        assert_same(other.model[0].weight.grad, loop.model[0].weight.grad)


def of_ranks(rank, folder, kind):
    """Stopped inside an update on two ranks: ``ddp`` without synchronisation, so that every rank has other gradients."""

    def wrap(model):
        if kind == "ddp":
            return DistributedDataParallel(model)
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def backward(loop, number, last):
        with loop.model.no_sync() if kind == "ddp" and not last else torch.enable_grad():
            loop.backward(10 * number + rank)

    def finish(loop, ckpt, until):
        for step in range(ckpt.progress.step, until):
            for micro in range(ckpt.micro, MICRO):
                backward(loop, MICRO * step + micro, micro == MICRO - 1)
                if micro < MICRO - 1:
                    ckpt.micro_step()
            loop.update()
            ckpt.step()

    straight = Loop(1, wrap, rank)
    with ks.Checkpointer(f"{folder}/straight", straight.state, background="thread") as ckpt:
        finish(straight, ckpt, 3)
    first = Loop(1, wrap, rank)
    with ks.Checkpointer(f"{folder}/run", first.state, background="thread") as ckpt:
        finish(first, ckpt, 1)
        for micro in range(2):
            backward(first, MICRO + micro, last=False)
            ckpt.micro_step()
        ckpt.save()
    local = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in first.model.parameters()]
    second = Loop(2, wrap, rank)
    with ks.Checkpointer(f"{folder}/run", second.state, background="thread") as ckpt:
        ckpt.restore()
        assert (ckpt.progress.step, ckpt.micro) == (1, 2)
        for parameter, gradient in zip(second.model.parameters(), local, strict=True):
            assert_same(getattr(parameter.grad, "_local_tensor", parameter.grad), gradient)
        finish(second, ckpt, 3)
    assert_same(second.result(), straight.result())
    return [gradient.sum().item() for gradient in local]


def begun_on_two(rank, folder):
    """Two microbatches of an update, saved."""
    loop = Loop(1, DistributedDataParallel, rank)
    with ks.Checkpointer(f"{folder}/run", loop.state, background="off") as ckpt:
        for micro in range(2):
            with loop.model.no_sync():
                loop.backward(10 * micro + rank)
            ckpt.micro_step()
        ckpt.save()
    return [parameter.grad.clone() for parameter in loop.model.parameters()]


def on_other_ranks(rank, folder):
    """What two ranks have accumulated without synchronisation, loaded by this many."""
    loop = Loop(2, DistributedDataParallel if dist.get_world_size() > 1 else lambda model: model, rank)
    with ks.Checkpointer(f"{folder}/run", loop.state, background="off") as ckpt:
        report = ckpt.restore()
        assert ckpt.micro == 2
    assert report.components["accumulation"].rederived
    return [parameter.grad.clone() for parameter in loop.model.parameters()]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_mean_of_the_gradients(rank_pool, tmp_path):
    each = rank_pool(2)(begun_on_two, str(tmp_path), timeout_s=60)
    means = [torch.stack(gradients).to(torch.float64).mean(0).float() for gradients in zip(*each, strict=True)]
    for world in (1, 3):
        for found in rank_pool(world)(on_other_ranks, str(tmp_path), timeout_s=60):
            assert_same(found, means)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_stopped_inside_an_update_finish_it_to_the_last_bit(rank_pool, kind, tmp_path):
    one, other = rank_pool(2)(of_ranks, str(tmp_path), kind, timeout_s=120)
    assert one != other


def on_one_rank_only(rank, folder):
    """Rank 1 has begun an update. Both hear of it, at once, and the ranks go on."""
    loop = Loop(1)
    with ks.Checkpointer(folder, loop.state, background="off") as ckpt:
        if rank == 1:
            loop.backward(0)
        with pytest.raises((UsageError, RankFailedError)) as caught:
            ckpt.save()
        loop.optimizer.zero_grad()
        dist.barrier()
        ckpt.save()
    return str(caught.value)


def unreduced(rank, folder):
    """FSDP2 was told to keep whole gradients to itself."""
    loop = Loop(1, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    loop.model.set_requires_gradient_sync(False)
    loop.backward(rank)
    with ks.Checkpointer(folder, loop.state, background="off") as ckpt:
        ckpt.micro_step()
        with pytest.raises((UsageError, RankFailedError)) as caught:
            ckpt.save()
    return str(caught.value)


@pytest.mark.slow
def test_what_one_rank_cannot_save_all_ranks_hear_of(rank_pool, tmp_path):
    told = rank_pool(2)(on_one_rank_only, str(tmp_path / "a"), timeout_s=60)
    assert all("gradients for the next update of optimizer were accumulated" in text for text in told)
    told = rank_pool(2)(unreduced, str(tmp_path / "b"), timeout_s=60)
    assert all("FSDP2 holds gradients that were not reduced" in text for text in told)


# --- parts that do not stand at one step ----------------------------------------------------------------------------


def steps(ckpt, *parts):
    """Three times round a loop that calls these in order."""
    for _ in range(3):
        for part in parts:
            part()


@pytest.mark.parametrize("late", ["scheduler", "optimizer", "both"])
def test_a_boundary_before_the_others_have_moved_is_found_at_the_third_step(late, tmp_path):
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state) as ckpt:
        optimizer, scheduler = loop.optimizer.step, loop.scheduler.step
        loop.backward(0)
        orders = {
            "scheduler": (optimizer, ckpt.step, scheduler),
            "optimizer": (ckpt.step, optimizer, scheduler),
            "both": (ckpt.step, optimizer, scheduler),
        }
        with pytest.raises(UsageError, match="do not stand at one step") as caught:
            steps(ckpt, *orders[late])
        named = str(caught.value).partition(":")[2].partition(" moved after")[0].strip()
        assert named == ("scheduler" if late == "scheduler" else "optimizer, scheduler")
        assert ckpt.progress.step == 3


@pytest.mark.parametrize("every", [2, 3])
def test_a_scheduler_of_epochs_is_no_fault(every, caplog, tmp_path):
    loop = Loop(1)
    with caplog.at_level(logging.WARNING, "keepstep"), ks.Checkpointer(tmp_path, loop.state) as ckpt:
        for number in range(8):
            loop.backward(number)
            loop.optimizer.step()
            if number % every == every - 1:
                loop.scheduler.step()
            ckpt.step()
    assert not caplog.records


def test_a_scheduler_that_moves_after_the_last_boundary_of_an_epoch_is_told_once(caplog, tmp_path):
    loop = Loop(1)
    with caplog.at_level(logging.WARNING, "keepstep"), ks.Checkpointer(tmp_path, loop.state) as ckpt:
        for epoch in range(3):
            for number in range(3):
                loop.backward(3 * epoch + number)
                loop.optimizer.step()
                ckpt.step()
            loop.scheduler.step()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("scheduler moved after the boundary of step 3 and before the next update")
    assert "before Checkpointer.step() of the last batch of an epoch" in told


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_steps_that_a_scaler_leaves_out_are_no_fault(tmp_path):
    loop = Loop(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    state = ks.TrainState(**{name: loop.state[name] for name in ("model", "optimizer", "scheduler")}, scaler=scaler)
    with ks.Checkpointer(tmp_path, state) as ckpt:
        for number in range(4):
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(torch.ones(1, 4)).sum()).backward()
            if number == 0:
                loop.model[0].weight.grad[0, 0] = torch.inf
            scaler.step(loop.optimizer)
            scaler.update()
            loop.scheduler.step()
            ckpt.step()


def test_a_boundary_without_an_update_is_told_once(caplog, tmp_path):
    loop = Loop(1)
    with caplog.at_level(logging.WARNING, "keepstep"), ks.Checkpointer(tmp_path, loop.state) as ckpt:
        for number in range(4):
            loop.backward(number)
            loop.update()
            ckpt.step()
        ckpt.step()
        ckpt.step()
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" has moved")[0] for text in told] == ["step 5: optimizer", "step 5: scheduler"]


def test_the_hooks_go_with_the_checkpointer(tmp_path):
    loop = Loop(1)
    with ks.Checkpointer(tmp_path, loop.state):
        assert len(loop.optimizer._optimizer_step_post_hooks) == 1
    assert not loop.optimizer._optimizer_step_post_hooks


def test_a_reserved_name_is_refused():
    with pytest.raises(UsageError, match="accumulation"):
        ks.TrainState(accumulation={})


def test_a_gradient_whose_parameter_is_gone_is_named(tmp_path):
    loop = Loop(1)
    loop.backward(0)
    with ks.Checkpointer(tmp_path, loop.state) as ckpt:
        ckpt.micro_step()
        ckpt.save()
    model = nn.Sequential(nn.Linear(4, 6))
    state = ks.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with ks.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(MismatchError) as caught:
            ckpt.restore()
        gone = [text for text in caught.value.mismatches if text.startswith("accumulation/own/2.")]
        assert len(gone) == 2
        assert all("no parameter of that name" in text for text in gone)
        assert model[0].weight.grad is None
