"""Which rank reads what for whom: every rank comes to the same, every needed block is read once, by one that needs it."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.format.box import Box
from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec, parts
from keepstep.plan.load_plan import Read
from keepstep.plan.share_plan import Extent, Needs, Placed, Team, clip, make_teams, rounds, segments

BLOCK = 16
WORLD = 5

ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 2**WORLD - 1)).map(
        lambda drawn: (drawn[0] * BLOCK, (drawn[0] + drawn[1]) * BLOCK, drawn[2])
    ),
    max_size=8,
)


@settings(max_examples=30)
@given(ranges)
def test_segments_say_of_each_byte_who_needs_it(found):
    needed = Counter()
    for start, stop, ranks in found:
        for at in range(start, stop, BLOCK):
            needed[at] |= ranks
    cut = segments(found)
    assert {at: ranks for start, stop, ranks in cut for at in range(start, stop, BLOCK)} == +needed
    for before, after in pairwise(cut):
        assert before[1] <= after[0]
        assert before[1] < after[0] or before[2] != after[2], "neighbours that need not be two"


@settings(max_examples=30)
@given(st.lists(ranges, min_size=1, max_size=3), st.integers(0, BLOCK - 1))
def test_every_block_is_read_once_for_all_that_need_it(files, short):
    # The last block of a file may be shorter than the others.
    found = [
        [(start, stop - short * (start + BLOCK < stop == cut[-1][1]), ranks) for start, stop, ranks in cut]
        for cut in map(segments, files)
    ]
    blocks = [BLOCK] * len(files)
    by_rank = [make_teams(found, blocks, rank) for rank in range(WORLD)]
    for rank, teams in enumerate(by_rank):
        orders = [team.ranks for team in teams]
        assert len(set(orders)) == len(orders)
        for other, theirs in enumerate(by_rank):
            # Both go through the teams that they have in common in one order, and mean the same by them.
            assert [t for t in teams if other in t.ranks] == [t for t in theirs if rank in t.ranks]
    read = Counter()
    for team in {team.ranks: team for teams in by_rank for team in teams}.values():
        mask = sum(1 << rank for rank in team.ranks)
        sizes = [sum(-(-(e.stop - e.start) // BLOCK) for e in share) for share in team.shares]
        assert max(sizes) - min(sizes) <= 1, f"shares of {sizes} blocks"
        for extent in chain.from_iterable(team.shares):
            assert extent.start % BLOCK == 0
            for byte in range(extent.start, extent.stop):
                read[extent.file, byte, mask] += 1
    assert read == Counter(
        (number, byte, ranks) for number, cut in enumerate(found) for a, b, ranks in cut for byte in range(a, b)
    )


@settings(max_examples=30)
@given(st.lists(ranges, min_size=1, max_size=2), st.integers(1, 12))
def test_rounds_are_small_and_complete(files, blocks_each):
    found, blocks = [segments(ranges) for ranges in files], [BLOCK] * len(files)
    for team in make_teams(found, blocks, rank=0):
        most = blocks_each * BLOCK * len(team.ranks)
        given_out = list(rounds(team, most, blocks))
        for index, share in enumerate(team.shares):
            portions = [portions[index] for portions in given_out]
            assert all(sum(e.stop - e.start for e in portion) <= most // len(team.ranks) for portion in portions)
            assert merged(chain.from_iterable(portions)) == merged(share)


def merged(extents):
    """What they cover, in their order."""
    found = []
    for extent in extents:
        if found and found[-1].file == extent.file and found[-1].stop == extent.start:
            found[-1] = Extent(extent.file, found[-1].start, extent.stop)
        else:
            found.append(extent)
    return found


def test_what_cannot_be_cut_is_given_whole():
    team = Team((0, 1), ((Extent(0, 0, 100), Extent(1, 0, 10), Extent(2, 0, 10)), ()))
    assert list(rounds(team, 60, [0, 0, 0])) == [
        ((Extent(0, 0, 100),), ()),
        ((Extent(1, 0, 10), Extent(2, 0, 10)), ()),
    ]


@settings(max_examples=30)
@given(st.data())
def test_a_clipped_read_fills_what_lies_between(data):
    """Each element of a read comes from exactly one portion, wherever the portions are cut."""
    item = 4
    if data.draw(st.booleans()):
        outer = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        sizes = tuple(data.draw(st.integers(1, size)) for size in outer)
        strides = tuple(int(np.prod(outer[d + 1 :])) for d in range(len(outer)))
        span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        read = Read(40, 40 + span * item, 0, -1, Box((3,) * len(sizes), sizes), strides)
    else:
        span = data.draw(st.integers(1, 30))
        read = Read(40, 40 + span * item, 0, 100)
    edges = sorted({0, 400, *data.draw(st.lists(st.integers(5, 60).map(lambda n: n * item), max_size=4))})
    filled = Counter()
    for start, stop in pairwise(edges):
        for part in clip(read, start, stop, item):
            assert start <= part.start < part.stop <= stop
            if part.box is None:
                filled.update((part.start + n, part.at + n) for n in range(0, part.stop - part.start, item))
                continue
            for index in np.ndindex(part.box.sizes):
                at = part.start + item * sum(i * step for i, step in zip(index, part.strides, strict=True))
                assert at + item <= part.stop
                filled[at, tuple(o + i for o, i in zip(part.box.offsets, index, strict=True))] += 1
    assert set(filled.values()) == {1}
    expected = span if read.box is None else int(np.prod(read.box.sizes))
    assert len(filled) == expected


def state(*tensors, mesh=(4,)):
    layouts = tuple(Layout((8, 4), 0, cuts) for cuts in tensors)
    return Placed((Mesh(mesh),), layouts, tuple((f"w{i}", i) for i in range(len(tensors))))


STORED = Structure((Mesh((2,)),), (Layout((8, 4), 0, (Cut(0, "B", 0),)),), (TensorSpec("w0", "float32", 0, "model"),))


@pytest.mark.parametrize(
    ("cuts", "mesh", "ranks", "totals"),
    [
        ((Cut(0, "R"),), (4,), (0b1111, 0b1111), (4 * 128, 128)),
        ((Cut(0, "S", 0),), (4,), (0b0011, 0b1100), (128, 128)),
        ((Cut(0, "S", 1),), (4,), (0b1111, 0b1111), (128, 128)),
        ((Cut(0, "R"), Cut(1, "S", 0)), (2, 2), (0b0101, 0b1010), (2 * 128, 128)),
        ((Cut(0, "S", 0), Cut(1, "R")), (2, 2), (0b0011, 0b1100), (2 * 128, 128)),
    ],
)
def test_files_know_who_needs_them(cuts, mesh, ranks, totals):
    needs = Needs(STORED, [(range(4), state(cuts, mesh=mesh))])
    assert tuple(needs.ranks_of_file("model", owner) for owner in (0, 1)) == ranks
    assert needs.ranks_of_file("optimizer", 0) == 0
    assert needs.totals() == totals
    for owner in (0, 1):
        for need in needs.of_file("model", owner):
            for rank in range(4):
                mine = parts(Layout((8, 4), 0, cuts), [Mesh(mesh)], rank)
                assert (need.wanted in [part.box for part in mine]) == bool(need.ranks >> rank & 1)


def test_kinds_of_ranks_are_counted_together():
    """Two stages want a tensor whole, one of them only the other tensor as well."""
    whole, both = state((Cut(0, "R"),)), state((Cut(0, "R"),), (Cut(0, "R"),))
    stored = Structure(STORED.meshes, STORED.layouts, (*STORED.tensors, TensorSpec("w1", "float32", 0, "model")))
    half = Placed((Mesh((2,)),), whole.layouts, whole.tensors)
    other = Placed((Mesh((2,), 2),), both.layouts, both.tensors)
    needs = Needs(stored, [((0, 1), half), ((2, 3), other)])
    assert {need.key: need.ranks for need in needs.of_file("model", 0)} == {"w0": 0b1100, "w1": 0b1100}
    assert sum(need.ranks for need in needs.of_file("model", 0) if need.key == "w0") == 0b1111
    assert needs.ranks_of_file("model", 1) == 0b1111
    assert needs.totals() == (4 * 128 + 2 * 128, 128 + 128)
