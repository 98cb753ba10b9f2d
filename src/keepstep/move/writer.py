"""From the arena to durable shard files. Knows chunks and bytes, not tensors; imports no torch.

In: chunks in file order, as they are filled. Out: a receipt, once every file is durable. A few threads hash and write, so
that the processor fills and hashes while the disk writes.
"""

from __future__ import annotations

import queue
import threading

import msgspec
import numpy as np

from keepstep.format.manifest import FileRecord, Receipt, file_name
from keepstep.format.shardfile import BLOCK_BYTES, PAGE_BYTES, digest, pack_header, seal_header
from keepstep.move.arena import CHUNK_BYTES, Arena
from keepstep.plan.save_plan import FilePlan
from keepstep.storage.base import Storage, Upload
from keepstep.timeline import Timeline

__all__ = ["WRITER_THREADS", "Chunk", "Origin", "ShardWriter"]

WRITER_THREADS = 4


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """``length`` bytes at ``offset`` of the data section of file ``file``, in chunk ``slot`` of the arena."""

    file: int
    offset: int
    length: int
    slot: int


class Origin(msgspec.Struct, frozen=True):
    """Whose files these are."""

    save_id: str
    step: int
    rank: int


class ShardWriter:
    """Writes the files of one rank in one save. ``close`` without ``finish`` before it leaves nothing behind.

    Raises:
        StorageError: a file cannot be created; from ``submit`` and ``finish``, the first write that failed.
    """

    def __init__(
        self, storage: Storage, plans: tuple[FilePlan, ...], *, origin: Origin, arena: Arena, timeline: Timeline
    ) -> None:
        self._arena = arena
        self._plans = plans
        self._origin = origin
        self._timeline = timeline
        self._headers = [
            pack_header(
                tuple(slot.entry for slot in plan.slots),
                plan.data_bytes,
                save_id=origin.save_id,
                step=origin.step,
                rank=origin.rank,
            )
            for plan in plans
        ]
        self._digests = [np.zeros(-(-plan.data_bytes // BLOCK_BYTES), np.uint64) for plan in plans]
        self._uploads: list[Upload] = []
        self._failed: Exception | None = None
        self._queue: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for plan, header in zip(plans, self._headers, strict=True):
                name = file_name(plan.folder, origin.rank, origin.save_id)
                self._uploads.append(storage.create(name, len(header) + plan.data_bytes))
        except BaseException:
            self.close()
            raise
        chunks = sum(-(-plan.data_bytes // CHUNK_BYTES) for plan in plans)
        for index in range(min(WRITER_THREADS, chunks)):
            thread = threading.Thread(target=self._work, name=f"keepstep-write-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, chunk: Chunk) -> None:
        """Takes a filled chunk; its place in the arena is released when it is written. Returns at once."""
        if self._failed is not None:
            self._arena.free.put(chunk.slot)
            raise self._failed
        self._queue.put(chunk)

    def finish(self) -> Receipt:
        """Waits until all is written, seals and commits every file: durable on return."""
        self._join()
        if self._failed is not None:
            raise self._failed
        files = {}
        for plan, upload, header, digests in zip(self._plans, self._uploads, self._headers, self._digests, strict=True):
            sealed = seal_header(header, digests)
            size = len(sealed) + plan.data_bytes
            with self._timeline.span("write"):
                upload.write_at(0, memoryview(sealed))
                upload.commit(size)
            files[plan.folder] = FileRecord(self._origin.rank, size, plan.data_bytes, f"{digest(sealed):016x}")
        return Receipt(self._origin.rank, self._origin.save_id, files)

    def close(self) -> None:
        """Stops the threads and drops what was not committed. Idempotent."""
        self._join()
        for upload in self._uploads:
            upload.close()

    def _join(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        """A writer thread: hash, write, give the place back. After a failure the rest is only given back."""
        while (chunk := self._queue.get()) is not None:
            try:
                if self._failed is not None:
                    continue
                digests, first = self._digests[chunk.file], chunk.offset // BLOCK_BYTES
                # The tail of the last chunk is zero up to a page, so that it too can be written directly; commit cuts it.
                data = self._arena.view(chunk.slot, -(-chunk.length // PAGE_BYTES) * PAGE_BYTES)
                for index, start in enumerate(range(0, chunk.length, BLOCK_BYTES)):
                    digests[first + index] = digest(data[start : min(start + BLOCK_BYTES, chunk.length)])
                self._uploads[chunk.file].write_at(len(self._headers[chunk.file]) + chunk.offset, data)
            except Exception as err:  # noqa: BLE001  thread entry: the error is raised by submit or finish
                self._failed = err
            finally:
                self._arena.free.put(chunk.slot)
