"""Whatever is spelled wrong is answered with what looks like it."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from keepstep.cli.words import near_pattern
from tests.cli.sources import write_all
from tests.cli.test_commands import call

STATE = {"model": {"layers.0.weight": torch.ones(2), "head.weight": torch.ones(2)}, "optimizer": {"lr": 0.1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hints")
    state = ks.TrainState(weight=torch.ones(2))
    with ks.Checkpointer(root / "runs" / "gpt", state, keep=ks.Keep(last=None)) as checkpointer:
        checkpointer.restore()
        for _ in range(3):
            checkpointer.step(loss=1.0)
            checkpointer.save()
    write_all(root, STATE)
    (root / "lone").mkdir()
    (root / "lone" / "__0.metadata").write_bytes(b"\x80")
    return root


STEP = "{root}/step"
WRONG = {
    "a command": (("shwo", STEP), 2, "Did you mean 'show'"),
    "a command of agents": (("agent", "sttus"), 2, "Did you mean 'status'"),
    "an option": (("show", STEP, "--dept", 1), 2, "--depth"),
    "a folder on the way": (("ls", "{root}/rnus/gpt"), 3, "did you mean '{root}/runs'?"),
    "a run": (("ls", "{root}/runs/gtp"), 3, "did you mean '{root}/runs/gpt'?"),
    "a step's name": (("show", "{root}/runs/gpt/step-0000002"), 3, "did you mean '{root}/runs/gpt/step-0000000"),
    "a step's number": (
        ("cp", "{root}/runs/gpt", "{root}/x", "--step", 9), 3, "the steps beside it: step-00000001, step-00000002",
    ),
    "a folder of single ranks": (("show", "{root}/lone"), 3, "each rank its own"),
    "a file": (("show", "{root}/fiel.pt"), 3, "did you mean '{root}/file.pt'?"),
    "a key": (("cat", STEP, "model/laers.0.weight"), 2, "did you mean 'model/layers.0.weight'"),
    "a key of DCP": (("cat", "{root}/dcp", "model/haed.weight"), 2, "did you mean 'model/head.weight'"),
    "a key with a slice": (("cat", STEP, "model/haed.weight[0]"), 2, "did you mean 'model/head.weight'"),
    "a pattern": (("show", STEP, "modle/*"), 2, "did you mean 'model/*'?"),
    "a pattern of a tree": (("show", STEP, "model/lyers.*", "--depth", 3), 2, "did you mean 'model/layers.*'?"),
    "a pattern of diff": (("diff", STEP, STEP, "--only", "modle/**"), 2, "did you mean 'model/**'?"),
    "a part of diff": (("diff", STEP, STEP, "--only", "optimzer"), 2, "did you mean 'optimizer'"),
    "a component to show": (("show", STEP, "--component", "modle"), 2, "did you mean 'model'?"),
    "a component to export": (("export", STEP, "{root}/x", "--component", "modle"), 3, "did you mean 'model'?"),
    "a component to export from DCP": (
        ("export", "{root}/dcp", "{root}/x", "--component", "modle"), 3, "did you mean 'model'?",
    ),
    "a component of DCP": (("convert", "{root}/dcp", "{root}/x", "--only", "modle"), 2, "did you mean 'model'?"),
    "a component of a file": (("convert", "{root}/file.pt", "{root}/x", "--only", "modle"), 2, "did you mean 'model'?"),
    "a component for DCP": (
        ("convert", STEP, "{root}/x", "--to", "dcp", "--only", "modle"), 2, "did you mean 'model'?",
    ),
    "a component for a file": (
        ("convert", STEP, "{root}/x", "--to", "torch", "--only", "modle"), 3, "did you mean 'model'?",
    ),
    "a format": (("convert", STEP, "{root}/x", "--to", "dpc"), 2, "did you mean 'dcp'?"),
    "a dtype": (("export", STEP, "{root}/x", "--dtype", "bfloat"), 2, "did you mean 'bfloat16'"),
    "a metric": (
        ("prune", "{root}/runs/gpt", "--keep-best", 1, "--metric", "los"), 2, "there are: loss; did you mean 'loss'?",
    ),
    "a mode": (("prune", "{root}/runs/gpt", "--keep-best", 1, "--mode", "mx"), 2, "did you mean 'max'?"),
    "a shell": (("completion", "fsih"), 2, "did you mean 'fish'?"),
    "no name": (("import", "{root}/hub", "{root}/x", "--component", ""), 2, "give the model a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_spelled_wrong_gets_a_hint(name, root):
    args, status, hint = WRONG[name]
    said = call(*(str(arg).replace("{root}", str(root)) for arg in args), status=status)
    assert hint.replace("{root}", str(root)) in said.stderr
    assert said.stdout == ""
    assert not (root / "x").exists()
    assert len(list((root / "runs" / "gpt").glob("step-*"))) == 3


def test_patterns_are_like_keys_or_what_keys_begin_with():
    keys = ["model/layers.0.weight", "optimizer/state/a/b"]
    assert near_pattern("model/layers.0.wieght", keys).startswith("; did you mean 'model/layers.0.weight'")
    assert near_pattern("optimizer/stat/**", keys) == "; did you mean 'optimizer/state/**'?"
    assert near_pattern("**/zzz", keys) == near_pattern("zzz", keys) == near_pattern("", keys) == ""
