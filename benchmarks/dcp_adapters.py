"""What a program that calls dcp.save and dcp.load gains by `Writer` and `Reader` in place of torch's.

The same calls, the same state, the same process: only the storage writer and reader differ. 2 GiB in 64 tensors on one rank,
and on two ranks as DTensors split by rows; then 2,000 small ones. Every save goes to a fresh directory and is durable.
"""

from __future__ import annotations

import statistics
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contestants import State, make_state, size_of
from harness import GIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question

from keepstep.interop.dcp import Reader, Writer

SAVE, LOAD = Bar("<=", 1 / 2), Bar("<=", 1 / 4)


def compare(context: Context) -> list[Result]:
    """Save and load in turns, by torch's files and by keepstep's."""
    warnings.simplefilter("ignore")
    alone = not dist.is_initialized()
    found = []
    for tensors, rows in ((8 if context.quick else 64, 2048), (2000, 16)):
        state = make_state(context, tensors, rows, rows * 2)
        total = sum(context.gather(size_of(state))) / GIB  # type: ignore[arg-type]
        what = f"{total:.2g} GiB in {tensors} tensors, {context.world} rank" + ("s" if context.world > 1 else "")
        root = context.directory / f"adapters-{tensors}"
        writers = {"DCP": dcp.FileSystemWriter, "keepstep's Writer": Writer}
        readers = {"DCP": dcp.FileSystemReader, "keepstep's Reader": Reader}

        def save(name: str, path: object, state: State = state, writers: dict = writers) -> object:
            return dcp.save(state, storage_writer=writers[name](path), no_dist=alone)

        def load(name: str, path: object, state: State = state, readers: dict = readers) -> object:
            return dcp.load(state, storage_reader=readers[name](path), no_dist=alone)

        entries = []
        for name in writers:
            path = root / name.split()[0] / "step-1"

            def after(path: object = path) -> None:
                if context.rank == 0:
                    remove(path)

            entries.append(Entry(name, lambda name=name, path=path: save(name, path), after=after))
        seconds = play(context, entries)
        own, theirs = seconds["keepstep's Writer"], seconds["DCP"]
        found.append(result(f"dcp.save, {what}: torch's writer", statistics.median(theirs), "s"))
        found.append(
            result(
                f"dcp.save, {what}: Writer",
                statistics.median(own),
                "s",
                against="torch's writer",
                ratio=median_ratio(own, theirs),
                bar=SAVE,
            )
        )
        places = {"DCP": root / "of-torch", "keepstep's Reader": root / "of-keepstep"}
        save("DCP", places["DCP"])
        save("keepstep's Writer", places["keepstep's Reader"])
        seconds = play(
            context, [Entry(name, lambda name=name, path=path: load(name, path)) for name, path in places.items()]
        )
        own, theirs = seconds["keepstep's Reader"], seconds["DCP"]
        found.append(result(f"dcp.load, {what}: torch's reader", statistics.median(theirs), "s"))
        found.append(
            result(
                f"dcp.load, {what}: Reader",
                statistics.median(own),
                "s",
                against="torch's reader",
                ratio=median_ratio(own, theirs),
                bar=LOAD,
            )
        )
        if context.rank == 0:
            remove(root)
    return found


if __name__ == "__main__":
    run_question({"one-rank": (1, compare), "two-ranks": (2, compare)})
