"""Whole runs on an object store: saved, restored, kept in order, damaged, killed, and behind a bad network."""

from __future__ import annotations

import os
import secrets
import signal

import pytest
import torch

import keepstep as ks
from keepstep.errors import StepNotFoundError
from keepstep.storage.remote import RemoteStorage
from tests.helpers.agents import agent_of, wait_until
from tests.helpers.buckets import (
    PAGE,
    SMALL_PARTS,
    a_run,
    advance,
    agents_end,
    committed,
    environment,
    same,
    training,
    weights,
)
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.slow

# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_a_run_is_saved_pruned_and_restored(moto_of_small_parts, library):
    """Retention goes by what is committed; a second run resumes, and saves of it go on in order."""
    server, url = moto_of_small_parts, a_run(moto_of_small_parts)
    root = RemoteStorage(url, options=server.options(library=library), library=library, limits=SMALL_PARTS)
    state = training()
    with ks.Checkpointer(root, state, every=ks.Every(steps=1), keep=ks.Keep(last=2)) as saves:
        assert saves.restore().fresh
        for _ in range(4):
            advance(state)
            saves.step(loss=1.0)
    assert committed(root) == [3, 4]
    names = dict(root.list(""))
    assert {name.split("/")[0] for name in names if "/" in name} == {"incarnations", "step-00000003", "step-00000004"}
    other = training(seed=1)
    with ks.Checkpointer(root, other, keep=ks.Keep(last=2)) as saves:
        assert saves.restore().step == 4
        assert same(weights(other), weights(state))
        advance(other)
        saves.step()
        saves.save()
    assert committed(root) == [4, 5]
    prefix = root.url.partition("runs/")[2]
    assert server.client().list_multipart_uploads(Bucket="runs", Prefix=prefix).get("Uploads") is None


@pytest.mark.case(82)
def test_retention_touches_its_own_run_only():
    """On a file system in memory: the step that another run has saved, and this one has resumed from, stays."""
    first = RemoteStorage(f"memory://{secrets.token_hex(4)}/run1")
    state = training()
    with ks.Checkpointer(first, state) as saves:
        saves.restore()
        advance(state)
        saves.step()
        saves.save()
    second = RemoteStorage(f"{first.url.rpartition('/')[0]}/run2")
    ks.load(f"{first.url}/step-00000001", state)
    with ks.Checkpointer(second, state, keep=ks.Keep(last=1)) as saves:
        saves.restore()
        for _ in range(3):
            advance(state)
            saves.step()
            saves.save()
    assert committed(second) == [state.progress.step]
    assert committed(first) == [1]
    ks.load(f"{first.url}/step-00000001", training())


def test_a_damaged_step_is_passed_over(moto):
    """An object that is short, altered or gone: the next older good step is taken, with a warning that says why."""
    root = RemoteStorage(a_run(moto), options=moto.options())
    state = training()
    kept = {}
    with ks.Checkpointer(root, state, every=ks.Every(steps=1)) as saves:
        saves.restore()
        for step in range(1, 5):
            advance(state)
            saves.step()
            kept[step] = weights(state)
    names = {step: next(n for n, _ in root.list(f"step-{step:08}") if "/model/" in n) for step in (2, 3, 4)}
    sizes = dict(root.list(""))
    with root.open(names[3]) as blob:
        data = bytearray(sizes[names[3]])
        blob.read_into(0, memoryview(data))
    data[-100] ^= 1
    root.put(names[3], bytes(data))
    root.delete([names[4]])
    other = training(seed=1)
    with (
        pytest.warns(ks.errors.DamageWarning, match="a damaged step was skipped"),
        ks.Checkpointer(root, other) as saves,
    ):
        report = saves.restore()
    assert report.step == 2
    assert len(report.skipped) == 2
    assert same(weights(other), kept[2])


