"""What a drill will do, as records: the options of the whole, and the moments at which a run is killed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.errors import UsageError, listed

__all__ = ["SCENARIOS", "Moment", "Plan", "check_plan", "plan_kills", "stop_step", "target_step"]

SCENARIOS = ("resume", "kills", "worlds", "damage")
Kind = Literal["step", "save", "staged"]
_KINDS: tuple[Kind, ...] = ("save", "step", "staged")


@dataclass(frozen=True, slots=True)
class Plan:
    """A drill. ``work`` is an empty folder for everything it makes; ``environment`` is that of the scripts.

    ``steps`` is where every run ends, None for the script's own end; ``stop_at`` where it is stopped, None for half way.
    ``also`` are commands that start the script on other numbers of ranks.
    """

    command: tuple[str, ...]
    work: Path
    environment: Mapping[str, str]
    also: tuple[tuple[str, ...], ...] = ()
    steps: int | None = None
    stop_at: int | None = None
    kills: int = 5
    seed: int = 0
    tolerance: float = 1e-5
    timeout_s: float = 1800.0
    only: tuple[str, ...] = SCENARIOS


@dataclass(frozen=True, slots=True)
class Moment:
    """When one start of the job is killed; whether its agent is killed with it.

    ``step``: so long after a step; ``save``: so long after a save was due, which is inside it; ``staged``: as soon as every
    rank has its copy. ``ahead`` says how far into what is left to train, ``late`` how far into the step or save: 0 to 1.
    """

    kind: Kind
    ahead: float
    late: float
    agent: bool


def check_plan(plan: Plan) -> None:
    """Whether it makes sense.

    Raises:
        UsageError: it does not; lists everything.
    """
    wrong = []
    if not plan.command or not all(plan.also):
        wrong.append("a command is empty: keepstep drill [OPTIONS] -- COMMAND ...")
    if plan.steps is not None and plan.steps < 2:
        wrong.append(f"steps is {plan.steps}; a run of 2 steps is the shortest that can be interrupted")
    if plan.stop_at is not None and plan.stop_at < 1:
        wrong.append(f"stop_at is {plan.stop_at}; the first step to stop at is 1")
    if plan.steps is not None and plan.stop_at is not None and plan.stop_at >= plan.steps:
        wrong.append(f"stop_at is {plan.stop_at}, which is not before the end at step {plan.steps}")
    if plan.kills < 0:
        wrong.append(f"kills is {plan.kills}; it is 0 or more")
    if not plan.tolerance >= 0:
        wrong.append(f"tolerance is {plan.tolerance}; it is relative, such as 1e-5")
    if not plan.timeout_s > 0:
        wrong.append(f"timeout_s is {plan.timeout_s}; it is in seconds, more than 0")
    if unknown := [name for name in plan.only if name not in SCENARIOS]:
        wrong.append(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if wrong:
        raise UsageError("this is no drill:" + listed(wrong))


def stop_step(plan: Plan, last: int) -> int:
    """Where a run of ``last`` steps is stopped.

    Raises:
        UsageError: it has no such step before its end.
    """
    stop = max(1, last // 2) if plan.stop_at is None else plan.stop_at
    if stop >= last:
        raise UsageError(f"the script cannot be stopped at step {stop} and resumed: it ends at step {last}")
    return stop


def plan_kills(seed: int, count: int) -> tuple[Moment, ...]:
    """The moments of ``count`` kills. Every kind in turn, from a random one on; every other kill takes the agent as well."""
    rng = random.Random(seed)
    first_kind, first_agent = rng.randrange(len(_KINDS)), rng.randrange(2)
    moments = []
    for number in range(count):
        kind = _KINDS[(first_kind + number) % len(_KINDS)]
        # What is promised of a copy that is complete is promised while the agent lives.
        agent = kind != "staged" and (first_agent + number) % 2 == 0
        moments.append(Moment(kind, rng.random(), rng.random(), agent))
    return tuple(moments)


def target_step(moment: Moment, *, begin: int, last: int, left: int, dues: Sequence[int]) -> tuple[Kind, int]:
    """Of a start that begins at ``begin``: the kind of kill that can be, and the first step that it waits for.

    Args:
        moment: what is wanted.
        begin: the step it stands at.
        last: the step at which every run ends.
        left: how many kills are to come, this one included; they share what is left to train.
        dues: the steps at which the reference saved before its end.
    """
    room = last - 1 - begin
    if room < 1:
        return "step", begin
    span = max(1, min(room, 2 * room // max(1, left)))
    step = begin + 1 + int(moment.ahead * span * 0.999)
    if moment.kind == "step":
        return "step", step
    coming = [due for due in dues if begin < due < last]
    if not coming:
        return "step", step
    # The first save from there on; the last one when there is none.
    return moment.kind, next((due for due in coming if due >= step), coming[-1])
