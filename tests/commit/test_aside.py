"""A damaged step that was put aside is no step any more, and nothing takes what is left of it away."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from keepstep.commit.aside import bring_back, put_aside, read_notes
from keepstep.commit.catalog import read_catalog
from keepstep.errors import CorruptError, StepExistsError, StepNotFoundError, StorageError
from keepstep.storage.base import read_blob
from tests.helpers.storages import Watched, failing

AT = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def root():
    """A run in memory with the steps 1, 2 and 3."""
    memory = ks.MemoryStorage()
    train(memory, 3)
    return memory


def train(root, steps, **options):
    """Goes on for so many steps and saves each. Returns the step it began at."""
    state = ks.TrainState(weight=torch.arange(4.0), free={"list": [1, 2]})
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off", **options) as checkpointer:
        begun = checkpointer.restore().step
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()
    return begun


def names(root, step):
    return {name for name, _ in root.list(f"step-{step:08d}")}


def blobs(root):
    return {name: read_blob(root, name, 1 << 20) for name, _ in root.list("")}


def test_a_step_put_aside_is_no_step_and_its_note_says_why(root):
    before = blobs(root)
    put_aside(root, 3, ["a block is bad"], AT)
    catalog = read_catalog(root)
    assert [found.step for found in catalog.steps] == [2, 1]
    assert catalog.unfinished == ()
    (note,) = catalog.aside
    assert (note.step, note.problems, note.at, note.keepstep) == (3, ("a block is bad",), AT, ks.__version__)
    assert names(root, 3) == {name for name in before if name.startswith("step-00000003/")} - {
        "step-00000003/.metadata"
    }
    assert "damaged and put aside: 3" in catalog.inventory()


def test_putting_aside_is_undone_byte_for_byte(root):
    before = blobs(root)
    put_aside(root, 3, ["it"], AT)
    bring_back(root, 3)
    assert blobs(root) == before
    with pytest.raises(StepNotFoundError, match="step 3 was not put aside"):
        bring_back(root, 3)


def test_neither_a_restore_nor_a_save_of_that_step_takes_its_data_away(root):
    put_aside(root, 3, ["it"], AT)
    kept = {name: data for name, data in blobs(root).items() if name.startswith("step-00000003/")}
    assert train(root, 2) == 2  # steps 3 and 4, so step 3 is there once more, beside what was put aside
    assert [found.step for found in read_catalog(root).steps] == [4, 3, 2, 1]
    train(root, 0)
    now = blobs(root)
    assert kept.items() <= now.items()
    with pytest.raises(StepExistsError, match="another step 3 is committed there"):
        bring_back(root, 3)
    assert blobs(root) == now


def test_only_steps_put_aside_are_never_a_fresh_start():
    memory = ks.MemoryStorage()
    train(memory, 1)
    put_aside(memory, 1, ["it"], AT)
    with pytest.raises(StepNotFoundError, match="damaged and put aside: 1"):
        train(memory, 0)


def test_a_note_that_cannot_be_read_keeps_everything_in_the_folder(root):
    put_aside(root, 3, ["it"], AT)
    kept = names(root, 3)
    (name,) = [name for name, _ in root.list("quarantine")]
    root.put(name, b"{")
    train(root, 0)
    assert names(root, 3) == kept
    assert read_notes(root)[0].files is None
    with pytest.raises(CorruptError, match="cannot be read; nothing was changed"):
        bring_back(root, 3)


@pytest.mark.parametrize("operation", ["open", "read", "list", "put", "delete"])
def test_interrupted_anywhere_it_is_done_by_doing_it_again(root, operation):
    before = blobs(root)
    with pytest.raises(StorageError):
        put_aside(Watched(root, failing(operation)), 3, ["it"], AT)
    train(root, 0)
    assert {name: data for name, data in before.items() if "step-" in name}.items() <= blobs(root).items()
    put_aside(root, 3, ["it"], AT)
    assert len(read_catalog(root).aside) == 1
    with pytest.raises(StorageError):
        bring_back(Watched(root, failing("put_new")), 3)
    with pytest.raises(StorageError):
        bring_back(Watched(root, failing("delete")), 3)
    bring_back(root, 3)
    assert before.items() <= blobs(root).items()


@pytest.mark.parametrize("field", [b'"save_id": "', b'"incarnation":'])
def test_a_flipped_bit_in_a_manifest_does_not_make_its_files_strays(root, field):
    """Files that are swept cannot help to repair it any more."""
    raw = bytearray(read_blob(root, "step-00000003/.metadata", 1 << 20))
    raw[raw.index(field) + len(field)] ^= 1
    root.put("step-00000003/.metadata", bytes(raw))
    before = names(root, 3)
    with pytest.warns(ks.errors.DamageWarning):
        assert train(root, 0) == 2
    assert names(root, 3) == before


def test_a_flipped_incarnation_makes_an_old_step_no_newer(root):
    """Or retention by hand would let the newest good step go in favour of a damaged one."""
    raw = read_blob(root, "step-00000001/.metadata", 1 << 20)
    root.put("step-00000001/.metadata", raw.replace(b'"incarnation":1', b'"incarnation":5', 1))
    catalog = read_catalog(root)
    assert [found.step for found in catalog.steps] == [3, 2, 1]
    assert "does not match its own digest" in catalog.steps[2].damage
