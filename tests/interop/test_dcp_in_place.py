"""What programs ask of torch's writer and reader besides a save and a load, asked of ``Writer`` and ``Reader``."""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.errors import StepNotFoundError, UsageError
from keepstep.interop.dcp import Reader, Writer
from keepstep.interop.dcp.writer import _BY_POSITION as BY_POSITION
from tests.helpers.same import assert_same
from tests.interop import dcp_checks as checks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def test_a_save_and_a_load_have_their_ids(tmp_path):
    writer, reader = (
        Writer(tmp_path / "s", thread_count=None, max_threads=4, min_size_per_thread=1),
        Reader(tmp_path / "s"),
    )
    assert (writer.path, writer.save_id, reader.path) == (tmp_path / "s", "", tmp_path / "s")
    dcp.save({"a": torch.zeros(4)}, storage_writer=writer, no_dist=True)
    told = reader.read_metadata().storage_meta
    assert told is not None
    assert (str(told.checkpoint_id), told.save_id, told.load_id) == (
        str(tmp_path / "s"),
        writer.save_id,
        reader.load_id,
    )
    before = reader.load_id
    reader.reset()
    assert reader.load_id != before


def test_arguments_by_position_are_those_of_torchs_writer(tmp_path):
    assert tuple(inspect.signature(dcp.FileSystemWriter).parameters)[1:] == BY_POSITION
    dcp.save({"a": torch.zeros(4)}, storage_writer=Writer(tmp_path / "s", True, False, 4, 1 << 20), no_dist=True)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        writer = Writer(tmp_path / "s", True, False, 4, 1 << 20, False, False)
        dcp.save({"a": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert_same(ks.open(tmp_path / "s")["a"], torch.zeros(4))
    with pytest.raises(UsageError, match="by position, single_file_per_rank"):
        Writer(tmp_path / "s", True, False, 4, 1 << 20, False, True, None, None, None)


def test_another_place_may_be_set_as_for_torchs_classes(tmp_path):
    """Classes of torch's own are made from its writer and reader so: those for fsspec."""
    writer, reader = Writer(tmp_path / "a"), Reader(tmp_path / "a")
    writer.path = reader.path = tmp_path / "b"
    dcp.save({"a": torch.arange(4)}, storage_writer=writer, no_dist=True)
    state = {"a": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state["a"], torch.arange(4))
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_a_checkpoint_that_is_there_is_told_as_torch_tells_it(tmp_path):
    dcp.save({"a": torch.zeros(4)}, storage_writer=Writer(tmp_path / "s"), no_dist=True)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save({"a": torch.ones(4)}, storage_writer=Writer(tmp_path / "s", overwrite=False), no_dist=True)
    assert_same(ks.open(tmp_path / "s")["a"], torch.zeros(4))


def test_places_are_told_from_what_is_none(tmp_path):
    for each in (Writer, Reader):
        assert each.validate_checkpoint_id(tmp_path)
        assert each.validate_checkpoint_id("runs/step-1")
        assert each.validate_checkpoint_id("memory://runs/step-1")
        assert not each.validate_checkpoint_id("abc://abc.abc")
        assert not each.validate_checkpoint_id("")
        assert not each.validate_checkpoint_id(3)


def test_an_empty_state_is_saved_and_loaded(tmp_path):
    dcp.save({}, storage_writer=Writer(tmp_path / "s"), no_dist=True)
    dcp.load({}, storage_reader=Reader(tmp_path / "s"), no_dist=True)
    assert list(ks.open(tmp_path / "s")) == []


class Trained:
    """Keeps its losses as a file in memory, as some trainers do."""

    def __init__(self, losses: list[float] = []) -> None:  # noqa: B006  never changed
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"step": torch.tensor(len(self.losses)), "losses": file}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"], weights_only=True)
        assert state["step"] == len(self.losses)


@pytest.mark.slow
def test_files_in_memory_come_back(tmp_path):
    """Under torch's calls, and from a directory of torch's own, through a step and back."""
    dcp.save({"t": Trained([0.5, 0.25])}, storage_writer=Writer(tmp_path / "s"), no_dist=True)
    checks.write(tmp_path / "d", {"t": Trained([0.5, 0.25])})
    ran = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "step")])
    assert ran.exit_code == 0, ran.output
    ran = CliRunner().invoke(app, ["convert", str(tmp_path / "step"), str(tmp_path / "again"), "--to", "dcp"])
    assert ran.exit_code == 0, ran.output
    for name in ("s", "d", "step"):
        target = Trained()
        dcp.load({"t": target}, storage_reader=Reader(tmp_path / name), no_dist=True)
        assert target.losses == [0.5, 0.25]
        target = Trained()
        ks.load(tmp_path / name, into={"t": target})
        assert target.losses == [0.5, 0.25]
    target = Trained()
    checks.read_back(tmp_path / "again", {"t": target})
    assert target.losses == [0.5, 0.25]
    file = ks.open(tmp_path / "s").values_of("t")["losses"]
    assert file.tell() == len(file.getvalue())


def test_what_each_rank_saved_for_itself_with_torch_is_read(tmp_path):
    state = {"w": torch.arange(6.0), "v": [1, "two"]}
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True, use_collectives=False)
    assert (tmp_path / "d" / "__0.metadata").exists()
    target = {"w": torch.zeros(6), "v": None}
    dcp.load(target, storage_reader=Reader(tmp_path / "d"), no_dist=True)
    assert_same(target, state)
    with pytest.raises(StepNotFoundError, match=r"use_collectives=False; __0\.metadata"):
        ks.load(tmp_path / "d", into=target)


def test_what_is_missing_and_what_has_another_size_is_told_by_torch_itself(tmp_path):
    saved, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    dcp.save({"m": saved}, storage_writer=Writer(tmp_path / "s"), no_dist=True)
    other.extra = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
        dcp.load({"m": other}, storage_reader=Reader(tmp_path / "s"), no_dist=True)
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"m": other}, storage_reader=Reader(tmp_path / "s"), planner=partly, no_dist=True)
    assert torch.equal(other.weight, saved.weight)
    assert torch.equal(other.extra, torch.ones(2))
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        dcp.load({"m": torch.nn.Linear(2, 3)}, storage_reader=Reader(tmp_path / "s"), no_dist=True)


@pytest.mark.slow
def test_torchs_own_tools_work_with_it(tmp_path, monkeypatch):
    """The conversions, and loads that are led by what is stored alone."""
    for name, ours in (("FileSystemWriter", Writer), ("FileSystemReader", Reader)):
        for module in (dcp, dcp.filesystem, format_utils):
            monkeypatch.setattr(module, name, ours)
    model, optimizer = checks.small_model()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pair": (1, "x")}
    torch.save(state, tmp_path / "a.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "s")
    format_utils.dcp_to_torch_save(tmp_path / "s", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same(dict(found["model"]), dict(state["model"]))
    assert_same(found["pair"], state["pair"])
    dcp.save({"m": model, "n": {"a": torch.ones(2), "b": 3}}, checkpoint_id=tmp_path / "t")
    assert ks.open(tmp_path / "t").values_of("n")["b"] == 3
    assert_same(_load_state_dict_from_keys("n", checkpoint_id=tmp_path / "t"), {"n": {"a": torch.ones(2), "b": 3}})
