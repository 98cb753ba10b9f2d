"""Keys under new names: what a load does before it compares a checkpoint with its target."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from keepstep.errors import UsageError
from keepstep.format.objects import ObjectNode, TensorRef, join

__all__ = ["Rename", "renamed_tree"]

SHOWN = 20

Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""None in the place of a new name leaves the key out of the load."""


def renamed_tree(tree: Mapping[str, Any], names: Rename) -> tuple[dict[str, Any], list[str]]:
    """The tree with new names for parameters and buffers, in modules and in the optimizers that speak of them.

    Regular expressions are tried in order on the whole key; the first that matches wins. Also the keys that got no name,
    which are not in the tree any more.

    Raises:
        UsageError: a pattern that is not a regular expression, or keys that get the same name; lists them.
    """
    rename = _renamer(names)
    modules = [name for name, node in tree.items() if _is_module(node)]
    parameters: dict[str, str | None] = {}
    made: dict[str, Any] = {}
    for component in modules:
        prefix = f"{component}." if len(modules) > 1 else ""
        inner = {name: _below(component, rename(join(component, name))) for name in _inside(tree[component])}
        parameters.update((prefix + name, None if new is None else prefix + new) for name, new in inner.items())
        taken: dict[str, list[str]] = {}
        for name, new in inner.items():
            if new is not None:
                taken.setdefault(new, []).append(name)
        twice = [f"{' and '.join(old)} become {new}" for new, old in taken.items() if len(old) > 1]
        if twice:
            raise UsageError(f"rename gives two keys of {component!r} the same name: {'; '.join(twice[:SHOWN])}")
        here = _inside(tree[component])
        made[component] = _with(tree[component], {new: here[old] for new, (old,) in taken.items()})
    for component, node in tree.items():
        if component not in made:
            made[component] = _renamed_optimizer(node, parameters) if _is_optimizer(node) else node
    gone = [
        join(component, name)
        for component in modules
        for name in _inside(tree[component])
        if parameters[f"{component}.{name}" if len(modules) > 1 else name] is None
    ]
    return {component: made[component] for component in tree}, gone


def _renamed_optimizer(node: Any, parameters: Mapping[str, str | None]) -> Any:
    here = _inside(node)

    def renamed(names: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Old and new names, without those that have no new one."""
        for name in names:
            new = parameters.get(name, name)
            if new is not None:
                yield name, new

    state = {new: here["state"][old] for old, new in renamed(here["state"])}
    groups = [{**group, "params": [new for _, new in renamed(group["params"])]} for group in here["param_groups"]]
    return _with(node, {**here, "state": state, "param_groups": groups})


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


def _renamer(rename: Rename) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    try:
        patterns = [(re.compile(pattern), replacement) for pattern, replacement in rename.items()]
    except re.error as err:
        raise UsageError(f"rename: {err.pattern!r} is not a regular expression: {err}") from err

    def apply(key: str) -> str | None:
        for pattern, replacement in patterns:
            if replacement is None:
                if pattern.search(key):
                    return None
                continue
            renamed, count = pattern.subn(replacement, key)
            if count:
                return renamed
        return key

    return apply


def _below(component: str, key: Any) -> str | None:
    if key is None:
        return None
    if not isinstance(key, str):
        raise UsageError(f"rename gives a key of {component!r} the name {key!r}: it is a text, or None to leave it out")
    head, slash, name = key.partition("/")
    if head != component or not slash:
        raise UsageError(f"rename may not move a key out of {component!r}, but gave {key!r}")
    return name
