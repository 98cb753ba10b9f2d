"""``keepstep verify``: one step, or a whole run with its records, with a progress bar on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column

from keepstep.check.run import verify_run
from keepstep.check.verify import Problem, Verified, exit_status, verify
from keepstep.cli.words import plural, safe, size_words
from keepstep.commit.aside import set_aside
from keepstep.commit.catalog import MAX_MANIFEST_BYTES, read_catalog, read_manifest, step_storage
from keepstep.commit.garbage import find_garbage
from keepstep.errors import CorruptError, StepNotFoundError, StorageError
from keepstep.foreign.kinds import FOREIGN
from keepstep.format.manifest import MANIFEST_NAME, step_name
from keepstep.storage.base import Storage, read_blob

__all__ = ["StepResult", "Verification", "bar_of", "print_result", "telling", "verify_root", "verify_step"]

SHOWN = 5


@dataclass(frozen=True, slots=True)
class StepResult:
    """One verified step. ``bytes`` and ``blocks`` are of tensor data, read and compared; ``strays`` are files beside it."""

    name: str
    step: int | None
    ok: bool
    files: int
    bytes: int
    blocks: int
    problems: tuple[Problem, ...]
    strays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """All of it; the fields are those of the JSON output. ``exit_status`` belongs to the worst problem of all.

    ``problems`` are those of a run's records, ``notes`` are no faults, ``aside`` are damaged steps that were put aside, and
    ``garbage_bytes`` is what `keepstep gc` would look at.
    """

    path: str
    ok: bool
    exit_status: int
    steps: tuple[StepResult, ...]
    unfinished: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    garbage_bytes: int = 0


def verify_step(storage: Storage, name: str, errors: Console) -> Verification:
    """Verifies one step, or what torch's DCP has put there; the bar goes to ``errors`` where that is a terminal."""
    if _is_pickle(storage):
        return _verify_foreign(storage, read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES), name, errors)
    result = _run(storage, name, errors)
    summed = _summed(storage.url, [result])
    if not result.ok or read_manifest(storage).lineage.exclusive is not False:
        return summed
    return replace(
        summed, notes=("the store gives a name to more than one writer: only one job at a time may save there",)
    )


def _is_pickle(storage: Storage) -> bool:
    """Whether there is torch's metadata in the place of a manifest."""
    first = bytearray(1)
    try:
        with storage.open(MANIFEST_NAME) as blob:
            blob.read_into(0, memoryview(first))
    except (StorageError, CorruptError):
        return False
    return bytes(first) == FOREIGN


def _verify_foreign(storage: Storage, raw: bytes, name: str, errors: Console) -> Verification:
    """A directory of torch's DCP: ``blocks`` are entries then, and ``notes`` say what could not be told."""
    # Late: it needs torch, and most steps do not.
    from keepstep.foreign.dcp.proving import proving

    with bar_of(errors) as bar:
        task = bar.add_task(safe(name), total=None)
        for proved in proving(storage, raw):
            bar.update(task, completed=proved.bytes, total=proved.total_bytes)
    problems = tuple(Problem(fault.kind, fault.file, fault.text) for fault in proved.faults)
    result = StepResult(name, None, not problems, proved.files, proved.bytes, proved.entries, problems, proved.strays)
    return replace(_summed(storage.url, [result]), notes=tuple(proved.notes))


def verify_root(root: Storage, errors: Console) -> Verification:
    """Verifies every committed step, newest first, and the records of the run. A step that goes meanwhile is left out.

    Raises:
        StepNotFoundError: no step is committed below the root, and no record says that there was one.
    """
    catalog = read_catalog(root)
    records = verify_run(root, catalog)
    if not catalog.steps and not records.problems:
        left = f"; never committed: {', '.join(catalog.unfinished)}" if catalog.unfinished else ""
        raise StepNotFoundError(f"no step is committed below {root.url}{left}")
    results = []
    for found in catalog.steps:
        name = step_name(found.step)
        try:
            result = _run(step_storage(root, found.step), name, errors)
        except StepNotFoundError:
            continue
        if result.step not in (None, found.step):
            elsewhere = Problem("manifest", MANIFEST_NAME, f"{name} holds the manifest of step {result.step}")
            result = replace(result, ok=False, problems=(elsewhere, *result.problems))
        kept = set_aside(catalog.aside, found.step, result.strays)
        results.append(replace(result, strays=tuple(name for name in result.strays if name not in kept)))
    summed = _summed(root.url, results, records.problems)
    return replace(
        summed,
        unfinished=catalog.unfinished,
        notes=records.notes,
        aside=tuple(step_name(note.step) for note in catalog.aside),
        garbage_bytes=sum(one.bytes for one in find_garbage(root, read_catalog(root))),
    )


def print_result(verification: Verification, console: Console) -> None:
    """A line a step, and below it what is wrong with it."""
    for result in verification.steps:
        counts = ", ".join(
            (
                plural(result.files, "file"),
                f"{size_words(result.bytes)} of data",
                plural(result.blocks, "block"),
            )
        )
        verdict = "ok" if result.ok else f"DAMAGED, {plural(len(result.problems), 'problem')}"
        console.print(f"{safe(result.name)}  {verdict}  ({counts})", soft_wrap=True)
        for problem in result.problems:
            console.print(f"  {problem.kind}: {safe(problem.text)}", soft_wrap=True)
        if result.strays:
            more = f" and {len(result.strays) - SHOWN} more" if len(result.strays) > SHOWN else ""
            console.print(f"  not of this step: {safe(', '.join(result.strays[:SHOWN]))}{more}", soft_wrap=True)
    for problem in verification.problems:
        console.print(f"{problem.kind}: {safe(problem.text)}", soft_wrap=True)
    for note in verification.notes:
        console.print(f"note: {safe(note)}", soft_wrap=True)
    if verification.aside:
        console.print(f"damaged and put aside: {', '.join(verification.aside)}", soft_wrap=True)
    if verification.unfinished:
        console.print(f"never committed, not looked at: {', '.join(verification.unfinished)}", soft_wrap=True)


def _run(storage: Storage, name: str, errors: Console) -> StepResult:
    verified = Verified(None)
    with bar_of(errors) as bar:
        task = bar.add_task(safe(name), total=None)
        for verified in verify(storage):
            bar.update(task, completed=verified.bytes, total=verified.total_bytes)
    return StepResult(
        name,
        verified.step,
        verified.ok,
        verified.files,
        verified.bytes,
        verified.blocks,
        verified.problems,
        verified.strays,
    )


def bar_of(errors: Console | None = None) -> Progress:
    """A bar of bytes on the error stream that goes away at its end; nothing where that is no terminal."""
    errors = errors or Console(stderr=True, markup=False, highlight=False, emoji=False)
    # A long key leaves room for the bar.
    named = Column(no_wrap=True, overflow="ellipsis", max_width=max(16, errors.width // 3))
    columns = (
        TextColumn("{task.description}", table_column=named),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextmanager
def telling(words: str) -> Iterator[None]:
    """What to say of an interruption in here: what is true then."""
    try:
        yield
    except KeyboardInterrupt as err:
        raise KeyboardInterrupt(*(err.args or (words,))) from None


def _summed(path: str, results: Iterable[StepResult], records: tuple[Problem, ...] = ()) -> Verification:
    steps = tuple(results)
    problems = (*(problem for step in steps for problem in step.problems), *records)
    return Verification(path, not problems, exit_status(problems), steps, problems=records)
