"""The drill: a reference, and then every way to interrupt it that was asked for, each judged as it ends."""

from __future__ import annotations

import contextlib
import random
import shlex
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.check.trace import read_trace
from keepstep.drill.jobs import stop_agent
from keepstep.drill.judge import (
    HINTS,
    Baseline,
    Verdict,
    baseline_of,
    judge_kills,
    judge_refusal,
    judge_repeated,
    judge_resumed,
    judge_stopped,
    judge_world,
)
from keepstep.drill.places import (
    committed_steps,
    cut_file,
    flip_byte,
    keep_only,
    make_work,
    newest_committed,
    site,
)
from keepstep.drill.plan import Plan, check_plan, plan_kills, stop_step
from keepstep.drill.runs import Ended, Progress, Site, Start, run
from keepstep.drill.watch import Trigger
from keepstep.errors import DrillError, UnprovenError

__all__ = ["Report", "drill"]

Doing = Generator[Progress | Verdict, None, None]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole drill. ``result`` is ``holds``, ``broken`` or ``unproven``; ``hints`` say what to do about the last.

    ``steps`` is where every run ended, ``stop_at`` where it was stopped. ``work`` has traces and logs, and the roots of
    scenarios that did not hold.
    """

    result: str
    exit_status: int
    command: str
    also: tuple[str, ...]
    seed: int
    steps: int
    stop_at: int
    world_size: int
    work: str | None
    verdicts: tuple[Verdict, ...]
    hints: tuple[str, ...] = ()


def drill(plan: Plan) -> Generator[Progress | Verdict | Report, None, None]:
    """Runs the drill: tells how it goes, gives each verdict as it is made, and the report at the end.

    Close it to stop before the end: every process that it has started is ended then, in any case.

    Raises:
        UsageError: the plan makes no sense, or there is no such command.
        UnprovenError: the script fails by itself, or leaves no trace.
    """
    check_plan(plan)
    make_work(plan.work)
    verdicts: list[Verdict] = []
    baseline: Baseline | None = None
    hints: tuple[str, ...] = HINTS
    with site(plan.work, "reference") as reference:
        first = yield from _reference(plan, reference)
        again = yield from _again(plan, reference, first)
        verdicts.append(again.verdict)
        yield again.verdict
        if again.verdict.holds:
            baseline, hints = again.baseline, ()
    if baseline is not None:
        _remove(reference)
        # Closed with this one, so that what it has started does not outlive it.
        with contextlib.closing(_interrupted(plan, baseline)) as events:
            for event in events:
                if isinstance(event, Verdict):
                    verdicts.append(event)
                yield event
    broken = [one for one in verdicts if not one.holds]
    kind = None if not broken else UnprovenError if baseline is None else DrillError
    yield Report(
        "holds" if kind is None else "unproven" if kind is UnprovenError else "broken",
        0 if kind is None else kind.exit_status,
        shlex.join(plan.command),
        tuple(map(shlex.join, plan.also)),
        plan.seed,
        again.baseline.last,
        again.baseline.stop_at,
        again.baseline.world,
        str(plan.work),
        tuple(verdicts),
        hints,
    )


# --- what is compared with -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Again:
    verdict: Verdict
    baseline: Baseline


def _reference(plan: Plan, place: Site) -> Generator[Progress, None, Baseline]:
    """A run without interruption."""
    ended = yield from run(_start(plan, "reference", place, stop_at=plan.steps))
    if ended.failure:
        output = ended.tail
        raise UnprovenError(
            f"the script {ended.failure}, without any interruption; its output is in {ended.log}"
            + (f", and ends with:\n{output}" if output else ", and is empty")
        )
    trace = read_trace(place.trace)
    if not trace.starts():
        raise UnprovenError(
            "the script has ended well and left no trace: it makes no ks.Checkpointer, calls none of its restore() and"
            f" step(), or starts what does without the variables of its environment; its output is in {ended.log}"
        )
    last = max(one.last_step for one in trace.starts()[-1].values())
    if last < 2:
        raise UnprovenError(f"the script has ended after step {last}: there is nothing to interrupt before its end")
    return baseline_of(trace, last=last, stop_at=stop_step(plan, last))


def _again(plan: Plan, reference: Site, baseline: Baseline) -> Generator[Progress, None, _Again]:
    """The same once more: can anything be proved at all?"""
    with site(plan.work, "reference-again") as place:
        ended = yield from run(_start(plan, "reference again", place, stop_at=plan.steps))
        if ended.failure:
            raise UnprovenError(
                f"the script {ended.failure}, when it was run a second time without any interruption; the end of its output"
                f" in {ended.log}:\n{ended.tail}"
            )
        verdict, own = judge_repeated(read_trace(reference.trace), read_trace(place.trace), ended)
    _remove(*([place] if verdict.holds else []))
    return _Again(verdict, replace(baseline, ignore=own))


# --- interruptions --------------------------------------------------------------------------------------------------


def _interrupted(plan: Plan, baseline: Baseline) -> Doing:
    """Every scenario that was asked for. All but the kills go on from one run that was stopped."""
    if {"resume", "worlds", "damage"} & set(plan.only):
        with site(plan.work, "stop") as stopped:
            ended = yield from run(_start(plan, "stop", stopped, stop_at=baseline.stop_at))
            # What it does may go on after the trainer's end; a copy is made of what stands still.
            stop_agent(str(stopped.root), now=False)
            verdict = judge_stopped(baseline, read_trace(stopped.trace), ended, committed_steps(stopped.root))
            yield verdict
            if not verdict.problems:
                yield from _from_stop(plan, baseline, stopped)
                _remove(stopped)
    if "kills" in plan.only and plan.kills:
        yield from _kills(plan, baseline)


def _from_stop(plan: Plan, baseline: Baseline, stopped: Site) -> Doing:
    if "resume" in plan.only:
        with site(plan.work, "resume", like=stopped) as place:
            ended = yield from run(_start(plan, "resume", place, stop_at=plan.steps))
        verdict = judge_resumed("resume", baseline, read_trace(place.trace), ended, begin=baseline.stop_at)
        yield _settled(verdict, place)
    if "worlds" in plan.only:
        for number, command in enumerate(plan.also, 1):
            yield from _world(plan, baseline, stopped, command=command, name=f"world-{number}")
    if "damage" in plan.only:
        yield from _damage(plan, baseline, stopped)


def _world(plan: Plan, baseline: Baseline, stopped: Site, *, command: tuple[str, ...], name: str) -> Doing:
    """On other ranks, twice from the same step."""
    places, ends = [], []
    for suffix in ("", "-again"):
        with site(plan.work, name + suffix, like=stopped) as place:
            start = replace(_start(plan, name + suffix, place, stop_at=plan.steps), command=command)
            ends.append((yield from run(start)))
            places.append(place)
    first, second = (read_trace(place.trace) for place in places)
    verdict = judge_world(name, baseline, (first, second), ends, tolerance=plan.tolerance)
    yield _settled(verdict, *places)


def _damage(plan: Plan, baseline: Baseline, stopped: Site) -> Doing:
    """Damage to the newest step: with an older one to fall back to, and with none."""
    rng = random.Random(plan.seed)
    newest = baseline.stop_at
    with contextlib.ExitStack() as held:
        if len(committed_steps(stopped.root)) < 2 and newest > 1:
            stopped = held.enter_context(site(plan.work, "two-steps"))
            yield from _two_steps(plan, stopped, newest)
        older = next((step for step in committed_steps(stopped.root) if step != newest), 0)
        ways: list[tuple[str, Callable[[Path, int, random.Random], str]]] = [("flipped", flip_byte), ("cut", cut_file)]
        for name, harm in ways if older else []:
            with site(plan.work, name, like=stopped) as place:
                what = harm(place.root, newest, rng)
                ended = yield from run(_start(plan, name, place, stop_at=plan.steps))
            verdict = judge_resumed(name, baseline, read_trace(place.trace), ended, begin=older, fell_back=True)
            yield _settled(replace(verdict, notes=(what, *verdict.notes)), place)
        with site(plan.work, "only-step", like=stopped) as place:
            keep_only(place.root, newest)
            what = flip_byte(place.root, newest, rng)
            ended = yield from run(_start(plan, "only-step", place, stop_at=plan.steps))
        verdict = judge_refusal("only-step", read_trace(place.trace), ended)
        yield _settled(replace(verdict, notes=(what, *verdict.notes)), place)


def _two_steps(plan: Plan, place: Site, newest: int) -> Generator[Progress, None, None]:
    """A run that was stopped twice, so that it has an older step, unless it keeps only one."""
    for number, step in enumerate((newest // 2, newest), 1):
        yield from run(replace(_start(plan, "two-steps", place, stop_at=step), number=number))
        stop_agent(str(place.root), now=False)


def _kills(plan: Plan, baseline: Baseline) -> Doing:
    """Killed again and again, and then left alone."""
    ends: list[Ended] = []
    on_disk: list[int] = []
    moments = plan_kills(plan.seed, plan.kills)
    with site(plan.work, "kills") as place:
        for number in range(1, plan.kills + 2):
            trigger = None
            if number <= plan.kills:
                trigger = Trigger(
                    moments[number - 1],
                    last=baseline.last,
                    left=plan.kills - number + 1,
                    dues=baseline.dues,
                    pace=baseline.pace,
                    first=newest_committed(place.root) < 0,
                )
            start = replace(_start(plan, "kills", place, stop_at=plan.steps), number=number)
            ends.append((yield from run(start, trigger)))
            on_disk.append(newest_committed(place.root))
            if not ends[-1].killed:
                # It has ended by itself, well or not: there is nothing left to kill.
                break
    yield _settled(judge_kills(baseline, read_trace(place.trace), ends, on_disk), place)


def _start(plan: Plan, scenario: str, place: Site, *, stop_at: int | None) -> Start:
    return Start(scenario, 1, plan.command, place, plan.environment, plan.timeout_s, stop_at)


def _settled(verdict: Verdict, *places: Site) -> Verdict:
    """The same verdict; the roots of what has held are removed. Traces and logs stay."""
    if verdict.holds:
        _remove(*places)
    return verdict


def _remove(*places: Site) -> None:
    for place in places:
        shutil.rmtree(place.root, ignore_errors=True)
