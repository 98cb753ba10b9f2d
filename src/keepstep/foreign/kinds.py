"""Which program has left a checkpoint in a folder, by the names there, and by which bytes it is known. Imports no torch."""

from __future__ import annotations

import re

from keepstep.errors import StepNotFoundError
from keepstep.storage.base import Storage

__all__ = ["ARCHIVE", "FOREIGN", "SAFETENSORS", "TORCH_NOTES", "find_foreign"]

FOREIGN = b"\x80"
"""How a pickle begins: the metadata of a directory of torch's DCP has the name of a manifest."""
SAFETENSORS = FOREIGN + b"safetensors"
"""Stands for a folder of safetensors, which has no such file. (No pickle begins so.)"""
ARCHIVE = b"PK\x03\x04"
"""How what ``torch.save`` wrote begins: it is a zip archive."""
TORCH_NOTES = "torch.distributed.checkpoint"
"""The field of a manifest's ``config`` for what a step that torch planned has to remember of torch's names."""
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
