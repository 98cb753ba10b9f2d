"""Shards by hand, tensors of one element, values that differ between ranks, parts that only some ranks have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import keepstep as ks
from keepstep.errors import CheckpointError, MismatchError, StepNotFoundError
from tests.helpers.jobs import alone, run_job
from tests.helpers.ranks import run_ranks
from tests.resharding.models import full
from tests.resharding.reference import chunk, placed

# --- shards by hand -------------------------------------------------------------------------------------------------


class Shaped(torch.Tensor):
    """A local tensor that says by attributes which boxes of a global tensor it holds, and where in itself they lie."""


def shaped(local, shape, boxes):
    """``boxes``: (offsets in the global tensor, offsets in the local one, sizes)."""
    made = local.as_subclass(Shaped)
    made.global_shape = torch.Size(shape)
    made.global_offsets = [box[0] for box in boxes]
    made.local_offsets = [box[1] for box in boxes]
    made.local_sizes = [box[2] for box in boxes]
    return made


def flat_state(rank, world, fill=None):
    """Ten elements in a buffer padded to a multiple of the world; and eight rows dealt to the ranks one by one."""
    size = -(-10 // world)
    low, high = min(rank * size, 10), min((rank + 1) * size, 10)
    buffer = torch.full((size,), 99.0)
    buffer[: high - low] = torch.arange(low, high) if fill is None else fill
    rows = torch.arange(24.0).reshape(8, 3)[rank::world].contiguous()
    boxes = [((row, 0), (i, 0), (1, 3)) for i, row in enumerate(range(rank, 8, world))]
    dealt = shaped(rows if fill is None else torch.full_like(rows, fill), (8, 3), boxes)
    padded = shaped(buffer.clone(), (10,), [((low,), (0,), (high - low,))])
    return buffer, {
        "flat": ks.sharded(buffer[: high - low], global_shape=(10,), offsets=(low,)),
        "padded": padded,
        "dealt": dealt,
    }


def save_flat(rank, folder):
    ks.save(folder, flat_state(rank, torch.distributed.get_world_size())[1])


def load_flat(rank, folder):
    world = torch.distributed.get_world_size()
    buffer, target = flat_state(rank, world, fill=-1.0)
    ks.load(folder, into=target)
    expected, state = flat_state(rank, world)
    assert torch.equal(buffer, expected)
    assert torch.equal(target["padded"].as_subclass(torch.Tensor), expected)
    assert torch.equal(target["dealt"].as_subclass(torch.Tensor), state["dealt"].as_subclass(torch.Tensor))


def flat_jobs(folder):
    run_job(folder / "save", 4, save_flat, str(folder / "ck"))
    for world in (3, 4, 5):
        run_job(folder / f"load{world}", world, load_flat, str(folder / "ck"))


@pytest.mark.case(118)
def test_padding_is_not_part_of_the_checkpoint(rank_pool, tmp_path):
    rank_pool(1)(alone, flat_jobs, tmp_path)
    with ks.open(tmp_path / "ck") as checkpoint:
        assert torch.equal(checkpoint["flat"], torch.arange(10.0))
        assert torch.equal(checkpoint["padded"], torch.arange(10.0))
        assert torch.equal(checkpoint["dealt"], torch.arange(24.0).reshape(8, 3))


def bad_boxes(rank, folder):
    hole = {"good": torch.ones(2), "x": ks.sharded(torch.ones(2), global_shape=(6,), offsets=(4 * rank,))}
    overlap = {"x": ks.sharded(torch.ones(4), global_shape=(6,), offsets=(2 * rank,))}
    said = []
    for name, state in (("hole", hole), ("overlap", overlap)):
        with pytest.raises(CheckpointError, match="'x'") as caught:
            ks.save(f"{folder}/{name}", state)
        said.append(str(caught.value))
        with pytest.raises(StepNotFoundError):
            ks.open(f"{folder}/{name}")
    return said


def test_shards_that_leave_a_hole_or_overlap_are_refused(rank_pool, tmp_path):
    for said in rank_pool(2)(bad_boxes, str(tmp_path)):
        assert "4" in said[0]
        assert "6" in said[0]


# --- one element, no dimension --------------------------------------------------------------------------------------


class Scalars(nn.Module):
    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        scalar = torch.tensor(0.5)
        if mesh is not None:
            fully_shard(self.line, mesh=mesh)
            scalar = DTensor.from_local(scalar, mesh, [Replicate()], run_check=False)
        self.scalar = nn.Parameter(scalar)
        self.row = nn.Parameter(torch.ones(1) if mesh is None else placed(torch.ones(1), mesh, [Shard(0)]))


def stepped(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + i + step)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def scalar_state(state):
    values = {name: full(p) for name, p in state["model"].named_parameters()}
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            values[f"{name}/{key}"] = full(value)
    return values


def scalars(rank, folder):
    mesh = DeviceMesh("cpu", [0, 1])
    state = stepped(Scalars(mesh), 2)
    saved = scalar_state(state)
    ks.save(folder, state)
    fresh = stepped(Scalars(mesh), 0)
    ks.load(folder, into=fresh)
    loaded = scalar_state(fresh)
    assert loaded.keys() == saved.keys()
    assert all(loaded[key].shape == saved[key].shape and torch.equal(loaded[key], saved[key]) for key in saved)
    return saved


@pytest.mark.case(41)
def test_one_element_and_no_dimension_under_sharding(rank_pool, tmp_path):
    saved = rank_pool(2)(scalars, str(tmp_path / "ck"))[0]
    assert saved["scalar"].shape == saved["scalar/exp_avg"].shape == ()
    assert saved["row"].shape == saved["line.bias"].shape == (1,)
    assert saved["line.weight/exp_avg_sq"].shape == (1, 1)
    state = stepped(Scalars(), 0)
    ks.load(tmp_path / "ck", into=state)
    assert {k: v.tolist() for k, v in scalar_state(state).items()} == {k: v.tolist() for k, v in saved.items()}
    assert all(value.shape == saved[key].shape for key, value in scalar_state(state).items())


# --- values that differ between ranks -------------------------------------------------------------------------------


def differing(rank, folder):
    states = {
        "w": {"deep": {"w": torch.tensor([0.0, 1.0]) + 2 * rank, "same": torch.ones(3)}},
        "epoch": {"epoch": rank, "name": "same"},
        "table": {"table": {"a": 1, "b": {"c": rank}}},
        "more": {"more": {"a": 1} if rank else {"a": 1, "b": 2}},
        "items": {"items": list(range(rank + 1))},
        "tensors": {"tensors": [torch.ones(2)] * (rank + 1)},
        "shape": {"shape": torch.zeros(2 + rank)},
        "dtype": {"dtype": torch.zeros(2, dtype=torch.int32 if rank else torch.float32)},
        "kind": {"kind": True if rank else 1},
    }
    for key, state in states.items():
        with pytest.raises(MismatchError, match=rf"\b{key}\b") as caught:
            ks.save(f"{folder}/{key}", state)
        assert "per_rank" in str(caught.value)
        assert "same" not in str(caught.value)
        assert any(key in line for line in caught.value.mismatches), (key, caught.value.mismatches)
        with pytest.raises(StepNotFoundError):
            ks.open(f"{folder}/{key}")
        ks.save(f"{folder}/own-{key}", {"own": ks.per_rank(state)})
        target = {"own": ks.per_rank({})}
        ks.load(f"{folder}/own-{key}", into=target)
        got, want = target["own"].value, state
        assert repr(got) == repr(want)
        assert type(got.get("kind")) is type(want.get("kind"))


@pytest.mark.case(42)
@pytest.mark.case(119)
def test_what_differs_between_ranks_is_declared_or_refused(rank_pool, tmp_path):
    rank_pool(2)(differing, str(tmp_path))


def buffers(rank, folder):
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    model = nn.Linear(3, 6)
    model.register_buffer("count", torch.tensor([7]))
    model.register_buffer("table", torch.arange(1152.0))
    with torch.no_grad():
        model.weight.copy_(torch.arange(18.0).reshape(6, 3))
    fully_shard(model, mesh=mesh)
    ks.save(folder, {"model": model})


@pytest.mark.case(43)
def test_replicated_buffers_keep_their_shape(rank_pool, tmp_path):
    rank_pool(4)(buffers, str(tmp_path / "ck"))
    with ks.open(tmp_path / "ck") as checkpoint:
        shapes = {key: tuple(checkpoint[key].shape) for key in checkpoint}
        assert shapes == {"model/weight": (6, 3), "model/bias": (6,), "model/count": (1,), "model/table": (1152,)}
        assert checkpoint["model/count"].tolist() == [7]
        assert torch.equal(checkpoint["model/table"], torch.arange(1152.0))
        assert torch.equal(checkpoint["model/weight"], torch.arange(18.0).reshape(6, 3))


@pytest.mark.case(47)
def test_a_view_saves_only_itself(tmp_path):
    big = torch.zeros(10_000_000)
    big[:1000] = torch.arange(1000.0)
    flat = torch.arange(60_000.0)
    views = [flat[i * 20_000 : (i + 1) * 20_000].view(100, 200) for i in range(3)]
    ks.save(tmp_path / "slice", {"x": big[:1000]})
    ks.save(tmp_path / "views", {"views": views})
    sizes = {n: sum(f.stat().st_size for f in (tmp_path / n).rglob("*") if f.is_file()) for n in ("slice", "views")}
    assert sizes["slice"] < 100_000
    assert 240_000 < sizes["views"] < 270_000
    target = {"x": torch.zeros(1000)}
    ks.load(tmp_path / "slice", into=target)
    assert torch.equal(target["x"], torch.arange(1000.0))


# --- parts that only some ranks have --------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some layers of a model of four; the first and the last stage share the embedding, as tied models do."""

    def __init__(self, layers, mesh=None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in layers})
        if {0, 3} & set(layers):
            self.embedding = nn.Parameter(torch.zeros(5, 3))
        with torch.no_grad():
            for i, layer in self.layers.items():
                layer.weight.copy_(torch.arange(9.0).reshape(3, 3) + 10 * int(i))
                layer.bias.fill_(int(i))
        if mesh is not None:
            fully_shard(self, mesh=mesh)


