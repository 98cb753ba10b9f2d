"""``keepstep convert`` between steps and DCP directories: equal to the last bit, in little memory, and nothing half done."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.cli.main import app
from keepstep.errors import CorruptError, StepNotFoundError
from keepstep.interop.dcp import export
from keepstep.storage.local import storage_of
from tests.helpers.same import assert_same
from tests.interop import dcp_checks as checks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def _convert(*args: object, status: int = 0) -> str:
    ran = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert ran.exit_code == status, ran.output
    return ran.output


def _whole(path: Path, into: Path) -> dict[str, object]:
    """All that torch finds in a directory."""
    dcp_to_torch_save(path, into)
    return torch.load(into, weights_only=False)


def test_there_and_back_every_dtype_and_value_is_the_same(tmp_path):
    state = {"all": checks.every_dtype(), "values": checks.plain_values(), "bare": torch.arange(3.0), "pair": (1, 2)}
    first = checks.write(tmp_path / "first", state)
    facts = json.loads(_convert(first, tmp_path / "step", "--check", "--json"))
    assert (facts["read"], facts["made"], facts["checked"], facts["problems"]) == ("dcp", "keepstep", True, [])
    section = (Path(__file__).parents[2] / "docs/cli.md").read_text().split("### `convert --json`\n")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(facts)
    *_, verified = verify(storage_of(tmp_path / "step"))
    assert verified.ok
    assert not verified.strays
    facts = json.loads(_convert(tmp_path / "step", tmp_path / "second", "--to", "dcp", "--check", "--json"))
    assert (facts["made"], facts["tensors"], facts["problems"]) == ("dcp", len(state["all"]) + 1, [])
    assert_same(_whole(tmp_path / "second", tmp_path / "b.pt"), _whole(first, tmp_path / "a.pt"))
    empty = {"all": {n: torch.zeros_like(v) for n, v in state["all"].items()}, "bare": torch.zeros(3)}
    checks.read_back(tmp_path / "second", empty)
    assert_same(empty, {"all": state["all"], "bare": state["bare"]})


def test_a_step_becomes_what_plain_torch_loads_into_model_and_optimizer(tmp_path):
    model, optimizer = checks.small_model()
    ks.save(tmp_path / "step", ks.TrainState(model=model, optimizer=optimizer))
    _convert(tmp_path / "step", tmp_path / "d", "--to", "dcp", "--only", "model", "--only", "optimizer")
    other, moved = checks.small_model(seed=1)
    weights, moments = get_state_dict(other, moved)
    checks.read_back(tmp_path / "d", {"model": weights, "optimizer": moments})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(moved.state[mine], optimizer.state[theirs])


def test_large_pieces_are_cut_ties_are_kept_and_tensors_in_tuples_go_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "CHUNK_BYTES", 64)
    tied = torch.randn(5, 7)
    state = {
        "a": {"x": tied, "y": tied, "none": torch.zeros(0, 3), "deep": torch.randn(1, 3, 30)},
        "t": (tied[0].clone(), 2),
    }
    ks.save(tmp_path / "step", state)
    _convert(tmp_path / "step", tmp_path / "d", "--to", "dcp", "--check")
    found = _whole(tmp_path / "d", tmp_path / "a.pt")
    assert_same(found, {"a": dict(state["a"]), "t": state["t"]})
    with ks.open(tmp_path / "d") as step:
        assert_same(step["a/deep"], state["a"]["deep"])


def test_what_a_dcp_checkpoint_has_no_place_for_is_refused_by_name(tmp_path):
    ks.save(tmp_path / "step", {"mine": ks.per_rank(3), "w": torch.ones(2), "also": {"x": ks.per_rank(1)}})
    told = _convert(tmp_path / "step", tmp_path / "d", "--to", "dcp", status=5)
    assert "mine: " in told
    assert "also/x: " in told
    assert not list((tmp_path / "d").glob("*"))
    ks.save(tmp_path / "dots", {"a": {"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}})
    assert "a.b.c" in _convert(tmp_path / "dots", tmp_path / "d", "--to", "dcp", status=2)


def test_a_wrong_call_says_what_to_do(tmp_path):
    path = checks.write(tmp_path / "d", {"w": {"a": torch.ones(2)}, "x": 1})
    ks.save(tmp_path / "step", {"w": torch.ones(2)})
    assert "--to dcp" in _convert(tmp_path / "step", tmp_path / "e", status=2)
    assert "--to keepstep" in _convert(path, tmp_path / "e", "--to", "dcp", status=2)
    assert "has w, x" in _convert(path, tmp_path / "e", "--only", "y", status=2)
    assert "holds 2 steps; name one" in _convert(tmp_path, tmp_path / "e", status=2)
    (tmp_path / "empty").mkdir()
    assert "empty is not a step" in _convert(tmp_path / "empty", tmp_path / "e", status=3)
    assert "already committed" in _convert(path, tmp_path / "step", status=4)
    _convert(path, tmp_path / "step", "--overwrite", "--only", "w")
    assert list(ks.open(tmp_path / "step")) == ["w/a"]
    *_, verified = verify(storage_of(tmp_path / "step"))
    assert not verified.strays
    assert "holds a checkpoint already" in _convert(tmp_path / "step", path, "--to", "dcp", status=4)
    _convert(tmp_path / "step", path, "--to", "dcp", "--overwrite")
    assert list(ks.open(path)) == ["w/a"]


def test_a_damaged_source_makes_no_target(tmp_path):
    path = checks.write(tmp_path / "d", {"w": torch.ones(64)})
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(torch.ones(64).numpy().tobytes()) + 9] ^= 1
    file.write_bytes(data)
    assert "CRC-32" in _convert(path, tmp_path / "step", status=CorruptError.exit_status)
    with pytest.raises(StepNotFoundError):
        ks.open(tmp_path / "step")
    assert not list((tmp_path / "step").rglob("*.safetensors"))


def test_a_target_that_is_damaged_is_found_by_reading_it_again(tmp_path, monkeypatch):
    ks.save(tmp_path / "step", {"w": torch.ones(64)})
    put = pickle.dumps

    def spoil(value: object) -> bytes:
        file = tmp_path / "d" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[data.find(torch.ones(64).numpy().tobytes()) + 9] ^= 1
        file.write_bytes(data)
        return put(value)

    monkeypatch.setattr(export.pickle, "dumps", spoil)
    assert "DAMAGED" in _convert(tmp_path / "step", tmp_path / "d", "--to", "dcp", "--check", status=7)


@pytest.mark.slow
def test_ranks_of_plain_torch_load_what_was_converted(tmp_path, rank_pool):
    rank_pool(3)(checks.save_with_torch, str(tmp_path / "d"))
    _convert(tmp_path / "d", tmp_path / "step", "--check")
    rank_pool(2)(checks.load_with_keepstep, str(tmp_path / "step"))
    _convert(tmp_path / "step", tmp_path / "e", "--to", "dcp", "--check")
    rank_pool(2)(checks.load_with_torch, str(tmp_path / "e"))
    assert_same(_whole(tmp_path / "e", tmp_path / "e.pt"), _whole(tmp_path / "d", tmp_path / "d.pt"))


_PEAK = """
import sys
from pathlib import Path
from keepstep.cli.main import app
from keepstep.interop.adopting import adopting
from keepstep.foreign.dcp import step
from keepstep.interop.dcp import export
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
first, between, last = sys.argv[1:]
for args in ([first, between], [between, last, "--to", "dcp"]):
    try:
        app(["convert", *args])
    except SystemExit as ended:
        assert not ended.code, ended.code
print((peak() - before) // 1024)
"""


@pytest.mark.slow
def test_a_large_tensor_passes_through_little_memory(tmp_path):
    mib = 1 << 20
    state = {"w": {"large": torch.arange(48 * mib, dtype=torch.int32), "second": torch.ones(mib)}}
    path = checks.write(tmp_path / "d", state)
    places = [str(each) for each in (path, tmp_path / "step", tmp_path / "e")]
    ran = subprocess.run([sys.executable, "-c", _PEAK, *places], capture_output=True, text=True, check=True)
    peak_mib = int(ran.stdout.split()[-1])
    print(f"{peak_mib} MiB more than before, for a tensor of 192 MiB there and back")
    assert peak_mib < 128
    with ks.open(tmp_path / "e") as step:
        assert torch.equal(step["w/large"], state["w"]["large"])
