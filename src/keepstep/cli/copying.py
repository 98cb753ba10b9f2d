"""``keepstep cp``: committed steps from one root to another, with a progress bar on standard error."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from keepstep.check.verify import Problem, Verified, exit_status, verify
from keepstep.cli.completing import known_numbers, known_steps
from keepstep.cli.places import folder_at, has_blob, is_step, name_of, near_steps, parent_of, root_at, step_at
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import plural, safe, size_words, time_words
from keepstep.commit.catalog import Catalog, check_files, read_catalog, read_manifest, step_storage
from keepstep.commit.copying import COPY_THREADS, Copied, copying
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, promised_files, step_name
from keepstep.storage.base import Storage
from keepstep.storage.local import storage_of

__all__ = ["CopiedStep", "Copying", "copy_steps"]

SHOWN = 5


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """One step, as it went. ``outcome`` is that of ``Copied``, or ``gone`` or ``failed``, with an ``error``.

    ``checked`` says that every byte at the target was read again; ``problems`` are what was found then.
    """

    name: str
    step: int
    outcome: str
    files: int = 0
    bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0
    total_files: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    checked: bool = False
    problems: tuple[Problem, ...] = ()
    code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Copying:
    """All of it; the fields are those of the JSON output. ``exit_status`` belongs to the worst of what went wrong."""

    source: str
    target: str
    exit_status: int
    steps: tuple[CopiedStep, ...]


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is to be copied: a root, and numbers of steps; None for a step outside of any run, whose folder the root is then.

    ``many`` steps go on when one of them cannot be copied.
    """

    root: Storage
    steps: tuple[int | None, ...]
    many: bool


def copy_steps(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A run, or one step: its folder or URL.", autocompletion=known_steps),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The root that is to have it: a folder or URL.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="This step of the run.", autocompletion=known_numbers),
    ] = None,
    last: Annotated[int | None, typer.Option("--last", metavar="N", min=1, help="The newest N steps.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every committed step.")] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", metavar="N", min=1, max=64, help="Read and write so many parts at once.")
    ] = COPY_THREADS,
    check: Annotated[bool, typer.Option("--check", help="Read every byte at the target again afterwards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")] = False,
) -> None:
    """Copy committed steps to another root: the newest one of a run, or those that are named. Nothing at SRC is changed.

    Every byte is proved on its way, and a step exists at DST when all of it is there. Cut off, it goes on where it was.
    """
    wish = _wish(source, step=step, last=last, everything=everything)
    place = _target_at(target)
    _check_space(wish, place)
    console = Console(markup=False, highlight=False, emoji=False)
    results = []
    for number in wish.steps:
        results.append(_copy(wish, number, place, threads=jobs, check=check))
        if not as_json:
            _print_step(results[-1], console)
    facts = Copying(wish.root.url, place.url, _status(results), tuple(results))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    raise typer.Exit(facts.exit_status)


def _wish(path: str, *, step: int | None, last: int | None, everything: bool) -> _Wish:
    """Which steps are meant.

    Raises:
        UsageError: options that contradict each other, or the path.
        StepNotFoundError: there is nothing to be copied.
    """
    asked = [name for name, given in (("--step", step is not None), ("--last", last), ("--all", everything)) if given]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do not go together")
    folder = folder_at(path)
    if is_step(folder):
        if asked:
            raise UsageError(f"{folder.url} is one step; {asked[0]} is for the root of a run")
        named = parse_step_name(name_of(step_at(path)))
        return _Wish(folder if named is None else parent_of(folder), (named,), False)
    root = root_at(path)
    if step is not None:
        wanted = step_storage(root, step)
        if not has_blob(wanted, MANIFEST_NAME):
            hint = near_steps(wanted)
            raise StepNotFoundError(f"{wanted.url}: no step is committed there; nothing was copied{hint}")
        return _Wish(root, (step,), False)
    catalog = read_catalog(root)
    if not catalog.steps:
        raise StepNotFoundError(f"no step is committed below {root.url}; {catalog.inventory()}")
    if everything or last is not None:
        # The newest first: whatever happens, the target has what is worth most.
        return _Wish(root, tuple(found.step for found in catalog.steps[:last]), True)
    return _Wish(root, (_newest(root, catalog),), False)


def _newest(root: Storage, catalog: Catalog) -> int:
    """The step that ``restore()`` would take.

    Raises:
        StepNotFoundError: there is none.
    """
    for found in catalog.steps:
        if not found.damage and not found.dropped:
            with contextlib.suppress(CorruptError, FormatError):
                check_files(step_storage(root, found.step), read_manifest(step_storage(root, found.step)))
                return found.step
    raise StepNotFoundError(
        f"{root.url} holds no step that restore() would take; {catalog.inventory()}. Name one: --step"
    )


