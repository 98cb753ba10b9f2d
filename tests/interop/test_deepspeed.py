"""DeepSpeed engines: their buffers by the names of parameters, in every stage and on other numbers of ranks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from keepstep.check.trace import read_trace
from tests.architecture.source import ROOT
from tests.helpers.scripts import campaign, warm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed"),
]
EXAMPLE = ROOT / "examples/train_deepspeed.py"
CHECKS = Path(__file__).with_name("deepspeed_script.py")
FEW = ["1 fp32", "3 bf16"]
MANY = [["0 fp32", "1 fp32", "1 bf16", "2 bf16", "3 fp16"], ["1 fp32", "1 bf16+fp32", "2 fp32", "2 fp16", "3 fp32"]]


@pytest.fixture(scope="module")
def deepspeed():
    with warm("tests.interop.deepspeed_host", "keepstep.interop.deepspeed", "keepstep.agent.client") as process:
        yield process


def check(process, name, folder, *more, ranks):
    process.run(CHECKS, name, folder, *more, folder=folder / "logs", name=name, drill=False, ranks=ranks)


@pytest.mark.parametrize("kinds", [FEW, *(pytest.param(kinds, marks=pytest.mark.soak) for kinds in MANY)])
def test_engines_go_on_exactly_and_on_other_ranks_with_the_same_values(deepspeed, tmp_path, kinds):
    check(deepspeed, "resume", tmp_path / "two", *kinds, ranks=2)
    check(deepspeed, "change", tmp_path / "one", tmp_path / "two", *kinds, ranks=1)
    check(deepspeed, "change", tmp_path / "again", tmp_path / "one", *kinds, ranks=2)
    check(deepspeed, "plain", tmp_path / "plain", tmp_path / "two/1-fp32", ranks=2)


def test_what_cannot_be_saved_or_does_not_fit_is_named(deepspeed, tmp_path):
    check(deepspeed, "refuse", tmp_path, ranks=2)


@pytest.mark.soak
def test_with_offload_to_the_host_and_where_a_loop_ends_its_updates_by_hand(deepspeed, tmp_path):
    check(deepspeed, "offload", tmp_path, ranks=2)
    check(deepspeed, "by_hand", tmp_path, ranks=2)


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        (["2", "--bf16"], [9]),
        *(pytest.param([*stage.split()], [9, 19, 25], marks=pytest.mark.soak) for stage in ("0", "1", "2", "3")),
        *(pytest.param([stage, "--bf16"], [9, 19, 25], marks=pytest.mark.soak) for stage in "13"),
    ],
)
def test_the_example_goes_on_after_kills(deepspeed, tmp_path, options, kills):
    """160 samples, 8 a batch, two batches a step: 10 steps an epoch."""
    moves = [{"kill_at": step} for step in kills]
    starts = campaign(deepspeed, EXAMPLE, "--stage", *options, folder=tmp_path, moves=moves, ranks=2)
    assert starts[-1].steps[-1].step == 30


@pytest.mark.soak
def test_the_example_goes_on_in_another_stage_on_another_number_of_ranks(deepspeed, tmp_path):
    moves = [("2", 2, {"stop_at": 8}), ("3", 1, {"stop_at": 16}), ("1", 2, {})]
    for stage, ranks, orders in moves:
        options = {"folder": tmp_path, "name": "run", "ranks": ranks, "launched": True, **orders}
        deepspeed.run(EXAMPLE, "--stage", stage, **options)
    starts = read_trace(tmp_path / "run/trace").ranks[0]
    assert [start.began.step for start in starts] == [0, 8, 16]
    assert starts[-1].steps[-1].step == 30
    losses = [step.loss for start in starts for step in start.steps]
    assert losses[-1] < losses[0]


def test_the_page_runs(deepspeed, tmp_path):
    page = (ROOT / "docs/coming-from-deepspeed.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(block)
    for _ in range(2):
        deepspeed.run(script, folder=tmp_path, name="page", drill=False, ranks=2)
    assert list((tmp_path / "page/runs").rglob(".metadata"))
