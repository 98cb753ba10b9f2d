"""Modules: names without wrappers, ties by memory, extra state, hooks, and what is refused before anything changes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import keepstep as ks
from tests.helpers.same import assert_same


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def state_of(model):
    return copy.deepcopy(dict(model.state_dict()))


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointed(model):
    return nn.Sequential(*(checkpoint_wrapper(child) for child in model))


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": lambda model: model.compile(backend="eager") or model,
    "parallel": lambda model: DistributedDataParallel(model),
    "checkpointed": checkpointed,
    "parallel, compiled": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "compiled, parallel": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "checkpointed, parallel": lambda model: DistributedDataParallel(checkpointed(model)),
}


@pytest.mark.case(126)
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "plain"])
def test_names_do_not_show_wrappers_through_two_generations(wrapper, one_rank, tmp_path):
    def build(seed, how):
        model = WRAPPERS[how](network(seed))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    whole = build(0, "plain")
    expected = train(*whole.values(), 8)
    keys = None
    now = build(0, "plain")
    losses = train(*now.values(), 2)
    for generation, how in enumerate((wrapper, "plain", wrapper), 1):
        path = tmp_path / str(generation)
        ks.save(path, now)
        there = sorted(ks.open(path))
        assert keys in (None, there)
        keys = there
        now = build(generation, how)
        ks.load(path, now)
        losses += train(*now.values(), 2, first=2 * generation)
    assert losses == expected
    assert "model/0.weight" in keys
    assert "optimizer/state/2.bias/exp_avg" in keys


def test_a_wrapped_part_of_a_model_has_plain_names(tmp_path):
    model = network()
    ks.save(tmp_path / "plain", {"model": model})
    partly = network(1)
    partly[0] = torch.compile(partly[0], backend="eager")
    partly[2] = checkpoint_wrapper(partly[2])
    ks.load(tmp_path / "plain", {"model": partly})
    x = torch.ones(2, 3)
    assert torch.equal(partly.eval()(x), model.eval()(x))
    ks.save(tmp_path / "partly", {"model": partly})
    assert sorted(ks.open(tmp_path / "partly")) == sorted(ks.open(tmp_path / "plain"))


@pytest.mark.case(131)
def test_tied_weights_are_stored_once_and_still_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self, tie):
            super().__init__()
            self.embed = nn.Embedding(500, 8)
            self.head = nn.Linear(8, 500, bias=False)
            if tie:
                self.head.weight = self.embed.weight

    def build(tie, seed):
        torch.manual_seed(seed)
        model = Tied(tie)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def step(state):
        state["optimizer"].zero_grad()
        state["model"].head(state["model"].embed(torch.arange(5))).square().mean().backward()
        state["optimizer"].step()

    tied = build(True, 0)
    step(tied)
    ks.save(tmp_path / "tied", tied)
    step(tied)
    weight = 500 * 8 * 4
    assert ks.open(tmp_path / "tied").describe()["components"]["model"]["bytes"] == weight

    fresh = build(True, 1)
    ks.load(tmp_path / "tied", fresh)
    assert fresh["model"].head.weight is fresh["model"].embed.weight
    step(fresh)
    assert_same(state_of(fresh["model"]), state_of(tied["model"]))

    # Equal values in separate memory are two tensors.
    apart = Tied(False)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    ks.save(tmp_path / "apart", {"model": apart})
    assert ks.open(tmp_path / "apart").describe()["components"]["model"]["bytes"] == 2 * weight

    # Saved tied, loaded apart: both are filled.
    ks.load(tmp_path / "tied", {"model": apart}, only=["model"])
    assert torch.equal(apart.head.weight, ks.open(tmp_path / "tied")["model/embed.weight"])
    assert torch.equal(apart.head.weight, apart.embed.weight)
    assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()

    # Saved apart, loaded tied: one memory cannot hold both.
    before = state_of(fresh["model"])
    with pytest.raises(ks.errors.MismatchError, match=r"model/head\.weight: tied to model/embed\.weight in the target"):
        ks.load(tmp_path / "apart", {"model": fresh["model"]})
    assert_same(state_of(fresh["model"]), before)


def test_a_submodule_used_in_two_places_is_stored_once(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        shared = nn.Linear(16, 16)
        return nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(2, 2)})

    model = build(0)
    ks.save(tmp_path / "s", {"model": model})
    assert ks.open(tmp_path / "s").describe()["components"]["model"]["bytes"] == (16 * 16 + 16 + 6) * 4
    fresh = build(1)
    ks.load(tmp_path / "s", {"model": fresh})
    assert fresh["first"] is fresh["second"]
    assert_same(state_of(fresh), state_of(model))


@pytest.mark.case(133)
@pytest.mark.case(168)
def test_all_missing_and_all_surplus_keys_are_listed_at_once(tmp_path):
    model = nn.ModuleDict({f"layer{i}": nn.Linear(2, 2, bias=False) for i in range(10)})
    ks.save(tmp_path / "s", {"model": model}, step=70)
    names = {3: "layr3", 5: "layer_five", 8: "laser8"}
    fresh = nn.ModuleDict({names.get(i, f"layer{i}"): nn.Linear(2, 2, bias=False) for i in range(10)})
    before = state_of(fresh)
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", {"model": fresh})
    text = str(caught.value)
    for old, new in names.items():
        assert f"model/layer{old}.weight: in the checkpoint, not in the target module" in text
        assert f"model/{new}.weight: in the target module, not in the checkpoint" in text
    assert "model/laser8.weight may be model/layer8.weight under another name" in text
    assert "step 70" in text
    assert str(tmp_path / "s") in text
    assert "ranks: 1 when saved, 1 now" in text
    assert "Nothing was changed" in text
    assert "{" not in text
    assert len([line for line in caught.value.mismatches if "under another name" not in line]) == 6
    assert_same(state_of(fresh), before)

    report = ks.load(tmp_path / "s", {"model": fresh}, strict=False)
    part = report.components["model"]
    assert part.restored == 7
    assert sorted(part.missing) == sorted(f"model/{new}.weight" for new in names.values())
    assert sorted(part.unexpected) == sorted(f"model/layer{old}.weight" for old in names)
    assert torch.equal(fresh["layer0"].weight, model["layer0"].weight)
    assert torch.equal(fresh["layr3"].weight, before["layr3.weight"])


def test_at_most_twenty_differences_are_shown_and_all_are_kept(tmp_path):
    ks.save(tmp_path / "s", {"model": nn.ParameterDict({f"p{i}": torch.zeros(1) for i in range(30)})})
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", {"model": nn.ParameterDict({f"p{i}": torch.zeros(2) for i in range(30)})})
    assert len(caught.value.mismatches) == 30
    assert "… and 10 more" in str(caught.value)
    assert "model/p0: saved with shape [1], the target has [2]" in str(caught.value)


class Growing(nn.Module):
    """A module whose extra state gets longer as it is used, in whatever form ``pack`` makes of it."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.pack, self.unpack = pack, unpack
        self.history = []
        self.given = 0
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self):
        return self.pack(self.history)

    def set_extra_state(self, state):
        self.given += 1
        self.history = self.unpack(state)


