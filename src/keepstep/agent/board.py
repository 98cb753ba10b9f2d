"""The coordinator's side of an attempt: who takes part, what has arrived, and the decision, which is made once.

Everything runs in whatever process the coordinator's agent is. Attempts are decided in the order in which they began, so
that an older step never becomes visible after a newer one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from keepstep.agent.protocol import Begin, Decided, Deliver
from keepstep.commit.catalog import read_catalog
from keepstep.commit.conclude import Order, tidy
from keepstep.commit.publish import commit_step, point_latest
from keepstep.commit.records import RankTimes, SaveRecord, append_record, now_text, tails_of
from keepstep.errors import AgentError, CheckpointError, CommitTimeoutError, MismatchError, StorageError
from keepstep.format.failure import Failure, failure_of, failure_on
from keepstep.format.manifest import Manifest, Receipt
from keepstep.storage.base import Storage

__all__ = ["Board", "Place", "memory_bytes"]

REMEMBERED = 64
TICK_S = 0.2
_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step goes: its own storage, and that of the run it belongs to."""

    step: Storage
    root: Storage | None


@dataclass(slots=True)
class _Attempt:
    begin: Begin
    began: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    begun: set[int] = field(default_factory=set)
    receipts: dict[int, Receipt] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    times: dict[int, RankTimes] = field(default_factory=dict)
    replicas: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    order: Order | None = None
    place: Place | None = None
    run: Storage | None = None
    background: str = ""
    staging: str = ""
    received: float = 0.0
    told: bool = False
    settled: bool = False
    far: Future[Decided] = field(default_factory=Future)
    decided: Future[Decided] = field(default_factory=Future)


