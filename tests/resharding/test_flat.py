"""Flat buffers of real ranks: saved without gathering, loaded into other partitions, DTensors and plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

import keepstep as ks
from keepstep.errors import CheckpointError, MismatchError, StepNotFoundError
from tests.helpers.jobs import alone, run_job
from tests.resharding.models import full

# --- padding, other partitions, other layouts -----------------------------------------------------------------------

SHAPES = {"a": (3, 4), "b": (7,), "c": (2, 3, 5)}
TOTAL = 49


def ten(rank, fill=None):
    """Ten elements in equal parts of a buffer that is padded to a multiple of the world."""
    world = dist.get_world_size()
    size = -(-10 // world)
    buffer = torch.full((size,), 99.0)
    for i in range(size):
        if rank * size + i < 10:
            buffer[i] = rank * size + i if fill is None else fill
    return buffer, ks.flat_pieces({"p": (10,)}, start=rank * size, elements=size)


def mixed(rank, fill=None):
    world = dist.get_world_size()
    size = -(-TOTAL // world)
    low = rank * size
    row = torch.cat([torch.arange(float(TOTAL)), torch.full((world * size - TOTAL,), 99.0)])
    buffer = row[low : low + size].clone() if fill is None else torch.full((size,), fill)
    return buffer, ks.flat_pieces(SHAPES, start=low, elements=size)


def save_flat(rank, folder):
    ks.save(folder, {"ten": ks.flat(*ten(rank)), "mixed": ks.flat(*mixed(rank))})


def load_flat(rank, folder):
    (small, small_pieces), (large, large_pieces) = ten(rank, -1.0), mixed(rank, 99.0)
    ks.load(folder, into={"ten": ks.flat(small, small_pieces), "mixed": ks.flat(large, large_pieces)})
    assert torch.equal(small, ten(rank)[0])
    assert torch.equal(large, mixed(rank)[0])
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    placed = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(len(shape) - 1)]) for name, shape in SHAPES.items()
    }
    ks.load(folder, into={"mixed": placed}, only=["mixed"])
    assert torch.equal(torch.cat([full(value).reshape(-1) for value in placed.values()]), torch.arange(float(TOTAL)))
    ks.save(f"{folder}-placed-{dist.get_world_size()}", {"mixed": placed})
    large.fill_(99.0)
    ks.load(f"{folder}-placed-{dist.get_world_size()}", into={"mixed": ks.flat(large, large_pieces)})
    assert torch.equal(large, mixed(rank)[0])


def flat_jobs(folder):
    run_job(folder / "save", 4, save_flat, str(folder / "ck"))
    for world in (3, 5):
        run_job(folder / f"load{world}", world, load_flat, str(folder / "ck"))


@pytest.mark.case(118)
@pytest.mark.slow
def test_padding_is_no_part_of_a_flat_buffer_and_any_layout_takes_it(rank_pool, tmp_path):
    rank_pool(1)(alone, flat_jobs, tmp_path)
    with ks.open(tmp_path / "ck") as checkpoint:
        assert torch.equal(checkpoint["ten/p"], torch.arange(10.0))
        assert torch.equal(checkpoint["mixed/c"], torch.arange(19.0, 49.0).reshape(2, 3, 5))


# --- what several ranks hold, holes, tensor parallelism -------------------------------------------------------------


def shared_row(rank):
    """Both ranks hold the first row, and only the second has the others: it is to write these, and not those."""
    rows = [ks.FlatPiece("x", (4, 3), 0, 3, 1)]
    buffer = torch.tensor([-1.0, 0, 1, 2])
    if rank == 1:
        rows.append(ks.FlatPiece("x", (4, 3), 3, 9, 4))
        buffer = torch.cat([buffer, torch.arange(3.0, 12.0)])
    return {"state": ks.flat(buffer, rows)}


def parallel(rank, fill=None):
    """A matrix cut by columns over tp, its part of each tp rank flattened, padded and cut over dp."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    value = distribute_tensor(torch.arange(30.0).reshape(5, 6), mesh["tp"], [Shard(1)])
    local = torch.cat([value.to_local().reshape(-1), torch.full((1,), 99.0)])
    low = mesh.get_local_rank("dp") * 8
    buffer = local[low : low + 8].clone()
    pieces = ks.flat_pieces({"x": value}, start=low, elements=8)
    if fill is not None:
        buffer.fill_(fill)
    return buffer, pieces


def several(rank, folder):
    buffer, pieces = parallel(rank)
    ks.save(f"{folder}/tp", {"state": ks.flat({"m": buffer}, pieces)})
    into = torch.full((8,), 99.0)
    ks.load(f"{folder}/tp", into={"state": ks.flat({"m": into}, pieces)})
    assert torch.equal(into, buffer)
    plain = {"state": {"x": {"m": torch.zeros(5, 6)}}}
    ks.load(f"{folder}/tp", into=plain)
    return plain["state"]["x"]["m"]


