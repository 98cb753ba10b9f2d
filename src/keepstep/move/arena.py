"""The arena: page-aligned memory through which the bytes of a save pass on their way to storage.

A *ring* serves a save that streams: the bytes of a rank's files are cut into chunks of ``CHUNK_BYTES``; a chunk is filled,
written, and its place used again. A *whole* arena holds every byte of a rank's files at once, each file's data from a page
boundary on, so that filling it is all that training has to wait for; it may be shared memory, which outlives the process
that filled it. Memory is faulted in when the arena is made, because filling fresh memory is many times slower than filling
memory that has been used, and kept for the next save.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
from collections.abc import Sequence

from keepstep.errors import StagingError

__all__ = [
    "ARENA_BYTES",
    "CHUNK_BYTES",
    "ONCE_BYTES",
    "Arena",
    "Ring",
    "bases_of",
    "free_memory_bytes",
    "shared_memory",
]

CHUNK_BYTES = 1 << 22
ARENA_BYTES = 1 << 26
ONCE_BYTES = 8 * CHUNK_BYTES
"""For a single save, whose arena is used once. Chosen by measurement, see benchmarks/README.md."""


class Arena:
    """Memory as large as what a rank writes in one save; see ``bases_of`` for where each file's data lies in it.

    ``memory`` is all of it, ``address`` where it lies (a multiple of the page size), ``size_bytes`` how much it is. Close it
    at the end; whoever still holds a view of it keeps the memory until the view is released.

    Args:
        size_bytes: how much, rounded up to whole chunks.
        descriptor: shared memory of at least that size to map; -1 for private memory.
        warm: whether to fault it in now.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """

    def __init__(self, size_bytes: int, *, descriptor: int = -1, warm: bool = True) -> None:
        self.size_bytes = size = max(1, -(-size_bytes // CHUNK_BYTES)) * CHUNK_BYTES
        flags = (mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | (
            getattr(mmap, "MAP_POPULATE", 0) if warm else 0
        )
        try:
            self._memory = mmap.mmap(descriptor, size, flags=flags)
        except (OSError, ValueError) as err:
            raise StagingError(
                f"no memory for an arena of {size:,} bytes ({free_memory_bytes():,} free): {err}"
            ) from err
        with contextlib.suppress(AttributeError, OSError):
            # A child that a data loader forks must neither keep this memory nor be charged for it.
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._memory)
        handle = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(handle)
        del handle
        self._closed = False

    def release(self, at: int) -> None:
        """Says that the bytes of a chunk at ``at`` are no longer needed. Here they stay until the next save."""

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self.memory.release()
            with contextlib.suppress(BufferError):
                self._memory.close()


class Ring(Arena):
    """An arena of chunks that are used again and again. ``free`` holds where those lie that nobody uses."""

    def __init__(self, size_bytes: int = ARENA_BYTES, *, warm: bool = True) -> None:
        super().__init__(max(size_bytes, 2 * CHUNK_BYTES), warm=warm)
        self.free: queue.LifoQueue[int] = queue.LifoQueue()
        for at in range(0, self.size_bytes, CHUNK_BYTES):
            self.free.put(at)

    def release(self, at: int) -> None:
        """Gives the chunk at ``at`` back."""
        self.free.put(at)


def bases_of(data_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where the data of each file begins in a whole arena, and how many bytes they take together, in whole pages."""
    bases, at = [], 0
    for size in data_bytes:
        bases.append(at)
        at += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return bases, at


def shared_memory(size_bytes: int) -> int:
    """A descriptor of new anonymous shared memory, in whole chunks, all of it reserved.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """
    size = max(1, -(-size_bytes // CHUNK_BYTES)) * CHUNK_BYTES
    descriptor = os.memfd_create("keepstep-arena", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as err:
        os.close(descriptor)
        raise StagingError(f"no memory for an arena of {size:,} bytes ({free_memory_bytes():,} free): {err}") from err
    return descriptor


def free_memory_bytes() -> int:
    """Bytes this process could still get without swapping: of the machine, and of its control group when that has less."""
    free = 0
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as info:  # noqa: PTH123  a kernel file, not a path of ours
        free = int(next(line for line in info if line.startswith("MemAvailable")).split()[1]) << 10
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as most:  # noqa: PTH123
            limit = int(most.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as now:  # noqa: PTH123
            return max(0, min(free, limit - int(now.read())))
    except (OSError, ValueError):
        return free
