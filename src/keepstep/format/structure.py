"""The structure of a state: which tensors, of which type and layout, without their contents.

Ranks whose structure has the same fingerprint need not talk about it again.
"""

from __future__ import annotations

import math

import msgspec

from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Layout, Mesh
from keepstep.format.shardfile import digest

__all__ = ["Structure", "TensorSpec", "fingerprint"]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: key, dtype name, index of its layout, and the folder (component) its bytes go to.

    ``rule`` is ``same`` when ranks that hold the same part must hold the same bytes, ``first`` when the first of them is
    the truth (buffers that DistributedDataParallel broadcasts before every forward).
    """

    key: str
    dtype: str
    layout: int
    folder: str
    rule: str = "same"


class Structure(msgspec.Struct, frozen=True):
    """All tensors of a state as one rank sees them, with the meshes and layouts they share."""

    meshes: tuple[Mesh, ...]
    layouts: tuple[Layout, ...]
    tensors: tuple[TensorSpec, ...]

    def tensor_bytes(self, spec: TensorSpec) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.layouts[spec.layout].shape) * ITEM_BYTES[spec.dtype]


def fingerprint(structure: Structure) -> str:
    """16 hex digits that change whenever keys, order, shapes, dtypes, meshes, placements or folders change."""
    return f"{digest(msgspec.json.encode(structure)):016x}"
