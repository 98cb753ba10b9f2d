"""Pins: small blobs in the run's folder, each of which says that one step stays whatever the rules of retention say."""

from __future__ import annotations

import datetime as dt
import errno

import msgspec

from keepstep.commit.catalog import step_storage
from keepstep.commit.publish import put_note
from keepstep.errors import StepNotFoundError, StorageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, step_name
from keepstep.storage.base import Storage

__all__ = ["PINS", "pin_step", "pinned_steps", "unpin_step"]

PINS = "pins"


def pinned_steps(root: Storage) -> frozenset[int]:
    """The steps that are pinned, whether they are there or not."""
    steps = (parse_step_name(name.rpartition("/")[2]) for name, _ in root.list(PINS))
    return frozenset(step for step in steps if step is not None)


def pin_step(root: Storage, step: int, note: str = "") -> bool:
    """Pins a committed step, durably. False when it was pinned before; then its note is left as it is.

    Raises:
        StepNotFoundError: it is not committed, or was removed just now.
        StorageError: the pin could not be written.
    """
    _check_committed(root, step)
    fields = {"step": step, "note": note, "pinned": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    made = put_note(root, f"{PINS}/{step_name(step)}", msgspec.json.encode(fields) + b"\n")
    try:
        # Retention may have looked for pins just before this one: once more, now that it is there.
        _check_committed(root, step)
    except StepNotFoundError:
        unpin_step(root, step)
        raise
    return made


def unpin_step(root: Storage, step: int) -> bool:
    """Takes the pin away; the step itself stays until retention comes by. False when it was not pinned."""
    pinned = step in pinned_steps(root)
    if pinned:
        root.delete([f"{PINS}/{step_name(step)}"])
    return pinned


def _check_committed(root: Storage, step: int) -> None:
    try:
        step_storage(root, step).open(MANIFEST_NAME).close()
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        raise StepNotFoundError(f"{root.url} has no committed step {step}; nothing was pinned") from err
