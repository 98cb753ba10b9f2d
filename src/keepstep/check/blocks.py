"""The bytes of one shard file against what was committed: its header, then every block of its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from keepstep.format.shardfile import ShardHeader, digest, header_bytes
from keepstep.storage.base import Blob

__all__ = ["VERIFY_THREADS", "Chunk", "compared_chunks", "read_header"]

VERIFY_THREADS = 4
CHUNK_BYTES = 1 << 22
FIRST_READ_BYTES = 1 << 16


def read_header(blob: Blob, name: str) -> bytes:
    """The raw header of an open shard file, with its length field; refuses a length that cannot be true.

    Raises:
        CorruptError: too short for a header, or a length that does not fit the file.
        StorageError: it cannot be read.
    """
    head = bytearray(min(FIRST_READ_BYTES, blob.size_bytes))
    if head:
        blob.read_into(0, memoryview(head))
    length = header_bytes(memoryview(head), blob.size_bytes, name)
    if length > len(head):
        rest = bytearray(length - len(head))
        blob.read_into(len(head), memoryview(rest))
        head += rest
    return bytes(head[:length])


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
