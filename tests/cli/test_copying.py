"""``keepstep cp``, as somebody calls it who moves runs between disks and buckets."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.commit.catalog import read_catalog
from keepstep.commit.publish import run_of
from keepstep.errors import StorageError
from tests.cli.test_commands import documented
from tests.conftest import SEED
from tests.helpers.agents import wait_until
from tests.helpers.buckets import environment
from tests.helpers.proxy import STALL, proxy_before
from tests.helpers.same import assert_same

RUNNER = CliRunner()


def train(root, steps, start=None):
    """Goes on for so many steps and saves each; every step has weights of its own."""
    state = ks.TrainState(model=torch.nn.Linear(20, 20), free={"at": 0})
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off") as checkpointer:
        checkpointer.restore(step=start)
        for _ in range(steps):
            with torch.no_grad():
                state["model"].weight.add_(1.0)
            checkpointer.step()
            checkpointer.save()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with the steps 1, 2 and 3; nobody changes it."""
    root = tmp_path_factory.mktemp("cp") / "run"
    train(root, 3)
    return root


@pytest.fixture
def source(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "source"))


def call(*args, status=0):
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def copied(*args, status=0):
    return json.loads(call("cp", *args, "--json", status=status).stdout)


def state_at(place):
    state = ks.TrainState(model=torch.nn.Linear(20, 20), free={"at": 1})
    ks.load(place, into=state)
    return {key: value.clone() for key, value in state["model"].state_dict().items()}, dict(state["free"])


def steps_at(root):
    return [found.step for found in read_catalog(ks.LocalStorage(root)).steps]


def outcomes(facts):
    return [(one["step"], one["outcome"]) for one in facts["steps"]]


# --- which steps ------------------------------------------------------------------------------------------------------


def test_the_newest_step_is_copied_and_is_the_same(saved, tmp_path):
    target = tmp_path / "to" / "run"
    shown = call("cp", saved, target).stdout
    assert shown.startswith("step-00000003  copied  (2 files, ")
    assert_same(state_at(target / "step-00000003"), state_at(saved / "step-00000003"))
    assert call("verify", target)
    assert (target / "latest").read_bytes() == (saved / "latest").read_bytes()
    assert call("cp", saved, target).stdout.startswith("step-00000003  was there  (2 files, ")


def test_steps_are_named_by_number_by_folder_by_count_or_all(saved, tmp_path):
    target = tmp_path / "to"
    assert outcomes(copied(saved, target, "--step", 1)) == [(1, "copied")]
    assert outcomes(copied(saved / "step-00000002", target)) == [(2, "copied")]
    assert outcomes(copied(saved, target, "--last", 2)) == [(3, "copied"), (2, "there")]
    facts = copied(saved, target, "--all", "--jobs", 1)
    assert outcomes(facts) == [(3, "there"), (2, "there"), (1, "there")]
    assert steps_at(target) == [3, 2, 1]
    assert set(facts) == documented("cp")
    assert {key for one in facts["steps"] for key in one} == documented("cp", "steps")
    call("verify", target)


def test_a_step_that_was_saved_by_itself_comes_into_a_root(tmp_path):
    ks.save(tmp_path / "final", {"weight": torch.arange(3.0)}, step=9)
    assert outcomes(copied(tmp_path / "final", tmp_path / "to")) == [(9, "copied")]
    assert torch.equal(ks.open(tmp_path / "to" / "step-00000009")["weight"], torch.arange(3.0))


def test_a_damaged_newest_step_is_passed_over_as_restore_does(source, tmp_path):
    next((source / "step-00000003" / "model").iterdir()).unlink()
    assert outcomes(copied(source, tmp_path / "to")) == [(2, "copied")]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("{saved}", "{to}", "--step", 1, "--all"), 2, "--step and --all do not go together"),
        (("{saved}/step-00000001", "{to}", "--last", 2), 2, "is one step"),
        (("{saved}", "{saved}"), 2, "to itself"),
        (("{saved}", "{to}/step-00000003"), 2, "name the root"),
        (("{saved}", "{saved}/run.json"), 2, "is a file"),
        (("{saved}", "{to}", "--step", 7), 3, "no step is committed there; nothing was copied"),
        (("{to}", "{saved}"), 3, "there is nothing at"),
        (("{empty}", "{to}"), 3, "no step is committed below"),
        (("{saved}", "s3:///x"), 2, "names no bucket"),
    ],
)
def test_what_means_nothing_is_said(saved, tmp_path, args, status, says):
    (tmp_path / "empty").mkdir()
    places = {"saved": saved, "to": tmp_path / "to", "empty": tmp_path / "empty"}
    result = call("cp", *(str(arg).format(**places) for arg in args), status=status)
    assert says in result.stderr
    assert "what to do:" in result.stderr
    assert not (tmp_path / "to").exists()


