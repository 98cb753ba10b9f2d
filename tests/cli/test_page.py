"""The commands that docs/cli.md shows under its headings do what it says, in a folder that has what they name."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

import keepstep as ks
from tests.architecture.source import ROOT
from tests.cli.test_commands import call
from tests.interop import dcp_checks


def commands(section):
    text = (ROOT / "docs/cli.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^    keepstep (.+)$", text, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run with the steps that the page names, and what others have written."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2))})
    optimizer = torch.optim.AdamW(model.parameters())
    state = ks.TrainState(model=model, optimizer=optimizer)
    for step in (1100, 1200):
        ks.save(f"runs/gpt/step-{step:08d}", state, step=step)
    dcp_checks.write(tmp_path / "old" / "checkpoint-100", {"model": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1}})
    dcp_checks.write(tmp_path / "old" / "checkpoint-1200", {"model": model.state_dict()})
    torch.save({"model": model.state_dict()}, "old/model.pt")
    return tmp_path


@pytest.mark.parametrize("section", ["Looking inside", "Converting"])
def test_the_commands_of_the_page_do_what_it_says(section, folder):
    shown = commands(section)
    assert len(shown) >= 3
    for line in shown:
        words = shlex.split(line)
        said = call(*words, status=0)
        assert said.stdout
        assert said.stderr == ""


def test_every_command_is_on_the_page_and_in_the_help():
    page = (ROOT / "docs/cli.md").read_text()
    offered = set(re.findall(r"^ +│? ?([a-z]+) {2,}[A-Z]", call("--help").stdout, re.MULTILINE))
    listed = set(re.findall(r"^    keepstep ([a-z]+)", page, re.MULTILINE)) | {"unpin"}
    assert {"show", "cat", "diff", "convert", "cp", "completion", "agent"} <= offered
    assert offered == listed
