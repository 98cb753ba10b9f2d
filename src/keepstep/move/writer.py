"""From the arena to durable shard files. Knows chunks and bytes, not tensors; imports no torch.

In: the heads of the files, and chunks as they are filled. Out: a receipt, once every file is durable. The processor fills
and hashes the next chunk while a few threads write those before it.
"""

from __future__ import annotations

import queue
import threading

import msgspec
import numpy as np

from keepstep.format.manifest import FileRecord, Receipt, file_name
from keepstep.format.shardfile import PAGE_BYTES, block_size, digest, seal_header
from keepstep.move.arena import Arena, bases_of
from keepstep.storage.base import Storage, Upload

__all__ = ["WRITER_THREADS", "Chunk", "FileHead", "Origin", "ShardWriter"]

WRITER_THREADS = 4


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """``length`` bytes at ``offset`` of the data section of file ``file``, which lie ``at`` that byte of the arena."""

    file: int
    offset: int
    length: int
    at: int


class FileHead(msgspec.Struct, frozen=True, gc=False):
    """A file that is to be written: its folder, its header with digests still zero, and the bytes of its data."""

    folder: str
    header: bytes
    data_bytes: int


class Origin(msgspec.Struct, frozen=True):
    """Whose files these are."""

    save_id: str
    step: int
    rank: int


class ShardWriter:
    """Writes the files of one rank in one save. ``close`` without ``finish`` before it leaves nothing behind.

    ``digests`` are those of all blocks of each file, where they are made already; else they are made here.

    Raises:
        StorageError: a file cannot be created; from ``submit`` and ``finish``, the first write that failed.
    """

    def __init__(
        self,
        storage: Storage,
        heads: tuple[FileHead, ...],
        *,
        origin: Origin,
        arena: Arena,
        digests: tuple[bytes, ...] = (),
    ) -> None:
        self._arena = arena
        self._heads = heads
        self._origin = origin
        self._failed: Exception | None = None
        self._over = False
        self._uploads: list[Upload] = []
        self._chunks: queue.Queue[tuple[Chunk, memoryview] | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._blocks = [block_size(head.data_bytes) for head in heads]
        self._sealed = bool(digests)
        self._digests = [np.frombuffer(each, "<u8") for each in digests] or [
            np.zeros(-(-head.data_bytes // block), np.uint64) for head, block in zip(heads, self._blocks, strict=True)
        ]
        try:
            for head in heads:
                name = file_name(head.folder, origin.rank, origin.save_id)
                self._uploads.append(storage.create(name, len(head.header) + head.data_bytes))
            if any(upload.in_order for upload in self._uploads):
                self._begin_in_order()
        except BaseException:
            self.close()
            raise

    def submit(self, chunk: Chunk) -> None:
        """Takes a filled chunk: hashes it while it is in the processor's cache, and leaves the writing to a thread.

        Its place in the arena is free again when it is written, or when this raises.
        """
        # The tail of the last chunk is zero up to a page, so that it too can be written directly; commit cuts it off.
        data = self._arena.memory[chunk.at : chunk.at + -(-chunk.length // PAGE_BYTES) * PAGE_BYTES]
        digests, block = self._digests[chunk.file], self._blocks[chunk.file]
        if not self._sealed:
            for index, at in enumerate(range(0, chunk.length, block), chunk.offset // block):
                digests[index] = digest(data[at : min(at + block, chunk.length)])
        self._chunks.put((chunk, data))
        if len(self._threads) < WRITER_THREADS:
            # Daemons: a write that never returns must not keep the interpreter from ending, as those of a pool would.
            thread = threading.Thread(target=self._write, name="keepstep-write", daemon=True)
            thread.start()
            self._threads.append(thread)
        if self._failed is not None:
            raise self._failed

    def finish(self) -> Receipt:
        """Waits until all is written, seals and commits every file: durable on return."""
        self._chunks.join()
        if self._failed is not None:
            raise self._failed
        files = {}
        for head, upload, digests in zip(self._heads, self._uploads, self._digests, strict=True):
            sealed = seal_header(head.header, digests)
            size = len(sealed) + head.data_bytes
            if not (upload.in_order and self._sealed):
                upload.write_at(0, memoryview(sealed))
            upload.commit(size)
            files[head.folder] = FileRecord(self._origin.rank, size, head.data_bytes, f"{digest(sealed):016x}")
        return Receipt(self._origin.rank, self._origin.save_id, files)

    def close(self) -> None:
        """Waits for the threads and drops what was not committed. Idempotent."""
        # What is still to be written is of no use any more: a slow storage is not to be fed with it.
        self._over = True
        self._chunks.join()
        for _ in self._threads:
            self._chunks.put(None)
        self._threads.clear()
        for upload in self._uploads:
            upload.close()

    def _begin_in_order(self) -> None:
        """Files that go on their way from their beginning are given it first, where all data is there to make its digests.

        (In a ring it is not: then the storage holds the file until its header comes.)
        """
        if not self._sealed and self._arena.free is not None:
            return
        bases, _ = bases_of([head.data_bytes for head in self._heads])
        for head, digests, block, base in zip(self._heads, self._digests, self._blocks, bases, strict=True):
            for index, at in enumerate(range(0, 0 if self._sealed else head.data_bytes, block)):
                digests[index] = digest(self._arena.memory[base + at : base + min(at + block, head.data_bytes)])
        self._sealed = True
        for head, upload, digests in zip(self._heads, self._uploads, self._digests, strict=True):
            if upload.in_order:
                upload.write_at(0, memoryview(seal_header(head.header, digests)))

    def _write(self) -> None:
        """A writer thread. After a failure the rest is only given back, so that nobody waits for a free place."""
        while (given := self._chunks.get()) is not None:
            chunk, data = given
            try:
                if self._failed is None and not self._over:
                    self._uploads[chunk.file].write_at(len(self._heads[chunk.file].header) + chunk.offset, data)
            except Exception as err:  # noqa: BLE001  thread entry: the error is raised by submit or finish
                self._failed = err
            finally:
                data.release()
                if self._arena.free is not None:
                    self._arena.free.put(chunk.at)
                self._chunks.task_done()
        self._chunks.task_done()
