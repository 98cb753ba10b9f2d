"""Who writes which bytes: every element once, in balance, and the same bytes that receipts are later checked against."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import keepstep as ks
from keepstep.errors import CorruptError, MismatchError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec
from keepstep.format.manifest import STATE_FOLDER
from keepstep.plan import save_plan
from keepstep.plan.save_plan import (
    Extra,
    assign_writers,
    expected_bytes,
    merge_structures,
    rank_files,
)
from tests.helpers.layouts import held, layouts

MIB = 1 << 20
REPLICATED = (Cut(0, "R"),)
SHARDED = (Cut(0, "S", 0),)


def structure_of(mesh: Mesh | list[Mesh], *tensors) -> Structure:
    """From (key, dtype, shape, cuts) or (key, dtype, shape, cuts, mesh index)."""
    found: dict[Layout, int] = {}
    specs = []
    for key, dtype, shape, cuts, *where in tensors:
        layout = Layout(shape, where[0] if where else 0, cuts)
        specs.append(TensorSpec(key, dtype, found.setdefault(layout, len(found)), key.split("/")[0]))
    return Structure(tuple(mesh) if isinstance(mesh, list) else (mesh,), tuple(found), tuple(specs))


def written(stored: Structure, world: int, **kwargs) -> list[int]:
    """Bytes of tensor data by rank."""
    kwargs = {"live_index": None, "extras": ()} | kwargs
    return [sum(plan.data_bytes for plan in rank_files(stored, rank, **kwargs)) for rank in range(world)]


def prove_written_once(live: Structure, stored: Structure, world: int) -> None:
    """Every element of every tensor in exactly one slot of one rank, taken from where it lies in the rank's tensor."""
    shapes = {spec.key: live.layouts[spec.layout].shape for spec in live.tensors}
    counts = {key: np.zeros(shape, int) for key, shape in shapes.items()}
    expected = expected_bytes(stored, world)
    for rank in range(world):
        plans = rank_files(stored, rank, live_index=None, extras=())
        assert [plan.folder for plan in plans].count(STATE_FOLDER) <= 1
        for plan in plans:
            assert plan.data_bytes == expected[plan.folder][rank]
            position = 0
            names = [slot.entry.name for slot in plan.slots]
            assert len(names) == len(set(names))
            for slot in plan.slots:
                entry, spec = slot.entry, live.tensors[slot.tensor]
                assert (entry.key, entry.dtype, entry.shape) == (spec.key, spec.dtype, shapes[spec.key])
                assert entry.start == position
                assert entry.start % ITEM_BYTES[entry.dtype] == 0
                assert entry.stop - entry.start == entry.box.elements * ITEM_BYTES[entry.dtype]
                position = entry.stop
                region = tuple(slice(o, o + n) for o, n in zip(entry.box.offsets, entry.box.sizes, strict=True))
                counts[entry.key][region] += 1
                layout = live.layouts[spec.layout]
                if layout.boxes is None:
                    here = held(layout, live.meshes[layout.mesh], rank)
                    for indices, at, offset, size in zip(
                        here, slot.local, entry.box.offsets, entry.box.sizes, strict=True
                    ):
                        assert indices[at : at + size].tolist() == list(range(offset, offset + size))
            assert position == plan.data_bytes
        assert {plan.folder for plan in plans} == {folder for folder, counted in expected.items() if counted[rank]}
    for key, count in counts.items():
        assert (count == 1).all(), key


@st.composite
def structures(draw):
    """Several tensors on one mesh: sharded, strided, replicated, and mixtures."""
    first, mesh, world = draw(layouts(kinds=("S", "SS", "R")))
    found, specs = {first: 0}, []
    for index in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        cuts = []
        for axis in range(len(mesh.shape)):
            kind = draw(st.sampled_from(("S", "SS", "R") if shape else ("R",)))
            dim = draw(st.integers(0, max(len(shape) - 1, 0))) if kind != "R" else 0
            cuts.append(Cut(axis, kind, dim, draw(st.integers(1, 3)) if kind == "SS" else 0))
        layout = Layout(shape, 0, tuple(cuts))
        rule = draw(st.sampled_from(["same", "same", "first"]))
        folder = draw(st.sampled_from(["a", "b", "state"]))
        dtype = draw(st.sampled_from(["uint8", "float32", "complex128", "bfloat16"]))
        specs.append(TensorSpec(f"{folder}/{index}", dtype, found.setdefault(layout, len(found)), folder, rule))
    return Structure((mesh,), tuple(found), tuple(specs)), world


