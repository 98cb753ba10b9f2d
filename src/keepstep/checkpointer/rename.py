"""Keys under new names: what a load does before it compares a checkpoint with its target."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.errors import UsageError
from keepstep.format.objects import ObjectNode, TensorRef, join

__all__ = ["Rename", "renamed_tree"]

Rename = Mapping[str, str] | Callable[[str], str]


def renamed_tree(tree: Mapping[str, Any], names: Rename) -> Mapping[str, Any]:
    """The tree with new names for parameters and buffers, in modules and in the optimizers that speak of them.

    Regular expressions are tried in order on the whole key; the first that matches wins.

    Raises:
        UsageError: a pattern that is not a regular expression, or two keys that get the same name.
    """
    rename = _renamer(names)
    modules = [name for name, node in tree.items() if _is_module(node)]
    parameters = {}
    for component in modules:
        for name in _inside(tree[component]):
            new = _below(component, rename(join(component, name)))
            prefix = f"{component}." if len(modules) > 1 else ""
            parameters[prefix + name] = prefix + new
    made = {}
    for component, node in tree.items():
        here = _inside(node)
        if component in modules:
            inner = {_below(component, rename(join(component, name))): value for name, value in here.items()}
            if len(inner) != len(here):
                raise UsageError(f"rename gives two keys of {component!r} the same name")
            made[component] = _with(node, inner)
        elif _is_optimizer(node):
            state = {parameters.get(name, name): value for name, value in here["state"].items()}
            groups = [
                {**group, "params": [parameters.get(name, name) for name in group["params"]]}
                for group in here["param_groups"]
            ]
            made[component] = _with(node, {**here, "state": state, "param_groups": groups})
        else:
            made[component] = node
    return made


def _inside(node: Any) -> Any:
    return node.tree if type(node) is ObjectNode else node


def _with(node: Any, inner: dict[str, Any]) -> Any:
    return ObjectNode(node.kind, node.type_name, inner) if type(node) is ObjectNode else type(node)(inner)


def _is_module(node: Any) -> bool:
    """A module, or what the state_dict of one is: tensors by name. Another program keeps no more of it."""
    if type(node) is ObjectNode:
        return node.kind == "module"
    return (
        type(node) in (dict, OrderedDict)
        and all(type(name) is str for name in node)
        and any(type(value) is TensorRef for value in node.values())
    )


def _is_optimizer(node: Any) -> bool:
    if type(node) is ObjectNode and node.kind != "optimizer":
        return False
    inner = _inside(node)
    return type(inner) is dict and type(inner.get("state")) is dict and type(inner.get("param_groups")) is list


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
