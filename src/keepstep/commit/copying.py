"""A committed step from one root to another, as it is: the same manifest, byte for byte, and files proved on the way.

In: two roots and a step. Out: a ``Copied``, again and again while bytes pass; the last one is the result. The manifest is
put in place last, so until then nothing is there; a copy that was cut off goes on where it was. Imports no torch.

What readers go by is the same in both roots: the run, the incarnation and the save id. So two roots that have gone on apart
from each other are told apart, and not mixed.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace

from keepstep.commit.aside import read_notes, set_aside
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.origins import NOTHING, Origin, check_run, introduce, manifest_at, read_origin
from keepstep.commit.pins import pinned_steps
from keepstep.commit.publish import newest_incarnation, point_latest
from keepstep.commit.transfer import ShardName, Transferred, transfer
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from keepstep.format.shardfile import digest
from keepstep.storage.base import Storage

__all__ = ["COPY_THREADS", "Copied", "copy_step", "copying"]

COPY_THREADS = 4
ROUNDS = 3
_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Copied:
    """What is known of a copy so far. ``outcome`` is empty until its end.

    Then it is ``copied``, ``replaced`` (an older step of this number was in its place), ``there`` (nothing was to be done),
    or ``mended`` (it was there, and files of it were not). ``files`` and ``bytes`` were sent, ``kept_files`` and
    ``kept_bytes`` were at the target already; ``total_files`` and ``total_bytes`` are those of the step.
    """

    step: int
    save_id: str
    url: str
    total_files: int
    total_bytes: int
    files: int = 0
    bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    outcome: str = ""


def copy_step(
    source: Storage, target: Storage, step: int | None, *, threads: int = COPY_THREADS, reread: bool = False
) -> Copied:
    """Copies one committed step; it is durable and committed at the target on return. See ``copying``."""
    return deque(copying(source, target, step, threads=threads, reread=reread), maxlen=1)[0]


def copying(
    source: Storage, target: Storage, step: int | None, *, threads: int = COPY_THREADS, reread: bool = False
) -> Generator[Copied, None, None]:
    """Copies one committed step from root to root; yields what is done so far. The last one is the result.

    Not collective; any thread, any process; several at once do no harm. Given up before its end, by ``close`` or by a kill,
    the target has files and no step, and the next copy sends what is missing. Memory: see ``transfer``.

    Args:
        source: root of the run. It may go on meanwhile.
        target: root that has this run already, or nothing.
        step: the step; None where ``source`` is the folder of a step outside of any run.
        threads: how many files or parts of files are on their way at once.
        reread: whether every byte that is at the target already is read and compared. Without, the header of each file is.

    Raises:
        StepNotFoundError: no such step is committed, or it was removed or replaced while it was copied.
        StepExistsError: another step of this number is there, and is not older, is pinned, or of another run.
        MismatchError: the target belongs to another run, or both roots have gone on apart from each other.
        CorruptError, FormatError: the step is damaged, or that of its number at the target.
        StorageError: something could not be read or written, or there is not enough space.
    """
    if source.url == target.url:
        raise UsageError(f"{source.url} cannot be copied to itself")
    began = time.monotonic()
    origin = read_origin(source, step)
    manifest, place = origin.manifest, step_storage(target, origin.manifest.step)
    so_far = Copied(manifest.step, manifest.save_id, place.url, len(origin.files), manifest.total_bytes)
    check_run(origin, target)
    for _ in range(ROUNDS):
        newest = newest_incarnation(target)
        standing = _look(origin, target, place, reread=reread)
        try:
            for done in transfer(
                origin.storage, place, standing.files, present=standing.present, look=standing.look, threads=threads
            ):
                yield _with(so_far, done, began)
        except (StorageError, CorruptError) as err:
            _check_still_there(origin, target, err)
            raise
        if standing.same:
            # Whoever put the manifest there may have been killed before it was durable.
            place.delete([NOTHING])
            outcome, now = "mended" if done.files else "there", standing.there
            break
        if done.kept_files:
            # So may whoever wrote what was kept.
            place.delete(sorted({f"{file.name.partition('/')[0]}/{NOTHING}" for file in standing.files}))
        introduce(origin, target)
        # A start of the job at the target sweeps what is not committed: files that were there may be gone again.
        if newest_incarnation(target) == max(newest, manifest.lineage.incarnation):
            _publish(origin, target, standing)
            outcome, now = "copied" if standing.there is None else "replaced", origin.raw
            break
    else:
        again = OSError(errno.EAGAIN, "jobs keep starting there; no step was committed, and what was sent stays")
        raise StorageError("copy", place.url, again)
    _point(target, place, now or origin.raw)
    yield replace(_with(so_far, done, began), outcome=outcome)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What is at the target: ``there`` is a manifest, of this step when it is the ``same``, else of one that it replaces."""

    same: bool
    there: bytes | None
    present: dict[str, int]
    files: tuple[ShardName, ...]
    look: str


