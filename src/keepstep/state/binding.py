"""Saved trees against a live state: containers, plain values and tensors. What holds them is left to ``restore``.

Nothing the user can see is changed: for each saved tensor the memory it belongs to is found (made, where a fresh object
does not have it yet), every difference is listed, and what is not a tensor in place is noted for later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.errors import CheckpointError, MismatchError, UsageError
from keepstep.format.box import Box, whole
from keepstep.format.globs import Globs
from keepstep.format.layout import Part, Want, parts
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, join
from keepstep.state.casting import Casts
from keepstep.state.marks import Flat, PerRank, Sharded
from keepstep.state.memory import host
from keepstep.state.report import ComponentReport, Origin
from keepstep.state.shard import LayoutTable, Shard, torch_dtype, writable
from keepstep.state.values import ABSENT, Slot, assign, child, materialise, objects_in

__all__ = ["Place", "TreeBinder"]

Finish = Callable[[], None]
Place = Callable[[TensorRef], torch.Tensor]


@dataclass(slots=True)
class TreeBinder(ABC):
    """Collects what to read into which memory. One use: bind every component, read, ``finish``.

    ``wants`` and ``targets`` go together: the box of a stored tensor, and the tensor of that shape to fill. ``placed`` says
    the same for all ranks at once: keys with the layouts of their targets. ``own_targets`` are tensors that one rank has of
    its own, by that rank and key, and ``slots`` the places for such values. ``mismatches`` lists every difference found;
    ``surplus`` maps saved keys that have no place on this rank to what to say of them, should no other rank have one either;
    those in ``spared`` may be without one. ``lacks`` maps keys of the target that were not saved to their line in
    ``mismatches``. Components in ``left_out`` are no part of this. ``notes`` go into the report as they are.
    ``resized`` takes the keys of tensors that may have another shape. ``saved`` is the tree of all that was saved, and
    ``stored`` says under which key the tensor of each key is stored. ``base`` are keys that the state leaves out of its
    steps, and ``mark`` stands for the values that they get from this one.
    """

    table: LayoutTable
    state: Mapping[str, Any]
    origin: Origin
    strict: bool = True
    cast: bool | Casts = False
    wants: list[Want] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    placed: dict[tuple[str, int], None] = field(default_factory=dict)
    own_targets: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    surplus: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    reports: dict[str, ComponentReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)
    resized: Globs | None = None
    base: list[str] | None = None
    mark: str | None = None
    _values: dict[str, Any] = field(default_factory=dict)
    _finish: list[tuple[str, bool, Finish]] = field(default_factory=list)
    _component: str = ""
    _owner: int | None = None
    _claimed: dict[Any, str] = field(default_factory=dict)
    _held: dict[int, list[Part]] = field(default_factory=dict)
    _report: ComponentReport = field(default_factory=ComponentReport)
    _casts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _cut: set[str] = field(default_factory=set)

    def bind_component(self, name: str, node: Any) -> None:
        """Binds one component of the state to its saved tree; changes nothing yet."""
        self._report = self.reports.setdefault(name, ComponentReport())
        self._component = name
        path = join("", name)
        target = self.state[name]
        if type(target) is PerRank and type(node) is not RankRef:
            self.mismatches.append(f"{path}: the target is per_rank, the checkpoint has one value for all ranks")
            return
        value = self._bind(target, node, path)
        if value is not target:
            self._then(lambda: self._assign(name, self.value_of(value)))

    def bind_own(self, slot: Slot, target: Any, node: Any, owner: int) -> Any:
        """Binds the value that one rank has saved for such a place."""
        self._component, self._report, self._owner = slot.component, self.reports[slot.component], owner
        bound = self._plain(node, slot.path, target) if slot.fresh else self._bind(target, node, slot.path)
        self._owner = None
        return bound

    def then_own(self, slot: Slot, finish: Finish) -> None:
        """Notes what is left to do for such a place; it comes before anything else of its component."""
        self._finish.append((slot.component, False, finish))

    def value_of(self, bound: Any) -> Any:
        """The value that was bound, once everything was read."""
        return materialise(bound, self._values)

    def reject(self, mismatches: list[str], unplaced: list[str]) -> None:
        """Takes over what any rank found, and surplus keys that no rank has a place for as differences."""
        self.mismatches[:] = mismatches
        nowhere = set(unplaced)
        for report in self.reports.values():
            report.unexpected = [key for key in report.unexpected if key in nowhere]
        if self.strict:
            extra = (key for key in unplaced if key in self.surplus and key not in self.spared)
            self.mismatches.extend(f"{key}: {self.surplus[key]}" for key in extra)

    def finish(self) -> None:
        """Gives back everything that was not read in place. Only after every byte was read and proved, on all ranks."""
        for target, temporary in self._casts.values():
            with torch.no_grad():
                target.copy_(temporary)
        order = {name: number for number, name in enumerate(self.reports)}
        for name, _, finish in sorted(self._finish, key=lambda item: (order[item[0]], item[1])):
            try:
                finish()
            except CheckpointError:
                raise
            except Exception as err:
                raise MismatchError(
                    f"component {name!r} refused what was saved for it: {type(err).__name__}: {err}",
                    then="Tensors and the components before it hold the restored state: load again before going on.",
                ) from err

    @abstractmethod
    def _bind_object(self, target: Any, node: ObjectNode, path: str) -> Any:
        """The object that takes a saved state."""

    @abstractmethod
    def _bind_part(self, target: Any, node: ObjectNode, path: str, place: Place | None) -> Any:
        """An object inside the state of another one, which is made anew; see ``_plain``."""

    def _assign(self, name: str, value: Any) -> None:
        if value is not self.state[name]:
            assign(self.state, name, value)

    def _then(self, finish: Finish) -> None:
        """Notes what is left to do for the component at hand once everything was read."""
        self._finish.append((self._component, self._owner is None, finish))

    def _bind(self, target: Any, node: Any, path: str) -> Any:
        """The value that belongs in the target's place: the target itself where it is filled or updated in place."""
        if type(node) is TensorRef:
            return self._bind_tensor(target, node, path)
        if type(node) is RankRef:
            return self._bind_rank(target, node, path)
        if type(node) is ObjectNode:
            return self._bind_object(target, node, path)
        if type(target) is dict or type(target) in (OrderedDict, defaultdict):
            if isinstance(node, dict):
                return self._bind_dict(target, node, path)
        elif type(target) is Flat and isinstance(node, dict):
            return self._bind_dict(target, self._held_of(target, node, path), path)
        elif type(target) is list and type(node) is list:
            return self._bind_list(target, node, path)
        elif type(target) in (tuple, deque) and type(node) is type(target):
            return self._bind_items(target, node, path)
        if isinstance(node, dict) and hasattr(target, "load_state_dict"):
            # The state of an object, as a dictionary and no more: another program keeps it so.
            return self._bind_object(target, ObjectNode("values", type(target).__name__, node), path)
        self._lose(target, path)
        self._report.restored += 1
        return self._plain(node, path, target)

    def _bind_dict(self, target: dict[Any, Any], node: dict[Any, Any], path: str) -> Any:
        kept = {key: item for key, item in target.items() if key not in node and self._lose(item, join(path, key))}
        made = {key: self._bind(target.get(key, ABSENT), item, join(path, key)) for key, item in node.items()}

        def finish() -> None:
            values = self.value_of(made)
            target.clear()
            target.update(values)
            target.update(kept)

        self._then(finish)
        return target

    def _held_of(self, target: Flat, node: dict[Any, Any], path: str) -> dict[Any, Any]:
        """The saved parameters of which this rank's flat buffers hold something; others belong to other ranks."""
        for key in node:
            if key not in target.names:
                self._surplus(
                    join(path, key), "in the checkpoint, not among the parameters of the target's flat buffer"
                )
        return {key: item for key, item in node.items() if key in target}

    def _bind_list(self, target: list[Any], node: list[Any], path: str) -> Any:
        kept = [
            item for index, item in enumerate(target[len(node) :], len(node)) if self._lose(item, join(path, index))
        ]
        made = [
            self._bind(target[index] if index < len(target) else ABSENT, item, join(path, index))
            for index, item in enumerate(node)
        ]

        def finish() -> None:
            target[:] = [*self.value_of(made), *kept]

        self._then(finish)
        return target

    def _bind_items(self, target: Any, node: Any, path: str) -> Any:
        """Another container of the same kind, around the tensors and objects that are there."""
        for index, item in enumerate(target):
            if index >= len(node):
                self._lose(item, join(path, index))
        made = [self._bind(child(target, index), item, join(path, index)) for index, item in enumerate(node)]
        return deque(made, node.maxlen) if type(node) is deque else tuple(made)

    def _bind_rank(self, target: Any, ref: RankRef, path: str, *, fresh: bool = False) -> Slot:
        """A place for this rank's own value, which is bound once all places are known."""
        slot = Slot(ref, target, path, self._component, fresh=fresh)
        self.slots.append(slot)
        return slot

    def _lose(self, target: Any, path: str) -> bool:
        """Notes tensors and objects of the target that the checkpoint has nothing for; whether there are any."""
        found = objects_in(target, path)
        for where, kind in found:
            self._miss(where, f"{kind} in the target, nothing of that name in the checkpoint")
        return bool(found)

    def _miss(self, path: str, text: str) -> None:
        self._report.missing.append(path)
        if self.strict:
            self.lacks[path] = f"{path}: {text}"
            self.mismatches.append(self.lacks[path])

    def _surplus(self, path: str, text: str) -> None:
        self._report.unexpected.append(path)
        self.surplus[path] = text

    def _plain(self, node: Any, path: str, target: Any = ABSENT, place: Place | None = None) -> Any:
        """A saved tree whose tensors get memory of their own.

        ``target`` shows how, where it has them too; ``place`` makes the memory instead, where it is given.
        """
        if type(node) is TensorRef:
            if place is not None:
                if self._add(path, place(self._made(path, node)), node, fresh=True):
                    self._report.restored += 1
                return node
            like = target if isinstance(target, torch.Tensor | Sharded) else None
            return self._bind_tensor(ABSENT if like is None else like, node, path, fresh=True)
        if type(target) is Flat and isinstance(node, dict):
            node = self._held_of(target, node, path)
        if type(node) in (dict, OrderedDict, defaultdict):
            items = ((k, self._plain(v, join(path, k), child(target, k), place)) for k, v in node.items())
            return defaultdict(node.default_factory, items) if type(node) is defaultdict else type(node)(items)
        if type(node) in (list, tuple, deque):
            walked = [self._plain(item, join(path, i), child(target, i), place) for i, item in enumerate(node)]
            return deque(walked, node.maxlen) if type(node) is deque else type(node)(walked)
        if type(node) is RankRef:
            return self._bind_rank(target, node, path, fresh=True)
        return self._bind_part(target, node, path, place) if type(node) is ObjectNode else node

    def _bind_tensor(self, target: Any, ref: TensorRef, path: str, *, fresh: bool = False) -> Any:
        """Where the bytes of a saved tensor go; returns the live tensor, or the reference to a new one."""
        if ref.form == "array":
            self._add(path, host(ref), ref, fresh=True)
            return ref
        live = isinstance(target, torch.Tensor) or type(target) is Sharded
        if not live:
            if target is not ABSENT and not fresh:
                self.mismatches.append(f"{path}: a {type(target).__name__} in the target, a tensor in the checkpoint")
            elif self._add(path, host(self._made(path, ref)), ref, fresh=True):
                self._report.restored += 1
            return ref
        if fresh and type(target) is Sharded:
            dtype = torch_dtype(self._made(path, ref).dtype)
            self._report.restored += self._add(path, target.empty_like(dtype), ref, fresh=True)
            return ref
        if fresh:
            wanted = self._made(path, ref)
            dtype = torch_dtype(wanted.dtype)
            made = torch.empty_like(target, dtype=dtype) if tuple(target.shape) == ref.shape else None
            made = made if made is not None else host(wanted).to(target.device)
            self._add(path, made, ref, fresh=True)
            self._report.restored += 1
            return ref
        if self._add(path, target, ref, fresh=False):
            self._report.restored += 1
        return target

    def _made(self, path: str, ref: TensorRef) -> TensorRef:
        """What memory is made for a saved tensor, where the target has none."""
        return ref if type(self.cast) is bool else self.cast.made(path, ref)

    def _add(self, path: str, target: Any, ref: TensorRef, *, fresh: bool) -> bool:
        """Adds one tensor to what is read, after comparing dtype, shape and ties."""
        try:
            shard = self.table.describe(target)
        except UsageError as err:
            self.mismatches.append(f"{path}: the target is {err}")
            return False
        cut = shard.shape != ref.shape
        if cut and not self._resizes(path, shard, ref):
            self.mismatches.append(f"{path}: saved with shape {list(ref.shape)}, the target has {list(shard.shape)}")
            return False
        to = self.cast if type(self.cast) is bool else self.cast.of(path, ref)
        if type(to) is str and shard.dtype != to:
            self.mismatches.append(f"{path}: cast= makes it {to}, the target is {shard.dtype}")
            return False
        if shard.dtype != ref.dtype:
            if to is False:
                self.mismatches.append(
                    f"{path}: saved as {ref.dtype}, the target is {shard.dtype} (cast=True converts)"
                )
                return False
            temporary = _like(target, torch_dtype(ref.dtype), filled=cut)
            self._casts[path] = (target, temporary)
            self._report.cast.append(path)
            kind = f"{ref.dtype} as {shard.dtype}"
            self._report.conversions[kind] = self._report.conversions.get(kind, 0) + 1
            shard = self.table.describe(temporary)
        if not all(map(writable, shard.locals)):
            self.mismatches.append(f"{path}: the target's elements share memory (an expanded or conjugated view)")
            return False
        if fresh:
            self._values[ref.key] = target
        if ref.own:
            owner = self.table.rank if self._owner is None else self._owner
            self.own_targets.setdefault(owner, {})[ref.key] = shard.locals[0] if shard.locals else target
            return True
        key = self.origin.aliases.get(ref.key, ref.key)
        if len(shard.locals) == 1 and shard.locals[0].numel():
            local = shard.locals[0]
            memory = (local.data_ptr(), local.stride(), shard.layout, shard.dtype)
            first = self._claimed.setdefault(memory, key)
            if first != key:
                self.mismatches.append(f"{path}: tied to {first} in the target, but saved as two separate tensors")
                return False
        if not cut:
            self.placed[key, shard.layout] = None
        self.stored[path] = key
        layout = self.table.layouts[shard.layout]
        held = self._held.get(shard.layout)
        if held is None:
            held = self._held[shard.layout] = parts(layout, self.table.meshes, self.table.rank)
        for index, part in enumerate(held):
            view = shard.locals[index] if layout.boxes is not None else shard.locals[0]
            if layout.boxes is None and view.shape != part.box.sizes:
                for dim, (start, size) in enumerate(zip(part.local, part.box.sizes, strict=True)):
                    view = view.narrow(dim, start, size)
            box, view = _overlap(part.box, ref.shape, view) if cut else (part.box, view)
            self.wants.append(Want(key, box, view.is_contiguous()))
            self.targets.append(view)
        return True

    def _resizes(self, path: str, shard: Shard, ref: TensorRef) -> bool:
        """Whether a tensor of another shape takes what it and the saved one have in common."""
        named = path in self._cut or (self.resized is not None and self.resized.takes(path))
        if not named or ref.own or ref.form == "array" or len(ref.shape) != len(shard.shape):
            return False
        self._report.resized.append(f"{path}: {list(ref.shape)} into {list(shard.shape)}")
        return True


def _like(target: Any, dtype: torch.dtype, *, filled: bool) -> Any:
    """Other memory for a tensor, in another dtype; ``filled`` with what it holds."""
    if type(target) is Sharded:
        made = target.empty_like(dtype)
        if filled:
            for mine, theirs in zip(made.locals, target.locals, strict=True):
                mine.copy_(theirs)
        return made
    return target.detach().to(dtype, copy=True) if filled else torch.empty_like(target, dtype=dtype)


def _overlap(box: Box, shape: tuple[int, ...], view: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The part of a box that lies in a tensor of this shape, and of the memory that holds the box."""
    inner = box.intersect(whole(shape))
    if inner is None:
        return Box((0,) * len(shape), (0,) * len(shape)), view[(slice(0),) * len(shape)]
    for dim, (start, first, size) in enumerate(zip(inner.offsets, box.offsets, inner.sizes, strict=True)):
        view = view.narrow(dim, start - first, size)
    return inner, view
