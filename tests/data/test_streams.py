from collections import Counter
from itertools import islice

import pytest
import torch

import keepstep as ks
from keepstep.data import PackingCollator, StreamReader
from keepstep.errors import MismatchError, PositionWarning, UsageError
from tests.data.loops import Documents, Forgetful, Shards, consume, flat

LENGTHS = (5, 9, 3, 7, 11, 2, 6, 8)
MANY_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
BUFFERS = pytest.mark.parametrize("buffer", [0, 7], ids=["as it lies", "shuffled"])


def reader(source=None, **options):
    options = {"streams": 4, "batch_size": 3, "repeat": False} | options
    return StreamReader(source or Shards(*LENGTHS), **options)


def epochs(found, count=1):
    return [[batch.tolist() for batch in found] for _ in range(count)]


@BUFFERS
def test_every_item_of_an_epoch_comes_once_and_in_another_order_each_time(buffer):
    one = reader(shuffle_buffer=buffer)
    first, second = epochs(one, 2)
    assert sorted(flat(first)) == sorted(flat(second)) == Shards(*LENGTHS).everything()
    assert first != second
    assert one.epoch == 2
    assert one.take_ids() is None


@BUFFERS
@pytest.mark.case(135)
def test_a_resume_behind_any_batch_goes_on_exactly(buffer):
    first, second = epochs(reader(shuffle_buffer=buffer), 2)
    for behind in range(1, len(first) + 1):
        left = reader(shuffle_buffer=buffer)
        assert len(list(islice(left, behind))) == behind
        state = left.state_dict()
        again = reader(shuffle_buffer=buffer)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert again.epoch == (behind == len(first))
        assert epochs(again) == [first[behind:] or second]


@pytest.mark.case(138)
@pytest.mark.case(140)
def test_two_resumes_in_one_epoch_and_whole_ones_after(tmp_path):
    def made():
        return reader(shuffle_buffer=4)

    first, second, third = epochs(made(), 3)
    seen = []
    for batches in (7, 5, 3):
        one = made()
        seen += consume(tmp_path, one, batches, component=one.per_rank())
    assert seen == first[:15]
    one = made()
    with ks.Checkpointer(tmp_path, ks.TrainState(data=one.per_rank()), background="off") as ckpt:
        ckpt.restore()
        assert epochs(one, 3) == [first[15:], second, third]


@pytest.mark.slow
@pytest.mark.case(137)
@pytest.mark.parametrize("background", ["off", "thread"])
def test_batches_that_were_fetched_ahead_come_again(tmp_path, background):
    def made():
        return reader(streams=2, num_workers=2, prefetch_factor=4, shuffle_buffer=5, repeat=True)

    whole = [batch.tolist() for batch in islice(made(), 20)]
    first = made()
    with ks.Checkpointer(tmp_path, ks.TrainState(data=first.per_rank()), background=background) as ckpt:
        for number, batch in enumerate(first, 1):
            assert batch.tolist() == whole[number - 1]
            ckpt.step()
            if number == 7:
                ckpt.save()
            if number == 10:  # three more, perhaps before that save has ended
                break
    one = made()
    assert consume(tmp_path, one, 5, component=one.per_rank()) == whole[7:12]


@pytest.mark.slow
@pytest.mark.case(143)
@MANY_WORKERS
@pytest.mark.parametrize("saved", [0, 1, 2, 4])
def test_any_number_of_workers_goes_on_exactly(tmp_path, saved):
    first, second = epochs(reader(shuffle_buffer=7), 2)
    for now in (0, 1, 2, 4):
        one, two = (reader(shuffle_buffer=7, num_workers=workers) for workers in (saved, now))
        assert consume(tmp_path / str(now), one, 6, component=one.per_rank()) == first[:6]
        assert consume(tmp_path / str(now), two, 17, component=two.per_rank()) == first[6:] + second[:5]


@pytest.mark.slow
@MANY_WORKERS
def test_workers_that_do_not_divide_the_streams_and_persistent_ones():
    first, second = epochs(reader(), 2)
    assert epochs(reader(num_workers=3), 2) == [first, second]
    kept = reader(num_workers=2, persistent_workers=True, prefetch_factor=3)
    assert [batch.tolist() for batch in islice(kept, 4)] == first[:4]
    assert epochs(kept, 2) == [first[4:], second]


def test_streams_that_repeat_read_every_shard_once_in_each_epoch():
    source = Shards(*LENGTHS)
    one = reader(source, repeat=True, batch_size=1, shuffle_buffer=3)
    counts = Counter(flat([batch.tolist() for batch in islice(one, 51 * 12)]))
    # Streams go at their own pace, so one may be some epochs ahead; none of them leaves anything out.
    assert set(counts) == set(source.everything())
    assert min(counts.values()) >= 6
    assert one.epoch >= 6


@pytest.mark.case(141)
@pytest.mark.case(144)
def test_streams_go_with_their_places_to_other_ranks(rank_pool, tmp_path):
    """One epoch over 2, 1, 3 and 2 ranks: what is in buffers and half-read shards comes once, on whichever rank."""
    seen = []
    for ranks, batches, workers in ((2, 3, 0), (1, 2, 0), (3, 1, 2), (2, 99, 0)):
        parts = rank_pool(ranks)(one_epoch, tmp_path, batches, workers)
        seen += flat(flat(parts))
    assert sorted(seen) == Shards(*LENGTHS).everything()


def one_epoch(rank, root, batches, workers):
    fork = {"multiprocessing_context": "fork"} if workers else {}
    one = reader(shuffle_buffer=5, num_workers=workers, **fork)
    with ks.Checkpointer(root, ks.TrainState(data=one.per_rank()), background="off") as ckpt:
        ckpt.restore()
        # Without boundaries: ranks come to their ends at different times, and meet in the save.
        seen = [batch.tolist() for batch in islice(one, batches)]
        ckpt.progress.step += 1
        ckpt.save()
    return seen


