"""Megatron-Core: what its ``sharded_state_dict`` methods give, saved as a step and filled from one.

Every ShardedTensor is stored under its own key, as the boxes of a global tensor that it says it is, so any other layout of
ranks, and any other program, can take it. A ShardedObject is stored whole under its unique key, without pickle; all other
values are common to all ranks. A LocalNonpersistentObject is not stored, and given back as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from keepstep.checkpointer import Saved
from keepstep.checkpointer import load as load_step
from keepstep.checkpointer import save as save_step
from keepstep.checkpointer.opened import Checkpoint
from keepstep.errors import CorruptError, UnsafeValueError, UsageError
from keepstep.format.objects import ObjectNode, TorchValue, decode, encode, join
from keepstep.state import Flat, FlatPiece, Sharded, flat
from keepstep.state.shard import dtype_name, torch_dtype
from keepstep.storage.local import Place

__all__ = ["ShardedState", "distributed_optimizer", "load", "save"]

TENSORS, OBJECTS, COMMON = "tensors", "objects", "common"


def save(
    path: Place, sharded_state_dict: Mapping[str, Any], *, step: int | None = None, overwrite: bool = False
) -> Saved:
    """Saves a sharded state dict as a step; in the place of ``dist_checkpointing.save``. Collective, as ``keepstep.save``.

    What several ranks hold alike, as their ``replica_id`` says, is written by that of them which has least to write.

    Raises:
        UnsafeValueError: lists every tensor and value that cannot be stored; nothing was written.
        MismatchError: values that are common to all ranks differ; nothing was written.
        CorruptError: the parts of a tensor overlap or leave a hole; nothing was written.
    """
    return save_step(path, Parts.of(sharded_state_dict).state(), step=step, overwrite=overwrite)


def load(path: Place, sharded_state_dict: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Fills the tensors of a sharded state dict from a step; in the place of ``dist_checkpointing.load``. Collective.

    Returns a state dict with the same nesting, for ``load_state_dict``: tensors (those of the argument, or new ones on the
    host where it has none), objects, what factories merge, and the common values that were saved. A tensor with
    ``allow_shape_mismatch`` takes what the step has of it, and keeps the rest.

    Args:
        path: the step.
        sharded_state_dict: as it is made for a load.
        options: those of ``keepstep.load``: ``strict``, ``allow_missing``, ``allow_extra``, ``cast``. Keys are
            ``tensors/<key>`` and ``objects/<unique key>``, so ``allow_extra=["tensors/optimizer.*"]`` leaves the optimizer.

    Raises:
        MismatchError: lists every key that one side lacks and every other difference; nothing was changed.
        CorruptError, StorageError: as for ``keepstep.load``.
    """
    parts = Parts.of(sharded_state_dict)
    with Checkpoint(path) as checkpoint:
        shapes = {key: checkpoint.shape(key) for key in checkpoint}
    into = parts.state(shapes)
    load_step(path, into, **options)
    return parts.joined(into[COMMON], into[OBJECTS])


