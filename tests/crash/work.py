"""What the jobs of the crash tests run: a training whose every step can be told from what was saved of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep as ks

WIDTH = 3000


def made(rank, world, step=0):
    """A state in which everything that was saved at a step says so: replicated, sharded, and each rank's own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    share = WIDTH // world
    shard = ks.sharded(torch.empty(share), global_shape=(WIDTH,), offsets=(share * rank,))
    state = ks.TrainState(
        model=model, optimizer=optimizer, parts={"shard": shard}, mine=ks.per_rank({"step": 0}, "same_rank")
    )
    return advanced(state, step)


def advanced(state, step):
    state.progress.step = step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(step)
            state["optimizer"].state[parameter]["exp_avg"].fill_(step + 0.5)
    shard = state["parts"]["shard"]
    shard.local.copy_(torch.arange(shard.offsets[0], shard.offsets[0] + len(shard.local)) + step)
    state["mine"].value["step"] = step
    return state


def whole(state):
    """The step that all parts of the state are of."""
    step = state.progress.step
    expected = made(0, 1, step)
    shard = state["parts"]["shard"]
    low = shard.offsets[0]
    assert torch.equal(shard.local, expected["parts"]["shard"].local[low : low + len(shard.local)]), step
    for mine, theirs in zip(state["model"].parameters(), expected["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs), step
        moments = state["optimizer"].state[mine]
        assert torch.all(moments["exp_avg"] == step + 0.5), step
        assert moments["step"].item() == 1
    assert state["mine"].value == {"step": step}
    return step


def newest(root):
    """What one process restores from a root, proved whole; also proves that the start cleaned up."""
    state = made(0, 1)
    with ks.Checkpointer(root, state, background="off") as checkpointer:
        report = checkpointer.restore()
    assert whole(state) == report.step
    assert report.skipped == ()
    for folder in Path(root).glob("step-*"):
        left = sorted(str(path.relative_to(root)) for path in folder.rglob("*"))
        assert (folder / ".metadata").exists(), f"{folder.name} was not cleaned up: {left}"
        ids = {path.name.split(".")[1] for path in folder.rglob("*.safetensors")}
        assert len(ids) == 1, (folder.name, ids)
    assert not list(Path(root).rglob("*.partial"))
    return report.step


def train(rank, root, notes, steps):
    """Goes on from the newest step and saves each one; notes, once a step is saved, that it must never be lost."""
    world = dist.get_world_size()
    state = made(rank, world)
    note = Path(notes) / f"committed-{rank}"
    with ks.Checkpointer(
        root, state, every=ks.Every(steps=1), keep=ks.Keep(last=2), deadline_s=1.5, background="off"
    ) as checkpointer:
        report = checkpointer.restore(allow_fresh=not note.exists())
        if not report.fresh:
            whole(state)
        for _ in range(steps):
            advanced(state, state.progress.step)
            advanced(state, state.progress.step + 1)
            state.progress.step -= 1
            checkpointer.step()
            partial = note.with_suffix(".new")
            partial.write_text(str(state.progress.step))
            partial.replace(note)
    return state.progress.step


CHANGES = ("fsync", "ftruncate", "rename", "replace", "link", "unlink", "rmdir", "mkdir")


class Fuse:
    """Kills this process ahead of the ``at``-th change it makes to the file system; at 0 it only counts."""

    def __init__(self, at):
        self.at = at
        self.count = 0

    def arm(self):
        for name in CHANGES:
            setattr(os, name, self.guarded(getattr(os, name)))
        return self

    def guarded(self, real):
        def change(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return change
