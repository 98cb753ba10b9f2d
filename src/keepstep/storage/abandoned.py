"""Uploads in parts that were begun in a bucket and never ended: what a process leaves that is killed while it sends.

No listing of objects shows them, and they are paid for. obstore can neither list nor end them, so this goes through
botocore, which comes with boto3, with s3fs and with AWS's command line. Other stores forget such parts by themselves, or by
a rule.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from keepstep.errors import StorageError
from keepstep.storage.client import known_trouble
from keepstep.storage.urls import OBJECT_STORES, parse_url, without_secrets

__all__ = ["Abandoned", "abort_uploads", "list_uploads", "why_unseen"]

TRIES = 5
CONNECT_S = 10
REQUEST_S = 60


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An upload that was begun: the name below the URL, its id, when (seconds since 1970, by the store's clock)."""

    name: str
    upload: str
    began: float


def why_unseen(url: str) -> str:
    """Why such uploads cannot be listed there, and what to do instead; empty where they can, or where there are none."""
    kind = OBJECT_STORES.get(parse_url(url).scheme, "")
    rule = "set the bucket's rule that aborts unfinished uploads after some days"
    if kind == "gcs":
        return f"unfinished uploads cannot be listed in Google Cloud Storage from here: {rule}"
    if kind == "s3":
        try:
            import_module("botocore.session")
        except ImportError:
            return f"unfinished uploads cannot be listed without botocore: pip install boto3, or {rule}"
    return ""


def list_uploads(url: str) -> tuple[Abandoned, ...]:
    """All uploads below a URL that were begun and have not ended; those of jobs that are alive are among them.

    Raises:
        StorageError: the store refused.
    """
    parsed = parse_url(url)
    if OBJECT_STORES.get(parsed.scheme) != "s3" or why_unseen(url):
        return ()
    below = f"{parsed.folder}/" if parsed.folder else ""
    return tuple(_listed(_s3(), parsed.bucket, below, url))


def abort_uploads(url: str, uploads: Sequence[Abandoned]) -> None:
    """Ends them: their parts are gone. One that has ended meanwhile is no error, and its object stays.

    Raises:
        StorageError: the store refused.
    """
    parsed = parse_url(url)
    store = _s3()
    for one in uploads:
        key = f"{parsed.folder}/{one.name}" if parsed.folder else one.name
        try:
            store.abort_multipart_upload(Bucket=parsed.bucket, Key=key, UploadId=one.upload)
        except _errors() as err:
            if _code(err) != "NoSuchUpload":
                raise _explained("abort upload", f"{url}/{one.name}", err) from err


def _listed(store: Any, bucket: str, below: str, url: str) -> Iterator[Abandoned]:
    try:
        for page in store.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=below):
            for each in page.get("Uploads") or ():
                # (Not every server goes by the prefix.)
                if each["Key"].startswith(below):
                    yield Abandoned(each["Key"][len(below) :], each["UploadId"], each["Initiated"].timestamp())
    except _errors() as err:
        raise _explained("list uploads", url, err) from err


def _s3() -> Any:
    """Endpoint, region and keys come from where AWS's tools look for them."""
    # Addressed by path, as obstore does it: a store at an address of its own seldom has a name for each bucket.
    config = import_module("botocore.config").Config(
        s3={"addressing_style": "path"},
        connect_timeout=CONNECT_S,
        read_timeout=REQUEST_S,
        retries={"total_max_attempts": TRIES, "mode": "standard"},
    )
    return import_module("botocore.session").get_session().create_client("s3", config=config)


def _errors() -> tuple[type[Exception], ...]:
    found = import_module("botocore.exceptions")
    return (found.BotoCoreError, found.ClientError, OSError)


def _code(error: Exception) -> str:
    told: dict[str, Any] = getattr(error, "response", None) or {}
    return str((told.get("Error") or {}).get("Code", ""))


def _explained(operation: str, place: str, error: Exception) -> StorageError:
    told: dict[str, Any] = getattr(error, "response", None) or {}
    status = int((told.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    known = known_trouble(_code(error), status)
    if known is not None:
        return StorageError(operation, place, OSError(known.errno, known.text))
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return StorageError(operation, place, OSError(errno.EACCES, "no credentials were found"))
    said = f"the store answered {status} {_code(error)}" if status else without_secrets(str(error))
    return StorageError(operation, place, OSError(errno.EIO, said))
