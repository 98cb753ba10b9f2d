"""The fence: before anything is changed in place, wait until a save in progress has copied it.

What an optimizer's step changes is copied while the next forward and backward pass run. Every ``torch.optim`` optimizer
calls the fence by itself before its step, whichever objects a save is about; loops that change tensors by hand call
``TrainState.fence``.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Hold", "fence", "has_hook", "raise_hold"]


class Hold:
    """One copy in progress. ``waited_s`` is how long training has stood still for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._since: float | None = None
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds, the present wait included."""
        since = self._since
        return self._waited_s + (time.perf_counter() - since if since is not None else 0.0)

    def drop(self) -> None:
        """The copy is done, or given up: whoever waits goes on."""
        self._done.set()
        _holds.discard(self)

    def wait(self) -> None:
        """Waits until the copy is done."""
        if not self._done.is_set():
            self._since = time.perf_counter()
            self._done.wait()
            self._waited_s += time.perf_counter() - self._since
            self._since = None


_holds: set[Hold] = set()
# In a forked child nobody copies: nothing there has to wait.
os.register_at_fork(after_in_child=_holds.clear)
_hooked = threading.Event()


def raise_hold() -> Hold:
    """From now on the fence waits for this copy."""
    if not _hooked.is_set():
        _hooked.set()
        register_optimizer_step_pre_hook(_before_step)
    hold = Hold()
    _holds.add(hold)
    return hold


def fence() -> None:
    """Waits for every copy in progress in this process. Costs nothing when there is none. Any thread."""
    while _holds:
        for hold in tuple(_holds):
            hold.wait()
            _holds.discard(hold)


def has_hook(optimizer: torch.optim.Optimizer) -> bool:
    """Whether PyTorch runs hooks before this optimizer's step."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _before_step(*_: Any) -> None:
    if _holds:
        fence()
