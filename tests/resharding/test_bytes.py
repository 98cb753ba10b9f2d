"""Who reads and writes how much: each rank only what it needs, from as few files as possible, in bounded memory."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import keepstep as ks
from tests.helpers.storages import Watched
from tests.resharding.models import Net, Run, forget_meshes
from tests.resharding.reference import part_of, placed, raw

MIB = 1 << 20
HEAD = 64 * 1024


class Peak:
    """Memory of this process: ``grown()`` is the peak since the with-block began, less what was held then, in bytes."""

    def __enter__(self):
        self.known = sys.platform == "linux"
        if self.known:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self.base = self.read("VmRSS")
        return self

    def __exit__(self, *_):
        self.grown = self.read("VmHWM") - self.base if self.known else 0

    def read(self, field):
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def rows(count, width):
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width)


def load_quarter(rank, folder, shape, expected):
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    # Once with a small part of the same kind: what is loaded on first use is no memory of the load.
    small = {"w": placed(torch.zeros(8, 2), mesh, [Shard(0)])}
    ks.load(f"{folder}/small", into=small)
    storage = Watched(f"{folder}/ck")
    with Peak() as peak:
        part = torch.empty(shape[0] // 4, shape[1])
        target = {"w": torch.distributed.tensor.DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}
        report = ks.load(storage, into=target)
    assert torch.equal(part[0], expected[rank][0])
    assert torch.equal(part[-1], expected[rank][1])
    return report.bytes_read, storage.read_bytes, peak.grown


@pytest.mark.case(102)
def test_each_rank_reads_its_part_of_a_large_tensor(rank_pool, tmp_path):
    whole = rows(4096, 2560)  # 40 MiB
    ks.save(tmp_path / "small", {"w": torch.zeros(8, 2)})
    ks.save(tmp_path / "ck", {"w": whole})
    expected = [(whole[1024 * rank], whole[1024 * (rank + 1) - 1]) for rank in range(4)]
    for read, seen, grown in rank_pool(4)(load_quarter, str(tmp_path), tuple(whole.shape), expected):
        assert read <= 1.02 * 10 * MIB
        # The manifest and the plain values are read as well, and a header with whatever follows it.
        assert read <= seen <= read + 3 * HEAD
        assert grown < 1.3 * 10 * MIB


def load_quarters(rank, folder, tensors, shape):
    """Into shards whose memory is there already; by how much this rank's has grown beyond it."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    ks.load(f"{folder}/small", into={"w": placed(torch.zeros(8, 2), mesh, [Shard(0)])})
    share = shape[0] // 4
    parts = {f"w{i}": torch.ones(share, shape[1]) for i in range(tensors)}
    target = {
        name: torch.distributed.tensor.DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        for name, part in parts.items()
    }
    with Peak() as peak:
        report = ks.load(f"{folder}/ck", into={"model": target})
    for index, part in enumerate(parts.values()):
        assert torch.equal(part, rows(*shape)[rank * share : (rank + 1) * share] + index)
    assert report.bytes_needed == sum(part.nbytes for part in parts.values())
    return peak.grown


@pytest.mark.case(104)
def test_one_file_goes_into_shards_without_a_whole_tensor_in_between(rank_pool, tmp_path):
    shape = (1024, 4096)  # 16 MiB each
    ks.save(tmp_path / "small", {"w": torch.zeros(8, 2)})
    ks.save(tmp_path / "ck", {"model": {f"w{i}": rows(*shape) + i for i in range(3)}})
    assert len([*(tmp_path / "ck" / "model").iterdir()]) == 1
    largest = 16 * MIB
    # Twice the largest tensor would be allowed; bytes are read into their places, so it is far less.
    assert max(rank_pool(4)(load_quarters, str(tmp_path), 3, shape)) < largest / 2


def resharded(rank, folder, saves, loads, shape):
    """Bytes read and needed by this rank, for each load."""
    world = torch.distributed.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    whole = rows(*shape)
    for name, placement in saves:
        ks.save(f"{folder}/{name}", {"w": placed(whole, mesh, [placement])})
    figures = []
    for name, placement in loads:
        storage = Watched(f"{folder}/{name}")
        target = {"w": placed(torch.zeros(shape), mesh, [placement])}
        report = ks.load(storage, into=target)
        expected = part_of(whole, (world,), (rank,), [placement])
        assert raw(target["w"]) == raw(expected)
        assert report.bytes_needed == expected.nbytes
        assert report.bytes_read <= storage.read_bytes <= report.bytes_read + HEAD * len(storage.names["open"])
        figures.append((report.bytes_read, report.bytes_needed))
    return figures


