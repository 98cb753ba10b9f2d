"""The story: restore, step, save, close. Names the rooms in order; decides nothing that belongs into one of them."""

from keepstep.checkpointer.loading import LoadReport, load
from keepstep.checkpointer.loop import Checkpointer, Every
from keepstep.checkpointer.opened import open
from keepstep.checkpointer.saving import Saved, save

__all__ = ["Checkpointer", "Every", "LoadReport", "Saved", "load", "open", "save"]
