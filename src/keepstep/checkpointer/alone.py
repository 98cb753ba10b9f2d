"""``async_save``: one save in the background for people who own their loop."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.checkpointer.agree import Attempt, KnownPlan
from keepstep.checkpointer.background import BackgroundSaves, Manner, is_plain
from keepstep.checkpointer.pending import Pending
from keepstep.errors import AgentError, UsageError
from keepstep.format.manifest import Lineage
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.train_state import TrainState
from keepstep.storage.local import LocalStorage, Place, storage_of

__all__ = ["async_save"]

_kept: dict[tuple[str, str | None], tuple[BackgroundSaves, KnownPlan | None]] = {}
"""What one call leaves to the next: the agent, the arena and the plan, by staging and background."""


def async_save(
    path: Place,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    overwrite: bool = False,
    staging: str = "overlap",
    background: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> Pending:
    """Begins to save the state under a path, and returns when training may go on. Collective, on the training thread.

    What is durable on return: nothing yet. ``Pending.wait_committed`` waits for that, and the interpreter does at its end.
    Optimizers of ``torch.optim`` wait by themselves, before their step, until the copy is done; whoever changes tensors by
    hand calls ``Pending.wait_staged`` (or ``TrainState.fence``) before. One save is in progress at a time: a second call
    waits for the first one to end.

    Args:
        path: the folder of this one step, the same on every rank; a Storage works too.
        state: a TrainState, or a dict of modules, optimizers, schedulers, tensors, DTensors and plain values.
        step: the number to record; by default the TrainState's progress, else 0.
        overwrite: whether a step that is committed there may be replaced. Readers see the old or the new one, whole.
        staging: ``"overlap"`` or ``"block"``, see Checkpointer.
        background: ``"agent"``, ``"thread"``, or None for an agent wherever one can run.
        deadline_s: how long to wait for other ranks, and how long the save may take, in seconds.

    Raises:
        UsageError: options that mean nothing.
        UnsafeValueError: values or tensors that cannot be stored; nothing was begun.
        MismatchError: ranks differ in path, step or undeclared values; nothing was begun.
        StepExistsError: a step is committed there and ``overwrite`` is False.
        RankFailedError, CommitTimeoutError: nothing was begun.
    """
    if background == "off":
        raise UsageError("background='off': save() is what is durable when it returns")
    ranks = Ranks.current()
    number = step if step is not None else state.progress.step if isinstance(state, TrainState) else 0
    storage = storage_of(path)
    manner = Manner(staging, background)
    manner.check()
    key = staging, background
    kept = _kept.get(key)
    if kept is None or not kept[0].fits(ranks, storage):
        if kept is not None:
            # What is in progress would lose whoever finishes it.
            kept[0].wait()
            kept[0].close()
        # All steps of a process go through one agent, which is found by the folder of the first of them.
        around = LocalStorage(Path(storage.url).parent) if is_plain(storage) else storage
        kept = BackgroundSaves(ranks, around, manner, deadline_s), None
        kept[0].connect()
    saves, known = kept
    attempt = Attempt(number, Lineage(secrets.token_hex(8)), replace=overwrite, deadline_s=deadline_s, known=known)
    pending, plan = saves.save(storage, state, attempt)
    _kept[key] = saves, plan
    if pending is None:
        raise AgentError("an arena was busy although this save waits for it")
    return pending
