"""Files of torch.save come in as steps and go out again, to the last bit; and what neither way takes is named."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.errors import (
    CorruptError,
    MismatchError,
    StepExistsError,
    StepNotFoundError,
    UnsafeFileError,
    UnsafeValueError,
    UsageError,
)
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.interop import torch_save
from keepstep.interop.adopting import adopting
from keepstep.interop.torch_save import export, proving, show_file
from tests.helpers.same import assert_same


def trained(seed=0, steps=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def dicts(state, **more):
    return {name: part.state_dict() for name, part in state.items()} | more


@pytest.fixture
def file(tmp_path):
    torch.save(dicts(trained(), epoch=7, note="x"), tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def adopt(shown, target):
    for _ in adopting(shown, ks.LocalStorage(target)):
        pass
    return target


@pytest.mark.parametrize("kept", [False, True], ids=["as it lies there", "as a step"])
def test_a_checkpoint_of_before_goes_on_here(file, tmp_path, kept):
    """The usual dictionary of state_dicts, whose optimizer knows positions, into a live state."""
    into = trained(1, steps=0) | {"epoch": 0, "note": ""}
    ks.load(adopt(show_file(file), tmp_path / "step") if kept else show_file(file), into)
    expected = dicts(trained())
    assert into["epoch"] == 7
    found = dicts({name: into[name] for name in expected})
    assert_same(json.loads(json.dumps(found["scheduler"])), json.loads(json.dumps(expected["scheduler"])))
    for name in ("model", "optimizer"):
        assert_same(found[name], expected[name])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_there_and_back_every_dtype_and_container_is_the_same(tmp_path):
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in ITEM_BYTES.items():
        raw = torch.randint(0, 2 if name == "bool" else 256, (48 * size,), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(getattr(torch, name))
    tied = torch.randn(3, 4)
    value = {
        "tensors": tensors,
        "shapes": [torch.tensor(1.5), torch.empty(0, 3), torch.arange(12.0).reshape(3, 4).t(), tied[1:], tied],
        "tied": OrderedDict(a=tied, b=tied),
        "plain": {
            "none": None, "yes": True, "one": 1, "large": -(1 << 90), "text": "é", "bytes": b"\0x", "inf": float("inf"),
            "minus": -0.0, 3: (1, (2, [])), True: {1, "a"}, "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
            "device": torch.device("cpu"), "count": Counter("abca"), "empty": {}, "order": OrderedDict([("z", 1), ("a", 2)]),
        },
        "a/b~c": [torch.ones(2), {"": 1}],
    }  # fmt: skip
    torch.save(value, tmp_path / "a.pt")
    step = adopt(show_file(tmp_path / "a.pt"), tmp_path / "step")
    written = export(step, tmp_path / "b.pt")
    assert written.components == tuple(value)
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same(back, value)
    assert back["tied"]["a"].data_ptr() == back["tied"]["b"].data_ptr()
    nan = torch.load(tmp_path / "b.pt", weights_only=True)["tensors"]["float32"].view(torch.uint8)
    assert torch.equal(nan, tensors["float32"].view(torch.uint8))
    export(show_file(tmp_path / "a.pt"), tmp_path / "c.pt", component="shapes")
    assert_same(torch.load(tmp_path / "c.pt", weights_only=True), value["shapes"])


def test_what_is_no_dictionary_of_parts_is_one_part(tmp_path):
    state = trained()["model"].state_dict()
    for number, value in enumerate((state, {"model": state, "weight": torch.ones(2)}, [torch.ones(2)], torch.ones(3))):
        torch.save(value, tmp_path / f"{number}.pt")
        shown = show_file(tmp_path / f"{number}.pt", component="net", step=4)
        export(shown, tmp_path / f"{number}.out", component="net")
        assert_same(torch.load(tmp_path / f"{number}.out", weights_only=True), value)
    model = trained(2)["model"]
    report = ks.load(show_file(tmp_path / "0.pt", step=4), {"model": model})
    assert report.step == 4
    assert_same(dict(model.state_dict()), dict(state))


def test_a_step_becomes_what_torch_itself_loads(tmp_path):
    """Names become positions again, and a model comes out of any layout."""
    state = trained()
    ks.save(tmp_path / "step", state | {"epoch": 7}, step=3)
    written = export(tmp_path / "step", tmp_path / "new/out.pt")
    assert (written.step, written.components) == (3, ("model", "optimizer", "scheduler", "epoch"))
    loaded = torch.load(tmp_path / "new/out.pt", weights_only=True)
    fresh = trained(1)
    for name, part in fresh.items():
        part.load_state_dict(loaded[name])
    assert_same(dicts(fresh)["optimizer"], dicts(state)["optimizer"])
    assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
    export(tmp_path / "step", tmp_path / "some.pt", only=["epoch", "model"])
    assert set(torch.load(tmp_path / "some.pt", weights_only=True)) == {"epoch", "model"}
    export(tmp_path / "step", tmp_path / "model.pt", component="model")
    trained(1)["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def test_large_tensors_pass_through_a_file_that_goes_with_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_save, "IN_MEMORY_BYTES", 100)
    model = {
        "a": torch.randn(300, 7),
        "b": torch.randn(5, dtype=torch.float64),
        "c": torch.randn(4).bool(),
        "d": torch.ones(()),
    }
    ks.save(tmp_path / "step", {"model": model})
    export(tmp_path / "step", tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), {"model": model})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "step"]


def test_optimizers_get_names_where_they_are_told(file):
    names = [name for name, _ in trained()["model"].named_parameters()]
    with ks.open(show_file(file, names=names)) as opened:
        assert opened["optimizer/state/2.weight/exp_avg"].shape == (2, 5)
        assert opened.values_of("optimizer")["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    with ks.open(show_file(file)) as opened:
        assert opened["optimizer/state/4/exp_avg"].shape == (2, 5)
    with pytest.raises(UsageError, match=r"6 parameters, and 2 names"):
        show_file(file, names=names[:2])


def test_names_are_changed_as_those_of_a_step(file, tmp_path):
    inner = trained(1)
    state = {"model": torch.nn.ModuleDict({"net": inner["model"]}), "optimizer": inner["optimizer"]}
    names = [name for name, _ in inner["model"].named_parameters()]
    for shown in (show_file(file), show_file(file, names=names)):
        inner["model"].load_state_dict(trained(1)["model"].state_dict())
        ks.load(shown, state, only=["model", "optimizer"], rename={"^model/": "model/net."})
        expected = dicts(trained())
        assert_same(dict(inner["model"].state_dict()), dict(expected["model"]))
        assert_same(inner["optimizer"].state_dict(), expected["optimizer"])


def test_an_optimizer_of_another_size_is_refused(file):
    into = {"optimizer": torch.optim.AdamW([torch.ones(2)])}
    with pytest.raises(MismatchError):
        ks.load(show_file(file), into, only=["optimizer"])


def test_classes_are_refused_by_name_when_they_come(tmp_path):
    value = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1), "path": Path("x"), "more": deque([1])}
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(UnsafeFileError) as caught:
        show_file(tmp_path / "a.pt")
    assert len(caught.value.refused) >= 3
    for name in ("argparse.Namespace", "PosixPath", "collections.deque", "add_safe_globals([Namespace])"):
        assert name in str(caught.value)


def test_what_weights_only_refuses_is_not_written(tmp_path):
    ks.save(
        tmp_path / "step",
        {
            "model": {"w": torch.ones(2), "twice": deque([1, 2])},
            "path": Path("x"),
            "by": {frozenset([1]): 2},
            "default": defaultdict(int, {"a": 1}),
            "mine": ks.per_rank({"a": torch.ones(1)}),
        },
    )
    with pytest.raises(UnsafeValueError) as caught:
        export(tmp_path / "step", tmp_path / "out.pt")
    said = str(caught.value)
    assert len(caught.value.refused) == 5, said
    for text in (
        "model/twice: a deque",
        "path: a PosixPath",
        "a frozenset as a key",
        "default: a defaultdict",
        "mine: each rank",
    ):
        assert text in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]
    with pytest.raises(StepNotFoundError, match="it has model, path"):
        export(tmp_path / "step", tmp_path / "out.pt", only=["mode"])
    (tmp_path / "out.pt").write_bytes(b"mine")
    with pytest.raises(StepExistsError):
        export(tmp_path / "step", tmp_path / "out.pt", only=["path"])
    assert (tmp_path / "out.pt").read_bytes() == b"mine"


def test_a_damaged_file_is_found(file, tmp_path):
    raw = file.read_bytes()
    assert list(proving(file))
    with zipfile.ZipFile(file) as archive:
        info = max(archive.infolist(), key=lambda one: one.file_size)
        at = info.header_offset + 30 + 64
    flipped = tmp_path / "flipped.pt"
    flipped.write_bytes(raw[: at + 100] + bytes([raw[at + 100] ^ 1]) + raw[at + 101 :])
    with pytest.raises(CorruptError):
        list(proving(flipped))
    for name, data in (("short", raw[: len(raw) // 2]), ("empty", b""), ("text", b"hello"), ("tail", raw[-5000:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises((CorruptError, UnsafeFileError)):
            show_file(tmp_path / name)
    with pytest.raises(StepNotFoundError):
        show_file(tmp_path / "nothing")


class Hostile:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_nothing_of_a_file_is_run(tmp_path):
    torch.save({"a": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeFileError, match="eval"):
        show_file(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Hostile(), protocol=2))
    with pytest.raises((UnsafeFileError, CorruptError)):
        show_file(tmp_path / "b.pt")


def test_the_old_format_of_a_file_is_read(tmp_path):
    state = dicts(trained())
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    export(show_file(tmp_path / "old.pt"), tmp_path / "new.pt")
    assert_same(torch.load(tmp_path / "new.pt", weights_only=True)["model"], state["model"])
    assert not list(proving(tmp_path / "old.pt"))


def convert(*args, status=0):
    result = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert result.exit_code == status, result.output
    return result.output


def test_convert_goes_both_ways(file, tmp_path):
    facts = json.loads(convert(file, tmp_path / "step", "--check", "--json"))
    assert (facts["read"], facts["made"], facts["problems"]) == ("torch", "keepstep", [])
    facts = json.loads(convert(tmp_path / "step", tmp_path / "back.pt", "--to", "torch", "--check", "--json"))
    assert (facts["read"], facts["made"], facts["problems"]) == ("keepstep", "torch", [])
    before, after = (torch.load(path, weights_only=True) for path in (file, tmp_path / "back.pt"))
    assert_same(after, before)
    convert(file, tmp_path / "dcp", "--to", "dcp", "--only", "model", "--only", "epoch")
    convert(tmp_path / "dcp", tmp_path / "three.pt", "--to", "torch")
    assert_same(dict(torch.load(tmp_path / "three.pt", weights_only=True)["model"]), dict(before["model"]))
    assert "is there already" in convert(tmp_path / "dcp", tmp_path / "three.pt", "--to", "torch", status=4)
    convert(tmp_path / "dcp", tmp_path / "three.pt", "--to", "torch", "--only", "epoch", "--overwrite")
    assert torch.load(tmp_path / "three.pt", weights_only=True) == {"epoch": 7}
    assert "has model, optimizer" in convert(file, tmp_path / "e", "--only", "y", status=2)
    assert "--to dcp" in convert(file, tmp_path / "e", "--to", "torch", status=2)
