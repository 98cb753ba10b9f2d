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
from keepstep.errors import CheckpointError, DamageWarning, StepNotFoundError, StorageError
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
    fired = storage.fired[0]
    assert f"errno {fired.fault.code}" in str(error), (fired, error)
    assert fired.name.rpartition("/")[2][:8] in str(error), (fired, error)


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    """No thread of the library, and no failed save that nobody was told of."""
    yield
    end = time.monotonic() + 30
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("keepstep")]:
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
@pytest.mark.case(60)
@pytest.mark.case(76)
@pytest.mark.case(79)
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
            target = values(7.0)
            try:
                ks.load(storage, target)
            except StorageError as err:
                named(err, storage)
                assert err.errno == code
                assert target["note"] == {"value": 7.0}
            else:
                assert not storage.fired
            if times is not None and storage.fired:
                ks.load(storage, target)
                assert target["note"] == {"value": 1.0}
                assert torch.equal(target["model"]["w"], values(1.0)["model"]["w"])
        assert faults.count >= 7
