"""``keepstep prune``, ``pin`` and ``unpin``: what goes, what stays and why, and when nothing may be touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import keepstep as ks
from keepstep.agent.node import Owner
from keepstep.cli.main import app
from keepstep.storage.local import LocalStorage
from tests.cli.test_commands import documented, flip
from tests.helpers.jobs import Job, alone

RUNNER = CliRunner()


def call(*args: object, status: int = 0):
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def asked(*args: object, status: int = 0) -> dict:
    return json.loads(call("prune", *args, "--json", status=status).stdout)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in root.glob("step-*/.metadata"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of six steps: the last three by a start that was resumed from step 30."""
    root = tmp_path_factory.mktemp("prune") / "run"
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    state = ks.TrainState(model=model, optimizer=optimizer)
    for steps in ((10, 20, 30), (40, 50, 60)):
        with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off") as ckpt:
            ckpt.restore()
            for step in steps:
                state.progress.step = step - 1
                ckpt.step(loss=abs(step - 19) / 10)
                ckpt.save()
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_what_goes_and_what_stays_and_why(root):
    found = asked(root, "--keep-last", 2, "--keep-best", 1)
    assert set(found) == documented("prune")
    assert all(set(line) == documented("prune", "steps") for line in found["steps"])
    assert {line["step"]: (line["action"], line["reasons"]) for line in found["steps"]} == {
        60: ("keep", ["newest", "last 2"]),
        50: ("keep", ["last 2"]),
        40: ("remove", []),
        30: ("keep", ["resumed from"]),
        20: ("keep", ["best 1 by loss (min)"]),
        10: ("remove", []),
    }
    assert found["steps_after"] == [60, 50, 30, 20]
    assert steps_in(root) == [20, 30, 50, 60]
    sizes = [sum(f.stat().st_size for f in (root / f"step-{step:08d}").rglob("*") if f.is_file()) for step in (20, 60)]
    assert found["bytes_before"] == sum(line["bytes"] for line in found["steps"])
    assert found["bytes_after"] == found["bytes_before"] - sum(found["steps"][at]["bytes"] for at in (2, 5))
    assert {line["bytes"] for line in found["steps"] if line["step"] in (20, 60)} <= set(sizes)
    assert not (root / "step-00000040").exists()
    # Once more: nothing is left to do.
    assert asked(root, "--keep-last", 2, "--keep-best", 1)["bytes_before"] == found["bytes_after"]


def test_a_dry_run_says_the_same_and_changes_nothing(root):
    before = sorted((str(f), f.stat().st_mtime_ns) for f in root.rglob("*"))
    wishes = ("--keep-every", 20, "--weights-only-after", 2)
    told = asked(root, *wishes, "--dry-run")
    assert sorted((str(f), f.stat().st_mtime_ns) for f in root.rglob("*")) == before
    out = call("prune", root, *wishes, "--dry-run").stdout
    assert "6 steps" in out
    assert "would be there after" in out
    done = asked(root, *wishes)
    assert [(line["step"], line["action"], line["frees_bytes"]) for line in told["steps"]] == [
        (line["step"], line["action"], line["frees_bytes"]) for line in done["steps"]
    ]
    assert [line["action"] for line in done["steps"]] == ["keep", "remove", "keep", "keep", "drop-optimizer", "remove"]
    there = sum(f.stat().st_size for f in root.glob("step-*/**/*") if f.is_file())
    assert abs(there - told["bytes_after"]) < 2000  # a manifest that names fewer files is shorter
    assert not list((root / "step-00000020").glob("optimizer/*"))
    assert "without optimizer" in call("ls", root).stdout
    assert "step-00000020  ok" in call("verify", root).stdout


@pytest.mark.case(79)
def test_the_newest_good_step_is_found_by_its_bytes(root):
    """Bits have flipped in the newest step: what is older is all there is, and stays."""
    flip(root / "step-00000060")
    found = asked(root, "--keep-last", 1, "--dry-run")
    assert {line["step"]: line["action"] for line in found["steps"] if line["action"] == "keep"} == {
        60: "keep", 50: "keep", 30: "keep",
    }  # fmt: skip
    assert "1 of 1 blocks" in found["steps"][0]["damage"]
    assert found["steps"][1]["reasons"] == ["newest", "last 1"]
    trusting = asked(root, "--keep-last", 1, "--dry-run", "--no-verify")
    assert trusting["steps_after"] == [60, 30]
    # One whose file is missing is seen in any case.
    next((root / "step-00000050" / "model").iterdir()).unlink()
    asked(root, "--keep-last", 1, "--no-verify")
    assert steps_in(root) == [30, 50, 60]


