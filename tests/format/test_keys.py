"""Keys: different paths give different keys, whatever the parts are; and a key is never a way out of anything."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.format.objects import join

text = st.one_of(
    st.text(max_size=4),
    st.text(alphabet="~/0123456789-ers.", max_size=5),
    st.sampled_from(
        ["", "0", "-1", "1.5", "True", "None", "~e", "~s1", "~0", "~1", "~", "/", "..", "²", "\ud800", "~ud800"]
    ),
)
part = st.one_of(
    text,
    st.integers(-3, 12),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, width=16),
    st.binary(max_size=3),
    st.tuples(st.integers(0, 2), text),
    st.dates(),
)


def spelled(path: list[object]) -> str:
    key = ""
    for item in path:
        key = join(key, item)
    return key


def same(one: list[object], other: list[object]) -> bool:
    return len(one) == len(other) and all(
        type(a) is type(b) and repr(a) == repr(b) for a, b in zip(one, other, strict=True)
    )


@given(st.lists(part, min_size=1, max_size=3), st.lists(part, min_size=1, max_size=3))
def test_different_paths_have_different_keys(one, other):
    assert (spelled(one) == spelled(other)) == same(one, other)


@given(st.lists(part, min_size=1, max_size=4))
@example(["\ud800", "a\udfff/~"])
def test_a_key_has_as_many_segments_as_its_path_and_can_be_written(path):
    key = spelled(path)
    segments = key.split("/")
    assert len(segments) == len(path)
    assert all(segments)
    assert key.encode().decode() == key


@given(text, text)
def test_parts_that_look_alike_stay_apart(one, other):
    """The kinds that a dictionary can hold beside each other."""
    looks = [one, other, 1, "1", True, "True", None, "None", 1.5, "1.5", b"1", "b'1'", (1,), "(1,)", -1, "-1", "", "~e"]
    unique = {(type(item), item): join("a", item) for item in looks}
    assert len(set(unique.values())) == len(unique)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("layers.0.weight", "layers.0.weight"),
        (0, "0"),
        (-1, "-1"),
        ("0", "~s0"),
        ("-1", "~s-1"),
        ("", "~e"),
        ("a/b", "a~1b"),
        ("a~b", "a~0b"),
        (True, "~bTrue"),
        (None, "~NNone"),
        ("a\ud8ffb", "a~ud8ffb"),
        (dt.date(2024, 1, 2), "~ddatetime.date(2024, 1, 2)"),
    ],
)
def test_the_spelling_is_part_of_the_format(part, key):
    assert join("", part) == key
    assert join("model", part) == f"model/{key}"
