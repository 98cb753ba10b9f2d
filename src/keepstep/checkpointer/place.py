"""Where a call reads and writes: a path or a Storage, made into a Storage."""

from __future__ import annotations

import os

from keepstep.errors import UsageError
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage

__all__ = ["Place", "storage_of"]

Place = str | os.PathLike[str] | Storage


def storage_of(place: Place) -> Storage:
    """The storage for a path or URL; a Storage is taken as it is.

    Raises:
        UsageError: a URL whose scheme is not supported, an empty path, or a path that is a file.
    """
    if isinstance(place, Storage):
        return place
    text = os.fspath(place)
    if not text or "://" in text:
        raise UsageError(f"{text!r} is not a path; pass a local path or a Storage")
    return LocalStorage(text)
