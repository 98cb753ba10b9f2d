"""The only place where ranks talk to each other.

They talk through the store that every process group has (a small key-value server), not through collectives: a wait has a
deadline, a rank that is missing can be named, and afterwards the trainer's process group is as usable as before. A *phase*
is one question to all ranks and one answer: every rank posts a report, rank 0 (the coordinator) collects them and announces
a verdict. An exception inside a phase, on any rank, reaches all of them.

Works beside NCCL and without it; no message depends on the trainer's groups or their timeouts.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist

from keepstep import errors
from keepstep.errors import CheckpointError, CommitTimeoutError, MismatchError, RankFailedError, UsageError

__all__ = ["DEADLINE_S", "Phase", "Ranks"]

DEADLINE_S = 600.0
GRACE_S = 1.0
_SHARED = {cls.code: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CheckpointError)}


class _Report(msgspec.Struct):
    """What a rank posts: the call it is in, its data or its error."""

    call: str
    data: bytes = b""
    error: str = ""


class _Verdict(msgspec.Struct):
    """What the coordinator announces. ``code`` is set when the phase failed."""

    data: bytes = b""
    code: str = ""
    message: str = ""
    failures: dict[int, str] = {}
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of the job, as one of them sees it. Use it on the thread that made it: the training thread.

    Rank 0 is the coordinator.
    """

    rank: int
    world: int
    _store: Any
    _thread: int = field(default_factory=threading.get_ident)

    @property
    def leads(self) -> bool:
        """Whether this is the coordinator."""
        return self.rank == 0

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of torch's default process group, or one rank alone when there is none. Not collective."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, None)
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError):
            # A connection of our own: a long wait on the shared one would block whoever else uses it.
            store = store.clone()
        return cls(dist.get_rank(), dist.get_world_size(), store)

    @contextlib.contextmanager
    def phase(self, call: str, deadline_s: float = DEADLINE_S) -> Iterator[Phase]:
        """A phase as a with-block; ``call`` must be the same text on every rank. Collective.

        An exception in the block is told to the other ranks, and raised here.

        Raises:
            UsageError: called on another thread than the one that made this object.
        """
        if threading.get_ident() != self._thread:
            raise UsageError("ranks may only talk on the training thread; this is another one")
        # The count lives in the store, by rank, so that it outlasts this object and both ends stay in step.
        number = 0 if self.world == 1 else self._store.add(f"keepstep/at/{self.rank}", 1)
        phase = Phase(self.rank, self.world, self._store, call, deadline_s, number)
        try:
            yield phase
        except BaseException as err:
            if self.world > 1:
                phase.tell(err)
            raise


