from itertools import islice

import pytest
import torch
from torch.utils.data import IterableDataset, Subset, default_collate

import keepstep as ks
from keepstep import data
from keepstep.errors import MismatchError, UsageError
from tests.data.loops import Noisy, Numbers, Together, consume, flat
from tests.helpers.same import rng_state

WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]
ANY_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Rows(IterableDataset):
    def __iter__(self):
        yield from range(3)


def epochs(loader, count: int = 1) -> list[list[list[float]]]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def test_the_names_are_listed_and_torch_comes_with_them():
    assert ks.data is data
    assert data.__all__ == sorted(data.__all__)
    assert all(getattr(data, name).__doc__ for name in data.__all__)


@pytest.mark.case(135)
@pytest.mark.parametrize("workers", WORKERS)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(tmp_path, workers):
    def loader():
        return data.ResumableLoader(Numbers(100), batch_size=8, seed=5, num_workers=workers)

    first, second, third = epochs(loader(), 3)
    assert consume(tmp_path, loader(), len(first)) == first

    again = loader()
    with ks.Checkpointer(tmp_path, ks.TrainState(data=again), background="off") as ckpt:
        ckpt.restore()
        saved = {"epoch": 1, "consumed": 0, "samples": 100, "seed": 5, "shuffle": True}
        assert again.state_dict() == saved
        assert again.epoch == 1
        assert [batch.tolist() for batch in again] == second
        assert [batch.tolist() for batch in again] == third
    assert sorted(flat(second)) == list(range(100))
    assert first != second


@pytest.mark.case(137)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("background", ["off", "thread"])
def test_what_was_fetched_ahead_is_not_consumed(tmp_path, workers, background):
    ahead = {"num_workers": workers, "prefetch_factor": 4} if workers else {}

    def loader():
        return data.ResumableLoader(Numbers(200), batch_size=4, **ahead)

    (whole,) = epochs(loader())
    first = loader()
    with ks.Checkpointer(tmp_path, ks.TrainState(data=first), background=background) as ckpt:
        for number, batch in enumerate(first, 1):
            assert batch.tolist() == whole[number - 1]
            ckpt.step()
            if number == 7:
                ckpt.save()
            if number == 10:  # three more, perhaps before that save has ended
                break
    assert consume(tmp_path, loader(), 5) == whole[7:12]


@pytest.mark.case(138)
@pytest.mark.parametrize("workers", WORKERS)
def test_epochs_after_a_resume_are_whole(tmp_path, workers):
    def loader():
        return data.ResumableLoader(Numbers(128), batch_size=8, num_workers=workers)

    first, second, third = epochs(loader(), 3)
    consume(tmp_path, loader(), 13)
    again = loader()
    with ks.Checkpointer(tmp_path, ks.TrainState(data=again), background="off") as ckpt:
        ckpt.restore()
        assert epochs(again, 3) == [first[13:], second, third]
    assert [len(epoch) for epoch in (first, second, third)] == [16, 16, 16]
    assert len(again) == 16


@pytest.mark.case(140)
@pytest.mark.parametrize("workers", WORKERS)
def test_two_resumes_in_one_epoch(tmp_path, workers):
    def loader():
        return data.ResumableLoader(Numbers(200), batch_size=4, num_workers=workers)

    (whole,) = epochs(loader())
    assert consume(tmp_path, loader(), 30) == whole[:30]
    assert consume(tmp_path, loader(), 10) == whole[30:40]
    assert consume(tmp_path, loader(), 10) == whole[40:50]


@pytest.mark.slow
@pytest.mark.case(143)
@ANY_WORKERS
@pytest.mark.parametrize("saved", [0, 1, 2, 4])
def test_any_number_of_workers_goes_on_exactly(tmp_path, saved):
    def loader(workers):
        return data.ResumableLoader(Noisy(60), batch_size=3, num_workers=workers)

    first, second = epochs(loader(0), 2)
    for now in (0, 1, 2, 4):
        root = tmp_path / str(now)
        assert consume(root, loader(saved), 6) == first[:6]
        assert consume(root, loader(now), 18) == first[6:] + second[:4]


@pytest.mark.parametrize("dataset", [Noisy(23), Together(23)], ids=["one by one", "together"])
@pytest.mark.parametrize("workers", WORKERS)
def test_random_numbers_of_samples_depend_on_samples_alone(dataset, workers):
    def collate(samples):
        return torch.cat([default_collate(samples), torch.rand(len(samples), 1)], dim=1)

    def loader(workers, **more):
        return data.ResumableLoader(dataset, batch_size=4, collate_fn=collate, num_workers=workers, **more)

    before = rng_state()
    first, second = epochs(loader(0), 2)
    assert rng_state() == before
    assert epochs(loader(workers), 2) == [first, second]

    resumed = loader(workers)
    torch.rand(7)
    resumed.load_state_dict({"epoch": 0, "consumed": 8, "samples": 23, "seed": 0, "shuffle": True})
    before = rng_state()
    assert epochs(resumed, 2) == [first[2:], second]
    assert rng_state() == before
    # Another epoch and another seed give other random numbers.
    noise = {tuple(sample[1:]) for batch in first + second for sample in batch}
    other = {tuple(sample[1:]) for batch in epochs(loader(0, seed=1))[0] for sample in batch}
    assert len(noise) == 46
    assert not noise & other


