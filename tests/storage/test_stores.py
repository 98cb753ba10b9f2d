"""Every kind of store that there is a server for, through each library that reaches it: whole runs, and what is refused."""

from __future__ import annotations

import errno
import gc
import secrets

import pytest

import keepstep as ks
from keepstep.errors import StorageError
from keepstep.storage.parts import PartLimits
from keepstep.storage.remote import RemoteStorage
from tests.helpers.agents import agent_of, wait_until
from tests.helpers.buckets import a_run, advance, agents_end, committed, environment, same, training, weights
from tests.helpers.servers import AZURE_KEY, SECRET

pytestmark = pytest.mark.slow

# (the fixture, the library, whether the store keeps conditions)
STORES = [
    ("gcs", "obstore", True),
    ("fake_gcs", "fsspec", True),
    ("gcp", "fsspec", False),
    ("azurite", "obstore", True),
    ("azurite", "fsspec", True),
]
# The smallest that Google takes through gcsfs.
PARTS = PartLimits(usual_bytes=1 << 18, least_bytes=1 << 18)
GUARDED = "cannot create an object only if it is absent"


@pytest.fixture(params=STORES, ids=lambda store: f"{store[0]}-{store[1]}")
def store(request):
    name, library, keeps = request.param
    return request.getfixturevalue(name), library, keeps


@pytest.fixture
def root(store):
    server, library, _ = store
    return RemoteStorage(a_run(server), options=server.options(library=library), library=library, limits=PARTS)


def test_a_run_is_saved_pruned_and_restored(store, root, caplog):
    """In parts and whole; another start resumes; what another has committed under a name is not taken."""
    state = training(width=300)
    with ks.Checkpointer(root, state, every=ks.Every(steps=1), keep=ks.Keep(last=2), background="thread") as saves:
        assert saves.restore().fresh
        for _ in range(3):
            advance(state)
            saves.step(loss=1.0)
    assert root.exclusive is store[2]
    assert (GUARDED in caplog.text) is not store[2]
    assert committed(root) == [2, 3]
    other = training(seed=1, width=300)
    with ks.Checkpointer(root, other, background="off") as saves:
        assert saves.restore().step == 3
    assert same(weights(other), weights(state))
    with pytest.raises(ks.errors.StepExistsError, match="is already committed"):
        ks.save(root_of(store, root, "step-00000003"), state)


def root_of(store, root, folder):
    server, library, _ = store
    return RemoteStorage(f"{root.url}/{folder}", options=server.options(library=library), library=library)


@pytest.mark.case(149)
def test_an_upload_that_is_given_up_leaves_nothing(store, root):
    """Not under its name, and not when what was left of it is cleaned up; the name is free."""
    if store[0].name == "gcp-emulator":
        pytest.skip("this emulator does not know how to give up an upload, and gcsfs asks it again for half a minute")
    size = 1 << 20
    with pytest.raises(KeyError), root.create("a/dropped", size) as upload:
        upload.write_at(0, memoryview(bytes(size)))
        raise KeyError
    gc.collect()
    assert list(root.list("")) == []
    with root.create("a/dropped", size) as upload:
        upload.write_at(0, memoryview(b"x" * size))
        upload.commit(size)
    assert dict(root.list("")) == {"a/dropped": size}
    root.delete(["a/dropped", "a/never-there"])
    assert list(root.list("")) == []


def test_a_bucket_that_is_not_there_and_keys_that_are_wrong(store):
    """What is missing is said, with no secret; it is no empty run."""
    server, library, _ = store
    url = f"{server.scheme}://no-such-bucket-{secrets.token_hex(4)}/run"
    lost = RemoteStorage(url, options=server.options(library=library), library=library)
    with pytest.raises(StorageError, match=r"the (bucket|container) does not exist|no such object") as caught:
        lost.put("x", b"1")
    assert caught.value.errno in (errno.ENODEV, errno.ENOENT)
    if server.scheme == "az":
        wrong = {key: flipped(value) for key, value in server.options(library=library).items()}
        with pytest.raises(StorageError, match=r"does not know these credentials|access was denied") as caught:
            list(
                RemoteStorage(f"{server.scheme}://{server.make_bucket('runs')}/x", options=wrong, library=library).list(
                    ""
                )
            )
        assert caught.value.errno == errno.EACCES
    assert not any(secret in str(caught.value) for secret in (SECRET, AZURE_KEY))


def flipped(value):
    """The same options with another key of the same form."""
    return value.replace(AZURE_KEY, AZURE_KEY[:8] + "AAAA" + AZURE_KEY[12:]) if isinstance(value, str) else value


def test_names_that_a_library_cannot_reach(azurite):
    """They are refused: as another name the object would be found by nobody."""
    root = RemoteStorage(a_run(azurite), options=azurite.options(library="fsspec"), library="fsspec")
    with pytest.raises(StorageError, match="names with a question mark"):
        root.put("a?b", b"1")
    assert list(root.list("")) == []


def test_azure_by_its_url_alone(azurite):
    """Through an agent, which finds account and key in the environment."""
    url = a_run(azurite)
    with environment(azurite), agents_end(url):
        state = training()
        with ks.Checkpointer(url, state) as saves:
            saves.restore()
            advance(state)
            saves.step()
            saves.save().wait_committed(30)
        wait_until(lambda: agent_of(url).committed == 1)
        other = training(seed=1)
        ks.load(f"{url}/step-00000001", other)
        assert same(weights(other), weights(state))
