"""The Checkpointer: a training loop's restore, step, save and close."""

from __future__ import annotations

import platform
import secrets
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from keepstep.checkpointer.agree import Attempt, KnownPlan
from keepstep.checkpointer.loading import LoadReport, Options, found_manifest, load_step
from keepstep.checkpointer.saving import Saved, save_step
from keepstep.commit.catalog import Found, read_catalog, step_storage
from keepstep.commit.publish import RUN_NAME, new_incarnation, run_of
from keepstep.commit.retention import Keep, sweep_leftovers, warn_untidy
from keepstep.errors import (
    CheckpointError,
    ClosedError,
    CorruptError,
    DamageWarning,
    FormatError,
    MismatchError,
    RankFailedError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.format.manifest import (
    FORMAT_MAJOR,
    MANIFEST_NAME,
    Lineage,
    Manifest,
    Parent,
    parse_manifest,
    step_name,
)
from keepstep.move.arena import Arena
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.progress import Progress
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Closing
from keepstep.storage.local import Place, storage_of

__all__ = ["Checkpointer", "Every"]

_DAMAGE = frozenset({"corrupt", "format", "storage"})


@dataclass(frozen=True, slots=True)
class Every:
    """When a save is due: after this many steps, or this many seconds, whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuses intervals that mean nothing.

        Raises:
            UsageError: an interval that is not positive, or none at all.
        """
        given = [value for value in (self.steps, self.seconds) if value is not None]
        if not given or any(value <= 0 for value in given):
            raise UsageError(f"{self}: give steps, seconds or both, each above zero")


class _Start(msgspec.Struct):
    """What the coordinator tells all ranks about this start of the job."""

    run: str
    incarnation: int


class _Choice(msgspec.Struct):
    """The step to restore: its manifest, or nothing on a fresh run. ``skipped`` says what was wrong with newer ones."""

    manifest: bytes = b""
    skipped: tuple[str, ...] = ()


class Checkpointer(Closing):
    """Keeps the steps of one run below one root. A context manager; every method is collective, on the training thread.

    Args:
        root: the run's folder, the same on every rank.
        state: the TrainState whose objects are saved and restored.
        every: when ``step`` saves by itself; None for only when ``save`` is called.
        keep: which steps stay after a save.
        overwrite: whether a run that did not restore may replace steps that are there already.
        deadline_s: how long a rank waits for the others, in seconds.

    Raises:
        UsageError: ``state`` is not a TrainState, or the root is a file.
        MismatchError: ranks were given different roots.
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
    ) -> None:
        self._ranks = Ranks.current()
        self._deadline_s = deadline_s
        self._every = every
        self._keep = keep or Keep()
        self._overwrite = overwrite
        self._state = state
        self._closed = False
        with self._ranks.phase("start", deadline_s) as phase:
            if not isinstance(state, TrainState):
                raise UsageError(
                    f"a Checkpointer keeps a TrainState, not a {type(state).__name__}: TrainState(**state)"
                )
            self._root = storage_of(root)
            posted = phase.gather(self._root.url.encode())
            answer = b"" if posted is None else msgspec.json.encode(self._begin(posted))
            start = msgspec.json.decode(phase.broadcast(answer), type=_Start)
        self._lineage = Lineage(start.run, start.incarnation)
        self._arena = Arena()
        self._known: KnownPlan | None = None
        self._restored_from: Found | None = None
        self._saved_step = -1
        self._failed_step = -1
        self._metrics: dict[str, Any] = {}
        self._due_s = time.monotonic()

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
                    answer = msgspec.msgpack.encode(self._choose(step, on_damage, allow_fresh, skipped))
                choice = msgspec.msgpack.decode(phase.broadcast(answer), type=_Choice)
            skipped = choice.skipped
            if not choice.manifest:
                self._due_s = time.monotonic()
                return LoadReport(0, self._root.url, True, world=self._ranks.world, skipped=skipped)
            manifest = parse_manifest(choice.manifest, f"{step_name(_step_of(choice.manifest))}/{MANIFEST_NAME}")
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
                self._warn(skipped[-1])
                continue
            self._adopt(manifest)
            return replace(report, skipped=skipped)

    def step(self, *, samples: int = 0, tokens: int = 0, epoch: int | None = None, **metrics: Any) -> Saved | None:
        """Marks a step boundary: everything now stands at one step. Saves when due, and returns what was saved.

        Call it once after every optimizer step, on every rank.

        Args:
            samples: samples consumed by this step, over all ranks.
            tokens: tokens consumed by this step, over all ranks.
            epoch: the epoch the next step belongs to, when it changed.
            metrics: numbers to store with the step, such as ``loss=loss``; ``Keep(best=...)`` looks at them.

        Raises:
            UsageError: a metric is not a number; nothing has changed.
            See ``save`` for the rest.
        """
        self._check_open()
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        progress = self._state.progress
        progress.step += 1
        progress.samples += samples
        progress.tokens += tokens
        if epoch is not None:
            progress.epoch = epoch
        self._metrics = numbers
        return self.save() if self._is_due() else None

    def save(self) -> Saved:
        """Saves now; the step is durable and committed on return, and old steps have gone by ``keep``.

        Raises:
            StepExistsError: the step is there and this run did not restore (see ``overwrite``).
            See ``keepstep.save`` for the rest. Committed steps are untouched by a save that fails.
        """
        self._check_open()
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
        )
        self._failed_step = step
        saved, self._known = save_step(self._ranks, place, self._state, attempt, self._arena)
        self._failed_step = -1
        self._saved_step = step
        self._due_s = time.monotonic()
        return saved

    def close(self) -> None:
        """Frees what the Checkpointer holds. Idempotent; saves nothing."""
        if not self._closed:
            self._closed = True
            self._arena.close()

    def _begin(self, posted: list[bytes]) -> _Start:
        """The coordinator's part of a start: one root, one run, one incarnation."""
        if len(set(posted)) > 1:
            lines = [f"rank {rank}: {url.decode()}" for rank, url in enumerate(posted)]
            raise MismatchError("ranks were given different roots; nothing was written:", lines)
        fresh = secrets.token_hex(8)
        if run_of(self._root) is None:
            about = {"run": fresh, "created": time.time(), "format": FORMAT_MAJOR}
            self._root.put_new(RUN_NAME, msgspec.json.encode(about) + b"\n")
        # A start that does not restore what is there is another run: it neither replaces nor removes those steps.
        run = fresh if read_catalog(self._root).steps else run_of(self._root) or fresh
        note = {"host": platform.node(), "world_size": self._ranks.world, "started": time.time()}
        return _Start(run, new_incarnation(self._root, msgspec.json.encode(note) + b"\n"))

    def _choose(self, step: int | None, on_damage: str, allow_fresh: bool, skipped: tuple[str, ...]) -> _Choice:
        """The coordinator's decision, told to all: the newest step that is not known to be damaged."""
        catalog = read_catalog(self._root)
        if step is not None and step not in {found.step for found in catalog.steps}:
            raise StepNotFoundError(f"{self._root.url} has no committed step {step}; {catalog.inventory()}")
        bad = {text.partition(":")[0] for text in skipped}
        for found in catalog.steps:
            name = step_name(found.step)
            if name in bad or (step is not None and found.step != step):
                continue
            try:
                if found.damage:
                    raise CorruptError(found.damage)
                return _Choice(found_manifest(step_storage(self._root, found.step)), skipped)
            except (CorruptError, FormatError, StorageError, StepNotFoundError) as err:
                if on_damage == "raise" or step is not None:
                    raise
                skipped = (*skipped, f"{name}: {err}")
                self._warn(skipped[-1])
        if (catalog.steps or catalog.unfinished) and not allow_fresh:
            raise StepNotFoundError(
                f"{self._root.url} holds no step that can be restored: {catalog.inventory()}"
                + "".join(f"\n  - {text}" for text in skipped)
                + "\nNothing was changed. restore(allow_fresh=True) starts from zero beside what is there"
            )
        try:
            sweep_leftovers(self._root, catalog)
        except StorageError as err:
            warn_untidy(err)
        return _Choice(skipped=skipped)

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

    def _is_due(self) -> bool:
        if self._every is None:
            return False
        if self._every.steps is not None and self._state.progress.step % self._every.steps == 0:
            return True
        if self._every.seconds is None:
            return False
        with self._ranks.phase("due", self._deadline_s) as phase:
            # Clocks differ between ranks: one of them decides.
            posted = phase.gather(b"")
            mine = b"1" if time.monotonic() - self._due_s >= self._every.seconds else b"0"
            return phase.broadcast(mine if posted is not None else None) == b"1"

    def _warn(self, text: str) -> None:
        if self._ranks.leads:
            warnings.warn(f"a damaged step was skipped: {text}", DamageWarning, stacklevel=3)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self._root.url} was closed")


def _number(name: str, value: Any) -> Any:
    """A metric as a float. A tensor on a device stays one until a save is due: reading it would wait for the device."""
    value = value.detach() if hasattr(value, "detach") else value
    if getattr(value, "is_cuda", False) and value.numel() == 1:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise UsageError(f"metrics are numbers, one each; {name} is a {type(value).__name__}: {err}") from err


def _step_of(raw: bytes) -> int:
    return int(msgspec.json.decode(raw, type=dict[str, Any]).get("step", 0))
