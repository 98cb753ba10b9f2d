"""The command proves it of the examples of trainers as it would of a user's script."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "example",
    [["train_lightning.py"], ["train_lightning.py", "--devices", "2"], ["train_trainer.py"], ["train_accelerate.py"]],
)
def test_a_drill_of_an_example_holds(tmp_path, example):
    options = ["--kills", "2", "--seed", "1", "--only", "resume", "--only", "kills", "--timeout-s", "300", "--json"]
    script = [sys.executable, str(ROOT / "examples" / example[0]), *example[1:]]
    ran = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "drill", *options, "--", *script],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    verdicts = json.loads(ran.stdout)["verdicts"]
    assert [(one["scenario"], one["result"]) for one in verdicts] == [
        (scenario, "holds") for scenario in ("reference again", "stop", "resume", "kills")
    ]
