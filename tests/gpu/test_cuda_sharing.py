"""Ranks that share what they read, with targets on a device: what others have read goes there through host memory."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from tests.helpers.same import assert_same

pytestmark = pytest.mark.gpu


def made():
    seeded = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(3 << 20, generator=seeded),
        "half": torch.randn(1001, 33, generator=seeded).bfloat16(),
        "turned": torch.randn(513, 257, generator=seeded),
        "scalar": torch.tensor(3.5),
    }


def load_shared(rank, folder):
    ks.save(folder, {"t": made()})
    target = {name: torch.zeros_like(value, device="cuda") for name, value in made().items()}
    target["turned"] = torch.zeros(257, 513, device="cuda").t()
    report = ks.load(folder, into={"t": target}, share_reads=True)
    assert all(value.is_cuda for value in target.values())
    assert_same({name: value.cpu().contiguous() for name, value in target.items()}, made())
    return report.bytes_received


def test_devices_are_filled_with_what_others_have_read(rank_pool, tmp_path):
    assert min(rank_pool(2)(load_shared, str(tmp_path / "ck"))) > 0
