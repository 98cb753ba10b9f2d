"""One small model with an optimizer, in every layout people train in, and its whole state as torch itself gathers it."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import keepstep as ks

RATE = 0.01


class Net(nn.Module):
    """Sizes that do not divide by 2, 3 or 4, except where tensor parallelism needs it; a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 5)
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(1152))

    def forward(self, x):
        with torch.no_grad():
            self.seen += len(x)
            self.table[: len(x)] += x.sum(1)
        h = self.inp(x)
        return self.out(self.norm(h + self.down(torch.relu(self.up(h)))))


@cache
def mesh_of(*shape):
    """Each call of a test has its own groups; see ``forget_meshes``."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def forget_meshes():
    mesh_of.cache_clear()


def spread(model, layout):
    """The model in a layout: none, ddp, fsdp, tp, 2d (fsdp over tp) or hsdp (replicated groups of shards)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout in ("tp", "2d"):
        mesh = mesh_of(world) if layout == "tp" else mesh_of(2, world // 2)["inner"]
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout in ("fsdp", "2d", "hsdp"):
        mesh = {"fsdp": lambda: mesh_of(world), "2d": lambda: mesh_of(2, world // 2)["outer"]}
        mesh = mesh.get(layout, lambda: mesh_of(2, world // 2))()
        if hasattr(model, "up"):
            fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Run:
    """Model, optimizer and scheduler of one training run, in one layout."""

    def __init__(self, layout, seed=0, make=Net) -> None:
        torch.manual_seed(seed)
        self.model = spread(make(), layout)
        named = [(name.removeprefix("module."), p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.named = dict(named)
        groups = [
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in named if not n.endswith("bias")], "lr": RATE / 2},
        ]
        # Not foreach: with tensor parallelism some parameters are DTensors and some are not.
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = ks.TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps):
        """Every rank sees the same samples, so that each layout computes the same thing up to rounding."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.state.progress.step)
            x = torch.randn(6, 7, generator=generator)
            self.optimizer.zero_grad()
            (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state.progress.step += 1
        return self

    def whole(self):
        """Everything as whole tensors and plain values, gathered by torch and not by keepstep. Collective."""
        gathered = {f"model/{n.removeprefix('module.')}": full(t) for n, t in self.model.state_dict().items()}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                gathered[f"optimizer/{name}/{key}"] = full(value)
        gathered["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        gathered["scheduler"] = self.scheduler.state_dict()
        gathered["step"] = self.state.progress.step
        return gathered


def full(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def differences(have, want, *, close=False):
    """Keys at which two whole states differ; to the last bit, or within rounding."""
    wrong = [f"{key} on one side only" for key in have.keys() ^ want.keys()]
    for key in have.keys() & want.keys():
        a, b = have[key], want[key]
        if not isinstance(a, torch.Tensor):
            same = a == b
        elif close:
            same = a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)
        else:
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        if not same:
            wrong.append(f"{key}: {a} and {b}")
    return wrong


class Adapted(nn.Module):
    """A frozen base with a small trainable part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 5)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, 7))
        self.b = nn.Parameter(torch.zeros(5, 3))
        self.scale_bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.base(x) + x @ self.a.T @ self.b.T * self.scale_bias).sum(1, keepdim=True)
