"""Every call of the operating system that the disk storage makes fails once; so does what is half done.

As in ``test_every_call``, one floor lower: nothing of ``keepstep`` is replaced, only functions of ``os``. After each failure
the promises hold, no file descriptor is left open, and nothing half-written is left once the next start has been.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.errors import CheckpointError
from keepstep.storage.local import LocalStorage
from tests.crash.test_every_call import LIMIT, Start, loaded, steps_of, three_steps, values

__all__ = ["three_steps"]

WRITES = ("pwrite", "fsync", "ftruncate", "replace", "rename", "link", "mkdir", "unlink", "rmdir", "write")
READS = ("preadv", "pread", "scandir")
CALLS = {*WRITES, *READS, "open", "fstat"}


class Limits:
    """Fails the ``nth`` call, of those that concern ``root``, with an errno; ``late`` when it has been done.

    ``half`` writes half of the data first, as a disk does that becomes full, and fails at the call after it; ``short`` only
    moves half of it, which is no failure.
    """

    def __init__(self, monkeypatch, root, names=CALLS):
        self.root = str(root)
        self.nth = self.count = 0
        self.code, self.manner, self.hit, self.inside = errno.EIO, "error", "", threading.local()
        self.lock = threading.Lock()
        self.ours: set[int] = set()
        for name in sorted(names | {"open"}):
            monkeypatch.setattr(os, name, self.guarded(name, getattr(os, name)))

    def arm(self, nth, code, manner):
        self.nth, self.count, self.code, self.manner, self.hit = nth, 0, code, manner, ""
        self.ours.clear()

    def concerns(self, args):
        first = args[0] if args else ""
        return first in self.ours if isinstance(first, int) else str(first).startswith(self.root)

    def is_hit(self, name, args):
        if not self.nth or not self.concerns(args):
            return False
        with self.lock:
            self.count += 1
            if self.count == self.nth:
                self.hit = name
                return True
            return False

    def shortened(self, name, real, args):
        if name in ("pwrite", "write"):
            data = memoryview(args[1])
            return real(args[0], data[: max(1, len(data) // 2)], *args[2:])
        if name == "preadv":
            (buffer,) = args[1]
            return real(args[0], [memoryview(buffer)[: max(1, len(buffer) // 2)]], *args[2:])
        return real(*args)

    def guarded(self, name, real):
        def call(*args, **kwargs):
            hit = self.is_hit(name, args)
            if hit and self.manner == "half" and name in ("pwrite", "write"):
                self.nth = self.count + 1
                data = memoryview(args[1])
                return real(args[0], data[: max(1, len(data) // 2)], *args[2:], **kwargs)
            if hit and self.manner == "short":
                return self.shortened(name, real, args)
            if hit and self.manner == "late" and name not in ("open", "pwrite", "write", "scandir"):
                real(*args, **kwargs)
            if hit:
                raise OSError(self.code, os.strerror(self.code), str(args[0]) if args else None)
            made = real(*args, **kwargs)
            if name == "open" and str(args[0]).startswith(self.root):
                self.ours.add(made)
            return made

        return call


def open_below(root):
    """Files and folders below the root that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(each.readlink()))
    return [name for name in found if name.startswith(str(root))]


def every(limits, code, manner, *, least=20, step=1):
    for nth in range(1, 10 * LIMIT, step):
        limits.arm(nth, code, manner)
        yield nth
        if not limits.hit:
            assert nth > least
            return
    raise AssertionError(f"not through after {10 * LIMIT} calls")


