"""A component of a step, written as safetensors that other libraries load: streamed, by one process or by all ranks.

plan        the same on every rank, from the manifest and the tree of values alone; the files are shared by their bytes
write       each rank its own files, none of which has its name yet; no rank waits for another meanwhile
agree       all ranks have written everything, or nothing gets its name
name        files get their names, the index comes last
"""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import torch

from keepstep.checkpointer.foreign import show_to_all
from keepstep.checkpointer.loading import found_manifest, read_trees
from keepstep.errors import CheckpointError, MismatchError, StepExistsError, StepNotFoundError, UsageError
from keepstep.foreign.kinds import FOREIGN
from keepstep.foreign.safetensors.files import TORCH_NAMES, pack_file_header
from keepstep.format.globs import near
from keepstep.format.layout import Structure
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.format.shardfile import digest
from keepstep.interop.huggingface.chunks import CHUNK_BYTES, Buffer, Chunk, page_aligned
from keepstep.interop.huggingface.planning import (
    INDEX_NAME,
    SINGLE_NAME,
    Naming,
    OutFile,
    Plan,
    plan_files,
    share_files,
)
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.shard import torch_dtype
from keepstep.storage.base import Storage, Upload
from keepstep.storage.local import Place, storage_of

__all__ = ["MAX_SHARD_BYTES", "Exported", "Wish", "export", "exporting"]

MAX_SHARD_BYTES = 5_000_000_000
THREADS = 3
MOST_FILES = 256
"""Files that one rank has open: they get their names when all of them are whole."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".partial")
MAX_CONFIG_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class Wish:
    """What to export, and how; see ``export``."""

    component: str = "model"
    max_shard_bytes: int = MAX_SHARD_BYTES
    dtype: str | None = None
    rename: Naming | None = None
    config_from: str | Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``files`` are names with their sizes; ``bytes_written`` and ``seconds`` are those of this rank.

    ``tied`` maps each name that is not written to the one that holds the same tensor; ``left_out`` are parts of the
    component that are no tensors, or were renamed to None.
    """

    url: str
    step: int
    files: Mapping[str, int] = field(default_factory=dict)
    tensors: int = 0
    total_bytes: int = 0
    bytes_written: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    copied: Sequence[str] = ()
    seconds: float = 0.0


