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

import msgspec
import pytest
import torch

from keepstep.check.trace import read_trace
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


def trace(folder) -> dict[int, list[dict]]:
    """What each rank did at each step, over all starts: everything that was written, but not when."""
    steps: dict[int, list[dict]] = {}
    for runs in read_trace(folder / "trace").ranks.values():
        for run in runs:
            for one in run.steps:
                if not one.micro:
                    steps.setdefault(one.step, []).append(msgspec.to_builtins(msgspec.structs.replace(one, time=0.0)))
    return steps


@pytest.mark.parametrize(("parallel", "ranks"), [("none", 1), ("fsdp", 2), ("tp", 2)])
def test_a_resumed_run_equals_the_one_that_did_not_stop(parallel, ranks, tmp_path):
    """DistributedDataParallel is drilled below."""
    kind = ["--parallel", parallel, "--steps", 4, "--trace"]
    train(ranks, *kind, "--checkpoints", tmp_path / "whole")
    for until in (2, 4):
        # The same schedule, stopped early: the process ends right after a save.
        said = train(ranks, *kind, "--stop-after", until, "--checkpoints", tmp_path / "parts")
        assert re.search(r"starting at step (\d+)", said)[1] == str(until - 2)
    whole = trace(tmp_path / "whole")
    assert {number: len(records) for number, records in whole.items()} == dict.fromkeys(range(1, 5), ranks)
    assert trace(tmp_path / "parts") == whole


def test_a_run_changes_its_layout_at_every_start(tmp_path):
    def step(ranks, parallel, until):
        options = ["--steps", 8, "--dropout", 0, "--parallel", parallel, "--stop-after", until, "--trace"]
        train(ranks, *options, "--checkpoints", tmp_path / "run")

    train(1, "--steps", 8, "--dropout", 0, "--checkpoints", tmp_path / "whole", "--trace")
    whole = trace(tmp_path / "whole")
    for ranks, parallel, until in ((2, "fsdp", 2), (3, "fsdp", 4), (2, "tp", 6), (1, "none", 8)):
        step(ranks, parallel, until)
    parts = trace(tmp_path / "run")
    assert sorted(parts) == sorted(whole)
    for number, records in parts.items():
        # Under tensor parallelism every rank computes all samples.
        given = [sample for one in (records[:1] if number in (5, 6) else records) for sample in one["samples"]]
        assert sorted(given) == sorted(whole[number][0]["samples"])
        for one in records:
            assert float.fromhex(one["loss"]) == pytest.approx(float.fromhex(whole[number][0]["loss"]), rel=1e-5)


def test_bfloat16_microbatches_and_workers_resume_too(tmp_path):
    kind = ["--bf16", "--accumulate", 4, "--workers", 2, "--steps", 4, "--trace"]
    train(1, *kind, "--checkpoints", tmp_path / "whole")
    for until in (2, 4):
        train(1, *kind, "--stop-after", until, "--checkpoints", tmp_path / "parts")
    whole = trace(tmp_path / "whole")
    assert sorted(whole) == [1, 2, 3, 4]
    assert trace(tmp_path / "parts") == whole


@pytest.mark.parametrize(("parallel", "ranks", "status"), [("none", 1, os.EX_TEMPFAIL), ("fsdp", 2, None)])
def test_a_job_that_is_asked_to_stop_saves_the_step_at_hand(parallel, ranks, status, tmp_path):
    options = ["--parallel", parallel, "--steps", 3000, "--save-every", 3000, "--trace"]
    run = [*options, "--checkpoints", tmp_path / "run"]
    with started(ranks, *run) as job:
        lines = iter(job.stdout.readline, "")
        assert any("step     3" in line for line in lines)
        job.terminate()
        said = "".join(lines)
        # (The launcher has a status of its own for a job that it was asked to end.)
        assert job.wait(60) == status if status is not None else job.wait(60) != 0
    stopped = max(trace(tmp_path / "run"))
    assert said.count(f"asked to stop at step {stopped}; it is committed") == ranks
    assert [path.parent.name for path in (tmp_path / "run").glob("step-*/.metadata")] == [f"step-{stopped:08d}"]
    assert stopped >= 3
    ran = train(ranks, *run, "--stop-after", stopped + 2)
    assert f"starting at step {stopped}\n" in ran
    parts = trace(tmp_path / "run")
    assert {number: len(records) for number, records in parts.items()} == dict.fromkeys(range(1, stopped + 3), ranks)
    if ranks == 1:
        train(ranks, *options, "--checkpoints", tmp_path / "whole", "--stop-after", stopped + 2)
        assert parts == trace(tmp_path / "whole")


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


def test_a_drill_of_the_example_holds(tmp_path):
    script = [*command(2, "--parallel", "ddp", "--batch", 8, "--accumulate", 2, "--workers", 1, "--bf16", "--steps", 8)]
    drill = [
        "drill",
        "--kills",
        2,
        "--seed",
        1,
        "--only",
        "resume",
        "--only",
        "kills",
        "--json",
        "--timeout-s",
        200,
        "--",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *map(str, drill), *script],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["result"] == "holds"
    assert [one["scenario"] for one in report["verdicts"]] == ["reference again", "stop", "resume", "kills"]
    assert all(one["result"] == "holds" for one in report["verdicts"])
    # Its own folder is not touched.
    assert not list(tmp_path.iterdir())


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


def test_the_demo_does_not_mind_an_agent_that_leaves_before_it_is_told_to(tmp_path):
    """An agent that was there when the demo asked leaves by itself a minute after its last trainer."""
    stop_agents = runpy.run_path(str(ROOT / "examples/demo.py"))["stop_agents"]
    stop_agents.__globals__["agents"] = lambda folder: {folder / "left": 0}
    stop_agents(tmp_path)
    stop_agents.__globals__["agents"] = lambda folder: {"": 0}
    with pytest.raises(SystemExit, match="is not a path"):
        stop_agents(tmp_path)


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
