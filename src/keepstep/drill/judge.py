"""What came of each scenario: evidence in, a verdict out. Starts nothing, reads no file but a log's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from keepstep.check.compare import Comparison, Difference, Lost, compare
from keepstep.check.trace import Run, Saved, Trace
from keepstep.drill.runs import Ended

__all__ = [
    "Baseline",
    "Generation",
    "Verdict",
    "baseline_of",
    "judge_kills",
    "judge_refusal",
    "judge_repeated",
    "judge_resumed",
    "judge_stopped",
    "judge_world",
]

EXACTLY = "reference: every bit"
_IDLE = ("metrics/", "rng/")
HINTS = (
    "seed everything before the model is made: torch.manual_seed, random.seed, numpy.random.seed, and a generator for the"
    " sampler",
    "torch.use_deterministic_algorithms(True) names the operations that are not; torch.backends.cudnn.benchmark = False, and"
    " CUBLAS_WORKSPACE_CONFIG=:4096:8 for matrix products on a GPU",
    "sums over threads or ranks in another order: OMP_NUM_THREADS and the number of ranks must be the same each time",
    "what depends on the clock, on a process's number, or on the order of a set or of files in a folder",
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The reference, and what follows from it: the step it ended at, where the others are stopped, its ranks.

    ``ignore`` are numbers that are others at each run; ``dues`` the steps at which it saved before its end; ``pace`` how
    long its steps and its saves took, in seconds.
    """

    trace: Trace
    last: int
    stop_at: int
    world: int
    ignore: tuple[str, ...] = ()
    dues: tuple[int, ...] = ()
    pace: tuple[float, float] = (0.1, 0.05)


