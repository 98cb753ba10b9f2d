"""What a store may do to a run besides failing: answers without an end, keys that expire, spoilt bytes, and being away."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.errors import CheckpointError, CorruptError, StorageError
from keepstep.storage.base import Subfolder, read_blob
from keepstep.storage.parts import PartLimits
from keepstep.storage.remote import RemoteStorage
from keepstep.storage.retry import Patience
from tests.helpers.buckets import QUICK, SMALL_PARTS, a_run, advance, same, training, weights
from tests.helpers.proxy import BUSY, DROP, FLIP, SPOIL, STALL, TRICKLE, proxy_before
from tests.helpers.servers import KEY, SECRET

pytestmark = pytest.mark.slow

SHORTLY = Patience(tries=2, first_wait_s=0.01, longest_wait_s=0.01, request_s=0.5, total_s=1)


@pytest.fixture
def proxy(moto_of_small_parts):
    with proxy_before(moto_of_small_parts.address) as one:
        yield one


@pytest.fixture
def reached(moto_of_small_parts, proxy):
    """``reached(patience=…, …)``: one and the same root, through the proxy."""
    url = a_run(moto_of_small_parts, "hard")

    def open_it(library="obstore", patience=QUICK, limits=None, **options):
        given = moto_of_small_parts.options(proxy.endpoint, library) | options
        if "credential_provider" in options:
            del given["access_key_id"], given["secret_access_key"]
        small = SMALL_PARTS if library == "obstore" else PartLimits()
        return RemoteStorage(url, options=given, library=library, patience=patience, limits=limits or small)

    return open_it


# --- answers without an end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_an_answer_that_trickles_is_given_up(reached, proxy, library):
    """A byte now and then keeps a connection alive for ever; a request has a deadline all the same."""
    root = reached(library, SHORTLY)
    size = (1 << 18) + 50_000
    reached(library).put("a/x", bytes(size))
    with contextlib.suppress(StorageError):
        root.open(
            "a/x"
        ).close()  # The first request also makes a client, which on a busy machine takes longer than is given.
    blob = root.open("a/x")
    proxy.fault = lambda asked: TRICKLE if asked.method == "GET" else None
    for act in (lambda: blob.read_into(size - 9000, memoryview(bytearray(9000))), lambda: [*root.list("")]):
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"failed: s3://.*: the connection failed") as caught:
            act()
        assert caught.value.errno in (errno.ETIMEDOUT, errno.EIO)
        assert time.monotonic() - began < 15


def test_a_save_beyond_its_deadline_says_what_held_it_up(reached, proxy, moto_of_small_parts):
    """Nothing of it is committed, the older step stays, and what is saved later is whole."""
    root = reached()
    state = training()
    with ks.Checkpointer(root, state, background="thread", deadline_s=2, tolerate_failures=9) as saves:
        saves.restore()
        advance(state)
        saves.step()
        saves.save().wait_committed(30)
        proxy.fault = lambda asked: STALL if asked.method in ("PUT", "POST") and ".safetensors" in asked.path else None
        advance(state)
        saves.step()
        with pytest.raises(CheckpointError, match=r"step 2: nothing came from rank 0 within 2 s.*Nothing") as caught:
            saves.save().wait_committed(30)
        assert not any(secret in str(caught.value) for secret in (KEY, SECRET))
        proxy.fault = lambda asked: None
        assert committed_in(root) == [1]
        advance(state)
        saves.step()
        saves.save().wait_committed(30)
    assert committed_in(root) == [1, 3]
    other = training(seed=1)
    with ks.Checkpointer(root, other, background="off") as saves:
        assert saves.restore().step == 3
    assert same(weights(other), weights(state))


def committed_in(root):
    return sorted(int(name[5:13]) for name, _ in root.list("") if name.endswith("/.metadata"))


def test_a_store_that_asks_for_time_is_asked_again(reached, proxy):
    """429 with Retry-After, as often as a throttled store says it."""
    root = reached()
    proxy.fault = lambda asked: BUSY if asked.number % 3 else None
    state, other = training(), training(seed=1)
    ks.save(root, state)
    ks.load(root, other)
    assert same(weights(other), weights(state))
    assert proxy.done[str(BUSY[0])] > 10


# --- keys that expire -------------------------------------------------------------------------------------------------


class Renewed:
    """Keys for a minute; the first ones are good for nothing by the time they are used."""

    def __init__(self):
        self.given = 0

    def __call__(self):
        self.given += 1
        return {
            "access_key_id": "OLDKEY" if self.given == 1 else KEY,
            "secret_access_key": SECRET,
            "token": None,
            "expires_at": datetime.now(UTC) + timedelta(minutes=1),
        }


def expired(asked):
    """What S3 says to keys that were given for a time."""
    if "OLDKEY" in asked.headers.get("Authorization", asked.headers.get("authorization", "")):
        return 400, f"<Error><Code>ExpiredToken</Code><Message>{SECRET}</Message></Error>".encode()
    return None


def test_keys_that_expire_are_renewed(reached, proxy):
    """The next try has those that the provider gives by then. Keys that nobody renews are told at once."""
    keys, slower = Renewed(), Patience(tries=8, first_wait_s=0.2, longest_wait_s=0.3)
    root = reached(patience=slower, credential_provider=keys)
    proxy.fault = expired
    state, other = training(), training(seed=1)
    ks.save(root, state)
    ks.load(root, other)
    assert same(weights(other), weights(state))
    assert proxy.done["400"] >= 1
    assert keys.given > 1
    before = len(proxy.asked)
    with pytest.raises(StorageError, match="the credentials have expired: renew them") as caught:
        reached(patience=slower, access_key_id="OLDKEY").put("x", b"1")
    assert len(proxy.asked) == before + 1
    assert SECRET not in str(caught.value)


# --- spoilt bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["obstore", "fsspec"])
def test_bytes_that_are_spoilt_on_the_way_to_the_store_are_refused_by_it(reached, proxy, library):
    """They are signed: the store says so, and gets them again. In a part, the upload fails; nothing is under the name."""
    root = reached(library)
    data = bytes(range(256)) * 200
    root.put("a/there", b"old")
    spoilt = []
    proxy.fault = lambda asked: (
        SPOIL if asked.method == "PUT" and spoilt.append(asked) is None and len(spoilt) == 1 else None
    )
    root.put("a/there", data)
    assert read_blob(root, "a/there", 1 << 20) == data
    assert proxy.done["spoil"] == 1
    if library == "obstore":
        proxy.fault = lambda asked: SPOIL if "partNumber=2" in asked.path else None
        big = memoryview(data * 8)
        with pytest.raises(StorageError, match="the store got other bytes"), root.create("a/parts", len(big)) as upload:
            upload.write_at(0, big)
            upload.commit(len(big))
        proxy.fault = lambda asked: None
        assert [name for name, _ in root.list("")] == ["a/there"]


def test_bytes_that_no_store_has_checked_are_found_by_their_digests(reached, proxy):
    """Without a signature over the content a spoilt object is taken; a restore passes over it to the step before."""
    root = reached(unsigned_payload=True, limits=PartLimits())
    state, kept = training(), {}
    with ks.Checkpointer(root, state, background="off") as saves:
        saves.restore()
        for step in (1, 2):
            advance(state)
            saves.step()
            proxy.fault = lambda asked, step=step: (
                SPOIL if step == 2 and asked.method == "PUT" and "/model/" in asked.path else None
            )
            saves.save()
            kept[step] = weights(state)
    assert proxy.done["spoil"] == 1
    other = training(seed=1)
    with pytest.raises(CorruptError, match=r"model/rank-00000"):
        ks.load(Subfolder(root, "step-00000002"), other)
    with pytest.warns(ks.errors.DamageWarning, match="skipped"), ks.Checkpointer(root, other) as saves:
        assert saves.restore().step == 1
    assert same(weights(other), kept[1])


def test_bytes_that_are_spoilt_on_the_way_from_the_store_are_never_loaded(reached, proxy):
    """A flip in each body in turn: the load fails, and says so, or has read the right bytes; the step itself is good."""
    root = reached(limits=PartLimits())
    state = training()
    ks.save(root, state)
    reads = lambda asked: asked.method == "GET" and re.search(r"\.safetensors|\.metadata", asked.path)  # noqa: E731
    proxy.asked.clear()
    ks.load(root, training())
    count = sum(1 for asked in proxy.asked if reads(asked))
    for nth in range(count):
        seen = []
        proxy.fault = lambda asked, nth=nth, seen=seen: (
            FLIP if reads(asked) and seen.append(asked) is None and len(seen) == nth + 1 else None
        )
        other = training(seed=1)
        try:
            ks.load(root, other)
        except CheckpointError:
            assert same(weights(other), weights(training(seed=1)))
        else:
            assert same(weights(other), weights(state))
    assert proxy.done["flip"] == count >= 3
    proxy.fault = lambda asked: None
    ks.load(root, other)
    assert same(weights(other), weights(state))


# --- a store that is away ---------------------------------------------------------------------------------------------


def outage(root, proxy, away_s, step_s):
    """Training with a save every few steps, while the store is away for so long. Returns what was counted."""
    state = training()
    counted = {"during": 0, "longest_s": 0.0, "failed": 0}
    saves = ks.Checkpointer(
        root, state, every=ks.Every(steps=5), background="thread", when_busy="skip", tolerate_failures=10_000
    )
    with saves:
        saves.restore()

        def step():
            advance(state)
            began = time.monotonic()
            pending = saves.step()
            counted["longest_s"] = max(counted["longest_s"], time.monotonic() - began)
            time.sleep(step_s)
            return pending

        while (pending := step()) is None:
            pass
        pending.wait_committed(30)
        last_good = pending.step
        proxy.fault = lambda asked: DROP
        pendings, end = [], time.monotonic() + away_s
        while time.monotonic() < end:
            pending = step()
            counted["during"] += 1
            if pending is not None:
                pendings.append(pending)
        proxy.fault = lambda asked: None
        said = [str(error) for pending in pendings if (error := pending.committed.exception(60)) is not None]
        counted["failed"] = len(said)
        assert all("connection failed" in text or "has not answered within" in text for text in said)
        assert SECRET not in "".join(said)
        assert last_good in committed_in(root)
        end = time.monotonic() + 60
        while (pending := step()) is None or pending.committed.exception(60) is not None:
            assert time.monotonic() < end
    other = training(seed=1)
    with ks.Checkpointer(root, other, background="off") as again:
        assert again.restore().step == pending.step
    assert pending.step in committed_in(root)
    return counted


@pytest.mark.filterwarnings("ignore:tidying up failed")
def test_training_goes_on_while_the_store_is_away(reached, proxy):
    """Saves meanwhile fail or wait, by their patience; steps are not held up; afterwards they succeed, and are whole."""
    patience = Patience(tries=3, first_wait_s=0.05, longest_wait_s=0.1)
    counted = outage(reached(patience=patience), proxy, away_s=2.0, step_s=0.01)
    print(counted)
    assert counted["during"] > 5
    assert counted["failed"] >= 1
    assert counted["longest_s"] < 3.0


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:tidying up failed")
def test_training_goes_on_while_the_store_is_away_for_a_minute(reached, proxy):
    """With the usual patience. The first look that fails takes seconds, those after it next to nothing."""
    counted = outage(reached(patience=Patience()), proxy, away_s=60.0, step_s=0.05)
    print(counted)
    assert counted["during"] > 100
    assert counted["longest_s"] < 6.0
