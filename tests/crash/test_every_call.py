"""Every storage call of a save, of retention, of a load and of a restore fails once, in every way it can.

The call fails first, then the one after it, and so on, until the operation needs no call that was not tried. After each:
what was reported is there and whole, what had to stay has stayed, the error says which file and why, and both the same
trainer and the next one save and restore as if nothing had been.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import warnings

import pytest
import torch

import keepstep as ks
from keepstep.check.faults import Fault, FaultyStorage
from keepstep.check.verify import verify
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.errors import CheckpointError, CorruptError, StepNotFoundError, StorageError
from keepstep.move.arena import ONCE_BYTES, Arena

CODES = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.ETIMEDOUT, errno.EACCES)
LIMIT = 400


def copied(memory):
    """The same blobs in a storage of their own."""
    twin = ks.MemoryStorage()
    twin._blobs = dict(memory._blobs)
    return twin


class Faults:
    """Storages over copies of one, each with a fault one call further on; ends with one whose fault nobody met."""

    def __init__(self, memory, kind="error", *, operation="*", times=1, codes=CODES, **more):
        self.memory, self.kind, self.operation, self.times, self.codes = memory, kind, operation, times, codes
        self.more = more
        self.count = 0

    def __iter__(self):
        for nth in range(1, LIMIT):
            code = self.codes[nth % len(self.codes)]
            fault = Fault(self.operation, self.kind, nth=nth, times=self.times, code=code, **self.more)
            storage = FaultyStorage(copied(self.memory), [fault])
            yield storage
            if not storage.fired:
                assert nth > 1, "no call was made at all"
                return
            self.count += 1
        raise AssertionError(f"not through after {LIMIT} calls")


def named(error, storage):
    """The error says which call failed, and why; so does the one that other ranks would get."""
    assert isinstance(error, CheckpointError), repr(error)
    assert f"errno {storage.fired[0].fault.code}" in str(error), (storage.fired, error)
    assert any(one.name.rpartition("/")[2][:8] in str(error) for one in storage.fired), (storage.fired, error)


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    """No thread of the library, and no failed save that nobody was told of."""
    before = {*threading.enumerate()}
    yield
    end = time.monotonic() + 30
    while left := [each.name for each in {*threading.enumerate()} - before if each.name.startswith("keepstep")]:
        assert time.monotonic() < end, left
        threading.Event().wait(0.005)


# --- one step, waited for ---------------------------------------------------------------------------------------------


def values(value):
    return {
        "model": {"w": torch.full((40,), value), "b": torch.full((3,), -value, dtype=torch.float64)},
        "note": {"value": value},
    }


def loaded(storage):
    """The one value that a step consists of; None when there is no step."""
    target = values(0.0)
    try:
        ks.load(storage, target)
    except StepNotFoundError:
        return None
    value = target["note"]["value"]
    for name, sign in (("w", 1), ("b", -1)):
        assert torch.all(target["model"][name] == sign * value), target
    return value


@pytest.mark.slow
@pytest.mark.case(76)
@pytest.mark.parametrize("kind", ["error", "late", "gone"])
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an older step"])
def test_every_call_of_a_save(over, kind):
    """``gone``: from there on the storage answers nothing any more, as if the process had been killed."""
    memory = ks.MemoryStorage()
    if over:
        ks.save(memory, values(1.0))
    before = loaded(memory)
    outcomes = set()
    for codes in [CODES[i:] + CODES[:i] for i in range(len(CODES))] if kind == "error" else [CODES]:
        faults = Faults(memory, "late" if kind == "late" else "error", times=None if kind == "gone" else 1, codes=codes)
        for storage in faults:
            failed = None
            try:
                ks.save(storage, values(2.0), overwrite=over)
            except CheckpointError as err:
                failed = err
                named(err, storage)
            there = loaded(storage.inner)
            if failed is None:
                assert there == 2.0, storage.fired
            elif kind == "gone":
                # The commit itself may have been the last thing that it did.
                assert there in (before, 2.0), storage.fired
            else:
                # A storage that answers again afterwards is asked what became of the commit.
                assert there == before, storage.fired
            outcomes.add((failed is None, there))
            again = storage if storage.fired and kind != "gone" else storage.inner
            ks.save(again, values(3.0), overwrite=True)
            assert loaded(storage.inner) == 3.0
            assert len(dict(storage.inner.list(""))) == 3, "something was left behind"
        assert faults.count >= 9
    assert {(False, before), (True, 2.0)} <= outcomes


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, None], ids=["once", "from there on"])
def test_every_call_of_a_load(times):
    """Plain values are as before; the error says what could not be read; the next load loads."""
    memory = ks.MemoryStorage()
    ks.save(memory, values(1.0))
    for code in CODES:
        faults = Faults(memory, times=times, codes=(code,))
        for storage in faults:
            target, failed = values(7.0), None
            try:
                ks.load(storage, target)
            except StorageError as err:
                failed = err
            assert bool(storage.fired) == (failed is not None)
            if failed is not None:
                named(failed, storage)
                assert failed.errno == code
                assert target["note"] == {"value": 7.0}
            if times is not None and storage.fired:
                ks.load(storage, target)
                assert target["note"] == {"value": 1.0}
                assert torch.equal(target["model"]["w"], values(1.0)["model"]["w"])
        assert faults.count >= 7


# --- a run: start, restore, saves, retention --------------------------------------------------------------------------


def trainer():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return ks.TrainState(model=model, optimizer=optimizer)


def advance(state, step):
    state.progress.step = step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(step)
            state["optimizer"].state[parameter]["exp_avg"].fill_(-step)


def check_whole(state, step):
    assert state.progress.step == step
    for parameter in state["model"].parameters():
        assert torch.all(parameter == step), step
        assert torch.all(state["optimizer"].state[parameter]["exp_avg"] == -step), step


class Start:
    """What one start of a job was told: the step it restored, the steps that were reported committed, the errors."""

    def __init__(self, storage, background, saves=2):
        self.restored, self.reported, self.errors = None, [], []
        state = trainer()
        with warnings.catch_warnings(record=True) as self.warned:
            warnings.simplefilter("always")
            try:
                with ks.Checkpointer(storage, state, keep=ks.Keep(last=2), background=background) as checkpointer:
                    report = checkpointer.restore(allow_fresh=False)
                    self.restored, self.skipped = report.step, report.skipped
                    if not report.fresh:
                        check_whole(state, report.step)
                    for _ in range(saves):
                        advance(state, state.progress.step + 1)
                        with self.noted():
                            self.reported.append(checkpointer.save().wait_committed(60).step)
            except CheckpointError as err:
                self.errors.append(err)

    @contextlib.contextmanager
    def noted(self):
        try:
            yield
        except CheckpointError as err:
            self.errors.append(err)


@pytest.fixture
def three_steps(monkeypatch, caplog):
    """A run of three steps; and a save's memory is taken without being made warm, which is what costs time here."""
    monkeypatch.setattr("keepstep.checkpointer.starting.Arena", lambda: Arena(ONCE_BYTES, warm=False))
    caplog.set_level(logging.CRITICAL, "keepstep")
    memory = ks.MemoryStorage()
    state = trainer()
    with ks.Checkpointer(memory, state, keep=ks.Keep(last=None), background="off") as checkpointer:
        checkpointer.restore()
        for step in (1, 2, 3):
            advance(state, step)
            checkpointer.save()
    return memory


