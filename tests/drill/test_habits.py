"""Habits of scripts that were not written for keepstep: which of them a resumed run survives, and how others are named."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest

from keepstep.check.trace import DRILL_VARIABLE, DrillOrders, encode_orders, read_trace
from keepstep.drill.judge import Verdict, baseline_of, judge_resumed
from keepstep.drill.runs import Ended
from keepstep.errors import DrillError
from tests.architecture.source import ROOT
from tests.helpers.jobs import alone, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests/drill/habits.py"
LAST = 12
UNUSED = ("rng/python", "rng/numpy")
# In the middle of an epoch of six steps, and at the end of one.
MIDDLE, END = 5, 6
BROKEN = [
    ("ahead", MIDDLE, "batch", "A batch that is fetched ahead of the step it is for belongs into the state"),
    ("ahead", MIDDLE, "batch", "rng/torch stood as in the reference before this step, and elsewhere after it"),
    ("loader", MIDDLE, "batch", "give a sampler or loader of keepstep.data to TrainState(data=...)"),
    (
        "loader untold",
        MIDDLE,
        "loss",
        "it may have been another batch: data without a position in the state",
    ),
    ("evaluates late", END, "batch", "An evaluation at the end of an epoch belongs before the last `ckpt.step()`"),
    ("schedules late", END, "lr/optimizer", "belongs before the last `ckpt.step()` of that epoch"),
]


def start(rank, habit, folder, stop_at):
    """One start of the script, as a drill would order it."""
    orders = DrillOrders(str(folder / "root"), str(folder / "trace"), stop_at)
    os.environ[DRILL_VARIABLE] = encode_orders(orders)
    name = habit.removesuffix(" untold")
    sys.argv = [str(SCRIPT), str(folder / "unused"), name, *(["untold"] if name != habit else [])]
    with suppress(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def starts(work, wanted):
    """For each habit a reference, and a run that is stopped and resumed."""
    for number, (habit, stop) in enumerate(wanted):
        jobs, place = work / "jobs", work / habit
        run_job(jobs / f"{number}-reference", 1, start, habit, place / "reference", None)
        run_job(jobs / f"{number}-stop", 1, start, habit, place / "stop", stop)
        shutil.copytree(place / "stop" / "root", place / "resume" / "root")
        run_job(jobs / f"{number}-resume", 1, start, habit, place / "resume", None)


@pytest.fixture(scope="module")
def work(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("habits")
    wanted = dict([("drawn", END), *((habit, stop) for habit, stop, *_ in BROKEN)])
    rank_pool(1)(alone, starts, folder, tuple(wanted.items()), timeout_s=240)
    return folder


def resumed(work, habit: str, stop: int) -> Verdict:
    place = work / habit
    reference = read_trace(place / "reference/trace")
    baseline = baseline_of(reference, last=LAST, stop_at=stop, ignore=UNUSED)
    trace = read_trace(place / "resume/trace")
    (run,) = trace.ranks[0]
    ended = Ended(place / "log", 0, 1.0, begun=True, begin=run.began.step, step=run.last_step)
    return judge_resumed("resume", baseline, trace, ended, begin=stop)


def test_batches_and_an_evaluation_that_draw_from_the_common_stream_go_on_to_the_last_bit(work):
    verdict = resumed(work, "drawn", END)
    assert verdict.holds, verdict
    assert (verdict.steps, verdict.differing) == (LAST - END, 0)


@pytest.mark.parametrize(("habit", "stop", "what", "words"), BROKEN)
def test_what_does_not_survive_is_caught_at_the_first_step_and_named(work, habit, stop, what, words):
    verdict = resumed(work, habit, stop)
    assert verdict.result == "broken"
    assert (verdict.first.step, verdict.first.what) == (stop + 1, what), verdict.first
    # All of the state came back: what is missing is not in it.
    assert verdict.first.before == ()
    assert words in " ".join(verdict.first.causes)


def test_the_command_names_a_plain_loader(tmp_path):
    asked = [sys.executable, "-m", "keepstep.cli.main", "drill", "--only", "resume", "--stop-at", str(MIDDLE), "--json"]
    asked += ["--work", tmp_path / "work", "--", sys.executable, SCRIPT, tmp_path / "unused", "loader"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert ran.returncode == DrillError.exit_status, ran.stderr
    found = {one["scenario"]: one for one in json.loads(ran.stdout)["verdicts"]}
    assert [name for name, one in found.items() if one["result"] != "holds"] == ["resume"]
    assert found["resume"]["first"]["what"] == "batch"
    assert "keepstep.data" in found["resume"]["first"]["causes"][0]
    # Streams that the script does not use are others in each process, and are not said to be the cause.
    assert "rng/python" in found["reference again"]["notes"][0]
    assert found["resume"]["first"]["before"] == []
