"""Ranks that need the same bytes read them once and pass them on: how much is read, what arrives, and what failures do."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import keepstep as ks
from keepstep.checkpointer import sharing
from keepstep.errors import CheckpointError, CorruptError, DamageWarning, RankFailedError, StorageError
from keepstep.ranks import Exchange, Ranks
from keepstep.storage.base import read_blob
from tests.helpers.agents import wait_until
from tests.helpers.buckets import a_run
from tests.helpers.jobs import Job, alone
from tests.helpers.proxy import proxy_before
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched
from tests.resharding.models import forget_meshes
from tests.resharding.reference import placed

WORLD = 4
MIB = 1 << 20


class Far(Watched):
    """As an object store: every byte comes over a wire."""

    far = True


def tensors():
    """Sizes that do not come out even, dtypes of several widths, next to nothing, nothing, and a scalar."""
    made = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(700, 1031, generator=made),
        "wide": torch.randn(130, 1500, generator=made).to(torch.bfloat16),
        "bytes": torch.randint(0, 255, (70_001,), dtype=torch.uint8, generator=made),
        "double": torch.randn(3, 5, 7, generator=made, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
    }


def emptied(state):
    return {key: torch.zeros_like(value) for key, value in state.items()}


def one_copy(folder):
    """The bytes of all files with tensors."""
    return sum(file.stat().st_size for file in Path(folder).glob("*/*.safetensors") if file.parent.name != "state")


# --- how much is read -----------------------------------------------------------------------------------------------


def load_whole(rank, folder):
    state = {"t": tensors(), "plain": {"n": 3, "s": "x"}}
    if not Path(folder, ".metadata").exists():
        ks.save(folder, state)
    found = {}
    for name, kind, share in (
        ("asked", Watched, True),
        ("far", Far, None),
        ("near", Watched, None),
        ("no", Far, False),
    ):
        storage, into = kind(folder), {"t": emptied(state["t"]), "plain": {"n": 0, "s": ""}}
        # One that lies in memory in another order: its bytes go there in small runs.
        into["t"]["large"] = torch.zeros(1031, 700).t()
        report = ks.load(storage, into=into, share_reads=share)
        into["t"]["large"] = into["t"]["large"].contiguous()
        assert_same(into, state)
        found[name] = storage.read_bytes, report.bytes_read, report.bytes_received, storage.done["open"]
        assert report.bytes_needed == sum(value.numel() * value.element_size() for value in state["t"].values())
    return found


@pytest.mark.slow
def test_replicas_read_one_copy_among_them(rank_pool, tmp_path):
    by_rank = rank_pool(WORLD)(load_whole, str(tmp_path / "ck"))
    copy = one_copy(tmp_path / "ck")
    small = sum(file.stat().st_size for file in (tmp_path / "ck").glob("state/*")) + 65536
    for name in ("asked", "far"):
        seen, read, received, opened = (sum(found[name][i] for found in by_rank) for i in range(4))
        assert copy <= read <= 1.05 * copy
        assert read <= seen <= read + small
        assert received == (WORLD - 1) * read
        # Manifest and state file once; a file of tensors by those who read of it.
        assert opened <= 2 + WORLD + WORLD + 3
        assert max(found[name][1] for found in by_rank) <= 1.1 * copy / WORLD + 4 * 65536, "the shares are even"
    for name in ("near", "no"):
        for found in by_rank:
            assert found[name][1] >= copy
            assert found[name][2] == 0


def load_laid_out(rank, folder):
    """Where the ranks that need the same are some of the ranks, or need only some of the same."""
    whole = torch.arange(768 * 1024, dtype=torch.float32).reshape(768, 1024)  # 3 MiB
    mesh, square = DeviceMesh("cpu", list(range(WORLD))), DeviceMesh("cpu", torch.arange(WORLD).reshape(2, 2))
    rows = {"m": {"w": placed(whole, mesh, [Shard(0)])}}
    if not Path(folder, ".metadata").exists():
        ks.save(folder, rows)
    found = {}
    for name, into in {
        "rows": placed(torch.zeros_like(whole), mesh, [Shard(0)]),
        "columns": placed(torch.zeros_like(whole), mesh, [Shard(1)]),
        "replicated rows": placed(torch.zeros_like(whole), square, [Replicate(), Shard(0)]),
        "replicated columns": placed(torch.zeros_like(whole), square, [Shard(1), Replicate()]),
        "overlapping": torch.zeros(400, 1024),
        "two kinds": torch.zeros(768, 1024) if rank < 2 else placed(torch.zeros_like(whole), mesh, [Shard(1)]),
    }.items():
        box = slice(100 * rank, 100 * rank + 400)
        target = ks.sharded(into, global_shape=(768, 1024), offsets=(100 * rank, 0)) if name == "overlapping" else into
        storage = Watched(folder)
        report = ks.load(storage, into={"m": {"w": target}}, share_reads=True)
        if hasattr(into, "placements"):
            assert torch.equal(into.to_local(), placed(whole, into.device_mesh, into.placements).to_local()), name
        else:
            assert torch.equal(into, whole[box] if name == "overlapping" else whole), name
        found[name] = report.bytes_read, report.bytes_received
    forget_meshes()
    return found


def load_on_two(rank, folder):
    whole = torch.arange(768 * 1024, dtype=torch.float32).reshape(768, 1024)
    mesh = DeviceMesh("cpu", [0, 1])
    found = {}
    for name, placements in (("rows", [Shard(0)]), ("columns", [Shard(1)]), ("all", [Replicate()])):
        into = placed(torch.zeros_like(whole), mesh, placements)
        report = ks.load(folder, into={"m": {"w": into}}, share_reads=True)
        assert torch.equal(into.to_local(), placed(whole, mesh, placements).to_local()), name
        found[name] = report.bytes_read, report.bytes_received
    forget_meshes()
    return found


@pytest.mark.slow
def test_any_layout_reads_each_block_once(rank_pool, tmp_path):
    folder = str(tmp_path / "ck")
    four = rank_pool(WORLD)(load_laid_out, folder)
    copy = one_copy(folder)
    for name in four[0]:
        read = sum(found[name][0] for found in four)
        assert read <= 1.05 * copy, f"{name}: {read / copy:.2f} copies were read"
    # Each has its own file: only headers and nothing else could have been passed on, and were not needed.
    assert all(found["rows"][1] == 0 for found in four)
    two = rank_pool(2)(load_on_two, folder)
    for name in two[0]:
        read = sum(found[name][0] for found in two)
        assert copy * 0.99 <= read <= 1.05 * copy, f"{name}: {read / copy:.2f} copies were read"


def restore_from_bucket(rank, url, variables, save):
    """A replica of a run in a bucket, told nothing but the URL."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        state = ks.TrainState(t={f"w{i}": torch.arange(MIB) * (i + 1.0) for i in range(4)})  # 16 MiB
        with ks.Checkpointer(url, state, background="off") as saves:
            if save:
                saves.step()
                saves.save()
                return 0
            for value in state["t"].values():
                value.zero_()
            report = saves.restore()
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert all(torch.equal(value, torch.arange(MIB) * (i + 1.0)) for i, value in enumerate(state["t"].values()))
    assert report.step == 1
    return report.bytes_received


