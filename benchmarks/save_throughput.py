"""How long a durable save takes, against the raw limit of the same storage.

2 GiB in 64 tensors: on one rank, and on two ranks as DTensors split by rows (1 GiB each).
"""

from __future__ import annotations

import statistics

from contestants import (
    Contestant,
    Dcp,
    TorchCheckpointing,
    TorchSave,
    make_state,
    ourselves,
    size_of,
)
from harness import GIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question
from rawio import RawLimit

BAR = Bar("<=", 1.18)


def save(context: Context) -> list[Result]:
    """Save with every contestant in turn, each time to a fresh directory."""
    state = make_state(context, tensors=8 if context.quick else 64)
    size = size_of(state)
    raw = RawLimit(context, size)
    raw.calibrate_write(context.directory)
    contestants: list[Contestant] = [
        raw,
        *ourselves(context),
        Dcp(context),
        Dcp(context, threads=2),
        TorchCheckpointing(context),
        TorchSave(context),
    ]
    seconds = play(context, [_entry(context, each, state) for each in contestants])
    total = sum(context.gather(size)) / GIB  # type: ignore[arg-type]
    what = f"save {total:g} GiB, {context.world} rank" + ("s" if context.world > 1 else "")
    limit = seconds[raw.name]
    found = [result(f"{what}: {raw.name} ({raw.writing})", total / statistics.median(limit), "GiB/s")]
    for each in contestants[1:]:
        own = seconds[each.name]
        bar = BAR if each.name == "keepstep" else None
        found.append(
            result(
                f"{what}: {each.name}",
                statistics.median(own),
                "s",
                against=raw.name,
                ratio=median_ratio(own, limit),
                bar=bar,
            )
        )
    return found


def _entry(context: Context, contestant: Contestant, state: dict) -> Entry:
    path = context.directory / contestant.name.replace(" ", "-") / "step-00000001"

    def after() -> None:
        if context.rank == 0:
            remove(path)

    return Entry(contestant.name, lambda: contestant.save(path, state), after=after)


if __name__ == "__main__":
    run_question({"one-rank": (1, save), "two-ranks": (2, save)})
