"""The one place where a step comes into existence.

Everything a step consists of is durable before ``commit_step`` is called. Putting the manifest in place is the commit; the
hint ``latest`` moves after it, and old steps go after that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from keepstep.commit.catalog import size_of
from keepstep.errors import CorruptError, RankFailedError, StepExistsError, StorageError, UsageError
from keepstep.failpoints import reach
from keepstep.format.layout import Structure
from keepstep.format.manifest import (
    MANIFEST_NAME,
    STATE_FOLDER,
    FileRecord,
    Manifest,
    Receipt,
    pack_manifest,
    step_name,
)
from keepstep.format.shardfile import digest
from keepstep.plan.save_plan import expected_bytes
from keepstep.storage.base import Storage, read_blob

__all__ = [
    "INCARNATIONS",
    "LATEST_NAME",
    "ORDER_NAME",
    "RUN_NAME",
    "TALLY_NAME",
    "Hint",
    "collect_receipts",
    "commit_step",
    "is_overtaken",
    "new_incarnation",
    "newest_incarnation",
    "point_latest",
    "put_note",
    "read_hint",
    "run_of",
]

LATEST_NAME = "latest"
RUN_NAME = "run.json"
INCARNATIONS = "incarnations"
ORDER_NAME = "remote.json"
"""Where copies of the steps go, and by which rules; see ``uploads``."""
TALLY_NAME = "uploaded.json"
"""Which copies are there."""
_log = logging.getLogger("keepstep")
MAX_HINT_BYTES = 1 << 16
POINTING_TRIES = 20
NOTE_TRIES = 3
OVERTAKEN_S = 0.5
"""A manifest that took longer than this to be put in place is looked after: deadlines are a second or more."""


def collect_receipts(receipts: list[Receipt], manifest: Manifest) -> Manifest:
    """The manifest with its files, once the receipts are proved to cover every byte of the plan.

    Raises:
        CorruptError: a rank wrote fewer or more bytes than the plan gave it, or belongs to another attempt.
    """
    problems = [f"rank {r.rank} wrote for attempt {r.save_id}" for r in receipts if r.save_id != manifest.save_id]
    expected = expected_bytes(Structure(manifest.meshes, manifest.layouts, manifest.tensors), manifest.world_size)
    files: dict[str, list[FileRecord]] = {spec.folder: [] for spec in manifest.tensors}
    for receipt in receipts:
        for folder, record in receipt.files.items():
            files.setdefault(folder, []).append(record)
    for folder, by_rank in expected.items():
        written = {record.rank: record.data_bytes for record in files[folder]}
        for rank, wanted in enumerate(by_rank.tolist()):
            got = written.get(rank, 0)
            if got < wanted or (got > wanted and folder != STATE_FOLDER):
                problems.append(f"rank {rank} wrote {got:,} bytes of {folder!r}; the plan has {wanted:,}")
    if problems:
        raise CorruptError(f"step {manifest.step} was not committed: " + "; ".join(problems[:8]))
    return msgspec.structs.replace(manifest, files={folder: tuple(records) for folder, records in files.items()})


def commit_step(
    storage: Storage,
    manifest: Manifest,
    receipts: list[Receipt],
    *,
    replace: bool,
    run: Storage | None,
    leftovers: Sequence[str],
) -> tuple[Manifest, str]:
    """Makes the step exist, durable and visible to every reader on return, and drops what else was in its folder.

    Returns the whole manifest and its digest.

    Args:
        storage: the step's own storage; every file that a receipt names is durable there.
        manifest: complete but for its files.
        receipts: one from every rank.
        replace: whether a committed step may be replaced.
        run: the storage of the run the step belongs to, or None for a step outside of any run.
        leftovers: names that were in the step's folder before this attempt.

    Raises:
        CorruptError: the receipts do not cover the plan; or the storage does not show what it took.
        RankFailedError: a later start of the job has taken over.
        StepExistsError: a step is committed there and may not be replaced.
        StorageError: the manifest could not be put in place.
    """
    reach("receipts")
    manifest = collect_receipts(receipts, manifest)
    if run is not None and is_overtaken(run, manifest.lineage.incarnation):
        # A later start of the job has taken over; what this one still has in hand must not appear beside its steps.
        raise RankFailedError("not committed", {0: "a later incarnation of this run has started"})
    data, began = pack_manifest(manifest), time.monotonic()
    sure, failed = True, None
    reach("publish")
    try:
        if replace:
            # Readers see the old step or the new one, whole.
            storage.put(MANIFEST_NAME, data)
        else:
            sure = storage.put_new(MANIFEST_NAME, data)
    except StorageError as err:
        sure, failed = False, err
    if not sure:
        # The answer may have been lost, not the step: what a reader finds tells.
        shown = False
        with contextlib.suppress(StorageError):
            shown = _is_in_place(storage, data)
        if not shown:
            raise failed or StepExistsError(f"{storage.url} is already committed; it was left as it is")
        # This attempt's own manifest. That it is seen does not mean that it is durable; that it is put once more does.
        # (A later start makes durable what it finds, and may have put one of its own in this place.)
        if run is None or not is_overtaken(run, manifest.lineage.incarnation):
            storage.put(MANIFEST_NAME, data)
    reach("published")
    if time.monotonic() - began > OVERTAKEN_S:
        _check_not_overtaken(storage, manifest, data)
    if leftovers:
        _drop(storage, data, leftovers)
    return manifest, f"{digest(data):016x}"


def _is_in_place(storage: Storage, data: bytes) -> bool:
    """Whether a reader finds exactly this manifest.

    Raises:
        StorageError: that cannot be known now.
    """
    try:
        return read_blob(storage, MANIFEST_NAME, len(data)) == data
    except CorruptError:
        return False
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return False


def _drop(storage: Storage, data: bytes, leftovers: Sequence[str]) -> None:
    """An earlier attempt's files, or those of the step just replaced, go. The step exists, even when they do not go."""
    try:
        if _is_in_place(storage, data):
            storage.delete(leftovers)
            return
    except StorageError as err:
        _log.warning("%s: files of an earlier attempt are left until the next start: %s", storage.url, err)
        return
    # What is still there instead must not lose its files.
    raise CorruptError(
        f"{storage.url}: the storage took the manifest and does not show it; what was there before was left alone"
    )


