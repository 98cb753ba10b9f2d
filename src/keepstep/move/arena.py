"""The arena: page-aligned memory through which the bytes of a save pass on their way to storage.

The bytes of a rank's files are cut into chunks of ``CHUNK_BYTES``. A chunk is filled, written, and its place used again;
an arena as large as the files holds all of them at once. The memory is faulted in when the arena is made and kept for the
next save: filling fresh memory is many times slower than filling memory that has been used.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from types import TracebackType
from typing import Self

from keepstep.errors import StagingError

__all__ = ["ARENA_BYTES", "CHUNK_BYTES", "Arena"]

CHUNK_BYTES = 1 << 22
ARENA_BYTES = 1 << 26


class Arena:
    """A ring of chunks. One thread acquires; any thread releases. Close it, or use it in a with-block.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """

    def __init__(self, size_bytes: int = ARENA_BYTES) -> None:
        self.chunks = max(2, -(-size_bytes // CHUNK_BYTES))
        size = self.chunks * CHUNK_BYTES
        try:
            self._memory = mmap.mmap(-1, size)
        except (OSError, ValueError) as err:
            raise StagingError(f"no memory for an arena of {size:,} bytes ({_free_text()}): {err}") from err
        self._view = memoryview(self._memory)
        handle = ctypes.c_char.from_buffer(self._memory)
        self._address = ctypes.addressof(handle)
        del handle
        ctypes.memset(self._address, 0, size)
        self._free = list(range(self.chunks))
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self) -> int:
        """The index of a chunk nobody uses; waits until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            return self._free.pop()

    def release(self, chunk: int) -> None:
        """Gives a chunk back."""
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()

    def view(self, chunk: int, length: int) -> memoryview:
        """The first ``length`` bytes of a chunk."""
        start = chunk * CHUNK_BYTES
        return self._view[start : start + length]

    def address(self, chunk: int) -> int:
        """Where a chunk lies in memory; a multiple of the page size."""
        return self._address + chunk * CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        """The memory it occupies."""
        return self.chunks * CHUNK_BYTES

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._view.release()
            self._memory.close()

    def __enter__(self) -> Self:
        """The arena itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()


def _free_text() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as info:  # noqa: PTH123  a kernel file, not a path of ours
            return next(" ".join(line.split()) for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return "free memory unknown"
