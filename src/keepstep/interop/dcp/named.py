"""A step under torch's names, whoever wrote it: what ``Reader`` shows to torch, and reads for it."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from keepstep.checkpointer.foreign import show_foreign
from keepstep.checkpointer.loading import found_manifest, read_trees
from keepstep.commit.catalog import MAX_MANIFEST_BYTES
from keepstep.errors import CorruptError, UnsafeFileError
from keepstep.foreign.dcp.items import undone
from keepstep.foreign.dcp.metadata import parse_metadata
from keepstep.foreign.dcp.step import show_directory
from keepstep.foreign.kinds import ARCHIVE, FOREIGN, TORCH_NOTES
from keepstep.foreign.plain import load_plain
from keepstep.format.box import Box, whole
from keepstep.format.layout import Want
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.format.objects import TensorRef
from keepstep.interop.dcp.written import Inside, Notes, Part, names_in, names_noted, notes_of, part_name
from keepstep.move.reader import copy_bits, read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.shard import torch_dtype
from keepstep.state.values import materialise
from keepstep.storage.base import Storage, read_blob

__all__ = ["NamedStep"]

TOGETHER_BYTES = 1 << 28
"""How much of what extensions made is read at once, to be undone."""


def _given(made: dict[str, TensorRef], inside: dict[str, Inside], url: str) -> dict[str, TensorRef]:
    """What extensions were given, by name, in place of what they made of it."""
    if lost := sorted(set(inside) - set(made)):
        raise CorruptError(f"{url}: noted, and not there: {', '.join(lost[:20])}")
    return {name: TensorRef(made[name].key, each.dtype, each.shape) for name, each in inside.items()}


class NamedStep:
    """One step, with torch's names: its metadata as torch has it, and what is stored under each name.

    Args:
        storage: the folder.
        raw: torch's own metadata of one rank, where it is that.
        registry: what knows the extensions that it was written through; by default torch's own.

    Raises:
        StepNotFoundError, CorruptError: there is none, or not what was written.
    """

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

    def saved_value(self, name: str, made: io.BytesIO | None, *, unpickles: bool) -> io.BytesIO:
        """A plain value, as torch expects to be given it. ``unpickles``: whoever is given it runs what is in a pickle.

        ``made`` is what an extension was given, where it went through one.

        Raises:
            CorruptError: it is none.
            UnsafeFileError: bytes that only the planner can read which made them, or a class that is not plain.
        """
        if made is not None:
            file = made
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
            raise UnsafeFileError([f"{name}: bytes that another planner has made, which this one would unpickle"])
        return file

    def read_into(self, items: list[ReadItem], targets: list[torch.Tensor]) -> None:
        """Fills targets from the tensors as they are stored.

        Raises:
            CorruptError: a block is not what was written.
        """
        boxes = [Box(tuple(item.storage_offsets), tuple(item.lengths)) for item in items]
        keys = [self.stored(self.ref_of(item)) for item in items]
        each = zip(keys, boxes, targets, strict=True)
        self._read([Want(key, box, target.is_contiguous()) for key, box, target in each], targets)

    def undo_into(self, items: list[ReadItem], targets: list[torch.Tensor]) -> None:
        """Fills targets from what went through extensions, which is undone whole: one after the other, in memory.

        Raises:
            UnsafeFileError: an extension that is not known.
            CorruptError: a block is not what was written, or an extension cannot undo it.
        """
        asked: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item, target in zip(items, targets, strict=True):
            asked.setdefault(self._name_of(item), []).append((item, target))
        for name, file in self.undone(asked):
            ref, each, found = self.refs[name], asked[name], bytearray(file.getvalue())
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

    def undone(self, names: Iterable[str]) -> Iterator[tuple[str, io.BytesIO]]:
        """What extensions were given, by name; for names of what went through none, nothing. Many are read together."""
        waiting = [name for name in names if name in self._made]
        while waiting:
            ends = itertools.accumulate(self._made[name].shape[0] for name in waiting)
            count = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= TOGETHER_BYTES, ends)))
            group, waiting = waiting[:count], waiting[count:]
            refs = [self._made[name] for name in group]
            made = [torch.empty(ref.shape, dtype=torch.uint8, device="cpu") for ref in refs]
            self._read([Want(self.stored(ref), whole(ref.shape)) for ref in refs], made)
            for name, each in zip(group, made, strict=True):
                yield name, undone(io.BytesIO(each.numpy().tobytes()), self.through, self._registry, name)

    def _read(self, wants: list[Want], targets: list[torch.Tensor]) -> None:
        pieces = find_pieces(self.manifest.structure, wants, -1)
        read_pieces(self.storage, self.manifest, pieces, wants=wants, targets=targets)

    def __getitem__(self, key: str) -> torch.Tensor:
        """A whole tensor that is part of a plain value."""
        spec = next(spec for spec in self.manifest.tensors if spec.key == self.manifest.aliases.get(key, key))
        shape = self.manifest.layouts[spec.layout].shape
        target = torch.empty(shape, dtype=torch_dtype(spec.dtype), device="cpu")
        self._read([Want(spec.key, whole(shape))], [target])
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
