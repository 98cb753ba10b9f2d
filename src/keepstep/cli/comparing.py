"""``keepstep diff``: how two checkpoints differ: keys, shapes, dtypes, bits, and how far their numbers are apart.

Two tensors are read side by side, a part of each at a time. Values that each rank has of its own are compared rank by rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from keepstep.checkpointer.opened import Checkpoint
from keepstep.cli.contents import PART_BYTES, shown
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import near_pattern
from keepstep.errors import UsageError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import Globs
from keepstep.format.objects import RankRef, TensorRef, join

__all__ = ["Comparison", "TensorDifference", "ValueDifference", "compare"]

_MOST_EXACT = 1 << 62
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both have, and not the same. ``elements`` differ, and of those ``not_finite`` in one or both.

    ``max`` and ``mean`` are of the absolute differences, the mean over all elements but the ``not_finite`` ones. None
    where shapes differ, which are not compared. ``ranks`` are those that differ, where each has a tensor of its own.
    """

    key: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int | None = None
    max: float | None = None
    mean: float | None = None
    not_finite: int = 0
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A plain value that differs; as JSON has it. A side that has none says so in ``only``: ``a`` or ``b``.

    Where each rank has one of its own, ``ranks`` are those that differ, and the values are those of the first of them.
    """

    key: str
    a: Any = None
    b: Any = None
    only: str | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints; the fields are those of the JSON output. ``equal`` counts tensors that are the same to the last bit.

    ``worlds`` are how many ranks have saved each. ``lone`` are ranks that only one of them has, with values of their own.
    """

    a: str
    b: str
    same: bool
    equal: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    worlds: tuple[int, int]
    lone: tuple[int, ...] = ()


