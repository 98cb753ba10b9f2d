"""DeepSpeed: the state of an engine under the names of its parameters, and a Checkpointer around it."""

from keepstep.interop.deepspeed.keeper import Checkpointer, engine_state

__all__ = ["Checkpointer", "engine_state"]
