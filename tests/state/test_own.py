"""Values of single ranks on another number of ranks: who gets whose, by which rule; ranks are simulated in one process."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import MismatchError, UnsafeValueError, UsageError
from keepstep.state.rng import RngStreams
from tests.helpers.simulated import loaded, loaded_everywhere, mesh_of, saved

# --- places of a mesh -----------------------------------------------------------------------------------------------

DIMS = ("pp", "dp", "tp")


@st.composite
def meshes(draw, dims):
    """A mesh with these dimensions and ranks in any order, and the coordinates of every rank."""
    sizes = {name: draw(st.integers(1, 3)) for name in dims}
    order = draw(st.permutations(range(int(np.prod(list(sizes.values()))))))
    where = {
        rank: dict(zip(dims, at, strict=True))
        for rank, at in zip(order, itertools.product(*map(range, sizes.values())), strict=True)
    }
    return mesh_of(sizes, order), sizes, where


@st.composite
def changes(draw):
    """Two meshes with the same dimensions, perhaps in another order, and those along which a value differs."""
    dims = draw(st.lists(st.sampled_from(DIMS), min_size=1, unique=True))
    chosen = draw(st.lists(st.sampled_from(dims), min_size=1, unique=True))
    return draw(meshes(tuple(dims))), draw(meshes(tuple(draw(st.permutations(dims))))), tuple(chosen)


def at(where, chosen):
    return tuple(where[name] for name in chosen)


@settings(max_examples=50)
@given(changes(), st.sampled_from(["error", "same_rank", "function"]))
def test_ranks_at_one_place_share_a_value(change, rule):
    """Against a dictionary of values by coordinates."""
    (mesh, sizes, where), (new_mesh, new_sizes, new_where), chosen = change
    seen = []

    def translate(values, here):
        seen.append(([(dict(place), value) for place, value in values], dict(here)))
        assert {name: here.size(name) for name in chosen} == {name: new_sizes[name] for name in chosen}
        return ("made", at(here, chosen))

    rule = translate if rule == "function" else rule

    def state(value, mesh, dims):
        return {"data": {"position": ks.per_rank(value, rule, mesh=mesh, dims=dims)}}

    step = saved([state(at(where[rank], chosen), mesh, chosen) for rank in range(len(where))])
    values = {at(here, chosen): at(here, chosen) for here in where.values()}
    assert sorted(item for own in step.own for item in own.values()) == sorted(values)  # each is stored once
    changed = at(sizes, chosen) != at(new_sizes, chosen)
    for rank, here in new_where.items():
        target = state("before", new_mesh, chosen[::-1])
        mismatches, reports = loaded(step, target, rank, len(new_where))
        got, place = target["data"]["position"].value, at(here, chosen)
        if not changed:
            assert (mismatches, got) == ([], place)
        elif rule == "error":
            (text,) = mismatches
            assert all(f"{name}={count[name]}" in text for name in chosen for count in (sizes, new_sizes))
            assert got == "before"
        elif rule == "same_rank":
            assert got == values.get(place, "before")
            assert bool(reports["data"].reset) == any(new_sizes[name] > sizes[name] for name in chosen)
            assert bool(reports["data"].noted) == any(new_sizes[name] < sizes[name] for name in chosen)
        else:
            assert got == ("made", place)
            every, told = seen.pop()
            assert every == [(dict(zip(chosen, place, strict=True)), place) for place in sorted(values)]
            assert told == {name: here[name] for name in chosen}
            assert reports["data"].rederived
    assert not seen


@settings(max_examples=40)
@given(changes())
def test_new_places_get_streams_of_their_own(change):
    (mesh, sizes, where), (new_mesh, _, new_where), chosen = change

    def state(seed, mesh, dims):
        return {"noise": ks.per_rank(np.random.default_rng(seed), "derive", mesh=mesh, dims=dims)}

    step = saved([state(at(where[rank], chosen), mesh, chosen) for rank in range(len(where))])
    again = []
    for dims in (chosen, chosen[::-1]):
        everywhere = loaded_everywhere(step, len(new_where), lambda _, dims=dims: state(7, new_mesh, dims))
        again.append([one["noise"].value.integers(1 << 62) for one in everywhere])
    assert again[0] == again[1]
    by_place = {}
    for rank, here in new_where.items():
        by_place.setdefault(at(here, chosen), set()).add(again[0][rank])
    assert all(len(drawn) == 1 for drawn in by_place.values())
    assert len(set.union(*by_place.values())) == len(by_place)
    for place, drawn in by_place.items():
        if all(i < sizes[name] for name, i in zip(chosen, place, strict=True)):
            assert drawn == {np.random.default_rng(place).integers(1 << 62)}


def test_only_the_sizes_along_the_dimensions_count():
    """Two tensor-parallel ranks read what one data loader gives; another number of them is no other world for it."""

    def state(value, mesh):
        return {"loader": ks.per_rank(value, mesh=mesh, dims="dp")}

    step = saved([state(rank // 2, mesh_of({"dp": 2, "tp": 2})) for rank in range(4)])
    assert [own.get("loader") for own in step.own] == [0, None, 1, None]
    alone = loaded_everywhere(step, 2, lambda _: state(None, mesh_of({"dp": 2, "tp": 1})))
    assert [one["loader"].value for one in alone] == [0, 1]
    more = loaded_everywhere(step, 6, lambda _: state(None, mesh_of({"tp": 3, "dp": 2})))
    assert [one["loader"].value for one in more] == [0, 1] * 3
    mismatches, _ = loaded(step, state(None, mesh_of({"dp": 4})), 3, 4)
    assert mismatches == [
        "loader: saved per rank on dp=2, now dp=4; give per_rank an on_world_change rule, or leave the component"
        " out with only="
    ]


def test_scopes_that_cannot_be_compared_need_a_function():
    """A value of every rank and one of every data-parallel rank are different things, whatever their numbers."""
    plain = saved([{"own": ks.per_rank(rank)} for rank in range(4)])
    grid = mesh_of({"dp": 2, "tp": 2})
    target = {"own": ks.per_rank(None, "same_rank", mesh=grid, dims="dp")}
    assert "saved per rank on 4 ranks, the target is per rank on dp=2" in loaded(plain, target, 0, 4)[0][0]

    def rule(values, here):
        return dict(here), [(dict(place), value) for place, value in values]

    target = {"own": ks.per_rank(None, rule, mesh=grid, dims="dp")}
    assert loaded(plain, target, 3, 4)[0] == []
    assert target["own"].value == ({"dp": 1}, [({"rank": rank, "world": 4}, rank) for rank in range(4)])

    scoped = saved([{"own": ks.per_rank(rank // 2, mesh=grid, dims="dp")} for rank in range(4)])
    assert "mark the target with ks.per_rank" in loaded(scoped, {"own": 5}, 0, 4)[0][0]
    assert "the target is per rank on 4 ranks" in loaded(scoped, {"own": ks.per_rank(5, "derive")}, 0, 4)[0][0]
    small = {"own": ks.per_rank(5, mesh=mesh_of({"dp": 2}), dims="dp")}
    assert "holds 2 ranks, there are 4" in loaded(scoped, small, 0, 4)[0][0]


def test_what_per_rank_refuses():
    grid = mesh_of({"dp": 2, "tp": 2})
    part = mesh_of({"dp": 2}, [0, 1])
    part.mesh = torch.tensor([0, 2])
    nameless = mesh_of({"dp": 2})
    nameless.mesh_dim_names = None
    for wrong, text in [
        (lambda: ks.per_rank(1, "sometimes"), r"'error', 'same_rank', 'derive', or a function"),
        (lambda: ks.per_rank(1, dims="dp"), "give that too"),
        (lambda: ks.per_rank(1, mesh=grid, dims="ep"), r"dimensions \('dp', 'tp'\)"),
        (lambda: ks.per_rank(1, mesh=grid, dims=("dp", "dp")), "and once"),
        (lambda: ks.per_rank(1, mesh=grid, dims=()), "each must be one of them"),
        (lambda: ks.per_rank(1, mesh=nameless), r"dimensions \(\)"),
        (lambda: ks.per_rank(1, mesh=part), r"ranks \[0, 2\]; give per_rank the whole mesh"),
    ]:
        with pytest.raises(UsageError, match=text):
            wrong()
    with pytest.raises(UnsafeValueError, match="own: the mesh of its per_rank holds 4 of 1 ranks"):
        ks.save(ks.MemoryStorage(), {"own": ks.per_rank(1, mesh=grid, dims="dp")})


# --- the rule -------------------------------------------------------------------------------------------------------


def test_the_rule_of_the_target_decides():
    step = saved([{"own": ks.per_rank(rank, "same_rank")} for rank in range(2)])
    for target, expected in [
        ({"own": ks.per_rank("x", "same_rank")}, 1),
        ({"own": ks.per_rank("x", lambda values, here: sum(value for _, value in values) + here["world"])}, 4),
    ]:
        assert loaded(step, target, 1, 3)[0] == []
        assert target["own"].value == expected
    strict = {"own": ks.per_rank("x")}
    assert "saved per rank on 2 ranks, now there are 3; give per_rank" in loaded(step, strict, 1, 3)[0][0]
    plain = {"own": "x"}
    assert loaded(step, plain, 1, 3)[0] == []
    assert plain["own"] == 1
    assert loaded(step, plain, 2, 3)[0] == []
    assert plain["own"] == 1  # a rank that is new keeps what it has


def test_a_function_is_stored_by_name_alone():
    step = saved([{"own": ks.per_rank(rank, lambda values, here: 0)} for rank in range(2)])
    assert step.tree["own"].rule == "function"
    same = {"own": ks.per_rank("x")}
    assert loaded(step, same, 1, 2)[0] == []
    assert same["own"].value == 1  # nothing has changed, so no rule is asked
    (text,) = loaded(step, {"own": "x"}, 0, 1)[0]
    assert text == (
        "own: saved per rank on 2 ranks, now there are 1; its rule was a function, which is not stored: mark the target with"
        " ks.per_rank and that function"
    )


class Buffer:
    """Keeps what is left of a stream, as an object with a state of its own."""

    def __init__(self, tokens):
        self.tokens = tokens

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state):
        self.tokens = state["tokens"]


def joined(values, here):
    """Everything that was left, dealt out anew."""
    together = torch.cat([value["left"]["tokens"] for _, value in values])
    count, rank = here["world"], here["rank"]
    gathered = sum(value["sum"] for _, value in values)
    return {
        "left": {"tokens": together[rank::count]},
        "sum": gathered,
        "names": [value["names"][0] for _, value in values],
    }


def left_state(rank):
    return {
        "left": Buffer(torch.arange(3 * rank, 3 * rank + 3)),
        "sum": torch.full((2,), float(rank)),
        "names": [f"rank {rank}"],
    }


def test_a_function_sees_every_value_and_what_it_makes_is_put_in_as_by_a_load():
    """Tensors of other ranks' files included; objects, containers and tensors of the target stay what they are."""
    step = saved([{"own": ks.per_rank(left_state(rank), joined)} for rank in range(3)])
    everything = []
    for rank in range(2):
        value = left_state(7)
        kept = copy.copy(value)
        target = {"own": ks.per_rank(value, joined)}
        mismatches, reports = loaded(step, target, rank, 2)
        assert mismatches == []
        assert reports["own"].rederived == ["own: by its rule, on every rank, from 3 saved values"]
        assert target["own"].value is value
        assert all(value[key] is kept[key] for key in kept)
        assert value["sum"].tolist() == [3.0, 3.0]
        assert value["names"] == ["rank 0", "rank 1", "rank 2"]
        everything += value["left"].tokens.tolist()
    assert sorted(everything) == list(range(9))