def test_a_bucket_without_steps_and_one_with_half_a_step(moto):
    """Half a step is no step: what was never committed is told, and swept when a run begins anew beside it."""
    root = RemoteStorage(a_run(moto), options=moto.options())
    root.put("step-00000007/model/rank-00000.0123456789abcdef.safetensors", bytes(5000))
    with pytest.raises(StepNotFoundError, match="step-00000007"), ks.Checkpointer(root, training()) as saves:
        saves.restore()
    with ks.Checkpointer(root, training()) as saves:
        assert saves.restore(allow_fresh=True).fresh
    assert committed(root) == []


def test_single_saves_by_url(moto):
    """``save``, ``async_save``, ``load`` and ``open`` take a URL as they take a path."""
    url = a_run(moto)
    with environment(moto), agents_end(f"{url}/b"):
        state = training()
        advance(state)
        ks.save(f"{url}/a", state)
        ks.async_save(f"{url}/b", state).wait_committed(30)
        for name in "ab":
            other = training(seed=1)
            ks.load(f"{url}/{name}", other)
            assert same(weights(other), weights(state))
        assert torch.equal(ks.open(f"{url}/a")["model/weight"], state["model"].weight)
        with pytest.raises(ks.errors.StepExistsError, match="is already committed"):
            ks.save(f"{url}/a", state)


# --- several processes ------------------------------------------------------------------------------------------------


def use_environment(variables):
    os.environ.update(variables)


def one_rank(rank, url, variables, steps, expected_start):
    """Restores, trains, and leaves; returns what it has."""
    use_environment(variables)
    state = training()
    with ks.Checkpointer(url, state, every=ks.Every(steps=1)) as saves:
        report = saves.restore()
        assert report.step == expected_start
        assert saves._saves.kind == "agent"
        for _ in range(steps):
            advance(state)
            saves.step()
    return {key: value.tolist() for key, value in weights(state).items()}


def test_ranks_save_through_agents_and_another_number_of_them_goes_on(moto, rank_pool):
    """Two ranks, then one, then two; the agent opens the URL by itself, with what its environment says."""
    url = a_run(moto, "ranks")
    with agents_end(url):
        variables = moto.environment()
        first = rank_pool(2)(one_rank, url, variables, 2, 0)
        assert first[0] == first[1]
        assert agent_of(url).committed == 2
        second = rank_pool(1)(one_rank, url, variables, 1, 2)
        third = rank_pool(2)(one_rank, url, variables, 0, 3)
        assert third == [second[0]] * 2


def killed_in_a_save(rank, url, variables):
    """Stages a save, and is gone."""
    use_environment(variables)
    state = training()
    saves = ks.Checkpointer(url, state)
    saves.restore()
    advance(state, 3)
    for _ in range(3):
        saves.step()
    saves.save().wait_staged(30)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_is_killed_and_the_agent_commits(moto):
    url = a_run(moto, "killed")
    with agents_end(url):
        with pytest.raises(RankError, match=r"SIGKILL|-9"):
            run_ranks(1, killed_in_a_save, url, moto.environment())
        root = RemoteStorage(url, options=moto.options())
        wait_until(lambda: committed(root) == [3] and agent_of(url).committed == 1)
        state = training(seed=1)
        with ks.Checkpointer(root, state) as saves:
            assert saves.restore().step == 3
        expected = training()
        advance(expected, 3)
        assert same(weights(state), weights(expected))


def test_an_attempt_that_was_killed_is_swept(moto_of_small_parts):
    """A process that is gone in the middle of its files leaves no step, and no object that stays for ever."""
    server = moto_of_small_parts
    root = RemoteStorage(a_run(server, "swept"), options=server.options(), limits=SMALL_PARTS)
    state = training()
    with ks.Checkpointer(root, state) as saves:
        saves.restore()
        advance(state)
        saves.step()
        saves.save()
    for folder in ("model", "optimizer"):
        root.put(f"step-00000002/{folder}/rank-00000.0123456789abcdef.safetensors", bytes(PAGE))
    with ks.Checkpointer(root, training(seed=1)) as saves:
        assert saves.restore().step == 1
    assert committed(root) == [1]
