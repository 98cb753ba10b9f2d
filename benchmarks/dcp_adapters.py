"""What a program that calls dcp.save and dcp.load gains by `Writer` and `Reader` in place of torch's.

The same calls, the same state, the same process: only the storage writer and reader differ. 2 GiB in 64 tensors on one rank,
and on two ranks as DTensors split by rows; then 2,000 small ones. Every save goes to a fresh directory and is durable;
loads are from the page cache. Beside them what no writer and no reader can do without: torch's planning, with a writer that
writes nothing and a reader that reads nothing; and the bytes alone, as the raw limit moves them, for loads also with a
digest of each block of 64 KiB.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contestants import make_state, size_of
from harness import GIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question
from rawio import RawLimit
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from keepstep.interop.dcp import Reader, Writer

SAVE, LOAD = Bar("<=", 1 / 2), Bar("<=", 1 / 4)
TORCH, OWN, NOTHING, PROVED = "torch's", "keepstep's", "none", "raw, with digests"


class NoWriter(dcp.FileSystemWriter):
    """Takes part in all of a save, and writes nothing."""

    def write_data(self, plan: Any, planner: Any) -> Future:
        """Says that all was written."""
        written: Future = Future()
        written.set_result([WriteResult(item.index, 1, None) for item in plan.items])
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Nothing."""


class NoReader(dcp.FileSystemReader):
    """Takes part in all of a load, knows what is there, and reads nothing."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self._known = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """What was read before."""
        return self._known

    def read_data(self, plan: Any, planner: Any) -> Future:
        """Says that all was read."""
        read: Future = Future()
        read.set_result(None)
        return read


WRITERS = {TORCH: dcp.FileSystemWriter, OWN: Writer, NOTHING: NoWriter}


def compare(context: Context) -> list[Result]:
    """Save and load in turns, by torch's files and by keepstep's."""
    warnings.simplefilter("ignore")
    alone = not dist.is_initialized()
    found = []
    for tensors, rows in ((8 if context.quick else 64, 2048), (2000, 16)):
        state = make_state(context, tensors, rows, rows * 2)
        size = size_of(state)
        total = sum(context.gather(size)) / GIB  # type: ignore[arg-type]
        what = f"{total:.2g} GiB in {tensors} tensors, {context.world} rank" + ("s" if context.world > 1 else "")
        root = context.directory / f"adapters-{tensors}"
        raw = RawLimit(context, size) if rows == 2048 else None

        def save(name: str, path: Path, state: Any = state) -> object:
            return dcp.save(state, storage_writer=WRITERS[name](path), no_dist=alone)

        entries = [_fresh(context, name, root / name / "step-1", save) for name in WRITERS]
        if raw is not None:
            raw.calibrate_write(context.directory)
            entries.append(_fresh(context, raw.name, root / "raw" / "step-1", lambda _, path, raw=raw: raw.save(path)))
        found += _told(f"dcp.save, {what}", "writer", play(context, entries), raw, SAVE)

        places = {name: root / f"of-{name}" for name in (TORCH, OWN)}
        for name, place in places.items():
            save(name, place)
        nothing = NoReader(places[TORCH])
        readers: dict[str, Callable[[], Any]] = {
            TORCH: lambda places=places: dcp.FileSystemReader(places[TORCH]),
            OWN: lambda places=places: Reader(places[OWN]),
            NOTHING: lambda nothing=nothing: nothing,
        }

        def load(name: str, state: Any = state, readers: dict = readers) -> object:
            return dcp.load(state, storage_reader=readers[name](), no_dist=alone)

        entries = [Entry(name, lambda name=name, load=load: load(name)) for name in readers]
        if raw is not None:
            raw.save(root / "raw")
            raw.reading = raw.calibrate_read(root / "raw", cold=False)
            entries.append(Entry(raw.name, lambda raw=raw, path=root / "raw": raw.load(path)))
            entries.append(Entry(PROVED, lambda raw=raw, path=root / "raw": raw.load_proved(path)))
        found += _told(f"dcp.load, {what}", "reader", play(context, entries), raw, LOAD)
        if context.rank == 0:
            remove(root)
    return found


def _fresh(context: Context, name: str, path: Path, save: Callable[[str, Path], object]) -> Entry:
    def after() -> None:
        if context.rank == 0:
            remove(path)

    return Entry(name, lambda: save(name, path), after=after)


def _told(what: str, kind: str, seconds: dict[str, list[float]], raw: RawLimit | None, bar: Bar) -> list[Result]:
    theirs = seconds[TORCH]
    found = [result(f"{what}: torch's {kind}", statistics.median(theirs), "s")]
    found.append(_against(f"{what}: {kind.capitalize()}", seconds[OWN], theirs, bar))
    least = seconds[NOTHING]
    found.append(_against(f"{what}: torch's planning alone", least, theirs))
    for name, said in ((raw and raw.name, "the bytes alone"), (PROVED, "the bytes with their digests alone")):
        if name in seconds:
            both = [bytes_s + plan_s for bytes_s, plan_s in zip(seconds[name], least, strict=True)]
            found.append(_against(f"{what}: planning and {said}", both, theirs))
    return found


def _against(what: str, own: list[float], theirs: list[float], bar: Bar | None = None) -> Result:
    ratio = median_ratio(own, theirs)
    return result(what, statistics.median(own), "s", against="torch's", ratio=ratio, bar=bar)


if __name__ == "__main__":
    run_question({"one-rank": (1, compare), "two-ranks": (2, compare)})
