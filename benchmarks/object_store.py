"""How long a save to an object store and a load from one take, and what they ask of it.

Three stores, all on loopback: `rclone serve s3` on a folder in memory, a real server, which hashes all it is given and is
the slower end; `wire.py`, which costs nothing of its own; and the same kept as far away as a store in the same region is,
with 20 ms before it answers and 90 MiB/s for each connection.

Everybody is given the same store by the same environment. One large object that obstore sends and reads alone, in parallel,
is what the client library reaches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed.checkpoint as dcp
from contestants import State, check, clear, local_tensor, make_state, size_of
from harness import MIB, Bar, Context, Entry, Result, median_ratio, play, result, run_question
from memory import reset_high_water, status

KEY, SECRET, REGION, BUCKET = "AKIDBENCH", "none-of-these-is-real", "us-east-1", "bench"
STORES = {
    "rclone": None,
    "wire": [],
    "far": ["--first-byte-ms", "20", "--connection-mib-s", "90"],
}
FASTER = Bar(">=", 3)
OF_THE_CLIENT = Bar(">=", 0.8)
BYTES = Bar("<=", 1.05)
PART_BYTES = 8 * MIB
MEMORY = Bar("<=", 64 + 9 * PART_BYTES / MIB, "MiB")
"""64 MiB, the ring among them, and the parts on their way: eight that are sent and one that is put together."""


# -------------------------------------------------------------------------------------- stores


@contextlib.contextmanager
def stores() -> Iterator[None]:
    """All of them, on free ports, told to the stages by the environment."""
    rclone = Path(sysconfig.get_path("scripts")) / "rclone"
    wire = Path(__file__).with_name("wire.py")
    # No proxy of this machine's stands between it and itself; nor has it credentials of its own.
    for name in [each for each in os.environ if each.startswith("AWS_") or each.lower().endswith("_proxy")]:
        del os.environ[name]
    with contextlib.ExitStack() as stack:
        for name, more in STORES.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, wire, str(port), *(more or [])]
            if more is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
                (Path(folder) / BUCKET).mkdir()
                where = ["--addr", f"127.0.0.1:{port}", "--config", os.devnull, "--auth-key", f"{KEY},{SECRET}"]
                command = [rclone, "serve", "s3", *where, "--vfs-cache-mode", "off", folder]
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.kill)
            _wait_for(port)
            os.environ[f"BENCH_STORE_{name.upper()}"] = f"http://127.0.0.1:{port}"
        yield


def _wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def use(store: str) -> str:
    """Tells everything in this process about a store; its address."""
    endpoint = os.environ[f"BENCH_STORE_{store.upper()}"]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
    }
    return endpoint


def root() -> str:
    """Where everything of this store lies. (An agent knows its run by the URL, and keeps the store it was started for.)"""
    return f"s3://{BUCKET}/{os.environ['AWS_ENDPOINT_URL'].rpartition(':')[2]}"


def counts(endpoint: str) -> dict[str, int]:
    """What the store of ours was asked for so far."""
    with urllib.request.urlopen(f"{endpoint}/_counts") as answer:
        return json.load(answer)


# -------------------------------------------------------------------------------- contestants


class Keepstep:
    """This library by a URL: `save` and `load`."""

    name = "keepstep"

    def __init__(self) -> None:
        import keepstep

        self.keepstep = keepstep

    def save(self, url: str, state: State) -> None:
        self.keepstep.save(url, state)

    def load(self, url: str, state: State):
        return self.keepstep.load(url, into=state)


class InBackground(Keepstep):
    """The same through the agent, until the step is committed: what a Checkpointer does. Its arena stays for the next."""

    name = "keepstep, in the background"

    def save(self, url: str, state: State) -> None:
        self.keepstep.async_save(url, state).wait_committed(600)


class DcpFsspec:
    """DCP with its fsspec writer and reader, over s3fs."""

    name = "DCP + fsspec"

    def save(self, url: str, state: State) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp.save(state, storage_writer=FsspecWriter(url))

    def load(self, url: str, state: State) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(state, storage_reader=FsspecReader(url))


class S3Connector:
    """DCP with the writer and reader of s3torchconnector, which is written in Rust over AWS's C client."""

    name = "s3torchconnector"

    def __init__(self) -> None:
        from s3torchconnector import S3ClientConfig

        self.config = S3ClientConfig(force_path_style=True)

    def save(self, url: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        dcp.save(state, storage_writer=S3StorageWriter(REGION, url, s3client_config=self.config))

    def load(self, url: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageReader

        dcp.load(state, storage_reader=S3StorageReader(REGION, url, s3client_config=self.config))


def contestants(context: Context, store: str) -> list:
    """Who takes part. rclone does not know the checksums with which s3torchconnector ends its uploads."""
    ours = [] if context.peers_only else [Keepstep()]
    return [*ours, DcpFsspec(), *([] if store == "rclone" else [S3Connector()])]


class OneObject:
    """One large object, by obstore alone: what the client library reaches."""

    def __init__(self, size: int) -> None:
        import obstore
        import obstore.store
        import torch

        self.obstore = obstore
        self.store = obstore.store.S3Store(BUCKET)
        self.memory = memoryview(torch.rand(size // 4).view(torch.uint8).numpy())

    def send(self) -> None:
        """In parts of 8 MiB, 8 at once."""
        parts = (self.memory[at : at + PART_BYTES] for at in range(0, len(self.memory), PART_BYTES))
        put = self.obstore.put
        put(self.store, "alone", parts, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=8)

    def read(self) -> None:
        """In ranges of 8 MiB, 16 at once, into memory that is there; whole, where the store's ranges do not please it."""
        starts = range(0, len(self.memory), PART_BYTES)
        with ThreadPoolExecutor(16) as pool:
            [*pool.map(self._read_range, starts)]

    def _read_range(self, start: int) -> None:
        stop = min(start + PART_BYTES, len(self.memory))
        self.memory[start:stop] = memoryview(self.obstore.get_range(self.store, "alone", start=start, end=stop))

    def send_ours(self) -> None:
        """The same object by keepstep's upload, as an arena is sent: in chunks of 4 MiB."""
        from keepstep.storage.remote import RemoteStorage

        with RemoteStorage(f"s3://{BUCKET}/ours").create("alone", len(self.memory)) as upload:
            for at in range(0, len(self.memory), 4 * MIB):
                upload.lend_at(at, self.memory[at : at + 4 * MIB])
            upload.commit(len(self.memory))

    def remove(self) -> None:
        self.obstore.delete(self.store, ["alone"])


# ---------------------------------------------------------------------------------- questions


def save_and_load(store: str) -> Callable[[Context], list[Result]]:
    """A stage that saves to a store and loads from it."""

    def stage(context: Context) -> list[Result]:
        use(store)
        state = make_state(context, tensors=_tensors(context))
        total = sum(context.gather(size_of(state)))  # type: ignore[arg-type]
        everyone = contestants(context, store)
        entries = [_saving(context, each, state) for each in everyone]
        if not context.peers_only:
            entries.append(_saving(context, InBackground(), state))
        if context.world == 1:
            one = OneObject(total)
            entries += [Entry("obstore alone", one.send, after=one.remove), Entry("one upload of ours", one.send_ours)]
        saved = play(context, entries)
        if context.world == 1:
            one.send()
        entries = [_loading(context, each, state) for each in everyone]
        if context.world == 1 and store != "rclone":
            entries.append(Entry("obstore alone", one.read))
        loaded = play(context, entries)
        _clear(context)
        what = f"{store}, {total // MIB} MiB, {context.world} rank" + ("s" if context.world > 1 else "")
        return [*_told(f"save to {what}", saved), *_told(f"load from {what}", loaded)]

    return stage


def _told(what: str, seconds: dict[str, list[float]]) -> list[Result]:
    theirs, alone = seconds[DcpFsspec.name], seconds.get("obstore alone")
    found = [result(f"{what}: {name}", statistics.median(each), "s") for name, each in seconds.items()]
    for name in (Keepstep.name, InBackground.name):
        if own := seconds.get(name):
            faster = median_ratio(theirs, own)
            bar = FASTER if name == Keepstep.name else None
            says = f"{what}: times faster, {name}"
            found.append(result(says, statistics.median(own), "s", against=DcpFsspec.name, ratio=faster, bar=bar))
    if alone and (own := seconds.get("one upload of ours")):
        share = median_ratio(alone, own)
        says = f"{what}: share of what the client library reaches, one object"
        found.append(result(says, statistics.median(own), "s", against="obstore alone", ratio=share, bar=OF_THE_CLIENT))
    if alone and (own := seconds.get(Keepstep.name)):
        says = f"{what}: share of what the client library reaches, all of it"
        found.append(result(says, statistics.median(own), "s", against="obstore alone", ratio=median_ratio(alone, own)))
    return found


def save_for_resharding(context: Context) -> list[Result]:
    """Leave a step of every contestant."""
    use("far")
    state = make_state(context, tensors=_tensors(context))
    for each in contestants(context, "far"):
        each.save(_url(each, context.world), state)
        context.barrier()
    return []


def load_resharded(context: Context) -> list[Result]:
    """Load what four ranks have saved, and count what the store was asked for."""
    endpoint = use("far")
    state = make_state(context, tensors=_tensors(context))
    needed = sum(context.gather(size_of(state)))  # type: ignore[arg-type]
    everyone = contestants(context, "far")
    asked: dict[str, tuple[int, int]] = {}
    entries = []
    for each in everyone:
        url = _url(each, 4)
        entries.append(_loading(context, each, state, url, counted=(endpoint, asked)))
    seconds = play(context, entries)
    what = f"reshard 4 -> {context.world} ranks from far, {needed // MIB} MiB"
    found = _told(what, seconds)
    for each in everyone:
        requests, received = asked[each.name]
        bar = BYTES if each.name == Keepstep.name else None
        says = f"{what}: bytes sent by the store, {each.name}, in {requests} requests"
        found.append(result(says, received / MIB, "MiB", against="bytes needed", ratio=received / needed, bar=bar))
    _clear(context)
    return found


def memory_of_an_upload(context: Context) -> list[Result]:
    """What a save takes beyond the state."""
    if context.peers_only:
        return []
    use("far")
    ours = Keepstep()
    ours.save(f"{root()}/tiny", make_state(context, tensors=2, rows=8, columns=128))
    state = make_state(context, tensors=_tensors(context))
    base = reset_high_water()
    ours.save(f"{root()}/large", state)
    peak = status("VmHWM") - base
    _clear(context)
    return [result("memory beyond the state, a save to far: keepstep", peak / MIB, "MiB", bar=MEMORY)]


def _saving(context: Context, contestant, state: State) -> Entry:
    numbers = itertools.count()
    newest = [""]

    def before() -> None:
        newest[0] = f"{root()}/{contestant.name.replace(' ', '-').replace(',', '')}/{next(numbers)}"

    def after() -> None:
        context.alone(lambda: _remove(newest[0].rpartition("/")[0]))

    def work() -> None:
        contestant.save(newest[0], state)

    return Entry(contestant.name, work, before, after)


def _loading(context: Context, contestant, state: State, url: str = "", counted=None) -> Entry:
    rounds = itertools.count()
    if not url:
        url = _url(contestant, context.world)
        contestant.save(url, state)
        context.barrier()

    def before() -> None:
        if not next(rounds):
            clear(state)
        if counted:
            counts_before.append(counts(counted[0]))
        context.barrier()

    def after() -> None:
        if counted:
            now, then = counts(counted[0]), counts_before[-1]
            requests = sum(now.get(each, 0) - then.get(each, 0) for each in ("GET", "HEAD"))
            counted[1][contestant.name] = requests, now["GET bytes"] - then.get("GET bytes", 0)
        if any(not local_tensor(each).any() for each in state["model"].values()):
            raise RuntimeError(f"{contestant.name} left a tensor empty")
        if next(rounds) == 1:
            check(context, state, contestant.name)

    counts_before: list[dict[str, int]] = []
    return Entry(contestant.name, lambda: contestant.load(url, state), before, after)


def _url(contestant, saved_on: int) -> str:
    return f"{root()}/kept-{contestant.name.replace(' ', '-')}-{saved_on}/step-00000001"


def _remove(url: str) -> None:
    import obstore
    import obstore.store

    store = obstore.store.S3Store(BUCKET)
    prefix = url.removeprefix(f"s3://{BUCKET}").lstrip("/")
    names = [each["path"] for page in obstore.list(store, prefix or None) for each in page]
    if names:
        obstore.delete(store, names)


def _clear(context: Context) -> None:
    context.alone(lambda: _remove(f"s3://{BUCKET}"))


def _tensors(context: Context) -> int:
    return 4 if context.quick else 8


STAGES = {
    "rclone": (1, save_and_load("rclone")),
    "wire": (1, save_and_load("wire")),
    "far": (1, save_and_load("far")),
    "far-two-ranks": (2, save_and_load("far")),
    "save-on-4": (4, save_for_resharding),
    "load-4-to-2": (2, load_resharded),
    "memory": (1, memory_of_an_upload),
}

if __name__ == "__main__":
    if "--stage" in sys.argv:
        run_question(STAGES)
    else:
        with stores():
            run_question(STAGES, rounds=3)
