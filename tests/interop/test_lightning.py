"""Lightning: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.check.trace import read_trace
from tests.architecture.source import ROOT
from tests.helpers.scripts import assert_traces_agree, warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/train_lightning.py"
KINDS = Path(__file__).with_name("lightning_script.py")
CHECKS = Path(__file__).with_name("lightning_checks.py")


@pytest.fixture(scope="module")
def lightning():
    with warm("lightning.pytorch", "keepstep.interop.lightning", "keepstep.agent.client") as process:
        yield process


def starts(folder):
    """Where each start of the first rank began."""
    return [(run.began.step, run.began.restored) for run in read_trace(folder / "trace").ranks[0]]


def test_the_example_goes_on_after_kills_and_stops(lightning, tmp_path):
    """300 samples, 16 a batch, two batches a step: 10 steps an epoch, the last of one batch; validation each epoch."""
    lightning.run(EXAMPLE, folder=tmp_path, name="whole")
    lightning.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=8)
    for stop in (10, 17, 20):
        lightning.run(EXAMPLE, folder=tmp_path, name="parts", stop_at=stop)
    lightning.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=33)
    lightning.run(EXAMPLE, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=40)
    began = starts(tmp_path / "parts")
    assert began[:1] + began[2:5] == [(0, False), (10, True), (17, True), (20, True)]
    assert began[1][0] in (0, 5)
    assert began[5][0] in (25, 30)


def test_two_ranks_of_it_too(lightning, tmp_path):
    argv = ["--devices", 2, "--accumulate", 1]
    lightning.run(EXAMPLE, *argv, folder=tmp_path, name="whole", ranks=2)
    lightning.run(EXAMPLE, *argv, folder=tmp_path, name="parts", ranks=2, stop_at=13)
    lightning.run(EXAMPLE, *argv, folder=tmp_path, name="parts", ranks=2, kill_at=28)
    lightning.run(EXAMPLE, *argv, folder=tmp_path, name="parts", ranks=2)
    assert_traces_agree(tmp_path, "whole", "parts", last=40)
    assert [len(runs) for runs in read_trace(tmp_path / "parts/trace").ranks.values()] == [3, 3]


@pytest.mark.parametrize(
    ("kind", "stops", "last"),
    [
        # 15 batches an epoch, validation after 5 each; stops on one, behind one, at the end of an epoch, inside the next.
        ("validation inside", (10, 11, 15, 22), 37),
        ("part of the epoch", (5, 7, 14, 30), 35),
        ("by hand", (4, 20, 33), 45),
    ],
)
def test_kinds_of_training(lightning, tmp_path, kind, stops, last):
    lightning.run(KINDS, kind, folder=tmp_path, name="whole")
    for stop in stops:
        lightning.run(KINDS, kind, folder=tmp_path, name="parts", stop_at=stop)
    lightning.run(KINDS, kind, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=last)


def test_an_update_that_was_begun_is_finished(lightning, tmp_path):
    """15 batches of 4 an update; killed in the second and the fourth of one, and at the first batch of an epoch."""
    kind = "inside an update"
    lightning.run(KINDS, kind, folder=tmp_path, name="whole")
    for batch in (5, 11, 15, 28):
        lightning.run(KINDS, kind, batch, folder=tmp_path, name="parts", kill_at=10**9)
    lightning.run(KINDS, kind, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=12)
    assert starts(tmp_path / "parts") == [(0, False), (1, True), (2, True), (4, True), (7, True)]


@pytest.mark.parametrize("name", ["own checkpoints", "refusals", "fabric"])
def test_checks(lightning, tmp_path, name):
    lightning.run(CHECKS, name, folder=tmp_path, name="check", drill=False)
