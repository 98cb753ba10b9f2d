"""A step, written as a directory that plain ``dcp.load`` reads: in the memory of one chunk, every byte proved on its way."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from keepstep.checkpointer.loading import read_trees
from keepstep.errors import StepExistsError, StorageError, UnsafeValueError, UsageError
from keepstep.foreign.dcp.metadata import METADATA_NAME
from keepstep.format.box import Box, whole
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import near
from keepstep.format.layout import Structure, TensorSpec, Want, parts
from keepstep.format.manifest import Manifest
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, join
from keepstep.move.reader import read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.shard import torch_dtype
from keepstep.state.values import materialise
from keepstep.storage.base import Storage

__all__ = ["exporting"]

CHUNK_BYTES = 1 << 24
"""A piece that is larger is written as several chunks: torch reads a chunk whole, and so does this."""
TOGETHER_BYTES = 1 << 22
_OWN = (
    "every rank has a value of its own under it, and a DCP checkpoint has one for all. Leave it out: name what is to be"
    " written, as only= or --only"
)


def exporting(
    source: Storage, manifest: Manifest, target: Storage, *, only: Sequence[str] = (), overwrite: bool = False
) -> Generator[int]:
    """Writes the step as a DCP checkpoint; gives the bytes of tensors written so far, and has put the metadata at its end.

    Not collective: one process does it all. There is one file for each rank that had saved something.

    Args:
        source: the step.
        manifest: its manifest.
        target: the directory.
        only: the components to write; all of them when it is empty.
        overwrite: whether a checkpoint that is there may be replaced; it is gone from the first byte of the new one on.

    Raises:
        UnsafeValueError: values that a DCP checkpoint has no place for; lists all. Nothing was written.
        UsageError: a component that is not there, or keys that are one and the same for torch. Nothing was written.
        StepExistsError: a checkpoint is there, and ``overwrite`` is False.
        CorruptError, StorageError: the step is damaged, or something cannot be read or written. There is no metadata.
    """
    if any(name == METADATA_NAME for name, _ in target.list("")):
        if not overwrite:
            raise StepExistsError(f"{target.url} holds a checkpoint already; it was left as it is, nothing was written")
        target.delete([METADATA_NAME])
    reader = _Reader(source, manifest)
    flat, paths = _flattened(reader, only)
    written = _Written(target)
    try:
        yield from _write_tensors(reader, flat, written)
        _write_values(reader, flat, written)
    except BaseException:
        # Given up, or it cannot be read or written.
        with contextlib.suppress(StorageError):
            target.delete(sorted({place.relative_path for place in written.places.values()}))
        raise
    metadata = Metadata(
        state_dict_metadata={name: written.entries[name] for name in flat},
        planner_data=paths,
        storage_data=written.places,
        storage_meta=StorageMeta(checkpoint_id=target.url, save_id=manifest.save_id),
        version=CURRENT_DCP_VERSION,
    )
    target.put(METADATA_NAME, pickle.dumps(metadata))


@dataclass(slots=True)
class _Reader:
    """Reads parts of tensors of the step. ``marks`` are the tensors that stand for stored ones, by identity."""

    storage: Storage
    manifest: Manifest
    marks: dict[int, tuple[torch.Tensor, TensorRef]] = field(default_factory=dict)

    def box(self, key: str, dtype: str, box: Box) -> torch.Tensor:
        """Part of a tensor, proved."""
        target = torch.empty(box.sizes, dtype=torch_dtype(dtype), device="cpu")
        want = Want(self.stored(key), box)
        pieces = find_pieces(self.manifest.structure, [want], -1) if target.numel() else []
        read_pieces(self.storage, self.manifest, pieces, wants=[want], targets=[target])
        return target

    def boxes(self, wanted: Sequence[tuple[TensorSpec, Box]]) -> Iterator[torch.Tensor]:
        """Parts of tensors, proved; small ones are read together: each read opens files, and takes its time."""
        group: list[tuple[TensorSpec, Box]] = []
        size = 0
        for spec, box in wanted:
            more = box.elements * ITEM_BYTES[spec.dtype]
            if group and size + more > TOGETHER_BYTES:
                yield from self._together(group)
                group, size = [], 0
            group.append((spec, box))
            size += more
        yield from self._together(group)

    def _together(self, group: Sequence[tuple[TensorSpec, Box]]) -> Iterator[torch.Tensor]:
        targets = [torch.empty(box.sizes, dtype=torch_dtype(spec.dtype), device="cpu") for spec, box in group]
        some = [(Want(spec.key, box), t) for (spec, box), t in zip(group, targets, strict=True) if box.elements]
        wants, filled = [want for want, _ in some], [target for _, target in some]
        tensors = tuple({spec.key: spec for spec, _ in group}.values())
        pieces = find_pieces(Structure(self.manifest.meshes, self.manifest.layouts, tensors), wants, -1)
        read_pieces(self.storage, self.manifest, pieces, wants=wants, targets=filled)
        del some, filled
        while targets:
            yield targets.pop(0)

    def stored(self, key: str) -> str:
        """The key under which a tied one is stored."""
        return self.manifest.aliases.get(key, key)

    def mark(self, ref: TensorRef) -> torch.Tensor:
        """A tensor without memory that stands for a stored one."""
        mark = torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device="meta")
        self.marks[id(mark)] = mark, ref
        return mark

    def ref(self, value: object) -> TensorRef | None:
        """What a mark stands for; None for anything else."""
        found = self.marks.get(id(value))
        return found[1] if found is not None and found[0] is value else None


@dataclass(slots=True)
class _Written:
    """What was written so far: by torch's name, and where."""

    target: Storage
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)