def test_what_a_function_does_wrong_is_said_with_the_key():
    step = saved(
        [{"own": {"x": ks.per_rank(torch.zeros(2), "same_rank"), "y": ks.per_rank(random.Random(1))}} for _ in range(2)]
    )

    def into(x, y):
        return {"own": {"x": ks.per_rank(torch.ones(2), x), "y": ks.per_rank(random.Random(2), y)}}

    good = into(lambda values, here: values[1][1], lambda values, here: values[0][1])
    loaded(step, good, 0, 1)
    assert good["own"]["x"].value.tolist() == [0, 0]
    assert good["own"]["y"].value.random() == random.Random(1).random()
    bad = into(lambda values, here: torch.zeros(3), lambda values, here: 5)
    with pytest.raises(MismatchError) as caught:
        loaded(step, bad, 0, 1)
    assert [line.partition(":")[0] for line in caught.value.mismatches] == ["own/x", "own/y"]
    assert bad["own"]["x"].value.tolist() == [1, 1]
    with pytest.raises(MismatchError, match="own/x: its on_world_change rule failed: KeyError: 'dp'"):
        loaded(step, into(lambda values, here: here["dp"], "same_rank"), 0, 1)


class Reader:
    """An object whose state has a part that differs between ranks."""

    def __init__(self, seed):
        self.epoch, self.seen, self.noise = 0, [seed], np.random.default_rng(seed)

    def state_dict(self):
        return {
            "epoch": self.epoch,
            "seen": ks.per_rank(self.seen, lambda values, here: sorted(seen for _, value in values for seen in value)),
            "noise": ks.per_rank(self.noise, "derive"),
        }

    def load_state_dict(self, state):
        self.epoch, self.seen = state["epoch"], state["seen"]
        self.noise = copy.deepcopy(state["noise"])  # what is given has its state already


