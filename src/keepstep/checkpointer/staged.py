"""One rank's part of one save in the background, from the boundary to the moment when the agent has it.

At the boundary, on the training thread, all is copied that no fence guards, or with ``staging="block"`` everything. The
rest is copied on a thread of its own, and the fence holds training back until that is done. Then the part is submitted, and
only when the agent has taken it is ``staged`` done: from there on the trainer may die.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import msgspec
import torch

from keepstep.agent.board import Place
from keepstep.agent.client import Background, Lent
from keepstep.agent.links import tell_instead
from keepstep.agent.protocol import Abort, Begin, Decided, Join, Submit, WriteOrder
from keepstep.checkpointer.agree import Agreement, Attempt
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.replicas import content, each_replica
from keepstep.checkpointer.saving import Saved, file_heads, order_of, planned_files
from keepstep.checkpointer.slots import ArenaSlot
from keepstep.commit.records import RankTimes, Span
from keepstep.errors import StagingError
from keepstep.failpoints import reach
from keepstep.format.failure import failure_of
from keepstep.format.manifest import step_name
from keepstep.format.shardfile import digest
from keepstep.move.arena import bases_of
from keepstep.move.device import HostMemory, cloned_on_device, compute_marks, side_streams
from keepstep.move.staging import Extras, Stager
from keepstep.move.writer import Origin
from keepstep.plan.save_plan import FilePlan
from keepstep.state.capture import Snapshot
from keepstep.state.fence import Hold, raise_hold
from keepstep.storage.base import Storage
from keepstep.timeline import Timeline

__all__ = ["COPY_THREADS", "Desk", "StagedSave"]

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Of one rank, with ``staging="block"``; more would only wait for memory."""
EXPLAINED_RANKS = 64
"""Up to this many ranks each sends a digest of every replicated tensor, so that an error can name the tensor."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Who saves, and who does the rest of the work; ``join`` says where the coordinator's agent is."""

    rank: int
    world: int
    background: Background
    join: Join
    check_staging: bool = False


