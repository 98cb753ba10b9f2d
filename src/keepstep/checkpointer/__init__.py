"""The story: restore, step, save, close. Names the rooms in order; decides nothing that belongs into one of them."""

from keepstep.checkpointer.alone import async_save
from keepstep.checkpointer.every import Every
from keepstep.checkpointer.loading import LoadReport, load
from keepstep.checkpointer.loop import Checkpointer
from keepstep.checkpointer.opened import open
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.preemption import Preempt
from keepstep.checkpointer.saving import Saved, save

__all__ = [
    "Checkpointer",
    "Every",
    "LoadReport",
    "Pending",
    "Preempt",
    "Saved",
    "async_save",
    "load",
    "open",
    "save",
]
