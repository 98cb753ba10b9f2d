"""What people do with steps that do not quite fit: each story saves in one layout and loads in another one.

``STORIES`` holds pairs of functions of a folder and a layout (see ``tests.resharding.models.spread``): the first saves, the
second loads and checks, in every process that takes part.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

import keepstep as ks
from keepstep.errors import MismatchError
from tests.helpers.same import assert_same, bits
from tests.resharding.models import spread

WIDTH = 6


class Net(nn.Module):
    def __init__(self, layers=2, *, vocabulary=10, lora=False, head=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        if lora:
            self.lora = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        if head:
            self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) + (self.lora[number](x) if hasattr(self, "lora") else 0)
        return self.head(x) if hasattr(self, "head") else x


def state_of(layout, seed, *, groups=None, steps=0, **shape):
    """A run of so many steps. ``groups`` makes the parameter groups of a model."""
    torch.manual_seed(seed)
    model = spread(Net(**shape), layout)
    parameters = model.parameters() if groups is None else groups(model)
    state = {"model": model, "optimizer": torch.optim.AdamW(parameters, lr=0.1)}
    for _ in range(steps):
        step(state)
    return state


def step(state):
    state["model"](torch.arange(10)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def whole(value):
    """A live value with whole tensors of its own."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def weights(state):
    return whole(dict(state["model"].state_dict()))


def moments(state):
    """The optimizer's state by the name of the parameter."""
    held = state["optimizer"].state
    return {name: whole(dict(held[p])) for name, p in state["model"].named_parameters() if p in held}


def local_bits(state):
    """Every bit that this process holds, of tensors and of plain values."""
    local = {
        name: bits(value.to_local() if isinstance(value, DTensor) else value)
        for name, value in state["model"].state_dict().items()
    }
    return local, str(state["optimizer"].state_dict()["param_groups"]), moments(state)


def part(tensors, prefix):
    return {name: value for name, value in tensors.items() if name.startswith(prefix)}


# --- a base and an adapter ------------------------------------------------------------------------------------------


def save_adapter(folder, layout):
    ks.save(f"{folder}/base", state_of(layout, 0, steps=1))
    tuned = state_of(layout, 1, steps=1, lora=True)
    lora = {name: value for name, value in tuned["model"].state_dict().items() if name.startswith("lora")}
    ks.save(f"{folder}/adapter", {"model": lora})


def load_adapter(folder, layout):
    state = state_of(layout, 2, lora=True)
    ks.load(f"{folder}/base", state, only=["model"], allow_missing=["model/lora.*"])
    report = ks.load(f"{folder}/adapter", state, only=["model/lora.*"])
    assert report.components["model"].missing == []
    assert_same(part(weights(state), "l"), part(read(folder, "base"), "layers") | read(folder, "adapter"))
    assert_same(weights(state)["embed.weight"], read(folder, "base")["embed.weight"])


def read(folder, name, component="model"):
    """The whole tensors of a component, as the step holds them."""
    with ks.open(f"{folder}/{name}") as opened:
        prefix = f"{component}/"
        return {key.removeprefix(prefix): opened[key] for key in opened if key.startswith(prefix)}


def flat(tree, path=""):
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    return {
        found: item
        for key, value in tree.items()
        for found, item in flat(value, f"{path}/{key}" if path else key).items()
    }


# --- a frozen base that is in no step of the run ----------------------------------------------------------------------

AWAY = ["model/embed.*", "model/layers.**"]


def frozen(layout, seed):
    torch.manual_seed(seed)
    model = Net(lora=True)
    model.embed.requires_grad_(False)
    model.layers.requires_grad_(False)
    model = spread(model, layout)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return ks.TrainState(model=model, optimizer=optimizer, leave_out=AWAY)