class Board:
    """The attempts that this process coordinates. Any thread; ``close`` leaves undecided what is undecided."""

    def __init__(self) -> None:
        self.committed = 0
        self.failed = 0
        self._attempts: dict[str, _Attempt] = {}
        self._order: list[str] = []
        self._changed = threading.Condition()
        self._seen_runs: set[str] = set()
        self._closed = False
        for work in (self._commit_in_order, self._watch_deadlines):
            threading.Thread(target=work, name=f"keepstep-{work.__name__.strip('_')}", daemon=True).start()

    def open(self, begin: Begin, run: Storage | None = None, *, far: bool = False) -> Future[Decided]:
        """Notes that a rank takes part; the first one opens the attempt. The future holds the decision, never an error.

        ``run`` is where the attempt is recorded, whatever becomes of it; it comes with the coordinator's own rank. ``far``
        is for ranks of other nodes: they hear of it first.
        """
        with self._changed:
            attempt = self._attempts.get(begin.attempt)
            if attempt is None:
                attempt = self._attempts[begin.attempt] = _Attempt(begin)
                attempt.deadline = attempt.began + begin.deadline_s
                self._order.append(begin.attempt)
                for old in self._order[:-REMEMBERED]:
                    if self._attempts[old].decided.done():
                        del self._attempts[old]
                        self._order.remove(old)
            attempt.run = attempt.run or run
            attempt.begun.add(begin.rank)
            return attempt.far if far else attempt.decided

    def receive(self, part: Deliver, place: Place | None = None) -> None:
        """Takes what became of one rank's part. ``place`` comes with the coordinator's own part, which has the order."""
        with self._changed:
            attempt = self._attempts.get(part.attempt)
            if attempt is None or attempt.decided.done() or part.rank in attempt.receipts:
                return
            if part.times is not None:
                attempt.times[part.rank] = part.times
            if part.order is not None:
                attempt.order, attempt.place = part.order, place
                attempt.background, attempt.staging = part.background, part.staging
            if part.failure is not None:
                attempt.failures.setdefault(part.rank, part.failure)
            elif part.receipt is not None:
                attempt.receipts[part.rank] = part.receipt
                attempt.replicas[part.rank] = part.replicas
            attempt.received = time.monotonic()
            self._changed.notify_all()

    def give_up(self, names: Sequence[str] | None) -> None:
        """Nobody is left who could begin a part of these attempts (None: of any); those with parts not begun have failed."""
        with self._changed:
            for name in self._attempts if names is None else names:
                attempt = self._attempts.get(name)
                if attempt is None or attempt.told:
                    continue
                for rank in set(range(attempt.begin.world)) - attempt.begun:
                    lost = AgentError(f"the trainer of rank {rank} ended before it took part")
                    attempt.failures.setdefault(rank, failure_of(lost))
            self._changed.notify_all()

    def open_attempts(self) -> int:
        """How many attempts are not decided yet."""
        with self._changed:
            return sum(not attempt.decided.done() for attempt in self._attempts.values())

    def settle(self, timeout_s: float) -> bool:
        """Waits until everything that was decided has been tidied up after too; whether it was."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(one.settled for one in self._attempts.values() if one.decided.done()), timeout_s
            )

    def close(self) -> None:
        """Stops the threads as soon as they have nothing in hand."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> _Attempt | None:
        """The oldest undecided attempt, once all its parts are there; one that has failed waits for no other."""
        oldest = True
        for name in self._order:
            attempt = self._attempts[name]
            if attempt.decided.done():
                continue
            if attempt.failures or (oldest and len(attempt.receipts) == attempt.begin.world):
                return attempt
            oldest = False
        return None

    def _commit_in_order(self) -> None:
        while True:
            with self._changed:
                while (attempt := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            self._end(attempt)

    def _end(self, attempt: _Attempt) -> None:
        """Commits an attempt or fails it, tells everybody, and tidies up."""
        manifest, digest = None, ""
        try:
            failure, manifest, digest = self._decide(attempt)
        except Exception as err:  # noqa: BLE001  thread entry: whatever it was, every rank hears of it
            failure = failure_of(err)
            if failure.code in (CheckpointError.code, StorageError.code):
                # Such an error speaks of one process, and does not say of which: it is the coordinator's.
                what = f"the commit of step {attempt.begin.step} failed; only committed steps exist"
                failure = failure_on(what, {0: failure}, attempt.begin.world)
        if failure is not None and attempt.run is not None:
            failure = msgspec.structs.replace(failure, text=failure.text + _newest(attempt.run))
        root = attempt.place.root if attempt.place is not None else None
        in_run = attempt.order is not None and attempt.order.in_run
        try:
            if manifest is not None and root is not None and in_run:
                point_latest(root, manifest, digest)
        except Exception as err:  # noqa: BLE001  a storage of the user's may raise what it likes; the step exists
            _log.warning("the hint could not be moved to step %d: %s", manifest.step if manifest else -1, err)
        ended = time.monotonic()
        decided = Decided(attempt.begin.attempt, failure, manifest.total_bytes if manifest is not None else 0)
        # Told before old steps go: nobody has to wait for that.
        if self._tell(attempt, decided):
            try:
                if manifest is not None and root is not None and in_run and attempt.order is not None:
                    tidy(root, attempt.order, manifest)
            except Exception as err:  # noqa: BLE001  as above
                _log.warning("tidying up failed; committed steps are untouched: %s", err)
            self._record(attempt, decided, ended)
            # The decision is remembered for ranks that come late; what led to it is not.
            attempt.order = attempt.place = None
            for parts in (attempt.receipts, attempt.replicas, attempt.times):
                parts.clear()
        with self._changed:
            attempt.settled = True
            self._changed.notify_all()

    def _decide(self, attempt: _Attempt) -> tuple[Failure | None, Manifest | None, str]:
        begin, order, place = attempt.begin, attempt.order, attempt.place
        if attempt.failures:
            what = f"save of step {begin.step} failed; nothing of it was committed"
            return failure_on(what, attempt.failures, begin.world), None, ""
        if order is None or place is None:
            missing = CommitTimeoutError(f"save of step {begin.step}: rank 0 sent no manifest", (0,))
            return failure_of(missing), None, ""
        differing = _differences(attempt.replicas)
        if differing:
            text = (
                "nothing was committed: tensors that every rank should hold alike differ. Mark them with ks.per_rank if"
                " each rank has its own, or pass the DistributedDataParallel wrapper if its first rank's buffers are the"
                " truth:"
            )
            return failure_of(MismatchError(text, differing)), None, ""
        receipts = [attempt.receipts[rank] for rank in range(begin.world)]
        manifest, digest = commit_step(
            place.step,
            order.manifest,
            receipts,
            replace=order.replace,
            run=place.root if order.in_run else None,
            leftovers=order.leftovers,
        )
        return None, manifest, digest

    def _record(self, attempt: _Attempt, decided: Decided, ended: float) -> None:
        """One line about the save, in the run's folder and in the log. Failing here loses nothing."""
        begin, failure = attempt.begin, decided.failure
        run = attempt.run
        if failure is None:
            self.committed += 1
            _log.info(
                "step %d committed: %s bytes, %.3f s", begin.step, f"{decided.total_bytes:,}", ended - attempt.began
            )
        else:
            self.failed += 1
            # Whoever trains is told by the Pending, and warned by the Checkpointer.
            _log.info("save of step %d failed: %s", begin.step, failure.error())
        if run is None:
            return
        record = _record_of(attempt, decided, ended, first=run.url not in self._seen_runs)
        self._seen_runs.add(run.url)
        try:
            append_record(run, record)
        except Exception as err:  # noqa: BLE001  as above
            _log.warning("the record of step %d could not be written: %s", begin.step, err)

    def _tell(self, attempt: _Attempt, decided: Decided) -> bool:
        with self._changed:
            if attempt.told:
                return False
            attempt.told = True
        # Other nodes first: this process may end as soon as its own ranks know.
        attempt.far.set_result(decided)
        attempt.decided.set_result(decided)
        with self._changed:
            self._changed.notify_all()
        return True

    def _watch_deadlines(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait(TICK_S)
                late = [
                    attempt
                    for attempt in self._attempts.values()
                    if not attempt.decided.done() and time.monotonic() > attempt.deadline
                ]
            for attempt in late:
                decided = Decided(attempt.begin.attempt, failure_of(_too_late(attempt)))
                if self._tell(attempt, decided):
                    with self._changed:
                        attempt.settled = True
                        self._changed.notify_all()
                    # The storage may be what hangs: nobody waits for this.
                    record = (attempt, decided, time.monotonic())
                    threading.Thread(target=self._record, args=record, daemon=True).start()


def _too_late(attempt: _Attempt) -> CommitTimeoutError:
    begin = attempt.begin
    missing = [rank for rank in range(begin.world) if rank not in attempt.receipts]
    if missing:
        who = ", ".join(map(str, missing))
        return CommitTimeoutError(
            f"save of step {begin.step}: nothing came from rank {who} within {begin.deadline_s:g} s (its storage or its"
            " trainer does not answer). Nothing of this attempt is committed",
            missing,
        )
    return CommitTimeoutError(
        f"save of step {begin.step}: all ranks were done, but the storage did not finish the commit within"
        f" {begin.deadline_s:g} s. Whether the step exists shows in `keepstep ls`",
        (),
    )


def _newest(root: Storage) -> str:
    try:
        steps = read_catalog(root).steps
    except Exception:  # noqa: BLE001  as above: what cannot be told is left out
        return ""
    return f" (newest on disk: step {steps[0].step})" if steps else " (no step is on disk)"


def _differences(replicas: dict[int, dict[str, dict[str, str]]]) -> list[str]:
    """Lines about tensors that ranks of a group hold differently, or that one of them does not hold."""
    problems = []
    groups: dict[str, dict[int, dict[str, str]]] = {}
    for rank, by_group in replicas.items():
        for group, digests in by_group.items():
            groups.setdefault(group, {})[rank] = digests
    for members in groups.values():
        first = min(members)
        keys = {key: None for digests in members.values() for key in digests}
        for key in keys:
            lacking = [rank for rank, digests in members.items() if key not in digests]
            if lacking:
                problems.append(f"{key}: rank {lacking[0]} holds it in another way than the others")
                continue
            others = [str(rank) for rank in sorted(members) if members[rank][key] != members[first][key]]
            if others:
                problems.append(f"{key or 'some tensor'}: values differ across ranks: {', '.join(others)} from {first}")
    return problems


def _record_of(attempt: _Attempt, decided: Decided, ended: float, *, first: bool) -> SaveRecord:
    begin, failure = attempt.begin, decided.failure
    ranks = tails_of(attempt.times)
    stall, staged = ranks.get("stall"), ranks.get("stage")
    lead = attempt.times.get(0, RankTimes())
    # The coordinator's rank is on this machine: its boundary is on this clock.
    boundary = lead.boundary or attempt.began
    lineage = attempt.order.manifest.lineage if attempt.order is not None else None
    durable = ended - boundary
    return SaveRecord(
        step=begin.step,
        save_id=begin.attempt,
        ended=now_text(),
        outcome="committed" if failure is None else "failed",
        code=failure.code if failure else "",
        error=str(failure.error()) if failure else "",
        run=lineage.run if lineage else "",
        incarnation=lineage.incarnation if lineage else 0,
        world=begin.world,
        bytes=decided.total_bytes,
        background=attempt.background,
        staging=attempt.staging,
        first=first,
        stall_s=stall.most if stall else 0.0,
        staged_s=staged.most if staged else 0.0,
        durable_s=durable,
        receipts_s=max(0.0, attempt.received - boundary),
        commit_s=max(0.0, ended - attempt.received),
        bytes_per_s=decided.total_bytes / durable if durable > 0 else 0.0,
        agent_memory_bytes=memory_bytes(),
        ranks=ranks,
        spans=[*lead.spans, ("coordinator", "commit", attempt.received - boundary, durable)],
    )


def memory_bytes() -> int:
    """Resident memory of this process, shared memory left out; 0 where it cannot be told."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123  a kernel file, not a path of ours
            fields = dict(line.split(":", 1) for line in status)
        return (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])) << 10
    except (OSError, KeyError, ValueError):
        return 0