def test_samples_keep_their_random_numbers_in_batches_of_another_size():
    def noise(**size):
        (epoch,) = epochs(data.ResumableLoader(Noisy(20), **size))
        return {sample[0]: sample[1:] for batch in epoch for sample in batch}

    assert noise(batch_size=3) == noise(batch_size=7) == noise(global_batch_size=20)


def test_a_part_of_a_data_set_is_seeded_like_any_other():
    part = Subset(Noisy(50), range(10, 30))
    one, other = (epochs(data.ResumableLoader(part, batch_size=size))[0] for size in (3, 7))
    assert sorted(flat(one)) == sorted(flat(other))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_training_with_dropout_goes_on_bit_for_bit(tmp_path, workers):
    """The random numbers of training are those of the run that did not stop, although a loader began anew."""

    def train(root, steps):
        torch.manual_seed(0)
        loader = data.ResumableLoader(Noisy(30), batch_size=4, num_workers=workers)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(model.parameters())
        state = ks.TrainState(model=model, optimizer=optimizer, data=loader)
        losses = []
        with ks.Checkpointer(root, state, background="off") as ckpt:
            ckpt.restore()
            while ckpt.progress.step < steps:
                for batch in loader:
                    loss = model(batch).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    ckpt.step(samples=loader.batch_samples, epoch=loader.epoch)
                    if ckpt.progress.step == steps:
                        break
            ckpt.save()
            return losses, ckpt.progress.samples

    whole, samples = train(tmp_path / "whole", 13)
    parts = [train(tmp_path / "parts", steps) for steps in (5, 8, 11, 13)]
    assert [loss for losses, _ in parts for loss in losses] == whole
    assert parts[-1][1] == samples == 30 + 5 * 4


@pytest.mark.slow
def test_persistent_workers_and_loops_that_are_left_early():
    loader = data.ResumableLoader(Noisy(40), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=3)
    first, second = epochs(data.ResumableLoader(Noisy(40), batch_size=4), 2)
    assert [batch.tolist() for batch in islice(loader, 3)] == first[:3]
    assert [batch.tolist() for batch in islice(loader, 2)] == first[3:5]
    assert epochs(loader, 2) == [first[5:], second]
    loader.set_epoch(1)
    assert epochs(loader) == [second]