class ShardedState:
    """A part of a ``TrainState`` that is saved and restored as a sharded state dict.

    ``TrainState(model=ShardedState(lambda: model.sharded_state_dict(metadata=...), model.load_state_dict))``. Tensors are
    read into new memory, put into those of the sharded state dict, and then given to ``apply``.

    Args:
        build: makes the sharded state dict, at every save and restore, on every rank.
        apply: takes the state dict of a restore.
    """

    def __init__(self, build: Callable[[], Mapping[str, Any]], apply: Callable[[dict[str, Any]], Any]) -> None:
        self._build = build
        self._apply = apply

    def state_dict(self) -> dict[str, Any]:
        """Tensors, objects and common values, apart."""
        return Parts.of(self._build()).state()

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Fills the tensors and applies the state dict.

        Raises:
            UsageError: the sharded state dict has a tensor or an object that was not restored.
        """
        parts = Parts.of(self._build())
        parts.state()[TENSORS].copy_(given[TENSORS])
        self._apply(parts.joined(given[COMMON], given[OBJECTS]))


def distributed_optimizer(optimizer: Any, model_sharded_state_dict: Mapping[str, Any]) -> Flat:
    """Masters and moments of a DistributedOptimizer under the names of the parameters, as a part of a state.

    Nothing is gathered or copied: the flat slices of this rank are saved as they lie, and filled by a load, from any
    tensor-, pipeline- and data-parallel size. Hyperparameters and steps are in ``optimizer.state_dict()``. Not collective.

    Args:
        optimizer: a DistributedOptimizer, or a ChainedOptimizer of such, whose state exists: after a step, or after
            ``optimizer.load_state_dict(optimizer.state_dict())``.
        model_sharded_state_dict: of the model, with the parameters themselves as data, as ``sharded_state_dict`` has it.

    Raises:
        UsageError: a parameter that is not in the model's sharded state dict.
    """
    parts: dict[str, dict[str, list[Sharded]]] = {}
    named = _pieces_by_parameter(model_sharded_state_dict)
    names = {piece.name for pieces in named.values() for piece in pieces}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        buckets = [bucket for ranges in one.gbuf_ranges for several in ranges.values() for bucket in several]
        for parameter, ranges in [item for bucket in buckets for item in bucket["param_map"].items()]:
            if id(parameter) not in named:
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} is not in the model's sharded state dict"
                )
            state = one._get_main_param_and_optimizer_states(parameter)
            buffers = {kind: value.detach() for kind, value in state.items() if kind != "step"}
            held = [_within(piece, ranges["param"].start, ranges["param"].end) for piece in named[id(parameter)]]
            for name, kinds in flat(buffers, held).items():
                for kind, part in kinds.items():
                    parts.setdefault(name, {}).setdefault(kind, []).append(part)
    made = {name: {kind: _together(several) for kind, several in kinds.items()} for name, kinds in parts.items()}
    return Flat(made, frozenset(names))


def _pieces_by_parameter(model: Mapping[str, Any]) -> dict[int, list[FlatPiece]]:
    """For each parameter the boxes of global tensors that it is; ``at`` is where such a box begins in the parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    found: dict[int, list[FlatPiece]] = {}
    for leaf in nested_values(dict(model)):
        if not isinstance(getattr(leaf, "data", None), torch.Tensor):
            continue
        built = leaf.build() if hasattr(leaf, "build") else [leaf]
        for part in nested_values(built):
            at = part.data.storage_offset() - leaf.data.storage_offset()
            if (
                not part.data.is_contiguous()
                or part.data.untyped_storage()._cdata != leaf.data.untyped_storage()._cdata
            ):
                raise UsageError(f"{part.key}: its factory makes no plain slices of the parameter")
            shape = (1,) * part.prepend_axis_num + tuple(part.data.shape)
            place = tuple(map(int, part.global_shape)), tuple(map(int, part.global_offset))
            found.setdefault(id(leaf.data), []).append(FlatPiece(part.key, shape, 0, part.data.numel(), at, *place))
    return found


def _within(piece: FlatPiece, low: int, high: int) -> FlatPiece:
    """What [low, high) of the parameter has of a piece; in a buffer that begins at ``low``."""
    first, last = max(low, piece.at), min(high, piece.at + piece.elements)
    count = max(last - first, 0)
    start, at = (first - piece.at, first - low) if count else (0, 0)
    return FlatPiece(piece.name, piece.shape, start, count, at, piece.global_shape, piece.offsets)


def _together(several: list[Sharded]) -> Sharded:
    views = tuple(local for part in several for local in part.locals)
    return Sharded(views, several[0].global_shape, tuple(at for part in several for at in part.starts))


@dataclass(frozen=True, slots=True)
class Parts:
    """A sharded state dict taken apart as Megatron does it: ``sharded`` has tensors and objects alone, in their places."""

    sharded: Any
    common: dict[str, Any]
    nonpersistent: Any
    factories: Any

    @classmethod
    def of(cls, sharded_state_dict: Mapping[str, Any]) -> Parts:
        from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
        from megatron.core.dist_checkpointing.utils import extract_sharded_base

        rest, nonpersistent, factories = load_preprocess(dict(sharded_state_dict))
        sharded, common = extract_sharded_base(rest)
        return cls(sharded, common, nonpersistent, factories)

    def leaves(self) -> list[Any]:
        """The ShardedTensors and ShardedObjects."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        return list(nested_values(self.sharded))

    def state(self, saved: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
        """A state for keepstep. With the shapes that were ``saved``, one to be filled by a load."""
        tensors: dict[str, list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]] = {}
        objects: dict[str, torch.Tensor] = {}
        refused: list[str] = []
        for leaf in self.leaves():
            if not hasattr(leaf, "unique_key"):
                shape = None if saved is None else saved.get(join(join("", TENSORS), leaf.key))
                if saved is not None:
                    leaf.init_data("cpu")
                if leaf.data is not None:
                    tensors.setdefault(leaf.key, []).append(_box_of(leaf, shape))
            elif saved is None:
                objects[leaf.unique_key] = _packed(leaf.data, join(join("", OBJECTS), leaf.unique_key), refused)
            else:
                length = saved.get(join(join("", OBJECTS), leaf.unique_key), (0,))
                objects[leaf.unique_key] = torch.empty(length, dtype=torch.uint8)
        if refused:
            raise UnsafeValueError(refused)
        made = {key: _sharded(key, pieces) for key, pieces in tensors.items()}
        if saved is None:
            return {
                TENSORS: Flat(made, frozenset(made)),
                OBJECTS: Flat(objects, frozenset(objects)),
                COMMON: self.common,
            }
        return {TENSORS: Flat(made, frozenset(made)), OBJECTS: Flat(objects, frozenset(objects)), COMMON: {}}

    def joined(self, common: Mapping[str, Any], objects: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The state dict that Megatron's own load would return.

        Raises:
            UsageError: an object that is not among those given.
        """
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
        from megatron.core.dist_checkpointing.mapping import apply_factory_merges

        def value_of(leaf: Any) -> Any:
            if not hasattr(leaf, "unique_key"):
                return leaf.data
            if leaf.unique_key not in objects:
                raise UsageError(f"the object {leaf.unique_key} was not restored")
            packed = objects[leaf.unique_key]
            # What a load was allowed to miss stays as it is.
            return _unpacked(packed) if packed.numel() else leaf.data

        whole: dict[str, Any] = merge(dict(common), self.nonpersistent)
        whole = merge(whole, dict_list_map_outplace(value_of, self.sharded))
        filled: dict[str, Any] = apply_factory_merges(whole, self.factories)
        return filled


