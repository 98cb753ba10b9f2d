"""From shard files into tensors, every block proved by its digest before its bytes are used.

In: pieces to read and the targets they fill. Out: filled targets and the count of bytes read. Large runs go straight into
the target; what shares blocks with other things is read once into a buffer and copied out. Ranges that touch are read
together. A block is 64 KiB; reading part of a tensor costs at most a block more at either end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from keepstep.errors import CorruptError, StorageError
from keepstep.format.layout import Want
from keepstep.format.manifest import FileRecord, Manifest, file_name
from keepstep.format.shardfile import Entry, ShardHeader, digest, header_bytes, parse_header
from keepstep.plan.load_plan import Piece, Read, plan_reads
from keepstep.storage.base import Blob, Storage

__all__ = [
    "READER_THREADS",
    "ShardFile",
    "copy_bits",
    "copy_box",
    "open_shard",
    "read_named",
    "read_pieces",
    "read_proved",
]

READER_THREADS = min(4, max(2, os.cpu_count() or 2))
CHUNK_BYTES = 1 << 22
STRAIGHT_BYTES = 1 << 20
PIECE_BYTES = 1 << 19
FIRST_READ_BYTES = 1 << 12
GAP_SHARE = 32
"""Over a wire, a gap of at most this share of what is read before it is read too, in place of one more request."""
LOOK_S = 0.05
MOST_FILES = 512
FILES_SHARE = 8
"""Files that one call has open at once, and which part that may be of all that the process may have."""


class ShardFile(msgspec.Struct, frozen=True):
    """An open shard file and its proved header. ``by_piece`` finds an entry by key and offsets.

    ``request_bytes`` is how much is best read at once; 0 where any size is as good, as on a disk. ``sealed`` is whether its
    blocks have digests; see Storage.
    """

    name: str
    blob: Blob
    header: ShardHeader
    by_piece: dict[tuple[str, tuple[int, ...]], Entry]
    request_bytes: int = 0
    sealed: bool = True


class _Task(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, stop) of a data section, whole blocks. Straight into ``target`` when it is set, else to ``reads``."""

    file: ShardFile
    start: int
    stop: int
    target: int = 0
    reads: tuple[Read, ...] = ()


def open_shard(
    storage: Storage, manifest: Manifest, folder: str, rank: int, records: dict[int, FileRecord]
) -> ShardFile:
    """Opens a shard file of a step and proves its header against the manifest's record of it, one of ``records``.

    Raises:
        CorruptError: no such record, wrong digest, or a header that makes no sense; or wrong size, also after as long as the
            storage may be late.
        StorageError: the file is missing, also after so long, or cannot be read.
    """
    expected = records.get(rank)
    if expected is None:
        raise CorruptError(f"{storage.url}: the manifest lists no file of rank {rank} in {folder!r}")
    name = file_name(folder, rank, manifest.save_id)
    end = time.monotonic() + storage.late_s
    while True:
        try:
            blob = storage.open(name)
            if blob.size_bytes == expected.size_bytes or time.monotonic() >= end:
                break
            blob.close()
        except StorageError as err:
            # Whoever has committed the step has seen it.
            if err.errno != errno.ENOENT or time.monotonic() >= end:
                raise
        time.sleep(LOOK_S)
    try:
        if blob.size_bytes != expected.size_bytes:
            raise CorruptError(f"{name} has {blob.size_bytes:,} bytes; {expected.size_bytes:,} were written")
        head = bytearray(min(FIRST_READ_BYTES, blob.size_bytes))
        blob.read_into(0, memoryview(head))
        length = header_bytes(memoryview(head), blob.size_bytes, name)
        if length > len(head):
            rest = bytearray(length - len(head))
            blob.read_into(len(head), memoryview(rest))
            head += rest
        raw = bytes(head[:length])
        if f"{digest(raw):016x}" != expected.header_digest:
            raise CorruptError(f"{name}: the header is not the one that was committed (digest differs)")
        header = parse_header(raw, blob.size_bytes, name)
    except BaseException:
        blob.close()
        raise
    by_piece = {(entry.key, entry.box.offsets): entry for entry in header.entries}
    return ShardFile(name, blob, header, by_piece, storage.request_bytes, storage.sealed)


