"""The copy of the manifest that the state file of rank 0 keeps in its header."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
import torch

import keepstep as ks
from keepstep.errors import CorruptError
from keepstep.format.box import whole
from keepstep.format.manifest import pack_manifest, parse_manifest
from keepstep.format.shardfile import COPY_NAME, MAX_COPY_BYTES, Entry, manifest_copy, pack_header
from keepstep.storage.base import read_blob


def header_with(packed: str) -> bytes:
    text = json.dumps({"__metadata__": {"keepstep": "{}", COPY_NAME: packed}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("background", ["off", "thread"])
def test_the_state_file_of_rank_0_keeps_the_manifest_but_for_its_files(tmp_path, background):
    state = ks.TrainState(model=torch.nn.Linear(3, 2), config={"lr": 0.1})
    with ks.Checkpointer(tmp_path, state, background=background) as checkpointer:
        checkpointer.restore()
        checkpointer.step(loss=float("nan"))
        checkpointer.save()
    step = ks.LocalStorage(tmp_path / "step-00000001")
    manifest = parse_manifest(read_blob(step, ".metadata", 1 << 20), "it")
    for name, size in step.list(""):
        if name.endswith(".safetensors"):
            raw = read_blob(step, name, size)
            copy = manifest_copy(raw[: int.from_bytes(raw[:8], "little") + 8], name)
            if name.startswith("state/"):
                assert copy.replace(b'"files": {}', b"") != copy
                assert copy.partition(b'"files"')[0] == pack_manifest(manifest).partition(b'"files"')[0]
            else:
                assert copy == b""


def test_a_copy_costs_a_file_little():
    entry = Entry("w", "w", "uint8", (4,), whole((4,)), 0, 4)
    text = json.dumps([[f"model/layers.{n}.weight", "float32", 3, "model", "same"] for n in range(300)]).encode()
    with_it = pack_header((entry,), 4, save_id="0" * 8, step=1, rank=0, manifest=text)
    assert manifest_copy(with_it, "f") == text
    assert len(with_it) < len(text) / 2


@pytest.mark.parametrize(
    "packed",
    ["!", "AAAA", base64.b64encode(zlib.compress(b"x" * 100)[:-5]).decode()],
    ids=["no base64", "no zlib", "cut off"],
)
def test_a_copy_that_cannot_be_unpacked_is_refused(packed):
    with pytest.raises(CorruptError, match="copy of the manifest"):
        manifest_copy(header_with(packed), "state/f")


def test_a_copy_that_would_fill_the_memory_is_refused():
    bomb = zlib.compressobj(9)
    packed = b"".join([bomb.compress(bytes(1 << 20)) for _ in range((MAX_COPY_BYTES >> 20) + 2)]) + bomb.flush()
    with pytest.raises(CorruptError, match="larger than"):
        manifest_copy(header_with(base64.b64encode(packed).decode()), "state/f")
