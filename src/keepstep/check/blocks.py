"""The data of one shard file against what was committed: every block by its digest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from keepstep.format.shardfile import ShardHeader, digest
from keepstep.storage.base import Blob

__all__ = ["VERIFY_THREADS", "Chunk", "compared_chunks"]

VERIFY_THREADS = 4
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Chunk:
    """A few MiB of data that were compared, and the blocks among them that differ."""

    bytes: int
    blocks: int
    bad: tuple[int, ...]


def compared_chunks(blob: Blob, header: ShardHeader) -> Iterator[Chunk]:
    """All data of one file against its digests, on a few threads that run no further ahead than they need.

    Raises:
        CorruptError, StorageError: the file ends early, or cannot be read.
    """
    starts = iter(range(0, header.data_bytes, CHUNK_BYTES))
    free: SimpleQueue[bytearray] = SimpleQueue()
    threads = min(VERIFY_THREADS, -(-header.data_bytes // CHUNK_BYTES))
    if threads <= 1:
        yield from (_compare(blob, header, start, bytearray(header.data_bytes)) for start in starts)
        return

    def work(start: int) -> Chunk:
        buffer = free.get()
        try:
            return _compare(blob, header, start, buffer)
        finally:
            free.put(buffer)

    for _ in range(threads):
        free.put(bytearray(CHUNK_BYTES))
    running: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-verify") as pool:
        for start in starts:
            running.append(pool.submit(work, start))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _compare(blob: Blob, header: ShardHeader, start: int, buffer: bytearray) -> Chunk:
    length = min(CHUNK_BYTES, header.data_bytes - start)
    view = memoryview(buffer)[:length]
    blob.read_into(header.data_offset + start, view)
    block = header.block_bytes
    first = start // block
    count = -(-length // block)
    expected = header.digests[first : first + count].tolist()
    bad = [
        first + index
        for index, wanted in enumerate(expected)
        if digest(view[index * block : (index + 1) * block]) != wanted
    ]
    return Chunk(length, count, tuple(bad))
