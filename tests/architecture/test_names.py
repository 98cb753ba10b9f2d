"""Words that say nothing, and units that drift."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import ROOT, functions, modules

EMPTY_WORDS = {"manager", "handler", "helper", "helpers", "util", "utils", "impl", "misc", "common"}
EMPTY_STARTS = {"base", "default", "abstract"}
# One unit per quantity, in the name: _s is float seconds, _bytes, _elements, _steps.
OTHER_UNITS = re.compile(r"(^timeout$|_(sec|secs|seconds|ms|us|ns|millis|mb|mib|kb|kib|gb|gib|nbytes)$)")

# Names that others gave: a method or parameter of an interface that is not ours.
GIVEN: set[str] = set()


def words(name: str) -> list[str]:
    """``HTTPBaseHandler`` and ``http_base_handler`` -> http, base, handler."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)]


@pytest.mark.parametrize(
    ("name", "found"),
    [("SaveManager", ["save", "manager"]), ("_write_impl", ["write", "impl"]), ("IOBase", ["io", "base"])],
)
def test_words(name, found):
    assert words(name) == found


def test_names_say_something():
    wrong = []
    for module in modules():
        place = module.path.relative_to(ROOT)
        parts = module.name.split(".")[1:]
        wrong += [f"{place}: {part}" for part in parts if EMPTY_WORDS & set(words(part))]
        names = [(n.lineno, n.name, True) for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)]
        names += [(f.lineno, f.name, False) for _, f in functions(module)]
        for line, name, is_class in names:
            parts = words(name)
            if EMPTY_WORDS & set(parts) or (is_class and parts and parts[0] in EMPTY_STARTS):
                wrong.append(f"{place}:{line}: {name}")
    assert not [w for w in wrong if w.split()[-1] not in GIVEN], "\n".join(wrong)


def test_units_are_the_agreed_ones():
    wrong = []
    for module in modules():
        place = module.path.relative_to(ROOT)
        for name, function in functions(module):
            spec = function.args
            for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
                if OTHER_UNITS.search(argument.arg) and f"{name}.{argument.arg}" not in GIVEN:
                    wrong.append(f"{place}:{function.lineno}: {name}({argument.arg})")
        for node in ast.walk(module.tree):
            field = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
            if OTHER_UNITS.search(field) and field not in GIVEN:
                wrong.append(f"{place}:{node.lineno}: {field}")
    assert not wrong, "\n".join(wrong)
