"""Which steps exist below a root. A step exists when its manifest is in place; names and pointers prove nothing.

Newest is by (incarnation, step), not by step: after a rollback the new line of steps is the newer one, although its
numbers are smaller.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, replace

from keepstep.commit.aside import QUARANTINE, Note, read_notes
from keepstep.errors import CheckpointError, CorruptError, StorageError
from keepstep.format.manifest import (
    HEAD_BYTES,
    MANIFEST_NAME,
    Head,
    Manifest,
    parse_head,
    parse_manifest,
    parse_step_name,
    promised_files,
    proves_itself,
    step_name,
)
from keepstep.storage.base import Storage, Subfolder, read_blob

__all__ = [
    "MAX_MANIFEST_BYTES",
    "MOST_LOOKS",
    "Catalog",
    "Found",
    "check_files",
    "read_catalog",
    "read_manifest",
    "size_of",
    "step_storage",
]

MAX_MANIFEST_BYTES = 1 << 30
MOST_LOOKS = 5
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Found:
    """A committed step, as its manifest's head tells. ``damage`` is set when not even the head can be read.

    ``parent`` is the step of the same run that its start of the job was restored from, or -1. ``dropped`` names components
    whose files have been let go.
    """

    step: int
    run: str = ""
    incarnation: int = 0
    save_id: str = ""
    created: str = ""
    metrics: dict[str, float | None] | None = None
    damage: str = ""
    parent: int = -1
    dropped: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """What newer means."""
        return self.incarnation, self.step


@dataclass(frozen=True, slots=True)
class Catalog:
    """Committed steps, newest first, and folders that look like steps but were never committed.

    ``aside`` are the notes of damaged steps that were put aside; their folders are not among the unfinished ones.
    """

    steps: tuple[Found, ...]
    unfinished: tuple[str, ...]
    aside: tuple[Note, ...] = ()

    def inventory(self) -> str:
        """What is there, in one line."""
        steps = ", ".join(str(found.step) for found in self.steps[:10]) or "none"
        unfinished = ", ".join(self.unfinished[:10])
        aside = ", ".join(str(note.step) for note in self.aside[:10])
        return (
            f"committed steps: {steps}"
            + (f"; never committed: {unfinished}" if unfinished else "")
            + (f"; damaged and put aside: {aside}" if aside else "")
        )


def step_storage(root: Storage, step: int) -> Storage:
    """The storage of one step below a root."""
    return Subfolder(root, step_name(step))


def read_catalog(root: Storage) -> Catalog:
    """Looks at every folder that has exactly a step's name; nothing is changed.

    One short read a step. The manifest of the newest one is read whole, and proves itself. Where a manifest is missing or
    damaged, all is looked at once more, until two looks agree: a step may have gone between two reads because a newer one
    had come, which is not to be overlooked.
    """
    catalog, sure = _look(root)
    for _ in range(MOST_LOOKS):
        before = catalog
        if sure:
            break
        catalog, sure = _look(root)
        if catalog == before:
            break
    return catalog


def _look(root: Storage) -> tuple[Catalog, bool]:
    """What one look finds, and whether it found a good manifest in every folder."""
    steps = []
    sure = True
    unfinished = []
    folders = sorted(root.folders())
    notes = read_notes(root) if QUARANTINE in folders else ()
    aside = {step_name(note.step) for note in notes}
    for name in folders:
        step = parse_step_name(name)
        if step is None:
            continue
        try:
            head = _read_head(step_storage(root, step), f"{root.url}/{name}")
        except CheckpointError as err:
            steps.append(Found(step, damage=str(err)))
            continue
        if head is None:
            sure = False
            # Empty folders are what is left of an attempt that was cleaned up.
            if name not in aside and [*root.list(name)]:
                unfinished.append(name)
        elif head.step != step:
            steps.append(Found(step, damage=f"{name} holds the manifest of step {head.step}"))
        else:
            steps.append(_found(head))
    steps = _proved(root, steps)
    # Which start of the job a damaged step is from is not known. One with a higher number than the newest good step counts
    # as newer than that, so that it is not passed over in silence.
    incarnation, newest = max((found.order for found in steps if not found.damage), default=(0, 0))
    steps = [replace(f, incarnation=incarnation) if f.damage and f.step > newest else f for f in steps]
    sure = sure and not any(found.damage for found in steps)
    return Catalog(tuple(sorted(steps, key=lambda found: found.order, reverse=True)), tuple(unfinished), notes), sure


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of one step.

    Raises:
        StorageError: it cannot be read; errno ENOENT when there is none.
        CorruptError, FormatError: see ``parse_manifest``.
    """
    return parse_manifest(read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES), f"{storage.url}/{MANIFEST_NAME}")


