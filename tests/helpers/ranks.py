"""Real processes that talk over gloo, for tests: ``run_ranks`` for one call, ``RankPool`` for many.

Both run a top-level function as ``fn(rank, *args)`` on every rank, inside a fresh process group, and return the list
of its results in rank order. What a caller may rely on:

- No call outlives its timeout. A rank that does not return dumps the stacks of all its threads; the dump is part of
  the error, then every process is killed.
- A rank that raises, or dies, fails the call with its rank and its full traceback. Others get ``GRACE_S`` to finish.
- Each call has its own store (a file), its own group, and the same random seeds. Nothing listens on a fixed port.

A started process costs a second and a half of importing torch. A pool keeps its processes between calls and replaces
those that took part in a failed one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

POOL_SIZE = 4
START_S = 120.0
GRACE_S = 5.0
DUMP_S = 3.0

_spawn = multiprocessing.get_context("spawn")


class RankError(AssertionError):
    """A rank raised, died, or did not return in time. ``failures`` maps rank to what is known about it."""

    def __init__(self, what: str, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__(what + "".join(f"\n--- rank {rank}: {text}" for rank, text in sorted(failures.items())))


@dataclass(frozen=True)
class Call:
    """One rank's part of one call. ``work`` is the pickled (fn, args): unpickled only once ``path`` is in place."""

    rank: int
    world: int
    store: str
    timeout_s: float
    path: list[str]
    work: bytes


@dataclass
class Worker:
    """One process and the parent's end of its pipe. ``stacks`` is the file its stack dumps go to."""

    process: Any
    pipe: Connection
    stacks: Path
    ready: bool = field(default=False)

    def stop(self) -> None:
        """Kills the process, if it still runs, and lets go of everything it held."""
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        with contextlib.suppress(ValueError):
            self.process.close()


# --- the calls ------------------------------------------------------------------------------------------------------


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Runs ``fn(rank, *args)`` in ``n`` new processes. Their start-up does not count towards ``timeout_s``."""
    with RankPool(n) as pool:
        return pool.run(n, fn, *args, timeout_s=timeout_s)


class RankPool:
    """Processes kept between calls. Starts them when first needed; a failed call costs the ones that took part."""

    def __init__(self, limit: int = POOL_SIZE) -> None:
        self.limit = limit
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[Worker] = []
        self.calls = itertools.count()
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, n: int) -> Callable[..., list[Any]]:
        """``pool(n)(fn, *args, timeout_s=60)``: the same as ``run``, in the order a test reads."""

        def run(fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
            return self.run(n, fn, *args, timeout_s=timeout_s)

        return run

    def run(self, n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results of ``fn(rank, *args)`` in rank order. More ranks than the pool keeps are started for this call only.

        Raises:
            RankError: a rank raised, died, or was still running after ``timeout_s``.
        """
        if n > self.limit:
            return run_ranks(n, fn, *args, timeout_s=timeout_s)
        work = pickle.dumps((fn, args))
        team = self._team(n)
        store = self.folder / f"store-{next(self.calls)}"
        for rank, worker in enumerate(team):
            call = Call(rank, n, str(store), timeout_s, list(sys.path), work)
            with contextlib.suppress(BrokenPipeError):  # it died since the last call: found out by _collect
                worker.pipe.send(call)
        results, failures = _collect(team, timeout_s)
        store.unlink(missing_ok=True)
        if failures:
            self._discard(team)
            name = getattr(fn, "__qualname__", repr(fn))
            raise RankError(f"{name} failed on {len(failures)} of {n} ranks", failures)
        return [results[rank] for rank in range(n)]

    def close(self) -> None:
        """Ends every process. May be called twice."""
        atexit.unregister(self.close)
        self._discard(list(self.workers))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _team(self, n: int) -> list[Worker]:
        """``n`` live workers. All missing ones are started before any is waited for."""
        self._discard([worker for worker in self.workers if not worker.process.is_alive()])
        while len(self.workers) < n:
            self.workers.append(_start(self.folder))
        team = self.workers[:n]
        for worker in team:
            if not worker.ready and (trouble := _await_ready(worker)):
                rank = team.index(worker)
                self._discard(team)
                raise RankError("a process did not start", {rank: trouble})
        return team

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.workers.remove(worker)
            worker.stop()