def pickled_tensor(history):
    buffer = io.BytesIO()
    buffer.write(bytes(history))
    return (
        torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        if history
        else torch.empty(0, dtype=torch.uint8)
    )


EXTRA = {
    "bytes": (bytes, list),
    "tensor": (pickled_tensor, lambda state: state.tolist()),
    "dict": (lambda history: {"n": len(history), "items": tuple(history)}, lambda state: list(state["items"])),
    "tensors in a dict": (
        lambda history: {"scales": [torch.tensor(float(item)) for item in history]},
        lambda state: [int(item) for item in state["scales"]],
    ),
    "none at first": (lambda history: list(history) or None, lambda state: list(state or ())),
}


@pytest.mark.case(54)
@pytest.mark.parametrize("form", EXTRA)
@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_that_grew_comes_back_whole(form, nested, tmp_path):
    def build():
        inner = Growing(*EXTRA[form])
        return inner, nn.Sequential(inner, nn.Linear(2, 2)) if nested else inner

    inner, model = build()
    inner.history = [1, 2, 3, 200]
    with torch.no_grad():
        inner.weight.fill_(5)
    ks.save(tmp_path / "s", {"model": model})
    fresh, target = build()
    ks.load(tmp_path / "s", {"model": target})
    assert fresh.history == [1, 2, 3, 200]
    assert fresh.given == 1
    assert_same(state_of(target), state_of(model))
    inner.history = [9]
    ks.save(tmp_path / "less", {"model": model})
    ks.load(tmp_path / "less", {"model": target})
    assert fresh.history == [9]