def steps_of(inner):
    """The committed steps, each of them whole."""
    steps = {found.step for found in read_catalog(inner).steps}
    for step in steps:
        *_, last = verify(step_storage(inner, step))
        assert last.ok, last.problems
    return steps


def check_start(start, storage, before, *, lasting):
    """What holds after every start, whatever happened in it; and the next start goes on without help."""
    inner = storage.inner
    steps = steps_of(inner)
    newest = max(steps)
    assert newest >= max([*start.reported, *before]), (storage.fired, start.reported, steps)
    assert {*sorted(before | steps)[-2:]} <= steps, (storage.fired, steps)
    if not start.reported and newest == max(before):
        assert steps == before, "something was removed although nothing was committed"
    for error in start.errors:
        named(error, storage)
    if start.restored is not None and not lasting:
        # One fault, so at most one of the two saves may have failed; and a failed one does not stand in the next one's way.
        assert len(start.reported) == 2 - len(start.errors) >= 1, start.errors
        assert start.restored + 2 in start.reported or len(start.errors) == 1
    following = Start(inner, "off", saves=1)
    assert (following.restored, following.skipped, following.reported) == (newest, (), [newest + 1]), following.errors
    assert not following.warned, [str(each.message) for each in following.warned]
    kept = steps_of(inner)
    assert kept == {newest, newest + 1}
    for step in kept:
        names = [name for name, _ in step_storage(inner, step).list("") if name != ".metadata"]
        assert len({name.split(".")[1] for name in names}) == 1, f"left behind: {names}"
    assert not [name for name, _ in inner.list("") if name.endswith(".partial")]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["error", "late", "gone"])
@pytest.mark.parametrize("background", ["off", "thread"])
def test_every_call_of_a_run(three_steps, background, kind):
    """Start, restore, two saves and the removal of old steps; the trainer goes on after every save that fails."""
    faults = Faults(three_steps, "late" if kind == "late" else "error", times=None if kind == "gone" else 1)
    reported, fell_back = set(), 0
    for storage in faults:
        start = Start(storage, background)
        check_start(start, storage, {1, 2, 3}, lasting=kind == "gone")
        reported.add(tuple(start.reported))
        fell_back += start.restored not in (None, 3)
    assert {(), (4, 5)} <= reported
    assert faults.count >= 60
    assert fell_back or kind == "gone"


