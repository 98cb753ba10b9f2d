"""The programs that are compared, each behind the same three calls.

`save(path, state)` returns when the step is durable; `load(path, state)` fills the tensors of
`state` in place. On several ranks all of them call together. A state is
`{"model": {name: tensor or DTensor}}`. Peers run as their documentation says they are fastest;
where a peer does not sync what it wrote, its documented hook does it, so that every contestant
promises the same thing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import fsync_directory

if TYPE_CHECKING:
    from harness import Context

State = dict[str, dict[str, torch.Tensor]]


class Contestant(Protocol):
    """What can take part."""

    name: str

    def save(self, path: Path, state: State) -> object:
        """Write `state` to the fresh directory `path`; return when it is durable."""

    def load(self, path: Path, state: State) -> object:
        """Fill `state` from `path`."""


class Keepstep:
    """This library, by its two plain calls."""

    name = "keepstep"

    def __init__(self, _context: Context) -> None:
        """Import the library."""
        import keepstep

        self.keepstep = keepstep

    def save(self, path: Path, state: State) -> object:
        """Write one committed step."""
        return self.keepstep.save(path, state)

    def load(self, path: Path, state: State) -> Any:
        """Read it back; digests are checked."""
        return self.keepstep.load(path, into=state)


class Dcp:
    """torch.distributed.checkpoint with its defaults, or with several writer threads."""

    def __init__(self, _context: Context, threads: int = 1) -> None:
        """`threads` is the writer's `thread_count`."""
        self.name = "DCP" if threads == 1 else f"DCP, {threads} threads"
        self.threads = threads

    def save(self, path: Path, state: State) -> object:
        """Write with fsync, as it does by default."""
        return dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=self.threads))

    def load(self, path: Path, state: State) -> object:
        """Read in place."""
        return dcp.load(state, storage_reader=dcp.FileSystemReader(path))


class TorchSave:
    """torch.save of the local tensors, one file a rank; resharding is not possible."""

    def __init__(self, context: Context, *, sync: bool = True) -> None:
        """`sync` makes the file durable."""
        self.name = "torch.save + fsync" if sync else "torch.save"
        self.file = f"rank-{context.rank}.pt"
        self.sync = sync

    def save(self, path: Path, state: State) -> None:
        """Write this rank's file."""
        path.mkdir(parents=True, exist_ok=True)
        local = {name: local_tensor(tensor) for name, tensor in state["model"].items()}
        with (path / self.file).open("wb") as stream:
            torch.save(local, stream)
            if self.sync:
                stream.flush()
                os.fsync(stream.fileno())
        if self.sync:
            fsync_directory(path)

    def load(self, path: Path, state: State) -> None:
        """Read this rank's file and copy into the targets."""
        loaded = torch.load(path / self.file, weights_only=True)
        for name, tensor in state["model"].items():
            local_tensor(tensor).copy_(loaded[name])


class TorchCheckpointing:
    """torch_checkpointing: blocking saves, several items so that it may use several threads.

    Its direct I/O, on by default, ends in EINVAL on file systems that insist on alignment, such
    as ext4: it is switched off as its troubleshooting page says. Its gather of sharding metadata
    needs CUDA whatever the process group is; on a machine without CUDA that one call is replaced
    by the same gather over the default group.
    """

    def __init__(self, context: Context, *, items: int = 4, reshard: bool = False) -> None:
        """The state is cut into `items` files, written by as many threads.

        `reshard` declares at save, as it must be, that ranks may change.
        """
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.name = "torch_checkpointing"
        self.items = items
        self.suffix = f"_{context.rank}.pt"
        resharder = DefaultResharder() if reshard else None
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                default=ItemSpec(resharder=resharder),
                save=SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=items)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=self._sync_files,
                finalize_callback=lambda args: fsync_directory(Path(args.path).parent),
            )
        )

        if reshard and not torch.cuda.is_available():
            self.manager._metadata_manager._all_gather_pickled_data = _gather_over_gloo

    def save(self, path: Path, state: State) -> None:
        """Write, wait for all ranks, rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.manager.save(str(path), self._payload(state))

    def load(self, path: Path, state: State) -> None:
        """Read in place."""
        self.manager.load(str(path), into=self._payload(state))

    def _payload(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        names = list(state["model"])
        return {
            f"model{part}": {name: state["model"][name] for name in names[part :: self.items]}
            for part in range(self.items)
        }

    def _sync_files(self, args: Any) -> None:
        for file in Path(args.path).glob(f"*{self.suffix}"):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        fsync_directory(Path(args.path))


def _gather_over_gloo(data: object, _group: object = None) -> dict[int, object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, data)
    return dict(enumerate(values))


def ourselves(context: Context) -> list[Contestant]:
    """keepstep, unless only the peers were asked for."""
    return [] if context.peers_only else [Keepstep(context)]


# --------------------------------------------------------------------------------------- states


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def make_state(context: Context, tensors: int, rows: int = 2048, columns: int = 4096) -> State:
    """Float32 tensors of rows x columns, split by rows over the ranks if there are several.

    The global values do not depend on the number of ranks.
    """
    base = _base(rows, columns)
    if context.world == 1:
        return {"model": {f"layers.{i}.weight": base + i for i in range(tensors)}}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (context.world,))
    local = base.chunk(context.world)[context.rank]
    shape, stride = base.shape, base.stride()
    return {
        "model": {
            f"layers.{i}.weight": DTensor.from_local(local + i, mesh, [Shard(0)], shape=shape, stride=stride)
            for i in range(tensors)
        }
    }


def clear(state: State) -> None:
    """Set all tensors to zero, so that a load that does nothing is noticed."""
    for tensor in state["model"].values():
        local_tensor(tensor).zero_()


def check(context: Context, state: State, who: str) -> None:
    """Fail unless `state` holds the values that `make_state` gave it."""
    tensors = [local_tensor(tensor) for tensor in state["model"].values()]
    rows = sum(context.gather(tensors[0].shape[0]))  # type: ignore[arg-type]
    base = _base(rows, tensors[0].shape[1])  # type: ignore[arg-type]
    local = base.chunk(context.world)[context.rank]
    for i, tensor in enumerate(tensors):
        if not torch.equal(tensor, local + i):
            message = f"{who} did not bring back tensor {i}"
            raise RuntimeError(message)


def size_of(state: State) -> int:
    """Bytes held by this rank."""
    return sum(local_tensor(tensor).nbytes for tensor in state["model"].values())


def _base(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(7))