def _flattened(reader: _Reader, only: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state as torch flattens it, marks in place of tensors, and where each entry stood."""
    tree, _ = read_trees(reader.storage, reader.manifest, 0)
    unknown = sorted(set(only) - set(tree))
    if unknown:
        hint = "".join(near(name, list(tree)) for name in unknown)
        raise UsageError(f"{', '.join(unknown)}: the step has {', '.join(tree)}{hint}. Nothing was written")
    refused: list[str] = []
    nested = {
        name: _lowered(reader, node, join("", name), refused) for name, node in tree.items() if not only or name in only
    }
    if refused:
        raise UnsafeValueError(refused)
    try:
        flat, paths = flatten_state_dict(nested)
    except ValueError as err:
        raise UsageError(f"two keys of the step are one for torch, which joins them with dots: {err}") from err
    return dict(flat), dict(paths)


def _lowered(reader: _Reader, node: Any, path: str, refused: list[str]) -> Any:
    """The state as plain torch has it: dictionaries for objects, marks for tensors."""
    kind = type(node)
    if kind is TensorRef:
        if node.form != "array":
            return reader.mark(node)
        return reader.box(node.key, node.dtype, whole(node.shape)).numpy()
    if kind is RankRef:
        refused.append(f"{path}: {_OWN}")
        return None
    if kind is ObjectNode:
        return _lowered(reader, node.tree, path, refused)
    if kind in (dict, OrderedDict, defaultdict):
        items = [(key, _lowered(reader, item, join(path, key), refused)) for key, item in node.items()]
        return defaultdict(node.default_factory, items) if kind is defaultdict else cast(Any, kind)(items)
    if kind in (list, tuple, deque):
        walked = [_lowered(reader, item, join(path, index), refused) for index, item in enumerate(node)]
        return deque(walked, node.maxlen) if kind is deque else kind(walked)
    return materialise(node, {})


def _write_tensors(reader: _Reader, flat: Mapping[str, Any], written: _Written) -> Iterator[int]:
    """One file for each rank of the step, with what that rank had saved."""
    names: dict[str, list[str]] = {}
    for name, value in flat.items():
        ref = reader.ref(value)
        if ref is not None:
            names.setdefault(reader.stored(ref.key), []).append(name)
            size, dtype = torch.Size(ref.shape), torch_dtype(ref.dtype)
            written.entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
    structure, meshes = reader.manifest.structure, list(reader.manifest.meshes)
    specs = [spec for spec in structure.tensors if spec.key in names]
    done = 0
    for rank in range(reader.manifest.world_size):
        held = [parts(layout, meshes, rank) for layout in structure.layouts]
        boxes: list[tuple[TensorSpec, Box]] = []
        for spec in specs:
            shape = structure.layouts[spec.layout].shape
            mine = [part.box for part in held[spec.layout]] or ([whole(shape)] if 0 in shape and not rank else [])
            boxes.extend((spec, part) for box in mine for part in _cut(box, ITEM_BYTES[spec.dtype]))
        if not boxes:
            continue
        name = f"__{rank}_0.distcp"
        total = sum(box.elements * ITEM_BYTES[spec.dtype] for spec, box in boxes)
        with written.target.create(name, total) as upload:
            at = 0
            for (spec, box), part in zip(boxes, reader.boxes(boxes), strict=True):
                data = _saved(part)
                del part
                upload.write_at(at, data)
                for each in names[spec.key]:
                    _add_chunk(written, each, box, _StorageInfo(name, at, len(data)))
                at += len(data)
                done += box.elements * ITEM_BYTES[spec.dtype]
                yield done
            upload.commit(at)


def _add_chunk(written: _Written, name: str, box: Box, info: _StorageInfo) -> None:
    entry = written.entries[name]
    assert isinstance(entry, TensorStorageMetadata)  # noqa: S101  made as one
    index = MetadataIndex(name, box.offsets, len(entry.chunks))
    entry.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    written.places[index] = info


def _write_values(reader: _Reader, flat: Mapping[str, Any], written: _Written) -> None:
    """All that is no tensor, in a file of its own."""
    name, at = "__0_1.distcp", 0
    values = {key: value for key, value in flat.items() if reader.ref(value) is None}
    if not values:
        return
    with written.target.create(name, 0) as upload:
        for key, value in values.items():
            data = _saved(_filled(reader, value))
            upload.write_at(at, data)
            written.entries[key] = BytesStorageMetadata()
            written.places[MetadataIndex(key)] = _StorageInfo(name, at, len(data))
            at += len(data)
        upload.commit(at)


def _filled(reader: _Reader, value: Any) -> Any:
    """A value with the tensors in it, in place of marks: torch stores one with what is in a tuple."""
    ref = reader.ref(value)
    if ref is not None:
        return reader.box(ref.key, ref.dtype, whole(ref.shape))
    if type(value) in (list, tuple):
        return type(value)(_filled(reader, item) for item in value)
    if type(value) is deque:
        return deque((_filled(reader, item) for item in value), value.maxlen)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _filled(reader, item)) for key, item in value.items())
    return value


def _saved(value: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def _cut(box: Box, item_bytes: int) -> Iterator[Box]:
    """The box in parts of at most ``CHUNK_BYTES``, as far as it can be cut."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.elements * item_bytes <= CHUNK_BYTES:
        yield box
        return
    row = math.prod(box.sizes[dim + 1 :]) * item_bytes
    rows = max(1, CHUNK_BYTES // row)
    for start in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, box.sizes[dim] - start)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), item_bytes)
