"""The arena: page-aligned memory through which the bytes of a save pass on their way to storage.

The bytes of a rank's files are cut into chunks of ``CHUNK_BYTES``. A chunk is filled, written, and its place used again;
an arena as large as the files holds all of them at once. A warm arena is faulted in when it is made and kept for the next
save: filling fresh memory is many times slower than filling memory that has been used.
"""

from __future__ import annotations

import ctypes
import mmap
import queue

from keepstep.errors import StagingError

__all__ = ["ARENA_BYTES", "CHUNK_BYTES", "ONCE_BYTES", "Arena"]

CHUNK_BYTES = 1 << 22
ARENA_BYTES = 1 << 26
ONCE_BYTES = 8 * CHUNK_BYTES
"""For a single save, whose arena is used once. Chosen by measurement, see benchmarks/README.md."""


class Arena:
    """A ring of chunks. ``free`` holds the indices of chunks nobody uses: get one, fill it, and put it back when written.

    ``memory`` is all of it, ``address`` where it lies (a multiple of the page size), ``size_bytes`` how much it is. Close it
    at the end.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """

    def __init__(self, size_bytes: int = ARENA_BYTES, *, warm: bool = True) -> None:
        self.chunks = max(2, -(-size_bytes // CHUNK_BYTES))
        self.size_bytes = size = self.chunks * CHUNK_BYTES
        try:
            self._memory = mmap.mmap(-1, size)
        except (OSError, ValueError) as err:
            raise StagingError(f"no memory for an arena of {size:,} bytes ({_free_text()}): {err}") from err
        self.memory = memoryview(self._memory)
        handle = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(handle)
        del handle
        if warm:
            ctypes.memset(self.address, 0, size)
        self.free: queue.LifoQueue[int] = queue.LifoQueue()
        for chunk in range(self.chunks):
            self.free.put(chunk)
        self._closed = False

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self.memory.release()
            self._memory.close()


def _free_text() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as info:  # noqa: PTH123  a kernel file, not a path of ours
            return next(" ".join(line.split()) for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return "free memory unknown"
