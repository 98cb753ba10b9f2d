"""Plain values as tagged JSON, and back with their exact types. The table is closed: nothing is ever unpickled.

``null``, ``true``, strings, 64-bit integers, ordinary floats, arrays and objects mean themselves (None, bool, str, int,
float, list, dict with string keys in order). Everything else is an object with the key ``$`` that names its type. A
dictionary that has ``$`` as a key of its own, or keys that are not strings, is written as a tagged list of pairs.

References stand where something is stored elsewhere: ``TensorRef`` for the bytes of a tensor, ``RankRef`` for a value that
each rank has of its own, ``ObjectNode`` for the tree of a module, an optimizer or another object with a state_dict.

A key is the path of a leaf as one string, ``optimizer/state/layers.0.weight/exp_avg``. Segments are joined by ``/``. Inside
a segment ``~`` is written ``~0`` and ``/`` is written ``~1`` (RFC 6901). A string that could be mistaken for an integer
gets the prefix ``~s`` and an empty one is ``~e``; an integer is written in digits; any other kind of dictionary key is
written with a ``~`` tag, so that ``1``, ``"1"``, ``True`` and ``None`` stay apart. Half of a surrogate pair, which no file
can hold as text, is written ``~ud800``. Keys are never file paths.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any

import msgspec

from keepstep.errors import CorruptError, UnsafeValueError
from keepstep.format.atoms import READ_ATOM, SURROGATE, write_atom
from keepstep.format.registry import can_register, registered_class, registered_name

__all__ = ["ObjectNode", "RankRef", "TensorRef", "TorchValue", "decode", "encode", "join"]

MAX_DEPTH = 100
MAX_REFUSED = 1000
"""A value that holds itself more than once would be refused without end."""
_INT64 = 1 << 63
_FACTORIES: dict[str, type] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """A tensor stored under ``key``. ``device`` is its device type when saved; ``form`` says what kind of tensor it was.

    ``form`` is ``tensor``, ``dtensor``, ``sharded``, or ``array`` for a large numpy array. ``own`` marks a tensor that
    belongs to one rank only. ``dtype`` and ``shape`` (global, in elements) let a reader allocate without the manifest.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    form: str = "tensor"
    own: bool = False


class RankRef(msgspec.Struct, frozen=True):
    """A value that every rank has of its own, found in the rank's state file under ``key``; ``rule`` is for a new world.

    Where ranks share one by their place in a mesh, ``names`` and ``sizes`` are the dimensions that tell places apart, and
    ``owners`` has for every place, row-major, the rank whose file holds the value.
    """

    key: str
    rule: str = "error"
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


class ObjectNode(msgspec.Struct, frozen=True):
    """The tree of an object with a state of its own. ``kind`` is module, optimizer, stateful, rng or progress."""

    kind: str
    type_name: str
    tree: Any


class TorchValue(msgspec.Struct, frozen=True):
    """A torch.Size, dtype or device, by kind and text; made and read by the side that has torch."""

    kind: str
    text: str


MANY = 64
_NEVER_REFUSED = frozenset({TensorRef, type(None), bool, int, float, str, bytes})
"""Whoever cannot be refused needs no path to be named by."""


def join(path: str, part: object) -> str:
    """The key of ``part`` (a dictionary key or a list index) below ``path``, which is empty at the root.

    Different parts give different keys; see the module's text for the spelling.
    """
    if type(part) is str:
        if "~" in part or "/" in part:
            part = part.replace("~", "~0").replace("/", "~1")
        if not part.isascii():
            part = SURROGATE.sub(lambda found: f"~u{ord(found[0]):04x}", part)
        tail = part
        if (part[1:] if part[:1] == "-" else part).isdigit():
            tail = f"~s{part}"
        elif not part:
            tail = "~e"
    elif type(part) is int:
        tail = str(part)
    else:
        # A set is spelled in order: its own order differs from process to process.
        text = f"{{{', '.join(sorted(map(repr, part)))}}}" if isinstance(part, frozenset) else repr(part)
        tail = f"~{type(part).__name__[0]}{text.replace('~', '~0').replace('/', '~1')}"
    return f"{path}/{tail}" if path else tail


def encode(tree: object, path: str = "", refused: list[str] | None = None) -> bytes:
    """The tree as JSON bytes: a private copy, so later changes of the tree are not seen.

    Every value that has no safe form is added to ``refused`` with its key and type, where the caller gives a list to
    raise for them together with others; the bytes are then of no use.

    Raises:
        UnsafeValueError: without such a list, lists every value that has no safe form.
    """
    found = [] if refused is None else refused
    plain = _lower(tree, path, 0, found)
    if found and refused is None:
        raise UnsafeValueError(found)
    return msgspec.json.encode(plain)


