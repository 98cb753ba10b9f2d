"""The Trainer of transformers: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.check.compare import compare
from keepstep.check.trace import read_trace
from tests.architecture.source import ROOT
from tests.helpers.scripts import assert_traces_agree, warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/train_trainer.py"
KINDS = Path(__file__).with_name("transformers_script.py")


@pytest.fixture(scope="module")
def transformers():
    modules = (
        "transformers",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "keepstep.agent.client",
    )
    with warm(*modules, "keepstep.interop.transformers") as process:
        yield process


def test_the_example_goes_on_after_kills_and_stops(transformers, tmp_path):
    """150 samples, 4 a batch, three batches a step: 13 steps an epoch, the last of two batches, the last of them short."""
    transformers.run(EXAMPLE, folder=tmp_path, name="whole")
    transformers.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=8)
    for stop in (12, 13, 14):
        transformers.run(EXAMPLE, folder=tmp_path, name="parts", stop_at=stop)
    transformers.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=31)
    transformers.run(EXAMPLE, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=39)
    began = [run.began.step for run in read_trace(tmp_path / "parts/trace").ranks[0]]
    assert began[0] == 0
    assert began[2:5] == [12, 13, 14]
    assert began[1] in (0, 5)
    assert began[5] in (25, 30)


def test_evaluations_logs_and_workers_too(transformers, tmp_path):
    transformers.run(KINDS, "evaluated", folder=tmp_path, name="whole")
    for stop in (4, 6, 11):
        transformers.run(KINDS, "evaluated", folder=tmp_path, name="parts", stop_at=stop)
    transformers.run(KINDS, "evaluated", folder=tmp_path, name="parts", kill_at=16)
    transformers.run(KINDS, "evaluated", folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=21)


def test_two_ranks_and_on_with_one(transformers, tmp_path):
    transformers.run(KINDS, "spread", 3, folder=tmp_path, name="whole", ranks=2)
    transformers.run(KINDS, "spread", 3, folder=tmp_path, name="parts", ranks=2, stop_at=5)
    transformers.run(KINDS, "spread", 3, folder=tmp_path, name="parts", ranks=2, stop_at=8)
    half = tmp_path / "parts"
    shutil.copytree(half / "root", tmp_path / "alone/root")
    transformers.run(KINDS, "spread", 3, folder=tmp_path, name="parts", ranks=2)
    assert_traces_agree(tmp_path, "whole", "parts", last=12)
    transformers.run(KINDS, "spread", 6, folder=tmp_path, name="alone")
    wanted, found = (read_trace(tmp_path / name / "trace") for name in ("whole", "alone"))
    comparison = compare(wanted, found, exact=False, tolerance=1e-5)
    assert comparison.equal, comparison.first
    assert [step.step for step in found.ranks[0][-1].steps] == [9, 10, 11, 12]


def test_refusals(transformers, tmp_path):
    transformers.run(KINDS, "refusals", folder=tmp_path, name="check", drill=False)
