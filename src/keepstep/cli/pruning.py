"""``keepstep prune``, ``pin`` and ``unpin``: the rules of retention by hand, and what they would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from keepstep.agent.client import call_agent
from keepstep.agent.node import listener_at, socket_path
from keepstep.agent.protocol import Drain
from keepstep.agent.sole import sole_writer
from keepstep.check.verify import Verified, verify
from keepstep.cli.places import name_of, parent_of, place_above, root_at, step_at
from keepstep.cli.verifying import bar_of
from keepstep.cli.words import age_s, age_words, metric_words, plural, safe, size_words
from keepstep.commit.catalog import Catalog, Found, check_files, read_catalog, read_manifest, step_storage
from keepstep.commit.pins import pin_step, pinned_steps, unpin_step
from keepstep.commit.publish import newest_incarnation
from keepstep.commit.retention import Fate, Keep, for_space, judge, make_room, remove_step
from keepstep.commit.weights import drop_optimizers, droppable
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.format.globs import near
from keepstep.format.manifest import parse_step_name, step_name
from keepstep.storage.base import Storage

__all__ = ["pin", "prune_steps", "unpin"]

SETTLE_S = 10.0
Json = Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")]


@dataclass(frozen=True, slots=True)
class PruneLine:
    """One committed step as it was. ``action`` is keep, remove or drop-optimizer; ``reasons`` are why it stays.

    ``frees_bytes`` is what the action frees; the fields are those of the JSON output.
    """

    step: int
    name: str
    action: str
    reasons: tuple[str, ...]
    bytes: int
    frees_bytes: int
    run: str | None = None
    created: str | None = None
    age_s: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is there before, and after. With ``dry_run`` nothing was changed, and what is after is what would be."""

    root: str
    run: str
    dry_run: bool
    steps: tuple[PruneLine, ...]
    bytes_before: int
    bytes_after: int
    steps_after: tuple[int, ...]
    free_bytes: int | None
    wanted_free_bytes: int
    unfinished: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """0, or that of a storage error where the space that was wanted is not there even so."""
        short = self.free_bytes is not None and self.free_bytes < self.wanted_free_bytes
        return StorageError.exit_status if short else 0


def prune_steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")],
    keep_last: Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="Keep every step that is a multiple of N.")
    ] = None,
    keep_every_s: Annotated[
        float | None, typer.Option("--keep-every-s", metavar="S", help="Keep one step for every S seconds of the run.")
    ] = None,
    keep_best: Annotated[
        int, typer.Option("--keep-best", metavar="N", help="Keep the N steps with the best metric.")
    ] = 0,
    metric: Annotated[str, typer.Option("--metric", metavar="NAME", help="Which metric is meant.")] = "loss",
    mode: Annotated[str, typer.Option("--mode", help="Whether the best is the min or the max.")] = "min",
    weights_only_after: Annotated[
        int | None,
        typer.Option("--weights-only-after", metavar="N", help="Drop the optimizer's files of all but the newest N."),
    ] = None,
    min_free_bytes: Annotated[
        int, typer.Option("--min-free-bytes", metavar="BYTES", help="Remove the oldest until so much is free.")
    ] = 0,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Steps of this run; that of the newest step if not given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Trust the newest step without reading its bytes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove old steps by the rules of Keep, joined: a step stays when any of them wants it.

    The newest good step always stays, as do the one it was resumed from, pinned ones, those of other runs and damaged ones.
    Refuses while a job on this machine saves there.
    """
    chosen = (keep_last, keep_every, keep_every_s, keep_best or None, weights_only_after, min_free_bytes or None)
    if all(rule is None for rule in chosen):
        raise UsageError("say what to keep: --keep-last N, or another rule; see keepstep prune --help")
    if keep_last is None and any(rule is not None for rule in chosen[:4]):
        # Who names rules means these, and not "everything", as without a rule for steps.
        keep_last = 1
    if mode not in ("min", "max"):
        raise UsageError(f"--mode {mode!r} is neither min nor max{near(mode, ('min', 'max'))}")
    keep = Keep(keep_last, keep_every, keep_best, metric, mode, keep_every_s, weights_only_after, min_free_bytes)
    pruning = _prune(root_at(root), keep, run, dry_run=dry_run, trusting=no_verify)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(pruning), indent=2).decode())
    else:
        _print_pruning(pruning, Console(markup=False, highlight=False, emoji=False))
    raise typer.Exit(pruning.exit_status)


def pin(
    step: Annotated[str, typer.Argument(metavar="STEP", help="One step: its folder or URL.")],
    note: Annotated[str, typer.Option("--note", help="Why; for whoever looks at it later.")] = "",
) -> None:
    """Pin a step: no rule of retention removes it, or anything of it, until it is unpinned."""
    storage = step_at(step)
    name = name_of(storage)
    made = pin_step(parent_of(storage), _number(storage.url, name), note)
    typer.echo(f"{name} is pinned" if made else f"{name} was pinned before; nothing was changed")


def unpin(
    step: Annotated[str, typer.Argument(metavar="STEP", help="One step, there or not: its folder or URL.")],
) -> None:
    """Take the pin of a step away. It stays until retention comes by."""
    above, name = place_above(step)
    if not unpin_step(root_at(above), _number(step, name)):
        raise StepNotFoundError(f"{name} is not pinned; nothing was changed")
    typer.echo(f"{name} is no longer pinned")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be done, step by step, and what each takes up."""

    run: str
    catalog: Catalog
    fates: tuple[Fate, ...]
    sizes: dict[int, int]
    frees: dict[int, int]


