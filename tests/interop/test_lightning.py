"""Lightning: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.helpers.scripts import campaign, page_runs, warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/train_lightning.py"
KINDS = Path(__file__).with_name("lightning_script.py")
CHECKS = Path(__file__).with_name("lightning_checks.py")


@pytest.fixture(scope="module")
def lightning():
    with warm("lightning.pytorch", "keepstep.interop.lightning", "keepstep.agent.client") as process:
        yield process


@pytest.mark.parametrize(
    "moves",
    [
        [{"kill_at": 13}, {"stop_at": 20}],
        pytest.param(
            [{"kill_at": 8}, {"stop_at": 10}, {"stop_at": 17}, {"stop_at": 20}, {"kill_at": 33}], marks=pytest.mark.soak
        ),
    ],
)
def test_the_example_goes_on_after_kills_and_stops(lightning, tmp_path, moves):
    """300 samples, 16 a batch, two batches a step: 10 steps an epoch, the last of one batch; validation each epoch."""
    campaign(lightning, EXAMPLE, folder=tmp_path, moves=moves)


@pytest.mark.parametrize(
    "moves", [[{"kill_at": 9}], pytest.param([{"stop_at": 13}, {"kill_at": 28}], marks=pytest.mark.soak)]
)
def test_two_ranks_of_it_too(lightning, tmp_path, moves):
    campaign(lightning, EXAMPLE, "--devices", 2, "--accumulate", 1, folder=tmp_path, moves=moves, ranks=2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        # 15 batches an epoch, validation after 5 each; stops on one, behind one, at the end of an epoch, inside the next.
        ("validation inside", (10, 11, 15, 22)),
        ("part of the epoch", (5, 7, 14, 30)),
        ("by hand", (4, 20, 33)),
    ],
)
def test_kinds_of_training(lightning, tmp_path, kind, stops):
    campaign(lightning, KINDS, kind, folder=tmp_path, moves=[{"stop_at": stop} for stop in stops])


def test_validation_schedulers_and_hooks_inside_of_an_epoch(lightning, tmp_path):
    """The short form of the above; with its place in the data by a sampler under a loader of torch."""
    campaign(lightning, KINDS, "validation inside", folder=tmp_path, moves=[{"stop_at": 11}, {"stop_at": 15}])


def test_an_update_that_was_begun_is_finished(lightning, tmp_path):
    """15 batches of 4 an update, each of which is saved; killed in the second of one, and late in an epoch."""
    moves = [{"die_in": 5}, {"die_in": 28}]
    starts = campaign(lightning, KINDS, "inside an update", folder=tmp_path, moves=moves)
    assert [start.began.step for start in starts] == [0, 1, 7]


@pytest.mark.parametrize("name", ["own checkpoints", "refusals", "fabric", "asked to stop"])
def test_checks(lightning, tmp_path, name):
    lightning.run(CHECKS, name, folder=tmp_path, name="check", drill=False)


def test_the_page_runs(lightning, tmp_path):
    page_runs(lightning, "docs/coming-from-lightning.md", tmp_path, only="StepCallback")