def test_a_part_of_an_objects_state_may_belong_to_a_rank():
    """The object is given back plain values, as it is without any mark."""
    step = saved([{"reader": Reader(rank)} for rank in range(2)])
    for rank in range(2):
        target = Reader(9)
        assert loaded(step, {"reader": target}, rank, 2)[0] == []
        assert (target.epoch, target.seen) == (0, [rank])
        assert target.noise.random() == np.random.default_rng(rank).random()
    drawn = []
    for rank in range(3):
        target = Reader(9)
        assert loaded(step, {"reader": target}, rank, 3)[0] == []
        assert target.seen == [0, 1]
        drawn.append(target.noise.random())
    assert drawn[:2] == [np.random.default_rng(rank).random() for rank in range(2)]
    assert len(set(drawn)) == 3


def test_a_rank_that_is_new_and_has_nothing_there_gets_nothing():
    step = saved(
        [{"own": {"a": ks.per_rank([rank], "same_rank"), "b": [ks.per_rank(rank, "same_rank")]}} for rank in range(2)]
    )
    old, new = {"own": {}}, {"own": {}}
    assert (loaded(step, old, 1, 3)[0], loaded(step, new, 2, 3)[0]) == ([], [])
    assert old == {"own": {"a": [1], "b": [1]}}
    assert new == {"own": {"b": []}}


