"""Accelerate: a Checkpointer around what an Accelerator has prepared, and a training loader that knows where it stands.

Nothing is imported from accelerate: the Accelerator that is given has all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.checkpointer import Checkpointer as StepKeeper
from keepstep.checkpointer import Pending
from keepstep.data import ResumableLoader
from keepstep.errors import UsageError
from keepstep.interop.positions import DataPlace, data_place, own_or_first
from keepstep.state import TrainState, per_rank
from keepstep.storage.local import Place

__all__ = ["Checkpointer", "PreparedLoader"]


class PreparedLoader:
    """A ResumableLoader as a training loader of an Accelerator: batches on its device, and its ends where accumulation ends.

    It deals samples to ranks by itself: do not give it to ``accelerator.prepare``.
    """

    def __init__(self, accelerator: Any, loader: ResumableLoader) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self.remainder = -1
        self.device = accelerator.device
        self._gradients = accelerator.gradient_state

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from where the run stands to the end of the epoch."""
        self.end_of_dataloader = False
        epoch = self.loader.epoch
        self._gradients._add_dataloader(self)
        try:
            for batch in self.loader:
                # With the last batch of an epoch the loader is in the next one.
                self.end_of_dataloader = self.loader.epoch != epoch
                yield _moved(batch, self.device)
        finally:
            self._gradients._remove_dataloader(self)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has, such as ``epoch`` and ``batch_samples``."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class Checkpointer(StepKeeper):
    """A ``keepstep.Checkpointer`` whose state is what an Accelerator has prepared. Make it after ``prepare``.

    Models, optimizers, schedulers, the gradient scaler, objects of ``register_for_checkpointing``, the count of
    microbatches, random numbers and the position in the data. ``skip_first_batches`` is not needed: the loader goes on where
    it stands.

    Args:
        root: the run's folder, the same on every rank.
        accelerator: the Accelerator, with everything prepared and registered.
        data: the training loader: a PreparedLoader, or another one whose position is known; None for nobody. Others than
            PreparedLoader are to be prepared only where there is one process: Accelerate would deal their batches again.
        extra: further components of the state, by name.
        options: as for ``keepstep.Checkpointer``.

    Raises:
        UsageError: a loader that does not know where it stands; FSDP version 1, DeepSpeed or Megatron-LM underneath.
    """

    def __init__(
        self, root: Place, accelerator: Any, *, data: Any, extra: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._accelerator = accelerator
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind in ("DEEPSPEED", "MEGATRON_LM") or (kind == "FSDP" and not accelerator.is_fsdp2):
            raise UsageError(f"{kind} keeps weights where nobody else can name them; take DDP, or FSDP with version 2")
        loader = data.loader if isinstance(data, PreparedLoader) else data
        self._place = DataPlace(None) if loader is None else data_place(loader)
        parts = {
            **_numbered("model", accelerator._models),
            **_numbered("optimizer", [getattr(one, "optimizer", one) for one in accelerator._optimizers]),
            **_numbered("scheduler", [getattr(one, "scheduler", one) for one in accelerator._schedulers]),
            **_numbered("registered", accelerator._custom_objects),
        }
        count = per_rank(Counts(accelerator, loader), own_or_first)
        state = TrainState(
            **parts, scaler=accelerator.scaler, data=self._place.component, accelerator=count, **dict(extra or {})
        )
        super().__init__(root, state, **options)

    def passed(self, *, epoch: int | None = None, **metrics: Any) -> Pending | None:
        """Call it once after every batch: it is ``step`` where gradients were synchronised, and else ``micro_step``.

        The number of samples is known from the loader.

        Args:
            epoch: the epoch the next step belongs to, when it changed; known from a ResumableLoader.
            metrics: as for ``step``.

        Raises:
            See ``step``.
        """
        samples = self._place.samples()
        if not self._accelerator.sync_gradients:
            return self.micro_step(samples=samples)
        if epoch is None:
            epoch = getattr(self._place.counted, "epoch", None)
        return self.step(samples=samples, epoch=epoch, **metrics)


class Counts:
    """The Accelerator's count of batches since the last end of a loader, and the epoch that its loader counts for itself."""

    def __init__(self, accelerator: Any, loader: Any) -> None:
        self._accelerator = accelerator
        self._loader = loader if hasattr(loader, "iteration") else None

    def state_dict(self) -> dict[str, Any]:
        """Both. With the last batch of an epoch, the next one is what a resumed run begins with."""
        counts = {"step": self._accelerator.step}
        if self._loader is not None:
            counts["iteration"] = self._loader.iteration + bool(self._loader.end_of_dataloader)
        return counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets them."""
        self._accelerator.step = state["step"]
        if self._loader is not None and "iteration" in state:
            self._loader.iteration = state["iteration"]


def _numbered(name: str, parts: list[Any]) -> dict[str, Any]:
    return {name if len(parts) == 1 else f"{name}_{number}": part for number, part in enumerate(parts)}


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: _moved(item, device) for key, item in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(item, device) for item in batch)
    return batch
