"""What ranks tell each other: few phases, bytes that do not grow with the state, nothing on the trainer's group."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import keepstep as ks
from tests.ranks.calls import attempt, training_state


class Counted:
    """The job's store, with every request counted; given to the process group like any store."""

    def __init__(self, store):
        self._store = store
        self.calls = Counter()
        self.bytes = 0

    def __getattr__(self, name):
        inner = getattr(self._store, name)

        def call(*args):
            self.calls[name] += 1
            result = inner(*args)
            moved = [*args, *(result if isinstance(result, list) else [result])]
            self.bytes += sum(len(item) for item in moved if isinstance(item, bytes | str))
            return result

        return call

    def clone(self):
        return self

    def phases(self):
        """Each phase of a rank takes one number."""
        return self.calls["add"]


def counted(monkeypatch):
    store = Counted(dist.distributed_c10d._get_default_store())
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def since(store, call):
    phases, moved = store.phases(), store.bytes
    began = time.monotonic()
    result = call()
    return store.phases() - phases, store.bytes - moved, time.monotonic() - began, result


def saves_of(rank, folder, tensors, background):
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = counted(monkeypatch)
        state = ks.TrainState(
            weights={f"a rather long name of a tensor, number {i}": torch.full((3,), float(i)) for i in range(tensors)},
            mine=ks.per_rank([rank]),
        )
        with ks.Checkpointer(folder, state, background=background) as checkpointer:
            first = since(store, checkpointer.save)
            state.progress.step = 1
            state["weights"]["a rather long name of a tensor, number 0"].fill_(9.0)
            second = since(store, checkpointer.save)
            state["weights"]["one more"] = torch.ones(4)
            state.progress.step = 2
            changed = since(store, checkpointer.save)
        with ks.Checkpointer(folder, state, background=background) as checkpointer:
            checkpointer.restore()
            state.progress.step = 3
            restarted = since(store, checkpointer.save)
    with ks.open(f"{folder}/step-00000002") as checkpoint:
        assert checkpoint["weights/one more"].tolist() == [1.0] * 4
        assert checkpoint["weights/a rather long name of a tensor, number 0"].tolist() == [9.0] * 3
    return [figures[:2] for figures in (first, second, changed, restarted)]


@pytest.mark.case(71)
@pytest.mark.case(107)
@pytest.mark.parametrize(("background", "phases_each"), [("off", 2), ("thread", 1)])
def test_phases_are_few_and_do_not_grow_with_tensors(rank_pool, tmp_path, background, phases_each):
    """What a save in the background has to tell after its beginning, agents tell each other."""
    few = rank_pool(3)(saves_of, str(tmp_path / "few"), 3, background)
    many = rank_pool(3)(saves_of, str(tmp_path / "many"), 2000, background)
    for rank in range(3):
        for small, large in zip(few[rank], many[rank], strict=True):
            phases, moved = large
            assert phases == small[0] == phases_each
            # No plan and no list of tensors goes round, not even for the first save: equal structures have equal prints.
            assert moved < (1024 if rank else 3 * 1024)
            assert moved < small[1] + 200


def uneven(rank, folder):
    """Ranks that hold different parts: what they hold is compared once more, and only then."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = counted(monkeypatch)
        model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2)})
        saved = since(store, lambda: ks.save(folder, {"model": model}))
    return saved[0]


@pytest.mark.case(71)
def test_ranks_that_differ_take_one_phase_more(rank_pool, tmp_path):
    assert rank_pool(3)(uneven, str(tmp_path / "ck")) == [3, 3, 3]


def busy_group(rank, folder):
    """The trainer's group is in use between saves, and keepstep puts no collective of its own on it."""
    used = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("all_reduce", "broadcast", "barrier", "all_gather", "gather", "all_gather_object", "new_group"):
            real = getattr(dist, name)
            monkeypatch.setattr(
                dist,
                name,
                lambda *args, _real=real, _name=name, **kwargs: (used.append(_name), _real(*args, **kwargs))[1],
            )
        state = training_state(rank)
        totals = []
        with ks.Checkpointer(folder, state, every=ks.Every(steps=1), keep=ks.Keep(last=2)) as checkpointer:
            checkpointer.restore()
            for step in range(10):
                total = torch.tensor([float(rank + step)])
                dist.all_reduce(total)
                totals.append(total.item())
                work = dist.all_reduce(total, async_op=True)
                state["model"].weight.data.fill_(totals[-1])
                checkpointer.step(loss=totals[-1])
                work.wait()
                dist.barrier()
    assert used == ["all_reduce", "all_reduce", "barrier"] * 10
    target = training_state(rank)
    ks.load(f"{folder}/step-00000010", into=target)
    assert torch.all(target["model"].weight == totals[-1])
    return totals


def test_ten_saves_beside_a_busy_group(rank_pool, tmp_path):
    totals = rank_pool(2)(busy_group, str(tmp_path / "run"))
    assert totals[0] == totals[1] == [2.0 * step + 1 for step in range(10)]
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000009", "step-00000010"]


def by_clock(rank, folder):
    """Saves by time: clocks differ, and still all ranks save at the same steps."""
    state = training_state(rank)
    saved = []
    with ks.Checkpointer(folder, state, every=ks.Every(seconds=0.15)) as checkpointer:
        for step in range(1, 16):
            time.sleep(0.02 + 0.02 * (rank == step % 2))
            if checkpointer.step() is not None:
                saved.append(step)
    return saved


def test_ranks_save_at_the_same_steps_by_the_clock(rank_pool, tmp_path):
    first, second = rank_pool(2)(by_clock, str(tmp_path / "run"))
    assert first == second
    assert 1 <= len(first) < 15


def other_thread(rank, folder):
    import threading

    state = training_state(rank)
    outcomes = []
    with ks.Checkpointer(folder, state) as checkpointer:
        thread = threading.Thread(target=lambda: outcomes.append(attempt(checkpointer.save)))
        thread.start()
        thread.join()
        outcomes.append(attempt(checkpointer.save))
    return outcomes


def test_ranks_do_not_talk_on_another_thread(rank_pool, tmp_path):
    for elsewhere, here in rank_pool(2)(other_thread, str(tmp_path / "run")):
        assert elsewhere.kind == "UsageError"
        assert "training thread" in elsewhere.text
        assert here.kind == "ok"
