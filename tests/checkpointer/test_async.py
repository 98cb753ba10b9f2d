"""Saves in the background, within one trainer: what a save holds, what its two futures say, and what a failure costs."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import random
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.checkpointer import alone
from keepstep.commit.records import read_records
from tests.helpers.agents import agent_of, stop_agents, wait_until
from tests.helpers.gates import Gate, slow_copies, waits_for
from tests.helpers.runs import WIDE, contents, latest, restored, run, steps_in, train
from tests.helpers.same import assert_same, bits, rng_state
from tests.helpers.storages import Watched, failing

BOTH = ["agent", "thread"]
# An agent of its own takes a test half a second.
SLOW_AGENT = [pytest.param("agent", marks=pytest.mark.slow), "thread"]
STAGINGS = ["overlap", "block"]


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory):
    """Single saves of this file go to one folder, so that they share one agent."""
    forget_agents()
    folder = tmp_path_factory.mktemp("single")
    yield folder
    forget_agents()
    stop_agents(folder)


def forget_agents():
    for saves, _ in alone._kept.values():
        saves.wait()
        saves.close()
    alone._kept.clear()


@pytest.fixture
def place(one_folder, request):
    """Where a single save may go: ``place("a")`` is another folder in each test."""
    return lambda name: one_folder / f"{''.join(c if c.isalnum() else '-' for c in request.node.name)}-{name}"


@pytest.fixture
def copies(monkeypatch):
    with slow_copies(monkeypatch) as gate:
        yield gate


# --- the two futures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", BOTH)
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_save_is_staged_and_then_committed(background, staging, place):
    model = nn.Linear(WIDE, WIDE)
    path = place("s")
    pending = ks.async_save(path, {"model": model, "note": "x"}, step=5, background=background, staging=staging)
    assert (pending.step, pending.url) == (5, str(path))
    assert pending.wait_staged(30) is None
    saved = pending.wait_committed(timeout_s=30)
    assert pending.staged.result() is None
    assert pending.committed.result() is saved
    assert (saved.url, saved.step) == (str(path), 5)
    on_disk = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert saved.total_bytes == saved.bytes_written == on_disk
    assert {"wait", "capture", "plan", "copy"} <= set(saved.seconds)
    assert 0 < pending.staged_s <= pending.committed_s
    assert repr(pending) == f"Pending(step=5, url={str(path)!r}, committed)"
    fresh = {"model": nn.Linear(WIDE, WIDE), "note": ""}
    ks.load(path, fresh)
    assert fresh["note"] == "x"
    assert_same(dict(fresh["model"].state_dict()), dict(model.state_dict()))
    with pytest.raises(ks.errors.StepExistsError):
        ks.async_save(path, {"model": model, "note": "x"}, background=background, staging=staging)


def test_waiting_has_an_end_and_the_save_goes_on(copies, tmp_path):
    gate = Gate("commit", name="step-")
    state = run()
    with ks.Checkpointer(Watched(tmp_path, gate), state) as ckpt:
        ckpt.step()
        pending = ckpt.save()
        where = f"step 1 in {tmp_path / 'step-00000001'} was not"
        with pytest.raises(ks.errors.CommitTimeoutError, match=f"{where} staged within 0.01 s; the save goes on"):
            pending.wait_staged(0.01)
        copies.open()
        pending.wait_staged(30)
        with pytest.raises(ks.errors.CommitTimeoutError, match=f"{where} committed within 0.01 s; the save goes on"):
            pending.wait_committed(timeout_s=0.01)
        gate.wait_reached()
        assert not pending.committed.done()
        assert repr(pending).endswith("staged)")
        gate.open()
        assert pending.wait_committed().step == 1
    assert steps_in(tmp_path) == [1]


def test_a_save_that_fails_after_the_copy_says_so_in_its_second_future(tmp_path):
    state = run()
    storage = Watched(tmp_path)
    with ks.Checkpointer(storage, state) as ckpt:
        storage.before = failing("write", name="step-")
        pending = ckpt.save()
        for _ in range(2):
            with pytest.raises(ks.errors.StorageError, match=r"rank-00000\..*failed.*errno 28") as caught:
                pending.wait_committed(30)
            assert caught.value.errno == errno.ENOSPC
        assert pending.staged.exception() is None
        assert pending.committed.exception() is caught.value
        assert repr(pending).endswith("failed)")
    assert not steps_in(tmp_path)


def test_what_cannot_be_stored_is_refused_before_anything_begins(place):
    with pytest.raises(ks.errors.UnsafeValueError, match="note"):
        ks.async_save(place("s"), {"note": object()}, background="thread")
    with pytest.raises(ks.errors.UsageError, match="staging='later'"):
        ks.async_save(place("s"), {"x": 1}, staging="later", background="thread")
    assert not place("s").exists()
    assert ks.async_save(place("s"), {"x": 1}, background="thread").wait_committed(30).step == 0


def test_agents_need_a_path(tmp_path):
    with pytest.raises(ks.errors.UsageError, match="background='agent' needs Linux and a root given by path"):
        ks.Checkpointer(Watched(tmp_path), run(), background="agent")
    with pytest.raises(ks.errors.UsageError, match="background='agent' needs Linux and a root given by path"):
        ks.Checkpointer(ks.MemoryStorage(), run(), background="agent")


class Noting(ks.LocalStorage):
    """A local storage of the user's own."""

    def __init__(self, root):
        super().__init__(root)
        self.created = []

    def create(self, name, size_hint_bytes):
        self.created.append(name)
        return super().create(name, size_hint_bytes)


