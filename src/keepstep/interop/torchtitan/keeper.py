"""The Checkpointer as what torchtitan calls a checkpoint manager: named by the configuration, built by the Trainer.

torchtitan calls it at the end of every step, and validates behind that. A step is really over when the next batch is asked
for, so that is where it is saved. Checkpoints that torchtitan has written itself are read by torchtitan.
"""

from __future__ import annotations

import contextlib
import re
import sys
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec
import torch
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from keepstep.checkpointer import Checkpointer as StepKeeper
from keepstep.checkpointer import Every, Pending, Preempt, Saved
from keepstep.checkpointer import load as load_step
from keepstep.checkpointer import save as save_step
from keepstep.commit.catalog import MAX_MANIFEST_BYTES, read_catalog, step_storage
from keepstep.commit.retention import Keep
from keepstep.errors import StorageError, UsageError
from keepstep.foreign.kinds import FOREIGN
from keepstep.format.manifest import MANIFEST_NAME, step_name
from keepstep.interop.positions import own_or_first
from keepstep.interop.torchtitan.parts import Feed, ModelParts, Progress, place_of
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state import TrainState, per_rank
from keepstep.state.fence import fence
from keepstep.state.rng import RngStreams
from keepstep.storage.base import read_blob
from keepstep.storage.local import storage_of

__all__ = ["Checkpointer"]