@dataclass(frozen=True, slots=True)
class Generation:
    """One start of a run that is killed again and again. Steps are -1 for none, and ``required`` is where it had to begin.

    ``on_disk`` is the newest step that was committed right after the kill; the other fields are as in Ended.
    """

    number: int
    killed: str
    agent: str
    required: int
    begin: int
    step: int
    staged: int
    committed: int
    on_disk: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one scenario: ``holds``, ``broken``, or ``unproven``.

    ``steps`` were compared with ``against``, ``differing`` of them differ, ``first`` is the first of these. ``problems`` are
    promises that were broken otherwise. ``output`` is the end of the log of a start that failed.
    """

    scenario: str
    against: str
    starts: int
    steps: int = 0
    differing: int = 0
    first: Difference | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    worst: Lost | None = None
    log: str = ""
    output: str = ""
    generations: tuple[Generation, ...] = ()
    result: str = "holds"

    @property
    def holds(self) -> bool:
        """Whether everything was as promised."""
        return self.result == "holds"


def baseline_of(trace: Trace, *, last: int, stop_at: int, ignore: Sequence[str] = ()) -> Baseline:
    """What follows from a reference that was run to its end."""
    (run, *_) = trace.starts()[-1].values()
    times = [step.time for step in run.steps if not step.micro]
    saved = {(r.event, r.step): r.time for r in run.records if isinstance(r, Saved)}
    dues = tuple(sorted(step for event, step in saved if event == "due" and step < last))
    saves = [saved["committed", s] - saved["due", s] for s in dues if ("committed", s) in saved]
    pace = _middle([b - a for a, b in pairwise(times)], 0.1), _middle(saves, 0.05)
    return Baseline(trace, last, stop_at, run.began.world, tuple(ignore), dues, pace)


def _middle(seconds: list[float], otherwise: float) -> float:
    """The median; not less than 0, for clocks that are set meanwhile."""
    return max(0.0, sorted(seconds)[len(seconds) // 2]) if seconds else otherwise


def judge_repeated(reference: Trace, again: Trace, ended: Ended) -> tuple[Verdict, tuple[str, ...]]:
    """Whether a script is the same twice; with the names of what is not, and on which nothing else depends.

    Those are numbers such as seconds, and random streams that the script neither seeds nor uses.
    """
    comparison = compare(reference, again, exact=True, tolerance=0.0)
    own = tuple(name for name in comparison.names if name.startswith(_IDLE))
    if own == comparison.names:
        comparison = compare(reference, again, exact=True, tolerance=0.0, ignore=own)
    verdict = _verdict("reference again", EXACTLY, [ended], comparison)
    last, its_last = _last(reference), _last(again)
    if last != its_last:
        problem = (
            f"it ended at step {its_last}, and at step {last} before: without --steps it is to end by itself, alike"
        )
        verdict = replace(verdict, problems=(*verdict.problems, problem))
    if own and not verdict.problems and comparison.equal:
        note = f"{', '.join(own)}: not the same at each run, and nothing else depends on it; not compared"
        verdict = replace(verdict, notes=(note,))
    bad = bool(verdict.problems or verdict.first)
    return replace(verdict, result="unproven" if bad else "holds"), own


def judge_stopped(baseline: Baseline, trace: Trace, ended: Ended, on_disk: Sequence[int]) -> Verdict:
    """A run that was to stop at a step, with that step committed."""
    problems = []
    if not ended.failure and ended.step != baseline.stop_at:
        problems.append(f"it was to stop at step {baseline.stop_at}, and ended at step {ended.step}")
    if not ended.failure and baseline.stop_at not in on_disk:
        there = ", ".join(map(str, on_disk)) or "none"
        problems.append(f"step {baseline.stop_at}, at which it stopped, is not committed; committed: {there}")
    return _verdict("stop", EXACTLY, [ended], _exactly(baseline, trace), problems)


def judge_resumed(
    scenario: str, baseline: Baseline, trace: Trace, ended: Ended, *, begin: int, fell_back: bool = False
) -> Verdict:
    """A run that was to begin at a step, and to go on to the end as the reference did."""
    problems = [] if ended.failure else [*_begun_at(trace, begin), *_complete(baseline, trace)]
    if fell_back and not ended.failure and not any(run.began.skipped for run in _newest(trace)):
        problems.append("the damaged step was passed over without a word: no rank reports it as skipped")
    notes = tuple(dict.fromkeys(text for run in _newest(trace) for text in run.began.skipped)) if fell_back else ()
    return _verdict(
        scenario, EXACTLY, [ended], _exactly(baseline, trace), problems, notes=[f"skipped {t}" for t in notes]
    )


def judge_refusal(scenario: str, trace: Trace, ended: Ended) -> Verdict:
    """A run with nothing to begin from but damage: it must end with an error, and not start from zero."""
    problems = []
    made = max((run.last_step - run.began.step for run in _newest(trace)), default=0)
    if ended.timed_out:
        problems.append(ended.failure)
    elif made or any(not run.began.restored for run in _newest(trace)):
        problems.append("its only step was damaged, and it started from zero instead of ending with an error")
    elif not ended.status:
        problems.append("its only step was damaged, and it ended as if all were well")
    verdict = _verdict(scenario, "nothing: must refuse", [replace(ended, status=0, timed_out=False)], None, problems)
    return replace(verdict, log=str(ended.log) if problems else "", output=ended.tail if problems else "")


def judge_world(
    scenario: str, baseline: Baseline, pair: tuple[Trace, Trace], ends: Sequence[Ended], *, tolerance: float
) -> Verdict:
    """Two runs on other ranks from one step: the first beside the reference, the second beside the first."""
    first, second = pair
    world = max((run.began.world for run in _newest(first)), default=0)
    name, against = f"{scenario} ({world} ranks)" if world else scenario, "reference: samples, losses"
    if any(end.failure for end in ends):
        return _verdict(name, against, ends, None)
    comparison = compare(baseline.trace, first, exact=False, tolerance=tolerance)
    problems = [*_begun_at(first, baseline.stop_at)]
    if not comparison.notes or "another number of samples" not in " ".join(comparison.notes):
        problems += _complete(baseline, first, world=world)
    itself = compare(first, second, exact=True, tolerance=0.0, ignore=baseline.ignore)
    if not itself.equal or not itself.steps:
        problems.append(f"resumed on these ranks twice, it is not the same twice: {itself.first or 'it made no step'}")
    verdict = _verdict(name, against, ends, comparison, problems)
    return replace(verdict, worst=comparison.worst)


def judge_kills(baseline: Baseline, trace: Trace, ends: Sequence[Ended], on_disk: Sequence[int]) -> Verdict:
    """A run that was killed again and again, and then left alone.

    ``on_disk`` has the newest committed step after each start.
    """
    generations: list[Generation] = []
    problems: list[str] = []
    required, known = 0, 0
    for number, (ended, there) in enumerate(zip(ends, on_disk, strict=True), 1):
        generations.append(
            Generation(
                number,
                ended.killed,
                ended.agent,
                required,
                ended.begin,
                ended.step,
                ended.staged,
                ended.committed,
                there,
            )
        )
        if 0 <= ended.begin < required:
            problems.append(
                f"start {number} began at step {ended.begin}: work up to step {required} was safe"
                f" ({_why(ends[number - 2], required)}), and {required - ended.begin} steps of it are lost"
            )
        if ended.begin >= 0 or ended.agent == "killed":
            # From where it began it is committed; what only the agent had is gone with the agent.
            required = 0
        known = max(known, ended.begin, ended.committed, there)
        required = max(required, known, ended.staged if ended.agent == "left" else 0)
    if not ends[-1].failure:
        problems += _complete(baseline, trace)
    killed = sum(bool(one.killed) for one in generations)
    notes = [f"{killed} kills"]
    if agents := sum(one.agent == "killed" for one in generations):
        notes.append(f"{agents} of them took the agent as well")
    verdict = _verdict("kills", EXACTLY, ends, _exactly(baseline, trace), problems, notes=[", ".join(notes)])
    return replace(verdict, generations=tuple(generations))


def _why(before: Ended, required: int) -> str:
    if before.agent == "left" and before.staged == required:
        return "its copy was complete on all ranks, and the agent was left alive"
    return "it was committed"


def _exactly(baseline: Baseline, trace: Trace) -> Comparison:
    return compare(baseline.trace, trace, exact=True, tolerance=0.0, ignore=baseline.ignore)


def _newest(trace: Trace) -> list[Run]:
    starts = trace.starts()
    return list(starts[-1].values()) if starts else []


def _last(trace: Trace) -> int:
    return max((run.last_step for run in _newest(trace)), default=-1)


def _begun_at(trace: Trace, begin: int) -> list[str]:
    """What is wrong with where the newest start began."""
    wrong = {
        f"it began at step {run.began.step}{'' if run.began.restored else ' without anything restored'}, not at {begin}"
        for run in _newest(trace)
        if run.began.step != begin or not run.began.restored
    }
    return sorted(wrong)


def _complete(baseline: Baseline, trace: Trace, world: int | None = None) -> list[str]:
    """Whether the newest start has every rank, and every rank has come to the end."""
    runs = _newest(trace)
    problems = []
    if len(runs) != (world or baseline.world):
        problems.append(f"{len(runs)} ranks took part, not {world or baseline.world}")
    if ends := sorted({run.last_step for run in runs if run.last_step != baseline.last}):
        beyond = ": does the loop count from where it was resumed?"
        problems.append(
            f"it ended at step {', '.join(map(str, ends))}; the reference at {baseline.last}"
            + (beyond if ends[-1] > baseline.last else "")
        )
    return problems


def _verdict(
    scenario: str,
    against: str,
    ends: Sequence[Ended],
    comparison: Comparison | None,
    problems: Sequence[str] = (),
    *,
    notes: Sequence[str] = (),
) -> Verdict:
    failed = next((end for end in ends if end.failure), None)
    all_problems = list(problems)
    if failed is not None:
        all_problems.insert(0, f"start {ends.index(failed) + 1} {failed.failure}")
    if comparison is not None and not comparison.steps and not all_problems:
        all_problems.append("no step was made that could be compared")
    found = comparison or Comparison(0, 0, None)
    return Verdict(
        scenario,
        against,
        len(ends),
        steps=found.steps,
        differing=found.differing,
        first=found.first,
        problems=tuple(all_problems),
        notes=(*notes, *found.notes),
        log=str(failed.log) if failed else "",
        output=failed.tail if failed else "",
        result="broken" if all_problems or found.first else "holds",
    )
