"""A loss of power at any moment, as it can be on any disk that keeps what it promised: every state of it keeps ours.

What a training does to the disk is recorded call by call. For each moment between two calls, all states are made in which a
crash may leave the disk (see states.py), and each is looked at as a user would: what is reported is whole, nothing is lost
that was reported before, the newest is restored, and saving goes on.
"""

from __future__ import annotations

import os
import random
import re
import shutil

import pytest

from keepstep.agent.node import agent_log
from keepstep.check.contract import StorageContract
from keepstep.checkpointer import saving
from keepstep.commit import conclude, retention
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.publish import commit_step, point_latest
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.storage import local
from keepstep.storage.base import read_blob
from keepstep.storage.local import LocalStorage
from tests.conftest import SEED
from tests.crash.histories import (
    Count,
    crashed,
    enumerate_crashes,
    go_through,
    merged,
    put_down,
    record,
    repeatable,
    taken,
    train,
)
from tests.crash.promise import LENGTH, Broken, ImageStorage, Inspector, small
from tests.crash.recorder import Op, Recorder
from tests.crash.states import MODELS, ORDERED, STRICT, Disk

ALL = 1 << 17
"""More states than there are at any moment of a small save."""


def checked(ops, keep, most, *, length=LENGTH, optimizer=False, **options):
    count = Count(SEED)
    enumerate_crashes(ops, Inspector(keep, length, optimizer=optimizer), count, most=most, **options)
    print(count)
    return count


# --- every state -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_state_of_a_small_training(tmp_path):
    """Two saves, the second one replaced, the first one removed: all there is, none left out."""
    count = checked(record(tmp_path, train((1, 1.0), (2, 2.0), (2, 2.5))), 1, ALL)
    assert count.complete
    assert len(count.different) > 1500
    assert len(count.views) > 250


# --- longer histories, sampled ---------------------------------------------------------------------------------------

