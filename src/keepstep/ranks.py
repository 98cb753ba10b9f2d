"""The only place where ranks talk to each other.

They talk through the store that every process group has (a small key-value server), not through collectives: a wait has a
deadline, a rank that is missing can be named, and afterwards the trainer's process group is as usable as before. A *phase*
is one question to all ranks and one answer: every rank posts a report, rank 0 (the coordinator) collects them and announces
a verdict. An exception inside a phase, on any rank, reaches all of them.

Each rank counts its phases, and equal numbers meet. A rank that missed one comes to a number that is over: when that was
another call than its own, or the others have come back to the same one, it goes on to the next number. So one call that
not all ranks made does not set the ranks apart for good.

Works beside NCCL and without it; no message depends on the trainer's groups or their timeouts. Bytes that are too many for
the store go through an *exchange*, by connections that are made for it.
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

from keepstep.errors import CheckpointError, CommitTimeoutError, MismatchError, RankFailedError, UsageError
from keepstep.format.failure import Failure, failure_in

__all__ = ["DEADLINE_S", "Exchange", "Phase", "Ranks"]

DEADLINE_S = 600.0
GRACE_S = 1.0
CONNECT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.05
BRIEF_S = 0.005
"""So long a rank that waits looks as often as it can; then less and less often."""
LOOK_S = 0.5
_AGAIN = "again"


class _Report(msgspec.Struct):
    """What a rank posts: the call it is in, its data or its error. ``gone`` says that it no longer waits for an answer."""

    call: str
    data: bytes = b""
    error: str = ""
    code: str = ""
    gone: bool = False


class _Verdict(msgspec.Struct):
    """What the coordinator announces. ``code`` is set when the phase failed, ``late`` names ranks it did not hear of."""

    data: bytes = b""
    code: str = ""
    failure: Failure | None = None
    call: str = ""
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of the job, as one of them sees it. Use it on the thread that made it: the training thread.

    Rank 0 is the coordinator.
    """

    rank: int
    world: int
    _store: Any
    _thread: int = field(default_factory=threading.get_ident)
    _group: Any = None

    @property
    def leads(self) -> bool:
        """Whether this is the coordinator."""
        return self.rank == 0

    @classmethod
    def current(cls) -> Ranks:
        """Those of torch's default group, or one rank alone. Not collective. RankFailedError when its store is gone."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, None)
        store: Any = dist.distributed_c10d._get_default_store()
        # A second connection to one that is gone would be tried for minutes; the first one knows.
        cls(dist.get_rank(), dist.get_world_size(), store).has("keepstep")
        with contextlib.suppress(RuntimeError):
            # A connection of our own: a long wait on the shared one would block whoever else uses it.
            store = store.clone()
        return cls(dist.get_rank(), dist.get_world_size(), store, _group=dist.group.WORLD)

    def is_same_group(self, other: Ranks) -> bool:
        """Whether both were made while the same process group was the default one, on the same thread."""
        return self._group is other._group and self._thread == other._thread

    def has(self, key: str) -> bool:
        """Whether somebody has posted under this key. Like the four below: for news outside of phases, by any rank."""
        return bool(self._ask("check", [key]))

    def post(self, key: str, value: bytes) -> None:
        """Posts a value under a key, for all ranks."""
        self._ask("set", key, value)

    def read(self, key: str) -> bytes:
        """What was posted under a key; ask ``has`` or ``wait`` first."""
        return bytes(self._ask("get", key))

    def count(self, key: str, more: int) -> int:
        """Adds to a counter that all ranks share; returns what it is then. Additions have one order for all."""
        return int(self._ask("add", key, more))

    def _ask(self, what: str, *args: Any) -> Any:
        try:
            return getattr(self._store, what)(*args)
        except dist.DistNetworkError as err:
            raise _unreachable("ask the other ranks", err) from err

    def wait(self, key: str, seconds: float) -> bool:
        """Waits until something is posted under a key; whether it was."""
        end, pause_s = time.monotonic() + seconds, FIRST_PAUSE_S
        # Asked again and again rather than waited for: a wait that ends too early is logged as a fault of the network.
        while not self.has(key):
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return True

    def hosts(self) -> tuple[str, ...]:
        """Names by which the machine may be known to the others: the one under which they all reach the store."""
        store = self._store
        while store is not None and not hasattr(store, "host"):
            store = getattr(store, "underlying_store", None)
        return (str(store.host),) if store is not None else ()

    def exchange(self, name: str, deadline_s: float) -> Exchange:
        """Connections between all ranks for bytes that are too many for the store. Collective; ``name`` is a new one.

        Raises:
            RuntimeError: ranks cannot reach each other, or one did not come in half the time or ``CONNECT_S``.
        """
        c10d: Any = dist.distributed_c10d
        store, limit_s = c10d.PrefixStore(f"keepstep/exchange/{name}", self._store), min(deadline_s / 2, CONNECT_S)
        group = c10d.ProcessGroupGloo(store, self.rank, self.world, dt.timedelta(seconds=limit_s))
        return Exchange(self.rank, dt.timedelta(seconds=deadline_s), group)

    @contextlib.contextmanager
    def phase(self, call: str, deadline_s: float = DEADLINE_S) -> Iterator[Phase]:
        """A phase as a with-block; ``call`` must be the same text on every rank. Collective.

        An exception in the block is told to the other ranks, and raised here.

        Raises:
            UsageError: called on another thread than the one that made this object.
        """
        if threading.get_ident() != self._thread:
            raise UsageError("ranks may only talk on the training thread; this is another one")
        phase = Phase(self.rank, self.world, self._store, call, deadline_s)
        try:
            if self.world > 1:
                phase.move_on()
            yield phase
        except BaseException as err:
            if self.world > 1:
                phase.tell(err)
            if isinstance(err, dist.DistNetworkError):
                raise _unreachable(call, err) from err
            raise


@dataclass(slots=True)
class Exchange:
    """Host tensors from rank to rank, through a gloo group of its own. A rank that fails closes it: the others notice."""

    rank: int
    _deadline: dt.timedelta
    _group: Any
    _begun: list[tuple[int, Any]] = field(default_factory=list)

    def begin(self, outgoing: list[tuple[int, Any]], incoming: list[tuple[int, Any]]) -> None:
        """Starts to send tensors to ranks and to fill others from ranks; leave them alone until ``finish`` returns."""
        with _cut_off(self.rank):
            self._begun.extend((rank, self._group.recv([tensor], rank, 0)) for rank, tensor in incoming)
            self._begun.extend((rank, self._group.send([tensor], rank, 0)) for rank, tensor in outgoing)

    def finish(self) -> None:
        """Waits until it is done. RankFailedError when a rank is gone or late; it may not be the one to blame."""
        while self._begun:
            with _cut_off(self._begun[0][0]):
                self._begun[0][1].wait(self._deadline)
            del self._begun[0]

    def close(self) -> None:
        """Closes this rank's end: after a failure, or when all ranks are done. Idempotent."""
        # The connections are closed once nothing holds them: no work may be left, not even in a frame of an error.
        self._begun.clear()
        self._group = None


