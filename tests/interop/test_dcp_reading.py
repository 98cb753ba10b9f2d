"""Directories that torch's DCP wrote, read as steps: everything in them, any layout, and nothing that runs code."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict

import keepstep as ks
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    MismatchError,
    StepNotFoundError,
    UnsafeFileError,
    UnsafeValueError,
)
from keepstep.foreign.dcp.metadata import parse_metadata
from tests.helpers.same import assert_same
from tests.interop import dcp_checks as checks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def test_every_dtype_and_every_plain_value_comes_back(tmp_path):
    state = {"all": checks.every_dtype(), "values": checks.plain_values(), "step": 12, "bare": torch.arange(3.0)}
    path = checks.write(tmp_path / "d", state)
    with ks.open(path) as step:
        for name, value in state["all"].items():
            assert_same(step[f"all/{name}"], value, name)
        assert_same(step.values_of("values"), state["values"])
        assert_same(step.values_of("step"), 12)
        assert_same(step["bare"], state["bare"])
    target = {"all": {name: torch.zeros_like(v) for name, v in state["all"].items()}, "bare": torch.zeros(3)}
    held = dict(target["all"])
    report = ks.load(path, into=target, only=["all", "bare"])
    assert report.components["all"].restored == len(held)
    for name, value in state["all"].items():
        assert target["all"][name] is held[name]
        assert_same(target["all"][name], value, name)


@pytest.mark.parametrize(
    "options",
    [
        {"single_file_per_rank": False},
        {"thread_count": 3},
        {"serialization_format": SerializationFormat.SAFETENSORS},
    ],
    ids=str,
)
def test_every_way_to_write_a_directory_is_read(tmp_path, options):
    state = {"w": {str(number): torch.randn(4, number + 1) for number in range(5)}}
    if "serialization_format" not in options:
        state["w"]["text"] = "here"
    path = checks.write(tmp_path / "d", state, **options)
    with ks.open(path) as step:
        assert_same(step.values_of("w"), state["w"])


def test_tensors_that_do_not_lie_in_order_are_read(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    state = {
        "turned": base.permute(2, 0, 3, 1),
        "last": base.contiguous(memory_format=torch.channels_last),
        "view": base[1, 1:],
        "wide": torch.ones(1).expand(3, 4),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": torch.nn.Parameter(base),
    }
    path = checks.write(tmp_path / "d", state)
    with ks.open(path) as step:
        for name, value in state.items():
            assert torch.equal(step[name], value.detach()), name


def test_an_archive_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = checks.write(tmp_path / "d", {"w": torch.arange(5.0), "v": (1, "x")})
    finally:
        torch.serialization.set_crc32_options(before)
    with ks.open(path) as step:
        assert_same(step["w"], torch.arange(5.0))
        assert step.values_of("v") == (1, "x")


def test_a_flat_state_has_its_names_as_they_are(tmp_path):
    state = {"layers.0.weight": torch.ones(2), "lr": 0.1}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    path = checks.write(tmp_path / "d", state, planner=planner)
    target = {"layers.0.weight": torch.zeros(2), "lr": 0.0}
    ks.load(path, into=target)
    assert_same(target, state)


def test_a_model_and_its_optimizer_are_restored_in_place(tmp_path):
    model, optimizer = checks.small_model()
    weights, moments = get_state_dict(model, optimizer)
    path = checks.write(tmp_path / "d", {"model": weights, "optimizer": moments})
    other, moved = checks.small_model(seed=1)
    parameters = list(other.parameters())
    moved.param_groups[0]["lr"] = 0.7
    ks.load(path, into={"model": other, "optimizer": moved})
    assert [id(p) for p in other.parameters()] == [id(p) for p in parameters]
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert moved.param_groups[0]["lr"] == 0.01
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(moved.state[mine], optimizer.state[theirs])


def test_the_state_of_an_optimizer_by_positions_is_restored(tmp_path):
    model, optimizer = checks.small_model()
    path = checks.write(tmp_path / "d", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, moved = checks.small_model(seed=1)
    ks.load(path, into={"model": other, "optimizer": moved})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(moved.state[mine], optimizer.state[theirs])
    target = checks.small_model(seed=2)[1].state_dict()
    ks.load(path, into={"optimizer": target}, only=["optimizer"])
    assert_same(target["state"], optimizer.state_dict()["state"])


def test_every_difference_is_listed_before_anything_changes(tmp_path):
    path = checks.write(tmp_path / "d", {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}})
    target = {"model": {"a": torch.zeros(2), "b": torch.zeros(4), "d": torch.zeros(1)}}
    with pytest.raises(MismatchError) as caught:
        ks.load(path, into=target)
    told = str(caught.value)
    assert re.search(r"model/b: .*\[3\].*\[4\]", told)
    assert "model/d" in told
    assert torch.equal(target["model"]["a"], torch.zeros(2))
    with pytest.raises(MismatchError, match="cast=True"):
        ks.load(path, into={"model": {name: torch.zeros(2, dtype=torch.int32) for name in "abc"}})


@pytest.mark.slow
def test_ranks_load_what_other_ranks_saved(tmp_path, rank_pool):
    for world in (2, 3):
        rank_pool(world)(checks.save_with_torch, str(tmp_path / f"of-{world}"))
    rank_pool(3)(checks.load_with_keepstep, str(tmp_path / "of-2"))
    rank_pool(2)(checks.load_with_keepstep, str(tmp_path / "of-3"))
    with ks.open(tmp_path / "of-3") as step:
        for name, value in checks.whole_tensors().items():
            assert_same(step[f"app/{name}"], value, name)
    target = {name: torch.zeros_like(value) for name, value in checks.whole_tensors().items()}
    report = ks.load(tmp_path / "of-2", into={"app": target}, only=["app"])
    checks.check_sharded(target)
    assert (report.saved_world, report.world) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "now"), [(2, 3), (3, 1)])
def test_a_model_under_fsdp_goes_on_elsewhere(tmp_path, rank_pool, saved, now):
    state = rank_pool(saved)(checks.save_fsdp, str(tmp_path / "d"))[0]
    rank_pool(now)(checks.load_fsdp, str(tmp_path / "d"), state)


class _Runs:
    """Pickled, this makes a file when it is read by whoever runs what a pickle says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def _spoiled(path: Path, name: str, ran: Path) -> None:
    """Puts a pickle that runs code at one position of a directory."""
    if name == ".metadata":
        (path / name).write_bytes(pickle.dumps(_Runs(ran)))
        return
    if name == "planner_data":
        metadata = dcp.FileSystemReader(path).read_metadata()
        metadata.planner_data = _Runs(ran)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return
    metadata = dcp.FileSystemReader(path).read_metadata()
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    file = path / info.relative_path
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Runs(ran), protocol=2))
        archive.writestr("archive/version", "3\n")
    info.offset, info.length = file.stat().st_size, len(made.getvalue())
    file.write_bytes(file.read_bytes() + made.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.case(158)
@pytest.mark.parametrize("position", [".metadata", "planner_data", "tensor", "value"])
def test_nothing_in_a_directory_is_run(tmp_path, position):
    path = checks.write(tmp_path / "d", {"tensor": torch.ones(3), "value": (1, 2)})
    ran = tmp_path / "ran"
    _spoiled(path, position, ran)
    with pytest.raises(UnsafeFileError, match=r"not read[\s\S]*posix\.mkdir"):
        ks.load(path, into={"tensor": torch.zeros(3), "value": None})
    assert not ran.exists()
    if position in (".metadata", "value"):
        with pytest.raises(CheckpointError):
            ks.open(path)
        assert not ran.exists()


@dataclass
class Mine:
    number: int = 1


@pytest.mark.case(158)
def test_a_class_of_the_users_is_refused_by_name_until_it_is_trusted(tmp_path):
    path = checks.write(tmp_path / "d", {"mine": Mine(3), "other": (1, Mine(4)), "w": torch.ones(1)})
    with pytest.raises(UnsafeFileError) as caught:
        ks.open(path)
    assert len(caught.value.refused) == 2
    assert all("test_dcp_reading.Mine" in text and "add_safe_globals" in text for text in caught.value.refused)
    with torch.serialization.safe_globals([Mine]):
        # Trusted, but a step has no form for it.
        with pytest.raises(UnsafeValueError, match=r"ks\.register"):
            ks.open(path)
        ks.register(Mine)
        assert ks.open(path).values_of("mine") == Mine(3)


@pytest.mark.case(158)
def test_metadata_cut_off_or_changed_anywhere_gives_a_clean_error(tmp_path):
    path = checks.write(tmp_path / "d", {"w": {"a": torch.ones(3)}, "v": (1, 2)})
    raw = (path / ".metadata").read_bytes()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            parse_metadata(raw[:length], "it")
    for at in range(len(raw)):
        for flip in (0x01, 0x80):
            spoiled = bytearray(raw)
            spoiled[at] ^= flip
            with contextlib.suppress(CheckpointError):
                parse_metadata(bytes(spoiled), "it")


def test_a_flipped_bit_of_a_tensor_is_noticed(tmp_path):
    path = checks.write(tmp_path / "d", {"w": torch.ones(64), "x": torch.arange(100, 164.0)})
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(torch.ones(64).numpy().tobytes())
    data[at + 130] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"'w'.*CRC-32"):
        ks.load(path, into={"w": torch.zeros(64), "x": torch.zeros(64)})
    with ks.open(path) as step:
        assert torch.equal(step["x"], torch.arange(100, 164.0))


