"""One bit that is another one, in every byte of every file of a step: it is noticed, wherever it is."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.errors import CheckpointError, DamageWarning, RankFailedError
from keepstep.storage.local import LocalStorage
from tests.conftest import SEED
from tests.helpers.forge import Forgery
from tests.helpers.same import assert_same

NOTICED = {"corrupt", "format"}


def saved(rank=0, world=1):
    """Several components; with two ranks replicated, sharded, and each rank's own."""
    model = {"w": torch.arange(6, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
    state = {"model": model, "moments": {"m": torch.full((5,), 0.5)}, "lr": 0.1, "note": {"a": (1, "x"), "seen": {3}}}
    if world > 1:
        held = torch.arange(3 * rank, 3 * rank + 3)
        state["parts"] = {"shard": ks.sharded(held, global_shape=(3 * world,), offsets=(3 * rank,))}
        state["mine"] = ks.per_rank({"rank": rank}, "same_rank")
    return state


def target(rank=0, world=1):
    state = saved(rank, world)
    for part in ("model", "moments"):
        for tensor in state[part].values():
            tensor.fill_(7)
    if world > 1:
        state["parts"]["shard"].local.fill_(7)
        state["mine"].value["rank"] = -1
    return {**state, **plain()}


def plain():
    return {"lr": -1.0, "note": {"a": None, "seen": None}}


def load_or_refuse(storage, like, into) -> str:
    """The code of the error, after which no plain value has changed; or "" when everything is exactly as it was saved."""
    try:
        ks.load(storage, into)
    except CheckpointError as err:
        assert_same({name: into[name] for name in plain()}, plain())
        return ",".join(sorted({err.code, *getattr(err, "codes", {}).values()} - {RankFailedError.code}))
    for part in ("model", "moments", "lr", "note"):
        assert_same(into[part], like[part])
    if "parts" in like:
        assert torch.equal(into["parts"]["shard"].local, like["parts"]["shard"].local)
        assert into["mine"].value == like["mine"].value
    return ""


def verified(storage) -> set[str]:
    """The files in which a verification finds something wrong."""
    *_, last = verify(storage)
    return {problem.file for problem in last.problems}


def flipped(blobs):
    """Every byte of every file, each with one bit changed; which bit goes round."""
    for name, data in blobs.items():
        changed = bytearray(data)
        for place in range(len(data)):
            changed[place] ^= 1 << place % 8
            yield name, place, bytes(changed)
            changed[place] = data[place]


def save_on_two(rank, folder):
    ks.save(folder, saved(rank, 2), step=3)


def save_on_one(rank, folder):
    ks.save(folder, saved(), step=3)


@pytest.fixture(scope="module")
def step_of_two(rank_pool, tmp_path_factory) -> Forgery:
    folder = tmp_path_factory.mktemp("two") / "step"
    rank_pool(2)(save_on_two, folder)
    found = Forgery(LocalStorage(folder))
    files = sorted(name.rpartition(".")[0].rpartition(".")[0] for name in found.blobs if name != ".metadata")
    assert files == [f"{folder}/rank-0000{rank}" for folder in ("parts", "state") for rank in (0, 1)]
    return found


@pytest.fixture(scope="module")
def step_of_one() -> Forgery:
    memory = ks.MemoryStorage()
    save_on_one(0, memory)
    return Forgery(memory)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_byte_of_a_step_of_one_rank(step_of_one):
    """Verification names the file, and a load refuses."""
    storage, like = step_of_one.storage(), saved()
    assert not verified(storage)
    assert load_or_refuse(storage, like, target()) == ""
    tried = 0
    for name, place, data in flipped(step_of_one.blobs):
        storage.put(name, data)
        assert verified(storage) == {name}, (name, place)
        assert load_or_refuse(storage, like, target()) in NOTICED, (name, place)
        storage.put(name, step_of_one.blobs[name])
        tried += 1
    assert tried == sum(map(len, step_of_one.blobs.values()))
    assert load_or_refuse(storage, like, target()) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_byte_of_a_step_of_two_ranks(step_of_two):
    """Also of files that no reader opens who is alone: what only rank 1 has of its own."""
    storage = step_of_two.storage()
    like = {**saved(), "parts": {"shard": ks.sharded(torch.arange(6), global_shape=(6,), offsets=(0,))}}
    like["mine"] = ks.per_rank({"rank": 0}, "same_rank")
    unread = step_of_two.file("state", rank=1)
    outcomes: dict[str, set[str]] = {}
    tried = 0
    for name, place, data in flipped(step_of_two.blobs):
        storage.put(name, data)
        # (What is missing here may be missed by the plain values of another file as well.)
        assert name in verified(storage), (name, place)
        if place % 4 == 0 or name == ".metadata":
            whole = torch.full((6,), 7)
            into = {**target(), "parts": {"shard": ks.sharded(whole, global_shape=(6,), offsets=(0,))}}
            into["mine"] = ks.per_rank({"rank": -1}, "same_rank")
            outcomes.setdefault(name, set()).add(load_or_refuse(storage, like, into))
        storage.put(name, step_of_two.blobs[name])
        tried += 1
    assert tried == sum(map(len, step_of_two.blobs.values()))
    assert outcomes.pop(unread) == {""}
    assert len(outcomes) == 4
    assert all(found <= NOTICED for found in outcomes.values()), outcomes


def load_damaged(rank, blobs, places):
    """What this rank hears of each; both ranks have the same damage before them."""
    storage = Forgery(blobs).storage()
    like, heard = saved(rank, 2), []
    for name, place in places:
        changed = bytearray(blobs[name])
        changed[place] ^= 1 << place % 8
        storage.put(name, bytes(changed))
        heard.append(load_or_refuse(storage, like, target(rank, 2)))
        storage.put(name, blobs[name])
    return heard, load_or_refuse(storage, like, target(rank, 2))


@pytest.mark.slow
def test_two_ranks_refuse_together(rank_pool, step_of_two):
    """Whichever of them reads the byte."""
    places = [(name, place) for name, data in step_of_two.blobs.items() for place in range(0, len(data), 199)]
    places += [(name, len(data) - 1) for name, data in step_of_two.blobs.items()]
    (first, whole), (second, other) = rank_pool(2)(load_damaged, step_of_two.blobs, places)
    assert whole == other == ""
    for place, mine, theirs in zip(places, first, second, strict=True):
        assert mine == theirs, place
        assert mine in NOTICED, place


def trainer():
    return ks.TrainState(model=torch.nn.Linear(2, 2, bias=False))


@pytest.mark.slow
def test_a_restore_falls_back_over_a_bit_anywhere_in_the_newest_step():
    memory, state = ks.MemoryStorage(), trainer()
    with ks.Checkpointer(memory, state, background="off") as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            state["model"].weight.detach().fill_(step)
            checkpointer.step()
            checkpointer.save()
    names = [name for name, _ in memory.list("step-00000002")]
    assert len(names) >= 3
    state = trainer()
    with ks.Checkpointer(memory, state, background="thread") as checkpointer:
        for name in names:
            data = memory._blobs[name]
            for place in sorted({*range(0, len(data), 97), len(data) - 1}):
                changed = bytearray(data)
                changed[place] ^= 1 << place % 8
                memory.put(name, bytes(changed))
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    report = checkpointer.restore()
                assert report.step == 1, (name, place)
                assert [each.category for each in told] == [DamageWarning]
                assert report.skipped[0].startswith("step-00000002"), (name, place)
                assert torch.all(state["model"].weight == 1), (name, place)
                memory.put(name, data)
        assert checkpointer.restore().step == 2


@pytest.mark.slow
def test_a_sample_of_the_bytes_of_a_large_step(tmp_path):
    """Some at random, and those at the ends of files and of blocks."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    state = {"model": {f"w{i}": torch.randn(1 << 20) for i in range(3)}, "lr": 0.1}
    ks.save(tmp_path / "step", state)
    storage = LocalStorage(tmp_path / "step")
    assert not verified(storage)
    for name, size in sorted(storage.list("")):
        places = {0, 7, 8, size // 2, size - 1} | {rng.randrange(size) for _ in range(40)}
        if size > 1 << 20:
            places |= {4096 * page + edge for page in (1, 17, 18, 1041) for edge in (-1, 0)}
        path = Path(storage.url, name)
        for place in sorted(places):
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << place % 8]))
                file.flush()
                assert verified(storage) == {name}, (name, place)
                file.seek(place)
                file.write(byte)
    assert not verified(storage)
