"""Loading what one wants: patterns of keys, what may be missing or extra, other values, and a look before it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.errors import MismatchError, UsageError
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched


class Grown(nn.Module):
    def __init__(self, *, head=True, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        if head:
            self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x))


def trained(model, lr=0.1, **more):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, **more}


def bytes_of(state):
    return copy.deepcopy([state["model"].state_dict(), state["optimizer"].state_dict()])


@pytest.fixture
def step(tmp_path):
    torch.manual_seed(0)
    state = trained(Grown(head=False), 0.1, note={"a": 1, "b": {"c": [2]}})
    ks.save(tmp_path / "s", state, step=7)
    torch.manual_seed(1)
    return tmp_path / "s", state


# --- what may be missing or extra -----------------------------------------------------------------------------------


@pytest.mark.case(164)
def test_new_layers_stay_as_they_are_and_everything_else_is_strict(step):
    path, saved = step
    grown = trained(Grown(), note={})
    fresh = copy.deepcopy(dict(grown["model"].head.state_dict()))
    with pytest.raises(MismatchError) as caught:
        ks.load(path, grown)
    assert [line.partition(": ")[0] for line in caught.value.mismatches[:4]] == [
        *("model/head.weight", "model/head.bias"),
        *("optimizer/state/head.weight", "optimizer/state/head.bias"),
    ]
    report = ks.load(path, grown, allow_missing=["model/head.*"])
    assert report.components["model"].missing == ["model/head.weight", "model/head.bias"]
    assert [text.partition(":")[0] for text in report.components["optimizer"].reset] == [
        *("optimizer/state/head.weight", "optimizer/state/head.bias")
    ]
    assert "2 missing (model/head.weight, model/head.bias)" in str(report)
    assert "2 reset (optimizer/state/head.weight: begins anew" in str(report)
    assert_same(dict(grown["model"].head.state_dict()), fresh)
    assert_same(dict(grown["model"].body.state_dict()), dict(saved["model"].body.state_dict()))
    assert grown["model"].head.weight not in grown["optimizer"].state
    assert len(grown["optimizer"].state) == 4


@pytest.mark.case(164)
def test_what_only_the_optimizer_lacks_is_still_an_error(tmp_path):
    state = trained(Grown())
    state["optimizer"] = torch.optim.AdamW([state["model"].head.weight])
    ks.save(tmp_path / "s", state)
    target = trained(Grown())
    with pytest.raises(MismatchError) as caught:
        ks.load(tmp_path / "s", target, allow_missing=["model/head.*"])
    lines = [line.partition(":")[0] for line in caught.value.mismatches]
    assert lines[:5] == [
        "optimizer/state/body.0.weight",
        "optimizer/state/body.0.bias",
        "optimizer/state/body.1.weight",
        "optimizer/state/body.1.bias",
        "optimizer/state/head.bias",
    ]
    ks.load(tmp_path / "s", target, allow_missing=["optimizer/state/*"])
    assert not target["optimizer"].state


@pytest.mark.case(164)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"allow_missing": ["model/bdoy.*"]},
            r"allow_missing='model/bdoy\.\*': no key of the target fits; did you mean",
        ),
        ({"only": ["modle"]}, r"only=modle: the checkpoint has model, optimizer, note; did you mean 'model'\?"),
        ({"only": ["model", "model/layrs.*"]}, r"only=model/layrs\.\*: the checkpoint has"),
        ({"override": {"optimizer/param_groups/*/rl": 1}}, r"override='optimizer/param_groups/\*/rl': no value of the"),
        ({"override": {"model/body.0.weight": 1}}, "it sets plain values, and tensors or objects are there"),
        ({"override": {"optimizer/param_groups/0/lr": "1e-4"}}, "'1e-4', in the place of the number 0.1"),
        ({"override": {"note": {1, 2}}}, "override='note': a set; it sets plain values"),
        ({"only": "model"}, r"only='model': give a list of patterns, such as \['model'\]"),
        ({"allow_extra": [3]}, "allow_extra=3: a pattern is a text"),
        ({"strict": False, "allow_extra": ["x"]}, "strict=False allows everything"),
        ({"only": ["optimizer/state/*/step", "note/b/c/0"]}, "note/b/c: only= takes a list whole or not at all"),
    ],
)
def test_what_means_nothing_is_said_and_changes_nothing(step, options, message):
    path, _ = step
    target = trained(Grown(head=False), 0.3, note={"a": 5})
    before = bytes_of(target)
    with pytest.raises(ks.errors.CheckpointError, match=message) as caught:
        ks.load(path, target, **options)
    assert isinstance(caught.value, UsageError | MismatchError)
    assert_same(bytes_of(target), before)
    assert target["note"] == {"a": 5}


def test_what_the_target_has_no_place_for_may_be_named(step):
    path, saved = step
    small = Grown(head=False)
    del small.body[1]
    target = trained(small)
    with pytest.raises(
        MismatchError, match=r"model/body\.1\.weight: in the checkpoint, not in the target module"
    ) as caught:
        ks.load(path, target, allow_extra=["note", "model/bdoy.*"])
    assert not [line for line in caught.value.mismatches if line.startswith("note")]
    assert any(
        "allow_extra='model/bdoy.*': no key of the checkpoint fits; did you" in x for x in caught.value.mismatches
    )
    report = ks.load(path, target, allow_extra=["note", "**/body.1.*", "gone/*"])
    assert report.components["model"].unexpected == ["model/body.1.weight", "model/body.1.bias"]
    assert report.components["note"].unexpected == ["note"]
    assert report.notes == ("allow_extra='gone/*': no key of the checkpoint fits",)
    assert "note: allow_extra='gone/*'" in str(report)
    assert torch.equal(small.body[0].weight, saved["model"].body[0].weight)


# --- parts of components --------------------------------------------------------------------------------------------


@pytest.mark.case(163)
def test_some_layers_of_a_model_read_their_own_bytes(tmp_path):
    saved = trained(Grown(head=False, width=256))
    ks.save(tmp_path / "s", saved)
    target = trained(Grown(width=256))
    before = bytes_of(target)
    storage = Watched(tmp_path / "s")
    report = ks.load(storage, target, only=["model/body.1.*"])
    assert report.bytes_needed == 256 * 257 * 4
    assert storage.read_bytes <= report.bytes_needed + 5 * 64 * 1024
    assert {name.partition("/")[0] for name in storage.names["open"]} == {".metadata", "model", "state"}
    assert torch.equal(target["model"].body[1].weight, saved["model"].body[1].weight)
    del before[0]["body.1.weight"], before[0]["body.1.bias"]
    after = bytes_of(target)
    del after[0]["body.1.weight"], after[0]["body.1.bias"]
    assert_same(after, before)
    assert report.components["optimizer"].skipped
    # What is asked for has to be there.
    with pytest.raises(MismatchError, match=r"model/head\.weight: in the target module, not in the checkpoint"):
        ks.load(tmp_path / "s", target, only=["model/[b-h]*"])


def test_parts_of_an_optimizer_leave_the_others(step):
    path, saved = step
    target = trained(Grown(head=False), 0.7)
    model, optimizer = target["model"], target["optimizer"]
    names = dict(zip(["0w", "0b", "1w", "1b"], model.parameters(), strict=True))
    before = {name: copy.deepcopy(optimizer.state[parameter]) for name, parameter in names.items()}
    theirs = dict(zip(names, (saved["optimizer"].state[p] for p in saved["model"].parameters()), strict=True))
    group = optimizer.param_groups[0]
    ks.load(path, target, only=["optimizer/state/body.0.*", "optimizer/state/body.1.bias/exp_avg"])
    for name in ("0w", "0b"):
        assert_same(dict(optimizer.state[names[name]]), dict(theirs[name]))
    assert_same(optimizer.state[names["1w"]], before["1w"])
    assert torch.equal(optimizer.state[names["1b"]]["exp_avg"], theirs["1b"]["exp_avg"])
    assert torch.equal(optimizer.state[names["1b"]]["exp_avg_sq"], before["1b"]["exp_avg_sq"])
    assert group["lr"] == 0.7
    group["weight_decay"] = 0.9
    ks.load(path, target, only=["optimizer/param_groups/*/lr"])
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.9)
    assert_same(optimizer.state[names["1w"]], before["1w"])
    ks.load(path, target, only=["optimizer/state/**"])
    assert_same(dict(optimizer.state[names["1w"]]), dict(theirs["1w"]))
    assert group["weight_decay"] == 0.9


def test_parts_of_dictionaries(step):
    path, _ = step
    target = {"note": {"a": 9, "b": {"d": 4}, "e": 5}}
    ks.load(path, target, only=["note/b/c"])
    assert target["note"] == {"a": 9, "b": {"d": 4, "c": [2]}, "e": 5}
    target = {"note": {"a": 9}}
    ks.load(path, target, only=["note/b"])
    assert target["note"] == {"a": 9, "b": {"c": [2]}}
    assert_same(ks.load(path, target, only=["note"]).components["note"].missing, [])
    assert target["note"] == {"a": 1, "b": {"c": [2]}}


@pytest.mark.parametrize("name", ["a/b", "1", "x[0]", "~", " "])
def test_components_may_have_any_name(tmp_path, name):
    ks.save(tmp_path / "s", {name: {"v": 1}, "other": 2})
    target = {name: {"v": 5}, "other": 6}
    report = ks.load(tmp_path / "s", target, only=[name], override={"**/v": 7})
    assert target == {name: {"v": 7}, "other": 6}
    assert len(report.components[name].overridden) == 1
    assert report.components["other"].skipped


# --- other values, a look, other names ------------------------------------------------------------------------------


def test_values_are_set_instead_of_saved_ones(step):
    path, saved = step
    target = trained(Grown(head=False), 0.7, note={})
    report = ks.load(path, target, override={"optimizer/param_groups/*/lr": 1e-4, "note/b/c": [3, 4]})
    assert target["optimizer"].param_groups[0]["lr"] == 1e-4
    assert target["note"] == {"a": 1, "b": {"c": [3, 4]}}
    assert report.components["optimizer"].overridden == ["optimizer/param_groups/0/lr"]
    assert "1 overridden (optimizer/param_groups/0/lr)" in str(report)
    assert_same(dict(target["model"].state_dict()), dict(saved["model"].state_dict()))
    target["optimizer"].param_groups[0]["lr"] = torch.tensor(0.5)
    ks.save(path, target, overwrite=True)
    ks.load(path, target, override={"optimizer/**/lr": 0.25})
    assert torch.equal(target["optimizer"].param_groups[0]["lr"], torch.tensor(0.25))


def test_a_dry_run_reads_no_tensor_and_changes_nothing(step):
    path, _ = step
    target = trained(Grown(), 0.7, note={"a": 0})
    before = bytes_of(target)
    storage = Watched(path)
    report = ks.load(storage, target, allow_missing=["**/head.*"], dry_run=True)
    assert_same(bytes_of(target), before)
    assert target["note"] == {"a": 0}
    assert {name.partition("/")[0] for name in storage.names["open"]} == {".metadata", "state"}
    needed = 3 * 2 * (16 + 4) * 4 + 4 * 4
    assert (report.dry, report.bytes_needed, report.rank_bytes, report.bytes_read) == (True, needed, (needed,), 0)
    assert {name.partition("/")[0]: count for name, count in report.files.items()} == {
        "model": 2 * 20 * 4,
        "optimizer": needed - 2 * 20 * 4,
    }
    assert all((path / name).exists() for name in report.files)
    text = str(report)
    assert f"a dry run: would restore step 7 from {path}" in text
    assert f"reads {needed:,} bytes (rank 0)" in text
    assert f"160 bytes of {next(iter(report.files))}" in text
    with pytest.raises(MismatchError, match=r"model/head\.weight"):
        ks.load(storage, target, dry_run=True)
    renamed = ks.load(path, target, allow_missing=["**/head.*"], rename={"^model/bdoy": "model/body"}, dry_run=True)
    assert renamed.notes == ("rename='^model/bdoy': found in no key of the checkpoint",)
    ks.load(path, target, allow_missing=["**/head.*"])
    assert target["note"]["a"] == 1


def test_a_run_that_goes_on_takes_the_same_options(tmp_path):
    def run(head, **options):
        torch.manual_seed(head)
        state = ks.TrainState(**trained(Grown(head=head)))
        with ks.Checkpointer(tmp_path / "run", state, background="off") as keeper:
            report = keeper.restore(**options)
            keeper.step()
            keeper.save()
        return state, report

    first, _ = run(False)
    growth = {"allow_missing": ["model/head.*"], "override": {"optimizer/param_groups/*/lr": 0.5}}
    second, report = run(True, **growth)
    assert (report.step, len(report.components["optimizer"].reset)) == (1, 2)
    assert torch.equal(second["model"].body[0].weight, first["model"].body[0].weight)
    assert second["optimizer"].param_groups[0]["lr"] == 0.5
    # The same call, when the new layers have been saved: they come back like everything else.
    third, report = run(True, **growth)
    assert (report.step, report.components["model"].missing) == (2, [])
    assert torch.equal(third["model"].head.weight, second["model"].head.weight)


# --- frozen parameters ----------------------------------------------------------------------------------------------


def tuned(seed, leave_out=("model/body.**",)):
    """A frozen body, a head that learns, and the optimizer of that."""
    torch.manual_seed(seed)
    model = Grown()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return ks.TrainState(model=model, optimizer=optimizer, leave_out=leave_out)


def test_what_is_frozen_is_left_out_and_demanded_back(tmp_path):
    base = tuned(0, ())
    ks.save(tmp_path / "base", base)
    first = tuned(0)
    ks.save(tmp_path / "s", first, step=4)
    with ks.open(tmp_path / "s") as opened:
        assert [key for key in opened if key.startswith("model/")] == ["model/head.weight", "model/head.bias"]
        assert opened.manifest.components["model"].left_out == ("model/body.**",)
        assert opened.manifest.components["optimizer"].left_out == ()
    target = tuned(1)
    before = copy.deepcopy(target["model"].state_dict())
    with pytest.raises(MismatchError) as caught:
        ks.load(tmp_path / "s", target)
    assert caught.value.mismatches == tuple(
        f"model/body.{layer}.{name}: left out when it was saved; left_out= names the step that has it"
        for layer in (0, 1)
        for name in ("weight", "bias")
    )
    with pytest.raises(ks.errors.StepNotFoundError):
        ks.load(tmp_path / "s", target, left_out=tmp_path / "nowhere")
    # A source without it, one that has no model at all, and one that has itself left it out.
    ks.save(tmp_path / "other", {"model": nn.Linear(1, 1)})
    ks.save(tmp_path / "none", {"notes": 1})
    keys = [f"model/body.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")]
    for source in ("other", "none", "s"):
        with pytest.raises(MismatchError) as caught:
            ks.load(tmp_path / "s", target, left_out=tmp_path / source)
        assert [line.partition(":")[0] for line in caught.value.mismatches] == keys
        assert str(tmp_path / source) in str(caught.value)
    look = ks.load(tmp_path / "s", target, left_out=tmp_path / "base", dry_run=True)
    assert look.dry
    assert look.notes == (f"what was left out comes from {tmp_path / 'base'}",)
    assert_same(dict(target["model"].state_dict()), dict(before))
    report = ks.load(tmp_path / "s", target, left_out=tmp_path / "base")
    assert report.step == 4
    assert report.components["model"].missing == []
    assert report.components["model"].noted == ["4 left out when it was saved, taken from another step"]
    assert report.notes == (f"what was left out came from {tmp_path / 'base'}",)
    assert_same(dict(target["model"].state_dict()), dict(first["model"].state_dict()))
    assert_same(target["optimizer"].state_dict(), first["optimizer"].state_dict())
    # Of a step that holds everything nothing has to come from elsewhere.
    again = tuned(2)
    assert "nothing was left out of this step" in ks.load(tmp_path / "base", again, left_out=tmp_path / "base").notes
    assert_same(dict(again["model"].state_dict()), dict(base["model"].state_dict()))


def test_a_run_leaves_out_what_is_frozen_save_after_save(tmp_path):
    base = tuned(0, ())
    ks.save(tmp_path / "base", base)
    state = tuned(0)
    with ks.Checkpointer(tmp_path / "run", state, background="off") as keeper:
        keeper.restore(left_out=tmp_path / "base")
        for _ in range(2):
            keeper.step()
            keeper.save()
    sizes = [
        sum(file.stat().st_size for file in folder.glob("model/*")) for folder in (tmp_path / "run").glob("step-*")
    ]
    assert len(sizes) == 2
    fresh = tuned(3)
    with ks.Checkpointer(tmp_path / "run", fresh, background="off") as keeper:
        report = keeper.restore(left_out=tmp_path / "base")
    assert report.step == 2
    assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))


# --- other shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_shape_takes_what_both_have(tmp_path):
    saved = torch.arange(40.0).reshape(10, 4)
    ks.save(tmp_path / "s", {"w": [saved], "n": [torch.ones(3)]})

    def shard(rows, at, width=4, dtype=torch.float32):
        return ks.sharded(torch.full((rows, width), -1.0, dtype=dtype), global_shape=(13, width), offsets=(at, 0))

    for part, options in (
        (shard(5, 7), {}),
        (shard(3, 10), {}),
        (shard(6, 0, width=2), {}),
        (shard(5, 7, width=6, dtype=torch.float16), {"cast": True}),
        (torch.full((13, 3), -1.0), {}),
        (torch.full((4, 9), -1.0, dtype=torch.float64), {"cast": {"w": torch.float64}}),
        (torch.full((9, 13), -1.0).t(), {}),
    ):
        target = {"w": [part], "n": [torch.zeros(3)]}
        report = ks.load(tmp_path / "s", target, allow_resized=["w"], **options)
        local, at = (part, 0) if isinstance(part, torch.Tensor) else (part.local, part.starts[0][0])
        expected = torch.full_like(local, -1.0)
        rows, columns = max(min(len(local), 10 - at), 0), min(local.shape[1], 4)
        expected[:rows, :columns] = saved[at : at + rows, :columns].to(local.dtype)
        assert_same(local.contiguous(), expected.contiguous())
        assert len(report.components["w"].resized) == 1
        assert torch.equal(target["n"][0], torch.ones(3))
    for wrong in (torch.zeros(40), torch.zeros(10, 4, 1), torch.zeros(())):
        with pytest.raises(MismatchError, match=r"w/0: saved with shape \[10, 4\], the target has"):
            ks.load(tmp_path / "s", {"w": [wrong], "n": [torch.zeros(3)]}, allow_resized=["w"])
    with pytest.raises(MismatchError, match=r"n/0: saved with shape \[3\], the target has \[4\]"):
        ks.load(tmp_path / "s", {"w": [saved.clone()], "n": [torch.zeros(4)]}, allow_resized=["w"])


@pytest.mark.slow
def test_state_that_is_not_of_the_parameters_shape_begins_anew(tmp_path):
    def state(words):
        model = nn.Embedding(words, 4)
        optimizer = torch.optim.Adafactor(model.parameters())
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, target = state(10), state(13)
    ks.save(tmp_path / "s", saved)
    report = ks.load(tmp_path / "s", target, allow_resized=["model/weight"])
    assert report.components["optimizer"].reset == [
        "optimizer/state/weight: begins anew, as its parameter has another shape"
    ]
    assert not target["optimizer"].state
    assert torch.equal(target["model"].weight[:10], saved["model"].weight)
    target["optimizer"].step()
