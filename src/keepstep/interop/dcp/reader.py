"""``Reader``: steps under ``dcp.load``, whoever wrote them: ``Writer``, ``ks.save``, or torch itself.

torch asks for boxes of tensors; all that one rank asks for is read together, straight into its tensors, every block proved.
"""

from __future__ import annotations

import io
import logging
import math
import os
import secrets
from collections.abc import Callable
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from keepstep.checkpointer.foreign import show_foreign
from keepstep.checkpointer.loading import found_manifest, read_trees
from keepstep.checkpointer.saving import no_collection
from keepstep.commit.catalog import MAX_MANIFEST_BYTES
from keepstep.errors import CheckpointError, CorruptError, MismatchError, UnsafeValueError, UsageError, listed
from keepstep.foreign.dcp.items import undone
from keepstep.foreign.dcp.metadata import parse_metadata
from keepstep.foreign.dcp.step import show_directory
from keepstep.foreign.kinds import ARCHIVE, FOREIGN, TORCH_NOTES
from keepstep.foreign.plain import load_plain
from keepstep.format.box import Box, whole
from keepstep.format.layout import Want
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.format.objects import TensorRef
from keepstep.interop.dcp.writer import alone_at, is_place
from keepstep.interop.dcp.written import Inside, Notes, Part, names_in, names_noted, notes_of, part_name
from keepstep.move.reader import copy_bits, read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.shard import torch_dtype, writable
from keepstep.state.values import materialise
from keepstep.storage.base import Storage, read_blob
from keepstep.storage.local import Place, storage_of

__all__ = ["Reader"]

_log = logging.getLogger("keepstep")


