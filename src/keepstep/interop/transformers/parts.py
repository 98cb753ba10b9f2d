"""What a Hugging Face Trainer knows beside its model and optimizer: its place in the data, its counts and its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from keepstep.data.order import Order, mix
from keepstep.data.position import Dealing, Position
from keepstep.data.seeding import Draw

__all__ = ["Batches", "TrainerNumbers"]

_NUMBERS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""What of a TrainerState is of the run. The rest follows from the arguments, and those of now are right."""
_SPEEDS = ("_runtime", "_per_second")
"""What in a log tells how fast a process was: no part of the run, and another number each time."""


class Batches:
    """Batches of the training data under a torch loader, and the position in it: the component ``data``.

    The Trainer counts batches from the beginning of an epoch and leaves out those that were used before. It is given as
    many empty ones to leave out, in the first iteration after a load.
    """

    def __init__(self, samples: int, *, batch_size: int, seed: int, shuffle: bool, drop_last: bool) -> None:
        self._position = Position(
            Dealing(Order(samples, seed, shuffle), "drop" if drop_last else "short", batch_size, None)
        )
        self._seed = seed
        self._loaded = False
        self.batch_size = batch_size
        self.drop_last = drop_last

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._position.standing()[0]

    @property
    def global_batch_size(self) -> int:
        """Samples in a batch of all ranks together, the last one of an epoch apart."""
        return self._position.dealing.cut()[0].size

    def passed(self) -> int:
        """Batches of this epoch that are consumed; with batches of another size, as many as there would have been."""
        cut, _ = self._position.dealing.cut()
        return cut.count() - cut.count(self._position.standing()[1])

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of that epoch; inside of it already, does nothing."""
        self._position.go_to(epoch)

    def __iter__(self) -> Iterator[Draw]:
        """This rank's batches to the end of the epoch."""
        if self._loaded:
            self._loaded = False
            for _ in range(self.passed()):
                yield Draw((), 0)
        for dealt in self._position.deal():
            yield Draw(dealt.ids, mix(self._seed, dealt.epoch))

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._position.dealing.cut()[0].count()

    def consumed(self, samples: int) -> None:
        """So many samples were consumed by all ranks together since the last call."""
        self._position.consume(samples)

    def take_ids(self) -> list[int] | None:
        """The samples this rank has consumed since the last call, in order."""
        return self._position.take_ids()

    def state_dict(self) -> dict[str, Any]:
        """The position and what the order depends on. The same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position.

        Raises:
            MismatchError: data set, seed or order are not those that were saved.
        """
        self._position.load_state_dict(state)
        self._loaded = True


class TrainerNumbers:
    """What a Trainer counts and logs, as a component of a state. Every rank has its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._late: dict[str, Any] = {}
        self.losses: Any = 0.0

    def state_dict(self) -> dict[str, Any]:
        """As it is now."""
        trainer = self._trainer
        callbacks: dict[str, list[Any]] = {}
        for one in self._with_state():
            callbacks.setdefault(type(one).__name__, []).append(one.state()["attributes"])
        numbers = {name: getattr(trainer.state, name) for name in _NUMBERS if hasattr(trainer.state, name)}
        numbers["log_history"] = [
            {name: value for name, value in entry.items() if not name.endswith(_SPEEDS)}
            for entry in numbers["log_history"]
        ]
        return {
            "state": numbers,
            "callbacks": callbacks,
            "loss_since_log": float(getattr(trainer, "_tr_loss", 0.0)),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "flos_since_log": trainer.current_flos,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts it back, as far as the Trainer does not set it anew before it begins; ``enter`` does the rest."""
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)
        left = {name: list(states) for name, states in state["callbacks"].items()}
        for one in self._with_state():
            for name, value in left[type(one).__name__].pop(0).items() if left.get(type(one).__name__) else ():
                setattr(one, name, value)
        self._late = state

    def enter(self) -> None:
        """Training goes on from here."""
        trainer, state = self._trainer, self._late
        trainer._tr_loss = torch.tensor(state["loss_since_log"], device=trainer.args.device)
        # The mean at the end is over the steps of this call: what was not logged before it does not count.
        trainer._total_loss_scalar = -state["loss_since_log"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer.current_flos = state["flos_since_log"]
        self._late = {}

    def _with_state(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if callable(getattr(one, "state", None))]