@pytest.mark.slow
def test_replicas_download_one_copy_from_a_bucket(rank_pool, moto):
    """By default. Counted in front of the server: the ranges that are asked for of files with tensors."""
    url, copy = a_run(moto, "replicas"), 16 * MIB
    rank_pool(WORLD)(restore_from_bucket, url, moto.environment(), True)
    with proxy_before(moto.address) as proxy:
        received = rank_pool(WORLD)(restore_from_bucket, url, moto.environment(proxy.endpoint), False)
        asked = [each for each in proxy.asked if each.method == "GET" and "/t/" in each.path]
    assert min(received) >= 0.7 * copy
    headers = [{name.lower(): value for name, value in each.headers.items()} for each in asked]
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", each["range"]) for each in headers]
    downloaded = sum(int(found[2]) + 1 - int(found[1]) for found in ranges)
    assert copy <= downloaded <= 1.1 * copy, f"{downloaded / copy:.3f} copies"


# --- memory ---------------------------------------------------------------------------------------------------------


def load_measured(rank, folder):
    from tests.resharding.test_bytes import Peak

    whole = {"w": torch.full((24, MIB), 1.0)}  # 96 MiB
    ks.save(folder, whole)
    small = {"w": whole["w"][:1].clone()}
    ks.save(f"{folder}-small", small)
    ks.load(f"{folder}-small", into=small, share_reads=True)
    whole["w"].zero_()
    with Peak() as peak:
        report = ks.load(folder, into=whole, share_reads=True)
    assert whole["w"].eq(1.0).all()
    return peak.grown, report.bytes_received


