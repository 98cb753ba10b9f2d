"""``keepstep export`` and ``keepstep import``: models as safetensors, out of a step and into one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.cli.completing import known_components, known_steps
from keepstep.cli.formats import found_at
from keepstep.cli.places import folder_at
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import plural, safe, size_words, time_words
from keepstep.commit.catalog import step_storage
from keepstep.errors import UsageError
from keepstep.storage.local import storage_of

__all__ = ["Imported", "export_step", "import_model"]

SHOWN = 5
MAX_SHARD = "5GB"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_Json = Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")]


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported; the fields are those of the JSON output."""

    source: str
    target: str
    step: int
    component: str
    tensors: int
    bytes: int
    seconds: float


def export_step(
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="One step, or what another program has saved.", autocompletion=known_steps),
    ],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder or URL for the files.")],
    component: Annotated[
        str,
        typer.Option("--component", metavar="NAME", help="Which part of the state.", autocompletion=known_components),
    ] = "model",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors, as to bfloat16.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="PATTERN=TEXT", help="A regular expression and its replacement; several."),
    ] = None,
    max_shard: Annotated[
        str, typer.Option("--max-shard", metavar="SIZE", help="The largest file, such as 500MB or 4GiB.")
    ] = MAX_SHARD,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FOLDER", help="Copy configuration and tokenizer from there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is at FOLDER.")] = False,
    as_json: _Json = False,
) -> None:
    """Export the model of a step as safetensors, with an index, as Hugging Face's libraries load it.

    Any step will do, however its tensors lay on ranks. Bytes pass through the memory of a few chunks, and are proved.
    """
    from keepstep.interop.huggingface.exporting import Wish, exporting

    place = found_at(step).step
    wish = Wish(component, parse_size(max_shard), dtype, _rules(rename), config, overwrite)
    with (
        bar_of() as bar,
        contextlib.closing(exporting(place, folder, wish)) as going,
    ):
        task = bar.add_task("export", total=None)
        for facts in going:
            bar.update(task, completed=facts.bytes_written, total=facts.total_bytes)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
        return
    console = Console(markup=False, highlight=False, emoji=False)
    line = f"{safe(facts.url)}  {plural(facts.tensors, 'tensor')} in {plural(len(facts.files), 'file')}"
    line += f"  ({size_words(facts.total_bytes)} in {time_words(facts.seconds)})"
    console.print(line, soft_wrap=True)
    for name, first in list(facts.tied.items())[:SHOWN]:
        console.print(f"  tied: {safe(name)} is {safe(first)}", soft_wrap=True)
    for name in facts.left_out[:SHOWN]:
        console.print(f"  left out: {safe(name)}", soft_wrap=True)


def import_model(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder of safetensors, or one such file.")],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The run that is to have the step: a folder or URL.")],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The number of the step.")] = 0,
    component: Annotated[str, typer.Option("--component", metavar="NAME", help="What to call the model.")] = "model",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a step of that number.")] = False,
    as_json: _Json = False,
) -> None:
    """Import a model as a committed step of that component alone. Nothing at SRC is changed."""
    from keepstep.foreign.safetensors.step import show_folder
    from keepstep.interop.adopting import adopting

    began = time.monotonic()
    if not component:
        raise UsageError("--component '': give the model a name")
    path = Path(source).expanduser()
    alone = path.is_file()
    folder = folder_at(str(path.parent) if alone else source)
    shown = show_folder(folder, component, file=path.name if alone else "", step=step)
    target = step_storage(storage_of(root), step)
    total = sum(record.data_bytes for records in shown.manifest.files.values() for record in records)
    with (
        bar_of() as bar,
        contextlib.closing(adopting(shown, target, overwrite=overwrite)) as going,
    ):
        task = bar.add_task("import", total=total)
        for done in going:
            bar.update(task, completed=done)
    size = shown.manifest.components[component].bytes
    seconds = round(time.monotonic() - began, 3)
    facts = Imported(shown.url, target.url, step, component, len(shown.manifest.tensors), size, seconds)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
        return
    line = f"{safe(facts.target)}  {plural(facts.tensors, 'tensor')}  ({size_words(size)} in {time_words(seconds)})"
    Console(markup=False, highlight=False, emoji=False).print(line, soft_wrap=True)


def parse_size(text: str) -> int:
    """Bytes of ``500MB``, ``4GiB`` or plain digits.

    Raises:
        UsageError: it is no size.
    """
    digits = text.rstrip("bBiIkKmMgGtT ")
    unit = text[len(digits) :].strip().upper().removesuffix("B")
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError) as err:
        raise UsageError(f"{text!r} is no size; write it as 500MB, 4GiB or in bytes") from err


def _rules(rename: list[str] | None) -> dict[str, str] | None:
    if not rename:
        return None
    wrong = [rule for rule in rename if "=" not in rule]
    if wrong:
        raise UsageError(f"--rename {wrong[0]!r}: write PATTERN=TEXT, such as '^transformer\\.=model.'")
    return {pattern: text for pattern, _, text in (rule.partition("=") for rule in rename)}