def test_resharding_reads_little_more_than_it_needs(rank_pool, tmp_path):
    folder, shape = str(tmp_path), (48, 131_072)  # 24 MiB in rows of 512 KiB
    rank_pool(4)(resharded, folder, [("four", Shard(0))], [], shape)
    for figures in rank_pool(2)(resharded, folder, [("two", Shard(0))], [("four", Shard(0))], shape):
        assert all(read <= 1.02 * needed for read, needed in figures)
    loads = [("two", Shard(0)), ("four", Shard(0)), ("two", Replicate()), ("two", Shard(1))]
    for by_rows, again, whole, by_columns in rank_pool(3)(resharded, folder, [], loads, shape):
        for read, needed in (by_rows, again, whole):
            assert read <= 1.02 * needed
        # Each row's third starts and ends within a block that is proved as a whole.
        assert by_columns[0] <= 1.6 * by_columns[1]


class Sharded(Net):
    """Nothing in it is replicated but scalars: everything else has one holder."""

    def __init__(self) -> None:
        super().__init__()
        del self.table

    def forward(self, x):
        self.table = torch.zeros(len(x))
        return super().forward(x)


def opened(rank, folder):
    forget_meshes()
    run = Run("fsdp", make=Sharded).train(1)
    ks.save(folder, run.state)
    storage = Watched(folder)
    fresh = Run("fsdp", seed=1, make=Sharded)
    ks.load(storage, into=fresh.state)
    return storage.names["open"]


@pytest.mark.case(111)
def test_the_same_layout_opens_its_own_files(rank_pool, tmp_path):
    for rank, names in enumerate(rank_pool(4)(opened, str(tmp_path / "ck"))):
        shards = {name for name in names if name.endswith(".safetensors")}
        own = {name for name in shards if f"/rank-{rank:05d}." in name}
        assert {name.partition("/")[0] for name in own} == {"model", "optimizer", "state"}
        others = shards - own
        assert {name.partition(".")[0] for name in others} <= {"state/rank-00000"}, others
        assert all((tmp_path / "ck" / name).stat().st_size < 64 * 1024 for name in others)
        assert names.count(".metadata") == (rank == 0)


def balanced(rank, folder):
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    replicated = {f"r{i}": torch.full((size // 4,), float(i)) for i, size in enumerate([3 * MIB, *[MIB // 16] * 16])}
    sharded = {f"s{i}": placed(rows(1024, 256), mesh, [Shard(0)]) for i in range(4)}
    storage = Watched(folder)
    saved = ks.save(storage, {"replicated": replicated, "sharded": sharded})
    return saved.bytes_written, storage.written_bytes, saved.total_bytes


@pytest.mark.case(109)
def test_ranks_write_about_as_much_as_each_other(rank_pool, tmp_path):
    figures = rank_pool(4)(balanced, str(tmp_path / "ck"))
    written = [said for said, *_ in figures]
    assert max(written) <= 1.2 * min(written)
    assert 8 * MIB < sum(written) < 8.2 * MIB
    for said, seen, total in figures:
        assert said <= seen <= said + 128 * 1024
        assert total == sum(written)


def save_in_bounds(rank, folder):
    world = torch.distributed.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    ks.save(f"{folder}/small", {"w": torch.zeros(8)})
    parts = {f"w{i}": placed(rows(4096, 1024 * world), mesh, [Shard(1)], transposed=i == 1) for i in range(4)}
    with Peak() as peak:
        ks.save(f"{folder}/ck", parts)
    return peak.grown


@pytest.mark.case(101)
def test_memory_is_bounded_at_both_ends(rank_pool, tmp_path):
    for grown in rank_pool(2)(save_in_bounds, str(tmp_path)):
        # 64 MiB a rank pass through an arena of 64 MiB, whatever their strides.
        assert grown <= (64 + 64) * MIB
    with ks.open(tmp_path / "small") as checkpoint:
        checkpoint["w"]
    # One process looks at everything the ranks saved: it holds one tensor of 32 MiB, and buffers, of 128 MiB.
    with Peak() as peak, ks.open(tmp_path / "ck") as checkpoint:
        sums = [checkpoint[key].sum().item() for key in sorted(checkpoint)]
    assert sums == [rows(4096, 2048).sum().item()] * 4
    assert peak.grown <= (32 + 64) * MIB
