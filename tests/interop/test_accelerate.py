"""Accelerate: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.helpers.scripts import campaign, page_runs, warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/train_accelerate.py"
CHECKS = Path(__file__).with_name("accelerate_script.py")


@pytest.fixture(scope="module")
def accelerate():
    with warm("accelerate", "keepstep.interop.accelerate", "keepstep.agent.client") as process:
        yield process


@pytest.mark.parametrize(
    "moves",
    [
        [{"kill_at": 5}, {"stop_at": 7}],
        pytest.param(
            [{"kill_at": 5}, {"stop_at": 6}, {"stop_at": 7}, {"stop_at": 8}, {"kill_at": 17}], marks=pytest.mark.soak
        ),
    ],
)
def test_the_example_goes_on_after_kills_and_stops(accelerate, tmp_path, moves):
    """160 samples, 6 a batch, four batches a step: 7 steps an epoch, the last of three batches, the last of them short."""
    starts = campaign(accelerate, EXAMPLE, folder=tmp_path, moves=moves)
    assert starts[-1].steps[-1].step == 21


@pytest.mark.soak
def test_two_ranks_of_it_too(accelerate, tmp_path):
    campaign(accelerate, EXAMPLE, folder=tmp_path, moves=[{"stop_at": 5}, {"kill_at": 17}], ranks=2)


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        ("ahead", (4, 17)),
        pytest.param("ahead", (4, 10, 17), marks=pytest.mark.soak),
        pytest.param("stateful", (4, 10, 17), marks=pytest.mark.soak),
    ],
)
def test_prepared_loaders_of_others(accelerate, tmp_path, loader, batches):
    """Two optimizers, registered objects, every batch saved; killed inside of updates, and at the end of an epoch."""
    moves = [{"die_in": batch} for batch in batches]
    starts = campaign(accelerate, CHECKS, loader, folder=tmp_path, moves=moves)
    assert [start.began.step for start in starts] == [0, *(batch // 2 for batch in batches)]


def test_refusals(accelerate, tmp_path):
    accelerate.run(CHECKS, "refusals", folder=tmp_path, name="check", drill=False)


def test_the_page_runs(accelerate, tmp_path):
    page_runs(accelerate, "docs/coming-from-accelerate.md", tmp_path, only="PreparedLoader")
