"""What the trainers of these tests run: a training whose every step can be told from what was saved of it."""

from __future__ import annotations

import gc
import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import keepstep as ks
from keepstep.errors import RunOwnedError
from tests.agent.gate import WRITING
from tests.helpers.agents import agent_of, wait_until

MIB = 1 << 20


def made(step=0, size_bytes=MIB, world=1, rank=0):
    """A state that says of which step it is, in parameters, moments, a shard and plain values; ``size_bytes`` a third."""
    torch.manual_seed(0)
    width = size_bytes // 4
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(width))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model["w"].grad = torch.ones(width)
    optimizer.step()
    share = width // world
    shard = ks.sharded(torch.empty(share), global_shape=(share * world,), offsets=(share * rank,))
    state = ks.TrainState(model=model, optimizer=optimizer, parts={"shard": shard}, note={"step": 0})
    return advanced(state, step)


def advanced(state, step):
    """The state as it is at this step."""
    state.fence()
    state.progress.step = step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(step)
            state["optimizer"].state[parameter]["momentum_buffer"].fill_(step + 0.5)
    state["parts"]["shard"].local.fill_(step + 0.25)
    state["note"]["step"] = step
    return state


def whole(state):
    """The step that every part of the state is of."""
    step = state.progress.step
    for parameter in state["model"].parameters():
        assert torch.all(parameter == step), step
        assert torch.all(state["optimizer"].state[parameter]["momentum_buffer"] == step + 0.5), step
    assert torch.all(state["parts"]["shard"].local == step + 0.25), step
    assert state["note"] == {"step": step}
    return step


def warmed(folder, fn, *args):
    """Runs it in a process that has imported and done once whatever jobs forked from it would have to."""
    ks.save(folder / "warm", made(1))
    ks.load(folder / "warm", into=made(0))
    return fn(folder, *args)


def steps_in(root):
    """The committed steps of a run, oldest first; fails when one of them is not what was saved."""
    found = sorted(int(path.parent.name.partition("-")[2]) for path in Path(root).glob("step-*/.metadata"))
    for step in found:
        state = made(0, size_of(root, step))
        ks.load(Path(root) / f"step-{step:08d}", into=state)
        assert whole(state) == step
    return found


def size_of(root, step):
    return 4 * ks.open(Path(root) / f"step-{step:08d}")["model/w"].numel()


def moved_on(ckpt, state, step):
    """Training goes on to this step, and begins to save it."""
    advanced(state, step)
    return ckpt.save()


def dying(rank, root, moment, size_bytes, gate=None):
    """Restores, saves one step more, and begins to save another; dies at the moment, or is killed at the gate."""
    state = made(0, size_bytes)
    with ks.Checkpointer(root, state, background="agent", keep=ks.Keep(last=1)) as ckpt:
        step = ckpt.restore().step
        if step:
            whole(state)
        moved_on(ckpt, state, step + 10).wait_committed(30)
        if moment == "idle":
            os.kill(os.getpid(), signal.SIGKILL)
        if gate is not None:
            gate.shut(WRITING)
        for later in range(step + 20, step + 500, 10):
            pending = moved_on(ckpt, state, later)
            if moment == "staging" and not pending.staged.done():
                os.kill(os.getpid(), signal.SIGKILL)
            pending.wait_staged(30)
            if moment == "staged":
                os.kill(os.getpid(), signal.SIGKILL)
            pending.wait_committed(60)
    raise AssertionError(f"it never was at {moment}")


def restored(rank, root, size_bytes, save=0):
    """What a trainer that starts now goes on from; saves a step then if it is told to."""
    state = made(0, size_bytes)
    with ks.Checkpointer(root, state, background="agent") as ckpt:
        step = ckpt.restore().step
        assert not step or whole(state) == step
        if save:
            step = moved_on(ckpt, state, save).wait_committed(30).step
    return step


def owning(rank, root, note):
    """Owns the run until it is killed."""
    with ks.Checkpointer(root, made(1), background="agent") as ckpt:
        ckpt.save().wait_committed(30)
        note.touch()
        parent = os.getppid()
        # A test that fails must not leave this behind.
        while os.getppid() == parent:
            time.sleep(0.2)


def refused(rank, root):
    """Tries to have the run while somebody else does."""
    began = time.monotonic()
    try:
        ks.Checkpointer(root, made(2), background="agent")
    except RunOwnedError as err:
        return str(err), time.monotonic() - began
    raise AssertionError("it was not refused")


STAGED, BEGUN, RESTORED, STARTS = range(0, 8, 2)


def saving_on(rank, world, root, notes, size_bytes):
    """Restores and saves step after step, until it is killed; notes what it may be held to, in shared memory."""
    board = np.memmap(notes, np.int64, "r+")
    state = made(0, size_bytes, world, rank)
    with ks.Checkpointer(root, state, background="agent", keep=ks.Keep(last=2), deadline_s=30.0) as ckpt:
        # Of a run that was killed before all ranks had staged anything there may be nothing but an attempt.
        promised = board[STAGED : STAGED + world].min()
        step = ckpt.restore(allow_fresh=not promised).step
        assert not step or whole(state) == step
        board[RESTORED + rank] = step
        board[STARTS + rank] += 1
        parent = os.getppid()
        while os.getppid() == parent:
            step += 1
            board[BEGUN + rank] = step
            pending = moved_on(ckpt, state, step)
            pending.staged.add_done_callback(partial(note, board, STAGED + rank, step))


def note(board, place, step, staged):
    if staged.exception() is None:
        board[place] = step


def usage(pid, looks=10):
    """Resident bytes, descriptors and threads of a process: the least of some looks, as it may just be closing a call."""
    seen = []
    for _ in range(looks):
        seen.append(usage_now(pid))
        time.sleep(0.01)
    return tuple(min(column) for column in zip(*seen, strict=True))


def usage_now(pid):
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    held = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return int(fields["RssAnon"].split()[0]) << 10, held, int(fields["Threads"])


def saving_often(rank, root, marks):
    """Saves a small state again and again; returns what trainer, agent and folder hold at each of the marks."""
    found = []
    state = made(0, 4096)
    with ks.Checkpointer(root, state, background="agent", keep=ks.Keep(last=2)) as ckpt:
        for step in range(1, marks[-1] + 1):
            pending = moved_on(ckpt, state, step)
            if step in marks:
                pending.wait_committed(30)
                del pending
                gc.collect()
                pid = agent_of(root).pid
                wait_until(lambda: len(list(Path(root).glob("step-*"))) <= 2)
                files = sum(path.is_file() for path in Path(root).rglob("*"))
                found.append((usage(os.getpid()), usage(pid), files))
    return found