def test_extra_state_that_one_side_lacks_is_a_mismatch(tmp_path):
    plain = nn.Sequential(nn.Linear(2, 2))
    extra = nn.Sequential(nn.Linear(2, 2))
    extra.add_module("1", Growing(*EXTRA["dict"]))
    plain.add_module("1", nn.ParameterDict({"weight": torch.zeros(2)}))
    ks.save(tmp_path / "plain", {"model": plain})
    ks.save(tmp_path / "extra", {"model": extra})
    before = state_of(plain)
    with pytest.raises(ks.errors.MismatchError, match=r"model/1\._extra_state: in the checkpoint, not in the target"):
        ks.load(tmp_path / "extra", {"model": plain})
    assert_same(state_of(plain), before)
    with pytest.raises(ks.errors.MismatchError, match=r"model/1\._extra_state: in the target module, not in the check"):
        ks.load(tmp_path / "plain", {"model": extra})
    assert extra[1].given == 0
    report = ks.load(tmp_path / "extra", {"model": plain}, strict=False)
    assert report.components["model"].unexpected == ["model/1._extra_state"]
    report = ks.load(tmp_path / "plain", {"model": extra}, strict=False)
    assert report.components["model"].missing == ["model/1._extra_state"]


class Buffers(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("cache", torch.full((2,), value), persistent=False)
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.full((2,), value))


def test_buffers_that_are_not_persistent_are_left_alone(tmp_path):
    ks.save(tmp_path / "s", {"model": Buffers(1.0)})
    assert sorted(ks.open(tmp_path / "s")) == ["model/kept", "model/weight"]
    target = Buffers(2.0)
    cache = target.cache
    ks.load(tmp_path / "s", {"model": target})
    assert torch.equal(target.kept, torch.ones(2))
    assert target.cache is cache
    assert torch.equal(cache, torch.full((2,), 2.0))


def test_memory_of_parameters_and_buffers_stays_where_it_is(tmp_path):
    model = network()
    ks.save(tmp_path / "s", {"model": model})
    fresh = network(1)
    held = {name: (tensor, tensor.data_ptr()) for name, tensor in fresh.state_dict(keep_vars=True).items()}
    grads = {name: torch.ones_like(p) for name, p in fresh.named_parameters()}
    for name, parameter in fresh.named_parameters():
        parameter.grad = grads[name]
    fresh[0].weight.requires_grad_(False)
    ks.load(tmp_path / "s", {"model": fresh})
    for name, tensor in fresh.state_dict(keep_vars=True).items():
        assert tensor is held[name][0]
        assert tensor.data_ptr() == held[name][1]
    assert all(p.grad is grads[name] for name, p in fresh.named_parameters())
    assert [p.requires_grad for p in fresh.parameters()] == [False, True, True, True, True, True]
    assert_same(state_of(fresh), state_of(model))


class Migrating(nn.Module):
    """Overrides how it is loaded, and counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.calls = 0
        self.derived = None

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.calls += 1
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.derived = state_dict[prefix + "weight"].sum().item()


class Renaming(nn.Module):
    """Saves under other names than those of its parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.zeros(3))

    def state_dict(self, *args, prefix="", **kwargs):
        return {f"{prefix}outer": self.inner.detach() * 2}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        with torch.no_grad():
            self.inner.copy_(state_dict["outer"] / 2)
        return nn.modules.module._IncompatibleKeys([], [])


