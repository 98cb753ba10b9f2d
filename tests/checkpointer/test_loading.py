"""ks.load and ks.open: what is read, what is reported, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched

MIB = 1 << 20


def run_state(seed=0, width=128):
    torch.manual_seed(seed)
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "note": {"seed": seed}}


@pytest.fixture
def saved(tmp_path):
    state = run_state()
    ks.save(tmp_path / "s", state, step=12)
    return tmp_path / "s", state


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.case(163)
def test_only_the_model_reads_only_the_models_bytes(tmp_path):
    state = run_state(width=512)
    ks.save(tmp_path / "s", state)
    storage = Watched(tmp_path / "s")
    model = nn.Linear(512, 512)
    report = ks.load(storage, {"model": model}, only=["model"])
    assert_same(dict(model.state_dict()), dict(state["model"].state_dict()))
    wanted = 512 * 513 * 4
    small = 4 * 64 * 1024  # the manifest, two headers, the plain values
    assert report.bytes_needed == wanted
    assert wanted <= report.bytes_read <= storage.read_bytes <= wanted + small
    assert {name.partition("/")[0] for name in storage.names["open"]} == {".metadata", "model", "state"}
    assert sum(file.stat().st_size for file in (tmp_path / "s").rglob("*") if file.is_file()) > 3 * wanted
    assert report.components["optimizer"].skipped
    assert report.components["model"].restored == 2


def test_opening_reads_the_manifest_and_a_key_reads_that_key(tmp_path):
    state = {name: [torch.full((MIB // 4,), float(i))] for i, name in enumerate("abc")}
    ks.save(tmp_path / "s", state)
    storage = Watched(tmp_path / "s")
    with ks.open(storage) as opened:
        assert storage.names["open"] == [".metadata"]
        assert "b/0" in opened
        assert len(opened) == 3
        assert sorted(opened.keys()) == ["a/0", "b/0", "c/0"]
        assert storage.names["open"] == [".metadata"]
        before = storage.read_bytes
        assert torch.equal(opened["b/0"], state["b"][0])
        assert MIB <= storage.read_bytes - before <= MIB + 70_000
        assert {name.partition("/")[0] for name in storage.names["open"][1:]} == {"b"}


@pytest.mark.case(102)
def test_a_slice_reads_its_own_part(tmp_path):
    rows, columns = 1024, 2048
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    ks.save(tmp_path / "s", {"big": [tensor]})
    whole = rows * columns * 4
    for part in range(4):
        local = torch.zeros(rows // 4, columns)
        offsets = (part * rows // 4, 0)
        report = ks.load(tmp_path / "s", {"big": [ks.sharded(local, global_shape=(rows, columns), offsets=offsets)]})
        assert torch.equal(local, tensor[offsets[0] : offsets[0] + rows // 4])
        assert report.bytes_needed == whole // 4
        assert report.bytes_read <= whole // 4 * 1.02
    # A box that is not a run of whole rows, and an empty one.
    local = torch.zeros(100, 512)
    ks.load(tmp_path / "s", {"big": [ks.sharded(local, global_shape=(rows, columns), offsets=(77, 700))]})
    assert torch.equal(local, tensor[77:177, 700:1212])
    ks.load(
        tmp_path / "s", {"big": [ks.sharded(torch.zeros(0, columns), global_shape=(rows, columns), offsets=(5, 0))]}
    )


def test_shards_of_one_process_must_cover_the_tensor(tmp_path):
    def half(rows, at):
        return ks.sharded(torch.full((rows, 3), 2.0), global_shape=(4, 3), offsets=(at, 0))

    with pytest.raises(ks.errors.CheckpointError, match="t"):
        ks.save(tmp_path / "hole", {"t": half(2, 0)})
    assert not (tmp_path / "hole" / ".metadata").exists()
    ks.save(tmp_path / "whole", {"t": half(4, 0)})
    target = {"t": torch.zeros(4, 3)}
    ks.load(tmp_path / "whole", target)
    assert torch.equal(target["t"], torch.full((4, 3), 2.0))


@pytest.mark.parametrize(
    ("shape", "offsets", "whole"),
    [((2, 3), (3, 0), (4, 3)), ((2, 3), (0,), (4, 3)), ((2, 3), (0, 0), (4,)), ((2,), (-1,), (4,)), ((5,), (0,), (4,))],
)
def test_a_shard_that_does_not_fit_is_refused_at_once(shape, offsets, whole):
    with pytest.raises(ks.errors.UsageError, match=r"a shard of shape .* does not fit into a tensor of shape"):
        ks.sharded(torch.zeros(shape), global_shape=whole, offsets=offsets)


# --- the report -----------------------------------------------------------------------------------------------------


@pytest.mark.case(166)
@pytest.mark.case(168)
def test_the_report_says_what_became_of_each_component(saved):
    path, state = saved
    target = {**run_state(1), "extra": 5, "late": nn.Linear(1, 1)}
    del target["note"]
    report = ks.load(path, target, strict=False)
    assert (report.step, report.saved_world, report.world, report.fresh) == (12, 1, 1, False)
    assert report.components["model"].restored == 2
    assert report.components["note"].unexpected == ["note"]
    assert report.components["extra"].missing == ["extra"]
    assert report.components["late"].missing == ["late"]
    assert target["extra"] == 5
    assert set(report.seconds) == {"plan", "read", "agree", "finish"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    text = str(report)
    assert f"restored step 12 from {path} (ranks: 1 when saved, 1 now)" in text
    assert "model: 2 restored" in text
    assert "1 unexpected (note)" in text
    assert "1 missing (late)" in text
    assert "{" not in text
    assert "left out" in str(ks.load(path, run_state(1), only=["note"]))
    assert_same(dict(target["model"].state_dict()), dict(state["model"].state_dict()))


@pytest.mark.case(166)
def test_a_load_with_the_optimizer_is_not_a_load_of_the_weights_alone(saved):
    path, state = saved

    def step(part):
        part["model"](torch.ones(128)).square().sum().backward()
        part["optimizer"].step()
        return part["model"].weight.detach().clone()

    full, weights = run_state(1), run_state(1)
    ks.load(path, full)
    ks.load(path, weights, only=["model"])
    expected = step(state)
    assert torch.equal(step(full), expected)
    assert not torch.equal(step(weights), expected)


# --- strict, only ---------------------------------------------------------------------------------------------------


@pytest.mark.case(11)
def test_a_component_that_is_not_there_is_an_error(tmp_path):
    state = run_state()
    ks.save(tmp_path / "s", {"model": state["model"]})
    target = run_state(1)
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", target)
    text = str(caught.value)
    assert "optimizer: in the target, not in the checkpoint, which has model" in text
    assert "note: in the target, not in the checkpoint" in text
    assert target["note"] == {"seed": 1}
    ks.load(tmp_path / "s", target, only=["model"])
    with pytest.raises(ks.errors.UsageError, match="only=optimizer: the checkpoint has model"):
        ks.load(tmp_path / "s", target, only=["optimizer"])


@pytest.mark.case(11)
def test_a_component_that_nobody_takes_is_an_error(saved):
    path, _ = saved
    with pytest.raises(ks.errors.MismatchError, match=r"optimizer: in the checkpoint, not in the target \(only="):
        ks.load(path, {"model": nn.Linear(128, 128)})


@pytest.mark.case(11)
def test_a_lost_optimizer_file_is_an_error_that_names_it(saved):
    path, _ = saved
    next(path.glob("optimizer/*")).unlink()
    target = run_state(1)
    before = target["model"].weight.detach().clone()
    for only in (None, ["model"]):
        with pytest.raises(ks.errors.CorruptError, match=r"step 12 is damaged: optimizer/rank-00000\..* is missing"):
            ks.load(path, target, only=only)
    assert torch.equal(target["model"].weight, before)


def test_nothing_there_and_half_of_something_there(tmp_path):
    with pytest.raises(ks.errors.StepNotFoundError, match=r"no committed step \(nothing is there\)"):
        ks.load(tmp_path / "none", {"a": 1})
    assert not (tmp_path / "none").exists()
    ks.save(tmp_path / "half", {"a": 1})
    (tmp_path / "half" / ".metadata").unlink()
    for read in (lambda: ks.load(tmp_path / "half", {"a": 1}), lambda: ks.open(tmp_path / "half")):
        with pytest.raises(
            ks.errors.StepNotFoundError, match="1 files of an attempt that was never committed are there"
        ):
            read()


# --- rename ---------------------------------------------------------------------------------------------------------


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 2)


class New(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(4, 4)])
        self.dec = nn.Linear(4, 2)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "rename",
    [
        {r"^model/encoder\.": "model/enc.0.", r"^model/decoder\.": "model/dec."},
        lambda key: key.replace("encoder.", "enc.0.").replace("decoder.", "dec."),
    ],
    ids=["expressions", "function"],
)
def test_renamed_parameters_and_their_moments(rename, tmp_path):
    state = trained(Old())
    ks.save(tmp_path / "s", state)
    fresh = trained(New())
    with pytest.raises(
        ks.errors.MismatchError, match=r"model/enc\.0\.weight: in the target module, not in the checkpoint"
    ):
        ks.load(tmp_path / "s", fresh)
    ks.load(tmp_path / "s", fresh, rename=rename)
    assert torch.equal(fresh["model"].enc[0].weight, state["model"].encoder.weight)
    assert torch.equal(fresh["model"].dec.bias, state["model"].decoder.bias)
    for a, b in zip(fresh["model"].parameters(), state["model"].parameters(), strict=True):
        assert_same(dict(fresh["optimizer"].state[a]), dict(state["optimizer"].state[b]))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"(": "x"}, r"rename: '\(' is not a regular expression"),
        ({r"^model/.*": "model/same"}, "rename gives two keys of 'model' the same name"),
        ({r"^model/": "other/"}, "rename may not move a key out of 'model', but gave 'other/"),
        (lambda key: "", "rename may not move a key out of 'model'"),
    ],
)
def test_renames_that_make_no_sense_change_nothing(rename, message, tmp_path):
    ks.save(tmp_path / "s", {"model": Old()})
    target = Old()
    before = target.encoder.weight.detach().clone()
    with pytest.raises(ks.errors.UsageError, match=message):
        ks.load(tmp_path / "s", {"model": target}, rename=rename)
    assert torch.equal(target.encoder.weight, before)


# --- an opened step -------------------------------------------------------------------------------------------------


def test_an_opened_step_shows_what_it_holds(saved):
    path, state = saved
    with ks.open(path) as opened:
        assert opened.step == 12
        assert_same(opened["model/weight"], state["model"].weight.detach())
        assert opened.values_of("note") == {"seed": 0}
        group = opened.values_of("optimizer")["param_groups"][0]
        assert (group["lr"], group["params"]) == (0.01, ["weight", "bias"])
        facts = opened.describe()
        assert (facts["step"], facts["world_size"], facts["url"]) == (12, 1, str(path))
        assert {name: part["kind"] for name, part in facts["components"].items()} == {
            "model": "module",
            "optimizer": "optimizer",
            "note": "values",
        }
        assert facts["components"]["model"]["bytes"] == 128 * 129 * 4
        assert facts["versions"]["torch"] == torch.__version__
        assert "model/nothing" not in opened
        with pytest.raises(KeyError) as caught:
            opened["other/weight"]
        assert isinstance(caught.value, ks.errors.StepNotFoundError)
        assert "model/weight" in str(caught.value)
        with pytest.raises(
            ks.errors.StepNotFoundError, match=r"no component 'nothing' in .*; it has model, optimizer, note"
        ):
            opened.values_of("nothing")
    opened.close()
    with pytest.raises(ks.errors.ClosedError, match="was closed"):
        opened["model/weight"]
    with pytest.raises(ks.errors.ClosedError):
        opened.values_of("note")


@pytest.mark.case(37)
def test_a_step_replaced_while_it_is_open_is_never_read_wrong(tmp_path):
    def state(value):
        return {"a": [torch.full((100_000,), value)], "b": [torch.full((100_000,), value)]}

    ks.save(tmp_path / "s", state(1.0))
    opened = ks.open(tmp_path / "s")
    first = opened["a/0"]
    held = next((tmp_path / "s").glob("b/*")).open("rb")
    ks.save(tmp_path / "s", state(2.0), overwrite=True)
    assert torch.equal(first, torch.full((100_000,), 1.0))
    with pytest.raises(ks.errors.CheckpointError):
        opened["b/0"]
    # Old files were removed, not cut short or written over: whoever has one open or mapped still reads it whole.
    assert held.read().endswith(torch.full((4,), 1.0).numpy().tobytes())
    held.close()
    assert torch.equal(ks.open(tmp_path / "s")["b/0"], torch.full((100_000,), 2.0))


def test_what_was_loaded_is_not_tied_to_the_files(saved):
    path, _ = saved
    target = run_state(1)
    ks.load(path, target)
    ks.save(path, target, overwrite=True, step=13)
    again = run_state(2)
    assert ks.load(path, again).step == 13
    assert_same(dict(again["model"].state_dict()), dict(target["model"].state_dict()))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_decide_where_bytes_go(device, tmp_path):
    state = run_state(width=8)
    state["list"] = [torch.ones(2)]
    state["table"] = np.arange(20_000.0)
    fresh = {**run_state(1, width=8), "list": [], "table": None}
    torch.set_default_device(device)
    try:
        ks.save(tmp_path / "s", state)
        ks.load(tmp_path / "s", fresh)
        opened = ks.open(tmp_path / "s")["model/weight"]
    finally:
        torch.set_default_device(None)
    assert_same(opened, state["model"].weight.detach())
    assert_same(fresh["list"], state["list"])
    assert_same(fresh["table"], state["table"])
    assert_same(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())
