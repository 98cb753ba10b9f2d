"""Bytes that changed, ended early, or went missing: a load raises, or gives back exactly what was saved. Nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch

import keepstep as ks
from keepstep.errors import CheckpointError, CorruptError, StepNotFoundError
from tests.helpers.forge import Forgery
from tests.helpers.same import assert_same

SAVED = {
    "model": {"w": torch.arange(6, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)},
    "lr": 0.1,
    "note": {"a": (1, "x"), "seen": {3}},
}


def target() -> dict:
    return {
        "model": {"w": torch.full((6,), 7.0), "b": torch.zeros(3, dtype=torch.bfloat16)},
        "lr": -1.0,
        "note": {"a": None, "seen": None},
    }


@pytest.fixture(scope="module")
def step() -> Forgery:
    memory = ks.MemoryStorage()
    ks.save(memory, SAVED, step=3)
    found = Forgery(memory)
    assert sorted(name.split("/")[0] for name in found.blobs) == [".metadata", "model", "state"]
    return found


def load_or_refuse(storage) -> str:
    """Loads; returns the code of the error, or "" when everything is exactly as it was saved."""
    into = target()
    try:
        ks.load(storage, into)
    except CheckpointError as err:
        assert_same({"lr": into["lr"], "note": into["note"]}, {"lr": -1.0, "note": {"a": None, "seen": None}})
        return err.code
    assert_same(into, SAVED)
    return ""


def test_files_cut_or_continued_anywhere_are_noticed(step):
    storage = step.storage()
    for name, data in step.blobs.items():
        ends = {0, 1, 7, 8, 9, len(data) - 1, *range(0, len(data), 512)} - {len(data)}
        for end in sorted(ends):
            storage.put(name, data[:end])
            assert load_or_refuse(storage) == "corrupt", (name, end)
        for more in (b"\0", b" ", b"\n", data, bytes(4096)):
            storage.put(name, data + more)
            assert load_or_refuse(storage) == "corrupt", (name, len(more))
        storage.put(name, data)
    assert load_or_refuse(storage) == ""


def test_a_missing_file_is_named(step):
    storage = step.storage()
    for name, data in step.blobs.items():
        storage.delete([name])
        with pytest.raises(StepNotFoundError if name == ".metadata" else CorruptError) as caught:
            ks.load(storage, target())
        told = "2 files of an attempt that was never committed" if name == ".metadata" else f"{name} is missing"
        assert told in str(caught.value)
        storage.put(name, data)
    assert load_or_refuse(storage) == ""


def test_files_in_each_others_place_are_noticed(step):
    """Also from another save of the same state, whose files have the same sizes."""
    memory = ks.MemoryStorage()
    ks.save(memory, {**SAVED, "model": {"w": torch.zeros(6), "b": torch.zeros(3, dtype=torch.bfloat16)}}, step=3)
    other = Forgery(memory)
    names = [step.file("model"), step.file("state")]
    for name in names:
        for data in (
            step.blobs[names[0] if name == names[1] else names[1]],
            other.blobs[other.file(name.split("/")[0])],
        ):
            storage = step.storage()
            storage.put(name, data)
            assert load_or_refuse(storage) == "corrupt"
    storage = step.storage()
    storage.put(".metadata", other.blobs[".metadata"])
    assert load_or_refuse(storage) == "corrupt"


def test_an_opened_step_never_returns_wrong_bytes(step):
    """Opened while it was good, damaged afterwards: whatever is read next is right or an error."""
    storage = step.storage()
    opened = ks.open(storage)
    assert torch.equal(opened["model/w"], SAVED["model"]["w"])
    name = step.file("model")
    data = bytearray(step.blobs[name])
    data[-1] ^= 1
    storage.put(name, bytes(data))
    for key in opened:
        with pytest.raises(CorruptError, match=name):
            opened[key]
    assert opened.values_of("lr") == 0.1


@pytest.mark.slow
def test_restore_falls_back_over_every_kind_of_damage_and_says_what_it_was(tmp_path):
    """Five steps, the newest four damaged in four ways: the oldest is restored, and a warning tells of each."""
    root = tmp_path / "run"
    model = torch.nn.Linear(2, 2, bias=False)
    weight = model.weight.detach()
    with ks.Checkpointer(root, ks.TrainState(model=model), keep=ks.Keep(last=None)) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            weight.fill_(step)
            ckpt.step()
            ckpt.save()
    steps = sorted(root.glob("step-*"))
    assert len(steps) == 5
    (steps[4] / ".metadata").write_bytes(b"{")
    next((steps[3] / "model").iterdir()).unlink()
    shard = next((steps[2] / "model").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    shard = next((steps[1] / "model").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x99")
    weight.fill_(0)
    with (
        warnings.catch_warnings(record=True) as caught,
        ks.Checkpointer(root, ks.TrainState(model=model), keep=ks.Keep(last=None)) as ckpt,
    ):
        warnings.simplefilter("always")
        report = ckpt.restore()
    assert report.step == 1
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    text = "\n".join(str(item.message) for item in caught if issubclass(item.category, ks.errors.DamageWarning))
    for told in ("not a manifest", "is missing", "bytes", "does not match its digest"):
        assert told in text