def _check_not_overtaken(storage: Storage, manifest: Manifest, data: bytes) -> None:
    """After a storage that took long: whoever gave this attempt up meanwhile may have removed its files.

    Raises:
        CorruptError: some are gone; the manifest has gone after them, unless there is another one by now.
    """
    there = {name for name, _ in storage.list("")}
    names = [manifest.file_name(folder, record.rank) for folder, each in manifest.files.items() for record in each]
    # (Opened as well: a listing may be older than files that other machines have put there.)
    lost = [name for name in names if name not in there and size_of(storage, name) is None]
    if lost:
        if _is_in_place(storage, data):
            storage.delete([MANIFEST_NAME])
        raise CorruptError(
            f"step {manifest.step} was not committed: the storage took so long that the attempt was given up, and"
            f" {len(lost)} of its files were removed"
        )


class Hint(msgspec.Struct, frozen=True):
    """What the file ``latest`` says. Readers trust manifests; this is for people and scripts."""

    step: int
    incarnation: int
    path: str
    manifest: str


def read_hint(root: Storage) -> Hint | None:
    """What ``latest`` says; None when it is absent.

    Raises:
        CorruptError: it says nothing that makes sense.
        StorageError: it cannot be read.
    """
    raw = _raw_hint(root)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=Hint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise CorruptError(f"{LATEST_NAME} cannot be read: {err}") from err


def point_latest(storage: Storage, manifest: Manifest, manifest_digest: str, *, back: bool = False) -> bool:
    """Moves the hint to this step; False, and it stays, when it names a newer one already, unless ``back``.

    So whoever wakes up late does not move it back: where the storage swaps, not even while another one moves it.
    """
    reach("latest")
    incarnation = manifest.lineage.incarnation
    hint = Hint(manifest.step, incarnation, step_name(manifest.step), manifest_digest)
    data = msgspec.json.format(msgspec.json.encode(hint)) + b"\n"
    for _ in range(POINTING_TRIES):
        try:
            before = _raw_hint(storage)
            there = None if before is None else msgspec.json.decode(before, type=Hint)
        except (CorruptError, msgspec.MsgspecError, UnicodeDecodeError):
            # Whatever that is, it names no step.
            storage.put(LATEST_NAME, data)
            return True
        if not back and there is not None and (there.incarnation, there.step) > (incarnation, manifest.step):
            return False
        if storage.put_new(LATEST_NAME, data) if before is None else storage.put_over(LATEST_NAME, data, before):
            return True
    return False


def _raw_hint(root: Storage) -> bytes | None:
    try:
        return read_blob(root, LATEST_NAME, MAX_HINT_BYTES)
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return None


def newest_incarnation(storage: Storage) -> int:
    """The highest incarnation that has started below this root; 0 when none has."""
    return max(
        (int(name.rpartition("/")[2]) for name, _ in storage.list(INCARNATIONS) if name[-6:].isdigit()), default=0
    )


def is_overtaken(root: Storage, incarnation: int) -> bool:
    """Whether a later start of the job has begun. From then on nothing of this one may appear, or take anything away.

    To be asked after everything that is looked at before a change, and directly before the one call that makes it: what
    begins between the two is not seen.
    """
    return newest_incarnation(root) > incarnation


def new_incarnation(storage: Storage, note: bytes, above: int = 0) -> int:
    """Takes the next incarnation for this start of the job, ``above`` another one; of several at once each gets its own."""
    first = max(newest_incarnation(storage), above) + 1
    for number in range(first, first + 1000):
        if put_note(storage, f"{INCARNATIONS}/{number:06d}", note):
            return number
    raise UsageError(f"{storage.url}: could not take an incarnation; are a thousand jobs starting in one folder?")


def put_note(storage: Storage, name: str, note: bytes) -> bool:
    """``put_new`` of a record of the run. One that a start of the job sweeps while it is half written is written again.

    A start cannot know whether a half-written record is of somebody who was killed, or of somebody who is at it.
    """
    for _ in range(NOTE_TRIES - 1):
        try:
            return storage.put_new(name, note)
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
    return storage.put_new(name, note)


def run_of(root: Storage) -> str | None:
    """The run id of a root, or None when it has none yet."""
    try:
        fields = msgspec.json.decode(read_blob(root, RUN_NAME, 1 << 16), type=dict[str, Any])
    except StorageError as err:
        if err.errno == errno.ENOENT:
            return None
        raise
    except msgspec.MsgspecError as err:
        raise CorruptError(f"{root.url}/{RUN_NAME} is not valid: {err}") from err
    return str(fields.get("run", ""))