def _unreachable(call: str, err: RuntimeError) -> RankFailedError:
    text = "the store of the process group is gone, with the process that has it (rank 0, or the launcher)"
    known = "Whether rank 0 finished is not known here; only committed steps exist"
    return RankFailedError(f"{call}: {text}. {known}", {0: str(err).splitlines()[0]})


@contextlib.contextmanager
def _cut_off(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as err:
        raise RankFailedError("the ranks' exchange broke off", {rank: str(err).splitlines()[0]}) from err


@dataclass(slots=True)
class Phase:
    """One question and one answer: ``gather`` first, then ``broadcast``."""

    rank: int
    world: int
    _store: Any
    _call: str
    _deadline_s: float
    _number: int = 0
    _posted: _Report | None = None
    _announced: bool = False
    _heard: frozenset[int] = frozenset()
    _began: float = field(default_factory=time.monotonic)

    def move_on(self) -> None:
        """Takes the next number, with the report that was posted. The count lives in the store: it outlasts this object."""
        self._number = self._store.add(f"keepstep/at/{self.rank}", 1)
        if self._posted is not None:
            self._post(self._posted)

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
        reports = self._reports()
        while any(r.gone and (r.call != self._call or self._comes_again(rank)) for rank, r in reports.items()):
            self._store.set(self._key("verdict"), msgspec.msgpack.encode(_Verdict(code=_AGAIN)))
            self.move_on()
            reports = self._reports()
        failures = {rank: report.error for rank, report in reports.items() if report.error}
        if failures:
            codes = {rank: reports[rank].code for rank in failures}
            raise RankFailedError(f"{self._call} failed", failures, codes)
        missing = [rank for rank in range(self.world) if rank not in reports]
        if missing:
            raise CommitTimeoutError(
                f"{self._call}: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not arrive within"
                f" {self._deadline_s:g} s (arrived: {', '.join(map(str, reports))}). Nothing of this call was committed",
                missing,
            )
        calls = {rank: report.call for rank, report in reports.items() if report.call != self._call}
        if calls:
            raise MismatchError(
                "ranks are in different calls; nothing was written:",
                [f"rank 0: {self._call}", *(f"rank {rank}: {call}" for rank, call in calls.items())],
            )
        self._forget_previous()
        return [report.data for report in reports.values()]

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
        while True:
            if not self._wait(self._key("verdict"), self._left_s() + GRACE_S):
                text = f"gave up after {self._deadline_s:g} s: rank 0, the coordinator, did not answer"
                self._post(_Report(self._call, error=text, code=CommitTimeoutError.code, gone=True))
                raise CommitTimeoutError(
                    f"{self._call}: rank {self.rank} {text}. Whether rank 0 finished is not known here; only committed"
                    " steps exist",
                    (0,),
                )
            verdict = self._verdict()
            if not self._is_stale(verdict):
                break
            self.move_on()
        self._announced = True
        if verdict.code:
            raise (verdict.failure or Failure(verdict.code, "")).error()
        return verdict.data

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks what went wrong here, unless the phase is decided already."""
        if self._announced:
            return
        if not isinstance(error, RankFailedError | CommitTimeoutError):
            error.add_note(f"(on rank {self.rank} of {self.world}, in: {self._call})")
        try:
            if self.rank == 0:
                failure = failure_in(self._call, error)
                self._announce(_Verdict(code=failure.code, failure=failure))
            elif self._posted is None:
                self._post(_Report(self._call, error=f"{type(error).__name__}: {error}", code=_code(error)))
                while self._store.check([self._key("verdict")]) and self._is_stale(self._verdict()):
                    self.move_on()
        except RuntimeError as unreachable:
            # The store is gone, and with it the other ranks: the error at hand is the one to raise.
            error.add_note(f"(the other ranks could not be told: {unreachable})")

    def _key(self, what: object) -> str:
        return f"keepstep/{self._number}/{what}"

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - (time.monotonic() - self._began))

    def _post(self, report: _Report) -> None:
        self._store.set(self._key(self.rank), msgspec.msgpack.encode(report))
        self._posted = report

    def _announce(self, verdict: _Verdict) -> None:
        self._announced = True
        verdict.call = self._call
        verdict.late = tuple(rank for rank in range(1, self.world) if rank not in self._heard) if verdict.code else ()
        self._store.set(self._key("verdict"), msgspec.msgpack.encode(verdict))

    def _verdict(self) -> _Verdict:
        return msgspec.msgpack.decode(self._store.get(self._key("verdict")), type=_Verdict)

    def _is_stale(self, verdict: _Verdict) -> bool:
        """Whether a verdict is not about this rank's call, but about one that it did not take part in."""
        if self.rank not in verdict.late or verdict.code == _AGAIN:
            return verdict.code == _AGAIN
        return verdict.call != self._call or (verdict.code == CommitTimeoutError.code and self._comes_again(0))

    def _comes_again(self, rank: int) -> bool:
        """Whether ``rank``, which gave up on this call under this number, makes it once more under the next."""
        key = f"keepstep/{self._number + 1}/{rank}"
        if not self._wait(key, GRACE_S):
            return False
        later = msgspec.msgpack.decode(self._store.get(key), type=_Report)
        return later.call == self._call and not later.gone

    def _wait(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], dt.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            return bool(self._store.check([key]))
        return True

    def _reports(self) -> dict[int, _Report]:
        """The reports by rank: all; or those that are there when the time is over or one of them is an error."""
        keys = [self._key(rank) for rank in range(self.world)]
        reports: dict[int, _Report] = {}
        pause_s, looked = FIRST_PAUSE_S, time.monotonic()
        while True:
            # Asked again and again rather than waited for: a wait that ends too early is logged as a fault of the network.
            here = list(range(self.world)) if self._store.check(keys) else []
            over = bool(here) or self._left_s() <= 0
            if not over and time.monotonic() - looked < LOOK_S:
                time.sleep(min(pause_s, self._left_s()))
                if time.monotonic() - self._began > BRIEF_S:
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            looked = time.monotonic()
            here = here or [rank for rank, key in enumerate(keys) if self._store.check([key])]
            # At the end all are read once more: a rank may have left meanwhile.
            new = [rank for rank in here if over or rank not in reports]
            raw = self._get_all([keys[rank] for rank in new]) if new else []
            reports |= {rank: msgspec.msgpack.decode(data, type=_Report) for rank, data in zip(new, raw, strict=True)}
            # Once one of them is an error, the others would be waited for in vain.
            if over or any(report.error for report in reports.values()):
                self._heard = frozenset(reports)
                return dict(sorted(reports.items()))

    def _get_all(self, keys: list[str]) -> list[bytes]:
        store = self._store
        return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]

    def _forget_previous(self) -> None:
        """Whoever reports in this phase has read the verdict of the last one: its keys are of no more use."""
        for what in (*range(self.world), "verdict"):
            self._store.delete_key(f"keepstep/{self._number - 1}/{what}")


def _code(error: BaseException) -> str:
    return error.code if isinstance(error, CheckpointError) else ""
