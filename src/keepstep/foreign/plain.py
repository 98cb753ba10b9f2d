"""What ``torch.save`` wrote of plain values and small tensors, read with a table of what may be named, and nothing else.

torch's own weights-only reader knows fewer containers than a step stores (no deque, no defaultdict, no numpy, no path). What
this table does not have is left to that reader: so a class that the user has declared safe to torch is safe here too.
"""

from __future__ import annotations

import collections
import datetime as dt
import importlib
import io
import math
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch

from keepstep.errors import CorruptError, UnsafeFileError
from keepstep.format.dtypes import ITEM_BYTES

__all__ = ["STORAGE_DTYPES", "Call", "has_checksums", "load_plain", "row_major"]

STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""The dtype of each of the storage classes that torch names in its files."""


class Call:
    """Something a pickle may call. It has no attributes that a pickle could set, as a function or a class of Python has."""

    __slots__ = ("_does",)

    def __init__(self, does: Callable[..., Any]) -> None:
        self._does = does

    def __call__(self, *args: Any) -> Any:
        """What it stands for."""
        return self._does(*args)

    def __setstate__(self, _: Any) -> None:
        """Refuses."""
        raise pickle.UnpicklingError("a state for something that has none")


class _UnknownError(Exception):
    """A name that is not in the table."""


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written in {encoding!r}")
    return text.encode("latin1")


def _attribute(owner: Any, name: str) -> Any:
    if owner is not _ZONE or name != "_unpickle":
        raise pickle.UnpicklingError(f"the attribute {name!r}")
    return _ZONE


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> torch.Tensor:
    dtype, data = storage
    if len(rest) > 2 and isinstance(rest[2], torch.dtype):
        dtype = rest[2]
    if any(isinstance(each, dict) and each for each in rest[2:]):
        # What it says of the tensor besides: that it is conjugated, for one.
        raise _UnknownError
    if not data or not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    # (A view that leaves its memory is refused by torch.)
    return torch.as_strided(torch.frombuffer(data, dtype=dtype), tuple(shape), tuple(strides), offset)


def _parameter(tensor: torch.Tensor, requires_grad: bool, *_: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad)


_ZONE = Call(lambda key, _from_cache=True: ZoneInfo(key))
_PATH = Call(lambda *parts: pathlib.Path(*parts))
_CORE = importlib.import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")
_TABLE: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): Call(_encode),
    ("_io", "BytesIO"): io.BytesIO,
    # Some releases of Python write a member of an enumeration, or how to make a time zone, so.
    ("builtins", "getattr"): Call(_attribute),
    ("__builtin__", "getattr"): Call(_attribute),
    ("collections", "Counter"): Call(collections.Counter),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("datetime", "date"): dt.date,
    ("datetime", "datetime"): dt.datetime,
    ("datetime", "timedelta"): dt.timedelta,
    ("datetime", "timezone"): dt.timezone,
    ("zoneinfo", "ZoneInfo"): _ZONE,
    ("zoneinfo", "ZoneInfo._unpickle"): _ZONE,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("torch", "Size"): Call(torch.Size),
    ("torch", "device"): Call(torch.device),
    ("torch._utils", "_rebuild_parameter"): Call(_parameter),
    ("torch._utils", "_rebuild_tensor_v2"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Call(_tensor),
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): getattr(torch, dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{("torch", name): getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)},
    **{
        (f"numpy.{core}.multiarray", name): getattr(_CORE, name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, bytearray, complex, int, float, str, bytes, list, dict, tuple, bool)
    },
    **{(module, name): _PATH for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{
        (module, name): Call(getattr(pathlib, name))
        for module in ("pathlib", "pathlib._local")
        for name in ("PurePosixPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """Reads the small pickle of an archive; the memory of tensors comes from its other records."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))
        self._archive, self._root = archive, root
        self._storages: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The entry of the table."""
        if module == "numpy.dtypes" and name.endswith("DType") and name.isidentifier():
            return getattr(np.dtypes, name)
        try:
            return _TABLE[module, name]
        except KeyError:
            raise _UnknownError from None

    def persistent_load(self, saved: Any) -> Any:
        """The memory of a tensor: its dtype and bytes of its own."""
        kind, dtype, key = saved[:3]
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise pickle.UnpicklingError("a reference to something that is no tensor's memory")
        if key not in self._storages:
            self._storages[key] = bytearray(self._archive.read(f"{self._root}/data/{key}"))
        return dtype, self._storages[key]


def load_plain(data: bytes, what: str) -> Any:
    """The value that ``torch.save`` wrote. Nothing of the file is run. Any thread.

    Args:
        data: the whole archive; every record of it is compared with its CRC-32, where there is one.
        what: what it is, for messages.

    Raises:
        UnsafeFileError: it names a class that is not plain, and that the user has not declared safe to torch either.
        CorruptError: it is damaged, or no such archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if has_checksums(archive) and (bad := archive.testzip()):
                raise CorruptError(f"{what}: {bad} does not match its CRC-32")
            root = names[0].partition("/")[0]
            if f"{root}/byteorder" in names and archive.read(f"{root}/byteorder") != b"little":
                raise _UnknownError
            return _Unpickler(archive, root).load()
    except _UnknownError:
        return _load_declared(data, what)
    except CorruptError:
        raise
    except Exception as err:
        raise CorruptError(f"{what}: cannot be read: {err}") from err


def has_checksums(archive: zipfile.ZipFile) -> bool:
    """Whether the records of an archive have their CRC-32; where they have not, none is asked for from now on."""
    infos = archive.infolist()
    if any(info.CRC for info in infos):
        return True
    for info in infos:
        # torch was told not to make any, and has noted zeros. Python compares with what is noted, unless it is None.
        info.CRC = None  # type: ignore[assignment]
    return False


def _load_declared(data: bytes, what: str) -> Any:
    """By torch's own reader, which knows what the user has declared safe."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as err:
        told = str(err).partition("GLOBAL ")[2].split(maxsplit=1)
        name = told[0] if told else str(err).splitlines()[0]
        raise UnsafeFileError(
            [f"{what}: {name}. Where you trust it: torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])"]
        ) from err
    except Exception as err:
        raise CorruptError(f"{what}: cannot be read: {err}") from err


def row_major(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host in row-major order: its own memory where it lies so, else a copy."""
    dense = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return memoryview(b"")
    data: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(data).cast("B")
