"""The manifest: written and read, its head alone, versions, its digest, and contents that cannot be true."""

# ruff: noqa: E501  tables, a few to a line

from __future__ import annotations

import contextlib
import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import CheckpointError, CorruptError, FormatError
from keepstep.format.box import Box
from keepstep.format.layout import Cut, Layout, Mesh, TensorSpec
from keepstep.format.manifest import (
    HEAD_BYTES,
    Component,
    FileRecord,
    Lineage,
    Manifest,
    Parent,
    Versions,
    file_name,
    pack_manifest,
    parse_head,
    parse_manifest,
    parse_step_name,
    promised_files,
    step_name,
)
from keepstep.format.shardfile import digest


def sample(**changes) -> Manifest:
    """Two ranks; a sharded tensor, one in boxes, a scalar with one rank; files whose sizes fit."""
    fields = {
        "format": (1, 0),
        "step": 7,
        "save_id": "0123abcd",
        "created": "2024-01-01T00:00:00.000+00:00",
        "lineage": Lineage("run", 3, Parent("other", 2, 5)),
        "metrics": {"loss": 1.5},
        "world_size": 2,
        "versions": Versions("0.1.0", "2.9.0", "3.11.7", "AVX2"),
        "fingerprint": "00ff",
        "components": {"m": Component("module", "Net", 3, 84, "m"), "lr": Component("values", "float", 0, 0, "state")},
        "aliases": {"m/tied": "m/w"},
        "meshes": (Mesh((2,)),),
        "layouts": (
            Layout((4, 2), 0, (Cut(0, "S", 0),)),
            Layout((6,), 0, (), ((0, Box((0,), (2,))), (1, Box((2,), (4,))))),
            Layout((), 0, (Cut(0, "O", 0, 1),)),
        ),
        "tensors": (
            TensorSpec("m/w", "float32", 0, "m"),
            TensorSpec("m/v", "float64", 1, "m"),
            TensorSpec("m/s", "float32", 2, "state"),
        ),
        "files": {
            "m": (FileRecord(0, 4128, 32, "aa"), FileRecord(1, 4144, 48, "bb")),
            "state": (FileRecord(0, 4196, 100, "cc"),),
        },
    }
    return Manifest(**(fields | changes))


def repacked(change) -> bytes:
    """The sample's JSON changed by hand, with a digest that is right again: deeper checks are reached."""
    raw = json.loads(pack_manifest(sample()))
    raw.pop("digest")
    change(raw)
    return signed(raw)


def signed(raw: dict) -> bytes:
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in raw.items())
    text = ("{\n" + lines).encode()
    return text + b',\n"digest": "%016x"\n}\n' % digest(text)


# --- written and read ------------------------------------------------------------------------------------------------


def test_a_manifest_comes_back():
    data = pack_manifest(sample())
    assert parse_manifest(data, "x") == sample()
    assert json.loads(data)["step"] == 7
    assert promised_files(sample()) == {
        "m/rank-00000.0123abcd.safetensors": 4128,
        "m/rank-00001.0123abcd.safetensors": 4144,
        "state/rank-00000.0123abcd.safetensors": 4196,
    }


@pytest.mark.parametrize("dropped", [(), ("o",)])
def test_it_is_json_with_a_field_a_line(dropped):
    """What was let go has a line only where there is something."""
    lines = pack_manifest(sample(dropped=dropped)).decode().splitlines()
    expected = [name for name in (*Manifest.__struct_fields__, "digest") if name != "dropped" or dropped]
    assert [line.split(":")[0] for line in lines[1:-1]] == [f'"{name}"' for name in expected]


def test_the_head_is_read_from_the_beginning_alone():
    """However long the rest is, and whatever became of it."""
    many = tuple(TensorSpec(f"m/{i}", "float32", 0, "m") for i in range(5000))
    data = pack_manifest(sample(tensors=many))
    assert len(data) > 5 * HEAD_BYTES
    head = parse_head(data[:HEAD_BYTES], "x")
    assert (head.step, head.lineage, head.save_id, head.metrics) == (7, sample().lineage, "0123abcd", {"loss": 1.5})
    short = pack_manifest(sample())
    assert parse_head(short, "x") == parse_head(short[: short.index(b'"versions"')], "x")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b"null", b"[1]", b'{"format":1}', b'{"format":[1]}', b"\xff\xfe", b"\x80\x04"]
)
def test_what_is_no_manifest_has_no_head(data):
    for parse in (parse_head, parse_manifest):
        with pytest.raises(CorruptError, match=r"^here"):
            parse(data, "here")


