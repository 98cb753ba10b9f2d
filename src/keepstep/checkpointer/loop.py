"""The Checkpointer: a training loop's restore, step, save and close."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec

from keepstep.checkpointer.agree import Attempt, KnownPlan
from keepstep.checkpointer.background import BackgroundSaves, Manner
from keepstep.checkpointer.decisions import Choice, Start, begin_run, choose_step, own_root, warn_damaged
from keepstep.checkpointer.every import Every
from keepstep.checkpointer.history import History
from keepstep.checkpointer.loading import LoadReport, Options, load_step
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.preemption import Preempt, StopWatch
from keepstep.checkpointer.saving import save_step
from keepstep.commit.catalog import Found, read_catalog, step_storage
from keepstep.commit.retention import Keep, sweep_leftovers, warn_untidy
from keepstep.errors import (
    CheckpointError,
    ClosedError,
    MismatchError,
    Preempted,
    RankFailedError,
    StorageError,
    UsageError,
)
from keepstep.format.manifest import (
    MANIFEST_NAME,
    Lineage,
    Manifest,
    Parent,
    parse_manifest,
    step_name,
)
from keepstep.move.arena import Arena
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.progress import Progress, metric
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Closing, Storage
from keepstep.storage.local import Place, storage_of

__all__ = ["Checkpointer"]

_log = logging.getLogger("keepstep")
_DAMAGE = frozenset({"corrupt", "format", "storage"})


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
        check_staging: proves for each late tensor that nothing changed it while it was copied, by digests before and after.
            For finding faults: it reads everything twice on the training thread.
        preempt: what to do when the job is asked to stop; None leaves signals alone.

    Raises:
        UsageError: ``state`` is not a TrainState, the root is a file, or options that mean nothing.
        MismatchError: ranks were given different roots.
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
    ) -> None:
        self._ranks = Ranks.current()
        self._deadline_s = deadline_s
        self._every = every
        self._keep = keep or Keep()
        self._overwrite = overwrite
        self._state = state
        self._closed = False
        self._history = History()
        self._known: KnownPlan | None = None
        self._restored_from: Found | None = None
        self._saved_step = self._failed_step = -1
        self._metrics: dict[str, Any] = {}
        self._tolerated = tolerate_failures
        with contextlib.ExitStack() as held:
            with self._ranks.phase("start", deadline_s) as phase:
                manner = Manner(
                    staging, background, arenas, when_busy, memory_budget_bytes, tolerate_failures, check_staging
                )
                if not isinstance(state, TrainState):
                    raise UsageError(
                        f"a Checkpointer keeps a TrainState, not a {type(state).__name__}: TrainState(**state)"
                    )
                self._root = storage_of(root)
                posted = phase.gather(self._root.url.encode())
                if posted is not None:
                    own_root(self._root, posted, held)
                phase.broadcast(b"" if posted is not None else None)
            self._arena: Arena | None = None
            self._saves: BackgroundSaves | None = None
            if background == "off":
                self._arena = held.enter_context(contextlib.closing(Arena()))
            else:
                self._saves = held.enter_context(BackgroundSaves(self._ranks, self._root, manner, deadline_s))
                self._saves.connect()
            with self._ranks.phase("begin", deadline_s) as phase:
                if self._saves is not None:
                    # What an earlier start of this job has left to the agent is committed before this one begins.
                    self._saves.settle(deadline_s)
                posted = phase.gather(b"")
                answer = b"" if posted is None else msgspec.json.encode(begin_run(self._root, self._ranks.world))
                start = msgspec.json.decode(phase.broadcast(answer), type=Start)
            self._lineage = Lineage(start.run, start.incarnation)
            self._watch: StopWatch | None = None
            if preempt is not None:
                watch = StopWatch(self._ranks, preempt, f"{start.run}/{start.incarnation}", deadline_s)
                self._watch = held.enter_context(watch)
            self._held = held.pop_all()
        self._due_s = time.monotonic()
        if self._saves is not None and every is not None:
            self._saves.warm_up(state)

    @property
    def progress(self) -> Progress:
        """How far the run is: step, samples, tokens, epoch."""
        return self._state.progress

    def restore(
        self,
        *,
        step: int | None = None,
        on_damage: str = "fall_back",
        allow_fresh: bool = False,
        strict: bool = True,
        cast: bool = False,
    ) -> LoadReport:
        """Brings the newest good step back into the state's objects; on a truly fresh root does nothing.

        Args:
            step: this step and no other; None for the newest good one.
            on_damage: ``"fall_back"`` skips damaged steps with a warning, all ranks together; ``"raise"`` stops.
            allow_fresh: whether to start from zero although unfinished or damaged steps are there.
            strict: whether keys that one side lacks are an error.
            cast: whether tensors may be converted to the target's dtype.

        Raises:
            StepNotFoundError: that step is not there; or steps are there and none is good ("nothing usable" is never
                "fresh start").
            MismatchError: the step does not fit the state; lists everything; nothing was changed.
            CorruptError: the step is damaged, with ``on_damage="raise"``.
        """
        self._check_open()
        self._settle()
        if on_damage not in ("fall_back", "raise"):
            raise UsageError(f"on_damage={on_damage!r}; it is 'fall_back' or 'raise'")
        options = Options(None, strict, cast, None)
        skipped: tuple[str, ...] = ()
        while True:
            with self._ranks.phase("restore", self._deadline_s) as phase:
                posted = phase.gather(msgspec.json.encode((step, on_damage, allow_fresh)))
                answer = b""
                if posted is not None:
                    if len(set(posted)) > 1:
                        raise MismatchError("ranks call restore with different arguments:", map(bytes.decode, posted))
                    answer = msgspec.msgpack.encode(choose_step(self._root, step, on_damage, allow_fresh, skipped))
                choice = msgspec.msgpack.decode(phase.broadcast(answer), type=Choice)
            skipped = choice.skipped
            if not choice.manifest:
                self._due_s = time.monotonic()
                return LoadReport(0, self._root.url, True, world=self._ranks.world, skipped=skipped)
            manifest = parse_manifest(choice.manifest, f"{step_name(choice.step)}/{MANIFEST_NAME}")
            try:
                storage = step_storage(self._root, manifest.step)
                report = load_step(
                    self._ranks, storage, manifest, self._state, options=options, deadline_s=self._deadline_s
                )
            except CheckpointError as err:
                # What made one rank fail was told to the others, so all of them decide alike.
                codes = err.codes.values() if isinstance(err, RankFailedError) else (err.code,)
                if on_damage == "raise" or step is not None or not _DAMAGE.issuperset(codes):
                    raise
                skipped = (*skipped, f"{step_name(manifest.step)}: {err}")
                if self._ranks.leads:
                    warn_damaged(skipped[-1])
                continue
            self._adopt(manifest)
            return replace(report, skipped=skipped)

    def step(self, *, samples: int = 0, tokens: int = 0, epoch: int | None = None, **metrics: Any) -> Pending | None:
        """Marks a step boundary: everything now stands at one step. Begins a save when one is due, and returns it.

        Call it once after every optimizer step, on every rank. A save that failed since the last call is logged here;
        training goes on, and the next due save tries again.

        Args:
            samples: samples consumed by this step, over all ranks.
            tokens: tokens consumed by this step, over all ranks.
            epoch: the epoch the next step belongs to, when it changed.
            metrics: numbers to store with the step, such as ``loss=loss``; ``Keep(best=...)`` looks at them.

        Raises:
            UsageError: a metric is not a number; nothing has changed.
            Preempted: the job was asked to stop, and all ranks stand at this step; see ``Preempt``.
            See ``save`` for the rest.
        """
        self._check_open()
        numbers = {name: metric(name, value) for name, value in metrics.items()}
        progress = self._state.progress
        progress.step += 1
        progress.samples += samples
        progress.tokens += tokens
        if epoch is not None:
            progress.epoch = epoch
        self._metrics = numbers
        self._notice()
        if self._saves is not None:
            self._known = self._saves.keep_ready(self._state, self._known)
        if self._watch is not None and self._watch.is_over(progress.step):
            self._stop(self._watch)
        if self._every and self._every.is_due(self._ranks, progress.step, self._due_s, self._deadline_s):
            return self.save()
        return None

    def save(self) -> Pending | None:
        """Begins a save now; old steps go by ``keep`` once it is committed. None when it was skipped as busy.

        With ``background="off"`` the step is durable and committed on return.

        Raises:
            StepExistsError: the step is there and this run did not restore (see ``overwrite``).
            RankFailedError: more than ``tolerate_failures`` saves in a row have failed; the message has the last reason.
            See ``keepstep.save`` for the rest. Committed steps are untouched by a save that fails.
        """
        self._check_open()
        self._notice()
        step = self._state.progress.step
        place = step_storage(self._root, step)
        attempt = Attempt(
            step,
            self._lineage,
            {name: float(value) for name, value in self._metrics.items()},
            self._may_replace(step),
            self._root,
            known=self._known,
            deadline_s=self._deadline_s,
            failed_step=self._failed_step,
            keep=self._keep,
            protect=() if self._restored_from is None else (self._restored_from.step,),
            ready=self._history.ready(self._tolerated),
        )
        self._due_s = time.monotonic()
        if self._arena is not None:
            return self._save_now(place, attempt, self._arena)
        pending, known = self._saves.save(place, self._state, attempt) if self._saves else (None, None)
        if pending is None:
            return None
        self._failed_step = -1
        self._known, self._saved_step = known, step
        self._history.add(pending)
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
            finally:
                self._held.close()
            self._history.raise_last()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it. While another exception is on its way, a failed save is only logged."""
        try:
            self.close()
        except CheckpointError as err:
            if error is None:
                raise
            _log.error("%s", err)

    def _save_now(self, place: Storage, attempt: Attempt, arena: Arena) -> Pending:
        """A save on the training thread."""
        self._failed_step = attempt.step
        saved, self._known = save_step(self._ranks, place, self._state, attempt, arena)
        self._failed_step = -1
        self._saved_step = attempt.step
        pending = Pending(attempt.step, place.url)
        pending.succeed(saved)
        return pending

    def _settle(self) -> None:
        if self._saves is not None:
            self._saves.wait()
            self._notice()

    def _notice(self) -> None:
        """Looks at what has ended since the last boundary."""
        for pending, error in self._history.ended():
            if error is not None:
                self._failed_step, pending.logged = -1 if pending.may_appear else pending.step, True
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
        if watch.preempt.exit_status is not None:
            _log.warning("%s", reason)
            raise SystemExit(watch.preempt.exit_status)
        raise Preempted(step, saved, reason)

    def _adopt(self, manifest: Manifest) -> None:
        """Goes on with the run of the restored step: its lineage, its plan, its place in the order."""
        lineage = manifest.lineage
        self._restored_from = Found(manifest.step, lineage.run, lineage.incarnation)
        parent = Parent(lineage.run, lineage.incarnation, manifest.step)
        self._lineage = Lineage(lineage.run, self._lineage.incarnation, parent)
        if manifest.world_size == self._ranks.world:
            self._known = KnownPlan(manifest.fingerprint, manifest.structure)
        self._saved_step = manifest.step
        self._due_s = time.monotonic()
        if self._ranks.leads:
            # The new incarnation fences older ones, so what they left unfinished can go.
            try:
                sweep_leftovers(self._root, read_catalog(self._root))
            except StorageError as err:
                warn_untidy(err)

    def _may_replace(self, step: int) -> bool:
        """Whether a committed step of this number may be replaced: one that this run has left behind by a rollback."""
        if self._overwrite or self._saved_step == step:
            return self._overwrite or self._restored_from is None or self._restored_from.step != step
        restored = self._restored_from
        return restored is not None and step > restored.step

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._root.url} was closed")
