"""Who may import whom: only downwards, never across a floor, never in a circle; and what must stay free of torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict

import pytest

from tests.architecture.source import HEIGHT, ROOT, Module, functions, imports, modules, room_of

TORCH_FREE = (
    "keepstep",
    "keepstep.agent.server",
    "keepstep.check.trace",
    "keepstep.commit",
    "keepstep.drill.story",
    "keepstep.errors",
    "keepstep.failpoints",
    "keepstep.format",
    "keepstep.move.writer",
    "keepstep.plan",
    "keepstep.storage",
    "keepstep.timeline",
)
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "gather", "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
# These pickle what they carry.
OBJECT_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip


def test_every_module_is_in_a_known_room():
    strangers = [str(m.path.relative_to(ROOT)) for m in modules() if m.room not in HEIGHT and m.name != "keepstep"]
    assert not strangers, f"give these rooms a floor in tests/architecture/source.py: {strangers}"


def test_imports_go_down_only():
    wrong = []
    for module in modules():
        if module.name == "keepstep":
            continue  # the package names the public things of all floors, lazily
        for found in imports(module):
            if found.target.split(".")[0] != "keepstep" or found.target == "keepstep.__version__":
                continue
            room = room_of(found.target)
            if room == module.room:
                continue
            # A public name imported from the package itself stands for the top of what it names.
            height = HEIGHT.get(room, HEIGHT["checkpointer"])
            if height >= HEIGHT[module.room]:
                wrong.append(str(found))
    assert not wrong, "imports that go up or across:\n" + "\n".join(wrong)


def test_no_module_is_part_of_a_circle():
    by_name = {module.name: module for module in modules()}
    edges = {name: {t for i in imports(m) if (t := _module_behind(i.target, by_name))} for name, m in by_name.items()}
    edges["keepstep"] = set()  # lazy
    # Inside a room, a package that gathers its modules' names is named by them without a circle at run time.
    circle = _circle({name: targets - {name, name.rpartition(".")[0]} for name, targets in edges.items()})
    assert not circle, "a circle of imports: " + " -> ".join(circle)


def _module_behind(target: str, by_name: dict[str, Module]) -> str | None:
    return target if target in by_name else (parent if (parent := target.rpartition(".")[0]) in by_name else None)


def _circle(edges: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def follow(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if found := follow(target, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := follow(name, []))), [])


def test_what_the_agent_needs_imports_no_torch():
    known = {module.name for module in modules()}
    names = [name for name in TORCH_FREE if name in known]
    assert names
    script = (
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = 'torch' in sys.modules\n"
        "print(json.dumps(found))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    guilty = [name for name, with_torch in json.loads(ran.stdout).items() if with_torch]
    assert not guilty, f"torch is imported by {guilty[0]}"


def test_nothing_pickles():
    wrong = [
        str(found)
        for module in modules()
        if module.room not in ("interop", "foreign")
        for found in imports(module)
        if found.target.split(".")[0] in PICKLERS
    ]
    assert not wrong, "\n".join(wrong)


def test_only_ranks_talks_and_never_in_pickles():
    wrong = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
                place = f"{module.path.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}"
                if node.attr in OBJECT_COLLECTIVES or (node.attr in COLLECTIVES and module.room != "ranks"):
                    wrong.append(place)
        for found in imports(module):
            owner, _, name = found.target.rpartition(".")
            if owner.startswith("torch.distributed") and (
                name in OBJECT_COLLECTIVES or (name in COLLECTIVES and module.room != "ranks")
            ):
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


# A variable that is read elsewhere, and why.
ENVIRONMENT = {
    "keepstep.check.trace": "drill_orders: how a drill reaches a script whose arguments are its own",
}


def test_the_environment_is_read_by_the_command_line_only():
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno}"
        for module in modules()
        if module.room != "cli" and module.name not in ENVIRONMENT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert not wrong, f"os.environ outside cli: {wrong}"


def test_what_may_read_the_environment_reads_one_variable_in_one_place():
    places = [
        f"{module.name}: {ast.unparse(node)}"
        for module in modules()
        if module.name in ENVIRONMENT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and "os.environ" in ast.unparse(node.func)
    ]
    assert places == ["keepstep.check.trace: os.environ.get(DRILL_VARIABLE)"]


# Fields of records that may be anything, and why.
ANYTHING = {
    "ObjectNode.tree": "a plain value, already in its tagged JSON form",
}


def test_records_hold_no_any():
    """Frozen records that pass between rooms say what is in them. Live user objects exist in ``state`` and above only."""
    wrong = []
    for module in modules():
        if module.room not in {"format", "plan", "move", "commit", "storage", "check"}:
            continue
        for record in ast.walk(module.tree):
            if not isinstance(record, ast.ClassDef) or not _is_record(record):
                continue
            for field in record.body:
                if isinstance(field, ast.AnnAssign) and "Any" in ast.unparse(field.annotation):
                    name = f"{record.name}.{ast.unparse(field.target)}"
                    if name not in ANYTHING:
                        wrong.append(f"{module.path.relative_to(ROOT)}:{field.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def _is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        "Struct" in ast.unparse(base) for base in node.bases
    )


def test_no_global_is_rebound():
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno} {name}"
        for module in modules()
        for name, function in functions(module)
        for node in ast.walk(function)
        if isinstance(node, ast.Global)
    ]
    assert not wrong, f"state in a module: {wrong}"


# --- the rules themselves, on sources that break them ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "targets"),
    [
        ("keepstep.a.b", "from ..format import box", ["keepstep.format.box"]),
        ("keepstep.a.b", "from . import c\nfrom .c import d", ["keepstep.a.c", "keepstep.a.c.d"]),
        ("keepstep.a", "def f():\n    import keepstep.cli.main", ["keepstep.cli.main"]),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path, name, source, targets):
    module = Module(tmp_path / "b.py", name, ast.parse(source), 1)
    assert [found.target for found in imports(module)] == targets


def test_circles_are_found():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert _circle(defaultdict(set, a={"b", "c"}, b={"c"})) == []
