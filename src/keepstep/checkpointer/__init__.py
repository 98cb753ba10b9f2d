"""The story: restore, step, save, close. Names the rooms in order; decides nothing that belongs into one of them."""

from keepstep.checkpointer.load import LoadReport, load
from keepstep.checkpointer.loop import Checkpointer, Every
from keepstep.checkpointer.opened import open  # noqa: A004  ks.open reads like the builtin on purpose
from keepstep.checkpointer.save import Saved, save

__all__ = ["Checkpointer", "Every", "LoadReport", "Saved", "load", "open", "save"]
