"""``keepstep verify``: one step, or every step below a root, with a progress bar on standard error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from keepstep.check.verify import Problem, Verified, exit_status, verify
from keepstep.cli.words import plural, safe, size_words
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.errors import StepNotFoundError
from keepstep.format.manifest import step_name
from keepstep.storage.base import Storage

__all__ = ["StepResult", "Verification", "print_result", "verify_root", "verify_step"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One verified step. ``bytes`` and ``blocks`` are of tensor data, read and compared."""

    name: str
    step: int | None
    ok: bool
    files: int
    bytes: int
    blocks: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """All of it; the fields are those of the JSON output. ``exit_status`` belongs to the worst problem of all."""

    path: str
    ok: bool
    exit_status: int
    steps: tuple[StepResult, ...]
    unfinished: tuple[str, ...] = ()


def verify_step(storage: Storage, name: str, errors: Console) -> Verification:
    """Verifies one step; the bar goes to ``errors`` where that is a terminal."""
    result = _run(storage, name, errors)
    return _summed(storage.url, [result], ())


def verify_root(root: Storage, errors: Console) -> Verification:
    """Verifies every committed step, newest first. One that is removed meanwhile is left out.

    Raises:
        StepNotFoundError: no step is committed below the root.
    """
    catalog = read_catalog(root)
    if not catalog.steps:
        left = f"; never committed: {', '.join(catalog.unfinished)}" if catalog.unfinished else ""
        raise StepNotFoundError(f"no step is committed below {root.url}{left}")
    results = []
    for found in catalog.steps:
        try:
            results.append(_run(step_storage(root, found.step), step_name(found.step), errors))
        except StepNotFoundError:
            continue
    return _summed(root.url, results, catalog.unfinished)


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
    if verification.unfinished:
        console.print(f"never committed, not looked at: {', '.join(verification.unfinished)}", soft_wrap=True)


def _run(storage: Storage, name: str, errors: Console) -> StepResult:
    verified = Verified(None)
    with _bar(errors) as bar:
        task = bar.add_task(safe(name), total=None)
        for verified in verify(storage):
            bar.update(task, completed=verified.bytes, total=verified.total_bytes)
    return StepResult(
        name, verified.step, verified.ok, verified.files, verified.bytes, verified.blocks, verified.problems
    )


def _bar(errors: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def _summed(path: str, results: Iterable[StepResult], unfinished: tuple[str, ...]) -> Verification:
    steps = tuple(results)
    problems = tuple(problem for step in steps for problem in step.problems)
    return Verification(path, not problems, exit_status(problems), steps, unfinished)
