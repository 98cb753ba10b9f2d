"""Patterns of keys: what they take, which of them are idle, what else was meant."""

from __future__ import annotations

import pytest

from keepstep.errors import UsageError
from keepstep.format.globs import Globs, near


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        ("model", ["model", "model/a", "model/a/b"], ["models", "a/model"]),
        ("model/*", ["model/a", "model/a/b"], ["model", "modelx/a"]),
        ("model/l.*.w", ["model/l.0.w", "model/l.0.1.w", "model/l.0.w/x"], ["model/l.0/x.w"]),
        ("optimizer/state/**", ["optimizer/state", "optimizer/state/w/exp_avg"], ["optimizer", "optimizer/statex"]),
        ("**", ["a", "a/b"], []),
        (
            "**/head.*",
            ["model/head.w", "optimizer/state/head.w", "optimizer/state/head.w/step"],
            ["head.w", "model/ahead.w"],
        ),
        ("model/l.[0-2].w", ["model/l.0.w", "model/l.2.w"], ["model/l.3.w", "model/l./.w"]),
        ("model/l.[!0-2].w", ["model/l.3.w"], ["model/l.0.w", "model/l./.w"]),
        ("a/?", ["a/b", "a/b/c"], ["a/bc", "a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a[", ["a["], ["a"]),
        ("x[0]*", ["x[0]*", "x0", "x01"], ["x[0]"]),
        ("a/x~1y", ["a/x~1y"], ["a/x/y"]),
    ],
)
def test_what_a_pattern_takes(pattern, taken, left):
    globs = Globs([pattern], "only")
    assert [key for key in taken if not globs.takes(key)] == []
    assert [key for key in left if globs.takes(key)] == []


def test_without_what_is_below():
    globs = Globs(["a/*/lr"], "override", below=False)
    assert globs.takes("a/0/lr")
    assert not globs.takes("a/0/lr/0")


def test_thousands_of_keys_are_no_thousands_of_expressions():
    keys = [f"model/layers.{number}.weight" for number in range(4000)]
    globs = Globs(keys, "only")
    assert all(map(globs.takes, keys))
    assert globs.takes("model/layers.17.weight/more")
    assert not globs.takes("model/layers.4000.weight")
    assert globs.idle(keys[1:]) == keys[:1]
    assert Globs(["a", "a/**", "b/**", "c/*"], "only").idle(["a/x"]) == ["b/**", "c/*"]


def test_idle_patterns_and_near_keys():
    keys = ["model/head.weight", "model/body.weight"]
    assert Globs(["model", "model/haed.*", "x"], "only").idle(keys) == ["model/haed.*", "x"]
    assert near("model/haed.weight", keys).startswith("; did you mean 'model/head.weight'")
    assert near("zzz", keys) == ""


@pytest.mark.parametrize(
    ("patterns", "message"), [("model", "give a list"), ([""], "a pattern is a text"), ([None], "text")]
)
def test_what_is_no_list_of_patterns(patterns, message):
    with pytest.raises(UsageError, match=message):
        Globs(patterns, "only")
