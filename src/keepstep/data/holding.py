"""Items that wait in a buffer, as state: a few large tensors in the place of thousands of small ones.

Thousands of tensors would each need a file descriptor on their way out of a worker, and an entry in the shard file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["joined", "parted"]

_Tagged = list[Any]


def joined(items: Sequence[Any]) -> dict[str, Any]:
    """The items with every tensor taken out of dicts, lists and tuples: ``tensors`` holds one for each dtype, flat."""
    parts: dict[str, list[torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    tagged = [_take_apart(item, parts, sizes) for item in items]
    return {"items": tagged, "tensors": {dtype: torch.cat(flat) for dtype, flat in parts.items()}}


def parted(state: dict[str, Any]) -> list[Any]:
    """The items again, each with tensors of its own."""
    return [_put_together(tagged, state["tensors"]) for tagged in state["items"]]


def _take_apart(item: Any, parts: dict[str, list[torch.Tensor]], sizes: dict[str, int]) -> _Tagged:
    kind = type(item)
    if kind is torch.Tensor and item.is_cpu and item.layout is torch.strided and not item.requires_grad:
        dtype = str(item.dtype)
        offset = sizes.get(dtype, 0)
        parts.setdefault(dtype, []).append(item.reshape(-1))
        sizes[dtype] = offset + item.numel()
        return ["tensor", dtype, offset, *item.shape]
    if kind is dict:
        return ["dict", *([key, _take_apart(value, parts, sizes)] for key, value in item.items())]
    if kind in (list, tuple):
        return [kind.__name__, *(_take_apart(value, parts, sizes) for value in item)]
    return ["value", item]


def _put_together(tagged: _Tagged, tensors: dict[str, torch.Tensor]) -> Any:
    kind, *rest = tagged
    if kind == "tensor":
        dtype, offset, *shape = rest
        # Not a view: one item that stays would keep the memory of all of them.
        return tensors[dtype][offset : offset + math.prod(shape)].clone().reshape(shape)
    if kind == "dict":
        return {key: _put_together(value, tensors) for key, value in rest}
    if kind == "value":
        return rest[0]
    made = [_put_together(value, tensors) for value in rest]
    return tuple(made) if kind == "tuple" else made
