"""Runs with two roots: committed on the local disk, copied to the other one, restored from whichever is nearer and good."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.agent import uploader
from keepstep.commit.catalog import read_catalog
from keepstep.commit.publish import new_incarnation
from keepstep.commit.retention import Keep
from keepstep.copies import uploads
from keepstep.copies.uploads import Behind
from keepstep.errors import (
    CommitTimeoutError,
    CorruptError,
    DamageWarning,
    MismatchError,
    StorageError,
    UsageError,
)
from keepstep.storage.local import LocalStorage
from tests.cli.test_commands import call
from tests.helpers.agents import kill_agent, wait_until
from tests.helpers.runs import contents, latest, run, steps_in, train
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched

pytestmark = pytest.mark.slow


class Cable(Watched):
    """A root that can be cut off: then every call fails as it does when nobody answers."""

    def __init__(self, place):
        super().__init__(place, self.look)
        self.cut = False
        self.refused = 0

    def look(self, operation, name):
        if self.cut:
            self.refused += 1
            raise StorageError(operation, name, OSError(errno.EIO, "nobody answers"))


@pytest.fixture(autouse=True)
def _short_goodbyes(monkeypatch):
    """A test that fails in the middle of an outage does not wait for its end."""
    monkeypatch.setattr(uploads, "CLOSE_S", 0.5)


@pytest.fixture
def near(tmp_path):
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


def job(far, near, state=None, **options):
    options.setdefault("background", "off")
    return ks.Checkpointer(far, state or run(), local=near, **options)


def save(ckpt, state, steps=1):
    for _ in range(steps):
        train(state)
        ckpt.step()
        pending = ckpt.save()
        pending.wait_committed(30)


def tensors_of(state):
    return {key: value.detach().clone() for key, value in state["model"].state_dict().items()}


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", ["off", "thread", "agent"])
def test_steps_are_committed_near_and_copied(near, far, background):
    state = run()
    with job(far, near, state, background=background, keep=Keep(last=2), keep_local=Keep(last=1)) as ckpt:
        ckpt.restore()
        for _ in range(4):
            save(ckpt, state)
            assert state.progress.step in steps_in(near)
            ckpt.uploads.wait(30)
        assert ckpt.uploads.behind() == Behind(())
    # Each level has its own rules; the last copy may still be letting an older one go.
    assert steps_in(near) == [4]
    wait_until(lambda: steps_in(far) == [3, 4])
    assert latest(near) == latest(far) == 4
    assert contents(near / "step-00000004") == contents(far / "step-00000004")
    assert (near / "run.json").read_bytes() == (far / "run.json").read_bytes()
    there = run(9)
    with job(far, near, there) as ckpt:
        report = ckpt.restore()
    assert (report.step, report.url, report.skipped) == (4, str(near / "step-00000004"), ())
    assert_same(tensors_of(there), tensors_of(state))


def test_an_agent_that_dies_is_followed_by_one_that_knows_what_waits(near, far):
    state = run()
    with job(far, near, state, background="agent") as ckpt:
        ckpt.restore()
        save(ckpt, state)
        kill_agent(near)
        # Started again at a boundary; nobody tells it anything.
        save(ckpt, state)
        ckpt.uploads.wait(30)
    assert steps_in(far) == [1, 2]
    for root in (near, far):
        assert call("verify", root).exit_code == 0


def test_a_local_disk_that_is_gone_is_not_needed(near, far):
    state = run()
    with job(far, near, state) as ckpt:
        ckpt.restore()
        save(ckpt, state, 2)
        ckpt.uploads.wait(30)
    shutil.rmtree(near)
    back = run(9)
    with job(far, near, back) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.url) == (2, str(far / "step-00000002"))
        assert_same(tensors_of(back), tensors_of(state))
        # It goes on as the same run, on both levels.
        save(ckpt, back)
        ckpt.uploads.wait(30)
    assert (steps_in(near), steps_in(far)) == ([3], [1, 2, 3])
    assert {found.run for found in read_catalog(LocalStorage(far)).steps} == {
        json.loads((near / "run.json").read_text())["run"]
    }


def test_what_is_damaged_near_is_taken_from_far_the_same_step(near, far):
    state = run()
    with job(far, near, state, keep_local=Keep(last=3)) as ckpt:
        ckpt.restore()
        save(ckpt, state, 2)
        ckpt.uploads.wait(30)
    for file in (near / "step-00000002" / "model").iterdir():
        flip(file)
    for on_damage in ("fall_back", "raise"):
        back = run(9)
        with job(far, near, back) as ckpt, pytest.warns(DamageWarning, match=r"step-00000002 \(local\)"):
            report = ckpt.restore(on_damage=on_damage)
        assert (report.step, report.url) == (2, str(far / "step-00000002"))
        assert_same(tensors_of(back), tensors_of(state))
    # A manifest that cannot be read is damage too; and one step that is asked for is found in whichever place it is good.
    (near / "step-00000002" / ".metadata").write_text("{")
    back = run(9)
    with job(far, near, back) as ckpt, pytest.warns(DamageWarning, match="local"):
        assert ckpt.restore(step=2).url == str(far / "step-00000002")
    assert_same(tensors_of(back), tensors_of(state))
    # Damaged in both: the one before it, or the error.
    for file in (far / "step-00000002" / "model").iterdir():
        flip(file)
    with job(far, near, run(9)) as ckpt, pytest.warns(DamageWarning) as told:
        assert ckpt.restore().step == 1
    assert [str(one.message).partition(": ")[2].partition(": ")[0] for one in told] == [
        "step-00000002 (local)",
        "step-00000002 (remote)",
    ]
    with job(far, near, run(9)) as ckpt, pytest.warns(DamageWarning), pytest.raises(CorruptError, match="digest"):
        ckpt.restore(on_damage="raise")


def test_steps_that_only_the_local_disk_has_are_restored_and_copied(near, far):
    state = run()
    with job(far, near, state, keep=Keep(last=None)) as ckpt:
        ckpt.restore()
        save(ckpt, state, 2)
        ckpt.uploads.wait(30)
    shutil.rmtree(far)
    back = run(9)
    with job(far, near, back) as ckpt:
        assert ckpt.restore().url == str(near / "step-00000002")
        ckpt.uploads.wait(30)
        assert steps_in(far) == [1, 2]
    assert_same(tensors_of(back), tensors_of(state))


# --- outages ----------------------------------------------------------------------------------------------------------


def test_an_outage_does_not_stop_training_and_is_made_up_for(near, far):
    state, cable = run(), Cable(far)
    with job(cable, near, state, keep=Keep(last=4), keep_local=Keep(last=1)) as ckpt:
        ckpt.restore()
        save(ckpt, state)
        ckpt.uploads.wait(30)
        cable.cut = True
        save(ckpt, state, 6)
        wait_until(lambda: cable.refused and ckpt.uploads.behind().trouble)
        behind = ckpt.uploads.behind()
        # Those that the far root would keep are kept for it, and no others.
        assert (behind.steps, steps_in(near), steps_in(far)) == ((7, 6, 5, 4), [4, 5, 6, 7], [1])
        assert behind.bytes == sum(ks.open(near / f"step-0000000{n}").manifest.total_bytes for n in behind.steps)
        assert "nobody answers" in str(behind)
        with pytest.raises(
            CommitTimeoutError, match=r"4 steps .* are not copied yet: 7, 6, 5, 4; the last try: .*nobody"
        ):
            ckpt.uploads.wait(0.01)
        cable.cut = False
        ckpt.uploads.wait(30)
        wait_until(lambda: steps_in(far) == [4, 5, 6, 7])
        assert latest(far) == 7
        # What was kept for the copies alone goes with the next save.
        save(ckpt, state)
        assert steps_in(near) == [8]


def test_the_newest_step_is_copied_first(near, far):
    state, cable = run(), Cable(far)
    with job(cable, near, state, keep=Keep(last=3)) as ckpt:
        ckpt.restore()
        cable.cut = True
        save(ckpt, state, 4)
        cable.cut = False
        ckpt.uploads.wait(30)
    published = [name for name in cable.names["put_new"] if name.endswith(".metadata")]
    assert published[:3] == [f"step-0000000{step}/.metadata" for step in (4, 3, 2)]
    assert latest(far) == 4


def test_a_start_without_the_far_root_goes_on_near_and_joins_it_later(near, far, caplog):
    state, cable = run(), Cable(far)
    with job(cable, near, state) as ckpt:
        ckpt.restore()
        save(ckpt, state)
        ckpt.uploads.wait(30)
    cable.cut = True
    back = run(9)
    with job(cable, near, back) as ckpt:
        assert "cannot be reached; the run goes on with the steps in" in caplog.text
        assert ckpt.restore().url == str(near / "step-00000001")
        save(ckpt, back)
        assert [path.name for path in (far / "incarnations").iterdir()] == ["000001"]
        cable.cut = False
        ckpt.uploads.wait(30)
    assert steps_in(far) == [1, 2]
    assert (far / "incarnations/000002").read_bytes() == (near / "incarnations/000002").read_bytes()


def test_without_anything_near_a_far_root_that_is_away_is_an_error(near, far):
    cable = Cable(far)
    cable.cut = True
    with pytest.raises(StorageError, match="nobody answers"):
        job(cable, near)
    assert not far.exists()


def test_a_run_that_has_gone_on_elsewhere_is_left_alone(near, far, tmp_path, caplog):
    """The machine sleeps through an outage, and another one goes on with the run: what the first saves stays there."""
    state, cable = run(), Cable(far)
    with job(cable, near, state) as ckpt:
        ckpt.restore()
        save(ckpt, state)
        ckpt.uploads.wait(30)
    cable.cut = True
    with job(cable, near, state) as ckpt:
        ckpt.restore()
        save(ckpt, state, 3)
        elsewhere = run(9)
        with job(far, tmp_path / "other", elsewhere) as other:
            assert other.restore().step == 1
            save(other, elsewhere)
            other.uploads.wait(30)
        there = contents(far / "step-00000002")
        cable.cut = False
        wait_until(lambda: "gone on elsewhere" in ckpt.uploads.behind().trouble)
        assert ckpt.uploads.behind().steps == (4, 3, 2)
        assert steps_in(far) == [1, 2]
        assert contents(far / "step-00000002") == there
        ckpt.uploads._uploader.close()
        ckpt.uploads._uploader = None
    # Back on the first machine: the run is what the far root says, whatever number the local steps have.
    back = run(9)
    with job(far, near, back) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.url) == (2, str(far / "step-00000002"))
        assert any("gone on elsewhere" in text for text in report.skipped)
        assert_same(tensors_of(back), tensors_of(elsewhere))
        save(ckpt, back)
        ckpt.uploads.wait(30)
    assert steps_in(far) == [1, 2, 3]
    assert contents(far / "step-00000003") == contents(near / "step-00000003")


def test_a_copy_under_way_does_not_appear_once_the_run_goes_on_elsewhere(near, far, tmp_path):
    """The other start comes between the last file of a step and its manifest."""
    state, cable = run(), Cable(far)
    starts = []

    def start_elsewhere(operation, name):
        cable.look(operation, name)
        if operation == "commit" and "step-00000002/state/" in name and not starts:
            starts.append(new_incarnation(cable.inner, b'{"id": "elsewhere"}'))

    cable.before = start_elsewhere
    with job(cable, near, state) as ckpt:
        ckpt.restore()
        save(ckpt, state, 1)
        ckpt.uploads.wait(30)
        save(ckpt, state, 1)
        wait_until(lambda: "gone on elsewhere" in ckpt.uploads.behind().trouble)
        assert (starts, steps_in(far), steps_in(near)) == ([2], [1], [1, 2])


def test_a_line_that_was_left_behind_is_replaced_at_both_levels(near, far):
    """Back to an older step, and on from there on another way."""
    state = run()
    with job(far, near, state, keep_local=Keep(last=9)) as ckpt:
        ckpt.restore()
        save(ckpt, state, 3)
        ckpt.uploads.wait(30)
        left = contents(far / "step-00000002")
        ckpt.restore(step=1)
        state["optimizer"].param_groups[0]["lr"] = 0.5
        save(ckpt, state)
        ckpt.uploads.wait(30)
    assert contents(far / "step-00000002") == contents(near / "step-00000002") != left
    assert latest(far) == 2
    assert sorted(path.name for path in (far / "incarnations").iterdir()) == ["000001", "000002"]
    back = run(9)
    with job(far, near, back) as ckpt:
        assert ckpt.restore().step == 2
    assert_same(tensors_of(back), tensors_of(state))


def test_a_step_that_is_damaged_near_holds_nothing_up(near, far, caplog, monkeypatch):
    monkeypatch.setattr(uploader, "FIRST_PAUSE_S", 0.01)
    state, cable = run(), Cable(far)
    with job(cable, near, state, keep=Keep(last=9)) as ckpt:
        ckpt.restore()
        cable.cut = True
        save(ckpt, state, 2)
        for file in (near / "step-00000002" / "model").iterdir():
            flip(file)
        cable.cut = False
        ckpt.uploads.wait(30)
        assert "step 2 is not copied" in caplog.text
        save(ckpt, state)
        ckpt.uploads.wait(30)
    assert steps_in(far) == [1, 3]


# --- what is not possible ---------------------------------------------------------------------------------------------


def test_what_means_nothing_is_refused(near, far):
    with pytest.raises(UsageError, match="is both the root and local="):
        ks.Checkpointer(far, run(), local=far, background="off")
    with pytest.raises(UsageError, match=r"keep_local=.* means nothing without local="):
        ks.Checkpointer(far, run(), keep_local=Keep(), background="off")
    assert not far.exists()
    with job(far, near):
        pass
    with ks.Checkpointer(far.with_name("another"), run(), background="off"):
        pass
    with pytest.raises(MismatchError, match="a local folder of its own"):
        job(far.with_name("another"), near)
