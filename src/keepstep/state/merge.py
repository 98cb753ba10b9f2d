"""One tree of plain values from those of ranks that differ: parts of a model are joined, the rest must agree."""

from __future__ import annotations

from typing import Any

from keepstep.errors import MismatchError
from keepstep.format.objects import ObjectNode, TensorRef, join
from keepstep.state.rng import GENERATOR

__all__ = ["merge_trees"]

Ranked = list[tuple[tuple[int, ...], Any]]


def merge_trees(trees: Ranked) -> Any:
    """Joins the trees of several groups of ranks, each given with its ranks.

    Modules and optimizers may hold other parameters on other ranks (pipeline stages): their keys are joined, and param
    groups are kept apart by the parameters they hold. Everything else must be the same on all ranks that have it.

    Raises:
        MismatchError: lists every key whose value differs and is not declared per rank.
    """
    problems: list[str] = []
    merged = _merge(trees, "", problems, inside=False)
    if problems:
        raise MismatchError(
            "nothing was written: values differ between ranks; mark them with ks.per_rank if each rank has its own:",
            problems,
        )
    return merged


def _merge(trees: Ranked, path: str, problems: list[str], *, inside: bool) -> Any:
    ranks, first = trees[0]
    if all(_same(first, other) for _, other in trees[1:]):
        return first
    if all(type(tree) is ObjectNode for _, tree in trees):
        kinds = {tree.kind for _, tree in trees}
        if GENERATOR in kinds:
            # Its state is one thing: which of its many numbers differ tells nobody anything.
            others = ", ".join(str(group[0]) for group, tree in trees[1:] if not _same(first, tree))
            problems.append(f"{path}: the generator of rank {ranks[0]} is not where that of rank {others} is")
            return first
        joinable = kinds == {"module"} or kinds == {"optimizer"}
        inner = [(group, tree.tree) for group, tree in trees]
        merged = _merge_optimizers(inner, path, problems) if kinds == {"optimizer"} else None
        tree = merged if merged is not None else _merge(inner, path, problems, inside=joinable)
        return ObjectNode(first.kind, first.type_name, tree)
    if all(type(tree) is type(first) is dict for _, tree in trees):
        return _merge_dicts(trees, path, problems, inside=inside)
    if all(type(tree) is list and len(tree) == len(first) for _, tree in trees):
        return [
            _merge([(group, tree[i]) for group, tree in trees], join(path, i), problems, inside=inside)
            for i in range(len(first))
        ]
    if all(type(tree) is TensorRef for _, tree in trees):
        # Shapes and dtypes are compared where structures are; the device may differ.
        return first
    other_ranks, other = next((group, tree) for group, tree in trees[1:] if not _same(first, tree))
    problems.append(f"{path}: rank {ranks[0]} has {_short(first)}, rank {other_ranks[0]} has {_short(other)}")
    return first


def _merge_dicts(trees: Ranked, path: str, problems: list[str], *, inside: bool) -> dict[Any, Any]:
    """Joined by key; outside of modules and optimizers, and above the components, every rank must have every key."""
    keys = list(dict.fromkeys(key for _, tree in trees for key in tree))
    merged = {}
    for key in keys:
        having = [(group, tree[key]) for group, tree in trees if key in tree]
        below = join(path, key)
        lacking = [group[0] for group, tree in trees if key not in tree]
        if lacking and not inside and not (path == "" and _joinable(having)) and not _only_tensors(having):
            problems.append(
                f"{below}: rank {having[0][0][0]} has {_short(having[0][1])}, rank {lacking[0]} has nothing"
            )
        merged[key] = _merge(having, below, problems, inside=inside)
    return merged


def _merge_optimizers(trees: Ranked, path: str, problems: list[str]) -> dict[Any, Any] | None:
    """Param groups of all ranks, each once; a parameter in two groups must have the same fields in both."""
    if not all(isinstance(tree, dict) and "param_groups" in tree for _, tree in trees):
        return None
    groups: list[Any] = []
    fields: dict[str, tuple[int, dict[str, Any]]] = {}
    for ranks, tree in trees:
        for group in tree["param_groups"]:
            if any(_same(group, other) for other in groups):
                continue
            for name in group["params"]:
                rank, other = fields.setdefault(name, (ranks[0], group))
                differing = sorted(k for k in group if k != "params" and not _same(group[k], other.get(k)))
                if differing:
                    where, what = join(path, "param_groups"), ", ".join(differing)
                    problems.append(f"{where}: {name!r} has other {what} on rank {rank} than on rank {ranks[0]}")
            groups.append(group)
    rest = [(ranks, {key: value for key, value in tree.items() if key != "param_groups"}) for ranks, tree in trees]
    merged: dict[Any, Any] = _merge(rest, path, problems, inside=True)
    return {**merged, "param_groups": groups}


def _joinable(having: Ranked) -> bool:
    return all(type(tree) is ObjectNode and tree.kind in ("module", "optimizer") for _, tree in having)


def _only_tensors(having: Ranked) -> bool:
    """Whether what some ranks lack is tensors alone: those have a layout that says who holds them."""
    inside = [(ranks, item) for ranks, tree in having if type(tree) is dict for item in tree.values()]
    others = [tree for _, tree in having if type(tree) is not dict or not tree]
    return all(type(tree) is TensorRef for tree in others) and (not inside or _only_tensors(inside))


def _same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; nan is equal to nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is ObjectNode:
        return (a.kind, a.type_name) == (b.kind, b.type_name) and _same(a.tree, b.tree)
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b) or (a != a and b != b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