def _start(folder: Path) -> Worker:
    handle, stacks = tempfile.mkstemp(prefix="stacks-", dir=folder)
    os.close(handle)
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=_serve, args=(there, stacks, os.getpid()), name="rank", daemon=False)
    process.start()
    there.close()
    return Worker(process, here, Path(stacks))


def _await_ready(worker: Worker) -> str:
    """Waits until the process has imported torch. Returns what went wrong, or nothing."""
    try:
        if not worker.pipe.poll(START_S):
            return f"not ready after {START_S:g} s"
        worker.pipe.recv()
    except (EOFError, OSError):
        return _obituary(worker)
    worker.ready = True
    return ""


def _collect(team: Sequence[Worker], timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Waits for every rank; returns results and failures by rank. After a first failure the rest get GRACE_S."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(team)}
    deadline = time.monotonic() + timeout_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except (EOFError, OSError):
                ok, value = False, _obituary(team[rank])
            (results if ok else failures)[rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    why = "did not finish after another rank failed" if failures else f"did not return within {timeout_s:g} s"
    failures |= {rank: f"{why}\n{stacks}" for rank, stacks in _stacks(team, sorted(waiting.values())).items()}
    return results, failures


def _obituary(worker: Worker) -> str:
    worker.process.join(5)
    status = worker.process.exitcode
    if status is not None and status < 0:
        return f"died of {signal.Signals(-status).name}\n{worker.stacks.read_text()}"
    return f"died with exit status {status}\n{worker.stacks.read_text()}"


def _stacks(team: Sequence[Worker], ranks: Sequence[int]) -> dict[int, str]:
    """The stacks of all threads of these ranks, as each one's faulthandler writes them on SIGUSR1."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(team[rank].process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + DUMP_S
    dumps = {rank: team[rank].stacks for rank in ranks}
    while time.monotonic() < deadline and not all("most recent call first" in p.read_text() for p in dumps.values()):
        time.sleep(0.05)
    if ranks:
        time.sleep(0.1)  # the first line is there; let the rest follow
    texts = {rank: path.read_text() for rank, path in dumps.items()}
    for rank, text in texts.items():
        print(f"rank {rank}:\n{text}", file=sys.stderr)
    return texts


# --- in the worker --------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, stacks: str, parent: int) -> None:
    """A worker's life: calls arrive on the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes the pipe
    with Path(stacks).open("w") as dump:
        faulthandler.enable(dump, all_threads=True)
        faulthandler.register(signal.SIGUSR1, dump, all_threads=True, chain=False)
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        pipe.send("ready")
        while True:
            try:
                call = pipe.recv()
            except (EOFError, OSError):
                break
            reply = _answer(call)
            with contextlib.suppress(BrokenPipeError):
                pipe.send(reply)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing to tidy up that the kernel does not; a stuck thread must not hold the session


def _answer(call: Call) -> tuple[bool, Any]:
    """(True, result) or (False, traceback). The result is pickled here once, so that a bad one fails here."""
    home = Path.cwd()
    try:
        sys.path[:] = call.path
        fn, args = pickle.loads(call.work)
        result = _in_group(call, fn, args)
        pickle.dumps(result)
    except BaseException:  # pytest.skip, SystemExit and KeyboardInterrupt too: the parent must hear of it
        return False, traceback.format_exc()
    else:
        return True, result
    finally:
        os.chdir(home)
        gc.collect()


def _in_group(call: Call, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    from datetime import timedelta

    import numpy as np
    import torch
    import torch.distributed as dist

    rank, world = str(call.rank), str(call.world)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store, call.world),
        rank=call.rank,
        world_size=call.world,
        timeout=timedelta(seconds=call.timeout_s),
    )
    _forget_meshes()
    try:
        # A rank that is done and leaves while another still connects to it would fail that one.
        dist.barrier()
        return fn(call.rank, *args)
    finally:
        if dist.is_initialized():  # fn may have ended it itself
            dist.destroy_process_group()


def _forget_meshes() -> None:
    """Empties torch's caches of plans for DTensors: a mesh of the call before can look like one of this call."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear) and not isinstance(value, type):
                    clear()


def _die_with(parent: int) -> None:
    """Ends this process when its parent is gone, even if the main thread is stuck in a collective."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