@pytest.mark.case(125)
@pytest.mark.parametrize("version", [(2, 0), (0, 9), (10**6, 1), (-1, 0)])
def test_another_major_version_is_refused_by_its_name(version):
    """Before anything else is looked at: its other fields may mean anything."""
    data = repacked(lambda raw: raw.update(format=list(version)))
    new = b'{"format": [%d, %d], "all": "else is new"}' % version
    for parse in (parse_head, parse_manifest):
        for given_data in (data, new):
            with pytest.raises(
                FormatError, match=rf"format {version[0]}\.{version[1]}; this keepstep reads format 1"
            ) as caught:
                parse(given_data, "step-7/.metadata")
            assert "step-7/.metadata" in str(caught.value)
            assert "Install" in caught.value.remedy


@pytest.mark.case(125)
def test_a_newer_minor_version_with_fields_unknown_today_is_read():
    def change(raw):
        raw["format"] = [1, 9]
        raw["new_field"] = {"x": 1}
        raw["components"]["m"]["colour"] = "red"

    assert parse_manifest(repacked(change), "x").format == (1, 9)


def test_every_flipped_byte_is_noticed():
    """Except in the digest itself nothing can be changed; and there neither."""
    data = pack_manifest(sample())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises((CorruptError, FormatError)):
            parse_manifest(bytes(changed), "x")


def test_a_manifest_cut_anywhere_is_noticed():
    data = pack_manifest(sample())
    for at in range(0, len(data), 7):
        with pytest.raises(CorruptError):
            parse_manifest(data[:at], "x")
    with pytest.raises(CorruptError):
        parse_manifest(data + b" ", "x")


# --- names -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**18 - 1))
def test_step_names_come_back(step):
    assert parse_step_name(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-1", "step-0000001", "step-000000001", "step-00000001 ", "step-00000001.tmp", "Step-00000001", "step--0000001",
     "step-0000000a", "xstep-00000001", "step-00000001/x", "step-٠٠٠٠٠٠٠١", "", "step-", "step-00000001\n"],
)  # fmt: skip
def test_names_that_only_resemble_a_step(name):
    assert parse_step_name(name) is None


def test_file_names_hold_rank_and_save_id():
    assert file_name("model", 3, "0123abcd") == "model/rank-00003.0123abcd.safetensors"
    assert file_name("model", 123456, "0123abcd") == "model/rank-123456.0123abcd.safetensors"


# --- what cannot be true ---------------------------------------------------------------------------------------------


def _at(*path):
    *inner, last, value = path

    def change(raw):
        where = raw
        for part in inner:
            where = where[part]
        where[last] = value

    return change


def _renamed_folder(name):
    def change(raw):
        raw["files"][name] = raw["files"].pop("m")
        for tensor in raw["tensors"][:2]:
            tensor[3] = name

    return change