# --- generators -----------------------------------------------------------------------------------------------------

BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.MT19937, np.random.SFC64]
GENERATORS = {
    "python": (lambda seed: random.Random(seed), lambda own: own.getrandbits(62)),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda own: torch.randint(1 << 62, (), generator=own).item(),
    ),
    "numpy, legacy": (lambda seed: np.random.RandomState(seed), lambda own: own.tomaxint()),
    "numpy, legacy, PCG64": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), lambda own: own.tomaxint()),
} | {
    f"numpy, {bits.__name__}": (
        lambda seed, bits=bits: np.random.Generator(bits(seed)),
        lambda own: own.integers(1 << 62),
    )
    for bits in BITS
}


@pytest.fixture(params=GENERATORS, ids=str)
def generator(request):
    return GENERATORS[request.param]


def test_a_generator_is_restored_in_place_wherever_it_stands(generator):
    make, draw = generator

    def state(seed):
        own = [make(seed + number) for number in range(5)]
        return own, {
            "top": own[0],
            "deep": {"list": [own[1], 1], "pair": ("x", own[2])},
            "own": ks.per_rank({"a": own[3], "b": own[4]}),
        }

    generators, source = state(10)
    for own in generators:
        if hasattr(own, "normal"):
            own.normal()  # leaves halves of pairs and of words behind
        draw(own)
    memory = ks.MemoryStorage()
    ks.save(memory, source)
    expected = [[draw(own) for _ in range(4)] for own in generators]
    others, target = state(50)
    report = ks.load(memory, target)
    assert [
        target["top"],
        target["deep"]["list"][0],
        target["deep"]["pair"][1],
        *target["own"].value.values(),
    ] == others
    assert [[draw(own) for _ in range(4)] for own in others] == expected
    assert report.components["top"].restored == 1
    empty = {"top": others[0], "deep": {}, "own": ks.per_rank({})}
    ks.load(memory, empty)
    made = [empty["deep"]["list"][0], empty["deep"]["pair"][1], *empty["own"].value.values()]
    assert all(type(a) is type(b) and a is not b for a, b in zip(made, others[1:], strict=True))
    assert [[draw(own) for _ in range(4)] for own in made] == expected[1:]
    assert [draw(ks.open(memory).values_of("top")) for _ in range(2)] == expected[0][:1] * 2


