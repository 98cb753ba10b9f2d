"""The shard file: a valid safetensors file whose data starts on a page boundary and that describes and verifies itself.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces so that the data starts at a multiple of 4,096 bytes
    data      the tensors one after another, no holes, largest element size first (so each is aligned to its own size)

``__metadata__["keepstep"]`` holds the save id, rank and step, the true dtypes, the position of every piece in its global
tensor, and the xxh3-64 digest of every 64 KiB block of the data. A block is the smallest thing that can be read and
proved, so that reading a part of a tensor costs at most a block more at either end.

The state file of rank 0 also has ``__metadata__["keepstep.manifest"]``: the manifest as it was before the files were
known, so that one that is lost can be made again. Nobody else reads it.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from keepstep.errors import CorruptError, UsageError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES

__all__ = [
    "BLOCK_BYTES",
    "MAX_HEADER_BYTES",
    "PAGE_BYTES",
    "Entry",
    "ShardHeader",
    "block_size",
    "digest",
    "header_bytes",
    "manifest_copy",
    "pack_header",
    "parse_header",
    "seal_header",
]

PAGE_BYTES = 4096
BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 1 << 22
MAX_HEADER_BYTES = 100_000_000
MAX_COPY_BYTES = 1 << 26
COPY_NAME = "keepstep.manifest"
_NAMES = {stored: name for name, stored in SAFETENSORS_NAMES.items()}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor or piece in a shard file: which box of which key, and its bytes in the data section."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int


class ShardHeader(msgspec.Struct, frozen=True):
    """All that the header says. ``data_offset`` is where the data section starts in the file, in bytes."""

    entries: tuple[Entry, ...]
    digests: npt.NDArray[np.uint64]
    data_offset: int
    data_bytes: int
    block_bytes: int
    save_id: str
    step: int
    rank: int
    header_digest: str


class _Notes(msgspec.Struct, omit_defaults=True):
    """What ``__metadata__["keepstep"]`` holds."""

    save_id: str
    step: int
    rank: int
    block_bytes: int
    digests: str
    dtypes: dict[str, str] = {}
    pieces: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}


class _Stored(msgspec.Struct, gc=False, omit_defaults=True):
    """An entry as safetensors writes it; ``keepstep`` is set in ``__metadata__`` alone."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)
    keepstep: str = ""


class _Copy(msgspec.Struct, gc=False):
    """An entry of a header of which only the copy of the manifest matters."""

    manifest: str = msgspec.field(default="", name=COPY_NAME)


digest = xxhash.xxh3_64_intdigest
"""The xxh3-64 digest of bytes or a memoryview, as an integer."""


def block_size(data_bytes: int) -> int:
    """Bytes a block: 64 KiB, and twice as much as often as it takes to have no more than ``MAX_BLOCKS`` of them."""
    size = BLOCK_BYTES
    while data_bytes > size * MAX_BLOCKS:
        size *= 2
    return size


