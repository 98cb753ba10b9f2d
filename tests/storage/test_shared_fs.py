"""File systems that machines share or that a program serves: what they refuse, report late, show late, and leave behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.check.contract import StorageContract
from keepstep.commit.catalog import read_catalog
from keepstep.commit.publish import commit_step
from keepstep.commit.retention import sweep_leftovers
from keepstep.errors import StorageError
from keepstep.storage.base import read_blob
from keepstep.storage.local import LocalStorage
from tests.helpers.agents import agents_below, is_alive, stop_agents, wait_until
from tests.helpers.fuse import can_serve, served
from tests.helpers.jobs import Job, alone, run_job
from tests.helpers.mounts import enter, mount

MIB = 1 << 20
POOR = {
    "link": errno.EPERM,
    "fsyncdir": errno.EINVAL,
    "fallocate": errno.EOPNOTSUPP,
    "direct_write": errno.EINVAL,
}
needs_fuse = pytest.mark.skipif(not can_serve(), reason="needs /dev/fuse and the right to mount")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def values(number: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), number)}


def loaded(place) -> float:
    target = values(0.0)
    ks.load(place, target)
    assert target["w"].eq(target["w"][0]).all()
    return float(target["w"][0])


# --- the contract, on real mounts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_mount(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plain")
    with served(folder / "held", folder / "seen") as at:
        yield at


@pytest.fixture(scope="module")
def poor_mount(tmp_path_factory) -> Iterator[Path]:
    """No hard links, no fsync of folders, no reservation, and direct writes that fail although their open did not."""
    folder = tmp_path_factory.mktemp("poor")
    with served(folder / "held", folder / "seen", refuse=POOR, keeps_open=True) as at:
        yield at


@pytest.mark.slow
@needs_fuse
class TestServed(StorageContract):
    @pytest.fixture
    def storage(self, plain_mount, request):
        return LocalStorage(plain_mount / request.node.name)


@pytest.mark.slow
@needs_fuse
class TestServedPoorly(StorageContract):
    @pytest.fixture
    def storage(self, poor_mount, request):
        return LocalStorage(poor_mount / request.node.name)


# --- errors that come at the end -------------------------------------------------------------------------------------


def test_a_close_that_fails_fails_the_save(tmp_path, monkeypatch):
    """A quota may be found out only there. Nothing gets its name, the step before stays, and nothing is left over."""
    ks.save(tmp_path / "step", values(1.0))
    before = files(tmp_path)
    real = os.close
    failed = []

    def close(descriptor):
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)
        if ".safetensors" in name:
            failed.append(name)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageError, match="commit") as caught:
        ks.save(tmp_path / "step", values(2.0), overwrite=True)
    monkeypatch.undo()
    assert failed
    assert caught.value.errno == errno.EDQUOT
    assert files(tmp_path) == before
    assert loaded(tmp_path / "step") == 1.0


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("operation", ["flush", "fsync"])
def test_a_server_that_tells_at_the_end_that_there_is_no_room(tmp_path, operation):
    ks.save(tmp_path / "held" / "step", values(1.0))
    before = files(tmp_path / "held")
    with served(tmp_path / "held", tmp_path / "seen", refuse={operation: errno.EDQUOT}) as at:
        with pytest.raises(StorageError) as caught:
            ks.save(at / "step", values(2.0, MIB), overwrite=True)
        assert loaded(at / "step") == 1.0
    assert caught.value.errno == errno.EDQUOT
    assert files(tmp_path / "held") == before
    assert loaded(tmp_path / "held" / "step") == 1.0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_fuse
def test_direct_writes_that_are_refused_lose_nothing(tmp_path):
    """At the open, and at the write; large enough for several blocks, odd enough for a tail."""
    torch.manual_seed(0)
    state = {"w": torch.randn(5 * MIB + 3), "b": torch.randn(7)}
    for index, refuse in enumerate([{"direct": errno.EINVAL}, {"direct": errno.EACCES}, POOR]):
        with served(tmp_path / f"held{index}", tmp_path / f"seen{index}", refuse=refuse) as at:
            ks.save(at / "step", state)
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        ks.load(tmp_path / f"held{index}" / "step", target)
        assert all(torch.equal(target[key], value) for key, value in state.items())


def test_a_folder_that_knows_no_fsync_is_no_obstacle(tmp_path, monkeypatch):
    real = os.fsync
    refused = []

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            refused.append(descriptor)
            raise OSError(codes[0], os.strerror(codes[0]))
        real(descriptor)

    for code in (errno.EINVAL, errno.EOPNOTSUPP):
        codes = [code]
        monkeypatch.setattr(os, "fsync", fsync)
        ks.save(tmp_path / str(code), values(1.0))
        monkeypatch.undo()
        assert loaded(tmp_path / str(code)) == 1.0
    assert refused
    codes = [errno.EIO]
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="errno 5"):
        ks.save(tmp_path / "one", values(1.0))


def test_a_link_that_was_made_although_its_answer_was_lost(tmp_path, monkeypatch):
    """A client that asks twice is told that the name is taken, by its own file; somebody else's is somebody else's."""
    storage = LocalStorage(tmp_path)
    real = os.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    assert storage.put_new("mine", b"mine")
    assert not storage.put_new("mine", b"other")
    assert read_blob(storage, "mine", 99) == b"mine"
    assert files(tmp_path) == ["mine"]


def test_without_hard_links_a_name_is_still_taken_once(tmp_path, monkeypatch):
    """A claim that a killed process has left holds the name until the next start has swept."""

    def link(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    storage = LocalStorage(tmp_path)
    assert storage.put_new("a/x", b"one")
    assert not storage.put_new("a/x", b"two")
    assert files(tmp_path) == ["a/x"]
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / ".metadata.claim.partial").touch()
    with pytest.raises(ks.errors.StepExistsError):
        ks.save(tmp_path / "step-00000001", values(1.0))
    sweep_leftovers(storage, read_catalog(storage), 1)
    ks.save(tmp_path / "step-00000001", values(1.0))
    assert loaded(tmp_path / "step-00000001") == 1.0


# --- stale handles ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_fuse
def test_a_handle_that_is_stale_is_asked_for_once_more(tmp_path):
    """On the open and on the read of every file."""
    ks.save(tmp_path / "held" / "step", values(3.0))
    with served(tmp_path / "held", tmp_path / "seen", stale=["open", "read"]) as at:
        assert loaded(at / "step") == 3.0


def test_a_folder_that_another_machine_removes_is_gone_while_it_is_listed(tmp_path, monkeypatch):
    """A stale root is an error: of what is in it nothing is known."""
    storage = LocalStorage(tmp_path)
    for name in ("step/model/x", "step/state/y", "run.json"):
        storage.put(name, b"1")
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith(stale):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    stale = "model"
    assert dict(storage.list("")) == {"step/state/y": 1, "run.json": 1}
    stale = "step"
    assert not [*storage.list("step")]
    stale = str(tmp_path)
    with pytest.raises(StorageError, match=r"errno 116"):
        [*storage.list("")]


def test_a_file_that_was_replaced_under_its_reader_is_not_mixed_with_the_new_one(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.put("x", b"a" * 9000)
    real = os.preadv
    stale = []

    def preadv(descriptor, buffers, offset):
        if descriptor in stale:
            stale.remove(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = bytearray(4500)
    with storage.open("x") as blob:
        blob.read_into(0, memoryview(buffer))
        stale.append(blob._descriptor)
        blob.read_into(4500, memoryview(buffer))
        assert bytes(buffer) == b"a" * 4500
        storage.put("x", b"b" * 9000)
        stale.append(blob._descriptor)
        with pytest.raises(StorageError, match="errno 116"):
            blob.read_into(4500, memoryview(buffer))
        assert bytes(buffer) == b"a" * 4500

    class Replaced(LocalStorage):
        def open(self, name):
            blob = super().open(name)
            if not made:
                made.append(name)
                self.put(name, b"c" * 10)
                stale.append(blob._descriptor)
            return blob

    made = []
    assert read_blob(Replaced(tmp_path), "x", 9999) == b"c" * 10
    assert (made, stale) == (["x"], [])


# --- files that are removed while they are open ----------------------------------------------------------------------


@pytest.mark.slow
@needs_fuse
def test_what_is_left_of_an_open_file_is_nobodys(tmp_path):
    """A reader has a file of a step open while that step goes: its new name is no file of a step, nor in the way."""
    with served(tmp_path / "held", tmp_path / "seen", keeps_open=True) as at:
        root, state = LocalStorage(at / "run"), ks.TrainState(model=torch.nn.Linear(3, 2))
        held = None
        for start in range(2):
            with ks.Checkpointer(at / "run", state, background="off", keep=ks.Keep(last=1)) as ckpt:
                assert ckpt.restore().step == 2 * start
                for _ in range(2):
                    ckpt.step()
                    ckpt.save()
                    if held is None:
                        held = next((at / "run").rglob("*.safetensors")).open("rb")
            there = [path.name for path in (at / "run").rglob(".nfs*")]
            assert len(there) == 1
            catalog = read_catalog(root)
            assert ([found.step for found in catalog.steps], catalog.unfinished) == ([[2], [4, 2]][start], ())
            assert not [name for name, _ in root.list("") if ".nfs" in name]
        held.close()
        ks.save(at / "run" / "step-00000001", values(1.0))
        assert loaded(at / "run" / "step-00000001") == 1.0
        storage = LocalStorage(at / "run")
        storage.delete([name for name, _ in storage.list("step-00000001")])
        assert not (at / "run" / "step-00000001").exists()


# --- views that lag behind -------------------------------------------------------------------------------------------


class OldView(LocalStorage):
    """A machine whose listings are those of the past; what it opens is true. ``hides`` says which names it has not seen."""

    def __init__(self, root, *, hides=lambda name: False, sizes=None, late_s=0.0):
        super().__init__(root, late_s=late_s)
        self.hides, self.sizes = hides, sizes or {}

    def list(self, prefix):
        for name, size in super().list(prefix):
            if not self.hides(name):
                yield name, self.sizes.get(name, size)


def test_a_listing_that_is_old_damages_no_step(tmp_path):
    """Sizes from the time when a file was being written, and files that are not listed yet."""
    ks.save(tmp_path, values(1.0))
    names = [name for name, _ in LocalStorage(tmp_path).list("")]
    assert loaded(OldView(tmp_path, sizes=dict.fromkeys(names, 17))) == 1.0
    assert loaded(OldView(tmp_path, hides=lambda name: name.endswith(".safetensors"))) == 1.0
    (tmp_path / next(name for name in names if name.endswith(".safetensors"))).unlink()
    with pytest.raises(ks.errors.CorruptError, match="is missing"):
        loaded(OldView(tmp_path))


def test_a_step_that_appears_late_is_not_swept(tmp_path):
    """The catalog was read where nobody saw the manifest; by the time of the sweep it is there."""
    root = tmp_path / "run"
    ks.save(root / "step-00000007", values(1.0))
    view = OldView(root)
    (root / "step-00000007" / ".metadata").rename(tmp_path / "manifest")
    catalog = read_catalog(view)
    assert catalog.unfinished == ("step-00000007",)
    (tmp_path / "manifest").rename(root / "step-00000007" / ".metadata")
    sweep_leftovers(view, catalog, 1)
    assert loaded(root / "step-00000007") == 1.0


def test_a_slow_commit_is_not_taken_back_for_an_old_listing(tmp_path, monkeypatch):
    """What other machines have written need not be listed where the coordinator runs."""
    from keepstep.commit import publish

    assert commit_step.__module__ == publish.__name__
    monkeypatch.setattr(publish, "OVERTAKEN_S", -1.0)
    view = OldView(tmp_path, hides=lambda name: name.endswith(".safetensors"))
    ks.save(view, values(1.0))
    assert loaded(tmp_path) == 1.0


@pytest.mark.slow
@needs_fuse
@pytest.mark.case(156)
def test_two_machines_with_caches_of_a_minute(tmp_path):
    """One has looked at a step while the other was writing it: sizes, names, and that there was no manifest."""
    held = tmp_path / "held"
    with (
        served(held, tmp_path / "a") as a,
        served(held, tmp_path / "b", cached_s=60, fresh_open=True) as b,
        served(held, tmp_path / "c", cached_s=60, absent_s=1, fresh_open=True) as c,
        served(held, tmp_path / "d", cached_s=1) as d,
    ):
        looks = []

        class Looked(LocalStorage):
            def put(self, name, data):
                self.look(name)
                super().put(name, data)

            def put_new(self, name, data):
                self.look(name)
                return super().put_new(name, data)

            def look(self, name):
                for machine in (b, c, d):
                    for path in [machine / "step" / name, *sorted(machine.rglob("*"))]:
                        looks.append(path.exists() and path.stat().st_size)

        # The second time in place of the first: what is remembered of the old files must not matter either.
        for number in (1.0, 2.0):
            ks.save(Looked(a / "step"), values(number), overwrite=number == 2.0)
            assert loaded(b / "step") == number
            assert loaded(LocalStorage(d / "step", late_s=20.0)) == number
            assert loaded(LocalStorage(c / "step", late_s=20.0)) == number
        assert False in looks


def a_run(rank, root, machines, background, saves):
    """One start of a job whose ranks are on machines of their own: restores, trains, saves, and says after which steps."""
    enter()
    mount("--bind", str(machines[rank]), str(root))
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    state = ks.TrainState(model=model)
    with ks.Checkpointer(root, state, background=background, keep=ks.Keep(last=2)) as ckpt:
        restored = ckpt.restore(on_damage="raise").step
        assert restored == 0 or model.weight.eq(restored).all()
        for _ in range(saves):
            torch.nn.init.constant_(model.weight, state.progress.step + 1)
            ckpt.step()
            pending = ckpt.save()
            if pending is not None:
                pending.wait_committed(30)
            # Whoever looks into the run from another machine leaves what it saw in that machine's caches.
            read_catalog(LocalStorage(root))
            Path(f"{root}.said-{rank}").write_text(str(state.progress.step))
        return restored, state.progress.step


def runs_on_two_machines(folder, machines, ways):
    """Killed in the middle, then started again with its ranks on each other's machines, in each way to save."""
    root = folder / "run"
    root.mkdir()
    told = []
    for number, background in enumerate(ways):
        job = Job(folder / f"killed-{number}", 2, a_run, root, machines, background, 1000)
        job.wait_ready()
        before = told[-1] if told else 0
        said = Path(f"{root}.said-0")
        while not said.exists() or int(said.read_text() or before) < before + 3:
            job._reap()
            assert not job.ends, job.ends
        job.kill()
        job.wait()
        at_least = int(said.read_text())
        running = [report.pid for report in agents_below(folder)]
        stop_agents(folder)
        # (One that is just leaving refuses the next start, plainly.)
        wait_until(lambda running=running: not any(map(is_alive, running)))
        machines = machines[::-1]
        ends = run_job(folder / f"again-{number}", 2, a_run, root, machines, background, 2)
        assert ends[0] == ends[1]
        restored, last = ends[0]
        assert restored >= at_least
        assert last == restored + 2
        told.append(last)
    stop_agents(folder)
    return told


@pytest.mark.slow
@needs_fuse
@pytest.mark.case(156)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("habits", "ways"),
    [({"cached_s": 60, "fresh_open": True}, ["off", "agent"]), ({"refuse": POOR, "keeps_open": True}, ["thread"])],
)
def test_a_run_on_two_machines_is_killed_and_goes_on(rank_pool, tmp_path, habits, ways):
    with (
        served(tmp_path / "held", tmp_path / "a", **habits) as a,
        served(tmp_path / "held", tmp_path / "b", **habits) as b,
    ):
        (told,) = rank_pool(1)(alone, runs_on_two_machines, tmp_path, [a, b], ways, timeout_s=100)
    catalog = read_catalog(LocalStorage(tmp_path / "held"))
    assert catalog.steps[0].step == told[-1]
    assert not [name for name in files(tmp_path / "held") if name.endswith(".partial")]