@pytest.mark.slow
@given(structures(), st.sampled_from([(1, 0), (8, 4), (1 << 18, 1 << 10), (32, 64)]))
def test_every_element_is_written_once(made, limits):
    """With any sizes above which tensors are split among replicas or count as more than tiny."""
    live, world = made
    with mock.patch.multiple(save_plan, SPLIT_BYTES=limits[0], TINY_BYTES=limits[1]):
        stored = assign_writers(live, world)
        assert assign_writers(live, world) == stored  # every rank plans by itself
    assert [(spec.key, spec.dtype) for spec in stored.tensors] == [(spec.key, spec.dtype) for spec in live.tensors]
    assert not any(cut.kind == "R" for layout in stored.layouts for cut in layout.cuts)
    prove_written_once(live, stored, world)


# --- balance ---------------------------------------------------------------------------------------------------------

SIZES_MIB = {
    "one of each": ([400], [400]),
    "a hundred of each": ([4] * 100, [4] * 100),
    "a few large replicas": ([150, 130, 120], [100] * 4),
    "many small replicas": ([0.25] * 1600, [400]),
    "a mixture": ([128, 64, 64, *[1] * 100, *[0.125] * 352], [*[8] * 40, *[1] * 80]),
    "nothing sharded": ([400, *[0.1] * 90], []),
}


