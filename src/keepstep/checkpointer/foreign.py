"""Who shows as a step what another program has put where a manifest should be.

Nothing of that is imported for a step of keepstep's own.
"""

from __future__ import annotations

from keepstep.commit.catalog import MAX_MANIFEST_BYTES
from keepstep.foreign.kinds import SAFETENSORS
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.ranks import Ranks
from keepstep.storage.base import Storage, read_blob

__all__ = ["show_foreign", "show_to_all"]


def show_foreign(storage: Storage, raw: bytes, registry: object = None) -> tuple[Storage, bytes]:
    """The folder as a step, and the manifest of that. ``registry`` is torch's, of extensions, where there are others.

    Raises:
        UnsafeValueError, CorruptError: it holds what is not plain, or is damaged; see ``keepstep.foreign``.
    """
    shown: Storage
    if raw.startswith(SAFETENSORS):
        from keepstep.foreign.safetensors.step import show_folder

        shown = show_folder(storage)
    else:
        from keepstep.foreign.dcp.step import show_directory

        shown = show_directory(storage, raw, registry=registry)
    return shown, read_blob(shown, MANIFEST_NAME, MAX_MANIFEST_BYTES)


def show_to_all(ranks: Ranks, storage: Storage, raw: bytes, deadline_s: float) -> tuple[Storage, bytes]:
    """The same on every rank, each of which has ``raw``. Collective."""
    with ranks.phase("show as a step", deadline_s) as phase:
        shown = show_foreign(storage, raw)
        phase.broadcast(b"" if phase.gather(b"") is not None else None)
    return shown
