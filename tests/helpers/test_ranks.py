from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import RankError, RankPool, run_ranks

# --- what the ranks run ---------------------------------------------------------------------------------------------


def total(rank, amount):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(rank + amount)])
    dist.all_reduce(tensor)
    return rank, dist.get_world_size(), tensor.item()


def identity(rank):
    return os.getpid()


def fsdp_losses(rank):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(5, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fail_on(rank, failing):
    if rank == failing:
        raise ValueError(f"rank {rank} does not like this")
    return rank


def fail_while_others_wait(rank, failing):
    import torch.distributed as dist

    if rank == failing:
        raise ValueError("gone before the barrier")
    time.sleep(0 if rank == failing else 0.2)
    dist.barrier()


def die_on(rank, dying):
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_on(rank, leaving):
    if rank == leaving:
        os._exit(7)
    time.sleep(60)


def hang_on(rank, hanging):
    if rank == hanging:
        wait_for_ever()
    return rank


def wait_for_ever():
    threading.Event().wait()


def unpicklable(rank):
    return lambda: rank


def leave_a_mess(rank, folder):
    import random

    os.chdir(folder)
    sys.path.append("/nowhere")
    return random.random()


def look_around(rank):
    import random

    return str(Path.cwd()), "/nowhere" in sys.path, random.random()


def end_the_group(rank):
    import torch.distributed as dist

    dist.destroy_process_group()
    return rank


def count_threads(rank):
    import torch

    return torch.get_num_threads()


# --- one pool for the tests that break nothing ----------------------------------------------------------------------


def test_results_come_in_rank_order(rank_pool):
    assert rank_pool(3)(total, 1) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_one_rank_is_a_group_too(rank_pool):
    assert rank_pool(1)(total, 5) == [(0, 1, 5.0)]


def test_processes_are_kept_between_calls_of_different_size(rank_pool):
    four = rank_pool(4)(identity)
    assert len(set(four)) == 4
    assert os.getpid() not in four
    assert rank_pool(2)(identity) == four[:2]
    assert rank_pool(4)(identity) == four


def test_a_warm_call_takes_well_under_a_second(rank_pool):
    rank_pool(4)(total, 0)
    began = time.perf_counter()
    for _ in range(5):
        rank_pool(4)(total, 0)
    assert (time.perf_counter() - began) / 5 < 1.0


def test_sharded_training_works_on_changing_worlds(rank_pool):
    alone = rank_pool(1)(fsdp_losses)[0]
    for world in (2, 3, 2):
        for losses in rank_pool(world)(fsdp_losses):
            assert losses == pytest.approx(alone, rel=1e-6)


def test_each_call_starts_with_the_same_seeds_folder_and_path(rank_pool, tmp_path):
    first = rank_pool(2)(leave_a_mess, str(tmp_path))
    for cwd, dirty, drawn in rank_pool(2)(look_around):
        assert cwd != str(tmp_path)
        assert not dirty
        assert drawn == first[0]


def test_a_function_may_end_the_group_itself(rank_pool):
    assert rank_pool(2)(end_the_group) == [0, 1]
    assert rank_pool(2)(end_the_group) == [0, 1]


def test_each_rank_uses_one_thread(rank_pool):
    assert rank_pool(2)(count_threads) == [1, 1]


# --- pools that are broken on purpose -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.ranks
def test_a_failing_rank_is_named_with_its_traceback(pool):
    with pytest.raises(RankError, match=r"(?s)fail_on failed on 1 of 2 ranks.*rank 1: Traceback.*in fail_on") as caught:
        pool(2)(fail_on, 1)
    assert list(caught.value.failures) == [1]
    assert "ValueError: rank 1 does not like this" in caught.value.failures[1]


@pytest.mark.ranks
def test_ranks_left_waiting_are_not_waited_for(pool):
    began = time.perf_counter()
    with pytest.raises(RankError) as caught:
        pool(2)(fail_while_others_wait, 0)
    assert "gone before the barrier" in caught.value.failures[0]
    assert time.perf_counter() - began < 25
    assert pool(2)(total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.mark.ranks
def test_a_killed_rank_is_reported_and_replaced(pool):
    with pytest.raises(RankError) as caught:
        pool(2)(die_on, 1, timeout_s=60)
    assert "died of SIGKILL" in caught.value.failures[1]
    assert "did not finish after another rank failed" in caught.value.failures[0]
    assert pool(2)(total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.mark.ranks
def test_a_rank_that_leaves_is_reported_with_its_status(pool):
    with pytest.raises(RankError, match="rank 0: died with exit status 7"):
        pool(2)(leave_on, 0)


@pytest.mark.ranks
def test_a_hanging_rank_shows_its_stacks_and_is_replaced(pool, capfd):
    began = time.perf_counter()
    with pytest.raises(RankError) as caught:
        pool(2)(hang_on, 1, timeout_s=2)
    assert time.perf_counter() - began < 25
    assert list(caught.value.failures) == [1]
    assert "did not return within 2 s" in caught.value.failures[1]
    assert "in wait_for_ever" in caught.value.failures[1]
    assert "in wait_for_ever" in capfd.readouterr().err
    assert pool(2)(total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.mark.ranks
def test_a_result_that_cannot_travel_is_an_error(pool):
    with pytest.raises(RankError, match="pickle"):
        pool(2)(unpicklable)


@pytest.mark.ranks
def test_closing_twice_leaves_no_process_and_no_file():
    pool = RankPool(1)
    (pid,) = pool(1)(identity)
    pool.close()
    pool.close()
    assert not pool.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.ranks
def test_more_ranks_than_the_pool_keeps_are_started_for_the_call():
    with RankPool(1) as pool:
        assert [world for _, world, _ in pool(2)(total, 0)] == [2, 2]
        assert pool.workers == []


@pytest.mark.ranks
def test_run_ranks_starts_and_ends_its_own_processes():
    pids = run_ranks(2, identity)
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