@pytest.mark.slow
def test_workers_that_are_started_anew_give_the_same():
    (first,) = epochs(data.ResumableLoader(Noisy(10), batch_size=4))
    (spawned,) = epochs(data.ResumableLoader(Noisy(10), batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    assert spawned == first


def test_structures_come_as_they_are():
    def collate(samples):
        return {"numbers": torch.stack(samples), "names": [str(int(sample)) for sample in samples]}

    loader = data.ResumableLoader(Numbers(4), batch_size=2, shuffle=False, collate_fn=collate)
    assert [batch["names"] for batch in loader] == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize(
    ("tail", "sizes"), [("short", [4, 4, 4, 2]), ("drop", [4, 4, 4]), ("pad", [4, 4, 4, 4])], ids=str
)
def test_tails(tail, sizes):
    loader = data.ResumableLoader(Numbers(14), batch_size=4, tail=tail)
    for epoch in range(2):
        assert loader.epoch == epoch
        seen = [batch.tolist() for batch in loader]
        assert [len(batch) for batch in seen] == sizes
        assert len(loader) == len(sizes)
        assert len(set(flat(seen))) == {"short": 14, "drop": 12, "pad": 14}[tail]


def test_loops_that_print_the_size_of_the_data_find_it():
    numbers = Numbers(10)
    loader = data.ResumableLoader(numbers, batch_size=4)
    assert loader.dataset is numbers
    assert len(loader.dataset) == 10


def test_ids_are_those_of_the_batches():
    loader = data.ResumableLoader(Numbers(40), batch_size=4)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    assert loader.take_ids() == flat(seen)
    assert loader.take_ids() == []
    assert next(batches).tolist() == loader.take_ids()
    assert loader.batch_samples == 4


def test_ids_that_nobody_asks_for_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("keepstep.data.position.MOST_IDS", 10)
    loader = data.ResumableLoader(Numbers(40), batch_size=4)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.take_ids() is None
    assert next(batches).tolist() == loader.take_ids()


def test_epochs_by_hand():
    loader = data.ResumableLoader(Numbers(12), batch_size=4)
    first, second, third = epochs(loader, 3)
    loader.set_epoch(1)
    assert epochs(loader) == [second]
    loader.set_epoch(0)
    batches = iter(loader)
    assert next(batches).tolist() == first[0]
    loader.set_epoch(0)  # as at the head of a loop over epochs: nothing is lost in the middle of one
    assert next(batches).tolist() == first[1]
    loader.set_epoch(2)
    with pytest.raises(UsageError, match="this iteration is over"):
        next(batches)
    assert epochs(loader) == [third]
    with pytest.raises(UsageError, match="negative"):
        loader.set_epoch(-1)


def test_a_loop_over_epochs_that_forgets_the_resume_is_stopped(tmp_path):
    consume(tmp_path, data.ResumableLoader(Numbers(12), batch_size=4), 7)
    loader = data.ResumableLoader(Numbers(12), batch_size=4)
    with ks.Checkpointer(tmp_path, ks.TrainState(data=loader), background="off") as ckpt:
        ckpt.restore()
        with pytest.raises(UsageError, match=r"set_epoch\(0\) after a resume that led to epoch 2.*range\(loader.epoch"):
            loader.set_epoch(0)
        loader.set_epoch(2)
        assert [len(batch) for batch in loader] == [4, 4]
        loader.set_epoch(0)  # later on it is a wish like any other


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_that_began_before_the_restore_is_stopped(tmp_path, workers):
    consume(tmp_path, data.ResumableLoader(Numbers(8), batch_size=4), 1)
    loader = data.ResumableLoader(Numbers(8), batch_size=4, num_workers=workers)
    batches = iter(loader)
    next(batches)
    with ks.Checkpointer(tmp_path, ks.TrainState(data=loader), background="off") as ckpt:
        ckpt.restore()
    with pytest.raises(UsageError, match="restore"):
        next(batches)


def test_two_loops_at_once_are_refused():
    loader = data.ResumableLoader(Numbers(12), batch_size=4)
    outer = iter(loader)
    next(outer)
    next(iter(loader))
    with pytest.raises(UsageError, match="one place at a time"):
        next(outer)


def test_a_changed_order_is_refused_with_everything_that_changed(tmp_path):
    consume(tmp_path, data.ResumableLoader(Numbers(12), batch_size=4), 1)
    other = data.ResumableLoader(Numbers(13), batch_size=4, seed=1, shuffle=False)
    job = ks.Checkpointer(tmp_path, ks.TrainState(data=other), background="off")
    with job as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.restore()
    assert caught.value.mismatches == (
        "samples in the data set: saved 12, now 13",
        "seed: saved 0, now 1",
        "shuffle: saved True, now False",
    )
    assert other.state_dict()["consumed"] == 0


def test_numbers_that_a_boundary_is_told_are_checked(tmp_path):
    loader = data.ResumableLoader(Numbers(10), global_batch_size=4, rank=0, world=2)
    with ks.Checkpointer(tmp_path, ks.TrainState(data=loader), background="off") as ckpt:
        batches = iter(loader)
        next(batches)
        ckpt.step(samples=4)
        next(batches)
        with pytest.raises(UsageError, match=r"samples=2, but since the last boundary the loop has got 4 samples"):
            ckpt.step(samples=2)  # what one rank has, in place of all
        assert len(next(batches)) == 1
        ckpt.step(samples=4)  # the last batch, counted as if it were whole
        assert loader.batch_samples == 2


def test_options_that_contradict_the_loader_are_refused_together():
    with pytest.raises(UsageError) as caught:
        data.ResumableLoader(Numbers(4), batch_size=2, drop_last=True, sampler=[1, 2], in_order=False)
    for text in ("drop_last=: tail='drop'", "sampler=", "in_order=False"):
        assert text in str(caught.value)
    with pytest.raises(UsageError, match=r"batch_size.*global_batch_size"):
        data.ResumableLoader(Numbers(4))
    with pytest.raises(UsageError, match="at least one sample"):
        data.ResumableLoader(Numbers(4), batch_size=0)
    with pytest.raises(UsageError, match="rank= and world= go together"):
        data.ResumableLoader(Numbers(4), batch_size=1, rank=0)
    with pytest.raises(UsageError, match="outside of world=2"):
        data.ResumableLoader(Numbers(4), batch_size=1, rank=2, world=2)
    with pytest.raises(UsageError, match="StreamReader"):
        data.ResumableLoader(Rows(), batch_size=1)
    with pytest.raises(TypeError, match="no_such_option"):
        data.ResumableLoader(Numbers(4), batch_size=1, no_such_option=1)
