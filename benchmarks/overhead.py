"""What a save costs where storage costs almost nothing, and where its time goes.

1 GiB on one rank into memory (tmpfs), against a plain write() of the same bytes to a file there.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from contestants import State, make_state, ourselves, size_of
from harness import GIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question

TMPFS = Path("/dev/shm")
BAR = Bar(">=", 0.5)
PARTS = ("capture", "plan", "copy", "write", "commit")


class PlainWrite:
    """One file, one write() a tensor; nothing is computed, named or proved."""

    name = "plain write()"

    def save(self, path: Path, state: State) -> None:
        path.mkdir()
        with (path / "bytes").open("wb", buffering=0) as stream:
            for tensor in state["model"].values():
                rest = memoryview(tensor.numpy()).cast("B")
                while rest:
                    rest = rest[stream.write(rest) :]


def save(context: Context) -> list[Result]:
    """Save in rounds; the parts are those that keepstep itself reports."""
    state = make_state(context, tensors=8 if context.quick else 32)
    size = size_of(state)
    if not TMPFS.is_dir() or shutil.disk_usage(TMPFS).free < 2 * size or _memory_available() < 3 * size:
        context.note(f"  left out: no room for {2 * size / GIB:g} GiB in {TMPFS}")
        return []
    plain = PlainWrite()
    reported: list[dict[str, float]] = []
    entries = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=TMPFS) as directory:
        for each in (plain, *ourselves(context)):
            path = Path(directory) / each.name.replace(" ", "-")

            def work(each=each, path=path) -> None:
                saved = each.save(path, state)
                if each.name == "keepstep":
                    reported.append(dict(saved.seconds))

            entries.append(Entry(each.name, work, after=lambda path=path: remove(path)))
        seconds = play(context, entries)
    what = f"save {size / GIB:g} GiB to memory, 1 rank"
    found = [result(f"{what}: {plain.name}", size / GIB / statistics.median(seconds[plain.name]), "GiB/s")]
    if "keepstep" in seconds:
        own = seconds["keepstep"]
        found.append(
            result(
                f"{what}: keepstep",
                size / GIB / statistics.median(own),
                "GiB/s",
                against=plain.name,
                ratio=median_ratio(seconds[plain.name], own),
                bar=BAR,
            )
        )
        found += _parts(what, own, reported[1:])
    return found


def _parts(what: str, whole: list[float], reported: list[dict[str, float]]) -> list[Result]:
    """Each part of a save, and what none of them covers; a part that is not reported is an error."""
    parts = {name: [seconds[name] for seconds in reported] for name in PARTS}
    sums = [sum(each) for each in zip(*parts.values(), strict=True)]
    parts["in none of them"] = [total - known for total, known in zip(whole, sums, strict=True)]
    return [
        result(
            f"{what}: {name}",
            statistics.median(each),
            "s",
            against="whole save",
            ratio=median_ratio(each, whole),
        )
        for name, each in parts.items()
    ]


def _memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


if __name__ == "__main__":
    run_question({"one-rank": (1, save)})
