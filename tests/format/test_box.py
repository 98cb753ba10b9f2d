"""Boxes: intersections against index sets, and the proof that boxes cover a tensor exactly once."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepstep.errors import CorruptError
from keepstep.format.box import Box, check_partition, range_boxes


def indices(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


@st.composite
def boxes_in(draw, shape, *, empty=True):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(
        draw(st.integers(0 if empty else 1, max(n - o, 0 if empty else 1))) for n, o in zip(shape, offsets, strict=True)
    )
    return Box(offsets, sizes)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def partitions(draw, most=12):
    """A tensor cut by cut: always exact."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    found = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most))):
        index = draw(st.integers(0, len(found) - 1))
        box = found[index]
        dim = draw(st.integers(0, len(shape) - 1))
        if box.sizes[dim] < 2:
            continue
        at = draw(st.integers(1, box.sizes[dim] - 1))
        found[index : index + 1] = [
            _along(box, dim, box.offsets[dim], at),
            _along(box, dim, box.offsets[dim] + at, box.sizes[dim] - at),
        ]
    return shape, draw(st.permutations(found))


def _along(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box((*box.offsets[:dim], offset, *box.offsets[dim + 1 :]), (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))


@settings(max_examples=60)
@given(st.data(), shapes)
def test_an_intersection_is_that_of_the_index_sets(data, shape):
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = one.intersect(other)
    assert (indices(shared) if shared else set()) == indices(one) & indices(other)
    assert one.intersect(other) == other.intersect(one)
    assert one.elements == len(indices(one))
    assert one.inside(shape)


def test_a_box_without_dimensions_is_one_element():
    point = Box((), ())
    assert point.elements == 1
    assert point.intersect(point) == point
    assert point.inside(())
    check_partition("scalar", (), [point])
    with pytest.raises(CorruptError, match="overlap"):
        check_partition("scalar", (), [point, point])
    with pytest.raises(CorruptError, match="0 of 1"):
        check_partition("scalar", (), [])


@pytest.mark.parametrize(
    "box",
    [Box((-1,), (2,)), Box((0,), (-1,)), Box((3,), (3,)), Box((0, 0), (1, 1)), Box((0,), ()), Box((0,), (1 << 70,))],
)
def test_boxes_that_are_not_inside(box):
    assert not box.inside((5,))


def test_a_box_reads_like_a_slice():
    assert str(Box((0, 8), (4, 8))) == "[0:4, 8:16]"


@given(partitions())
def test_a_partition_is_accepted_with_empty_boxes_between(made):
    shape, found = made
    check_partition("key", shape, list(found))
    check_partition("key", shape, [*found, Box((0,) * len(shape), (0,) * len(shape)), Box(shape, (0,) * len(shape))])


@given(partitions(), st.data())
def test_a_hole_is_found(made, data):
    shape, found = made
    gone = data.draw(st.integers(0, len(found) - 1))
    with pytest.raises(CorruptError, match=r"'some/key'.*cover"):
        check_partition("some/key", shape, [box for index, box in enumerate(found) if index != gone])


@given(partitions(), st.data())
def test_an_overlap_is_found_even_where_the_volume_is_right(made, data):
    """One box is replaced by a copy of part of another: as many elements as before, one region twice, one not at all."""
    shape, found = made
    assume(len(found) > 1)
    victim, copied = data.draw(st.permutations(range(len(found))))[:2]
    moved = Box(found[copied].offsets, found[victim].sizes)
    assume(moved.inside(shape) and moved != found[victim])
    changed = [moved if index == victim else box for index, box in enumerate(found)]
    count = np.zeros(shape, int)
    for box in changed:
        count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assume((count != 1).any())
    with pytest.raises(CorruptError, match=r"'some/key'.*(overlap|cover)"):
        check_partition("some/key", shape, changed)


def test_a_box_outside_is_named():
    with pytest.raises(CorruptError, match=r"'k': piece \[4:6\] lies outside the tensor of shape \[5\]"):
        check_partition("k", (5,), [Box((0,), (4,)), Box((4,), (2,))])


@pytest.mark.case(106)
def test_thousands_of_shards_are_checked_in_time_that_grows_with_their_number():
    """Rows, columns and blocks; comparing each with each would take minutes at the larger size."""

    def seconds(rows: int, columns: int) -> float:
        found = [Box((r * 2, c * 3), (2, 3)) for r in range(rows) for c in range(columns)]
        start = time.process_time()
        check_partition("k", (rows * 2, columns * 3), found)
        return time.process_time() - start

    for rows, columns in ((8192, 1), (1, 8192)):
        small = min(seconds(max(rows // 4, 1), max(columns // 4, 1)) for _ in range(3))
        assert seconds(rows, columns) < 10 * max(small, 0.002)
    assert seconds(64, 64) < 1


@settings(max_examples=150)
@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_range_is_a_few_boxes_in_order(shape, data):
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = range_boxes(shape, start, stop)
    runs = [whole[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))].ravel() for b in boxes]
    assert [int(i) for run in runs for i in run] == list(range(start, stop))
    assert all(run.size for run in runs)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_range_of_nothing_and_of_all():
    assert range_boxes((3, 4), 5, 5) == []
    assert range_boxes((0, 4), 0, 0) == []
    assert range_boxes((), 0, 1) == [Box((), ())]
    assert range_boxes((3, 4, 5), 0, 60) == [Box((0, 0, 0), (3, 4, 5))]
    assert range_boxes((3, 4, 5), 20, 60) == [Box((1, 0, 0), (2, 4, 5))]
    assert range_boxes((3, 4, 5), 24, 27) == [Box((1, 0, 4), (1, 1, 1)), Box((1, 1, 0), (1, 1, 2))]
