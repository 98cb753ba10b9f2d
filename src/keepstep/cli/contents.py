"""``keepstep cat``: what is saved under one key: figures and the first elements of a tensor, or plain values."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from keepstep.checkpointer.opened import Checkpoint
from keepstep.cli.slices import Part, cut_out, slices_of, split_key
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import layout_words, number_words, piece_count, plural, safe, size_words
from keepstep.errors import UsageError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import near
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, join

__all__ = ["PART_BYTES", "Contents", "Figures", "print_contents", "read_contents", "shown"]

HEAD = 8
SLICE_HEAD = 256
SHOWN_ITEMS = 12
SHOWN_TEXT = 72
_RAW = re.compile(r"([\d,]+ bytes|array \w+ \[[\d, ]*\]) ")
"""How a text begins that stands for bytes or an array."""
PART_BYTES = 8 << 20
"""How much of a tensor is in memory at once, before it is made wide."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A tensor in numbers. ``min`` to ``std`` are of the finite elements, by magnitude where these are complex.

    ``std`` is that of the whole population. None where there is no finite element.
    """

    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int = 0
    nans: int = 0
    infs: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What is saved under a key; the fields are those of the JSON output. ``kind`` is tensor or value.

    ``head`` are the first elements of a tensor, row by row. ``same_as`` is set for a tied one. ``value`` is a plain value as
    JSON has it; what JSON has not is text. With ``part``, a slice of a tensor of the shape ``whole``, everything is of that.
    ``ranks`` is how many have a value of their own, ``rank`` whose it is.
    """

    path: str
    key: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    layout: str | None = None
    pieces: int | None = None
    bytes: int | None = None
    figures: Figures | None = None
    head: tuple[float | int | bool | str, ...] | None = None
    same_as: str | None = None
    value: Any = None
    ranks: int | None = None
    rank: int | None = None
    part: str | None = None
    whole: tuple[int, ...] | None = None


def read_contents(opened: Checkpoint, key: str, *, head: int | None, rank: int, errors: Console) -> Contents:
    """Reads a tensor part by part, or the plain values below a key; without ``head`` as many first elements as are of use.

    Raises:
        UsageError: nothing is saved under that key; names those that look like it. Or a slice is not one of that tensor.
        CorruptError: its bytes are not what was written.
    """
    path, manifest = opened.describe()["url"], opened.manifest
    name, inside = (key, None) if key in opened else split_key(key)
    if name in opened:
        spec, shape = opened.spec(name), opened.shape(name)
        layout = manifest.layouts[spec.layout]
        known = Contents(
            path,
            name,
            "tensor",
            spec.dtype,
            shape,
            layout_words(layout, manifest.meshes),
            piece_count(layout, manifest.meshes),
            same_as=spec.key if spec.key != name else None,
        )
        part = cut_out(inside, name, shape) if inside is not None else None
        parts = opened.parts(name, PART_BYTES, part.box if part else None)
        return _measured(known, parts, part=part, head=head, errors=errors)
    if rank >= manifest.world_size:
        raise UsageError(f"{path} was saved by {plural(manifest.world_size, 'rank')}: there is no rank {rank}")
    tree, own = opened.tree_of()[0], opened.own_of(rank)
    keys: list[str] = []
    found, of_rank = _node_at(tree, own, key, keys)
    if found is None and name != key:
        found, of_rank = _node_at(tree, own, name, keys)
    else:
        name, inside = key, None
    if found is None:
        hint = near(name, list(dict.fromkeys((*opened, *keys))))
        raise UsageError(f"nothing is saved under {name!r} in {path}{hint}")
    (node,) = found
    known = Contents(
        path, name, "value", ranks=manifest.world_size if of_rank else None, rank=rank if of_rank else None
    )
    if isinstance(node, RankRef) and node.key not in own:
        owners = f"; those of ranks {number_words(sorted({*node.owners}))} are there" if node.owners else ""
        raise UsageError(f"{path} has no value of rank {rank} under {name!r}{owners}")
    if isinstance(node, TensorRef) and node.own:
        known = replace(
            known, kind="tensor", dtype=node.dtype, shape=node.shape, layout=f"of rank {rank} alone", pieces=1
        )
        part = cut_out(inside, name, node.shape) if inside is not None else None
        tensor = opened.own_tensor(rank, node)
        return _measured(known, iter([tensor[slices_of(part)].flatten()]), part=part, head=head, errors=errors)
    if inside is not None:
        raise UsageError(f"[{inside}]: {name!r} is no tensor in {path}, and has no parts that a slice could name")
    return replace(known, value=shown(node, own))


