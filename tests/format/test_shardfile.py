"""Shard files: any safetensors reader opens them; they describe themselves; and no number in them is believed."""

from __future__ import annotations

import contextlib
import json
import math
import pickle

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import CorruptError, UsageError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from keepstep.format.shardfile import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Entry,
    digest,
    header_bytes,
    pack_header,
    parse_header,
    seal_header,
)

NAMES = {"save_id": "0123abcd", "step": 7, "rank": 3}


def entries_of(*described) -> tuple[tuple[Entry, ...], int]:
    """Entries one after another, from (key, dtype, global shape, offsets, sizes)."""
    found, start = [], 0
    for key, dtype, shape, offsets, sizes in described:
        box = Box(offsets, sizes)
        stop = start + box.elements * ITEM_BYTES[dtype]
        found.append(Entry(key if sizes == shape else f"{key}~{box}", key, dtype, shape, box, start, stop))
        start = stop
    return tuple(found), start


def sealed(entries, data: bytes) -> bytes:
    header = pack_header(entries, len(data), **NAMES)
    digests = np.array([digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)], np.uint64)
    return seal_header(header, digests) + data


def rebuilt(raw: bytes, change) -> bytes:
    """The file with its header's table changed by ``change(table, notes)``; lengths and padding true again."""
    length = header_bytes(raw, len(raw), "x")
    table = json.loads(raw[8:length])
    notes = json.loads(table["__metadata__"]["keepstep"])
    change(table, notes)
    if isinstance(table.get("__metadata__"), dict) and isinstance(table["__metadata__"].get("keepstep"), str):
        table["__metadata__"]["keepstep"] = json.dumps(notes)
    text = json.dumps(table).encode()
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8) + raw[length:]


SAMPLE, SAMPLE_BYTES = entries_of(
    ("m/w", "float64", (4, 6), (2, 0), (2, 6)),
    ("m/b", "float32", (5,), (0,), (5,)),
    ("m/s", "float32", (), (), ()),
    ("m/e", "bfloat16", (0, 3), (0, 0), (0, 3)),
    ("m/f", "float8_e4m3fnuz", (3,), (0,), (3,)),
)


