"""``keepstep drill``: a user's own script, interrupted in every way, and each resumed run compared with one that was not."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from keepstep.check.compare import Difference, Lost
from keepstep.cli.words import plural, safe
from keepstep.drill.judge import Verdict
from keepstep.drill.plan import SCENARIOS, Plan
from keepstep.drill.runs import Progress
from keepstep.drill.story import Report, drill
from keepstep.errors import DrillError, UnprovenError, UsageError

__all__ = ["INTERRUPTED", "drill_script", "print_report"]

INTERRUPTED = 130
PIPED_COLUMNS = 10_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""(A shell starts what runs behind it deaf to the first: whoever sends it all the same means it.)"""


def drill_script(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND ...", help="What starts the script, after two dashes.")
    ],
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="COMMAND", help="Start it on other ranks too, in quotes; repeatable."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="End every run at step N; else the script ends by itself."),
    ] = None,
    stop_at: Annotated[
        int | None,
        typer.Option("--stop-at", metavar="K", help="Stop at step K and resume; about half way if not given."),
    ] = None,
    kills: Annotated[int, typer.Option("--kills", metavar="N", help="Kill a run N times with SIGKILL.")] = 5,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the moments of the kills; random if not given.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How far losses on other ranks may be apart, relative.")
    ] = 1e-5,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", metavar="S", help="How long a start may take, in seconds.")
    ] = 1800.0,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help=f"Only this, repeatable: {', '.join(SCENARIOS)}."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", metavar="DIR", help="An empty folder to work in, which is kept.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the JSON to a file as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")] = False,
) -> None:
    """Interrupt a training script in every way, resume it, and compare with a run that was never interrupted.

    The script must use a Checkpointer. It is started about a dozen times, with a run folder of the drill's own in place of
    the one it names.
    """
    folder = (work or Path(tempfile.mkdtemp(prefix="keepstep-drill-"))).absolute()
    plan = Plan(
        command=tuple(command),
        work=folder,
        environment=dict(os.environ),
        also=tuple(tuple(shlex.split(text)) for text in also or ()),
        steps=steps,
        stop_at=stop_at,
        kills=kills,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        tolerance=tolerance,
        timeout_s=timeout_s,
        only=tuple(only or SCENARIOS),
    )
    errors = Console(stderr=True, markup=False, highlight=False, emoji=False)
    report = _run(plan, errors, ours=work is None)
    if report.result == "holds" and work is None:
        shutil.rmtree(folder, ignore_errors=True)
        report = replace(report, work=None)
    facts = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    if report_file is not None:
        report_file.write_text(facts + "\n")
    if as_json:
        typer.echo(facts)
    else:
        print_report(report, Console(markup=False, highlight=False, emoji=False))
    if report.result == "unproven":
        raise UnprovenError(f"nothing can be proved: the script is not the same twice; see {report.work}")
    if report.result == "broken":
        names = ", ".join(one.scenario for one in report.verdicts if not one.holds)
        raise DrillError(f"promises were broken: {names}; traces and logs are in {report.work}")


def _run(plan: Plan, errors: Console, *, ours: bool) -> Report:
    """Runs it, showing how it goes; whatever ends it, no process stays behind."""
    errors.print(f"seed {plan.seed}, working in {safe(str(plan.work))}", soft_wrap=True)
    try:
        with _signals(), contextlib.closing(drill(plan)) as events, errors.status("starting") as status:
            for event in events:
                if isinstance(event, Report):
                    return event
                _show(event, plan, errors, status)
    except UsageError:
        if ours:
            shutil.rmtree(plan.work, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        errors.print(
            f"interrupted; every process of the drill has been ended. What it has made is in {safe(str(plan.work))}",
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    raise UnprovenError("the drill has ended without a report")


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """A drill that is asked to end does so as after Ctrl-C: with everything that it has started."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _show(event: Progress | Verdict, plan: Plan, errors: Console, status: Status) -> None:
    if isinstance(event, Verdict):
        errors.print(f"{event.scenario}: {_result(event)}, {plural(event.steps, 'step')} compared", soft_wrap=True)
        return
    end = f" of {plan.steps}" if plan.steps is not None else ""
    place = f"step {event.step}{end}" if event.step >= 0 else event.doing
    status.update(f"{event.scenario}, start {event.start}: {place}")


# --- what people see at the end --------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """A table, and below it what was broken and why it may be so."""
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("scenario", "compared with", "starts", "steps", "result", "first difference"):
        table.add_column(name, justify="right" if name in ("starts", "steps") else "left", overflow="fold")
    for verdict in report.verdicts:
        first = verdict.first
        where = f"step {first.step}: {first.what}" if first else "–" if verdict.holds else "see below"
        table.add_row(
            safe(verdict.scenario),
            verdict.against,
            str(verdict.starts),
            str(verdict.steps),
            _result(verdict),
            safe(where),
        )
    console.print(table)
    for verdict in report.verdicts:
        _print_details(verdict, console)
    for hint in report.hints:
        console.print(f"  hint: {hint}", soft_wrap=True)
    if report.result == "holds":
        steps = sum(verdict.steps for verdict in report.verdicts)
        console.print(
            f"\nevery promise held: {plural(steps, 'step')} of {plural(report.world_size, 'rank')}, stopped at step"
            f" {report.stop_at} of {report.steps}, seed {report.seed}",
            soft_wrap=True,
        )
    if report.work is not None:
        console.print(f"\ntraces and logs: {safe(report.work)}", soft_wrap=True)


def _result(verdict: Verdict) -> str:
    return verdict.result if verdict.holds else verdict.result.upper()


def _print_details(verdict: Verdict, console: Console) -> None:
    lines = [*_why(verdict), *(f"note: {safe(text)}" for text in verdict.notes), *_apart(verdict.worst)]
    if not lines:
        return
    console.print(f"\n{safe(verdict.scenario)}", style="bold")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)
    if verdict.output:
        console.print(f"  its output in {safe(verdict.log)} ends with:", soft_wrap=True)
        for line in verdict.output.splitlines():
            console.print(f"    | {safe(line)}", soft_wrap=True)


def _why(verdict: Verdict) -> list[str]:
    lines = [safe(problem) for problem in verdict.problems]
    if verdict.first is not None:
        lines.append(f"{plural(verdict.differing, 'step')} differ, the first one here:")
        lines += _difference(verdict.first)
    return lines


def _difference(first: Difference) -> list[str]:
    lines = [safe(str(first))]
    if first.others:
        lines.append(f"in the same step differ as well: {safe(', '.join(first.others))}")
    if first.before:
        lines.append(f"had differed before it: {safe(', '.join(first.before))}")
    return [*lines, *(f"likely cause: {safe(cause)}" for cause in first.causes)]


def _apart(worst: Lost | None) -> list[str]:
    if worst is None:
        return []
    return [f"losses: at most {worst.apart:.1e} apart, at step {worst.step} ({worst.found:.6g}, {worst.expected:.6g})"]
