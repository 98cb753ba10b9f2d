"""What the rank functions of these tests share: how a call went, and a state to save."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import keepstep as ks


@dataclass(frozen=True)
class Outcome:
    """How one call went on one rank. ``text`` is what a log shows, notes included."""

    kind: str
    text: str = ""
    seconds: float = 0.0
    failures: dict = field(default_factory=dict)
    missing: tuple = ()
    mismatches: tuple = ()


def attempt(call, *args, **kwargs):
    """Makes the call and tells how it went; only Exceptions are taken for an answer."""
    began = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as err:
        return Outcome(
            type(err).__name__,
            "".join(traceback.format_exception_only(err)),
            time.monotonic() - began,
            getattr(err, "failures", {}),
            getattr(err, "missing", ()),
            getattr(err, "mismatches", ()),
        )
    return Outcome("ok", seconds=time.monotonic() - began)


def training_state(rank=0, value=0.0):
    """A model that is the same on every rank, an optimizer with moments, a shard, and something of each rank's own."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(value)
    shard = ks.sharded(torch.full((600,), value + rank), global_shape=(600 * world,), offsets=(600 * rank,))
    return ks.TrainState(
        model=model, optimizer=optimizer, parts={"shard": shard}, mine=ks.per_rank({"rank": rank}, "same_rank")
    )


def group_works():
    """The trainer's own group is as usable as before."""
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    return total.item() == dist.get_world_size()
