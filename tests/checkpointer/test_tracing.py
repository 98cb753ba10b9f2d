"""What a Checkpointer writes down of every step, and how a drill steers it."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.check.trace import DRILL_VARIABLE, DrillOrders, Ended, Saved, encode_orders, read_trace
from keepstep.checkpointer.tracing import digests_of
from keepstep.errors import UsageError
from keepstep.storage.remote import RemoteStorage
from tests.helpers.runs import run, steps_in, train


@pytest.fixture
def drill(monkeypatch, tmp_path):
    """Makes this process one that a drill has started; returns the folders of root and trace."""

    def order(stop_at=None):
        orders = DrillOrders(str(tmp_path / "drilled"), str(tmp_path / "traced"), stop_at)
        monkeypatch.setenv(DRILL_VARIABLE, encode_orders(orders))
        return tmp_path / "drilled", tmp_path / "traced"

    return order


def the_run(folder, start=-1):
    return read_trace(folder).ranks[0][start]


# --- what is written ------------------------------------------------------------------------------------------------


def test_every_step_is_written_with_what_it_was_given_and_what_came_of_it(tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=2), trace=True) as ckpt:
        ckpt.restore()
        train(state)
        ckpt.step(loss=torch.tensor(0.1), grad_norm=2.5, batch=[3, 1])
        train(state)
        ckpt.step(loss=0.3, batch=torch.ones(2))
    seen = the_run(tmp_path / "trace")
    assert (seen.began.world, seen.began.incarnation, seen.began.step, seen.began.restored) == (1, 1, 0, False)
    first, second = seen.steps
    assert (first.step, first.samples, first.batch, first.loss) == (1, (3, 1), None, float(torch.tensor(0.1)).hex())
    assert (first.norm, first.metrics["grad_norm"]) == ((2.5).hex(), (2.5).hex())
    assert (second.samples, second.loss) == (None, (0.3).hex())
    assert len(second.batch) == 16
    assert first.lr == {"optimizer": (state["optimizer"].param_groups[0]["lr"].hex(),)}
    assert {"model", "optimizer", "progress", "rng/torch", "rng/python", "rng/numpy"} <= first.parts.keys()
    changed = {name for name in first.parts if first.parts[name] != second.parts[name]}
    assert changed == {"model", "optimizer", "progress", "log"}
    events = [(record.step, record.event) for record in seen.records if isinstance(record, Saved)]
    assert events == [(2, "due"), (2, "staged"), (2, "committed")]
    assert seen.records[-1] == Ended(step=2, why="closed", time=seen.records[-1].time)


def test_a_resumed_run_begins_with_the_digests_that_the_saved_step_had(tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), trace=True) as ckpt:
        ckpt.restore()
        train(state)
        ckpt.step()
    random.seed(5)
    torch.manual_seed(5)
    with ks.Checkpointer(tmp_path, run(), trace=True) as ckpt:
        ckpt.restore()
    first, second = read_trace(tmp_path / "trace").ranks[0]
    assert (second.began.incarnation, second.began.step, second.began.restored) == (2, 1, True)
    assert second.began.parts == first.steps[0].parts


def test_microbatches_are_written_with_their_samples(tmp_path):
    state = run()
    with ks.Checkpointer(tmp_path, state, trace=True) as ckpt:
        ckpt.micro_step(batch=[1])
        ckpt.micro_step(batch=[2])
        train(state)
        ckpt.step(batch=[3])
    seen = the_run(tmp_path / "trace")
    assert seen.began.step == 0
    assert [(one.place, one.samples) for one in seen.steps] == [((0, 1), (1,)), ((0, 2), (2,)), ((1, 0), (3,))]


def test_a_run_that_fails_has_no_end(tmp_path):
    with pytest.raises(ZeroDivisionError), ks.Checkpointer(tmp_path, run(), trace=True) as ckpt:
        ckpt.restore()
        raise ZeroDivisionError
    assert not any(isinstance(record, Ended) for record in the_run(tmp_path / "trace").records)


class Sampler:
    """Knows which samples it gave out."""

    def __init__(self):
        self.given = [4, 5]

    def state_dict(self):
        return {"at": 2}

    def load_state_dict(self, state):
        pass

    def take_ids(self):
        given, self.given = self.given, []
        return given


def test_samples_come_from_a_component_that_knows_them(tmp_path):
    with ks.Checkpointer(tmp_path, ks.TrainState(data=Sampler()), trace=True) as ckpt:
        ckpt.step()
        ckpt.step()
    assert [one.samples for one in the_run(tmp_path / "trace").steps] == [(4, 5), None]


def test_the_digests_see_all_that_is_alive(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = ks.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, mine=ks.per_rank([1.5]))

    def grow(values):
        values[0] += 1

    changes = {
        "a weight": ("model", lambda: model[0].weight.data.add_(1)),
        "a buffer": ("model", lambda: model[1].running_mean.add_(1)),
        "a buffer that is not saved": ("model", lambda: model.cache.add_(1)),
        "a group's field": ("optimizer", lambda: optimizer.param_groups[0].update(momentum=0.5)),
        "the scheduler": ("scheduler", lambda: setattr(scheduler, "last_epoch", 7)),
        "a value of this rank": ("mine", lambda: grow(state["mine"].value)),
        "python's stream": ("rng/python", random.random),
        "numpy's stream": ("rng/numpy", np.random.random),
        "torch's stream": ("rng/torch", lambda: torch.rand(1)),
        "progress": ("progress", lambda: setattr(state.progress, "tokens", 9)),
    }
    before = digests_of(state, rank=0, world=1)
    for what, (part, change) in changes.items():
        change()
        after = digests_of(state, rank=0, world=1)
        assert {name for name in after if after[name] != before[name]} == {part}, what
        before = after


def test_a_trace_needs_a_folder(tmp_path):
    for trace in (True, "memory://x/trace", ks.MemoryStorage()):
        with pytest.raises(
            UsageError, match=r"a trace goes to a folder of a file system, not to .*: trace='some/folder'"
        ):
            ks.Checkpointer("memory://x/run", run(), trace=trace)
    with pytest.raises(UsageError, match="is a file"):
        ks.Checkpointer("memory://x/run", run(), trace=Path(__file__))
    with ks.Checkpointer(tmp_path / "run", run(), background="off", trace=False) as ckpt:
        ckpt.step()
    assert not (tmp_path / "run/trace").exists()


def test_the_trace_of_a_run_by_url_goes_to_the_folder_that_is_named(tmp_path):
    """Nothing of it beside the steps; two starts write into one trace, as ever."""
    url = f"memory://{secrets.token_hex(4)}/run"
    for _ in range(2):
        state = run()
        with ks.Checkpointer(url, state, background="off", trace=tmp_path / "trace") as ckpt:
            ckpt.restore()
            train(state)
            ckpt.step()
            ckpt.save()
    starts = read_trace(tmp_path / "trace").ranks[0]
    assert [(one.began.step, one.last_step, one.saved("committed")) for one in starts] == [(0, 1, 1), (1, 2, 2)]
    assert not [name for name, _ in RemoteStorage(url).list("") if "trace" in name]


# --- what a drill orders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", ["off", "thread"])
def test_a_drill_says_where_and_until_when(background, drill, tmp_path):
    root, traced = drill(stop_at=3)
    state = run()
    with (
        pytest.raises(SystemExit) as ended,
        ks.Checkpointer(tmp_path / "own", state, every=ks.Every(steps=2), background=background) as ckpt,
    ):
        ckpt.restore()
        for _ in range(5):
            train(state)
            ckpt.step()
    assert ended.value.code == 0
    assert not (tmp_path / "own").exists()
    assert steps_in(root) == [2, 3]
    seen = the_run(traced)
    assert seen.saved("committed") == 3
    assert [record.why for record in seen.records if isinstance(record, Ended)] == ["stopped"]


def test_a_drill_without_an_end_lets_the_script_end(drill, tmp_path):
    root, traced = drill()
    with ks.Checkpointer(tmp_path / "own", run()) as ckpt:
        ckpt.restore()
        ckpt.step()
        ckpt.save()
    assert steps_in(root) == [1]
    assert the_run(traced).records[-1].why == "closed"


def test_an_order_that_makes_no_sense_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(DRILL_VARIABLE, "yes")
    with pytest.raises(UsageError, match=DRILL_VARIABLE):
        ks.Checkpointer(tmp_path, run())
    assert not list(tmp_path.iterdir())
