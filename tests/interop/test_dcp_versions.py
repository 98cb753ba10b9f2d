"""What each torch has written is read: directories of its DCP and files of ``torch.save``, with keepstep and back."""

from __future__ import annotations

import collections
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from typer.testing import CliRunner

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.cli.main import app
from keepstep.interop.dcp import Reader
from keepstep.interop.torch_save import show_file
from keepstep.storage.local import storage_of
from tests.helpers.same import assert_same, bits
from tests.interop.written import states

HERE = Path(__file__).parent / "written"
VERSIONS = ["2.3.1", "2.6.0", "2.9.1", "2.14.1"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request, tmp_path_factory) -> Path:
    """What that torch has written."""
    folder = tmp_path_factory.mktemp("written") / request.param
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def _tensors(version: Path) -> dict[str, torch.Tensor]:
    return states.tensors(unsigned=tuple(map(int, version.name.split(".")[:2])) >= (2, 6))


def _whole(path: Path) -> dict[str, Any]:
    """All that torch itself finds in a directory."""
    state: dict[str, Any] = {}
    _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def _convert(*args: object) -> None:
    ran = CliRunner().invoke(app, ["convert", "--check", *map(str, args)])
    assert ran.exit_code == 0, ran.output


def _check_values(found: dict[str, Any]) -> None:
    """Values as they were saved. (DCP makes text of a dictionary's keys, and plain dictionaries of what is one.)"""
    expected = states.values() | {"ordered": dict(b=1, a=2), "counter": dict(collections.Counter("aab"))}
    assert list(found) == list(expected)
    for name, value in expected.items():
        if name in ("ordered", "counter"):
            assert dict(found[name]) == value
        else:
            assert_same(found[name], value, name)


def _check_more(found: dict[str, Any]) -> None:
    expected = states.containers()
    assert list(found) == list(expected)
    file, wanted = found.pop("file"), expected.pop("file")
    assert (file.getvalue(), file.tell()) == (wanted.getvalue(), wanted.tell())
    assert_same(found, expected)


def test_what_one_process_saved_is_read(version):
    with ks.open(version / "one") as step:
        for name, value in _tensors(version).items():
            assert_same(step[f"tensors/{name}"], value.contiguous(), name)
        _check_values(step.values_of("values"))
        _check_more(step.values_of("more"))
    target: dict[str, Any] = {"tensors": {name: torch.zeros_like(value) for name, value in _tensors(version).items()}}
    ks.load(version / "one", into=target, only=["tensors"])
    for name, value in _tensors(version).items():
        assert bits(target["tensors"][name]) == bits(value), name


def test_what_was_not_flattened_is_read(version):
    with ks.open(version / "flat") as step:
        assert_same(step["a.b"], torch.arange(4.0))
        assert_same(step.values_of("c"), {"d": [1, torch.ones(2)]})
        assert_same(step["e"], torch.ones(2, 2))


@pytest.mark.slow
def test_what_two_ranks_saved_is_read_by_one(version):
    whole = states.whole()
    target: dict[str, Any] = {"app": {name: torch.zeros_like(value) for name, value in whole.items()}, "step": 0}
    ks.load(version / "two", into=target, only=["app", "step"])
    assert_same({name: target["app"][name] for name in whole}, whole)
    assert target["step"] == 12
    expected = torch.load(version / "whole.pt", weights_only=True)
    with ks.open(version / "two") as step:
        assert step.values_of("rank1").tolist() == [1.0, 1.0]
        for name, value in expected["model"].items():
            assert_same(step[f"model/{name}"], value, name)
        for name, moments in expected["optimizer"]["state"].items():
            for kind, value in moments.items():
                assert_same(step[f"optimizer/state/{name}/{kind}"], value, f"{name} {kind}")
        assert step.values_of("optimizer")["param_groups"][0]["betas"] == (0.5, 0.75)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ks.load(version / "two", into={"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
    assert_same(dict(model.state_dict()), expected["model"])
    for name, parameter in model.named_parameters():
        assert_same(optimizer.state[parameter]["exp_avg"], expected["optimizer"]["state"][name]["exp_avg"])
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.01, (0.5, 0.75))


@pytest.mark.parametrize("name", ["one", "two", "flat"])
@pytest.mark.slow
def test_there_and_back_it_is_the_same_for_plain_torch(version, tmp_path, name):
    _convert(version / name, tmp_path / "step")
    *_, verified = verify(storage_of(tmp_path / "step"))
    assert verified.ok, verified.problems
    _convert(tmp_path / "step", tmp_path / "back", "--to", "dcp")
    was, now = _whole(version / name), _whole(tmp_path / "back")
    if name == "one":
        for each in (was, now):
            _check_more(each.pop("more"))
        for kind in ("ordered", "counter"):
            # torch 2.3 kept a dictionary of plain values as it was; those after it take each apart.
            was["values"][kind] = dict(was["values"][kind])
    assert_same(now, was)
    for command in ("show", "verify"):
        ran = CliRunner().invoke(app, [command, str(version / name), "--json"])
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.output)


@pytest.mark.case(125)
def test_torchs_calls_read_it_through_ours(version):
    target: dict[str, Any] = {
        "app": {name: torch.zeros_like(value) for name, value in states.whole().items()},
        "step": 0,
    }
    dcp.load(target, storage_reader=Reader(version / "two"), no_dist=True)
    assert_same(target, {"app": states.whole(), "step": 12})
    # Under the names of its own time, too, when a dictionary of plain values was one value.
    target = {"values": states.values(), "more": states.containers()}
    target["values"] |= {"text": "", "rng": torch.zeros(64, dtype=torch.uint8), "ordered": {"b": 0, "a": 0}}
    dcp.load(target, storage_reader=Reader(version / "one"), no_dist=True)
    _check_values(target["values"])
    _check_more(target["more"])


@pytest.mark.slow
def test_files_of_torch_save_are_read(version, tmp_path):
    with ks.open(show_file(version / "saved.pt")) as step:
        for name, value in _tensors(version).items():
            assert_same(step[f"tensors/{name}"], value.contiguous(), name)
        found = step.values_of("values")
        assert list(found) == list(states.values())
        for name, value in states.values().items():
            assert_same(found[name], value, name)
        shared = torch.arange(12.0)
        assert_same(step["shared/all"], shared)
        assert_same(step["shared/part"], shared[4:8])
        assert_same(step["shared/turned"], shared.view(3, 4).t().contiguous())
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.1)
    ks.load(show_file(version / "optimizer.pt"), into={"optimizer": optimizer, "epoch": 0})
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert_same(optimizer.state[weight]["momentum_buffer"], torch.ones(4))
    _convert(version / "saved.pt", tmp_path / "step")
    _convert(tmp_path / "step", tmp_path / "back.pt", "--to", "torch")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert list(back) == ["tensors", "values", "shared"]
    for name, value in _tensors(version).items():
        assert_same(back["tensors"][name], value.contiguous(), name)
    assert_same(back["values"], states.values())
    (named,) = [ks.open(show_file(version / "model.pt"))["model/weight"]]
    assert_same(named, torch.arange(4.0) - 0.5)
