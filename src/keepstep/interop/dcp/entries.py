"""What one rank writes of a state that torch has planned: tensors as they are, or what stream extensions make of them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from keepstep.errors import UsageError
from keepstep.foreign.kinds import ARCHIVE
from keepstep.foreign.paths import key_of
from keepstep.foreign.plain import load_plain, row_major
from keepstep.format.box import Box, whole
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.shardfile import Entry
from keepstep.interop.dcp.written import LOOSE, Inside, Saved, part_name
from keepstep.plan.save_plan import FilePlan, Slot
from keepstep.state.capture import capture
from keepstep.state.shard import dtype_name

__all__ = ["Entries", "PlainEntries", "TransformedEntries", "descriptors", "path_of", "through"]

TRANSFORM_BYTES = 1 << 24
"""How much of a tensor an extension is given at once."""


class Entries(Sequence[tuple[torch.Tensor, ...]]):
    """The tensors that one rank writes, in the order of ``saved``, and where each goes.

    ``names`` has the key of each name of torch's, ``sizes`` the bytes of each entry, ``values`` the tree of plain values,
    ``raw`` the names of those that are bytes of the planner's own, and ``inside`` which tensors extensions were given.
    """

    def __init__(self) -> None:
        self._items: list[torch.Tensor | Callable[[], Any]] = []
        self.saved: list[Saved] = []
        self.names: dict[str, str] = {}
        self.sizes: dict[MetadataIndex, int] = {}
        self.values = b"{}"
        self.raw: tuple[str, ...] = ()
        self.inside: dict[str, Inside] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        item = self._items[index]
        tensor = item if isinstance(item, torch.Tensor) else item()
        return (tensor.detach().resolve_conj().resolve_neg(),)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self[index] for index in range(len(self._items)))

    def files(self) -> tuple[FilePlan, ...]:
        """The files of this rank."""
        order = sorted(range(len(self.saved)), key=lambda at: (-ITEM_BYTES[self.saved[at].dtype], self.saved[at].dtype))
        slots: dict[str, list[Slot]] = {}
        ends: dict[str, int] = {}
        for index in order:
            saved = self.saved[index]
            if not saved.box.elements:
                continue
            start = ends.get(saved.folder, 0)
            stop = start + math.prod(saved.box.sizes) * ITEM_BYTES[saved.dtype]
            name = saved.key if saved.box.sizes == saved.shape else f"{saved.key}~{saved.box}"
            entry = Entry(name, saved.key, saved.dtype, saved.shape, saved.box, start, stop)
            slots.setdefault(saved.folder, []).append(Slot(entry, index, (0,) * len(saved.shape)))
            ends[saved.folder] = stop
        return tuple(FilePlan(folder, tuple(each), ends[folder]) for folder, each in slots.items())


class PlainEntries(Entries):
    """Tensors as the planner gives them, and plain values as a tree.

    ``apart`` makes a tensor of its own of each part of one: a rank that saves without the others has no more of it.

    Raises:
        UsageError: a tensor of a dtype or a layout that cannot be stored.
        UnsafeValueError: values that cannot be stored without pickle; lists all.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, folders: dict[str, str], *, apart: bool) -> None:
        super().__init__()
        plain = is_plain(planner)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                continue
            name, path, box, shape = _named(plan, item, apart=apart)
            key = self.names[name] = key_of(path)
            # (What it is may be another thing by now than what a plan that was kept says.)
            tensor = cast(torch.Tensor, planner.resolve_data(item))
            dtype = _storable(key, tensor)
            self.sizes[item.index] = box.elements * ITEM_BYTES[dtype]
            self.saved.append(Saved(key, dtype, folders.get(str(path[0]), LOOSE), shape, box))
            # One that the planner makes is made again when its turn comes: all of them may be more than the memory holds.
            self._items.append(tensor if plain else partial(planner.resolve_data, item))
        values, self.raw = values_of(plan, planner)
        if values:
            snapshot = capture(values, rank=0, world=1)
            self.values = snapshot.tree
            for spec, (local,) in zip(snapshot.structure.tensors, snapshot.locals, strict=True):
                shape = tuple(local.shape)
                self.saved.append(Saved(spec.key, spec.dtype, "tensors", shape, whole(shape)))
                self._items.append(local)


