"""``keepstep stats``: what the saves of a run have cost, from the records that each of them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from keepstep.cli.words import plural, safe, size_words, time_words
from keepstep.commit.catalog import read_catalog
from keepstep.commit.records import RECORDS_NAME, SaveRecord, read_records
from keepstep.storage.base import Storage

__all__ = ["FailureCount", "Percentiles", "Stats", "print_stats", "read_stats"]

PIPED_COLUMNS = 10_000
FEWEST_COLUMNS = 80
MEASURED = ("stall_s", "staged_s", "durable_s", "bytes_per_s")
_WORDS = {"stall_s": "stall", "staged_s": "staged", "durable_s": "durable", "bytes_per_s": "rate"}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How one measure is spread over some saves."""

    min: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failed saves of one kind; ``step`` and ``error`` are those of the last one."""

    code: str
    count: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Stats:
    """The saves of a run; the fields are those of the JSON output.

    ``recorded`` counts all records, ``saves`` are those looked at, oldest first. ``percentiles`` are over committed saves;
    ``first`` over those that were the first of their agent, which the others leave out. ``steps`` counts committed steps.
    """

    root: str
    recorded: int
    committed: int
    failed: int
    percentiles: dict[str, Percentiles]
    first: dict[str, Percentiles]
    failures: tuple[FailureCount, ...]
    steps: int
    saves: tuple[SaveRecord, ...]


def read_stats(root: Storage, last: int | None) -> Stats:
    """What the records of a run say; with ``last`` only the newest so many are looked at."""
    records = read_records(root)
    saves = tuple(records if last is None else records[max(0, len(records) - last) :])
    good = [save for save in saves if save.outcome == "committed"]
    bad = [save for save in saves if save.outcome != "committed"]
    return Stats(
        root=root.url,
        recorded=len(records),
        committed=len(good),
        failed=len(bad),
        percentiles=_percentiles([save for save in good if not save.first]),
        first=_percentiles([save for save in good if save.first]),
        failures=_failures(bad),
        steps=len(read_catalog(root).steps),
        saves=saves,
    )


def print_stats(stats: Stats, console: Console) -> None:
    """Tables for people, 80 columns and more."""
    if not stats.recorded:
        console.print(_nothing(stats), soft_wrap=True)
        return
    _print_saves(stats, console)
    console.print()
    left_out = stats.recorded - len(stats.saves)
    of = f", the newest of {stats.recorded:,}" if left_out else ""
    console.print(f"{plural(len(stats.saves), 'save')}{of}: {stats.committed:,} committed, {stats.failed:,} failed")
    if stats.committed:
        console.print()
        _print_percentiles(stats, console)
    for failure in stats.failures:
        console.print(
            f"\n{failure.count:,} failed with {safe(failure.code)}, the last one at step {failure.step}:"
            f" {safe(failure.error)}",
            soft_wrap=True,
        )


def _print_saves(stats: Stats, console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    # A number of which the end is missing is worse than a line that the terminal breaks.
    console.width = max(console.width, FEWEST_COLUMNS)
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in ("step", "", "size", "stall", "staged", "durable", "write", "commit", "slowest", "rate"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for save in stats.saves:
        write = save.ranks.get("write")
        good = save.outcome == "committed"
        table.add_row(
            str(save.step),
            ("first" if save.first else "") if good else "FAILED",
            size_words(save.bytes) if good else "–",
            time_words(save.stall_s),
            time_words(save.staged_s),
            time_words(save.durable_s) if good else "–",
            time_words(write.most) if write else "–",
            time_words(save.commit_s) if good else "–",
            f"rank {write.rank}" if write and save.world > 1 else "–",
            _amount("bytes_per_s", save.bytes_per_s if good else None),
        )
    console.print(table)


def _print_percentiles(stats: Stats, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("min", "median", "p90", "p99", "max", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in MEASURED:
        spread, first = stats.percentiles.get(name), stats.first.get(name)
        values = [spread.min, spread.median, spread.p90, spread.p99, spread.max] if spread else [None] * 5
        cells = [_amount(name, value) for value in (*values, first.median if first else None)]
        table.add_row(_WORDS[name], *cells)
    console.print(table)
    firsts = sum(save.first and save.outcome == "committed" for save in stats.saves)
    if firsts > 1:
        console.print(f"first: the median of {firsts} saves, each the first of its agent; the others leave them out")


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{size_words(int(value))}/s" if name == "bytes_per_s" else time_words(value)


def _nothing(stats: Stats) -> str:
    text = f"no save is recorded in {safe(stats.root)}"
    if not stats.steps:
        return f"{text}, and no step is committed there"
    return (
        f"{text}, although {plural(stats.steps, 'step')} {'is' if stats.steps == 1 else 'are'} committed there:"
        f" {RECORDS_NAME} is written by background saves of a Checkpointer only"
    )


def _percentiles(saves: Sequence[SaveRecord]) -> dict[str, Percentiles]:
    if not saves:
        return {}
    return {name: _spread([getattr(save, name) for save in saves]) for name in MEASURED}


def _spread(values: list[float]) -> Percentiles:
    """Percentiles between the two nearest values, as numpy has them."""
    ordered = sorted(values)

    def at(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low + part * (high - low)

    return Percentiles(ordered[0], at(0.5), at(0.9), at(0.99), ordered[-1])


def _failures(saves: Sequence[SaveRecord]) -> tuple[FailureCount, ...]:
    """Failed saves by code, the most frequent first."""
    by_code: dict[str, list[SaveRecord]] = {}
    for save in saves:
        by_code.setdefault(save.code, []).append(save)
    counts = [FailureCount(code, len(bad), bad[-1].step, bad[-1].error) for code, bad in by_code.items()]
    return tuple(sorted(counts, key=lambda failure: -failure.count))