@pytest.mark.case(32)
def test_new_ranks_get_streams_that_nobody_has_or_had(generator):
    """2 -> 4 -> 2 -> 3 -> 4, with draws and without, at the same step and at later ones: every new stream is new."""
    make, draw = generator
    state = lambda seed: {"noise": ks.per_rank({"a": make(seed), "b": make(seed)}, "derive")}  # noqa: E731
    states, history = [state(100 + rank) for rank in range(2)], []
    for number, world in enumerate((4, 2, 3, 4, 8, 1, 8)):
        step = saved(states, number // 2)
        new = range(len(states), world)
        target = [state(5) for _ in range(world)]
        for rank in range(world):
            mismatches, reports = loaded(step, target[rank], rank, world)
            assert mismatches == []
            assert bool(reports["noise"].rederived) == bool(new)
        streams = [own for one in target for own in one["noise"].value.values()]
        again = loaded_everywhere(step, world, lambda _: state(6))
        first = [draw(own) for own in streams]
        assert first == [draw(own) for one in again for own in one["noise"].value.values()]
        old = [draw(own) for one in states[:world] for own in one["noise"].value.values()]
        assert first[: len(old)] == old
        fresh = first[len(old) :]
        assert len(set(fresh)) == len(fresh) == 2 * len(new)
        if number % 2 == 0:
            # At the same step and from the same state a world of the same size is the same world again.
            assert not set(fresh) & set(history)
        history += fresh
        states = target if number % 3 else again


def test_a_generator_of_another_kind_is_refused_with_its_key(generator):
    make, _ = generator
    memory = ks.MemoryStorage()
    ks.save(memory, {"noise": {"a": make(1)}})
    for other in (
        random.Random(1),
        np.random.Generator(np.random.PCG64(1)),
        torch.Generator(),
        np.random.RandomState(1),
        5,
    ):
        target = {"noise": {"a": other}}
        if type(other) is type(make(1)) and not (
            isinstance(other, np.random.Generator) and type(make(1).bit_generator) is not type(other.bit_generator)
        ):
            continue
        before = repr(target)
        with pytest.raises(MismatchError, match="noise/a: "):
            ks.load(memory, target)
        assert repr(target) == before
    with pytest.raises(MismatchError, match=r"noise/b: .* in the target, nothing of that name"):
        ks.load(memory, {"noise": {"a": make(1), "b": make(2)}})


def test_what_draws_from_the_system_has_no_state():
    with pytest.raises(UnsafeValueError, match=r"noise: random\.SystemRandom"):
        ks.save(ks.MemoryStorage(), {"noise": random.SystemRandom()})


FORGED = {
    "a position beyond the key": lambda state: state["state"]["state"].update(pos=1 << 20),
    "a negative position": lambda state: state["state"]["state"].update(pos=-1),
    "a short key": lambda state: state["state"]["state"].update(key=np.zeros(3, np.uint32)),
    "a key of other numbers": lambda state: state["state"]["state"].update(key=np.zeros(624, np.uint64)),
    "a list": lambda state: state["state"].update(state=[1]),
    "no state": lambda state: state["state"].pop("state"),
    "another algorithm": lambda state: state["state"].update(bit_generator="PCG64"),
    "an unknown one": lambda state: state["state"].update(bit_generator="system"),
    "another library": lambda state: state.update(of="torch"),
    "an unknown library": lambda state: state.update(of="os"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_states_of_generators_are_refused(name):
    """numpy takes any position and reads what lies there."""
    step = saved([{"noise": np.random.Generator(np.random.MT19937(1))}])
    FORGED[name](step.tree["noise"].tree)
    for target in ({"noise": np.random.Generator(np.random.MT19937(2))}, {"noise": np.random.default_rng(2)}):
        assert loaded(step, target, 0, 1)[0]
    outer = saved([{"box": {"noise": np.random.Generator(np.random.MT19937(1))}}])
    FORGED[name](outer.tree["box"]["noise"].tree)
    mismatches, _ = loaded(outer, {"box": {}}, 0, 1)
    assert len(mismatches) == 1


# --- streams of devices ---------------------------------------------------------------------------------------------


class Devices:
    """Stands for ``torch.cuda`` on a machine with so many devices, each with a generator of the host."""

    def __init__(self, count):
        self.generators = [torch.Generator().manual_seed(number) for number in range(count)]

    def is_available(self):
        return bool(self.generators)

    is_initialized = is_available

    def device_count(self):
        return len(self.generators)

    def get_rng_state_all(self):
        return [own.get_state() for own in self.generators]

    def set_rng_state(self, state, device):
        self.generators[device].set_state(state)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (2, 2, []),
        (4, 1, ["rng: cuda:1..3 saved, no such device here; left out"]),
        (1, 0, ["rng: cuda:0 saved, no such device here; left out"]),
        (1, 3, ["rng: cuda:1..2 not saved; as before the load"]),
        (0, 2, ["rng: cuda:0..1 not saved; as before the load"]),
        (0, 0, []),
    ],
)
def test_streams_of_devices_that_do_not_match_are_reported(monkeypatch, before, now, said):
    memory = ks.MemoryStorage()
    monkeypatch.setattr(torch, "cuda", Devices(before))
    ks.save(memory, ks.TrainState())
    saved_draws = [torch.rand(3, generator=own).tolist() for own in torch.cuda.generators]
    here = Devices(now)
    for own in here.generators:
        own.manual_seed(99)
    monkeypatch.setattr(torch, "cuda", here)
    report = ks.load(memory, ks.TrainState())
    assert report.components["rng"].reset == said
    untouched = torch.rand(3, generator=torch.Generator().manual_seed(99)).tolist()
    expected = [saved_draws[number] if number < before else untouched for number in range(now)]
    assert [torch.rand(3, generator=own).tolist() for own in here.generators] == expected
    assert all(text in str(report) for text in said)


def test_a_stream_of_another_kind_of_device_is_reported(monkeypatch):
    memory, device = ks.MemoryStorage(), torch.Generator().manual_seed(4)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", device.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", device.set_state)
    ks.save(memory, ks.TrainState())
    first = torch.rand(3, generator=device)
    assert ks.load(memory, ks.TrainState()).components["rng"].reset == []
    assert torch.equal(torch.rand(3, generator=device), first)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    report = ks.load(memory, ks.TrainState())
    assert report.components["rng"].reset == ["rng: mps:0 saved, no such device here; left out"]


