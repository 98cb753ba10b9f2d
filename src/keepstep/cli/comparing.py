"""``keepstep diff``: how two steps differ: keys, shapes, dtypes, bits, and how far their numbers are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from keepstep.checkpointer.opened import Checkpoint
from keepstep.cli.contents import PART_BYTES, shown
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import plural, safe
from keepstep.errors import UsageError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import Globs, near
from keepstep.format.objects import RankRef, TensorRef, join

__all__ = ["Comparison", "TensorDifference", "ValueDifference", "compare", "print_comparison"]

SHOWN = 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both steps have, and not the same. ``elements`` differ, and of those ``not_finite`` in one or both.

    ``max`` and ``mean`` are of the absolute differences, the mean over all elements but the ``not_finite`` ones. None
    where shapes differ, which are not compared.
    """

    key: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int | None = None
    max: float | None = None
    mean: float | None = None
    not_finite: int = 0


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A plain value that differs; as JSON has it. A side that has none says so in ``only``: ``a`` or ``b``."""

    key: str
    a: Any = None
    b: Any = None
    only: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps; the fields are those of the JSON output. ``equal`` counts tensors that are the same to the last bit."""

    a: str
    b: str
    same: bool
    equal: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]


def compare(a: Checkpoint, b: Checkpoint, only: list[str], errors: Console) -> Comparison:
    """Compares the chosen keys of two steps, a part of a tensor at a time; values of ranks are those of rank 0.

    Raises:
        UsageError: a pattern that fits no key of either step.
        CorruptError: bytes are not what was written.
    """
    globs = Globs(only, "--only")
    plain = [dict(_leaves(*step.tree_of())) for step in (a, b)]
    keys = list(dict.fromkeys((*a, *b)))
    everything = list(dict.fromkeys((*keys, *plain[0], *plain[1])))
    idle = globs.idle(everything)
    if idle and idle != ["**"]:
        hints = "".join(near(pattern, everything) for pattern in idle)
        raise UsageError(f"--only {' '.join(idle)}: no key of either step fits{hints}")
    keys = [key for key in keys if globs.takes(key)]
    both = [key for key in keys if key in a and key in b]
    differences = []
    with bar_of(errors) as bar:
        task = bar.add_task("comparing", total=sum(_bytes(a, key) for key in both))
        for key in both:
            difference = _compare(a, b, key, bar)
            if difference is not None:
                differences.append(difference)
            bar.update(task, advance=_bytes(a, key) if a.shape(key) != b.shape(key) else 0)
    values = []
    for key in (key for key in dict.fromkeys((*plain[0], *plain[1])) if globs.takes(key)):
        sides = [key in each for each in plain]
        if not all(sides):
            mine, theirs = (each.get(key) for each in plain)
            values.append(ValueDifference(key, mine, theirs, "a" if sides[0] else "b"))
        elif repr(plain[0][key]) != repr(plain[1][key]):
            values.append(ValueDifference(key, plain[0][key], plain[1][key]))
    only_a, only_b = (tuple(key for key in keys if key not in other) for other in (b, a))
    return Comparison(
        a.describe()["url"],
        b.describe()["url"],
        not (differences or values or only_a or only_b),
        len(both) - len(differences),
        only_a,
        only_b,
        tuple(differences),
        tuple(values),
    )


