"""What capture remembers of large dictionaries of tensors, so that the next save of an unchanged state costs little.

Remembered is structure alone: keys, dtypes, shapes, devices, layouts, which tensors are tied, and the encoded tree.
Never memory: every tensor is taken from the live state each time, and proved to look as it did. When anything differs,
everything is forgotten and the state is captured as if for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import TensorSpec
from keepstep.state.shard import LayoutTable, is_dtensor

__all__ = ["ChangedError", "Entry", "Recall", "Remembered", "entries_of", "replay", "template_of"]

FEWEST_TENSORS = 8
MOST_MISSES = 3
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR = object()


class ChangedError(Exception):
    """The state does not have the structure that is remembered."""


class Look(msgspec.Struct, frozen=True, gc=False):
    """What a tensor looks like, without its memory. ``placed`` is a DTensor's mesh, placements and local shape."""

    type: type
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    on_host: bool
    placed: Any = None


@dataclass(slots=True)
class Remembered:
    """One dictionary as it was: its structure, its tensors in order, the specs of those that are stored.

    ``raw`` is the encoded tree; ``rules`` and ``folder`` are what specs were made with.
    """

    template: Any
    entries: list[Entry]
    raw: msgspec.Raw
    folder: str
    rules: frozenset[str]
    tensor_bytes: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: its look and key; ``first`` is the key it is tied to, or its own. ``spec`` is that of ``first``.

    ``shared`` says that another tensor of the state begins at the same address.
    """

    look: Look
    key: str
    first: str
    spec: TensorSpec
    local_bytes: int
    shared: bool


@dataclass(slots=True)
class Recall:
    """What is remembered of one state, by key of the dictionary; ``table`` holds the layouts that specs refer to."""

    table: LayoutTable | None = None
    layouts: int = 0
    kept: dict[str, Remembered] = field(default_factory=dict)
    _misses: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Nothing is remembered any more."""
        self.table, self.layouts = None, 0
        self.kept.clear()

    def miss(self, path: str) -> None:
        """What was remembered of ``path`` is not so any more. Again and again, and it will not be remembered."""
        self._misses[path] = self._misses.get(path, 0) + 1

    def learn(self, path: str, known: Remembered) -> None:
        """Remembers a dictionary, unless it has changed too often."""
        if self._misses.get(path, 0) < MOST_MISSES:
            self.kept[path] = known


def entries_of(
    tree: Any, keys: list[str], aliases: dict[str, str], specs: dict[str, TensorSpec], shared: Set[int]
) -> list[Entry] | None:
    """The tensors of a tree that was just captured, by its keys in the same order; None when one cannot be remembered.

    ``shared`` are the addresses at which more than one tensor begins.
    """
    tensors: list[torch.Tensor] = []
    _flatten(tree, tensors)
    if len(tensors) != len(keys) or len(tensors) < FEWEST_TENSORS:
        return None
    entries = []
    for value, key in zip(tensors, keys, strict=True):
        look, first = look_of(value), aliases.get(key, key)
        spec = specs.get(first)
        if look is None or spec is None:
            return None
        count = look.shape.numel() if look.placed is None else look.placed[2].numel()
        local = value if look.placed is None else _placed(value, look)
        entries.append(Entry(look, key, first, spec, count * ITEM_BYTES[spec.dtype], local.data_ptr() in shared))
    return entries


def _flatten(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif type(tree) in (dict, list, tuple):
        for item in tree.values() if type(tree) is dict else tree:
            _flatten(item, found)


def look_of(value: torch.Tensor) -> Look | None:
    """The look of a tensor that may be remembered; None for others, such as wrapper subclasses and lazy conjugates."""
    if value.is_neg() or value.is_conj():
        return None
    if is_dtensor(value):
        local: torch.Tensor = value._local_tensor  # type: ignore[attr-defined]
        if type(local) is not torch.Tensor or local.layout is not torch.strided:
            return None
        placed = (value.device_mesh, value.placements, local.shape)  # type: ignore[attr-defined]
        return Look(type(value), value.dtype, value.shape, local.device, local.is_cpu, placed)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested or value.layout is not torch.strided:
        return None
    return Look(type(value), value.dtype, value.shape, value.device, value.is_cpu)


def template_of(tree: Any) -> Any:
    """The structure of a tree of dictionaries, lists and tensors; None when it holds anything else that may change."""
    if isinstance(tree, torch.Tensor):
        return _TENSOR
    kind = type(tree)
    if kind is dict:
        children = [template_of(item) for item in tree.values()]
        return None if any(child is None for child in children) else (dict, list(tree), children)
    if kind in (list, tuple):
        children = [template_of(item) for item in tree]
        return None if any(child is None for child in children) else (kind, None, children)
    return (_PLAIN, None, tree) if kind in _PLAIN else None


def matches(tree: Any, template: Any, found: list[torch.Tensor]) -> bool:
    """Whether a tree has the structure of the template, plain values included; appends its tensors in order."""
    if template is _TENSOR:
        found.append(tree)
        return True
    kind, keys, children = template
    if kind is _PLAIN:
        return type(tree) is type(children) and tree == children
    if type(tree) is not kind or len(tree) != len(children):
        return False
    if kind is not dict:
        return all(matches(item, child, found) for item, child in zip(tree, children, strict=True))
    for (key, item), wanted, child in zip(tree.items(), keys, children, strict=True):
        if key is not wanted and (key != wanted or type(key) is not type(wanted)):
            return False
        if child is _TENSOR:
            found.append(item)
        elif not matches(item, child, found):
            return False
    return True


def replay(
    known: Remembered, tree: Any, seen: dict[Any, str], places: dict[int, str]
) -> Iterator[tuple[Entry, torch.Tensor, int]]:
    """The tensors of an unchanged dictionary that are stored: each entry with the local tensor and where it begins.

    Args:
        known: what is remembered of it.
        tree: as it is now.
        seen: key by identity of memory, over the whole state, as the capture keeps it.
        places: key by address, likewise. Both are added to.

    Raises:
        ChangedError: it is not as it was.
    """
    tensors: list[torch.Tensor] = []
    if not matches(tree, known.template, tensors):
        raise ChangedError
    for value, entry in zip(tensors, known.entries, strict=True):
        look = entry.look
        if type(value) is not look.type or value.dtype is not look.dtype or value.shape != look.shape:
            raise ChangedError
        local = value if look.placed is None else _placed(value, look)
        # Asked in the cheapest way there is, some hundred times at each save.
        if local.layout is not torch.strided or local.is_neg() or (look.dtype.is_complex and local.is_conj()):
            raise ChangedError
        if local.is_cpu is not look.on_host or (not look.on_host and local.device != look.device):
            raise ChangedError
        at = local.data_ptr()
        if entry.local_bytes:
            owner, spec = places.setdefault(at, entry.key), entry.spec
            if entry.shared:
                if seen.setdefault((at, spec.dtype, local.stride(), spec.layout), entry.key) != entry.first:
                    raise ChangedError
            elif owner is not entry.key:
                raise ChangedError
        if entry.first == entry.key:
            yield entry, local, at


def _placed(value: Any, look: Look) -> torch.Tensor:
    """The local tensor of a DTensor that lies on its mesh as it did."""
    local: torch.Tensor = value._local_tensor
    if (value.device_mesh, value.placements, local.shape) != look.placed or type(local) is not torch.Tensor:
        raise ChangedError
    return local