def test_a_storage_derived_from_the_local_one_is_used_as_it_is(tmp_path):
    """An agent could open only what it knows: it would pass by what the user has added."""
    storage = Noting(tmp_path / "run")
    with ks.Checkpointer(storage, run()) as ckpt:
        assert ckpt.save().wait_committed(30).step == 0
    assert [name for name in storage.created if name.startswith("step-00000000/model/")]
    single = Noting(tmp_path / "single")
    ks.async_save(single, {"t": torch.ones(3)}).wait_committed(30)
    assert single.created


def test_a_second_kind_of_storage_waits_for_the_first_save(tmp_path, place):
    gate = Gate("commit")
    first = ks.async_save(Watched(tmp_path / "a", gate), {"x": 1}, background="thread")
    gate.wait_reached()
    threading.Timer(0.05, gate.open).start()
    second = ks.async_save(place("b"), {"x": 2}, background="thread")
    assert first.committed.done()
    assert first.wait_committed(30).step == second.wait_committed(30).step == 0


@pytest.mark.slow
def test_another_kind_of_storage_does_not_make_an_agents_save_fail(place):
    t = torch.ones(1 << 20)
    first = ks.async_save(place("a"), {"t": [t]})
    ks.async_save(ks.MemoryStorage("b"), {"x": 2}).wait_committed(30)
    assert first.committed.done()
    assert first.wait_committed(30).step == 0


# --- what a save holds is what stood at the boundary ----------------------------------------------------------------


