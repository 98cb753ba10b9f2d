from itertools import islice

import pytest
from torch.utils.data import DataLoader

import keepstep as ks
from keepstep.data import ResumableBatchSampler, ResumableSampler
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
    return flat(list(sampler))
