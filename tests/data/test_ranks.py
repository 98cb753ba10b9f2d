"""Data over real ranks: the samples of all of them together, through changes of their number."""

from itertools import islice

import pytest
from torch.distributed.device_mesh import init_device_mesh

import keepstep as ks
from keepstep.data import ResumableBatchSampler, ResumableLoader, StreamReader
from tests.data.loops import Noisy, Numbers, Shards, flat


def consumed(rank, root, batches, options):
    """This rank's part of so many batches, after which the job ends; and what a trace would say of them."""
    loader = ResumableLoader(Noisy(options.pop("samples")), seed=3, **options)
    seen, traced = [], []
    with ks.Checkpointer(root, ks.TrainState(data=loader), background="off") as ckpt:
        ckpt.restore()
        for batch in loader:
            seen.append(batch.tolist())
            traced.append(loader.take_ids())
            ckpt.step(samples=loader.batch_samples)
            if len(seen) == batches:
                break
        ckpt.save()
        return seen, traced, loader.epoch, ckpt.progress.samples


def together(parts):
    """The global batches that the ranks of one job have consumed."""
    return [flat(shares) for shares in zip(*(seen for seen, *_ in parts), strict=True)]


@pytest.mark.case(141)
@pytest.mark.case(144)
def test_one_epoch_over_two_one_three_and_two_ranks(rank_pool, tmp_path):
    """Every sample once, in the global batches of a run that one rank did alone; the random numbers of samples too."""
    options = {"samples": 53, "global_batch_size": 6}
    whole = [batch.tolist() for batch in ResumableLoader(Noisy(53), global_batch_size=6, seed=3)]
    seen = []
    for ranks, batches, workers in ((2, 3, 0), (1, 2, 0), (3, 2, 2), (2, 9, 0)):
        fork = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        parts = rank_pool(ranks)(consumed, tmp_path, batches, options | fork)
        for part, traced, *_ in parts:
            assert [[int(sample[0]) for sample in batch] for batch in part] == traced
        seen += together(parts)
    assert seen == whole
    assert sorted(int(sample[0]) for sample in flat(seen)) == list(range(53))
    _, _, epoch, samples = parts[0]
    assert (epoch, samples) == (1, 53)


@pytest.mark.case(144)
def test_four_ranks_and_twelve_samples(rank_pool, tmp_path):
    options = {"samples": 12, "batch_size": 1}
    first = rank_pool(4)(consumed, tmp_path, 1, options)
    # No rank went back to the beginning, and the remaining ones did not divide what was left anew.
    second = rank_pool(4)(consumed, tmp_path, 9, options)
    assert [len(seen) for seen, *_ in second] == [2, 2, 2, 2]
    assert sorted(int(s[0]) for s in flat(together(first) + together(second))) == list(range(12))


@pytest.mark.case(141)
def test_four_ranks_become_two_and_eight(rank_pool, tmp_path):
    """The position of a sampler is that of all ranks, so none of theirs can be dropped."""
    options = {"samples": 96, "batch_size": 2}
    seen = together(rank_pool(4)(consumed, tmp_path, 4, options))
    seen += together(rank_pool(2)(consumed, tmp_path, 4, options))
    left = []
    for rank in range(8):
        sampler = ResumableBatchSampler(Numbers(96), batch_size=2, seed=3, rank=rank, world=8)
        ks.load(tmp_path / "step-00000008", into=ks.TrainState(data=sampler), only=["data"])
        left.append(list(sampler))
    assert [len(batches) for batches in left] == [3] * 8
    ids = [int(sample[0]) for sample in flat(seen)] + flat(flat(left))
    assert sorted(ids) == list(range(96))


def test_ranks_of_one_data_parallel_place_read_the_same(rank_pool, tmp_path):
    """Two places of two tensor-parallel ranks each, then one place of two: both ranks of a place read alike."""
    first = rank_pool(4)(on_a_mesh, tmp_path, 2, 3)
    assert first[0] == first[1]
    assert first[2] == first[3]
    second = rank_pool(2)(on_a_mesh, tmp_path, 1, 99)
    assert second[0] == second[1]
    for kind, everything in enumerate((list(range(40)), Shards(9, 7, 5, 8).everything())):
        seen = [flat(part[kind]) for part in (first[0], first[2], second[0])]
        assert sorted(flat(seen)) == everything


def on_a_mesh(rank, root, places, batches):
    mesh = init_device_mesh("cpu", (places, 2), mesh_dim_names=("dp", "tp"))
    place = {"rank": mesh.get_local_rank("dp"), "world": places}
    loader = ResumableLoader(Numbers(40), global_batch_size=4, **place)
    reader = StreamReader(Shards(9, 7, 5, 8), streams=4, batch_size=2, shuffle_buffer=3, repeat=False, **place)
    state = {"data": loader, "rows": reader.per_rank(mesh=mesh, dims="dp")}
    if (root / "step").exists():
        ks.load(root / "step", into=state)
    seen = [[batch.tolist() for batch in islice(source, batches)] for source in (loader, reader)]
    ks.save(root / "step", state, overwrite=True)
    return seen


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
def test_tails_over_ranks_end_everywhere_at_once(tail):
    """Shares of explicit ranks; an epoch of 29 samples from 3 ranks to 2 in its middle."""
    shares, later = [], []
    for rank in range(3):
        sampler = ResumableBatchSampler(Numbers(29), batch_size=3, tail=tail, rank=rank, world=3)
        batches = iter(sampler)
        shares += next(batches) + next(batches)
        sampler.consumed(18)
    for rank in range(2):
        again = ResumableBatchSampler(Numbers(29), batch_size=3, tail=tail, rank=rank, world=2)
        again.load_state_dict(sampler.state_dict())
        later.append(list(again))
    assert len(later[0]) == len(later[1])
    ids = shares + flat(flat(later))
    assert len(ids) == {"short": 29, "drop": 24, "pad": 30}[tail]
    assert len(set(ids)) == {"short": 29, "drop": 24, "pad": 29}[tail]
