from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import keepstep as ks
from keepstep.data import ResumableBatchSampler, ResumableSampler
from keepstep.data.order import Cut
from keepstep.errors import UsageError
from tests.data.loops import Numbers, flat

WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]


def train(root, loader, sampler, batches, *, samples):
    """So many batches from where the run stands; every boundary is told the samples of all ranks."""
    seen = []
    with ks.Checkpointer(root, ks.TrainState(data=sampler), background="off") as ckpt:
        ckpt.restore()
        while len(seen) < batches:
            for batch in islice(loader, batches - len(seen)):
                seen.append(batch.tolist())
                ckpt.step(samples=samples)
        ckpt.save()
    return seen


@pytest.mark.case(137)
@pytest.mark.case(140)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_plain_loader_goes_on_behind_what_was_consumed(tmp_path, workers):
    ahead = {"num_workers": workers, "prefetch_factor": 4} if workers else {}

    def made():
        sampler = ResumableBatchSampler(Numbers(103), batch_size=4, seed=2)
        return DataLoader(Numbers(103), batch_sampler=sampler, **ahead), sampler

    loader, sampler = made()
    whole = [batch.tolist() for batch in loader]
    assert len(whole) == len(sampler) == 26
    assert [len(batch) for batch in whole[-2:]] == [4, 3]
    assert train(tmp_path, *made(), 11, samples=4) == whole[:11]
    assert train(tmp_path, *made(), 7, samples=4) == whole[11:18]
    loader, sampler = made()
    assert train(tmp_path, loader, sampler, 8, samples=4) == whole[18:]  # the last one told as if it were whole
    assert sampler.epoch == 1
    assert sampler.state_dict()["consumed"] == 0


@pytest.mark.case(135)
@pytest.mark.parametrize("workers", WORKERS)
def test_the_next_epoch_is_another_one_and_whole(tmp_path, workers):
    def made():
        sampler = ResumableSampler(Numbers(100))
        return DataLoader(Numbers(100), batch_size=8, sampler=sampler, num_workers=workers), sampler

    sampler = made()[1]
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert len(sampler) == 100
    first = train(tmp_path, *made(), 12, samples=8)  # 96 of 100
    loader, sampler = made()
    assert first + train(tmp_path, loader, sampler, 1, samples=4) == [
        epochs[0][start : start + 8] for start in range(0, 100, 8)
    ]
    assert sampler.state_dict() == {"epoch": 1, "consumed": 0, "samples": 100, "seed": 0, "shuffle": True}
    assert flat(train(tmp_path, *made(), 3, samples=8)) == epochs[1][:24]


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_every_rank_of_a_sampler_has_as_many(tail):
    shares = [list(ResumableSampler(Numbers(11), tail=tail, rank=rank, world=4)) for rank in range(4)]
    assert {len(share) for share in shares} == {3 if tail == "pad" else 2}
    assert len(set(flat(shares))) == (11 if tail == "pad" else 8)
    (one,) = [list(ResumableSampler(Numbers(11), rank=0, world=1))]
    assert [share[0] for share in shares] == one[:4]
    with pytest.raises(UsageError, match="ResumableBatchSampler"):
        ResumableSampler(Numbers(11), tail="short")


def test_accumulated_batches_are_told_together_or_one_by_one(tmp_path):
    sampler = ResumableBatchSampler(Numbers(40), global_batch_size=4, rank=1, world=2)
    with ks.Checkpointer(tmp_path, ks.TrainState(data=sampler), background="off") as ckpt:
        batches = list(islice(sampler, 6))
        ckpt.step(samples=8)
        assert sampler.take_ids() == flat(batches[:2])
        ckpt.micro_step(samples=4)
        ckpt.micro_step(samples=4)
        ckpt.step()
        assert sampler.take_ids() == flat(batches[2:4])
        assert sampler.state_dict()["consumed"] == 16


