"""The hint ``latest``: it moves forward, whoever comes late, and never back by accident."""

from __future__ import annotations

import secrets
import threading
from io import StringIO

import msgspec
import pytest
import torch
from rich.console import Console

import keepstep as ks
from keepstep.cli.formats import Found
from keepstep.cli.showing import Wanted, print_step, read_step
from keepstep.cli.verifying import verify_root, verify_step
from keepstep.commit.catalog import read_manifest, step_storage
from keepstep.commit.publish import Hint, point_latest, read_hint
from keepstep.errors import CorruptError
from keepstep.storage.base import read_blob
from keepstep.storage.memory import MemoryStorage
from keepstep.storage.remote import RemoteStorage
from keepstep.storage.retry import Patience
from tests.helpers.proxy import LOST, proxy_before


def train(root, steps):
    state = ks.TrainState(weight=torch.ones(2))
    with ks.Checkpointer(root, state, background="off") as checkpointer:
        checkpointer.restore()
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()


def manifest_of(incarnation, step, root):
    manifest = read_manifest(step_storage(root, 1))
    lineage = msgspec.structs.replace(manifest.lineage, incarnation=incarnation)
    return msgspec.structs.replace(manifest, step=step, lineage=lineage)


@pytest.fixture
def root():
    storage = MemoryStorage()
    train(storage, 1)
    return storage


def told(root):
    hint = read_hint(root)
    return hint.incarnation, hint.step


def test_it_names_the_newest_by_incarnation_and_step(root):
    """A rollback is newer, although its number is smaller; the same step saved again is told by its digest."""
    assert told(root) == (1, 1)
    for incarnation, step, moves in (
        (1, 5, True),
        (2, 3, True),
        (1, 9, False),
        (2, 2, False),
        (2, 3, True),
        (3, 1, True),
    ):
        before = told(root)
        mark = secrets.token_hex(8)
        assert point_latest(root, manifest_of(incarnation, step, root), mark) is moves
        assert told(root) == ((incarnation, step) if moves else before)
        assert (read_hint(root).manifest == mark) is moves


def test_who_repairs_may_move_it_back(root):
    assert point_latest(root, manifest_of(7, 7, root), "0" * 16)
    assert point_latest(root, manifest_of(1, 1, root), "1" * 16, back=True)
    assert told(root) == (1, 1)


def test_what_names_nothing_is_replaced(root):
    """Garbage, and JSON that is no hint, stand in nobody's way; that it is garbage is told to who reads it."""
    for garbage in (b"", b"\xff\xfe", b"step-00000001\n", b'{"step": "x"}', b"x" * (1 << 17)):
        root.put("latest", garbage)
        with pytest.raises(CorruptError, match="latest"):
            read_hint(root)
        assert point_latest(root, manifest_of(1, 4, root), "0" * 16)
        assert told(root) == (1, 4)
    root.delete(["latest"])
    assert read_hint(root) is None
    assert point_latest(root, manifest_of(1, 2, root), "0" * 16)
    assert told(root) == (1, 2)


