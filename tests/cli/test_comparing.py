"""``keepstep diff`` between formats, dtypes and numbers of ranks; slices of ``keepstep cat``."""

from __future__ import annotations

import json
import math
from collections import deque

import numpy as np
import pytest
import safetensors.torch
import torch

import keepstep as ks
from keepstep.checkpointer.opened import Checkpoint
from keepstep.cli import comparing
from keepstep.cli.words import number_words
from keepstep.move.reader import read_pieces
from tests.cli.test_commands import call
from tests.interop import dcp_checks


def facts(*args, status=0):
    return json.loads(call(*args, "--json", status=status).stdout)


# --- any two formats ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    saved = {"model": {"a": torch.randn(30, 4), "b": torch.arange(7)}, "epoch": 3, "lrs": [0.1, 0.2]}
    other = {"model": {"a": saved["model"]["a"] + 0.5, "b": saved["model"]["b"].clone()}, "epoch": 3, "lrs": [0.1, 0.3]}
    for name, state in (("one", saved), ("two", other)):
        (root / name).mkdir()
        ks.save(root / name / "keepstep", state)
        dcp_checks.write(root / name / "dcp", state)
        torch.save(state, root / name / "torch")
        safetensors.torch.save_file(state["model"], root / name / "safetensors.safetensors")
    return root


@pytest.mark.parametrize("a", ["keepstep", "dcp", "torch", "safetensors.safetensors"])
@pytest.mark.parametrize("b", ["keepstep", "dcp", "torch", "safetensors.safetensors"])
def test_any_two_formats_are_compared(places, a, b):
    only = ["--only", "model"]
    same = facts("diff", places / "one" / a, places / "one" / b, *only)
    assert (same["same"], same["equal"], same["tensors"], same["values"]) == (True, 2, [], [])
    found = facts("diff", places / "one" / a, places / "two" / b, *only, status=1)
    (line,) = found["tensors"]
    assert (line["key"], line["elements"], found["equal"]) == ("model/a", 120, 1)
    assert (line["max"], line["mean"]) == (pytest.approx(0.5, abs=1e-6), pytest.approx(0.5, abs=1e-6))


def test_values_are_compared_between_formats_too(places):
    both = places / "one" / "torch", places / "two" / "keepstep"
    found = facts("diff", *both, "--only", "lrs", "--only", "epoch", status=1)
    assert [(value["key"], value["a"], value["b"]) for value in found["values"]] == [("lrs", [0.1, 0.2], [0.1, 0.3])]
    assert "lrs: [0.1, 0.2] in A, [0.1, 0.3] in B" in call("diff", *both, status=1).stdout


def test_a_checkpoint_of_another_format_is_looked_into(places):
    for name in ("dcp", "torch", "safetensors.safetensors"):
        found = facts("cat", places / "one" / name, "model/b[2:4]")
        assert (found["head"], found["part"], found["whole"], found["shape"]) == ([2, 3], "[2:4]", [7], [2])
    assert facts("cat", places / "one" / "torch", "lrs")["value"] == [0.1, 0.2]


def test_a_place_with_files_of_others_says_which(places, tmp_path):
    (tmp_path / "x.pt").write_bytes(b"")
    assert "holds files that may be some; name one: x.pt" in call("show", tmp_path, status=3).stderr
    text = tmp_path / "text.txt"
    text.write_text("hello")
    for args in (["show", text], ["cat", text, "x"], ["diff", text, text], ["convert", text, tmp_path / "new"]):
        assert "none of torch.save or safetensors" in call(*args, status=2).stderr


# --- numbers --------------------------------------------------------------------------------------------------------


def pair(tmp_path, a, b):
    ks.save(tmp_path / "a", {"x": {"t": a}})
    ks.save(tmp_path / "b", {"x": {"t": b}})
    found = facts("diff", tmp_path / "a", tmp_path / "b", status=1)
    (line,) = found["tensors"]
    return line


def test_large_integers_differ_by_what_they_differ(tmp_path):
    big = 2**61
    line = pair(tmp_path, torch.tensor([big, 5, -big]), torch.tensor([big + 1, 5, -big]))
    assert (line["elements"], line["max"], line["mean"]) == (1, 1.0, pytest.approx(1 / 3))
    assert pair(tmp_path / "x", torch.tensor([2**62, -(2**62)]), torch.tensor([-(2**62), 2**62]))["max"] == 2.0**63