def test_a_generator_of_a_device_that_is_not_here_is_a_difference():
    step = saved([{"noise": {"a": torch.Generator()}}])
    step.tree["noise"]["a"].tree["device"] = "cuda:3"
    assert loaded(step, {"noise": {"a": torch.Generator()}}, 0, 1)[0] == [
        "noise/a: saved from a generator on cuda:3, this one is on cpu"
    ]
    if not torch.cuda.is_available():
        (text,) = loaded(step, {"noise": {}}, 0, 1)[0]
        assert text.startswith("noise/a: the generator in the checkpoint cannot be made here")
    near = saved([{"noise": {"a": torch.Generator().manual_seed(3)}}])
    near.tree["noise"]["a"].tree["device"] = "cpu:1"
    target = {"noise": {"a": torch.Generator()}}
    assert loaded(near, target, 0, 1)[0] == []
    assert target["noise"]["a"].initial_seed() == 3


def test_the_global_streams_of_a_new_rank_are_seeded_apart():
    """numpy and torch make the same words of the same seed, so they are not given the same."""
    np.random.seed(5)
    torch.manual_seed(5)
    assert torch.randint(1 << 32, ()).item() in np.random.randint(0, 1 << 32, size=2, dtype=np.uint32)
    streams = RngStreams()
    drawn = []
    for seed in (0, 1, 1 << 31, (1 << 64) - 2) * 2:
        streams.derive({}, seed)
        words = np.random.randint(0, 1 << 32, size=4, dtype=np.uint32).tolist()
        drawn.append((random.getrandbits(32), *words, *torch.randint(1 << 32, (2,)).tolist()))
    assert drawn[:4] == drawn[4:]
    assert len({word for words in drawn for word in words}) == 4 * 7


@settings(max_examples=8)
@given(st.integers(2, 4000), st.integers(0, 1 << 40))
def test_no_two_places_have_the_same_seed(world, step):
    """Not even in the lower 32 bits, which is all that some generators make of it."""
    from keepstep.state.choice import seed_of

    seeds = [seed_of({"x": 1}, "noise", step, ks.Coordinates(("rank",), (rank,), (world,))) for rank in range(world)]
    assert len({seed % (1 << 32) for seed in seeds}) == world
    other = ks.Coordinates(("rank",), (0,), (world,))
    assert len({seed_of(v, k, s, other) for v in (1, 2) for k in ("a", "b") for s in (step, step + 1)}) == 8


def test_coordinates_read_as_a_mapping():
    here = ks.Coordinates(("rank",), (3,), (4,))
    assert here == {"rank": 3, "world": 4}
    assert (here["rank"], here["world"], here.size("rank"), len(here)) == (3, 4, 4, 2)
    place = ks.Coordinates(("dp", "pp"), (1, 0), (2, 3))
    assert dict(place) == {"dp": 1, "pp": 0}
    assert place.size("pp") == 3
    assert len({place, ks.Coordinates(("dp", "pp"), (1, 0), (2, 3)), here}) == 2
    with pytest.raises(KeyError):
        place["world"]
