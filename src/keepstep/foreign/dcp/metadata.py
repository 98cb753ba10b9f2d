"""What torch's ``.metadata`` says, read without running anything of it.

The file is a pickle. Of what a pickle can name, only the few record types that torch itself puts there are let in, and
none of them is torch's own class: each becomes a record of this module. Whatever else is named is refused, by its name.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.errors import CorruptError, UnsafeFileError
from keepstep.foreign.plain import Call
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES

__all__ = ["METADATA_NAME", "Chunk", "Directory", "Item", "SavedTensor", "SavedValue", "parse_metadata"]

METADATA_NAME = ".metadata"
_DCP = "torch.distributed.checkpoint"
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Where one entry lies: bytes [offset, offset + length) of a file. ``transforms`` are what was done to them, if any."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor (in elements of the global one) and where it lies."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor: the name torch gives it, where it stood in the state, its dtype's name, its global shape, its chunks."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """Anything that is no tensor, stored by itself."""

    name: str
    path: Path
    item: Item


@dataclass(frozen=True, slots=True)
class Directory:
    """All that a directory holds, in the order in which it was saved."""

    entries: tuple[SavedTensor | SavedValue, ...]

    @property
    def tensors(self) -> Iterator[SavedTensor]:
        """The tensors."""
        return (entry for entry in self.entries if isinstance(entry, SavedTensor))

    @property
    def values(self) -> Iterator[SavedValue]:
        """Everything else."""
        return (entry for entry in self.entries if isinstance(entry, SavedValue))

    @property
    def files(self) -> dict[str, int]:
        """The files, and how many bytes each must have at least."""
        needed: dict[str, int] = {}
        for entry in self.entries:
            for item in (entry.item,) if isinstance(entry, SavedValue) else (chunk.item for chunk in entry.chunks):
                needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
        return needed


class _Sealed(type):
    """A class to which a pickle cannot give other attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"a state for the class {cls.__name__}")


class _Record(metaclass=_Sealed):
    """Stands for an instance of any record type: what was to be put into it, and nothing that does anything."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        # Records with slots give a pair.
        self.state = state[1] if isinstance(state, tuple) and len(state) == 2 and state[0] is None else state


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        # A dictionary takes it for a key before it is filled.
        return id(self)


class _Ignored(_Record):
    __slots__ = ()


class _Dtype:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("a state for a dtype")


def _shape(sizes: Any = ()) -> tuple[Any, ...]:
    return tuple(sizes)


def _ignored(*_: Any) -> None:
    return None


_IGNORED = Call(_ignored)
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_DCP}.metadata", "TensorProperties"): _Record,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Ignored,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _IGNORED,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Record,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _IGNORED,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    (f"{_DCP}.filesystem", "_StoragePrefix"): _Ignored,
    ("torch", "Size"): Call(_shape),
    ("torch.serialization", "_get_layout"): _IGNORED,
    # Some releases of Python write a member of an enumeration so.
    ("builtins", "getattr"): _IGNORED,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _IGNORED
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    },
}


class _Unpickler(pickle.Unpickler):
    """Reads records and plain values; see the module's text."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for what a pickle names."""
        if module == "torch" and (name in ITEM_BYTES or name.startswith(("q", "uint", "int", "bits", "float"))):
            return _Dtype(name)
        found = _ALLOWED.get((module, name))
        if found is None:
            raise UnsafeFileError([f"{module}.{name}, which is no part of torch's own records"])
        return found

    def persistent_load(self, _: Any) -> Any:
        """Refuses: torch refers to nothing outside of this file."""
        raise UnsafeFileError(["a reference to something outside of the file"])


def parse_metadata(raw: bytes, name: str) -> Directory:
    """Reads the metadata of a directory that torch 2.3 or newer wrote.

    Args:
        raw: the whole file.
        name: where it came from, for messages.

    Raises:
        UnsafeFileError: it names something that does not belong there; nothing of it was run.
        CorruptError: it is no such metadata, or contradicts itself; lists everything.
    """
    try:
        read = _Unpickler(io.BytesIO(raw)).load()
    except UnsafeFileError as err:
        raise UnsafeFileError([f"{name}: {text}" for text in err.refused]) from err
    except Exception as err:
        raise CorruptError(f"{name}: cannot be read as the metadata of a DCP checkpoint: {err}") from err
    if type(read) is not _Metadata or not isinstance(read.state, dict):
        raise CorruptError(f"{name}: holds a {type(read).__name__}, not the metadata of a DCP checkpoint")
    try:
        return _directory(read.state, name)
    except (LookupError, TypeError, ValueError, AttributeError) as err:
        if isinstance(err, CorruptError):
            raise
        raise CorruptError(f"{name}: not as torch writes it: {err!r}") from err


def _directory(state: dict[str, Any], name: str) -> Directory:
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in (state.get("storage_data") or {}).items():
        where = index.state
        items[where["fqn"], where.get("offset")] = _item(info, name)
    paths = state.get("planner_data")
    paths = paths if isinstance(paths, Mapping) else {}
    entries: list[SavedTensor | SavedValue] = []
    wrong: list[str] = []
    for key, what in state["state_dict_metadata"].items():
        path = _path(paths.get(key), key)
        if type(what) is _Bytes:
            item = items.get((key, None))
            if item is None:
                wrong.append(f"{key}: no file is named for it")
            else:
                entries.append(SavedValue(key, path, item))
        elif type(what) is _Tensor:
            entries.append(_tensor(key, path, what.state, items, wrong))
        else:
            wrong.append(f"{key}: neither a tensor nor a value")
    if wrong:
        text = "; ".join(wrong[:20])
        raise CorruptError(
            f"{name}: the checkpoint is not complete, although it was finished: {text}"
            + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        )
    return Directory(tuple(entries))


def _path(path: Any, key: str) -> Path:
    known = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
    return path if known and type(path[0]) is str else (key,)


def _item(info: Any, name: str) -> Item:
    where = info.state
    file, offset, length = where["relative_path"], where["offset"], where["length"]
    parts = str(file).split("/")
    if type(file) is not str or ".." in parts or "" in parts or "\\" in file or "\0" in file:
        raise CorruptError(f"{name}: {file!r} is no name of a file in the directory")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptError(f"{name}: bytes {offset!r} and {length!r} on of {file!r} are not possible")
    return Item(file, offset, length, tuple(map(str, where.get("transform_descriptors") or ())))


def _sizes(value: Any) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)


def _tensor(key: str, path: Path, what: dict[str, Any], items: Mapping[Any, Item], wrong: list[str]) -> SavedTensor:
    properties = what["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = _sizes(what["size"])
    if type(dtype) is not _Dtype or dtype.name not in ITEM_BYTES:
        raise UnsafeFileError(
            [f"{key}: a tensor of dtype {getattr(dtype, 'name', dtype)}, which keepstep does not store"]
        )
    chunks = []
    for chunk in what["chunks"]:
        box = Box(_sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"]))
        if not box.inside(shape):
            raise CorruptError(f"{key}: {box} lies outside of its shape {list(shape)}")
        item = items.get((key, box.offsets))
        if item is None and box.elements:
            wrong.append(f"{key}: no file is named for its {box}")
        elif item is not None:
            chunks.append(Chunk(box, item))
    return SavedTensor(key, path, dtype.name, shape, tuple(chunks))
