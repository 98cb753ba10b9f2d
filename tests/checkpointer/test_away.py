"""A store that is away when a save is due: that save fails, on all ranks, and training goes on."""

from __future__ import annotations

import errno
import threading
import time

import pytest

import keepstep as ks
from keepstep.checkpointer import looking
from keepstep.errors import CheckpointError, RankFailedError, StorageError
from tests.helpers.buckets import advance, training
from tests.helpers.runs import steps_in
from tests.helpers.storages import Watched


def far_away(folder, before):
    root = Watched(folder, before)
    root.far = True
    return root


def saves_of_two(rank, folder):
    away = threading.Event()

    def before(operation, name):
        if away.is_set():
            raise StorageError(operation, name, OSError(errno.EIO, "nobody answers"))

    state = training()
    with ks.Checkpointer(
        far_away(folder, before), state, every=ks.Every(steps=1), background="thread", tolerate_failures=2
    ) as saves:
        saves.restore()
        advance(state)
        saves.step().wait_committed(30)
        if rank == 0:
            away.set()
        advance(state)
        failed = saves.step()
        away.clear()
        with pytest.raises(CheckpointError, match="nobody answers") as caught:
            failed.wait_committed(30)
        advance(state)
        saves.step().wait_committed(30)
        if rank == 0:
            away.set()
        with pytest.raises(RankFailedError, match=r"3 saves in a row have failed.*nobody answers"):
            for _ in range(4):
                advance(state)
                saves.step()
        away.clear()
    return type(caught.value).__name__


@pytest.mark.filterwarnings("ignore:tidying up failed")
def test_all_ranks_go_on_and_too_many_failures_in_a_row_are_raised(tmp_path, rank_pool):
    names = rank_pool(2)(saves_of_two, tmp_path)
    assert names == ["StorageError", "RankFailedError"]
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.slow
def test_training_does_not_wait_for_a_store_that_says_nothing(tmp_path, monkeypatch):
    """The look at what is there is given up after a while, and goes on without anybody; a refusal is still a refusal."""
    monkeypatch.setattr(looking, "LONGEST_S", 0.3)
    silent, over = threading.Event(), threading.Event()
    root = far_away(tmp_path, lambda operation, name: silent.is_set() and over.wait(20) and None)
    state = training()
    with ks.Checkpointer(root, state, background="thread") as saves:
        saves.restore()
        advance(state)
        saves.step()
        saves.save().wait_committed(30)
        silent.set()
        advance(state)
        saves.step()
        began = time.monotonic()
        pending = saves.save()
        assert time.monotonic() - began < 10
        with pytest.raises(StorageError, match=r"has not answered within 0\.3 s, and training does not wait") as caught:
            pending.wait_committed(30)
        assert caught.value.errno == errno.ETIMEDOUT
        silent.clear()
        over.set()
        saves.save().wait_committed(30)
    assert steps_in(tmp_path) == [1, 2]
    with pytest.raises(ks.errors.StepExistsError, match="is already committed"):
        ks.async_save(far_away(tmp_path / "step-00000002", None), state).wait_committed(30)
