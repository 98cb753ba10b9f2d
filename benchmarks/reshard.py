"""How long a load takes on another number of ranks, and how many bytes it reads for it.

1 GiB of DTensors split by rows, saved on 4 ranks and loaded on 2, saved on 2 and loaded on 3.
The bytes are counted twice: as the load reports them, and as the kernel counts what the process
asked to read.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from contestants import (
    Contestant,
    Dcp,
    TorchCheckpointing,
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
    play,
    result,
    run_question,
)
from rawio import RawLimit

FASTER = Bar(">=", 2)
BYTES = Bar("<=", 1.02)


def save(context: Context) -> list[Result]:
    """Leave a step of every contestant."""
    state = make_state(context, tensors=_tensors(context))
    for each in _contestants(context):
        each.save(_path(context, each, context.world), state)
        context.barrier()
        context.alone(lambda each=each: drop_from_page_cache(_path(context, each, context.world)))
    return []


def load_from(saved_on: int):
    """A stage that loads on its own ranks what was saved on `saved_on` ranks."""

    def load(context: Context) -> list[Result]:
        state = make_state(context, tensors=_tensors(context))
        size = size_of(state)
        contestants = _contestants(context)
        reads: list[tuple[int, int, int]] = []
        raw, entries = _raw_read(context, size)
        for each in contestants:
            entries += _cold_and_warm(context, each, _path(context, each, saved_on), state, reads)
        seconds = play(context, entries)
        total = sum(context.gather(size)) / GIB  # type: ignore[arg-type]
        what = f"reshard {saved_on} -> {context.world} ranks, {total:g} GiB"
        limit = seconds[f"{raw.name}, warm"]
        found = [
            result(f"{what}, warm: {raw.name}, as many bytes and no digests", statistics.median(limit), "s"),
        ]
        for kind in ("warm", "cold"):
            for each in contestants:
                own = seconds[f"{each.name}, {kind}"]
                found.append(result(f"{what}, {kind}: {each.name}", statistics.median(own), "s"))
            peers = [seconds[f"{each.name}, {kind}"] for each in contestants if each.name != "keepstep"]
            better = [min(times) for times in zip(*peers, strict=True)]
            if kind == "warm":
                # What no load can beat: it shows how much faster than the better peer a load could be at all.
                most = statistics.median(b / a for a, b in zip(limit, better, strict=True))
                found.append(
                    result(
                        f"{what}, {kind}: times faster than the better peer, {raw.name}",
                        statistics.median(limit),
                        "s",
                        against="DCP or torch_checkpointing",
                        ratio=most,
                    )
                )
            if f"keepstep, {kind}" not in seconds:
                continue
            own = seconds[f"keepstep, {kind}"]
            found.append(
                result(
                    f"{what}, {kind}: times faster than the better peer",
                    statistics.median(own),
                    "s",
                    against="DCP or torch_checkpointing",
                    ratio=statistics.median(b / a for a, b in zip(own, better, strict=True)),
                    bar=FASTER if kind == "warm" else None,
                )
            )
        if reads:
            found += _bytes_read(context, what, reads[-1])
        return found

    return load


def _raw_read(context: Context, size: int) -> tuple[RawLimit, list[Entry]]:
    """As many bytes as each rank loads, from the page cache into memory that exists, by the fastest reader there is."""
    raw = RawLimit(context, size)
    path = context.directory / f"raw-{context.world}" / "step-00000001"
    raw.calibrate_write(context.directory, rounds=1)
    raw.save(path)
    context.barrier()
    context.alone(lambda: bring_into_page_cache(path))
    raw.reading = raw.calibrate_read(path, cold=False)
    prepare = lambda: context.alone(lambda: bring_into_page_cache(path))  # noqa: E731
    return raw, [Entry(f"{raw.name}, warm", lambda: raw.load(path), prepare, lambda: None)]


def _bytes_read(context: Context, what: str, own: tuple[int, int, int]) -> list[Result]:
    ranks = context.gather(own)
    said, needed, counted = (sum(each[i] for each in ranks) for i in range(3))  # type: ignore[index]
    return [
        result(
            f"{what}: bytes read {source}",
            value / (1 << 20),
            "MiB",
            against="bytes needed",
            ratio=value / needed,
            bar=BYTES,
        )
        for source, value in (("(as reported)", said), ("(as counted by the kernel)", counted))
    ]


def _cold_and_warm(
    context: Context, contestant: Contestant, path: Path, state: dict, reads: list[tuple[int, int, int]]
) -> list[Entry]:
    unchecked = ["cold", "warm"]

    def work() -> None:
        before = _bytes_asked_for()
        report = contestant.load(path, state)
        if contestant.name == "keepstep":
            reads.append((report.bytes_read, report.bytes_needed, _bytes_asked_for() - before))

    def entry(kind: str) -> Entry:
        def before() -> None:
            context.alone(lambda: drop_from_page_cache(path) if kind == "cold" else bring_into_page_cache(path))
            if kind in unchecked:
                clear(state)

        def after() -> None:
            if kind in unchecked:
                unchecked.remove(kind)
                check(context, state, contestant.name)

        return Entry(f"{contestant.name}, {kind}", work, before, after)

    return [entry("cold"), entry("warm")]


def _bytes_asked_for() -> int:
    """What all threads of this process have read so far, by read and its kin."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _contestants(context: Context) -> list[Contestant]:
    return [
        *ourselves(context),
        Dcp(context),
        TorchCheckpointing(context, reshard=True),
    ]


def _path(context: Context, contestant: Contestant, saved_on: int) -> Path:
    return context.directory / f"{contestant.name}-{saved_on}" / "step-00000001"


def _tensors(context: Context) -> int:
    return 8 if context.quick else 32


if __name__ == "__main__":
    run_question(
        {
            "save-on-4": (4, save),
            "load-4-to-2": (2, load_from(4)),
            "save-on-2": (2, save),
            "load-2-to-3": (3, load_from(2)),
        }
    )
