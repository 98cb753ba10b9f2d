"""Any URL that ``fsspec`` knows, through the file system it has for it.

What such a file system promises differs. Objects of buckets, and files in memory, appear whole when they are closed; for
everything else a file is written under another name and moved, so the move has to be atomic there.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any, ClassVar

from keepstep.errors import StorageError, UsageError
from keepstep.storage.client import Client, Opened, check_full, known_trouble
from keepstep.storage.retry import Patience, Trouble
from keepstep.storage.urls import OBJECT_STORES, RemoteUrl, without_secrets

__all__ = ["FsspecClient"]

PARTIAL = ".partial"
_PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.EIO, errno.EPIPE, errno.ETIMEDOUT})
_NETWORK = (
    "aiohttp",
    "botocore",
    "aiobotocore",
    "google.auth.exceptions",
    "azure.core.exceptions",
    "paramiko",
    "requests",
)


class FsspecClient(Client):
    """A folder of a file system.

    Args:
        url: what fsspec makes a file system from.
        options: its storage options.
        patience: how long a request may take, where the file system can be told.

    Raises:
        ImportError: fsspec, or what it needs for this scheme, is not installed.
        UsageError: a scheme it does not know, or options that mean nothing.
    """

    library = "fsspec"
    # Whatever a file system of somebody else's raises is a failure of the storage.
    errors = (Exception,)
    # aiohttp does, on a connection that was used before.
    resends = True
    one_by_one = True
    _memory: ClassVar[contextlib.AbstractContextManager[object]] = threading.RLock()

    def __init__(self, url: RemoteUrl, options: Mapping[str, Any], patience: Patience) -> None:
        try:
            self._files, root = _files_of(url, options, patience, tries=1)
            # Parts come only once, so it has to be the library that sends them again.
            has_tries = OBJECT_STORES.get(url.scheme) == "s3"
            patient = _files_of(url, options, patience, tries=max(1, patience.tries))[0] if has_tries else self._files
        except (ValueError, TypeError, OSError) as err:
            raise UsageError(f"{url.shown}: {without_secrets(str(err))}") from err
        self._patient: Any = patient
        self._root: str = root.rstrip("/")
        memory = import_module("fsspec.implementations.memory")
        self._in_memory = self.private = isinstance(self._files, memory.MemoryFileSystem)
        self._has_objects = self._in_memory or url.scheme in OBJECT_STORES
        self._no_marks = OBJECT_STORES.get(url.scheme) == "azure"
        # Where a second writer may come between looking and writing, the store cannot be tried out.
        self.exclusive = None if self._has_objects else False
        # A store that sends a byte now and then is waited for without an end, but for this. A listing is many requests.
        in_time = getattr(self._files, "async_impl", False)
        self._limits = {"timeout": patience.request_s} if in_time else {}
        self._long = {"timeout": patience.total_s} if in_time else {}
        # File systems that are not made for several threads have one position in a file, or one channel; and what is in
        # memory belongs to the process, whoever has opened it.
        own = contextlib.nullcontext() if in_time else threading.RLock()
        self._one: contextlib.AbstractContextManager[object] = self._memory if self._in_memory else own

    def check_process(self) -> None:
        """See Client. File systems find out by themselves."""

    def write(self, name: str, data: bytes | memoryview, *, new: bool = False) -> None:
        """See Client."""
        with self._one:
            if not self._has_objects:
                self.stream(name, iter([memoryview(data)]), max(1, len(data)))
            elif new:
                self._create(self._path(name), bytes(data))
            else:
                self._files.pipe_file(self._path(name), bytes(data), **self._limits)

    def write_over(self, name: str, data: bytes, opened: Opened) -> None:
        """See Client. In memory, and where the library passes the condition on."""
        path = self._path(name)
        with self._one:
            if self._in_memory:
                if not self._files.exists(path) or self._files.cat_file(path) != opened.first:
                    raise FileExistsError(errno.EEXIST, "the object is another one by now")
                self._files.pipe_file(path, data)
                return
        if "s3" not in self._files.protocol or not opened.version:
            raise NotImplementedError("the library replaces an object whatever it is")
        try:
            self._files.pipe_file(path, data, IfMatch=opened.version, **self._limits)
        except Exception as err:  # whatever the library makes of it, a condition that did not hold has one meaning
            status = _answer(err)[1]
            if status in (404, 412):
                raise FileExistsError(errno.EEXIST, "the object is another one by now") from err
            if status == 501:
                raise NotImplementedError("the store replaces an object whatever it is") from err
            raise

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """See Client. Where a file cannot be held back until it is whole, it is written under another name and moved."""
        path = self._path(name)
        if self._in_memory:
            self.write(name, b"".join(parts))
            return
        if self._has_objects:
            self._send(path, parts, part_bytes)
            return
        partial = f"{path}.{secrets.token_hex(4)}{PARTIAL}"
        with self._one:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._files.open(partial, "wb") as file:
                    for part in parts:
                        file.write(part)
                self._files.mv(partial, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._files.rm_file(partial)
                raise

    def open(self, name: str, first_bytes: int) -> Opened:
        """See Client. Two requests."""
        path = self._path(name)
        with self._one:
            about = self._files.info(path, **self._limits)
            if about["type"] != "file":
                raise FileNotFoundError(errno.ENOENT, "there is no such object")
            size = int(about["size"])
            if size <= first_bytes:
                # Whole, whatever it has become meanwhile.
                data = bytes(self._files.cat_file(path, **self._limits)) if size else b""
                return Opened(len(data), data, str(about.get("ETag") or ""))
            first = bytes(self._files.cat_file(path, start=0, end=first_bytes, **self._limits))
        check_full(len(first), first_bytes)
        return Opened(size, first)

    def read_into(self, name: str, opened: Opened, offset: int, buffer: memoryview) -> None:
        """See Client."""
        with self._one:
            data = self._files.cat_file(self._path(name), start=offset, end=offset + len(buffer), **self._limits)
        check_full(len(data), len(buffer))
        buffer[:] = data

    def list(self, folder: str) -> Sequence[tuple[str, int]]:
        """See Client. Unfinished files are listed too, so that they can be swept."""
        return [(name, int(about["size"] or 0)) for name, about in self._found(folder).items()]

    def written_at(self, folder: str) -> Mapping[str, float]:
        """See Client. Each file system says it under a name of its own."""
        told = {name: _time_of(about) for name, about in self._found(folder).items()}
        return {name: at for name, at in told.items() if at is not None}

    def _found(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        """What the file system says of each file below a folder."""
        below = f"{self._path(folder)}/" if folder else f"{self._root}/"
        try:
            with self._one:
                found: dict[str, dict[str, Any]] = self._files.find(below.rstrip("/") or "/", detail=True, **self._long)
        except FileNotFoundError as err:
            self._check_bucket(err)
            return {}
        cut = len(self._root) + 1
        return {path[cut:]: about for path, about in found.items() if path.startswith(below)}

    def folders(self) -> Sequence[str]:
        """See Client."""
        try:
            with self._one:
                found = self._files.ls(self._root or "/", detail=True, **self._long)
        except FileNotFoundError as err:
            self._check_bucket(err)
            return []
        names = (each["name"].rstrip("/") for each in found if each["type"] == "directory")
        return sorted({name.rpartition("/")[2] for name in names if name.startswith(f"{self._root}/")})

    def remove(self, names: Sequence[str]) -> None:
        """See Client. One after another."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._one:
                self._files.rm_file(self._path(name), **self._limits)

    def explain(self, error: Exception) -> Trouble:
        """See Client."""
        code, status = _answer(error)
        if isinstance(error, StorageError):
            return Trouble(error.errno or errno.EIO, str(error))
        if (known := known_trouble(code, status)) is not None:
            return known
        # What a store writes besides its code may name keys.
        said = f"the store answered {status} {code}" if status else without_secrets(f"{type(error).__name__}: {error}")
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Trouble(errno.ENOENT, "there is no such object")
        if isinstance(error, PermissionError):
            return Trouble(errno.EACCES, "access was denied: these credentials may not do this here")
        if isinstance(error, TimeoutError):
            return Trouble(errno.ETIMEDOUT, f"the connection failed: {said}", passing=True)
        if type(error).__name__ in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
            return Trouble(errno.EACCES, "no credentials were found")
        if type(error).__module__.startswith(_NETWORK) or isinstance(error, ConnectionError):
            return Trouble(errno.EIO, f"the connection failed: {said}", passing=True)
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        return Trouble(number, said, passing=isinstance(error, OSError) and number in _PASSING)

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._files.pipe_file(path, data, mode="create", **self._limits)
        except Exception as err:  # whatever the library makes of it, a condition that did not hold has one meaning
            if _answer(err)[1] == 412:
                raise FileExistsError(errno.EEXIST, "the name is taken") from err
            raise

    def _send(self, path: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """One object of a bucket, which appears by ``commit``, not by ``close``."""
        file = self._patient.open(path, "wb", block_size=part_bytes, autocommit=False)
        try:
            for part in parts:
                file.write(part)
            file.close()
            file.commit()
        except BaseException:
            # Some publish what they have when they are closed, if only as garbage; not what they take for sent.
            file.forced = True
            for give_up in (file.discard, file.close):
                with contextlib.suppress(Exception):
                    give_up()
            raise

    def _path(self, name: str) -> str:
        if self._no_marks and "?" in name:
            # It would be read as the beginning of a version, and the object get another name.
            raise OSError(errno.EINVAL, "this library cannot reach names with a question mark")
        return f"{self._root}/{name}"

    def _check_bucket(self, error: FileNotFoundError) -> None:
        if _answer(error)[0] in ("NoSuchBucket", "ContainerNotFound"):
            raise error


def _files_of(url: RemoteUrl, options: Mapping[str, Any], patience: Patience, tries: int) -> tuple[Any, str]:
    """The file system, and the root in it.

    One that tries again by itself takes its own object for somebody else's; where that can be turned off, ``tries`` counts.
    """
    manner: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if OBJECT_STORES.get(url.scheme) == "s3":
        times = {"read_timeout": patience.request_s, "connect_timeout": 10}
        manner["config_kwargs"] = {"retries": {"total_max_attempts": tries}, **times}
    files, root = import_module("fsspec").core.url_to_fs(url.given, **{**manner, **options})
    if hasattr(files, "retries"):
        files.retries = 1
    return files, root


def _time_of(about: Mapping[str, Any]) -> float | None:
    """When a file was written, as far as its file system tells."""
    told = next(
        (about[key] for key in ("LastModified", "mtime", "updated", "last_modified", "created") if key in about), None
    )
    if isinstance(told, str):
        with contextlib.suppress(ValueError):
            told = datetime.fromisoformat(told)
    if isinstance(told, datetime):
        return told.timestamp()
    return float(told) if isinstance(told, int | float) else None


def _answer(error: BaseException | None) -> tuple[str, int]:
    """The code and the HTTP status that a store has answered with, from wherever the library has put them."""
    while error is not None:
        told = getattr(error, "response", None)
        if isinstance(told, dict):
            meta = told.get("ResponseMetadata") or {}
            return str((told.get("Error") or {}).get("Code", "")), int(meta.get("HTTPStatusCode") or 0)
        for place in ("status", "status_code", "code"):
            status = getattr(error, place, None)
            if isinstance(status, int) and 100 <= status < 600:
                return "", status
        error = error.__cause__
    return "", 0