class Checkpointer(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is not there where types are checked
    """Keeps the steps of a torchtitan Trainer: ``Trainer.Config(checkpoint=Checkpointer.Config(enable=True))``.

    The state is whole: model parts, optimizers, schedulers, the Trainer's counts, the place in the data and the random
    numbers of every rank. Every method is collective, on the training thread.

    Args:
        config: see ``Config``.
        given: what the Trainer gives to every checkpoint manager, by name.

    Raises:
        UsageError: names in ``exclude_from_loading`` that no component has.
        See ``keepstep.Checkpointer`` for the rest.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """What every checkpoint manager of torchtitan can be told, and what a ``keepstep.Checkpointer`` can."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """"disabled": a step is durable when it is over. The two others are one: training waits for the copy at most."""

        tolerate_failures: int = 3
        """How many saves in a row may fail before the next one ends training."""

        local: str | None = None
        """A folder on a disk of each machine, where steps are committed first."""

        preempt_grace_s: float | None = None
        """Seconds that are left after SIGTERM: the step at hand is saved, and training ends. None leaves signals alone."""

        deadline_s: float = DEADLINE_S
        """How long a rank waits for the others, and how long a save may take, in seconds."""

        trace: bool = False
        """Whether every rank writes what it did, with digests of the state, to the folder ``trace``."""

        def __post_init__(self) -> None:
            """Refuses what torchtitan refuses."""
            # (super() is another class here: slots make a new one.)
            BaseCheckpointManager.Config.__post_init__(self)

    def __init__(self, config: Config, **given: Any) -> None:
        self.enable = config.enable
        self.save_future: Future[Saved] | None = None
        if not self.enable:
            return
        self._config = config
        self._given = given
        self._folder: str = filesystem.join(given.get("base_folder", ""), config.folder)
        place = place_of(given["dataloader"])
        states: dict[str, Any] = given["states"]
        trainer: Any = states.get("train_state")
        self._progress = None if trainer is None else Progress(trainer)
        self._state = TrainState(
            model=given["model_parts"][0] if len(given["model_parts"]) == 1 else ModelParts(given["model_parts"]),
            **_numbered("optimizer", list(given["optimizers"])),
            lr_scheduler=given["lr_schedulers"],
            dataloader=place.component,
            train_state=None if self._progress is None else per_rank(self._progress, own_or_first),
            **{name: value for name, value in states.items() if name not in _OWN},
        )
        unknown = sorted(set(config.exclude_from_loading) - {_torchtitans(name) for name in self._state})
        if unknown:
            raise UsageError(f"checkpoint.exclude_from_loading: no {', '.join(unknown)} in {self._state!r}")
        self._numbers: dict[str, Any] = {}
        self._over: int | None = None
        self._pending: Pending | None = None
        self._random: dict[str, Any] | None = None
        self._feed: Feed | None = None
        if given["dataloader"] is not None and getattr(trainer, "dataloader", None) is given["dataloader"]:
            self._feed = trainer.dataloader = Feed(given["dataloader"], place, self)
        # Of the stages of a pipeline, the last one knows the loss.
        if hasattr(trainer, "metrics_processor") and getattr(trainer, "pp_has_last_stage", True):
            self._watch_losses(trainer.metrics_processor)
        self._keeper = None if config.load_only else self._open()
        logger.info(f"Checkpointing with keepstep in {self._folder}")

    # --- what torchtitan calls ---

    def _load(self, step: int = -1) -> bool:
        """Goes on from that step of the folder, or from its newest good one; else begins from ``initial_load_path``.

        Raises:
            See ``keepstep.Checkpointer.restore``; for checkpoints of torchtitan, and of Hugging Face, its own manager.
        """
        with structured_logger.log_trace_span("checkpoint_load"), torch.no_grad():
            sight = self._look(step)
            theirs = step != -1 and step not in sight.steps and sight.theirs
            if (theirs or not self._resume(step, sight)) and not self._begin(step, sight):
                logger.info("No checkpoint was provided, this is a fresh start.")
                return False
            if self._progress is not None:
                self._progress.take()
                self._state.progress.step = self._progress.step
        # What comes until the first batch draws random numbers: they are put back there.
        self._random = RngStreams().state_dict()
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Notes that a step is done; whether it will be saved. The last one is saved, and committed, on return.

        Raises:
            See ``keepstep.Checkpointer.step``.
        """
        if self._keeper is None:
            return False
        if self._progress is not None:
            self._progress.take()
        config, self._over = self._config, curr_step
        if last_step or self._feed is None:
            self.end_step()
        if last_step:
            with structured_logger.log_trace_span("checkpoint_save"), torch.no_grad():
                self._save_last(curr_step)
        first = curr_step == 1 and config.enable_first_step_checkpoint
        return last_step or first or curr_step % config.interval == 0

    def _maybe_wait_for_staging(self) -> None:
        """Waits for the copy of what an optimizer is about to change."""
        fence()

    def _wait_for_saving(self) -> None:
        """Waits until the newest save is committed.

        Raises:
            CheckpointError: it has failed.
        """
        self.save_future = None
        if self._pending is not None:
            self._pending.wait_committed()

    def _close(self) -> None:
        """Waits for the save in progress; while another exception is on its way, what fails is only logged."""
        if getattr(self, "_keeper", None) is not None:
            self._keeper.__exit__(*sys.exc_info())  # type: ignore[union-attr]

    # --- what the feed calls ---

    def begin_batches(self) -> None:
        """Before the first batch: random numbers as they were saved."""
        if self._random is not None:
            RngStreams().load_state_dict(self._random)
            self._random = None

    def end_step(self) -> None:
        """The step that was noted is over: nothing that belongs to it is left to do."""
        step, self._over = self._over, None
        if step is None or self._keeper is None:
            return
        samples = 0 if self._feed is None else self._feed.take_samples()
        self._state.progress.step = step - 1 if step else 0
        numbers, self._numbers = self._numbers, {}
        pending = self._keeper.step(samples=samples, **numbers) if step else None
        if pending is None and step == 1 and self._config.enable_first_step_checkpoint:
            pending = self._keeper.save()
        if pending is not None:
            self._pending, self.save_future = pending, pending.committed

    # --- the parts of it ---

    def _open(self) -> StepKeeper:
        config = self._config
        return StepKeeper(
            self._folder,
            self._state,
            every=Every(steps=config.interval),
            keep=Keep(last=config.keep_latest_k or None),
            background="off" if config.async_mode == "disabled" else None,
            tolerate_failures=config.tolerate_failures,
            local=config.local,
            preempt=None if config.preempt_grace_s is None else Preempt(grace_s=config.preempt_grace_s),
            deadline_s=config.deadline_s,
            trace=config.trace,
        )

    def _look(self, step: int) -> Sight:
        """What there is to begin from: one rank looks, for all."""
        config = self._config
        with Ranks.current().phase("look for steps", config.deadline_s) as phase:
            posted, raw = phase.gather(b""), None
            if posted is not None:
                steps: list[int] = []
                theirs = False
                if filesystem.isdir(self._folder):
                    steps = [one.step for one in read_catalog(storage_of(self._folder)).steps]
                    found = [name for name in filesystem.listdir(self._folder) if _THEIRS.fullmatch(name)]
                    theirs = bool(found) if step == -1 else f"step-{step}" in found
                elsewhere = None if config.initial_load_in_hf else config.initial_load_path
                raw = msgspec.json.encode(Sight(steps, theirs, _own_step(elsewhere)))
            return msgspec.json.decode(phase.broadcast(raw), type=Sight)

    def _resume(self, step: int, sight: Sight) -> bool:
        """Goes on from the folder; whether there was anything. From a step 0 come weights alone, as in torchtitan."""
        steps, left = sight.steps, self._config.exclude_from_loading
        if steps and "train_state" in left:
            raise UsageError(
                "checkpoint.exclude_from_loading has train_state: steps would be counted from 0 again in a folder that has"
                f" later ones. Take another checkpoint.folder, and {self._folder} as checkpoint.initial_load_path"
            )
        seed = step == 0 or (step == -1 and bool(steps) and max(steps) == 0)
        only: dict[str, Any] = {"only": ["model"] if seed else self._wanted()} if seed or left else {}
        if self._keeper is not None:
            # Attempts that never ended are in the way of a fresh start, not of one from elsewhere. Damaged steps always are.
            elsewhere = sight.theirs or self._config.initial_load_path or self._config.initial_load_in_hf
            begins = bool(elsewhere) and not steps
            return not self._keeper.restore(step=None if step == -1 else step, allow_fresh=begins, **only).fresh
        if step == -1 and not steps:
            return False
        load_step(step_storage(storage_of(self._folder), steps[0] if step == -1 else step), self._state, **only)
        return True

    def _begin(self, step: int, sight: Sight) -> bool:
        """Begins from what another program has left in the folder, or from elsewhere; whether there is anything."""
        config = self._config
        if sight.own and not sight.theirs:
            only = ["model"] if config.initial_load_model_only else self._wanted()
            load_step(sight.own, self._state, only=only)
            return True
        if sight.theirs or config.initial_load_path or config.initial_load_in_hf:
            return bool(self._stock()._load(step))
        return False

    def _wanted(self) -> list[str]:
        """The components to load."""
        left = set(self._config.exclude_from_loading)
        return [name for name in self._state if _torchtitans(name) not in left]

    def _save_last(self, step: int) -> None:
        """The whole step, and beside it what the configuration wants of the last one."""
        config, keeper = self._config, self._keeper
        if self._pending is None or self._pending.step != step:
            self._pending = None if keeper is None else keeper.save()
        if self._pending is not None:
            self._pending.wait_committed()
        if not config.last_save_model_only or step == 0:
            return
        if config.last_save_in_hf:
            self._stock()._save_last_step(step)
            return
        dtype = TORCH_DTYPE_MAP[config.export_dtype]
        model: dict[str, Any] = self._state["model"].state_dict()
        model = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in model.items()
        }
        save_step(filesystem.join(self._folder, f"model-{step}"), {"model": model}, step=step, overwrite=True)

    def _stock(self) -> Any:
        """The manager of torchtitan itself, for formats that are its own."""
        shared = {field.name: getattr(self._config, field.name) for field in fields(BaseCheckpointManager.Config)}
        config = CheckpointManager.Config(**shared | {"keep_latest_k": 0})
        return CheckpointManager(config, **self._given | {"states": dict(self._given["states"])})

    def _watch_losses(self, metrics: Any) -> None:
        """Keeps the loss that torchtitan logs, for the step it belongs to."""
        log = metrics.log

        def logged(step: int, global_avg_loss: float, *rest: Any, **more: Any) -> Any:
            self._numbers = {"loss": global_avg_loss}
            return log(step, global_avg_loss, *rest, **more)

        metrics.log = logged


class Sight(msgspec.Struct, frozen=True):
    """What there is to begin from.

    The folder's steps, newest first; whether torchtitan's own manager has left what is wanted there; a step that keepstep
    has written elsewhere, or nothing.
    """

    steps: list[int]
    theirs: bool
    own: str


_OWN = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
_THEIRS = re.compile(r"step-(0|[1-9]\d*)/?")
"""How torchtitan's own manager calls a checkpoint."""


def _numbered(name: str, parts: list[Any]) -> dict[str, Any]:
    return {name if len(parts) == 1 else f"{name}_{number}": part for number, part in enumerate(parts)}


def _torchtitans(component: str) -> str:
    """What torchtitan calls a component."""
    return "optimizer" if component.startswith("optimizer_") else component


def _own_step(path: str | None) -> str:
    """The step under a path, which may be a run's: then its newest. Empty when keepstep has not written it."""
    if not path:
        return ""
    storage = storage_of(path)
    steps = read_catalog(storage).steps
    if steps:
        return str(filesystem.join(path, step_name(steps[0].step)))
    with contextlib.suppress(StorageError):
        return "" if read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES).startswith(FOREIGN) else path
    return ""
