"""What is shown as a step, written as one: proved on its way, with digests from then on, in the memory of a few chunks."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
from collections.abc import Generator, Iterator

import msgspec

from keepstep.checkpointer.saving import file_heads
from keepstep.commit.publish import commit_step
from keepstep.errors import StepExistsError, StorageError
from keepstep.foreign.shown import ShownStep
from keepstep.format.manifest import MANIFEST_NAME, Receipt
from keepstep.move.arena import CHUNK_BYTES, ONCE_BYTES, Arena
from keepstep.move.writer import Chunk, Origin, ShardWriter
from keepstep.storage.base import Storage

__all__ = ["adopting", "reading"]


def adopting(step: ShownStep, target: Storage, *, overwrite: bool = False) -> Generator[int]:
    """Writes the step under ``target``, rank by rank; gives the bytes written so far, and has committed at its end.

    Not collective: one process does it all. What is cut off has committed nothing, and leaves nothing unless it is killed.

    Args:
        step: what another program has saved.
        target: the folder of the new step.
        overwrite: whether a step that is committed there may be replaced. Readers see the old or the new one, whole.

    Raises:
        StepExistsError: a step is committed there, and ``overwrite`` is False.
        CorruptError: the source is damaged. Nothing was committed.
        StorageError: it cannot be read, or not be written. Nothing was committed.
    """
    there = [name for name, _ in target.list("")]
    if MANIFEST_NAME in there and not overwrite:
        raise StepExistsError(f"{target.url} is already committed; it was left as it is, nothing was written")
    leftovers = tuple(name for name in there if name != MANIFEST_NAME)
    save_id, written = secrets.token_hex(4), 0
    receipts: list[Receipt] = []
    created = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    lineage = msgspec.structs.replace(step.manifest.lineage, exclusive=target.exclusive)
    manifest = msgspec.structs.replace(step.manifest, save_id=save_id, created=created, lineage=lineage, files={})
    try:
        with contextlib.closing(Arena(ONCE_BYTES, warm=False)) as arena:
            for rank in step.plans:
                for written in _write_rank(step, target, Origin(save_id, manifest.step, rank), arena, receipts):
                    yield written
    except BaseException:
        # Given up, or it cannot be read or written: of ranks that are done there are whole files.
        made = [manifest.file_name(folder, receipt.rank) for receipt in receipts for folder in receipt.files]
        with contextlib.suppress(StorageError):
            target.delete(made)
        raise
    commit_step(target, manifest, receipts, replace=overwrite, run=None, leftovers=leftovers)
    yield written


def _write_rank(
    step: ShownStep, target: Storage, origin: Origin, arena: Arena, receipts: list[Receipt]
) -> Iterator[int]:
    """Writes the files of one rank, and adds its receipt."""
    plans, done = step.plans[origin.rank], sum(r.data_bytes for one in receipts for r in one.files.values())
    heads = file_heads(plans, origin, None)
    free = arena.free
    assert free is not None  # noqa: S101  a ring was made
    with contextlib.closing(ShardWriter(target, heads, origin=origin, arena=arena)) as writer:
        for take in (writer.seal, writer.submit) if writer.seals_first else (writer.submit,):
            for number, plan in enumerate(plans):
                name = step.manifest.file_name(plan.folder, origin.rank)
                with contextlib.closing(step.open(name)) as blob:
                    start = blob.size_bytes - plan.data_bytes
                    for offset in range(0, plan.data_bytes, CHUNK_BYTES):
                        length = min(CHUNK_BYTES, plan.data_bytes - offset)
                        at = free.get()
                        blob.read_into(start + offset, arena.memory[at : at + length])
                        take(Chunk(number, offset, length, at))
                        done += length if take == writer.submit else 0
                        yield done
        receipts.append(writer.finish())


def reading(step: ShownStep) -> Iterator[tuple[int, int]]:
    """Reads every byte of what is shown, and proves what can be proved; gives how many were read, of how many.

    Raises:
        CorruptError: it is damaged.
        StorageError: it cannot be read.
    """
    buffer, done, total = memoryview(bytearray(CHUNK_BYTES)), 0, step.manifest.total_bytes
    for rank, plans in step.plans.items():
        for plan in plans:
            with contextlib.closing(step.open(step.manifest.file_name(plan.folder, rank))) as blob:
                for offset in range(0, blob.size_bytes, CHUNK_BYTES):
                    part = buffer[: min(CHUNK_BYTES, blob.size_bytes - offset)]
                    blob.read_into(offset, part)
                    done += len(part)
                    yield done, total
