"""Two roots and several ranks: one decision for all of them, also where one of them cannot read what the others can."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.commit.retention import Keep
from keepstep.errors import CheckpointError, DamageWarning, RankFailedError, UsageError
from keepstep.storage.local import LocalStorage
from tests.helpers.runs import contents, run, steps_in, train
from tests.helpers.storages import Watched, failing

pytestmark = pytest.mark.slow


def both_levels(rank, folder):
    """Trained by two ranks, copied; then restored, and restored where rank 1 cannot read what is near."""
    far, near = Path(folder, "far"), Path(folder, "near")
    state = run()
    found = {}
    with ks.Checkpointer(far, state, local=near, background="thread", keep_local=Keep(last=1)) as ckpt:
        ckpt.restore()
        for _ in range(3):
            train(state)
            ckpt.step()
            ckpt.save().wait_committed(30)
        ckpt.uploads.wait(30)
        found["behind"] = ckpt.uploads.behind().steps
    found["bits"] = state["model"].weight.detach().numpy().tobytes()
    for name, place in (
        ("near", near),
        ("far", Watched(near, failing("read", name="model/", times=1000)) if rank else Watched(near)),
    ):
        back = run(9)
        with (
            warnings.catch_warnings(),
            ks.Checkpointer(far, back, local=place, background="off") as ckpt,
        ):
            warnings.simplefilter("ignore", DamageWarning)
            report = ckpt.restore()
        bits = back["model"].weight.detach().numpy().tobytes()
        found[name] = report.step, Path(report.url).parent.name, len(back["log"]), bits == found["bits"]
    return found


def apart(rank, folder):
    """What each rank is told when its local folder is one of its own."""
    try:
        ks.Checkpointer(Path(folder, "far"), run(), local=LinkedFolder(folder, rank), background="off")
    except CheckpointError as err:
        return type(err).__name__, str(err)
    return None


class LinkedFolder(LocalStorage):
    """A folder of the same name on each machine, and another one on each."""

    def __init__(self, folder, rank):
        super().__init__(Path(folder, f"disk-{rank}"))
        self.url = "/nvme/run"


@pytest.mark.case(66)
def test_ranks_read_one_copy_of_one_step(rank_pool, tmp_path):
    """A rank that cannot read the near copy makes all of them take the far one of the same step."""
    for found in rank_pool(2)(both_levels, str(tmp_path)):
        assert found["behind"] == ()
        assert found["near"] == (3, "near", 3, True)
        assert found["far"] == (3, "far", 3, True)
    # (Steps that were not copied yet as the last one was committed are there still.)
    assert 3 in steps_in(tmp_path / "near")
    assert steps_in(tmp_path / "far") == [1, 2, 3]
    assert contents(tmp_path / "near/step-00000003") == contents(tmp_path / "far/step-00000003")


def test_a_local_folder_that_ranks_do_not_share_is_refused(rank_pool, tmp_path):
    told = rank_pool(2)(apart, str(tmp_path))
    for kind, text in told:
        assert kind in (UsageError.__name__, RankFailedError.__name__)
        assert "another folder on rank 1 than on rank 0" in text
