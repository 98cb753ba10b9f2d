"""How long a load takes, against a raw parallel read of as many bytes.

The steps are those of save_throughput: 2 GiB on one rank, and on two ranks as DTensors. Each
contestant loads into tensors that exist, once from the device (cold: its files were dropped from
the page cache) and once from the page cache (warm). The warm-up round checks every value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from contestants import (
    Contestant,
    Dcp,
    TorchCheckpointing,
    TorchSave,
    check,
    clear,
    make_state,
    ourselves,
    size_of,
)
from harness import (
    GIB,
    Bar,
    Context,
    Entry,
    Result,
    bring_into_page_cache,
    drop_from_page_cache,
    median_ratio,
    play,
    result,
    run_question,
)
from rawio import RawLimit, Setting

WARM_BAR = Bar("<=", 1.9)
COLD_BAR = Bar("<=", 1.15)
FASTER_THAN_DCP = {1: Bar(">=", 6), 2: Bar(">=", 2)}


def load(context: Context) -> list[Result]:
    """Save once with every contestant, then load in rounds, cold and warm."""
    state = make_state(context, tensors=8 if context.quick else 64)
    size = size_of(state)
    raw = RawLimit(context, size)
    raw.calibrate_write(context.directory, rounds=1)
    contestants: list[Contestant] = [
        raw,
        *ourselves(context),
        Dcp(context),
        TorchCheckpointing(context),
        TorchSave(context),
    ]
    for each in contestants:
        each.save(_path(context, each), state)
        context.barrier()
        context.alone(lambda each=each: drop_from_page_cache(_path(context, each)))
    cold = raw.calibrate_read(_path(context, raw), cold=True, rounds=2)
    context.alone(lambda: bring_into_page_cache(_path(context, raw)))
    warm = raw.calibrate_read(_path(context, raw), cold=False)
    entries = []
    for each in contestants:
        entries += _cold_and_warm(context, each, state, {"cold": cold, "warm": warm})
    seconds = play(context, entries)
    total = sum(context.gather(size)) / GIB  # type: ignore[arg-type]
    what = f"{total:g} GiB, {context.world} rank" + ("s" if context.world > 1 else "")
    found = []
    for kind, setting in (("warm", warm), ("cold", cold)):
        limit = seconds[f"{raw.name}, {kind}"]
        found.append(result(f"load {kind} {what}: raw limit ({setting})", total / statistics.median(limit), "GiB/s"))
        for each in contestants[1:]:
            own = seconds[f"{each.name}, {kind}"]
            bar = {"warm": WARM_BAR, "cold": COLD_BAR}[kind] if each.name == "keepstep" else None
            found.append(
                result(
                    f"load {kind} {what}: {each.name}",
                    statistics.median(own),
                    "s",
                    against=raw.name,
                    ratio=median_ratio(own, limit),
                    bar=bar,
                )
            )
    if "keepstep, warm" in seconds:
        faster = median_ratio(seconds["DCP, warm"], seconds["keepstep, warm"])
        found.append(
            result(
                f"load warm {what}: times faster than DCP",
                statistics.median(seconds["keepstep, warm"]),
                "s",
                against="DCP",
                ratio=faster,
                bar=FASTER_THAN_DCP[context.world],
            )
        )
    return found


def _path(context: Context, contestant: Contestant):
    return context.directory / f"{contestant.name.replace(' ', '-')}-{context.world}" / "step-00000001"


def _cold_and_warm(context: Context, contestant: Contestant, state: dict, settings: dict[str, Setting]) -> list[Entry]:
    path = _path(context, contestant)
    unchecked = ["cold", "warm"]

    def entry(kind: str, prepare: Callable[[], None]) -> Entry:
        def before() -> None:
            context.alone(prepare)
            if isinstance(contestant, RawLimit):
                contestant.reading = settings[kind]
            elif kind in unchecked:
                clear(state)

        def after() -> None:
            if kind in unchecked:
                unchecked.remove(kind)
                if not isinstance(contestant, RawLimit):
                    check(context, state, contestant.name)
            if kind == "warm":
                context.alone(lambda: drop_from_page_cache(path))

        return Entry(f"{contestant.name}, {kind}", lambda: contestant.load(path, state), before, after)

    return [
        entry("cold", lambda: drop_from_page_cache(path)),
        entry("warm", lambda: bring_into_page_cache(path)),
    ]


if __name__ == "__main__":
    run_question({"one-rank": (1, load), "two-ranks": (2, load)})
