"""``keepstep drill`` as a user meets it: the table, the explanation, the JSON, the exit status, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from tests.architecture.source import ROOT
from tests.helpers.agents import wait_until
from tests.helpers.drilled import command, left_running

pytestmark = pytest.mark.slow
RUNNER = CliRunner()


def call(*args: object, status: int = 0):
    result = RUNNER.invoke(app, ["drill", *map(str, args)])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def documented(*inside: str) -> set[str]:
    """The names in the table below ``### drill --json [inside]`` of docs/cli.md."""
    page = (ROOT / "docs/cli.md").read_text()
    title = " ".join(["`drill --json`", *(f"`{part}`" for part in inside)])
    return set(re.findall(r"^\| `(\w+)` \|", page.split(f"### {title}\n")[1].split("\n#")[0], re.M))


def test_a_drill_that_holds_says_so_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    also = " ".join(command("--world", 3))
    ran = call("--kills", 1, "--seed", 7, "--also", also, "--", *command("--pace-s", 0.005))
    lines = ran.stdout.splitlines()
    assert lines[0].split() == ["scenario", "compared", "with", "starts", "steps", "result", "first", "difference"]
    names = ("reference again", "stop", "resume", "world-1 (3 ranks)", "flipped", "cut", "only-step", "kills")
    for name, line in zip(names, lines[1:], strict=False):
        assert line.startswith(f"{name} ")
        assert " holds " in line
    assert re.search(r"^every promise held: \d+ steps of 2 ranks, stopped at step 6 of 12, seed 7$", ran.stdout, re.M)
    assert ran.stderr.startswith(f"seed 7, working in {tmp_path}/keepstep-drill-")
    assert "resume: holds, 6 steps compared" in ran.stderr
    assert not list(tmp_path.glob("keepstep-drill-*"))


def test_a_broken_promise_is_explained_and_its_traces_are_kept(tmp_path):
    options = ("--only", "resume", "--work", tmp_path / "work", "--report", tmp_path / "report.json")
    ran = call(*options, "--", *command("--wrong", "moment"), status=14)
    assert re.search(r"^resume +reference: every bit +1 +6 +BROKEN +step 7: model", ran.stdout, re.M)
    assert "  6 steps differ, the first one here:\n  step 7, rank 0, start 1: model is " in ran.stdout
    assert "  had differed before it: optimizer\n" in ran.stdout
    assert "  likely cause: the optimizer's state already differed before this step." in ran.stdout
    assert f"traces and logs: {tmp_path}/work" in ran.stdout
    assert f"error[drill]: promises were broken: resume; traces and logs are in {tmp_path}/work" in ran.stderr
    assert (tmp_path / "work/resume/trace/rank-00000.jsonl").exists()
    assert json.loads((tmp_path / "report.json").read_text())["result"] == "broken"


def test_json_has_the_fields_of_the_page(tmp_path):
    also = " ".join(command("--world", 3))
    options = ("--kills", 1, "--work", tmp_path / "work", "--also", also, "--json")
    ran = call(*options, "--", *command("--wrong", "lr", "--pace-s", 0.005), status=14)
    report = json.loads(ran.stdout)
    assert set(report) == documented()
    assert (report["result"], report["exit_status"], report["steps"], report["stop_at"]) == ("broken", 14, 12, 6)
    by_name = {one["scenario"]: one for one in report["verdicts"]}
    for one in by_name.values():
        assert set(one) == documented("verdicts")
    assert set(by_name["resume"]["first"]) == documented("verdicts", "first")
    assert by_name["resume"]["first"]["what"] == "lr/optimizer"
    assert set(by_name["kills"]["generations"][0]) == documented("verdicts", "generations")
    assert set(by_name["world-1 (3 ranks)"]["worst"]) == documented("verdicts", "worst")


def test_a_script_that_is_not_the_same_twice_has_a_status_of_its_own_and_hints(tmp_path):
    ran = call("--work", tmp_path / "work", "--", *command("--wrong", "random"), status=15)
    assert re.search(r"^reference again .* UNPROVEN +step 1: loss", ran.stdout, re.M)
    assert "hint: torch.use_deterministic_algorithms(True)" in ran.stdout
    assert "error[unproven]: nothing can be proved: the script is not the same twice" in ran.stderr


def test_what_cannot_be_drilled_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    ran = call("--steps", 1, "--", *command(), status=2)
    assert "error[usage]: this is no drill:\n  - steps is 1" in ran.stderr
    assert "cannot be started: No such file" in call("--", "no-such-command", status=2).stderr
    assert not list(tmp_path.glob("keepstep-drill-*"))
    ran = call("--", *command("--wrong", "silent"), status=15)
    assert "error[unproven]: the script has ended well and left no trace" in ran.stderr
    assert len(list(tmp_path.glob("keepstep-drill-*/reference/start-1.log"))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_drill_that_is_interrupted_leaves_no_process(number, tmp_path):
    work = tmp_path / "work"
    script = command("--launched", "--steps", 1_000_000, "--pace-s", 0.01)
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "drill", "--work", work, "--", *script],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as drilling:
        wait_until(lambda: (work / "reference/trace/rank-00000.jsonl").exists(), what="the trace")
        assert len(left_running(work)) == 2
        drilling.send_signal(number)
        said = drilling.communicate(timeout=60)[1]
    assert drilling.returncode == 130, said
    assert f"interrupted; every process of the drill has been ended. What it has made is in {work}" in said
    assert not left_running(work)


def test_help_names_every_option_of_the_page():
    page = (ROOT / "docs/drill.md").read_text()
    options = set(re.findall(r"^\| `(--[\w-]+)", page, re.M))
    assert options
    shown = call("--help").stdout
    assert options <= set(re.findall(r"--[\w-]+", shown))
    assert set(re.findall(r"(--[\w-]+)(?: \w+)?  ", shown)) - {"--help"} <= options
    assert Path(ROOT / "docs/drill.md").is_file()