def export(
    step: Place,
    folder: Place,
    *,
    component: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | torch.dtype | None = None,
    rename: Naming | None = None,
    config_from: str | Path | None = None,
    overwrite: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Exported:
    """Writes a component of a step as safetensors, with an index where there are several files.

    Collective where there are ranks: the files are then spread over them by bytes. Memory is a few chunks on each rank,
    whatever the size. The files get their names when all of them are whole, and the index comes last. A step's layout
    makes no difference, and a directory of torch's DCP does as well.

    Args:
        step: the folder of the step, the same on every rank.
        folder: where the files go, the same on every rank; all ranks must reach it.
        component: which part of the state.
        max_shard_bytes: the largest file; a tensor that is larger has a file to itself.
        dtype: what floating-point tensors are converted to, such as ``"bfloat16"``; by default they stay as they are.
        rename: regular expressions with their replacements, tried in order on the whole name, or a function that gives the
            new name, or None to leave the tensor out.
        config_from: a folder whose other files (configuration, tokenizer) are copied along.
        overwrite: whether files of a model that are there already may be replaced.
        deadline_s: how long ranks wait for the slowest of them, in seconds, once they have written their own share.

    Raises:
        StepNotFoundError: no such step, or no such component in it.
        StepExistsError: a model is there already, and ``overwrite`` is False.
        UsageError, MismatchError: options that mean nothing, tensors that safetensors cannot hold, or values that do not
            fit into ``dtype``.
        CorruptError, StorageError, RankFailedError, CommitTimeoutError: nothing got its name.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    wish = Wish(component, max_shard_bytes, name, rename, config_from, overwrite)
    *_, last = exporting(step, folder, wish, deadline_s)
    return last


def exporting(step: Place, folder: Place, wish: Wish, deadline_s: float = DEADLINE_S) -> Generator[Exported]:
    """The same, bit by bit: gives how far it is, and the whole of it at the end. To give up, close the iterator."""
    began = time.monotonic()
    ranks = Ranks.current()
    target = storage_of(folder)
    source, manifest = _opened(ranks, storage_of(step), deadline_s)
    with ranks.phase("plan an export", deadline_s) as phase:
        plan = _planned(source, manifest, wish, ranks.world)
        seen = f"{target.url} {digest(msgspec.json.encode([plan.files, plan.tied])):016x}".encode()
        posted = phase.gather(seen)
        if posted is not None:
            _check_alike(posted)
            _check_free(target, wish)
        phase.broadcast(b"" if posted is not None else None)
    files = share_files(plan.files, ranks.world)[ranks.rank]
    done = Exported(target.url, manifest.step, total_bytes=plan.data_bytes, tied=plan.tied, left_out=plan.left_out)
    call = "write an export"
    with contextlib.ExitStack() as held:
        try:
            uploads: dict[str, tuple[Upload, int]] = {}
            for count in _written(source, manifest, files, target, uploads, held):
                yield replace(done, bytes_written=count)
        except BaseException as err:
            # The others learn of it when they have written their share: nobody waits while there is work.
            if ranks.world > 1:
                with contextlib.suppress(CheckpointError), ranks.phase(call, deadline_s) as phase:
                    phase.tell(err)
            raise
        with ranks.phase(call, deadline_s) as phase:
            answers = phase.gather(b"")
            if answers is not None:
                _make_room(target, wish)
            phase.broadcast(b"" if answers is not None else None)
        with ranks.phase("name the files of an export", deadline_s) as phase:
            for upload, size in uploads.values():
                upload.commit(size)
            answers = phase.gather(msgspec.json.encode({name: size for name, (_, size) in uploads.items()}))
            sizes = b""
            copied: list[str] = []
            if answers is not None:
                named: dict[str, int] = {}
                for raw in answers:
                    named |= msgspec.json.decode(raw, type=dict[str, int])
                copied = _finish(target, plan, named, wish)
                sizes = msgspec.json.encode((dict(sorted(named.items())), copied))
            named, copied = msgspec.json.decode(phase.broadcast(sizes), type=tuple[dict[str, int], list[str]])
    written = sum(file.data_bytes for file in files)
    tensors = sum(len(file.tensors) for file in plan.files)
    seconds = time.monotonic() - began
    yield replace(done, files=named, tensors=tensors, bytes_written=written, copied=tuple(copied), seconds=seconds)


def _opened(ranks: Ranks, source: Storage, deadline_s: float) -> tuple[Storage, Manifest]:
    """The step, with its manifest as the coordinator sees it."""
    with ranks.phase("open a step for export", deadline_s) as phase:
        posted = phase.gather(source.url.encode())
        raw = None
        if posted is not None:
            _check_alike(posted)
            raw = found_manifest(source)
        raw = phase.broadcast(raw)
    if raw[:1] == FOREIGN:
        source, raw = show_to_all(ranks, source, raw, deadline_s)
    return source, parse_manifest(raw, f"{source.url}/{MANIFEST_NAME}")


def _check_alike(posted: Sequence[bytes]) -> None:
    others = [f"rank {rank}: {one.decode()}" for rank, one in enumerate(posted) if one != posted[0]]
    if others:
        raise MismatchError(
            "ranks export differently; nothing was written:", [f"rank 0: {posted[0].decode()}", *others]
        )


def _planned(source: Storage, manifest: Manifest, wish: Wish, world: int) -> Plan:
    """Files of the wished size, and at least one for each rank as far as there are tensors enough."""
    if wish.max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes={wish.max_shard_bytes}: a file needs room for something")
    if wish.dtype is not None and (wish.dtype not in TORCH_NAMES or not torch_dtype(wish.dtype).is_floating_point):
        real = ", ".join(name for name in TORCH_NAMES if torch_dtype(name).is_floating_point)
        hint = near(wish.dtype, list(TORCH_NAMES))
        raise UsageError(f"dtype={wish.dtype!r} is none that floating-point tensors can be converted to: {real}{hint}")
    if wish.config_from is not None and not Path(wish.config_from).is_dir():
        raise UsageError(f"config_from={str(wish.config_from)!r} is no folder")
    tree, _ = read_trees(source, manifest, 0)
    if wish.component not in tree:
        gone = " (let go, to keep the weights alone)" if wish.component in manifest.dropped else ""
        hint = near(wish.component, list(tree))
        raise StepNotFoundError(
            f"no component {wish.component!r} in {source.url}{gone}; it has {', '.join(tree)}{hint}"
        )
    node = tree[wish.component]

    def plan(most: int) -> Plan:
        return plan_files(node, manifest.aliases, rename=wish.rename, dtype=wish.dtype, most_bytes=most)

    found = plan(wish.max_shard_bytes)
    if world > 1:
        found = plan(min(wish.max_shard_bytes, max(1, -(-found.data_bytes // world))))
    most = max(len(share) for share in share_files(found.files, world))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = min(MOST_FILES, limit // 4) if limit > 0 else MOST_FILES
    if most > allowed:
        raise UsageError(
            f"max_shard_bytes={wish.max_shard_bytes:,} makes {len(found.files):,} files, {most:,} of them on one rank, which"
            f" keeps no more than {allowed} open; give a larger one, or allow more open files (ulimit -n)"
        )
    return found


def _check_free(target: Storage, wish: Wish) -> None:
    """Nothing that is there may be lost without asking."""
    there = [name for name, _ in target.list("") if "/" not in name]
    taken = sorted(name for name in there if _is_weight(name))
    copies = sorted(set(there) & {one.name for one in _config_files(wish)})
    if (taken or copies) and not wish.overwrite:
        some = ", ".join([*taken, *copies][:4])
        raise StepExistsError(
            f"{target.url} has {some} already; nothing was written. overwrite=True replaces what is there"
        )


def _is_weight(name: str) -> bool:
    return name == INDEX_NAME or _WEIGHTS.fullmatch(name) is not None


def _config_files(wish: Wish) -> list[Path]:
    if wish.config_from is None:
        return []
    files = sorted(path for path in Path(wish.config_from).iterdir() if path.is_file())
    others = [path for path in files if not path.name.endswith((*_OTHER_WEIGHTS, ".index.json"))]
    return [path for path in others if not path.name.startswith(".") and path.stat().st_size <= MAX_CONFIG_BYTES]


def _make_room(target: Storage, wish: Wish) -> None:
    """Before new files take their names, what made the old ones a model goes: nobody finds a mixture of both."""
    if wish.overwrite:
        old = [name for name, _ in target.list("") if "/" not in name and _is_weight(name)]
        target.delete(sorted(old, key=lambda name: name not in (INDEX_NAME, SINGLE_NAME)))


def _finish(target: Storage, plan: Plan, named: Mapping[str, int], wish: Wish) -> list[str]:
    """Copies the configuration, and puts the index last."""
    copied = []
    for path in _config_files(wish):
        target.put(path.name, path.read_bytes())
        copied.append(path.name)
    if set(named) != {file.name for file in plan.files}:
        raise MismatchError("files of the export are missing:", sorted({file.name for file in plan.files} - set(named)))
    if len(plan.files) > 1:
        where = {one.name: file.name for file in plan.files for one in file.tensors}
        index = {"metadata": {"total_size": plan.data_bytes}, "weight_map": dict(sorted(where.items()))}
        target.put(INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
    return copied


def _written(
    source: Storage,
    manifest: Manifest,
    files: Sequence[OutFile],
    target: Storage,
    uploads: dict[str, tuple[Upload, int]],
    held: contextlib.ExitStack,
) -> Iterator[int]:
    """Writes the files, all of which stay open; gives the bytes of tensors that are written."""
    specs = {spec.key: spec for spec in manifest.tensors}
    done = 0
    pending: set[Future[int]] = set()
    buffers: SimpleQueue[Buffer] = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(Buffer(page_aligned(CHUNK_BYTES)))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="keepstep-export") as pool:
        try:
            for file in files:
                header = pack_file_header(file.tensors)
                size = len(header) + file.data_bytes
                upload = held.enter_context(target.create(file.name, size))
                uploads[file.name] = upload, size
                upload.write_at(0, memoryview(header))
                keys = {one.key for one in file.sources}
                few = Structure(manifest.meshes, manifest.layouts, tuple(specs[key] for key in sorted(keys)))
                for start in range(0, file.data_bytes, CHUNK_BYTES):
                    stop = min(start + CHUNK_BYTES, file.data_bytes)
                    work = Chunk(source, manifest, few, file, start, stop)
                    pending.add(pool.submit(work.move, upload, len(header), buffers))
                    # No more than one waits for its turn. A store that takes parts in order gets them nearly so.
                    while len(pending) > THREADS:
                        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                        done += sum(each.result() for each in finished)
                        yield done
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                done += sum(each.result() for each in finished)
                yield done
        finally:
            for each in pending:
                each.cancel()
