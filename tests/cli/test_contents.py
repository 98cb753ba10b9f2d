"""``keepstep cat`` and ``keepstep diff``: what is in a step, and how two of them differ."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import keepstep as ks
from keepstep.cli import comparing, contents
from keepstep.cli.main import app
from tests.cli.test_commands import RUNNER, call, documented


def facts(*args, status=0):
    return json.loads(call(*args, "--json", status=status).stdout)


@pytest.fixture
def step(tmp_path):
    torch.manual_seed(0)
    wide = torch.randn(50, 40, dtype=torch.float64)
    wide[3, 4], wide[5, 6], wide[7] = math.nan, -math.inf, 0.0
    state = {
        "model": {"wide": wide, "half": torch.arange(6, dtype=torch.bfloat16), "none": torch.empty(0, 3)},
        "counts": {"int": torch.tensor([-(2**62), 5]), "bool": torch.tensor([True, False, True])},
        "spectrum": [torch.tensor([3 + 4j, 0j])],
        "plain": {"lr": 0.1, "steps": [1, 2], "deep": {"a/b": (True, None), "inf": math.inf}},
        "mine": ks.per_rank({"seed": 5}, "same_rank"),
    }
    ks.save(tmp_path / "s", state, step=3)
    return tmp_path / "s", state


@pytest.mark.parametrize("part_bytes", [contents.PART_BYTES, 7 * 8])
def test_figures_of_a_tensor_are_those_of_numpy(step, part_bytes, monkeypatch):
    path, state = step
    monkeypatch.setattr(contents, "PART_BYTES", part_bytes)
    found = facts("cat", path, "model/wide", "--head", 3)
    wide = state["model"]["wide"].numpy()
    finite = wide[np.isfinite(wide)]
    figures = found["figures"]
    assert (figures["min"], figures["max"]) == (finite.min(), finite.max())
    assert figures["mean"] == pytest.approx(finite.mean(), abs=1e-12)
    assert figures["std"] == pytest.approx(finite.std(), abs=1e-12)
    assert (figures["zeros"], figures["nans"], figures["infs"]) == (40, 1, 1)
    assert found["head"] == wide.ravel()[:3].tolist()
    assert (found["dtype"], found["shape"], found["pieces"], found["bytes"]) == ("float64", [50, 40], 1, 16_000)


def test_figures_of_other_types(step):
    path, _ = step
    ints = facts("cat", path, "counts/int")
    assert (ints["figures"]["min"], ints["head"]) == (-(2**62), [-(2**62), 5])
    flags = facts("cat", path, "counts/bool")
    assert (flags["figures"]["mean"], flags["figures"]["zeros"]) == (pytest.approx(2 / 3), 1)
    assert flags["head"] == [True, False, True]
    spectrum = facts("cat", path, "spectrum/0")
    assert (spectrum["figures"]["max"], spectrum["head"]) == (5.0, ["(3+4j)", "0j"])
    none = facts("cat", path, "model/none")
    assert (none["figures"]["min"], none["head"], none["bytes"]) == (None, [], 0)
    text = call("cat", path, "model/half").stdout
    assert "bfloat16 [6], 6 elements, 12 B" in text
    assert "0 1 2 3 4 5" in text
    assert "1 (16.7 %)" in text


def test_values_are_printed_whole_or_below_a_key(step):
    path, _ = step
    assert facts("cat", path, "plain")["value"] == {
        "lr": 0.1, "steps": [1, 2], "deep": {"a/b": [True, None], "inf": "inf"},
    }  # fmt: skip
    assert facts("cat", path, "plain/deep/a~1b/0")["value"] is True
    assert call("cat", path, "plain").stdout.splitlines() == [
        *("lr: 0.1", "steps: [1, 2]", "deep:", "  a/b: [True, None]", "  inf: 'inf'")
    ]
    assert facts("cat", path, "model")["value"]["half"] == "tensor bfloat16 [6]"
    mine = facts("cat", path, "mine/seed")
    assert (mine["value"], mine["ranks"]) == (5, 1)
    assert "of rank 0; each of 1 rank has its own" in call("cat", path, "mine").stdout
    assert "there is no rank 1" in call("cat", path, "mine", "--rank", 1, status=2).stderr


def test_a_key_that_is_not_there_gets_a_hint(step):
    path, _ = step
    assert "did you mean 'model/half'" in call("cat", path, "model/hlaf", status=2).stderr
    assert "did you mean 'plain/steps'" in call("cat", path, "plain/stesp", status=2).stderr
    assert (
        "--only modle/**: no key of either step fits" in call("diff", path, path, "--only", "modle/**", status=2).stderr
    )


def test_steps_and_commands_that_are_not_there_get_a_hint(tmp_path):
    for number in (100, 200, 300, 400):
        ks.save(tmp_path / f"step-{number:08}", {"x": {"t": torch.ones(1)}})
    for wrong in ("210", "step-00000210"):
        text = call("cat", tmp_path / wrong, "x", status=3).stderr
        assert "the steps beside it: step-00000100, step-00000200, step-00000300, …" in text
    assert "the steps beside" not in call("cat", tmp_path / "stpe", "x", status=3).stderr
    assert "Did you mean 'diff'" in call("dif", "a", "b", status=2).stderr
    assert "--json" in call("diff", "a", "b", "--jsno", status=2).stderr
    assert "did you mean 'x/t'" in call("show", tmp_path / "step-00000100", "--tensors", "x/tt", status=2).stderr


def test_a_shell_completes_commands_and_keys(step):
    path, _ = step

    def completed(line):
        variables = {"_KEEPSTEP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return RUNNER.invoke(app, [], env=variables, prog_name="keepstep").stdout.split()

    assert {"cat", "convert", "cp"} <= set(completed("keepstep c"))
    assert completed(f"keepstep cat {path} model/") == ["model/wide", "model/half", "model/none"]
    assert completed(f"keepstep cat {path} mine") == ["mine"]
    assert completed(f"keepstep cat {path}x m") == []
    assert "_KEEPSTEP_COMPLETE" in call("--show-completion", "bash").stdout


def test_a_step_is_the_same_as_itself(step):
    path, _ = step
    assert facts("diff", path, path) == {
        "a": str(path), "b": str(path), "same": True, "equal": 6, "only_a": [], "only_b": [], "tensors": [], "values": [],
        "worlds": [1, 1], "lone": [],
    }  # fmt: skip
    assert call("diff", path, path).stdout == "6 tensors equal to the last bit\n"


@pytest.mark.parametrize("part_bytes", [comparing.PART_BYTES, 64])
def test_every_kind_of_difference_is_told(step, tmp_path, part_bytes, monkeypatch):
    monkeypatch.setattr(comparing, "PART_BYTES", part_bytes)
    path, state = step
    other = {**state, "model": dict(state["model"]), "plain": {"lr": 0.2, "steps": [1], "deep": state["plain"]["deep"]}}
    wide = other["model"]["wide"] = state["model"]["wide"].clone()
    wide[0, 0] += 0.5
    wide[49, 39] -= 1.5
    wide[3, 4] = 0.0
    wide[10, 0] = math.nan
    other["model"]["half"] = state["model"]["half"].float()
    other["model"]["none"] = torch.empty(0, 4)
    other["counts"] = {"bool": torch.tensor([True, True, True]), "new": torch.ones(1)}
    ks.save(tmp_path / "other", other)
    found = facts("diff", path, tmp_path / "other", status=1)
    assert not found["same"]
    assert (found["equal"], found["only_a"], found["only_b"]) == (1, ["counts/int"], ["counts/new"])
    tensors = {line.pop("key"): line for line in found["tensors"]}
    assert tensors.keys() == {"model/wide", "model/half", "model/none", "counts/bool"}
    assert tensors["model/wide"] | {"mean": 0} == {
        "dtypes": ["float64", "float64"], "shapes": [[50, 40], [50, 40]], "elements": 4, "max": 1.5, "mean": 0,
        "not_finite": 2, "ranks": None,
    }  # fmt: skip
    assert tensors["model/wide"]["mean"] == pytest.approx(2.0 / (2000 - 2))
    assert (tensors["model/half"]["dtypes"], tensors["model/half"]["max"]) == (["bfloat16", "float32"], 0.0)
    assert (tensors["model/none"]["shapes"], tensors["model/none"]["max"]) == ([[0, 3], [0, 4]], None)
    assert (tensors["counts/bool"]["elements"], tensors["counts/bool"]["mean"]) == (1, pytest.approx(1 / 3))
    assert {value["key"]: (value["a"], value["b"], value["only"]) for value in found["values"]} == {
        "plain/lr": (0.1, 0.2, None),
        "plain/steps": ([1, 2], [1], None),
    }
    text = call("diff", path, tmp_path / "other", status=1).stdout
    first = "1 tensor equal to the last bit, 4 different, 1 only in A, 1 only in B, 2 values different"
    assert text.splitlines()[0] == first
    for line in ("bfloat16 and float32", "[0, 3] and [0, 4]", "2 not finite", "plain/lr: 0.1 in A, 0.2 in B"):
        assert line in text
    assert "plain/steps: [1, 2] in A, [1] in B" in text
    assert call("diff", path, tmp_path / "other", "--only", "spectrum", "--only", "mine").stdout.startswith("1 tensor")


def test_the_page_lists_every_field(step, tmp_path):
    path, state = step
    found = facts("cat", path, "model/wide")
    assert found.keys() == documented("cat")
    assert found["figures"].keys() == documented("cat", "figures")
    ks.save(tmp_path / "other", {**state, "spectrum": [torch.tensor([3 + 4j, 1j])], "plain": 1})
    found = facts("diff", path, tmp_path / "other", status=1)
    assert found.keys() == documented("diff")
    for part in ("tensors", "values"):
        assert found[part][0].keys() == documented("diff", part)


def test_show_says_what_was_left_out(tmp_path):
    model = torch.nn.Linear(2, 2)
    ks.save(tmp_path / "s", ks.TrainState(model=model, leave_out=["model/w*"]))
    assert "left out when it was saved: model/w*" in call("show", tmp_path / "s").stdout
    (part, *_) = facts("show", tmp_path / "s")["components"]
    assert (part["name"], part["tensors"], part["left_out"]) == ("model", 1, ["model/w*"])


def test_bits_count_and_not_only_numbers(tmp_path):
    ks.save(tmp_path / "a", {"x": {"z": torch.tensor([0.0, math.nan])}})
    ks.save(tmp_path / "b", {"x": {"z": torch.tensor([-0.0, math.nan])}})
    (line,) = facts("diff", tmp_path / "a", tmp_path / "b", status=1)["tensors"]
    assert (line["elements"], line["max"], line["mean"], line["not_finite"]) == (1, 0.0, 0.0, 0)


def test_a_large_tensor_is_never_whole_in_memory(tmp_path):
    tensor = torch.arange(300_000, dtype=torch.float32).view(3, 100_000)
    ks.save(tmp_path / "s", {"x": {"t": tensor}})
    with ks.open(tmp_path / "s") as opened:
        parts = list(opened.parts("x/t", 90_000))
        assert max(part.numel() * part.element_size() for part in parts) <= 90_000
        assert torch.equal(torch.cat(parts), tensor.flatten())
        assert opened.shape("x/t") == (3, 100_000)
        assert opened.spec("x/t").dtype == "float32"
        with pytest.raises(KeyError):
            opened.shape("x/u")


def test_bytes_and_arrays_are_shown_by_how_they_begin_and_compared_where_they_differ(tmp_path):
    def state(last):
        return {"mark": bytes(range(200)) + last, "table": np.arange(300)}

    ks.save(tmp_path / "a", state(b"\x07tail"))
    ks.save(tmp_path / "b", state(b"\x0btail"))
    assert (
        facts("cat", tmp_path / "a", "mark")["value"] == f"205 bytes {(bytes(range(200)) + bytes([7])).hex()}7461696c"
    )
    text = call("cat", tmp_path / "a", "mark").stdout
    assert text.startswith("205 bytes 000102")
    assert text.rstrip().endswith("… (--json has all)")
    assert "array int64 [300] [0, 1, 2," in call("cat", tmp_path / "a", "table").stdout
    assert all(len(line) < 120 for line in call("cat", tmp_path / "a", "table").stdout.splitlines())
    told = call("diff", tmp_path / "a", tmp_path / "b", status=1).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("mark: ")]
    mine, theirs = line.removeprefix("mark: ").removesuffix(" in B").split(" in A, ")
    assert mine.endswith("077461696c'")
    assert theirs.endswith("0b7461696c'")
