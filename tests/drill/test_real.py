"""A whole drill of a real script, with its agents: every scenario, as a user would have it run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from tests.helpers.agents import agents_below
from tests.helpers.drilled import left_running

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(400)]

SCRIPT = ROOT / "tests/drill/small.py"
SEED = 2


def test_every_scenario_holds_and_the_user_s_own_folder_stays_untouched(tmp_path):
    print(f"seed {SEED}")
    own = tmp_path / "runs/own"
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    also = shlex.join([*ranks, str(SCRIPT), str(own)])
    options = ["--work", tmp_path / "work", "--kills", 3, "--seed", SEED, "--also", also, "--timeout-s", 100, "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "drill", *map(str, options), "--", sys.executable, SCRIPT, own],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    found = {one["scenario"]: one for one in report["verdicts"]}
    assert {name: one["steps"] for name, one in found.items() if name != "kills"} == {
        "reference again": 10, "stop": 5, "resume": 5, "world-1 (2 ranks)": 5, "flipped": 6, "cut": 6, "only-step": 0,
    }  # fmt: skip
    # Samples and losses of the other world were judged, not only shown.
    assert found["world-1 (2 ranks)"]["notes"] == []
    assert found["world-1 (2 ranks)"]["worst"]["apart"] <= 1e-5
    generations = found["kills"]["generations"]
    assert [bool(one["killed"]) for one in generations] == [True] * 3 + [False]
    assert {one["agent"] for one in generations if one["killed"]} == {"left", "killed"}
    assert generations[-1]["step"] == 10
    assert not own.exists()
    assert not agents_below(tmp_path)
    assert not left_running(tmp_path)
