"""``keepstep show --depth``: what takes how much, whoever has written it."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from keepstep.cli.formats import found_at
from keepstep.cli.showing import Wanted, print_step, read_step
from tests.cli.sources import write_all
from tests.cli.test_commands import call, documented

LAYERS = 12


def state():
    model = {"embed.weight": torch.zeros(10, 4)}
    for number in range(LAYERS):
        model[f"layers.{number}.up.weight"] = torch.zeros(8, 4, dtype=torch.bfloat16)
        model[f"layers.{number}.up.bias"] = torch.zeros(8)
    model["layers.12.up.weight"] = torch.zeros(2, 4)
    model["head.weight"] = model["embed.weight"]
    return {"model": model, "optimizer": {"state": {"embed.weight": {"exp_avg": torch.zeros(10, 4)}}}, "epoch": 3}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same state in every format, by its name; safetensors have the model, without what is tied."""
    root = tmp_path_factory.mktemp("formats")
    write_all(root, state(), tied=["head.weight"])
    return {"keepstep": root / "step", "dcp": root / "dcp", "torch": root / "file.pt", "safetensors": root / "hub"}


def tree(*args):
    return {line["key"]: line for line in json.loads(call("show", *args, "--json").stdout)["tree"]}


@pytest.mark.parametrize("made", ["keepstep", "dcp", "torch", "safetensors"])
def test_every_format_has_the_same_tree(places, made):
    facts = json.loads(call("show", places[made], "--depth", 4, "--json").stdout)
    assert facts["made"] == made
    lines = {line["key"]: line for line in facts["tree"]}
    assert all(line.keys() == documented("show", "tree") for line in facts["tree"])
    layer = lines["model/layers.3"]
    assert (layer["tensors"], layer["bytes"], layer["depth"], layer["ranks"]) == (2, 8 * 4 * 2 + 8 * 4, 3, 1)
    assert sorted(layer["dtypes"]) == ["bfloat16", "float32"]
    assert lines["model/layers"]["tensors"] == 2 * LAYERS + 1
    assert lines["model/layers"]["bytes"] == LAYERS * 96 + 32
    assert lines["model/embed.weight"] | {"share": 0} == {
        "key": "model/embed.weight", "name": "weight", "depth": 3, "tensors": 1, "bytes": 160, "share": 0, "ranks": 1,
        "dtypes": ["float32"], "shape": [10, 4], "layout": "whole on rank 0", "pieces": 1, "same_as": None,
    }  # fmt: skip
    total = sum(line["bytes"] for line in facts["tree"] if line["depth"] == 1)
    assert lines["model"]["share"] == pytest.approx(lines["model"]["bytes"] / total, abs=1e-6)
    assert facts["tree"][1]["depth"] == 2
    assert max(line["depth"] for line in facts["tree"]) == 4
    assert ("epoch" in lines) == (made != "safetensors")
    shown = call("show", places[made]).stdout
    assert ("no digests" in shown) == (made != "keepstep")


def test_a_tied_tensor_takes_no_room_twice(places):
    head = tree(places["keepstep"], "--component", "model")["model/head.weight"]
    assert (head["bytes"], head["same_as"], head["tensors"]) == (0, "model/embed.weight", 1)
    assert tree(places["keepstep"], "--depth", 1)["model"]["bytes"] == 160 + LAYERS * 96 + 32


def test_what_is_shown_is_chosen_by_component_key_and_depth(places):
    step = places["keepstep"]
    assert tree(step, "--depth", 1).keys() == {"model", "optimizer", "epoch"}
    assert tree(step, "--component", "optimizer", "--depth", 2).keys() == {"optimizer", "optimizer/state"}
    some = tree(step, "model/layers.1?.*", "--depth", 3)
    assert list(some) == ["model", "model/layers", *(f"model/layers.{number}" for number in (10, 11, 12))]
    assert some["model"]["bytes"] == 2 * 96 + 32
    assert 0 < some["model"]["share"] < 0.2
    deep = tree(step, "--component", "model")
    assert deep["model/layers.11.up.bias"]["shape"] == [8]
    assert "did you mean 'model'" in call("show", step, "--component", "modle", status=2).stderr
    assert "do not go together" in call("show", step, "--tensors", "--depth", 2, status=2).stderr
    assert "Invalid value for '--depth'" in call("show", step, "--depth", 0, status=2).stderr


@pytest.mark.parametrize("width", [60, 80])
def test_numbered_parts_that_are_alike_are_one_line(places, width):
    shown = StringIO()
    facts = read_step(found_at(str(places["keepstep"])), Wanted(depth=9))
    print_step(facts, Console(file=shown, force_terminal=True, color_system=None, width=width))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    counted = [["tensors"], ["24"], ["12"], ["28"]] if width == 80 else [[]] * 4
    rows = [line.split() for line in lines]
    assert rows[0] == ["key", *counted[0], "bytes", "share", "contents"]
    assert ["0…11.up.", *counted[1], "1.12", "KiB"] in [row[: 3 + len(counted[1])] for row in rows]
    assert ["weight", *counted[2], "768", "B", "51.1", "%", "bfloat16", "[8,", "4]"] in rows
    assert ["12.up.weight", "32", "B", "2.1", "%", "float32", "[2,", "4]"] in rows
    assert "same as" in shown.getvalue()
    assert rows[-1] == [*counted[3], "1.47", "KiB"]


def test_a_pipe_and_no_color_have_no_escapes(places, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    piped = call("show", places["keepstep"], "--depth", 9).stdout
    assert "\x1b" not in piped
    assert "same as model/embed.weight" in piped
    assert len([line for line in piped.splitlines() if "model/embed.weight" in line]) == 1
