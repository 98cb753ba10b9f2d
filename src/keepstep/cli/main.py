"""The commands. Each reads its arguments, asks one room, prints what it was given, and says how it went by exit status.

Facts go to standard output, errors and progress to standard error. An error of keepstep's own is printed as
``error[code]: message`` with what to do about it, and never as a traceback unless ``--debug`` asks for one.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

import keepstep
from keepstep.cli.agents import print_agents, print_stopped, read_agents, stop_agents
from keepstep.cli.collecting import collect_garbage
from keepstep.cli.completing import known_components, known_steps
from keepstep.cli.converting import convert_step
from keepstep.cli.copying import copy_steps
from keepstep.cli.drilling import INTERRUPTED, drill_script
from keepstep.cli.exporting import export_step, import_model
from keepstep.cli.formats import found_at
from keepstep.cli.listing import print_listing, read_listing
from keepstep.cli.looking import diff_steps, print_key
from keepstep.cli.places import folder_at, is_step, name_of, root_at, step_at
from keepstep.cli.pruning import pin, prune_steps, unpin
from keepstep.cli.repairing import repair_run
from keepstep.cli.scrubbing import scrub_run
from keepstep.cli.shells import print_completion
from keepstep.cli.showing import DEEPEST, Wanted, print_step, read_step
from keepstep.cli.stats import print_stats, read_stats
from keepstep.cli.verifying import print_result, verify_root, verify_step
from keepstep.cli.words import safe
from keepstep.errors import CheckpointError, StorageError, UsageError

__all__ = ["app", "main"]


# What is true after Ctrl-C; commands that only look have changed nothing.
_UNNAMED = "nothing half is left at the target"
_INTERRUPTED = {
    "convert": _UNNAMED,
    "cp": "what was sent stays for the next time; a step that is not whole is no step",
    "export": _UNNAMED,
    "gc": "what was removed is gone; call it again for the rest",
    "import": _UNNAMED,
    "prune": "what was removed is gone, every step that is left is whole; call it again for the rest",
    "repair": "what was mended stays; call it again for the rest",
    "scrub": "what was read to its end is remembered",
}


class _Commands(TyperGroup):
    """The group of all commands: where errors become text and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as caught:
            words = str(caught) or _INTERRUPTED.get(str(ctx.invoked_subcommand), "nothing was changed")
            typer.echo(f"interrupted: {safe(words)}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (CheckpointError, OSError) as caught:
            if isinstance(caught, BrokenPipeError):
                raise
            error = caught if isinstance(caught, CheckpointError) else _storage_error(caught)
            if ctx.params.get("debug"):
                traceback.print_exception(caught)
            _say_error(error)
            raise typer.Exit(error.exit_status) from None


app = typer.Typer(
    cls=_Commands,
    name="keepstep",
    help="Lists, shows, verifies, copies, repairs and prunes the checkpoints of training runs, and drills training scripts.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

agent = typer.Typer(
    help="Look at the background agents of this user on this machine, or have them leave.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(agent, name="agent")

Json = Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keepstep {keepstep.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error too.")] = False,
) -> None:
    """Options of every command."""


@app.command("ls")
def list_steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")], as_json: Json = False
) -> None:
    """List the steps of a run, newest first; damaged and unfinished ones are marked."""
    listing = read_listing(root_at(root))
    if as_json:
        _print_json(listing)
    else:
        print_listing(listing, _console())


@app.command("show")
def show_step(
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="One step, or what another program has saved.", autocompletion=known_steps),
    ],
    glob: Annotated[str | None, typer.Argument(metavar="[GLOB]", help="The keys to list, such as 'model/*'.")] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List tensors: key, dtype, shape, layout, pieces.")
    ] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", metavar="N", min=1, help="What takes how much, down to N parts of keys.")
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component", metavar="NAME", help="This component alone; again for more.", autocompletion=known_components
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a step: components, layouts, world, lineage, versions; its tensors, or what takes how much.

    STEP is a step, a directory of DCP, a folder or file of safetensors, or a file of torch.save.
    """
    if tensors and depth is not None:
        raise UsageError(
            "--tensors and --depth do not go together: with --depth there is a line for each part of the keys"
        )
    listed = tensors or (glob is not None and depth is None)
    deep = None if listed else depth if depth is not None else DEEPEST if component else None
    facts = read_step(found_at(step), Wanted(glob or "*", tuple(component or ()), deep, listed))
    if as_json:
        _print_json(facts)
    else:
        print_step(facts, _console())


@app.command("verify")
def verify_steps(
    path: Annotated[str, typer.Argument(metavar="STEP_OR_ROOT", help="One step, or a run for all its steps.")],
    as_json: Json = False,
) -> None:
    """Verify structure, coverage and every digest. The exit status says what kind of fault there is."""
    folder = folder_at(path)
    errors = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if is_step(folder):
        verification = verify_step(step_at(path), name_of(folder), errors)
    else:
        verification = verify_root(root_at(path), errors)
    if as_json:
        _print_json(verification)
    else:
        print_result(verification, _console())
    raise typer.Exit(verification.exit_status)


@app.command("stats")
def show_stats(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")],
    last: Annotated[int | None, typer.Option("--last", metavar="N", min=1, help="Only the newest N saves.")] = None,
    as_json: Json = False,
) -> None:
    """Show what the saves of a run have cost: one line each, percentiles, and what failed."""
    stats = read_stats(root_at(root), last)
    if as_json:
        _print_json(stats)
    else:
        print_stats(stats, _console())


app.command("cat")(print_key)
app.command("completion")(print_completion)
app.command("diff")(diff_steps)
app.command("convert")(convert_step)
app.command("cp")(copy_steps)
app.command("drill")(drill_script)
app.command("export")(export_step)
app.command("import")(import_model)
app.command("prune")(prune_steps)
app.command("repair")(repair_run)
app.command("gc")(collect_garbage)
app.command("scrub")(scrub_run)
app.command("pin")(pin)
app.command("unpin")(unpin)


@agent.command("status")
def show_agents(as_json: Json = False) -> None:
    """Show every agent of this user on this machine, and what it is doing."""
    found = read_agents()
    if as_json:
        _print_json(found)
    else:
        print_agents(found, _console())


@agent.command("stop")
def stop_agent(
    root: Annotated[str | None, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All agents of this user on this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Give up what is not decided yet.")] = False,
    as_json: Json = False,
) -> None:
    """Have agents leave, once what was submitted to them is decided. The exit status says whether all of it was kept."""
    stopping = stop_agents(root, everything=everything, now=now)
    if as_json:
        _print_json(stopping)
    else:
        print_stopped(stopping, root, _console())
    raise typer.Exit(stopping.exit_status)


def main() -> None:
    """The entry point of the command ``keepstep``."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its number, not an error.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()


def _console() -> Console:
    return Console(markup=False, highlight=False, emoji=False)


def _print_json(facts: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())


def _say_error(error: CheckpointError) -> None:
    typer.echo(f"error[{error.code}]: {safe(str(error))}", err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(f"  {safe(note)}", err=True)
    typer.echo(f"what to do: {error.remedy}", err=True)


def _storage_error(error: OSError) -> StorageError:
    return StorageError("open", str(error.filename or "the path"), error)


if __name__ == "__main__":
    main()