def check_files(storage: Storage, manifest: Manifest) -> None:
    """Proves that every file the manifest names is there in its full size, and that they can hold every tensor.

    Reads no contents.

    Raises:
        CorruptError: lists every file that is missing or has another size; see also ``promised_files``.
    """
    there = dict(storage.list(""))
    problems = []
    for name, expected in promised_files(manifest).items():
        size = there.get(name)
        if size != expected:
            # A listing may be old where files are shared; what is opened is not.
            size = size_of(storage, name, expected)
        if size is None:
            problems.append(f"{name} is missing")
        elif size != expected:
            problems.append(f"{name} has {size:,} bytes; {expected:,} were written")
    if problems:
        raise CorruptError(f"{storage.url}: step {manifest.step} is damaged: " + "; ".join(problems[:8]))


def size_of(storage: Storage, name: str, expected: int | None = None) -> int | None:
    """The size of a file by opening it, or None; waits for it, and for ``expected``, as long as the storage may be late."""
    end = time.monotonic() + storage.late_s
    while True:
        size = None
        try:
            with storage.open(name) as blob:
                size = blob.size_bytes
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
        if (size is not None and expected in (None, size)) or time.monotonic() >= end:
            return size
        time.sleep(LOOK_S)


def _found(head: Head) -> Found:
    lineage = head.lineage
    parent = lineage.parent.step if lineage.parent is not None and lineage.parent.run == lineage.run else -1
    return Found(
        head.step,
        lineage.run,
        lineage.incarnation,
        head.save_id,
        head.created,
        dict(head.metrics),
        parent=parent,
        dropped=head.dropped,
    )


def _proved(root: Storage, steps: list[Found]) -> list[Found]:
    """The same steps, but damaged those among them whose flipped bits would decide which one is the newest.

    A head alone proves nothing. The step that is the newest by it has to; so do those with a higher number, which would
    be the newest, were it not for the incarnation in their heads.
    """
    found = {one.step: one for one in steps}
    checked: set[int] = set()
    while True:
        good = [one for one in found.values() if not one.damage]
        newest = max((one.order for one in good), default=(0, 0))
        doubted = [one for one in good if one.step not in checked and (one.order == newest or one.step > newest[1])]
        if not doubted:
            return list(found.values())
        for one in doubted:
            checked.add(one.step)
            name = f"{step_name(one.step)}/{MANIFEST_NAME}"
            try:
                proved = proves_itself(read_blob(root, name, MAX_MANIFEST_BYTES))
            except CheckpointError as err:
                # (Retention may have taken it since its head was read.)
                if not isinstance(err, StorageError) or err.errno != errno.ENOENT:
                    found[one.step] = Found(one.step, damage=str(err))
                continue
            if not proved:
                found[one.step] = Found(
                    one.step, damage=f"{root.url}/{name}: the manifest does not match its own digest"
                )


def _read_head(storage: Storage, name: str, *, again: bool = True) -> Head | None:
    try:
        with storage.open(MANIFEST_NAME) as blob:
            raw = bytearray(min(HEAD_BYTES, blob.size_bytes))
            if raw:
                blob.read_into(0, memoryview(raw))
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        if MANIFEST_NAME not in dict(storage.list("")):
            return None
        # What is listed is there, although a view that lags behind does not open it: it was never an unfinished attempt,
        # which may be swept. Unless it came between the two looks.
        if again:
            size_of(storage, MANIFEST_NAME)
            return _read_head(storage, name, again=False)
        raise CorruptError(f"{name}/{MANIFEST_NAME} is listed, and cannot be opened: {err}") from err
    return parse_head(bytes(raw), f"{name}/{MANIFEST_NAME}")
