"""Steps copied to and from an object store behind a network that fails."""

from __future__ import annotations

import secrets

import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.copying import copy_step
from keepstep.errors import StorageError
from keepstep.storage.parts import PartLimits
from keepstep.storage.remote import RemoteStorage
from keepstep.storage.retry import Patience
from tests.helpers.proxy import at_random, proxy_before

pytestmark = pytest.mark.slow

PAGE = 4096
QUICK = Patience(tries=2, first_wait_s=0.002, longest_wait_s=0.02, request_s=20)
SMALL_PARTS = PartLimits(usual_bytes=16 * PAGE, least_bytes=PAGE)
COPIES, TRIES = 6, 20


def blobs(root, step):
    found = {}
    for name, size in root.list(f"step-{step:08d}"):
        data = bytearray(size)
        with root.open(name) as blob:
            blob.read_into(0, memoryview(data))
        found[name] = bytes(data)
    return found


@pytest.fixture(scope="module")
def saved():
    """A run in memory with three steps, each of several parts."""
    memory = ks.MemoryStorage("saved")
    torch.manual_seed(0)
    with ks.Checkpointer(
        memory, ks.TrainState(model=torch.nn.Linear(200, 400)), keep=ks.Keep(last=None), background="off"
    ) as saves:
        saves.restore()
        for _ in range(3):
            saves.step()
            saves.save()
    return memory


def test_copies_through_a_network_that_fails_are_whole_or_not_there(saved, moto_of_small_parts):
    """Of the requests 15 % fail, in every way there is, up and down. What was cut off goes on; nothing is lost or wrong."""
    server = moto_of_small_parts
    with proxy_before(server.address) as proxy:
        proxy.fault = at_random(0.15, seed=7)
        failed = 0
        for count in range(COPIES):
            url, step = f"s3://{server.make_bucket('runs')}/copies-{secrets.token_hex(4)}", 1 + count % 3
            options = {"patience": QUICK, "limits": SMALL_PARTS}
            bad = RemoteStorage(url, options=server.options(proxy.endpoint), **options)
            good = RemoteStorage(url, options=server.options(), **options)
            back = ks.MemoryStorage("back")
            for source, target, look in ((saved, bad, good), (bad, back, back)):
                for left in reversed(range(TRIES)):
                    try:
                        copied = copy_step(source, target, step, threads=2)
                        break
                    except StorageError:
                        failed += 1
                        assert left
                        assert [found.step for found in read_catalog(look).steps] in ([], [step])
                assert copied.outcome in ("copied", "there")
                assert blobs(look, step) == blobs(saved, step)
            *_, verified = verify(step_storage(back, step))
            assert verified.ok
        wrong = sum(proxy.done.values()) - proxy.done["well"]
        print(f"{sum(proxy.done.values())} requests, {wrong} of them failed; {failed} copies began anew")
        assert wrong > 15