def test_metadata_of_older_releases_is_read(tmp_path):
    """As 2.3 wrote it: with neither a version nor a record of the storage, and nested values as one."""
    state = {"w": {"a": torch.arange(6.0).reshape(2, 3)}, "opt": {"lr": 0.1, "groups": [{"x": (1, None)}]}}
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    path = checks.write(
        tmp_path / "d", {"w.a": state["w"]["a"], "opt": state["opt"]}, planner=dcp.DefaultSavePlanner(**options)
    )
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data = {"w.a": ("w", "a"), "opt": ("opt",)}
    del metadata.__dict__["version"], metadata.__dict__["storage_meta"]
    assert not any("transform_descriptors" in info.__getstate__() for info in metadata.storage_data.values())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {"w": {"a": torch.zeros(2, 3)}, "opt": {}}
    ks.load(path, into=target)
    assert_same(target, state)


@pytest.mark.slow
def test_a_bit_that_is_flipped_anywhere_gives_the_same_or_a_clean_error(tmp_path):
    state = {"w": torch.arange(8.0), "u": torch.ones(3, dtype=torch.uint16), "v": (1, "x")}
    path = checks.write(tmp_path / "d", state)
    file = path / "__0_0.distcp"
    raw = file.read_bytes()
    noticed = 0
    for at in random.Random(0).sample(range(len(raw)), 400):
        spoiled = bytearray(raw)
        spoiled[at] ^= 1 << at % 8
        file.write_bytes(spoiled)
        try:
            with ks.open(path) as step:
                assert_same({"w": step["w"], "u": step["u"], "v": step.values_of("v")}, state)
        except CorruptError:
            noticed += 1
    assert noticed > 50


def test_what_is_missing_or_cut_off_is_listed(tmp_path):
    state = {str(number): torch.ones(4) for number in range(3)}
    path = checks.write(tmp_path / "d", state, single_file_per_rank=False)
    (path / "__0_0.distcp").unlink()
    short = path / "__0_2.distcp"
    short.write_bytes(short.read_bytes()[:-5])
    with pytest.raises(CorruptError, match=r"__0_0\.distcp is missing; __0_2\.distcp has .* bytes"):
        ks.open(path)


def test_metadata_that_says_something_else_than_the_data_is_noticed(tmp_path):
    path = checks.write(tmp_path / "d", {"w": torch.ones(4)})
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"'w'.*holds float32 .*the metadata says int32"), ks.open(path) as step:
        step["w"]


def test_a_path_that_leads_out_of_the_directory_is_refused(tmp_path):
    path = checks.write(tmp_path / "d", {"w": torch.ones(4)})
    metadata = dcp.FileSystemReader(path).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../other"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="no name of a file in the directory"):
        ks.open(path)


def test_a_folder_that_holds_neither_is_told_apart(tmp_path):
    with pytest.raises(StepNotFoundError, match="no committed step"):
        ks.open(tmp_path)
