"""Object stores, and whatever else is reached by a URL: the storage contract without any rename.

Objects are written whole, and appear at the end of their upload. A name is taken once by create-if-absent, where the store
has that; that it has is tried out at the first use. Requests that fail for a reason that passes are tried again; a create
whose answer was lost finds its own object, and knows it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.client import Client, Opened
from keepstep.storage.local import check_name
from keepstep.storage.parts import PartLimits, PartUpload, Taker
from keepstep.storage.retry import Patience, Trouble, patiently
from keepstep.storage.urls import OBJECT_STORES, RemoteUrl, parse_url

__all__ = ["RemoteStorage"]

FIRST_BYTES = 1 << 18
"""The header of a shard file of 1.5 GiB is no longer."""
READ_BYTES = 1 << 24
SETTLE_S = 0.5
LATE_S = 5.0
PROBE = ".keepstep-probe"
_log = logging.getLogger("keepstep")
_Answer = TypeVar("_Answer")


class RemoteStorage(Storage):
    """Blobs as objects below a URL, such as ``s3://bucket/runs/gpt``.

    ``exclusive`` says whether the store itself gives a name to one writer only; ``is_plain`` whether another process can
    open the same place by ``url`` and what it finds in the environment. ``library`` is what it is reached through: obstore
    for S3, Google Cloud Storage and Azure where it is installed; else fsspec.

    Args:
        url: scheme, bucket, and the folder of the run. No credentials and no options.
        options: for the library's store: ``{"endpoint": …, "region": …}``; what is missing comes from the environment.
        library: ``"obstore"`` or ``"fsspec"``; None for the better one that is there.
        patience: how often a request is tried, and how long it may take.
        limits: what the store takes in one object.
        late_s: how long a load waits for an object that the manifest names; None for not at all in a bucket, and for a few
            seconds elsewhere.

    Raises:
        UsageError: the URL means nothing here, options the library does not know, or no library for it is installed.
    """

    far = True
    request_bytes = 1 << 22
    requests_at_once = 32

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        library: str | None = None,
        patience: Patience | None = None,
        limits: PartLimits | None = None,
        late_s: float | None = None,
    ) -> None:
        parsed = parse_url(url)
        self.url = parsed.shown
        self._patience = patience or Patience()
        self._limits = limits or PartLimits()
        self._client = _client(parsed, options or {}, library, self._patience)
        asked = options or library or patience or limits or late_s is not None
        self.late_s = (0.0 if parsed.scheme in OBJECT_STORES else LATE_S) if late_s is None else late_s
        self.is_plain = parsed.is_plain and not asked and not self._client.private
        self._trying_out = threading.Lock()
        self._exclusive = self._client.exclusive
        self._swaps: bool | None = None
        self._guarding = threading.Lock()
        self.library = self._client.library

    @property
    def exclusive(self) -> bool:  # type: ignore[override]
        """Whether two writers of one name cannot both get it. Found out once, by a small object that is written twice."""
        with self._trying_out:
            if self._exclusive is None:
                self._exclusive = self._try_out()
                if not self._exclusive:
                    _log.warning(
                        "%s cannot create an object only if it is absent: names are looked up before and after they are"
                        " written, and two jobs that start here in the same moment are not told apart for certain",
                        self.url,
                    )
            return self._exclusive

    @property
    def swaps(self) -> bool:  # type: ignore[override]
        """Whether ``put_over`` has one winner among all writers. Found out once, by an object written three times."""
        with self._trying_out:
            if self._swaps is None:
                self._swaps = self._try_swapping()
            return self._swaps

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """An object that is sent in parts of one size while it is written, from its beginning to its end.

        ``size_hint_bytes`` decides the size of the parts, so it should be the size. What comes before its turn is held in
        memory.
        """
        return PartUpload(
            _Sender(self._client, self._patiently, self._explain), check_name(name), size_hint_bytes, self._limits
        )

    def open(self, name: str) -> Blob:
        """One request for the size and the first bytes; later reads are of that same version of the object."""
        found = self._patiently("open", check_name(name), lambda: self._client.open(name, FIRST_BYTES))
        return _RemoteBlob(self, name, found)

    def put(self, name: str, data: bytes) -> None:
        """One request."""
        self._patiently("put", check_name(name), lambda: self._client.write(name, data))

    def put_new(self, name: str, data: bytes) -> bool:
        """One request, with the condition that the object is absent.

        After a try whose answer was lost, an object with exactly these bytes is this call's own: so they must be bytes that
        nobody else writes.
        """
        check_name(name)
        if not self.exclusive:
            return self._put_guarded(name, data)
        # Where a request may have been sent twice, it may be this very call that has taken the name: unless it was before.
        unsure = self._client.resends
        if unsure and self._is_there(name):
            return False

        def once() -> bool:
            nonlocal unsure
            try:
                self._client.write(name, data, new=True)
            except FileExistsError:
                return unsure and self._client.open(name, len(data) + 1).first == data
            except self._client.errors:
                unsure = True
                raise
            return True

        return self._patiently("put_new", name, once)

    def put_over(self, name: str, data: bytes, expected: bytes) -> bool:
        """Two requests: the second has the condition that the object is still the one that the first has found.

        After a try whose answer was lost, an object with exactly these bytes is this call's own.
        """
        check_name(name)
        unsure = self._client.resends

        def once() -> bool | None:
            nonlocal unsure
            try:
                found = self._client.open(name, max(len(expected), len(data)) + 1)
            except FileNotFoundError as err:
                if self._client.explain(err).errno != errno.ENOENT:
                    raise
                return False
            if found.first != expected:
                return unsure and found.first == data
            try:
                self._client.write_over(name, data, found)
            except FileExistsError:
                # Another one came in between; or an earlier try, where a library makes some by itself.
                return unsure and self._client.open(name, len(data) + 1).first == data
            except NotImplementedError:
                return None
            except self._client.errors:
                unsure = True
                raise
            return True

        done = self._patiently("put_over", name, once)
        return super().put_over(name, data, expected) if done is None else done

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """All pages, before the first name is given."""
        folder = check_name(prefix) if prefix else ""
        return iter(self._patiently("list", prefix or ".", lambda: self._client.list(folder)))

    def folders(self) -> Sequence[str]:
        """One request for each thousand of them."""
        return self._patiently("list", ".", self._client.folders)

    def written_at(self, prefix: str) -> Mapping[str, float]:
        """One request for each thousand of them."""
        folder = check_name(prefix) if prefix else ""
        return self._patiently("list", prefix or ".", lambda: self._client.written_at(folder))

    def delete(self, names: Sequence[str]) -> None:
        """Many in one request, where the library has that; else a name that fails is tried again by itself."""
        for name in names:
            check_name(name)
        for some in [[name] for name in names] if self._client.one_by_one else [names] * bool(names):
            self._patiently("delete", some[0], functools.partial(self._client.remove, some))

    def read_into(self, name: str, opened: Opened, offset: int, buffer: memoryview) -> None:
        """Fills the buffer from an object as it was opened."""
        for start in range(0, len(buffer), READ_BYTES):
            part = buffer[start : start + READ_BYTES]
            read = functools.partial(self._client.read_into, name, opened, offset + start, part)
            self._patiently("read", name, read)

    def _patiently(self, operation: str, name: str, act: Callable[[], _Answer]) -> _Answer:
        self._client.check_process()
        errors = self._client.errors
        return patiently(act, self._explain, what=(operation, name), errors=errors, patience=self._patience)

    def _explain(self, error: Exception) -> Trouble:
        trouble = self._client.explain(error)
        return replace(trouble, text=f"{self.url}: {trouble.text}")

    def _try_out(self) -> bool:
        name = f"{PROBE}-{secrets.token_hex(8)}"

        def write(data: bytes) -> bool:
            try:
                self._client.write(name, data, new=True)
            except FileExistsError:
                return False
            except NotImplementedError:
                return True
            return True

        try:
            # The first answer says nothing: a try whose answer was lost may have written it.
            self._patiently("put_new", name, lambda: write(b"1"))
            return not self._patiently("put_new", name, lambda: write(b"2"))
        finally:
            with contextlib.suppress(StorageError):
                self._patiently("delete", name, lambda: self._client.remove([name]))

    def _try_swapping(self) -> bool:
        name = f"{PROBE}-{secrets.token_hex(8)}"

        def write_over_another() -> bool:
            self._client.write(name, b"1")
            first = self._client.open(name, 2)
            self._client.write(name, b"2")
            try:
                self._client.write_over(name, b"3", first)
            except FileExistsError:
                return True
            except NotImplementedError:
                return False
            return False

        try:
            return self._patiently("put_over", name, write_over_another)
        finally:
            with contextlib.suppress(StorageError):
                self._patiently("delete", name, lambda: self._client.remove([name]))

    def _is_there(self, name: str) -> bool:
        try:
            self.open(name).close()
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
            return False
        return True

    def _put_guarded(self, name: str, data: bytes) -> bool:
        """Without help from the store: whoever is still there after a moment has won, as far as that can be told."""
        with self._guarding:
            if self._is_there(name):
                return False
            self.put(name, data)
            time.sleep(SETTLE_S)
            found = self._patiently("put_new", name, lambda: self._client.open(name, len(data) + 1))
            return found.first == data


class _Sender(Taker):
    """Sends the objects of uploads."""

    def __init__(
        self,
        client: Client,
        again: Callable[[str, str, Callable[[], None]], None],
        explain: Callable[[Exception], Trouble],
    ) -> None:
        self._client = client
        self._again = again
        self._explain = explain

    def take_whole(self, name: str, data: memoryview) -> None:
        """Tried again as often as it may be."""
        self._again("commit", name, lambda: self._client.write(name, data))

    def take_parts(self, name: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """The library tries parts again; the whole cannot be sent a second time, since its parts are gone."""
        sent, ended = 0, False

        def counted() -> Iterator[memoryview]:
            nonlocal sent, ended
            for part in parts:
                sent += len(part)
                yield part
            ended = True

        def once() -> None:
            try:
                self._client.stream(name, counted(), part_bytes)
            except self._client.errors as err:
                trouble = self._explain(err)
                if not sent and trouble.errno == errno.EIO:
                    # It was not even begun, whatever was answered: nothing is lost yet.
                    raise ConnectionError(errno.EIO, self._client.explain(err).text) from err
                # The answer to its end may have been lost, not the object: nobody else writes under this name.
                if ended and (trouble.passing or trouble.errno == errno.ENOENT) and self._is_whole(name, sent):
                    return
                raise StorageError("upload", name, OSError(trouble.errno, trouble.text)) from err

        self._again("upload", name, once)

    def _is_whole(self, name: str, size_bytes: int) -> bool:
        """Whether the object is there in its size. This answer may be lost as well, so it is asked for as patiently."""
        found: list[int] = []
        try:
            self._again("upload", name, lambda: found.append(self._client.open(name, 1).size_bytes))
        except StorageError:
            return False
        return found == [size_bytes]


class _RemoteBlob(Blob):
    def __init__(self, storage: RemoteStorage, name: str, opened: Opened) -> None:
        self._storage = storage
        self._name = name
        self._opened = opened
        self.size_bytes = opened.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """From what came when it was opened, as far as that goes; else by one ranged request."""
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{self._name} ends at byte {self.size_bytes:,}; {offset + len(buffer):,} expected")
        have = self._opened.first[offset : offset + len(buffer)]
        buffer[: len(have)] = have
        if len(have) < len(buffer):
            self._storage.read_into(self._name, self._opened, offset + len(have), buffer[len(have) :])

    def close(self) -> None:
        """Nothing to release."""


def _client(url: RemoteUrl, options: Mapping[str, Any], library: str | None, patience: Patience) -> Client:
    """The library that is there for this URL.

    Raises:
        UsageError: none is.
    """
    if library not in (None, "obstore", "fsspec"):
        raise UsageError(f"library={library!r}: it is 'obstore', 'fsspec' or None")
    known = url.scheme in OBJECT_STORES
    if library == "obstore" and not known:
        raise UsageError(f"{url.shown}: obstore is for {', '.join(sorted(OBJECT_STORES))}; use library='fsspec'")
    missing = []
    if known and library != "fsspec":
        try:
            from keepstep.storage.obstores import ObstoreClient

            return ObstoreClient(url, options, patience)
        except ImportError as err:
            missing.append(str(err))
    if library != "obstore":
        try:
            from keepstep.storage.fsspecs import FsspecClient

            return FsspecClient(url, options, patience)
        except ImportError as err:
            missing.append(str(err))
    extra = {"s3": "s3", "gcs": "gcs", "azure": "azure"}.get(OBJECT_STORES.get(url.scheme, ""), "")
    install = f"pip install 'keepstep[{extra}]'" if extra else f"install fsspec and what it needs for {url.scheme}://"
    raise UsageError(f"{url.shown} cannot be reached ({'; '.join(missing)}): {install}")
