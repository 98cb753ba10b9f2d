"""torchtitan: its Trainer goes on where it was, to the last bit; its configuration names ``Checkpointer``."""

from keepstep.interop.torchtitan.keeper import Checkpointer

__all__ = ["Checkpointer"]
