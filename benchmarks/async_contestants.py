"""The programs that save while training goes on, each behind the same few calls.

`open` prepares, untimed, whatever the program can prepare before its first save; `boundary` is called between two
steps and saves if a save is due; `finish` waits for the last save; `close` ends every process that was started, so
that the next round begins as a new job does. Each contestant notes the moments at which its saves had copied all
they need (`staged`) and were durable (`durable`). Peers run as their documentation says they are fastest.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contestants import TorchSave, local_tensor
from harness import fsync_directory
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if TYPE_CHECKING:
    from harness import Context
    from training import Trainer


class AsyncContestant(Protocol):
    """What can take part."""

    name: str
    background: bool
    """Whether training goes on while it saves."""
    staged: list[float]
    durable: list[float]

    def open(self, trainer: Trainer, root: Path) -> None:
        """Get ready to save the trainer's state under `root`, which does not exist yet."""

    def boundary(self, due: bool) -> None:
        """All stands at one step."""

    def finish(self) -> None:
        """Return when the last save is durable."""

    def close(self) -> None:
        """End what was started."""


class Synchronous:
    """torch.save, then fsync: training stands still until it is done. One file a rank."""

    name = "torch.save + fsync"
    background = False

    def __init__(self, context: Context) -> None:
        """Nothing is prepared."""
        self.saver = TorchSave(context)

    def open(self, trainer: Trainer, root: Path) -> None:
        """Nothing is prepared."""
        self.trainer, self.root = trainer, root
        self.staged: list[float] = []
        self.durable: list[float] = []

    def boundary(self, due: bool) -> None:
        """Write, if due."""
        if due:
            self.saver.save(step_path(self.root, len(self.durable)), {"model": self.trainer.tensors()})
            self.staged.append(time.perf_counter())
            self.durable.append(time.perf_counter())

    def finish(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Nothing was started."""


class DcpAsync:
    """torch.distributed.checkpoint's async_save, in a thread or in its process, with cached plans.

    Its stager is kept between saves, so that its memory is warm, and copies in a thread of its own; the update waits
    for that copy. Collectives of the saves have a group of their own. Its process starts in the first save.
    """

    background = True

    def __init__(self, context: Context, *, process: bool, threads: int = 2) -> None:
        """`threads` is the writer's `thread_count`."""
        self.name = "DCP process" if process else "DCP thread"
        self.process = process
        self.threads = threads
        self.group = dist.new_group(backend="gloo")

    def open(self, trainer: Trainer, root: Path) -> None:
        """Make the stager; forget the plans of earlier rounds."""
        self.trainer, self.root = trainer, root
        self.staged: list[float] = []
        self.durable: list[float] = []
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.process,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self.count = 0
        self.staging = self.uploading = _done()
        self.hook = trainer.optimizer.register_step_pre_hook(lambda *_: self.staging.result())

    def boundary(self, due: bool) -> None:
        """Save, if due; the stager's memory is in use until the last save has ended."""
        if not due:
            return
        self.uploading.result()
        response = dcp.async_save(
            {"tensors": self.trainer.tensors(), **self.trainer.plain()},
            storage_writer=dcp.FileSystemWriter(step_path(self.root, self.count), thread_count=self.threads),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )
        self.count += 1
        self.staging, self.uploading = response.staging_completion, response.upload_completion
        _note(self.staging, self.staged)
        _note(self.uploading, self.durable)

    def finish(self) -> None:
        """Wait for the last save."""
        self.uploading.result()

    def close(self) -> None:
        """End the process and drop the memory and the plans."""
        self.hook.remove()
        self.stager.close()
        del self.stager
        dcp_process._CHECKPOINT_PROCESS = None
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(SavePlanner, f"_cached_{name}").clear()
        gc.collect()


class TorchCheckpointingAsync:
    """torch_checkpointing: its own stager and writer process, both started and warmed before the first save.

    The update is guarded by its lock. The state is cut into four items, written by as many threads; files are synced
    by its hooks. Its direct I/O ends in EINVAL on ext4 and is switched off.
    """

    name = "torch_checkpointing"
    background = True
    items = 4

    def __init__(self, _context: Context) -> None:
        """All is made in `open`."""

    def open(self, trainer: Trainer, root: Path) -> None:
        """Start the writer process and allocate the staging memory."""
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.trainer, self.root = trainer, root
        self.staged: list[float] = []
        self.durable: list[float] = []
        root.mkdir(parents=True, exist_ok=True)
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                default=ItemSpec(),
                save=AsyncCheckpointSaverConfig(
                    writer_config=CheckpointWriterConfig(file_write_max_threads=self.items)
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=sync_files,
                finalize_callback=sync_parent,
            )
        )
        self.manager.prewarm_staging(self._payload())
        self.manager._prewarm_staging_future.result()
        self.manager._saver._checkpoint_process.wait_for_init()
        self.count = 0
        self.writing: Future[Any] = _done()
        lock = self.manager.lock()
        self.hooks = [
            trainer.optimizer.register_step_pre_hook(lambda *_: lock.acquire_or_raise()),
            trainer.optimizer.register_step_post_hook(lambda *_: lock.release()),
        ]

    def boundary(self, due: bool) -> None:
        """Save, if due; it waits for the last save by itself."""
        if due:
            self.writing = self.manager.save(str(step_path(self.root, self.count)), self._payload())
            self.count += 1
            _note(self.manager._staging_future, self.staged)
            _note(self.writing, self.durable)

    def finish(self) -> None:
        """Wait for the last save."""
        self.writing.result()

    def close(self) -> None:
        """End the process."""
        for hook in self.hooks:
            hook.remove()
        self.manager.close()
        gc.collect()

    def _payload(self) -> dict[str, Any]:
        tensors = self.trainer.tensors()
        names = list(tensors)
        parts = {f"part{i}": {name: tensors[name] for name in names[i :: self.items]} for i in range(self.items)}
        return parts | self.trainer.plain()