def _measured(
    known: Contents, parts: Iterator[torch.Tensor], *, part: Part | None, head: int | None, errors: Console
) -> Contents:
    """Figures and first elements of a tensor, which is read once; the bar goes to ``errors`` where that is a terminal."""
    shape = known.shape or ()
    size = math.prod(part.shape if part else shape) * ITEM_BYTES[known.dtype or ""]
    most = head if head is not None else SLICE_HEAD if part else HEAD
    first: list[Any] = []
    tally = _Tally()
    with bar_of(errors) as bar:
        task = bar.add_task(safe(known.key), total=size)
        for one in parts:
            first.extend(_plain(each) for each in one[: max(0, most - len(first))])
            tally.add(one)
            bar.update(task, advance=one.numel() * one.element_size())
    found = replace(known, bytes=size, figures=tally.figures(), head=tuple(first))
    return replace(found, shape=part.shape, part=str(part.box), whole=shape) if part else found


@dataclass(slots=True)
class _Tally:
    """What is known of a tensor so far."""

    zeros: int = 0
    nans: int = 0
    infs: int = 0
    count: int = 0
    mean: float = 0.0
    spread: float = 0.0
    ends: list[float | int] = field(default_factory=list)

    def add(self, part: torch.Tensor) -> None:
        """Some more of its elements."""
        wide = _wide(part)
        self.zeros += int((wide == 0).sum())
        if wide.is_floating_point():
            self.nans += int(wide.isnan().sum())
            self.infs += int(wide.isinf().sum())
            wide = wide[wide.isfinite()]
        if wide.numel():
            self.ends += [wide.min().item(), wide.max().item()]
            self.ends = [min(self.ends), max(self.ends)]
            # Means and squares of two parts together, without the loss of large sums.
            real = wide.double()
            here, more = float(real.mean()), wide.numel()
            apart = here - self.mean
            self.count += more
            self.mean += apart * more / self.count
            between = apart * apart * more * (self.count - more) / self.count
            self.spread += float((real - here).square().sum()) + between

    def figures(self) -> Figures:
        """All of it in numbers."""
        if not self.count:
            return Figures(zeros=self.zeros, nans=self.nans, infs=self.infs)
        std = math.sqrt(self.spread / self.count)
        return Figures(self.ends[0], self.ends[1], self.mean, std, self.zeros, self.nans, self.infs)


