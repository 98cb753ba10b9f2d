"""Very large files have larger blocks, so that their headers stay within what safetensors allows."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.errors import CorruptError, UsageError
from keepstep.format import shardfile
from keepstep.format.shardfile import BLOCK_BYTES, MAX_BLOCKS, block_size


def test_blocks_grow_only_when_there_would_be_too_many():
    assert block_size(0) == block_size(BLOCK_BYTES * MAX_BLOCKS) == BLOCK_BYTES
    assert block_size(BLOCK_BYTES * MAX_BLOCKS + 1) == 2 * BLOCK_BYTES
    assert block_size(10 << 40) * MAX_BLOCKS >= 10 << 40


def test_a_file_with_larger_blocks_is_read_and_proved(tmp_path, monkeypatch):
    monkeypatch.setattr(shardfile, "MAX_BLOCKS", 2)
    value = torch.arange(300_000, dtype=torch.int32)
    ks.save(tmp_path / "step", {"model": {"w": value, "b": value[:7].clone()}})
    target = {"model": {"w": torch.zeros_like(value), "b": torch.zeros(7, dtype=torch.int32)}}
    ks.load(tmp_path / "step", into=target)
    assert torch.equal(target["model"]["w"], value)
    *_, result = verify(ks.LocalStorage(tmp_path / "step"))
    assert not result.problems
    file = next((tmp_path / "step" / "model").iterdir())
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptError, match="block at byte"):
        ks.load(tmp_path / "step", into=target)
    *_, result = verify(ks.LocalStorage(tmp_path / "step"))
    assert [problem.kind for problem in result.problems] == ["blocks"]


def test_a_header_that_no_reader_would_take_is_refused_while_saving(tmp_path, monkeypatch):
    monkeypatch.setattr(shardfile, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(UsageError, match="Nothing was written"):
        ks.save(tmp_path / "step", {"model": {f"w{i}": torch.zeros(1) for i in range(100)}})
    assert not list(tmp_path.rglob("*.safetensors*"))