def sync_files(args: Any) -> None:
    """Make every file of a step durable, before it gets its name. Runs in the writer process."""
    for file in Path(args.path).iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    fsync_directory(Path(args.path))


def sync_parent(args: Any) -> None:
    """Make the name of a step durable. Runs in the writer process."""
    fsync_directory(Path(args.path).parent)


class NvrxAsync:
    """nvidia-resiliency-ext: its persistent worker, which forks one writer a bucket, with cached metadata.

    It is made for CUDA; on a CPU it gets by with three changes. Staging is ours: the worker would see live memory, so
    the state is first copied into shared memory that is kept between saves. Asking all ranks whether they are done
    goes over gloo, once a step. Nothing is preloaded, since preloading waits for CUDA.
    A save is durable when the trainer has noticed its end and written the metadata, at a boundary.
    """

    name = "NVRx"
    background = True

    def __init__(self, context: Context, buckets: int = 2) -> None:
        """The state is written as that many files a rank."""
        self.world = context.world
        self.buckets = buckets
        self.group = dist.new_group(backend="gloo")

    def open(self, trainer: Trainer, root: Path) -> None:
        """Allocate the shared memory. Worker and manager processes start in the first save."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        self.core, self.files, self.saver = core, filesystem_async, state_dict_saver
        self.trainer, self.root = trainer, root
        self.staged: list[float] = []
        self.durable: list[float] = []
        self.queue = core.AsyncCallsQueue(persistent=True)
        self.cache = state_dict_saver.CheckpointMetadataCache()
        self.shared = {name: _shared_like(tensor) for name, tensor in trainer.tensors().items()}
        self.count = 0

    def boundary(self, due: bool) -> None:
        """See whether a save has ended; save, if due."""
        if self.queue.get_num_unfinalized_calls() and self._all_done():
            self.finish()
        if not due:
            return
        self.finish()
        for name, tensor in self.trainer.tensors().items():
            local_tensor(self.shared[name]).copy_(local_tensor(tensor).detach())
        self.staged.append(time.perf_counter())
        path = step_path(self.root, self.count)
        path.mkdir(parents=True, exist_ok=True)
        self.count += 1
        writer = self.files.FileSystemWriterAsync(path, thread_count=self.buckets)
        planned = self.saver.save_state_dict_async_plan(
            {"tensors": self.shared, **self.trainer.plain()},
            writer,
            self.group,
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self.cache,
        )
        function, _, arguments = writer.get_save_function_and_args()
        finalize = [lambda: self.saver.save_state_dict_async_finalize(*planned)]
        self.queue.schedule_async_request(self.core.AsyncRequest(function, arguments, finalize))

    def finish(self) -> None:
        """Wait for the last save and write its metadata, if that has not been done."""
        if self.queue.get_num_unfinalized_calls():
            self.queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            self.durable.append(time.perf_counter())

    def close(self) -> None:
        """End the worker and the manager."""
        self.queue.persistent_caller.close()
        self.queue.persistent_caller = None
        self.files._results_queue = None
        del self.queue, self.shared
        gc.collect()

    def _all_done(self) -> bool:
        pending = torch.tensor([int(self.queue.persistent_caller.comp_q.empty())])
        if self.world > 1:
            dist.all_reduce(pending, group=self.group)
        return pending.item() == 0


class KeepstepAsync:
    """This library: a Checkpointer, its agent started and its arena warmed before the first save."""

    background = True

    def __init__(self, context: Context, *, staging: str = "overlap", name: str = "keepstep") -> None:
        """`staging` as the Checkpointer takes it."""
        self.context = context
        self.name = name
        self.staging = staging

    def open(self, trainer: Trainer, root: Path) -> None:
        """Make the Checkpointer on a run of its own."""
        import keepstep as ks

        self.root = root
        self.staged: list[float] = []
        self.durable: list[float] = []
        state = ks.TrainState(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
        self.checkpointer = ks.Checkpointer(root, state, staging=self.staging)
        self.checkpointer.restore()
        self.pending: Any = None
        self.begun = False

    def boundary(self, due: bool) -> None:
        """What a training loop calls after each step, and a save if due. The first time there was no step yet."""
        if self.begun:
            self.checkpointer.step()
        self.begun = True
        if due:
            self.pending = self.checkpointer.save()
            _note(self.pending.staged, self.staged)
            _note(self.pending.committed, self.durable)

    def finish(self) -> None:
        """Wait for the last save."""
        if self.pending is not None:
            self.pending.wait_committed(timeout_s=600)

    def close(self) -> None:
        """Close, and end the agent."""
        self.checkpointer.close()
        self.context.barrier()
        if self.context.rank == 0:
            command = Path(sys.executable).with_name("keepstep")
            subprocess.run([command, "agent", "stop", self.root], check=True, stdout=subprocess.DEVNULL)
        self.context.barrier()

    def records(self) -> list[dict[str, Any]]:
        """What the run's own records say about its saves, oldest first."""
        return [json.loads(line) for line in (self.root / "saves.jsonl").read_text().splitlines()]


def peers(context: Context) -> list[AsyncContestant]:
    """Everyone else."""
    found: list[AsyncContestant] = [
        Synchronous(context),
        DcpAsync(context, process=False),
        DcpAsync(context, process=True),
        TorchCheckpointingAsync(context),
    ]
    try:
        import nvidia_resiliency_ext  # noqa: F401
    except ImportError:
        context.note("  NVRx is left out: nvidia-resiliency-ext is not installed")
    else:
        found.append(NvrxAsync(context))
    return found


def step_path(root: Path, index: int) -> Path:
    """Where a save goes."""
    return root / f"step-{index:08d}"


def _done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def _note(future: Future[Any], moments: list[float]) -> None:
    """Note the moment at which the future is fulfilled."""
    future.add_done_callback(lambda _: moments.append(time.perf_counter()))


def _shared_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout whose local part lies in shared memory."""
    local = local_tensor(tensor).detach().clone().share_memory_()
    if local_tensor(tensor) is tensor:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
