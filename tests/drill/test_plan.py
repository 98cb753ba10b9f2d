"""Plans: what makes no sense is refused at once, and the moments of kills follow from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.drill.plan import Moment, Plan, check_plan, plan_kills, stop_step, target_step
from keepstep.errors import UsageError

PLAN = Plan(("train",), Path("work"), {})


def test_everything_that_makes_no_sense_is_said_at_once():
    check_plan(PLAN)
    with pytest.raises(UsageError) as caught:
        check_plan(
            Plan((), Path("w"), {}, steps=1, stop_at=0, kills=-1, tolerance=float("nan"), timeout_s=0, only=("resum",))
        )
    said = str(caught.value)
    for part in (
        "a command is empty",
        "steps is 1",
        "stop_at is 0",
        "kills is -1",
        "tolerance is nan",
        "timeout_s is 0",
    ):
        assert part in said
    assert "no such scenario: resum; there are resume, kills, worlds, damage" in said
    with pytest.raises(UsageError, match="stop_at is 9, which is not before the end at step 9"):
        check_plan(Plan(("train",), Path("w"), {}, also=(("a",),), steps=9, stop_at=9))
    with pytest.raises(UsageError, match="a command is empty"):
        check_plan(Plan(("train",), Path("w"), {}, also=((),)))


def test_a_run_is_stopped_half_way_or_where_it_was_said():
    assert [stop_step(PLAN, last) for last in (2, 3, 60)] == [1, 1, 30]
    early = Plan(("train",), Path("w"), {}, stop_at=5)
    assert stop_step(early, 6) == 5
    with pytest.raises(UsageError, match="cannot be stopped at step 5 and resumed: it ends at step 5"):
        stop_step(early, 5)


def test_kills_follow_from_the_seed_and_are_of_every_kind_with_and_without_the_agent():
    assert plan_kills(7, 5) == plan_kills(7, 5)
    assert plan_kills(7, 5) != plan_kills(8, 5)
    assert plan_kills(0, 0) == ()
    for seed in range(20):
        moments = plan_kills(seed, 5)
        assert {moment.kind for moment in moments} == {"step", "save", "staged"}
        assert {moment.agent for moment in moments} == {True, False}
        # What is promised of a complete copy is promised while the agent lives.
        assert not any(moment.agent for moment in moments if moment.kind == "staged")
        assert all(0 <= moment.ahead < 1 and 0 <= moment.late < 1 for moment in moments)


@pytest.mark.parametrize("ahead", [0.0, 0.3, 0.999999])
@pytest.mark.parametrize("left", [1, 3, 50])
@pytest.mark.parametrize("begin", [0, 4, 10])
def test_a_kill_waits_for_a_step_that_is_still_to_come_and_is_not_the_last(ahead, left, begin):
    kind, step = target_step(Moment("step", ahead, 0.5, agent=False), begin=begin, last=12, left=left, dues=())
    assert kind == "step"
    assert begin < step < 12


def test_a_kill_inside_a_save_waits_for_one_that_will_come():
    save = Moment("save", 0.5, 0.5, agent=False)
    assert target_step(save, begin=0, last=20, left=2, dues=(4, 8, 12, 16)) == ("save", 12)
    assert target_step(save, begin=16, last=20, left=1, dues=(4, 8, 12, 16)) == ("step", 18)
    late = Moment("staged", 0.99, 0.0, agent=False)
    assert target_step(late, begin=8, last=20, left=1, dues=(4, 8, 12, 16)) == ("staged", 16)
    assert target_step(late, begin=0, last=20, left=1, dues=()) == ("step", 19)


def test_where_nothing_is_left_to_train_it_is_killed_as_soon_as_it_has_begun():
    for begin in (11, 12):
        assert target_step(Moment("save", 0.5, 0.5, agent=True), begin=begin, last=12, left=1, dues=(3,)) == (
            "step",
            begin,
        )
