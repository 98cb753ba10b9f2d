"""``keepstep scrub``: old steps read again at low priority, so that rotten bits are told before they are needed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.check.scrub import Pace, Scrubbed, lower_priority, scrub
from keepstep.check.verify import Problem, exit_status
from keepstep.cli.places import root_at
from keepstep.cli.words import plural, safe, size_words, time_words
from keepstep.errors import UsageError
from keepstep.format.manifest import step_name
from keepstep.storage.base import Storage

__all__ = ["Scrubbing", "scrub_run"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scrubbing:
    """One round; the fields are those of the JSON output. ``exit_status`` belongs to the worst problem that was found."""

    root: str
    exit_status: int
    steps: tuple[Scrubbed, ...]


def scrub_run(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")],
    once: Annotated[bool, typer.Option("--once", help="One round and no more; so without --every, too.")] = False,
    every: Annotated[
        float | None, typer.Option("--every", metavar="HOURS", min=0.0, help="Go on, and read each step so often.")
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", metavar="MIB_PER_S", min=0.0, help="At most so much; 0 for no limit.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a round; see docs/cli.md.")] = False,
) -> None:
    """Verify every step of a run, the one that was read longest ago first, at low priority; remember what was found.

    With --once and --every together, one round over the steps that are due.
    """
    if every is None and not once:
        once = True
    storage = root_at(root)
    pace = Pace(int(rate * MIB))
    older_than_s = (every or 0.0) * 3600
    if not once and not older_than_s:
        raise UsageError("--every 0 would read without a pause; say how many hours")
    # On a thread of its own: only that one gives way to everybody else, and what it starts.
    with ThreadPoolExecutor(1, initializer=lower_priority, thread_name_prefix="keepstep-scrub") as low:
        try:
            while True:
                done = low.submit(_round, storage, pace, older_than_s, shown=not as_json).result()
                if as_json:
                    typer.echo(msgspec.json.format(msgspec.json.encode(done), indent=2).decode())
                if once:
                    raise typer.Exit(done.exit_status)
                time.sleep(min(60.0, older_than_s))
        finally:
            pace.stop.set()


def _round(storage: Storage, pace: Pace, older_than_s: float, *, shown: bool) -> Scrubbing:
    console = Console(markup=False, highlight=False, emoji=False)
    results: list[Scrubbed] = []
    problems: list[Problem] = []
    for result, found in scrub(storage, pace, older_than_s=older_than_s):
        results.append(result)
        problems.extend(found)
        if shown:
            verdict = "ok" if result.ok else f"DAMAGED, {plural(len(found), 'problem')}"
            facts = f"{size_words(result.bytes)} in {time_words(result.seconds)}"
            console.print(f"{step_name(result.step)}  {verdict}  ({facts})", soft_wrap=True)
            for problem in found:
                console.print(f"  {problem.kind}: {safe(problem.text)}", soft_wrap=True)
    if shown and not results and not older_than_s:
        console.print("no step is committed there", soft_wrap=True)
    return Scrubbing(storage.url, exit_status(tuple(problems)), tuple(results))
