"""What the coordinator needs to commit a step, and which old steps may go after that."""

from __future__ import annotations

import msgspec

from keepstep.commit.catalog import read_catalog
from keepstep.commit.retention import Keep, remove_step, to_remove
from keepstep.format.manifest import Manifest
from keepstep.storage.base import Storage

__all__ = ["Order", "tidy"]


class Order(msgspec.Struct, frozen=True):
    """An attempt to be committed: what ``commit_step`` and ``tidy`` need besides receipts.

    ``manifest`` is complete but for its files. ``leftovers`` are names that were in the step's folder before this attempt.
    ``in_run`` says that the step lies in a run's folder, where ``keep`` rules and ``protect`` lists steps that stay.
    """

    manifest: Manifest
    replace: bool = False
    leftovers: tuple[str, ...] = ()
    in_run: bool = False
    keep: Keep | None = None
    protect: tuple[int, ...] = ()


def tidy(root: Storage, order: Order, manifest: Manifest) -> None:
    """After a commit: lets old steps go. Failing here loses nothing.

    Raises:
        StorageError: something could not be removed; committed steps that stay are untouched.
    """
    catalog = read_catalog(root)
    for step in to_remove(catalog, order.keep or Keep(last=None), run=manifest.lineage.run, protect={*order.protect}):
        remove_step(root, step)
