"""A copy to a disk, whenever it is killed and whenever the power goes: the step is there as a whole, or what was before.

What a copy does to the disk is recorded call by call; from that all states are made in which a crash may leave it.
"""

from __future__ import annotations

import random

import pytest

import keepstep as ks
from keepstep.commit.catalog import read_catalog
from keepstep.commit.copying import copy_step
from keepstep.storage.base import read_blob
from keepstep.storage.local import LocalStorage
from tests.conftest import SEED
from tests.crash.histories import ROOT, merged, put_down, taken
from tests.crash.recorder import Recorder
from tests.crash.states import MODELS, Disk

MOST = 48
"""States looked at in one moment, of each model, if there are more."""


def train(root, value, start=None):
    """Saves the step after ``start``; with another value it is another step of that number."""
    state = ks.TrainState(model={"weight": [value] * 9}, more={"text": "x" * 5000})
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off") as checkpointer:
        checkpointer.restore(step=start)
        checkpointer.step()
        checkpointer.save()


def contents(root):
    return {name: read_blob(root, name, 1 << 20) for name, _ in root.list("")}


@pytest.fixture(scope="module")
def roots():
    """A run that was rolled back to step 1 and has saved step 2 once more, and the run as it was before."""
    before, after = ks.MemoryStorage("before"), ks.MemoryStorage("after")
    train(before, 1.0)
    train(before, 2.0)
    for name, data in contents(before).items():
        after.put(name, data)
    train(after, 3.0, start=1)
    return before, after


def step_of(root):
    """The files of step 2 as they are committed."""
    names = [name for name in contents(root) if name.startswith("step-00000002/")]
    return {name: contents(root)[name] for name in names}


def found_in(image):
    """The run as a reader finds it after the crash."""
    root = ks.MemoryStorage("image")
    for name, data in image.files.items():
        root.put(name.removeprefix(f"{ROOT}/"), data)
    return root


def recorded(base, source, before):
    """What a copy of step 2 does below ``base``, where ``before`` is what was there."""
    put_down(before, base)
    with Recorder(base) as log:
        copy_step(source, LocalStorage(base / ROOT), 2, threads=1)
    return merged(base, [log.ops], before)


@pytest.fixture(params=["where nothing was", "over an older step"])
def history(request, roots, tmp_path):
    """The source, the steps of that number that may be found, what is there before, and what a copy does."""
    before, after = roots
    old = before if request.param == "over an older step" else None
    base = tmp_path / "start"
    base.mkdir()
    if old is not None:
        copy_step(before, LocalStorage(base / ROOT), 2)
        copy_step(before, LocalStorage(base / ROOT), 1)
    image = taken(base)
    (tmp_path / "copy").mkdir()
    ops = recorded(tmp_path / "copy", after, image)
    return after, [step_of(root) for root in (old, after) if root is not None], image, ops


def check(image, possible, *, ended, must):
    root = found_in(image)
    there = contents(root)
    steps = {found.step: found for found in read_catalog(root).steps}
    if 2 not in steps:
        assert not must, "a step that was there is gone"
        return
    assert not steps[2].damage
    assert {"run.json", f"incarnations/{steps[2].incarnation:06d}"} <= there.keys(), "a step without its run"
    whole = [step for step in possible if step["step-00000002/.metadata"] == there["step-00000002/.metadata"]]
    assert whole, "a manifest that nobody has written"
    assert whole[0].items() <= there.items(), "a manifest without all of its files"
    assert not ended or whole[0] == possible[-1], "the copy had ended, and is not there"


@pytest.mark.slow
def test_the_power_goes_at_any_moment(history):
    _, possible, before, ops = history
    rng, looked = random.Random(SEED), 0
    disk = Disk.of(before)
    for moment, op in enumerate([None, *ops]):
        if op is not None:
            disk.do(op)
        for model in MODELS:
            for image in disk.images(model, MOST, rng):
                ended = moment == len(ops)
                check(image, possible, ended=ended, must=ended or len(possible) > 1)
                looked += 1
    print(f"seed {SEED}: {looked:,} states at {len(ops) + 1} moments")
    assert looked > 200


@pytest.mark.slow
def test_it_is_killed_at_any_moment_goes_on_and_then_the_power_goes(history, tmp_path):
    """What the killed one has left may not be durable yet: the second one relies on it, and has to make it so."""
    source, possible, before, ops = history
    rng, looked = random.Random(SEED), 0
    for moment in range(len(ops) + 1):
        disk = Disk.of(before)
        for op in ops[:moment]:
            disk.do(op)
        base = tmp_path / f"killed-{moment}"
        base.mkdir()
        for op in recorded(base, source, disk.now()):
            disk.do(op)
        for model in MODELS:
            for image in disk.images(model, MOST, rng):
                check(image, possible, ended=True, must=True)
                looked += 1
    print(f"seed {SEED}: {looked:,} states after {len(ops) + 1} kills")
    assert looked > 100
