"""S3, Google Cloud Storage and Azure through ``obstore``, which does its work outside of Python's lock.

Options, credentials and endpoints come from where each vendor's tools look for them in the environment, and are renewed by
the library. Nothing here reads the environment itself.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from http.client import HTTPException
from importlib import import_module
from typing import Any, ClassVar

from keepstep.errors import StorageError, UsageError
from keepstep.storage.client import Client, Opened, check_full, known_trouble
from keepstep.storage.ranged import RefusedError, SignedReader
from keepstep.storage.retry import Patience, Trouble
from keepstep.storage.urls import OBJECT_STORES, RemoteUrl, without_secrets

__all__ = ["ObstoreClient"]

PARTS_AT_ONCE = 8
CONNECT_S = 10
SIGNED_FOR = timedelta(minutes=15)
_STORES = {"s3": "S3Store", "gcs": "GCSStore", "azure": "AzureStore"}
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})\b")
_BROKEN = re.compile(
    r"error sending request|connection|timed out|timeout|broken pipe|reset by peer|decoding response body|unexpected eof"
    r"|end of file|incomplete|body error|request or response body|got invalid [\w ]*response",
    re.IGNORECASE,
)
_NO_CONDITION = re.compile(
    r"status code: 501\b|status: 501\b|NotImplemented|not implemented|(?:ETag|Version) required", re.I
)
_NO_KEYS = re.compile(r"169\.254\.169\.254|metadata\.google|credentials? (?:not|provider)|InstanceCredential", re.I)


class ObstoreClient(Client):
    """A folder of a bucket.

    Two stores are behind it: one that never tries again, and one that does, for streams, whose parts come only once.

    Args:
        url: of an object store.
        options: as the library's store takes them: ``endpoint``, ``region``, ``credential_provider`` …
        patience: of the stream's requests; every other request is tried once.

    Raises:
        ImportError: the library is not installed.
        UsageError: options it does not know, or that contradict each other.
    """

    library = "obstore"
    _first_in: ClassVar[dict[str, int]] = {}

    def __init__(self, url: RemoteUrl, options: Mapping[str, Any], patience: Patience) -> None:
        self._obstore = import_module("obstore")
        self._url = url
        self.check_process()
        stores = import_module("obstore.store")
        errors = import_module("obstore.exceptions")
        self.errors = (errors.BaseError, OSError, ValueError, HTTPException)
        self._taken: type[Exception] = errors.AlreadyExistsError
        self._request_s = patience.request_s
        self._renews = "credential_provider" in options
        self._signed: SignedReader | None = None
        make = getattr(stores, _STORES[OBJECT_STORES[url.scheme]])
        # As settings, not as ``client_options``: those would replace what the environment says of the connection.
        manner = {"timeout": f"{patience.request_s:g}s", "connect_timeout": f"{CONNECT_S}s"}
        backoff = {
            "init_backoff": timedelta(seconds=patience.first_wait_s),
            "max_backoff": timedelta(seconds=patience.longest_wait_s),
            "base": 2,
        }
        try:
            self._once, self._stubborn = (
                make(
                    url.bucket,
                    prefix=url.folder or None,
                    retry_config={
                        "max_retries": tries,
                        "retry_timeout": timedelta(seconds=patience.total_s),
                        "backoff": backoff,
                    },
                    **{**manner, **options},
                )
                for tries in (0, max(0, patience.tries - 1))
            )
        except (errors.BaseError, TypeError, ValueError) as err:
            raise UsageError(f"{url.shown}: {without_secrets(str(err).partition('Debug source')[0])}") from err

    def check_process(self) -> None:
        """See Client."""
        # The library's threads do not come along into a child that is forked: what that asks for is never answered.
        if self._first_in.setdefault("process", os.getpid()) != os.getpid():
            raise UsageError(
                f"{self._url.shown}: this process was forked from one that has used an object store, whose threads it has"
                " not got: start it anew (multiprocessing's 'spawn'), or use the store in one of the two only"
            )

    def write(self, name: str, data: bytes | memoryview, *, new: bool = False) -> None:
        """See Client."""
        try:
            self._obstore.put(self._once, name, data, mode="create" if new else "overwrite", use_multipart=False)
        except self._taken as err:
            raise FileExistsError(errno.EEXIST, "the name is taken") from err

    def write_over(self, name: str, data: bytes, opened: Opened) -> None:
        """See Client."""
        told = {"e_tag": opened.version, "version": opened.generation}
        version = {key: value for key, value in told.items() if value}
        try:
            self._obstore.put(self._once, name, data, mode=version, use_multipart=False)
        except FileNotFoundError as err:
            self._check_bucket(err)
            raise FileExistsError(errno.EEXIST, "the object is gone") from err
        except self.errors as err:
            if _is_replaced(err):
                raise FileExistsError(errno.EEXIST, "the object is another one by now") from err
            if _NO_CONDITION.search(str(err)):
                raise NotImplementedError("the store replaces an object whatever it is") from err
            raise

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """See Client. The parts are asked for on this thread; those on their way are the library's memory."""
        put: Callable[..., object] = self._obstore.put
        put(self._stubborn, name, parts, use_multipart=True, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)

    def open(self, name: str, first_bytes: int) -> Opened:
        """See Client. One request, or two where a server refuses a range that goes beyond the end."""
        if self._signed is not None:
            return self._signed.open(name, first_bytes)
        try:
            found = self._obstore.get(self._once, name, options={"range": (0, first_bytes)})
        except self.errors as err:
            if _is_whole(err):
                # Either it sends the whole object, which is not longer than the range, or it sends ranges as if they were.
                return self._reader().open(name, first_bytes)
            if not _is_beyond(err):
                raise
            meta = self._obstore.head(self._once, name)
            if meta["size"]:
                raise ConnectionError(errno.EIO, "the object was replaced while it was opened") from err
            return Opened(0, b"", meta["e_tag"] or "", meta["version"] or "")
        meta = found.meta
        first = found.bytes().to_bytes()
        check_full(len(first), min(first_bytes, meta["size"]))
        return Opened(meta["size"], first, meta["e_tag"] or "", meta["version"] or "")

    def read_into(self, name: str, opened: Opened, offset: int, buffer: memoryview) -> None:
        """See Client."""
        if self._signed is None:
            options: dict[str, object] = {"range": (offset, offset + len(buffer))}
            if opened.version:
                options["if_match"] = opened.version
            try:
                data = self._obstore.get(self._once, name, options=options).bytes()
            except self.errors as err:
                if not _is_whole(err):
                    raise
            else:
                check_full(len(data), len(buffer))
                buffer[:] = memoryview(data)
                return
        self._reader().read_into(name, opened, offset, buffer)

    def list(self, folder: str) -> Sequence[tuple[str, int]]:
        """See Client."""
        pages = self._obstore.list(self._once, folder or None, chunk_size=1000)
        return [(each["path"], each["size"]) for page in pages for each in page]

    def written_at(self, folder: str) -> Mapping[str, float]:
        """See Client."""
        pages = self._obstore.list(self._once, folder or None, chunk_size=1000)
        return {each["path"]: each["last_modified"].timestamp() for page in pages for each in page}

    def folders(self) -> Sequence[str]:
        """See Client."""
        return [*self._obstore.list_with_delimiter(self._once)["common_prefixes"]]

    def remove(self, names: Sequence[str]) -> None:
        """See Client."""
        try:
            self._obstore.delete(self._once, [*names])
        except FileNotFoundError as err:
            # Some stores say so, and may have stopped there.
            if _code(str(err)) == "NoSuchBucket" or len(names) == 1:
                self._check_bucket(err)
                return
            for name in names:
                self.remove([name])

    def explain(self, error: Exception) -> Trouble:
        """See Client."""
        text = str(error).partition("Debug source")[0]
        found = _STATUS.search(text)
        status = int(found[1] or found[2]) if found else 0
        code = error.code if isinstance(error, RefusedError) else _code(text)
        if isinstance(error, StorageError):
            return Trouble(error.errno or errno.EIO, str(error))
        if _NO_KEYS.search(text):
            return Trouble(
                errno.EACCES,
                "no credentials were found: none in the environment, and the machine has no role that gives any",
            )
        if _is_replaced(error):
            return Trouble(errno.ESTALE, "the object was replaced while it was read")
        status = 301 if "Received redirect" in text else status
        if (known := known_trouble(code, status, renews=self._renews)) is not None:
            return known
        if isinstance(error, FileNotFoundError):
            return Trouble(errno.ENOENT, "there is no such object")
        if isinstance(error, HTTPException):
            return Trouble(errno.EIO, f"the connection failed: {type(error).__name__}", passing=True)
        if isinstance(error, OSError):
            late = isinstance(error, TimeoutError)
            return Trouble(
                errno.ETIMEDOUT if late else error.errno or errno.EIO, error.strerror or str(error), passing=True
            )
        said = without_secrets(re.sub(r"<\?xml.*", "", text, flags=re.DOTALL))
        if not status and _BROKEN.search(text):
            late = "timed out" in text or "timeout" in text
            return Trouble(errno.ETIMEDOUT if late else errno.EIO, f"the connection failed: {said}", passing=True)
        return Trouble(errno.EIO, said)

    def _reader(self) -> SignedReader:
        """For a server that was found to send ranges under the status of a whole object; from then on for all reads."""
        if self._signed is None:
            sign, store = self._obstore.sign, self._once
            self._signed = SignedReader(lambda name: str(sign(store, "GET", name, SIGNED_FOR)), self._request_s)
        return self._signed

    def _check_bucket(self, error: FileNotFoundError) -> None:
        if _code(str(error)) in ("NoSuchBucket", "ContainerNotFound"):
            raise error


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _is_replaced(error: Exception) -> bool:
    """Whether a condition on the version of an object did not hold."""
    return "PreconditionError" in type(error).__name__


def _is_whole(error: Exception) -> bool:
    """Whether a server answered a range with the status of a whole object."""
    return "NotPartial" in str(error) or "non-partial response" in str(error)


def _is_beyond(error: Exception) -> bool:
    """Whether a server refused a range for beginning at the end: the object is empty."""
    return not isinstance(error, FileNotFoundError) and _STATUS.findall(str(error))[:1] in (
        [("416", "")],
        [("", "416")],
    )
