"""What several tests of DCP share: states, directories that torch writes, and functions that ranks run."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import keepstep as ks
from keepstep.format.dtypes import ITEM_BYTES


def write(path: Path, state: dict[str, Any], **options: Any) -> Path:
    """A directory as torch writes it, by one process."""
    planner = options.pop("planner", None)
    writer = dcp.FileSystemWriter(path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    if "_extensions" in options:
        gc.collect()  # here, and not in another test, torch's wrapper of a stream is closed, and says that it cannot be
    return path


def read_back(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Plain ``dcp.load`` of a directory into a state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True, **options)
    return state


def every_dtype() -> dict[str, torch.Tensor]:
    """A small tensor of every dtype that both sides know, with all kinds of bytes in it."""
    found: dict[str, torch.Tensor] = {}
    for number, (name, size) in enumerate(ITEM_BYTES.items()):
        generator = torch.Generator().manual_seed(number)
        raw = torch.randint(0, 2 if name == "bool" else 256, (6 * size,), generator=generator, dtype=torch.uint8)
        tensor = raw.view(getattr(torch, name)).reshape(2, 3)
        with contextlib.suppress(NotImplementedError):  # torch 2.9 has four-bit floats, and copies none
            torch.zeros_like(tensor).copy_(tensor)
            found[name] = tensor
    return found


def plain_values() -> dict[str, Any]:
    """Values of every kind that both sides know."""
    return {
        "none": None,
        "truth": True,
        "int": 7,
        "huge": 1 << 90,
        "floats": [0.1, -0.0, float("inf")],
        "text": "ä/b~",
        "bytes": b"\x00\xff",
        "pair": (1, ("x", None)),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "ordered": (collections.OrderedDict(b=1, a=2),),
        "counter": (collections.Counter("aab"),),
        "default": (collections.defaultdict(list, a=[1]),),
        "deque": collections.deque([1, 2], 5),
        "path": Path("a/b"),
        "when": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        "long": dt.timedelta(1, 2, 3),
        "scalar": np.float64(1.5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "dtype": torch.bfloat16,
        "size": (torch.Size([2, 3]),),
        "device": torch.device("cpu"),
    }


def small_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with an optimizer that has made two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def whole_tensors() -> dict[str, torch.Tensor]:
    """What the sharded states below are, put together."""
    torch.manual_seed(11)
    return {
        "rows": torch.randn(10, 6),
        "uneven": torch.randn(7, 3),
        "less": torch.randn(1, 4),
        "columns": torch.randn(4, 9),
        "same": torch.randn(5),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "half": torch.randn(8, 8).bfloat16(),
    }


_PLACED = {"rows": 0, "uneven": 0, "less": 0, "columns": 1, "half": 0}


def sharded(*, empty: bool = False, turned: bool = False) -> dict[str, Any]:
    """The tensors as this rank has them in a world of its own; ``turned`` along other dimensions; ``empty`` to be filled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in whole_tensors().items():
        held = torch.zeros_like(value) if empty else value
        dim = _PLACED.get(name)
        if dim is None:
            state[name] = held
        elif turned and name == "rows":
            state[name] = distribute_tensor(held, mesh, [Replicate()], src_data_rank=None)
        else:
            state[name] = distribute_tensor(held, mesh, [Shard(1 - dim if turned else dim)], src_data_rank=None)
    return state


def check_sharded(state: dict[str, Any]) -> None:
    for name, value in whole_tensors().items():
        found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(found, value), name


def save_with_torch(_rank: int, path: str) -> None:
    """Every rank saves its shards with plain torch."""
    dcp.save({"app": sharded(), "step": 3}, checkpoint_id=path)


def load_with_keepstep(_rank: int, path: str) -> None:
    """Every rank loads with keepstep, in two layouts."""
    for turned in (False, True):
        state = {"app": sharded(empty=True, turned=turned), "step": 0}
        report = ks.load(path, into=state)
        check_sharded(state["app"])
        assert state["step"] == 3
        assert report.saved_world >= 1


def load_with_torch(_rank: int, path: str) -> None:
    """Every rank loads with plain torch, in two layouts."""
    for turned in (False, True):
        state = {"app": sharded(empty=True, turned=turned), "step": 0}
        dcp.load(state, checkpoint_id=path)
        check_sharded(state["app"])
        assert state["step"] == 3


def save_fsdp(_rank: int, path: str) -> dict[str, Any]:
    """A model under FSDP2 with its optimizer, saved with plain torch; returns what it was, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"model": dict(whole[0]), "optimizer": whole[1]}


def load_fsdp(_rank: int, path: str, state: dict[str, Any]) -> None:
    """The same model under FSDP2, fresh, filled by keepstep: equal to what was saved."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ks.load(path, into={"model": model, "optimizer": optimizer})
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if weights:
        for name, value in state["model"].items():
            assert torch.equal(weights[name], value), name
        for name, values in state["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(moments["state"][name][key], value), (name, key)
        assert moments["param_groups"][0]["lr"] == 0.01
