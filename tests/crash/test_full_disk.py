"""A disk that is really full: saves fail with the reason, what is there stays, and what makes room works without any."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.commit.catalog import read_catalog
from keepstep.commit.retention import Keep
from keepstep.storage.local import LocalStorage
from tests.helpers.agents import stop_agents
from tests.helpers.jobs import alone
from tests.helpers.mounts import in_namespace, may, mount
from tests.ranks.calls import attempt

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _may_mount():
    if not may("mount -t tmpfs -o size=1m none /mnt"):
        pytest.skip("needs the right to mount, as root or in a user namespace")


def run_of(step=0):
    """About a MiB of model, and half as much of optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return moved(ks.TrainState(model=model, optimizer=optimizer), step)


def moved(state, step):
    state.progress.step = step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(step)
            state["optimizer"].state[parameter]["momentum_buffer"].fill_(step)
    return state


def tried(ckpt):
    """How a save went, also one in the background."""
    pending = None

    def save():
        nonlocal pending
        pending = ckpt.save()
        if pending is not None:
            pending.wait_committed(30)

    return attempt(save)


def newest(root):
    state = run_of(99)
    with ks.Checkpointer(root, state, background="off") as ckpt:
        step = ckpt.restore(on_damage="raise").step
    for parameter in state["model"].parameters():
        assert bool((parameter == step).all())
        assert bool((state["optimizer"].state[parameter]["momentum_buffer"] == step).all())
    assert not [*Path(root).rglob("*.partial")]
    assert read_catalog(LocalStorage(root)).unfinished == ()
    return step


def steps_in(root):
    return sorted(found.step for found in read_catalog(LocalStorage(root)).steps)


def filled_up(folder, background):
    """Saves until nothing fits any more, and goes on when somebody has made room."""
    mount("-t", "tmpfs", "-o", "size=5m", "none", str(folder))
    logging.getLogger("keepstep").setLevel(logging.CRITICAL)
    root = folder / "run"
    state, outcomes = run_of(), []
    options = {"background": background, "staging": "block", "tolerate_failures": 100}
    with ks.Checkpointer(root, state, keep=Keep(last=None), **options) as ckpt:
        for step in range(1, 12):
            moved(state, step)
            outcomes.append(tried(ckpt))
            if len(outcomes) > 2 and outcomes[-1].kind != "ok" and outcomes[-2].kind != "ok":
                break
        good = sum(outcome.kind == "ok" for outcome in outcomes)
        assert steps_in(root) == list(range(1, good + 1))
        free = os.statvfs(folder).f_bavail
        for path in [*(root / "step-00000001").rglob("*")][::-1]:
            path.rmdir() if path.is_dir() else path.unlink()
        moved(state, 20)
        after = tried(ckpt)
    found = steps_in(root), newest(root)
    stop_agents(folder)
    return outcomes, after, free, found


@pytest.mark.case(76)
@pytest.mark.case(92)
@pytest.mark.slow
@pytest.mark.parametrize("background", ["off", "thread", "agent"])
def test_a_save_into_a_full_disk_fails_and_the_next_with_room_works(rank_pool, tmp_path, background):
    (tmp_path / "disk").mkdir()
    ((outcomes, after, _, (steps, step)),) = rank_pool(1)(
        alone, in_namespace, tmp_path, filled_up, tmp_path / "disk", background
    )
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds[-2:] == ["StorageError"] * 2
    assert set(kinds[:-2]) == {"ok"}
    assert len(kinds) >= 4
    for outcome in outcomes[-2:]:
        assert f"errno {errno.ENOSPC}" in outcome.text
        assert outcome.seconds < 10
    assert after.kind == "ok", after
    assert step == 20
    assert steps == [*range(2, len(kinds) - 1), 20]


def little_room(folder, keep, rounds):
    """A run on a disk that holds about three steps, for longer than that; and what is wanted where nothing is left."""
    mount("-t", "tmpfs", "-o", "size=5m", "none", str(folder))
    root, state, outcomes = folder / "run", run_of(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ks.Checkpointer(root, state, keep=keep, background="off") as ckpt:
            for step in range(1, rounds + 1):
                moved(state, step)
                outcomes.append(attempt(ckpt.save))
    return outcomes, steps_in(root), newest(root), [str(warning.message) for warning in caught]


@pytest.mark.case(79)
@pytest.mark.slow
@pytest.mark.parametrize("keep", [Keep(last=1), Keep(last=2), Keep(last=None, min_free_bytes=2 * MIB)], ids=str)
def test_retention_keeps_a_small_disk_from_filling_up(rank_pool, tmp_path, keep):
    (tmp_path / "disk").mkdir()
    ((outcomes, steps, step, said),) = rank_pool(1)(
        alone, in_namespace, tmp_path, little_room, tmp_path / "disk", keep, 12
    )
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 12
    assert step == 12
    assert steps == ([12] if keep.last == 1 else [11, 12])
    assert said == []


def no_room_at_all(folder):
    """Not even for a manifest: retention, which writes one for a step that loses its optimizer, leaves it as it is."""
    mount("-t", "tmpfs", "-o", "size=8m", "none", str(folder))
    root, state = folder / "run", run_of()
    with ks.Checkpointer(root, state, keep=Keep(last=None), background="off") as ckpt:
        for step in (1, 2):
            moved(state, step)
            ckpt.save()
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as err:
            assert err.errno == errno.ENOSPC  # noqa: PT017
    from typer.testing import CliRunner

    from keepstep.cli.main import app

    def prune(*options):
        return CliRunner().invoke(app, ["prune", str(root), *options])

    stripped = prune("--weights-only-after", "1")
    between = steps_in(root), [bool([*(root / f"step-{step:08d}" / "optimizer").glob("*")]) for step in (1, 2)]
    removed = prune("--keep-last", "1")
    after = steps_in(root)
    ballast.unlink()
    return (stripped.exit_code, stripped.output), between, (removed.exit_code, removed.output), after, newest(root)


@pytest.mark.slow
def test_steps_can_be_removed_without_any_room(rank_pool, tmp_path):
    (tmp_path / "disk").mkdir()
    ((stripped, between, removed, after, step),) = rank_pool(1)(
        alone, in_namespace, tmp_path, no_room_at_all, tmp_path / "disk"
    )
    assert stripped[0] == 8, stripped
    assert between == ([1, 2], [True, True])
    assert removed[0] == 0, removed
    assert after == [2]
    assert step == 2