IMPOSSIBLE = {
    **{f"folder {name!r}": _renamed_folder(name) for name in (
        "../../x", "/etc", "..", ".", "", "a/b", "a\\b", "a\0", "C:", "-m", ".m", "m" * 65, "ü", "m\n", "~", " m")},
    **{f"save id {name!r}": _at("save_id", name) for name in ("../x", "", "0123", "0123abcd/..", "XYZ", "0" * 33, "0123ABCD", "0123abcd\n", 5, None)},
    **{f"world of {n!r}": _at("world_size", n) for n in (0, -1, 10**18, 2**70, 1, "2", None, 2.5, True)},
    **{f"step {n!r}": _at("step", n) for n in (-1, "7", None, 7.5)},
    **{f"shape {shape}": _at("layouts", 0, 0, shape) for shape in ([-4, 2], [10**18, 2], [2**70, 1], [4, 2, 0, 2**62], ["4", 2], [4.5, 2], None, 4, [1] * 65)},
    **{f"mesh {n}": _at("layouts", 0, 1, n) for n in (1, -1, 10**18, "0", None)},
    **{f"mesh shape {shape}": _at("meshes", 0, 0, shape) for shape in ([3], [0], [-2], [], [10**9, 10**9], [2**70], [1], [2, 2], ["2"], None)},
    **{f"mesh from {n}": _at("meshes", 0, 1, n) for n in (1, -1, 10**18, "0")},
    **{f"mesh of ranks {ranks}": _at("meshes", 0, [[2], 0, ranks]) for ranks in ([0], [0, 0], [0, 2], [-1, 0], [0, 1, 1], [10**18, 0], ["0", 1])},
    **{f"cut {cut}": _at("layouts", 0, 2, [cut]) for cut in (
        [1, "S", 0, 0], [-1, "S", 0, 0], [0, "S", 2, 0], [0, "S", -1, 0], [0, "X", 0, 0], [0, "R", 0, 0], [0, "", 0, 0],
        [0, "SS", 0, 0], [0, "SS", 0, -1], [0, "SS", 0, 10**18], [0, "SS", 5, 1], [0, "O", 0, 2], [0, "O", 0, -1],
        [0, 5, 0, 0], ["0", "S"], [0, "B", 2], None)},
    **{f"boxes {boxes}": _at("layouts", 1, 3, boxes) for boxes in (
        [[0, [[0], [2]]], [2, [[2], [4]]]], [[0, [[0], [2]]], [-1, [[2], [4]]]], [[0, [[0], [2]]], [1, [[2], [5]]]],
        [[0, [[0], [2]]], [1, [[-1], [4]]]], [[0, [[0], [-2]]], [1, [[0], [8]]]], [[0, [[0, 0], [2, 1]]]],
        [[0, [[0], [10**18]]]], [[0, [[2**70], [1]]]], [[0, [[0]]]], [[0]], [0], 5)},
    **{f"dtype {name!r}": _at("tensors", 0, 1, name) for name in ("object", "", "float128", "torch.float32", None, 4)},
    **{f"layout {n!r}": _at("tensors", 0, 2, n) for n in (3, -1, 10**18, "0", None)},
    **{f"tensor in {name!r}": _at("tensors", 0, 3, name) for name in ("gone", "../x", "", None)},
    "a tensor twice": _at("tensors", 1, ["m/w", "float64", 1, "m"]),
    "a tensor that is a string": _at("tensors", 0, "m/w"),
    "tensors as an object": _at("tensors", {}),
    "a tie that is also stored": _at("aliases", {"m/v": "m/w"}),
    "a tie to a number": _at("aliases", {"m/x": 5}),
    **{f"file {record}": _at("files", "m", 0, record) for record in (
        [2, 4128, 32, "aa"], [-1, 4128, 32, "aa"], [1, 4128, 32, "aa"], [0, -1, 32, "aa"], [0, 4128, -1, "aa"],
        [0, 31, 32, "aa"], [0, 4128, 32, 5], [0, 4128, 32], ["0", 4128, 32, "aa"], [0, 4128.5, 32, "aa"], 5, None)},
    "files of no folder": _at("files", {}),
    "files as a list": _at("files", []),
    "a metric that is a string": _at("metrics", {"loss": "low"}),
    "no lineage": lambda raw: raw.pop("lineage"),
    "a lineage without run": _at("lineage", {}),
    "an incarnation that is a string": _at("lineage", "incarnation", "3"),
    "no versions": lambda raw: raw.pop("versions"),
    "no layouts": _at("layouts", []),
}  # fmt: skip


@pytest.mark.case(162)
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_true_is_refused_although_the_digest_is_right(name):
    with pytest.raises(CorruptError, match=r"^x: "):
        parse_manifest(repacked(IMPOSSIBLE[name]), "x")