def read_pieces(
    storage: Storage, manifest: Manifest, pieces: list[Piece], *, wants: list[Want], targets: list[torch.Tensor]
) -> int:
    """Fills the targets from the pieces; returns the bytes read, headers included. Not collective; any thread.

    Args:
        storage: the step's own storage (names are relative to the step).
        manifest: the step's manifest.
        pieces: what to read, as ``find_pieces`` gave it.
        wants: what each target needs.
        targets: one tensor a want, with the want's shape and the stored dtype, on any device.

    Raises:
        CorruptError: a block, header or size that is not what was written; targets may hold part of the new bytes.
        StorageError: a file that cannot be read.
    """
    by_file: dict[tuple[str, int], list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault((piece.folder, piece.rank), []).append(piece)
    bytes_read = 0
    records: dict[str, dict[int, FileRecord]] = {}
    for folder, _ in by_file:
        if folder not in records:
            records[folder] = {record.rank: record for record in manifest.files.get(folder, ())}
    # A step of many ranks has more files than a process may have open, of which others need some too.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(4, min(MOST_FILES, limit // FILES_SHARE if limit > 0 else MOST_FILES))
    order = [*by_file.items()]
    for batch in (order[start : start + most] for start in range(0, len(order), most)):
        files: list[ShardFile] = []
        try:
            tasks: list[_Task] = []
            if storage.requests_at_once and len(batch) > 1:
                files = _open_together(storage, manifest, [which for which, _ in batch], records)
            for number, ((folder, rank), here) in enumerate(batch):
                if number == len(files):
                    files.append(open_shard(storage, manifest, folder, rank, records[folder]))
                file = files[number]
                bytes_read += file.header.data_offset
                reads: list[Read] = []
                for piece in here:
                    entry = file.by_piece.get((piece.key, piece.stored.offsets))
                    dtype = str(targets[piece.want].dtype)
                    if entry is None or entry.box != piece.stored or dtype != f"torch.{entry.dtype}":
                        where = f"{piece.key!r}{piece.stored}"
                        raise CorruptError(f"{file.name} does not hold {where}, which the manifest expects there")
                    reads.extend(plan_reads(piece, entry, wants[piece.want]))
                tasks.extend(_tasks(file, reads, targets))
            bytes_read += sum(task.stop - task.start for task in tasks)
            _run(tasks, wants, targets, storage.requests_at_once or READER_THREADS)
        finally:
            for file in files:
                file.blob.close()
    return bytes_read


def read_named(
    storage: Storage, manifest: Manifest, folder: str, *, rank: int, targets: dict[str, torch.Tensor | None]
) -> int:
    """Reads entries by name from the file of one rank, whole and proved; returns the bytes read.

    Args:
        storage: the step's own storage.
        manifest: the step's manifest.
        folder: which of the rank's files.
        rank: whose file.
        targets: by name, the tensor to fill; None is replaced by a new byte tensor, or stays when there is no such entry.

    Raises:
        CorruptError: the file is not there or not what was written, or lacks an entry that a tensor waits for.
    """
    records = {record.rank: record for record in manifest.files.get(folder, ())}
    file = open_shard(storage, manifest, folder, rank, records)
    with contextlib.closing(file.blob):
        entries = {entry.name: entry for entry in file.header.entries if entry.name in targets}
        wants: list[Want] = []
        held: list[torch.Tensor] = []
        reads: list[Read] = []
        for name, target in targets.items():
            entry = entries.get(name)
            if entry is None and target is None:
                continue
            found = entry and (entry.box.sizes, f"torch.{entry.dtype}")
            if entry is None or (target is not None and found != (tuple(target.shape), str(target.dtype))):
                raise CorruptError(f"{file.name} has no entry {name!r} of the type and shape that the values tell")
            if target is None:
                target = targets[name] = torch.empty(entry.stop - entry.start, dtype=torch.uint8, device="cpu")
            want = Want(name, entry.box, target.is_contiguous())
            if entry.stop > entry.start:
                reads.extend(plan_reads(Piece("", 0, name, entry.box, entry.box, len(wants)), entry, want))
            wants.append(want)
            held.append(target)
        tasks = list(_tasks(file, reads, held))
        _run(tasks, wants, held, storage.requests_at_once or READER_THREADS)
    return file.header.data_offset + sum(task.stop - task.start for task in tasks)


def _open_together(
    storage: Storage, manifest: Manifest, wanted: list[tuple[str, int]], records: dict[str, dict[int, FileRecord]]
) -> list[ShardFile]:
    """Opens several files, each with a request of its own and many at once; when one fails, none stays open."""
    with ThreadPoolExecutor(min(storage.requests_at_once, len(wanted)), thread_name_prefix="keepstep-open") as pool:
        opening = [pool.submit(open_shard, storage, manifest, *each, records[each[0]]) for each in wanted]
    for each in opening:
        if each.exception() is not None:
            for other in opening:
                if other.exception() is None:
                    other.result().blob.close()
    return [each.result() for each in opening]


def _tasks(file: ShardFile, reads: list[Read], targets: list[torch.Tensor]) -> Iterator[_Task]:
    """Cuts reads into block-aligned tasks: the inside of large runs straight, everything else grouped by neighbourhood.

    Over a wire a request for the few bytes beside a run takes as long as some for the run: there all is grouped, and what
    lies in a small gap is read as well.
    """
    end, far = file.header.data_bytes, file.request_bytes
    block = file.header.block_bytes if file.sealed else 1
    most = far or 2 * CHUNK_BYTES
    shared: list[Read] = []
    for read in reads:
        target = targets[read.want]
        first = -(-read.start // block) * block
        last = read.stop if read.stop == end else read.stop // block * block
        if far or read.at < 0 or last - first < STRAIGHT_BYTES or target.device.type != "cpu":
            if read.at < 0:
                shared.append(read)
                continue
            # A long run that cannot go straight to its target is read in pieces that fit a buffer, whole blocks each.
            step = max(STRAIGHT_BYTES if far else CHUNK_BYTES, block)
            cuts = [read.start, *range((read.start // step + 1) * step, read.stop, step), read.stop]
            runs = (run for run in itertools.pairwise(cuts) if run[0] < run[1])
            shared.extend(Read(start, stop, read.want, read.at + start - read.start) for start, stop in runs)
            continue
        address = target.data_ptr() + read.at - read.start
        for start in range(first, last, CHUNK_BYTES):
            yield _Task(file, start, min(start + CHUNK_BYTES, last), address + start)
        if read.start < first:
            shared.append(Read(read.start, first, read.want, read.at))
        if last < read.stop:
            shared.append(Read(last, read.stop, read.want, read.at + last - read.start))
    shared.sort(key=lambda read: read.start)
    group: list[Read] = []
    low = high = 0
    for read in shared:
        first = read.start // block * block
        last = min(-(-read.stop // block) * block, end)
        gap = (high - low) // GAP_SHARE if far else 0
        if group and (first > high + gap or max(last, high) - low > most):
            yield _Task(file, low, high, 0, tuple(group))
            group = []
        if not group:
            low = high = first
        group.append(read)
        high = max(high, last)
    if group:
        yield _Task(file, low, high, 0, tuple(group))


def _run(tasks: list[_Task], wants: list[Want], targets: list[torch.Tensor], most_threads: int) -> None:
    """Executes the tasks on a few threads; the first failure stops the rest and is raised."""
    tasks.sort(key=lambda task: (id(task.file), task.start))
    pending = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        # A thread's own buffer, used again for every task: fresh memory would be faulted in each time.
        scratch = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        while not stop.is_set():
            with lock:
                task = next(pending, None)
            if task is None:
                return
            try:
                _perform(task, wants, targets, scratch)
            except BaseException:
                stop.set()
                raise

    threads = min(most_threads, len(tasks))
    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-read") as pool:
        running = [pool.submit(work) for _ in range(threads)]
    for future in running:
        future.result()


def _perform(task: _Task, wants: list[Want], targets: list[torch.Tensor], scratch: list[torch.Tensor]) -> None:
    length = task.stop - task.start
    if task.target:
        view = memoryview((ctypes.c_char * length).from_address(task.target)).cast("B")
        read_proved(task.file, task.start, view)
        return
    if scratch[0].numel() < length:
        scratch[0] = torch.empty(max(length, CHUNK_BYTES), dtype=torch.uint8, device="cpu")
    buffer = scratch[0][:length]
    address = buffer.data_ptr()
    read_proved(task.file, task.start, memoryview((ctypes.c_char * length).from_address(address)).cast("B"))
    for read in task.reads:
        target = targets[read.want]
        skip = read.start - task.start
        if target.device.type == "cpu" and read.box is None:
            ctypes.memmove(target.data_ptr() + read.at, address + skip, read.stop - read.start)
            continue
        # In a worker thread the current device is the first one: without this it would get a context it does not need.
        with torch.cuda.device_of(target):
            if read.box is not None:
                copy_box(buffer[skip:], read, wants[read.want], target)
                continue
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            flat[read.at : read.at + read.stop - read.start].copy_(buffer[skip : skip + read.stop - read.start])


def read_proved(file: ShardFile, start: int, view: memoryview, *, there: bool = False) -> None:
    """Reads whole blocks and compares each with its digest, on a disk while it is still in the processor's cache.

    A block that has come over a wire and does not match is asked for once more: it may have been spoilt on the way.

    Args:
        file: the open file.
        start: the first byte of its data, where a block begins.
        view: what is filled.
        there: the bytes are in ``view`` already, and are only compared.

    Raises:
        CorruptError: a block is not what was written.
    """
    header, block = file.header, file.header.block_bytes
    piece = max(file.request_bytes or PIECE_BYTES, block)
    for done in range(0, len(view), piece):
        part, offset = view[done : done + piece], header.data_offset + start + done
        if not there:
            file.blob.read_into(offset, part)
        if not file.sealed:
            continue
        first = (start + done) // block
        expected = header.digests[first : first + -(-len(part) // block)].tolist()
        for index, at in enumerate(range(0, len(part), block)):
            one = part[at : at + block]
            good = digest(one) == expected[index]
            if not good and file.request_bytes and not there:
                file.blob.read_into(offset + at, one)
                good = digest(one) == expected[index]
            if not good:
                where = f"the {block // 1024} KiB block at byte {offset + at:,}"
                raise CorruptError(f"{file.name}: {where} does not match its digest")


def copy_box(buffer: torch.Tensor, read: Read, want: Want, target: torch.Tensor) -> None:
    """Copies the box a span holds into its place in the target, both with gaps."""
    assert read.box is not None  # noqa: S101  only reads with a box come here
    item = target.element_size()
    count = (read.stop - read.start) // item
    # A span starts at a multiple of the element size in the file, but the block that holds it starts anywhere.
    typed = buffer[: count * item]
    if typed.data_ptr() % item:
        typed = typed.clone()
    source = typed.view(target.dtype).as_strided(read.box.sizes, read.strides)
    view = target
    for dim, (start, size) in enumerate(zip(read.box.offsets, read.box.sizes, strict=True)):
        view = view.narrow(dim, start - want.box.offsets[dim], size)
    copy_bits(source, view)


def copy_bits(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies between tensors of one shape and dtype; those of one byte as bytes, for not every torch copies all of them."""
    if source.element_size() == 1:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    with torch.no_grad():
        target.copy_(source)
