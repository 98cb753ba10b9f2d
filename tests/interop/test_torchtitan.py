"""The Trainer of torchtitan: runs that are killed or stopped go on as if nothing had happened, to the last bit."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.helpers.scripts import campaign, warm

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan wants older versions of what the clients of object stores want; make soak has it apart",
    ),
]
TRAIN = Path(__file__).with_name("torchtitan_on_cpu.py")
PAGE = ROOT / "docs/coming-from-torchtitan.md"
KINDS = Path(__file__).with_name("torchtitan_kinds.py")
SMALL = ("--module", "train_torchtitan", "--config", "small", "--checkpoint.interval", "4")


@pytest.fixture(scope="module")
def torchtitan():
    with warm("tests.interop.torchtitan_on_cpu", "keepstep.interop.torchtitan", "keepstep.agent.client") as process:
        yield process


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_goes_on_after_kills_and_stops(torchtitan, tmp_path, ranks):
    campaign(
        torchtitan,
        TRAIN,
        *SMALL,
        folder=tmp_path,
        moves=[{"kill_at": 12}, {"stop_at": 17}, {"kill_at": 21}],
        ranks=ranks,
    )


def test_validation_workers_and_updates_of_several_batches(torchtitan, tmp_path):
    kind = ("--module", "tests.interop.torchtitan_kinds", "--config", "validated")
    campaign(torchtitan, TRAIN, *kind, folder=tmp_path, moves=[{"stop_at": 5}, {"kill_at": 13}])


@pytest.mark.parametrize(
    "name", ["goes_on", "taken_over", "elsewhere", "last_steps", "seeds", "refusals", "ends", "parts", "sent_late"]
)
def test_checks(torchtitan, tmp_path, name):
    torchtitan.run(KINDS, name, folder=tmp_path, name="check", drill=False)


def test_another_number_of_ranks(torchtitan, tmp_path):
    torchtitan.run(KINDS, "spread", folder=tmp_path, name="check", drill=False, ranks=2)
    torchtitan.run(KINDS, "gathered", folder=tmp_path, name="check", drill=False)


def test_stages_of_a_pipeline(torchtitan, tmp_path):
    torchtitan.run(KINDS, "staged", folder=tmp_path, name="check", drill=False, ranks=2)
    torchtitan.run(KINDS, "unstaged", folder=tmp_path, name="check", drill=False)


def test_the_page_runs(torchtitan, tmp_path):
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(block)
    torchtitan.run(KINDS, "paged", folder=tmp_path, name="check", drill=False)