class Everything:
    """A state with all that people keep in one, to be changed in every way at once."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.1), nn.Linear(WIDE, WIDE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.values = {"losses": [1.0, 2.0], "best": {"step": 3, "names": ["a"]}, "seen": {1, 2}, "count": 0}
        self.table = np.arange(20_000, dtype=np.float64)
        self.buffer = torch.zeros(WIDE, WIDE)
        self.state = ks.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            average=self.average,
            values=self.values,
            table=[self.table],
            buffer=self.buffer,
            tied=[self.buffer, self.buffer[:3]],
        )

    def change(self):
        """One step of training, and every change by hand that a loop may make after it."""
        loss = self.model(torch.randn(8, WIDE)).square().mean()
        self.values["losses"].append(loss.item())
        self.values["best"]["step"] += 1
        self.values["best"]["names"].clear()
        self.values["seen"].add(9)
        self.values["count"] += 1
        self.table += 1
        self.buffer.add_(1)
        random.random()
        np.random.rand()
        self.state.progress.step += 1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)

    def facts(self):
        return {
            "model": {name: bits(value) for name, value in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "average": {name: bits(value) for name, value in self.average.state_dict().items()},
            "values": copy.deepcopy(self.values),
            "table": self.state["table"][0].copy(),
            "buffer": self.buffer.clone(),
            "tied": bits(self.state["tied"][1]),
            "rng": rng_state(),
            "progress": self.state.progress.state_dict(),
        }


@pytest.mark.case(57)
@pytest.mark.parametrize("background", SLOW_AGENT)
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_save_holds_what_stood_at_the_boundary(background, staging, copies, tmp_path):
    run = Everything(0)
    run.change()
    with ks.Checkpointer(
        tmp_path, run.state, background=background, staging=staging, check_staging=True, keep=ks.Keep(last=None)
    ) as ckpt:
        before = run.facts()
        first = ckpt.save()
        assert_same(rng_state(), before["rng"])
        if staging == "overlap":
            with waits_for(copies):
                run.change()
        else:
            run.change()
        # The next save follows at once, and is followed by more changes.
        between = run.facts()
        second = ckpt.save()
        run.change()
        assert [first.wait_committed(30).step, second.wait_committed(30).step] == [1, 2]
    for step, facts in ((1, before), (2, between)):
        fresh = Everything(step)
        ks.load(tmp_path / f"step-{step:08d}", fresh.state)
        assert_same(fresh.facts(), facts)


@pytest.mark.case(57)
@pytest.mark.parametrize("background", BOTH)
def test_plain_tensors_and_lists_may_be_changed_right_after_the_call(background, place):
    tensors = [torch.full((WIDE, WIDE), float(i)) for i in range(4)]
    state = {"weights": tensors, "model": nn.Linear(WIDE, WIDE), "log": [1, [2]]}
    expected = {**{f"weights/{i}": bits(tensor) for i, tensor in enumerate(tensors)}}
    expected |= {f"model/{name}": bits(value) for name, value in state["model"].state_dict().items()}
    pending = ks.async_save(place("s"), state, background=background)
    with torch.no_grad():
        for tensor in (*tensors, *state["model"].parameters()):
            tensor += 1
    state["log"][1].append(3)
    del tensors[2:]
    pending.wait_committed(30)
    assert contents(place("s")) == expected
    with ks.open(place("s")) as step:
        assert step.values_of("log") == [1, [2]]


@pytest.mark.parametrize("background", BOTH)
def test_the_model_may_go_right_after_the_call(background, copies, place):
    state = run()
    train(state)
    ks.save(place("now"), dict(state))
    pending = ks.async_save(place("later"), dict(state), background=background)
    copies.wait_reached()
    seen = weakref.ref(state["model"])
    del state
    gc.collect()
    assert seen() is None
    copies.open()
    pending.wait_committed(30)
    assert contents(place("later")) == contents(place("now"))


@pytest.mark.parametrize("background", BOTH)
def test_a_load_into_the_state_comes_after_the_save(background, copies, place):
    state, other = run(), run(1)
    train(state)
    train(other)
    ks.save(place("other"), dict(other))
    before = {key: bits(value) for key, value in state["model"].state_dict().items()}
    pending = ks.async_save(place("s"), dict(state), background=background)
    copies.wait_reached()
    threading.Timer(0.05, copies.open).start()
    ks.load(place("other"), dict(state))
    assert pending.committed.done()
    assert_same(dict(state["model"].state_dict()), dict(other["model"].state_dict()))
    assert {key[6:]: value for key, value in contents(place("s")).items() if key.startswith("model/")} == before


@pytest.mark.parametrize("background", SLOW_AGENT)
def test_an_exception_in_the_loop_lets_the_save_end_first(background, tmp_path):
    state = run()
    with (
        pytest.raises(ZeroDivisionError),
        ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), background=background) as ckpt,
    ):
        train(state)
        pending = ckpt.step()
        raise ZeroDivisionError
    assert pending.committed.done()
    assert restored(tmp_path)["log"] == state["log"]


class Scaled(torch.Tensor):
    """Bytes and a scale that together stand for numbers, with no memory of its own."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_bytes, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_bytes", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["data_bytes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_bytes, args[0].scale)
        raise NotImplementedError(f"{func} of a Scaled")


FIXED_SIZE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


def filled(shape, dtype, seed):
    """Any bits that the dtype may have, and the same for the same seed."""
    items = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)), dtype.itemsize), dtype=np.uint8)
    if dtype is torch.bool:
        items &= 1
    return torch.frombuffer(bytearray(items.tobytes()), dtype=torch.uint8).view(dtype).reshape(shape)


