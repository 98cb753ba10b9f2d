"""Shard files from one storage to another: every block proved by its digest while it passes, in memory that is bounded.

In: two folders of one step, and the files to be there. Out: counts, again and again. A file appears at the target when all
of it was proved, and not before; one that is there already is looked at and left.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue

from keepstep.errors import CorruptError, StorageError
from keepstep.format.manifest import FileRecord
from keepstep.format.shardfile import ShardHeader, digest, header_bytes, parse_header
from keepstep.storage.base import Blob, Storage, Upload

__all__ = ["LOOKS", "ShardName", "Transferred", "read_header", "transfer"]

CHUNK_BYTES = 1 << 23
FIRST_READ_BYTES = 1 << 16
LOOK_S = 0.05
LOOKS = ("sizes", "headers", "blocks")
"""How closely a file that is there already is looked at: a header proves that all of it is of this attempt, since a file
appears when it is whole."""


@dataclass(frozen=True, slots=True)
class ShardName:
    """A shard file by its name below the step, and what the manifest says of it."""

    name: str
    record: FileRecord


@dataclass(frozen=True, slots=True)
class Transferred:
    """So far: files and bytes that were sent, and those that were there already. Bytes of files begun are counted too."""

    files: int = 0
    bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0

    def __add__(self, more: Transferred) -> Transferred:
        """Both together."""
        return Transferred(
            self.files + more.files,
            self.bytes + more.bytes,
            self.kept_files + more.kept_files,
            self.kept_bytes + more.kept_bytes,
        )


def transfer(
    source: Storage, target: Storage, files: Sequence[ShardName], *, present: dict[str, int], look: str, threads: int
) -> Generator[Transferred, None, None]:
    """Sends what is not at the target yet; yields what is done after each part of the work. The last one is the result.

    Not collective; any thread. Holds a buffer a thread, and what the target's uploads hold: one more a thread, and parts on
    their way. Closed before its end, it takes back what was not whole.

    Args:
        source: the step's folder that is read; each file is opened once.
        target: the step's folder that is written.
        files: what is to be there in the end.
        present: names and sizes that were at the target before.
        look: one of ``LOOKS``.
        threads: how many read and write at once.

    Raises:
        CorruptError: a file at the source is not what was committed; it did not appear at the target.
        StorageError: something could not be read or written.
    """
    work = _Work(source, target, present, look, threads)
    waiting = iter(files)
    chunks: deque[tuple[_Sending, int]] = deque()
    running: set[Future[_Sending | Transferred]] = set()
    so_far = Transferred()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="keepstep-copy")
    try:
        while True:
            while len(running) < threads:
                if chunks:
                    running.add(pool.submit(work.send, *chunks.popleft()))
                elif (file := next(waiting, None)) is not None:
                    running.add(pool.submit(work.begin, file))
                else:
                    break
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                found = each.result()
                if isinstance(found, Transferred):
                    so_far += found
                else:
                    so_far += Transferred(bytes=found.header.data_offset)
                    chunks.extend((found, start) for start in range(0, found.header.data_bytes, CHUNK_BYTES))
            yield so_far
    finally:
        pool.shutdown(cancel_futures=True)
        work.close()
    yield so_far


class _Sending:
    """A file on its way: its header was proved and sent."""

    def __init__(self, name: str, header: ShardHeader, blob: Blob, upload: Upload) -> None:
        self.name, self.header, self.blob, self.upload = name, header, blob, upload
        self._left = -(-header.data_bytes // CHUNK_BYTES)
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        """One more chunk is there; whether it was the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def close(self) -> None:
        self.blob.close()
        self.upload.close()


