"""What an agent does, whatever process it runs in: writes what its ranks staged, and sees to it that it is committed.

In: parts of attempts, each with an arena that is filled. Out: one decision for each attempt, the same for all ranks. The
hub of the coordinator's rank decides; other hubs deliver to it and wait.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from keepstep.agent.board import Board, Place
from keepstep.agent.links import Link, Listener
from keepstep.agent.protocol import Abort, Begin, Decided, Deliver, JobStatus, Join, Submit
from keepstep.errors import AgentError, CommitTimeoutError, StorageError, UsageError
from keepstep.format.failure import Failure, failure_of
from keepstep.format.manifest import Receipt
from keepstep.move.arena import CHUNK_BYTES, Arena, bases_of
from keepstep.move.writer import Chunk, Origin, ShardWriter
from keepstep.storage.base import Storage

__all__ = ["Hub"]

MOST_RANKS = 1 << 20
PATIENCE_S = 1.5
"""How much longer than the coordinator's own deadline its decision may take to come here."""
_log = logging.getLogger("keepstep")


@dataclass(slots=True)
class _Part:
    """One rank's part in one attempt."""

    begin: Begin
    decided: Future[Decided]
    state: str = "staging"
    began: float = field(default_factory=time.monotonic)
    done_bytes: int = 0
    total_bytes: int = 0
    writing: threading.Thread | None = None