@dataclass(slots=True)
class StagedSave:
    """One save of one rank. ``began`` is the boundary, on the clock of ``time.perf_counter``."""

    desk: Desk
    attempt: Attempt
    storage: Storage
    snapshot: Snapshot
    agreed: Agreement
    timeline: Timeline
    began: float
    files: tuple[FilePlan, ...] = ()
    pending: Pending = field(init=False)
    _begun: Begin = field(init=False)
    _extras: Extras = field(default_factory=dict)
    _hold: Hold | None = None
    _stager: Stager | None = None
    _lent: Lent | None = None
    _staging: str = "overlap"
    _replicas: list[tuple[str, str, int]] = field(default_factory=list)
    _digests: tuple[bytes, ...] = ()
    _versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)

    def begin(self) -> Pending:
        """Plans this rank's files and announces its part. The Pending hears of the decision by itself."""
        desk, attempt, agreed = self.desk, self.attempt, self.agreed
        pending = self.pending = Pending(attempt.step, self.storage.url)
        with self.timeline.span("plan"):
            self.files, self._extras = planned_files(self.snapshot, agreed, desk.rank)
            run = attempt.root
            begin = self._begun = Begin(
                agreed.save_id,
                attempt.step,
                desk.rank,
                desk.world,
                pending.url,
                attempt.deadline_s,
                desk.join,
                "" if run is None else run.url,
            )
            decided = desk.background.begin(begin, run)
        seconds = self.timeline.seconds
        decided.add_done_callback(lambda done: _settle(pending, done.result(), agreed.save_id, seconds))
        return pending

    def stage(self, slot: ArenaSlot, budget_bytes: int, copier: Executor, pool: Executor | None) -> Future[None] | None:
        """Copies what cannot wait, on this thread, the training thread; leaves the rest to the copier and returns its end.

        With a pool everything is copied at once, on its threads. A part that cannot be staged is given up: every rank's
        Pending carries the reason.
        """
        try:
            _, size = bases_of([plan.data_bytes for plan in self.files])
            with self.timeline.span("wait"):
                self._lent, memory = slot.fit(self.desk.background, size, budget_bytes)
            self._at_boundary(memory, pool)
        except Exception as err:  # noqa: BLE001  the other ranks hear of it from the agent, this one from its Pending
            self._give_up(err)
            return None
        return copier.submit(self._finish)

    def _at_boundary(self, memory: HostMemory, pool: Executor | None) -> None:
        self._staging = "overlap" if pool is None else "block"
        if pool is None and torch.cuda.is_initialized():
            with torch.no_grad():
                copies, waiting = cloned_on_device(self.snapshot.locals, self.snapshot.late)
            self.snapshot = replace(self.snapshot, locals=copies, late=waiting)
        tensors = self.snapshot.locals
        late = frozenset[int]() if pool is not None else self.snapshot.late
        if late:
            self._hold = raise_hold()
            self._versions = {index: self._version(tensors[index][0]) for index in late}
        at = 0.0
        for name in ("wait", "capture", "plan"):
            # One after another, as they were; what lies between them is not worth a clock of its own.
            took = self.timeline.seconds.get(name, 0.0)
            self._spans.append(("training", name, at, at + took))
            at += took
        began = time.perf_counter()
        with self.timeline.span("copy"), torch.no_grad():
            stager = self._stager = Stager(self.files, tensors, self._extras, memory, compute_marks(tensors))
            if pool is not None:
                stager.copy_on(pool, COPY_THREADS)
            else:
                stager.copy(others_than=late)
            if self.desk.world > 1:
                early = False if late else None
                self._replicas = each_replica(self.snapshot, self.agreed.plan.stored, self.desk.rank, late=early)
            stager.finish()
        self._span("training", "copy", began)

    def _finish(self) -> None:
        """Copies the rest, opens the fence, and hands the part to the background. On a thread of its own; never raises."""
        try:
            if self._stager is not None and self._versions:
                self._copy_late(self._stager)
            staged_s = time.perf_counter() - self.began
            waited_s = self._let_go()
            self._submit(staged_s, waited_s)
        except Exception as err:  # noqa: BLE001  thread entry: every rank hears of it
            self._give_up(err)
        else:
            self.pending.copied()
        finally:
            self._let_go()
            # Nothing of the live state is kept until the next save.
            self._stager = None
            self.snapshot = None  # type: ignore[assignment]

    def _give_up(self, error: BaseException) -> None:
        """This rank cannot do its part: the others hear of it, and so does whoever waits for this save."""
        self._let_go()
        failure = failure_of(error)
        self.desk.background.abort(Abort(self.agreed.save_id, self.desk.rank, failure))
        if not self.desk.background.alive:
            self.pending.fail(failure.error())
            tell_instead(self._begun, failure)

    def _copy_late(self, stager: Stager) -> None:
        began = time.perf_counter()
        tensors, late = self.snapshot.locals, self.snapshot.late
        with torch.no_grad(), side_streams(stager.marks):
            self._digests = stager.copy_sealed(late)
            if self.desk.world > 1:
                stored = self.agreed.plan.stored
                self._replicas += each_replica(self.snapshot, stored, self.desk.rank, late=True)
            stager.finish()
            changed = [index for index in late if self._version(tensors[index][0]) != self._versions[index]]
        self._span("copy", "stage", began)
        if changed:
            step = self.attempt.step
            keys = [self.snapshot.structure.tensors[index].key for index in sorted(changed)]
            raise StagingError(
                f"step {step} was not saved: while it was being copied, something changed it in step {step + 1}:"
                + "".join(f"\n  - {key}" for key in keys[:20])
                + (f"\n  … and {len(keys) - 20} more" if len(keys) > 20 else "")
                + "\nOnly an optimizer's step may change these without a call of state.fence() before it. Committed steps"
                " are untouched"
            )

    def _version(self, local: torch.Tensor) -> tuple[int, int]:
        """What shows that a tensor was changed: the count of its in-place changes, and its digest where that is wanted."""
        try:
            version = int(local._version)
        except RuntimeError:
            # Made in inference mode: such tensors are not counted.
            version = 0
        return version, content(local) if self.desk.check_staging else 0

    def _let_go(self) -> float:
        """Opens the fence. Returns how long training has waited at it."""
        if self._hold is None:
            return 0.0
        waited = self._hold.waited_s
        self._hold.drop()
        return waited

    def _submit(self, staged_s: float, waited_s: float) -> None:
        reach("submit")
        desk, attempt, agreed = self.desk, self.attempt, self.agreed
        if self._lent is None:
            raise StagingError("no arena")
        order = order_of(self.snapshot, agreed, attempt, desk.world) if desk.rank == 0 else None
        heads = file_heads(self.files, Origin(agreed.save_id, agreed.step, desk.rank), order)
        self.pending.bytes_written = sum(len(head.header) + head.data_bytes for head in heads)
        seconds = {**self.timeline.seconds, "fence": waited_s, "stage": staged_s}
        if waited_s:
            self._spans.append(("training", "fence", staged_s - waited_s, staged_s))
        size = sum(plan.data_bytes for plan in self.files)
        boundary = time.monotonic() - (time.perf_counter() - self.began)
        times = RankTimes(seconds, self._spans, size, boundary=boundary)
        replicas: dict[str, dict[str, str]] = {}
        for key, group, value in self._replicas:
            replicas.setdefault(group, {})[key] = f"{value:016x}"
        if desk.world > EXPLAINED_RANKS:
            replicas = {group: {"": _sum_of(digests)} for group, digests in replicas.items()}
        root = attempt.root
        write = WriteOrder(
            heads,
            agreed.step,
            self._lent.number,
            self.storage.url if root is None else root.url,
            "" if root is None else step_name(attempt.step),
            self._digests,
        )
        submit = Submit(agreed.save_id, desk.rank, write, times, replicas, order, desk.background.kind, self._staging)
        desk.background.submit(submit, Place(self.storage, root), self._lent)

    def _span(self, who: str, what: str, since: float) -> None:
        self._spans.append((who, what, since - self.began, time.perf_counter() - self.began))


def _settle(pending: Pending, decided: Decided, save_id: str, seconds: dict[str, float]) -> None:
    """What was decided, as the end of the Pending. On whatever thread hears of it."""
    if decided.failure is not None:
        pending.fail(decided.failure.error())
    else:
        pending.succeed(
            Saved(pending.url, pending.step, save_id, decided.total_bytes, pending.bytes_written, dict(seconds))
        )


def _sum_of(digests: dict[str, str]) -> str:
    return f"{digest(msgspec.json.encode(sorted(digests.items()))):016x}"
