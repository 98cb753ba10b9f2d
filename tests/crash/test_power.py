"""Power cuts: a real file system on an image, copied at random moments while a run saves into it, and opened as it is.

What the saver has not made durable is in the memory of the file system, and not in the image. It is stopped while a copy is
made, and a copy during which anything was written is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.retention import Keep
from keepstep.errors import CheckpointError
from keepstep.storage.local import LocalStorage
from tests.conftest import SEED
from tests.crash.campaign import TIMES, note, quick_folder
from tests.crash.work import advanced, made, newest, whole
from tests.helpers.agents import wait_until
from tests.helpers.jobs import alone
from tests.helpers.mounts import in_namespace, may, mount

IMAGE_BYTES = 24 << 20
COPIES = 24
OPTIONS = "loop,noauto_da_alloc,commit=300"
"""As strict as ext4 gets: no help for programs that forget to sync before a rename, no commit of its own meanwhile."""


@pytest.fixture(autouse=True, scope="module")
def _may_mount_images():
    image = f"/tmp/keepstep-{os.getpid()}.img"
    tried = (f"truncate -s 8M {image}", f"mkfs.ext4 -q -F {image}", f"mount -o loop {image} /mnt", f"rm {image}")
    if os.getuid() != 0 or not may(*tried):
        pytest.skip("needs root, a loop device and mkfs.ext4")


def keep_saving(root, notes, background):
    """Goes on from the newest step, and notes each one that it was told is committed. Ends with a kill."""
    state = made(0, 1)
    options = {"background": background, "staging": "block"}
    with ks.Checkpointer(root, state, keep=Keep(last=2), **options) as ckpt:
        ckpt.restore(allow_fresh=True)
        while True:
            advanced(state, state.progress.step + 1)
            pending = ckpt.save()
            pending.wait_committed(30)
            note(notes / "committed", pending.step)


def forgetful(what):
    """Planted: from now on ``files``, or ``everything``, is not synced, only said to be."""
    sync = os.fsync

    def fsync(descriptor):
        if what != "everything" and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            sync(descriptor)

    os.fsync = fsync


def forked(fn, *args):
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            fn(*args)
        finally:
            os._exit(1)
    return pid


def written(device):
    """How much the loop device has written so far."""
    return Path(f"/sys/block/{device}/stat").read_text().split()[4:7]


def stopped_copy(pid, image, copy, device):
    """A copy of the image as it is at one instant, in the middle of whatever the saver is doing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all_stopped(pid), what="the saver's rest")
        for _ in range(50):
            before = written(device)
            shutil.copyfile(image, copy)
            if written(device) == before:
                return
        raise AssertionError("the image never came to rest")
    finally:
        os.kill(pid, signal.SIGCONT)


def all_stopped(pid):
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def opened(copy, folder, promised):
    """What a machine finds that comes up again: a sound file system, the promised step or a newer one, whole."""
    checked = subprocess.run(["e2fsck", "-p", str(copy)], capture_output=True, text=True, check=False)
    assert checked.returncode <= 1, checked.stdout
    mount("-o", "loop", str(copy), str(folder))
    try:
        root = folder / "run"
        storage = LocalStorage(root)
        steps = [found.step for found in read_catalog(storage).steps]
        assert steps[:1] >= [promised], f"steps {steps}, step {promised} was promised"
        assert len(steps) >= 2
        for step in steps:
            target = made(0, 1)
            ks.load(step_storage(storage, step), into=target)
            assert whole(target) == step
        assert newest(root) == steps[0]
        return steps[0]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def power_cuts(work, copies, seed, background, plant):
    """Steps found in each copy; with a plant, until the first copy that is not as it should be."""
    dice = random.Random(seed)
    image, copy, disk, after = work / "disk.img", work / "copy.img", work / "disk", work / "after"
    disk.mkdir()
    after.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", str(image)], check=True)
    mount("-o", OPTIONS, str(image), str(disk))
    device = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {disk} " in line).split()[0]
    if plant:
        forgetful(plant)
    pid = forked(keep_saving, disk / "run", work, background)
    found = []
    try:
        promised = work / "committed"
        wait_until(lambda: promised.exists() and json.loads(promised.read_text()) >= 3, what="the first steps")
        for _ in range(copies):
            time.sleep(dice.uniform(0.0, 0.12))
            before = json.loads(promised.read_text())
            stopped_copy(pid, image, copy, Path(device).name)
            found.append((opened(copy, after, before), before))
    except (AssertionError, CheckpointError) as err:
        if not plant:
            raise
        return found, str(err)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", str(disk)], check=True)
    return found, ""


@pytest.mark.case(72)
@pytest.mark.slow
@pytest.mark.timeout(200 * TIMES)
@pytest.mark.parametrize("background", ["off", "thread"])
def test_a_power_cut_at_any_moment(rank_pool, background):
    print(f"seed {SEED}")
    with quick_folder() as folder:
        arguments = (folder, power_cuts, folder, COPIES // 2 * TIMES, SEED, background, "")
        ((found, _),) = rank_pool(1)(alone, in_namespace, *arguments, timeout_s=180 * TIMES)
    print(f"{len(found)} copies; (newest step, promised step): {found}")
    assert len(found) == COPIES // 2 * TIMES
    assert found[-1][0] > found[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["files", "everything"])
def test_what_is_not_synced_is_found_by_a_power_cut(rank_pool, plant):
    with quick_folder() as folder:
        arguments = (folder, power_cuts, folder, COPIES, SEED, "off", plant)
        ((found, said),) = rank_pool(1)(alone, in_namespace, *arguments, timeout_s=100)
    print(f"{len(found)} copies were as they should be, then: {said}")
    assert said, f"{plant} were never synced, and the disk was found as it should be"