def _target_at(path: str) -> Storage:
    """The root that is to have the steps; it need not be there yet.

    Raises:
        UsageError: it is a step itself, or cannot be written to by this name.
    """
    place = storage_of(path)
    if is_step(place):
        raise UsageError(f"{place.url} is the place of one step; name the root that is to hold it")
    return place


def _check_space(wish: _Wish, place: Storage) -> None:
    """Where the target can tell what is free, all steps have to fit before the first one is begun.

    Raises:
        StorageError: they do not.
    """
    free = place.free_bytes() if wish.many else None
    if free is None:
        return
    needed = 0
    for number in wish.steps:
        if number is not None:
            # (What cannot be read is told when its turn comes.)
            with contextlib.suppress(CheckpointError):
                promised = promised_files(read_manifest(step_storage(wish.root, number)))
                there = dict(step_storage(place, number).list(""))
                needed += sum(size for name, size in promised.items() if there.get(name) != size)
    if free < needed:
        text = (
            f"{needed:,} bytes are needed for {plural(len(wish.steps), 'step')}, {free:,} are free; nothing was copied"
        )
        raise StorageError("copy", place.url, OSError(errno.ENOSPC, text))


def _copy(wish: _Wish, number: int | None, place: Storage, *, threads: int, check: bool) -> CopiedStep:
    """Copies one step. One of many that cannot be copied is a result as well; what would stop every one of them is not."""
    name = step_name(number) if number is not None else name_of(wish.root)
    problems: tuple[Problem, ...] = ()
    try:
        with (
            bar_of() as bar,
            contextlib.closing(copying(wish.root, place, number, threads=threads)) as going,
        ):
            task = bar.add_task(safe(name), total=None)
            for copied in going:
                bar.update(task, completed=copied.bytes + copied.kept_bytes, total=copied.total_bytes)
            if check:
                problems = _read_again(step_storage(place, copied.step), bar)
    except (StepNotFoundError, StepExistsError, CorruptError, FormatError) as err:
        if not wish.many or number is None:
            raise
        outcome = "gone" if isinstance(err, StepNotFoundError) else "failed"
        return CopiedStep(name, number, outcome, code=err.code, error=str(err))
    return _result(copied, problems, check=check)


def _read_again(storage: Storage, bar: Progress) -> tuple[Problem, ...]:
    verified = Verified(None)
    task = bar.add_task("read again", total=None)
    for verified in verify(storage):
        bar.update(task, completed=verified.bytes, total=verified.total_bytes)
    return verified.problems


def _result(copied: Copied, problems: tuple[Problem, ...], *, check: bool) -> CopiedStep:
    return CopiedStep(
        step_name(copied.step),
        copied.step,
        copied.outcome,
        copied.files,
        copied.bytes,
        copied.kept_files,
        copied.kept_bytes,
        copied.total_files,
        copied.total_bytes,
        copied.seconds,
        check,
        problems,
    )


def _status(results: Sequence[CopiedStep]) -> int:
    """That of the worst of all: damage, a version that is not known, a step that is in the way."""
    problems = exit_status(tuple(problem for result in results for problem in result.problems))
    failed = {result.code for result in results if result.outcome == "failed"}
    kinds = (CorruptError, FormatError, StepExistsError)
    return problems or next((kind.exit_status for kind in kinds if kind.code in failed), 0)


def _print_step(result: CopiedStep, console: Console) -> None:
    words = {
        "copied": "copied",
        "replaced": "copied, in place of an older one",
        "there": "was there",
        "mended": "was there, and was mended",
        "gone": "is gone",
        "failed": "NOT COPIED",
    }
    line = f"{safe(result.name)}  {words[result.outcome]}"
    if result.error:
        line += f": {safe(result.error)}"
    elif result.files:
        line += f"  ({plural(result.files, 'file')}, {size_words(result.bytes)} in {time_words(result.seconds)}"
        line += f"; {size_words(result.kept_bytes)} were there" if result.kept_files else ""
        line += ")"
    else:
        line += f"  ({plural(result.total_files, 'file')}, {size_words(result.total_bytes)})"
    if result.checked:
        line += f"  DAMAGED, {plural(len(result.problems), 'problem')}" if result.problems else "  read again: ok"
    console.print(line, soft_wrap=True)
    for problem in result.problems[:SHOWN]:
        console.print(f"  {problem.kind}: {safe(problem.text)}", soft_wrap=True)
