"""From the arena to durable shard files. Knows chunks and bytes, not tensors; imports no torch.

In: the heads of the files, and chunks as they are filled. Out: a receipt, once every file is durable. The processor fills
and hashes the next chunk while a few threads write those before it.
"""

from __future__ import annotations

import queue
import threading

import msgspec
import numpy as np
import numpy.typing as npt

from keepstep.errors import StagingError
from keepstep.format.manifest import FileRecord, Receipt, file_name
from keepstep.format.shardfile import PAGE_BYTES, block_size, digest, seal_header
from keepstep.move.arena import Arena, bases_of
from keepstep.storage.base import Storage, Upload

__all__ = ["WRITER_THREADS", "Chunk", "FileHead", "Origin", "ShardWriter"]

WRITER_THREADS = 4
FAR_THREADS = 2


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

    ``digests`` are those of all blocks of each file, where they are made already; else they are made here. ``seals_first``
    says that files go on their way from their beginning, and that their data is not there yet: then every chunk is to be
    filled twice, once for ``seal`` and once for ``submit``, or else the files are held in memory until their headers come.

    Raises:
        StorageError: a file cannot be created; from ``submit`` and ``finish``, the first write that failed.
        StagingError: from ``submit``, a chunk is not what ``seal`` has seen.
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
        self.seals_first = False
        self._unsealed_bytes = sum(head.data_bytes for head in heads)
        try:
            for head in heads:
                name = file_name(head.folder, origin.rank, origin.save_id)
                self._uploads.append(storage.create(name, len(head.header) + head.data_bytes))
            if any(upload.in_order for upload in self._uploads):
                # In a ring the data is not there yet.
                self.seals_first = not self._sealed and arena.free is not None
                if self.seals_first:
                    # What waits takes memory, and is sent no sooner by it.
                    self._chunks = queue.Queue(FAR_THREADS)
                if not self.seals_first:
                    self._begin_in_order()
        except BaseException:
            self.close()
            raise

    def seal(self, chunk: Chunk) -> None:
        """Takes the digests of a filled chunk and gives its place back. After the last one the headers go on their way."""
        data = self._arena.memory[chunk.at : chunk.at + chunk.length]
        self._hash(chunk, data, self._digests[chunk.file])
        data.release()
        if self._arena.free is not None:
            self._arena.free.put(chunk.at)
        self._unsealed_bytes -= chunk.length
        if not self._unsealed_bytes:
            self._begin_in_order()

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
        elif self.seals_first:
            self._check_unchanged(chunk, data)
        self._chunks.put((chunk, data))
        if len(self._threads) < (FAR_THREADS if self.seals_first else WRITER_THREADS):
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
        ends: list[tuple[Upload, int]] = []
        for head, upload, digests in zip(self._heads, self._uploads, self._digests, strict=True):
            sealed = seal_header(head.header, digests)
            size = len(sealed) + head.data_bytes
            if not (upload.in_order and self._sealed):
                upload.write_at(0, memoryview(sealed))
            if upload.in_order:
                ends.append((upload, size))
            else:
                upload.commit(size)
            files[head.folder] = FileRecord(self._origin.rank, size, head.data_bytes, f"{digest(sealed):016x}")
        if ends:
            _end_together(ends)
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
        """Gives files that go on their way from their beginning their headers, now that all data was there to hash."""
        bases, _ = bases_of([head.data_bytes for head in self._heads])
        for file, (head, digests, base) in enumerate(zip(self._heads, self._digests, bases, strict=True)):
            if not self._sealed and not self.seals_first:
                whole = Chunk(file, 0, head.data_bytes, base)
                self._hash(whole, self._arena.memory[base : base + head.data_bytes], digests)
        self._sealed = True
        for head, upload, digests in zip(self._heads, self._uploads, self._digests, strict=True):
            if upload.in_order:
                upload.lend_at(0, memoryview(seal_header(head.header, digests)))

    def _hash(self, chunk: Chunk, data: memoryview, digests: npt.NDArray[np.uint64]) -> None:
        block = self._blocks[chunk.file]
        for index, at in enumerate(range(0, chunk.length, block), chunk.offset // block):
            digests[index] = digest(data[at : min(at + block, chunk.length)])

    def _check_unchanged(self, chunk: Chunk, data: memoryview) -> None:
        """The digests are gone with the header already: what follows it has to be what they were made of."""
        digests, block = self._digests[chunk.file], self._blocks[chunk.file]
        for index, at in enumerate(range(0, chunk.length, block), chunk.offset // block):
            if digest(data[at : min(at + block, chunk.length)]) != digests[index]:
                if self._arena.free is not None:
                    self._arena.free.put(chunk.at)
                raise StagingError(
                    f"the state changed while it was being saved (folder {self._heads[chunk.file].folder!r}, byte"
                    f" {chunk.offset + at:,} of the data): what was sent would be neither the old nor the new one. Nothing"
                    " was committed. Find the thread that writes to it"
                )

    def _write(self) -> None:
        """A writer thread. After a failure the rest is only given back, so that nobody waits for a free place."""
        while (given := self._chunks.get()) is not None:
            chunk, data = given
            try:
                if self._failed is None and not self._over:
                    upload = self._uploads[chunk.file]
                    # In a whole arena the data stays where it is until the save is over.
                    write = upload.write_at if self._arena.free is not None else upload.lend_at
                    write(len(self._heads[chunk.file].header) + chunk.offset, data)
            except Exception as err:  # noqa: BLE001  thread entry: the error is raised by submit or finish
                self._failed = err
            finally:
                data.release()
                if self._arena.free is not None:
                    self._arena.free.put(chunk.at)
                self._chunks.task_done()
        self._chunks.task_done()


def _end_together(ends: list[tuple[Upload, int]]) -> None:
    """Commits uploads, each with its size. Each is a few requests that wait for each other; those of others need not wait.

    Raises:
        StorageError: the first that failed; all have ended by then.
    """
    failed: list[Exception] = []

    def end(upload: Upload, size_bytes: int) -> None:
        try:
            upload.commit(size_bytes)
        except Exception as err:  # noqa: BLE001  thread entry: raised below
            failed.append(err)

    threads = [threading.Thread(target=end, args=each, name="keepstep-commit", daemon=True) for each in ends[1:]]
    for thread in threads:
        thread.start()
    end(*ends[0])
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
