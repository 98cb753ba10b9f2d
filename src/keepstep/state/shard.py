"""What a tensor is a part of: plain tensors, DTensors and hand-made shards as local memory plus a layout.

In: one tensor of any of these kinds. Out: the local tensors that hold its bytes on this rank, and the index of its layout
in a table that all tensors share. Nothing is copied and nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from keepstep.errors import UsageError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Cut, Layout, Mesh, parts
from keepstep.state.marks import Sharded

__all__ = ["LayoutTable", "Shard", "dtype_name", "is_dtensor", "torch_dtype", "writable"]

_DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ITEM_BYTES if isinstance(getattr(torch, name, None), torch.dtype)
}


class Shard(msgspec.Struct, frozen=True):
    """One tensor on this rank. ``locals`` holds one tensor, or one a box where the layout lists boxes."""

    locals: tuple[torch.Tensor, ...]
    layout: int
    dtype: str
    shape: tuple[int, ...]
    form: str


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of a dtype in the format, or None for one without a fixed element size."""
    return _DTYPE_NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        UsageError: this torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {name}")
    return dtype


def is_dtensor(value: object) -> bool:
    """Whether the value is a DTensor; cheap for ordinary tensors, and without importing torch.distributed.tensor."""
    return type(value).__name__ == "DTensor" and hasattr(value, "placements")


@dataclass(slots=True)
class LayoutTable:
    """Collects meshes and layouts, each once. ``world`` is the number of ranks, ``rank`` this one; mesh 0 is the world."""

    rank: int
    world: int
    meshes: list[Mesh]
    layouts: list[Layout] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _plain: dict[Any, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)
    _mesh_of: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def describe(self, tensor: Any) -> Shard:
        """The shard this rank holds.

        Raises:
            UsageError: a kind of tensor that cannot be stored: on meta, sparse, nested, quantised, with a partial
                placement, or of a dtype without a fixed element size. The message has no key; the caller adds it.
        """
        if type(tensor) is Sharded:
            dtype = check_storable(tensor.local)
            boxes = [(at, tuple(local.shape)) for at, local in zip(tensor.starts, tensor.locals, strict=True)]
            return self._listed([local.detach() for local in tensor.locals], tensor.global_shape, boxes, dtype)
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            if type(tensor).__name__ == "DTensor":
                return self._dtensor(tensor)
            if hasattr(tensor, "global_offsets") and hasattr(tensor, "local_sizes"):
                return self._checkpointable(tensor)
            if is_lazy(tensor):
                raise UsageError("a parameter of a lazy module that has no shape yet; run the module once first")
        elif tensor.__dict__ and hasattr(tensor, "global_offsets") and hasattr(tensor, "local_sizes"):
            return self._checkpointable(tensor)
        local = tensor.detach()
        # Most tensors look like one before them: what was found out about that one holds for them too.
        look = None if local.is_nested else (local.dtype, local.shape, local.device, local.layout, type(local))
        known = self._plain.get(look)
        if known is None:
            dtype, shape = check_storable(local), tuple(local.shape)
            layout = self._layout(shape, 0, _REPLICATED if self.world > 1 else ())
            known = self._plain[look] = dtype, shape, layout
        return Shard((local,), known[2], known[0], known[1], "tensor")

    def _layout(self, shape: tuple[int, ...], mesh: int, cuts: tuple[Cut, ...]) -> int:
        known = self._known.get((shape, mesh, cuts))
        if known is None:
            known = self._known[shape, mesh, cuts] = len(self.layouts)
            self.layouts.append(Layout(shape, mesh, cuts))
        return known

    def _dtensor(self, tensor: Any) -> Shard:
        with torch.no_grad():
            local = tensor.to_local()
        dtype = check_storable(local)
        shape = tuple(tensor.shape)
        mesh = self._mesh(tensor.device_mesh)
        seen = (shape, mesh, tuple(tensor.placements), tuple(local.shape))
        known = self._known.get(seen)
        if known is not None:
            return Shard((local,), known, dtype, shape, "dtensor")
        for cuts in _readings(tensor.placements, self.meshes[mesh].shape):
            layout = Layout(shape, mesh, cuts)
            if _local_shape(layout, self.meshes, self.rank) in (None, tuple(local.shape)) or not local.numel():
                known = self._known[seen] = self._layout(shape, mesh, cuts)
                return Shard((local,), known, dtype, shape, "dtensor")
        raise UsageError(
            f"DTensor of shape {shape} with placements {tensor.placements} has a local shape {tuple(local.shape)} that"
            " does not follow from them"
        )

    def _mesh(self, device_mesh: Any) -> int:
        known = self._mesh_of.get(id(device_mesh))
        if known is None:
            ranks = tuple(device_mesh.mesh.flatten().tolist())
            mesh = Mesh.of(tuple(device_mesh.mesh.shape), ranks)
            if mesh not in self.meshes:
                self.meshes.append(mesh)
            # The mesh itself is kept, so that its id cannot be given to another one while this table lives.
            known = self._mesh_of[id(device_mesh)] = (device_mesh, self.meshes.index(mesh))
        return known[1]

    def _checkpointable(self, tensor: Any) -> Shard:
        local = tensor.detach().as_subclass(torch.Tensor)
        dtype = check_storable(local)
        shape = tuple(map(int, tensor.global_shape))
        views = []
        boxes = []
        for where, at, size in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
            view = local
            for dim, (start, length) in enumerate(zip(at, size, strict=True)):
                view = view.narrow(dim, int(start), int(length))
            views.append(view)
            boxes.append((tuple(map(int, where)), tuple(map(int, size))))
        return self._listed(views, shape, boxes, dtype)

    def _listed(
        self,
        views: list[torch.Tensor],
        shape: tuple[int, ...],
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
        dtype: str,
    ) -> Shard:
        held = [(view, Box(*box)) for view, box in zip(views, boxes, strict=True) if view.numel()]
        listed = tuple((self.rank, box) for _, box in held)
        key = (shape, listed)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = len(self.layouts)
            self.layouts.append(Layout(shape, 0, (), listed))
        return Shard(tuple(view for view, _ in held), known, dtype, shape, "sharded")


