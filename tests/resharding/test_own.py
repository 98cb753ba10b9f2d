"""What belongs to one rank, or to one place of a mesh, over real ranks: saved on some, loaded on others."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.errors import CorruptError, MismatchError, RankFailedError, StepNotFoundError
from tests.helpers.forge import Forgery
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated import mesh_of

# --- places of a mesh -----------------------------------------------------------------------------------------------


def dealt(values, here):
    """What is left of all data-parallel ranks, dealt out in turn."""
    assert [place["dp"] for place, _ in values] == list(range(len(values)))
    left = torch.cat([value["left"] for _, value in values])
    return {"position": max(value["position"] for _, value in values), "left": left[here["dp"] :: here.size("dp")]}


class Loader:
    def __init__(self, dp=7):
        self.position, self.left = 10 * dp, torch.arange(10 * dp, 10 * dp + dp + 1)

    def state_dict(self):
        return {"position": self.position, "left": self.left}

    def load_state_dict(self, state):
        self.position, self.left = state["position"], state["left"]


def grid_state(mesh, dp, rank):
    return {
        "model": {"w": torch.ones(3)},
        "loader": ks.per_rank(Loader(dp), dealt, mesh=mesh, dims="dp"),
        "noise": {"mask": ks.per_rank(np.random.Generator(np.random.Philox(dp)), "derive", mesh=mesh, dims=("dp",))},
        "place": ks.per_rank((dp, rank), "same_rank", mesh=mesh),
    }


def save_grid(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    ks.save(f"{folder}/now", grid_state(mesh, dp, rank), step=3)
    with ks.Checkpointer(f"{folder}/later", ks.TrainState(**grid_state(mesh, dp, rank)), background="thread") as saving:
        saving.step()
        saving.save()
    for key, wrong in {
        "own/plain": {"plain": ks.per_rank({"a": [tp]}, mesh=mesh, dims="dp")},
        "own/tensor": {"tensor": ks.per_rank(torch.full((2,), float(rank)), mesh=mesh, dims="dp")},
        "own/stream": {"stream": ks.per_rank(random.Random(rank), mesh=mesh, dims="dp")},
    }.items():
        with pytest.raises(
            (MismatchError, RankFailedError), match=f"{key}: rank 1 has another value than rank 0"
        ) as caught:
            ks.save(f"{folder}/wrong", {"own": wrong})
        assert f"{key}: rank 3 has another value than rank 2" in str(caught.value)
        with pytest.raises(StepNotFoundError):
            ks.open(f"{folder}/wrong")
    undeclared = "noise/a: the generator of rank 0 is not where that of rank 1"
    with pytest.raises((MismatchError, RankFailedError), match=undeclared) as caught:
        ks.save(f"{folder}/wrong", {"noise": {"a": random.Random(rank), "b": random.Random(1)}})
    assert "ks.per_rank" in str(caught.value)
    assert "noise/b" not in str(caught.value)


def load_grid(rank, folder, dp, tp):
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    state = grid_state(mesh, 7, rank)
    report = ks.load(folder, state, only=list(state))
    got = taken(state)
    ks.load(folder, state, only=list(state))
    assert taken(state) == got
    return got, {name: (part.rederived, part.reset, part.noted) for name, part in report.components.items()}


def taken(state):
    loader = state["loader"].value
    mask = state["noise"]["mask"].value
    return loader.position, loader.left.tolist(), mask.integers(1 << 62), state["place"].value


def streams(count):
    return [np.random.Generator(np.random.Philox(dp)).integers(1 << 62) for dp in range(count)]


@pytest.mark.case(115)
def test_a_value_of_each_data_parallel_rank_over_other_meshes(rank_pool, tmp_path):
    rank_pool(4)(save_grid, str(tmp_path))
    old = streams(2)
    for step in (tmp_path / "now", tmp_path / "later" / "step-00000001"):
        *_, last = verify(ks.LocalStorage(step))
        assert last.problems == ()
    entries = [Forgery(ks.LocalStorage(tmp_path / "now")).entries("state", rank) for rank in range(4)]
    assert [("loader/left" in held, "loader" in json.loads(held["~own"])) for held in entries] == [
        (True, True), (False, False), (True, True), (False, False)
    ]  # fmt: skip

    narrow = rank_pool(2)(load_grid, str(tmp_path / "now"), 2, 1)
    same = rank_pool(4)(load_grid, str(tmp_path / "later" / "step-00000001"), 2, 2)
    for got, report in (*narrow, *same):
        dp = got[0] // 10
        assert got[:3] == (10 * dp, [10, 11] if dp else [0], old[dp])
        assert not any((*report["loader"], *report["noise"]))
    assert [got[0] for got, _ in (*narrow, *same)] == [0, 10, 0, 0, 10, 10]

    wide = rank_pool(4)(load_grid, str(tmp_path / "now"), 4, 1)
    assert [got[:2] for got, _ in wide] == [(10, [0]), (10, [10]), (10, [11]), (10, [])]
    assert [got[2] for got, _ in wide[:2]] == old
    assert len({got[2] for got, _ in wide}) == 4
    assert [got[3] for got, _ in wide] == [(0, 0), (1, 2), (7, 2), (7, 3)]
    for _, report in wide:
        assert report["loader"][0] == ["loader: by its rule, on every rank, from 2 saved values"]
        assert report["noise"][0] == ["noise/mask: new on dp 2..3"]
        assert report["place"][1:] == (
            ["place: as before the load on dp=2 tp=0, dp=3 tp=0"], ["place: nothing here stands for dp=0 tp=1, dp=1 tp=1"]
        )  # fmt: skip

    alone = grid_state(mesh_of({"tp": 1, "dp": 1}), 7, 0)
    ks.load(tmp_path / "now", alone)
    assert taken(alone) == (10, [0, 10, 11], old[0], (0, 0))

    forged = Forgery(ks.LocalStorage(tmp_path / "now"))
    own = json.loads(forged.entries("state", 2)["~own"])
    storage = forged.rewrite("state", "~own", json.dumps({"place": own["place"]}).encode(), 2).storage()
    *_, last = verify(storage)
    assert "'loader' has no value on rank 2" in last.problems[-1].text
    with pytest.raises(CorruptError, match="'loader' has no value in the file of rank 2"):
        ks.load(storage, grid_state(mesh_of({"dp": 1, "tp": 1}), 7, 0))
    nowhere = Forgery(ks.LocalStorage(tmp_path / "now")).edit_tree(lambda tree: tree["loader"].update(owners=[0, 9]))
    with pytest.raises(CorruptError, match="'loader' belongs to a rank that is not there"):
        ks.load(nowhere.storage(), grid_state(mesh_of({"dp": 1, "tp": 1}), 7, 0))


# --- loaders of single ranks ----------------------------------------------------------------------------------------

SAMPLES = 41


def redealt(values, here):
    """What nobody has consumed yet, in the order of the epoch, dealt out to the ranks there are now."""
    left = sorted(sample for _, value in values for sample in value["left"])
    return {"left": left[here["rank"] :: here["world"]]}


def save_loaders(rank, folder, world):
    left = list(range(SAMPLES))[rank::world][rank + 1 :]
    ks.save(f"{folder}/strict", {"model": {"w": torch.ones(2)}, "data": ks.per_rank({"left": left})})
    ks.save(f"{folder}/dealt", {"data": ks.per_rank({"left": left}, redealt)})
    return left


def load_loaders(rank, folder, saved, world):
    strict = {"model": {"w": torch.zeros(2)}, "data": ks.per_rank({"left": []})}
    with pytest.raises(MismatchError, match=f"data: saved per rank on {saved} ranks, now there are {world}") as caught:
        ks.load(f"{folder}/strict", strict)
    assert "only=" in str(caught.value)
    assert strict["model"]["w"].tolist() == [0, 0]
    ks.load(f"{folder}/strict", strict, only=["model"])
    assert strict["model"]["w"].tolist() == [1, 1]
    with pytest.raises(MismatchError, match="its rule was a function, which is not stored"):
        ks.load(f"{folder}/dealt", {"data": {"left": []}})
    state = {"data": ks.per_rank({"left": []}, redealt)}
    report = ks.load(f"{folder}/dealt", state)
    assert report.components["data"].rederived
    return state["data"].value["left"]


@pytest.mark.case(115)
@pytest.mark.case(141)
@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_no_sample_of_a_rank_is_lost_on_another_number_of_ranks(rank_pool, tmp_path, world):
    """An error by default, which says how to leave it out; or a function that deals out what is left."""
    left = rank_pool(4)(save_loaders, str(tmp_path), 4)
    run = rank_pool(world) if world <= 4 else lambda fn, *args: run_ranks(world, fn, *args, timeout_s=120)
    now = run(load_loaders, str(tmp_path), 4, world)
    assert sorted(sample for part in now for sample in part) == sorted(sample for part in left for sample in part)
    assert max(map(len, now)) - min(map(len, now)) <= 1


# --- streams over 4 -> 2 -> 4 ---------------------------------------------------------------------------------------


def own_generators(seed):
    return {
        "python": random.Random(seed),
        "torch": torch.Generator().manual_seed(seed),
        "legacy": np.random.RandomState(seed),
        **{
            bits.__name__: np.random.Generator(bits(seed))
            for bits in (np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64)
        },
    }


def drawn(own):
    return {
        "python": own["python"].getrandbits(62),
        "torch": torch.randint(1 << 62, (), generator=own["torch"]).item(),
        "legacy": own["legacy"].tomaxint(),
        **{name: int(own[name].integers(1 << 62)) for name in ("PCG64", "Philox", "MT19937", "SFC64")},
        "all of python": random.getrandbits(62),
        "all of numpy": int(np.random.randint(1 << 62)),
        "all of torch": torch.randint(1 << 62, ()).item(),
    }


def go_on(rank, root, seed):
    """One start of a job: restored when there is anything, then two steps; what the streams give at the first and after."""
    own = own_generators(seed)
    for seed_all in (random.seed, np.random.seed, torch.manual_seed):
        seed_all(seed)
    state = ks.TrainState(noise=ks.per_rank(own, "derive"))
    with ks.Checkpointer(root, state, background="off") as saving:
        report = saving.restore()
        first = drawn(own)
        saving.step()
        saving.save()
        after = drawn(own)
    return (
        first,
        after,
        report.components and [*report.components["noise"].rederived, *report.components["rng"].rederived],
    )


@pytest.mark.slow
@pytest.mark.case(31)
@pytest.mark.case(32)
def test_streams_from_four_ranks_to_two_and_back(rank_pool, tmp_path):
    """Old ranks go on exactly, new ones never with a stream that any rank has or has had."""
    root = str(tmp_path / "run")
    four = rank_pool(4)(start_apart, root)
    two = rank_pool(2)(go_on, root, 5)
    again = rank_pool(4)(go_on, root, 6)
    assert [first for first, *_ in two] == [after for _, after, _ in four[:2]]
    assert [first for first, *_ in again[:2]] == [after for _, after, _ in two]
    assert all(len(new) == 8 and all("ranks 2..3" in text for text in new) for *_, new in again)
    for name in two[0][0]:
        seen = [one[name] for start in (four, two) for first, after, _ in start for one in (first, after)]
        fresh = [one[name] for first, after, _ in again[2:] for one in (first, after)]
        assert len(set(fresh)) == 4, name
        assert not set(fresh) & set(seen), name


def start_apart(rank, root):
    return go_on(rank, root, 100 + rank)
