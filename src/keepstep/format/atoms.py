"""Plain values that hold no other values: their tagged form, and back with their exact types. See ``objects``."""

from __future__ import annotations

import base64
import datetime as dt
import io
import math
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

__all__ = ["READ_ATOM", "SURROGATE", "write_atom"]

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, as in file names that are not UTF-8: a str may hold it, a file of text may not."""
_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d*(\[\w+\])?")
_PATHS: dict[type, str] = {
    type(Path()): "path",
    PurePosixPath: "pure_posix_path",
    PureWindowsPath: "pure_windows_path",
}


def write_atom(value: object) -> dict[str, Any] | None:
    """The tagged form of a value that holds no others; None when it is of no such type.

    Raises:
        ValueError: of such a type, but not to be stored; says why.
    """
    write = _WRITE.get(type(value))
    if write is not None:
        return write(value)
    if type(value) is np.ndarray or (isinstance(value, np.generic) and type(value).__module__ == "numpy"):
        return _write_array(value)
    return None


def _write_text(value: str) -> dict[str, Any]:
    return {"$": "str", "v": _text(value.encode("utf-8", "surrogatepass"))}


def _write_path(value: object) -> dict[str, Any]:
    text = str(value)
    return {"$": _PATHS[type(value)], "v": _write_text(text) if SURROGATE.search(text) else text}


def _write_datetime(value: dt.datetime) -> dict[str, Any]:
    zone = value.tzinfo
    plain: dict[str, Any] = {"$": "datetime", "v": value.isoformat()}
    if type(zone) is ZoneInfo and zone.key:
        plain = {"$": "datetime", "v": value.replace(tzinfo=None).isoformat(), "zone": zone.key}
    elif zone is not None and type(zone) is not dt.timezone:
        raise ValueError(f"datetime with a {type(zone).__module__}.{type(zone).__qualname__}; use zoneinfo")
    return plain | {"fold": 1} if value.fold else plain


def _write_file(value: io.BytesIO) -> dict[str, Any]:
    # As a class with a state, which readers that are older know how to refuse by name.
    return {
        "$": "class",
        "type": "io.BytesIO",
        "v": {"$": "tuple", "v": [_WRITE[bytes](value.getvalue()), value.tell()]},
    }


def _write_array(value: Any) -> dict[str, Any]:
    kind = value.dtype
    # Types that numpy does not know by itself call themselves raw bytes.
    if not _DTYPE.fullmatch(kind.str) or np.dtype(kind.str) != kind or (value.shape and not kind.itemsize):
        raise ValueError(f"numpy value of dtype {kind}; only plain element types can be stored")
    tag = "ndarray" if isinstance(value, np.ndarray) else "npscalar"
    # An empty string claims to have four bytes.
    data = value.tobytes() if kind.itemsize else b""
    return {"$": tag, "dtype": kind.str, "shape": list(value.shape), "v": _text(data)}


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


_WRITE: dict[type, Callable[[Any], dict[str, Any]]] = {
    str: _write_text,
    # In hexadecimal: Python refuses to write, and to read, more than a few thousand decimal digits.
    int: lambda value: {"$": "int", "v": hex(value)},
    float: lambda value: {"$": "float", "v": np.float64(value).tobytes().hex()},
    complex: lambda value: {"$": "complex", "v": np.complex128(value).tobytes().hex()},
    bytes: lambda value: {"$": "bytes", "v": _text(value)},
    io.BytesIO: _write_file,
    bytearray: lambda value: {"$": "bytearray", "v": _text(value)},
    dt.date: lambda value: {"$": "date", "v": value.isoformat()},
    dt.datetime: _write_datetime,
    dt.timedelta: lambda value: {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]},
    **dict.fromkeys(_PATHS, _write_path),
}


def _bytes(plain: dict[str, Any], _depth: int = 0) -> bytes:
    return base64.b64decode(plain["v"], validate=True)


def _read_text(plain: dict[str, Any], _depth: int = 0) -> str:
    return _bytes(plain).decode("utf-8", "surrogatepass")


def _path_text(plain: dict[str, Any]) -> str:
    text = plain["v"]
    return _read_text(text) if isinstance(text, dict) else text


def _read_datetime(plain: dict[str, Any], _depth: int) -> dt.datetime:
    value = dt.datetime.fromisoformat(plain["v"]).replace(fold=plain.get("fold", 0))
    return value.replace(tzinfo=ZoneInfo(plain["zone"])) if "zone" in plain else value


def _read_array(plain: dict[str, Any], _depth: int) -> Any:
    if not _DTYPE.fullmatch(plain["dtype"]):
        raise ValueError(f"dtype {plain['dtype']!r}")
    data, kind, shape = _bytes(plain), np.dtype(plain["dtype"]), plain["shape"]
    if any(size < 0 for size in shape) or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for shape {shape}")
    # numpy's frombuffer takes no element of no size, such as an empty string.
    return np.frombuffer(data, kind).reshape(shape).copy() if kind.itemsize else np.zeros((), kind.type)


READ_ATOM: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "str": _read_text,
    "int": lambda plain, _depth: int(plain["v"], 16),
    "float": lambda plain, _depth: float(np.frombuffer(bytes.fromhex(plain["v"]), np.float64)[0]),
    "complex": lambda plain, _depth: complex(np.frombuffer(bytes.fromhex(plain["v"]), np.complex128)[0]),
    "bytes": _bytes,
    "bytearray": lambda plain, _depth: bytearray(_bytes(plain)),
    "date": lambda plain, _depth: dt.date.fromisoformat(plain["v"]),
    "datetime": _read_datetime,
    "timedelta": lambda plain, _depth: dt.timedelta(*plain["v"]),
    "path": lambda plain, _depth: Path(_path_text(plain)),
    "pure_posix_path": lambda plain, _depth: PurePosixPath(_path_text(plain)),
    "pure_windows_path": lambda plain, _depth: PureWindowsPath(_path_text(plain)),
    "ndarray": _read_array,
    "npscalar": lambda plain, _depth: _read_array(plain, 0)[()],
}
"""How each tag is read; what is malformed raises what Python raises for it."""