@pytest.mark.case(146)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_left_over_tokens_and_the_place_in_the_stream_come_back_together(tmp_path, workers):
    def made():
        pack = PackingCollator(10, separator=-1)
        return reader(Documents(*LENGTHS), streams=2, pack=pack, shuffle_buffer=3, repeat=True, num_workers=workers)

    whole = [batch.tolist() for batch in islice(made(), 16)]
    assert all(len(block) == 10 for batch in whole for block in batch)
    seen = []
    for batches in (5, 4, 7):
        one = made()
        seen += consume(tmp_path, one, batches, component=one.per_rank())
        left = one.state_dict()["places"][0]["snapshot"]
        assert 0 < left["pack"]["left"].numel() < 10 or left["buffer"]["items"]
    assert seen == whole


def test_tokens_that_fill_no_block_wait_for_the_next_epoch():
    one = reader(Documents(*LENGTHS), streams=1, batch_size=2, pack=PackingCollator(16))
    tokens = sum(1 + item % 7 for item in Shards(*LENGTHS).everything())
    first, second = epochs(one, 2)
    assert len(flat(first)) == tokens // 16
    assert len(flat(first + second)) == 2 * tokens // 16
    assert one.epoch == 2


@pytest.mark.case(146)
def test_a_source_without_state_is_named_when_it_is_saved(tmp_path):
    (whole,) = epochs(reader())
    one = reader(Forgetful(*LENGTHS))
    list(islice(one, 6))
    with pytest.warns(PositionWarning, match=r"Forgetful.open gives have no state_dict.*reads \d+ items"):
        ks.save(tmp_path, {"data": one.per_rank()})
    again = reader(Forgetful(*LENGTHS))
    ks.load(tmp_path, into={"data": again.per_rank()})
    assert epochs(again) == [whole[6:]]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(UsageError) as caught:
        reader(streams=9, batch_size=0, shuffle_buffer=-1)
    for text in ("streams=9, and there are 8 shards", "batch_size=0", "shuffle_buffer=-1"):
        assert text in str(caught.value)
    with pytest.raises(UsageError, match="4 streams leave some of 5 ranks without one"):
        reader(rank=0, world=5)
    with pytest.raises(UsageError, match="drop_last="):
        reader(drop_last=True)
    with pytest.raises(UsageError, match="no item in its shards"):
        next(iter(reader(Shards(0, 0, 0, 0), repeat=True)))


def test_other_streams_are_refused_with_everything_that_differs():
    state = reader().state_dict()
    with pytest.raises(MismatchError) as caught:
        reader(Shards(1, 2, 3, 4, 5), streams=5, seed=1, shuffle_buffer=2, pack=PackingCollator(8)).load_state_dict(
            state
        )
    named = [line.split(":")[0] for line in caught.value.mismatches]
    assert named == ["streams", "shards", "seed", "shuffle_buffer", "block", "streams of this rank"]
    with pytest.raises(MismatchError, match=r"data=reader\.per_rank\(\)"):
        reader(rank=0, world=2).load_state_dict(state)


def test_a_state_that_comes_while_reading_ends_the_reading():
    one = reader()
    batches = iter(one)
    next(batches)
    one.load_state_dict(one.state_dict())
    with pytest.raises(UsageError, match="this iteration is over"):
        next(batches)


def test_a_rank_that_saved_nothing_is_a_stream_that_is_missing():
    half = reader(rank=0, world=2)
    with pytest.raises(MismatchError, match="stream 1"):
        reader().redeal([({"rank": 0, "world": 2}, half.state_dict())], {"rank": 0, "world": 1})


def test_a_rank_sits_out_what_is_left_of_an_epoch_for_others():
    """The streams that it is given have ended, those of other ranks have not: it must not begin the next epoch."""
    one = reader(Shards(3, 3, 9, 9), streams=4, shuffle=False)
    list(islice(one, 6))
    saved = [({"rank": 0, "world": 1}, one.state_dict())]
    left = []
    for rank in range(2):
        again = StreamReader(
            Shards(3, 3, 9, 9), streams=4, batch_size=3, shuffle=False, repeat=False, rank=rank, world=2
        )
        again.load_state_dict(again.redeal(saved, {"rank": rank, "world": 2}))
        assert again.epoch == 0
        left.append(epochs(again, 2))
    assert [first for first, _ in left] == [[[2006, 2007, 2008]], [[3006, 3007, 3008]]]
    assert sorted(flat(left[0][1] + left[1][1])) == Shards(3, 3, 9, 9).everything()
    for rank in range(4):
        again = StreamReader(
            Shards(3, 3, 9, 9), streams=4, batch_size=3, shuffle=False, repeat=False, rank=rank, world=4
        )
        again.load_state_dict(again.redeal(saved, {"rank": rank, "world": 4}))
        assert again.epoch == 0
        assert [len(epoch) for epoch in epochs(again, 2)] == [[0, 1], [0, 1], [1, 3], [1, 3]][rank]


def test_random_numbers_of_sources_and_collate_functions_are_the_same_in_workers():
    def noisy(items):
        return torch.tensor(items) + torch.rand(len(items))

    torch.manual_seed(1)
    (first,) = epochs(reader(collate_fn=noisy))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    one = reader(collate_fn=noisy)
    list(islice(one, 5))
    again = reader(collate_fn=noisy)
    again.load_state_dict(one.state_dict())
    assert epochs(again) == [first[5:]]
    assert torch.equal(before, torch.get_rng_state())
