"""Which bytes go where: reads put together any wanted box from any stored layout, and ask for no more than they need."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import CorruptError
from keepstep.format.box import Box
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec, Want, parts
from keepstep.plan import load_plan
from keepstep.plan.load_plan import find_pieces, plan_reads
from keepstep.plan.save_plan import rank_files
from tests.helpers.layouts import layouts

NUMPY = {"uint8": np.uint8, "float32": np.float32, "complex128": np.complex128}


def region(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    origin = origin or (0,) * len(box.sizes)
    return tuple(slice(o - at, o - at + n) for o, at, n in zip(box.offsets, origin, box.sizes, strict=True))


def files_of(stored: Structure, world: int, wholes: dict[str, np.ndarray]):
    """The data section and the entries of every file, by (folder, rank)."""
    found = {}
    for rank in range(world):
        for plan in rank_files(stored, rank, live_index=None, extras=()):
            data = b"".join(
                np.ascontiguousarray(wholes[s.entry.key][region(s.entry.box)]).tobytes() for s in plan.slots
            )
            assert len(data) == plan.data_bytes
            found[plan.folder, rank] = data, {(s.entry.key, s.entry.box): s.entry for s in plan.slots}
    return found


def load(stored: Structure, files, wants: list[Want], rank: int):
    """Follows the plan with numpy. Returns the targets, the reads by want, and the pieces."""
    dtypes = {spec.key: NUMPY[spec.dtype] for spec in stored.tensors}
    targets = [np.full(want.box.sizes, 99, dtypes[want.key]) for want in wants]
    counts = [np.zeros(want.box.sizes, int) for want in wants]
    pieces = find_pieces(stored, wants, rank)
    reads = []
    for piece in pieces:
        data, entries = files[piece.folder, piece.rank]
        entry, want = entries[piece.key, piece.stored], wants[piece.want]
        item = ITEM_BYTES[entry.dtype]
        for read in plan_reads(piece, entry, want):
            assert entry.start <= read.start < read.stop <= entry.stop
            reads.append((piece, read))
            raw = np.frombuffer(data[read.start : read.stop], dtypes[piece.key])
            if read.box is None:
                assert want.dense
                assert read.at % item == 0
                flat = slice(read.at // item, read.at // item + len(raw))
                targets[read.want].reshape(-1)[flat] = raw
                counts[read.want].reshape(-1)[flat] += 1
            else:
                assert read.at == -1
                span = 1 + sum((n - 1) * step for n, step in zip(read.box.sizes, read.strides, strict=True))
                assert span == len(raw), "the ends of a span are needed"
                values = np.lib.stride_tricks.as_strided(raw, read.box.sizes, [step * item for step in read.strides])
                targets[read.want][region(read.box, want.box.offsets)] = values
                counts[read.want][region(read.box, want.box.offsets)] += 1
    assert all((count == 1).all() for count in counts), "an element is read twice, or not at all"
    return targets, reads, pieces


@st.composite
def stored_tensors(draw):
    layout, mesh, world = draw(layouts(kinds=("S", "SS", "B", "O")))
    if draw(st.integers(0, 3)) == 0:
        rows = sorted(draw(st.sets(st.integers(0, layout.shape[0]), max_size=3)) | {0, layout.shape[0]})
        boxes = [
            (draw(st.integers(0, world - 1)), Box((a, *[0] * (len(layout.shape) - 1)), (b - a, *layout.shape[1:])))
            for a, b in itertools.pairwise(rows)
        ]
        layout = Layout(layout.shape, 0, (), tuple(boxes))
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    return Structure((mesh,), (layout,), (TensorSpec("m/w", dtype, 0, "m"),)), world


@st.composite
def wanted(draw, shape):
    offsets, sizes = [], []
    for n in shape:
        low, high = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        offsets.append(low)
        sizes.append(high - low)
    return Want("m/w", Box(tuple(offsets), tuple(sizes)), draw(st.booleans()))


@pytest.mark.slow
@given(stored_tensors(), st.data(), st.sampled_from([(1 << 22, 1 << 16), (64, 16), (1, 1)]))
def test_any_box_is_put_together_from_any_layout(made, data, limits):
    """Whatever the sizes from which spans are read with their gaps; from every rank's point of view."""
    stored, world = made
    (layout,), (spec,) = stored.layouts, stored.tensors
    whole = np.arange(math.prod(layout.shape)).astype(NUMPY[spec.dtype]).reshape(layout.shape)
    files = files_of(stored, world, {"m/w": whole})
    wants = [data.draw(wanted(layout.shape)) for _ in range(data.draw(st.integers(1, 3)))]
    with mock.patch.multiple(load_plan, SPAN_BYTES=limits[0], RUN_BYTES=limits[1]):
        targets, _, _ = load(stored, files, wants, data.draw(st.integers(-1, world)))
    for want, target in zip(wants, targets, strict=True):
        assert np.array_equal(target, whole[region(want.box)])