def test_a_boundary_that_is_told_nothing_says_what_to_do(tmp_path):
    sampler = ResumableBatchSampler(Numbers(40), batch_size=4)
    with ks.Checkpointer(tmp_path, ks.TrainState(data=sampler), background="off") as ckpt:
        ckpt.step()  # nothing was handed out either
        next(iter(sampler))
        with pytest.raises(UsageError, match=r"ckpt\.step\(samples=n\)"):
            ckpt.step()
    with pytest.raises(UsageError, match=r"sampler\.consumed\(n\)"):
        ks.save(tmp_path / "by hand", ks.TrainState(data=sampler))
    sampler.consumed(4)
    ks.save(tmp_path / "by hand", ks.TrainState(data=sampler))
    again = ResumableBatchSampler(Numbers(40), batch_size=4)
    ks.load(tmp_path / "by hand", into=ks.TrainState(data=again))
    assert again.state_dict()["consumed"] == 4


def test_numbers_that_are_not_those_of_batches_are_refused():
    sampler = ResumableBatchSampler(Numbers(40), batch_size=4, rank=0, world=3)
    list(islice(sampler, 2))
    for samples in (4, 20, 36, 1):
        with pytest.raises(UsageError, match=f"samples={samples} is not the size of whole batches"):
            sampler.consumed(samples)
    with pytest.raises(UsageError, match="negative"):
        sampler.consumed(-1)
    sampler.consumed(24)
    assert sampler.state_dict()["consumed"] == 24
    assert sampler.global_batch_size == 12


def test_what_was_handed_out_and_not_consumed_comes_again():
    sampler = ResumableBatchSampler(Numbers(40), batch_size=4)
    first = list(islice(sampler, 5))
    sampler.consumed(8)
    assert list(islice(sampler, 2)) == first[2:4]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), st.integers(4, 90), st.sampled_from(["short", "drop", "pad"]))
def test_any_worlds_prefetching_and_accumulation_see_an_epoch_once(data, samples, tail):
    """Jobs of other sizes, each fetching ahead and told what it has consumed, until the epoch is over."""
    state, seen, told = None, [], 0
    while state is None or state["epoch"] == 0:
        world = data.draw(st.integers(1, 4), label="ranks")
        size = data.draw(st.integers(world, max(world, min(samples, 20))), label="global batch")
        job = [
            ResumableBatchSampler(Numbers(samples), global_batch_size=size, tail=tail, rank=rank, world=world)
            for rank in range(world)
        ]
        for sampler in job:
            if state is not None:
                sampler.load_state_dict(state)
        ahead = [iter(sampler) for sampler in job]
        steps = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4), label="microbatches of each step")
        for micro in steps:
            before = job[0].state_dict()
            if before["epoch"] > 0:
                break
            fetched = [list(islice(one, micro + data.draw(st.integers(0, 3), label="ahead"))) for one in ahead]
            assert all(fetched)
            sizes = [batch.size for batch in Cut(samples, size, world, tail).batches(before["consumed"])][:micro]
            for sampler in job:
                sampler.consumed(sum(sizes))
                seen += sampler.take_ids()
            told += sum(sizes)
            # What was fetched beyond comes again, as after a loop that is left early.
            ahead = [iter(sampler) for sampler in job]
        assert len({str(sampler.state_dict()) for sampler in job}) == 1
        state = job[0].state_dict()
    found = Counter(seen)
    assert told == len(seen)
    if tail == "drop":
        assert max(found.values(), default=1) == 1
        assert samples - len(seen) < 20
    else:
        assert set(found) == set(range(samples))
        assert len(seen) - samples < (4 if tail == "short" else 20)


def test_a_sampler_that_is_older_than_the_process_group(rank_pool):
    """Made before the group, it must not give every rank all the data."""
    shares = rank_pool(2)(older_sampler)
    assert sorted(flat(shares)) == list(range(10))


def older_sampler(rank):
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    sampler = ResumableBatchSampler(Numbers(10), batch_size=1)
    dist.init_process_group("gloo", store=dist.PrefixStore("later", store), rank=rank, world_size=2)
    found = flat(list(sampler))
    dist.barrier()  # Who leaves while the other still connects takes the connection away.
    return found