def odd_tensors():
    """Tensors of every dtype and of every kind of memory."""
    base = torch.arange(4.0 * WIDE * WIDE).reshape(2 * WIDE, 2 * WIDE)
    weight = torch.randn(WIDE, WIDE, dtype=torch.complex64)
    state = {
        f"{dtype}".removeprefix("torch."): filled((2 * WIDE, WIDE), dtype, i) for i, dtype in enumerate(FIXED_SIZE)
    }
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is not None:
        state["packed"] = filled((2 * WIDE, WIDE), torch.uint8, 77).view(packed)
    return state | {
        "transposed": base.t(),
        "columns": base[:, 3:WIDE:2],
        "row": base[5],
        "shared": [base, base, base.view(-1)],
        "expanded": torch.ones(1, WIDE).expand(WIDE, WIDE),
        "channels last": torch.randn(8, 8, 32, 32).to(memory_format=torch.channels_last),
        "conjugate": weight.conj(),
        "negative": weight.imag,
        "empty": torch.empty(0, WIDE),
        "scalar": torch.tensor(1.5),
        "wrapped": Scaled(filled((2 * WIDE, 2 * WIDE), torch.uint8, 3), torch.tensor(0.5)),
        "int4": filled((WIDE, WIDE), torch.uint8, 4),
    }


@pytest.mark.case(51)
@pytest.mark.parametrize("background", BOTH)
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_kind_of_tensor_is_saved_as_a_synchronous_save_would(background, staging, place):
    state = odd_tensors()
    ks.save(place("sync"), state)
    ks.async_save(place("async"), state, background=background, staging=staging).wait_committed(30)
    expected = contents(place("sync"))
    assert contents(place("async")) == expected
    assert len(expected) >= len(state)
    wrapped = state["wrapped"]
    assert expected["wrapped/data_bytes"] == bits(wrapped.data_bytes)
    assert expected["wrapped/scale"] == bits(wrapped.scale)
    for name, value in state.items():
        if type(value) is torch.Tensor:
            assert expected[name.replace(" ", "%20") if name not in expected else name] == bits(value)