def save_frozen(folder, layout):
    ks.save(f"{folder}/base", state_of(layout, 30))
    other = state_of(layout, 30)
    with torch.no_grad():
        other["model"].layers[1].weight.mul_(1.001)
    ks.save(f"{folder}/other", other)
    state = frozen(layout, 31)
    ks.load(f"{folder}/base", state, only=["model"], allow_missing=["model/lora.*"])
    step(state)
    ks.save(f"{folder}/tuned", state, step=3)
    assert all(name.startswith("lora") for name in read(folder, "tuned"))


def load_frozen(folder, layout):
    state = frozen(layout, 32)
    before = local_bits(state)
    with pytest.raises(MismatchError, match="another base than the one it had"):
        ks.load(f"{folder}/tuned", state, left_out=f"{folder}/other")
    with pytest.raises(
        MismatchError, match=r"model/embed\.weight: left out when it was saved; left_out= names the step"
    ):
        ks.load(f"{folder}/tuned", state)
    assert_same(local_bits(state), before)
    look = ks.load(f"{folder}/tuned", state, left_out=f"{folder}/base", dry_run=True)
    assert_same(local_bits(state), before)
    report = ks.load(f"{folder}/tuned", state, left_out=f"{folder}/base")
    assert report.bytes_needed == look.bytes_needed
    assert sum(look.rank_bytes) == sum(look.files.values())
    assert_same(weights(state), read(folder, "base") | read(folder, "tuned"))
    assert_same(flat(moments(state)), read(folder, "tuned", "optimizer/state"))
    with ks.open(f"{folder}/tuned") as opened:
        assert opened.manifest.components["model"].left_out_from == state.left_out_from != ""
    step(state)


# --- model from one, optimizer from another -------------------------------------------------------------------------


def save_two(folder, layout):
    ks.save(f"{folder}/a", state_of(layout, 3, steps=1))
    ks.save(f"{folder}/b", state_of(layout, 4, steps=2))


def load_two(folder, layout):
    for first, second in (("model", "optimizer"), ("optimizer", "model")):
        state = state_of(layout, 5, steps=1)
        for component in (first, second):
            ks.load(f"{folder}/{'a' if component == 'model' else 'b'}", state, only=[component])
        assert_same(weights(state), read(folder, "a"))
        assert_same(flat(moments(state)), part(read(folder, "b", "optimizer/state"), ""))
        step(state)


# --- a model that has grown, and one that has shrunk ----------------------------------------------------------------


def biases_apart(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "lr": 0.3},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.5},
    ]


