"""System calls of a save fail, or are its last: the first, the second, … of each kind, until none is hit any more.

A process that has imported everything is the parent of all; each child waits on a pipe until ``strace`` has hold of it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.commit.catalog import read_catalog
from keepstep.storage.local import LocalStorage
from tests.helpers.agents import wait_until
from tests.helpers.jobs import alone
from tests.ranks.calls import attempt

FIRST, SECOND, THIRD = 1, 2, 3
CHANGES = ("pwrite64", "fsync", "ftruncate", "fallocate", "rename", "unlink", "mkdir", "rmdir")
NO_SPACE = ("pwrite64", "ftruncate", "fallocate", "mkdir")
INTERRUPTED = ("pwrite64", "fsync", "rename", "unlink")
STRACE = shutil.which("strace")


def can_trace() -> bool:
    """Whether strace may take hold of a process here and put an error in."""
    if STRACE is None:
        return False
    asked = [STRACE, "-qq", "-e", "trace=mkdir", "-e", "inject=mkdir:error=EIO:when=1", "mkdir", "/tmp/keepstep-never"]
    return "INJECTED" in subprocess.run(asked, capture_output=True, text=True, check=False).stderr


@pytest.fixture(autouse=True, scope="module")
def _may_trace():
    if not can_trace():
        pytest.skip("needs strace, and the right to use it")


def state_at(step):
    """Large enough for a file that is given its blocks in advance, and of its step from end to end."""
    state = ks.TrainState(model={"w": torch.full((1 << 19,), float(step))}, note={"step": step})
    state.progress.step = step
    return state


def moved(state, step):
    state.progress.step = state["note"]["step"] = step
    state["model"]["w"].fill_(step)
    return state


def is_whole(state, step):
    return state["note"] == {"step": step} and bool((state["model"]["w"] == step).all()) and state.progress.step == step


def saved_twice(root):
    with ks.Checkpointer(root, state := state_at(0), background="off") as ckpt:
        for step in (FIRST, SECOND):
            moved(state, step)
            ckpt.save()


def save_third(root, gate):
    """Restores the second step, waits for the tracer, saves the third, which lets the first go; again when it fails.

    (strace counts calls by thread: it has to let go before the second try.)
    """
    state = state_at(0)
    folder = Path(root).parent
    with ks.Checkpointer(root, state, keep=ks.Keep(last=1), background="off") as ckpt:
        ckpt.restore()
        moved(state, THIRD)
        (folder / "waiting").touch()
        os.read(gate, 1)
        outcomes = [attempt(ckpt.save)]
        if outcomes[0].kind != "ok":
            there = [found.step for found in read_catalog(LocalStorage(root)).steps]
            (folder / "failed").write_bytes(pickle.dumps(there))
            os.read(gate, 1)
            outcomes.append(attempt(ckpt.save))
    return outcomes


def child_of(folder):
    """Forks the child that saves; returns its process and the end of the pipe that lets it go on."""
    waits, lets_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(lets_go)
            import warnings

            warnings.simplefilter("ignore")
            value = save_third(str(folder / "run"), waits)
            (folder / "outcome").write_bytes(pickle.dumps(value))
            status = 0
        except BaseException as err:
            (folder / "outcome").write_bytes(pickle.dumps(repr(err)))
        finally:
            os._exit(status)
    os.close(waits)
    return pid, lets_go


def traced(folder, call, inject):
    """How the child ended under this injection: exit code, its outcomes, and whether it was hit."""
    pid, lets_go = child_of(folder)
    wait_until((folder / "waiting").exists, what="the child")
    log = folder / "trace"
    command = [
        STRACE,
        "-f",
        "-qq",
        "-o",
        str(log),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:{inject}",
        "-p",
        str(pid),
    ]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        status = Path(f"/proc/{pid}/status")
        wait_until(lambda: f"TracerPid:\t{tracer.pid}\n" in status.read_text(), what="the tracer")
        os.write(lets_go, b"x")
        wait_until(lambda: (folder / "failed").exists() or tracer.poll() is not None, what="the end of the save")
        if (folder / "failed").exists():
            tracer.terminate()
            tracer.wait(20)
            os.write(lets_go, b"x")
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(lets_go)
        tracer.wait(20)
    path = folder / "outcome"
    hit = "INJECTED" in log.read_text() or "killed by" in log.read_text()
    return ended, pickle.loads(path.read_bytes()) if path.exists() else None, hit


def restored(root):
    """The newest step as the next start finds it, whole; and that nothing is left beside."""
    state = state_at(0)
    with ks.Checkpointer(root, state, background="off") as ckpt:
        step = ckpt.restore(on_damage="raise").step
    assert is_whole(state, step)
    left = [str(path) for path in root.rglob("*.partial")]
    assert not left
    assert read_catalog(LocalStorage(root)).unfinished == ()
    return step


def every_call(folder, inject, calls):
    """For each kind of call: what the next start found after the 1st, the 2nd, … was hit."""
    saved_twice(folder / "warm")
    assert restored(folder / "warm") == SECOND
    found = {}
    for call in calls:
        found[call] = []
        for nth in range(1, 100):
            work = folder / f"{call}-{nth}"
            work.mkdir()
            shutil.copytree(folder / "warm", work / "run")
            ended, outcomes, hit = traced(work, call, f"{inject}:when={nth}")
            step = checked(work, ended, outcomes, killed="KILL" in inject)
            shutil.rmtree(work)
            if not hit:
                assert (ended, [outcome.kind for outcome in outcomes], step) == (0, ["ok"], THIRD)
                break
            found[call].append(step)
    return found


def checked(work, ended, outcomes, *, killed):
    if killed and ended != 0:
        assert ended == -signal.SIGKILL
        step = restored(work / "run")
        assert step in (SECOND, THIRD)
        return step
    assert ended == 0, outcomes
    first, *rest = outcomes
    if first.kind != "ok":
        # It failed with its cause, and what was there before is there; the next save works in any case.
        assert first.kind == "StorageError", first
        assert "errno" in first.text
        assert SECOND in pickle.loads((work / "failed").read_bytes())
        assert [outcome.kind for outcome in rest] == ["ok"], outcomes
    assert restored(work / "run") == THIRD
    return THIRD if first.kind == "ok" else SECOND


@pytest.mark.case(72)
@pytest.mark.case(76)
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("inject", "calls"),
    [
        ("error=EIO", CHANGES),
        ("error=ENOSPC", NO_SPACE),
        ("error=EINTR", INTERRUPTED),
        ("signal=SIGKILL", CHANGES),
    ],
    ids=["EIO", "ENOSPC", "EINTR", "KILL"],
)
def test_every_system_call_fails_once(rank_pool, tmp_path, inject, calls):
    (found,) = rank_pool(1)(alone, every_call, tmp_path, inject, calls, timeout_s=220)
    print(f"{inject}: {sum(map(len, found.values()))} calls hit: { {call: len(hits) for call, hits in found.items()} }")
    assert found["pwrite64"]
    assert found["fallocate" if "fallocate" in calls else "rename"]
    if "EINTR" in inject:
        # Interrupted writes and syncs are simply made again.
        assert set(found["pwrite64"]) == set(found["fsync"]) == {THIRD}
    elif "ENOSPC" not in inject:
        assert {step for hits in found.values() for step in hits} == {SECOND, THIRD}
        assert all(found[call] for call in ("fsync", "rename", "unlink", "mkdir", "ftruncate"))
        assert len(found["fsync"]) > 5
