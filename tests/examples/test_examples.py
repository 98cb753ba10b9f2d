"""Every example runs as its first lines say, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

SMALL = [
    "--n-layer",
    "1",
    "--n-head",
    "6",
    "--d-model",
    "24",
    "--block",
    "16",
    "--text-bytes",
    "100000",
    "--save-every",
    "2",
    "--log-every",
    "1",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def train(ranks: int, *options: object) -> str:
    script = str(ROOT / "examples/train_gpt.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    ran = subprocess.run(
        [sys.executable, *launcher, script, *SMALL, *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def trace(path) -> dict[int, dict]:
    return {record["step"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize(("parallel", "ranks"), [("none", 1), ("ddp", 2), ("fsdp", 2), ("tp", 2)])
def test_a_resumed_run_equals_the_one_that_did_not_stop(parallel, ranks, tmp_path):
    kind = ["--parallel", parallel, "--steps", 4]
    train(ranks, *kind, "--checkpoints", tmp_path / "whole", "--trace", tmp_path / "whole.jsonl")
    for until in (2, 4):
        # The same schedule, stopped early: the process ends right after a save.
        part = ["--stop-after", until, "--checkpoints", tmp_path / "parts", "--trace", tmp_path / f"{until}.jsonl"]
        said = train(ranks, *kind, *part)
        assert re.search(r"starting at step (\d+)", said)[1] == str(until - 2)
    assert trace(tmp_path / "2.jsonl") | trace(tmp_path / "4.jsonl") == trace(tmp_path / "whole.jsonl")


def test_a_run_changes_its_layout_at_every_start(tmp_path):
    def step(ranks, parallel, until):
        options = ["--steps", 8, "--dropout", 0, "--parallel", parallel, "--stop-after", until]
        train(ranks, *options, "--checkpoints", tmp_path / "run", "--trace", tmp_path / f"{until}.jsonl")
        return trace(tmp_path / f"{until}.jsonl")

    train(1, "--steps", 8, "--dropout", 0, "--checkpoints", tmp_path / "whole", "--trace", tmp_path / "whole.jsonl")
    whole = trace(tmp_path / "whole.jsonl")
    parts = step(2, "fsdp", 2) | step(3, "fsdp", 4) | step(2, "tp", 6) | step(1, "none", 8)
    assert sorted(parts) == sorted(whole)
    for number, record in parts.items():
        assert record["samples"] == whole[number]["samples"]
        assert float.fromhex(record["loss"]) == pytest.approx(float.fromhex(whole[number]["loss"]), rel=1e-5)


def test_bfloat16_resumes_too(tmp_path):
    kind = ["--bf16", "--steps", 4]
    train(1, *kind, "--checkpoints", tmp_path / "whole", "--trace", tmp_path / "whole.jsonl")
    train(1, *kind, "--stop-after", 2, "--checkpoints", tmp_path / "parts")
    train(1, *kind, "--checkpoints", tmp_path / "parts", "--trace", tmp_path / "rest.jsonl")
    whole = trace(tmp_path / "whole.jsonl")
    assert trace(tmp_path / "rest.jsonl") == {number: whole[number] for number in (3, 4)}


def demo_trace(**changes):
    records = {step: {"samples": [step], "loss": float(step).hex(), "parameters": f"{step:x}"} for step in (4, 5, 6)}
    records[5] |= changes
    return records


@pytest.mark.parametrize(
    ("changes", "exact", "holds"),
    [
        ({}, True, True),
        ({"loss": (5.0 + 1e-15).hex()}, True, False),
        ({"loss": (5.0 + 1e-15).hex()}, False, True),
        ({"loss": (5.01).hex()}, False, False),
        ({"parameters": "other"}, True, False),
        ({"samples": [9]}, True, False),
        ({"samples": [9]}, False, False),
    ],
)
def test_the_demo_sees_differences(changes, exact, holds):
    compare = runpy.run_path(str(ROOT / "examples/demo.py"))["compare"]
    assert compare("", demo_trace(**changes), "", demo_trace(), first=4, exact=exact).holds is holds


def test_the_demo_sees_missing_steps():
    compare = runpy.run_path(str(ROOT / "examples/demo.py"))["compare"]
    whole = demo_trace()
    assert not compare("", {}, "", whole, first=4, exact=True).holds
    assert not compare("", {s: whole[s] for s in (5, 6)}, "", whole, first=4, exact=True).holds
    assert not compare("", {s: whole[s] for s in (4, 6)}, "", whole, first=4, exact=False).holds
    assert not compare("", {**whole, 7: whole[6]}, "", whole, first=4, exact=True).holds


def test_the_demo_holds():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py")], capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("holds") == 4
