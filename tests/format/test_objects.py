"""Plain values: every type of the closed table comes back as it was; everything else is refused, all of it at once."""

# ruff: noqa: E501  tables, a few to a line

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import io
import math
import pickle
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keepstep as ks
from keepstep.errors import CorruptError, UnsafeValueError
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, decode, encode


@ks.register
@dataclasses.dataclass
class Schedule:
    warmup: int
    names: list[str]
    nested: object = None


@ks.register
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object
    made: int = dataclasses.field(default=3, init=False)


@ks.register
class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = (1, 2)


@ks.register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@ks.register
class Switch(enum.Flag):
    NONE = 0
    A = 1
    B = 2
    C = 4


class Tokens:
    def __init__(self, counts):
        self.counts = counts

    def __eq__(self, other):
        return type(other) is Tokens and self.counts == other.counts

    __hash__ = None

    def to_state(self):
        return {"counts": self.counts}

    @classmethod
    def from_state(cls, value):
        return cls(value["counts"])


ks.register(Tokens, name="tests.Tokens")


def same(a, b) -> bool:
    """Equal in type and bits, all the way down; dictionaries and sequences in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return factory and len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dt.datetime):
        return a.isoformat() == b.isoformat() and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    return a == b


def back(value):
    return decode(encode(value))


# --- the table -------------------------------------------------------------------------------------------------------

TABLE = [
    None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**70, -(2**70), 10**5000,
    0.0, -0.0, 1.0, 1e16, 1e22, 5e-324, 1.7976931348623157e308, 0.1, math.inf, -math.inf, math.nan, -math.nan,
    struct.unpack("<d", bytes.fromhex("0100000000f0f87f"))[0],
    1j, complex(-0.0, math.nan), "", "a", "$", "ü日本🎉", "\0", "\ud800 half", "\x7f\u2028",
    b"", b"\x00\xff", bytearray(b"x"), bytearray(),
    [], (), set(), frozenset(), {}, [1, [2.0, (True,)]], (1,), ((),), [None],
    {1, True and 2, "1", b"1", (1, 2), None}, frozenset({frozenset({1}), 2.5}),
    {"b": 1, "a": 2}, {"$": 1}, {"$": {"$": "tuple", "v": []}}, {1: "int", "1": "str", None: 0, (1, 2): 3, 2.5: 4, b"k": 5},
    {True: 1, 0: 2}, {"": 0, "/": 1, "~": 2, "..": 3}, {"\udfff": 1}, {1: {2: {3: ()}}}, {Mode.TRAIN: 1, Level.LOW: 2},
    OrderedDict([("z", 1), ("a", [2])]), OrderedDict({1: 2}), Counter("abca"), Counter({(1,): -1}),
    defaultdict(int, {"a": 1}), defaultdict(list, {1: [2]}), defaultdict(None, {"x": 1}), defaultdict(dict), defaultdict(float),
    deque([1, 2], maxlen=2), deque(), deque([(1,)]), deque(maxlen=0),
    Mode.TRAIN, Mode.EVAL, Level.HIGH, Switch.A, Switch.A | Switch.C, Switch.NONE, Switch(7),
    Path("a/b"), Path("/x"), Path(), Path("a\udc80"), PurePosixPath("a/b"), PureWindowsPath("C:\\x"),
    dt.datetime(2024, 2, 29, 1, 2, 3, 4), dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=-30, seconds=-7))),
    dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Paris"), fold=1),
    dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Paris")), dt.datetime(2024, 1, 1, fold=1),
    dt.date(2024, 2, 29), dt.timedelta(days=-1, microseconds=1), dt.timedelta.max, dt.timedelta.min,
    Schedule(3, ["a"], Schedule(1, [], (1, {2}))), Frozen(b"x"), Frozen({1: 2}), Tokens({"a": (1, 2)}), [Tokens(None)],
]  # fmt: skip


@pytest.mark.parametrize("value", TABLE, ids=lambda value: type(value).__name__)
def test_what_the_table_holds_comes_back_as_it_was(value):
    made = back(value)
    assert same(made, value)
    assert encode(made) == encode(value)
    assert same(back([{"in": (value,)}]), [{"in": (value,)}])


ARRAYS = [
    np.float64(1.5), np.float32(-0.0), np.float16(math.nan), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 - 2j), np.str_("ü"), np.str_(""), np.bytes_(b"x\0y"), np.datetime64("2024-01-01T00:00:01"),
    np.timedelta64(5, "ms"), np.longdouble(1) / 3,
    np.array(3.5), np.array(7, np.int16), np.zeros((0, 3)), np.zeros((2, 0), np.int8), np.arange(6).reshape(2, 3),
    np.arange(6, dtype=">f4").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::-3],
    np.array([True, False]), np.array(["a", "bcd"]), np.array([b"a", b""]), np.array([[1 + 2j]]),
    np.array(["2024-01-01", "NaT"], "M8[D]"), np.array([[[1]]], np.uint16),
]  # fmt: skip


@pytest.mark.case(161)
@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{type(value).__name__}-{value.dtype.str}-{value.shape}")
def test_numpy_values_come_back_with_their_dtype_and_shape(value):
    made = back({"v": value})["v"]
    assert same(made, value)
    if isinstance(made, np.ndarray) and made.dtype.itemsize:
        made[...] = made  # one's own memory, to be written


@pytest.mark.slow
@pytest.mark.case(161)
def test_the_state_of_numpys_generators_is_plain(tmp_path):
    """Both kinds; through a file, and continued from it."""
    legacy = np.random.RandomState(3)
    legacy.normal()
    modern = np.random.default_rng(3)
    modern.normal(size=3)
    state = {
        "legacy": legacy.get_state(),
        "modern": modern.bit_generator.state,
        "global": np.random.get_state(),
        "scalar": np.float64(0.1),
        "array": np.arange(3),
        "point": np.array(5.0),
        "python": random.Random(3).getstate(),
    }
    ks.save(tmp_path, {"values": state})
    found = ks.open(tmp_path).values_of("values")
    assert same(found, state)
    other = np.random.RandomState()
    other.set_state(found["legacy"])
    assert other.normal() == legacy.normal()
    again = np.random.default_rng()
    again.bit_generator.state = found["modern"]
    assert again.normal() == modern.normal()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"numpy" not in path.read_bytes()


def test_references_come_back():
    tree = {
        "t": TensorRef("a/b", "float32", (2, 3), "cuda", "dtensor", True),
        "u": TensorRef("c", "bool", ()),
        "r": RankRef("rng", "derive"),
        "p": RankRef("loader", "error", ("dp", "pp"), (2, 1), (0, 3)),
        "o": ObjectNode("optimizer", "Adam", {"param_groups": [{"lr": 0.1}]}),
        "s": TorchValue("size", "2,3"),
        "d": TorchValue("dtype", "bfloat16"),
    }
    assert same(back(tree), tree)


plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(max_size=6),
        st.text(st.characters(), max_size=6), st.dates(), st.timedeltas(), st.sampled_from([*Mode, *Level, Switch(5)]),
        st.datetimes(timezones=st.one_of(st.none(), st.just(dt.UTC), st.timezones())),
        hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.just("$")), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.frozensets(st.one_of(st.integers(), st.text(max_size=3), st.binary(max_size=2)), max_size=3),
        inner.map(lambda item: Schedule(1, ["x"], item)),
        inner.map(Frozen),
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@given(plain)
def test_any_combination_comes_back(value):
    data = encode(value)
    made = decode(data)
    assert same(made, value)
    assert encode(made) == data


def test_the_copy_is_private():
    value = {"list": [1], "array": np.zeros(2), "bytes": bytearray(b"a")}
    data = encode(value)
    value["list"].append(2)
    value["array"][:] = 1
    value["bytes"][:] = b"b"
    assert same(decode(data), {"list": [1], "array": np.zeros(2), "bytes": bytearray(b"a")})


@pytest.mark.slow
def test_a_set_gives_the_same_bytes_whatever_the_hash_seed():
    """Ranks compare the bytes; each has a hash seed of its own."""
    script = (
        "from keepstep.format.objects import encode, join;"
        "print(encode({'s': {'a', 'b', 'c', 1, (2, 'x')}, 'f': frozenset('xyz')}), join('k', frozenset('abc')))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


# --- what is refused -------------------------------------------------------------------------------------------------


class Thing:
    pass


class Text(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Unregistered:
    x: int = 1


class Colour(enum.Enum):
    RED = 1


def test_everything_unsafe_is_listed_at_once_with_key_and_type(tmp_path):
    """Nothing is written, and one try tells all."""
    with (tmp_path / "file").open("w") as handle:
        bad = {
            "function": lambda: 0,
            "object": object(),
            "file": handle,
            "instance": Thing(),
            "generator": (i for i in range(3)),
            "class": Thing,
            "module": math,
            "subclass": Text("x"),
            "named": Point(1, 2),
            "dataclass": Unregistered(),
            "enum": Colour.RED,
            "objects": np.array([object()]),
            "record": np.zeros(2, [("a", "i4")]),
            "matrix": np.ma.masked_array([1], [True]),
            "factory": defaultdict(lambda: 0),
            "range": range(3),
            "deep/key": [0, (1, {"x": {2: Thing()}})],
            "set": {Thing()},
            "zone": dt.datetime(2024, 1, 1, tzinfo=_Zone()),
            "exception": ValueError("x"),
        }
        with pytest.raises(UnsafeValueError) as caught:
            ks.save(tmp_path / "step", {"values": bad, "good": torch.zeros(3)})
    refused = caught.value.refused
    assert len(refused) == len(bad)
    text = "\n".join(refused)
    for key in bad:
        assert f"values/{key.replace('/', '~1')}" in text
    for kind in (
        "builtins.object",
        "function",
        "Thing",
        "generator",
        "TextIOWrapper",
        "namedtuple"[:0],
        "Point",
        "range",
    ):
        assert kind in text
    assert "values/deep~1key/1/1/x/2: tests.format.test_objects.Thing" in text
    assert text.count("ks.register") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class _Zone(dt.tzinfo):
    def utcoffset(self, when):
        return dt.timedelta(hours=1)

    def dst(self, when):
        return None

    def tzname(self, when):
        return "X"


def test_more_than_twenty_are_counted_in_the_message_and_kept_in_full():
    with pytest.raises(UnsafeValueError, match="and 30 more") as caught:
        encode({str(i): object() for i in range(50)})
    assert len(caught.value.refused) == 50


def _holding_itself():
    inside_list: list = [1]
    inside_list.append(inside_list)
    twice: list = []
    twice.extend([twice, twice])
    inside_dict: dict = {}
    inside_dict["self"] = {"again": inside_dict}
    inside_record = Schedule(1, [])
    inside_record.nested = [inside_record, inside_record]
    inside_deque: deque = deque()
    inside_deque.append((inside_deque,))
    return [inside_list, twice, inside_dict, inside_record, inside_deque]


@pytest.mark.parametrize("value", _holding_itself(), ids=["list", "twice", "dict", "dataclass", "deque"])
def test_values_that_hold_themselves_are_refused(value, tmp_path):
    with pytest.raises(UnsafeValueError, match="contains itself"):
        encode({"x": value}, "state")
    with pytest.raises(UnsafeValueError, match="contains itself"):
        ks.save(tmp_path, {"values": {"x": value}})
    assert list(tmp_path.iterdir()) == []


def test_depth_has_a_limit_on_both_sides():
    value: object = 1
    for _ in range(90):
        value = [value]
    assert same(back(value), value)
    for _ in range(20):
        value = [value]
    with pytest.raises(UnsafeValueError, match="nested deeper than 100"):
        encode(value)


def test_a_file_in_memory_comes_back_with_its_position():
    file = io.BytesIO(b"in memory")
    file.seek(3)
    found = decode(encode({"file": file}))["file"]
    assert (type(found), found.getvalue(), found.tell()) == (io.BytesIO, b"in memory", 3)


# --- what is read ----------------------------------------------------------------------------------------------------

MALFORMED = [
    b"", b"{", b"nul", b"\xff", b"[1,", b'{"$":"nothing"}', b'{"$":1}', b'{"$":{}}', b'{"$":["tuple"]}', b'{"$":"tuple"}',
    b'{"$":"tuple","v":1}', b'{"$":"dict","v":[1]}', b'{"$":"dict","v":[[[1],2]]}', b'{"$":"set","v":[[1]]}',
    b'{"$":"dict","v":[["a"]]}', b'{"$":"int","v":"x"}', b'{"$":"int","v":5}', b'{"$":"float","v":"00"}',
    b'{"$":"float","v":""}', b'{"$":"complex","v":""}', b'{"$":"bytes","v":"*"}', b'{"$":"bytes","v":1}',
    b'{"$":"class","type":"io.BytesIO","v":1}', b'{"$":"class","type":"io.BytesIO","v":["x",0]}',
    b'{"$":"class","type":"io.BytesIO","v":[{"$":"bytes","v":""},-1]}', b'{"$":"class","type":"io.BytesIO","v":[]}',
    b'{"$":"str","v":"/w=="}', b'{"$":"path","v":1}', b'{"$":"path","v":{"v":"*"}}', b'{"$":"date","v":"x"}',
    b'{"$":"datetime","v":"2024-01-01","zone":"../../etc/passwd"}', b'{"$":"datetime","v":"2024-01-01","zone":"Europe"}',
    b'{"$":"datetime","v":"2024-01-01","zone":"No/Where"}', b'{"$":"datetime","v":"2024-01-01","fold":9}',
    b'{"$":"timedelta","v":[1e300]}', b'{"$":"timedelta","v":[99999999999,0,0]}', b'{"$":"deque","v":[],"maxlen":-1}',
    b'{"$":"deque","v":[],"maxlen":"x"}', b'{"$":"deque","v":[]}', b'{"$":"defaultdict","v":[],"factory":"eval"}',
    b'{"$":"ndarray","dtype":"O","shape":[1],"v":"AAAAAAAAAAA="}', b'{"$":"ndarray","dtype":"|O","shape":[1],"v":""}',
    b'{"$":"ndarray","dtype":"<f4","shape":[1000000000000],"v":"AAAA"}', b'{"$":"ndarray","dtype":"<f4","shape":[3],"v":"AAAAAA=="}',
    b'{"$":"ndarray","dtype":"<f4","shape":[-5],"v":"AAAAAA=="}', b'{"$":"ndarray","dtype":"f4,(","shape":[],"v":""}',
    b'{"$":"ndarray","dtype":["a"],"shape":[],"v":""}', b'{"$":"ndarray","dtype":"<M8[lightyear]","shape":[1],"v":"AAAAAAAAAAA="}',
    b'{"$":"ndarray","dtype":"<f99","shape":[1],"v":""}', b'{"$":"npscalar","dtype":"<U0","shape":[1000000000000000000],"v":"AA=="}',
    b'{"$":"ndarray","dtype":"|V99999999999","shape":[1],"v":""}', b'{"$":"npscalar","dtype":"<f8","shape":[],"v":""}',
    b'{"$":"enum","type":"os.system","v":"x"}', b'{"$":"enum","type":[],"v":"x"}',
    b'{"$":"enum","type":"%s.Mode","v":"__class__"}' % __name__.encode(), b'{"$":"enum","type":"%s.Switch","v":99}' % __name__.encode(),
    b'{"$":"enum","type":"%s.Mode","v":[]}' % __name__.encode(), b'{"$":"dataclass","type":"%s.Schedule","v":[]}' % __name__.encode(),
    b'{"$":"dataclass","type":"%s.Schedule","v":{"__class__":1}}' % __name__.encode(),
    b'{"$":"dataclass","type":"%s.Schedule","v":{"warmup":1,"extra":2}}' % __name__.encode(),
    b'{"$":"dataclass","type":"builtins.object","v":{}}', b'{"$":"class","type":"tests.Tokens","v":{}}',
    b'{"$":"class","type":"tests.Tokens","v":5}', b'{"$":"tensor"}', b'{"$":"tensor","key":1,"dtype":"f","shape":[]}',
    b'{"$":"tensor","key":"a","dtype":"float32","shape":["x"]}', b'{"$":"object","kind":"x"}', b'{"$":"per_rank"}',
    b'{"$":"per_rank","key":"a"}', b'{"$":"per_rank","key":"a","rule":1}', b'{"$":"per_rank","key":"a","rule":"error","names":["dp"]}',
    b'{"$":"per_rank","key":"a","rule":"error","names":["dp"],"sizes":[2],"owners":[0]}',
    b'{"$":"per_rank","key":"a","rule":"error","names":["dp","pp"],"sizes":[-1,-2],"owners":[0,1]}',
    b'{"$":"per_rank","key":"a","rule":"error","names":["dp"],"sizes":[1000000000000],"owners":[]}',
    b'{"$":"per_rank","key":"a","rule":"error","names":["dp","dp"],"sizes":[1,1],"owners":[0]}',
    b'{"$":"per_rank","key":"a","rule":"error","names":[],"sizes":[],"owners":[0]}',
    b"[" * 100_000 + b"]" * 100_000, b'{"$":"tuple","v":[' * 300 + b"]}" * 300, b'{"a":' * 5000 + b"1" + b"}" * 5000,
    pickle.dumps({"a": 1}), b"9" * 5000, b"NaN", b"Infinity", b'"\\ud800"',
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[:60]))
def test_what_is_not_such_a_tree_is_corrupt(data):
    with pytest.raises(CorruptError):
        decode(data)


json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False, allow_infinity=False),
              st.text(max_size=4), st.sampled_from(["<f4", "|b1", "AAAA", "tuple", "a", "ndarray", "list"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "type", "dtype", "shape", "maxlen", "key", "zone", "a"]), inner, max_size=5),
        st.fixed_dictionaries(
            {"$": st.sampled_from(["tuple", "dict", "set", "int", "float", "ndarray", "npscalar", "deque", "datetime",
                                   "enum", "dataclass", "class", "tensor", "object", "per_rank", "path", "str",
                                   "timedelta", "defaultdict", "Counter", "OrderedDict", "torch.size"])},
            optional={"v": inner, "dtype": inner, "shape": inner, "maxlen": inner, "factory": inner, "key": inner,
                      "type": st.one_of(inner, st.sampled_from(["tests.Tokens", f"{__name__}.Mode", f"{__name__}.Schedule"])),
                      "kind": inner, "rule": inner, "zone": inner, "fold": inner}),
    ),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.fuzz
@given(json)
def test_any_json_is_read_or_refused(value):
    with contextlib.suppress(CorruptError):
        decode(msgspec.json.encode(value))


def test_a_class_that_is_not_registered_here_is_named():
    data = encode(Schedule(1, [])).replace(b"Schedule", b"Timetable")
    with pytest.raises(CorruptError, match=r"Timetable.*ks\.register"):
        decode(data)
