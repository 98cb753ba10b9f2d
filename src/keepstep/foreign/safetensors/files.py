"""Safetensors files of other programs: their headers, proved before anything is made of their numbers, and our own.

8 bytes   length of the JSON that follows, little-endian
JSON      name -> dtype, shape, [start, stop) in the data; padded with spaces
data      the tensors one after another, without holes
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from keepstep.errors import CorruptError
from keepstep.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from keepstep.format.manifest import MAX_ELEMENTS
from keepstep.format.shardfile import MAX_HEADER_BYTES, PAGE_BYTES
from keepstep.storage.base import Blob

__all__ = ["TORCH_NAMES", "StoredTensor", "pack_file_header", "parse_file"]

TORCH_NAMES = {name: stored for name, stored in SAFETENSORS_NAMES.items()} | {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""How safetensors spells each dtype that both it and torch have."""
MAX_DIMENSIONS = 64
_DTYPES = {stored: name for name, stored in TORCH_NAMES.items()}
_ABOUT = "__metadata__"


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file: its dtype's name in torch, and its bytes [start, stop) of the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def pack_file_header(tensors: Sequence[StoredTensor]) -> bytes:
    """The header of a file of these tensors, whose positions count from the data's beginning; a multiple of 4,096 bytes."""
    table: dict[str, object] = {_ABOUT: {"format": "pt"}}
    for one in tensors:
        table[one.name] = _Entry(TORCH_NAMES[one.dtype], one.shape, (one.start, one.stop))
    text = msgspec.json.encode(table)
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def parse_file(blob: Blob, name: str) -> tuple[StoredTensor, ...]:
    """The tensors of a safetensors file, in the order of their bytes. Reads the header alone, in memory of its true size.

    Raises:
        CorruptError: it is no such file, it is cut off, or its numbers contradict each other; or it is part of a step.
    """
    length = bytearray(8)
    if blob.size_bytes < len(length):
        raise CorruptError(f"{name}: {blob.size_bytes} bytes are too few for a safetensors file")
    blob.read_into(0, memoryview(length))
    text_bytes = int.from_bytes(length, "little")
    if text_bytes > min(MAX_HEADER_BYTES, blob.size_bytes - len(length)):
        raise CorruptError(
            f"{name}: a header of {text_bytes:,} bytes is not possible in a file of {blob.size_bytes:,} bytes"
        )
    text = bytearray(text_bytes)
    blob.read_into(len(length), memoryview(text))
    try:
        table = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(table.pop(_ABOUT, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {key: msgspec.json.decode(raw, type=_Entry) for key, raw in table.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"{name}: the header is not one of safetensors: {err}") from err
    if "keepstep" in about:
        raise CorruptError(
            f"{name} is one file of a step of keepstep, of which it may hold a part; name the step's folder"
        )
    return _proved(entries, len(length) + text_bytes, blob.size_bytes, name)


def _proved(entries: dict[str, _Entry], data: int, size: int, name: str) -> tuple[StoredTensor, ...]:
    wrong = [
        f"{key!r} has the dtype {e.dtype}, which torch lacks" for key, e in entries.items() if e.dtype not in _DTYPES
    ]
    if wrong:
        raise CorruptError(f"{name}: {'; '.join(wrong[:8])}{f'; and {len(wrong) - 8} more' if len(wrong) > 8 else ''}")
    found = []
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        extent = math.prod(max(one, 1) for one in shape)
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or extent > MAX_ELEMENTS:
            raise CorruptError(f"{name}: {key!r} has the shape {list(shape)}, which no tensor has")
        if start != position or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CorruptError(
                f"{name}: {key!r}, {entry.dtype} {list(shape)}, is said to be at [{start:,}, {stop:,}) of the data;"
                f" expected it at {position:,} with {math.prod(shape) * ITEM_BYTES[dtype]:,} bytes"
            )
        found.append(StoredTensor(key, dtype, shape, data + start, data + stop))
        position = stop
    if data + position != size:
        raise CorruptError(f"{name}: {size:,} bytes long, but its header describes {data + position:,}")
    return tuple(found)