class Reader(StorageReader):
    """In the place of ``FileSystemReader``. Reads steps that ``Writer`` or ``ks.save`` wrote, and torch's own directories.

    Args:
        path: the folder of the step, or a URL; ``checkpoint_id`` of a call takes its place.
        cast: whether tensors may be converted to the dtype of the state. (torch does it without a word.)
        strict: whether a key of the step that no rank asks for is an error; else it is logged.
        _extension_registry: what knows the extensions that a checkpoint of torch's was written through, as for torch's.

    Raises:
        MismatchError: from a load, dtypes differ and ``cast`` is False; or keys that are not asked for, with ``strict``.
            Lists all; no tensor was changed. (As all of these, inside of what torch raises.)
        StepNotFoundError: no step is committed there.
        CorruptError: a block is not what was written. Tensors may hold part of the step.
    """

    def __init__(
        self,
        path: Place | None = None,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        cast: bool = False,
        strict: bool = False,
    ) -> None:
        self._path = path
        self._registry = _extension_registry
        self.load_id = secrets.token_hex(8)
        self._cast = cast
        self._strict = strict
        self._step: _Step | None = None
        self._failed: CheckpointError | None = None

    @property
    def path(self) -> Any:
        """Where the next load comes from, by the name that torch's reader has for it."""
        return self._path

    @property
    def checkpoint_id(self) -> Any:
        """Where the next load comes from."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, at another place where one is given."""
        if checkpoint_id:
            self._path = cast(Place, checkpoint_id)
        self._step = self._failed = None
        self.load_id = secrets.token_hex(8)

    @no_collection()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The step in torch's words: each tensor as one chunk, whatever pieces it lies in.

        Raises:
            StepNotFoundError, CorruptError: see the class.
        """
        rank = kwargs.get("rank")
        try:
            self._step = self._found(rank)
        except CheckpointError as err:
            if rank is None or self._failed is None:
                self._failed = err
                raise
            # torch asks twice, and some versions of it say of neither error more than that there was one.
            return Metadata({})
        self._failed = None
        cast(StorageMeta, self._step.metadata.storage_meta).load_id = self.load_id
        return self._step.metadata

    def _found(self, rank: int | None) -> _Step:
        if self._path is None:
            raise UsageError("Reader() was given no path, and the call no checkpoint_id")
        storage, raw = storage_of(self._path), b""
        if rank is not None:
            own = f"__{rank}{MANIFEST_NAME}"
            if any(name == own for name, _ in storage.list("")):
                raw = read_blob(storage, own, MAX_MANIFEST_BYTES)
            else:
                storage = storage_of(alone_at(self._path, int(rank)))
        return _Step(storage, raw, self._registry)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the metadata that was read; reads it where another reader did that.

        Raises:
            StepNotFoundError, CorruptError: see the class.
        """
        if self._failed is not None:
            raise self._failed
        if self._step is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are, once it is known what nobody asks for.

        Raises:
            MismatchError: see the class.
        """
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        step = self._opened()
        empty = {name for name, ref in step.refs.items() if 0 in ref.shape}
        unread = [name for name in step.metadata.state_dict_metadata if name not in asked and name not in empty]
        if unread and self._strict:
            raise MismatchError(f"{step.storage.url} has keys that the state has not; nothing was changed:", unread)
        if unread:
            _log.warning("%s: not asked for, and not loaded:%s", step.storage.url, listed(unread))
        return plans

    @no_collection()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what this rank asks for. All of it is there on return.

        Raises:
            MismatchError, CorruptError: see the class.
        """
        step = self._opened()
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        held = [planner.resolve_tensor(item) for item in items]
        targets, given = self._targets(step, items, held)
        wants = [
            Want(
                step.stored(step.ref_of(item)),
                Box(tuple(item.storage_offsets), tuple(item.lengths)),
                target.is_contiguous(),
            )
            for item, target in zip(items, targets, strict=True)
        ]
        if step.through:
            step.undo_into(items, targets)
        else:
            pieces = find_pieces(step.manifest.structure, wants, -1)
            read_pieces(step.storage, step.manifest, pieces, wants=wants, targets=targets)
        for give in given:
            give()
        # Only now, when every byte was proved.
        for item, tensor in zip(items, held, strict=True):
            planner.commit_tensor(item, tensor)
        for item in values:
            planner.load_bytes(item, step.saved_value(item.storage_index.fqn, unpickles=_unpickles(planner)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether that may be the name of a place."""
        return is_place(checkpoint_id)

    def _opened(self) -> _Step:
        if self._step is None:
            raise UsageError("set_up_storage_reader comes first")
        return self._step

    def _targets(
        self, step: _Step, items: list[ReadItem], held: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Callable[[], object]]]:
        """The memory to fill for each item, and what is left to do afterwards where that is not the state's own."""
        targets, given, wrong = [], [], {}
        for item, tensor in zip(items, held, strict=True):
            name = item.storage_index.fqn
            target, dtype = tensor.detach(), torch_dtype(step.ref_of(item).dtype)
            if target.shape != item.lengths:
                wrong[name] = f"{name}: {list(item.lengths)} of it into a tensor of shape {list(target.shape)}"
            elif target.dtype != dtype and not self._cast:
                wrong[name] = f"{name}: saved as {dtype}, the state has {target.dtype} (Reader(cast=True) converts)"
            if target.dtype != dtype or not writable(target):
                made = torch.empty(target.shape, dtype=dtype, device=target.device)
                given.append(_copy(target, made))
                target = made
            targets.append(target)
        if wrong:
            raise MismatchError(f"{step.storage.url} does not fit the state; nothing was changed:", wrong.values())
        return targets, given


def _unpickles(planner: LoadPlanner) -> bool:
    """Whether it does with the bytes of a value what torch's own planner does."""
    own = DefaultLoadPlanner
    return isinstance(planner, own) and type(planner).load_bytes is own.load_bytes


def _copy(target: torch.Tensor, made: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(made)


def _given(made: dict[str, TensorRef], inside: dict[str, Inside], url: str) -> dict[str, TensorRef]:
    """What extensions were given, by name, in place of what they made of it."""
    if lost := sorted(set(inside) - set(made)):
        raise CorruptError(f"{url}: noted, and not there: {', '.join(lost[:20])}")
    return {name: TensorRef(made[name].key, each.dtype, each.shape) for name, each in inside.items()}


class _Step:
    """One step, with torch's names. ``raw`` is torch's own metadata of one rank, where it is that."""

    def __init__(self, storage: Storage, raw: bytes, registry: ExtensionRegistry | None = None) -> None:
        notes = None
        if raw:
            notes = notes_of(parse_metadata(raw, storage.url))
            storage = show_directory(storage, raw, registry=registry, apart=True)
            raw = read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        elif (raw := found_manifest(storage))[:1] == FOREIGN:
            storage, raw = show_foreign(storage, raw, registry)
        self.storage = storage
        self.manifest: Manifest = parse_manifest(raw, f"{storage.url}/{MANIFEST_NAME}")
        tree, _ = read_trees(storage, self.manifest, 0)
        notes = notes or self._notes()
        names = names_in(tree) if notes is None else names_noted(tree, notes)
        self.refs, self._values = names.refs, names.values
        self.through = notes.through if notes is not None else ()
        self._registry, self._made = registry, dict(names.refs) if self.through else {}
        paths = dict(names.paths)
        if notes is not None and self.through:
            # Of each of them the step has the bytes that extensions made of it.
            self.refs = _given(self._made, notes.inside, storage.url)
            paths = {name: path[1:] for name, path in paths.items()}
        self._raw = frozenset(notes.raw if notes is not None else ())
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        parts = {part_name(part.name, part.box): part for part in (notes.parts if notes is not None else ())}
        # (A part without elements may be said to begin where another one does.)
        order = sorted(parts.items(), key=lambda each: each[1].box.elements > 0)
        self._parts = {(part.name, part.box.offsets): stored for stored, part in order}
        for name in names.paths:
            ref = self.refs.get(name)
            if ref is None:
                entries[name] = BytesStorageMetadata()
                continue
            part = parts.get(name) or Part(name, ref.shape, whole(ref.shape))
            chunk = ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            made = TensorStorageMetadata(TensorProperties(dtype=torch_dtype(ref.dtype)), torch.Size(part.shape), [])
            cast(TensorStorageMetadata, entries.setdefault(part.name, made)).chunks.append(chunk)
            if name in parts:
                paths[part.name] = paths.pop(name)[:-1]
        meta = StorageMeta(checkpoint_id=storage.url, save_id=self.manifest.save_id)
        self.metadata = Metadata(entries, paths, {}, meta, CURRENT_DCP_VERSION)

    def ref_of(self, item: ReadItem) -> TensorRef:
        """The tensor that has what is asked for."""
        return self.refs[self._name_of(item)]

    def _name_of(self, item: ReadItem) -> str:
        index = item.storage_index
        return self._parts.get((index.fqn, tuple(index.offset or ())), index.fqn)

    def stored(self, ref: TensorRef) -> str:
        """The key under which a tensor is stored."""
        return self.manifest.aliases.get(ref.key, ref.key)

    def saved_value(self, name: str, *, unpickles: bool) -> io.BytesIO:
        """A plain value, as torch expects to be given it. ``unpickles``: whoever is given it runs what is in a pickle.

        Raises:
            CorruptError: it is none.
            UnsafeValueError: bytes that only the planner can read which made them, or a class that is not plain.
        """
        if name in self._made and name not in self.refs:
            file = self._undone(name)
        elif name not in self._values:
            raise CorruptError(f"{self.storage.url}: {name!r} is no plain value in the step, and one in the state")
        elif name in self._raw:
            file = io.BytesIO(self._values[name])
        else:
            file = io.BytesIO()
            torch.save(materialise(self._values[name], cast(Any, self)), file)
            file.seek(0)
            return file
        if (raw := file.getvalue())[: len(ARCHIVE)] == ARCHIVE:
            load_plain(raw, name)
        elif unpickles:
            raise UnsafeValueError([f"{name}: bytes that another planner has made, which this one would unpickle"])
        return file

    def undo_into(self, items: list[ReadItem], targets: list[torch.Tensor]) -> None:
        """Fills targets from what went through extensions, which is undone whole: one after the other, in memory.

        Raises:
            UnsafeValueError: an extension that is not known.
            CorruptError: a block is not what was written, or an extension cannot undo it.
        """
        asked: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item, target in zip(items, targets, strict=True):
            asked.setdefault(self._name_of(item), []).append((item, target))
        for name, each in asked.items():
            ref, found = self.refs[name], bytearray(self._undone(name).getvalue())
            dtype = torch_dtype(ref.dtype)
            expected = math.prod(ref.shape) * dtype.itemsize
            if len(found) != expected:
                raise CorruptError(f"{name}: extensions gave back {len(found):,} bytes of {expected:,}")
            if not expected:
                continue
            tensor = torch.frombuffer(found, dtype=dtype).view(ref.shape)
            for item, target in each:
                part = tensor
                for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, size)
                copy_bits(part, target)

    def _undone(self, name: str) -> io.BytesIO:
        made = self[self._made[name].key]
        return undone(io.BytesIO(made.numpy().tobytes()), self.through, self._registry, name)

    def __getitem__(self, key: str) -> torch.Tensor:
        """A whole tensor that is part of a plain value."""
        spec = next(spec for spec in self.manifest.tensors if spec.key == self.manifest.aliases.get(key, key))
        shape = self.manifest.layouts[spec.layout].shape
        target = torch.empty(shape, dtype=torch_dtype(spec.dtype), device="cpu")
        want = Want(spec.key, Box((0,) * len(shape), shape))
        pieces = find_pieces(self.manifest.structure, [want], -1)
        read_pieces(self.storage, self.manifest, pieces, wants=[want], targets=[target])
        return target

    def _notes(self) -> Notes | None:
        """What ``Writer`` noted, where it had to.

        Raises:
            CorruptError: it cannot be read.
        """
        try:
            config = msgspec.json.decode(self.manifest.config)
            noted = config.get(TORCH_NOTES) if isinstance(config, dict) else None
            return None if noted is None else msgspec.convert(noted, Notes)
        except msgspec.MsgspecError as err:
            raise CorruptError(f"{self.storage.url}: what was noted for torch cannot be read: {err}") from err
