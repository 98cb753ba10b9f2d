"""Jobs that can be killed. Their ranks are forked from one warm process, so that a job costs milliseconds to start.

Each job is a start of its own: new processes, a new store, a new group. Use it inside ``rank_pool(1)`` (or ``alone``):
the process that forks must have no group of its own and only one thread that computes. What it has imported and done
before, a job need not do again: let it save and load once.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class End:
    """How one rank of a job ended: its exit status (negative: the signal), and what it returned, if it did."""

    status: int
    value: Any = None
    error: str = ""


class Job:
    """``fn(rank, *args)`` on ``world`` forked ranks."""

    def __init__(self, folder: Path, world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _live(folder, rank, world, fn, args, timeout_s)
            self.pids.append(pid)
        self.ends: dict[int, End] = {}

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until every rank has its group, or has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._reap()
            if all(rank in self.ends or (self.folder / f"ready-{rank}").exists() for rank in range(len(self.pids))):
                return
            time.sleep(0.005)
        self.kill()
        raise AssertionError(f"the ranks of the job were not ready after {timeout_s:g} s")

    def kill(self, *ranks: int) -> None:
        """SIGKILL, to all ranks or to those given."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self.ends:
                os.kill(self.pids[rank], signal.SIGKILL)

    def wait_for(self, rank: int, timeout_s: float = 30.0) -> End:
        """How one rank ended; the others are killed as soon as it has, as by a launcher."""
        deadline = time.monotonic() + timeout_s
        while rank not in self.ends and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
        self.kill()
        return self.wait()[rank]

    def wait(self, timeout_s: float = 60.0) -> list[End]:
        """How every rank ended. Kills all and fails when one is still running after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while len(self.ends) < len(self.pids):
            self._reap()
            if time.monotonic() > deadline:
                late = sorted(set(range(len(self.pids))) - self.ends.keys())
                self.kill()
                raise AssertionError(f"ranks {late} of the job were still running after {timeout_s:g} s")
            time.sleep(0.005)
        return [self.ends[rank] for rank in range(len(self.pids))]

    def _reap(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.ends[rank] = self._end(rank, os.waitstatus_to_exitcode(status))

    def _end(self, rank: int, status: int) -> End:
        path = self.folder / f"result-{rank}"
        if not path.exists():
            return End(status)
        value, error = pickle.loads(path.read_bytes())
        return End(status, value, error)


def run_job(folder: Path, world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """The results of a job that is left to finish; any rank that does not return fails it."""
    ends = Job(folder, world, fn, *args, timeout_s=timeout_s).wait(timeout_s)
    failed = {rank: end for rank, end in enumerate(ends) if end.status != 0 or end.error}
    assert not failed, "".join(f"\nrank {rank} ended with {end.status}\n{end.error}" for rank, end in failed.items())
    return [end.value for end in ends]


def alone(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs ``fn(*args)`` without a group: ``rank_pool(1)(alone, fn, ...)`` is a place to fork jobs from."""
    import torch.distributed as dist

    import keepstep

    dist.destroy_process_group()
    # Its names are imported when they are first used: here once, and not in every rank of every job.
    for name in keepstep.__all__:
        getattr(keepstep, name)
    return fn(*args)


def _live(folder: Path, rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
    """A forked rank's whole life. Never returns."""
    status = 1
    result: tuple[Any, str] = (None, "")
    try:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        dist.barrier()
        (folder / f"ready-{rank}").touch()
        result = (fn(rank, *args), "")
        status = 0
    except BaseException:
        result = (None, traceback.format_exc())
    finally:
        partial = folder / f"result-{rank}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(folder / f"result-{rank}")
        os._exit(status)