def test_two_dtypes_are_compared_in_the_wider(tmp_path):
    wide = torch.tensor([1.0, 2.5, math.nan, 1e-3, 7.0], dtype=torch.float64)
    line = pair(tmp_path, wide, wide.bfloat16())
    rounded = float(torch.tensor(1e-3).bfloat16())
    assert (line["elements"], line["not_finite"]) == (1, 0)
    assert line["max"] == pytest.approx(abs(1e-3 - rounded), rel=1e-9)
    line = pair(tmp_path / "x", torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.5, math.inf]))
    assert (line["elements"], line["max"], line["not_finite"]) == (2, 0.5, 1)


def test_memory_is_that_of_two_parts(tmp_path, monkeypatch):
    """No tensor larger than a part is ever asked for, on either side."""
    monkeypatch.setattr(comparing, "PART_BYTES", 1 << 12)
    tensor = torch.arange(1 << 14, dtype=torch.float32)
    ks.save(tmp_path / "a", {"t": tensor})
    ks.save(tmp_path / "b", {"t": tensor.double()})
    sizes = []
    real = Checkpoint._read

    def watched(self, spec, box=None):
        found = real(self, spec, box)
        sizes.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(Checkpoint, "_read", watched)
    line = facts("diff", tmp_path / "a", tmp_path / "b", status=1)["tensors"][0]
    assert (line["elements"], line["max"]) == (0, 0.0)
    assert len(sizes) == 2 * (1 << 17) // (1 << 12)
    assert max(sizes) <= 1 << 12


def test_many_small_tensors_are_read_together(tmp_path, monkeypatch):
    state = {"m": {f"w{number}": torch.full((10,), float(number)) for number in range(300)}}
    ks.save(tmp_path / "a", state)
    state["m"]["w7"] = torch.zeros(2000)
    state["m"]["w8"] = torch.empty(0)
    state["m"]["w9"] = state["m"]["w9"] + 1
    ks.save(tmp_path / "b", state)
    calls = []
    for module in ("keepstep.checkpointer.opened", "keepstep.interop.dcp.export"):
        monkeypatch.setattr(
            f"{module}.read_pieces", lambda *a, **k: calls.append(len(k["wants"])) or read_pieces(*a, **k)
        )
    found = facts("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert [(line["key"], line["elements"]) for line in found["tensors"]] == [
        ("m/w7", None),
        ("m/w8", None),
        ("m/w9", 10),
    ]
    assert (len(calls), found["equal"]) == (4, 297)
    calls.clear()
    call("convert", tmp_path / "b", tmp_path / "dcp", "--to", "dcp")
    assert len(calls) == 1
    assert facts("diff", tmp_path / "b", tmp_path / "dcp")["equal"] == 300
    monkeypatch.setattr(comparing, "PART_BYTES", 400)
    assert facts("diff", tmp_path / "a", tmp_path / "b", status=1)["tensors"] == found["tensors"]


# --- ranks ----------------------------------------------------------------------------------------------------------


def save_own(rank, root):
    world = torch.distributed.get_world_size()
    shared = {"w": torch.ones(2)}

    def mine(**values):
        return {"model": shared, "mine": ks.per_rank({"same": 1, **values}, "same_rank")}

    order = list(range(50))
    ks.save(f"{root}/a-{world}", mine(at=10 * rank, order=order, buffer=torch.full((3,), float(rank))))
    moved = [*order[:40], -1, *order[41:]] if rank == 1 else order
    ks.save(f"{root}/b-{world}", mine(at=10 * rank, order=moved, buffer=torch.tensor([rank, rank, 4.0 * rank])))


@pytest.mark.slow
def test_values_of_every_rank_are_compared(rank_pool, tmp_path):
    rank_pool(2)(save_own, str(tmp_path))
    a, b = tmp_path / "a-2", tmp_path / "b-2"
    assert facts("diff", a, a)["same"]
    found = facts("diff", a, b, status=1)
    ((value,), (line,)) = found["values"], found["tensors"]
    assert (value["key"], value["ranks"], value["a"][40], value["b"][40]) == ("mine/order", [1], 40, -1)
    assert (line["key"], line["ranks"], line["elements"], line["max"]) == ("mine/buffer", [1], 1, 3.0)
    assert (found["equal"], found["worlds"], found["lone"]) == (1, [2, 2], [])
    text = call("diff", a, b, status=1).stdout
    assert "mine/order: 1 of 50 items differ, the first is item 40 on rank 1" in text
    assert "on rank 1\n" in "".join(f"{line.rstrip()}\n" for line in text.splitlines() if "mine/buffer" in line)
    assert facts("diff", a, b, "--only", "mine/at")["same"]
    assert "did you mean 'mine/order'" in call("diff", a, b, "--only", "mine/oredr", status=2).stderr
    # Fewer ranks: those that both have are compared, and the others are told.
    state = {
        "model": {"w": torch.ones(2)},
        "mine": ks.per_rank({"same": 1, "at": 0, "order": list(range(50))}, "same_rank"),
    }
    ks.save(tmp_path / "one", state)
    found = facts("diff", a, tmp_path / "one", status=1)
    assert (found["worlds"], found["lone"]) == ([2, 1], [1])
    assert {(value["key"], value["only"], tuple(value["ranks"])) for value in found["values"]} == {
        ("mine/buffer", "a", (0,))
    }
    text = call("diff", a, tmp_path / "one", status=1).stdout
    assert "A was saved by 2 ranks, B by 1: rank 1 has a value of its own in A alone" in text
    assert facts("diff", a, tmp_path / "one", "--only", "model")["same"]
    found = facts("cat", a, "mine/buffer[1:]", "--rank", 1)
    assert (found["head"], found["rank"], found["ranks"], found["figures"]["mean"]) == ([1.0, 1.0], 1, 2, 1.0)
    assert facts("cat", a, "mine/at", "--rank", 1)["value"] == 10


