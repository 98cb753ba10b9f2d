"""Whole drills, of a script without torch that keeps every promise, or breaks one that must be found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from keepstep.drill.judge import Verdict
from keepstep.drill.plan import Plan
from keepstep.drill.runs import Progress
from keepstep.drill.story import Report, drill
from keepstep.errors import UnprovenError, UsageError
from tests.helpers.drilled import command, left_running

pytestmark = pytest.mark.slow

# Seconds for a step of what is killed: long beside the time that a busy machine may take to notice one.
SLOWLY = 0.05


def drilled(folder: Path, *options: object, **plan) -> Report:
    """The report of a drill of the fake script; what it said on the way is consistent with it."""
    plan = {"seed": 5, "timeout_s": 60.0} | plan
    print(f"seed {plan['seed']}")
    events = list(drill(Plan(command(*options), folder / "work", dict(os.environ), **plan)))
    report = events[-1]
    assert tuple(event for event in events if isinstance(event, Verdict)) == report.verdicts
    assert any(isinstance(event, Progress) for event in events)
    assert not left_running(folder)
    return report


def verdict(report: Report, name: str) -> Verdict:
    (found,) = [one for one in report.verdicts if one.scenario.split(" (")[0] == name]
    return found


def test_a_script_that_keeps_every_promise_holds_in_every_scenario(tmp_path):
    report = drilled(tmp_path, "--launched", kills=1, also=(command("--world", 3), command("--world", 1)))
    assert (report.result, report.exit_status) == ("holds", 0), report.verdicts
    assert [one.scenario for one in report.verdicts] == [
        *("reference again", "stop", "resume", "world-1 (3 ranks)", "world-2 (1 ranks)", "flipped", "cut", "only-step"),
        "kills",
    ]
    assert (report.steps, report.stop_at, report.world_size, report.seed) == (12, 6, 2, 5)
    assert [one.steps for one in report.verdicts[:-1]] == [12, 6, 6, 6, 6, 9, 9, 0]
    # Nothing of the roots is left of what has held; traces and logs are.
    assert not list((tmp_path / "work").glob("*/root"))
    assert (tmp_path / "work/kills/trace/rank-00001.jsonl").exists()
    assert (tmp_path / "work/kills/start-1.log").exists()


def test_a_run_is_killed_as_often_as_was_asked_for_and_inside_saves(tmp_path):
    report = drilled(tmp_path, "--launched", "--pace-s", SLOWLY, only=("kills",))
    assert report.result == "holds", report.verdicts
    generations = verdict(report, "kills").generations
    assert [bool(one.killed) for one in generations] == [True] * 5 + [False]
    assert any("inside the save" in one.killed for one in generations)
    assert generations[-1].step == 12
    # Some work was lost, and made again.
    assert verdict(report, "kills").steps > 12


def test_steps_and_stop_are_where_they_were_said(tmp_path):
    report = drilled(tmp_path, "--steps", 1000, "--every", 4, steps=9, stop_at=3, only=("resume", "damage"))
    assert report.result == "holds", report.verdicts
    assert [one.scenario for one in report.verdicts] == [
        "reference again", "stop", "resume", "flipped", "cut", "only-step",
    ]  # fmt: skip
    assert [one.steps for one in report.verdicts] == [9, 3, 6, 8, 8, 0]


@pytest.mark.parametrize(
    ("wrong", "what", "cause"),
    [
        ("data", "samples", "at step 1: the data's position is 6 steps too early"),
        ("repeat", "samples", "at step 6: the data's position is 1 step too early"),
        ("lr", "lr/optimizer", "learning rate of step 1: the scheduler stands at another position"),
        ("model", "loss", "parameters or buffers already differed after the restore"),
        ("moment", "model", "the optimizer's state already differed before this step"),
        ("decay", "norm", "gradients accumulated before the save"),
        ("rng", "loss", "rng/torch stood elsewhere before this step"),
    ],
)
def test_a_kind_of_state_that_does_not_come_back_is_found_and_named(wrong, what, cause, tmp_path):
    options = ["--wrong", wrong, *(["--dropout"] if wrong == "rng" else [])]
    report = drilled(tmp_path, *options, only=("resume",))
    assert (report.result, report.exit_status) == ("broken", 14)
    resumed = verdict(report, "resume")
    assert (resumed.first.step, resumed.first.what, resumed.differing) == (7, what, 6)
    assert cause in " ".join(resumed.first.causes)
    assert verdict(report, "stop").holds
    assert (tmp_path / "work/resume/root").exists()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("zero", "it began at step 0 without anything restored, not at 6"),
        ("lost", "it began at step 3, not at 6"),
        ("crash-resumed", "start 1 ended with status 1 before it began"),
        ("hang-resumed", "start 1 did not end within 5 s and was killed at step 0"),
    ],
)
def test_a_resumed_run_that_goes_wrong_is_found(wrong, problem, tmp_path):
    report = drilled(tmp_path, "--wrong", wrong, only=("resume",), timeout_s=5.0 if "hang" in wrong else 60.0)
    resumed = verdict(report, "resume")
    assert report.result == "broken"
    assert problem in resumed.problems
    if wrong == "crash-resumed":
        assert resumed.output == "size mismatch for head.weight"
        assert Path(resumed.log).read_text() == "size mismatch for head.weight\n"


@pytest.mark.parametrize(("wrong", "problem"), [("deaf", "ended at step 12"), ("uncommitted", "committed: none")])
def test_a_run_that_does_not_stop_as_it_was_told_is_found(wrong, problem, tmp_path):
    report = drilled(tmp_path, "--wrong", wrong, only=("resume",))
    assert problem in verdict(report, "stop").problems[0]
    assert report.verdicts[-1].scenario == "stop"


@pytest.mark.parametrize("wrong", ["lost", "zero"])
def test_work_that_was_safe_and_is_lost_after_a_kill_is_found(wrong, tmp_path):
    report = drilled(tmp_path, "--wrong", wrong, "--pace-s", SLOWLY, only=("kills",))
    assert re.search(r"work up to step \d+ was safe \(it was committed\)", verdict(report, "kills").problems[0])


@pytest.mark.parametrize(
    ("wrong", "scenario", "problem"),
    [
        ("hushed", "flipped", "the damaged step was passed over without a word"),
        ("damage-zero", "only-step", "started from zero instead of ending with an error"),
    ],
)
def test_damage_that_is_hidden_is_found(wrong, scenario, problem, tmp_path):
    report = drilled(tmp_path, "--wrong", wrong, only=("damage",))
    assert scenario in [one.scenario for one in report.verdicts if not one.holds]
    assert problem in verdict(report, scenario).problems[0]


def test_a_run_with_one_step_is_given_an_older_one_to_fall_back_to(tmp_path):
    report = drilled(tmp_path, "--every", 100, only=("damage",))
    assert report.result == "holds", report.verdicts
    assert [verdict(report, name).steps for name in ("flipped", "cut")] == [9, 9]


def test_samples_that_are_dealt_wrongly_on_other_ranks_are_found(tmp_path):
    report = drilled(tmp_path, also=(command("--world", 3, "--wrong", "dealing"),), only=("worlds",))
    found = verdict(report, "world-1")
    assert (found.first.step, found.first.what, found.first.rank) == (7, "samples", None)
    assert "skipped" in found.first.found


def test_losses_are_not_judged_on_other_ranks_when_the_script_draws_at_random(tmp_path):
    report = drilled(tmp_path, "--dropout", also=(command("--world", 3, "--dropout"),), only=("worlds",))
    found = verdict(report, "world-1")
    assert found.holds
    assert found.worst.apart > 1e-5
    assert "random numbers were drawn on the ranks" in found.notes[0]


def test_a_script_that_is_not_the_same_twice_proves_nothing_and_is_not_drilled(tmp_path):
    report = drilled(tmp_path, "--wrong", "random")
    assert (report.result, report.exit_status) == ("unproven", 15)
    (again,) = report.verdicts
    assert (again.first.step, again.first.what) == (1, "loss")
    assert any("torch.manual_seed" in hint for hint in report.hints)


def test_a_number_of_the_clock_s_does_not_keep_a_script_from_being_judged(tmp_path):
    report = drilled(tmp_path, "--wrong", "metric", only=("resume",))
    assert report.result == "holds", report.verdicts
    assert "metrics/seconds" in verdict(report, "reference again").notes[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--wrong", "crash"], "ended with status 1 before it began, without any interruption"),
        (["--wrong", "silent"], "left no trace: it makes no ks.Checkpointer"),
        (["--wrong", "hang"], "did not end within 2 s and was killed at step 0"),
        (["--steps", 1], "has ended after step 1: there is nothing to interrupt"),
    ],
)
def test_a_script_that_cannot_be_drilled_is_an_error_that_shows_why(options, words, tmp_path):
    with pytest.raises(UnprovenError) as caught:
        drilled(tmp_path, *options, timeout_s=2.0 if "hang" in options else 60.0)
    said = str(caught.value)
    assert words in said
    assert str(tmp_path / "work/reference/start-1.log") in said or "nothing to interrupt" in said
    assert ("treining" in said) == ("crash" in options)
    assert not left_running(tmp_path)


def test_a_stop_beyond_the_script_s_end_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be stopped at step 12 and resumed: it ends at step 12"):
        drilled(tmp_path, stop_at=12)


def test_a_folder_in_which_something_is_stays_as_it_is(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/mine").write_text("mine")
    with pytest.raises(UsageError, match="is not an empty folder"):
        drilled(tmp_path)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine"]


def test_a_drill_that_is_closed_leaves_no_process(tmp_path):
    plan = Plan(command("--launched", "--steps", 100_000, "--pace-s", 0.01), tmp_path / "work", dict(os.environ))
    events = drill(plan)
    assert any(isinstance(event, Progress) and event.step > 0 for event in events)
    assert len(left_running(tmp_path)) == 2
    events.close()
    assert not left_running(tmp_path)
