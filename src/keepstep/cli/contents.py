"""``keepstep cat``: what is saved under one key: figures and the first elements of a tensor, or plain values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from keepstep.checkpointer.opened import Checkpoint
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import layout_words, piece_count, plural, safe, size_words
from keepstep.errors import StepNotFoundError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import near
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, join

__all__ = ["PART_BYTES", "Contents", "Figures", "print_contents", "read_contents", "shown"]

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
    JSON has it; what JSON has not is text.
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


def read_contents(opened: Checkpoint, key: str, *, head: int, rank: int, errors: Console) -> Contents:
    """Reads a tensor part by part, or the plain values below a key.

    Raises:
        StepNotFoundError: nothing is saved under that key; names those that look like it.
        CorruptError: its bytes are not what was written.
    """
    path, manifest = opened.describe()["url"], opened.manifest
    if key in opened:
        spec, shape = opened.spec(key), opened.shape(key)
        layout = manifest.layouts[spec.layout]
        size = math.prod(shape) * ITEM_BYTES[spec.dtype]
        figures, first = _figures(opened, key, head, errors)
        return Contents(
            path,
            key,
            "tensor",
            spec.dtype,
            shape,
            layout_words(layout, manifest.meshes),
            piece_count(layout, manifest.meshes),
            size,
            figures,
            first,
            spec.key if spec.key != key else None,
        )
    if rank >= manifest.world_size:
        raise StepNotFoundError(f"{path} was saved by {plural(manifest.world_size, 'rank')}: there is no rank {rank}")
    tree, own = opened.tree_of(rank)
    keys: list[str] = []
    found, of_rank = _node_at(tree, own, key, keys)
    if found is None:
        raise StepNotFoundError(f"nothing is saved under {key!r} in {path}{near(key, [*opened, *keys])}")
    return Contents(path, key, "value", value=shown(found[0], own), ranks=manifest.world_size if of_rank else None)


def _figures(
    opened: Checkpoint, key: str, head: int, errors: Console
) -> tuple[Figures, tuple[float | int | bool | str, ...]]:
    """Figures and first elements of a tensor, which is read once; the bar goes to ``errors`` where that is a terminal."""
    total = math.prod(opened.shape(key)) * ITEM_BYTES[opened.spec(key).dtype]
    first: list[Any] = []
    zeros = nans = infs = count = 0
    mean = spread = 0.0
    least: list[float | int] = []
    with bar_of(errors) as bar:
        task = bar.add_task(safe(key), total=total)
        for part in opened.parts(key, PART_BYTES):
            first.extend(_plain(each) for each in part[: max(0, head - len(first))])
            wide = _wide(part)
            zeros += int((wide == 0).sum())
            if wide.is_floating_point():
                nans += int(wide.isnan().sum())
                infs += int(wide.isinf().sum())
                wide = wide[wide.isfinite()]
            if wide.numel():
                least += [wide.min().item(), wide.max().item()]
                least = [min(least), max(least)]
                # Means and squares of two parts together, without the loss of large sums.
                real = wide.double()
                here, more = float(real.mean()), wide.numel()
                apart = here - mean
                count += more
                mean += apart * more / count
                spread += float((real - here).square().sum()) + apart * apart * more * (count - more) / count
            bar.update(task, advance=part.numel() * part.element_size())
    if not count:
        return Figures(zeros=zeros, nans=nans, infs=infs), tuple(first)
    return Figures(least[0], least[1], mean, math.sqrt(spread / count), zeros, nans, infs), tuple(first)


def print_contents(found: Contents, console: Console) -> None:
    """For people, 80 columns and more."""
    if found.kind == "value":
        if found.ranks is not None:
            console.print(f"one of the values that {plural(found.ranks, 'rank')} have of their own", soft_wrap=True)
        for line in _lines(found.value, ""):
            console.print(safe(line), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    elements, figures = math.prod(found.shape or ()), found.figures or Figures()
    rows = {
        "key": safe(found.key) + (f", same as {safe(found.same_as)}" if found.same_as else ""),
        "tensor": f"{found.dtype} {list(found.shape or ())}, {plural(elements, 'element')}, {size_words(found.bytes or 0)}",
        "layout": f"{found.layout}, {plural(found.pieces or 0, 'piece')}",
        "min, max": "" if figures.min is None else f"{figures.min:.6g}, {figures.max:.6g}",
        "mean, std": "" if figures.mean is None else f"{figures.mean:.6g}, {figures.std:.6g}",
        "zeros": f"{figures.zeros:,}" + (f" ({100 * figures.zeros / elements:.3g} %)" if elements else ""),
        "not finite": f"{figures.nans:,} nan, {figures.infs:,} inf" if figures.nans + figures.infs else "",
        "head": " ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in found.head or ()),
    }
    for name, text in rows.items():
        if text:
            grid.add_row(name, text)
    console.print(grid)


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
    return repr(node)


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
            found += [f"{indent}- {number}:", *_lines(item, indent + "  ")]
        return found
    return [f"{indent}{value!r}"]
