"""``Stager``: a copy of the state that training cannot change any more, for ``dcp.async_save``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

__all__ = ["Stager"]


class Stager(AsyncStager):
    """In the place of torch's stagers. The copy is whole when ``stage`` returns, and is never used again for another save.

    Tensors go to the host, after all that was queued for them on their devices; plain values are copied too.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        """Holds nothing."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy. On the training thread."""
        return {name: _copied(value) for name, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is held."""


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is DTensor:
        local = _copied(value.to_local())
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if kind in (torch.Tensor, torch.nn.Parameter):
        # (An event on the current stream would do as well; this is the order of everything queued there.)
        return value.detach().to("cpu", copy=True)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_copied(item) for item in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _copied(item)
        return made
    return copy.deepcopy(value)