class Zombies:
    """A storage in which whoever is called so falls asleep between the look at the hint and its change."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.asleep, self.wake = threading.Event(), threading.Event()

    def put_over(self, name, data, expected):
        if threading.current_thread().name == "zombie":
            self.asleep.set()
            assert self.wake.wait(30)
        return super().put_over(name, data, expected)


class ZombiesInMemory(Zombies, MemoryStorage):
    pass


class ZombiesFarAway(Zombies, RemoteStorage):
    pass


def check_that_a_zombie_moves_nothing_back(root):
    """It has looked, and sleeps; a later start moves the hint; it wakes up, and finds another one than it expects."""
    train(root, 1)
    assert root.swaps
    moved = []
    old, new = manifest_of(1, 2, root), manifest_of(2, 1, root)
    zombie = threading.Thread(target=lambda: moved.append(point_latest(root, old, "0" * 16)), name="zombie")
    zombie.start()
    assert root.asleep.wait(30)
    assert point_latest(root, new, "1" * 16)
    root.wake.set()
    zombie.join()
    assert moved == [False]
    assert read_hint(root) == Hint(1, 2, "step-00000001", "1" * 16)


@pytest.mark.parametrize(
    "root", [ZombiesInMemory(), ZombiesFarAway(f"memory://{secrets.token_hex(4)}/run")], ids=["memory", "url"]
)
def test_a_zombie_moves_nothing_back(root):
    check_that_a_zombie_moves_nothing_back(root)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_a_zombie_moves_nothing_back_in_a_bucket(moto, library):
    url = f"s3://{moto.make_bucket('latest')}/{secrets.token_hex(4)}"
    root = ZombiesFarAway(url, options=moto.options(library=library), library=library)
    check_that_a_zombie_moves_nothing_back(root)


@pytest.mark.slow
def test_a_zombie_moves_nothing_back_where_versions_have_numbers(gcs):
    url = f"gs://{gcs.make_bucket('latest')}/{secrets.token_hex(4)}"
    check_that_a_zombie_moves_nothing_back(ZombiesFarAway(url, options=gcs.options()))


@pytest.mark.slow
def test_a_zombie_moves_nothing_back_in_a_container(azurite):
    url = f"az://{azurite.make_bucket('latest')}/{secrets.token_hex(4)}"
    check_that_a_zombie_moves_nothing_back(ZombiesFarAway(url, options=azurite.options()))


@pytest.mark.slow
def test_a_store_without_conditions_has_a_hint_all_the_same(rclone):
    """And says in every manifest that it has none."""
    root = RemoteStorage(f"s3://{rclone.make_bucket('latest')}/{secrets.token_hex(4)}", options=rclone.options())
    train(root, 2)
    assert (root.exclusive, root.swaps) == (False, False)
    assert told(root) == (1, 2)
    assert not point_latest(root, manifest_of(1, 1, root), "0" * 16)
    assert read_manifest(step_storage(root, 2)).lineage.exclusive is False
    step = step_storage(root, 2)
    facts = read_step(Found("keepstep", step, read_manifest(step)), Wanted())
    shown = Console(width=200, file=StringIO(), markup=False)
    print_step(facts, shown)
    assert "store       gives a name to more than one writer" in shown.file.getvalue()
    assert msgspec.json.decode(msgspec.json.encode(facts))["lineage"]["exclusive"] is False
    quiet = Console(file=StringIO(), stderr=True)
    assert verify_step(step_storage(root, 2), "step-00000002", quiet).notes
    (note,) = verify_root(root, quiet).notes
    assert "before these steps were committed: 1, 2; only one job at a time" in note


@pytest.mark.slow
def test_an_answer_that_is_lost_is_no_other_writer(moto):
    """The hint was put in place; the second try finds what this very call has written."""
    with proxy_before(moto.address) as proxy:
        url = f"s3://{moto.make_bucket('latest')}/{secrets.token_hex(4)}"
        patience = Patience(first_wait_s=0.001, longest_wait_s=0.01)
        root = RemoteStorage(url, options=moto.options(proxy.endpoint), patience=patience)
        root.put("a", b"old")
        lost = []

        def lose(asked):
            if asked.method == "PUT" and not lost:
                lost.append(asked)
                return LOST
            return None

        proxy.fault = lose
        assert root.put_over("a", b"new", b"old") is True
        assert len(lost) == 1
        assert root.put_over("a", b"newer", b"old") is False
        assert read_blob(root, "a", 10) == b"new"
        proxy.fault = lambda asked: (
            (501, b"<Error><Code>NotImplemented</Code></Error>")
            if "if-match" in {key.lower() for key in asked.headers} and asked.method == "PUT"
            else None
        )
        assert root.put_over("a", b"newest", b"new") is True
        assert root.put_over("a", b"none", b"new") is False
        assert read_blob(root, "a", 10) == b"newest"
        assert root.swaps is False
