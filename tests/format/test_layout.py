"""Layouts against brute force: what each rank holds, as sets of indices, for every kind of cut and mixtures of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.errors import CorruptError
from keepstep.format.box import Box
from keepstep.format.layout import Cut, Layout, Mesh, parts, rank_elements
from tests.helpers.layouts import held, layouts


@given(layouts(kinds=("S", "SS", "R", "O")))
def test_parts_are_what_the_definitions_say(made):
    layout, mesh, world = made
    for rank in range(world):
        found = parts(layout, [mesh], rank)
        wanted = held(layout, mesh, rank) if rank in mesh.members() else None
        local_shape = () if wanted is None else tuple(map(len, wanted))
        expected = {} if wanted is None else dict(_by_local_position(wanted))
        seen = {}
        for part in found:
            assert part.box.elements > 0
            assert part.box.inside(layout.shape)
            for steps in itertools.product(*map(range, part.box.sizes)):
                local = tuple(a + s for a, s in zip(part.local, steps, strict=True))
                index = tuple(o + s for o, s in zip(part.box.offsets, steps, strict=True))
                assert local not in seen, "two parts at one place of the local tensor"
                assert all(0 <= p < n for p, n in zip(local, local_shape, strict=True))
                seen[local] = index
        assert seen == expected
        assert [part.local for part in found] == sorted(part.local for part in found)


@given(layouts())
def test_stored_parts_hold_what_the_definitions_say_at_their_place_in_the_live_tensor(made):
    """With B, which takes a part of what a rank holds: ``local`` is the position in the live tensor, before that cut."""
    layout, mesh, _world = made
    live = Layout(layout.shape, 0, tuple(cut for cut in layout.cuts if cut.kind != "B"))
    for rank in mesh.members():
        whole, wanted = held(live, mesh, rank), held(layout, mesh, rank)
        expected = set() if wanted is None else set(itertools.product(*(map(int, dim) for dim in wanted)))
        seen = []
        for part in parts(layout, [mesh], rank):
            for steps in itertools.product(*map(range, part.box.sizes)):
                index = tuple(o + s for o, s in zip(part.box.offsets, steps, strict=True))
                assert tuple(int(dim[a + s]) for dim, a, s in zip(whole, part.local, steps, strict=True)) == index
                seen.append(index)
        assert len(seen) == len(set(seen))
        assert set(seen) == expected


@given(layouts())
def test_counting_for_all_ranks_at_once_agrees_with_each(made):
    layout, mesh, world = made
    counts = rank_elements(layout, [mesh], world)
    assert counts.tolist() == [sum(part.box.elements for part in parts(layout, [mesh], rank)) for rank in range(world)]


@given(layouts(kinds=("S", "SS", "B", "O")))
def test_without_replicas_every_element_is_held_once(made):
    layout, mesh, world = made
    count = np.zeros(layout.shape, int)
    for rank in range(world):
        for part in parts(layout, [mesh], rank):
            count[tuple(slice(o, o + s) for o, s in zip(part.box.offsets, part.box.sizes, strict=True))] += 1
    owners = math.prod(0 if cut.kind == "O" and cut.arg >= mesh.shape[cut.axis] else 1 for cut in layout.cuts)
    assert (count == owners).all()


def _by_local_position(wanted: list[np.ndarray]):
    for local in itertools.product(*(range(len(dim)) for dim in wanted)):
        yield local, tuple(int(dim[at]) for dim, at in zip(wanted, local, strict=True))


# --- what torch does -------------------------------------------------------------------------------------------------


def local_values(layout: Layout, mesh: Mesh, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The rank's local tensor along dimension 0, put together from its parts."""
    found = parts(layout, [mesh], rank)
    if not found:
        return whole[:0]
    length = max(part.local[0] + part.box.sizes[0] for part in found)
    local = torch.full((length, *whole.shape[1:]), -1)
    for part in found:
        (start, *_), (size, *_) = part.box.offsets, part.box.sizes
        local[part.local[0] : part.local[0] + size] = whole[start : start + size]
    return local


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_s_is_torchs_shard(ranks):
    for length in range(18):
        whole = torch.arange(length * 2).reshape(length, 2)
        split, _ = Shard(0)._split_tensor(whole, ranks, with_padding=False, contiguous=False)
        layout = Layout(tuple(whole.shape), 0, (Cut(0, "S", 0),))
        for rank, expected in enumerate(split):
            got = local_values(layout, Mesh((ranks,)), rank, whole)
            assert torch.equal(got, expected.reshape(-1, 2)), (length, rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_ss_is_torchs_strided_shard(ranks, factor):
    # Until 2.9 torch cut a length that does not divide otherwise than FSDP over tensor parallelism lays it out: first by
    # the outer dimension, then by the inner one.
    first, *_ = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2, with_padding=False)[0]
    step = 1 if first.tolist() == [0, 1, 3] else ranks * factor
    for length in range(0, 18, step):
        whole = torch.arange(length * 2).reshape(length, 2)
        placement = _StridedShard(0, split_factor=factor)
        split, _ = placement._split_tensor(whole, ranks, with_padding=False, contiguous=False)
        layout = Layout(tuple(whole.shape), 0, (Cut(0, "SS", 0, factor),))
        for rank, expected in enumerate(split):
            got = local_values(layout, Mesh((ranks,)), rank, whole)
            assert torch.equal(got, expected.reshape(-1, 2)), (length, rank)


# --- meshes, boxes, edges --------------------------------------------------------------------------------------------


def test_a_mesh_is_compact_where_its_ranks_follow_each_other():
    assert Mesh.of((2, 2), (4, 5, 6, 7)) == Mesh((2, 2), 4)
    assert Mesh.of((2, 2), (0, 2, 1, 3)).ranks == (0, 2, 1, 3)
    scattered = Mesh.of((2, 2), (0, 2, 1, 3))
    assert [scattered.coordinate(rank) for rank in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), None]
    assert Mesh((2, 2), 4).coordinate(3) is None
    assert Mesh((2, 2), 4).coordinate(6) == (1, 0)
    assert Mesh((2, 3)).size == 6


def test_a_layout_of_boxes_lists_what_each_rank_holds():
    boxes = ((1, Box((0,), (3,))), (0, Box((3,), (2,))), (1, Box((5,), (1,))), (2, Box((6,), (0,))))
    layout = Layout((6,), 0, (), boxes)
    assert [part.box for part in parts(layout, [], 1)] == [Box((0,), (3,)), Box((5,), (1,))]
    assert parts(layout, [], 2) == []
    assert rank_elements(layout, [], 4).tolist() == [2, 4, 0, 0]


def test_scalars_and_empty_tensors():
    mesh = Mesh((2,))
    scalar = Layout((), 0, (Cut(0, "O", 0, 1),))
    assert parts(scalar, [mesh], 0) == []
    assert [part.box for part in parts(scalar, [mesh], 1)] == [Box((), ())]
    assert rank_elements(scalar, [mesh], 2).tolist() == [0, 1]
    assert parts(Layout((0, 3), 0, (Cut(0, "S", 1),)), [mesh], 0) == []
    assert parts(Layout((0, 3)), [Mesh((1,))], 0) == []


def test_an_unknown_kind_of_cut_is_an_error():
    with pytest.raises(CorruptError, match="unknown kind of cut 'X'"):
        parts(Layout((4,), 0, (Cut(0, "X"),)), [Mesh((2,))], 0)