class Quantised(nn.Module):
    """A layer as low-precision training has them: a wrapped weight, tied twice, and a view of a larger buffer."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(
            Scaled(filled((2 * WIDE, 2 * WIDE), torch.uint8, seed), torch.tensor(0.5)), requires_grad=False
        )
        torch.manual_seed(seed)
        self.linear = nn.Linear(2 * WIDE, WIDE, bias=False)
        self.tied = nn.Linear(2 * WIDE, WIDE, bias=False)
        self.tied.weight = self.linear.weight
        self.turned = nn.Parameter(torch.randn(2 * WIDE, WIDE).t())
        self.register_buffer("part", torch.randn(4 * WIDE, WIDE)[WIDE : 3 * WIDE])


@pytest.mark.case(51)
def test_wrapped_tied_and_turned_parameters_are_copied_late_and_right(copies, tmp_path):
    model = Quantised(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
    state = ks.TrainState(model=model, optimizer=optimizer)
    with ks.Checkpointer(tmp_path, state, check_staging=True, background="thread") as ckpt:
        (model.linear.weight.sum() + model.turned.sum()).backward()
        optimizer.step()
        ks.save(tmp_path / "sync", state)
        pending = ckpt.save()
        with waits_for(copies):
            optimizer.step()
        pending.wait_committed(30)
    assert contents(tmp_path / "step-00000000") == contents(tmp_path / "sync")
    fresh = Quantised(1)
    ks.load(tmp_path / "step-00000000", {"model": fresh}, only=["model"])
    assert fresh.tied.weight is fresh.linear.weight


@pytest.mark.case(89)
@pytest.mark.parametrize("background", SLOW_AGENT)
@pytest.mark.parametrize("staging", STAGINGS)
def test_every_save_holds_its_own_values(background, staging, tmp_path):
    weight = nn.Parameter(torch.zeros(WIDE, WIDE))
    model = nn.ParameterDict({"w": weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight.grad = torch.full_like(weight, -1.0)
    state = ks.TrainState(model=model, optimizer=optimizer)
    options = {"staging": staging, "background": background, "check_staging": True}
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), keep=ks.Keep(last=None), **options) as ckpt:
        for _ in range(5):
            optimizer.step()
            ckpt.step()
        optimizer.step()
        weight.data = weight.data.clone()  # new memory
        ckpt.step()
        optimizer.step()
        model.to(torch.float64).to(torch.float32)  # moved away and back
        model["w"].grad = torch.full_like(model["w"], -1.0)
        ckpt.step()
        optimizer.step()
        ckpt.step()
    for step in range(1, 9):
        with ks.open(tmp_path / f"step-{step:08d}") as opened:
            assert torch.equal(opened["model/w"], torch.full((WIDE, WIDE), float(step)))


# --- what exists when -----------------------------------------------------------------------------------------------


@pytest.mark.case(36)
@pytest.mark.case(73)
def test_a_step_has_its_own_number_and_is_the_newest_only_once_it_is_durable(tmp_path):
    gate = Gate("commit", name="step-00000010")
    done = []

    def before(kind, name):
        done.append((kind, name))
        gate(kind, name)

    state = run()
    with ks.Checkpointer(Watched(tmp_path, before), state, every=ks.Every(steps=5), keep=ks.Keep(last=1)) as ckpt:
        for _ in range(13):
            train(state)
            pending = ckpt.step()
            if state.progress.step == 10:
                log = list(state["log"])
                gate.wait_reached()
        assert pending is None
        # Three steps later the save of step 10 has not ended.
        assert (latest(tmp_path), steps_in(tmp_path)) == (5, [5])
        with ks.open(tmp_path / "step-00000005") as step:
            assert step.step == 5
        gate.open()
    assert (latest(tmp_path), steps_in(tmp_path)) == (10, [10])
    manifest = json.loads((tmp_path / "step-00000010" / ".metadata").read_text())
    assert (manifest["step"], [record.step for record in read_records(ks.LocalStorage(tmp_path))]) == (10, [5, 10])
    fresh = restored(tmp_path)
    assert (fresh.progress.step, fresh["log"]) == (10, log)
    published = done.index(("put_new", "step-00000010/.metadata"))
    assert done.index(("delete", "step-00000005/.metadata")) > published


@pytest.mark.case(91)
@pytest.mark.parametrize("how", ["restore", "load", "close"])
def test_a_load_waits_for_the_save_in_progress(how, tmp_path):
    gate = Gate("commit", name="step-00000002")
    state = run()
    with ks.Checkpointer(Watched(tmp_path, gate), state, every=ks.Every(steps=1)) as ckpt:
        for _ in range(2):
            train(state)
            ckpt.step()
        log = list(state["log"])
        gate.wait_reached()
        train(state)
        threading.Timer(0.05, gate.open).start()
        if how == "restore":
            assert ckpt.restore().step == 2
            assert state["log"] == log
        elif how == "load":
            assert ks.load(tmp_path / "step-00000002", state).step == 2
            assert state["log"] == log
        else:
            ckpt.close()
            assert latest(tmp_path) == 2
    assert restored(tmp_path)["log"] == log


@pytest.mark.case(82)
@pytest.mark.parametrize("background", SLOW_AGENT)
def test_a_run_that_came_from_another_one_leaves_that_alone(background, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    state = run()
    with ks.Checkpointer(one, state, every=ks.Every(steps=1), background="off") as ckpt:
        train(state)
        ckpt.step()
    before = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    state = run(1)
    ks.load(one / "step-00000001", state)
    with ks.Checkpointer(two, state, every=ks.Every(steps=1), keep=ks.Keep(last=1), background=background) as ckpt:
        for _ in range(3):
            train(state)
            ckpt.step()
    assert steps_in(two) == [4]
    assert {path: path.read_bytes() for path in one.rglob("*") if path.is_file()} == before
    assert len(restored(two)["log"]) == 4


@pytest.mark.case(95)
@pytest.mark.parametrize("background", BOTH)
def test_saves_one_after_another_of_every_kind(background, place):
    state = run()
    expected = {}
    for turn in range(5):
        train(state)
        expected[f"async-{turn}"] = {f"model/{k}": bits(v) for k, v in state["model"].state_dict().items()}
        pending = ks.async_save(place(f"async-{turn}"), dict(state), background=background)
        if turn % 2:
            ks.save(place(f"sync-{turn}"), dict(state))
            expected[f"sync-{turn}"] = expected[f"async-{turn}"]
        if turn == 2:
            # A folder that cannot be made: a file is in the way.
            place("file").write_text("")
            with pytest.raises(ks.errors.CheckpointError):
                ks.async_save(place("file") / "step", dict(state), background=background).wait_committed(30)
    pending.wait_committed(30)
    for name, tensors in expected.items():
        found = contents(place(name))
        assert tensors.items() <= found.items()


@pytest.mark.case(98)
@pytest.mark.parametrize("staging", STAGINGS)
def test_what_was_copied_is_let_go_before_it_is_written(staging, tmp_path):
    gate = Gate("write")
    tensors = [torch.full((WIDE, WIDE), float(i)) for i in range(12)]
    seen = [weakref.ref(tensor) for tensor in tensors]
    pending = ks.async_save(Watched(tmp_path / "s", gate), {"t": tensors}, background="thread", staging=staging)
    pending.wait_staged(30)
    gate.wait_reached()
    del tensors
    gc.collect()
    wait_until(lambda: not any(ref() is not None for ref in seen), what="the tensors gone")
    assert not pending.committed.done()
    gate.open()
    pending.wait_committed(30)
    assert len(contents(tmp_path / "s")) == 12


def resident_bytes(pid="self"):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.case(97)
@pytest.mark.slow
@pytest.mark.parametrize("background", BOTH)
def test_twenty_saves_do_not_need_more_memory_than_three(background, tmp_path):
    parameter = nn.Parameter(torch.ones(200_000_000 // 4))
    model = nn.ParameterDict({"p": parameter})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameter.grad = torch.ones_like(parameter)
    state = ks.TrainState(model=model, optimizer=optimizer)
    ours, agents = [], []
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1), background=background) as ckpt:
        for _ in range(20):
            optimizer.step()
            ckpt.step()
            ckpt.save()
            ours.append(resident_bytes())
            if background == "agent":
                agents.append(resident_bytes(agent_of(tmp_path).pid))
        ckpt.save()
    assert steps_in(tmp_path) == [20]
    # The state, one arena, and little else.
    for sizes in filter(None, (ours, agents)):
        assert max(sizes[3:]) < 1.2 * sizes[2], [size // 1_000_000 for size in sizes]
    shutil.rmtree(tmp_path)


# --- shards in several boxes, and states of which little is known at the start -------------------------------------


class Shaped(torch.Tensor):
    """A local tensor that says by attributes which boxes of a global tensor it holds."""


@pytest.mark.parametrize("background", BOTH)
@pytest.mark.parametrize("staging", STAGINGS)
def test_every_box_of_a_shard_gets_its_own_bytes(background, staging, place):
    shard = torch.arange(12.0).reshape(6, 2).as_subclass(Shaped)
    shard.global_shape = torch.Size((6, 2))
    shard.global_offsets = [(4, 0), (0, 0), (2, 0)]
    shard.local_offsets = [(0, 0), (2, 0), (4, 0)]
    shard.local_sizes = [(2, 2)] * 3
    saved = ks.async_save(place("boxes"), {"shard": shard}, staging=staging, background=background).wait_committed(30)
    with ks.open(saved.url) as checkpoint:
        found = checkpoint["shard"]
    assert found.tolist() == [[4, 5], [6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]


class Odd(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter, and is not a dictionary."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state["moments"] = [torch.zeros(3), torch.ones(2)]


def test_an_arena_for_a_state_that_is_not_known_yet_is_only_guessed(tmp_path):
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    state = ks.TrainState(model=lazy, optimizer=Odd(nn.Linear(2, 2).parameters()))
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), background="thread") as ckpt:
        lazy(torch.ones(1, 4))
        ckpt.step().wait_committed(30)
    assert steps_in(tmp_path) == [1]


class Later:
    """A part of a state that cannot be asked yet."""

    ready = False

    def state_dict(self):
        if not self.ready:
            raise RuntimeError("not yet")
        return {"ready": True}

    def load_state_dict(self, state):
        pass


def test_nobody_is_asked_in_vain_before_a_save_is_due(tmp_path):
    later = Later()
    state = ks.TrainState(later=later)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=2), background="thread") as ckpt:
        assert ckpt.step() is None
        with pytest.raises(RuntimeError, match="not yet"):
            ckpt.step()
        later.ready = True
        ckpt.save().wait_committed(30)
    assert steps_in(tmp_path) == [2]
