"""Patterns where ranks hold different parts of a model: one that fits on any rank is no mistake; a look before on all."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import keepstep as ks
from tests.ranks.calls import attempt


def stage(rank, *, head):
    """The part of a pipeline that a rank holds; the last one has the head."""
    layers = {"embed": nn.Linear(2, 2)} if rank == 0 else {"body": nn.Linear(2, 2)}
    if rank and head:
        layers["head"] = nn.Linear(2, 2)
    return {"model": nn.ModuleDict(layers)}


def grow(rank, folder):
    torch.manual_seed(rank)
    saved = stage(rank, head=False)
    ks.save(f"{folder}/s", saved, step=3)
    grown = stage(rank, head=True)
    found = [
        attempt(ks.load, f"{folder}/s", grown, **options)
        for options in ({}, {"allow_missing": ["model/head.*", "model/haed.*"]}, {"allow_missing": ["model/head.*"]})
    ]
    same = all(
        torch.equal(grown["model"].state_dict()[key], value) for key, value in saved["model"].state_dict().items()
    )
    part = ks.TrainState(**saved, leave_out=["model/embed.*"])
    ks.save(f"{folder}/part", part)
    back = ks.TrainState(**stage(rank, head=False))
    found.append(attempt(ks.load, f"{folder}/part", back))
    ks.load(f"{folder}/part", back, left_out=f"{folder}/s")
    same = same and all(torch.equal(back["model"].state_dict()[k], v) for k, v in saved["model"].state_dict().items())
    mesh = init_device_mesh("cpu", (2,))
    whole = {"w": distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])}
    ks.save(f"{folder}/whole", whole)
    report = ks.load(f"{folder}/whole", whole, dry_run=True)
    return found, same, (report.rank_bytes, report.bytes_needed, sum(report.files.values()), len(report.files))


def test_a_pattern_may_fit_on_one_rank_alone(rank_pool, tmp_path):
    for rank, (found, same, looked) in enumerate(rank_pool(2)(grow, str(tmp_path))):
        strict, typo, allowed, demanded = found
        assert strict.kind == typo.kind == "MismatchError"
        assert "model/head.weight: in the target module, not in the checkpoint (on rank 1)" in strict.mismatches
        lines = [line.partition(": no key")[0] for line in typo.mismatches]
        assert lines == ["allow_missing='model/haed.*'"]
        assert allowed.kind == "ok", allowed.text
        assert same
        left = "model/embed.weight: left out when it was saved; left_out= names the step that has it (on rank 0)"
        assert left in demanded.mismatches
        assert len(demanded.mismatches) == 2
        assert looked == ((24, 16), (24, 16)[rank], 40, 2)
