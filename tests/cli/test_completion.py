"""What the shells complete: by their own protocol, and typed into a real bash."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.cli.main import app
from keepstep.storage.local import storage_of
from tests.cli.test_commands import RUNNER, call

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps of two components."""
    root = tmp_path_factory.mktemp("completion") / "a run"
    for number in (7, 8, 12):
        state = {"model": {"wide": torch.ones(2), "deep:er": torch.ones(1)}, "plain": 1}
        ks.save(root / f"step-{number:08d}", state, step=number)
    return root


def completed(line, shell="bash"):
    variables = {
        "bash": {"COMP_WORDS": f"{line}''" if line.endswith(" ") else line, "COMP_CWORD": "-1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return RUNNER.invoke(
        app, [], env={"_KEEPSTEP_COMPLETE": f"complete_{shell}", **variables}, prog_name="keepstep"
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_the_same(run, shell):
    step = f"'{run}/step-00000007'"
    for line, words in {
        "keepstep di": ["diff"],
        "keepstep completion ": ["bash", "fish", "zsh"],
        f"keepstep cat {step} ": ["model/wide", "model/deep:er", "model", "plain"],
        f"keepstep cat {step} model/w": ["model/wide"],
        f"keepstep diff {step} {step} --only mo": ["model/wide", "model/deep:er", "model"],
        f"keepstep show {step} --component ": ["model", "plain"],
        f"keepstep export {step} x --component m": ["model"],
        f"keepstep convert {step} x --to ": ["keepstep", "dcp", "torch"],
        f"keepstep convert {step} x --only p": ["plain"],
        f"keepstep cp '{run}' x --step ": ["12", "8", "7"],
        f"keepstep cp '{run}' x --step 1": ["12"],
    }.items():
        told = completed(line, shell).removeprefix("_arguments '*: :((").strip().removesuffix("))'")
        assert [word_of(each) for each in told.splitlines()] == words, (line, told)


def word_of(told):
    """The word alone: zsh has it in quotes, and some have what it means behind it."""
    quoted = re.match(r'"((?:[^"]|"")*)"', told)
    return (quoted[1] if quoted else told.partition("\t")[0]).replace("\\", "")


def test_nothing_is_said_where_nothing_is_known(run, tmp_path):
    (tmp_path / "text.txt").write_text("x")
    for step in (tmp_path, tmp_path / "gone", tmp_path / "text.txt", run):
        assert completed(f"keepstep cat '{step}' m") in ("", "\n")
    assert completed("keepstep show s3") in ("", "\n")
    assert completed("keepstep cp memory://nothing/there x --step ") in ("", "\n")


def test_steps_of_a_url_are_told(run):
    memory = storage_of("memory://completion/run")
    for path in (run / "step-00000012").rglob("*"):
        if path.is_file():
            memory.put(f"step-00000012/{path.relative_to(run / 'step-00000012').as_posix()}", path.read_bytes())
    assert completed("keepstep show memory://completion/run/").split() == ["memory://completion/run/step-00000012"]
    assert completed("keepstep cat memory://completion/run/step-00000012 model/w").split() == ["model/wide"]


def test_there_are_lines_for_three_shells():
    for shell in ("bash", "zsh", "fish"):
        assert f"complete_{shell}" in call("completion", shell).stdout
    said = call("completion", "bahs", status=2).stderr
    assert "'bahs' is none of the shells bash, fish, zsh; did you mean 'bash'" in said


class Terminal:
    """A bash that thinks that somebody types."""

    def __init__(self, script: Path, home: Path) -> None:
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            variables = {"PATH": path, "HOME": str(home), "TERM": "dumb", "PS1": "ready> ", "COLUMNS": "500"}
            os.chdir(home)
            os.execve(BASH, [BASH, "--norc", "--noprofile", "-i"], variables)
        self.seen = ""
        self.wait_for(r"ready> ")
        self.type(f"bind 'set bell-style none'; bind 'set enable-bracketed-paste off'; stty cols 500; . '{script}'\n")
        self.wait_for(r"ready> ")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str, limit_s: float = 60.0) -> re.Match[str]:
        end = time.monotonic() + limit_s
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.terminal], [], [], 0.5)[0]:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def complete(self, line: str, expected: str) -> None:
        """Types the line and a tab, and has bash print the words that it has then."""
        self.type(f"{line}\t")
        # The beginning of the line, and a command in front of it that shows the words.
        self.type("\x01printf '<%s>' \n")
        self.wait_for(re.escape(expected))
        self.wait_for(r"ready> ")

    def close(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.terminal)


@pytest.mark.slow
@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_a_real_bash_completes_commands_keys_steps_and_paths(run, tmp_path):
    script = tmp_path / "keepstep.bash"
    script.write_text(call("completion", "bash").stdout)
    plain = tmp_path / "run"
    plain.symlink_to(run)
    terminal = Terminal(script, tmp_path)
    try:
        terminal.complete("keepstep verif", "<keepstep><verify>")
        terminal.complete("keepstep cat run/step-00000007 model/w", "<keepstep><cat><run/step-00000007><model/wide>")
        # What bash takes for two words because of the colon, and what has a space in it.
        terminal.complete("keepstep cat run/step-00000007 model/deep:", "<model/deep:er>")
        terminal.complete(f"keepstep cat '{run}/step-00000007' pl", f"<{run}/step-00000007><plain>")
        terminal.complete("keepstep cp run x --step 1", "<run><x><--step><12>")
        terminal.complete("keepstep show run/step-0000001", "<keepstep><show><run/step-00000012")
    finally:
        terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_are_ones_that_the_shell_reads(shell, tmp_path):
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(call("completion", shell).stdout)
    ran = subprocess.run([found, "-n", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