def stage_state(layers, mesh=None, steps=0):
    state = stepped(Stage(layers, mesh), steps)
    # Every parameter gets what its name says, so that it does not matter which stage made it.
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            if key != "step":
                local = value.to_local() if isinstance(value, DTensor) else value
                local.fill_(sum(map(ord, name + key)) / 8)
    return {"epoch": 5 if steps else 0, **state}


def check_stage(state, layers):
    assert state["epoch"] == 5
    wanted = Stage(layers)
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(full(parameter), dict(wanted.named_parameters())[name]), name
        moments = state["optimizer"].state[parameter]
        assert moments["step"].item() == 1
        assert torch.all(full(moments["exp_avg"]) == sum(map(ord, name + "exp_avg")) / 8), name


def blank(state):
    with torch.no_grad():
        for parameter in state["model"].parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(-1.0)
    return state


def pipeline(rank, folder, split, source, save):
    """``split``: for every rank its layers and the ranks of its stage."""
    meshes = {group: DeviceMesh("cpu", list(group)) for group in dict.fromkeys(group for _, group in split)}
    layers, group = split[rank]
    mesh = meshes[group] if len(group) > 1 else None
    if save:
        state = stage_state(layers, mesh, steps=1)
        with torch.no_grad():
            if hasattr(state["model"], "embedding"):
                (state["model"].embedding.to_local() if mesh else state["model"].embedding).fill_(0.0)
            for name, parameter in Stage(layers).named_parameters():
                live = dict(state["model"].named_parameters())[name]
                local = chunk(parameter, 0, len(group))[group.index(rank)]
                (live.to_local() if mesh else live).copy_(local)
        ks.save(f"{folder}/{save}", state)
    if source:
        state = blank(stage_state(layers, mesh))
        report = ks.load(f"{folder}/{source}", into=state)
        check_stage(state, layers)
        assert not report.components["model"].missing
    return True


