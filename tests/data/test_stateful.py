"""Loaders of others: torchdata's with a state of its own, torch's without."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep as ks
from keepstep.data import stateful_loader
from keepstep.errors import MismatchError, PositionWarning, UnsafeValueError, UsageError
from tests.data.loops import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Counting(IterableDataset):
    """Counts on, and can say how far it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 100:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Unaware(IterableDataset):
    def __iter__(self):
        yield from range(100)


def made(dataset, workers, **more):
    generator = torch.Generator().manual_seed(1)
    shuffle = True if isinstance(dataset, Numbers) else None
    return StatefulDataLoader(dataset, batch_size=4, num_workers=workers, shuffle=shuffle, generator=generator, **more)


@pytest.mark.case(137)
@pytest.mark.case(140)
@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(lambda: Numbers(100), 0), (Counting, 0), pytest.param(Counting, 2, marks=pytest.mark.slow)],
    ids=["by number", "in a row", "in a row, by workers"],
)
def test_it_goes_on_behind_what_the_loop_has_got(tmp_path, dataset, workers):
    ahead = {"prefetch_factor": 4} if workers else {}
    whole = [batch.tolist() for batch in made(dataset(), workers)]
    seen = []
    for batches in (7, 3, 5):
        loader = made(dataset(), workers, **ahead)
        with ks.Checkpointer(tmp_path, ks.TrainState(data=stateful_loader(loader)), background="off") as ckpt:
            before = torch.get_rng_state()
            ckpt.restore()
            assert torch.equal(torch.get_rng_state(), before) or seen  # a restore brings back that of training
            for batch in islice(loader, batches):
                seen.append(batch.tolist())
                ckpt.step()
            ckpt.save()
    assert seen == whole[:15]


@pytest.mark.slow
@pytest.mark.case(143)
@pytest.mark.parametrize(("saved", "now"), [(0, 1), (1, 0)])
def test_another_number_of_workers_is_refused(tmp_path, saved, now):
    loader = made(Numbers(40), saved)
    next(iter(loader))
    ks.save(tmp_path, {"data": stateful_loader(loader)})
    with pytest.raises(MismatchError, match=f"num_workers={saved}, now {now}"):
        ks.load(tmp_path, into={"data": stateful_loader(made(Numbers(40), now))})


@pytest.mark.case(141)
def test_another_number_of_ranks_is_refused_with_both_sizes(rank_pool, tmp_path):
    rank_pool(4)(save_loader, tmp_path / "four")
    rank_pool(2)(save_loader, tmp_path / "two")
    for saved, world, now in (("four", 4, 2), ("two", 2, 4)):
        for text in rank_pool(now)(refused_load, tmp_path / saved):
            assert f"ranks: {world} when saved, {now} now" in text


def save_loader(rank, root):
    loader = quiet(Numbers(40))
    next(iter(loader))
    ks.save(root, {"data": stateful_loader(loader)})


def refused_load(rank, root):
    with pytest.raises(MismatchError) as caught:
        ks.load(root, into={"data": stateful_loader(quiet(Numbers(40)))})
    return str(caught.value)


def quiet(dataset):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(dataset, 0)


@pytest.mark.case(146)
def test_a_data_set_without_state_is_named_when_it_is_saved(tmp_path):
    loader = made(Unaware(), 0)
    next(iter(loader))
    state = ks.TrainState(data=stateful_loader(loader))
    with ks.Checkpointer(tmp_path, state, background="off") as ckpt:
        with pytest.warns(PositionWarning, match="Unaware"):
            ckpt.save()
        ckpt.step()
        ckpt.save()  # said once


def test_asking_for_the_state_takes_nothing_from_training():
    component = stateful_loader(StatefulDataLoader(Numbers(10), shuffle=True))
    before = torch.get_rng_state()
    component.value.state_dict()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plain_loader_is_refused_and_what_to_pass_is_said(tmp_path):
    loader = DataLoader(Numbers(4))
    for state in (ks.TrainState(data=loader), {"data": ks.per_rank(loader)}):
        with pytest.raises(UnsafeValueError, match=r"data: a DataLoader.*ResumableBatchSampler.*ResumableLoader"):
            ks.save(tmp_path, state)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="a DataLoader has no state"):
        stateful_loader(loader)
