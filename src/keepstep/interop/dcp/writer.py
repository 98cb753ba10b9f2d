"""``Writer``: keepstep's files, digests and commit under ``dcp.save`` and ``dcp.async_save``.

torch plans who writes what; this writes it as shard files, and the coordinator commits the step when every rank has. What a
rank has written travels in the results that torch gathers anyway, so no rank asks another for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpointer.saving import file_heads, no_collection
from keepstep.commit.publish import commit_step
from keepstep.errors import StepExistsError, StorageError, UsageError
from keepstep.format.box import Box, whole
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.manifest import MANIFEST_NAME, TREE_NAME, FileRecord, Receipt, promised_files
from keepstep.format.objects import encode
from keepstep.format.shardfile import Entry
from keepstep.interop.dcp.written import (
    LOOSE,
    NOTES_NAME,
    Saved,
    Told,
    Written,
    components_of,
    folders_of,
    is_plain,
    key_of,
    manifest_of,
    part_name,
    parts_apart,
    seen_by,
    tree_of,
    values_of,
)
from keepstep.move.arena import ONCE_BYTES, Arena
from keepstep.move.staging import fill
from keepstep.move.writer import Origin, ShardWriter
from keepstep.plan.save_plan import Extra, FilePlan, Slot, rank_files
from keepstep.state.capture import capture
from keepstep.state.shard import dtype_name
from keepstep.storage.base import Storage, read_blob
from keepstep.storage.local import LocalStorage, Place, storage_of
from keepstep.timeline import Timeline

__all__ = ["Writer"]

ATTEMPT_NAME = "attempt"
"""Holds the save id while planners use plans of an earlier save, which hold that one's."""
_TUNING = frozenset(
    {
        "cache_staged_state_dict",
        "max_threads",
        "min_size_per_thread",
        "per_thread_copy_ahead",
        "serialization_format",
        "single_file_per_rank",
        "sync_files",
        "thread_count",
    }
)
_log = logging.getLogger("keepstep")
_STEP = re.compile(r"step[-_]?(\d{1,18})")


