"""Every example runs as its first lines say, and goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

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


def command(ranks: int, *options: object) -> list[str]:
    script = str(ROOT / "examples/train_gpt.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, script, *SMALL, *map(str, options)]


@contextlib.contextmanager
def started(ranks: int, *options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(ranks, *options),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.terminate()


def train(ranks: int, *options: object) -> str:
    ran = subprocess.run(
        command(ranks, *options),
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


@pytest.mark.parametrize(("parallel", "ranks", "status"), [("none", 1, os.EX_TEMPFAIL), ("fsdp", 2, None)])
def test_a_job_that_is_asked_to_stop_saves_the_step_at_hand(parallel, ranks, status, tmp_path):
    options = ["--parallel", parallel, "--steps", 3000, "--save-every", 3000, "--checkpoints", tmp_path / "run"]
    with started(ranks, *options, "--trace", tmp_path / "first.jsonl") as job:
        lines = iter(job.stdout.readline, "")
        assert any("step     3" in line for line in lines)
        job.terminate()
        said = "".join(lines)
        # (The launcher has a status of its own for a job that it was asked to end.)
        assert job.wait(60) == status if status is not None else job.wait(60) != 0
    stopped = max(trace(tmp_path / "first.jsonl"))
    assert said.count(f"asked to stop at step {stopped}; it is committed") == ranks
    assert [path.parent.name for path in (tmp_path / "run").glob("step-*/.metadata")] == [f"step-{stopped:08d}"]
    assert stopped >= 3
    ran = train(ranks, *options, "--stop-after", stopped + 2, "--trace", tmp_path / "second.jsonl")
    assert f"starting at step {stopped}\n" in ran
    assert sorted(trace(tmp_path / "second.jsonl")) == [stopped + 1, stopped + 2]
    if ranks == 1:
        whole = [*options[:-1], tmp_path / "whole", "--stop-after", stopped + 2, "--trace", tmp_path / "whole.jsonl"]
        train(ranks, *whole)
        parts = trace(tmp_path / "first.jsonl") | trace(tmp_path / "second.jsonl")
        assert parts == trace(tmp_path / "whole.jsonl")


def test_every_rank_notes_what_it_has_staged(tmp_path):
    options = ["--parallel", "fsdp", "--steps", 4, "--checkpoints", tmp_path / "run", "--staged", tmp_path / "staged"]
    train(2, *options)
    assert sorted((tmp_path / "staged").read_text().splitlines()) == ["2 0", "2 1", "4 0", "4 1"]


def test_the_size_that_is_worth_watching_has_thirty_million_parameters():
    script = runpy.run_path(str(ROOT / "examples/train_gpt.py"))
    flags = dict(re.findall(r"--(n-layer|n-head|d-model) (\d+)", script["__doc__"]))
    with torch.device("meta"):
        model = script["GPT"](*(int(flags[name]) for name in ("n-layer", "n-head", "d-model")), 64, 0.1)
    parameters = sum(p.numel() for p in model.parameters())
    assert 30e6 < parameters < 33e6
    # Weights and two moments, four bytes each.
    assert f"{round(parameters / 1e6)} million" in script["__doc__"]
    assert f"{parameters * 12 / 1e6:.0f} MB" in script["__doc__"]


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
    assert ran.stdout.count("holds") == 6
    committed = re.search(r"it committed step (\d+) by itself, (\d+) ms after the kill", ran.stdout)
    assert int(committed[2]) >= 0
    assert re.search(rf"^killed at staged +1-{committed[1]} +{committed[1]} ", ran.stdout, re.M)
    assert max(map(len, ran.stdout.splitlines())) <= 80
