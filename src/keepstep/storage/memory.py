"""Blobs in the memory of this process: for tests, and for a state that only has to survive until the next line."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence

from keepstep.errors import CorruptError, StorageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.local import check_name

__all__ = ["MemoryStorage"]


class MemoryStorage(Storage):
    """Holds blobs as bytes in a dictionary. Durable only while the object lives."""

    swaps = True

    def __init__(self, name: str = "memory") -> None:
        self.url = f"memory://{name}"
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """Starts a blob that grows as it is written."""
        return _MemoryUpload(self, check_name(name))

    def open(self, name: str) -> Blob:
        """The bytes as they are now; a later ``put`` does not change what was opened."""
        data = self._blobs.get(check_name(name))
        if data is None:
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such blob"))
        return _MemoryBlob(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Replaces the entry."""
        with self._lock:
            self._blobs[check_name(name)] = bytes(data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Adds the entry unless it is there."""
        with self._lock:
            if check_name(name) in self._blobs:
                return False
            self._blobs[name] = bytes(data)
            return True

    def put_over(self, name: str, data: bytes, expected: bytes) -> bool:
        """Replaces the entry if it is what is expected."""
        with self._lock:
            if self._blobs.get(check_name(name)) != expected:
                return False
            self._blobs[name] = bytes(data)
            return True

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """A snapshot of names and sizes."""
        with self._lock:
            found = [(name, len(data)) for name, data in self._blobs.items()]
        start = f"{check_name(prefix)}/" if prefix else ""
        return iter([item for item in found if item[0].startswith(start)])

    def folders(self) -> Sequence[str]:
        """First segments of names that have more than one."""
        return sorted({name.split("/", 1)[0] for name, _ in self.list("") if "/" in name})

    def delete(self, names: Sequence[str]) -> None:
        """Drops the entries."""
        with self._lock:
            for name in names:
                self._blobs.pop(check_name(name), None)


class _MemoryUpload(Upload):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._data = bytearray()
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Grows the buffer as needed."""
        with self._lock:
            end = offset + len(data)
            if end > len(self._data):
                self._data.extend(bytes(end - len(self._data)))
            self._data[offset:end] = data

    def commit(self, size_bytes: int) -> None:
        """Cuts or pads to size and shows the blob."""
        data = bytes(self._data[:size_bytes])
        self._storage.put(self._name, data + bytes(size_bytes - len(data)))

    def close(self) -> None:
        """Drops the buffer."""
        self._data = bytearray()


class _MemoryBlob(Blob):
    def __init__(self, name: str, data: bytes) -> None:
        self._name = name
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copies out."""
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{self._name} ends at byte {self.size_bytes:,}; {offset + len(buffer):,} expected")
        buffer[:] = memoryview(self._data)[offset : offset + len(buffer)]

    def close(self) -> None:
        """Nothing to release."""
