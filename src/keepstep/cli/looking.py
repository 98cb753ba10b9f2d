"""``keepstep cat`` and ``keepstep diff``: the commands that read tensors. torch is imported when they run, not before."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.cli.places import step_at
from keepstep.commit.catalog import read_manifest
from keepstep.errors import CheckpointError

__all__ = ["diff_steps", "known_keys", "print_key"]

MOST_KEYS = 1000

Json = Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")]
Globs = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="GLOB", help="Only these keys, such as 'model/**'; again for more."),
]


def known_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of the step on the command line that begin like this, for the shell; none where there is no such step."""
    try:
        manifest = read_manifest(step_at(str(ctx.params.get("step", ""))))
    except (CheckpointError, OSError):
        return []
    keys = (*(spec.key for spec in manifest.tensors), *manifest.aliases, *manifest.components)
    return [key for key in keys if key.startswith(incomplete)][:MOST_KEYS]


def print_key(
    step: Annotated[str, typer.Argument(metavar="STEP", help="One step: its folder or URL.")],
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="A key, such as model/layers.0.weight or scheduler.", autocompletion=known_keys
        ),
    ],
    head: Annotated[int, typer.Option("--head", metavar="N", min=0, help="How many first elements to print.")] = 8,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", min=0, help="Whose value, where each rank has its own.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Print what is saved under a key: figures and first elements of a tensor, or plain values."""
    from keepstep.checkpointer.opened import Checkpoint
    from keepstep.cli.contents import print_contents, read_contents

    with Checkpoint(step_at(step)) as opened:
        found = read_contents(opened, key, head=head, rank=rank, errors=_console(stderr=True))
    if as_json:
        _print_json(found)
    else:
        print_contents(found, _console())


def diff_steps(
    first: Annotated[str, typer.Argument(metavar="A", help="One step: its folder or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another step.")],
    only: Globs = None,
    as_json: Json = False,
) -> None:
    """Compare two steps: keys, shapes, dtypes, bits, how far apart. The exit status is 1 when they differ."""
    from keepstep.checkpointer.opened import Checkpoint
    from keepstep.cli.comparing import compare, print_comparison

    with Checkpoint(step_at(first)) as a, Checkpoint(step_at(second)) as b:
        found = compare(a, b, only or ["**"], _console(stderr=True))
    if as_json:
        _print_json(found)
    else:
        print_comparison(found, _console())
    raise typer.Exit(0 if found.same else 1)


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def _print_json(found: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
