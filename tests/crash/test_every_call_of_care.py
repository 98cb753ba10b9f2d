"""Every storage call of a prune, a repair and a collection of garbage fails once: good steps stay, and the next try ends it.

Below the commands, on a storage in memory; the commands themselves are killed elsewhere.
"""

from __future__ import annotations

import pytest

from keepstep.check.repair import Wish, repair, undo
from keepstep.commit.catalog import read_catalog
from keepstep.commit.garbage import fence, find_garbage, remove_garbage
from keepstep.commit.publish import newest_incarnation
from keepstep.commit.retention import Keep, judge, remove_step
from keepstep.errors import CheckpointError
from tests.crash.test_every_call import Faults, Start, copied, named, steps_of, three_steps

__all__ = ["three_steps"]

ALL = Wish(frozenset(), False, False, False)
QUARANTINE = Wish(frozenset(), False, True, False)


def prune(storage):
    catalog = read_catalog(storage)
    start = newest_incarnation(storage)
    for fate in reversed(judge(catalog, Keep(last=1), run=catalog.steps[0].run, resumed=set(), pinned=set())):
        if fate.goes:
            remove_step(storage, fate.found, start)


def mend(storage):
    return [action.outcome for action in repair(storage, ALL)]


def put_aside(storage):
    return [action.outcome for action in repair(storage, QUARANTINE)]


def bring_back(storage):
    if 2 in {note.step for note in read_catalog(storage).aside}:
        undo(storage, 2)


def collect(storage):
    fence(storage, "here")
    for _ in remove_garbage(storage, find_garbage(storage, read_catalog(storage))):
        pass


def without_a_manifest(memory):
    """Step 3 has lost its manifest, which its files tell, and of which the hint says that it was there."""
    memory.delete(["step-00000003/.metadata"])


def with_a_damaged_step(memory):
    (name,) = [name for name, _ in memory.list("step-00000002/model")]
    data = bytearray(memory._blobs[name])
    data[-1] ^= 1
    memory.put(name, bytes(data))


def with_one_put_aside(memory):
    with_a_damaged_step(memory)
    put_aside(memory)
    (name,) = [name for name, _ in memory.list("step-00000002/model")]
    data = bytearray(memory._blobs[name])
    data[-1] ^= 1
    memory.put(name, bytes(data))


def with_garbage(memory):
    memory.put("step-00000009/model/rank-00000.0123abcd.safetensors", b"never committed")
    memory.put("step-00000003/model/rank-00000.0123abcd.safetensors", b"beside a committed step")
    memory.put("latest.0a1b2c3d.partial", b"half a record")


CARE = {
    # what is wrong, what is done, the steps that are good whatever happens, those that are good in the end
    "prune": (lambda memory: None, prune, {3}, {3}),
    "repair": (without_a_manifest, mend, {1, 2}, {1, 2, 3}),
    "quarantine": (with_a_damaged_step, put_aside, {1, 3}, {1, 3}),
    "undo": (with_one_put_aside, bring_back, {1, 3}, {1, 2, 3}),
    "gc": (with_garbage, collect, {1, 2, 3}, {1, 2, 3}),
}


def names_of(storage):
    """What lies in the folders of steps, and half-written records."""
    return {name for name, _ in storage.list("") if name.startswith("step-") or name.endswith(".partial")}


def good(storage, damaged=frozenset()):
    """The steps that a listing shows as good."""
    return {found.step for found in read_catalog(storage).steps if not found.damage} - damaged


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["error", "late", "gone"])
@pytest.mark.parametrize("care", CARE)
def test_every_call(three_steps, care, kind):
    spoil, work, always, finally_ = CARE[care]
    spoil(three_steps)
    # The quarantined step is damaged for as long as it is listed.
    damaged = frozenset({2}) if care == "quarantine" else frozenset()
    whole = copied(three_steps)
    work(whole)
    assert good(whole) == steps_of(whole) == finally_
    faults = Faults(three_steps, "late" if kind == "late" else "error", times=None if kind == "gone" else 1)
    for storage in faults:
        failed, outcomes = None, []
        try:
            outcomes = work(storage)
        except CheckpointError as err:
            failed = err
            named(err, storage)
        inner = storage.inner
        assert always <= good(inner, damaged), (storage.fired, failed)
        work(inner)
        if care == "prune":
            # A step that lost its manifest is gone for everybody; its files go with the next start, or so.
            collect(inner)
        assert good(inner) == steps_of(inner) == finally_, (storage.fired, failed, outcomes)
        assert names_of(inner) == names_of(whole), storage.fired
        following = Start(inner, "off", saves=1)
        assert (following.restored, following.skipped, following.reported) == (3, (), [4]), following.errors
    assert faults.count >= 8