@pytest.mark.ranks
def test_stages_of_a_pipeline_load_in_other_splits(tmp_path):
    folder = str(tmp_path)
    two_by_two = [((0, 1), (0, 1)), ((0, 1), (0, 1)), ((2, 3), (2, 3)), ((2, 3), (2, 3))]
    # Processes of its own: in one that had other groups before, torch may gather over a group of an earlier test.
    run_ranks(4, pipeline, folder, two_by_two, "four", "four")
    run_ranks(2, pipeline, folder, [((0,), (0,)), ((1, 2, 3), (1,))], "four", "two")
    run_ranks(4, pipeline, folder, two_by_two, "two", "")
    for source in ("four", "two"):
        state = blank(stage_state((0, 1, 2, 3)))
        ks.load(tmp_path / source, into=state)
        check_stage(state, (0, 1, 2, 3))


def lacking(rank, folder):
    """A key that no rank has a place for is an error on every rank, although each of them lacks some."""
    ks.save(folder, {"model": Stage((0, 1) if rank == 0 else (2, 3))})
    target = {"model": Stage((0,) if rank == 0 else (2, 3))}
    before = target["model"].layers["0" if rank == 0 else "2"].weight.clone()
    with torch.no_grad():
        for parameter in target["model"].parameters():
            parameter.add_(1)
    with pytest.raises(MismatchError) as caught:
        ks.load(folder, into=target)
    assert "layers.1.weight" in str(caught.value)
    assert "layers.1.bias" in str(caught.value)
    assert "layers.2" not in str(caught.value)
    assert "layers.0" not in str(caught.value)
    assert torch.equal(target["model"].layers["0" if rank == 0 else "2"].weight, before + 1)


def test_a_key_that_no_stage_has_is_still_an_error(rank_pool, tmp_path):
    rank_pool(2)(lacking, str(tmp_path / "ck"))