def test_the_oldest_go_for_space(root, monkeypatch):
    size = sum(f.stat().st_size for f in (root / "step-00000010").rglob("*") if f.is_file())
    total = sum(f.stat().st_size for f in root.glob("step-*/**/*") if f.is_file()) + size // 2

    def free(self):
        return total - sum(f.stat().st_size for f in root.glob("step-*/**/*") if f.is_file())

    monkeypatch.setattr(LocalStorage, "free_bytes", free)
    wanted = ("--min-free-bytes", 2 * size)
    told, done = asked(root, *wanted, "--dry-run"), asked(root, *wanted)
    assert [line["step"] for line in done["steps"] if line["action"] == "remove"] == [20, 10]
    assert [line["action"] for line in told["steps"]] == [line["action"] for line in done["steps"]]
    assert done["steps"][-1]["reasons"][0].startswith("for space")
    assert told["free_bytes"] == done["free_bytes"] == free(None)
    # More than there is: only what is protected stays, and the status says that it was not enough.
    assert asked(root, "--min-free-bytes", 100 * size, status=8)["steps_after"] == [60, 30]
    assert "no more steps may go" in call("prune", root, "--min-free-bytes", 100 * size, status=8).stdout
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: None)
    assert "cannot be told" in call("prune", root, *wanted).stdout
    assert steps_in(root) == [30, 60]


def test_pins_hold(root):
    assert "step-00000020 is pinned" in call("pin", root / "step-00000020", "--note", "for the paper").stdout
    assert "pinned before" in call("pin", root / "step-00000020").stdout
    line = next(line for line in json.loads(call("ls", root, "--json").stdout)["steps"] if line["step"] == 20)
    assert line["pinned"]
    assert asked(root, "--keep-last", 1)["steps_after"] == [60, 30, 20]
    assert "no longer pinned" in call("unpin", root / "step-00000020").stdout
    assert "error[step-not-found]" in call("unpin", root / "step-00000020", status=3).stderr
    assert asked(root, "--keep-last", 1)["steps_after"] == [60, 30]
    assert "error[step-not-found]" in call("pin", root / "step-00000020", status=3).stderr
    shutil.copytree(root / "step-00000060", root / "final")
    assert "is not a step of a run" in call("pin", root / "final", status=2).stderr


@pytest.mark.case(82)
def test_steps_of_another_run_stay(root):
    state = ks.TrainState(x=torch.zeros(3))
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off") as ckpt:
        for step in (70, 80):
            state.progress.step = step
            ckpt.save()
    found = asked(root, "--keep-last", 1)
    assert found["steps_after"] == [80, 60, 50, 40, 30, 20, 10]
    assert found["steps"][1]["reasons"] == [] and found["steps"][2]["reasons"] == ["of another run"]  # noqa: PT018
    older = found["steps"][2]["run"]
    assert asked(root, "--keep-last", 2, "--run", older)["steps_after"] == [80, 60, 50, 30]
    result = call("prune", root, "--keep-last", 1, "--run", "nobody", status=3)
    assert older in result.stderr


def test_rules_are_needed_and_checked(root):
    assert "say what to keep" in call("prune", root, status=2).stderr
    assert "last=0" in call("prune", root, "--keep-last", 0, status=2).stderr
    assert "is one step" in call("prune", root / "step-00000010", "--keep-last", 1, status=2).stderr
    assert steps_in(root) == [10, 20, 30, 40, 50, 60]


def owns(rank, root, ready, leave):
    owner = Owner(root)
    ready.touch()
    while not leave.exists():
        pass
    owner.release()


def refused_while_owned(root):
    ready, leave = root.parent / "ready", root.parent / "leave"
    job = Job(root.parent / "job", 1, owns, str(root), ready, leave)
    while not ready.exists():
        pass
    refused = call("prune", root, "--keep-last", 1, status=13)
    dry = asked(root, "--keep-last", 1, "--dry-run")
    leave.touch()
    job.wait()
    return refused.stderr, dry["steps_after"], job.pids[0], asked(root, "--keep-last", 1)["steps_after"]


def test_a_job_that_is_alive_is_left_alone(rank_pool, root):
    ((said, told, pid, after),) = rank_pool(1)(alone, refused_while_owned, root)
    assert said.startswith("error[run-owned]: ")
    assert str(pid) in said
    assert told == after == [60, 30]
    assert steps_in(root) == [30, 60]