def _look(origin: Origin, target: Storage, place: Storage, *, reread: bool) -> _Standing:
    """What is at the target under this number, and which files are to be there.

    Raises:
        StepExistsError: a step that stays.
        CorruptError, FormatError: a step whose manifest is damaged, or newer than this keepstep.
        StorageError: the files that are missing do not fit.
    """
    manifest, raw = origin.manifest, manifest_at(place)
    present = dict(place.list(""))
    files, look, same = origin.files, "headers", False
    if raw is not None:
        try:
            there = parse_manifest(raw, f"{place.url}/{MANIFEST_NAME}")
        except (CorruptError, FormatError) as err:
            raise type(err)(f"a step {manifest.step} is at the target, and was left as it is: {err}") from err
        same = there.save_id == manifest.save_id
        if same:
            # (Retention has its own ways in each root: files that it has let go here do not come back.)
            kept = {there.file_name(folder, record.rank) for folder, each in there.files.items() for record in each}
            files, look = tuple(file for file in files if file.name in kept), "sizes"
        else:
            _check_may_replace(manifest, there, target)
    if reread or any(note.step == manifest.step for note in read_notes(target)):
        # (What was put aside was damaged, and may have been this very step.)
        look = "blocks"
    needed = sum(file.record.size_bytes for file in files if present.get(file.name) != file.record.size_bytes)
    free = target.free_bytes() if needed else None
    if free is not None and free < needed:
        text = f"{needed:,} bytes are needed, {free:,} are free; nothing was copied"
        raise StorageError("copy", place.url, OSError(errno.ENOSPC, text))
    return _Standing(same, raw, present, files, look)


def _check_may_replace(manifest: Manifest, there: Manifest, target: Storage) -> None:
    """What the same run has left behind, by a rollback or by saving once more, may be replaced by what came after.

    Raises:
        StepExistsError: it is none of that.
    """
    mine, theirs = manifest.lineage, there.lineage
    why = ""
    if mine.run != theirs.run:
        why = f"it is of run {theirs.run}, not of {mine.run}"
    elif (mine.incarnation, manifest.created) <= (theirs.incarnation, there.created):
        why = (
            f"it is not older: incarnation {theirs.incarnation}, saved {there.created}; the one to be copied is of"
            f" incarnation {mine.incarnation}, saved {manifest.created}"
        )
    elif manifest.step in pinned_steps(target):
        why = "it is older, but pinned"
    if why:
        raise StepExistsError(f"{target.url} has another step {manifest.step}, which was left as it is: {why}")


def _check_still_there(origin: Origin, target: Storage, cause: CheckpointError) -> None:
    """A step that retention takes, or a later save replaces, while it is copied is not a damaged one.

    Raises:
        StepNotFoundError: so it was.
    """
    try:
        now = manifest_at(origin.storage)
    except CheckpointError:
        return
    if now != origin.raw:
        what = "removed" if now is None else "replaced"
        raise StepNotFoundError(
            f"{origin.storage.url} was {what} while it was copied; nothing was committed at {target.url}"
        ) from cause


def _publish(origin: Origin, target: Storage, standing: _Standing) -> None:
    """Puts the manifest in place; then, where it has replaced one, the files of that go.

    Raises:
        StepExistsError: somebody else has committed a step of this number meanwhile.
        CorruptError: files have gone meanwhile; so has the manifest, and what it had replaced is back.
    """
    place, failed = step_storage(target, origin.manifest.step), None
    try:
        if standing.there is None:
            sure = place.put_new(MANIFEST_NAME, origin.raw)
        else:
            sure = place.put_over(MANIFEST_NAME, origin.raw, standing.there)
    except StorageError as err:
        sure, failed = False, err
    if not sure:
        # The answer may have been lost, not the manifest; or somebody else copies the same step.
        try:
            now = manifest_at(place)
        except CheckpointError as err:
            raise failed or err from err
        if now != origin.raw:
            raise failed or StepExistsError(f"{place.url} has changed meanwhile, and was left as it is: copy it again")
        # That it is seen does not mean that it is durable; that it is put once more does.
        place.put(MANIFEST_NAME, origin.raw)
    there = {name for name, _ in place.list("")}
    # (A listing may be older than what another machine has written.)
    lost = [file.name for file in origin.files if file.name not in there and not _is_there(place, file.name)]
    if lost:
        if standing.there is not None:
            place.put(MANIFEST_NAME, standing.there)
        else:
            place.delete([MANIFEST_NAME])
        raise CorruptError(
            f"{place.url}: the step was not committed: {len(lost)} of its files, such as {lost[0]}, were removed while it"
            " was copied. Copy it again when no job is starting there"
        )
    if standing.there is not None:
        _drop(origin, target, standing)


def _is_there(place: Storage, name: str) -> bool:
    try:
        place.open(name).close()
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return False
    return True


def _drop(origin: Origin, target: Storage, standing: _Standing) -> None:
    """The files of the step that was replaced go, while this one is seen in its place. It exists, even when they stay."""
    place = step_storage(target, origin.manifest.step)
    old = parse_manifest(standing.there or b"", MANIFEST_NAME).save_id
    names = [name for name in standing.present if f".{old}." in name]
    try:
        aside = set_aside(read_notes(target), origin.manifest.step, names)
        if manifest_at(place) == origin.raw:
            place.delete([name for name in names if name not in aside])
    except StorageError as err:
        _log.warning("%s: files of the step that was replaced are left until the next start: %s", place.url, err)


def _point(target: Storage, place: Storage, raw: bytes) -> None:
    """The hint names the step when it is the newest one there that can be restored."""
    manifest = parse_manifest(raw, f"{place.url}/{MANIFEST_NAME}")
    if not manifest.lineage.incarnation or manifest.dropped:
        return
    others = [found for found in read_catalog(target).steps if not found.damage and not found.dropped]
    if all(found.order <= (manifest.lineage.incarnation, manifest.step) for found in others):
        try:
            point_latest(target, manifest, f"{digest(raw):016x}")
        except StorageError as err:
            err.add_note(f"step {manifest.step} is committed at {target.url}; only the hint to it was not moved")
            raise


def _with(so_far: Copied, done: Transferred, began: float) -> Copied:
    return replace(
        so_far,
        files=done.files,
        bytes=done.bytes,
        kept_files=done.kept_files,
        kept_bytes=done.kept_bytes,
        seconds=time.monotonic() - began,
    )
