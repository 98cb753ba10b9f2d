"""Saved in one layout, loaded in another: every rank ends up with exactly its part of the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import keepstep as ks
from tests.conftest import SEED
from tests.helpers.jobs import alone, run_job
from tests.resharding.reference import part_of, placed, raw

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (5,), (7, 3), (4, 6), (0, 4), (3, 0), (1, 9), (6, 2, 5), (2, 1, 3, 4), (1030, 260)]
MESHES = {
    "line": [0, 1, 2, 3],
    "grid": [[0, 1], [2, 3]],
    "column": [[0], [1], [2], [3]],
    "turned": [[3, 1], [2, 0]],
    "front": [0, 1],
    "odd": [1, 3],
    "back": [1, 2, 3],
    "single": [2],
}
TENSORS = 120
LOADS = 4


def numbers(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-1000, 1000, shape, generator=generator, dtype=dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def some_layout(rng, shape):
    """A mesh by name and a placement for each of its dimensions; or None for a plain tensor on every rank."""
    if rng.random() < 0.1:
        return None
    name = rng.choice(list(MESHES))
    mesh = torch.tensor(MESHES[name])
    placements = []
    for _ in range(mesh.ndim):
        if not shape or rng.random() < 0.3:
            placements.append(Replicate())
        else:
            placements.append(Shard(rng.randrange(len(shape))))
    if mesh.ndim == 2 and shape and rng.random() < 0.4:
        # What fully sharded data parallelism over tensor parallelism makes.
        dim = rng.randrange(len(shape))
        placements = [_StridedShard(dim, split_factor=mesh.shape[1]), Shard(dim)]
    elif shape and rng.random() < 0.1:
        placements[-1] = _StridedShard(rng.randrange(len(shape)), split_factor=rng.choice([2, 3]))
    return name, placements


def sample(seed):
    """For each tensor: shape, dtype, the layout to save in, the layouts to load in."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(TENSORS):
        shape = rng.choice(SHAPES)
        layouts = [some_layout(rng, shape) for _ in range(1 + LOADS)]
        chosen.append((shape, rng.choice(DTYPES), layouts))
    return chosen


def live(whole, layout, meshes, rng):
    if layout is None:
        return whole.clone()
    return placed(whole, meshes[layout[0]], layout[1], transposed=whole.ndim == 2 and rng.random() < 0.3)


def held(whole, layout, meshes):
    """This rank's bytes of the whole, and their number."""
    if layout is None:
        return raw(whole)
    coordinate = meshes[layout[0]].get_coordinate()
    if coordinate is None:
        return b""
    return raw(part_of(whole, tuple(meshes[layout[0]].mesh.shape), coordinate, layout[1]))


def save_and_reload_everywhere(rank, folder, seed):
    meshes = {name: DeviceMesh("cpu", ranks) for name, ranks in MESHES.items()}
    chosen = sample(seed)
    wholes = [numbers(shape, dtype, index) for index, (shape, dtype, _) in enumerate(chosen)]
    rng = random.Random(f"{seed} {rank}")

    def state(which, values):
        return {"t": {f"n{i}": live(value, chosen[i][2][which], meshes, rng) for i, value in enumerate(values)}}

    ks.save(folder, state(0, wholes))
    wrong = []
    for which in range(1, 1 + LOADS):
        target = state(which, [numbers(shape, dtype, -1 - i) for i, (shape, dtype, _) in enumerate(chosen)])
        report = ks.load(folder, into=target)
        expected = [held(whole, chosen[i][2][which], meshes) for i, whole in enumerate(wholes)]
        for i, (shape, dtype, layouts) in enumerate(chosen):
            if raw(target["t"][f"n{i}"]) != expected[i]:
                wrong.append(f"rank {rank}: {tuple(shape)} {dtype} from {layouts[0]} to {layouts[which]}")
        assert report.bytes_needed == sum(map(len, expected))
        assert report.components["t"].restored == TENSORS
    return wrong


@pytest.mark.case(45)
@pytest.mark.case(48)
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_any_layout_loads_in_any_other(rank_pool, tmp_path, seed):
    print(f"seed {seed}")
    results = rank_pool(4)(save_and_reload_everywhere, str(tmp_path / "ck"), seed)
    assert [line for wrong in results for line in wrong] == []

    chosen = sample(seed)
    wholes = {f"t/n{i}": numbers(shape, dtype, i) for i, (shape, dtype, _) in enumerate(chosen)}
    with ks.open(tmp_path / "ck") as checkpoint:
        for key, whole in wholes.items():
            assert checkpoint[key].dtype == whole.dtype
            assert checkpoint[key].shape == whole.shape
            assert raw(checkpoint[key]) == raw(whole)
    assert stored_elements(tmp_path / "ck") == {key: whole.numel() for key, whole in wholes.items() if whole.numel()}


