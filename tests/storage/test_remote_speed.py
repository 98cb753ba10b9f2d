"""What a save and a load ask of a store, counted between the two: how often, how much, and what it takes in memory."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.storage.remote import FIRST_BYTES, RemoteStorage
from tests.helpers.buckets import QUICK, environment
from tests.helpers.proxy import CUT, proxy_before

pytestmark = pytest.mark.slow
MIB = 1 << 20
BLOCK = 1 << 16


@pytest.fixture
def proxy(moto):
    with proxy_before(moto.address) as one:
        yield one


def a_place(moto, proxy, url=""):
    url = url or f"s3://{moto.make_bucket('speed')}/{secrets.token_hex(4)}"
    return RemoteStorage(url, options=moto.options(proxy.endpoint), patience=QUICK)


def reads(proxy, since=0):
    """(name, first byte, bytes asked for) of each read of a shard file."""
    found = []
    for asked in proxy.asked[since:]:
        name = re.search(r"(\w+/rank-\d+)\.\w+\.safetensors$", asked.path.partition("?")[0])
        told = {key.lower(): value for key, value in asked.headers.items()}.get("range", "")
        if asked.method == "GET" and name and told:
            start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", told).groups())
            found.append((name[1], start, stop + 1 - start))
    return found


def test_a_load_asks_for_each_header_once_and_for_hardly_a_byte_too_many(moto, proxy):
    """And a read that fails is done again by itself: nothing else is."""
    storage = a_place(moto, proxy)
    state = {"model": {f"w{n}": torch.rand(size) for n, size in enumerate((1_500_003, 17, 700_001, 900_000))}}
    ks.save(storage, state)
    needed = sum(each.nbytes for each in state["model"].values())
    (size,) = [size for name, size in storage.list("model")]
    target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    begun = len(proxy.asked)
    ks.load(storage, target)
    assert all(torch.equal(target["model"][key], value) for key, value in state["model"].items())
    model = [(start, length) for name, start, length in reads(proxy, begun) if name == "model/rank-00000"]
    assert model[0] == (0, FIRST_BYTES)
    assert len(model) == 1 + -(-(size - FIRST_BYTES) // storage.request_bytes)
    assert sum(length for _, length in model) <= 1.05 * needed
    asked = Counter(name for name, _, _ in reads(proxy, begun))
    assert set(asked) == {"model/rank-00000", "state/rank-00000"}

    failed = []
    proxy.fault = lambda asked: CUT if _is_third_read(asked) and not failed and not failed.append(1) else None
    begun = len(proxy.asked)
    ks.load(storage, target)
    again = [(start, length) for name, start, length in reads(proxy, begun) if name == "model/rank-00000"]
    assert failed
    assert len(again) == len(model) + 1
    assert set(again) == set(model)


def _is_third_read(asked):
    return asked.method == "GET" and "model" in asked.path and not asked.headers.get("range", "").startswith("bytes=0-")


def save_rows(rank, url, shell, world):
    state, _ = _rows(rank, world, shell)
    ks.save(url, state)


def load_rows(rank, url, shell, world):
    state, expected = _rows(rank, world, shell)
    for each in state["model"].values():
        each.to_local().zero_()
    report = ks.load(url, state, share_reads=False)
    assert all(torch.equal(state["model"][key].to_local(), value) for key, value in expected.items())
    return report.bytes_read, report.bytes_needed


def _rows(rank, world, shell):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    os.environ.update(shell)
    mesh = init_device_mesh("cpu", (world,))
    whole = {f"w{n}": torch.rand(240, columns, generator=torch.Generator().manual_seed(n)) for n, columns in SHAPES}
    local = {key: value.chunk(world)[rank].clone() for key, value in whole.items()}
    state = {key: DTensor.from_local(value.clone(), mesh, [Shard(0)]) for key, value in local.items()}
    return {"model": state}, local


SHAPES = ((1, 5_001), (2, 33), (3, 7_000), (4, 9_999))


@pytest.mark.ranks
def test_a_load_on_other_ranks_downloads_what_it_needs(moto, proxy, rank_pool):
    """Four ranks have saved, two load: the store sends at most a twentieth more than they hold, and each header once."""
    url = f"s3://{moto.make_bucket('speed')}/{secrets.token_hex(4)}"
    shell = moto.environment(proxy.endpoint)
    rank_pool(4)(save_rows, url, shell, 4)
    sizes = {re.sub(r"\.\w+\.safetensors$", "", name): size for name, size in a_place(moto, proxy, url).list("")}
    begun = len(proxy.asked)
    needed = sum(told[1] for told in rank_pool(2)(load_rows, url, shell, 2))
    model = [each for each in reads(proxy, begun) if each[0].startswith("model")]
    sent = sum(min(start + length, sizes[name]) - start for name, start, length in model)
    print(f"{len(model)} requests, {sent / needed:.3f} of what is needed")
    assert sent <= 1.05 * needed
    assert Counter(name for name, start, _ in model if start == 0) == {
        f"model/rank-0000{owner}": 1 for owner in range(4)
    }


def high_water(name):
    return next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if name in line
    )


def test_a_save_holds_no_file_in_memory(rclone):
    """The header is known first, so parts go as they are filled: 64 MiB, the ring among them, and nine parts of 8."""
    state = {"model": {"w": torch.rand(56 << 20)}}
    # Eight that the library sends, and the one that it puts together.
    parts = 9 * 8 * MIB
    bucket = rclone.make_bucket("speed")
    with environment(rclone):
        ks.save(f"s3://{bucket}/{secrets.token_hex(4)}", {"model": {"w": torch.ones(3)}})
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water("VmRSS")
        ks.save(f"s3://{bucket}/{secrets.token_hex(4)}", state)
        taken = high_water("VmHWM") - before
    print(f"{taken / MIB:.0f} MiB beyond a state of 224 MiB")
    assert taken <= 64 * MIB + parts