class TransformedEntries(Entries):
    """What extensions make of every tensor and every value: a row of bytes each, all of them in memory.

    An extension is given the bytes of a tensor in row-major order, and what the planner makes of a value.

    Raises:
        UsageError: an extension that fails, or a tensor of a dtype or a layout that cannot be stored.
        UnsafeValueError: values that could not be read again without pickle; lists all.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, extensions: Sequence[Any]) -> None:
        super().__init__()
        top = through(extensions)
        _refuse_unsafe(plan, planner)
        for item in plan.items:
            data = planner.resolve_data(item)
            name, path, box, _ = _named(plan, item, all_of_them=True)
            key = self.names[name] = key_of((top, *path))
            if isinstance(data, torch.Tensor):
                self.inside[name] = Inside(_storable(key, data), box.sizes)
                given = row_major(data)
            else:
                given = memoryview(data.getvalue())
            made = _transformed(given, extensions, name)
            self.sizes[item.index] = len(made)
            self.saved.append(Saved(key, "uint8", LOOSE, tuple(made.shape), whole(tuple(made.shape))))
            self._items.append(made)


def through(extensions: Sequence[Any]) -> str:
    """The component below which everything stands that went through those."""
    return f"through {', '.join(descriptors(extensions))}"


def descriptors(extensions: Sequence[Any]) -> tuple[str, ...]:
    """By what each of them can be had again; first the one to be undone first."""
    return tuple(str(each.get_descriptor()) for each in extensions)


def path_of(plan: SavePlan, item: WriteItem) -> tuple[str | int, ...]:
    """Where an entry stood in the state, as the planner tells; its name, where it does not."""
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    path = paths.get(item.index.fqn)
    return path if isinstance(path, tuple) and path else (item.index.fqn,)


def values_of(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plain values that this rank writes, by torch's names; and names of those that are bytes of the planner's own."""
    # As it is, where the planner does with it what torch's does: it would be pickled, only to be read again.
    plain = is_plain(planner)
    found: dict[str, Any] = {}
    raw = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            name = item.index.fqn
            if plain:
                found[name] = cast(DefaultSavePlanner, planner).lookup_object(item.index)
            else:
                data = cast(io.BytesIO, planner.resolve_data(item)).getvalue()
                if data[:4] != ARCHIVE:
                    raw.append(name)
                found[name] = data if name in raw else load_plain(data, name)
    return found, tuple(raw)


def is_plain(planner: SavePlanner) -> bool:
    """Whether it gives what is in the state, as torch's own planner does."""
    own = DefaultSavePlanner
    return (
        isinstance(planner, own)
        and type(planner).transform_object is own.transform_object
        and type(planner).resolve_data is own.resolve_data
    )


def _transformed(data: memoryview, extensions: Sequence[Any], name: str) -> torch.Tensor:
    kept = _Kept()
    stream: Any = kept
    try:
        # As in torch the first stands next to the file: what is written passes the last one first.
        for each in extensions:
            stream = each.transform_to(stream)
        for start in range(0, len(data), TRANSFORM_BYTES):
            stream.write(data[start : start + TRANSFORM_BYTES])
        stream.close()
    except Exception as err:
        raise UsageError(f"{name}: {through(extensions)}: {err!r}; nothing was committed") from err
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(kept.written, dtype=torch.uint8) if kept.written else empty


class _Kept(io.RawIOBase):
    """Has what was written also when it is closed: an extension closes what it writes to."""

    def __init__(self) -> None:
        self.written = bytearray()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Keeps all of it."""
        view = memoryview(data).cast("B")
        self.written += view
        return len(view)


def _refuse_unsafe(plan: SavePlan, planner: SavePlanner) -> None:
    """What could not be read again is not written."""
    values, _ = values_of(plan, planner)
    if values:
        capture(values, rank=0, world=1)


def _named(
    plan: SavePlan, item: WriteItem, *, apart: bool = True, all_of_them: bool = False
) -> tuple[str, tuple[str | int, ...], Box, tuple[int, ...]]:
    """The name of an entry, its path, its box and the shape of which that is a part; see ``parts_apart``."""
    name, path = item.index.fqn, path_of(plan, item)
    if item.tensor_data is None:
        return name, path, whole(()), ()
    chunk = item.tensor_data.chunk
    box, shape = Box(tuple(chunk.offsets), tuple(chunk.sizes)), tuple(item.tensor_data.size)
    if all_of_them or (apart and box.sizes != shape):
        name, path = part_name(name, box), (*path, str(box))
        box, shape = whole(box.sizes), box.sizes
    return name, path, box, shape


def _storable(key: str, tensor: torch.Tensor) -> str:
    dtype = dtype_name(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise UsageError(f"{key}: a tensor of {tensor.dtype} and {tensor.layout} cannot be stored")
    return dtype
