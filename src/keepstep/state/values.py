"""Saved trees as values: references replaced by the tensors that were read for them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from keepstep.errors import CorruptError
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, join
from keepstep.state.marks import Flat, Sharded
from keepstep.state.rng import GENERATOR, is_generator, new_generator
from keepstep.state.shard import torch_dtype

__all__ = ["ABSENT", "Slot", "assign", "child", "is_live", "materialise", "objects_in", "references"]

ABSENT = object()
"""Stands for "the target has nothing here"."""


@dataclass(slots=True)
class Slot:
    """The place of one rank's own value in a tree, until it is known whose value belongs there.

    ``fresh`` says that it is part of an object's state, to be made anew, and not a part of the target to be filled in place.
    """

    ref: RankRef
    target: Any
    path: str
    component: str
    fresh: bool = False
    value: Any = ABSENT


def materialise(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with tensors for references and torch's own values for their texts."""
    kind = type(tree)
    if kind is TensorRef:
        value = values[tree.key]
        return value.numpy() if tree.form == "array" else value
    if kind is Slot:
        return materialise(tree.value, values)
    if kind in (dict, OrderedDict, defaultdict):
        items = ((key, materialise(item, values)) for key, item in tree.items() if not _is_empty(item))
        return defaultdict(tree.default_factory, dict(items)) if kind is defaultdict else cast(Any, kind)(items)
    if kind in (list, tuple, deque):
        walked = [materialise(item, values) for item in tree if not _is_empty(item)]
        return deque(walked, tree.maxlen) if kind is deque else kind(walked)
    if kind is TorchValue:
        try:
            if tree.kind == "size":
                return torch.Size(int(part) for part in tree.text.split(",") if part)
            return torch.device(tree.text) if tree.kind == "device" else torch_dtype(tree.text)
        except (ValueError, RuntimeError) as err:
            raise CorruptError(f"{tree.text!r} is no torch.{tree.kind}: {err}") from err
    if kind is ObjectNode:
        return materialise(tree.tree, values) if tree.kind != GENERATOR else _generator(tree.tree)
    return tree


def _is_empty(item: Any) -> bool:
    """Whether neither the checkpoint nor the target has a value for this place."""
    return type(item) is Slot and item.value is ABSENT


def _generator(state: Any) -> Any:
    """A generator that stands where the saved one did; its state, where none can be made: of a device that is not here."""
    try:
        return new_generator(state)
    except (LookupError, ValueError, TypeError, OverflowError, RuntimeError):
        return state


def child(target: Any, key: Any) -> Any:
    """What the target has under a key or index, or ABSENT."""
    if isinstance(target, Mapping):
        return target.get(key, ABSENT)
    if isinstance(target, list | tuple | deque) and isinstance(key, int) and key < len(target):
        return target[key]
    return ABSENT


def is_live(tree: Any) -> bool:
    """Whether a saved tree has anything that looks at the target: tensors, generators, values of one rank."""
    return any(True for _ in references(tree))


def references(tree: Any) -> Iterator[Any]:
    """Every tensor, generator and value of one rank that a saved tree refers to, in order."""
    if type(tree) in (TensorRef, RankRef) or (type(tree) is ObjectNode and tree.kind == GENERATOR):
        yield tree
    elif type(tree) is ObjectNode:
        yield from references(tree.tree)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from references(item)
    elif isinstance(tree, list | tuple | deque):
        for item in tree:
            yield from references(item)


def objects_in(target: Any, path: str) -> list[tuple[str, str]]:
    """Keys and types of the tensors, modules, optimizers and generators in a live value; plain values do not count."""
    if isinstance(target, torch.Tensor | Sharded | torch.nn.Module | torch.optim.Optimizer) or is_generator(target):
        return [(path, type(target).__name__)]
    items: Any = ()
    if type(target) in (dict, OrderedDict, defaultdict, Flat):
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