@pytest.mark.case(109)
@pytest.mark.parametrize("name", SIZES_MIB)
def test_what_ranks_write_is_within_a_fifth_of_each_other(name):
    """400 MB that all four ranks hold alike and 400 MB in shards, cut up in several ways."""
    replicated, sharded = SIZES_MIB[name]
    live = structure_of(
        Mesh((4,)),
        *(
            (f"model/r{i}", "float32", (max(int(size * MIB) // 4096, 1), 1024), REPLICATED)
            for i, size in enumerate(replicated)
        ),
        *((f"optimizer/s{i}", "float32", (int(size * MIB) // 4096, 1024), SHARDED) for i, size in enumerate(sharded)),
    )
    counts = written(assign_writers(live, 4), 4)
    assert sum(counts) == sum(math.prod(live.layouts[s.layout].shape) * 4 for s in live.tensors)
    assert min(counts) >= 0.8 * max(counts), counts


def test_replicas_that_cannot_be_split_go_to_whoever_has_least():
    """Rank 0 has more shards than others: what all hold goes to the others."""
    boxes = ((0, Box((0,), (3 * MIB,))), (1, Box((3 * MIB,), (MIB,))))
    live = Structure(
        (Mesh((2,)),),
        (Layout((4 * MIB,), 0, (), boxes), Layout((1000,), 0, REPLICATED)),
        (
            TensorSpec("a/sharded", "uint8", 0, "a"),
            *(TensorSpec(f"a/{i}", "float32", 1, "a") for i in range(250)),
        ),
    )
    assert written(assign_writers(live, 2), 2) == [3 * MIB, MIB + 1_000_000]


def test_a_grid_of_replicas_and_shards_is_balanced_too():
    """Hybrid sharding: along one dimension of the mesh everybody has the same."""
    hybrid = (Cut(0, "R"), Cut(1, "S", 0))
    live = structure_of(
        Mesh((2, 4)),
        *((f"m/{i}", "float32", (1024, 64 + i), hybrid) for i in range(40)),
        *((f"m/large{i}", "float32", (4096, 1024), hybrid) for i in range(4)),
        *((f"m/norm{i}", "float32", (4096,), (Cut(0, "R"), Cut(1, "R"))) for i in range(64)),
    )
    counts = written(assign_writers(live, 8), 8)
    assert min(counts) >= 0.8 * max(counts), counts


def save_balanced(rank, folder):
    mesh = DeviceMesh("cpu", list(range(4)))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(256, (2 * MIB,), dtype=torch.uint8, generator=generator)
    saved = ks.save(
        folder,
        {
            "model": {f"r{i}": whole[: MIB // 2 + i] for i in range(4)},
            "optimizer": {"s": DTensor.from_local(whole[: MIB // 2], mesh, [Shard(0)])},
        },
    )
    return saved.bytes_written


@pytest.mark.case(109)
def test_four_real_ranks_write_about_the_same(rank_pool, tmp_path):
    counts = rank_pool(4)(save_balanced, str(tmp_path))
    assert min(counts) >= 0.8 * max(counts), counts
    assert sum(counts) == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))


# --- shards that follow no mesh --------------------------------------------------------------------------------------


def boxes_structure(*boxes, key="m/w", shape=(10,)) -> Structure:
    return Structure((Mesh((4,)),), (Layout(shape, 0, (), tuple(boxes)),), (TensorSpec(key, "float32", 0, "m"),))


def test_boxes_are_written_by_those_who_hold_them():
    live = boxes_structure((0, Box((0,), (4,))), (2, Box((4,), (1,))), (0, Box((5,), (5,))), (1, Box((0,), (0,))))
    stored = assign_writers(live, 4)
    prove_written_once(live, stored, 4)
    assert written(stored, 4) == [36, 0, 4, 0]
    pieces = [(slot.piece, slot.local) for slot in rank_files(stored, 0, live_index=None, extras=())[0].slots]
    assert pieces == [(0, (0,)), (1, (0,))]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            [(0, Box((0,), (4,))), (1, Box((5,), (5,)))],
            r"'m/w': the pieces cover 9 of 10 elements; have \[0:4\], \[5:10\]",
        ),
        ([(0, Box((0,), (6,))), (1, Box((5,), (5,)))], r"'m/w': pieces \[0:6\] and \[5:10\] overlap"),
        (
            [(0, Box((0,), (6,))), (1, Box((6,), (5,)))],
            r"'m/w': piece \[6:11\] lies outside the tensor of shape \[10\]",
        ),
        ([], r"'m/w': the pieces cover 0 of 10"),
    ],
)
def test_boxes_with_a_hole_or_an_overlap_are_refused(boxes, message):
    with pytest.raises(CorruptError, match=message):
        assign_writers(boxes_structure(*boxes), 4)


# --- ranks that see different things ---------------------------------------------------------------------------------


def test_stages_of_a_pipeline_are_put_together():
    """Each stage has tensors of its own, replicated inside the stage; some are the same on both."""
    world = Mesh((4,))
    first = structure_of(world, ("m/0", "float32", (8, 3), REPLICATED), ("m/norm", "float32", (5,), REPLICATED))
    second = structure_of(world, ("m/norm", "float32", (5,), REPLICATED), ("m/1", "float64", (6,), REPLICATED))
    merged = merge_structures([((0, 1), first), ((2, 3), second)], 4)
    stored = assign_writers(merged, 4)
    assert [spec.key for spec in stored.tensors] == ["m/0", "m/norm", "m/1"]
    holders = {spec.key: merged.meshes[merged.layouts[spec.layout].mesh].members() for spec in merged.tensors}
    assert holders == {"m/0": (0, 1), "m/norm": (0, 1, 2, 3), "m/1": (2, 3)}
    prove_written_once(merged, stored, 4)
    index = {"m/norm": 0, "m/1": 1}
    slots = [slot for plan in rank_files(stored, 2, live_index=index, extras=()) for slot in plan.slots]
    assert {slot.entry.key: slot.tensor for slot in slots}.items() <= index.items()


def test_a_group_with_everything_in_common_is_taken_as_it_is():
    live = structure_of(Mesh((2,)), ("m/0", "float32", (8,), SHARDED))
    assert merge_structures([((0, 1), live)], 2) is live


def test_one_key_on_several_meshes_is_written_once_and_the_meshes_take_turns():
    """Data parallel groups that each shard the whole model over their own ranks."""
    left = structure_of(Mesh((2,), 0), *((f"m/{i}", "float32", (8,), SHARDED) for i in range(6)))
    right = structure_of(Mesh((2,), 2), *((f"m/{i}", "float32", (8,), SHARDED) for i in range(6)))
    merged = merge_structures([((0, 1), left), ((2, 3), right)], 4)
    stored = assign_writers(merged, 4)
    prove_written_once(merged, stored, 4)
    assert written(stored, 4) == [48, 48, 48, 48]


def test_a_tensor_that_some_hold_whole_and_others_in_shards_is_written_once():
    plain = structure_of(Mesh((4,)), ("m/w", "float32", (9,), REPLICATED))
    shards = structure_of(Mesh((2,), 2), ("m/w", "float32", (9,), SHARDED))
    for seen in ([((0, 1), plain), ((2, 3), shards)], [((2, 3), shards), ((0, 1), plain)]):
        merged = merge_structures(seen, 4)
        prove_written_once(merged, assign_writers(merged, 4), 4)


def test_boxes_of_several_groups_are_joined_and_what_two_hold_is_written_by_the_first():
    def seen_by(rank, *boxes):
        return (rank,), boxes_structure(*((rank, box) for box in boxes))

    low, high = Box((0,), (4,)), Box((4,), (6,))
    merged = merge_structures([seen_by(0, low), seen_by(1, high), seen_by(2, low), seen_by(3)], 4)
    stored = assign_writers(merged, 4)
    assert written(stored, 4) == [16, 24, 0, 0]
    with pytest.raises(CorruptError, match=r"'m/w': the pieces cover 4 of 10"):
        assign_writers(merge_structures([seen_by(0, low), seen_by(1, low)], 2), 2)


def test_every_disagreement_is_listed_with_its_ranks():
    world = Mesh((3,))
    tensors = [(f"m/{i}", "float32", (4, i + 1), REPLICATED) for i in range(30)]
    changed = [
        (key, "float16" if i % 2 else dtype, shape if i % 2 else (5, 1), cuts)
        for i, (key, dtype, shape, cuts) in enumerate(tensors)
    ]
    changed[29] = tensors[29]
    with pytest.raises(MismatchError) as caught:
        merge_structures([((0, 2), structure_of(world, *tensors)), ((1,), structure_of(world, *changed))], 3)
    assert len(caught.value.mismatches) == 29
    assert "m/0: rank 0 has float32 [4, 1], rank 1 has float32 [5, 1]" in caught.value.mismatches[0]
    assert "m/1: rank 0 has float32 [4, 2], rank 1 has float16 [4, 2]" in caught.value.mismatches[1]
    assert "and 9 more" in str(caught.value)
    mixed = [
        ((0,), boxes_structure((0, Box((0,), (10,))))),
        ((1,), structure_of(world, ("m/w", "float32", (10,), REPLICATED))),
    ]
    with pytest.raises(MismatchError, match="m/w: rank 0 and rank 1 describe its shards in different ways"):
        merge_structures(mixed, 2)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_belongs_to_a_rank_alone_goes_to_its_state_file():
    live = structure_of(
        Mesh((1,)), ("m/w", "int8", (3,), ()), ("m/d", "float64", (2,), ()), ("state/x", "int16", (1,), ())
    )
    extras = (Extra("~tree", "uint8", (5,)), Extra("rng/mine", "float32", (2, 2)))
    plans = rank_files(live, 0, live_index=None, extras=extras)
    assert [(plan.folder, plan.data_bytes) for plan in plans] == [("m", 19), ("state", 23)]
    assert [slot.entry.name for slot in plans[0].slots] == ["m/d", "m/w"]
    assert [(slot.entry.name, slot.tensor) for slot in plans[1].slots] == [
        ("rng/mine", -1),
        ("state/x", 2),
        ("~tree", -1),
    ]
    assert rank_files(live, 1, live_index=None, extras=()) == ()


def test_listed_boxes_that_several_ranks_hold_are_shared_out_among_them():
    box = [Box((at, 0), (2, 3)) for at in (0, 2)]
    seen = []
    for ranks in ((0,), (1,)):
        listed = tuple((ranks[0], each) for each in box)
        specs = tuple(TensorSpec(key, "float32", 0, "model") for key in "abc")
        seen.append((ranks, Structure((Mesh((2,)),), (Layout((4, 3), 0, (), listed),), specs)))
    stored = assign_writers(merge_structures(seen, 2), 2)
    assert expected_bytes(stored, 2)["model"].tolist() == [72, 72]