LARGE = 262_200
HISTORIES = {
    "four saves, two of them kept": (2, LENGTH, [train((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), keep=2)]),
    "rolled back twice": (
        2,
        LENGTH,
        [
            train((1, 1.0), (2, 2.0), (3, 3.0), keep=3),
            train((2, 2.1), (3, 3.1), keep=2, restore=1),
            train((3, 3.2), keep=2, restore=2),
        ],
    ),
    "in a thread": (1, LENGTH, [train((1, 1.0), (2, 2.0), (3, 3.0), background="thread")]),
    "files that are reserved and written directly": (1, LARGE, [train((1, 1.0), length=LARGE)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_states_of_longer_histories(tmp_path, name):
    keep, length, sessions = HISTORIES[name]
    count = checked(record(tmp_path, *sessions), keep, 20 if length == LARGE else 80, length=length)
    assert len(count.different) > (100 if length == LARGE else 1000)
    assert len(count.views) > (50 if length == LARGE else 300)


@pytest.mark.slow
def test_states_of_steps_that_lose_their_optimizers(tmp_path):
    """A manifest is replaced by one that promises less, and only then the files go."""
    rules = {"weights_only_after": 1}
    ops = record(tmp_path, train((1, 1.0), (2, 2.0), (3, 3.0), keep=2, optimizer=True, rules=rules))
    assert sum(op.kind == "unlink" and "/optimizer/" in op.path for op in ops) == 2
    count = checked(ops, 2, 40, optimizer=True)
    assert len(count.different) > 1000


def recorded_rank(rank, base):
    with repeatable(SEED + rank), Recorder(base) as log:
        go_through(base / "run", log, [(1, 1.0), (2, 2.0), (3, 3.0)], small(rank=rank, world=2))
    return log.ops


@pytest.mark.slow
def test_states_of_two_ranks_that_write_at_once(rank_pool, tmp_path):
    """The second rank finds folders that the first has just made, and the other way round."""
    ops = merged(tmp_path, rank_pool(2)(recorded_rank, tmp_path))
    count = checked(ops, 1, 80)
    # (Who was first, and where, is another matter in every run.)
    assert len(count.different) > 400


# --- killed, started again, and then the power goes ------------------------------------------------------------------


def killed_and_started_again(base, first, then, before=(), *, most=8, backwards=False):
    """For each moment of the first training: killed there, the next one begins with what it sees, and then the power goes.

    What a killed process had not synced is there for its successor, and may still be lost with the power.
    """
    (base / "before").mkdir()
    done = record(base / "before", *before) if before else []
    ops = done + record(base / "before", first, seed=2)
    count, inspector = Count(SEED), Inspector(keep=1)
    moments = range(len(done), len(ops) + 1)
    for moment in reversed(moments) if backwards else moments:
        disk = Disk()
        for op in ops[:moment]:
            disk.do(op)
        folder = base / f"killed at {moment}"
        folder.mkdir()
        put_down(disk.now(), folder)
        again = record(folder, then, seed=3)
        shutil.rmtree(folder)
        enumerate_crashes(ops[:moment] + again, inspector, count, most=most, start=moment)
    print(count)
    return count


FIRST = train((1, 1.0), (2, 2.0))
REPLACING = train((2, 2.5), (3, 3.0), overwrite=True, restore=True)
RESTARTS = {
    "in its first saves, and restored": (FIRST, train((3, 3.0), restore=True), ()),
    "replacing a step, and restored": (REPLACING, train((4, 4.0), restore=True), (FIRST,)),
    "replacing a step, and replaced again": (REPLACING, train((2, 2.7), overwrite=True), (FIRST,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTARTS)
def test_killed_and_started_again_before_the_power_goes(tmp_path, name):
    count = killed_and_started_again(tmp_path, *RESTARTS[name])
    assert len(count.different) > 500


@pytest.mark.slow
def test_a_crash_of_what_a_crash_has_left(tmp_path):
    """The job starts again on the disk as it was found, goes on, and the power goes once more."""
    rng = random.Random(SEED)
    (tmp_path / "first").mkdir()
    ops = record(tmp_path / "first", train((1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0), keep=2))
    count, inspector = Count(SEED), Inspector(2)
    for round_ in range(16):
        image, claims = crashed(ops, 2, MODELS[round_ % 2], rng)
        folder = tmp_path / str(round_)
        folder.mkdir()
        put_down(image, folder)
        again = record(folder, train((8, 8.0), (9, 9.0), keep=2, restore=True), seed=3)
        enumerate_crashes(again, inspector, count, most=30, before=(image, claims))
    print(count)
    assert len(count.different) > 1000


def test_the_folder_of_a_run_stays_whoever_made_it(tmp_path):
    """By the log of an agent, which comes before everything else; by a job that was killed at once; and a missing parent."""
    (tmp_path / "agent").mkdir()
    with Recorder(tmp_path / "agent") as log:
        agent_log(str(tmp_path / "agent/runs/mine"))
    (tmp_path / "killed").mkdir()
    with Recorder(tmp_path / "killed") as killed:
        (tmp_path / "killed/runs").mkdir()
        LocalStorage(tmp_path / "killed/runs/mine").put("x", b"1")
    for ops, stays in ((log.ops, "runs/mine"), (killed.ops, "runs/mine/x")):
        disk = Disk()
        for op in ops:
            disk.do(op)
        for image in disk.images(STRICT, ALL, random.Random(SEED)):
            assert stays in image.folders | image.files.keys()


def test_nothing_is_synced_twice(tmp_path):
    """What a storage has made durable once costs nothing more: of a second file, its data and its name."""
    storage = LocalStorage(tmp_path / "run")
    storage.put("a/first", b"1")
    with Recorder(tmp_path) as log:
        storage.put("a/second", b"2")
    assert [(op.kind, op.path) for op in log.ops if "sync" in op.kind] == [("sync", ""), ("sync folder", "run/a")]


# --- planted mistakes ------------------------------------------------------------------------------------------------


def without(*left_out):
    """A commit of a file that leaves out one of its steps."""

    def commit(self, size_bytes, *, unless_taken=False):
        os.ftruncate(self._buffered, size_bytes)
        if "fsync" not in left_out:
            os.fsync(self._buffered)
        if unless_taken:
            os.link(self._partial, self._final)
        else:
            self._partial.replace(self._final)
        local.sync_folder(self._final.parent)

    return commit


def no_file_fsync(plant):
    plant.setattr(local._LocalUpload, "commit", without("fsync"))


def no_folder_fsync(plant):
    plant.setattr(local, "sync_folder", lambda folder: None)


def new_folders_not_synced(plant):
    plant.setattr(local, "make_folders", lambda folder, _lasting: folder.mkdir(parents=True, exist_ok=True))


def in_place(plant):
    def opened(self, path, size_bytes):
        self._final = self._partial = path
        self._direct = -1
        self._buffered = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o666)

    def commit(self, size_bytes, *, unless_taken=False):
        os.ftruncate(self._buffered, size_bytes)
        os.fsync(self._buffered)
        local.sync_folder(self._final.parent)

    def close(self):
        if self._buffered >= 0:
            os.close(self._buffered)
            self._buffered = -1

    plant.setattr(local._LocalUpload, "__init__", opened)
    plant.setattr(local._LocalUpload, "commit", commit)
    plant.setattr(local._LocalUpload, "close", close)


def manifest_before_data(plant):
    commit, close, late = local._LocalUpload.commit, local._LocalUpload.close, []

    def commit_late(self, size_bytes, **options):
        if self._final.suffix == ".safetensors":
            late.append((self, size_bytes))
            return
        commit(self, size_bytes, **options)
        while late and self._final.name == MANIFEST_NAME:
            upload, size = late.pop()
            commit(upload, size)
            close(upload)

    plant.setattr(local._LocalUpload, "commit", commit_late)
    plant.setattr(local._LocalUpload, "close", lambda self: None if self in [one for one, _ in late] else close(self))


def latest_before_manifest(plant):
    def commit(storage, manifest, receipts, *, run, **options):
        point_latest(run, manifest, "0" * 16)
        return commit_step(storage, manifest, receipts, run=run, **options)

    plant.setattr(saving, "commit_step", commit)


def retention_before_commit(plant):
    def commit(storage, manifest, receipts, *, run, **options):
        # To have room for the new one.
        for found in read_catalog(run).steps:
            if found.step != manifest.step:
                step_storage(run, found.step).delete([MANIFEST_NAME])
                step_storage(run, found.step).delete([name for name, _ in step_storage(run, found.step).list("")])
        return commit_step(storage, manifest, receipts, run=run, **options)

    plant.setattr(saving, "commit_step", commit)


def data_removed_before_manifest(plant):
    def remove(root, found, *_more):
        storage = step_storage(root, found.step)
        names = [name for name, _ in storage.list("")]
        storage.delete([name for name in names if name != MANIFEST_NAME])
        storage.delete([MANIFEST_NAME])

    plant.setattr(conclude, "remove_step", remove)


PLANTS = {
    no_file_fsync: (MODELS, "damaged"),
    no_folder_fsync: (MODELS, "step 1 is lost"),
    new_folders_not_synced: ([STRICT], "step 1 is lost"),
    in_place: (MODELS, "damaged"),
    manifest_before_data: (MODELS, "damaged"),
    latest_before_manifest: (MODELS, "latest names step 2"),
    retention_before_commit: (MODELS, "only steps [] are left"),
    data_removed_before_manifest: (MODELS, "step 1 is reported and damaged"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(tmp_path, monkeypatch, plant):
    """In each model of the disk in which it is one; from the first save on that has returned."""
    models, what = PLANTS[plant]
    with monkeypatch.context() as patched:
        plant(patched)
        ops = record(tmp_path, train((1, 1.0), (2, 2.0)))
    start = next(index for index, op in enumerate(ops) if op.kind == "returned") + 1
    for model in models:
        with pytest.raises(Broken, match=re.escape(what)) as caught:
            checked(ops, 1, 200, models=[model], start=start)
        print(caught.value)


def folders_taken_as_found(plant):
    """As if whoever made a folder had lived to sync it."""

    def make(folder, _lasting=None):
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        for path in reversed(missing):
            path.mkdir()
            local.sync_folder(path.parent)

    plant.setattr(local, "make_folders", make)


def manifests_taken_as_found(plant):
    """As if whoever put a manifest in place, or removed one, had lived to sync it."""
    delete = LocalStorage.delete
    seen = retention._NOTHING
    plant.setattr(LocalStorage, "delete", lambda self, names: delete(self, [n for n in names if not n.endswith(seen)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (folders_taken_as_found, "in its first saves, and restored"),
        (manifests_taken_as_found, "in its first saves, and restored"),
        (manifests_taken_as_found, "replacing a step, and restored"),
    ],
)
def test_what_is_seen_after_a_kill_is_not_taken_for_durable(tmp_path, monkeypatch, plant, name):
    plant(monkeypatch)
    with pytest.raises(Broken, match=r"damaged|lost") as caught:
        killed_and_started_again(tmp_path, *RESTARTS[name], backwards=plant is manifests_taken_as_found)
    print(caught.value)


# --- what all this rests on ------------------------------------------------------------------------------------------


class TestImageStorage(StorageContract):
    @pytest.fixture
    def storage(self):
        return ImageStorage()


def test_an_image_reads_as_the_same_files_on_a_disk(tmp_path):
    """For states of all kinds: names, sizes, folders, contents; and what is there after something was deleted."""
    rng = random.Random(SEED)
    (tmp_path / "first").mkdir()
    ops = record(tmp_path / "first", train((1, 1.0), (2, 2.0)))
    for round_ in range(8):
        image, _ = crashed(ops, 1, MODELS[round_ % 2], rng)
        folder = tmp_path / str(round_)
        folder.mkdir()
        put_down(image, folder)
        assert taken(folder) == image
        ours, theirs = ImageStorage(image, "run"), LocalStorage(folder / "run")
        names = sorted(name for name, _ in theirs.list(""))
        assert sorted(ours.list("")) == sorted(theirs.list(""))
        assert sorted(ours.folders()) == sorted(theirs.folders())
        assert [read_blob(ours, name, ALL) for name in names] == [read_blob(theirs, name, ALL) for name in names]
        doomed = [*(name for name in names if name.startswith("step-00000001")), "step-00000001/.nothing"]
        ours.delete(doomed)
        theirs.delete(doomed)
        assert sorted(ours.list("")) == sorted(theirs.list(""))
        assert sorted(ours.folders()) == sorted(theirs.folders())


def states(model, *ops):
    disk = Disk()
    for op in ops:
        disk.do(op)
    found = {image.key(): image for image in disk.images(model, ALL, random.Random(0))}
    assert disk.complete
    return [image.files for image in found.values()]


def test_the_models_of_the_disk():
    """What is promised after which call, by the smallest examples there are."""
    create = Op("create", 0, "a", inode=1)
    write = Op("write", 0, inode=1, data=b"x" * 600)
    sync, folder = Op("sync", 0, inode=1), Op("sync folder", 0)
    whole, torn = b"x" * 600, b"x" * 512 + bytes(88)
    for model in MODELS:
        assert states(model, create, write, sync, folder) == [{"a": whole}]
        # The data of a synced file is there, its name may not be.
        assert sorted(map(len, states(model, create, write, sync))) == [0, 1]
        assert {} not in states(model, create, folder, write)
    # A size without its bytes, half of them, and everything else; a journal has the bytes first.
    strict = [files["a"] for files in states(STRICT, create, folder, write)]
    assert sorted(strict) == sorted([b"", bytes(600), torn, whole])
    assert sorted(files["a"] for files in states(ORDERED, create, folder, write)) == [b"", whole]
    # A rename that was not synced: the old file or the new one under the name, never none.
    before = [create, write, sync, folder, Op("create", 0, "b", inode=2), Op("sync", 0, inode=2)]
    after = {model: states(model, *before, Op("rename", 0, "b", "a")) for model in MODELS}
    assert all(files["a"] in (whole, b"") for model in MODELS for files in after[model])
    assert {"a": b"", "b": b""} in after[STRICT]
    assert {"a": b"", "b": b""} not in after[ORDERED]
    # Two folders: a journal keeps their order, POSIX keeps none.
    two = [Op("mkdir", 0, "f"), folder, Op("create", 0, "f/a", inode=1), Op("create", 0, "b", inode=2)]
    assert {"b": b""} in states(STRICT, *two)
    assert {"b": b""} not in states(ORDERED, *two)
    assert {"f/a": b""} in states(ORDERED, *two)


def test_blocks_of_a_file_reach_the_disk_in_any_order():
    create = [Op("create", 0, "a", inode=1), Op("resize", 0, inode=1, offset=3 * 4096)]
    synced = [*create, Op("sync", 0, inode=1), Op("sync folder", 0)]
    writes = [Op("write", 0, inode=1, offset=block * 4096, data=b"%d" % block * 4096) for block in range(3)]
    found = {tuple(files["a"][block * 4096] for block in range(3)) for files in states(STRICT, *synced, *writes)}
    assert found == {(a, b, c) for a in (0, 48) for b in (0, 49) for c in (0, 50)}
    assert len(states(ORDERED, *synced, *writes)) == 8


def test_a_recording_that_missed_something_is_refused(tmp_path):
    def session(root, log):
        shutil.copytree(tmp_path / "beside", root)

    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/x").write_text("written past the recorder")
    base = tmp_path / "base"
    base.mkdir()
    with pytest.raises(AssertionError, match="does not lead to what is on the disk"):
        record(base, session)