_REPLICATED = (Cut(0, "R"),)


def check_storable(local: torch.Tensor) -> str:
    """The dtype name of a tensor whose bytes can be stored.

    Raises:
        UsageError: says what about the tensor cannot be stored.
    """
    dtype = _DTYPE_NAMES.get(local.dtype)
    if dtype is None:
        raise UsageError(f"dtype {local.dtype} has no fixed element size that can be stored")
    if local.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {local.layout}; store its indices and values instead")
    if local.is_nested:
        raise UsageError("a nested tensor; store its values and offsets instead")
    if local.device.type == "meta":
        raise UsageError("a tensor on the meta device has no bytes; materialise it first (module.to_empty(device=...))")
    if type(local) is not torch.Tensor and local.numel() and not _has_bytes(local):
        raise UsageError(
            f"a {type(local).__name__} has no bytes of its own and no __tensor_flatten__ that names its parts"
        )
    return dtype


def writable(local: torch.Tensor) -> bool:
    """Whether bytes can be put into this memory: no element stands for several, none is read through a conjugation."""
    repeated = any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True))
    return not (repeated and local.numel()) and not local.is_conj() and not local.is_neg()


def _has_bytes(local: torch.Tensor) -> bool:
    try:
        return local.data_ptr() != 0
    except RuntimeError:
        return False


def _readings(placements: Any, mesh_shape: tuple[int, ...]) -> list[tuple[Cut, ...]]:
    """The ways to read placements as cuts, the true one first.

    FSDP2 over tensor parallelism shards a dimension that is already sharded, and writes that as _StridedShard followed by
    Shard. What happened is "first the later mesh dimension, then the earlier one"; for uneven sizes this differs from
    reading left to right, and it is what the local shapes show.
    """
    cuts = []
    for axis, placement in enumerate(placements):
        name = type(placement).__name__
        if name == "_StridedShard":
            cuts.append(Cut(axis, "SS", placement.dim, int(placement.split_factor)))
        elif placement.is_shard():
            cuts.append(Cut(axis, "S", placement.dim))
        elif placement.is_replicate():
            cuts.append(Cut(axis, "R"))
        else:
            raise UsageError(f"a DTensor with the placement {placement} holds no final values; reduce it first")
    left_to_right = tuple(cuts)
    for at, cut in enumerate(cuts):
        after = [i for i in range(at + 1, len(cuts)) if cuts[i].kind == "S" and cuts[i].dim == cut.dim]
        if cut.kind == "SS" and after and mesh_shape[cuts[after[0]].axis] == cut.arg:
            nested = [*cuts[:at], *cuts[at + 1 : after[0] + 1], Cut(cut.axis, "S", cut.dim), *cuts[after[0] + 1 :]]
            return [tuple(nested), left_to_right]
    return [left_to_right]


def _local_shape(layout: Layout, meshes: list[Mesh], rank: int) -> tuple[int, ...] | None:
    """The shape of the local tensor that the layout implies, or None when the rank holds nothing."""
    held = parts(layout, meshes, rank)
    if not held:
        return None
    return tuple(max(part.local[dim] + part.box.sizes[dim] for part in held) for dim in range(len(layout.shape)))
