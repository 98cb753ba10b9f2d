"""The drill notices whatever a resume leaves out, names the component, and holds when nothing is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.check.trace import read_trace
from keepstep.drill.judge import Baseline, baseline_of, judge_resumed, judge_stopped
from keepstep.drill.places import committed_steps, site
from keepstep.drill.runs import Ended, Site, Start, run
from keepstep.errors import DrillError
from tests.architecture.source import ROOT
from tests.helpers.forgetful import MUTATIONS

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


def command(kind: str | None, root: Path) -> tuple[str, ...]:
    through = [] if kind is None else [str(LAUNCHER), kind]
    return sys.executable, *through, str(SCRIPT), str(root)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def started(kind: str | None, place: Site, *, stop_at: int | None = None) -> Ended:
    """One start of the script by the drill's own means, to its end."""
    start = Start("test", 1, command(kind, place.folder / "unused"), place, environment(), 120.0, stop_at)
    events = run(start)
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class Drilled:
    work: Path
    baseline: Baseline
    stopped: Site


@pytest.fixture(scope="module")
def drilled(tmp_path_factory) -> Drilled:
    """What every resume is compared with, and what it goes on from: made once, as a drill makes them."""
    work = tmp_path_factory.mktemp("drill")
    with site(work, "reference") as place:
        ended = started(None, place)
        assert not ended.failure, ended.tail
        baseline = baseline_of(read_trace(place.trace), last=LAST, stop_at=STOP)
    with site(work, "stop") as stopped:
        ended = started(None, stopped, stop_at=STOP)
        verdict = judge_stopped(baseline, read_trace(stopped.trace), ended, committed_steps(stopped.root))
        assert verdict.holds, verdict
    return Drilled(work, baseline, stopped)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_whatever_is_left_out_is_caught_and_named(kind, drilled):
    with site(drilled.work, kind, like=drilled.stopped) as place:
        ended = started(kind, place)
    assert not ended.failure, ended.tail
    verdict = judge_resumed("resume", drilled.baseline, read_trace(place.trace), ended, begin=STOP)
    assert verdict.result == "broken"
    if kind == "progress":
        assert (verdict.first.step, verdict.first.what) == (1, "progress")
    else:
        assert verdict.first.step == STOP + 1
        assert verdict.first.before == (NAMED[kind],), verdict.first
    assert verdict.first.causes


def test_nothing_is_found_when_nothing_is_left_out(drilled):
    with site(drilled.work, "whole", like=drilled.stopped) as place:
        ended = started(None, place)
    verdict = judge_resumed("resume", drilled.baseline, read_trace(place.trace), ended, begin=STOP)
    assert verdict.holds, verdict
    assert (verdict.steps, verdict.differing) == (LAST - STOP, 0)


@pytest.mark.parametrize("kind", [None, "optimizer_state"])
def test_the_command_itself_says_so(kind, tmp_path):
    asked = [sys.executable, "-c", "from keepstep.cli.main import main; main()", "drill", "--only", "resume", "--json"]
    asked += ["--work", str(tmp_path / "work"), "--", *command(kind, tmp_path / "unused")]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=False, env=environment())
    assert ran.returncode == (0 if kind is None else DrillError.exit_status), ran.stderr
    report = json.loads(ran.stdout)
    resumed = next(one for one in report["verdicts"] if one["scenario"] == "resume")
    assert resumed["result"] == ("holds" if kind is None else "broken")
    if kind is not None:
        assert resumed["first"]["before"] == [NAMED[kind]]
