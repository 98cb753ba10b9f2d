"""The records of a run against its steps: does everything that is said beside the steps agree with them?

In: the root of a run and its catalog. Out: problems, and what is worth knowing and no fault. Reads manifests and records,
not the data of steps. Changes nothing. A job may go on meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keepstep.check.verify import Problem
from keepstep.commit.catalog import MAX_MANIFEST_BYTES, Catalog, read_catalog, read_manifest, step_storage
from keepstep.commit.publish import INCARNATIONS, LATEST_NAME, RUN_NAME, read_hint, run_of
from keepstep.commit.records import RECORDS_NAME, SaveRecord, read_records
from keepstep.errors import CheckpointError, CorruptError, FormatError, StorageError
from keepstep.format.manifest import MANIFEST_NAME, Lineage, parse_head, step_name
from keepstep.format.shardfile import digest
from keepstep.storage.base import Storage, read_blob

__all__ = ["RunVerified", "verify_run"]

SHOWN = 10


@dataclass(frozen=True, slots=True)
class RunVerified:
    """What is wrong with the records of a run, and what is worth knowing although nothing is wrong with it."""

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def verify_run(root: Storage, catalog: Catalog) -> RunVerified:
    """Compares the records of a run with its steps, and the steps with each other.

    Raises:
        StorageError: a record cannot be read.
    """
    lineages = {}
    for found in catalog.steps:
        if not found.damage:
            try:
                lineages[found.step] = read_manifest(step_storage(root, found.step)).lineage
            except (CorruptError, FormatError):
                # Verifying the step says so.
                continue
            except StorageError as err:
                # Retention may have taken it since.
                if err.errno != errno.ENOENT:
                    raise
    told = [
        *_latest(root, catalog),
        *_run(root, lineages),
        *_incarnations(root, lineages),
        *_parents(lineages),
        *_unguarded(lineages),
        *_lost(root, catalog),
    ]
    return RunVerified(
        tuple(one for one in told if isinstance(one, Problem)), tuple(one for one in told if isinstance(one, str))
    )


def _latest(root: Storage, catalog: Catalog) -> Iterator[Problem | str]:
    try:
        hint = read_hint(root)
    except CorruptError as err:
        yield Problem("latest", LATEST_NAME, str(err))
        return
    newest = catalog.steps[0] if catalog.steps else None
    if hint is None:
        if newest is not None and newest.incarnation:
            yield f"{LATEST_NAME} is not there; a save that was killed after its commit leaves no hint"
        return
    name = f"{step_name(hint.step)}/{MANIFEST_NAME}"
    if hint.path != step_name(hint.step):
        yield Problem("latest", LATEST_NAME, f"names step {hint.step} and the path {hint.path!r}")
        return
    try:
        raw = read_blob(root, name, MAX_MANIFEST_BYTES)
        there = parse_head(raw, name).lineage.incarnation
    except (CorruptError, FormatError):
        # Verifying the step says so.
        return
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        aside = any(note.step == hint.step for note in catalog.aside)
        why = "which was put aside" if aside else "which is not there"
        if hint == read_hint(root):
            # (Not one that a save has moved meanwhile, after which retention took the step.)
            yield Problem("latest", LATEST_NAME, f"names step {hint.step}, {why}")
        return
    found = f"{digest(raw):016x}"
    if found != hint.manifest and hint.incarnation > there:
        text = f"names step {hint.step} of incarnation {hint.incarnation}; the one there is older, of {there}"
        yield Problem("latest", LATEST_NAME, text)
    elif found != hint.manifest:
        # The step was saved again, and the hint moves after that: a kill in between leaves it behind.
        text = f"a manifest of step {hint.step} with the digest {hint.manifest}; the one there has {found}"
        yield f"{LATEST_NAME} names {text}, as after a kill right after a step was saved again"
    elif newest is not None and newest.step != hint.step:
        yield f"{LATEST_NAME} names step {hint.step}, the newest is {newest.step}; restore() goes by manifests"


def _run(root: Storage, lineages: Mapping[int, Lineage]) -> Iterator[Problem | str]:
    runs = {lineage.run for lineage in lineages.values() if lineage.incarnation}
    try:
        run = run_of(root)
    except CheckpointError as err:
        if isinstance(err, StorageError):
            raise
        yield Problem("run", RUN_NAME, str(err))
        return
    if run is None and runs:
        yield Problem("run", RUN_NAME, f"{RUN_NAME} is missing, but there are steps of run {', '.join(sorted(runs))}")
    elif run == "":
        yield Problem("run", RUN_NAME, f"{RUN_NAME} names no run")
    elif run is not None and runs and run not in runs:
        yield f"{RUN_NAME} names the run {run}, of which there is no step; the steps are of {', '.join(sorted(runs))}"


def _incarnations(root: Storage, lineages: Mapping[int, Lineage]) -> Iterator[Problem]:
    there = {name.rpartition("/")[2] for name, _ in root.list(INCARNATIONS)}
    steps: dict[int, list[int]] = {}
    for step, lineage in sorted(lineages.items()):
        if lineage.incarnation:
            steps.setdefault(lineage.incarnation, []).append(step)
    for number, made in sorted(steps.items()):
        name = f"{number:06d}"
        if name not in there:
            text = f"is missing, but {step_name(made[0])} was saved by that start: a later start could take its number"
            yield Problem("incarnation", f"{INCARNATIONS}/{name}", f"{INCARNATIONS}/{name} {text}")


def _parents(lineages: Mapping[int, Lineage]) -> Iterator[Problem | str]:
    gone = set()
    for step, lineage in sorted(lineages.items()):
        parent = lineage.parent
        if parent is None or parent.run != lineage.run:
            continue
        there = lineages.get(parent.step)
        wrong = ""
        if parent.incarnation >= lineage.incarnation or parent.step > step:
            wrong = f"incarnation {lineage.incarnation} came from incarnation {parent.incarnation}, step {parent.step}"
        elif there is None or there.run != lineage.run:
            gone.add(parent.step)
        elif there.incarnation < parent.incarnation:
            wrong = (
                f"it came from step {parent.step} of incarnation {parent.incarnation}; the one there is older, of"
                f" incarnation {there.incarnation}"
            )
        if wrong:
            yield Problem("lineage", f"{step_name(step)}/{MANIFEST_NAME}", f"step {step}: {wrong}")
    if gone:
        yield f"steps that others came from are gone, as retention lets them: {', '.join(map(str, sorted(gone)))}"


def _unguarded(lineages: Mapping[int, Lineage]) -> Iterator[str]:
    steps = [str(step) for step, lineage in sorted(lineages.items()) if lineage.exclusive is False]
    if steps:
        more = f" and {len(steps) - SHOWN} more" if len(steps) > SHOWN else ""
        shown = ", ".join(steps[-SHOWN:])
        text = (
            "the store gives a name to more than one writer, as it was found to do before these steps were committed:"
        )
        yield f"{text} {shown}{more}; only one job at a time may save there"


def _lost(root: Storage, catalog: Catalog) -> Iterator[Problem]:
    """The newest step that was committed is never removed: when it is not there, somebody else took it."""
    done = [record for record in read_records(root) if record.outcome == "committed"]
    if not done:
        return
    last = max(done, key=lambda record: (record.incarnation, record.step))
    if not _may_be_lost(catalog, last):
        return
    # A job that goes on may have saved it since the catalog was read.
    again = read_catalog(root)
    if _may_be_lost(again, last):
        newest = max((found.order for found in again.steps if not found.damage), default=(0, -1))
        text = (
            f"step {last.step} (incarnation {last.incarnation}, attempt {last.save_id}) was committed at {last.ended}, and"
            f" is not there; the newest is {f'step {newest[1]}' if newest[1] >= 0 else 'none'}"
        )
        yield Problem("lost", RECORDS_NAME, text)


def _may_be_lost(catalog: Catalog, last: SaveRecord) -> bool:
    newest = max((found.order for found in catalog.steps if not found.damage), default=(0, -1))
    known = {found.step for found in catalog.steps if found.damage} | {note.step for note in catalog.aside}
    return (last.incarnation, last.step) > newest and last.step not in known