def decode(data: bytes | memoryview) -> Any:
    """The tree that ``encode`` was given, with references in place of tensors.

    Raises:
        CorruptError: not such JSON, an unknown tag, or a class that is not registered here.
    """
    try:
        plain = msgspec.json.decode(data)
        return _raise_up(plain, 0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise CorruptError(f"plain values are not valid: {err}") from err


def _lower(value: Any, path: str, depth: int, refused: list[str]) -> Any:
    """The JSON form of one value; appends to ``refused`` instead of raising, so that all are reported at once."""
    kind = type(value)
    if value is None or kind is bool or (kind is str and (value.isascii() or not SURROGATE.search(value))):
        return value
    if kind is TensorRef:
        lowered: dict[str, Any] = {"$": "tensor", "key": value.key, "dtype": value.dtype, "shape": value.shape}
        for name, usual in (("device", "cpu"), ("form", "tensor"), ("own", False)):
            if getattr(value, name) != usual:
                lowered[name] = getattr(value, name)
        return lowered
    if kind is msgspec.Raw:
        # Encoded before, and unchanged since.
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else write_atom(value)
    if kind is float:
        plain = math.isfinite(value) and (value != 0.0 or math.copysign(1.0, value) > 0)
        return value if plain else write_atom(value)
    if len(refused) >= MAX_REFUSED:
        return None
    if depth > MAX_DEPTH:
        refused.append(f"{path}: nested deeper than {MAX_DEPTH} levels, or a value that contains itself")
        return None
    if kind is dict:
        if "$" not in value and all(type(k) is str and (k.isascii() or not SURROGATE.search(k)) for k in value):
            return {
                key: _lower(item, "" if type(item) in _NEVER_REFUSED else join(path, key), depth + 1, refused)
                for key, item in value.items()
            }
        return {"$": "dict", "v": _lower_pairs(value, path, depth, refused)}
    if kind is list:
        return [
            _lower(item, "" if type(item) in _NEVER_REFUSED else join(path, i), depth + 1, refused)
            for i, item in enumerate(value)
        ]
    lower = _LOWER.get(kind)
    if lower is not None:
        return lower(value, path, depth, refused)
    return _lower_other(value, path, depth, refused)


def _lower_pairs(value: Any, path: str, depth: int, refused: list[str]) -> list[Any]:
    pairs = []
    for key, item in value.items():
        below = join(path, key)
        pairs.append([_lower(key, below, depth + 1, refused), _lower(item, below, depth + 1, refused)])
    return pairs


def _lower_items(tag: str) -> Callable[[Any, str, int, list[str]], Any]:
    def lower(value: Any, path: str, depth: int, refused: list[str]) -> Any:
        if len(value) > MANY and set(map(type, value)) == {int} and min(value) >= -_INT64 and max(value) < _INT64:
            # Such as the state of a random number generator: every number is what JSON has already.
            return {"$": tag, "v": list(value)}
        return {
            "$": tag,
            "v": [
                _lower(item, "" if type(item) in _NEVER_REFUSED else join(path, i), depth + 1, refused)
                for i, item in enumerate(value)
            ],
        }

    return lower


def _lower_set(value: Any, path: str, depth: int, refused: list[str]) -> Any:
    # Sorted by JSON text: the same set gives the same bytes on every rank, whatever the hash seed.
    items = [_lower(item, path, depth + 1, refused) for item in value]
    return {"$": type(value).__name__, "v": sorted(items, key=msgspec.json.encode)}


def _lower_deque(value: deque[Any], path: str, depth: int, refused: list[str]) -> Any:
    items = [_lower(item, join(path, i), depth + 1, refused) for i, item in enumerate(value)]
    return {"$": "deque", "v": items, "maxlen": value.maxlen}


def _lower_mapping(tag: str) -> Callable[[Any, str, int, list[str]], Any]:
    def lower(value: Any, path: str, depth: int, refused: list[str]) -> Any:
        return {"$": tag, "v": _lower_pairs(value, path, depth, refused)}

    return lower


def _lower_defaultdict(value: defaultdict[Any, Any], path: str, depth: int, refused: list[str]) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        refused.append(f"{path}: defaultdict with the factory {factory!r}; use one of {', '.join(_FACTORIES)}")
    return {"$": "defaultdict", "v": _lower_pairs(value, path, depth, refused), "factory": name}


def _lower_rank_ref(value: RankRef, _path: str, _depth: int, _refused: list[str]) -> Any:
    lowered: dict[str, Any] = {"$": "per_rank", "key": value.key, "rule": value.rule}
    return lowered | {"names": value.names, "sizes": value.sizes, "owners": value.owners} if value.names else lowered


def _lower_object(value: ObjectNode, path: str, depth: int, refused: list[str]) -> Any:
    tree = _lower(value.tree, path, depth + 1, refused)
    return {"$": "object", "kind": value.kind, "type": value.type_name, "v": tree}


def _lower_torch(value: TorchValue, _path: str, _depth: int, _refused: list[str]) -> Any:
    return {"$": f"torch.{value.kind}", "v": value.text}


_LOWER: dict[type, Callable[[Any, str, int, list[str]], Any]] = {
    tuple: _lower_items("tuple"),
    set: _lower_set,
    frozenset: _lower_set,
    deque: _lower_deque,
    OrderedDict: _lower_mapping("OrderedDict"),
    Counter: _lower_mapping("Counter"),
    defaultdict: _lower_defaultdict,
    RankRef: _lower_rank_ref,
    ObjectNode: _lower_object,
    TorchValue: _lower_torch,
}


def _lower_other(value: Any, path: str, depth: int, refused: list[str]) -> Any:
    """Values that hold no others, and registered classes; anything else is refused."""
    try:
        atom = write_atom(value)
    except ValueError as err:
        refused.append(f"{path}: {err}")
        return None
    if atom is not None:
        return atom
    name = registered_name(type(value))
    if name is None:
        hint = " (register its class with ks.register)" if can_register(type(value)) else ""
        refused.append(f"{path}: {type(value).__module__}.{type(value).__qualname__}{hint}")
        return None
    if isinstance(value, Enum):
        # Several flags together have no name of their own.
        return {"$": "enum", "type": name, "v": value.value if isinstance(value, Flag) else value.name}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        return {"$": "dataclass", "type": name, "v": _lower(fields, path, depth + 1, refused)}
    return {"$": "class", "type": name, "v": _lower(value.to_state(), path, depth + 1, refused)}


def _raise_up(plain: Any, depth: int) -> Any:
    if type(plain) is list:
        return [_raise_up(item, depth + 1) for item in plain]
    if type(plain) is not dict:
        return plain
    tag = plain.get("$")
    if tag is None:
        return {key: _raise_up(item, depth + 1) for key, item in plain.items()}
    if depth > 2 * MAX_DEPTH:
        raise CorruptError("plain values are nested too deeply")
    read = _READ.get(tag) if type(tag) is str else None
    if read is None:
        raise CorruptError(f"plain values hold the unknown tag {tag!r}")
    try:
        return read(plain, depth + 1)
    except CorruptError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, MemoryError, OSError) as err:
        raise CorruptError(f"plain value tagged {tag!r} is malformed: {err}") from err


