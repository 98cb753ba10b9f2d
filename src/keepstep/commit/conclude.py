"""What the coordinator needs to commit a step, and which old steps may go after that."""

from __future__ import annotations

import errno
import logging

import msgspec

from keepstep.commit.catalog import read_catalog
from keepstep.commit.pins import pinned_steps
from keepstep.commit.publish import is_overtaken
from keepstep.commit.retention import Fate, Keep, for_space, judge, make_room, remove_step
from keepstep.commit.uploads import unsent_steps
from keepstep.commit.weights import drop_optimizers, droppable
from keepstep.errors import StorageError
from keepstep.failpoints import reach
from keepstep.format.manifest import MANIFEST_NAME, Manifest, step_name
from keepstep.storage.base import Storage

__all__ = ["Order", "tidy"]

ROOM = 1.25
"""How many times the last step there is to be room for, before steps are kept only because they were not copied yet."""
_log = logging.getLogger("keepstep")


class Order(msgspec.Struct, frozen=True):
    """An attempt to be committed: what ``commit_step`` and ``tidy`` need besides receipts.

    ``manifest`` is complete but for its files. ``leftovers`` are names that were in the step's folder before this attempt.
    ``in_run`` says that the step lies in a run's folder, where ``keep`` rules and ``protect`` lists steps that stay.
    ``upload`` are the rules of another root, to which steps are copied: those it wants stay until they are there.
    """

    manifest: Manifest
    replace: bool = False
    leftovers: tuple[str, ...] = ()
    in_run: bool = False
    keep: Keep | None = None
    protect: tuple[int, ...] = ()
    upload: Keep | None = None


def tidy(root: Storage, order: Order, manifest: Manifest) -> None:
    """After a commit: lets old steps go, or their optimizers. Failing here loses nothing.

    A start of the job that another one has followed lets nothing go: what that one has resumed from is not known here.

    Raises:
        CorruptError: an old step that was to lose its optimizer is damaged; it stays as it is.
        StorageError: something could not be removed, or more space was wanted than could be made; committed steps that
            stay are untouched.
    """
    reach("tidy")
    keep = order.keep
    if keep is None or is_overtaken(root, manifest.lineage.incarnation):
        return
    catalog, pinned = read_catalog(root), pinned_steps(root)
    if (manifest.step, manifest.save_id) not in {(found.step, found.save_id) for found in catalog.steps}:
        # Whatever the storage said as it took the manifest: without that step, the ones before it are all there is.
        lost = FileNotFoundError(errno.ENOENT, "the step just committed is not there; nothing was removed")
        raise StorageError("find", f"{step_name(manifest.step)}/{MANIFEST_NAME}", lost)
    fates = judge(catalog, keep, run=manifest.lineage.run, resumed={*order.protect}, pinned=pinned | {manifest.step})
    unsent = frozenset[int]() if order.upload is None else unsent_steps(root, catalog, order.upload, pinned)
    for fate in reversed(fates):
        if fate.found.step in unsent:
            continue
        if fate.goes:
            remove_step(root, fate.found, manifest.lineage.incarnation)
        elif fate.strip and droppable(manifest):
            # (A state without an optimizer has nothing to drop: no old manifest has to be read to see that.)
            drop_optimizers(root, fate.found.step, manifest.lineage.incarnation)
    if unsent:
        _make_room_of_unsent(root, [fate for fate in reversed(fates) if fate.found.step in unsent], keep, manifest)
    if keep.min_free_bytes:
        free = make_room(root, for_space(fates), keep.min_free_bytes, manifest.lineage.incarnation)
        if free is not None and free < keep.min_free_bytes:
            text = f"{free:,} bytes are free, {keep.min_free_bytes:,} are wanted, and no more steps may go for that"
            raise StorageError("make room", root.url, OSError(errno.ENOSPC, text))


def _make_room_of_unsent(root: Storage, fates: list[Fate], keep: Keep, manifest: Manifest) -> None:
    """Where the next save would not fit: training matters more than copies of old steps, so the oldest of them go."""
    needed = max(keep.min_free_bytes, int(ROOM * manifest.total_bytes))
    for fate in fates:
        free = root.free_bytes()
        if free is None or free >= needed:
            return
        if fate.goes:
            _log.warning(
                "%s: step %d is removed although it was not copied yet: %s bytes are free, and the next save needs %s",
                root.url,
                fate.found.step,
                f"{free:,}",
                f"{needed:,}",
            )
            remove_step(root, fate.found, manifest.lineage.incarnation)
