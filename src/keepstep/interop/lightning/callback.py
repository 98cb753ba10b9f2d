"""The Checkpointer inside of a Lightning Trainer: restores before the first batch, saves where a step is really over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from keepstep.checkpointer import Checkpointer, Pending
from keepstep.commit.retention import Keep
from keepstep.errors import UsageError
from keepstep.interop.lightning.feed import Feed
from keepstep.interop.lightning.parts import TrainerPart
from keepstep.interop.positions import DataPlace, data_place, own_or_first
from keepstep.state import TrainState, per_rank
from keepstep.storage.local import Place

__all__ = ["StepCallback"]

_FLAT = {
    "FSDPStrategy": "take ModelParallelStrategy, or fully_shard in configure_model",
    "DeepSpeedStrategy": "take DDPStrategy or ModelParallelStrategy",
}
"""Strategies that keep weights where nobody else can name them."""


class StepCallback(Callback):
    """Keeps the steps of a run below one root; ``trainer.fit`` goes on from the newest good one, without a path.

    The state is whole: weights, optimizers, schedulers, the gradient scaler, gradients of an update in the making, loops,
    callbacks, the data module, random numbers of every rank, and the position in the training data. A step is saved when
    the next batch is asked for: validation, hooks and schedulers that belong to it are done by then. ``progress.step``
    counts batches after which an optimizer has stepped.

    One Trainer at a time; every hook is collective, on the training thread.

    Args:
        root: the run's folder, the same on every rank.
        data: who keeps the position in the training data, or None for nobody. When it is left out, found in the training
            loader: one of keepstep.data, a DataLoader with a ResumableBatchSampler, or a StatefulDataLoader.
        extra: further components of the state, by name.
        at_end: whether the last step is saved when training ends.
        options: what a ``Checkpointer`` takes: ``every``, ``keep``, ``preempt``, ``trace``, ``background``, ...
    """

    _FOUND = object()

    def __init__(
        self,
        root: Place,
        *,
        data: Any = _FOUND,
        extra: Mapping[str, Any] | None = None,
        at_end: bool = True,
        **options: Any,
    ) -> None:
        self._root = root
        self._data = data
        self._extra = dict(extra or {})
        self._at_end = at_end
        self._options = options
        self._metric = keep.metric if (keep := options.get("keep") or Keep()).best else ""
        self._checkpointer: Checkpointer | None = None
        self._trainer: Any = None
        self._part: TrainerPart | None = None
        self._clear()

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The one of the training that goes on, between ``on_fit_start`` and ``teardown``."""
        return self._checkpointer

    # --- hooks of Lightning, in the order in which they are called ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores, when there is something to restore.

        Raises:
            UsageError: a strategy, loader or option that cannot be kept exactly; says what to take.
            See ``Checkpointer`` and its ``restore`` for the rest.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # as all that writes checkpoints
            return
        _check(trainer)
        self._clear()
        loader = _training_loader(trainer)
        if self._data is StepCallback._FOUND:
            self._place = data_place(loader)
        else:
            self._place = DataPlace(self._data)
        trainer.fit_loop._data_source.instance = Feed(loader, self)
        self._trainer, self._part = trainer, TrainerPart(trainer)
        state = TrainState(
            **_components(trainer),
            data=self._place.component,
            trainer=per_rank(self._part, own_or_first),
            **self._extra,
        )
        self._checkpointer = Checkpointer(self._root, state, **self._options)
        report = self._checkpointer.restore()
        if report.fresh:
            return
        if trainer.ckpt_path is not None:
            raise UsageError(
                f"fit(ckpt_path={trainer.ckpt_path!r}), but the run in {self._root} has step {report.step}: leave ckpt_path"
                " out to go on from there, or give the callback another root to begin a new run from that checkpoint"
            )
        self._saved = report.step
        self._part.hold_streams()
        if self._checkpointer.micro:
            # Lightning clears all gradients before it begins.
            owned = (p for group in trainer.optimizers for g in group.param_groups for p in g["params"])
            self._gradients += [(p, p.grad) for p in owned if p.grad is not None]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks whether batches come as they are asked for."""
        if self._checkpointer is None:
            return
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is None or fetcher.length is None or not hasattr(fetcher, "prefetch_batches"):
            raise UsageError(
                "Lightning fetches batches ahead, or lets training_step fetch them: then nobody knows which were used. Give"
                " the training loader a length, or the Trainer a number for limit_train_batches; and training_step a batch"
            )
        self._stepped = trainer.global_step
        if trainer.ckpt_path is not None:
            self._checkpointer.progress.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes what the batch was; the boundary comes with the next request."""
        if self._checkpointer is None or self._part is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._part.losses += loss.detach()
        self._part.add_levels()
        self._due = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch that is left early, because enough steps are done, can be finished by another run."""
        if self._part is not None:
            self._part.forget_levels()
            if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
                self._boundary(inside=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last boundary, and the save of the last step."""
        self._boundary(inside=False)
        if self._checkpointer is not None and self._at_end and self._saved != self._checkpointer.progress.step:
            self._checkpointer.save()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for the save in progress; the step that was interrupted is not one."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the save in progress.

        Raises:
            CheckpointError: the last save has failed.
        """
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()
            self._clear()

    # --- what the feed tells ---

    def epoch_begins(self) -> None:
        """Between two epochs."""
        self._boundary(inside=False)
        if self._part is not None and self._part.loaded and not self._part.inside:
            self._part.enter()

    def batches_begin(self) -> None:
        """Before the first batch of a resumed run: nothing that Lightning has done since the restore counts."""
        if self._part is not None and self._part.loaded:
            self._part.enter()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            self._gradients.clear()

    def batch_wanted(self) -> None:
        """The batch before is over."""
        self._boundary(inside=True)

    def _boundary(self, *, inside: bool) -> None:
        if self._checkpointer is None or self._part is None or self._trainer is None or not self._due:
            return
        self._due = False
        self._part.inside = inside
        samples = self._place.samples()
        pending: Pending | None
        if self._trainer.global_step == self._stepped:
            pending = self._checkpointer.micro_step(samples=samples)
        else:
            self._stepped = self._trainer.global_step
            numbers: dict[str, Any] = {"loss": self._part.losses}
            self._part.losses = 0.0
            watched = self._trainer.callback_metrics.get(self._metric)
            if watched is not None:
                numbers[self._metric] = watched
            epoch = self._trainer.current_epoch
            pending = self._checkpointer.step(samples=samples, epoch=epoch, **numbers)
        if pending is not None:
            self._saved = pending.step

    def _clear(self) -> None:
        """Nothing of a training that is over stays."""
        self._trainer = self._part = None
        self._place = DataPlace(None)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._due = False
        self._stepped = 0
        self._saved = -1


def _check(trainer: Any) -> None:
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _FLAT:
            raise UsageError(f"the state under {kind.__name__} cannot be kept by name: {_FLAT[kind.__name__]}")
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError(
            "reload_dataloaders_every_n_epochs makes new training loaders on the way, whose place in the data nobody knows"
        )


def _training_loader(trainer: Any) -> Any:
    """The one loader that training will iterate over."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader()
    if isinstance(loader, CombinedLoader | dict | list | tuple):
        raise UsageError(
            f"the training data is a {type(loader).__name__} of loaders; where each of them stands is not kept. Make one"
            " loader of them"
        )
    return loader.loader if isinstance(loader, Feed) else loader


def _components(trainer: Any) -> dict[str, Any]:
    """Weights, optimizers, schedulers and scaler by name; with several of a kind, each with its number."""
    found: dict[str, Any] = {"model": trainer.strategy.model or trainer.lightning_module}
    kinds = {"optimizer": trainer.optimizers, "scheduler": [one.scheduler for one in trainer.lr_scheduler_configs]}
    for name, parts in kinds.items():
        found |= {name if len(parts) == 1 else f"{name}_{number}": part for number, part in enumerate(parts)}
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        found["scaler"] = scaler
    elif plugin.state_dict():
        found["precision"] = plugin
    return found