def _items(plain: dict[str, Any], depth: int) -> list[Any]:
    return [_raise_up(item, depth) for item in plain["v"]]


def _pairs(plain: dict[str, Any], depth: int) -> list[tuple[Any, Any]]:
    return [(_raise_up(key, depth), _raise_up(item, depth)) for key, item in plain["v"]]


def _read_defaultdict(plain: dict[str, Any], depth: int) -> Any:
    name = plain["factory"]
    return defaultdict(None if name is None else _FACTORIES[name], _pairs(plain, depth))


def _read_class(plain: dict[str, Any], depth: int) -> Any:
    name = plain["type"]
    cls: Any = registered_class(name)
    if cls is None:
        raise CorruptError(
            f"the state holds a {name!r}, which is not registered here; call ks.register on that class first"
        )
    if plain["$"] == "enum":
        return cls(plain["v"]) if issubclass(cls, Flag) else cls[plain["v"]]
    value = _raise_up(plain["v"], depth)
    if plain["$"] == "class":
        return cls.from_state(value)
    unknown = value.keys() - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise CorruptError(f"a {name!r} was saved with the fields {', '.join(sorted(unknown))}, which it does not have")
    made = cls.__new__(cls)
    for field, item in value.items():
        object.__setattr__(made, field, item)
    return made


def _read_rank_ref(plain: dict[str, Any], _depth: int) -> RankRef:
    ref = msgspec.convert({key: value for key, value in plain.items() if key != "$"} | {"rule": plain["rule"]}, RankRef)
    places = math.prod(ref.sizes) if ref.names else 0
    named = len(ref.names) == len(set(ref.names)) == len(ref.sizes)
    if not named or len(ref.owners) != places or any(size < 1 for size in ref.sizes):
        raise ValueError(f"{len(ref.owners)} owners of places in {ref.names} of {ref.sizes}")
    return ref


_READ: dict[str, Callable[[dict[str, Any], int], Any]] = {
    **READ_ATOM,
    "dict": lambda plain, depth: dict(_pairs(plain, depth)),
    "OrderedDict": lambda plain, depth: OrderedDict(_pairs(plain, depth)),
    "Counter": lambda plain, depth: Counter(dict(_pairs(plain, depth))),
    "defaultdict": _read_defaultdict,
    "tuple": lambda plain, depth: tuple(_items(plain, depth)),
    "set": lambda plain, depth: set(_items(plain, depth)),
    "frozenset": lambda plain, depth: frozenset(_items(plain, depth)),
    "deque": lambda plain, depth: deque(_items(plain, depth), plain["maxlen"]),
    "enum": _read_class,
    "dataclass": _read_class,
    "class": _read_class,
    "tensor": lambda plain, _depth: msgspec.convert({k: v for k, v in plain.items() if k != "$"}, TensorRef),
    "per_rank": _read_rank_ref,
    "object": lambda plain, depth: ObjectNode(str(plain["kind"]), str(plain["type"]), _raise_up(plain["v"], depth)),
    "torch.size": lambda plain, _depth: TorchValue("size", str(plain["v"])),
    "torch.dtype": lambda plain, _depth: TorchValue("dtype", str(plain["v"])),
    "torch.device": lambda plain, _depth: TorchValue("device", str(plain["v"])),
}