# --- what is written -------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(ITEM_BYTES)),
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=3),
        ),
        max_size=5,
    )
)
def test_a_header_says_what_it_was_given(drawn):
    described = []
    for index, (dtype, dims) in enumerate(drawn):
        sizes = tuple(size for size, _, _ in dims)
        offsets = tuple(offset for _, offset, _ in dims)
        shape = tuple(size + offset + rest for size, offset, rest in dims)
        described.append((f"c/ü~1{index}", dtype, shape, offsets, sizes))
    entries, size = entries_of(*described)
    data = bytes(range(251)) * (size // 251 + 1)
    raw = sealed(entries, data[:size])
    header = parse_header(raw, len(raw), "file")
    assert sorted(header.entries, key=lambda e: e.name) == sorted(entries, key=lambda e: e.name)
    assert (header.save_id, header.step, header.rank) == ("0123abcd", 7, 3)
    assert header.data_bytes == size
    assert header.data_offset % PAGE_BYTES == 0
    assert header.data_offset + size == len(raw)
    assert header.digests.tolist() == [digest(data[:size][at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]


def test_the_size_of_a_header_does_not_depend_on_the_digests():
    entries, size = entries_of(("m/w", "uint8", (20 * BLOCK_BYTES + 1,), (0,), (20 * BLOCK_BYTES + 1,)))
    header = pack_header(entries, size, **NAMES)
    for value in (0, 1, 2**64 - 1):
        digests = np.full(21, value, np.uint64)
        assert len(seal_header(header, digests)) == len(header)
        raw = seal_header(header, digests)
        assert parse_header(raw, len(raw) + size, "x").digests.tolist() == [value] * 21


def test_names_that_look_like_digests_do_not_get_any():
    """Sealing replaces text; the text of a name must stay."""
    zeros = "A" * 11 + "="
    entries, _ = entries_of((zeros, "uint8", (4,), (0,), (4,)), (f"{zeros}/x", "float8_e4m3fnuz", (4,), (0,), (4,)))
    raw = sealed(entries, b"abcdefgh")
    assert {entry.key for entry in parse_header(raw, len(raw), "x").entries} == {zeros, f"{zeros}/x"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A step with every dtype, and what was saved."""
    folder = tmp_path_factory.mktemp("safetensors")
    tensors = {}
    for number, name in enumerate(sorted(ITEM_BYTES)):
        raw = torch.arange(number, number + 6 * ITEM_BYTES[name], dtype=torch.int64).to(torch.uint8)
        raw = raw % 2 if name == "bool" else raw
        tensors[name] = raw.view(getattr(torch, name)).reshape(2, 3)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    ks.save(folder, {"model": tensors, "lr": 0.1})
    return folder, tensors


def test_the_safetensors_library_opens_every_file(saved):
    folder, tensors = saved
    files = sorted(folder.rglob("*.safetensors"))
    assert {path.parent.name for path in files} == {"model", "state"}
    found = {}
    for path in files:
        raw = path.read_bytes()
        assert (int.from_bytes(raw[:8], "little") + 8) % PAGE_BYTES == 0
        with safetensors.safe_open(path, "pt") as opened:
            assert "keepstep" in opened.metadata()
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  it is no dictionary
    assert "model/empty" not in found  # it has no bytes; the manifest knows it
    for name, tensor in tensors.items():
        if name == "empty":
            continue
        got = found[f"model/{name}"]
        if name in SAFETENSORS_NAMES or name == "scalar":
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
        else:
            assert got.dtype == torch.uint8
            assert got.shape == (*tensor.shape, ITEM_BYTES[name])
        assert got.contiguous().reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    again = safetensors.torch.load_file(next(path for path in files if path.parent.name == "model"))
    assert set(again) == {f"model/{name}" for name in tensors if name != "empty"}


def test_every_tensor_lies_at_a_multiple_of_its_own_element_size(saved):
    folder, _ = saved
    for path in folder.rglob("*.safetensors"):
        raw = path.read_bytes()
        for entry in parse_header(raw, len(raw), path.name).entries:
            assert entry.start % ITEM_BYTES[entry.dtype] == 0


def test_names_that_look_like_pieces_or_like_the_header_stay_apart(tmp_path):
    """Keys are the user's: one may read like the name of a piece, of the tree, or of a block of metadata."""
    keys = ["w", "w~[0:2]", "w[0:2]", "~tree", "__metadata__", "", "0", "a/b", "a~1b", "keepstep", "\ud800"]
    state = {"m": {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}, "~tree": torch.ones(1)}
    ks.save(tmp_path, state)
    target = {"m": {key: torch.zeros(2) for key in keys}, "~tree": torch.zeros(1)}
    ks.load(tmp_path, target)
    for i, key in enumerate(keys):
        assert target["m"][key].tolist() == [float(i)] * 2, key
    assert target["~tree"].tolist() == [1.0]
    with pytest.raises(UsageError, match="__metadata__"):
        ks.save(tmp_path / "other", {"__metadata__": torch.zeros(1)})


# --- what is read ----------------------------------------------------------------------------------------------------


def _set(path, value):
    def change(table, notes):
        where = notes if path[0] == "notes" else table
        for part in path[1:-1]:
            where = where[part]
        where[path[-1]] = value

    return change


HOSTILE = {
    "no metadata": lambda table, notes: table.pop("__metadata__"),
    "metadata is a list": _set(("table", "__metadata__"), []),
    "metadata of someone else": _set(("table", "__metadata__"), {"format": "pt"}),
    "entry is a number": _set(("table", "m/b"), 5),
    "dtype unknown": _set(("table", "m/b", "dtype"), "F4096"),
    "dtype is another": _set(("table", "m/b", "dtype"), "F64"),
    "dtype is a list": _set(("table", "m/b", "dtype"), []),
    "shape too large": _set(("table", "m/b", "shape"), [10**18]),
    "shape beyond 64 bits": _set(("table", "m/b", "shape"), [10**30]),
    "shape negative": _set(("table", "m/b", "shape"), [-5]),
    "shape of two negatives": _set(("table", "m/b", "shape"), [-1, -5]),
    "shape of strings": _set(("table", "m/b", "shape"), ["5"]),
    "shape of floats": _set(("table", "m/b", "shape"), [5.5]),
    "shape is null": _set(("table", "m/b", "shape"), None),
    "a million dimensions": _set(("table", "m/b", "shape"), [1] * 1_000_000),
    "offset beyond the end": _set(("table", "m/b", "data_offsets"), [96, 10**18]),
    "offsets reversed": _set(("table", "m/b", "data_offsets"), [116, 96]),
    "offset negative": _set(("table", "m/w~[2:4, 0:6]", "data_offsets"), [-96, 0]),
    "one offset": _set(("table", "m/b", "data_offsets"), [96]),
    "overlap": _set(("table", "m/b", "data_offsets"), [92, 112]),
    "hole": _set(("table", "m/s", "data_offsets"), [117, 121]),
    "entry gone": lambda table, notes: table.pop("m/s"),
    "all gone": lambda table, notes: [table.pop(key) for key in list(table) if key != "__metadata__"],
    "notes are a list": lambda table, notes: table.update(__metadata__={"keepstep": []}),
    "notes are no JSON": lambda table, notes: (notes.clear(), table.update(__metadata__={"keepstep ": "{"})),
    "digests no base64": _set(("notes", "digests"), "*"),
    "digests too few": _set(("notes", "digests"), ""),
    "digests cut": _set(("notes", "digests"), "AAAA"),
    "digests too many": _set(("notes", "digests"), "A" * 16 + "A" * 4 + "="[:0] + "A" * 12),
    "block of one byte": _set(("notes", "block_bytes"), 1),
    "block of nothing": _set(("notes", "block_bytes"), 0),
    "block huge": _set(("notes", "block_bytes"), 10**18),
    "block negative": _set(("notes", "block_bytes"), -1),
    "step is a string": _set(("notes", "step"), "7"),
    "dtypes is a list": _set(("notes", "dtypes"), []),
    "true dtype unknown": _set(("notes", "dtypes"), {"m/f": "object"}),
    "true dtype of another size": _set(("notes", "dtypes"), {"m/f": "complex128"}),
    "piece outside": _set(("notes", "pieces", "m/w~[2:4, 0:6]"), ["m/w", [4, 6], [3, 0]]),
    "piece at a negative place": _set(("notes", "pieces", "m/w~[2:4, 0:6]"), ["m/w", [4, 6], [-1, 0]]),
    "piece of other dimensions": _set(("notes", "pieces", "m/w~[2:4, 0:6]"), ["m/w", [4], [2]]),
    "piece of a huge tensor at a huge place": _set(("notes", "pieces", "m/w~[2:4, 0:6]"), ["m/w", [10**18, 6], [10**18, 0]]),
    "piece with two fields": _set(("notes", "pieces", "m/w~[2:4, 0:6]"), ["m/w", [4, 6]]),
}  # fmt: skip


@pytest.mark.case(162)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_contradicts_itself_is_refused(name):
    raw = sealed(SAMPLE, bytes(SAMPLE_BYTES))
    parse_header(raw, len(raw), "x")
    changed = rebuilt(raw, HOSTILE[name])
    with pytest.raises(CorruptError, match=r"^file"):
        parse_header(changed, len(changed), "file")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x08",
        bytes(8),
        bytes(PAGE_BYTES),
        b"\xff" * PAGE_BYTES,
        (10**18).to_bytes(8, "little").ljust(PAGE_BYTES),
        (PAGE_BYTES - 8).to_bytes(8, "little").ljust(PAGE_BYTES, b"{"),
        (PAGE_BYTES - 8).to_bytes(8, "little") + b"{}".ljust(PAGE_BYTES - 8),
        (PAGE_BYTES - 8).to_bytes(8, "little") + b'{"__metadata__":{"keepstep":"{}"}}'.ljust(PAGE_BYTES - 8),
        (PAGE_BYTES - 8).to_bytes(8, "little") + b"[" * (PAGE_BYTES - 8),
        (PAGE_BYTES - 8).to_bytes(8, "little") + b'{"a":' * 800 + b"1" * 88,
        pickle.dumps({"a": 1}).ljust(PAGE_BYTES),
        (PAGE_BYTES - 9).to_bytes(8, "little") + bytes(PAGE_BYTES),
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_header_is_refused(raw):
    with pytest.raises(CorruptError):
        parse_header(raw, len(raw), "file")


def test_a_header_for_a_file_of_another_size_is_refused():
    raw = sealed(SAMPLE, bytes(SAMPLE_BYTES))
    for size in (0, 8, PAGE_BYTES - 1, PAGE_BYTES, len(raw) - 1, len(raw) + 1, 10**18):
        with pytest.raises(CorruptError):
            parse_header(raw, size, "file")


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5),
        st.sampled_from(["F32", "U8", "float32", 0, 96, 116, 10**18, -1]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.fuzz
@given(st.data())
def test_a_changed_header_is_refused_or_means_what_it_says(data):
    """Any field of the table replaced by any JSON: an error of ours, or entries that fit the file byte for byte."""

    def change(table, notes):
        where, parent, key = (notes if data.draw(st.booleans()) else table), None, None
        for _ in range(data.draw(st.integers(1, 3))):
            keys = (
                list(where) if isinstance(where, dict) else list(range(len(where))) if isinstance(where, list) else []
            )
            if not keys:
                break
            parent, key = where, data.draw(st.sampled_from(keys))
            where = parent[key]
        parent[key] = data.draw(json_values)

    changed = rebuilt(sealed(SAMPLE, bytes(SAMPLE_BYTES)), change)
    with contextlib.suppress(CorruptError):
        header = parse_header(changed, len(changed), "file")
        assert header.data_offset + header.data_bytes == len(changed)
        position = 0
        for entry in header.entries:
            assert entry.start == position
            assert entry.stop - entry.start == math.prod(entry.box.sizes) * ITEM_BYTES[entry.dtype]
            assert entry.box.inside(entry.shape)
            position = entry.stop
        assert position == header.data_bytes


@pytest.mark.slow
@pytest.mark.fuzz
@given(st.data())
def test_flipped_bytes_in_a_header_never_escape(data):
    raw = bytearray(sealed(SAMPLE, bytes(SAMPLE_BYTES)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, PAGE_BYTES - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError):
        parse_header(bytes(raw), len(raw), "file")
