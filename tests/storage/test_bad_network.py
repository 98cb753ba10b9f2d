"""Whole runs behind a network that fails in every way: none of the saves is lost, none is wrong, and training goes on."""

from __future__ import annotations

import random

import pytest

import keepstep as ks
from keepstep.storage.base import Subfolder, read_blob
from keepstep.storage.remote import RemoteStorage
from tests.helpers.buckets import PAGE, QUICK, SMALL_PARTS, a_run, advance, committed, same, training, weights
from tests.helpers.proxy import BUSY, CUT, DROP, LOST, RESET, SHORT, at_random, proxy_before

pytestmark = pytest.mark.slow

RATE = 0.05
SEED = 100


def storage(url, server, endpoint, library):
    # (s3fs makes no parts below 5 MiB: through it these files go whole.)
    limits = SMALL_PARTS if library == "obstore" else None
    options = server.options(endpoint, library)
    return RemoteStorage(url, options=options, library=library, patience=QUICK, limits=limits)


def saves_and_loads(rank, url, server, endpoint, library, count):
    """Each save is read back by the way it went, before the next one; the oldest go meanwhile."""
    root = storage(url, server, endpoint, library)
    state, other = training(width=160), training(seed=1, width=160)
    keep = ks.Keep(last=2)
    with ks.Checkpointer(
        root, state, every=ks.Every(steps=1), keep=keep, tolerate_failures=0, background="thread"
    ) as saves:
        saves.restore()
        for step in range(1, count + 1):
            advance(state)
            saves.step().wait_committed(60)
            ks.load(Subfolder(root, f"step-{step:08}"), other)
            assert same(weights(other), weights(state)), step
    return {key: value.tolist() for key, value in weights(state).items()}


def resumed(url, server, endpoint, library):
    """What another start of the job finds, through the same network."""
    state = training(seed=2, width=160)
    with ks.Checkpointer(storage(url, server, endpoint, library), state, background="off") as saves:
        step = saves.restore().step
    return step, {key: value.tolist() for key, value in weights(state).items()}


def campaign(server, library, count, pool=None):
    url = a_run(server, "bad")
    beside = RemoteStorage(url, options=server.options())
    with proxy_before(server.address) as proxy:
        dice, lost_beginnings = at_random(RATE, SEED), []

        def fault(asked):
            kind = dice(asked)
            if kind in (LOST, RESET, CUT, SHORT) and "?uploads" in asked.path:
                lost_beginnings.append(kind)
            return kind

        proxy.fault = fault
        way = (url, server, proxy.endpoint, library)
        if pool is None:
            kept = saves_and_loads(0, *way, count)
        else:
            kept, *others = pool(2)(saves_and_loads, *way, count, timeout_s=1500)
            assert others == [kept]
        assert resumed(*way) == (count, kept)
        asked, failed = sum(proxy.done.values()), sum(proxy.done.values()) - proxy.done["well"]
        print(f"{count} saves by {library}: {asked} requests, {failed} of them failed: {dict(proxy.done)}")
    assert failed > count * RATE * 4
    # What was replaced, given up or sent twice has gone as well.
    assert committed(beside) == [count - 1, count]
    folders = {name.partition("/")[0] for name, _ in beside.list("") if "/" in name}
    assert folders == {"incarnations", f"step-{count - 1:08}", f"step-{count:08}"}
    assert all(size >= PAGE for name, size in beside.list("") if name.endswith(".safetensors"))
    unfinished = server.client().list_multipart_uploads(Bucket="runs").get("Uploads") or []
    # (A store that has begun an upload and could not say so keeps it: nobody knows its name.)
    left = [each["Key"] for each in unfinished if each["Key"].startswith(url.rpartition("/")[2])]
    assert len(left) <= len(lost_beginnings)


@pytest.mark.parametrize(("library", "count"), [("obstore", 14), ("fsspec", 8)])
def test_saves_behind_a_network_that_fails(moto_of_small_parts, library, count):
    """At 5 % of requests failing in every way there is, those of loads and deletions too: none lost, none wrong."""
    campaign(moto_of_small_parts, library, count)


def test_saves_of_two_ranks_behind_a_network_that_fails(moto_of_small_parts, rank_pool):
    campaign(moto_of_small_parts, "obstore", 4, rank_pool)


def test_a_lost_answer_is_settled_also_when_looking_fails_at_first(moto_of_small_parts, data):
    """The completion was obeyed, its second try hears of no such upload, and the look at the object is cut off."""
    root = RemoteStorage(a_run(moto_of_small_parts), options=moto_of_small_parts.options())
    with proxy_before(moto_of_small_parts.address) as proxy:
        looks = []

        def fault(asked):
            if asked.method == "GET" and "a/settled" in asked.path:
                looks.append(asked)
                return (DROP, 503, None)[min(len(looks), 3) - 1]
            return LOST if asked.method == "POST" and "uploadId" in asked.path else None

        proxy.fault = fault
        part = data[: 40 * PAGE]
        with storage(root.url, moto_of_small_parts, proxy.endpoint, "obstore").create("a/settled", len(part)) as upload:
            upload.write_at(0, memoryview(part))
            upload.commit(len(part))
        assert len(looks) == 3
    assert read_blob(root, "a/settled", 1 << 20) == part


def test_parts_of_fsspec_are_sent_again(moto, data):
    """By the library, since they come only once; and what its last request has done is found out."""
    root = RemoteStorage(a_run(moto), options=moto.options(library="fsspec"), library="fsspec")
    with proxy_before(moto.address) as proxy:
        bad = storage(root.url, moto, proxy.endpoint, "fsspec")
        sent, lost, faults = [], [], {1: 503, 3: BUSY, 5: RESET}

        def fault(asked):
            if "uploadId" not in asked.path or asked.method not in ("PUT", "POST"):
                return None
            sent.append(asked)
            if asked.method == "POST" and not lost:
                lost.append(asked)
                return LOST
            return faults.get(len(sent))

        proxy.fault = fault
        with bad.create("a/parts", len(data)) as upload:
            upload.write_at(0, memoryview(data))
            upload.commit(len(data))
        assert proxy.done["503"] == proxy.done[str(BUSY[0])] == proxy.done["reset"] == 1
    assert read_blob(root, "a/parts", 1 << 30) == data


@pytest.fixture
def data():
    """Three parts that no two of are the same."""
    return random.Random(SEED).randbytes((17 << 20) + 5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_five_hundred_saves_behind_a_network_that_fails(moto_of_small_parts, library):
    campaign(moto_of_small_parts, library, 500)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_five_hundred_saves_of_two_ranks_behind_a_network_that_fails(moto_of_small_parts, rank_pool):
    campaign(moto_of_small_parts, "obstore", 500, rank_pool)
