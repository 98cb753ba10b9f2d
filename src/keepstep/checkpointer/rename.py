"""Keys under new names: what a load does before it compares a checkpoint with its target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.errors import UsageError
from keepstep.format.objects import ObjectNode, join

__all__ = ["Rename", "renamed_tree"]

Rename = Mapping[str, str] | Callable[[str], str]


def renamed_tree(tree: Mapping[str, Any], names: Rename) -> Mapping[str, Any]:
    """The tree with new names for parameters and buffers, in modules and in the optimizers that speak of them.

    Regular expressions are tried in order on the whole key; the first that matches wins.

    Raises:
        UsageError: a pattern that is not a regular expression, or two keys that get the same name.
    """
    rename = _renamer(names)
    modules = [name for name, node in tree.items() if type(node) is ObjectNode and node.kind == "module"]
    parameters = {}
    for component in modules:
        for name in tree[component].tree:
            new = _below(component, rename(join(component, name)))
            prefix = f"{component}." if len(modules) > 1 else ""
            parameters[prefix + name] = prefix + new
    made = {}
    for component, node in tree.items():
        if type(node) is ObjectNode and node.kind == "module":
            inner = {_below(component, rename(join(component, name))): value for name, value in node.tree.items()}
            if len(inner) != len(node.tree):
                raise UsageError(f"rename gives two keys of {component!r} the same name")
            made[component] = ObjectNode(node.kind, node.type_name, inner)
        elif type(node) is ObjectNode and node.kind == "optimizer" and "param_groups" in node.tree:
            state = {parameters.get(name, name): value for name, value in node.tree["state"].items()}
            groups = [
                {**group, "params": [parameters.get(name, name) for name in group["params"]]}
                for group in node.tree["param_groups"]
            ]
            made[component] = ObjectNode(
                node.kind, node.type_name, {**node.tree, "state": state, "param_groups": groups}
            )
        else:
            made[component] = node
    return made


def _renamer(rename: Rename) -> Callable[[str], str]:
    if callable(rename):
        return rename
    try:
        patterns = [(re.compile(pattern), replacement) for pattern, replacement in rename.items()]
    except re.error as err:
        raise UsageError(f"rename: {err.pattern!r} is not a regular expression: {err}") from err

    def apply(key: str) -> str:
        for pattern, replacement in patterns:
            renamed, count = pattern.subn(replacement, key)
            if count:
                return renamed
        return key

    return apply


def _below(component: str, key: str) -> str:
    head, slash, name = key.partition("/")
    if head != component or not slash:
        raise UsageError(f"rename may not move a key out of {component!r}, but gave {key!r}")
    return name
