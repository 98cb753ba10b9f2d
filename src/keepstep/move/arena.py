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
    "bases_of",
    "check_budget",
    "free_bytes",
    "shared_memory",
    "whole_chunks",
]

CHUNK_BYTES = 1 << 22
ARENA_BYTES = 1 << 26
BUDGET_SHARE = 0.8
"""Without a budget of the user's own, arenas may take this share of the memory that is free."""
_POPULATE_WRITE = 23
"""Linux 5.14 and later; elsewhere private memory is written to, and shared memory is left to its first use."""
ONCE_BYTES = 8 * CHUNK_BYTES
"""For a single save, whose arena is used once. Chosen by measurement, see benchmarks/README.md."""


class Arena:
    """Page-aligned memory, used as a ring or whole.

    ``memory`` is all of it, ``address`` where it lies (a multiple of the page size), ``size_bytes`` how much it is. A ring
    has a queue ``free`` of where the chunks lie that nobody uses: get one, fill it, put it back when it is written. Close
    the arena at the end; whoever still holds a view of it keeps the memory until the view is released.

    Args:
        size_bytes: how much, rounded up to whole chunks; a ring has at least two.
        ring: whether it is a ring; else see ``bases_of`` for where each file's data lies in it.
        descriptor: shared memory of at least that size to map; -1 for private memory.
        warm: whether to fault it in now.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """

    def __init__(
        self, size_bytes: int = ARENA_BYTES, *, ring: bool = True, descriptor: int = -1, warm: bool = True
    ) -> None:
        self.size_bytes = size = max(2 if ring else 1, -(-size_bytes // CHUNK_BYTES)) * CHUNK_BYTES
        flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._memory = mmap.mmap(descriptor, size, flags=flags)
        except (OSError, ValueError) as err:
            raise StagingError(f"no memory for an arena of {size:,} bytes ({free_bytes():,} free): {err}") from err
        with contextlib.suppress(AttributeError, OSError):
            # A child that a data loader forks must neither keep this memory nor be charged for it.
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._memory)
        handle = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(handle)
        del handle
        if warm:
            _fault_in(self.address, size, shared=descriptor >= 0)
        self.free: queue.LifoQueue[int] | None = queue.LifoQueue() if ring else None
        if self.free is not None:
            for at in range(0, size, CHUNK_BYTES):
                self.free.put(at)
        self._closed = False

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(BufferError):
                self.memory.release()
                self._memory.close()


def bases_of(data_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where the data of each file begins in a whole arena, and how many bytes they take together, in whole pages."""
    bases, at = [], 0
    for size in data_bytes:
        bases.append(at)
        at += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return bases, at


def whole_chunks(size_bytes: int) -> int:
    """The size that an arena for this many bytes has."""
    return max(1, -(-size_bytes // CHUNK_BYTES)) * CHUNK_BYTES


def shared_memory(size_bytes: int) -> int:
    """A descriptor of new anonymous shared memory, in whole chunks, all of it reserved.

    Raises:
        StagingError: the memory cannot be had; says how much was asked for and how much is free.
    """
    size = whole_chunks(size_bytes)
    descriptor = os.memfd_create("keepstep-arena", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as err:
        os.close(descriptor)
        raise StagingError(f"no memory for an arena of {size:,} bytes ({free_bytes():,} free): {err}") from err
    return descriptor


def check_budget(size_bytes: int, budget_bytes: int, held_bytes: int) -> None:
    """Refuses an arena before it is allocated.

    Args:
        size_bytes: what is asked for.
        budget_bytes: what all arenas of this machine may have together; 0 for most of what is free.
        held_bytes: what they have already.

    Raises:
        StagingError: names what was asked for, the budget, and what is free.
    """
    free = free_bytes()
    budget = budget_bytes or held_bytes + int(free * BUDGET_SHARE)
    if held_bytes + size_bytes > budget or (free and size_bytes > free):
        raise StagingError(
            f"an arena of {size_bytes:,} bytes was asked for; the budget of this machine is {budget:,} bytes, of which"
            f" arenas hold {held_bytes:,}; {free:,} bytes of memory are free. Nothing was written, committed steps are"
            " untouched"
        )


def _fault_in(address: int, size: int, *, shared: bool) -> None:
    """Touches every page without changing what is in it; other threads run meanwhile."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if madvise(address, size, _POPULATE_WRITE) == 0:
            return
    if not shared:
        ctypes.memset(address, 0, size)


def free_bytes() -> int:
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
