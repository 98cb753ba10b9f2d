"""How much memory a save of a state will need, before the first one: so that the arena is there in time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from keepstep.state.files import Files
from keepstep.state.marks import Sharded
from keepstep.state.shard import is_dtensor

__all__ = ["SLACK_BYTES", "guessed_bytes"]

SLACK_BYTES = 1 << 20


def guessed_bytes(state: Mapping[str, Any], world: int) -> int:
    """About how many bytes this rank will write. An optimizer that has not stepped yet counts as if it had.

    What every rank holds alike is written once, so it is counted by its share.
    """
    seen: set[int] = set()
    total = sum(_bytes_of(value, seen, world) for value in state.values())
    return int(total) + SLACK_BYTES


def _bytes_of(value: Any, seen: set[int], world: int) -> float:
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return 0.0
        seen.add(id(value))
        return _tensor_bytes(value, world)
    if isinstance(value, Sharded):
        return float(sum(local.nbytes for local in value.locals))
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return sum(_bytes_of(tensor, seen, world) for tensor in tensors)
    if isinstance(value, torch.optim.Optimizer):
        if value.state:
            return _bytes_of(value.state, seen, world)
        copies = 2 if "betas" in value.defaults else 1 if value.defaults.get("momentum") else 0
        return copies * sum(_tensor_bytes(p, world) for group in value.param_groups for p in group["params"])
    if isinstance(value, Files):
        return value.size_bytes / world
    if isinstance(value, Mapping):
        return sum(_bytes_of(item, seen, world) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(item, seen, world) for item in value)
    return 0.0


def _tensor_bytes(tensor: torch.Tensor, world: int) -> float:
    if is_lazy(tensor):
        # Without a shape until its module runs.
        return 0.0
    if not is_dtensor(tensor):
        return math.prod(tensor.shape) * tensor.element_size() / world
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    copies = math.prod(int(size) for size, where in zip(mesh.shape, placements, strict=True) if where.is_replicate())
    local = tensor.to_local() if not tensor.requires_grad else tensor.detach().to_local()  # type: ignore[attr-defined]
    return float(local.nbytes) / float(copies)