@pytest.fixture
def in_memory(tmp_path):
    """A folder where an fsync costs nothing: there are some ten thousand of them."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="keepstep-", dir=shared) as folder:
        yield Path(folder)


ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EACCES)


@pytest.mark.slow
@pytest.mark.case(76)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("manner", ["error", "late", "half", "short"])
def test_every_call_of_a_save_over_an_older_step(tmp_path, in_memory, monkeypatch, manner):
    """The former step loads in full, or the new one does; never neither, and no error without an effect on the step."""
    # (Half a write is tried where writes go past the page cache, if they do anywhere.)
    folder = tmp_path if manner in ("half", "short") else in_memory
    ks.save(folder / "first", values(1.0))
    limits = Limits(monkeypatch, folder / "run")
    codes = ERRNOS if manner == "error" else (errno.ENOSPC,)
    tried = 0
    for code in codes:
        for nth in every(limits, code, manner):
            limits.nth = 0
            root = folder / "run"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(folder / "first", root)
            failed = None
            limits.arm(nth, code, manner)
            try:
                ks.save(root, values(2.0), overwrite=True)
            except CheckpointError as err:
                failed = err
            limits.nth = 0
            there = loaded(root)
            assert failed is None or manner != "short", failed
            assert there == (2.0 if failed is None else 1.0), (limits.hit, code, failed)
            assert failed is None or f"errno {code}" in str(failed), (limits.hit, failed)
            assert not open_below(root), limits.hit
            if failed is not None and manner == "error" and limits.hit not in ("unlink",):
                assert not list(root.rglob("*.partial")), limits.hit
            tried += bool(limits.hit)
            ks.save(root, values(3.0), overwrite=True)
            assert loaded(root) == 3.0
            assert len([path for path in root.rglob("*") if path.is_file()]) == 3
    assert tried >= 20 * len(codes)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("manner", ["error", "short"])
def test_every_call_of_a_load(tmp_path, monkeypatch, manner):
    """It says what could not be read, and changes no plain value; or it loads."""
    ks.save(tmp_path / "step", values(1.0))
    limits = Limits(monkeypatch, tmp_path / "step", {*READS, "open", "fstat"})
    for code in (errno.EIO, errno.EINTR, errno.EACCES):
        for _ in every(limits, code, manner, least=8):
            target, failed = values(7.0), None
            try:
                ks.load(tmp_path / "step", target)
            except CheckpointError as err:
                failed = err
            assert bool(failed) == (bool(limits.hit) and manner == "error"), (limits.hit, failed)
            assert target["note"] == {"value": 7.0 if failed else 1.0}
            assert failed is None or f"errno {code}" in str(failed)
            assert not open_below(tmp_path)
            hit, limits.nth = limits.hit, 0
            assert loaded(tmp_path / "step") == 1.0
            limits.hit = hit


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("manner", ["error", "late"])
@pytest.mark.parametrize("background", ["off", "thread"])
def test_every_call_of_a_run(in_memory, monkeypatch, three_steps, background, manner):
    """Start, restore, a save, the removal of old steps: what was reported is there, and the next start goes on."""
    first, root = LocalStorage(in_memory / "first"), in_memory / "run"
    for name, _ in three_steps.list(""):
        first.put(name, three_steps._blobs[name])
    limits = Limits(monkeypatch, root)
    hits = set()
    for nth in every(limits, errno.EIO, manner, step=3 if manner == "late" else 1):
        limits.nth = 0
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(in_memory / "first", root)
        limits.arm(nth, ERRNOS[nth % len(ERRNOS)], manner)
        start = Start(root, background, saves=1)
        hit, limits.nth = limits.hit, 0
        hits.add(hit)
        inner = LocalStorage(root)
        steps = steps_of(inner)
        assert max(steps) >= max([3, *start.reported]), (hit, start.reported, steps)
        assert {*sorted({1, 2, 3} | steps)[-2:]} <= steps, (hit, steps)
        for error in start.errors:
            assert isinstance(error, CheckpointError)
            assert f"errno {limits.code}" in str(error), (hit, error)
        assert not open_below(root), hit
        following = Start(root, "off", saves=1)
        assert (following.restored, following.skipped) == (max(steps), ()), (hit, following.errors)
        assert following.reported == [max(steps) + 1], (hit, following.errors)
        assert not following.warned, [str(each.message) for each in following.warned]
        assert not list(root.rglob("*.partial")), hit
        limits.hit = hit
    assert hits >= {"", "open", "fsync", "replace", "link", "unlink", "mkdir"} or manner == "late"
