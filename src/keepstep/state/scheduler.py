"""What is particular about learning rate schedulers: which of their state is code, and which groups they were made for."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from keepstep.format.objects import join

__all__ = ["other_groups", "own_state"]


def own_state(value: Any) -> Any:
    """The ``state_dict()`` of an object; of a scheduler without functions of torch's own, as ``SWALR`` has one in it.

    That is a choice made where the scheduler is made, as the rules of a ``LambdaLR`` are: the target has its own.
    """
    state = value.state_dict()
    return _without_rules(state) if isinstance(value, LRScheduler) else state


def _without_rules(node: Any) -> Any:
    if type(node) is list:
        return [_without_rules(item) for item in node]
    if type(node) is not dict:
        return node
    return {key: _without_rules(item) for key, item in node.items() if not _is_rule(item)}


def _is_rule(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__.startswith("torch.optim.")


def other_groups(scheduler: Any, tree: Any, path: str) -> Iterator[str]:
    """Where a scheduler was for another number of parameter groups: it takes any, and fails at a later step. Else nothing.

    Args:
        scheduler: what is to be filled.
        tree: what was saved of it.
        path: its key.
    """
    if not isinstance(scheduler, LRScheduler) or not isinstance(tree, dict):
        return
    for name in ("base_lrs", "min_lrs"):
        here, saved = getattr(scheduler, name, None), tree.get(name)
        if isinstance(here, list) and isinstance(saved, list) and len(here) != len(saved):
            text = f"saved for {len(saved)} parameter groups, the optimizer has {len(here)}"
            yield f"{join(path, name)}: {text} (override= sets {len(here)} values)"
    inner, nodes = getattr(scheduler, "_schedulers", ()), tree.get("_schedulers")
    if isinstance(nodes, list | tuple) and len(nodes) == len(inner):
        for index, (child, node) in enumerate(zip(inner, nodes, strict=True)):
            yield from other_groups(child, node, join(join(path, "_schedulers"), index))
