"""Fabric: the objects behind its wrappers as a state."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer

from keepstep.interop.positions import data_place
from keepstep.state import TrainState

__all__ = ["fabric_state"]


def fabric_state(fabric: Fabric, **components: Any) -> TrainState:
    """A TrainState of what ``fabric.setup`` and ``setup_dataloaders`` returned, and of anything else.

    Wrappers are taken off, so that keys and the step hooks are those of the objects inside; the gradient scaler of 16-bit
    precision is added. Call it after ``fabric.launch()`` and ``fabric.setup(...)``, on every rank.

    Raises:
        UsageError: a loader that does not know where it stands; names that mean something else.
    """
    scaler = getattr(fabric._precision, "scaler", None)
    if scaler is not None:
        components.setdefault("scaler", scaler)
    return TrainState(**{name: _inside(value) for name, value in components.items()})


def _inside(value: Any) -> Any:
    if isinstance(value, _FabricModule):
        return value._forward_module
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    if isinstance(value, _FabricDataLoader):
        return data_place(value._dataloader).component
    return value
