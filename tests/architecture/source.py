"""The source tree as the architecture tests see it: modules, their floors, and what they import. By AST only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "keepstep"

# Top to bottom. A room may import rooms of lower floors, and nothing of its own floor or above.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "cli",
        "report drill interop advise",
        "checkpointer",
        "copies check data foreign",
        "agent",
        "move commit",
        "state plan",
        "storage ranks",
        "format timeline",
        "errors failpoints",
    )
)
HEIGHT = {room: len(FLOORS) - number for number, floor in enumerate(FLOORS) for room in floor}


@dataclass(frozen=True)
class Module:
    """One file. ``room`` is the first name below keepstep; empty for the package's own ``__init__``."""

    path: Path
    name: str
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """``importer`` names ``target`` (a full module name, perhaps with an attribute) on ``line``."""

    importer: Module
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer.path.relative_to(ROOT)}:{self.line} imports {self.target}"


def room_of(name: str) -> str:
    """The room a dotted name below keepstep belongs to; an attribute of the package itself belongs to ``""``."""
    parts = name.split(".")
    if parts[0] != "keepstep" or len(parts) == 1:
        return ""
    return parts[1] if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file() else ""


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, in the order of their names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("keepstep", *path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(path, name, ast.parse(text, str(path)), len(text.splitlines())))
    return tuple(found)


def imports(module: Module) -> Iterator[Import]:
    """Every import anywhere in the module: inside functions, and for type checkers only, as well."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", node.lineno)


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, methods and nested ones included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + child.name, child
            inner = f"{prefix}{child.name}." if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix
            yield from walk(child, inner)

    yield from walk(module.tree, "")