@pytest.mark.slow
def test_memory_stays_bounded(rank_pool, tmp_path):
    for grown, received in rank_pool(2)(load_measured, str(tmp_path / "ck")):
        assert received > 40 * MIB
        assert grown <= 64 * MIB, f"{grown / MIB:.0f} MiB"


# --- failures -------------------------------------------------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def load_damaged(rank, folders):
    found = {}
    for name, folder in folders.items():
        began = time.monotonic()
        into = {"t": emptied(tensors())}
        with pytest.raises(CheckpointError) as caught:
            ks.load(folder, into=into, share_reads=True)
        codes = set(caught.value.codes.values()) if isinstance(caught.value, RankFailedError) else {caught.value.code}
        found[name] = codes, str(caught.value), time.monotonic() - began
    return found


def save_all(rank, folders):
    for folder in folders.values():
        ks.save(folder, {"t": tensors()})


def run_damaged(rank, root):
    """Two steps, the newer one damaged by rank 0; all ranks come back to the older one."""
    state = ks.TrainState(t=tensors())
    with ks.Checkpointer(root, state, background="off") as saves:
        for step in (1, 2):
            state["t"]["one"] += step
            saves.step()
            saves.save()
    if rank == 0:
        file = next(Path(root, "step-00000002").glob("t/rank-00002.*"))
        flip(file, file.stat().st_size - 5)
    torch.distributed.barrier()
    state = ks.TrainState(t=emptied(tensors()))
    with ks.Checkpointer(root, state, background="off") as saves, warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        report = saves.restore(share_reads=True)
        with pytest.raises(CheckpointError):
            saves.restore(step=2, share_reads=True)
        again = saves.restore(share_reads=True)
    return report.step, again.step, int(state["t"]["one"]), report.skipped, report.bytes_received


@pytest.mark.slow
def test_damage_seen_by_one_is_told_to_all(rank_pool, tmp_path):
    folders = {name: str(tmp_path / name) for name in ("block", "header", "cut", "missing", "values")}
    rank_pool(WORLD)(save_all, folders)
    names = {}
    for name, folder in folders.items():
        file = next(Path(folder).glob("state/rank-00000.*" if name == "values" else "t/rank-00001.*"))
        names[name] = f"{file.parent.name}/{file.name}"
        if name == "missing":
            file.unlink()
        elif name == "cut":
            file.write_bytes(file.read_bytes()[:-4096])
        elif name == "values":
            flip(file, int.from_bytes(file.read_bytes()[:8], "little") + 8)
        else:
            flip(file, file.stat().st_size - 9 if name == "block" else 900)
    for found in rank_pool(WORLD)(load_damaged, folders):
        for name, (codes, text, seconds) in found.items():
            assert codes <= {CorruptError.code, StorageError.code}, f"{name}: {text}"
            assert names[name] in text, f"{name}: {text}"
            assert seconds < 10, "it was waited for a deadline"


@pytest.mark.slow
def test_all_fall_back_together(rank_pool, tmp_path):
    for step, again, value, skipped, received in rank_pool(WORLD)(run_damaged, str(tmp_path / "run")):
        assert (step, again, value) == (1, 1, 8)
        assert received > 0
        assert "rank-00002" in skipped[0]


def load_or_tell(rank, folder, told, kind):
    """Loads; one rank is killed, or waits, when it has begun to read. What becomes of the others is written down."""

    def before(operation, name):
        if rank == 2 and operation == "read" and name.startswith("t/"):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until(lambda: all(Path(told, f"{other}").exists() for other in (0, 1, 3)), timeout_s=30)

    began = time.monotonic()
    try:
        ks.load(Watched(folder, before), into={"t": emptied(tensors())}, share_reads=True, deadline_s=3.0)
        text = "it went well"
    except CheckpointError as err:
        text = f"{err.code}: {err}"
    Path(told, f"{rank}").write_text(f"{time.monotonic() - began:.1f} {text}")
    return time.monotonic() - began, text


def jobs_that_break(folder, kinds):
    ends = {}
    for kind in kinds:
        told = Path(folder, f"told-{kind}")
        told.mkdir()
        ends[kind] = Job(Path(folder, f"job-{kind}"), WORLD, load_or_tell, f"{folder}/ck", str(told), kind).wait(60)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "wait"])
