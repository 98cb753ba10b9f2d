"""``keepstep verify`` of a directory of torch's DCP: every fault that can be told, and what cannot be told."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from typer.testing import CliRunner

from keepstep.cli.main import app
from tests.interop import dcp_checks as checks

STATE = {"w": torch.arange(6.0), "v": torch.ones(3, 2), "n": {"x": [1, "two"]}}


def _verify(path: Path, status: int = 0) -> dict[str, Any]:
    ran = CliRunner().invoke(app, ["verify", str(path), "--json"])
    assert ran.exit_code == status, ran.output
    return json.loads(ran.output)


def _changed(path: Path, change: Callable[[Any], object]) -> None:
    """The same directory with other metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_good_one_is_told_to_be_good_as_far_as_that_can_be_known(tmp_path):
    path = checks.write(tmp_path / "d", STATE)
    (path / "other").write_bytes(b"x")
    told = _verify(path)
    (step,) = told["steps"]
    size = (path / "__0_0.distcp").stat().st_size
    assert (told["ok"], step["files"], step["bytes"], step["blocks"], step["strays"]) == (True, 1, size, 3, ["other"])
    assert any("no digests" in note for note in told["notes"])
    ran = CliRunner().invoke(app, ["verify", str(path)])
    assert "ok" in ran.output
    assert "cannot be told" in ran.output


def test_what_has_no_checksums_is_told(tmp_path):
    state = {"w": torch.ones(3)}
    path = checks.write(tmp_path / "d", state, serialization_format=SerializationFormat.SAFETENSORS)
    assert any("1 of 1 entries have no CRC-32" in note for note in _verify(path)["notes"])


def test_classes_that_are_not_plain_are_no_damage(tmp_path):
    path = checks.write(tmp_path / "d", {"w": torch.ones(3), "o": checks.sharded})
    told = _verify(path)
    assert told["ok"]
    assert any("dcp_checks.sharded" in note for note in told["notes"])


def _flip(path: Path, data: bytes) -> None:
    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    at = raw.find(data)
    assert at >= 0
    raw[at + 2] ^= 0x10
    file.write_bytes(raw)


def _cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9])


def _hole(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["v"].chunks[0]
    chunk.sizes = torch.Size((2, 2))


def _inside(metadata: Any) -> None:
    w, v = (next(info for index, info in metadata.storage_data.items() if index.fqn == name) for name in "wv")
    v.offset = w.offset + 64


def _nameless(metadata: Any) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "w"}


def _other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("blocks", lambda path: _flip(path, STATE["w"].numpy().tobytes())),
        ("values", lambda path: _flip(path, b"two")),
        ("missing", lambda path: (path / "__0_0.distcp").unlink()),
        ("size", _cut),
        ("coverage", lambda path: _changed(path, _hole)),
        ("entries", lambda path: _changed(path, _inside)),
        ("manifest", lambda path: _changed(path, _nameless)),
        ("blocks", lambda path: _changed(path, _other_dtype)),
        ("manifest", lambda path: (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-40])),
    ],
    ids=["bit", "value", "missing", "cut", "hole", "inside", "nameless", "dtype", "metadata"],
)
def test_each_fault_is_found_and_named(tmp_path, kind, spoil):
    path = checks.write(tmp_path / "d", STATE)
    spoil(path)
    told = _verify(path, status=7)
    assert kind in {problem["kind"] for problem in told["steps"][0]["problems"]}


def test_all_faults_are_listed(tmp_path):
    path = checks.write(tmp_path / "d", STATE)
    _flip(path, STATE["w"].numpy().tobytes())
    _flip(path, b"two")
    _changed(path, _hole)
    kinds = [problem["kind"] for problem in _verify(path, status=7)["steps"][0]["problems"]]
    assert sorted(kinds) == ["blocks", "blocks", "coverage", "values"]


def test_metadata_of_another_kind_is_refused_by_name_and_not_run(tmp_path):
    path = checks.write(tmp_path / "d", STATE)
    (path / ".metadata").write_bytes(pickle.dumps({"x": Path.cwd}, protocol=2))
    ran = CliRunner().invoke(app, ["verify", str(path)])
    assert ran.exit_code == 5, ran.output
    assert "pathlib" in ran.output or "getattr" in ran.output