def print_contents(found: Contents, console: Console) -> None:
    """For people, 80 columns and more."""
    if found.kind == "value":
        if found.ranks is not None:
            console.print(f"of rank {found.rank}; each of {plural(found.ranks, 'rank')} has its own", soft_wrap=True)
        for line in _lines(found.value, ""):
            console.print(safe(line), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    elements, figures = math.prod(found.shape or ()), found.figures or Figures()
    of = f" of {list(found.whole)}" if found.whole is not None else ""
    rows = {
        "key": safe(found.key) + (f", same as {safe(found.same_as)}" if found.same_as else ""),
        "tensor": f"{found.dtype} {list(found.shape or ())}, {plural(elements, 'element')}, {size_words(found.bytes or 0)}",
        "part": (found.part or "") + of,
        "layout": f"{found.layout}, {plural(found.pieces or 0, 'piece')}",
        "min, max": "" if figures.min is None else f"{figures.min:.6g}, {figures.max:.6g}",
        "mean, std": "" if figures.mean is None else f"{figures.mean:.6g}, {figures.std:.6g}",
        "zeros": f"{figures.zeros:,}" + (f" ({100 * figures.zeros / elements:.3g} %)" if elements else ""),
        "not finite": f"{figures.nans:,} nan, {figures.infs:,} inf" if figures.nans + figures.infs else "",
        "head": "" if of else " ".join(map(_number, found.head or ())),
    }
    for name, text in rows.items():
        if text:
            grid.add_row(name, text)
    console.print(grid)
    if of and found.head:
        _print_rows(found, console)


def _print_rows(found: Contents, console: Console) -> None:
    """The first elements of a slice, a line for each row of its last dimension, in columns."""
    cells = [_number(each) for each in found.head or ()]
    long = (found.shape or (1,))[-1] if found.shape else 1
    width = max(map(len, cells))
    for start in range(0, len(cells), long):
        row = " ".join(cell.rjust(width) for cell in cells[start : start + long])
        console.print(row, soft_wrap=True)
    left = math.prod(found.shape or ()) - len(cells)
    if left:
        console.print(f"and {plural(left, 'element')} more; --head N", soft_wrap=True)


def _number(value: float | int | bool | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def shown(node: Any, own: Mapping[str, Any]) -> Any:
    """A saved tree as JSON has it; tensors, and what JSON has not, as text. Values of a rank are taken from ``own``."""
    if isinstance(node, TensorRef):
        return f"tensor {node.dtype} {list(node.shape)}"
    if isinstance(node, RankRef):
        return shown(own.get(node.key), own)
    if isinstance(node, ObjectNode):
        return shown(node.tree, own)
    if isinstance(node, TorchValue):
        return f"torch.{node.kind} {node.text}"
    if isinstance(node, Mapping):
        return {key if isinstance(key, str) else repr(key): shown(item, own) for key, item in node.items()}
    if isinstance(node, list | tuple | deque):
        return [shown(item, own) for item in node]
    if isinstance(node, bool | str) or node is None or (isinstance(node, int) and abs(node) < 1 << 63):
        return node
    if isinstance(node, float) and math.isfinite(node):
        return node
    if isinstance(node, bytes | bytearray):
        return f"{len(node):,} bytes {node.hex()}"
    return f"array {node.dtype} {list(node.shape)} {node.tolist()}" if isinstance(node, np.ndarray) else repr(node)


def _node_at(
    tree: Any, own: Mapping[str, Any], wanted: str, keys: list[str], path: str = ""
) -> tuple[tuple[Any] | None, bool]:
    """The node under that key, in a tuple, and whether each rank has one of its own; ``keys`` gets those that were seen."""
    of_rank = isinstance(tree, RankRef)
    inner = own.get(tree.key) if isinstance(tree, RankRef) else tree
    inner = inner.tree if isinstance(inner, ObjectNode) else inner
    if path == wanted:
        return (tree,), of_rank
    items: Any = inner.items() if isinstance(inner, Mapping) else ()
    if isinstance(inner, list | tuple | deque):
        items = enumerate(inner)
    for name, item in items:
        key = join(path, name)
        keys.append(key)
        if wanted == key or wanted.startswith(f"{key}/"):
            found, more = _node_at(item, own, wanted, keys, key)
            return found, more or of_rank
    return None, False


def _wide(part: torch.Tensor) -> torch.Tensor:
    """The elements in a type that can be counted and compared, without loss where there is one."""
    if part.is_complex():
        return part.abs().double()
    if part.is_floating_point():
        return part.double() if part.element_size() >= 2 else part.float().double()
    if part.dtype in (torch.bool, torch.uint16, torch.uint32):
        return part.to(torch.int64)
    return part.double() if part.dtype == torch.uint64 else part


def _plain(element: torch.Tensor) -> float | int | bool | str:
    value = element.float().item() if element.is_floating_point() and element.element_size() == 1 else element.item()
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _lines(value: Any, indent: str) -> list[str]:
    """A value as indented lines: entries by name, short lists in one line."""
    if isinstance(value, dict) and value:
        found = []
        for key, item in value.items():
            inner = _lines(item, indent + "  ")
            short = len(inner) == 1 and not (isinstance(item, dict) and item)
            found += [f"{indent}{key}: {inner[0].strip()}"] if short else [f"{indent}{key}:", *inner]
        return found
    if isinstance(value, list) and any(isinstance(item, dict | list) and item for item in value):
        found = []
        for number, item in enumerate(value):
            inner = _lines(item, indent + "  ")
            short = len(inner) == 1 and not (isinstance(item, dict) and item)
            found += [f"{indent}- {number}: {inner[0].strip()}"] if short else [f"{indent}- {number}:", *inner]
        return found
    if isinstance(value, list) and len(value) > SHOWN_ITEMS:
        return [f"{indent}[{', '.join(map(repr, value[:SHOWN_ITEMS]))}, … {len(value):,} in all; --json has them]"]
    if isinstance(value, str) and len(value) > SHOWN_TEXT and _RAW.match(value):
        return [f"{indent}{value[:SHOWN_TEXT]}… (--json has all)"]
    return [f"{indent}{value!r}"]
