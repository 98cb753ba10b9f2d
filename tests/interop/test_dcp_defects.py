"""What torch's DCP does where it goes wrong, and what happens instead with keepstep's files under the same calls.

Each test shows both outcomes, so that the day on which torch mends one is noticed. The state, the calls and the fault are
the same; only the storage writer and reader differ, or it is ``ks.save`` and ``ks.load``.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import keepstep as ks
from keepstep.errors import CheckpointError, CorruptError, MismatchError, StepNotFoundError
from keepstep.interop.dcp import Reader, Stager, Writer
from keepstep.storage.local import LocalStorage
from tests.interop import dcp_checks as checks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    # A thread of torch's that dies is a part of what is shown.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def torch_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), planner=planner, no_dist=True)


def torch_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def our_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path), no_dist=True, **options)


def our_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=Reader(path), no_dist=True)
    return state


def test_a_write_that_fails_in_a_thread_of_the_writer(tmp_path, monkeypatch):
    state = {str(number): torch.ones(4) for number in range(8)}
    create = dcp.filesystem.FileSystem.create_stream
    main = threading.get_ident()

    def refuse(self: Any, path: Any, mode: str) -> Any:
        if mode == "wb" and threading.get_ident() != main:
            raise OSError(28, "No space left on device")
        return create(self, path, mode)

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", refuse)
    # On its own thread the writer takes no file while the other one has both: so it is the other that fails, or neither.
    monkeypatch.setattr(dcp.filesystem.queue.Queue, "get_nowait", _first_for_the_others(main))
    torch_save(tmp_path / "torch", state, thread_count=2)
    metadata = dcp.FileSystemReader(tmp_path / "torch").read_metadata()
    assert len(metadata.storage_data) < len(metadata.state_dict_metadata) == 8
    monkeypatch.undo()
    with pytest.raises(CheckpointException, match="KeyError"):
        torch_load(tmp_path / "torch", {name: torch.zeros(4) for name in state})
    with pytest.raises(CorruptError, match="no file is named for it"):
        ks.open(tmp_path / "torch")

    upload = type(LocalStorage(tmp_path).create("x/y", 10))

    def fail(self: Any, offset: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(upload, "write_at", fail)
    monkeypatch.setattr(upload, "lend_at", fail)
    with pytest.raises(CheckpointException, match="No space left on device"):
        our_save(tmp_path / "ours", state)
    with pytest.raises(StepNotFoundError):
        ks.open(tmp_path / "ours")


def _first_for_the_others(main: int) -> Callable[[Any], Any]:
    """``get_nowait`` that makes the main thread wait until another one has taken something."""
    import queue

    taken = threading.Event()
    get = queue.Queue.get_nowait

    def get_nowait(self: Any) -> Any:
        if threading.get_ident() == main and self.qsize() and not taken.is_set():
            assert taken.wait(30)
        found = get(self)
        if threading.get_ident() != main:
            taken.set()
        return found

    return get_nowait


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32], ids=str)
def test_a_dtype_that_is_not_the_saved_one(tmp_path, dtype):
    state = {"w": torch.tensor([1.7, 2.3])}
    torch_save(tmp_path / "torch", state)
    our_save(tmp_path / "ours", state)
    changed = torch_load(tmp_path / "torch", {"w": torch.zeros(2, dtype=dtype)})
    assert not torch.equal(changed["w"].float(), state["w"])
    target = {"w": torch.zeros(2, dtype=dtype)}
    with pytest.raises(CheckpointException, match=r"w: saved as torch\.float32"):
        our_load(tmp_path / "ours", target)
    for path in (tmp_path / "torch", tmp_path / "ours"):
        with pytest.raises(MismatchError, match="cast=True converts"):
            ks.load(path, into=target)
    assert not target["w"].any()


def test_keys_of_the_checkpoint_that_the_state_has_not(tmp_path, caplog):
    state = {"w": torch.ones(2), "forgotten": torch.ones(2)}
    torch_save(tmp_path / "torch", state)
    our_save(tmp_path / "ours", state)
    with caplog.at_level(logging.INFO):
        caplog.clear()
        torch_load(tmp_path / "torch", {"w": torch.zeros(2)})
        assert "forgotten" not in caplog.text
        our_load(tmp_path / "ours", {"w": torch.zeros(2)})
        assert "forgotten" in caplog.text
    with pytest.raises(MismatchError, match="forgotten"):
        ks.load(tmp_path / "torch", into={"w": torch.zeros(2)})


def test_one_flipped_bit(tmp_path):
    state = {"w": torch.ones(32)}
    torch_save(tmp_path / "torch", state)
    our_save(tmp_path / "ours", state)
    for path in (tmp_path / "torch", tmp_path / "ours"):
        for file in path.rglob("*"):
            data = bytearray(file.read_bytes()) if file.is_file() else b""
            at = data.find(state["w"].numpy().tobytes())
            if at >= 0:
                data[at + 2] ^= 0x40
                file.write_bytes(data)
    assert torch_load(tmp_path / "torch", {"w": torch.zeros(32)})["w"][0] != 1.0
    with pytest.raises(CheckpointException, match="does not match its digest"):
        our_load(tmp_path / "ours", {"w": torch.zeros(32)})
    with pytest.raises(CorruptError, match="CRC-32"):
        ks.load(tmp_path / "torch", into={"w": torch.zeros(32)})


def test_safetensors_with_something_that_is_no_tensor(tmp_path):
    state = {"w": torch.ones(4), "lr": 0.1}
    torch_save(tmp_path / "torch", state, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(CheckpointException):
        torch_load(tmp_path / "torch", {"w": torch.zeros(4), "lr": 0.0})
    with (
        pytest.raises(CorruptError, match="written as safetensors together with something that is no tensor"),
        ks.open(tmp_path / "torch") as step,
    ):
        step["w"]
    # Every file of a step is a safetensors file, and has both.
    our_save(tmp_path / "ours", state)
    assert our_load(tmp_path / "ours", {"w": torch.zeros(4), "lr": 0.0})["lr"] == 0.1


def test_a_checkpoint_that_is_there_already(tmp_path):
    """Both replace it. Ours does so at once, which the next test shows, and refuses where it is asked to."""
    for save, load in ((torch_save, torch_load), (our_save, our_load)):
        path = tmp_path / save.__name__
        save(path, {"w": torch.ones(2)})
        save(path, {"w": torch.zeros(2)})
        assert not load(path, {"w": torch.ones(2)})["w"].any()
    with pytest.raises(CheckpointException, match="is already committed"):
        dcp.save({"w": torch.ones(2)}, storage_writer=Writer(path, overwrite=False), no_dist=True)
    assert not our_load(path, {"w": torch.ones(2)})["w"].any()


def test_a_crash_while_a_checkpoint_is_replaced(tmp_path, monkeypatch):
    old, new = {"w": torch.ones(2)}, {"w": torch.zeros(2)}

    def crash(*_: Any) -> None:
        raise SystemError("the machine is gone")

    torch_save(tmp_path / "torch", old)
    monkeypatch.setattr(dcp.filesystem.FileSystem, "rename", crash)
    with pytest.raises(CheckpointException):
        torch_save(tmp_path / "torch", new)
    monkeypatch.undo()
    with pytest.raises(CheckpointException):
        # Neither the old one nor the new one is there.
        torch_load(tmp_path / "torch", {"w": torch.full((2,), 3.0)})

    our_save(tmp_path / "ours", old)
    monkeypatch.setattr("keepstep.interop.dcp.writer.commit_step", crash)
    with pytest.raises(CheckpointException):
        dcp.save(new, storage_writer=Writer(tmp_path / "ours"), no_dist=True)
    monkeypatch.undo()
    assert our_load(tmp_path / "ours", {"w": torch.zeros(2)})["w"].all()


def test_another_dtype_under_a_plan_that_was_kept(tmp_path, monkeypatch):
    outcomes = {}
    for name, writer in (("torch", dcp.FileSystemWriter), ("ours", Writer)):
        for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            monkeypatch.setattr(dcp.SavePlanner, f"_cached_{cache}", {})
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            path = tmp_path / name / str(number)
            dcp.save({"w": torch.ones(2, dtype=dtype)}, storage_writer=writer(path), planner=planner, no_dist=True)
        outcomes[name] = path
    said = dcp.FileSystemReader(outcomes["torch"]).read_metadata().state_dict_metadata["w"].properties.dtype
    assert said == torch.float32
    with (
        pytest.raises(CorruptError, match=r"holds bfloat16 .*the metadata says float32"),
        ks.open(outcomes["torch"]) as step,
    ):
        step["w"]
    assert ks.open(outcomes["ours"])["w"].dtype == torch.bfloat16
    assert Reader(outcomes["ours"]).read_metadata().state_dict_metadata["w"].properties.dtype == torch.bfloat16


def test_an_error_passes_through_except_exception(tmp_path):
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(CheckpointError) as caught:
        ks.load(tmp_path, into={"w": torch.zeros(1)})
    assert isinstance(caught.value, Exception)


@pytest.mark.parametrize("position", [".metadata", "value"])
@pytest.mark.case(158)
def test_code_in_a_checkpoint(tmp_path, position):
    path = checks.write(tmp_path / "d", {"w": torch.ones(1), "v": 1})
    made = tmp_path / "made"
    if position == ".metadata":
        (path / ".metadata").write_bytes(pickle.dumps(_Runs(made)))
    else:
        metadata = dcp.FileSystemReader(path).read_metadata()
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "v")
        file, data = path / info.relative_path, io.BytesIO()
        torch.save(_Runs(made), data)
        info.offset, info.length = file.stat().st_size, len(data.getvalue())
        file.write_bytes(file.read_bytes() + data.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for load in (
        lambda: ks.load(path, into={"w": torch.zeros(1), "v": 0}),
        lambda: our_load(path, {"w": torch.zeros(1)}),
    ):
        with pytest.raises((CheckpointError, CheckpointException), match=r"mkdir"):
            load()
        assert not made.exists()
    if position == ".metadata":
        with pytest.raises(CheckpointException):
            torch_load(path, {"w": torch.zeros(1), "v": 0})
    else:
        torch_load(path, {"w": torch.zeros(1), "v": 0})
    assert made.exists()


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_a_large_part_of_the_reading_is_done_again_and_again(tmp_path, monkeypatch):
    """A target in four shards of one stored chunk: torch reads all of it four times."""
    import torch.distributed.checkpoint.filesystem as files

    whole = torch.arange(1 << 14, dtype=torch.float32).reshape(128, 128)
    torch_save(tmp_path / "torch", {"w": whole})
    our_save(tmp_path / "ours", {"w": whole})
    read: list[int] = []
    loads = torch.load

    def counted(file: Any, **options: Any) -> Any:
        found = loads(file, **options)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(files.torch, "load", counted)
    torch_load(tmp_path / "torch", {"w": _Rows()})
    assert sum(read) == 4 * whole.nbytes
    read.clear()
    blob = type(LocalStorage(tmp_path / "ours").open(".metadata"))
    into = blob.read_into

    def counted_into(self: Any, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        into(self, offset, buffer)

    monkeypatch.setattr(blob, "read_into", counted_into)
    target = _Rows()
    our_load(tmp_path / "ours", {"w": target})
    assert sum(read) < 2 * whole.nbytes
    assert torch.equal(torch.cat(target.rows), whole)


class _Rows(torch.Tensor):
    """A tensor that torch's planners see as four shards of rows."""

    rows: list[torch.Tensor]

    @staticmethod
    def __new__(cls) -> _Rows:
        made = torch.Tensor._make_wrapper_subclass(cls, (128, 128))
        made.rows = [torch.zeros(32, 128) for _ in range(4)]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def __create_chunk_list__(self) -> list[Any]:
        size = torch.Size((32, 128))
        return [dcp.ChunkStorageMetadata(torch.Size((32 * number, 0)), size) for number in range(4)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows[index.offset[0] // 32]


# --- ranks ----------------------------------------------------------------------------------------------------------


def _own_values(rank: int, root: str) -> tuple[dict[str, Any], str]:
    """Both ranks save values of their own under one name; what torch gives back, and what is said instead."""
    mine = {"rng": {"r": f"r of {rank}", "t": f"t of {rank}"}, "w": torch.ones(1)}
    dcp.save(mine, checkpoint_id=f"{root}/torch")
    found = {"rng": {"r": "", "t": ""}, "w": torch.zeros(1)}
    dcp.load(found, checkpoint_id=f"{root}/torch")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(mine, storage_writer=Writer(f"{root}/ours"))
    with pytest.raises(CheckpointError, match="rng/r"):
        ks.save(f"{root}/plain", mine)
    ks.save(f"{root}/plain", {"rng": ks.per_rank(mine["rng"])})
    again = {"rng": ks.per_rank({"r": "", "t": ""})}
    ks.load(f"{root}/plain", into=again)
    assert again["rng"].value == mine["rng"]
    return found["rng"], str(caught.value)


def _safetensors_chunks(_rank: int, root: str) -> None:
    """Two chunks of one tensor on one rank: in safetensors, torch has one name for both."""
    from torch.distributed._shard.sharded_tensor import Shard as Local
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank = dist.get_rank()

    def made(value: float) -> Any:
        rows = [
            Local.from_tensor_and_offsets(torch.full((2, 3), value + at), [at, 0], rank)
            for at in (4 * rank, 4 * rank + 2)
        ]
        return init_from_local_shards(rows, (8, 3))

    writer = dcp.FileSystemWriter(f"{root}/chunks", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": made(1.0)}, storage_writer=writer)
    with pytest.raises((CorruptError, CheckpointError), match="all but the last are lost"):
        ks.load(f"{root}/chunks", into={"w": torch.zeros(8, 3)})
    dcp.save({"w": made(1.0)}, storage_writer=Writer(f"{root}/ours-chunks"))
    target = {"w": torch.zeros(8, 3)}
    ks.load(f"{root}/ours-chunks", into=target)
    assert target["w"][::2, 0].tolist() == [1.0, 3.0, 5.0, 7.0]


def _bytes_of_ranks(rank: int, root: str) -> tuple[int, int]:
    """Shards and whole tensors, saved by both: how many bytes this rank has written with torch, and with ``ks.save``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"whole-{n}": torch.ones(1 << 12) for n in range(8)}
    state |= {
        f"same-{n}": distribute_tensor(torch.ones(1 << 12), mesh, [Replicate()], src_data_rank=None) for n in range(8)
    }
    state |= {
        f"part-{n}": distribute_tensor(torch.ones(1 << 13), mesh, [Shard(0)], src_data_rank=None) for n in range(8)
    }
    sizes = []
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    for item in planner.create_local_plan().items:
        if item.index.fqn == "part-0" and item.type != WriteItemType.BYTE_IO:
            # What torch takes for the size of a shard is that of the whole tensor.
            assert item.tensor_storage_size() == 4 << 13
            sizes.append(item.tensor_data.chunk.sizes.numel() * 4)
    assert sizes == [4 << 12]
    ks.save(f"{root}/balance", state)
    written = sum(file.stat().st_size for file in Path(root, "balance").rglob(f"rank-{rank:05d}.*"))
    return written, sum(file.stat().st_size for file in Path(root, "balance").rglob("rank-*"))


@pytest.mark.slow
def test_values_of_ranks_chunks_of_one_name_and_bytes_of_each(tmp_path, rank_pool):
    results = rank_pool(2)(_own_values, str(tmp_path))
    assert results[0][0] == results[1][0], "torch gives every rank the same"
    for _, told in results:
        assert "rng.r: rank 1 has another value than rank 0" in told
        assert "rng.t" in told
    with pytest.raises(StepNotFoundError):
        ks.open(tmp_path / "ours")
    rank_pool(2)(_safetensors_chunks, str(tmp_path))
    shares = rank_pool(2)(_bytes_of_ranks, str(tmp_path))
    assert all(abs(mine / total - 1 / 2) < 0.1 for mine, total in shares), shares


def _killed_child(_rank: int, root: str) -> None:
    """The process that saves is killed: torch's never recovers, and an agent's successor saves the next step."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    def begin(number: int) -> Any:
        return dcp.async_save(
            {"w": torch.ones(2)},
            storage_writer=Writer(f"{root}/{number}"),
            async_stager=Stager(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    begin(0).result()
    child = executor._CHECKPOINT_PROCESS
    os.kill(child._save_process.pid, signal.SIGKILL)
    child._save_process.join()
    for number in (1, 2):
        with pytest.raises((RuntimeError, OSError, EOFError)):
            begin(number).result()
    pending = ks.async_save(f"{root}/agent-1", {"w": torch.ones(2)}, background="agent")
    pending.wait_committed()
    ks.load(f"{root}/agent-1", into={"w": torch.zeros(2)})


@pytest.mark.slow
def test_the_process_that_saves_is_killed(tmp_path, rank_pool):
    rank_pool(1)(_killed_child, str(tmp_path), timeout_s=120)
