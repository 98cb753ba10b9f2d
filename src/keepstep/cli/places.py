"""What a path on the command line is: one step, the root of a run, or neither; and what to say when it is the other."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.cli.words import plural, safe
from keepstep.errors import StepNotFoundError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name
from keepstep.storage.local import LocalStorage

__all__ = ["folder_at", "is_step", "root_at", "step_at"]

SHOWN = 3


def folder_at(path: str) -> LocalStorage:
    """The folder at a path.

    Raises:
        UsageError: a URL, nothing at all, or a file.
        StepNotFoundError: there is nothing at that path.
    """
    if not path or "://" in path:
        raise UsageError(f"{path!r} is not a path; this version looks at folders of a file system only")
    storage = LocalStorage(path)
    if not storage.root.exists():
        above = next(parent for parent in storage.root.parents if parent.exists())
        raise StepNotFoundError(f"there is nothing at {storage.url}; the path exists as far as {above}")
    return storage


def is_step(storage: LocalStorage) -> bool:
    """Whether this is the folder of one step, committed or not."""
    root = storage.root
    return (root / MANIFEST_NAME).exists() or (parse_step_name(root.name) is not None and not _steps_below(root))


def step_at(path: str) -> LocalStorage:
    """The folder of a committed step.

    Raises:
        UsageError: it is a root; names steps below it.
        StepNotFoundError: no step is committed there; says what is there instead.
    """
    storage = folder_at(path)
    root = storage.root
    if (root / MANIFEST_NAME).exists():
        return storage
    below = _steps_below(root)
    if parse_step_name(root.name) is not None and not below:
        left = plural(sum(1 for _ in storage.list("")), "file")
        raise StepNotFoundError(f"{storage.url} was never committed: {left} of an attempt, and no {MANIFEST_NAME}")
    if below:
        raise UsageError(
            f"{storage.url} is not a step but holds {plural(len(below), 'step')}; name one, such as"
            f" {os.path.join(path, below[-1])}"  # noqa: PTH118  as the user wrote it
        )
    raise StepNotFoundError(f"{storage.url} is not a step: there is no {MANIFEST_NAME} in it, and no step below it")


def root_at(path: str) -> LocalStorage:
    """The root of a run, which may have no step yet.

    Raises:
        UsageError: it is one step; names its root.
        StepNotFoundError: there is nothing at that path, or steps under names that no run gives.
    """
    storage = folder_at(path)
    if is_step(storage):
        raise UsageError(f"{storage.url} is one step, not the root of a run; its root is {storage.root.parent}")
    below = _steps_below(storage.root)
    if below and not any(parse_step_name(name) is not None for name in below):
        named = ", ".join(safe(name) for name in below[:SHOWN])
        raise StepNotFoundError(
            f"{storage.url} is not the root of a run; steps were saved there under names of their own: {named}."
            " Look at each with `keepstep show`"
        )
    return storage


def _steps_below(root: Path) -> list[str]:
    """Folders directly below that hold a manifest."""
    return sorted(item.name for item in root.iterdir() if item.is_dir() and (item / MANIFEST_NAME).exists())