# --- a storage that lies ----------------------------------------------------------------------------------------------

LIES = [
    ("write_at", "flip"), ("put", "flip"), ("put_new", "flip"),
    ("commit", "cut"), ("put", "cut"), ("put_new", "cut"),
    ("write_at", "lost"), ("commit", "lost"), ("put", "lost"), ("put_new", "lost"), ("delete", "lost"),
    ("commit", "forgotten"), ("put", "forgotten"), ("put_new", "forgotten"), ("delete", "forgotten"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("operation", "kind"), LIES, ids=[f"{kind} {operation}" for operation, kind in LIES])
def test_every_call_lies_once(three_steps, operation, kind):
    """Whatever the storage said it had done: what is restored is whole, the step before is there, and training goes on."""
    faults = Faults(three_steps, kind, operation=operation, at=29)
    for storage in faults:
        start = Start(storage, "off", saves=1)
        storage.crash()
        inner = storage.inner
        assert start.restored in (None, 3)
        there = {found.step for found in read_catalog(inner).steps}
        following = Start(inner, "off", saves=1)
        # Either the new step is right, or it is known not to be; in both cases the one before is still there.
        assert following.restored in (3, 4), (storage.fired, following.errors)
        if following.restored == 3 and 4 in there:
            assert "step-00000004" in following.skipped[0], storage.fired
        assert following.reported == [following.restored + 1], following.errors
        last = Start(inner, "off", saves=1)
        assert (last.restored, last.skipped) == (following.restored + 1, ()), storage.fired
    assert faults.count >= 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("operation", ["list", "folders", "open"])
@pytest.mark.parametrize("ago", [1, 4, 25])
@pytest.mark.parametrize("times", [1, 2, 12])
def test_every_look_at_the_storage_is_an_old_one(three_steps, operation, ago, times):
    """What is decided from an old listing removes nothing that is committed, and reports nothing that is not."""

    def life(storage):
        # Twice, so that there is a past to be seen; no save after the second restore, so that what it removed shows.
        return Start(storage, "off"), Start(storage, "off", saves=0)

    faults = Faults(three_steps, "stale", operation=operation, ago=ago, times=times)
    for storage in faults:
        starts = life(storage)
        inner = storage.inner
        steps = steps_of(inner)
        reported = [step for start in starts for step in start.reported]
        assert steps >= {*sorted({1, 2, 3, *reported})[-2:]}, (storage.fired, reported, steps)
        following = Start(inner, "off", saves=1)
        assert (following.restored, following.skipped) == (max(steps), ()), (storage.fired, following.errors)
        assert following.reported == [max(steps) + 1], following.errors
    assert faults.count >= 10


def test_a_replacement_that_was_never_made_takes_no_files_with_it():
    """The storage says that it has put the new manifest in place, and has not: the step that is there keeps its data."""
    memory = ks.MemoryStorage()
    ks.save(memory, values(1.0))
    for fault in (Fault("put", "lost", name=".metadata"), Fault("put", "lost", name=".metadata", times=None)):
        storage = FaultyStorage(copied(memory), [fault])
        with pytest.raises(CorruptError, match="took the manifest and does not show it"):
            ks.save(storage, values(2.0), overwrite=True)
        assert storage.fired
        assert loaded(storage) == 1.0
    ks.save(storage.inner, values(3.0), overwrite=True)
    assert loaded(storage.inner) == 3.0
    assert len(dict(storage.inner.list(""))) == 3


def test_old_steps_stay_when_the_new_one_does_not_appear(three_steps):
    storage = FaultyStorage(three_steps, [Fault("put", "lost", name="step-00000004/.metadata")])
    start = Start(storage, "off", saves=1)
    assert storage.fired
    assert start.reported == [4]
    assert ["the step just committed is not there" in str(each.message) for each in start.warned] == [True]
    assert steps_of(three_steps) == {1, 2, 3}


def test_an_old_step_that_is_damaged_does_not_make_a_committed_one_fail(three_steps):
    """It was to lose its optimizer; it stays as it is, and somebody is told."""
    (name,) = [name for name, _ in three_steps.list("step-00000002") if name.endswith(".metadata")]
    data = three_steps._blobs[name]
    three_steps.put(name, data[:-40] + b"?" + data[-39:])
    state = trainer()
    keep = ks.Keep(last=None, weights_only_after=1)
    with ks.Checkpointer(three_steps, state, keep=keep, background="off") as checkpointer:
        checkpointer.restore()
        advance(state, 4)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert checkpointer.save().wait_committed().step == 4
    assert "step-00000002" in str(told[0].message), told
    assert three_steps._blobs[name] == data[:-40] + b"?" + data[-39:]
