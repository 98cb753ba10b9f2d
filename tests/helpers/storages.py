"""A storage that lets a test look at, delay or fail every operation of another one; passed as a path, like any storage."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from keepstep.errors import StorageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.local import LocalStorage

Before = Callable[[str, str], None]


class Watched(Storage):
    """Asks ``before(operation, name)`` ahead of each operation, which may raise or wait; then passes it on.

    Operations: create, write, commit, open, read, put, put_new, list, folders, delete. ``done`` counts them, ``names``
    holds the names of each, ``read_bytes`` and ``written_bytes`` what went through.
    """

    def __init__(self, inner, before: Before | None = None) -> None:
        self.inner = inner if isinstance(inner, Storage) else LocalStorage(inner)
        self.before = before
        self.done: Counter[str] = Counter()
        self.names: dict[str, list[str]] = {}
        self.read_bytes = 0
        self.written_bytes = 0
        self.lock = threading.Lock()

    def note(self, operation: str, name: str, read: int = 0, written: int = 0) -> None:
        with self.lock:
            self.done[operation] += 1
            self.names.setdefault(operation, []).append(name)
            self.read_bytes += read
            self.written_bytes += written
        if self.before is not None:
            self.before(operation, name)

    @property
    def url(self) -> str:
        return self.inner.url

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        self.note("create", name)
        return _Upload(self, name, self.inner.create(name, size_hint_bytes))

    def open(self, name: str) -> Blob:
        self.note("open", name)
        return _Blob(self, name, self.inner.open(name))

    def put(self, name: str, data: bytes) -> None:
        self.note("put", name, written=len(data))
        self.inner.put(name, data)

    def put_new(self, name: str, data: bytes) -> bool:
        self.note("put_new", name, written=len(data))
        return self.inner.put_new(name, data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.note("list", prefix)
        return self.inner.list(prefix)

    def folders(self) -> list[str]:
        self.note("folders", "")
        return self.inner.folders()

    def delete(self, names: list[str]) -> None:
        for name in names:
            self.note("delete", name)
        self.inner.delete(names)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()


class _Upload(Upload):
    def __init__(self, storage: Watched, name: str, inner: Upload) -> None:
        self.storage, self.name, self.inner = storage, name, inner

    def write_at(self, offset: int, data: memoryview) -> None:
        self.storage.note("write", self.name, written=len(data))
        self.inner.write_at(offset, data)

    def commit(self, size_bytes: int) -> None:
        self.storage.note("commit", self.name)
        self.inner.commit(size_bytes)

    def close(self) -> None:
        self.inner.close()


class _Blob(Blob):
    def __init__(self, storage: Watched, name: str, inner: Blob) -> None:
        self.storage, self.name, self.inner = storage, name, inner
        self.size_bytes = inner.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.storage.note("read", self.name, read=len(buffer))
        self.inner.read_into(offset, buffer)

    def close(self) -> None:
        self.inner.close()


def failing(operation: str, nth: int = 1, *, name: str = "", code: int = errno.ENOSPC, times: int = 1) -> Before:
    """Fails the ``nth`` and following ``times - 1`` operations of that kind on names that contain ``name``."""
    seen = Counter()
    lock = threading.Lock()

    def before(kind: str, where: str) -> None:
        if kind != operation or name not in where:
            return
        with lock:
            seen["calls"] += 1
            count = seen["calls"]
        if nth <= count < nth + times:
            raise StorageError(operation, where, OSError(code, "as the test wants it"))

    return before
