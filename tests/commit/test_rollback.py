"""A run that goes back to an older step and goes on from there, in the same process: the new line is the one that counts."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from keepstep.errors import UsageError
from tests.helpers.agents import wait_until
from tests.helpers.gates import Gate
from tests.helpers.storages import Watched


def steps_in(root):
    """Steps whose manifest is in place."""
    return sorted(int(path.parent.name[5:]) for path in root.glob("step-*/.metadata"))


def moved_to(state, step, value):
    state.progress.step = step
    state["x"].fill_(value)
    return state


def restored(root):
    state = ks.TrainState(x=torch.zeros(3))
    with ks.Checkpointer(root, state, background="off") as ckpt:
        step = ckpt.restore().step
    return step, state["x"][0].item()


@pytest.mark.case(81)
@pytest.mark.parametrize("background", ["off", "thread"])
def test_a_rollback_within_a_process_begins_a_newer_line(tmp_path, background):
    state = ks.TrainState(x=torch.zeros(3))
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=3), background=background) as ckpt:
        for step in (10, 20, 30):
            moved_to(state, step, step)
            ckpt.save()
        assert ckpt.restore(step=10).step == 10
        moved_to(state, 15, 115.0)
        ckpt.save()
    # What was left behind has larger numbers, and is older.
    assert restored(tmp_path) == (15, 115.0)
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1), background=background) as ckpt:
        ckpt.restore()
        moved_to(state, 16, 116.0)
        ckpt.save()
        ckpt.restore(step=15)
        moved_to(state, 20, 120.0)
        ckpt.save()
    assert steps_in(tmp_path) == [15, 20]
    assert restored(tmp_path) == (20, 120.0)


def test_going_back_by_hand_is_refused(tmp_path):
    """Nobody has told keepstep: what is saved then would be older than what was left behind."""
    state = ks.TrainState(x=torch.zeros(3))
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1), background="off") as ckpt:
        for step in (10, 30):
            moved_to(state, step, step)
            ckpt.save()
        moved_to(state, 15, 115.0)
        with pytest.raises(UsageError, match=r"step 15 comes before step 30, .*restore\(step=\.\.\.\)"):
            ckpt.save()
        moved_to(state, 31, 31.0)
        ckpt.save()
    # Another start of the job may count anew.
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1), background="off") as ckpt:
        ckpt.restore()
        moved_to(state, 1, 101.0)
        ckpt.save()
    assert restored(tmp_path) == (1, 101.0)


def test_a_step_that_is_saved_again_while_the_old_one_is_removed_is_whole(tmp_path):
    """After the rollback retention takes old step 20 away; meanwhile the files of the new step 20 are written."""
    removing = Gate("delete", name="step-00000020/.metadata")
    storage = Watched(tmp_path)
    state = ks.TrainState(x=torch.zeros(3), model=torch.nn.Linear(3, 3))
    with ks.Checkpointer(storage, state, keep=ks.Keep(last=None), background="thread") as ckpt:
        for step in (10, 20):
            moved_to(state, step, step)
            ckpt.save().wait_committed(20)
    with ks.Checkpointer(storage, state, keep=ks.Keep(last=1), background="thread") as ckpt:
        ckpt.restore(step=10)
        moved_to(state, 15, 115.0)
        storage.before = removing
        ckpt.save().wait_committed(20)
        removing.wait_reached()
        moved_to(state, 20, 120.0)
        pending = ckpt.save()
        pending.wait_staged(20)
        wait_until(lambda: len(list(tmp_path.glob("step-00000020/*/*.safetensors"))) == 4, what="both steps' files")
        removing.open()
        pending.wait_committed(20)
    assert restored_whole(tmp_path) == (20, 120.0)


def restored_whole(root):
    state = ks.TrainState(x=torch.zeros(3), model=torch.nn.Linear(3, 3))
    with ks.Checkpointer(root, state, background="off") as ckpt:
        step = ckpt.restore(on_damage="raise").step
    return step, state["x"][0].item()
