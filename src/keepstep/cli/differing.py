"""What ``keepstep diff`` has found, for people: counts, then the first of each kind of difference."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from keepstep.cli.comparing import Comparison, TensorDifference, ValueDifference
from keepstep.cli.words import PIPED_COLUMNS, number_words, plural, safe

__all__ = ["print_comparison"]

SHOWN = 20
MOST_TEXT = 60


def print_comparison(found: Comparison, console: Console) -> None:
    """A line of counts, a table of tensors, and a line for each other difference."""
    counts = {
        f"{plural(found.equal, 'tensor')} equal to the last bit": True,
        f"{len(found.tensors):,} different": found.tensors,
        f"{len(found.only_a):,} only in A": found.only_a,
        f"{len(found.only_b):,} only in B": found.only_b,
        f"{plural(len(found.values), 'value')} different": found.values,
    }
    console.print(", ".join(text for text, wanted in counts.items() if wanted), soft_wrap=True)
    if found.lone:
        worlds, side = found.worlds, "A" if found.worlds[0] > found.worlds[1] else "B"
        saved = f"A was saved by {plural(worlds[0], 'rank')}, B by {worlds[1]:,}"
        have = (
            f"has a value of its own in {side} alone"
            if len(found.lone) == 1
            else f"have values of their own in {side} alone"
        )
        console.print(f"{saved}: {_ranks(found.lone)} {have}", soft_wrap=True)
    if found.tensors:
        _print_tensors(found.tensors, console)
    for label, keys in (("A", found.only_a), ("B", found.only_b)):
        for key in keys[:SHOWN]:
            console.print(f"only in {label}: {safe(key)}", soft_wrap=True)
    for value in found.values[:SHOWN]:
        console.print(_value_words(value), soft_wrap=True)
    if max(map(len, (found.tensors, found.only_a, found.only_b, found.values))) > SHOWN:
        console.print(f"the first {SHOWN} of each are shown; --json lists all", soft_wrap=True)


def _print_tensors(lines: tuple[TensorDifference, ...], console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold")
    for name in ("elements", "max", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for line in lines[:SHOWN]:
        numbers = ["–" if each is None else f"{each:.3g}" for each in (line.max, line.mean)]
        elements = "–" if line.elements is None else f"{line.elements:,}"
        table.add_row(safe(line.key), elements, *numbers, _remark(line))
    console.print(table)


def _remark(line: TensorDifference) -> str:
    pairs = (line.dtypes, tuple(str(list(shape)) for shape in line.shapes))
    notes = [" and ".join(pair) for pair in pairs if pair[0] != pair[1]]
    if line.not_finite:
        notes.append(f"{line.not_finite:,} not finite")
    if line.ranks is not None:
        notes.append(f"on {_ranks(line.ranks)}")
    return ", ".join(notes)


def _value_words(value: ValueDifference) -> str:
    where = f" on {_ranks(value.ranks)}" if value.ranks is not None else ""
    if value.only:
        return f"{safe(value.key)}: only in {value.only.upper()}{where}"
    return f"{safe(value.key)}: {safe(_pair_words(value.a, value.b))}{where}"


def _pair_words(a: object, b: object) -> str:
    """Both values; of long ones where they begin to differ."""
    texts = repr(a), repr(b)
    if isinstance(a, list) and isinstance(b, list) and max(map(len, texts)) > MOST_TEXT:
        differ = [x != y for x, y in zip(a, b, strict=False)]
        count, sizes = (
            sum(differ) + abs(len(a) - len(b)),
            f"{len(a):,}" if len(a) == len(b) else f"{len(a):,} and {len(b):,}",
        )
        first = differ.index(True) if any(differ) else min(len(a), len(b))
        return f"{count:,} of {sizes} items differ, the first is item {first:,}"
    first = next((at for at, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
    return f"{_clipped(texts[0], first)} in A, {_clipped(texts[1], first)} in B"


def _clipped(text: str, first: int) -> str:
    """Of a long text that place, with some of what is before it."""
    if len(text) <= MOST_TEXT:
        return text
    start = max(0, min(first - MOST_TEXT // 4, len(text) - MOST_TEXT + 1))
    return (
        f"{'…' if start else ''}{text[start : start + MOST_TEXT - 1]}{'…' if start + MOST_TEXT - 1 < len(text) else ''}"
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {number_words(ranks)}"