@dataclass(slots=True)
class Phase:
    """One question and one answer: ``gather`` first, then ``broadcast``."""

    rank: int
    world: int
    _store: Any
    _call: str
    _deadline_s: float
    _number: int
    _posted: bool = False
    _announced: bool = False
    _began: float = field(default_factory=time.monotonic)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Posts this rank's data. On the coordinator, returns everybody's, by rank; elsewhere None at once.

        Raises (on the coordinator):
            CommitTimeoutError: ranks that did not come before the deadline.
            RankFailedError: ranks that reported an error.
            MismatchError: ranks that are in another call.
        """
        if self.world == 1:
            return [data]
        self._post(_Report(self._call, data))
        if self.rank != 0:
            return None
        keys = [self._key(rank) for rank in range(self.world)]
        self._wait_all(keys)
        reports = [msgspec.msgpack.decode(raw, type=_Report) for raw in self._get_all(keys)]
        failures = {rank: report.error for rank, report in enumerate(reports) if report.error}
        if failures:
            raise RankFailedError(f"{self._call} failed", failures)
        calls = {rank: report.call for rank, report in enumerate(reports) if report.call != self._call}
        if calls:
            raise MismatchError(
                "ranks are in different calls; nothing was written:",
                [f"rank 0: {self._call}", *(f"rank {rank}: {call}" for rank, call in calls.items())],
            )
        self._forget_previous()
        return [report.data for report in reports]

    def broadcast(self, data: bytes | None = None) -> bytes:
        """The coordinator's answer, on every rank. The coordinator passes it, the others pass nothing and wait.

        Raises:
            CommitTimeoutError: no answer before the deadline.
            CheckpointError: what made the phase fail, as the coordinator saw it.
        """
        if self.rank == 0:
            answer = data if data is not None else b""
            if self.world > 1:
                self._announce(_Verdict(answer))
            return answer
        left = self._left_s() + GRACE_S
        key = self._key("verdict")
        if not self._wait(key, left):
            text = f"gave up after {self._deadline_s:g} s: rank 0, the coordinator, did not answer"
            self._post(_Report(self._call, error=text))
            raise CommitTimeoutError(
                f"{self._call}: rank {self.rank} {text}. Whether rank 0 finished is not known here; only committed"
                " steps exist",
                (0,),
            )
        verdict = msgspec.msgpack.decode(self._store.get(key), type=_Verdict)
        self._announced = True
        if verdict.code:
            raise _rebuilt(verdict)
        return verdict.data

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks what went wrong here, unless the phase is decided already."""
        if self._announced:
            return
        try:
            if self.rank == 0:
                self._announce(_verdict_of(error, self._call))
            elif not self._posted:
                self._post(_Report(self._call, error=_text(error)))
        except RuntimeError as unreachable:
            # The store is gone, and with it the other ranks: the error at hand is the one to raise.
            error.add_note(f"(the other ranks could not be told: {unreachable})")

    def _key(self, what: object) -> str:
        return f"keepstep/{self._number}/{what}"

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - (time.monotonic() - self._began))

    def _post(self, report: _Report) -> None:
        self._store.set(self._key(self.rank), msgspec.msgpack.encode(report))
        self._posted = True

    def _announce(self, verdict: _Verdict) -> None:
        self._announced = True
        self._store.set(self._key("verdict"), msgspec.msgpack.encode(verdict))

    def _wait(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], dt.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            return bool(self._store.check([key]))
        return True

    def _wait_all(self, keys: list[str]) -> None:
        """Waits for every report, but not longer once one of them is an error: the rest would wait for nothing."""
        store = self._store
        pause_s = 0.05
        while True:
            seconds = min(self._left_s(), pause_s)
            try:
                store.wait(keys, dt.timedelta(seconds=max(seconds, 0.001)))
            except RuntimeError:
                here = [rank for rank, key in enumerate(keys) if store.check([key])]
                failures = {rank: text for rank in here if (text := self._error_of(keys[rank]))}
                if failures:
                    raise RankFailedError(f"{self._call} failed", failures) from None
                if self._left_s() > 0:
                    pause_s = min(pause_s * 2, 2.0)
                    continue
                missing = [rank for rank in range(self.world) if rank not in here]
                raise CommitTimeoutError(
                    f"{self._call}: {_numbers(missing)} did not arrive within {self._deadline_s:g} s"
                    f" (arrived: {', '.join(map(str, here))}). Nothing of this call was committed",
                    missing,
                ) from None
            return

    def _error_of(self, key: str) -> str:
        return msgspec.msgpack.decode(self._store.get(key), type=_Report).error

    def _get_all(self, keys: list[str]) -> list[bytes]:
        store = self._store
        if store.has_extended_api():
            return list(store.multi_get(keys))
        return [store.get(key) for key in keys]

    def _forget_previous(self) -> None:
        """Whoever reports in this phase has read the verdict of the last one: its keys are of no more use."""
        for what in (*range(self.world), "verdict"):
            self._store.delete_key(f"keepstep/{self._number - 1}/{what}")


def _numbers(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _verdict_of(error: BaseException, call: str) -> _Verdict:
    """How the coordinator's exception is told to the others: as itself where it speaks of all ranks."""
    if isinstance(error, RankFailedError):
        return _Verdict(code=error.code, message=f"{call} failed", failures=error.failures)
    if isinstance(error, CommitTimeoutError):
        return _Verdict(code=error.code, message=str(error), missing=error.missing)
    if isinstance(error, CheckpointError) and error.code not in ("storage", "staging", "unsafe-value"):
        return _Verdict(code=error.code, message=str(error))
    return _Verdict(code=RankFailedError.code, message=f"{call} failed", failures={0: _text(error)})


def _rebuilt(verdict: _Verdict) -> CheckpointError:
    if verdict.code == RankFailedError.code:
        return RankFailedError(verdict.message, verdict.failures)
    if verdict.code == CommitTimeoutError.code:
        return CommitTimeoutError(verdict.message, verdict.missing)
    made: CheckpointError = _SHARED[verdict.code](verdict.message)
    return made