def test_containers_of_single_ranks_are_compared_to_the_last_bit(tmp_path):
    long = np.arange(2000, dtype=np.uint32)
    other = long.copy()
    other[1500] += 1
    for name, state in (("a", long), ("b", other)):
        mine = ks.per_rank({"state": ("MT", state[:600], (1, 2.0)), "late": deque([int(state[1500])])}, "same_rank")
        ks.save(tmp_path / name, {"mine": mine, "shared": {"state": state[1200:1600].copy()}})
    found = facts("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert {value["key"] for value in found["values"]} | {line["key"] for line in found["tensors"]} == {
        "mine/late", "shared/state",
    }  # fmt: skip


# --- slices ---------------------------------------------------------------------------------------------------------

TENSOR = torch.arange(2 * 5 * 7).view(2, 5, 7)


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    path = tmp_path_factory.mktemp("cube") / "s"
    ks.save(path, {"m": {"cube": TENSOR, "odd[0]": torch.ones(2), "scalar": torch.tensor(3.5)}, "plain": [1, 2]})
    return path


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0", TENSOR[0]),
        ("0:2", TENSOR),
        (":, 1:3", TENSOR[:, 1:3]),
        ("-1, -2:, 3", TENSOR[-1, -2:, 3]),
        ("..., -1", TENSOR[..., -1]),
        ("1, ..., 2:4", TENSOR[1, ..., 2:4]),
        ("1,2,3", TENSOR[1, 2, 3]),
        ("0, 3:3", TENSOR[0, 3:3]),
        ("", TENSOR),
        ("0, :99:1", TENSOR[0, :99]),
    ],
)
def test_a_slice_is_that_of_python(cube, text, part):
    found = facts("cat", cube, f"m/cube[{text}]", "--head", 100)
    assert found["shape"] == list(part.shape)
    assert found["head"] == part.flatten().tolist()
    assert (found["bytes"], found["whole"]) == (part.numel() * 8, [2, 5, 7])
    if part.numel():
        assert (found["figures"]["min"], found["figures"]["max"]) == (int(part.min()), int(part.max()))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("m/cube[2]", "there is no index 2 in a dimension of 2"),
        ("m/cube[0, 0, 0, 0]", "has 3 dimensions, [2, 5, 7]"),
        ("m/cube[::2]", "'::2' has a step"),
        ("m/cube[a]", "'a' is neither an index nor a slice"),
        ("m/cube[..., ...]", "has 3 dimensions"),
        ("m/scalar[0]", "has 0 dimensions"),
        ("plain[0]", "'plain' is no tensor"),
    ],
)
def test_a_wrong_slice_is_told(cube, key, text):
    assert text in call("cat", cube, key, status=2).stderr
    assert "did you mean 'm/cube'" in call("cat", cube, "m/cuba[0]", status=2).stderr


def test_a_slice_is_printed_in_rows_and_a_key_with_brackets_is_a_key(cube):
    text = call("cat", cube, "m/cube[1, 1:3, :3]").stdout
    assert "[1:2, 1:3, 0:3] of [2, 5, 7]" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["42", "43", "44"], ["49", "50", "51"]]
    text = call("cat", cube, "m/cube[1]", "--head", 2).stdout
    assert text.splitlines()[-1] == "and 33 elements more; --head N"
    assert facts("cat", cube, "m/odd[0]")["head"] == [1.0, 1.0]
    assert facts("cat", cube, "m/scalar")["head"] == [3.5]


def test_rows_of_numbers_are_told_by_their_ends():
    assert number_words([0, 3, 4, 5, 9]) == "0, 3–5, 9"
    assert number_words([]) == ""
