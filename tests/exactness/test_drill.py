"""The drill notices whatever a resume leaves out, names the component, and holds when nothing is left out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.check.trace import DRILL_VARIABLE, DrillOrders, encode_orders, read_trace
from keepstep.drill.judge import baseline_of, judge_resumed, judge_stopped
from keepstep.drill.places import committed_steps
from keepstep.drill.runs import Ended
from keepstep.errors import DrillError
from tests.architecture.source import ROOT
from tests.helpers.forgetful import MUTATIONS, forgetting
from tests.helpers.jobs import alone, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests/exactness/train.py"
LAUNCHER = ROOT / "tests/helpers/forgetful.py"
PAGE = ROOT / "docs/exactness.md"
LAST, STOP = 8, 4

# What is left out, and the component that must be named for it.
NAMED = {
    "parameters": "model",
    "buffers": "model",
    "non_persistent_buffers": "model",
    "extra_state": "model",
    "average": "average",
    "average_count": "average",
    "optimizer_state": "optimizer",
    "group_fields": "optimizer",
    "added_group_fields": "optimizer",
    "scheduler": "scheduler",
    "scheduler_rules": "scheduler",
    "scaler": "scaler",
    "growth_tracker": "scaler",
    "data": "data",
    "generators": "noise",
    "rng_python": "rng/python",
    "rng_numpy": "rng/numpy",
    "rng_torch": "rng/torch",
    "progress": "progress",
    "counters": "counters",
}


def test_the_page_lists_what_is_left_out_and_what_is_named():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:`([\w/]+)`|the component) \|$", PAGE.read_text(), re.MULTILINE)
    assert {kind: named or NAMED[kind] for kind, named in rows} == {kind: NAMED[kind] for kind in MUTATIONS}


# --- every kind: processes that are forked where torch is there already ---------------------------------------------


def start(rank, kind, folder, stop_at):
    """One start of the script, as a drill would order it, by a keepstep that forgets one kind of state."""
    orders = DrillOrders(str(folder / "root"), str(folder / "trace"), stop_at)
    os.environ[DRILL_VARIABLE] = encode_orders(orders)
    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv = [str(SCRIPT), str(folder / "unused")]
    with contextlib.nullcontext() if kind is None else forgetting(kind), contextlib.suppress(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def starts(work):
    """A reference, a run that is stopped, and from there one resume for each kind, and one that forgets nothing."""
    run_job(work / "jobs" / "reference", 1, start, None, work / "reference", None)
    run_job(work / "jobs" / "stop", 1, start, None, work / "stop", STOP)
    for kind in (None, *MUTATIONS):
        shutil.copytree(work / "stop" / "root", work / str(kind) / "root")
        run_job(work / "jobs" / str(kind), 1, start, kind, work / str(kind), None)


@pytest.fixture(scope="module")
def work(rank_pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drill")
    rank_pool(1)(alone, starts, folder, timeout_s=240)
    return folder


@pytest.fixture(scope="module")
def baseline(work):
    made = baseline_of(read_trace(work / "reference" / "trace"), last=LAST, stop_at=STOP)
    stopped = work / "stop"
    verdict = judge_stopped(made, read_trace(stopped / "trace"), ended(stopped), committed_steps(stopped / "root"))
    assert verdict.holds, verdict
    return made


def ended(folder: Path) -> Ended:
    """How a start ended that ended well."""
    (run,) = read_trace(folder / "trace").ranks[0]
    return Ended(folder / "log", 0, 1.0, begun=True, begin=run.began.step, step=run.last_step)


def test_nothing_is_found_when_nothing_is_left_out(work, baseline):
    folder = work / "None"
    verdict = judge_resumed("resume", baseline, read_trace(folder / "trace"), ended(folder), begin=STOP)
    assert verdict.holds, verdict
    assert (verdict.steps, verdict.differing) == (LAST - STOP, 0)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_whatever_is_left_out_is_caught_and_named(kind, work, baseline):
    verdict = judge_resumed("resume", baseline, read_trace(work / kind / "trace"), ended(work / kind), begin=STOP)
    assert verdict.result == "broken"
    if kind == "progress":
        assert (verdict.first.step, verdict.first.what) == (1, "progress")
    else:
        assert verdict.first.step == STOP + 1
        assert verdict.first.before == (NAMED[kind],), verdict.first
    assert verdict.first.causes


# --- the command, on a script that is started in the usual way ------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "optimizer_state"])
def test_the_command_itself_says_so(kind, tmp_path):
    through = [] if kind is None else [str(LAUNCHER), kind]
    asked = [sys.executable, "-c", "from keepstep.cli.main import main; main()", "drill", "--only", "resume", "--json"]
    asked += ["--work", str(tmp_path / "work"), "--", sys.executable, *through, str(SCRIPT), str(tmp_path / "unused")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert ran.returncode == (0 if kind is None else DrillError.exit_status), ran.stderr
    report = json.loads(ran.stdout)
    resumed = next(one for one in report["verdicts"] if one["scenario"] == "resume")
    assert resumed["result"] == ("holds" if kind is None else "broken")
    if kind is not None:
        assert resumed["first"]["before"] == [NAMED[kind]]