def test_modules_with_their_own_way_of_loading_are_asked_once(tmp_path):
    model = nn.Sequential(Migrating(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    ks.save(tmp_path / "s", {"model": model})
    fresh = nn.Sequential(Migrating(), nn.Linear(2, 2))
    seen = []
    fresh.register_load_state_dict_post_hook(lambda module, keys: seen.append(list(keys.missing_keys)))
    ks.load(tmp_path / "s", {"model": fresh})
    assert (fresh[0].calls, fresh[0].derived, seen) == (1, 6.0, [[]])
    assert_same(state_of(fresh), state_of(model))

    renaming = Renaming()
    with torch.no_grad():
        renaming.inner.fill_(7)
    ks.save(tmp_path / "renaming", {"model": renaming})
    other = Renaming()
    ks.load(tmp_path / "renaming", {"model": other})
    assert torch.equal(other.inner, torch.full((3,), 7.0))


@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrised_modules_come_back(parametrize, tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(parametrize(nn.Linear(4, 4)), nn.Linear(4, 2))

    def run(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run(model, optimizer, 2)
    ks.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    fresh = build(1)
    restored = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    ks.load(tmp_path / "s", {"model": fresh, "optimizer": restored})
    assert_same(state_of(fresh), state_of(model))
    assert run(fresh, restored, 3) == run(model, optimizer, 3)


def test_targets_on_the_meta_device_are_refused_with_their_keys(tmp_path):
    ks.save(tmp_path / "s", {"model": network()})
    with torch.device("meta"):
        empty = network()
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", {"model": empty})
    text = str(caught.value)
    assert "model/0.weight: the target is a tensor on the meta device" in text
    assert "to_empty" in text
    with pytest.raises(ks.errors.UnsafeValueError, match=r"model/0\.weight: a tensor on the meta device has no bytes"):
        ks.save(tmp_path / "meta", {"model": empty})
    assert not (tmp_path / "meta").exists()
    filled = empty.to_empty(device="cpu")
    ks.load(tmp_path / "s", {"model": filled})
    assert torch.equal(filled[0].weight, ks.open(tmp_path / "s")["model/0.weight"])


def test_lazy_modules_are_refused_until_they_have_shapes(tmp_path):
    lazy = nn.LazyLinear(3)
    with pytest.raises(ks.errors.UnsafeValueError, match="model/weight"):
        ks.save(tmp_path / "s", {"model": lazy})
    lazy(torch.ones(1, 2))
    ks.save(tmp_path / "s", {"model": lazy})
    fresh = nn.LazyLinear(3)
    fresh(torch.ones(1, 2))
    ks.load(tmp_path / "s", {"model": fresh})
    assert_same(state_of(fresh), state_of(lazy))


def test_modules_inside_dicts_and_lists(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        return {"nets": {"a": nn.Linear(2, 2), "b": [nn.Linear(2, 1)]}, "n": seed}

    state = build(0)
    ks.save(tmp_path / "s", state)
    fresh = build(1)
    held = fresh["nets"]["a"], fresh["nets"]["b"][0]
    ks.load(tmp_path / "s", fresh)
    assert (fresh["nets"]["a"], fresh["nets"]["b"][0]) == held
    assert_same(state_of(held[0]), state_of(state["nets"]["a"]))
    assert_same(state_of(held[1]), state_of(state["nets"]["b"][0]))

    more = {"nets": {**build(2)["nets"], "c": nn.Linear(1, 1)}, "n": 2}
    with pytest.raises(ks.errors.MismatchError, match="nets/c: Linear in the target, nothing of that name"):
        ks.load(tmp_path / "s", more)
    kept = more["nets"]["c"]
    report = ks.load(tmp_path / "s", more, strict=False)
    assert report.components["nets"].missing == ["nets/c"]
    assert more["nets"]["c"] is kept


def test_a_module_with_the_name_of_a_container_or_the_reverse_is_a_mismatch(tmp_path):
    ks.save(tmp_path / "module", {"x": nn.Linear(2, 2)})
    ks.save(tmp_path / "values", {"x": {"weight": 1}})
    ks.save(tmp_path / "tensor", {"x": torch.zeros(2)})
    for path, target, where in (
        ("values", nn.Linear(2, 2), "x/weight"),
        ("tensor", nn.Linear(2, 2), "x"),
        ("module", torch.zeros(2), "x"),
        ("module", 3, "x"),
    ):
        with pytest.raises(ks.errors.MismatchError, match=f"{where}: "):
            ks.load(tmp_path / path, {"x": target})


def test_a_module_loads_into_a_dict_of_tensors(tmp_path):
    model = nn.Linear(2, 2)
    ks.save(tmp_path / "s", {"model": model})
    target = {"model": {}}
    ks.load(tmp_path / "s", target)
    assert_same(target["model"], state_of(model))