def said(rank, folder):
    ks.save(f"{folder}/row", shared_row(rank))
    plain = {"state": {"x": torch.zeros(4, 3)}}
    ks.load(f"{folder}/row", into=plain)
    assert torch.equal(plain["state"]["x"], torch.arange(12.0).reshape(4, 3))
    states = {
        "hole": [ks.FlatPiece("fine", (2,), 0, 2, 2), ks.FlatPiece("holed", (5,), 3 * rank, 2, 0)],
        "overlap": [ks.FlatPiece("twice", (5,), 2 * rank, 3, 0)],
        "shape": [ks.FlatPiece("shaped", (4 + rank,), 2 * rank, 2, 0)],
    }
    found = []
    for name, pieces in states.items():
        with pytest.raises(CheckpointError) as caught:
            ks.save(f"{folder}/{name}", {"state": ks.flat(torch.ones(4), pieces)})
        with pytest.raises(StepNotFoundError):
            ks.open(f"{folder}/{name}")
        found.append(str(caught.value))
    with pytest.raises(MismatchError) as lacking:
        ks.load(f"{folder}/row", into={"state": ks.flat(torch.ones(2), [ks.FlatPiece("y", (2,), rank, 1, 0)])})
    return [*found, str(lacking.value)]


@pytest.mark.slow
def test_what_ranks_hold_alike_is_written_once_and_what_does_not_fit_is_named(rank_pool, tmp_path):
    for hole, overlap, shape, lacking in rank_pool(2)(said, str(tmp_path)):
        assert "state/holed" in hole
        assert "4 of 5" in hole
        assert "state/twice" in overlap
        assert "overlap" in overlap
        assert "state/shaped" in shape
        assert "state/y" in lacking
        assert "state/x" in lacking
    for whole in rank_pool(4)(several, str(tmp_path)):
        assert torch.equal(whole, torch.arange(30.0).reshape(5, 6))


# --- two optimizers that divide their state -------------------------------------------------------------------------


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def grown(model, step):
    """Gradients of the whole batch on every rank, so that the number of ranks changes nothing."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 5, generator=generator)).square().sum().backward()


class DividedAdam:
    """The first stage of ZeRO by hand: each rank has an equal part of flat masters and moments, and all share the result."""

    def __init__(self, model):
        self.parameters = dict(model.named_parameters())
        total, world = sum(p.numel() for p in self.parameters.values()), dist.get_world_size()
        self.size = -(-total // world)
        self.start = dist.get_rank() * self.size
        self.master = self.part([p.detach() for p in self.parameters.values()])
        self.m, self.v = torch.zeros(self.size), torch.zeros(self.size)
        self.steps = 0

    def part(self, tensors):
        row = torch.cat([tensor.reshape(-1) for tensor in tensors])
        padded = torch.cat([row, row.new_zeros(self.size * dist.get_world_size() - len(row))])
        return padded[self.start : self.start + self.size].clone()

    def step(self):
        self.steps += 1
        grad = self.part([p.grad for p in self.parameters.values()])
        self.m.mul_(0.9).add_(grad * 0.1)
        self.v.mul_(0.99).add_(grad * grad * 0.01)
        scale = self.v.sqrt() / (1 - 0.99**self.steps) ** 0.5 + 1e-8
        self.master.sub_(self.m / (1 - 0.9**self.steps) / scale * 0.05)
        parts = [torch.empty(self.size) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.master)
        row, at = torch.cat(parts), 0
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(row[at : at + parameter.numel()].view(parameter.shape))
                at += parameter.numel()

    def state_dict(self):
        pieces = ks.flat_pieces(self.parameters, start=self.start, elements=self.size)
        buffers = {"master": self.master, "exp_avg": self.m, "exp_avg_sq": self.v}
        return {"steps": self.steps, "state": ks.flat(buffers, pieces)}

    def load_state_dict(self, given):
        self.steps = given["steps"]
        self.state_dict()["state"].copy_(given["state"])


def zero(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, foreach=False)


def train(rank, folder, first, last):
    model, other = net(), net()
    divided, redundant = DividedAdam(model), zero(other)
    # Each rank's own optimizer in the ZeroRedundancyOptimizer holds some of the parameters whole.
    state = {"model": model, "divided": divided, "other": other, "redundant": redundant.optim}
    if first:
        ks.load(f"{folder}/{first}", into=state)
        for ours, local in zip(redundant.param_groups, redundant.optim.param_groups, strict=True):
            ours.update({key: value for key, value in local.items() if key != "params"})
    for step in range(first, last):
        grown(model, step)
        divided.step()
        grown(other, step)
        redundant.step()
        for group in redundant.param_groups:
            group["lr"] *= 0.9
    if not first:
        for ours, local in zip(redundant.param_groups, redundant.optim.param_groups, strict=True):
            local["lr"] = ours["lr"]
        ks.save(f"{folder}/{last}", state)
    return [p.detach().clone() for p in (*model.parameters(), *other.parameters())]


def divided_jobs(folder):
    ends = {}
    run_job(folder / "first", 4, train, str(folder), 0, 5)
    ends["uninterrupted"] = run_job(folder / "whole", 4, train, str(folder / "whole"), 0, 9)[0]
    for world in (2, 3):
        ends[world] = run_job(folder / f"then{world}", world, train, str(folder), 5, 9)[0]
    return ends


@pytest.mark.slow
def test_divided_optimizers_go_on_with_other_numbers_of_ranks(rank_pool, tmp_path):
    [ends] = rank_pool(1)(alone, divided_jobs, tmp_path)
    assert len(ends) == 3
    assert not torch.equal(ends["uninterrupted"][0], net()[0].weight)
    for world in (2, 3):
        for resumed, expected in zip(ends[world], ends["uninterrupted"], strict=True):
            assert torch.equal(resumed, expected), world
