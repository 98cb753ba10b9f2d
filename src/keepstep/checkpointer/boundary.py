"""Whether everything stands at one step: who has moved between one boundary and the next, and who is in the middle.

Optimizers are counted by a hook after their step, schedulers by their own count. Nothing here waits for a device.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.state.fence import has_hook
from keepstep.storage.base import Closing

__all__ = ["Boundaries"]

PROVED_AFTER = 3
"""Boundaries after which it is known who moves between them, and who has moved before the first."""
_Seen = tuple[weakref.ref[torch.Tensor], int]
"""A gradient, and how often it had been changed in place."""
_log = logging.getLogger("keepstep")


class Boundaries(Closing):
    """Looks at the parts of a state at every boundary. On the training thread.

    Args:
        state: its optimizers and schedulers are watched.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._optimizers = {name: value for name, value in state.items() if _is_watched(value)}
        self._schedulers = {
            name: value
            for name, value in state.items()
            if type(getattr(value, "last_epoch", None)) is int and hasattr(value, "step")
        }
        # A scaler leaves out steps whose gradients are not finite: then nobody knows how often an optimizer should move.
        self._scaled = any(hasattr(value, "get_scale") for value in state.values())
        self._steps = dict.fromkeys(self._optimizers, 0)
        self._hooks = [
            optimizer.register_step_post_hook(partial(self._count, name))
            for name, optimizer in self._optimizers.items()
        ]
        self._told: set[str] = set()
        self._told_late: set[str] = set()
        # Schedulers that do not move with every update, but by epochs or the like.
        self._rested: set[str] = set()
        self._at = 0
        self._gradients: dict[str, _Seen] = {}
        self.restart()

    def restart(self) -> None:
        """Counts from here: at the start, and after a restore."""
        self._before = self._counts()
        self._moves: list[dict[str, int]] = []
        self._look()

    def passed(self, step: int) -> None:
        """A boundary: ``step`` updates are finished.

        Raises:
            UsageError: parts that move after the boundary instead of before it; lists them.
        """
        counts = self._counts()
        moved = {name: count - self._before[name] for name, count in counts.items()}
        self._before, self._at = counts, step
        self._rested |= {name for name in self._schedulers if not moved[name]}
        self._look()
        if len(self._moves) < PROVED_AFTER:
            self._moves.append(moved)
            if len(self._moves) == PROVED_AFTER:
                self._prove(step)
        elif not self._scaled:
            self._compare(step, moved)

    def passed_micro(self) -> None:
        """A microbatch of an update is done."""
        self._look()

    def unfinished(self, step: int) -> str:
        """Why a save cannot be made here: in the middle of an update that nobody has declared. Empty when it can."""
        begun = [
            name
            for name, gradient in self._first_gradients().items()
            if not _is_as_seen(gradient, self._gradients.get(name)) and bool(torch.count_nonzero(gradient))
        ]
        if not begun:
            return ""
        return (
            f"step {step} cannot be saved here: gradients for the next update of {', '.join(begun)} were accumulated"
            " since the last boundary, and would be lost. Either save where no update is in the making (right after"
            " optimizer.step() and Checkpointer.step()), or call Checkpointer.micro_step() after every microbatch: then the"
            " gradients are saved with the step, and a resumed run finishes that update. Nothing was written"
        )

    def close(self) -> None:
        """Takes the hooks away. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _count(self, name: str, *_: Any) -> None:
        self._steps[name] += 1
        self._tell_late()
        self._look()

    def _tell_late(self) -> None:
        """Tells, once for each, of schedulers that have moved between the boundary and the first optimizer after it.

        Not an error: a loop may do so at the head of an epoch, and a resumed one does it there again.
        """
        if sum(count - self._before[name] for name, count in self._steps.items()) != 1:
            return
        for name in sorted(self._rested - self._told_late):
            if int(self._schedulers[name].last_epoch) != self._before[name]:
                self._told_late.add(name)
                _log.warning(
                    "%s moved after the boundary of step %d and before the next update: step %d has it as it was before."
                    " Unless a run resumed from there moves it again, call scheduler.step() before Checkpointer.step() of"
                    " the last batch of an epoch",
                    name,
                    self._at,
                    self._at,
                )

    def _counts(self) -> dict[str, int]:
        return self._steps | {name: int(value.last_epoch) for name, value in self._schedulers.items()}

    def _prove(self, step: int) -> None:
        """Finds parts that stood still before the first boundary, and have moved once before each of the next.

        That is what a part looks like whose turn comes after the boundary. After two boundaries it is too early to say so:
        a scheduler that moves at every other step looks the same up to there.
        """
        usual = {name: tuple(moved[name] for moved in self._moves) for name in self._moves[0]}
        once, late = (1,) * PROVED_AFTER, (0,) + (1,) * (PROVED_AFTER - 1)
        leaders = [name for name, moves in usual.items() if moves == once]
        if self._scaled:
            usual = {name: moves for name, moves in usual.items() if name in self._schedulers}
        wrong = [name for name, moves in usual.items() if moves == late]
        others = leaders or (["progress"] if any(name in self._optimizers for name in wrong) else [])
        if wrong and others:
            raise UsageError(
                f"at step {step} the parts of the state do not stand at one step: {', '.join(wrong)} moved after"
                f" Checkpointer.step() and not before it, unlike {', '.join(others)}. Call Checkpointer.step() after"
                " optimizer.step() and scheduler.step(): a run resumed from a step saved so would leave one out"
            )

    def _compare(self, step: int, moved: Mapping[str, int]) -> None:
        """Tells, once for each part, that it has moved otherwise than it used to."""
        for name, count in moved.items():
            if count != 1 and name not in self._told and all(one[name] == 1 for one in self._moves):
                self._told.add(name)
                _log.warning(
                    "step %d: %s has moved %d times since the last boundary, and once between all before: progress"
                    " and %s no longer count alike",
                    step,
                    name,
                    count,
                    name,
                )

    def _first_gradients(self) -> dict[str, torch.Tensor]:
        """For each optimizer the gradient of the first of its parameters that has one; of a DTensor the local part."""
        found = {}
        for name, optimizer in self._optimizers.items():
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
            first = next((gradient for gradient in gradients if gradient is not None), None)
            if first is not None:
                found[name] = getattr(first, "_local_tensor", first)
        return found

    def _look(self) -> None:
        """Remembers what gradients look like when they belong to no update in the making."""
        self._gradients = {
            name: (weakref.ref(gradient), _version(gradient)) for name, gradient in self._first_gradients().items()
        }


def _is_watched(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) and has_hook(value)


def _is_as_seen(gradient: torch.Tensor, seen: _Seen | None) -> bool:
    return seen is not None and seen[0]() is gradient and seen[1] == _version(gradient)


def _version(gradient: torch.Tensor) -> int:
    """The count of in-place changes."""
    try:
        return int(gradient._version)
    except RuntimeError:
        # Made in inference mode: such tensors are not counted.
        return 0
