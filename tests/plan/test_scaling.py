"""Planning for worlds that no test can start: the cost grows with tensors + ranks, not with tensors x ranks."""

from __future__ import annotations

import time

import pytest

from keepstep.format.box import Box
from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec, Want, fingerprint
from keepstep.format.manifest import (
    FileRecord,
    Lineage,
    Manifest,
    Versions,
    pack_manifest,
    parse_manifest,
    promised_files,
)
from keepstep.plan.load_plan import find_pieces
from keepstep.plan.save_plan import assign_writers, expected_bytes, rank_files

HIDDEN, LAYERS = 8192, 180


def listed_boxes(tensors: int, shards: int) -> Structure:
    """Tensors whose shards follow no mesh, each with boxes of its own."""
    layouts = tuple(
        Layout((shards * 2, 3 + t), 0, (), tuple((rank, Box((rank * 2, 0), (2, 3 + t))) for rank in range(shards)))
        for t in range(tensors)
    )
    return Structure(
        (Mesh((shards,)),), layouts, tuple(TensorSpec(f"m/{t}", "float32", t, "m") for t in range(tensors))
    )


def seconds(structure: Structure, shards: int) -> float:
    start = time.process_time()
    stored = assign_writers(structure, shards)
    expected_bytes(stored, shards)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.case(106)
@pytest.mark.timeout(300)
def test_a_million_shards_are_proved_to_cover_their_tensors_in_seconds():
    """A thousand tensors of a thousand shards, no two with the same layout; and twice the shards in about twice the time."""
    assert seconds(listed_boxes(1000, 1024), 1024) < 10
    once = min(seconds(listed_boxes(100, 1024), 1024) for _ in range(3))
    twice = min(seconds(listed_boxes(100, 2048), 2048) for _ in range(3))
    assert twice < 3 * once


def large_model(ranks: int, columns: int) -> Structure:
    """2,169 tensors of a transformer: most sharded over all ranks, matrices also over the columns of the mesh."""
    mesh = Mesh((ranks // columns, columns))
    found: dict[Layout, int] = {}
    specs = []

    def add(key: str, shape: tuple[int, ...], *cuts: Cut) -> None:
        specs.append(TensorSpec(key, "bfloat16", found.setdefault(Layout(shape, 0, cuts), len(found)), "model"))

    for layer in range(LAYERS):
        for name in "qkvo":
            cut = (Cut(0, "SS", 0, columns), Cut(1, "S", 0)) if name != "o" else (Cut(0, "S", 0), Cut(1, "S", 1))
            add(f"model/layers.{layer}.attention.{name}.weight", (HIDDEN, HIDDEN), *cut)
        for name in ("gate", "up"):
            add(f"model/layers.{layer}.{name}.weight", (4 * HIDDEN, HIDDEN), Cut(0, "SS", 0, columns), Cut(1, "S", 0))
        add(f"model/layers.{layer}.down.weight", (HIDDEN, 4 * HIDDEN), Cut(0, "S", 0), Cut(1, "S", 1))
        for name in ("norm1", "norm2", "q_norm", "k_norm", "bias"):
            add(f"model/layers.{layer}.{name}", (HIDDEN,), Cut(0, "S", 0), Cut(1, "R"))
    for index in range(9):
        add(f"model/extra.{index}", (128_256 + index, HIDDEN), Cut(0, "S", 0), Cut(1, "R"))
    return Structure((mesh,), tuple(found), tuple(specs))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("columns", [1, 8])
def test_a_large_model_on_1856_ranks(columns):
    """Planned in seconds; the manifest is small and read at once; a rank finds its own part without looking at others."""
    ranks = 1856
    live = large_model(ranks, columns)
    assert len(live.tensors) == 2169
    start = time.process_time()
    stored = assign_writers(live, ranks)
    expected = expected_bytes(stored, ranks)
    planned_s = time.process_time() - start
    start = time.process_time()
    assert fingerprint(live) == fingerprint(large_model(ranks, columns))
    compared_s = time.process_time() - start
    start = time.process_time()
    files = rank_files(stored, 1234, live_index=None, extras=())
    laid_out_s = time.process_time() - start
    assert {plan.folder: plan.data_bytes for plan in files} == {
        name: int(counted[1234]) for name, counted in expected.items()
    }
    manifest = Manifest(
        format=(1, 0),
        step=1,
        save_id="0123abcd",
        created="2024-01-01T00:00:00.000+00:00",
        lineage=Lineage("run"),
        world_size=ranks,
        versions=Versions("0", "2", "3"),
        components={},
        meshes=stored.meshes,
        layouts=stored.layouts,
        tensors=stored.tensors,
        files={
            folder: tuple(FileRecord(rank, int(n) + 4096, int(n), "0" * 16) for rank, n in enumerate(counted))
            for folder, counted in (*expected.items(), ("state", [4096] * ranks))
        },
    )
    data = pack_manifest(manifest)
    start = time.process_time()
    again = parse_manifest(data, "x")
    promised = promised_files(again)
    read_s = time.process_time() - start
    wants = [Want(slot.entry.key, slot.entry.box) for plan in files for slot in plan.slots]
    start = time.process_time()
    pieces = find_pieces(stored, wants, 1234)
    found_s = time.process_time() - start
    times = {"plan": planned_s, "compare": compared_s, "lay out": laid_out_s, "read": read_s, "find": found_s}
    print(f"{len(data):,} bytes of manifest;", {name: round(took, 3) for name, took in times.items()})
    assert len(promised) == 2 * ranks
    assert {piece.rank for piece in pieces} == {1234}
    assert len(data) < 2 << 20
    assert planned_s < 2
    assert read_s < 0.5
    assert max(compared_s, laid_out_s, found_s) < 1