UNCOVERED = {
    "an overlap": (_at("layouts", 1, 3, [[0, [[0], [3]]], [1, [[2], [4]]]]), "'m/v': pieces .* overlap"),
    "a hole": (_at("layouts", 1, 3, [[0, [[0], [2]]], [1, [[3], [3]]]]), "'m/v': the pieces cover 5 of 6"),
    "twice and not at all": (_at("layouts", 1, 3, [[0, [[0], [3]]], [1, [[0], [3]]]]), "'m/v': pieces .* overlap"),
    "a mesh that is not used": (_at("layouts", 0, 2, []), "'m/w': cuts along .* do not give"),
    "a mesh that is used twice": (_at("layouts", 0, 2, [[0, "S", 0], [0, "S", 1]]), "'m/w': cuts along .* do not give"),
    "a larger tensor": (_at("layouts", 0, 0, [400, 2]), "'m' hold 3,168 bytes less"),
    "a huge tensor": (_at("layouts", 0, 0, [10**16, 2]), "bytes less than its tensors"),
    "a smaller tensor": (_at("layouts", 0, 0, [2, 2]), "'m' hold 16 bytes more"),
    "a tensor gone": (lambda raw: raw["tensors"].pop(1), "'m' hold 48 bytes more"),
    "a file gone": (lambda raw: raw["files"]["m"].pop(1), "'m' hold 48 bytes less"),
    "less in a state file": (_at("files", "state", [[0, 4096, 0, "cc"]]), "'state' hold 4 bytes less"),
    "a tie to nothing": (_at("aliases", {"m/x": "m/gone"}), "'m/x' is tied to 'm/gone', which is not stored"),
}


@pytest.mark.case(121, 162)
@pytest.mark.parametrize("name", UNCOVERED)
def test_a_manifest_whose_tensors_are_not_wholly_in_its_files_promises_nothing(name):
    change, message = UNCOVERED[name]
    with pytest.raises(CorruptError, match=message):
        promised_files(parse_manifest(repacked(change), "x"))


@pytest.mark.parametrize(
    "text",
    ["NaN", "Infinity", "-Infinity", "1e999", "0x10", "'7'", "07", "7,", "9" * 5000, "[" * 50_000, "{}" * 3, "1.0"],
)
def test_numbers_that_are_none(text):
    raw = pack_manifest(sample())
    body = raw[: raw.index(b',\n"digest"')].replace(b'"step": 7', b'"step": ' + text.encode())
    data = body + b',\n"digest": "%016x"\n}\n' % digest(body)
    with pytest.raises(CorruptError):
        parse_manifest(data, "x")


def test_nothing_is_allocated_by_a_number_in_it():
    """A kilobyte of JSON that speaks of exabytes costs kilobytes."""
    changes = [
        IMPOSSIBLE[name] for name in IMPOSSIBLE if "10**" in name or "00000" in name or "1180591620717411303424" in name
    ]
    changes += [UNCOVERED["a huge tensor"][0]]
    blobs = [repacked(change) for change in changes]
    assert len(blobs) > 10
    tracemalloc.start()
    for blob in blobs:
        with contextlib.suppress(CorruptError):
            promised_files(parse_manifest(blob, "x"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from([10**18, 2**63, 2**70, -(10**18), 1 << 20]),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4),
    st.sampled_from(["..", "../../x", "m", "state", "S", "SS", "B", "O", "float32", "m/w"]),
)  # fmt: skip
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=300)
@given(st.data())
def test_any_change_is_refused_or_leaves_a_manifest_that_fits_together(data):
    """A few places of the JSON replaced by anything; the digest is right again."""

    def change(raw):
        for _ in range(data.draw(st.integers(1, 3))):
            where, parent, key = raw, None, None
            for _ in range(data.draw(st.integers(1, 5))):
                keys = (
                    list(where)
                    if isinstance(where, dict)
                    else list(range(len(where)))
                    if isinstance(where, list)
                    else []
                )
                if not keys:
                    break
                parent, key = where, data.draw(st.sampled_from(keys))
                where = parent[key]
            parent[key] = data.draw(json_values)

    raw = repacked(change)
    for parse in (parse_head, lambda d, n: promised_files(parse_manifest(d, n))):
        with contextlib.suppress(CheckpointError):
            parse(raw, "x")
    with contextlib.suppress(CheckpointError):
        manifest = parse_manifest(raw, "x")
        for name in promised_files(manifest):
            assert ".." not in name
            assert not name.startswith("/")
        assert parse_manifest(pack_manifest(manifest), "x") == manifest


@pytest.mark.slow
@pytest.mark.fuzz
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), json_values.map(msgspec.json.encode)))
def test_any_bytes_are_refused(data):
    for parse in (parse_head, parse_manifest):
        with pytest.raises(CheckpointError):
            parse(data, "x")
