"""Accelerate: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.check.trace import read_trace
from tests.architecture.source import ROOT
from tests.helpers.scripts import assert_traces_agree, warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/train_accelerate.py"
CHECKS = Path(__file__).with_name("accelerate_script.py")


@pytest.fixture(scope="module")
def accelerate():
    with warm("accelerate", "keepstep.interop.accelerate", "keepstep.agent.client") as process:
        yield process


def test_the_example_goes_on_after_kills_and_stops(accelerate, tmp_path):
    """160 samples, 6 a batch, three batches a step: 9 steps an epoch, the last batch short."""
    accelerate.run(EXAMPLE, folder=tmp_path, name="whole")
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=6)
    for stop in (8, 9, 10):
        accelerate.run(EXAMPLE, folder=tmp_path, name="parts", stop_at=stop)
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts", kill_at=22)
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=27)
    began = [run.began.step for run in read_trace(tmp_path / "parts/trace").ranks[0]]
    assert began[0] == 0
    assert began[2:5] == [8, 9, 10]


def test_two_ranks_of_it_too(accelerate, tmp_path):
    accelerate.run(EXAMPLE, folder=tmp_path, name="whole", ranks=2)
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts", ranks=2, stop_at=5)
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts", ranks=2, kill_at=20)
    accelerate.run(EXAMPLE, folder=tmp_path, name="parts", ranks=2)
    assert_traces_agree(tmp_path, "whole", "parts", last=27)


@pytest.mark.parametrize("loader", ["ahead", "stateful"])
def test_prepared_loaders_of_others(accelerate, tmp_path, loader):
    """Two optimizers, registered objects, every batch saved; killed inside of updates and of the second epoch."""
    accelerate.run(CHECKS, loader, folder=tmp_path, name="whole")
    for batch in (4, 10, 17):
        accelerate.run(CHECKS, loader, batch, folder=tmp_path, name="parts", kill_at=10**9)
    accelerate.run(CHECKS, loader, folder=tmp_path, name="parts")
    assert_traces_agree(tmp_path, "whole", "parts", last=10)


def test_refusals(accelerate, tmp_path):
    accelerate.run(CHECKS, "refusals", folder=tmp_path, name="check", drill=False)
