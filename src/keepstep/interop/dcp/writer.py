"""``Writer``: keepstep's files, digests and commit under ``dcp.save`` and ``dcp.async_save``.

torch plans who writes what; this writes it as shard files, and the coordinator commits the step when every rank has. What a
rank has written travels in the results that torch gathers anyway, so no rank asks another for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from pathlib import PurePath
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpointer.saving import file_heads, no_collection
from keepstep.commit.publish import commit_step
from keepstep.errors import StepExistsError, StorageError, UsageError
from keepstep.foreign.kinds import TORCH_NOTES
from keepstep.format.manifest import MANIFEST_NAME, TREE_NAME, FileRecord, Receipt, promised_files
from keepstep.format.objects import encode
from keepstep.interop.dcp.entries import Entries, PlainEntries, TransformedEntries, descriptors, path_of, through
from keepstep.interop.dcp.written import (
    Told,
    Written,
    below,
    components_of,
    folders_of,
    manifest_of,
    parts_apart,
    seen_by,
    tree_of,
)
from keepstep.move.arena import ONCE_BYTES, Arena
from keepstep.move.staging import fill
from keepstep.move.writer import Origin, ShardWriter
from keepstep.plan.save_plan import Extra, FilePlan, rank_files
from keepstep.storage.base import Storage, read_blob
from keepstep.storage.local import Place, storage_of
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
_BY_POSITION = (
    "single_file_per_rank",
    "sync_files",
    "thread_count",
    "per_thread_copy_ahead",
    "cache_staged_state_dict",
    "overwrite",
    "_extensions",
    "serialization_format",
)
"""What torch's writer takes after its path."""
_STEP = re.compile(r"step[-_]?(\d{1,18})")


class Writer(StorageWriter):
    """In the place of ``FileSystemWriter``. What is saved is a step, for ``ks.load``, ``ks.open`` and ``keepstep verify``.

    Args:
        path: the folder of the step, or a URL; ``checkpoint_id`` of a call takes its place.
        overwrite: whether a step that is committed there may be replaced, as torch's own writer does. Here readers see the
            old or the new one, whole, and the old one stays where the save fails.
        step: the number to record; by default the one in the folder's name (``step-100``), else 0.
        by_position: what torch's writer takes after its path, in its order.
        tuning: ``thread_count`` and what else tunes torch's writer. It changes nothing: every rank writes one file for each
            component, synced, with as many threads as are of use. ``_extensions`` alone does: what they make of each entry
            is what is stored, and ``Reader`` alone undoes it.

    Raises:
        UsageError: an argument that it does not know; from a save, an extension that fails.
        StepExistsError: from a save, a step is committed there and ``overwrite`` is False. (As all of these, inside of what
            torch raises.)
        UnsafeValueError: values that cannot be stored without pickle; lists all. Nothing was committed.
        MismatchError: ranks have different values under one name. Nothing was committed.
        StorageError: nothing was committed.
    """

    def __init__(
        self,
        path: Place | None = None,
        *by_position: object,
        overwrite: bool = True,
        step: int | None = None,
        **tuning: object,
    ) -> None:
        if len(by_position) > len(_BY_POSITION):
            raise UsageError(f"Writer takes a path and, by position, {', '.join(_BY_POSITION)}; not more")
        tuning.update(zip(_BY_POSITION, by_position, strict=False))
        overwrite = bool(tuning.pop("overwrite", overwrite))
        self._extensions = tuple(cast(Any, tuning.pop("_extensions", None)) or ())
        if unknown := sorted(set(tuning) - _TUNING):
            raise UsageError(
                f"Writer takes no {', '.join(unknown)}; of torch's writer it takes {', '.join(sorted(_TUNING))}"
            )
        self.path = path
        self._overwrite = overwrite
        self._step = step
        self._save_id = ""
        self._there: tuple[str, ...] = ()
        self._rank = 0
        self._alone = False

    @property
    def save_id(self) -> str:
        """The save that was begun last; empty before the first."""
        return self._save_id

    @property
    def checkpoint_id(self) -> Any:
        """Where the next save goes."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, in another place where one is given."""
        if checkpoint_id:
            self.path = cast(Place, checkpoint_id)
        self._save_id = ""

    def storage_meta(self) -> StorageMeta | None:
        """What torch tells planners of the place."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id or None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this rank's part of a save. Without collectives each rank saves a step, in a folder of its own."""
        self._rank = int(kwargs.get("rank") or 0)
        self._alone = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    @no_collection()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the attempt, on the coordinator, and tells every rank of it.

        Raises:
            StepExistsError: see the class.
        """
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
        paths = (path_of(plan, item) for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO)
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
        storage = self._storage()
        told: Told = plan.storage_data
        save_id = told.save_id
        if getattr(planner, "_enable_plan_caching", False):
            with contextlib.suppress(StorageError):
                save_id = read_blob(storage, ATTEMPT_NAME, 64).decode()
        self._save_id = save_id
        origin = Origin(save_id, self._number(), 0 if self._alone else told.rank)
        with no_collection():
            entries: Entries
            if self._extensions:
                entries = TransformedEntries(plan, planner, self._extensions)
            else:
                entries = PlainEntries(plan, planner, told.folders, apart=self._alone)
            files = entries.files()
        receipt = _write(storage, files, origin, cast(Any, entries), {})
        written = Written(
            receipt, tuple(entries.saved), entries.names, entries.values, seen_by(planner), entries.raw, entries.inside
        )
        results = [WriteResult(item.index, entries.sizes.get(item.index, 1), None) for item in plan.items]
        results.append(WriteResult(MetadataIndex(TORCH_NOTES), 0, msgspec.msgpack.encode(written)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the step, on the coordinator: durable and visible on return.

        Raises:
            MismatchError, StorageError: see the class.
        """
        storage = self._storage()
        with no_collection():
            told = [msgspec.msgpack.decode(each[-1].storage_data, type=Written) for each in results]
            save_id = told[0].receipt.save_id
            stored, parts = parts_apart(metadata) if self._alone else (metadata, ())
            if self._extensions:
                stored, parts = parts_apart(metadata, all_of_them=True)
                stored = below(stored, through(self._extensions))
            manifest, refs = manifest_of(
                told, stored, save_id=save_id, step=self._number(), exclusive=storage.exclusive
            )
            tree, notes = tree_of(told, stored, refs, parts)
            if notes is not None and self._extensions:
                inside = {name: each for part in told for name, each in part.inside.items()}
                notes = msgspec.structs.replace(notes, through=descriptors(self._extensions), inside=inside)
            extras: dict[str, bytes | torch.Tensor] = {TREE_NAME: encode(tree)}
            described = (Extra(TREE_NAME, "uint8", (len(extras[TREE_NAME]),)),)
            empty = msgspec.structs.replace(manifest.structure, layouts=(), tensors=())
            files = rank_files(empty, 0, live_index=None, extras=described)
            last = _write(storage, files, Origin(save_id, manifest.step, 0), (), extras)
            receipts = [*(each.receipt for each in told), last]
            config = b"null" if notes is None else msgspec.json.encode({TORCH_NOTES: notes})
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

    def _storage(self) -> Storage:
        if self.path is None:
            raise UsageError("Writer() was given no path, and the call no checkpoint_id")
        if not self._alone:
            return storage_of(self.path)
        return storage_of(alone_at(self.path, self._rank))

    def _number(self) -> int:
        if self._step is not None:
            return self._step
        match = _STEP.fullmatch(PurePath(str(getattr(self.path, "url", self.path))).name)
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
