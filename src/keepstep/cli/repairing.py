"""``keepstep repair``: lost manifests, damaged steps and the records of a run, put in order by what can be proved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.agent.sole import sole_writer
from keepstep.check.rebuild import attempts_in
from keepstep.check.repair import Action, Wish, repair, repair_alone, undo
from keepstep.cli.listing import read_listing
from keepstep.cli.places import check_there, folder_at, has_blob, name_of, parent_of
from keepstep.cli.words import safe
from keepstep.commit.publish import RUN_NAME
from keepstep.errors import CorruptError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name
from keepstep.storage.base import Storage

__all__ = ["Repair", "StepState", "repair_run"]


@dataclass(frozen=True, slots=True)
class StepState:
    """A step before or after; ``status`` as in `keepstep ls`."""

    name: str
    status: str
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """All of it; the fields are those of the JSON output. ``exit_status`` is 7 when something damaged was left."""

    path: str
    dry_run: bool
    exit_status: int
    before: tuple[StepState, ...]
    actions: tuple[Action, ...]
    after: tuple[StepState, ...]


def repair_run(
    path: Annotated[str, typer.Argument(metavar="STEP_OR_ROOT", help="One step, or a run for all of it.")],
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Make whole attempts steps that nothing says were committed.")
    ] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Read every step, and put damaged ones aside; nothing is deleted.")
    ] = False,
    undoing: Annotated[bool, typer.Option("--undo", help="Bring a step back that was put aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")] = False,
) -> None:
    """Make lost manifests again from the files of their steps, put damaged steps aside, write the records of a run anew.

    Deletes no data. Refuses while a job on this machine saves there.
    """
    storage = folder_at(path)
    check_there(storage)
    root, step = _run_of(storage)
    wish = Wish(frozenset() if step is None else frozenset({step}), uncommitted, quarantine, dry_run)
    if undoing and (step is None or uncommitted or quarantine or dry_run):
        raise UsageError("--undo is for one step that was put aside, and goes with none of the other options")
    console = Console(markup=False, highlight=False, emoji=False)
    shown = None if as_json else console
    with contextlib.nullcontext() if dry_run else sole_writer(storage.url if root is None else root.url):
        before = _states(root or storage, alone=root is None)
        if shown is not None:
            _print_states("before", before, shown)
        actions: list[Action] = []
        for action in _actions(storage, root, wish, undoing=undoing):
            actions.append(action)
            if shown is not None:
                _print_action(action, shown)
        after = _states(root or storage, alone=root is None)
    status = CorruptError.exit_status if any(one.outcome == "left" for one in actions) else 0
    if shown is not None:
        _print_states("after", after, shown)
    else:
        facts = Repair(storage.url, dry_run, status, before, tuple(actions), after)
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    raise typer.Exit(status)


def _run_of(storage: Storage) -> tuple[Storage | None, int | None]:
    """The root of the run that the folder is or belongs to, and the step that it is. None for a step outside of any run."""
    step = parse_step_name(name_of(storage))
    looks_like_step = has_blob(storage, MANIFEST_NAME) or bool(attempts_in(storage))
    if step is not None:
        root = parent_of(storage)
        if looks_like_step or has_blob(root, RUN_NAME):
            return root, step
    return (None if looks_like_step else storage), None


def _actions(storage: Storage, root: Storage | None, wish: Wish, *, undoing: bool) -> Iterator[Action]:
    if root is None:
        if wish.quarantine:
            raise UsageError(f"{storage.url} belongs to no run: nobody takes it for a step unless it is named")
        yield from repair_alone(storage, wish)
    elif undoing:
        (step,) = wish.steps
        yield undo(root, step)
    else:
        yield from repair(root, wish)


def _states(storage: Storage, *, alone: bool) -> tuple[StepState, ...]:
    if alone:
        there = has_blob(storage, MANIFEST_NAME)
        return (StepState(name_of(storage), "committed" if there else "unfinished"),)
    return tuple(StepState(line.name, line.status, line.damage) for line in read_listing(storage).steps)


def _print_states(title: str, states: tuple[StepState, ...], console: Console) -> None:
    counts: dict[str, list[str]] = {}
    for state in states:
        counts.setdefault(state.status, []).append(state.name)
    text = "; ".join(f"{len(names)} {status} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
                     for status, names in counts.items())  # fmt: skip
    console.print(f"{title}: {safe(text) or 'no steps'}", soft_wrap=True)


def _print_action(action: Action, console: Console) -> None:
    words = {"done": "done", "would": "would be done", "left": "LEFT AS IT IS", "none": "nothing done"}
    console.print(f"  {safe(action.target)}: {words[action.outcome]}: {safe(action.text)}", soft_wrap=True)