def pack_header(
    entries: tuple[Entry, ...], data_bytes: int, *, save_id: str, step: int, rank: int, manifest: bytes = b""
) -> bytes:
    """The header with its length and padding, digests still zero: what goes before the data, in its final size.

    ``manifest`` is a copy to be kept in it; see ``manifest_copy``.
    """
    pieces = {}
    dtypes = {}
    table: dict[str, Any] = {}
    for entry in entries:
        stored_dtype, shape = _stored_shape(entry.dtype, entry.box.sizes)
        table[entry.name] = _Stored(stored_dtype, shape, (entry.start, entry.stop))
        if entry.name != entry.key or entry.box.sizes != entry.shape:
            pieces[entry.name] = (entry.key, entry.shape, entry.box.offsets)
        if entry.dtype not in SAFETENSORS_NAMES:
            dtypes[entry.name] = entry.dtype
    block = block_size(data_bytes)
    zeros = _digest_text(np.zeros(-(-data_bytes // block), np.uint64))
    notes = _Notes(save_id, step, rank, block, zeros, dtypes, pieces)
    about = {"keepstep": msgspec.json.encode(notes).decode()}
    if manifest:
        about[COPY_NAME] = base64.b64encode(zlib.compress(manifest, 1)).decode()
    text = msgspec.json.encode({"__metadata__": about, **table})
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    if padded > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of {len(entries):,} tensors in one file needs {padded:,} bytes, safetensors allows"
            f" {MAX_HEADER_BYTES:,}; spread the tensors over more components or ranks. Nothing was written"
        )
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def seal_header(header: bytes, digests: npt.NDArray[np.uint64]) -> bytes:
    """The header with the true digests in place of the zeros; the size stays."""
    # The digests come before every text of the user's in the header, so the first match is theirs.
    return header.replace(_digest_text(np.zeros_like(digests)).encode(), _digest_text(digests).encode(), 1)


def _digest_text(digests: npt.NDArray[np.uint64]) -> str:
    return base64.b64encode(digests.astype("<u8").tobytes()).decode()


def parse_header(raw: bytes | memoryview, file_bytes: int, name: str) -> ShardHeader:
    """Reads a header and proves that it makes sense for a file of ``file_bytes``; allocates nothing by its numbers.

    Args:
        raw: the file's bytes from 0 up to at least the end of the header.
        file_bytes: the true size of the file.
        name: the file's name, for messages.

    Raises:
        CorruptError: not a keepstep shard file, or one whose numbers contradict each other.
    """
    length = header_bytes(raw, file_bytes, name)
    text = bytes(raw[8:length])
    try:
        stored = msgspec.json.decode(text, type=dict[str, _Stored])
        notes = msgspec.json.decode(stored.pop("__metadata__").keepstep, type=_Notes)
        digests = np.frombuffer(base64.b64decode(notes.digests, validate=True), "<u8")
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as err:
        raise CorruptError(f"{name}: the header is not a keepstep header: {err}") from err
    entries = sorted(
        (_entry(key, item, notes, name) for key, item in stored.items()), key=lambda entry: (entry.start, entry.stop)
    )
    position = 0
    for entry in entries:
        if entry.start != position:
            raise CorruptError(f"{name}: entry {entry.name!r} starts at byte {entry.start}, expected {position}")
        position = entry.stop
    if notes.block_bytes != block_size(position) or len(digests) != -(-position // notes.block_bytes):
        raise CorruptError(
            f"{name}: {len(digests)} digests of {notes.block_bytes}-byte blocks do not fit {position:,} bytes of data"
        )
    if length + position != file_bytes:
        raise CorruptError(f"{name}: {file_bytes:,} bytes long, but the header describes {length + position:,}")
    return ShardHeader(
        entries=tuple(entries),
        digests=digests,
        data_offset=length,
        data_bytes=position,
        block_bytes=notes.block_bytes,
        save_id=notes.save_id,
        step=notes.step,
        rank=notes.rank,
        header_digest=f"{digest(bytes(raw[:length])):016x}",
    )


def manifest_copy(raw: bytes, name: str) -> bytes:
    """The copy of the manifest that a raw header holds; empty when it holds none.

    Raises:
        CorruptError: it cannot be unpacked, or would be larger than any manifest is.
    """
    try:
        stored = msgspec.json.decode(raw[8:], type=dict[str, _Copy])
        packed = stored["__metadata__"].manifest if "__metadata__" in stored else ""
        opener = zlib.decompressobj()
        copy = opener.decompress(base64.b64decode(packed, validate=True), MAX_COPY_BYTES) if packed else b""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, binascii.Error, zlib.error) as err:
        raise CorruptError(f"{name}: the copy of the manifest cannot be read: {err}") from err
    if packed and not opener.eof:
        raise CorruptError(f"{name}: the copy of the manifest is cut off, or larger than {MAX_COPY_BYTES:,} bytes")
    return copy


def header_bytes(raw: bytes | memoryview, file_bytes: int, name: str) -> int:
    """The size of the header with its length field, from the first 8 bytes; refuses sizes that cannot be true."""
    if len(raw) < 8:
        raise CorruptError(f"{name}: {file_bytes} bytes are too few for a shard file")
    length = int.from_bytes(raw[:8], "little") + 8
    if length > min(file_bytes, MAX_HEADER_BYTES) or length % PAGE_BYTES:
        raise CorruptError(f"{name}: a header of {length:,} bytes is not possible in a file of {file_bytes:,} bytes")
    return length


def _stored_shape(dtype: str, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape under which a tensor of ``dtype`` and ``sizes`` (in elements) is stored."""
    name = SAFETENSORS_NAMES.get(dtype)
    if name is not None:
        return name, sizes
    return "U8", (*sizes, ITEM_BYTES[dtype])


def _entry(name: str, item: _Stored, notes: _Notes, file_name: str) -> Entry:
    dtype = notes.dtypes.get(name) or _NAMES.get(item.dtype)
    if dtype not in ITEM_BYTES:
        raise CorruptError(f"{file_name}: entry {name!r} has the unknown dtype {dtype or item.dtype!r}")
    start, stop = item.data_offsets
    sizes = item.shape if dtype in SAFETENSORS_NAMES else item.shape[:-1]
    key, shape, offsets = notes.pieces.get(name, (name, sizes, (0,) * len(sizes)))
    box = Box(offsets, sizes)
    if _stored_shape(dtype, sizes) != (item.dtype, item.shape) or not box.inside(shape):
        raise CorruptError(f"{file_name}: entry {name!r} claims {box} of a tensor of shape {list(shape)}")
    if start < 0 or stop - start != math.prod(sizes) * ITEM_BYTES[dtype]:
        raise CorruptError(f"{file_name}: entry {name!r} has {stop - start:,} bytes, its shape and dtype say otherwise")
    return Entry(name, key, dtype, shape, box, start, stop)
