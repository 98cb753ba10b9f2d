"""Which steps may go, and how they go. Runs in one process, after a commit, on committed steps of one run only."""

from __future__ import annotations

import warnings
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from keepstep.commit.catalog import Catalog, step_storage
from keepstep.commit.publish import INCARNATIONS, LATEST_NAME, RUN_NAME
from keepstep.errors import StorageError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, step_name
from keepstep.storage.base import Storage
from keepstep.storage.local import PARTIAL

__all__ = ["Keep", "remove_step", "sweep_failed", "sweep_leftovers", "to_remove", "warn_untidy"]

_NOTHING = ".nothing"
"""A name that no blob has: removing it lets a storage drop a folder that a killed attempt made and never filled."""
_RECORDS = (f"{LATEST_NAME}.", f"{RUN_NAME}.", f"{INCARNATIONS}/")


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep: a step stays when any of the rules wants it.

    Args:
        last: the newest this many.
        every: every step whose number is a multiple of this; None for no such rule.
        best: this many with the best ``metric`` (as given to ``step``).
        metric: which metric ``best`` looks at.
        mode: ``"min"`` or ``"max"``.
    """

    last: int | None = 3
    every: int | None = None
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        """Refuses rules that mean nothing.

        Raises:
            UsageError: a count below one, or an unknown mode.
        """
        counts = {"last": self.last, "every": self.every}
        bad = [f"{name}={count}" for name, count in counts.items() if count is not None and count < 1]
        if bad or self.best < 0 or self.mode not in ("min", "max"):
            raise UsageError(f"Keep: {', '.join(bad) or f'best={self.best}, mode={self.mode!r}'} means nothing")


def to_remove(catalog: Catalog, keep: Keep, *, run: str, protect: AbstractSet[int]) -> list[int]:
    """The steps that no rule wants, oldest first. Pure.

    Never among them: the newest step, steps of another run, damaged ones (somebody should look), and ``protect`` (the
    step this run was restored from).
    """
    mine = [found for found in catalog.steps if found.run == run and not found.damage]
    if keep.last is None:
        return []
    wanted = {found.step for found in mine[: max(1, keep.last)]} | set(protect)
    if keep.every:
        wanted |= {found.step for found in mine if found.step % keep.every == 0}
    rated = [(found, (found.metrics or {}).get(keep.metric)) for found in mine]
    ranked = sorted(
        (value if keep.mode == "min" else -value, -f.step, f.step) for f, value in rated if value is not None
    )
    wanted |= {step for _, _, step in ranked[: keep.best]}
    return [found.step for found in reversed(mine) if found.step not in wanted]


def remove_step(root: Storage, step: int) -> None:
    """Removes a step: first its manifest, so that at no instant a step exists whose data is partly gone."""
    storage = step_storage(root, step)
    storage.delete([MANIFEST_NAME])
    storage.delete([name for name, _ in storage.list("")])


def sweep_leftovers(root: Storage, catalog: Catalog) -> None:
    """Removes what killed attempts left: steps never committed, strays beside committed ones, half-written records.

    Call only after taking a new incarnation, which fences whoever wrote them. Damaged steps stay as they are.
    """
    committed = {step_name(found.step): f".{found.save_id}." for found in catalog.steps if not found.damage}
    steps = [folder for folder in root.folders() if parse_step_name(folder) is not None]
    doomed = [f"{folder}/{_NOTHING}" for folder in steps if folder not in committed]
    for name, _ in root.list(""):
        folder, _, inside = name.partition("/")
        if folder in committed:
            gone = inside != MANIFEST_NAME and committed[folder] not in inside
        else:
            gone = folder in catalog.unfinished or (name.startswith(_RECORDS) and name.endswith(PARTIAL))
        if gone:
            doomed.append(name)
    root.delete(doomed)


def sweep_failed(root: Storage, step: int) -> None:
    """Removes what a failed attempt left, unless the step is committed after all. Failing here loses nothing: only warns."""
    try:
        names = [name for name, _ in step_storage(root, step).list("")]
        if MANIFEST_NAME not in names:
            step_storage(root, step).delete([*names, _NOTHING])
    except StorageError as err:
        warn_untidy(err)


def warn_untidy(err: StorageError) -> None:
    """What is kept is safe; what could not be removed only takes space."""
    warnings.warn(f"tidying up failed; committed steps are untouched: {err}", stacklevel=4)
