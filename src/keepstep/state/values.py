"""Saved trees as values: references replaced by the tensors that were read for them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, cast

import torch

from keepstep.errors import CorruptError
from keepstep.format.objects import ObjectNode, TensorRef, TorchValue, join
from keepstep.state.marks import Sharded
from keepstep.state.shard import torch_dtype

__all__ = ["ABSENT", "assign", "child", "has_tensors", "materialise", "objects_in"]

ABSENT = object()
"""Stands for "the target has nothing here"."""


def materialise(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with tensors for references and torch's own values for their texts."""
    kind = type(tree)
    if kind is TensorRef:
        value = values[tree.key]
        return value.numpy() if tree.form == "array" else value
    if kind in (dict, OrderedDict, defaultdict):
        items = ((key, materialise(item, values)) for key, item in tree.items())
        return defaultdict(tree.default_factory, dict(items)) if kind is defaultdict else cast(Any, kind)(items)
    if kind in (list, tuple, deque):
        walked = [materialise(item, values) for item in tree]
        return deque(walked, tree.maxlen) if kind is deque else kind(walked)
    if kind is TorchValue:
        try:
            if tree.kind == "size":
                return torch.Size(int(part) for part in tree.text.split(",") if part)
            return torch.device(tree.text) if tree.kind == "device" else torch_dtype(tree.text)
        except (ValueError, RuntimeError) as err:
            raise CorruptError(f"{tree.text!r} is no torch.{tree.kind}: {err}") from err
    if kind is ObjectNode:
        return materialise(tree.tree, values)
    return tree


def child(target: Any, key: Any) -> Any:
    """What the target has under a key or index, or ABSENT."""
    if isinstance(target, Mapping):
        return target.get(key, ABSENT)
    if isinstance(target, list | tuple) and isinstance(key, int) and key < len(target):
        return target[key]
    return ABSENT


def has_tensors(tree: Any) -> bool:
    """Whether a saved tree refers to any tensor."""
    if type(tree) is TensorRef:
        return True
    if isinstance(tree, Mapping):
        return any(has_tensors(item) for item in tree.values())
    return isinstance(tree, list | tuple | deque) and any(has_tensors(item) for item in tree)


def objects_in(target: Any, path: str) -> list[tuple[str, str]]:
    """Keys and types of the tensors, modules and optimizers in a live value; plain values do not count."""
    if isinstance(target, torch.Tensor | Sharded | torch.nn.Module | torch.optim.Optimizer):
        return [(path, type(target).__name__)]
    items: Any = ()
    if type(target) in (dict, OrderedDict, defaultdict):
        items = target.items()
    elif type(target) in (list, tuple, deque):
        items = enumerate(target)
    return [found for key, item in items for found in objects_in(item, join(path, key))]


def assign(state: Any, name: str, value: Any) -> None:
    """Puts a value in the place of a top-level component: of a TrainState, or of a dict."""
    if hasattr(state, "replace_value"):
        state.replace_value(name, value)
    else:
        state[name] = value