def _box_of(leaf: Any, saved: tuple[int, ...] | None) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """The tensor as a box of its global tensor: local memory, global shape, offsets."""
    local = leaf.data.detach()[(None,) * leaf.prepend_axis_num]
    shape, offsets = tuple(map(int, leaf.global_shape)), tuple(map(int, leaf.global_offset))
    if leaf.allow_shape_mismatch and saved is not None and len(saved) == len(shape):
        for dim, (limit, start) in enumerate(zip(saved, offsets, strict=True)):
            local = local.narrow(dim, 0, min(max(limit - start, 0), local.shape[dim]))
        shape = saved
    return local, shape, offsets


def _sharded(key: str, pieces: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]) -> Sharded:
    shapes = {shape for _, shape, _ in pieces}
    dtypes = {local.dtype for local, _, _ in pieces}
    if len(shapes) > 1 or len(dtypes) > 1:
        raise UsageError(f"{key}: parts of one tensor with the global shapes {sorted(shapes)} and dtypes {dtypes}")
    [shape] = shapes
    for local, _, at in pieces:
        inside = all(0 <= a <= a + n <= limit for a, n, limit in zip(at, local.shape, shape, strict=True))
        if local.numel() and not inside:
            raise UsageError(f"{key}: a part of shape {list(local.shape)} at {list(at)} is not in one of {list(shape)}")
    return Sharded(tuple(local for local, _, _ in pieces), shape, tuple(at for _, _, at in pieces))


def _packed(value: Any, key: str, refused: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(_lowered(value), key, refused)), dtype=torch.uint8)


def _lowered(value: Any) -> Any:
    """A value of plain values, with its tensors as their bytes."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        if name is None or value.layout is not torch.strided:
            return value
        dense = value.detach().cpu().contiguous().reshape(-1)
        raw = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return ObjectNode("tensor", name, [list(value.shape), raw])
    if kind is BytesIO:
        return ObjectNode("buffer", "BytesIO", value.getvalue())
    if kind is torch.dtype:
        return TorchValue("dtype", str(value).removeprefix("torch."))
    if kind in (dict, OrderedDict):
        return kind((_lowered(key), _lowered(item)) for key, item in value.items())
    return kind(map(_lowered, value)) if kind in (list, tuple) else value


def _unpacked(packed: torch.Tensor) -> Any:
    return _raised(decode(packed.numpy().tobytes()))


def _raised(value: Any) -> Any:
    kind = type(value)
    if kind is ObjectNode and value.kind == "tensor":
        shape, raw = value.tree
        dtype = torch_dtype(value.type_name)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    if kind is ObjectNode and value.kind == "buffer":
        return BytesIO(value.tree)
    if kind is TorchValue and value.kind == "dtype":
        return torch_dtype(value.text)
    if kind is ObjectNode or kind is TorchValue:
        raise CorruptError(f"an object of the unknown kind {value.kind!r}")
    if kind in (dict, OrderedDict):
        return kind((_raised(key), _raised(item)) for key, item in value.items())
    return kind(map(_raised, value)) if kind in (list, tuple) else value