class Writer(StorageWriter):
    """In the place of ``FileSystemWriter``. What is saved is a step, for ``ks.load``, ``ks.open`` and ``keepstep verify``.

    Args:
        path: the folder of the step, or a URL; ``checkpoint_id`` of a call takes its place.
        overwrite: whether a step that is committed there may be replaced, as torch's own writer does. Here readers see the
            old or the new one, whole, and the old one stays where the save fails.
        step: the number to record; by default the one in the folder's name (``step-100``), else 0.
        tuning: ``thread_count`` and what else tunes torch's writer. It changes nothing: every rank writes one file for each
            component, synced, with as many threads as are of use. ``_extensions`` alone does: they change every byte, and
            what is saved through them is a checkpoint of torch's own form, by torch's writer, which is logged.

    Raises:
        UsageError: an argument that it does not know; from a save, extensions and a URL.
        StepExistsError: from a save, a step is committed there and ``overwrite`` is False. (As all of these, inside of what
            torch raises.)
        UnsafeValueError: values that cannot be stored without pickle; lists all. Nothing was committed.
        MismatchError: ranks have different values under one name. Nothing was committed.
        StorageError: nothing was committed.
    """

    def __init__(
        self, path: Place | None = None, *, overwrite: bool = True, step: int | None = None, **tuning: object
    ) -> None:
        self._extensions = cast("Sequence[Any]", tuning.pop("_extensions", None) or ())
        if unknown := sorted(set(tuning) - _TUNING):
            raise UsageError(
                f"Writer takes no {', '.join(unknown)}; of torch's writer it takes {', '.join(sorted(_TUNING))}"
            )
        self._path = path
        self._overwrite = overwrite
        self._step = step
        self._save_id = ""
        self._there: tuple[str, ...] = ()
        self._rank = 0
        self._alone = False
        self._torchs: FileSystemWriter | None = None

    @property
    def path(self) -> Any:
        """Where the next save goes, by the name that torch's writer has for it."""
        return self._path

    @property
    def save_id(self) -> str:
        """The save that was begun last; empty before the first."""
        return self._save_id if self._torchs is None else str(self._torchs.save_id)

    @property
    def checkpoint_id(self) -> Any:
        """Where the next save goes."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, in another place where one is given."""
        if checkpoint_id:
            self._path = cast(Place, checkpoint_id)
        self._save_id = ""

    def storage_meta(self) -> StorageMeta | None:
        """What torch tells planners of the place."""
        return StorageMeta(checkpoint_id=str(self._path), save_id=self.save_id or None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this rank's part of a save. Without collectives each rank saves a step, in a folder of its own."""
        self._rank = int(kwargs.get("rank") or 0)
        self._alone = not kwargs.get("use_collectives", True)
        if self._extensions:
            self._torchs = self._through()
            self._torchs.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan if self._torchs is None else self._torchs.prepare_local_plan(plan)

    @no_collection()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the attempt, on the coordinator, and tells every rank of it.

        Raises:
            StepExistsError: see the class.
        """
        if self._torchs is not None:
            return self._torchs.prepare_global_plan(plans)
        storage = self._storage()
        there = [name for name, _ in storage.list("")]
        if not self._alone:
            there = [name for name in there if not _is_alone(name)] if self._overwrite else there
        if MANIFEST_NAME in there and not self._overwrite:
            raise StepExistsError(
                f"Checkpoint already exists: {storage.url} is already committed; it was left as it is, nothing was written"
            )
        self._there = tuple(name for name in there if name != MANIFEST_NAME)
        self._save_id = secrets.token_hex(4)
        if any(not plan.usable for plan in plans):
            # Planners take out what they kept of an earlier save, with what that one was told.
            storage.put(ATTEMPT_NAME, self._save_id.encode())
            self._there = (*self._there, ATTEMPT_NAME)
        elif ATTEMPT_NAME in there:
            storage.delete([ATTEMPT_NAME])
        paths = (_path_of(plan, item) for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO)
        # What stands alone at the top shares one folder: a file for each would only be another file to wait for.
        folders = folders_of([str(name) for name in dict.fromkeys(path[0] for path in paths if len(path) > 1)])
        return [
            dataclasses.replace(plan, storage_data=Told(self._save_id, rank, folders))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files: durable on return, and looked at by nobody yet.

        Raises:
            UnsafeValueError, StorageError: see the class.
        """
        if self._torchs is not None:
            return self._torchs.write_data(plan, planner)
        storage = self._storage()
        told: Told = plan.storage_data
        save_id = told.save_id
        if getattr(planner, "_enable_plan_caching", False):
            with contextlib.suppress(StorageError):
                save_id = read_blob(storage, ATTEMPT_NAME, 64).decode()
        self._save_id = save_id
        origin = Origin(save_id, self._number(), 0 if self._alone else told.rank)
        with no_collection():
            values, raw = values_of(plan, planner)
            tensors = _Tensors(plan, planner, told.folders, values, apart=self._alone)
            files = tensors.files()
        receipt = _write(storage, files, origin, cast(Any, tensors), {})
        written = Written(receipt, tuple(tensors.saved), tensors.names, tensors.values, seen_by(planner), raw)
        size = {index: box.elements * ITEM_BYTES[saved.dtype] for index, (saved, box) in tensors.by_index.items()}
        results = [WriteResult(item.index, size.get(item.index, 1), None) for item in plan.items]
        results.append(WriteResult(MetadataIndex(NOTES_NAME), 0, msgspec.msgpack.encode(written)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the step, on the coordinator: durable and visible on return.

        Raises:
            MismatchError, StorageError: see the class.
        """
        if self._torchs is not None:
            self._torchs.finish(metadata, results)
            return
        storage = self._storage()
        with no_collection():
            told = [msgspec.msgpack.decode(each[-1].storage_data, type=Written) for each in results]
            save_id = told[0].receipt.save_id
            stored, parts = parts_apart(metadata) if self._alone else (metadata, ())
            manifest, refs = manifest_of(
                told, stored, save_id=save_id, step=self._number(), exclusive=storage.exclusive
            )
            tree, notes = tree_of(told, stored, refs, parts)
            extras: dict[str, bytes | torch.Tensor] = {TREE_NAME: encode(tree)}
            described = (Extra(TREE_NAME, "uint8", (len(extras[TREE_NAME]),)),)
            empty = msgspec.structs.replace(manifest.structure, layouts=(), tensors=())
            files = rank_files(empty, 0, live_index=None, extras=described)
            last = _write(storage, files, Origin(save_id, manifest.step, 0), (), extras)
            receipts = [*(each.receipt for each in told), last]
            config = b"null" if notes is None else msgspec.json.encode({NOTES_NAME: notes})
            manifest = msgspec.structs.replace(
                manifest, components=components_of(tree, manifest.structure), config=msgspec.Raw(config)
            )
            records: dict[str, list[FileRecord]] = {folder: [] for folder in {spec.folder for spec in manifest.tensors}}
            for receipt in receipts:
                for folder, record in receipt.files.items():
                    records.setdefault(folder, []).append(record)
            promised_files(msgspec.structs.replace(manifest, files={f: tuple(each) for f, each in records.items()}))
        commit_step(storage, manifest, receipts, replace=self._overwrite, run=None, leftovers=self._there)
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether that may be the name of a place."""
        return is_place(checkpoint_id)

    def _through(self) -> FileSystemWriter:
        """Torch's own writer: an extension makes other bytes of each entry, of which nothing here could read a part."""
        storage = self._storage()
        if not isinstance(storage, LocalStorage):
            raise UsageError(f"{storage.url}: torch writes through extensions to a path; nothing was written")
        _log.warning(
            "%s: through extensions torch writes its own checkpoint: without digests, not at once", storage.url
        )
        return FileSystemWriter(storage.root, overwrite=self._overwrite, _extensions=self._extensions)

    def _storage(self) -> Storage:
        if self._path is None:
            raise UsageError("Writer() was given no path, and the call no checkpoint_id")
        if not self._alone:
            return storage_of(self._path)
        return storage_of(alone_at(self._path, self._rank))

    def _number(self) -> int:
        if self._step is not None:
            return self._step
        match = _STEP.fullmatch(PurePath(str(getattr(self._path, "url", self._path))).name)
        return int(match[1]) if match else 0


def is_place(checkpoint_id: object) -> bool:
    """Whether a step could be kept there: a path, or a URL that can be reached with what is installed."""
    try:
        return isinstance(checkpoint_id, str | os.PathLike) and bool(storage_of(checkpoint_id))
    except UsageError:
        return False


def alone_at(path: Place, rank: int) -> str:
    """Where a rank saves that saves without the others."""
    return f"{str(getattr(path, 'url', path)).rstrip('/')}/alone-{rank:05d}"


def _is_alone(name: str) -> bool:
    return re.match(r"alone-\d{5}/", name) is not None


def _path_of(plan: SavePlan, item: WriteItem) -> tuple[str | int, ...]:
    """Where an entry stood in the state, as the planner tells; its name, where it does not."""
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    path = paths.get(item.index.fqn)
    return path if isinstance(path, tuple) and path else (item.index.fqn,)


class _Tensors(Sequence[tuple[torch.Tensor, ...]]):
    """The tensors that one rank writes, and where each goes.

    ``saved`` says what they are, ``names`` has the key of each name of torch's, ``values`` the tree of plain values.
    ``apart`` makes a tensor of its own of each part of one: a rank that saves without the others has no more of it.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, folders: dict[str, str], values: dict[str, Any], *, apart: bool
    ) -> None:
        self._planner = planner
        self._items: list[WriteItem | torch.Tensor] = []
        plain = is_plain(planner)
        self.saved: list[Saved] = []
        self.names: dict[str, str] = {}
        self.by_index: dict[MetadataIndex, tuple[Saved, Box]] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                continue
            name, path = item.index.fqn, _path_of(plan, item)
            chunk = item.tensor_data.chunk
            box, shape = Box(tuple(chunk.offsets), tuple(chunk.sizes)), tuple(item.tensor_data.size)
            if apart and box.sizes != shape:
                name, path = part_name(name, box), (*path, str(box))
                box, shape = whole(box.sizes), box.sizes
            key = self.names[name] = key_of(path)
            # (What it is may be another thing by now than what a plan that was kept says.)
            tensor = cast(torch.Tensor, planner.resolve_data(item))
            dtype = dtype_name(tensor.dtype)
            if dtype is None or tensor.layout is not torch.strided:
                raise UsageError(f"{key}: a tensor of {tensor.dtype} and {tensor.layout} cannot be stored")
            saved = Saved(key, dtype, folders.get(str(path[0]), LOOSE), shape, box)
            self.by_index[item.index] = saved, box
            self.saved.append(saved)
            # One that the planner makes is made again when its turn comes: all of them may be more than the memory holds.
            self._items.append(tensor if plain else item)
        self.values = b"{}"
        if values:
            snapshot = capture(values, rank=0, world=1)
            self.values = snapshot.tree
            for spec, (local,) in zip(snapshot.structure.tensors, snapshot.locals, strict=True):
                shape = tuple(local.shape)
                self.saved.append(Saved(spec.key, spec.dtype, "tensors", shape, whole(shape)))
                self._items.append(local)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item = self._items[index]
        if isinstance(item, WriteItem):
            item = cast(torch.Tensor, self._planner.resolve_data(item))
        return (item.detach().resolve_conj().resolve_neg(),)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self[index] for index in range(len(self._items)))

    def files(self) -> tuple[FilePlan, ...]:
        """The files of this rank."""
        order = sorted(range(len(self.saved)), key=lambda at: (-ITEM_BYTES[self.saved[at].dtype], self.saved[at].dtype))
        slots: dict[str, list[Slot]] = {}
        ends: dict[str, int] = {}
        for index in order:
            saved = self.saved[index]
            if not saved.box.elements:
                continue
            start = ends.get(saved.folder, 0)
            stop = start + math.prod(saved.box.sizes) * ITEM_BYTES[saved.dtype]
            name = saved.key if saved.box.sizes == saved.shape else f"{saved.key}~{saved.box}"
            entry = Entry(name, saved.key, saved.dtype, saved.shape, saved.box, start, stop)
            slots.setdefault(saved.folder, []).append(Slot(entry, index, (0,) * len(saved.shape)))
            ends[saved.folder] = stop
        return tuple(FilePlan(folder, tuple(each), ends[folder]) for folder, each in slots.items())


def _write(
    storage: Storage,
    files: tuple[FilePlan, ...],
    origin: Origin,
    tensors: tuple[tuple[torch.Tensor, ...], ...],
    extras: dict[str, bytes | torch.Tensor],
) -> Receipt:
    """Fills and writes files: durable on return."""
    timeline = Timeline()
    with (
        contextlib.closing(Arena(ONCE_BYTES, warm=False)) as arena,
        contextlib.closing(ShardWriter(storage, file_heads(files, origin, None), origin=origin, arena=arena)) as writer,
    ):
        for take in (writer.seal, writer.submit) if writer.seals_first else (writer.submit,):
            for chunk in fill(files, tensors, extras, arena, timeline):
                take(chunk)
        return writer.finish()
