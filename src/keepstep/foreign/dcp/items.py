"""The entries of ``.distcp`` files: where the bytes of a tensor lie in one, whether they are right, and plain values.

An entry is what ``torch.save`` wrote: a zip archive with one small pickle and the bytes of the tensor as they were in
memory. That pickle is read with stand-ins, as the metadata is. The archive has a CRC-32 of the bytes, at which torch's own
reader does not look. Or the whole file is one safetensors file, which has none.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry

from keepstep.errors import CorruptError, StorageError, UnsafeFileError
from keepstep.foreign.dcp.metadata import Chunk, Item, SavedTensor, SavedValue
from keepstep.foreign.kinds import ARCHIVE
from keepstep.foreign.plain import STORAGE_DTYPES, Call, has_checksums, load_plain, row_major
from keepstep.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from keepstep.storage.base import Blob

__all__ = ["Extent", "find_extent", "prove", "read_value", "undone"]

PROOF_BYTES = 1 << 22
_LOCAL = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's bytes lie: [start, start + size) of a file, row-major; or ``held``, where they are not so there.

    ``proof`` is [start, size) and CRC-32 of the record of the archive they lie in; None where there is nothing to compare.
    """

    start: int
    size: int
    held: memoryview | None = None
    proof: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True, slots=True)
class _View:
    """How a tensor lies in its storage: offset, shape and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _UnknownError(Exception):
    """A pickle that is not that of an ordinary tensor."""


def _view(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _View:
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], str) else storage.dtype
    if any(isinstance(each, dict) and each for each in rest[2:]):
        # What it says of the tensor besides: that it is conjugated, for one.
        raise _UnknownError
    return _View(storage, offset, tuple(shape), tuple(strides), dtype)


_VIEW = Call(_view)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _VIEW
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "uint8"
        if module == "torch" and name in ITEM_BYTES:
            return name
        raise _UnknownError

    def persistent_load(self, saved: Any) -> Any:
        kind, dtype, key = saved[:3]
        if kind != "storage" or type(dtype) is not str or type(key) is not str:
            raise _UnknownError
        return _Storage(dtype, key)


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a blob as a file."""

    def __init__(self, blob: Blob, offset: int, length: int) -> None:
        self._blob, self._offset, self._length, self._at = blob, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        if count:
            self._blob.read_into(self._offset + self._at, view[:count])
        self._at += count
        return count


def find_extent(blob: Blob, tensor: SavedTensor, chunk: Chunk, registry: Any = None) -> Extent:
    """Where the bytes of one chunk lie; reads a few small things, or all of it where they do not lie there as they are.

    Raises:
        CorruptError: the file does not hold that chunk, or holds something else.
    """
    item, size = chunk.item, math.prod(chunk.box.sizes) * ITEM_BYTES[tensor.dtype]
    if item.transforms:
        return _held(_transformed(blob, item, registry), tensor, chunk)
    head = bytearray(min(4, max(blob.size_bytes - item.offset, 0)))
    blob.read_into(item.offset, memoryview(head))
    if bytes(head) != ARCHIVE:
        return _in_safetensors(blob, tensor, chunk, size)
    try:
        with zipfile.ZipFile(_Window(blob, item.offset, item.length)) as archive:
            view, info = _read_view(archive)
        if view is None or info is None:
            return _held(_Window(blob, item.offset, item.length), tensor, chunk)
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, RuntimeError, struct.error, zlib.error) as err:
        raise CorruptError(f"{item.file}: the entry of {tensor.name!r}{chunk.box} is damaged: {err}") from err
    if (view.dtype, view.shape) != (tensor.dtype, chunk.box.sizes):
        raise CorruptError(
            f"{item.file}: {tensor.name!r}{chunk.box} holds {view.dtype} {list(view.shape)}; the metadata says"
            f" {tensor.dtype} {list(chunk.box.sizes)}"
        )
    if not _is_dense(view):
        return _held(_Window(blob, item.offset, item.length), tensor, chunk)
    local = bytearray(_LOCAL.size)
    blob.read_into(item.offset + info.header_offset, memoryview(local))
    _, name_bytes, extra_bytes = _LOCAL.unpack(local)
    record = item.offset + info.header_offset + _LOCAL.size + name_bytes + extra_bytes
    start = record + view.offset * ITEM_BYTES[view.dtype]
    if start + size > record + info.file_size or record + info.file_size > item.offset + item.length:
        raise CorruptError(f"{item.file}: {tensor.name!r}{chunk.box} is longer than its entry")
    proof = None if info.CRC is None else (record, info.file_size, info.CRC)
    return Extent(start, size, None, proof)


def _read_view(archive: zipfile.ZipFile) -> tuple[_View | None, zipfile.ZipInfo | None]:
    """The tensor of an archive and the record with its bytes; None for one that is not simply that."""
    has_checksums(archive)
    infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    try:
        view = _Unpickler(io.BytesIO(archive.read(infos["data.pkl"]))).load()
    except (_UnknownError, pickle.UnpicklingError, TypeError, AttributeError, IndexError):
        return None, None
    if type(view) is not _View or type(view.storage) is not _Storage:
        return None, None
    order = infos.get("byteorder")
    info = infos.get(f"data/{view.storage.key}")
    if info is None or info.compress_type != zipfile.ZIP_STORED or (order and archive.read(order) != b"little"):
        return None, None
    return view, info


