"""torch.distributed.checkpoint: its directories as steps, and keepstep under its own calls.

``Writer``, ``Reader`` and ``Stager`` go where torch's take a storage writer, a storage reader and a stager:

    dcp.save(state, storage_writer=Writer("runs/step-00000100"))
    dcp.load(state, storage_reader=Reader("runs/step-00000100"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.interop.dcp.reader import Reader
    from keepstep.interop.dcp.stager import Stager
    from keepstep.interop.dcp.writer import Writer

__all__ = ["Reader", "Stager", "Writer"]


def __getattr__(name: str) -> Any:
    """Imports a name on first use: whoever reads a directory needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'keepstep.interop.dcp' has no attribute {name!r}")
    return getattr(import_module(f"keepstep.interop.dcp.{name.lower()}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
