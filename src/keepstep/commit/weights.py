"""Steps that are kept for their weights: their optimizers' files go, and the manifest says so before they do."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from keepstep.commit.catalog import read_manifest, step_storage
from keepstep.commit.publish import is_overtaken
from keepstep.format.manifest import FORMAT_MAJOR, MANIFEST_NAME, STATE_FOLDER, Manifest, pack_manifest
from keepstep.storage.base import Storage

__all__ = ["drop_optimizers", "droppable", "left_behind", "stripped"]

DROPPED_MINOR = 1
"""The minor version of a manifest that names dropped components: what is older takes their tensors for lost."""


def droppable(manifest: Manifest) -> tuple[str, ...]:
    """The optimizers whose files hold nothing that another component needs."""
    found = []
    for name, part in manifest.components.items():
        if part.kind != "optimizer" or part.folder != name or name == STATE_FOLDER or name not in manifest.files:
            continue
        inside = {spec.key for spec in manifest.tensors if spec.folder == name}
        strangers = any(not key.startswith(f"{name}/") for key in inside)
        # Tied tensors are stored once, under the first of their keys.
        needed = any(stored in inside and not key.startswith(f"{name}/") for key, stored in manifest.aliases.items())
        if not strangers and not needed:
            found.append(name)
    return tuple(found)


def stripped(manifest: Manifest, names: tuple[str, ...]) -> Manifest:
    """The manifest without the files of these components. Pure.

    The fingerprint goes as well: it stood for the structure with them.
    """
    gone = {spec.key for spec in manifest.tensors if spec.folder in names}
    return msgspec.structs.replace(
        manifest,
        format=(FORMAT_MAJOR, max(manifest.format[1], DROPPED_MINOR)),
        dropped=(*manifest.dropped, *names),
        fingerprint="",
        tensors=tuple(spec for spec in manifest.tensors if spec.key not in gone),
        aliases={key: stored for key, stored in manifest.aliases.items() if stored not in gone},
        files={folder: records for folder, records in manifest.files.items() if folder not in names},
    )


def drop_optimizers(root: Storage, step: int, incarnation: int) -> tuple[str, ...]:
    """Lets the files of a step's optimizers go; the rest of it stays whole at every instant. Returns what went.

    Call only where nobody else of this start of the job, ``incarnation``, removes or replaces this step meanwhile. Nothing
    happens when a later one has begun.

    Raises:
        CorruptError: the manifest is damaged; nothing was changed.
        StorageError: something could not be written or removed. The step is whole, with its optimizers or without.
    """
    storage = step_storage(root, step)
    manifest = read_manifest(storage)
    names = droppable(manifest)
    if is_overtaken(root, incarnation):
        return ()
    if names:
        # First the promise, in one atomic operation, then what it was about.
        storage.put(MANIFEST_NAME, pack_manifest(stripped(manifest, names)))
    storage.delete(list(left_behind(root, step)))
    return names


def left_behind(root: Storage, step: int) -> Iterator[str]:
    """Files of dropped components that are still there, by their names in the step: a deletion that was interrupted.

    Goes by the whole manifest, which proves itself, and not by its head.
    """
    storage = step_storage(root, step)
    manifest = read_manifest(storage)
    for folder in manifest.dropped:
        for name, _ in storage.list(folder):
            if manifest.save_id in name:
                yield name
