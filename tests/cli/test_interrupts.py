"""Ctrl-C in long work: nothing half is left, it is said what is true, and there is a bar where somebody looks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import keepstep as ks
from keepstep.cli import verifying
from tests.cli.sources import write_all
from tests.cli.test_commands import call
from tests.cli.under_limit import write

ROOT = Path(__file__).parents[2]
STATE = {"model": {f"w{number}": torch.full((1 << 10,), float(number)) for number in range(4)}, "epoch": 1}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    with ks.Checkpointer(root / "run", ks.TrainState(weight=torch.ones(100))) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.save()
    write_all(root, STATE)
    return root


def interrupt_at(monkeypatch, number):
    """Ctrl-C when the bar moves for that time."""
    real, count = Progress.update, [0]

    def update(self, *args, **facts):
        count[0] += 1
        if count[0] == number:
            raise KeyboardInterrupt
        return real(self, *args, **facts)

    monkeypatch.setattr(Progress, "update", update)


def words(args, places, tmp_path):
    """``:dcp`` is a source, ``new`` the target."""
    return [places / arg[1:] if arg[0] == ":" else tmp_path / arg if arg == "new" else arg for arg in args]


LONG = {
    "dcp to step": ("convert", ":dcp", "new"),
    "torch to step": ("convert", ":file.pt", "new"),
    "safetensors to step": ("convert", ":hub", "new"),
    "step to dcp": ("convert", ":step", "new", "--to", "dcp"),
    "step to torch": ("convert", ":step", "new", "--to", "torch"),
    "export": ("export", ":step", "new", "--max-shard", "4KiB"),
    "import": ("import", ":hub", "new"),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", LONG)
def test_what_writes_leaves_nothing_half(name, at, places, tmp_path, monkeypatch):
    args = words(LONG[name], places, tmp_path)
    interrupt_at(monkeypatch, at)
    said = call(*args, status=130)
    assert said.stdout == ""
    assert said.stderr.startswith("interrupted: nothing half is left at ")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    call(*args)
    assert (tmp_path / "new").exists()


@pytest.mark.slow
def test_files_of_ranks_that_were_done_go_as_well(places, tmp_path, monkeypatch):
    """The step of a hundred ranks, to a DCP checkpoint and back, given up in the middle."""
    wide = write(tmp_path / "wide", 1)
    call("convert", wide, tmp_path / "dcp", "--to", "dcp")
    for number, source, options in ((90, wide, ["--to", "dcp"]), (60, tmp_path / "dcp", [])):
        with monkeypatch.context() as patch:
            interrupt_at(patch, number)
            call("convert", source, tmp_path / "new", *options, status=130)
        assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []


def test_an_interrupted_check_and_an_overwrite_say_what_is_true(places, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("keepstep.cli.converting._read_again", lambda *_: interrupt())
        said = call("convert", places / "dcp", tmp_path / "new", "--check", status=130).stderr
    assert said == f"interrupted: {tmp_path / 'new'} is whole; it was not read again to its end\n"
    assert json.loads(call("verify", tmp_path / "new", "--json").stdout)["ok"]
    call("convert", places / "step", tmp_path / "dcp", "--to", "dcp")
    interrupt_at(monkeypatch, 2)
    said = call("convert", places / "step", tmp_path / "dcp", "--to", "dcp", "--overwrite", status=130).stderr
    assert "what was there is no checkpoint any more" in said


def interrupt():
    raise KeyboardInterrupt


def test_what_only_looks_has_changed_nothing(places, monkeypatch):
    for args in (("verify", ":step"), ("cat", ":step", "model/w1"), ("diff", ":step", ":dcp"), ("verify", ":run")):
        with monkeypatch.context() as patch:
            interrupt_at(patch, 1)
            assert call(*words(args, places, None), status=130).stderr == "interrupted: nothing was changed\n"


def test_a_copy_goes_on_where_it_was(places, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        said = call("cp", places / "run", tmp_path / "copy", status=130).stderr
    assert said == "interrupted: what was sent stays for the next time; a step that is not whole is no step\n"
    assert "copied" in call("cp", places / "run", tmp_path / "copy").stdout


BLOCKED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children too
from rich.progress import Progress

real = Progress.update

def update(self, *args, **facts):
    print("moving", flush=True)
    sys.stdin.read(1)
    return real(self, *args, **facts)

Progress.update = update
from keepstep.cli.main import main

sys.argv = ["keepstep", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_real_signal_ends_a_real_process(places, tmp_path):
    command = [sys.executable, "-c", BLOCKED, "convert", places / "dcp", tmp_path / "new"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "moving\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == f"interrupted: nothing half is left at {tmp_path / 'new'}\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "args",
    [
        ("convert", ":dcp", "new"),
        ("convert", ":step", "new", "--to", "torch"),
        ("export", ":step", "new"),
        ("import", ":hub", "new"),
        ("cp", ":run", "new"),
        ("verify", ":step"),
        ("cat", ":step", "model/w1"),
        ("diff", ":step", ":dcp"),
        ("prune", ":run", "--keep-last", "1"),
    ],
)
def test_there_is_a_bar_on_a_terminal_and_none_in_a_pipe(args, places, tmp_path, monkeypatch):
    shown = StringIO()
    real = verifying.Progress

    def on_terminal(*columns, console, **options):
        options["disable"] = False
        screen = Console(file=shown, force_terminal=True, width=80, markup=False, highlight=False, emoji=False)
        return real(*columns, console=screen, **options)

    with monkeypatch.context() as patch:
        patch.setattr(verifying, "Progress", on_terminal)
        call(*words(args, places, tmp_path))
    assert "━" in shown.getvalue()
    assert any(unit in shown.getvalue() for unit in ("KiB", "bytes", "MiB"))
    if "new" not in args:
        said = call(*words(args, places, tmp_path))
        assert said.stderr == ""
        assert "━" not in said.stdout
