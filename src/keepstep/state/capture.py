"""One walk over the live state: plain values as a tree, tensors as references plus the memory that holds them.

In: anything a user may pass as a state. Out: a ``Snapshot`` whose tree is a private copy and whose tensors are live. All
of it stands at one step boundary because the training thread does nothing else meanwhile. Everything that cannot be
stored is collected and refused at once, before a byte is written.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import nn

from keepstep.errors import UnsafeValueError, UsageError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Mesh, Structure, TensorSpec
from keepstep.format.manifest import STATE_FOLDER, Component, safe_folder
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, encode, join
from keepstep.state.choice import rank_ref
from keepstep.state.fence import has_hook
from keepstep.state.marks import Flat, PerRank, Sharded
from keepstep.state.memory import pointer
from keepstep.state.module import broadcast_buffers, buffer_names, left_out_of, parameter_names, saved_state, unwrap
from keepstep.state.optimizer import optimizer_state
from keepstep.state.recall import ChangedError, Recall, Remembered, entries_of, replay, template_of
from keepstep.state.rng import GENERATOR, as_stateful, is_generator
from keepstep.state.scheduler import own_state
from keepstep.state.shard import LayoutTable, is_dtensor
from keepstep.state.snapshot import SharedValue, Snapshot

__all__ = ["Collector", "SharedValue", "Snapshot", "capture", "names_of"]

LARGE_ARRAY_BYTES = 1 << 16
MAX_FOLDERS = 12
_NO_POSITION = (
    "a DataLoader, which does not know which of its batches were used: give the state the ResumableBatchSampler under it, or"
    " take a ResumableLoader or a StreamReader (keepstep.data), or a StatefulDataLoader"
)
_KINDS: dict[type, str] = {RankRef: "per_rank", TensorRef: "tensor"}
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def capture(
    state: Mapping[str, Any], *, rank: int, world: int, overlap: bool = False, recall: Recall | None = None
) -> Snapshot:
    """The state as it is now. Not collective; call on the training thread, at a step boundary.

    Tensors are not copied: they must not change until they are staged. Plain values are copied. With ``overlap`` the
    snapshot also says which tensors may be copied later. With ``recall`` an unchanged structure is proved, not found again.

    Raises:
        UnsafeValueError: lists every value and tensor that cannot be stored, each with its key and type.
        UsageError: the state itself is not a mapping with string keys, or names collide.
    """
    if not isinstance(state, Mapping) or not all(type(name) is str and name for name in state):
        raise UsageError(f"a state is a TrainState or a dict with non-empty string keys, not {type(state).__name__}")
    if "__metadata__" in state:
        raise UsageError("a component cannot be called __metadata__: shard files use the name for themselves")
    layouts = recall.table if recall is not None and recall.kept else None
    if recall is not None and layouts is None:
        recall.clear()
    collector = Collector(layouts or LayoutTable(rank, world, [Mesh((world,))]), state, overlap=overlap, recall=recall)
    if overlap:
        collector.guarded = guarded_memory(state)
    tree: dict[str, Any] = {}
    components: dict[str, Component] = {}
    try:
        for name, value in state.items():
            path = join("", name)
            # Containers of tensors get files of their own, so that a model can be read without its optimizer.
            bare = isinstance(value, torch.Tensor | Sharded)
            crowded = len({part.folder for part in components.values()}) >= MAX_FOLDERS
            collector.folder = STATE_FOLDER if bare or crowded or not safe_folder(name) else name
            before, size = len(collector.specs), collector.tensor_bytes
            tree[name] = collector.visit(value, path)
            tensors = len(collector.specs) - before
            folder = collector.folder if tensors else STATE_FOLDER
            node = tree[name]
            kind = node.kind if type(node) is ObjectNode else _KINDS.get(type(node), "values")
            held, out = collector.tensor_bytes - size, left_out_of(state) if kind == "module" else ()
            base = getattr(state, "left_out_from", "") if out else ""
            components[name] = Component(kind, type(value).__name__, tensors, held, folder, out, base)
        if recall is not None and recall.layouts not in (0, len(collector.table.layouts)):
            raise ChangedError
    except ChangedError:
        # Something is not as it was remembered: all over again, with nothing remembered.
        (recall or Recall()).clear()
        return capture(state, rank=rank, world=world, overlap=overlap, recall=recall)
    encoded = encode(tree, refused=collector.refused)
    for one in collector.shared:
        encode(one.value, one.key, refused=collector.refused)
    for key, value in collector.own_values.items():
        encode(value, key, refused=collector.refused)
    own = encode(collector.own_values, refused=[]) if collector.own_values else b""
    if collector.refused:
        raise UnsafeValueError(collector.refused)
    if recall is not None:
        collector.learn(recall)
    structure = Structure(tuple(collector.table.meshes), tuple(collector.table.layouts), tuple(collector.specs))
    return Snapshot(
        tree=encoded,
        own_tree=own,
        structure=structure,
        locals=tuple(collector.locals),
        own=tuple(collector.own),
        aliases=collector.aliases,
        components=components,
        late=frozenset(collector.late),
        shared=tuple(collector.shared),
        config=getattr(state, "config_record", b""),
    )


def guarded_memory(state: Mapping[str, Any]) -> frozenset[int]:
    """Where the memory begins of every parameter that the fence guards: those of the optimizers in the state.

    With a loop that calls ``fence`` by hand, those of all modules too.
    """
    parameters: list[torch.Tensor] = []
    by_hand = getattr(state, "fenced_by_hand", False)
    for value in state.values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for item in inside:
            if isinstance(item, torch.optim.Optimizer) and has_hook(item):
                parameters.extend(p for group in item.param_groups for p in group["params"])
            elif by_hand and isinstance(item, nn.Module):
                parameters.extend(item.parameters())
    return frozenset(pointer(parameter) for parameter in parameters) - {0, -1}


def names_of(state: Mapping[str, Any]) -> dict[int, str]:
    """Parameter names by identity, over all modules at the top of the state.

    With several modules each name starts with its component, so that two networks with a ``weight`` each stay apart.
    """
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    names: dict[int, str] = {}
    for component, module in modules.items():
        prefix = f"{component}." if len(modules) > 1 else ""
        for key, name in parameter_names(module).items():
            names.setdefault(key, prefix + name)
    return names


@dataclass(frozen=True, slots=True)
class _Learnt:
    """A large dictionary that was walked, until the end of the capture."""

    path: str
    tree: dict[str, Any]
    node: Any
    template: Any
    folder: str
    rules: frozenset[str]
    stored: int
    tensor_bytes: int


@dataclass(slots=True)
class Collector:
    """The walk itself. ``own_values`` and ``own`` collect what belongs to this rank alone."""

    table: LayoutTable
    state: Mapping[str, Any]
    folder: str = STATE_FOLDER
    specs: list[TensorSpec] = field(default_factory=list)
    locals: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    own_values: dict[str, Any] = field(default_factory=dict)
    own: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    shared: list[SharedValue] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    tensor_bytes: int = 0
    overlap: bool = False
    recall: Recall | None = None
    guarded: frozenset[int] = frozenset()
    late: list[int] = field(default_factory=list)
    _stepped: bool = False
    _inside_rank: bool = False
    _first_wins: frozenset[str] = frozenset()
    _open: set[int] = field(default_factory=set)
    _seen: dict[Any, str] = field(default_factory=dict)
    _places: dict[int, str] = field(default_factory=dict)
    _shared: set[int] = field(default_factory=set)
    _learnt: list[_Learnt] = field(default_factory=list)

    def visit(self, value: Any, path: str) -> Any:
        """The tree node for a value; containers are walked, everything else is left to the encoder to accept."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor) or kind is Sharded:
            return self._tensor(value, path)
        if id(value) in self._open:
            self.refused.append(f"{path}: a {kind.__name__} that contains itself")
            return None
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is dict or kind is Flat:
            return {
                key: item if type(item) in _PLAIN else self.visit(item, join(path, key)) for key, item in value.items()
            }
        if kind in _MAPPINGS:
            items = ((key, self.visit(item, join(path, key))) for key, item in value.items())
            return defaultdict(value.default_factory, dict(items)) if kind is defaultdict else cast(Any, kind)(items)
        if kind in _SEQUENCES:
            walked = [item if type(item) in _PLAIN else self.visit(item, join(path, i)) for i, item in enumerate(value)]
            return deque(walked, value.maxlen) if kind is deque else kind(walked)
        if kind is PerRank:
            return self._per_rank(value, path)
        if isinstance(value, torch.Size | torch.dtype | torch.device):
            text = ",".join(map(str, value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
            return TorchValue(type(value).__name__.lower(), text)
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE_ARRAY_BYTES and _as_tensor(value) is not None:
            return self._tensor(_as_tensor(value), path, form="array")
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Any:
        if isinstance(value, nn.Module):
            inner = unwrap(value)
            first = buffer_names(inner) if broadcast_buffers(value) else set()
            self._first_wins = frozenset(join(path, name) for name in first)
            tree = self._recalled(saved_state(self.state, inner, path), path)
            self._first_wins = frozenset()
            return ObjectNode("module", type(inner).__name__, tree)
        if isinstance(value, torch.optim.Optimizer):
            self._stepped = self.overlap and has_hook(value)
            parts = optimizer_state(value, names_of(self.state))
            tree = {
                key: self._recalled(item, join(path, key)) if key == "state" else self.visit(item, join(path, key))
                for key, item in parts.items()
            }
            self._stepped = False
            return ObjectNode("optimizer", type(value).__name__, tree)
        if is_generator(value):
            return ObjectNode(GENERATOR, type(value).__name__, as_stateful(value).state_dict())
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return ObjectNode("stateful", type(value).__name__, self.visit(own_state(value), path))
        if isinstance(value, torch.utils.data.DataLoader):
            self.refused.append(f"{path}: {_NO_POSITION}")
            return None
        return value

    def _walk(self, tree: dict[str, Any], path: str) -> dict[Any, Any]:
        return {key: self.visit(item, join(path, key)) for key, item in tree.items()}

    def _recalled(self, tree: dict[str, Any], path: str) -> Any:
        """The node of a large dictionary: as it was encoded before when nothing but the tensors' contents has changed."""
        recall = self.recall
        if recall is None or self._inside_rank:
            return self._walk(tree, path)
        known = recall.kept.get(path)
        if known is not None:
            return self._replayed(known, tree, path, recall)
        before, size = len(self.specs), self.tensor_bytes
        node = self._walk(tree, path)
        template = template_of(tree)
        if template is not None and not recall.layouts:
            stored, size = len(self.specs) - before, self.tensor_bytes - size
            self._learnt.append(_Learnt(path, tree, node, template, self.folder, self._first_wins, stored, size))
        return node

    def learn(self, recall: Recall) -> None:
        """Remembers the large dictionaries of a capture that has just ended."""
        specs = {spec.key: spec for spec in self.specs}
        for one in self._learnt:
            entries = entries_of(one.tree, list(_keys_in(one.node)), self.aliases, specs, self._shared)
            if entries is not None and sum(entry.first == entry.key for entry in entries) == one.stored:
                raw = msgspec.Raw(encode(one.node, one.path))
                recall.learn(one.path, Remembered(one.template, entries, raw, one.folder, one.rules, one.tensor_bytes))
        recall.table, recall.layouts = self.table, len(self.table.layouts)

    def _replayed(self, known: Remembered, tree: dict[str, Any], path: str, recall: Recall) -> Any:
        overlap, stepped, guarded, late = self.overlap, self._stepped, self.guarded, self.late
        try:
            if (known.folder, known.rules) != (self.folder, self._first_wins):
                raise ChangedError
            for entry, local, at in replay(known, tree, self._seen, self._places):
                if overlap and entry.local_bytes and (stepped or at in guarded):
                    late.append(len(self.specs))
                    # What is copied later is held by an alias of its own: its owner may be given other memory.
                    local = local.detach()
                self.locals.append((local,))
                self.specs.append(entry.spec)
        except ChangedError:
            recall.miss(path)
            raise
        for entry in known.entries:
            if entry.first != entry.key:
                self.aliases[entry.key] = entry.first
        self.tensor_bytes += known.tensor_bytes
        return known.raw

    def _per_rank(self, value: PerRank, path: str) -> Any:
        if self._inside_rank:
            self.refused.append(f"{path}: per_rank inside per_rank")
            return None
        scope, before = value.scope, len(self.own)
        if scope is not None and len(scope.places) != self.table.world:
            held = f"{len(scope.places)} of {self.table.world} ranks"
            self.refused.append(f"{path}: the mesh of its per_rank holds {held}; give it one with all of them")
            return None
        self._inside_rank = True
        node = self.visit(value.value, path)
        self._inside_rank = False
        ref = rank_ref(path, value)
        if scope is not None:
            place = scope.places[self.table.rank]
            self.shared.append(SharedValue(path, place, node, tuple(tensor for *_, tensor in self.own[before:])))
            if ref.owners[place] != self.table.rank:
                del self.own[before:]
                return ref
        self.own_values[path] = node
        return ref

    def _tensor(self, value: Any, path: str, form: str | None = None) -> Any:
        inner = None if type(value) in (torch.Tensor, nn.Parameter, Sharded) or is_dtensor(value) else wrapped(value)
        if inner is not None:
            return ObjectNode("wrapper", type(value).__name__, self._walk(inner, path))
        try:
            shard = self.table.describe(value)
        except UsageError as err:
            self.refused.append(f"{path}: {err}")
            return None
        held = shard.locals
        for local in held:
            if local.is_conj() or local.is_neg():
                held = tuple(one.resolve_conj().resolve_neg() for one in held)
                break
        form = form or shard.form
        device = "cpu" if not held else held[0].device.type
        ref = TensorRef(path, shard.dtype, shard.shape, device, form, self._inside_rank)
        if self._inside_rank:
            if shard.form != "tensor":
                self.refused.append(f"{path}: a {shard.form} inside per_rank; a shard belongs to all ranks together")
            self.own.extend((path, shard.dtype, local) for local in held)
            return ref
        size = held[0].numel() if len(held) == 1 else 0
        if size:
            local = held[0]
            at = local.data_ptr()
            first = self._seen.setdefault((at, shard.dtype, local.stride(), shard.layout), path)
            if self._places.setdefault(at, path) is not path:
                self._shared.add(at)
                if self.recall is not None and self.recall.layouts:
                    # Tied with one of those that are only remembered, perhaps: to be found out anew.
                    raise ChangedError
            if first != path:
                self.aliases[path] = first
                return ref
            if self.overlap and (self._stepped or at in self.guarded):
                self.late.append(len(self.specs))
        rule = "first" if path in self._first_wins else "same"
        self.specs.append(TensorSpec(path, shard.dtype, shard.layout, self.folder, rule))
        self.locals.append(held)
        self.tensor_bytes += math.prod(shard.shape) * ITEM_BYTES[shard.dtype]
        return ref


def _keys_in(node: Any) -> Iterator[str]:
    """The keys of the tensors below a node, in order."""
    if type(node) is TensorRef:
        yield node.key
    elif type(node) in (dict, list, tuple):
        for item in node.values() if type(node) is dict else node:
            yield from _keys_in(item)


def wrapped(value: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The inner tensors of a traceable wrapper subclass, or None for a tensor that holds its own bytes."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or value.is_nested:
        return None
    names, _ = flatten()
    return {name: getattr(value, name) for name in names}


def _as_tensor(value: np.ndarray) -> torch.Tensor | None:
    try:
        with warnings.catch_warnings():  # nobody writes to this tensor: the array may be a file mapped for reading
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(value)
    except (TypeError, ValueError):
        return None