def test_another_run_is_refused_by_both_names(saved, tmp_path):
    target = tmp_path / "other"
    train(target, 1)
    said = call("cp", saved, target, status=5).stderr
    assert run_of(ks.LocalStorage(saved)) in said
    assert run_of(ks.LocalStorage(target)) in said
    assert steps_at(target) == [1]


def test_of_two_steps_of_one_number_the_newer_one_stays(saved, source):
    """The source was rolled back to step 2, and has saved another step 3."""
    rolled = source
    train(rolled, 1, start=2)
    said = call("cp", saved, rolled, "--step", 3, status=4).stderr
    assert "is not older" in said
    facts = copied(saved, rolled, "--all", status=4)
    assert outcomes(facts) == [(3, "failed"), (2, "there"), (1, "there")]
    assert facts["steps"][0]["code"] == "step-exists"


def test_a_damaged_step_is_not_passed_on_and_the_others_are(source, tmp_path):
    name = next((source / "step-00000002" / "model").iterdir())
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(data)
    target = tmp_path / "to"
    assert "does not match its digest" in call("cp", source, target, "--step", 2, status=7).stderr
    assert not (target / "step-00000002" / ".metadata").exists()
    result = call("cp", source, target, "--all", status=7)
    assert "step-00000002  NOT COPIED: " in result.stdout
    assert steps_at(target) == [3, 1]


def test_check_reads_what_was_there_already(source, tmp_path):
    """A file of the first copy has rotted since; its header is good."""
    target = tmp_path / "to"
    assert copied(source, target, "--check")["steps"][0]["checked"]
    name = next((target / "step-00000003" / "model").iterdir())
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(data)
    assert outcomes(copied(source, target)) == [(3, "there")]
    facts = copied(source, target, "--check", status=7)
    (problem,) = facts["steps"][0]["problems"]
    assert problem["kind"] == "blocks"
    assert set(problem) == documented("cp", "steps", "problems")
    assert "DAMAGED, 1 problem" in call("cp", source, target, "--check", status=7).stdout


@pytest.mark.parametrize("which", [("--all",), ("--step", "3")])
def test_what_does_not_fit_is_said_before_anything_is_written(saved, tmp_path, monkeypatch, which):
    """A file system of which a page is free."""
    measured = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*measured[:3], 1, 1, *measured[5:])))
    steps = 3 if which == ("--all",) else 1
    needed = sum(path.stat().st_size for path in saved.glob("step-*/*/*")) // 3 * steps
    said = call("cp", saved, tmp_path / "to", *which, status=StorageError.exit_status).stderr
    assert f"{needed:,} bytes are needed" in said
    assert f"{measured.f_frsize:,} are free; nothing was copied" in said
    assert not (tmp_path / "to").exists()


# --- disks and buckets ------------------------------------------------------------------------------------------------


def a_root(server, name):
    return f"s3://{server.make_bucket('runs')}/{name}-{secrets.token_hex(4)}"


