"""What users can reach: all of it documented, listed, sorted, and loaded only when asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

from tests.architecture.source import HEIGHT, ROOT, Module, imports, modules

PROMISED = {
    "Checkpoint", "Checkpointer", "Every", "Keep", "LoadReport", "Saved", "TrainState",
    "load", "open", "per_rank", "register", "save", "sharded",
}  # fmt: skip


def listed(module: Module) -> list[str] | None:
    """The module's ``__all__``, or None where it has none."""
    for node in module.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and node.value is not None:
            return list(ast.literal_eval(node.value))
    return None


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then the rest: the order ruff keeps ``__all__`` in."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


WITH_ALL = [module for module in modules() if listed(module) is not None]
# They import the trainer of their name, which takes seconds.
HEAVY = ("keepstep.interop.lightning",)
# They import what is not in the environment of developers.
APART = ("keepstep.interop.torchtitan",)


@pytest.mark.parametrize("module", WITH_ALL, ids=lambda module: module.name)
def test_all_is_sorted_without_doubles(module):
    names = listed(module)
    assert names == sorted(set(names), key=sort_key)


@pytest.mark.parametrize(
    "module",
    [pytest.param(one, marks=pytest.mark.slow) if one.name.startswith(HEAVY) else one for one in WITH_ALL],
    ids=lambda module: module.name,
)
def test_all_names_what_exists(module):
    if module.name.startswith(APART):
        pytest.importorskip("torchtitan", reason="make soak has torchtitan in an environment of its own")
    loaded = importlib.import_module(module.name)
    assert not {name for name in listed(module) if not hasattr(loaded, name)}


def test_all_is_complete():
    """What another room takes from a module is in its ``__all__``; what starts with an underscore stays in its module."""
    by_name = {module.name: module for module in modules()}
    wrong = []
    for module in modules():
        for found in imports(module):
            home, _, name = found.target.rpartition(".")
            if home not in by_name or found.target in by_name or home == "keepstep":
                continue
            outside = by_name[home].room != module.room and listed(by_name[home]) is not None
            if name.startswith("_") or (outside and name not in listed(by_name[home])):
                wrong.append(str(found))
    assert not wrong, "taken, but not offered:\n" + "\n".join(wrong)


def test_what_was_promised_is_there():
    import keepstep

    assert set(keepstep.__all__) >= PROMISED


def test_every_public_name_resolves_and_is_documented():
    import keepstep

    undocumented = []
    for name in keepstep.__all__:
        value = getattr(keepstep, name)
        if name.startswith("__") or inspect.ismodule(value):
            continue
        if not inspect.getdoc(value):
            undocumented.append(name)
        if inspect.isclass(value):
            undocumented += [
                f"{name}.{part}"
                for part, member in vars(value).items()
                if not part.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod)))
                and not inspect.getdoc(member)
            ]
    assert not undocumented


def test_type_checkers_see_the_same_names():
    """A lazy package tells type checkers its names under TYPE_CHECKING; both lists must agree."""
    (package,) = [module for module in modules() if module.name == "keepstep"]
    seen = set()
    for node in package.tree.body:
        for part in ast.walk(node) if isinstance(node, ast.If) else [node]:
            if isinstance(part, ast.ImportFrom) and part.module != "__future__":
                seen |= {alias.asname or alias.name for alias in part.names}
    public = {name for name in listed(package) or () if not name.startswith("__") and name not in HEIGHT}
    assert public <= seen | {
        node.name for node in package.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def test_the_package_is_lazy_and_lists_its_names():
    script = (
        "import sys, keepstep\n"
        "assert 'torch' not in sys.modules, 'import keepstep imports torch'\n"
        "assert set(keepstep.__all__) <= set(dir(keepstep)), set(keepstep.__all__) - set(dir(keepstep))\n"
        "try:\n"
        "    keepstep.no_such_name\n"
        "except AttributeError as error:\n"
        "    assert 'no_such_name' in str(error)\n"
        "else:\n"
        "    raise SystemExit('an unknown name must be an AttributeError')\n"
        "assert keepstep.save is keepstep.save and callable(keepstep.save)\n"
        "namespace = {}\n"
        "exec('from keepstep import *', namespace)\n"
        "assert set(keepstep.__all__) <= set(namespace)\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_package_is_typed():
    assert (ROOT / "src/keepstep/py.typed").is_file()
