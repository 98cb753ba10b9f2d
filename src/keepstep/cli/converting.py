"""``keepstep convert``: what other programs have saved, as a step; and a step, as what they read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from keepstep.check.verify import Problem, Verified, exit_status, verify
from keepstep.cli.completing import known_components, known_formats, known_steps
from keepstep.cli.formats import FORMAT_WORDS, FORMATS, found_at
from keepstep.cli.verifying import bar_of, telling
from keepstep.cli.words import plural, safe, size_words, time_words
from keepstep.commit.catalog import MAX_MANIFEST_BYTES, read_manifest
from keepstep.errors import CorruptError, UsageError
from keepstep.format.globs import near
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.storage.base import Storage, read_blob
from keepstep.storage.local import storage_of

__all__ = ["Conversion", "convert_step"]

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written; the fields are those of the JSON output. ``made`` is the format of the target.

    ``bytes`` are of tensors. ``checked`` says that every byte at the target was read again; ``problems`` were found then.
    """

    source: str
    target: str
    read: str
    made: str
    tensors: int
    bytes: int
    seconds: float
    checked: bool = False
    problems: tuple[Problem, ...] = ()
    exit_status: int = 0


def convert_step(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A step, or what another program has saved.", autocompletion=known_steps),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The folder or URL that is to have it.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="keepstep, dcp or torch; without it a foreign SRC is a step.",
            autocompletion=known_formats,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME",
            help="This component; may be given several times.",
            autocompletion=known_components,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read every byte at DST again afterwards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")] = False,
) -> None:
    """Convert a DCP checkpoint, a torch.save file or safetensors to a step, or a step to one. Nothing at SRC is changed.

    Bytes pass through the memory of a few chunks, and are proved on their way. DST is complete at the end, or not there.
    """
    began = time.monotonic()
    wanted = tuple(only or ())
    found = found_at(source, wanted)
    kind, step = found.format, found.step
    made = to or ("keepstep" if kind != "keepstep" else "")
    if made not in FORMATS or made == kind:
        others = " or ".join(f"--to {name}" for name in FORMATS if name != kind)
        wrong = f", not {made!r}{near(made, FORMATS)}" if made and made not in FORMATS else ". Nothing was written"
        raise UsageError(f"{step.url} is {FORMAT_WORDS[kind]}: say what to make of it, {others}{wrong}")
    goal = target if made == "torch" else storage_of(target).url
    tensors, size, going = _going(step, source, (made, target), wanted, overwrite=overwrite)
    problems: tuple[Problem, ...] = ()
    lost = "; without its metadata, what was there is no checkpoint any more" if made == "dcp" and overwrite else ""
    with bar_of() as bar, telling(f"nothing half is left at {goal}{lost}"), contextlib.closing(going):
        task = bar.add_task("convert", total=size)
        for done in going:
            # When all of it is read it has to be put together or made durable still: nobody knows how long that takes.
            bar.update(task, completed=done, total=size if done < size else None)
        if check:
            with telling(f"{goal} is whole; it was not read again to its end"):
                problems = _read_again(target, made, bar)
    facts = Conversion(
        step.url,
        goal,
        kind,
        made,
        tensors,
        size,
        round(time.monotonic() - began, 3),
        check,
        problems,
        exit_status(problems),
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    else:
        _print(facts)
    raise typer.Exit(facts.exit_status)


def _going(
    step: Storage, source: str, goal: tuple[str, str], only: tuple[str, ...], *, overwrite: bool
) -> tuple[int, int, Generator[int]]:
    """How many tensors and bytes there are, and the work itself."""
    made, target = goal
    manifest = read_manifest(step)
    structure = manifest.structure
    wanted = [spec for spec in structure.tensors if not only or spec.key.partition("/")[0] in only]
    size = sum(map(structure.tensor_bytes, wanted))
    if made == "torch":
        return len(wanted), size, _one_file(step, target, only, overwrite=overwrite)
    if made == "dcp":
        from keepstep.interop.dcp.export import exporting

        return len(wanted), size, exporting(step, manifest, storage_of(target), only=only, overwrite=overwrite)
    from keepstep.foreign.shown import ShownStep
    from keepstep.interop.adopting import adopting

    if not isinstance(step, ShownStep):
        raise UsageError(f"{step.url} is a step already")
    size = sum(record.data_bytes for records in manifest.files.values() for record in records)
    return len(wanted), size, _proved(source, adopting(step, storage_of(target), overwrite=overwrite))


def _proved(source: str, going: Generator[int]) -> Generator[int]:
    """The same, once what can be told about a file by its own checksums was told."""
    path = Path(source).expanduser()
    if path.is_file():
        from keepstep.interop.torch_save import proving

        for _ in proving(path):
            yield 0
    yield from going


def _one_file(step: Storage, target: str, only: tuple[str, ...], *, overwrite: bool) -> Generator[int]:
    from keepstep.interop.torch_save import exporting

    yield 0
    for facts in exporting(step, target, only=only or None, overwrite=overwrite):
        yield facts.bytes


def _read_again(target: str, made: str, bar: Progress) -> tuple[Problem, ...]:
    task = bar.add_task("read again", total=None)
    if made == "torch":
        from keepstep.interop.torch_save import proving

        try:
            for done in proving(target):
                bar.update(task, completed=done)
        except CorruptError as err:
            return (Problem("blocks", target, str(err)),)
        return ()
    goal = storage_of(target)
    if made == "dcp":
        from keepstep.foreign.dcp.step import show_directory
        from keepstep.interop.adopting import reading

        try:
            for done, total in reading(show_directory(goal, read_blob(goal, MANIFEST_NAME, MAX_MANIFEST_BYTES))):
                bar.update(task, completed=done, total=total)
        except CorruptError as err:
            return (Problem("blocks", goal.url, str(err)),)
        return ()
    verified = Verified(None)
    for verified in verify(goal):
        bar.update(task, completed=verified.bytes, total=verified.total_bytes)
    return verified.problems


def _print(facts: Conversion) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    line = f"{safe(facts.target)}  {facts.made}  ({plural(facts.tensors, 'tensor')}, {size_words(facts.bytes)} in"
    line += f" {time_words(facts.seconds)})"
    if facts.checked:
        line += f"  DAMAGED, {plural(len(facts.problems), 'problem')}" if facts.problems else "  read again: ok"
    console.print(line, soft_wrap=True)
    for problem in facts.problems[:SHOWN]:
        console.print(f"  {problem.kind}: {safe(problem.text)}", soft_wrap=True)
