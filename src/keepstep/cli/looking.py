"""``keepstep cat`` and ``keepstep diff``: the commands that read tensors. torch is imported when they run, not before."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.cli.completing import known_keys, known_steps
from keepstep.cli.formats import found_at

__all__ = ["diff_steps", "print_key"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")]
Globs = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="GLOB",
        help="Only these keys, such as 'model/**'; again for more.",
        autocompletion=known_keys,
    ),
]


def print_key(
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="One step, or what another program has saved.", autocompletion=known_steps),
    ],
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A key, such as model/layers.0.weight or scheduler; of a tensor also a slice, such as 'KEY[0:2, -1]'.",
            autocompletion=known_keys,
        ),
    ],
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", min=0, help="How many first elements to print.")
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", min=0, help="Whose value, where each rank has its own.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Print what is saved under a key: figures and first elements of a tensor, or plain values."""
    from keepstep.checkpointer.opened import Checkpoint
    from keepstep.cli.contents import print_contents, read_contents

    with Checkpoint(found_at(step).step) as opened:
        found = read_contents(opened, key, head=head, rank=rank, errors=_console(stderr=True))
    if as_json:
        _print_json(found)
    else:
        print_contents(found, _console())


def diff_steps(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="One step, or what another program has saved.", autocompletion=known_steps),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", autocompletion=known_steps)],
    only: Globs = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, bits, how far apart. The exit status is 1 when they differ.

    Each is a step, a directory of DCP, a folder or file of safetensors, or a file of torch.save.
    """
    from keepstep.checkpointer.opened import Checkpoint
    from keepstep.cli.comparing import compare
    from keepstep.cli.differing import print_comparison

    with Checkpoint(found_at(first).step) as a, Checkpoint(found_at(second).step) as b:
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
