"""Ranks that save to a bucket: what they tell each other, and who sends how much, is as on a disk."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import keepstep as ks
from keepstep.storage.remote import RemoteStorage
from tests.helpers.storages import Watched
from tests.ranks.test_traffic import saves_of

MIB = 1 << 20


def two_jobs(rank, url, variables):
    """What four saves of a run have told and asked of others; and what this rank has sent of a state that ranks share."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        told = saves_of(rank, f"{url}/run", 200, "off")
        mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        torch.manual_seed(0)
        shared = {f"r{i}": torch.rand(size // 4) for i, size in enumerate([MIB, *[MIB // 32] * 16])}
        sharded = {f"s{i}": distribute_tensor(torch.rand(512, 256), mesh, [Shard(0)]) for i in range(2)}
        watched = Watched(RemoteStorage(f"{url}/balanced"))
        saved = ks.save(watched, {"shared": shared, "sharded": sharded})
        return told, saved.bytes_written, watched.written_bytes, saved.total_bytes


@pytest.mark.slow
@pytest.mark.case(107)
@pytest.mark.case(109)
def test_saves_to_a_bucket_tell_little_and_are_balanced(rank_pool, moto):
    url = f"s3://{moto.make_bucket('far-ranks')}/{secrets.token_hex(4)}"
    found = rank_pool(4)(two_jobs, url, moto.environment())
    for rank, (told, *_) in enumerate(found):
        first, second, changed, restarted = told
        # No plan goes round for a structure that did not change, nor for one that all ranks have changed alike.
        assert [phases for phases, _ in (second, changed, restarted)] == [first[0]] * 3
        assert second[1] < (1024 if rank else 4 * 1024)
        assert changed[1] < second[1] + 200
    sent = [bytes_written for _, bytes_written, *_ in found]
    assert max(sent) <= 1.2 * min(sent)
    for _, said, seen, total in found:
        assert said <= seen <= said + 128 * 1024
        assert total == sum(sent) > 2.5 * MIB
