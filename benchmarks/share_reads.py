"""What ranks gain by reading once what several of them need, and passing it on: time, and bytes from the storage.

Four replicas load one state, from the stores of `object_store.py`, from a folder on this disk, and from the same folder
through a narrow wire: one that lets 400 MiB/s through for all four together, a quarter for each. Everybody's own reads and
shared reads alternate. All ranks are on this machine, so what they pass on goes over loopback, and so do the stores, which
have no limit for all connections together.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from functools import partial

import torch
from harness import MIB, Bar, Context, Entry, Result, median_ratio, play, result, run_question
from object_store import counts, root, stores, use

from keepstep.storage.base import Blob, Subfolder
from keepstep.storage.local import LocalStorage

WORLD = 4
BYTES = Bar("<=", 1.1)
RANK_MIB_S = 100
COUNTED = ("far", "wire")
"""Stores that say what they were asked for."""


class NarrowWire(Subfolder):
    """A folder whose bytes come to this rank at `RANK_MIB_S`, however many are asked for at once."""

    far = True

    def __init__(self, path: str) -> None:
        super().__init__(LocalStorage(path), "")
        self._prefix, self.url = "", path
        self.far = True
        self.turn = threading.Lock()
        self.free_s = 0.0

    def open(self, name: str) -> Blob:
        return _NarrowBlob(self, self._parent.open(name))


class _NarrowBlob(Blob):
    def __init__(self, wire: NarrowWire, blob: Blob) -> None:
        self.wire, self.blob, self.size_bytes = wire, blob, blob.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.blob.read_into(offset, buffer)
        with self.wire.turn:
            self.wire.free_s = max(self.wire.free_s, time.monotonic()) + len(buffer) / (RANK_MIB_S * MIB)
            until_s = self.wire.free_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        self.blob.close()


def replicas(context: Context, store: str) -> list[Result]:
    """Every rank loads everything."""
    import keepstep as ks

    tensors = 4 if context.quick else 16
    size = tensors * 8 * MIB
    made = torch.Generator().manual_seed(0)
    state = {"t": {f"w{i}": torch.rand(2 * MIB, generator=made) for i in range(tensors)}}
    local = store in ("disk", "narrow")
    endpoint = "" if local else use(store)
    place = str(context.directory / store) if local else f"{root()}/shared"
    ks.save(place, state, overwrite=True)
    source = NarrowWire(place) if store == "narrow" else place
    wanted = {key: tensor.clone() for key, tensor in state["t"].items()}
    read: dict[bool, list[float]] = {True: [], False: []}

    def before(share: bool) -> None:
        for tensor in state["t"].values():
            tensor.zero_()
        if store in COUNTED and context.rank == 0:
            read[share].append(-counts(endpoint).get("GET bytes", 0))

    def work(share: bool) -> None:
        report = ks.load(source, into=state, share_reads=share)
        assert (report.bytes_received > 0) == share

    def after(share: bool) -> None:
        if store in COUNTED and context.rank == 0:
            read[share][-1] += counts(endpoint).get("GET bytes", 0)
        assert all(torch.equal(state["t"][key], wanted[key]) for key in wanted)

    entries = [
        Entry(
            "shared" if share else "each its own", partial(work, share), partial(before, share), partial(after, share)
        )
        for share in (True, False)
    ]
    seconds = play(context, entries)
    shared, own = seconds["shared"], seconds["each its own"]
    name = f"{WORLD} replicas, {size // MIB} MiB, {store}"
    found = [
        result(
            f"{name}: load with shared reads",
            statistics.median(shared),
            "s",
            against="each rank reads for itself",
            ratio=median_ratio(shared, own),
        )
    ]
    if store in COUNTED and context.rank == 0:
        for share in (True, False):
            copies = statistics.median(read[share]) / size
            what = "with shared reads" if share else "each for itself"
            found.append(result(f"{name}: copies read, {what}", copies, "x", bar=BYTES if share else None))
    return found


STAGES = {
    f"replicas-{store}": (WORLD, partial(replicas, store=store))
    for store in ("narrow", "far", "wire", "rclone", "disk")
}

if __name__ == "__main__":
    if "--stage" in sys.argv:
        run_question(STAGES)
    else:
        with stores():
            run_question(STAGES, rounds=3)
