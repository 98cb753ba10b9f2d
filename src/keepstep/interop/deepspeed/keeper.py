"""The state of an engine as a TrainState, and a Checkpointer around the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.checkpointer import Checkpointer as StepKeeper
from keepstep.checkpointer import Pending
from keepstep.errors import UsageError
from keepstep.interop.deepspeed.buffers import microbatches, refusals
from keepstep.interop.deepspeed.parts import Counts, Moments, Weights
from keepstep.interop.positions import DataPlace, data_place
from keepstep.state import TrainState
from keepstep.storage.local import Place

__all__ = ["Checkpointer", "engine_state"]


def engine_state(engine: Any, **others: Any) -> TrainState:
    """The state of a DeepSpeedEngine: weights, optimizer, scheduler, counts and loss scale. Not collective.

    ``model`` has fp32 weights of what is trained; parameters in 16 bits are made of them at the end of a load, with an
    all-gather. A save stands where an update is done: between the microbatches of one it is refused.

    Args:
        engine: what ``deepspeed.initialize`` has returned, with ZeRO stage 1, 2 or 3, or without ZeRO in fp32.
        others: further components, and options of a TrainState.

    Raises:
        UsageError: lists everything about the engine that cannot be saved.
    """
    refused = list(refusals(engine))
    if refused:
        raise UsageError("an engine with what cannot be saved:\n" + "\n".join(f"  {text}" for text in refused))
    zero = engine.zero_optimization_stage()
    scheduler = engine.lr_scheduler if hasattr(engine.lr_scheduler, "state_dict") else None
    return TrainState(
        model=Weights(engine) if zero else engine.module,
        optimizer=Moments(engine) if zero else engine.optimizer,
        scheduler=scheduler,
        engine=Counts(engine),
        **others,
    )


class Checkpointer(StepKeeper):
    """A ``keepstep.Checkpointer`` whose state is that of a DeepSpeedEngine.

    Args:
        root: the run's folder, the same on every rank.
        engine: as for ``engine_state``.
        data: the training loader, which knows its position (see ``keepstep.data``); None for nobody.
        extra: further components of the state, by name.
        options: as for ``keepstep.Checkpointer``.

    Raises:
        UsageError: as for ``engine_state``; or a loader that does not know where it stands.
    """

    def __init__(
        self, root: Place, engine: Any, *, data: Any, extra: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._engine = engine
        self._place = DataPlace(None) if data is None else data_place(data)
        self._samples = 0
        super().__init__(root, engine_state(engine, data=self._place.component, **dict(extra or {})), **options)

    def passed(self, *, epoch: int | None = None, **metrics: Any) -> Pending | None:
        """Call it once after every ``engine.step()``: it is ``step`` where that was an update, and else counts samples.

        Args:
            epoch: the epoch the next step belongs to, when it changed; known from a ResumableLoader.
            metrics: as for ``step``.

        Raises:
            See ``step``.
        """
        self._samples += self._place.samples()
        if microbatches(self._engine):
            return None
        samples, self._samples = self._samples, 0
        if epoch is None:
            epoch = getattr(self._place.counted, "epoch", None)
        return self.step(samples=samples, epoch=epoch, **metrics)