def biases_and_head_apart(model):
    """Groups of other parameters in another order: what belongs to a parameter is found by its name."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.startswith("head")], "lr": 0.7},
        {"params": [p for n, p in named if n.endswith("bias") and not n.startswith("head")], "weight_decay": 0.9},
        {"params": [p for n, p in named if n.endswith("weight") and not n.startswith("head")], "lr": 0.8},
    ]


def save_small(folder, layout):
    ks.save(f"{folder}/small", state_of(layout, 6, groups=biases_apart, steps=2))
    ks.save(f"{folder}/large", state_of(layout, 7, groups=biases_and_head_apart, steps=2, layers=3, head=True))


def load_grown(folder, layout):
    grown = state_of(layout, 8, groups=biases_and_head_apart, layers=3, head=True)
    fresh = weights(grown)
    new = ["model/layers.2.*", "model/head.*"]
    names = ["layers.2.weight", "layers.2.bias", "head.weight", "head.bias"]
    with pytest.raises(MismatchError) as caught:
        ks.load(f"{folder}/small", grown, allow_missing=new[:1])
    assert {line.partition(":")[0] for line in caught.value.mismatches} >= {"model/head.weight", "model/head.bias"}
    assert_same(weights(grown), fresh)
    report = ks.load(f"{folder}/small", grown, allow_missing=new)
    assert report.components["model"].missing == [f"model/{name}" for name in names]
    assert {text.partition(":")[0] for text in report.components["optimizer"].reset} == {
        f"optimizer/state/{name}" for name in names
    }
    assert_same(weights(grown), {**{name: fresh[name] for name in fresh}, **read(folder, "small")})
    assert set(moments(grown)) == {name for name in fresh if name not in names}
    assert_same(
        dict(sorted(flat(moments(grown)).items())), dict(sorted(read(folder, "small", "optimizer/state").items()))
    )
    first, second, third = grown["optimizer"].param_groups
    assert (first["lr"], second["weight_decay"], third["lr"]) == (0.7, 0.5, 0.3)
    step(grown)
    assert set(moments(grown)) == set(fresh)


def load_shrunk(folder, layout):
    shrunk = state_of(layout, 9, groups=biases_apart, steps=1)
    before = local_bits(shrunk)
    with pytest.raises(MismatchError) as caught:
        ks.load(f"{folder}/large", shrunk)
    gone = ["layers.2.weight", "layers.2.bias", "head.weight", "head.bias"]
    lines = {line.partition(":")[0] for line in caught.value.mismatches}
    assert lines >= {f"model/{name}" for name in gone} | {f"optimizer/state/{name}" for name in gone}
    assert_same(local_bits(shrunk), before)
    ks.load(f"{folder}/large", shrunk, allow_extra=["**/layers.2.*", "**/head.*"])
    there = read(folder, "large")
    assert_same(weights(shrunk), {name: there[name] for name in weights(shrunk)})
    assert set(moments(shrunk)) == set(weights(shrunk))
    assert [group["lr"] for group in shrunk["optimizer"].param_groups] == [0.8, 0.1]
    assert shrunk["optimizer"].param_groups[1]["weight_decay"] == 0.9
    step(shrunk)


# --- a second model that joins, and leaves -----------------------------------------------------------------------------


def with_teacher(layout, seed, steps=0):
    state = state_of(layout, seed, groups=biases_apart, steps=steps)
    return {**state, "teacher": spread(Net(), layout)}


def save_one_and_both(folder, layout):
    ks.save(f"{folder}/one", state_of(layout, 17, groups=biases_apart, steps=2))
    ks.save(f"{folder}/both", with_teacher(layout, 18, steps=2))


def load_both_and_one(folder, layout):
    for name, state, options in (
        ("one", with_teacher(layout, 19), {"allow_missing": ["teacher"]}),
        ("both", state_of(layout, 20, groups=biases_apart), {"allow_extra": ["teacher"]}),
        ("both", state_of(layout, 21, groups=biases_apart, steps=1), {"only": ["model", "optimizer"]}),
        (
            "one",
            with_teacher(layout, 22, steps=1),
            {"only": ["model", "optimizer/state/**", "optimizer/param_groups/**"]},
        ),
    ):
        teacher = whole(dict(state["teacher"].state_dict())) if "teacher" in state else None
        ks.load(f"{folder}/{name}", state, **options)
        assert_same(weights(state), read(folder, name))
        prefix = "" if name == "one" else "model."
        there = {key.removeprefix(prefix): value for key, value in read(folder, name, "optimizer/state").items()}
        assert_same(dict(sorted(flat(moments(state)).items())), dict(sorted(there.items())))
        assert [group["lr"] for group in state["optimizer"].param_groups] == [0.3, 0.1]
        if teacher is not None:
            assert_same(whole(dict(state["teacher"].state_dict())), teacher)
        step(state)


# --- some of the layers, with other numbers -------------------------------------------------------------------------


def save_deep(folder, layout):
    ks.save(f"{folder}/deep", state_of(layout, 10, steps=1, layers=4))


def every_other(key):
    head, dot, rest = key.partition("model/layers.")
    if not dot:
        return key
    number, _, name = rest.partition(".")
    return None if int(number) % 2 else f"{head}{dot}{int(number) // 2}.{name}"


def load_every_other(folder, layout):
    by_pattern = {r"^model/layers\.[13]\.": None, r"^model/layers\.2\.": "model/layers.1."}
    deep, held = read(folder, "deep"), read(folder, "deep", "optimizer/state")
    for rename in (every_other, by_pattern):
        state = state_of(layout, 11)
        report = ks.load(f"{folder}/deep", state, rename=rename)
        assert any(
            "4 keys have no name by rename=, and are not loaded: model/layers.1.weight" in n for n in report.notes
        )
        for name, value in weights(state).items():
            old = name.replace("layers.1.", "layers.2.")
            assert_same(value, deep[old])
            assert_same(moments(state)[name]["exp_avg"], held[f"{old}/exp_avg"])
        step(state)


# --- other learning rates -------------------------------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


def scheduled(layout, seed, kind):
    state = state_of(layout, seed, groups=biases_apart)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.2, momentum=0.9)
    scheduler = SCHEDULERS[kind](state["optimizer"])
    return {**state, "second": other, "scheduler": scheduler}


def save_schedules(folder, layout):
    for kind in SCHEDULERS:
        state = scheduled(layout, 12, kind)
        for _ in range(2):
            step(state)
            state["scheduler"].step()
        ks.save(f"{folder}/schedule.{kind}", state)


def load_schedules(folder, layout):
    for kind in SCHEDULERS:
        by_hand, told = scheduled(layout, 13, kind), scheduled(layout, 14, kind)
        ks.load(f"{folder}/schedule.{kind}", by_hand)
        for group in (*by_hand["optimizer"].param_groups, *by_hand["second"].param_groups):
            group["lr"] = 0.01
        for group in by_hand["optimizer"].param_groups:
            group["initial_lr"] = 0.02
        inner = getattr(by_hand["scheduler"], "_schedulers", [by_hand["scheduler"]])
        for scheduler in inner:
            scheduler.base_lrs = [0.02, 0.02]
        override = {"*/param_groups/*/lr": 0.01, "optimizer/param_groups/*/initial_lr": 0.02, "**/base_lrs/*": 0.02}
        report = ks.load(f"{folder}/schedule.{kind}", told, override=override)
        assert len(report.components["optimizer"].overridden) == 4
        assert report.components["second"].overridden == ["second/param_groups/0/lr"]
        assert len(report.components["scheduler"].overridden) == 2 * len(inner)
        for state in (by_hand, told):
            state["rates"] = []
            for _ in range(4):
                state["rates"].append([group["lr"] for group in state["optimizer"].param_groups])
                step(state)
                state["scheduler"].step()
        assert told["rates"][0] == [0.01, 0.01]
        assert_same(told["rates"], by_hand["rates"])
        assert_same(weights(told), weights(by_hand))


def load_scheduled_grown(folder, layout):
    """A group more than there was: its rates are nowhere in the step."""
    for kind in SCHEDULERS:
        torch.manual_seed(23)
        grown = state_of(layout, 23, groups=biases_and_head_apart, head=True)
        state = {**grown, "scheduler": SCHEDULERS[kind](grown["optimizer"])}
        before = copy.deepcopy(state["scheduler"].state_dict())
        there = {"only": ["model", "optimizer", "scheduler"], "allow_missing": ["model/head.*"]}
        with pytest.raises(MismatchError) as caught:
            ks.load(f"{folder}/schedule.{kind}", state, **there)
        inner = getattr(state["scheduler"], "_schedulers", None)
        paths = ["scheduler"] if inner is None else [f"scheduler/_schedulers/{number}" for number in range(len(inner))]
        text = "saved for 2 parameter groups, the optimizer has 3 (override= sets 3 values)"
        assert caught.value.mismatches == tuple(f"{path}/base_lrs: {text}" for path in paths)
        assert_same(state["scheduler"].state_dict(), before)
        ks.load(f"{folder}/schedule.{kind}", state, override={"**/base_lrs": [0.7, 0.1, 0.3]}, **there)
        assert all(one.base_lrs == [0.7, 0.1, 0.3] for one in (inner or [state["scheduler"]]))
        assert (inner or [state["scheduler"]])[0].last_epoch == 2
        step(state)
        state["scheduler"].step()
        assert len(state["scheduler"].get_last_lr()) == 3


# --- an embedding that has grown ------------------------------------------------------------------------------------


def save_embedding(folder, layout):
    ks.save(f"{folder}/vocabulary", state_of(layout, 15, steps=1))


def load_embedding(folder, layout):
    for only in (None, ["optimizer"]):
        state = state_of(layout, 16, vocabulary=13, steps=1)
        before = local_bits(state)
        with pytest.raises(MismatchError) as caught:
            ks.load(f"{folder}/vocabulary", state, only=only)
        model = f"model/embed.weight: saved with shape [10, {WIDTH}], the target has [13, {WIDTH}]"
        text = f"the state of a parameter that had the shape [10, {WIDTH}], and has [13, {WIDTH}] now"
        held = [f"optimizer/state/embed.weight/{name}: {text}" for name in ("exp_avg", "exp_avg_sq")]
        assert caught.value.mismatches == ((model, *held) if only is None else tuple(held))
        assert "Nothing was changed." in str(caught.value)
        assert_same(local_bits(state), before)


def load_embedding_anyway(folder, layout):
    """More words and fewer: what both have comes back, with its moments; nothing else of the target is touched."""
    there, held = read(folder, "vocabulary")["embed.weight"], read(folder, "vocabulary", "optimizer/state")
    for words, steps, cast in ((13, 0, False), (7, 1, False), (13, 1, {"model/embed.*": True, "optimizer": None})):
        state = state_of(layout, 17, vocabulary=words)
        if steps:
            state["model"](torch.arange(5)).sum().backward()
            state["optimizer"].step()
        before = weights(state)["embed.weight"]
        allowed = {"allow_resized": ["model/embed.*"], "cast": cast}
        look = ks.load(f"{folder}/vocabulary", state, dry_run=True, **allowed)
        assert_same(weights(state)["embed.weight"], before)
        report = ks.load(f"{folder}/vocabulary", state, **allowed)
        assert report.bytes_needed == look.bytes_needed
        assert report.components["model"].resized == [f"model/embed.weight: [10, {WIDTH}] into [{words}, {WIDTH}]"]
        assert "1 resized (model/embed.weight: [10" in str(report)
        both = min(words, 10)
        assert_same(weights(state)["embed.weight"], torch.cat([there[:both], before[both:]]))
        assert_same(weights(state)["layers.1.bias"], read(folder, "vocabulary")["layers.1.bias"])
        got = moments(state)["embed.weight"]
        for name in ("exp_avg", "exp_avg_sq"):
            saved = held[f"embed.weight/{name}"]
            assert_same(got[name], torch.cat([saved[:both], torch.zeros(words - both, WIDTH)]))
        assert_same(got["step"], held["embed.weight/step"])
        state["model"](torch.arange(words)).sum().backward()
        state["optimizer"].step()
    narrow = state_of(layout, 18, vocabulary=12)
    with pytest.raises(
        MismatchError, match=r"allow_resized='model/embde\.\*': no key of the target fits; did you mean"
    ):
        ks.load(f"{folder}/vocabulary", narrow, allow_resized=["model/embed.*", "model/embde.*"])


STORIES = {
    "adapter": (save_adapter, load_adapter),
    "frozen": (save_frozen, load_frozen),
    "two": (save_two, load_two),
    "grown": (save_small, load_grown),
    "shrunk": (save_small, load_shrunk),
    "teacher": (save_one_and_both, load_both_and_one),
    "renumbered": (save_deep, load_every_other),
    "schedules": (save_schedules, load_schedules),
    "schedules of more groups": (save_schedules, load_scheduled_grown),
    "embedding": (save_embedding, load_embedding),
    "embedding that may": (save_embedding, load_embedding_anyway),
}