class Hub:
    """The parts of this node's ranks. Any thread. ``name`` tells hubs apart, all over the world."""

    def __init__(self) -> None:
        self.name = f"{platform.node()}-{secrets.token_hex(6)}"
        self.board = Board()
        self._parts: dict[tuple[str, int], _Part] = {}
        self._lock = threading.Lock()
        self._listeners: dict[str, Listener] = {}
        self._links: dict[str, Link] = {}
        self._linking = threading.Lock()
        self._waiting: dict[str, Future[Decided]] = {}
        self._present: set[int] = set()
        self._hopes: dict[str, set[int]] = {}

    def listen(self, secret: str, hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Makes this hub reachable for others that know the secret. Returns where, the likeliest address first."""
        with self._lock:
            listener = self._listeners.get(secret)
            if listener is None:
                for old in self._listeners.values():
                    old.close()
                listener = Listener(self.board, secret)
                self._listeners = {secret: listener}
        return tuple((host, listener.port) for host in _own_addresses(hosts))

    def enter(self, trainer: int) -> None:
        """A trainer is there, which may take part in what begins from now on."""
        with self._lock:
            self._present.add(trainer)

    def leave(self, trainer: int) -> None:
        """A trainer is gone. When all are that were there as an attempt began, nobody will begin what is missing of it."""
        with self._lock:
            self._present.discard(trainer)
            for hopes in self._hopes.values():
                hopes.discard(trainer)
            lost = [attempt for attempt, hopes in self._hopes.items() if not hopes] if self._present else None
        self.board.give_up(lost)

    def begin(self, begin: Begin, run: Storage | None) -> Future[Decided]:
        """A rank takes part in an attempt. The future holds the decision, never an error. ``run`` is its run's storage."""
        if not 0 <= begin.rank < begin.world <= MOST_RANKS:
            raise UsageError(f"rank {begin.rank} of {begin.world}")
        here = begin.join.coordinator in ("", self.name)
        with self._lock:
            self._hopes.setdefault(begin.attempt, set(self._present))
        decided = self.board.open(begin, run if begin.rank == 0 else None) if here else self._begin_elsewhere(begin)
        with self._lock:
            self._parts[begin.attempt, begin.rank] = _Part(begin, decided)
            # What was decided long ago and is not being written any more is of no interest.
            for key in [k for k, part in self._parts.items() if part.decided.done() and part.writing is None][:-16]:
                del self._parts[key]
        decided.add_done_callback(lambda _: self._forget(begin.attempt))
        return decided

    def submit(self, submit: Submit, place: Place, arena: Arena) -> None:
        """The rank's arena is filled: writes it, on a thread of its own, and delivers the receipt."""
        part = self._parts.get((submit.attempt, submit.rank))
        if part is None:
            # Decided long ago; whoever submits this has heard of it, or will.
            return
        part.state, part.total_bytes = "writing", sum(head.data_bytes for head in submit.write.heads)
        part.writing = threading.Thread(
            target=self._write, args=(part, submit, place, arena), name="keepstep-job", daemon=True
        )
        part.writing.start()

    def abort(self, abort: Abort) -> None:
        """The rank could not stage its part; for a rank that has submitted already nothing changes."""
        part = self._parts.get((abort.attempt, abort.rank))
        if part is not None and part.state == "staging":
            part.state = "aborted"
            self._deliver(part, Deliver(abort.attempt, abort.rank, failure=abort.failure))

    def _forget(self, attempt: str) -> None:
        with self._lock:
            self._hopes.pop(attempt, None)

    def is_writing(self, attempt: str, rank: int) -> bool:
        """Whether the arena of this part is still being read."""
        part = self._parts.get((attempt, rank))
        return part is not None and part.writing is not None

    def open_parts(self) -> int:
        """How many parts are not decided or still being written, plus attempts of others that wait for a decision here."""
        with self._lock:
            mine = sum(not part.decided.done() or part.writing is not None for part in self._parts.values())
        return mine or self.board.open_attempts()

    def settle(self, timeout_s: float) -> int:
        """Waits until everything that was submitted is decided. Returns how many parts are still open then."""
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                parts = list(self._parts.values())
            left = [part for part in parts if part.state in ("writing", "written") and not part.decided.done()]
            if not left or time.monotonic() >= end:
                self.board.settle(max(0.0, end - time.monotonic()))
                return len(left)
            with contextlib.suppress(TimeoutError):
                left[0].decided.result(max(0.0, end - time.monotonic()))

    def status(self) -> tuple[JobStatus, ...]:
        """Every part that is not decided."""
        with self._lock:
            parts = [(key, part) for key, part in self._parts.items() if not part.decided.done()]
        now = time.monotonic()
        return tuple(
            JobStatus(
                attempt,
                part.begin.step,
                rank,
                part.state,
                part.begin.url,
                part.done_bytes,
                part.total_bytes,
                now - part.began,
            )
            for (attempt, rank), part in parts
        )

    def close(self) -> None:
        """Hangs up and stops. What is undecided stays so."""
        self.board.close()
        with self._lock:
            for listener in self._listeners.values():
                listener.close()
            for link in self._links.values():
                link.close()

    def _write(self, part: _Part, submit: Submit, place: Place, arena: Arena) -> None:
        began = time.monotonic()
        receipt: Receipt | None = None
        failure: Failure | None = None
        try:
            receipt = self._write_files(part, submit, place, arena)
            part.state = "written"
        except Exception as err:  # noqa: BLE001  thread entry: the error becomes this rank's part
            part.state = "failed"
            failure = failure_of(err)
        took = time.monotonic() - began
        times = submit.times
        times.seconds["write"] = took
        at = times.seconds.get("stage", 0.0)
        times.spans.append(("agent", "write", at, at + took))
        times.host = platform.node()
        try:
            self._deliver(
                part,
                Deliver(
                    submit.attempt,
                    submit.rank,
                    receipt,
                    failure,
                    times,
                    submit.replicas,
                    submit.order,
                    part.begin.url,
                    submit.background,
                    submit.staging,
                ),
                place,
            )
        finally:
            part.writing = None

    def _write_files(self, part: _Part, submit: Submit, place: Place, arena: Arena) -> Receipt:
        heads = submit.write.heads
        bases, _ = bases_of([head.data_bytes for head in heads])
        origin = Origin(submit.attempt, submit.write.step, submit.rank)
        with contextlib.closing(
            ShardWriter(place.step, heads, origin=origin, arena=arena, digests=submit.write.digests)
        ) as writer:
            for file, (head, base) in enumerate(zip(heads, bases, strict=True)):
                for offset in range(0, head.data_bytes, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, head.data_bytes - offset)
                    writer.submit(Chunk(file, offset, length, base + offset))
                    part.done_bytes += length
                    if part.decided.done():
                        raise AgentError("the save was given up")
            return writer.finish()

    def _deliver(self, part: _Part, message: Deliver, place: Place | None = None) -> None:
        join = part.begin.join
        if join.coordinator in ("", self.name):
            self.board.receive(message, place)
            return
        link = self._links.get(join.coordinator)
        try:
            if link is None:
                raise AgentError("the coordinator's agent is gone: that of rank 0")
            link.send(message)
        except AgentError as err:
            self._lost((part.begin.attempt,), str(err))

    def _begin_elsewhere(self, begin: Begin) -> Future[Decided]:
        """The same attempt is announced to the coordinator for each rank; its decision comes once."""
        with self._lock:
            decided = self._waiting.get(begin.attempt)
            if decided is None:
                decided = self._waiting[begin.attempt] = Future()
                late = threading.Timer(begin.deadline_s + PATIENCE_S, self._late, (begin,))
                late.daemon = True
                late.start()
                decided.add_done_callback(lambda _: late.cancel())
        try:
            self._link(begin.join).send(begin)
        except (AgentError, StorageError) as err:
            self._lost((begin.attempt,), str(err))
        return decided

    def _link(self, join: Join) -> Link:
        """The link to this coordinator. One at a time is made, so that all parts of an attempt use the same."""
        with self._linking:
            link = self._links.get(join.coordinator)
            if link is not None and link.alive:
                return link
            link = Link(join, self._hear, self._lost)
            with self._lock:
                old = self._links
                self._links = {name: one for name, one in old.items() if one.attempts} | {join.coordinator: link}
            for name, one in old.items():
                if name != join.coordinator and not one.attempts:
                    one.close()
            return link

    def _hear(self, decided: Decided) -> None:
        with self._lock:
            waiting = self._waiting.pop(decided.attempt, None)
        if waiting is not None:
            waiting.set_result(decided)

    def _lost(self, attempts: Sequence[str], why: str) -> None:
        text = f"{why}. Whether the step was committed is not known here; only committed steps exist"
        for attempt in attempts:
            _log.warning("attempt %s: %s", attempt, why)
            self._hear(Decided(attempt, Failure(AgentError.code, text)))

    def _late(self, begin: Begin) -> None:
        text = (
            f"save of step {begin.step}: the coordinator's agent has said nothing for {begin.deadline_s:g} s; it is that of"
            " rank 0. Whether the step was committed is not known here; only committed steps exist"
        )
        self._hear(Decided(begin.attempt, failure_of(CommitTimeoutError(text, (0,)))))
        if (link := self._links.get(begin.join.coordinator)) is not None:
            # What comes next is not to wait behind messages that nobody takes.
            link.close()


def _own_addresses(hosts: Sequence[str]) -> list[str]:
    """Addresses of this machine by which others may reach it: those it was told that are its own, then what it finds."""
    found: dict[str, None] = {}
    for host in (*hosts, platform.node()):
        with contextlib.suppress(OSError):
            for info in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM):
                address = str(info[4][0])
                with contextlib.suppress(OSError), socket.socket() as probe:
                    probe.bind((address, 0))
                    found[address] = None
    for target in (*hosts, "192.0.2.1"):
        # No packet is sent: asks the kernel which of its addresses it would use.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found[probe.getsockname()[0]] = None
    return list(found) or ["127.0.0.1"]
