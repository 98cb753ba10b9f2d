"""Storages that users bring: object stores without rename, stores that publish when a file is closed, stores that die."""

from __future__ import annotations

import errno
import threading
import time

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import keepstep as ks
from keepstep.check.contract import StorageContract
from keepstep.errors import CorruptError, StepNotFoundError, StorageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.local import LocalStorage, check_name
from keepstep.storage.memory import MemoryStorage


class NoRename(MemoryFileSystem):
    """A file system in which nothing can be renamed: some stores copy and delete instead, others refuse."""

    protocol = "norename"
    cachable = False

    def __init__(self):
        super().__init__()
        self.store = {}
        self.pseudo_dirs = [""]

    def mv(self, *_args, **_kwargs):
        raise NotImplementedError("no rename here")

    mv_file = move = rename = cp_file = copy = mv


class Bucket(Storage):
    """Whole objects on any fsspec file system; a name is taken once, under a lock in place of a conditional request."""

    def __init__(self, files: fsspec.AbstractFileSystem) -> None:
        self.files = files
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return "bucket://steps"

    def create(self, name, size_hint_bytes):
        return BucketUpload(self, check_name(name))

    def open(self, name):
        try:
            return BucketBlob(name, self.files.cat_file(f"/{check_name(name)}"))
        except (FileNotFoundError, IsADirectoryError) as err:
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such object")) from err

    def put(self, name, data):
        self.files.pipe_file(f"/{check_name(name)}", bytes(data))

    def put_new(self, name, data):
        with self.lock:
            if self.files.isfile(f"/{check_name(name)}"):
                return False
            self.put(name, data)
            return True

    def list(self, prefix):
        start = f"/{check_name(prefix)}/" if prefix else "/"
        # (Copied at once: somebody else may be writing.)
        found = [*self.files.store.items()]
        return iter([(name[1:], len(item.getvalue())) for name, item in found if name.startswith(start)])

    def folders(self):
        return sorted({name.split("/")[0] for name, _ in self.list("") if "/" in name})

    def delete(self, names):
        for name in names:
            self.files.store.pop(f"/{check_name(name)}", None)


class BucketUpload(Upload):
    """Kept in memory; one put at the end."""

    def __init__(self, bucket, name):
        self.bucket, self.name, self.data, self.lock = bucket, name, bytearray(), threading.Lock()

    def write_at(self, offset, data):
        with self.lock:
            self.data.extend(bytes(max(0, offset + len(data) - len(self.data))))
            self.data[offset : offset + len(data)] = data

    def commit(self, size_bytes):
        self.bucket.put(self.name, bytes(self.data[:size_bytes]))

    def close(self):
        pass


class BucketBlob(Blob):
    def __init__(self, name, data):
        self.name, self.data, self.size_bytes = name, data, len(data)

    def read_into(self, offset, buffer):
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{self.name} ends at byte {self.size_bytes}")
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self):
        pass


class TestBucket(StorageContract):
    @pytest.fixture
    def storage(self):
        return Bucket(NoRename())


def state(value: float) -> dict:
    return {
        "model": {"w": torch.full((300,), value), "b": torch.full((7,), -value, dtype=torch.float64)},
        "note": {"value": value, "text": "x" * 50},
    }


def loaded(storage: Storage) -> float:
    """The one value a step consists of; fails when the step is a mixture."""
    target = state(0.0)
    ks.load(storage, target)
    value = target["note"]["value"]
    assert torch.equal(target["model"]["w"], torch.full((300,), value))
    assert torch.equal(target["model"]["b"], torch.full((7,), -value, dtype=torch.float64))
    return value


@pytest.mark.case(147)
def test_a_store_without_rename_takes_steps_whole():
    """The commit is one put of the manifest; a second save of the same place is refused or replaces it whole."""
    bucket = Bucket(NoRename())
    with pytest.raises(NotImplementedError):
        bucket.files.mv("a", "b")
    ks.save(bucket, state(1.0))
    assert loaded(bucket) == 1.0
    with pytest.raises(ks.errors.StepExistsError):
        ks.save(bucket, state(2.0))
    assert loaded(bucket) == 1.0
    ks.save(bucket, state(3.0), overwrite=True)
    assert loaded(bucket) == 3.0
    assert len(list(bucket.list(""))) == 3


class Dead(BaseException):
    """The machine is gone: nothing after this happens, no clean-up either."""


class Dying(Bucket):
    """Does so many changes, then none any more."""

    def __init__(self, files, changes):
        super().__init__(files)
        self.left = changes

    def put(self, name, data):
        if self.left == 0:
            raise Dead
        self.left -= 1
        super().put(name, data)

    def delete(self, names):
        if self.left == 0:
            raise Dead
        self.left -= 1
        super().delete(names)


