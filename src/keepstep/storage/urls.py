"""What a URL of a storage says, and how it is shown: never with a password, a token or anything else behind a ``?``."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from keepstep.errors import UsageError

__all__ = ["OBJECT_STORES", "RemoteUrl", "parse_url", "without_secrets"]

OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""Schemes whose authority is a bucket, and the kind of store behind each."""


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """``given`` is the URL as it was passed, ``shown`` what a message may have of it.

    ``bucket`` is the authority: a bucket, a host; ``folder`` what follows, without slashes at either end.
    """

    given: str
    shown: str
    scheme: str
    bucket: str
    folder: str

    @property
    def is_plain(self) -> bool:
        """Whether ``shown`` says everything, so that another process can open the same place by it."""
        return self.given.rstrip("/") == self.shown


def parse_url(text: str) -> RemoteUrl:
    """Takes a URL apart.

    Raises:
        UsageError: no scheme or bucket, a folder that leaves the root, or, for an object store, credentials or options in
            the URL. What it says of the URL is without them.
    """
    scheme, found, rest = text.partition("://")
    scheme = scheme.lower()
    if not found or not scheme:
        raise UsageError(f"{rest or scheme!r} is not a URL: scheme://bucket/folder")
    authority, _, path = rest.partition("/")
    host = authority.rpartition("@")[2]
    # In an object store a name may contain a question mark; in the folder of a run it would be a mistake all the same.
    folder, query, _ = path.partition("?")
    folder = folder.strip("/")
    shown = f"{scheme}://{host}/{folder}".rstrip("/") if folder else f"{scheme}://{host}"
    problems = []
    if scheme in OBJECT_STORES:
        if not host:
            problems.append("it names no bucket")
        if authority != host:
            problems.append("credentials do not belong in a URL; give them in the environment, or to RemoteStorage")
        if query:
            problems.append("options do not belong in a URL; give them in the environment, or to RemoteStorage")
    if any(part in ("", ".", "..") for part in folder.split("/")) and folder:
        problems.append("the folder has an empty segment, '.' or '..'")
    if problems:
        raise UsageError(f"{shown} cannot be used: " + "; ".join(problems))
    return RemoteUrl(text, shown, scheme, host, folder)


def without_secrets(text: str) -> str:
    """The text with every URL in it cut down to scheme, host and path."""
    return " ".join(_bare(word) if "://" in word else word for word in text.split())


def _bare(word: str) -> str:
    try:
        parts = urlsplit(word)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        return "(a URL)"