@pytest.mark.slow
def test_a_run_goes_to_a_bucket_to_another_one_into_memory_and_back(saved, moto, tmp_path):
    there, further, memory = a_root(moto, "cp"), a_root(moto, "cp"), f"memory://{secrets.token_hex(4)}/run"
    places = [str(saved), there, further, memory, str(tmp_path / "back")]
    with environment(moto):
        for source, target in itertools.pairwise(places):
            facts = copied(source, target, "--all", "--check")
            assert outcomes(facts) == [(3, "copied"), (2, "copied"), (1, "copied")]
            assert_same(state_at(f"{target}/step-00000002"), state_at(saved / "step-00000002"))
            assert outcomes(copied(source, target, "--last", 1)) == [(3, "there")]
        assert outcomes(copied(f"{there}/step-00000001", tmp_path / "one")) == [(1, "copied")]
        # The run goes on where it has come to.
        train(further, 1)
        assert outcomes(copied(further, there)) == [(4, "copied")]
        assert outcomes(copied(there, tmp_path / "back")) == [(4, "copied")]
    call("verify", tmp_path / "back")
    for step in (1, 2, 3):
        folder = f"step-{step:08d}"
        for path in (saved / folder).rglob("*"):
            if path.is_file():
                assert (tmp_path / "back" / path.relative_to(saved)).read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_command_that_was_killed_goes_on_where_it_was(saved, moto, tmp_path, direction):
    """Killed for good while the second file is on its way; the first one is not sent again."""
    bucket, local = a_root(moto, "killed"), tmp_path / "to"
    with proxy_before(moto.address) as proxy:
        if direction == "down":
            with environment(moto):
                copied(saved, bucket)
        ends = (saved, bucket) if direction == "up" else (bucket, local)
        ways = ("PUT", "POST") if direction == "up" else ("GET",)

        def shards():
            return [each for each in proxy.asked if each.method in ways and ".safetensors" in each.path]

        def stall(asked):
            mine = asked.method in ways and ".safetensors" in asked.path
            first = shards()[0].path.partition("?")[0] if shards() else ""
            return STALL if mine and not asked.path.startswith(first) else None

        proxy.fault = stall
        command = [sys.executable, "-m", "keepstep.cli.main", "cp", *map(str, ends), "--jobs", "1"]
        process = subprocess.Popen(command, env=os.environ | moto.environment(proxy.endpoint))
        try:
            wait_until(lambda: proxy.done[STALL] > 0, what="the second file")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        first = shards()[0].path.partition("?")[0]
        proxy.fault = lambda asked: None
        asked_before = len(proxy.asked)
        with environment(moto, proxy.endpoint):
            (step,) = copied(*ends)["steps"]
            assert (step["outcome"], step["files"], step["kept_files"]) == ("copied", 1, 1)
            assert 0 < step["kept_bytes"] == step["total_bytes"] - step["bytes"]
            again = [each for each in proxy.asked[asked_before:] if each.path.startswith(first)]
            if direction == "up":
                assert not [each for each in again if each.method in ways]
                sent = sum(each.length for each in proxy.asked[asked_before:] if ".safetensors" in each.path)
                assert sent < 1.1 * step["bytes"]
            else:
                assert not again
            assert_same(state_at(f"{ends[1]}/step-00000003"), state_at(saved / "step-00000003"))
            call("verify", f"{ends[1]}/step-00000003")


def killed_again_and_again(saved, target, times, dice):
    """Starts the command until it ends by itself; before, it is killed so many times, each soon after a name has come."""
    command = [sys.executable, "-m", "keepstep.cli.main", "cp", str(saved), str(target), "--all", "--jobs", "2"]
    names = len([path for path in saved.glob("step-*/**/*") if path.is_file()])
    kills = 0
    for _ in range(times):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wanted = dice.randint(0, names)
        try:
            wait_until(
                lambda process=process, wanted=wanted: (
                    process.poll() is not None or len([*target.glob("step-*/**/*.*")]) >= wanted
                )
            )
        finally:
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        for step in steps_at(target):
            assert_same(state_at(target / f"step-{step:08d}"), state_at(saved / f"step-{step:08d}"))
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    call("verify", target)
    assert steps_at(target) == steps_at(saved)
    return kills


@pytest.mark.slow
def test_whenever_it_is_killed_whole_steps_are_there_and_the_next_one_ends_it(saved, tmp_path):
    print(f"seed {SEED}")
    killed_again_and_again(saved, tmp_path / "to", 2, random.Random(SEED))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_forty_kills(saved, tmp_path):
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    kills = sum(killed_again_and_again(saved, tmp_path / f"to-{n}", 5, dice) for n in range(8))
    print(f"{kills} of 40 were killed in time")
    assert kills > 10
