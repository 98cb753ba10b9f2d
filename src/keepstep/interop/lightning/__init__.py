"""Lightning: the Checkpointer as a callback, keepstep's files under Lightning's own checkpoints, and Fabric."""

from keepstep.interop.lightning.callback import StepCallback
from keepstep.interop.lightning.fabric import fabric_state
from keepstep.interop.lightning.plugin import StepIO

__all__ = ["StepCallback", "StepIO", "fabric_state"]