def _prune(root: Storage, keep: Keep, run: str | None, *, dry_run: bool, trusting: bool) -> Pruning:
    """Looks, and does what the rules say. Killed in between, it can be run again."""
    with contextlib.nullcontext() if dry_run else _quiet(root):
        plan = _plan(root, keep, run, trusting=trusting)
        free = root.free_bytes()
        if dry_run:
            freed = sum(plan.frees[fate.found.step] for fate in plan.fates)
            gone = {fate.found.step for fate in plan.fates if fate.goes}
            for found in for_space(plan.fates) if free is not None else ():
                if free is not None and free + freed < keep.min_free_bytes:
                    freed += plan.sizes[found.step] - plan.frees[found.step]
                    gone.add(found.step)
            free = None if free is None else free + freed
        else:
            gone, free = _carry_out(root, keep, plan)
    lines = tuple(_line(fate, plan, gone, keep) for fate in plan.fates)
    before = sum(plan.sizes.values())
    return Pruning(
        root.url,
        plan.run,
        dry_run,
        lines,
        before,
        before - sum(line.frees_bytes for line in lines),
        tuple(line.step for line in lines if line.action != "remove"),
        free,
        keep.min_free_bytes,
        plan.catalog.unfinished,
    )


@contextlib.contextmanager
def _quiet(root: Storage) -> Iterator[None]:
    """No job of this machine writes here; and what an agent has committed, it has tidied up after."""
    with sole_writer(root.url):
        if listener_at(path := socket_path(root.url)):
            call_agent(path, Drain(SETTLE_S), 2 * SETTLE_S)
        yield


def _carry_out(root: Storage, keep: Keep, plan: _Plan) -> tuple[set[int], int | None]:
    """Steps that are gone, and what is free then."""
    start = newest_incarnation(root)
    for fate in reversed(plan.fates):
        if fate.goes:
            remove_step(root, fate.found, start)
        elif fate.strip or (fate.found.dropped and not fate.found.damage):
            # (Of one that was interrupted, what is left is finished.)
            drop_optimizers(root, fate.found.step, start)
    free = make_room(root, for_space(plan.fates), keep.min_free_bytes, start)
    there = {found.step for found in read_catalog(root).steps}
    return {fate.found.step for fate in plan.fates} - there, free


def _plan(root: Storage, keep: Keep, run: str | None, *, trusting: bool) -> _Plan:
    """Looks at every step: sizes and names of all, every byte of the newest good one."""
    catalog = read_catalog(root)
    steps = [_looked_at(root, found) for found in catalog.steps]
    chosen = run or next((found.run for found in steps if not found.damage), "")
    if run is not None and run not in {found.run for found in steps}:
        known = ", ".join(sorted({found.run for found in steps if found.run})) or "none"
        raise StepNotFoundError(f"{root.url} has no step of run {run!r}; runs there: {known}")
    named = {name for found in steps for name in found.metrics or ()}
    if keep.best and keep.metric not in named:
        # A slip of the pen here would cost the best steps.
        known = ", ".join(sorted(named)) or "none"
        raise UsageError(
            f"no step has the metric {keep.metric!r}; there are: {known}{near(keep.metric, sorted(named))}"
        )
    if not trusting:
        steps = list(_proved(root, steps, chosen))
    catalog = replace(catalog, steps=tuple(steps))
    newest = next((found for found in steps if found.run == chosen and not found.damage), None)
    resumed = {newest.parent} if newest is not None else set()
    fates = judge(catalog, keep, run=chosen, resumed=resumed, pinned=pinned_steps(root))
    # What would lose its optimizer, but cannot, stays as it is.
    fates = tuple(replace(fate, strip=fate.strip and bool(_optimizers(root, fate.found))) for fate in fates)
    sizes = {found.step: sum(size for _, size in root.list(step_name(found.step))) for found in steps}
    frees = {
        fate.found.step: sizes[fate.found.step] if fate.goes else _optimizer_bytes(root, fate) if fate.strip else 0
        for fate in fates
    }
    return _Plan(chosen, catalog, fates, sizes, frees)


