"""SIGKILL in the middle of a save: the step before or the step after, never anything else, and nothing to clean by hand."""

from __future__ import annotations

import random
import time
import warnings

import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.jobs import Job, alone
from tests.helpers.same import bits

KILLS = 20
SEED = 72


def state_at(step):
    """A run's state as a function of its step: about 4 MiB in three components."""
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.full((64, 1024), float(step * 100 + i))) for i in range(8)})
    state = ks.TrainState(model=model, moments=[torch.full((1 << 18,), float(step))], note={"step": step})
    state.progress.step = step
    return state


def save_twenty(rank, root, began):
    """Restores step 10 and saves step 20, over and over: whenever the kill comes, a save is going on."""
    state = state_at(0)
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None)) as ckpt:
        ckpt.restore(step=10)
        later = state_at(20)
        with torch.no_grad():
            for key, parameter in state["model"].items():
                parameter.copy_(later["model"][key])
            state["moments"][0].copy_(later["moments"][0])
        state["note"]["step"] = 20
        state.progress.step = 20
        began.touch()
        while True:
            ckpt.save()


def check(root):
    """What a new start of the job finds."""
    state = state_at(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ks.Checkpointer(root, state, keep=ks.Keep(last=None)) as ckpt:
            step = ckpt.restore().step
    assert step in (10, 20)
    expected = state_at(step)
    assert bits(state["moments"][0]) == bits(expected["moments"][0])
    for key, parameter in state["model"].items():
        assert bits(parameter) == bits(expected["model"][key])
    assert (state["note"], state.progress.step) == ({"step": step}, step)
    unfinished = [folder.name for folder in root.glob("step-*") if not (folder / ".metadata").exists()]
    assert not [name for name in unfinished if any(path.is_file() for path in (root / name).rglob("*"))]
    assert not list(root.rglob("*.partial"))
    return step


def kill_at_random_points(folder, seed):
    dice = random.Random(seed)
    found = []
    for kill in range(KILLS):
        root = folder / f"run-{kill}"
        with ks.Checkpointer(root, state_at(10)) as ckpt:
            start = time.monotonic()
            ckpt.save()
            save_s = time.monotonic() - start
        began = folder / f"began-{kill}"
        job = Job(folder / f"job-{kill}", 1, save_twenty, root, began)
        deadline = time.monotonic() + 30
        while not began.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 1.5 * save_s))
        job.kill()
        (end,) = job.wait()
        assert end.status == -9, end
        found.append(check(root))
    return found


@pytest.mark.case(72)
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_kill_at_any_moment_leaves_the_old_step_or_the_new_one(rank_pool, tmp_path):
    print(f"seed {SEED}")
    (found,) = rank_pool(1)(alone, kill_at_random_points, tmp_path, SEED, timeout_s=200)
    print(f"steps found after the kills: {found}")
    assert len(found) == KILLS
    assert set(found) <= {10, 20}
    assert 10 in found  # at least one kill came before the commit
