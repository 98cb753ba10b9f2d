"""docs/follow-one-tensor.md and docs/format.md are true: what they name runs, and what they show reads what was saved."""

from __future__ import annotations

import re
import runpy
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import keepstep as ks
from tests.architecture.source import PACKAGE, ROOT, functions, modules
from tests.architecture.test_reading_path import follow

NAMED = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def test_every_function_that_the_page_names_takes_part(tmp_path):
    page = (ROOT / "docs/follow-one-tensor.md").read_text()
    whole, empty = {"w": torch.arange(12.0).reshape(3, 4)}, {"w": torch.zeros(3, 4)}
    trails = {
        "Saved": follow(lambda: ks.save(tmp_path / "step", whole)),
        "Loaded": follow(lambda: ks.load(tmp_path / "step", into=empty)),
    }
    assert torch.equal(empty["w"], whole["w"])
    for title, trail in trails.items():
        ran = {(str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname) for code in trail.functions}
        named = set(NAMED.findall(page.split(f"## {title}\n")[1].split("\n## ")[0]))
        assert len(named) > 12
        assert not named - ran, title


def train(root: Path, background: str) -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = ks.TrainState(model=model, optimizer=optimizer)
    with ks.Checkpointer(root, state, every=ks.Every(steps=1), background=background) as checkpointer:
        checkpointer.restore()
        for _ in range(2):
            model(torch.ones(256)).sum().backward()
            optimizer.step()
            checkpointer.step()


@pytest.mark.slow
def test_every_function_of_the_walk_in_the_background_takes_part(tmp_path):
    """In a trainer with an agent, or in one that is its own; of the agent's server, which runs elsewhere, it is there."""
    section = (ROOT / "docs/follow-one-tensor.md").read_text().split("## Saved in the background\n")[1]
    named = set(NAMED.findall(section))
    ran = set()
    for background in ("agent", "thread"):
        trail = follow(lambda background=background: train(tmp_path / background, background))
        ran |= {(str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname) for code in trail.functions}
        assert len(list((tmp_path / background).glob("step-*/.metadata"))) == 2
    (server,) = [module for module in modules() if module.name == "keepstep.agent.server"]
    there = {("agent/server.py", name) for name, _ in functions(server)}
    assert len(named) > 30
    assert not named - ran - there


def reader(tmp_path: Path) -> types.SimpleNamespace:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/format.md").read_text(), re.M | re.S)
    assert "keepstep " not in re.sub(r'"keepstep"', "", block)
    script = tmp_path / "reader.py"
    script.write_text(block)
    return types.SimpleNamespace(**runpy.run_path(str(script)))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(path: Path, tmp_path: Path) -> dict[str, np.ndarray]:
    tensors, values = reader(tmp_path).read_step(path)
    with ks.open(path) as step:
        assert set(tensors) == set(step.keys())
        for key, found in tensors.items():
            assert found.shape == tuple(step[key].shape)
            assert found.tobytes() == bits(step[key]), key
    assert values["note"] == {"$": "tuple", "v": [1, "two"]}
    return tensors


def test_the_reader_of_the_format_page_reads_every_dtype_and_ties(tmp_path):
    shared = torch.arange(6.0)
    state = {
        "model": {str(dtype): torch.arange(12).reshape(3, 4).to(dtype) for dtype in (
            torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16, torch.int64, torch.bool,
            torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2fnuz,
        )},
        "tied": {"one": shared, "two": shared, "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)},
        "large": torch.arange(70_000, dtype=torch.int32),
        "note": (1, "two"),
    }  # fmt: skip
    ks.save(tmp_path / "step", state)
    tensors = check(tmp_path / "step", tmp_path)
    assert np.array_equal(tensors["tied/two"], np.arange(6.0))


def save_sharded(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = distribute_tensor(torch.arange(35.0).reshape(7, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    columns = distribute_tensor(torch.arange(35.0).reshape(7, 5), init_device_mesh("cpu", (2,)), [Shard(1)])
    model = {"rows": rows, "columns": columns, "split": torch.arange(2.0**18), "alone": torch.ones(400)}
    own = {"noise": torch.full((3,), float(rank))}
    ks.save(path, {"model": model, "mine": ks.per_rank(own), "note": (1, "two")})


def test_the_reader_of_the_format_page_puts_pieces_together(rank_pool, tmp_path):
    rank_pool(2)(save_sharded, str(tmp_path / "step"))
    tensors = check(tmp_path / "step", tmp_path)
    assert np.array_equal(tensors["model/columns"], np.arange(35.0).reshape(7, 5))
    assert np.array_equal(tensors["model/split"], np.arange(2.0**18))


def test_the_failure_model_refers_to_cases_that_are_listed():
    table = (ROOT / "docs/failure-model.md").read_text().split("| fault |")[1].split("\n\n")[0]
    named = {int(number) for row in table.splitlines() for number in re.findall(r"\d+", row.rpartition(" | ")[2])}
    listed = {int(number) for number in re.findall(r"^(\d+) ", (ROOT / "tests/cases.txt").read_text(), re.M)}
    assert len(named) > 15
    assert named <= listed
