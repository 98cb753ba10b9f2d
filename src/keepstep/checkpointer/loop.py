"""The Checkpointer: a training loop's restore, step, save and close."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from types import TracebackType
from typing import Any, Unpack

from keepstep.check.trace import drill_orders
from keepstep.checkpointer.agree import Attempt, KnownPlan
from keepstep.checkpointer.background import Manner
from keepstep.checkpointer.boundary import Boundaries
from keepstep.checkpointer.course import Course, tidy_after_restore
from keepstep.checkpointer.every import Every
from keepstep.checkpointer.history import History
from keepstep.checkpointer.options import Cast, LoadReport, Options, Selected, selection_of
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.preemption import Preempt, StopWatch, watch_for
from keepstep.checkpointer.restoring import Wanted, restore_step
from keepstep.checkpointer.saving import save_step
from keepstep.checkpointer.starting import Wish, start_job
from keepstep.checkpointer.tracing import Tracing
from keepstep.commit.catalog import step_storage
from keepstep.commit.retention import Keep
from keepstep.errors import CheckpointError, ClosedError
from keepstep.move.arena import Arena
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.progress import Progress, metric
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Closing, Storage
from keepstep.storage.local import Place

__all__ = ["Checkpointer"]

_log = logging.getLogger("keepstep")


class Checkpointer(Closing):
    """Keeps the steps of one run below one root. A context manager; every method is collective, on the training thread.

    Saves go on in the background: training waits for a part of the copy at most, and one small process for each machine,
    the agent, does the rest, even if the trainer is killed meanwhile.

    Args:
        root: the run's folder, the same on every rank.
        state: the TrainState whose objects are saved and restored.
        every: when ``step`` saves by itself; None for only when ``save`` is called.
        keep: which steps stay after a save.
        overwrite: whether a run that did not restore may replace steps that are there already.
        deadline_s: how long a rank waits for the others, and how long a save may take, in seconds.
        staging: ``"overlap"`` copies weights and moments while training goes on, until the next optimizer step; ``"block"``
            copies everything before ``step`` returns.
        background: ``"agent"``, ``"thread"`` (in the trainer's process, with which it ends), ``"off"`` (a save is durable
            when ``step`` returns, and raises what goes wrong); None for an agent wherever one can run.
        arenas: how many saves may be in progress at once, 1 or 2; each needs memory as large as what a rank writes.
        when_busy: when a save is due and every arena is in use, ``"wait"`` for one, or ``"skip"`` this save.
        memory_budget_bytes: what the arenas of one machine may have together; None for most of what is free.
        tolerate_failures: how many saves in a row may fail before the next due one raises.
        check_staging: proves by digests that nothing changes a late tensor while it is copied, by reading all twice more.
        preempt: what to do when the job is asked to stop; None leaves signals alone.
        trace: whether every rank writes what it did, with digests of the state, to the folder ``trace``; or to which one.
        scrub: how often the agent reads old steps again while it has no save in hand, in seconds; None for never.
        local: a folder on a disk of this machine, where steps are committed first; they are copied to ``root`` after that,
            and ``uploads`` tells how far (None without). ``restore`` takes the nearest good copy of the newest step.
        keep_local: which steps stay in ``local``, besides those to be copied; None for the last two.

    Raises:
        UsageError: ``state`` is not a TrainState, the root is a file, or options that mean nothing.
        MismatchError: ranks were given different roots; or the two roots of one hold different runs.
        RunOwnedError: another job that is alive on this machine writes to this root.
        AgentError: ``background="agent"`` and none can be started.
    """

    def __init__(
        self,
        root: Place,
        state: TrainState,
        *,
        every: Every | None = None,
        keep: Keep | None = None,
        overwrite: bool = False,
        deadline_s: float = DEADLINE_S,
        staging: str = "overlap",
        background: str | None = None,
        arenas: int = 1,
        when_busy: str = "wait",
        memory_budget_bytes: int | None = None,
        tolerate_failures: int = 3,
        check_staging: bool = False,
        preempt: Preempt | None = None,
        trace: bool | Place = False,
        scrub: Every | None = None,
        local: Place | None = None,
        keep_local: Keep | None = None,
    ) -> None:
        self._ranks = Ranks.current()
        self._drill = drill_orders()
        self._report: LoadReport | None = None
        self._deadline_s = deadline_s
        self._every = every
        self._state = state
        self._closed, self._passed = False, 0
        self._history = History()
        self._known: KnownPlan | None = None
        self._metrics: dict[str, Any] = {}
        self._tolerated = tolerate_failures
        manner = Manner(
            staging, background, arenas, when_busy, memory_budget_bytes, tolerate_failures, check_staging, scrub
        )
        with contextlib.ExitStack() as held:
            wish = Wish(root, state, manner, trace, self._drill, deadline_s, keep or Keep(), local, keep_local)
            started = start_job(self._ranks, wish, held)
            self._root, self._saves, self._arena = started.root, started.saves, started.arena
            self._levels, self._keep, self._upload = started.levels, started.keep, started.upload
            self.uploads = started.uploads
            self._course = Course(started.lineage, overwrite=overwrite)
            self._boundaries = held.enter_context(Boundaries(state))
            self._tracing = held.enter_context(Tracing(started.trace, self._ranks, state, started.lineage.incarnation))
            self._watch = watch_for(self._ranks, preempt, started.lineage, deadline_s)
            if self._watch is not None:
                held.enter_context(self._watch)
            self._held = held.pop_all()
        self._due_s = time.monotonic()
        if self._saves is not None and every is not None:
            self._saves.warm_up(state)

    @property
    def progress(self) -> Progress:
        """How far the run is: step, samples, tokens, epoch."""
        return self._state.progress

    @property
    def micro(self) -> int:
        """How many microbatches of the next update are done; see ``micro_step``."""
        return self._state.accumulation.micro

    @property
    def report(self) -> LoadReport | None:
        """What the last ``restore`` did."""
        return self._report

    def restore(
        self,
        *,
        step: int | None = None,
        on_damage: str = "fall_back",
        allow_fresh: bool = False,
        strict: bool = True,
        cast: Cast = False,
        share_reads: bool | None = None,
        **selected: Unpack[Selected],
    ) -> LoadReport:
        """Brings the newest good step back into the state's objects; on a truly fresh root does nothing.

        What was restored is printed on rank 0, to standard error, and returned.

        Args:
            step: this step and no other; None for the newest good one.
            on_damage: ``"fall_back"`` skips damaged steps with a warning, all ranks together; ``"raise"`` stops.
            allow_fresh: whether to start from zero although unfinished or damaged steps are there.
            strict, cast, share_reads, only, rename, allow_missing and others: see ``keepstep.load``.

        Raises:
            StepNotFoundError: that step is not there; or steps are there and none is good, which is never a fresh start.
            MismatchError: the step does not fit the state; lists everything; nothing was changed.
            CorruptError: the step is damaged, with ``on_damage="raise"``.
        """
        self._check_open()
        wanted = Wanted(step, on_damage, allow_fresh, self._course.lineage.incarnation)
        self._settle()
        unused, options = self._course.unused, Options(strict, cast, share_reads, selection=selection_of(selected))
        report, manifest = restore_step(
            self._ranks, self._levels, self._state, wanted, options=options, deadline_s=self._deadline_s
        )
        self._report, self._due_s = report, time.monotonic()
        if manifest is not None:
            self._course.adopt(manifest, report.incarnation)
            if manifest.world_size == self._ranks.world:
                self._known = KnownPlan(manifest.fingerprint, manifest.structure)
        if self._ranks.leads and unused:
            tidy_after_restore(self._root, self._course.lineage.incarnation)
        self._boundaries.restart()
        if self._ranks.leads and not report.fresh:
            sys.stderr.write(f"{report}\n")
        self._tracing.began(report.step, restored=not report.fresh, skipped=report.skipped)
        return report

    def step(
        self, *, samples: int = 0, tokens: int = 0, epoch: int | None = None, batch: Any = None, **metrics: Any
    ) -> Pending | None:
        """Marks a step boundary: everything now stands at one step. Begins a save when one is due, and returns it.

        Call it once after every optimizer step (and scheduler step), on every rank. A save that failed since the last call
        is logged here; training goes on, and the next due save tries again.

        Args:
            samples, tokens: what this step consumed, over all ranks, as far as ``micro_step`` has not counted it.
            epoch: the epoch the next step belongs to, when it changed.
            batch: what this rank was given, or the ids of its samples, for a trace; nobody else looks at it.
            metrics: numbers to store with the step, such as ``loss=loss``; ``Keep(best=...)`` looks at them.

        Raises:
            UsageError: a metric is not a number, or the parts of the state do not stand at one step.
            Preempted: the job was asked to stop, and all ranks stand at this step; see ``Preempt``.
            See ``save`` for the rest.
        """
        self._check_open()
        numbers = {name: metric(name, value) for name, value in metrics.items()}
        progress = self._consumed(samples, tokens)
        progress.step += 1
        if epoch is not None:
            progress.epoch = epoch
        self._state.accumulation.micro = 0
        self._boundaries.passed(progress.step)
        self._metrics = numbers
        if self._saves is not None:
            self._known = self._saves.keep_ready(self._state, self._known)
        return self._go_on(batch)

    def micro_step(self, *, samples: int = 0, tokens: int = 0, batch: Any = None) -> Pending | None:
        """Marks the end of a microbatch whose gradients are accumulated, and not applied yet.

        Not after the last one of an update: there ``step`` follows the optimizer's. From here on a save has a place inside
        the update: the accumulated gradients belong to it, and it takes the place of one of the same step that is there
        already. A resumed loop finds in ``micro`` how many microbatches are done. Begins a save when time says so.

        Args:
            samples, tokens, batch: of this microbatch alone, as for ``step``.

        Raises:
            Preempted: the job was asked to stop, and all ranks stand here.
            See ``save`` for the rest.
        """
        self._check_open()
        self._consumed(samples, tokens)
        self._state.accumulation.micro += 1
        self._boundaries.passed_micro()
        return self._go_on(batch)

    def save(self) -> Pending | None:
        """Begins a save now; old steps go by ``keep`` once it is committed. None when it was skipped as busy.

        With ``background="off"`` the step is durable and committed on return.

        Raises:
            StepExistsError: the step is there and this run did not restore (see ``overwrite``).
            UsageError: gradients of the next update were accumulated, and ``micro_step`` was not called.
            RankFailedError: more than ``tolerate_failures`` saves in a row have failed; the message has the last reason.
            See ``keepstep.save`` for the rest. Committed steps are untouched by a save that fails.
        """
        self._check_open()
        self._notice()
        step = self._state.progress.step
        place = step_storage(self._root, step)
        if self._course.saved == step:
            # Two saves of one step go into one folder: one after the other.
            self._settle()
        attempt = Attempt(
            step,
            self._course.lineage,
            {name: float(value) for name, value in self._metrics.items()},
            self._course.may_replace(step, inside=self.micro > 0),
            self._root,
            known=self._known,
            deadline_s=self._deadline_s,
            failed_step=self._course.failed,
            keep=self._keep,
            protect=self._course.protected,
            upload=self._upload,
            ready=self._history.ready(self._tolerated),
            refused=self._boundaries.unfinished(step) or self._course.behind(step),
        )
        self._due_s = time.monotonic()
        if self._arena is not None:
            return self._save_now(place, attempt, self._arena)
        pending, known = self._saves.save(place, self._state, attempt) if self._saves else (None, None)
        if pending is None:
            return None
        self._course.failed, self._course.saved = -1, step
        self._known = known
        self._history.add(pending)
        self._tracing.saving(pending)
        return pending

    def close(self) -> None:
        """Waits for the save in progress, and frees what the Checkpointer holds. Idempotent; saves nothing.

        Raises:
            CheckpointError: the last save has failed and nobody was told by an exception yet.
        """
        if not self._closed:
            self._closed = True
            try:
                self._settle()
                self._tracing.ended(self._state.progress.step, "closed")
            finally:
                self._held.close()
            self._history.raise_last()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it. While another exception is on its way, a failed save is only logged."""
        if error is not None:
            self._tracing.give_up()
        try:
            self.close()
        except CheckpointError as err:
            if error is None:
                raise
            _log.error("%s", err)

    def _save_now(self, place: Storage, attempt: Attempt, arena: Arena) -> Pending:
        """A save on the training thread."""
        self._course.failed = attempt.step
        saved, self._known = save_step(self._ranks, place, self._state, attempt, arena)
        self._course.failed, self._course.saved = -1, attempt.step
        pending = Pending(attempt.step, place.url)
        pending.succeed(saved)
        self._tracing.saving(pending)
        return pending

    def _consumed(self, samples: int, tokens: int) -> Progress:
        """Counts what was consumed since the boundary before this one."""
        self._state.consumed(samples)
        progress = self._state.progress
        progress.samples += samples
        progress.tokens += tokens
        return progress

    def _go_on(self, batch: Any) -> Pending | None:
        """What every boundary has in common, those inside an update too: to notice, to trace, to stop, to save when due."""
        step, micro = self._state.progress.step, self._state.accumulation.micro
        self._passed += 1
        self._notice()
        self._tracing.stepped(step, {} if micro else self._metrics, micro=micro, batch=batch)
        if self._watch is not None and self._watch.is_over(self._passed):
            self._stop(self._watch)
        if self._drill is not None and (step, micro) == (self._drill.stop_at, 0):
            self._stop_for_drill(step)
        if self._every and self._every.is_due(self._ranks, step, self._due_s, self._deadline_s, micro=bool(micro)):
            return self.save()
        return None

    def _stop_for_drill(self, step: int) -> None:
        """A drill wants to see this run resumed from here."""
        while self.save() is None:
            self._settle()
        self._settle()
        self._history.raise_last()
        self._tracing.ended(step, "stopped")
        raise SystemExit(0)

    def _settle(self) -> None:
        if self._saves is not None:
            self._saves.wait()
            self._notice()

    def _notice(self) -> None:
        """Looks at what has ended since the last boundary."""
        for pending, error in self._history.ended():
            if error is not None:
                self._course.failed, pending.logged = -1 if pending.may_appear else pending.step, True
                if self._ranks.leads:
                    _log.warning("the save of step %d failed, training goes on: %s", pending.step, error)

    def _stop(self, watch: StopWatch) -> None:
        """The job was asked to stop and all ranks are here: saves what fits into the time that is left, and leaves."""
        step = self._state.progress.step
        outlives = self._saves is not None and self._saves.kind == "agent"
        plan, left_s = watch.plan(step, self._history.usual_s(), outlives=outlives)
        reason = f"asked to stop at step {step}"
        pending = saved = None
        try:
            if plan == "leave":
                reason += f"; {left_s:.1f} s were too few for a save"
                self._settle()
            elif (pending := self.save()) is None:
                # The last save of a job is not skipped: it waits for those in progress.
                self._settle()
                pending = self.save()
            if pending is not None and plan == "stage":
                pending.wait_staged(left_s)
                reason += "; it is copied, and the agent commits it"
            elif pending is not None:
                saved = pending.wait_committed(left_s).step
                reason += "; it is committed"
        except CheckpointError as err:
            reason += f"; the save of it failed: {err}"
            self._history.forgive()
        if saved is None:
            saved = self._history.newest
        watch.leave(step, saved, reason)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._root.url} was closed")
