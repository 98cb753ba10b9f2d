"""keepstep keeps the state of a training run: saved whole, brought back exactly, on any number of ranks.

``save``, ``load`` and ``open`` are for people who own their loop; ``TrainState`` and ``Checkpointer`` do it for them.
Names are imported when they are first used, so that the parts that need no torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpointer import (
        Checkpointer,
        Every,
        LoadReport,
        Pending,
        Preempt,
        Saved,
        async_save,
        load,
        open,
        save,
    )
    from keepstep.checkpointer.opened import Checkpoint
    from keepstep.commit.retention import Keep
    from keepstep.errors import Preempted
    from keepstep.format.manifest import VERSION as __version__
    from keepstep.format.registry import register
    from keepstep.state import Coordinates, FlatPiece, TrainState, flat, flat_pieces, per_rank, sharded
    from keepstep.storage.local import LocalStorage
    from keepstep.storage.memory import MemoryStorage
    from keepstep.storage.remote import RemoteStorage

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Coordinates",
    "Every",
    "FlatPiece",
    "Keep",
    "LoadReport",
    "LocalStorage",
    "MemoryStorage",
    "Pending",
    "Preempt",
    "Preempted",
    "RemoteStorage",
    "Saved",
    "TrainState",
    "__version__",
    "async_save",
    "data",
    "errors",
    "flat",
    "flat_pieces",
    "load",
    "open",
    "per_rank",
    "register",
    "save",
    "sharded",
]

_HOMES = {
    "Checkpoint": "keepstep.checkpointer.opened",
    "Checkpointer": "keepstep.checkpointer",
    "Coordinates": "keepstep.state",
    "Every": "keepstep.checkpointer",
    "FlatPiece": "keepstep.state",
    "Keep": "keepstep.commit.retention",
    "LoadReport": "keepstep.checkpointer",
    "LocalStorage": "keepstep.storage.local",
    "MemoryStorage": "keepstep.storage.memory",
    "Pending": "keepstep.checkpointer",
    "Preempt": "keepstep.checkpointer",
    "Preempted": "keepstep.errors",
    "RemoteStorage": "keepstep.storage.remote",
    "Saved": "keepstep.checkpointer",
    "TrainState": "keepstep.state",
    "__version__": "keepstep.format.manifest",
    "async_save": "keepstep.checkpointer",
    "flat": "keepstep.state",
    "flat_pieces": "keepstep.state",
    "load": "keepstep.checkpointer",
    "open": "keepstep.checkpointer",
    "per_rank": "keepstep.state",
    "register": "keepstep.format.registry",
    "save": "keepstep.checkpointer",
    "sharded": "keepstep.state",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name in ("data", "errors"):
        return import_module(f"keepstep.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    return getattr(import_module(home), "VERSION" if name == "__version__" else name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
