"""What a path or URL on the command line is: one step, the root of a run, or neither; and what to say to the other."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from keepstep.cli.words import plural, safe
from keepstep.errors import CheckpointError, StepNotFoundError, StorageError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage, storage_of
from keepstep.storage.urls import parse_url

__all__ = [
    "check_there",
    "folder_at",
    "has_blob",
    "is_step",
    "name_of",
    "near_steps",
    "parent_of",
    "place_above",
    "root_at",
    "shown_place",
    "step_at",
]

SHOWN = 3
MOST_COMPARED = 5000


def folder_at(path: str) -> Storage:
    """The folder at a path or URL. Of a bucket nothing is asked yet: there are no folders in it.

    Raises:
        UsageError: nothing at all, a file, or a URL that cannot be reached from here.
        StepNotFoundError: there is nothing at that path.
    """
    storage = storage_of(path)
    if isinstance(storage, LocalStorage) and not storage.root.exists():
        above = next(parent for parent in storage.root.parents if parent.exists())
        hint = near_steps(storage) or _near_names(storage.root, above)
        raise StepNotFoundError(f"there is nothing at {storage.url}; the path exists as far as {above}{hint}")
    return storage


def is_step(storage: Storage) -> bool:
    """Whether this is the folder of one step, committed or not."""
    return has_blob(storage, MANIFEST_NAME) or (
        parse_step_name(name_of(storage)) is not None and next(_steps_below(storage), None) is None
    )


def step_at(path: str) -> Storage:
    """The folder of a committed step.

    Raises:
        UsageError: it is a root; names steps below it.
        StepNotFoundError: no step is committed there; says what is there instead.
    """
    storage = folder_at(path)
    if has_blob(storage, MANIFEST_NAME):
        return storage
    below = sorted(_steps_below(storage))
    if below:
        raise UsageError(
            f"{storage.url} is not a step but holds {plural(len(below), 'step')}; name one, such as"
            f" {os.path.join(path, below[-1])}"  # noqa: PTH118  as the user wrote it
        )
    check_there(storage)
    if parse_step_name(name_of(storage)) is not None:
        files = plural(sum(1 for _ in storage.list("")), "file")
        raise StepNotFoundError(f"{storage.url} was never committed: {files} of an attempt, and no {MANIFEST_NAME}")
    raise StepNotFoundError(f"{storage.url} is not a step: there is no {MANIFEST_NAME} in it, and no step below it")


def root_at(path: str) -> Storage:
    """The root of a run, which may have no step yet.

    Raises:
        UsageError: it is one step; names its root.
        StepNotFoundError: there is nothing at that path, or steps under names that no run gives.
    """
    storage = folder_at(path)
    if is_step(storage):
        check_there(storage)
        raise UsageError(f"{storage.url} is one step, not the root of a run; its root is {place_above(storage.url)[0]}")
    # (Those with a step's name come first: of a run, one look is enough.)
    below = _steps_below(storage)
    first = next(below, None)
    if first is None:
        check_there(storage)
    elif parse_step_name(first) is None:
        named = ", ".join(safe(name) for name in sorted([first, *below])[:SHOWN])
        raise StepNotFoundError(
            f"{storage.url} is not the root of a run; steps were saved there under names of their own: {named}."
            " Look at each with `keepstep show`"
        )
    return storage


def name_of(storage: Storage) -> str:
    """The last part of a path or URL."""
    return storage.url.rstrip("/").rpartition("/")[2]


def parent_of(storage: Storage) -> Storage:
    """The folder that this one lies in."""
    return storage_of(place_above(storage.url)[0])


def place_above(path: str) -> tuple[str, str]:
    """The folder that a path or URL lies in, and its name in there. Neither has to be there.

    Raises:
        UsageError: a bucket, which lies in nothing.
    """
    if "://" not in path:
        absolute = Path(path).absolute()
        return str(absolute.parent), absolute.name
    url = parse_url(path)
    if not url.folder:
        raise UsageError(f"{url.shown} is no folder: it lies in none")
    above, _, name = url.shown.rpartition("/")
    return above, name


def shown_place(path: str) -> str:
    """A path or URL as everybody else writes it who has opened it.

    Raises:
        UsageError: nothing at all, or a URL that cannot be used.
    """
    return parse_url(path).shown if "://" in path and not path.startswith("file://") else storage_of(path).url


def has_blob(storage: Storage, name: str) -> bool:
    """Whether a blob is there, readable or not.

    Raises:
        StorageError: a store that is far away does not say.
    """
    try:
        storage.open(name).close()
    except StorageError as err:
        if err.errno != errno.ENOENT and not isinstance(storage, LocalStorage):
            raise
        return err.errno != errno.ENOENT
    return True


def _steps_below(storage: Storage) -> Iterator[str]:
    """Folders directly below that hold a manifest; those with the name of a step first, the newest at their head."""
    for name in sorted(storage.folders(), key=lambda each: (parse_step_name(each) is not None, each), reverse=True):
        if has_blob(storage, f"{name}/{MANIFEST_NAME}"):
            yield name


def check_there(storage: Storage) -> None:
    """Where there are no folders, a place is there when something is below it.

    Raises:
        StepNotFoundError: there is nothing.
    """
    if not isinstance(storage, LocalStorage) and next(iter(storage.list("")), None) is None:
        raise StepNotFoundError(f"there is nothing at {storage.url}{near_steps(storage)}")


def _near_names(path: Path, above: Path) -> str:
    """Words about what is called nearly so, where the path is wrong for the first time."""
    try:
        there = sorted(each.name for each in above.iterdir())
    except OSError:
        return ""
    close = get_close_matches(path.relative_to(above).parts[0], there[:MOST_COMPARED], n=SHOWN, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(safe(str(above / name))) for name in close)}?" if close else ""


def near_steps(storage: Storage) -> str:
    """Words about the steps beside a place where there is none, by their numbers; empty where nothing is known of any."""
    name = name_of(storage)
    wanted = parse_step_name(name)
    if wanted is None and name.isdigit():
        wanted = int(name)
    try:
        names = [each for each in parent_of(storage).folders() if parse_step_name(each) is not None]
    except (CheckpointError, OSError):
        # A hint and no more: the error is that nothing is there.
        return ""
    if wanted is None or not names:
        return ""
    nearest = sorted(names, key=lambda each: (abs((parse_step_name(each) or 0) - wanted), each))[:SHOWN]
    return f"; the steps beside it: {', '.join(sorted(nearest))}{', …' if len(names) > SHOWN else ''}"
