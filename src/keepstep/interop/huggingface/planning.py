"""What goes into which file: names, dtypes and positions of all tensors of a component. Nothing is read or written here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from keepstep.errors import MismatchError, UsageError
from keepstep.foreign.safetensors.files import TORCH_NAMES, StoredTensor
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.objects import ObjectNode, TensorRef

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "Naming",
    "OutFile",
    "Plan",
    "Source",
    "plan_files",
    "share_files",
    "tensors_of",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
Naming = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the step: the name it is written under, its key in the step, and what it is there."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file: its name, and the tensors in it. ``sources`` goes with ``tensors``, one by one, by position."""

    name: str
    tensors: tuple[StoredTensor, ...]
    sources: tuple[Source, ...]

    @property
    def data_bytes(self) -> int:
        """The size of what follows the header."""
        return self.tensors[-1].stop if self.tensors else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All files. ``tied`` maps a name that is not written to the one that holds the same; ``left_out`` are no tensors."""

    files: tuple[OutFile, ...]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def data_bytes(self) -> int:
        """The bytes of all tensors, as they are written."""
        return sum(one.data_bytes for one in self.files)


def tensors_of(node: Any, aliases: Mapping[str, str]) -> tuple[dict[str, Source], dict[str, str], tuple[str, ...]]:
    """The tensors of a saved component by name; tied names and where they are; and what is no tensor.

    Nested names are joined by dots, as a module's are.
    """
    sources: dict[str, Source] = {}
    tied: dict[str, str] = {}
    left_out = []
    by_key: dict[str, str] = {}
    for name, leaf in _leaves(node, ""):
        if type(leaf) is not TensorRef or leaf.own:
            left_out.append(name)
            continue
        key = aliases.get(leaf.key, leaf.key)
        if key in by_key:
            tied[name] = by_key[key]
            continue
        by_key[key] = name
        sources[name] = Source(name, key, leaf.dtype, leaf.shape)
    return sources, tied, tuple(left_out)


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if type(node) is ObjectNode:
        yield from _leaves(node.tree, name)
    elif isinstance(node, Mapping) and (node or not name):
        for part, item in node.items():
            yield from _leaves(item, f"{name}.{part}" if name else str(part))
    elif isinstance(node, list | tuple) and node:
        for index, item in enumerate(node):
            yield from _leaves(item, f"{name}.{index}" if name else str(index))
    else:
        yield name, node


def plan_files(
    node: Any, aliases: Mapping[str, str], *, rename: Naming | None, dtype: str | None, most_bytes: int
) -> Plan:
    """What goes where, in the order of the state, no file above ``most_bytes`` unless one tensor alone is.

    Raises:
        UsageError: no tensors; rules that are none, that match nothing, or that give two tensors one name.
        MismatchError: tensors that safetensors cannot hold; lists them all.
    """
    sources, tied, left_out = tensors_of(node, aliases)
    if not sources:
        raise UsageError("there are no tensors in that component: nothing to export")
    named, skipped = _renamed([*sources, *tied], rename)
    # (A tied name whose first one is left out takes its place.)
    held = {first: name for name, first in reversed(tied.items()) if name in named and first not in named}
    tensors = [replace(one, name=named[held.get(n, n)]) for n, one in sources.items() if held.get(n, n) in named]
    new_tied = {
        named[name]: named[held.get(first, first)]
        for name, first in tied.items()
        if name in named and held.get(first) != name
    }
    targets = [_target_dtype(one.dtype, dtype) for one in tensors]
    lacking = [f"{s.name}: {t}" for s, t in zip(tensors, targets, strict=True) if t not in TORCH_NAMES]
    if lacking:
        raise MismatchError("safetensors has no name for the dtype of these (dtype=... converts real ones):", lacking)
    groups: list[list[tuple[Source, str]]] = [[]]
    room = most_bytes
    for one, target in zip(tensors, targets, strict=True):
        size = math.prod(one.shape) * ITEM_BYTES[target]
        if size > room and groups[-1]:
            groups.append([])
            room = most_bytes
        groups[-1].append((one, target))
        room -= size
    many = len(groups)
    names = [f"model-{n:05d}-of-{many:05d}.safetensors" for n in range(1, many + 1)] if many > 1 else [SINGLE_NAME]
    files = tuple(_out_file(name, group) for name, group in zip(names, groups, strict=True))
    return Plan(files, new_tied, (*left_out, *skipped))


def share_files(files: Sequence[OutFile], ranks: int) -> tuple[tuple[OutFile, ...], ...]:
    """The files that each rank writes: the largest first, each to the rank that has least. Names have no say."""
    shares: list[list[OutFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for one in sorted(files, key=lambda file: (-file.data_bytes, file.name)):
        least = loads.index(min(loads))
        shares[least].append(one)
        loads[least] += one.data_bytes
    return tuple(map(tuple, shares))


def _out_file(name: str, group: list[tuple[Source, str]]) -> OutFile:
    """Largest elements first, so that every tensor is aligned to its own."""
    ordered = sorted(group, key=lambda item: (-ITEM_BYTES[item[1]], item[0].name))
    stored = []
    position = 0
    for one, dtype in ordered:
        stop = position + math.prod(one.shape) * ITEM_BYTES[dtype]
        stored.append(StoredTensor(one.name, dtype, one.shape, position, stop))
        position = stop
    return OutFile(name, tuple(stored), tuple(one for one, _ in ordered))


def _target_dtype(stored: str, wanted: str | None) -> str:
    """Real numbers are cast, everything else stays as it is."""
    kind = getattr(torch, stored, None)
    return wanted if wanted is not None and kind is not None and kind.is_floating_point else stored


def _renamed(names: Sequence[str], rename: Naming | None) -> tuple[dict[str, str], list[str]]:
    """New names by old ones, and those that a function has left out (None)."""
    if rename is None:
        return {name: name for name in names}, []
    given = {name: rename(name) for name in names} if callable(rename) else _by_rules(names, rename)
    made = {name: new for name, new in given.items() if new is not None}
    wrong = [f"{name} -> {new!r}" for name, new in made.items() if type(new) is not str or not new]
    sharing: dict[str, list[str]] = {}
    for name, new in made.items():
        sharing.setdefault(new, []).append(name)
    wrong += [f"{' and '.join(old)} -> {new}" for new, old in sharing.items() if len(old) > 1]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise UsageError(f"rename gives names that are none, or one name to several: {'; '.join(wrong[:8])}{more}")
    return made, [name for name, new in given.items() if new is None]


def _by_rules(names: Sequence[str], rename: Mapping[str, str]) -> dict[str, str | None]:
    """Regular expressions are tried in order on the whole name; the first that matches wins."""
    given: dict[str, str | None] = {}
    idle = set(rename)
    try:
        rules = [(re.compile(pattern), text) for pattern, text in rename.items()]
        for name in names:
            given[name] = name
            for pattern, text in rules:
                new, count = pattern.subn(text, name)
                if count:
                    given[name] = new
                    idle.discard(pattern.pattern)
                    break
    except (re.error, IndexError) as err:
        raise UsageError(f"rename: not a regular expression with its replacement: {err}") from err
    if idle:
        some = ", ".join(names[:4])
        raise UsageError(f"rename: nothing is left for {', '.join(map(repr, sorted(idle)))}; names are such as {some}")
    return given