def test_a_rank_that_is_gone_or_stuck_is_no_hang(rank_pool, tmp_path, kind):
    rank_pool(WORLD)(save_all, {"one": str(tmp_path / "ck")})
    (ends,) = rank_pool(1)(alone, jobs_that_break, str(tmp_path), [kind])[0].values()
    assert (ends[2].status == -signal.SIGKILL) == (kind == "kill")
    for rank in (0, 1, 3):
        seconds, text = ends[rank].value
        assert text.split(":")[0] in ("rank-failed", "commit-timeout"), text
        assert "rank 2" in text
        assert seconds < 3.0 + 5.0
    if kind == "wait":
        assert ends[2].value[1] != "it went well"


def load_cut_off(rank, folder):
    """A connection that is lost while every rank is well is no damage: nobody falls back, and the next load works."""
    finish = Exchange.finish

    def lose(wire):
        wire.close()
        raise RankFailedError("the exchange broke off", {3: "connection reset"})

    if rank == 1:
        Exchange.finish = lose
    state = ks.TrainState(t=tensors())
    with ks.Checkpointer(folder, state, background="off", deadline_s=20) as saves:
        for _ in range(2):
            saves.step()
            saves.save()
        with pytest.raises(RankFailedError) as caught:
            saves.restore(share_reads=True)
        Exchange.finish = finish
        report = saves.restore(share_reads=True)
    return str(caught.value), set(caught.value.codes.values()), report.step, report.bytes_received


def load_changed(rank, folder):
    """A bit is turned over on the way from rank 1; whoever gets it notices, while more is on its way."""
    begin = Exchange.begin

    def spoil(wire, outgoing, incoming):
        for to, tensor in outgoing:
            if to == 2:
                tensor[-1] ^= 1
        begin(wire, outgoing, incoming)

    if rank == 1:
        Exchange.begin = spoil
    began = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            ks.load(folder, into={"t": emptied(tensors())}, share_reads=True)
    finally:
        Exchange.begin = begin
    return str(caught.value), time.monotonic() - began


def load_unconnected(rank, folder):
    """Where ranks cannot reach each other, each reads for itself, and rank 0 says so."""
    exchange = Ranks.exchange

    def refuse(ranks, name, deadline_s):
        raise RuntimeError("no route to host")

    said = []
    if rank == 1:
        Ranks.exchange = refuse
    warning, sharing._log.warning = sharing._log.warning, lambda text, *args: said.append(text % args)
    try:
        into = {"t": emptied(tensors())}
        report = ks.load(folder, into=into, share_reads=True, deadline_s=3)
    finally:
        Ranks.exchange, sharing._log.warning = exchange, warning
    assert_same(into["t"], tensors())
    return report.bytes_received, said


@pytest.mark.slow
def test_what_happens_to_connections_is_noticed(rank_pool, tmp_path):
    rank_pool(WORLD)(save_all, {"one": str(tmp_path / "ck")})
    for rank, (received, said) in enumerate(rank_pool(WORLD)(load_unconnected, str(tmp_path / "ck"))):
        assert received == 0
        assert ["no route to host" in text for text in said] == ([True] if rank == 0 else [])
    for text, seconds in rank_pool(WORLD)(load_changed, str(tmp_path / "ck")):
        assert "does not match its digest" in text or "is not the one that was committed" in text
        assert seconds < 10, "it was waited for a deadline"
    for text, codes, step, received in rank_pool(WORLD)(load_cut_off, str(tmp_path / "run")):
        assert "connection reset" in text
        assert codes == {RankFailedError.code}
        assert step == 2
        assert received > 0


def load_differently(rank, folder):
    with pytest.raises(CheckpointError) as caught:
        ks.load(folder, into={"t": emptied(tensors())}, share_reads=rank == 0, deadline_s=5)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_ask_for_different_things_are_told(rank_pool, tmp_path):
    rank_pool(2)(save_all, {"one": str(tmp_path / "ck")})
    assert all("different calls" in text for text in rank_pool(2)(load_differently, str(tmp_path / "ck")))


def test_alone_there_is_nobody_to_share_with(tmp_path):
    ks.save(tmp_path / "ck", {"t": tensors()})
    into = {"t": emptied(tensors())}
    report = ks.load(Far(tmp_path / "ck"), into=into, share_reads=True)
    assert_same(into["t"], tensors())
    assert report.bytes_received == 0
    assert read_blob(Watched(tmp_path / "ck"), ".metadata", MIB)