def _looked_at(root: Storage, found: Found) -> Found:
    """The step, damaged where a file is missing or of another size."""
    if found.damage:
        return found
    storage = step_storage(root, found.step)
    try:
        check_files(storage, read_manifest(storage))
    except (CorruptError, FormatError, StorageError) as err:
        return replace(found, damage=str(err))
    return found


def _proved(root: Storage, steps: list[Found], run: str) -> Iterator[Found]:
    """The steps, after every byte of the newest one was read that is to be relied upon; damaged ones are passed over."""
    sure = False
    for found in steps:
        if sure or found.damage or found.dropped or found.run != run:
            yield found
            continue
        verified = Verified(None)
        with bar_of() as bar:
            task = bar.add_task(step_name(found.step), total=None)
            for verified in verify(step_storage(root, found.step)):
                bar.update(task, completed=verified.bytes, total=verified.total_bytes)
        sure = verified.ok
        yield found if sure else replace(found, damage=verified.problems[0].text)


def _optimizers(root: Storage, found: Found) -> tuple[str, ...]:
    try:
        return droppable(read_manifest(step_storage(root, found.step)))
    except CheckpointError:
        return ()


def _optimizer_bytes(root: Storage, fate: Fate) -> int:
    folders = _optimizers(root, fate.found)
    return sum(size for folder in folders for _, size in root.list(f"{step_name(fate.found.step)}/{folder}"))


def _line(fate: Fate, plan: _Plan, gone: set[int], keep: Keep) -> PruneLine:
    found = fate.found
    action = "remove" if found.step in gone else "drop-optimizer" if fate.strip else "keep"
    reasons = (*fate.held, *fate.wanted)
    if action == "remove" and reasons:
        reasons = (f"for space: less than {size_words(keep.min_free_bytes)} free",)
    return PruneLine(
        found.step,
        step_name(found.step),
        action,
        reasons,
        plan.sizes[found.step],
        plan.sizes[found.step] if action == "remove" else plan.frees[found.step],
        found.run or None,
        found.created or None,
        age_s(found.created),
        dict(found.metrics or {}),
        found.damage or None,
    )


def _print_pruning(pruning: Pruning, console: Console) -> None:
    """What is there before, with what becomes of it and why; and what is there after."""
    if pruning.steps:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, side in (("step", "right"), ("age", "right"), ("size", "right"), ("action", "left")):
            table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("why", overflow="fold")
        table.add_column("metrics", overflow="fold")
        for line in pruning.steps:
            why = "no rule wants it" if not line.reasons else ", ".join(line.reasons)
            cells = (str(line.step), age_words(line.age_s), size_words(line.bytes), line.action.replace("-", " "))
            table.add_row(*cells, why, metric_words(line.metrics))
        console.print(table)
    after = plural(len(pruning.steps_after), "step")
    before = plural(len(pruning.steps), "step")
    verb = "would be there" if pruning.dry_run else "are there"
    console.print(
        f"before: {before}, {size_words(pruning.bytes_before)}; {after}, {size_words(pruning.bytes_after)} {verb} after",
        soft_wrap=True,
    )
    if pruning.wanted_free_bytes and pruning.free_bytes is None:
        console.print(f"how much is free at {safe(pruning.root)} cannot be told: nothing went for that", soft_wrap=True)
    elif pruning.exit_status:
        console.print(
            f"only {size_words(pruning.free_bytes or 0)} free, {size_words(pruning.wanted_free_bytes)} wanted: no more"
            " steps may go",
            soft_wrap=True,
        )
    if pruning.unfinished:
        console.print(
            f"never committed, not looked at: {', '.join(pruning.unfinished)} (the next start of the job removes them)",
            soft_wrap=True,
        )


def _number(place: str, name: str) -> int:
    number = parse_step_name(name)
    if number is None:
        raise UsageError(f"{place} is not a step of a run: its name would be {step_name(0)} and the like")
    return number