class _Work:
    """What the threads do, one call at a time each."""

    def __init__(self, source: Storage, target: Storage, present: dict[str, int], look: str, threads: int) -> None:
        self._source, self._target, self._present, self._look = source, target, present, look
        self._open: set[_Sending] = set()
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(threads):
            # Aligned to a page, as direct I/O wants it.
            self._buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))

    def begin(self, file: ShardName) -> _Sending | Transferred:
        """Leaves a file that is there, or opens it and sends its header; one that is a chunk long is done with that."""
        size = file.record.size_bytes
        if self._present.get(file.name) == size and self._is_good(file):
            return Transferred(kept_files=1, kept_bytes=size)
        blob = _opened(self._source, file.name)
        try:
            raw, header = _proved_header(blob, file)
            upload = self._target.create(file.name, size)
        except BaseException:
            blob.close()
            raise
        sending = _Sending(file.name, header, blob, upload)
        self._open.add(sending)
        upload.write_at(0, memoryview(raw))
        if header.data_bytes > CHUNK_BYTES:
            return sending
        if header.data_bytes:
            return self.send(sending, 0) + Transferred(bytes=header.data_offset)
        self._finish(sending)
        return Transferred(files=1, bytes=size)

    def send(self, sending: _Sending, start: int) -> Transferred:
        """One chunk of a file's data; the last one ends the file."""
        buffer = self._buffers.get()
        try:
            view = buffer[: min(CHUNK_BYTES, sending.header.data_bytes - start)]
            _read_proved(sending.name, sending.blob, sending.header, start, view)
            sending.upload.write_at(sending.header.data_offset + start, view)
        finally:
            self._buffers.put(buffer)
        last = sending.is_last()
        if last:
            self._finish(sending)
        return Transferred(files=int(last), bytes=len(view))

    def close(self) -> None:
        """Gives up what is not whole."""
        while self._open:
            self._open.pop().close()

    def _finish(self, sending: _Sending) -> None:
        sending.upload.commit(sending.header.data_offset + sending.header.data_bytes)
        self._open.discard(sending)
        sending.close()

    def _is_good(self, file: ShardName) -> bool:
        """Whether the file at the target is the one that was committed, as far as is to be looked."""
        if self._look == "sizes":
            return True
        try:
            with self._target.open(file.name) as blob:
                _, header = _proved_header(blob, file)
                if self._look == "blocks":
                    self._read_all(file.name, blob, header)
        except CorruptError:
            return False
        except StorageError as err:
            # (Swept since it was seen.)
            if err.errno != errno.ENOENT:
                raise
            return False
        return True

    def _read_all(self, name: str, blob: Blob, header: ShardHeader) -> None:
        buffer = self._buffers.get()
        try:
            for start in range(0, header.data_bytes, CHUNK_BYTES):
                _read_proved(name, blob, header, start, buffer[: min(CHUNK_BYTES, header.data_bytes - start)])
        finally:
            self._buffers.put(buffer)


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


def _opened(source: Storage, name: str) -> Blob:
    """The file, waited for as long as the storage may be late: whoever has committed the step has seen it."""
    end = time.monotonic() + source.late_s
    while True:
        try:
            return source.open(name)
        except StorageError as err:
            if err.errno != errno.ENOENT or time.monotonic() >= end:
                raise
        time.sleep(LOOK_S)


def _proved_header(blob: Blob, file: ShardName) -> tuple[bytes, ShardHeader]:
    """The header as it is stored and as it is read, once it is the one that the manifest means."""
    name, record = file.name, file.record
    if blob.size_bytes != record.size_bytes:
        raise CorruptError(f"{name} has {blob.size_bytes:,} bytes; {record.size_bytes:,} were written")
    raw = read_header(blob, name)
    if f"{digest(raw):016x}" != record.header_digest:
        raise CorruptError(f"{name}: the header is not the one that was committed (digest differs)")
    return raw, parse_header(raw, blob.size_bytes, name)


def _read_proved(name: str, blob: Blob, header: ShardHeader, start: int, view: memoryview) -> None:
    """Fills the view from byte ``start`` of the data, a multiple of the blocks, and compares every block."""
    blob.read_into(header.data_offset + start, view)
    block = header.block_bytes
    first = start // block
    for index, wanted in enumerate(header.digests[first : first + -(-len(view) // block)].tolist()):
        if digest(view[index * block : (index + 1) * block]) != wanted:
            at = header.data_offset + start + index * block
            raise CorruptError(f"{name}: the block at byte {at:,} does not match its digest")