@dataclass(slots=True)
class _Tally:
    """How far two tensors are apart, part by part."""

    changed: int = 0
    not_finite: int = 0
    compared: int = 0
    most: float = 0.0
    total: float = 0.0

    def add(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Two parts of as many elements, of one dimension each."""
        alike = mine.dtype == theirs.dtype
        if alike and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            self.compared += mine.numel()
            return
        wide = [_comparable(each) for each in (mine, theirs)]
        finite = wide[0].isfinite() & wide[1].isfinite()
        apart = _apart(mine, theirs, wide)[finite]
        if alike:
            rows = [each.view(torch.uint8).view(len(each), -1) for each in (mine, theirs)]
            unlike = (rows[0] != rows[1]).any(1)
        else:
            unlike = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
        strange = int((unlike & ~finite).sum())
        self.changed += int(unlike.sum())
        self.not_finite += strange
        self.compared += mine.numel() - strange
        self.most = max(self.most, float(apart.max())) if apart.numel() else self.most
        self.total += float(apart.sum())

    def difference(self, key: str, mine: tuple[str, tuple[int, ...]], theirs: tuple[str, tuple[int, ...]]) -> Any:
        """What was found of two tensors of this dtype and shape each; None where nothing was."""
        if not self.changed and mine[0] == theirs[0]:
            return None
        mean = self.total / self.compared if self.compared else None
        found = self.changed, self.most, mean, self.not_finite
        return TensorDifference(key, (mine[0], theirs[0]), (mine[1], theirs[1]), *found)


@dataclass(slots=True)
class _Own:
    """What differs between the values of single ranks, by key, over all ranks."""

    values: dict[tuple[str, str | None], tuple[Any, Any, list[int]]] = field(default_factory=dict)
    tensors: dict[str, tuple[TensorDifference, list[int]]] = field(default_factory=dict)
    equal: dict[str, None] = field(default_factory=dict)
    lone: list[int] = field(default_factory=list)

    def value(self, key: str, pair: tuple[Any, Any], only: str | None, rank: int) -> None:
        """A value of a rank that differs."""
        self.values.setdefault((key, only), (*pair, []))[2].append(rank)

    def tensor(self, found: TensorDifference, rank: int) -> None:
        """A tensor of a rank that differs: shown is the one that is furthest apart."""
        known, ranks = self.tensors.setdefault(found.key, (found, []))
        ranks.append(rank)
        if (found.max or 0.0) > (known.max or 0.0):
            self.tensors[found.key] = found, ranks


def compare(a: Checkpoint, b: Checkpoint, only: list[str], errors: Console) -> Comparison:
    """Compares the chosen keys of two checkpoints; the bar goes to ``errors`` where that is a terminal.

    Raises:
        UsageError: a pattern that fits no key of either.
        CorruptError: bytes are not what was written.
    """
    globs = Globs(only, "--only")
    trees = [step.tree_of()[0] for step in (a, b)]
    plain = [{key: leaf for key, leaf in _leaves(tree) if not isinstance(leaf, TensorRef)} for tree in trees]
    of_ranks = [list(_rank_refs(tree)) for tree in trees]
    keys = list(dict.fromkeys((*a, *b)))
    _check_patterns(globs, list(dict.fromkeys((*keys, *plain[0], *plain[1], *_own_keys((a, b), of_ranks)))))
    keys = [key for key in keys if globs.takes(key)]
    both = [key for key in keys if key in a and key in b]
    tensors, values = [], []
    with bar_of(errors) as bar:
        task = bar.add_task("comparing", total=sum(_bytes(a, key) for key in both))
        for group in _groups(a, b, both):
            # Small ones are read together: each read opens files, and looks for its tensors among all.
            read = [step.together(group) for step in (a, b)] if len(group) > 1 else None
            for key in group:
                difference = _compare(a, b, key, read)
                tensors.extend([difference] if difference is not None else [])
                bar.update(task, advance=_bytes(a, key))
        own = _compare_ranks(a, b, of_ranks, globs)
    for key in (key for key in dict.fromkeys((*plain[0], *plain[1])) if globs.takes(key)):
        sides = [key in each for each in plain]
        mine, theirs = (each.get(key) for each in plain)
        if not all(sides) or _form(mine) != _form(theirs):
            side = None if all(sides) else "a" if sides[0] else "b"
            values.append(ValueDifference(key, shown(mine, {}), shown(theirs, {}), side))
    equal = len(both) - len(tensors) + len(own.equal.keys() - own.tensors.keys())
    tensors += [replace(found, ranks=tuple(ranks)) for found, ranks in own.tensors.values()]
    values += [ValueDifference(key, x, y, side, tuple(ranks)) for (key, side), (x, y, ranks) in own.values.items()]
    only_a, only_b = (tuple(key for key in keys if key not in other) for other in (b, a))
    return Comparison(
        a.describe()["url"],
        b.describe()["url"],
        not (tensors or values or only_a or only_b or own.lone),
        equal,
        only_a,
        only_b,
        tuple(tensors),
        tuple(values),
        (a.manifest.world_size, b.manifest.world_size),
        tuple(own.lone),
    )


def _check_patterns(globs: Globs, everything: list[str]) -> None:
    idle = globs.idle(everything)
    if idle and idle != ["**"]:
        hints = "".join(near_pattern(pattern, everything) for pattern in idle)
        raise UsageError(f"--only {' '.join(idle)}: no key of either step fits{hints}")


def _groups(a: Checkpoint, b: Checkpoint, keys: list[str]) -> Iterator[list[str]]:
    """Keys of as many tensors as are read together; a large one is alone, and so is one of two shapes."""
    group: list[str] = []
    size = 0
    for key in keys:
        more = max(_bytes(a, key), _bytes(b, key))
        if group and (size + more > PART_BYTES or a.shape(key) != b.shape(key)):
            yield group
            group, size = [], 0
        group.append(key)
        size += more if a.shape(key) == b.shape(key) else PART_BYTES + 1
    if group:
        yield group


def _compare(
    a: Checkpoint, b: Checkpoint, key: str, read: list[dict[str, torch.Tensor]] | None
) -> TensorDifference | None:
    """How one tensor differs; None where it does not. Those that were not ``read`` are, a part at a time."""
    dtypes, shapes = (a.spec(key).dtype, b.spec(key).dtype), (a.shape(key), b.shape(key))
    if shapes[0] != shapes[1]:
        return TensorDifference(key, dtypes, shapes)
    tally = _Tally()
    # Parts of as many elements on both sides.
    elements = PART_BYTES // max(ITEM_BYTES[dtype] for dtype in dtypes)
    if read is not None:
        both: Any = ([each[key].flatten()] if each[key].numel() else [] for each in read)
    else:
        both = (step.parts(key, elements * ITEM_BYTES[dtype]) for step, dtype in zip((a, b), dtypes, strict=True))
    for mine, theirs in zip(*both, strict=True):
        tally.add(mine, theirs)
    found: TensorDifference | None = tally.difference(key, (dtypes[0], shapes[0]), (dtypes[1], shapes[1]))
    return found


def _compare_ranks(a: Checkpoint, b: Checkpoint, of_ranks: list[list[tuple[str, RankRef]]], globs: Globs) -> _Own:
    """Values that each rank has of its own, rank by rank."""
    found = _Own()
    worlds = [step.manifest.world_size for step in (a, b)]
    for rank in range(max(worlds) if any(of_ranks) else 0):
        sides = [
            {key: leaf for key, leaf in _own_leaves(step, refs, rank) if globs.takes(key)} if rank < world else {}
            for step, refs, world in zip((a, b), of_ranks, worlds, strict=True)
        ]
        if rank >= min(worlds):
            found.lone.extend([rank] if any(sides) else [])
            continue
        for key in dict.fromkeys((*sides[0], *sides[1])):
            mine, theirs = (side.get(key) for side in sides)
            if isinstance(mine, TensorRef) and isinstance(theirs, TensorRef):
                difference = _compare_own(a, b, rank, mine, theirs)
                if difference is None:
                    found.equal[key] = None
                else:
                    found.tensor(replace(difference, key=key), rank)
                continue
            there = all(key in side for side in sides)
            if not there or _form(mine) != _form(theirs):
                only = None if there else "a" if key in sides[0] else "b"
                found.value(key, (shown(mine, {}), shown(theirs, {})), only, rank)
    return found


def _compare_own(
    a: Checkpoint, b: Checkpoint, rank: int, mine: TensorRef, theirs: TensorRef
) -> TensorDifference | None:
    """How a tensor of one rank differs: these are read whole."""
    looks = (mine.dtype, tuple(mine.shape)), (theirs.dtype, tuple(theirs.shape))
    if looks[0][1] != looks[1][1]:
        return TensorDifference(mine.key, (mine.dtype, theirs.dtype), (looks[0][1], looks[1][1]))
    tally = _Tally()
    parts = [
        step.own_tensor(rank, ref).flatten().split(max(1, PART_BYTES // ITEM_BYTES[ref.dtype]))
        for step, ref in ((a, mine), (b, theirs))
    ]
    if len(parts[0]) != len(parts[1]):
        parts = [[torch.cat(list(each))] for each in parts]
    for x, y in zip(*parts, strict=True):
        tally.add(x, y)
    found: TensorDifference | None = tally.difference(mine.key, *looks)
    return found


def _comparable(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        return part.to(torch.complex128)
    return part.float().double() if part.element_size() == 1 and part.is_floating_point() else part.double()


def _apart(mine: torch.Tensor, theirs: torch.Tensor, wide: list[torch.Tensor]) -> torch.Tensor:
    """The absolute differences. Those of large integers are exact where they fit, which doubles would lose."""
    apart = (wide[0] - wide[1]).abs().double()
    if any(each.is_floating_point() or each.is_complex() or each.dtype == torch.uint64 for each in (mine, theirs)):
        return apart
    small = (wide[0].abs() < _MOST_EXACT) & (wide[1].abs() < _MOST_EXACT)
    return torch.where(small, (mine.to(torch.int64) - theirs.to(torch.int64)).abs().double(), apart)


def _bytes(step: Checkpoint, key: str) -> int:
    return ITEM_BYTES[step.spec(key).dtype] * math.prod(step.shape(key))


def _rank_refs(tree: Any, path: str = "") -> Iterator[tuple[str, RankRef]]:
    """What each rank has of its own, by key."""
    if isinstance(tree, RankRef):
        yield path, tree
    for key, item in _inside(tree, path):
        yield from _rank_refs(item, key)


def _own_leaves(step: Checkpoint, refs: list[tuple[str, RankRef]], rank: int) -> Iterator[tuple[str, Any]]:
    """The plain values and tensors that a rank has of its own, by key. Where ranks share one, it is that of its owner."""
    mine = [(path, ref) for path, ref in refs if not ref.owners or rank in ref.owners]
    own: Mapping[str, Any] = step.own_of(rank) if mine else {}
    for path, ref in mine:
        if ref.key in own:
            yield from _leaves(own[ref.key], path)


def _own_keys(steps: tuple[Checkpoint, Checkpoint], of_ranks: list[list[tuple[str, RankRef]]]) -> Iterator[str]:
    """Keys that single ranks have: those of the first of them are looked at."""
    for step, refs in zip(steps, of_ranks, strict=True):
        for rank in sorted({min(ref.owners, default=0) for _, ref in refs}):
            yield from (key for key, _ in _own_leaves(step, refs, rank))


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values and references to tensors by key; what ranks have of their own not.

    Empty containers are among them, and lists of scalars as one value each: those of a random number stream are long.
    """
    if isinstance(tree, RankRef):
        return
    inside = list(_inside(tree, path))
    plain = all(isinstance(item, _SCALARS) for _, item in inside)
    if not inside or (plain and not isinstance(getattr(tree, "tree", tree), Mapping)):
        yield path, getattr(tree, "tree", tree)
        return
    for key, item in inside:
        yield from _leaves(item, key)


def _inside(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(tree, "tree", tree)
    items: Any = inner.items() if isinstance(inner, Mapping) else ()
    if isinstance(inner, list | tuple | deque):
        items = enumerate(inner)
    for name, item in items:
        yield join(path, name), item


def _form(leaf: Any) -> Any:
    """What is equal for values that are the same to the last bit, and for no others."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.str, leaf.shape, leaf.tobytes()
    if isinstance(leaf, Mapping):
        return [(repr(key), _form(item)) for key, item in leaf.items()]
    if isinstance(leaf, list | tuple | deque):
        return [_form(item) for item in leaf]
    return repr(shown(leaf, {}))
