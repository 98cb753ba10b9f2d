"""The Trainer of transformers: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.check.compare import compare
from keepstep.check.trace import read_trace
from tests.architecture.source import ROOT
from tests.helpers.scripts import campaign, page_runs, warm

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


@pytest.mark.parametrize(
    "moves",
    [
        [{"kill_at": 9}, {"stop_at": 13}],
        pytest.param(
            [{"kill_at": 8}, {"stop_at": 12}, {"stop_at": 13}, {"stop_at": 14}, {"kill_at": 31}], marks=pytest.mark.soak
        ),
    ],
)
def test_the_example_goes_on_after_kills_and_stops(transformers, tmp_path, moves):
    """150 samples, 4 a batch, three batches a step: 13 steps an epoch, the last of two batches, the last of them short."""
    campaign(transformers, EXAMPLE, folder=tmp_path, moves=moves)


@pytest.mark.parametrize(
    "stops", [(6, 11), pytest.param((4, 6, 8, 11, 16), marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_evaluations_logs_and_workers_too(transformers, tmp_path, stops):
    campaign(transformers, KINDS, "evaluated", folder=tmp_path, moves=[{"stop_at": stop} for stop in stops])


@pytest.mark.soak
def test_two_ranks_and_on_with_one(transformers, tmp_path):
    campaign(transformers, KINDS, "spread", 3, folder=tmp_path, moves=[{"stop_at": 5}, {"stop_at": 8}], ranks=2)
    shutil.copytree(tmp_path / "parts/root", tmp_path / "alone/root")
    for late in (9, 10, 11, 12):
        shutil.rmtree(tmp_path / f"alone/root/step-{late:08d}", ignore_errors=True)
    transformers.run(KINDS, "spread", 6, folder=tmp_path, name="alone")
    wanted, found = (read_trace(tmp_path / name / "trace") for name in ("whole", "alone"))
    comparison = compare(wanted, found, exact=False, tolerance=1e-5)
    assert comparison.equal, comparison.first
    assert [step.step for step in found.ranks[0][-1].steps] == [9, 10, 11, 12]


@pytest.mark.parametrize("name", ["refusals", "asked to stop"])
def test_checks(transformers, tmp_path, name):
    transformers.run(KINDS, name, folder=tmp_path, name="check", drill=False)


def test_the_page_runs(transformers, tmp_path):
    page_runs(transformers, "docs/coming-from-trainer.md", tmp_path, only="attach(")