@pytest.mark.slow
@pytest.mark.case(147)
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "over an older step"])
def test_a_crash_between_any_two_changes_leaves_the_old_step_or_the_new_one(overwrite):
    """After each number of puts and deletes; and the next attempt at the same place succeeds."""
    seen = []
    for changes in range(20):
        files = NoRename()
        if overwrite:
            ks.save(Bucket(files), state(1.0))
        try:
            ks.save(Dying(files, changes), state(2.0), overwrite=overwrite)
        except Dead:
            finished = False
        else:
            finished = True
        try:
            seen.append(loaded(Bucket(files)))
        except StepNotFoundError:
            seen.append(None)
        ks.save(Bucket(files), state(4.0), overwrite=True)
        assert loaded(Bucket(files)) == 4.0
        if finished:
            break
    before = 1.0 if overwrite else None
    assert seen == sorted(seen, key=lambda value: value == 2.0)
    assert set(seen) == {before, 2.0}
    assert seen.count(before) >= 3


class PublishesOnClose(MemoryStorage):
    """A store whose client uploads what it has when a file is closed, for whatever reason it is closed."""

    fail_after = None

    def create(self, name, size_hint_bytes):
        return HalfUpload(self, check_name(name), super().create(name, size_hint_bytes))


class HalfUpload(Upload):
    def __init__(self, storage, name, inner):
        self.storage, self.name, self.inner, self.end = storage, name, inner, 0

    def write_at(self, offset, data):
        limit = self.storage.fail_after
        kept = len(data) if limit is None else max(0, min(len(data), limit - offset))
        self.inner.write_at(offset, data[:kept])
        self.end = max(self.end, offset + kept)
        if kept < len(data):
            raise StorageError("write", self.name, OSError(errno.EIO, "connection lost"))

    def commit(self, size_bytes):
        self.inner.commit(size_bytes)
        self.end = -1

    def close(self):
        if self.end >= 0:
            self.inner.commit(self.end)
        self.inner.close()


@pytest.mark.case(149)
def test_a_truncated_object_that_a_store_published_is_part_of_no_step():
    """The save fails in the middle of a shard; the store shows half of it; no manifest speaks of it."""
    storage = PublishesOnClose()
    large = {"model": {"w": torch.arange(1 << 16, dtype=torch.int32)}}
    storage.fail_after = 100_000
    with pytest.raises(StorageError, match="connection lost"):
        ks.save(storage, large)
    half = {name: size for name, size in storage.list("") if name.startswith("model/")}
    assert len(half) == 1
    assert 0 < next(iter(half.values())) < 1 << 18
    with pytest.raises(StepNotFoundError, match="never committed"):
        ks.open(storage)
    storage.fail_after = None
    ks.save(storage, large)
    assert torch.equal(ks.open(storage)["model/w"], large["model"]["w"])
    assert not set(half) & set(dict(storage.list("")))
    storage.fail_after = 100_000
    with pytest.raises(StorageError, match="connection lost"):
        ks.save(storage, {"model": {"w": torch.zeros(1 << 16, dtype=torch.int32)}}, overwrite=True)
    assert torch.equal(ks.open(storage)["model/w"], large["model"]["w"])


@pytest.mark.case(149)
def test_a_truncated_object_under_the_name_of_a_good_one_is_rejected():
    storage = MemoryStorage()
    ks.save(storage, state(1.0))
    for name, size in list(storage.list("")):
        if name.endswith(".safetensors"):
            with storage.open(name) as blob:
                whole = bytearray(size)
                blob.read_into(0, memoryview(whole))
            for kept in (0, 1, 4096, size - 1):
                storage.put(name, bytes(whole[:kept]))
                with pytest.raises(CorruptError, match=name):
                    ks.load(storage, state(0.0))
            storage.put(name, bytes(whole))
    assert loaded(storage) == 1.0


class Lagging(LocalStorage):
    """A folder whose new files this process sees only some time after it has first looked for them."""

    def __init__(self, root, lag_s, late_s):
        super().__init__(root)
        self.lag_s, self.late_s, self.asked = lag_s, late_s, {}

    def open(self, name):
        if name.endswith(".safetensors"):
            first = self.asked.setdefault(name, time.monotonic())
            if time.monotonic() < first + self.lag_s:
                raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "not to be seen yet"))
        return super().open(name)


def save_and_load_at_once(rank, folder):
    """Rank 1 sees new files half a second late, and is told so; then a file that never comes."""
    torch.manual_seed(0)
    saved = {"model": {"w": torch.randn(500)}, "n": 7}
    place = Lagging(folder, lag_s=0.5 * rank, late_s=20.0)
    ks.save(place, saved)
    target = {"model": {"w": torch.zeros(500)}, "n": 0}
    ks.load(place, target)
    assert torch.equal(target["model"]["w"], saved["model"]["w"])
    assert target["n"] == 7
    try:
        ks.load(Lagging(folder, lag_s=1000.0 * rank, late_s=0.3), target)
    except ks.errors.CheckpointError as err:
        return len(place.asked), str(err)
    return None


@pytest.mark.slow
@pytest.mark.case(156)
def test_files_that_are_seen_late_are_waited_for(rank_pool, tmp_path):
    (_, first), (asked, second) = rank_pool(2)(save_and_load_at_once, str(tmp_path / "step"))
    assert asked >= 2
    assert "not to be seen yet" in second
    assert ".safetensors" in second
    assert "rank 1" in first
