"""What a Lightning Trainer knows beside its model and optimizers, as one component of a state.

Loops with their progress, callbacks, the data module, what the module adds to checkpoints, and metrics that schedulers and
callbacks look at. Lightning's own way of going on in the middle of an epoch guesses from counters what was done already;
here loops are put back to where the next batch is asked for, which is the only place that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import Callback, LightningModule, Trainer

from keepstep.state.rng import RngStreams

__all__ = ["TrainerPart"]

_LEVELS = ("value", "cumulated_batch_size")
"""What Lightning adds up for a logged value during an epoch."""


class TrainerPart:
    """Everything of the trainer that its own checkpoints hold beside weights and optimizers, and a little more.

    ``inside`` says whether the run stands inside of an epoch; ``loaded`` whether a state was loaded.
    """

    def __init__(self, trainer: Trainer) -> None:
        # Much of it is set where type checkers do not see it.
        self._trainer: Any = trainer
        self._running: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._loops: dict[str, Any] = {}
        self.losses: Any = 0.0
        self.inside = False
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        """As it is now. Every rank has its own: a timer, for one, differs."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        # The position in the data is a component of its own.
        loops["state_dict"] = {}
        if self.inside:
            # An epoch that was cut short is counted as processed in the hook at its end: it is not.
            for span in loops["epoch_progress"].values():
                span["processed"] = span["completed"]
        return {
            "inside": self.inside,
            "losses": float(self.losses),
            "loops": loops,
            "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "added": self._added(),
            "metrics": dict(sorted(trainer._logger_connector._callback_metrics.items())),
            "running": self._levels() if self.inside else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts it back, as far as it can be before training has begun; ``enter`` does the rest."""
        trainer = self._trainer
        self.loaded, self.inside, self.losses = True, state["inside"], state["losses"]
        self._loops, self._running = state["loops"], dict(state["running"])
        for one in trainer.callbacks:
            if one.state_key in state["callbacks"]:
                one.load_state_dict(state["callbacks"][one.state_key])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        hooks = self._hooks("on_load_checkpoint")
        checkpoint = self._frame() | {"callbacks": state["callbacks"]} | state["added"] if hooks else {}
        for hook in hooks:
            hook(checkpoint)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        self._set_loops(begun=False)

    def hold_streams(self) -> None:
        """Keeps the random numbers as they are now, until ``enter``: what comes until then draws some."""
        self._random = RngStreams().state_dict()

    def enter(self) -> None:
        """Training goes on from here: counters and random numbers as they were saved."""
        if self.inside:
            self._set_loops(begun=True)
        if self._random is not None:
            RngStreams().load_state_dict(self._random)
        self._random, self.loaded = None, False

    def add_levels(self) -> None:
        """Adds what was logged before the resume to what the first batches after it have logged, for means over an epoch."""
        results = self._trainer.fit_loop.epoch_loop._results
        for key in [key for key in self._running if key in results]:
            saved, live = self._running.pop(key), results[key]
            if live.meta.is_max_reduction or live.meta.is_min_reduction:
                live.value = live.meta.reduce_fx(live.value, saved["value"].to(live.value.device))
            else:
                for name in saved:
                    setattr(live, name, saved[name].to(live.value.device) + getattr(live, name))
            live._computed = None

    def forget_levels(self) -> None:
        """The epoch is over: what it has logged is, too."""
        self._running = {}

    def _levels(self) -> dict[str, dict[str, torch.Tensor]]:
        """What was logged in this epoch so far for its end, by name. Metrics that are modules are in the model's state."""
        results = self._trainer.fit_loop.epoch_loop._results
        found = {
            key: {name: getattr(one, name) for name in _LEVELS if hasattr(one, name)}
            for key, one in results.items()
            if one.is_tensor and one.meta.on_epoch and one.update_called
        }
        return dict(sorted({**self._running, **found}.items()))

    def _set_loops(self, *, begun: bool) -> None:
        """Gives every loop its counters. ``begun``: the loop is in the epoch already and asks for a batch."""
        fit = self._trainer.fit_loop
        fit.load_state_dict(self._loops)
        epoch = fit.epoch_loop
        for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
            loop._restarting = False
        # The first epoch's iterator is made once, and its hooks are not called again inside of it. A sanity check of the
        # validation is for new runs.
        fit._restarting = self.inside and not begun
        fit._resuming_from_checkpoint = epoch.val_loop._restarting = not begun
        if begun and fit._data_fetcher is not None:
            fit._data_fetcher.fetched = epoch.batch_progress.current.ready

    def _frame(self) -> dict[str, Any]:
        """What hooks expect to find in a checkpoint of Lightning."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning_version,
            "state_dict": trainer.lightning_module.state_dict(),
        }

    def _added(self) -> dict[str, Any]:
        """What hooks of the module and of callbacks add to a checkpoint."""
        hooks = self._hooks("on_save_checkpoint")
        checkpoint = self._frame() if hooks else {}
        known = set(checkpoint)
        for hook in hooks:
            hook(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in known}

    def _hooks(self, name: str) -> list[Callable[[dict[str, Any]], None]]:
        """Those that somebody has written."""
        trainer = self._trainer
        found = [
            partial(getattr(one, name), trainer, trainer.lightning_module)
            for one in trainer.callbacks
            if getattr(type(one), name) is not getattr(Callback, name)
        ]
        module = trainer.lightning_module
        return found + [getattr(module, name)] * (getattr(type(module), name) is not getattr(LightningModule, name))
