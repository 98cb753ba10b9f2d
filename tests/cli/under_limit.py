"""Run by a test in a process that may have 64 files open: everything that reads a step of 100 ranks, in every format.

Prints what each command has said, and whether a load was right, as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.foreign.shown import OpenFiles, Piece, ShownStep, ShownTensor, Source
from keepstep.format.box import Box
from keepstep.format.objects import ObjectNode, TensorRef
from keepstep.interop.adopting import adopting
from keepstep.storage.local import LocalStorage

RANKS, TENSORS, OPEN = 100, 3, 64


@dataclass(frozen=True)
class Held(Source):
    data: bytes

    def read_into(self, files: OpenFiles, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


def values(number: int) -> np.ndarray:
    return (np.arange(RANKS * 8, dtype=np.float32) + number).reshape(RANKS * 2, 4)


def write(root: Path, step: int) -> Path:
    """A step of 100 ranks, each of which holds two rows of every tensor."""
    tensors, tree = [], {}
    for number in range(TENSORS):
        key, whole = f"model/w{number}", values(number)
        pieces = [Piece(r, Box((2 * r, 0), (2, 4)), Held(whole[2 * r : 2 * r + 2].tobytes())) for r in range(RANKS)]
        tensors.append(ShownTensor(key, "float32", whole.shape, tuple(pieces)))
        tree[f"w{number}"] = TensorRef(key, "float32", whole.shape)
    state = {"model": ObjectNode("module", "Module", tree)}
    shown = ShownStep(LocalStorage(root), state, tensors, name="0" * 16, world=RANKS, step=step)
    path = root / f"step-{step:08d}"
    for _ in adopting(shown, LocalStorage(path)):
        pass
    return path


def main(root: Path) -> dict[str, object]:
    run = root / "run"
    step, other = write(run, 1), write(run, 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN))
    answers: dict[str, object] = {}

    def call(*args: object) -> None:
        result = CliRunner().invoke(app, list(map(str, args)))
        answers[" ".join(str(arg).removeprefix(f"{root}/") for arg in args)] = [result.exit_code, result.output]

    call("verify", run)
    call("show", step, "--depth", 1)
    call("cat", step, "model/w1[0:9]")
    call("diff", step, other)
    call("cp", run, root / "copy", "--all")
    call("export", step, root / "hub")
    call("export", step, root / "hub-2", "--max-shard", 32 * RANKS)
    call("import", root / "hub", root / "imported")
    call("convert", step, root / "dcp", "--to", "dcp")
    call("convert", step, root / "file.pt", "--to", "torch")
    for name in ("dcp", "hub", "file.pt", "imported/step-00000000"):
        call("diff", step, root / name)
    call("convert", root / "dcp", root / "back", "--check")
    call("convert", root / "dcp", root / "dcp.pt", "--to", "torch")
    call("export", root / "dcp", root / "hub-4")
    call("diff", root / "hub-4", root / "back")
    for place in (step, root / "dcp", root / "hub-2"):
        into = {"model": {f"w{number}": torch.zeros(RANKS * 2, 4) for number in range(TENSORS)}}
        ks.load(place, into=into)
        right = all(np.array_equal(into["model"][f"w{number}"].numpy(), values(number)) for number in range(TENSORS))
        answers[f"load {place.name}"] = [0 if right else 1, "not the values that were saved"]
    return answers


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
