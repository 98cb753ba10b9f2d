"""What another program has put where a manifest should be, and who shows it as a step.

Nothing of that is imported for a step of keepstep's own.
"""

from __future__ import annotations

import re

from keepstep.errors import StepNotFoundError
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.ranks import Ranks
from keepstep.storage.base import Storage, read_blob

__all__ = ["FOREIGN", "find_foreign", "show_foreign", "show_to_all"]

FOREIGN = b"\x80"
"""How a pickle begins: the metadata of a directory of torch's DCP has the name of a manifest."""
SAFETENSORS = FOREIGN + b"safetensors"
"""Stands for a folder of safetensors, which has no such file. (No pickle begins so.)"""
MAX_MANIFEST_BYTES = 1 << 30
_RANK_FILE = re.compile(r"__\d+\.metadata")


def find_foreign(storage: Storage) -> bytes:
    """What stands for a manifest where there is none: nothing, unless another program's files are there.

    Raises:
        StepNotFoundError: there are several checkpoints in one folder, each of one rank.
    """
    for name, _ in storage.list(""):
        if _RANK_FILE.fullmatch(name):
            raise StepNotFoundError(
                f"{storage.url}: no committed step; every rank has saved a checkpoint of its own there with torch's DCP"
                f" (use_collectives=False; {name} is one). dcp.load(storage_reader=keepstep.interop.dcp.Reader(path)) gives"
                " each rank its own"
            )
        if (name.endswith(".safetensors") and "/" not in name) or name.startswith("snapshots/"):
            return SAFETENSORS
    return b""


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
