"""The contents of a step as a tree: what takes how much, at every depth. Keys are cut at slashes and at dots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.console import Console
from rich.table import Table

from keepstep.cli.tensors import TensorLine
from keepstep.cli.words import PIPED_COLUMNS, safe, share_words, size_words

__all__ = ["TreeLine", "grow", "print_tree"]

FEWEST_ALIKE = 3
"""So many numbered parts in a row, which have the same in them, are shown as one."""
SHOWN_DTYPES = 3
NARROW_COLUMNS = 72
"""A terminal that has fewer is shown less."""
INDENT = "  "
_SEGMENT = re.compile(r"[^/.]*[/.]?")


@dataclass(frozen=True, slots=True)
class TreeLine:
    """What lies below a part of keys, or one tensor: then ``shape`` is set. ``share`` is of all tensors of the step.

    ``name`` is the last part of ``key``, with what parts it from the next one. ``depth`` counts from 1, the components.
    ``ranks`` is how many of them hold something of it.
    """

    key: str
    name: str
    depth: int
    tensors: int
    bytes: int
    share: float
    ranks: int
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    layout: str | None = None
    pieces: int | None = None
    same_as: str | None = None


@dataclass(slots=True)
class _Node:
    name: str
    inside: dict[str, _Node] = field(default_factory=dict)
    tensor: TensorLine | None = None
    tensors: int = 0
    bytes: int = 0
    holders: set[int] = field(default_factory=set)
    dtypes: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A line with those below it; in a branch that stands for several alike, ``name`` says for which."""

    line: TreeLine
    inside: tuple[_Branch, ...]

    @property
    def form(self) -> object:
        """The same for branches that have the same in them, whatever they are called."""
        here = self.line
        below = tuple((each.line.name, each.form) for each in self.inside)
        return here.tensors, here.bytes, here.ranks, here.dtypes, here.shape, here.layout, here.same_as, below


def grow(
    lines: Iterable[TensorLine],
    holders: Mapping[str, frozenset[int]],
    *,
    empty: Iterable[str] = (),
    total_bytes: int,
    depth: int,
) -> tuple[TreeLine, ...]:
    """The tree of these tensors down to a depth, in their order.

    Args:
        lines: the tensors.
        holders: the ranks that hold something of each, by key.
        empty: components that have none.
        total_bytes: what shares are of.
        depth: 1 for the components alone.
    """
    root = _Node("")
    for line in lines:
        here = root
        for segment in filter(None, _SEGMENT.findall(line.key)):
            here = here.inside.setdefault(segment, _Node(segment))
            here.tensors += 1
            here.bytes += line.bytes
            here.holders |= holders[line.key]
            here.dtypes[line.dtype] = None
        here.tensor = line
    for name in empty:
        root.inside.setdefault(name, _Node(name))
    return tuple(_lines(root, "", 1, depth, total_bytes))


def _lines(above: _Node, path: str, depth: int, most: int, total_bytes: int) -> Iterator[TreeLine]:
    for node in above.inside.values() if depth <= most else ():
        key, one = path + node.name, node.tensor
        line = TreeLine(
            key.removesuffix("/").removesuffix(".") if node.inside else key,
            node.name,
            depth,
            node.tensors,
            node.bytes,
            round(node.bytes / total_bytes, 6) if total_bytes else 0.0,
            len(node.holders),
            tuple(node.dtypes),
        )
        yield (
            line
            if one is None
            else replace(line, shape=one.shape, layout=one.layout, pieces=one.pieces, same_as=one.same_as)
        )
        yield from _lines(node, key, depth + 1, most, total_bytes)


def print_tree(lines: Sequence[TreeLine], console: Console) -> None:
    """For people, 60 columns and more: one line for all numbered parts that are alike, with their sum."""
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    narrow = console.width < NARROW_COLUMNS
    shown = list(_flat(map(_joined, _folded(_branches(iter(lines)))), 1))
    keys = [INDENT * (line.depth - 1) + safe(line.name) for line in shown]
    numbers = ["bytes", "share"] if narrow else ["tensors", "bytes", "share"]
    if any(line.ranks > 1 for line in lines):
        numbers.append("ranks")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0 if narrow else 1))
    table.add_column("key", overflow="fold", min_width=min(console.width // 5 * 2, max(map(len, keys), default=0)))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("contents", overflow="fold")
    for key, line in zip(keys, shown, strict=True):
        table.add_row(key, *_numbers(line, numbers), _contents(line))
    top = [line for line in lines if line.depth == 1]
    if len(top) > 1:
        counted, size = f"{sum(line.tensors for line in top):,}", size_words(sum(line.bytes for line in top))
        table.add_row("", *([size] if narrow else [counted, size]))
    console.print(table)


def _numbers(line: TreeLine, wanted: Sequence[str]) -> list[str]:
    texts = {
        "tensors": f"{line.tensors:,}" if line.shape is None or line.tensors > 1 else "",
        "bytes": size_words(line.bytes),
        "share": share_words(line.share),
        "ranks": f"{line.ranks:,}" if line.tensors else "",
    }
    return [texts[name] for name in wanted]


def _contents(line: TreeLine) -> str:
    if line.same_as is not None:
        return f"same as {safe(line.same_as)}"
    if line.shape is not None:
        cut = f", {line.layout}" if line.ranks > 1 else ""
        return f"{line.dtypes[0]} {list(line.shape)}{cut}"
    more = f" and {len(line.dtypes) - SHOWN_DTYPES} more" if len(line.dtypes) > SHOWN_DTYPES else ""
    return ", ".join(line.dtypes[:SHOWN_DTYPES]) + more if line.tensors else "no tensors"


def _branches(lines: Iterator[TreeLine]) -> tuple[_Branch, ...]:
    """The lines with those that are deeper inside of them."""
    found: list[tuple[TreeLine, list[TreeLine]]] = []
    for line in lines:
        if not found or line.depth <= found[0][0].depth:
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return tuple(_Branch(line, _branches(iter(below))) for line, below in found)


def _folded(branches: Sequence[_Branch]) -> Iterator[_Branch]:
    """The same, and one for each row of numbered branches that are alike."""
    for form, alike in groupby(branches, lambda each: (each.line.name.rstrip("/.").isdigit(), each.form)):
        group = list(alike)
        if not form[0] or len(group) < FEWEST_ALIKE:
            yield from (_Branch(each.line, tuple(_folded(each.inside))) for each in group)
            continue
        first, last = group[0], group[-1].line.name
        name = f"{first.line.name.rstrip('/.')}…{last}"
        merged = _times(_Branch(first.line, tuple(_folded(first.inside))), len(group))
        yield replace(merged, line=replace(merged.line, name=name))


def _joined(branch: _Branch) -> _Branch:
    """The same, and one line for what has one thing in it: of that."""
    inside = tuple(map(_joined, branch.inside))
    if branch.line.depth > 1 and len(inside) == 1:
        (only,) = inside
        return replace(only, line=replace(only.line, name=branch.line.name + only.line.name, depth=branch.line.depth))
    return _Branch(branch.line, inside)


def _times(branch: _Branch, count: int) -> _Branch:
    line = branch.line
    summed = replace(line, tensors=line.tensors * count, bytes=line.bytes * count, share=line.share * count)
    return _Branch(summed, tuple(_times(each, count) for each in branch.inside))


def _flat(branches: Iterable[_Branch], depth: int) -> Iterator[TreeLine]:
    for branch in branches:
        yield replace(branch.line, depth=depth)
        yield from _flat(branch.inside, depth + 1)