def stored_elements(folder):
    """Elements in the shard files by key, as another reader of the files counts them."""
    counts = {}
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                key = name.partition("~[")[0]
                if not key.startswith("~"):
                    elements = torch.Size(file.get_slice(name).get_shape()).numel()
                    counts[key] = counts.get(key, 0) + elements
    return {key: count for key, count in counts.items() if count}


LENGTHS = (1, 2, 3, 5, 6, 7)


def lengths_state(value=None):
    mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    state = {}
    for length in LENGTHS:
        whole = torch.arange(length * 3.0).reshape(length, 3)
        state[f"rows{length}"] = placed(whole if value is None else whole * 0 + value, mesh, [Shard(0)])
    # One row over all ranks, and one dimension of length zero.
    state["wide"] = placed(torch.arange(11.0)[None] if value is None else torch.zeros(1, 11), mesh, [Shard(0)])
    state["none"] = placed(torch.zeros(0, 5), mesh, [Shard(0)])
    return state


def lengths(rank, folder, load_from, save_as):
    for name in load_from:
        target = lengths_state(-1.0)
        report = ks.load(f"{folder}/{name}", into=target)
        for key, tensor in lengths_state().items():
            assert torch.equal(target[key].to_local(), tensor.to_local()), (name, key)
        assert not any(part.missing or part.unexpected for part in report.components.values())
        assert report.bytes_needed == sum(t.to_local().nbytes for t in target.values())
    if save_as:
        ks.save(f"{folder}/{save_as}", lengths_state())


@pytest.mark.case(38)
@pytest.mark.case(40)
def test_short_dimensions_on_two_three_and_four_ranks(rank_pool, tmp_path):
    # In this order every saving world meets every loading world, its own included.
    for world, load_from in ((4, []), (3, []), (2, []), (2, [2, 3, 4]), (3, [2, 3, 4]), (4, [2, 3, 4])):
        rank_pool(world)(lengths, str(tmp_path), load_from, "" if load_from else str(world))
    for world in (2, 3, 4):
        target = {key: torch.zeros(length, 3) for length in LENGTHS for key in [f"rows{length}"]}
        target |= {"wide": torch.zeros(1, 11), "none": torch.zeros(0, 5)}
        ks.load(tmp_path / str(world), into=target)
        for length in LENGTHS:
            assert torch.equal(target[f"rows{length}"], torch.arange(length * 3.0).reshape(length, 3))
        assert torch.equal(target["wide"], torch.arange(11.0)[None])


# --- more ranks than the pool keeps ---------------------------------------------------------------------------------


def wide_state(fill=None):
    """One dimension over all ranks, two over a grid where the world has one, and FSDP over tensor parallelism."""
    world = torch.distributed.get_world_size()
    meshes = {"line": DeviceMesh("cpu", list(range(world)))}
    if world % 2 == 0:
        meshes["grid"] = DeviceMesh("cpu", torch.arange(world).reshape(2, world // 2))
    layouts = {
        "rows": ("line", [Shard(0)]),
        "columns": ("line", [Shard(1)]),
        "copies": ("line", [Replicate()]),
        "corner": ("grid", [Shard(0), Shard(1)]),
        "twice": ("grid", [_StridedShard(0, split_factor=world // 2), Shard(0)]),
        "mixed": ("grid", [Replicate(), Shard(1)]),
    }
    state = {}
    for index, (key, (mesh, placements)) in enumerate(layouts.items()):
        whole = torch.arange(13.0 * 11).reshape(13, 11) + 1000 * index
        if mesh not in meshes:
            mesh, placements = "line", placements[1:]
        state[key] = placed(whole if fill is None else torch.full_like(whole, fill), meshes[mesh], placements)
    return state


def wide(rank, folder, source, name):
    if name:
        ks.save(f"{folder}/{name}", wide_state())
    if source:
        target = wide_state(-1.0)
        report = ks.load(f"{folder}/{source}", into=target)
        for key, tensor in wide_state().items():
            assert torch.equal(target[key].to_local(), tensor.to_local()), (source, key)
        assert report.bytes_needed == sum(tensor.to_local().nbytes for tensor in target.values())
    # Whoever leaves while another still connects its groups fails it.
    torch.distributed.barrier()


def wide_jobs(rank, folder):
    wide_state()  # the first DTensor of a process imports a good deal: done here, the forked ranks need not
    alone(rank, run_wide_jobs, folder)


def run_wide_jobs(folder):
    run_job(folder / "a", 8, wide, str(folder), "", "eight")
    run_job(folder / "b", 5, wide, str(folder), "eight", "five")
    for world, source in ((7, "five"), (6, "eight"), (8, "eight"), (8, "five")):
        run_job(folder / f"{world}{source}", world, wide, str(folder), source, "")


@pytest.mark.case(45)
def test_up_to_eight_ranks(rank_pool, tmp_path):
    rank_pool(1)(wide_jobs, tmp_path)
    for name in ("eight", "five"):
        with ks.open(tmp_path / name) as checkpoint:
            for index, key in enumerate(checkpoint):
                assert torch.equal(checkpoint[key], torch.arange(13.0 * 11).reshape(13, 11) + 1000 * index), key