def one(shape, cuts, mesh=None, dtype="float32"):
    mesh = mesh or Mesh((4,))
    stored = Structure((mesh,), (Layout(shape, 0, cuts),), (TensorSpec("m/w", dtype, 0, "m"),))
    whole = np.arange(math.prod(shape)).astype(NUMPY[dtype]).reshape(shape)
    return stored, whole, files_of(stored, mesh.size, {"m/w": whole})


def read_bytes(reads) -> int:
    return sum(read.stop - read.start for _, read in reads)


def test_an_unchanged_world_reads_its_own_files_and_each_tensor_in_one_run():
    stored, whole, files = one((103, 7), (Cut(0, "S", 0),))
    for rank in range(4):
        (part,) = parts(stored.layouts[0], list(stored.meshes), rank)
        targets, reads, pieces = load(stored, files, [Want("m/w", part.box)], rank)
        assert np.array_equal(targets[0], whole[region(part.box)])
        assert [(piece.rank, read.at, read.stop - read.start) for piece, read in reads] == [
            (rank, 0, part.box.elements * 4)
        ]
        assert [piece.stored for piece in pieces] == [part.box]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_rows_resharded_to_rows_cost_exactly_the_bytes_that_are_needed(ranks):
    stored, whole, files = one((103, 7), (Cut(0, "S", 0),))
    total = 0
    for rank in range(ranks):
        for part in parts(Layout((103, 7), 0, (Cut(0, "S", 0),)), [Mesh((ranks,))], rank):
            targets, reads, _ = load(stored, files, [Want("m/w", part.box)], rank)
            assert np.array_equal(targets[0], whole[region(part.box)])
            assert all(read.box is None for _, read in reads)
            assert read_bytes(reads) == part.box.elements * 4
            assert len(reads) <= 4
            total += read_bytes(reads)
    assert total == whole.nbytes


def test_narrow_columns_are_read_with_the_gaps_between_them():
    """Runs of a few bytes: one read for many, at most SPAN_BYTES long."""
    stored, _, files = one((1 << 16, 64), (Cut(0, "S", 0),))
    want = Want("m/w", Box((0, 8), (1 << 16, 4)))
    _, reads, _ = load(stored, files, [want], 0)
    assert len(reads) == 4
    assert all(read.stop - read.start <= load_plan.SPAN_BYTES for _, read in reads)
    assert read_bytes(reads) < 1.01 * (1 << 16) * 64 * 4


def test_wide_columns_are_read_run_by_run():
    """Runs of RUN_BYTES and more: nothing between them is read."""
    stored, _, files = one((64, 1 << 16), (Cut(0, "S", 0),))
    want = Want("m/w", Box((0, 1000), (64, 1 << 14)))
    targets, reads, _ = load(stored, files, [want], 0)
    assert read_bytes(reads) == targets[0].nbytes
    assert len(reads) == 64


def test_empty_boxes_and_scalars():
    stored, whole, files = one((), (Cut(0, "O", 0, 2),))
    targets, reads, _ = load(stored, files, [Want("m/w", Box((), ())), Want("m/w", Box((), ()), False)], 1)
    assert [target.item() for target in targets] == [whole.item()] * 2
    assert [piece.rank for piece, _ in reads] == [2, 2]
    stored, whole, files = one((4, 0), (Cut(0, "S", 0),))
    targets, reads, _ = load(stored, files, [Want("m/w", Box((0, 0), (4, 0))), Want("m/w", Box((1, 0), (0, 0)))], 1)
    assert [target.shape for target in targets] == [(4, 0), (0, 0)]
    assert reads == []


@pytest.mark.case(121)
def test_a_piece_that_is_stored_nowhere_is_named_with_its_region():
    """Of four pieces one is gone from the layout: whoever needs an element of it hears so, others do not."""
    pieces = tuple((rank, Box((4 * rank, 0), (4, 3))) for rank in range(4) if rank != 2)
    layout = Layout((16, 3), 0, (), pieces)
    stored = Structure((Mesh((4,)),), (layout,), (TensorSpec("m/w", "float32", 0, "m"),))
    with pytest.raises(CorruptError, match=r"'m/w': 36 of 48 elements of \[0:16, 0:3\] are stored"):
        find_pieces(stored, [Want("m/w", Box((0, 0), (16, 3)))], 0)
    with pytest.raises(CorruptError, match=r"'m/w': 3 of 6 elements of \[7:9, 0:3\] are stored"):
        find_pieces(stored, [Want("m/w", Box((0, 0), (4, 3))), Want("m/w", Box((7, 0), (2, 3)))], 1)
    assert len(find_pieces(stored, [Want("m/w", Box((2, 0), (4, 3)))], 0)) == 2