def _compare(a: Checkpoint, b: Checkpoint, key: str, bar: Progress) -> TensorDifference | None:
    """How one tensor differs; None where it does not."""
    dtypes, shapes = (a.spec(key).dtype, b.spec(key).dtype), (a.shape(key), b.shape(key))
    if shapes[0] != shapes[1]:
        return TensorDifference(key, dtypes, shapes)
    changed = not_finite = compared = 0
    most = total = 0.0
    # Parts of as many elements on both sides.
    elements = PART_BYTES // max(ITEM_BYTES[dtype] for dtype in dtypes)
    both = (step.parts(key, elements * ITEM_BYTES[dtype]) for step, dtype in zip((a, b), dtypes, strict=True))
    for mine, theirs in zip(*both, strict=True):
        bar.advance(bar.task_ids[0], mine.numel() * mine.element_size())
        if mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            compared += mine.numel()
            continue
        wide = [_comparable(each) for each in (mine, theirs)]
        finite = wide[0].isfinite() & wide[1].isfinite()
        apart = (wide[0] - wide[1]).abs()[finite].double()
        if mine.dtype == theirs.dtype:
            rows = [each.view(torch.uint8).view(len(each), -1) for each in (mine, theirs)]
            unlike = (rows[0] != rows[1]).any(1)
        else:
            unlike = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
        changed += int(unlike.sum())
        strange = int((unlike & ~finite).sum())
        not_finite += strange
        compared += mine.numel() - strange
        most = max(most, float(apart.max())) if apart.numel() else most
        total += float(apart.sum())
    if not changed and dtypes[0] == dtypes[1]:
        return None
    return TensorDifference(key, dtypes, shapes, changed, most, total / compared if compared else None, not_finite)


def _comparable(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        return part.to(torch.complex128)
    return part.float().double() if part.element_size() == 1 and part.is_floating_point() else part.double()


def _bytes(step: Checkpoint, key: str) -> int:
    spec = step.spec(key)
    return ITEM_BYTES[spec.dtype] * torch.Size(step.shape(key)).numel()


def _leaves(tree: Any, own: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values by key, as JSON has them; empty containers among them, tensors not."""
    if isinstance(tree, TensorRef):
        return
    if isinstance(tree, RankRef):
        yield from _leaves(own.get(tree.key), own, path)
        return
    inner = getattr(tree, "tree", tree)
    items: Any = inner.items() if isinstance(inner, Mapping) else enumerate(inner) if isinstance(inner, list) else ()
    if not inner or not isinstance(inner, Mapping | list):
        yield path, shown(inner, own)
    for name, item in items:
        yield from _leaves(item, own, join(path, name))


def print_comparison(found: Comparison, console: Console) -> None:
    """For people: counts, then the first of each kind of difference."""
    counts = {
        f"{plural(found.equal, 'tensor')} equal to the last bit": True,
        f"{len(found.tensors):,} different": found.tensors,
        f"{len(found.only_a):,} only in A": found.only_a,
        f"{len(found.only_b):,} only in B": found.only_b,
        f"{plural(len(found.values), 'value')} different": found.values,
    }
    console.print(", ".join(text for text, wanted in counts.items() if wanted), soft_wrap=True)
    if found.tensors:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, justify in (
            ("key", "left"),
            ("elements", "right"),
            ("max", "right"),
            ("mean", "right"),
            ("", "left"),
        ):
            table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for line in found.tensors[:SHOWN]:
            numbers = ["–" if each is None else f"{each:.3g}" for each in (line.max, line.mean)]
            elements = "–" if line.elements is None else f"{line.elements:,}"
            table.add_row(safe(line.key), elements, *numbers, _remark(line))
        console.print(table)
    for label, keys in (("A", found.only_a), ("B", found.only_b)):
        for key in keys[:SHOWN]:
            console.print(f"only in {label}: {safe(key)}", soft_wrap=True)
    for value in found.values[:SHOWN]:
        sides = f"only in {value.only.upper()}" if value.only else f"{value.a!r} in A, {value.b!r} in B"
        console.print(f"{safe(value.key)}: {safe(sides)}", soft_wrap=True)
    if max(map(len, (found.tensors, found.only_a, found.only_b, found.values))) > SHOWN:
        console.print(f"the first {SHOWN} of each are shown; --json lists all", soft_wrap=True)


def _remark(line: TensorDifference) -> str:
    pairs = (line.dtypes, tuple(str(list(shape)) for shape in line.shapes))
    notes = [" and ".join(pair) for pair in pairs if pair[0] != pair[1]]
    if line.not_finite:
        notes.append(f"{line.not_finite:,} not finite")
    return ", ".join(notes)
