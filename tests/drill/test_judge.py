"""Verdicts: what each kind of evidence is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.check.trace import Began, Run, Saved, Stepped, Trace
from keepstep.drill.judge import (
    baseline_of,
    judge_kills,
    judge_refusal,
    judge_repeated,
    judge_resumed,
    judge_stopped,
    judge_world,
)
from keepstep.drill.runs import Ended


def run(
    begin: int, end: int, *, rank: int = 0, world: int = 2, start: int = 1, skipped=(), restored=None, **change
) -> Run:
    """Steps after ``begin`` up to ``end``, as they should be; ``change`` maps ``step_N`` to another loss of that step."""
    restored = begin > 0 if restored is None else restored
    began = Began(rank=rank, world=world, incarnation=start, step=begin, restored=restored, skipped=skipped)
    steps = [
        Stepped(
            step=n, samples=(world * n + rank,), loss=change.get(f"step_{n}", float(n).hex()), parts={"rng/torch": "0"}
        )
        for n in range(begin + 1, end + 1)
    ]
    return Run(began, tuple(steps))


def trace(*starts, world: int = 2, **change) -> Trace:
    """Starts from (begin, end) on every rank."""
    runs = {
        rank: tuple(run(*start, rank=rank, world=world, start=n, **change) for n, start in enumerate(starts, 1))
        for rank in range(world)
    }
    return Trace("", runs)


def ended(status: int | None = 0, log: Path = Path("none"), **fields) -> Ended:
    return Ended(log, status, 1.0, **fields)


BASELINE = baseline_of(trace((0, 12)), last=12, stop_at=6)


def test_a_baseline_knows_when_it_saved_and_how_long_things_took():
    steps = [Stepped(step=n, time=10.0 + 0.5 * n) for n in range(1, 9)]
    saves = [
        Saved(step=3, event="due", time=20.0),
        Saved(step=3, event="staged", time=20.1),
        Saved(step=3, event="committed", time=20.3),
        Saved(step=6, event="due", time=22.0),
        Saved(step=8, event="due", time=30.0),
    ]
    began = Began(rank=0, world=1, incarnation=1, step=0, restored=False)
    found = baseline_of(Trace("", {0: (Run(began, (*steps, *saves)),)}), last=8, stop_at=4)
    assert (found.world, found.dues, found.ignore) == (1, (3, 6), ())
    assert found.pace == pytest.approx((0.5, 0.3))


def test_a_script_that_is_the_same_twice_can_be_judged():
    verdict, own = judge_repeated(trace((0, 12)), trace((0, 12)), ended())
    assert (verdict.result, verdict.steps, own) == ("holds", 12, ())


def test_a_script_that_is_another_one_each_time_proves_nothing():
    verdict, _ = judge_repeated(trace((0, 12)), trace((0, 12), step_5="0x1p+9"), ended())
    assert (verdict.result, verdict.first.step, verdict.first.what) == ("unproven", 5, "loss")
    verdict, _ = judge_repeated(trace((0, 12)), trace((0, 11)), ended())
    assert verdict.result == "unproven"
    assert "it ended at step 11, and at step 12 before" in verdict.problems[0]


@pytest.mark.parametrize("name", ["metrics/seconds", "rng/numpy"])
def test_what_is_another_each_time_and_moves_nothing_else_is_left_out_and_said(name):
    def once(value: str, loss: str) -> Trace:
        kind, _, rest = name.partition("/")
        own = {"metrics": {rest: value}} if kind == "metrics" else {"parts": {name: value, "model": "0"}}
        steps = (Stepped(step=1, loss="0x1p+0", **own), Stepped(step=2, loss=loss, **own))
        return Trace("", {0: (Run(Began(rank=0, world=1, incarnation=1, step=0, restored=False), steps),)})

    verdict, own = judge_repeated(once("0x1p+0", "0x1p+0"), once("0x1p+1", "0x1p+0"), ended())
    assert (verdict.result, own) == ("holds", (name,))
    assert verdict.notes == (f"{name}: not the same at each run, and nothing else depends on it; not compared",)
    # Where something depends on it, nothing can be proved.
    verdict, _ = judge_repeated(once("0x1p+0", "0x1p+0"), once("0x1p+1", "0x1p+1"), ended())
    assert verdict.result == "unproven"


def test_a_run_that_does_not_stop_or_is_not_committed_is_broken():
    good = trace((0, 6))
    assert judge_stopped(BASELINE, good, ended(step=6), [6, 3]).holds
    assert (
        "it was to stop at step 6, and ended at step 12"
        in judge_stopped(BASELINE, good, ended(step=12), [6]).problems[0]
    )
    assert "is not committed; committed: 3" in judge_stopped(BASELINE, good, ended(step=6), [3]).problems[0]


@pytest.mark.parametrize(
    ("begun", "problem"),
    [
        ((3, 12), "it began at step 3, not at 6"),
        ((0, 12), "it began at step 0 without anything restored, not at 6"),
        ((6, 11), "it ended at step 11; the reference at 12"),
        ((6, 6), "it ended at step 6; the reference at 12"),
        (
            (6, 15),
            "it ended at step 15; the reference at 12: does the loop count from where it was resumed?",
        ),
    ],
)
def test_a_resumed_run_begins_where_it_was_stopped_and_comes_to_the_end(begun, problem):
    assert judge_resumed("resume", BASELINE, trace((6, 12)), ended(), begin=6).holds
    verdict = judge_resumed("resume", BASELINE, trace(begun), ended(), begin=6)
    assert verdict.result == "broken"
    assert problem in verdict.problems


def test_a_resumed_run_with_a_rank_missing_or_a_bit_off_is_broken():
    alone = Trace("", {0: (run(6, 12),)})
    assert judge_resumed("resume", BASELINE, alone, ended(), begin=6).problems == ("1 ranks took part, not 2",)
    verdict = judge_resumed("resume", BASELINE, trace((6, 12), step_9="0x1p+9"), ended(), begin=6)
    assert (verdict.result, verdict.problems, verdict.first.step, verdict.differing) == ("broken", (), 9, 1)


def test_a_start_that_fails_is_broken_and_shows_what_it_said(tmp_path):
    (tmp_path / "log").write_text("size mismatch\n")
    for end, words in (
        (ended(3, tmp_path / "log"), "start 1 ended with status 3 before it began"),
        (ended(-11, tmp_path / "log", step=7), "start 1 was ended by signal 11 at step 7"),
        (
            ended(None, tmp_path / "log", timed_out=True, step=7),
            "start 1 did not end within 1 s and was killed at step 7",
        ),
    ):
        verdict = judge_resumed("resume", BASELINE, Trace("", {}), end, begin=6)
        assert verdict.problems == (words,)
        assert (verdict.result, verdict.output) == ("broken", "size mismatch")


def test_a_damaged_step_is_fallen_back_from_and_not_in_silence():
    told = trace((3, 12), skipped=("step-00000006: damaged",))
    verdict = judge_resumed("cut", BASELINE, told, ended(), begin=3, fell_back=True)
    assert verdict.holds
    assert verdict.notes == ("skipped step-00000006: damaged",)
    hushed = judge_resumed("cut", BASELINE, trace((3, 12)), ended(), begin=3, fell_back=True)
    assert "without a word" in hushed.problems[0]


def test_nothing_usable_is_an_error_and_not_a_fresh_start(tmp_path):
    (tmp_path / "log").write_text("error\n")
    assert judge_refusal("only", Trace("", {}), ended(1)).holds
    cases = (
        (trace((0, 12)), ended(), "it started from zero instead"),
        (trace((0, 0)), ended(1), "it started from zero instead"),
        (Trace("", {}), ended(0), "ended as if all were well"),
        (Trace("", {}), ended(None, tmp_path / "log", timed_out=True), "did not end within"),
    )
    for found, end, words in cases:
        verdict = judge_refusal("only", found, end)
        assert verdict.result == "broken"
        assert words in verdict.problems[0]


def test_other_ranks_are_judged_by_samples_and_losses_and_by_themselves():
    def world(**change) -> Trace:
        # Three ranks of which the samples together are those of two.
        runs = {}
        for rank in range(3):
            steps = [
                Stepped(
                    step=n,
                    samples=(2 * n + rank,) if rank < 2 else (),
                    loss=change.get(f"step_{n}", float(n).hex()),
                    parts={"rng/torch": "0"},
                )
                for n in range(7, 13)
            ]
            began = Began(rank=rank, world=3, incarnation=2, step=6, restored=True)
            runs[rank] = (Run(began, tuple(steps)),)
        return Trace("", runs)

    both = [ended(), ended()]
    verdict = judge_world("world-1", BASELINE, (world(), world()), both, tolerance=1e-5)
    assert (verdict.result, verdict.scenario, verdict.steps) == ("holds", "world-1 (3 ranks)", 6)
    off = world(step_8="0x1.1p+3")
    verdict = judge_world("world-1", BASELINE, (off, off), both, tolerance=1e-5)
    assert (verdict.first.step, verdict.first.what, verdict.worst.step) == (8, "loss", 8)
    verdict = judge_world("world-1", BASELINE, (world(), off), both, tolerance=1.0)
    assert "not the same twice: step 8, rank 0, start 1: loss is 8.5, not 8.0" in verdict.problems[0]
    verdict = judge_world("world-1", BASELINE, (world(), Trace("", {})), [ended(), ended(1)], tolerance=1.0)
    assert verdict.problems == ("start 2 ended with status 1 before it began",)


def killed(begin: int, step: int, *, agent: str = "left", staged: int = -1, committed: int = -1) -> Ended:
    return ended(None, killed="after a step", agent=agent, begin=begin, step=step, staged=staged, committed=committed)


def test_kills_that_lose_no_more_than_they_may_hold():
    ends = [
        killed(0, 4, staged=3),
        killed(3, 7, agent="killed", staged=6, committed=3),
        killed(3, 7, agent="none", staged=6),
        ended(begin=3, step=12),
    ]
    found = trace((0, 4), (3, 7), (3, 7), (3, 12))
    verdict = judge_kills(BASELINE, found, ends, [3, 3, 3, 12])
    assert verdict.holds, verdict.problems
    assert verdict.steps == 4 + 4 + 4 + 9
    assert [one.required for one in verdict.generations] == [0, 3, 3, 3]
    assert verdict.notes == ("3 kills, 1 of them took the agent as well",)


def test_a_copy_that_was_complete_must_not_be_lost_while_the_agent_lives():
    ends = [killed(0, 7, staged=6, committed=3), ended(begin=3, step=12)]
    verdict = judge_kills(BASELINE, trace((0, 7), (3, 12)), ends, [3, 12])
    assert verdict.result == "broken"
    assert verdict.problems == (
        "start 2 began at step 3: work up to step 6 was safe (its copy was complete on all ranks, and the agent was left"
        " alive), and 3 steps of it are lost",
    )


def test_what_was_committed_must_not_be_lost_whoever_dies():
    for end, there in ((killed(0, 7, agent="killed", committed=6), -1), (killed(0, 7, agent="none"), 6)):
        verdict = judge_kills(BASELINE, trace((0, 7), (3, 12)), [end, ended(begin=3, step=12)], [there, 12])
        assert "work up to step 6 was safe (it was committed)" in verdict.problems[0]


def test_what_a_start_has_left_to_the_agent_is_still_promised_after_one_that_never_began():
    ends = [killed(0, 7, staged=6), killed(-1, -1, agent="left"), ended(begin=3, step=12)]
    verdict = judge_kills(BASELINE, trace((0, 7), (3, 12)), ends, [3, 3, 12])
    assert "work up to step 6 was safe" in verdict.problems[0]
    ends[1] = killed(-1, -1, agent="killed")
    assert judge_kills(BASELINE, trace((0, 7), (3, 12)), ends, [3, 3, 12]).holds


def test_steps_made_again_after_a_kill_must_be_the_same_again():
    found = trace((0, 7), (3, 12))
    off = {rank: (runs[0], run(3, 12, rank=rank, start=2, step_5="0x1p+9")) for rank, runs in found.ranks.items()}
    verdict = judge_kills(BASELINE, Trace("", off), [killed(0, 7, staged=3), ended(begin=3, step=12)], [3, 12])
    assert (verdict.first.start, verdict.first.step) == (2, 5)


def test_the_last_start_must_come_to_the_end():
    verdict = judge_kills(BASELINE, trace((0, 4), (3, 9)), [killed(0, 4), ended(begin=3, step=9)], [3, 9])
    assert verdict.problems == ("it ended at step 9; the reference at 12",)
    verdict = judge_kills(BASELINE, trace((0, 4), (3, 9)), [killed(0, 4), ended(1, begin=3, step=9)], [3, 9])
    assert verdict.problems == ("start 2 ended with status 1 at step 9",)
