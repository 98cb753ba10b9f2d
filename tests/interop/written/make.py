"""Writes ``<version of torch>.tar.xz``: what that torch's DCP and ``torch.save`` make of the states beside this file.

``python make.py`` in an environment that has that torch and numpy, and nothing of keepstep. Once for every version: what
was written is never made again.
"""

from __future__ import annotations

import pathlib
import sys
import tarfile
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as Local
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import states  # noqa: E402

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # before 2.5
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import fully_shard

VERSION = torch.__version__.partition("+")[0]
UNSIGNED = tuple(map(int, VERSION.split(".")[:2])) >= (2, 6)


def model_of(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer after one step of gradients that are given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8 + number)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.5, 0.75))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def two(rank: int, world: int, folder: str) -> None:
    """What one of two ranks saves."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole = states.whole()
    placed = {"rows": Shard(0), "uneven": Shard(0), "less": Shard(0), "columns": Shard(1), "same": Replicate()}
    state: dict[str, Any] = {name: distribute_tensor(whole[name], mesh, [where]) for name, where in placed.items()}
    rows = [
        Local.from_tensor_and_offsets(whole["table"][at : at + 2].clone(), [at, 0], rank)
        for at in (4 * rank, 4 * rank + 2)
    ]
    state["table"] = init_from_local_shards(rows, 8, 3)
    model, optimizer = model_of(mesh)
    weights, moments = get_state_dict(model, optimizer)
    saved = {
        "app": state,
        "model": weights,
        "optimizer": moments,
        "step": 12,
        f"rank{rank}": torch.full((2,), float(rank)),
    }
    dcp.save(saved, checkpoint_id=f"{folder}/two")
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": dict(full[0]), "optimizer": full[1]}, f"{folder}/whole.pt")
    dist.destroy_process_group()


def one(folder: str) -> None:
    """What a process alone saves."""
    every, values = states.tensors(unsigned=UNSIGNED), states.values()
    state = {"tensors": every, "values": values, "more": states.containers(), "bare": torch.arange(3.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/one"))
    few = {"a.b": torch.arange(4.0), "c": {"d": [1, torch.ones(2)]}, "e": torch.ones(2, 2)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = dcp.FileSystemWriter(f"{folder}/flat", single_file_per_rank=False, thread_count=2)
    dcp.save(few, storage_writer=writer, planner=planner)
    shared = torch.arange(12.0)
    views = {"all": shared, "part": shared[4:8], "turned": shared.view(3, 4).t()}
    torch.save({"tensors": every, "values": values, "shared": views}, f"{folder}/saved.pt")
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    parameter.grad = torch.ones(4)
    optimizer.step()
    torch.save({"weight": parameter.detach()}, f"{folder}/model.pt")
    torch.save({"optimizer": optimizer.state_dict(), "epoch": 3}, f"{folder}/optimizer.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        one(scratch)
        torch.multiprocessing.spawn(two, (2, scratch), nprocs=2)
        with tarfile.open(HERE / f"{VERSION}.tar.xz", "x:xz") as archive:
            for name in ("one", "two", "flat", "whole.pt", "saved.pt", "model.pt", "optimizer.pt"):
                archive.add(f"{scratch}/{name}", name)
    print(VERSION)