def _is_dense(view: _View) -> bool:
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != step:
            return not math.prod(view.shape)
        step *= size
    return True


def _held(file: Any, tensor: SavedTensor, chunk: Chunk) -> Extent:
    """The bytes of a tensor that torch has to read, as row-major memory: one of another order, a subclass, compressed."""
    value = load_plain(file.read(), f"{chunk.item.file}: {tensor.name!r}{chunk.box}")
    if not isinstance(value, torch.Tensor):
        raise CorruptError(f"{chunk.item.file}: {tensor.name!r} holds a {type(value).__name__}, not a tensor")
    local = value.detach().as_subclass(torch.Tensor)
    found = str(local.dtype).removeprefix("torch."), tuple(local.shape)
    if found != (tensor.dtype, chunk.box.sizes):
        raise CorruptError(
            f"{chunk.item.file}: {tensor.name!r}{chunk.box} holds {found[0]} {list(found[1])}; the metadata says"
            f" {tensor.dtype} {list(chunk.box.sizes)}"
        )
    data = row_major(local)
    return Extent(0, len(data), data)


def _in_safetensors(blob: Blob, tensor: SavedTensor, chunk: Chunk, size: int) -> Extent:
    """The bytes in a file that is one safetensors file: torch names a tensor there by its name alone, and by no box."""
    item = chunk.item
    length = bytearray(min(8, blob.size_bytes))
    blob.read_into(0, memoryview(length))
    count = int.from_bytes(length, "little")
    why = "it was written as safetensors together with something that is no tensor, which no program can read"
    if len(length) < 8 or count + 8 > blob.size_bytes:
        raise CorruptError(f"{item.file}: there is no entry of {tensor.name!r} at byte {item.offset:,}; or {why}")
    head = bytearray(count)
    blob.read_into(8, memoryview(head))
    try:
        header = json.loads(head)
        entry = header[tensor.name]
        start, stop = entry["data_offsets"]
        found = entry["dtype"], tuple(entry["shape"])
        noted = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])[tensor.name]["saved_offsets"]
    except (ValueError, LookupError, TypeError) as err:
        raise CorruptError(f"{item.file}: no entry of {tensor.name!r}: {err!r}; or {why}") from err
    expected = SAFETENSORS_NAMES.get(tensor.dtype), chunk.box.sizes
    if found != expected or stop - start != size or tuple(noted) != chunk.box.offsets:
        raise CorruptError(
            f"{item.file}: {found[0]} {list(found[1])} from {noted} under {tensor.name!r}, and not {chunk.box}: torch"
            " writes several chunks of a tensor in one file under one name, and all but the last are lost"
        )
    return Extent(8 + count + start, size)


def prove(blob: Blob, extent: Extent, what: str) -> None:
    """Reads the record once and compares its CRC-32 with the archive's.

    Raises:
        CorruptError: they differ.
    """
    if extent.proof is None:
        return
    start, size, expected = extent.proof
    buffer = memoryview(bytearray(min(size, PROOF_BYTES)))
    found = 0
    for at in range(start, start + size, PROOF_BYTES):
        part = buffer[: min(PROOF_BYTES, start + size - at)]
        blob.read_into(at, part)
        found = zlib.crc32(part, found)
    if found != expected:
        raise CorruptError(f"{what}: the {size:,} bytes at byte {start:,} do not match their CRC-32")


def read_value(blob: Blob, saved: SavedValue, registry: Any = None) -> Any:
    """A plain value; tensors in it are read with it.

    Raises:
        UnsafeFileError: it is made of a class that is not plain; names it. Nothing of it was run.
        CorruptError: there is nothing of that kind.
    """
    item = saved.item
    file = _transformed(blob, item, registry) if item.transforms else _Window(blob, item.offset, item.length)
    return load_plain(file.read(), f"{item.file}: {saved.name!r}")


def _transformed(blob: Blob, item: Item, registry: Any) -> io.BytesIO:
    """An entry that was passed through torch's stream extensions, undone."""
    return undone(_Window(blob, item.offset, item.length), item.transforms, registry, item.file)


def undone(stream: Any, descriptors: Sequence[str], registry: Any, what: str) -> io.BytesIO:
    """What stream extensions were given, from what they made of it.

    Args:
        stream: a file of what was written.
        descriptors: how each extension calls itself, first the one to be undone first.
        registry: torch's ``ExtensionRegistry`` that knows them; by default torch's own.
        what: what it is, for messages.

    Raises:
        UnsafeFileError: by one that this registry does not know.
        CorruptError: an extension cannot undo it.
    """
    through = f"{what}: written through {', '.join(descriptors)}"
    try:
        known: Any = registry or ExtensionRegistry()
        extensions = known.from_descriptor_list(descriptors)
    except (ValueError, LookupError, AttributeError, ImportError, AssertionError) as err:
        raise UnsafeFileError([f"{through}: {err}"]) from err
    try:
        for one in extensions:
            stream = one.transform_from(stream)
        return io.BytesIO(stream.read(-1))
    except StorageError:
        raise
    except Exception as err:
        raise CorruptError(f"{through}, which cannot undo it: {err!r}") from err
