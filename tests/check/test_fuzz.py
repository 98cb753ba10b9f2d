"""No change of a byte goes unnoticed, and no number in a manifest makes verify fail in a way of its own."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.errors import CheckpointError
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.format.shardfile import digest
from keepstep.storage.local import LocalStorage
from tests.conftest import SEED

pytestmark = pytest.mark.fuzz
NUMBERS = (-1, 0, 1, 2, 3, 7, 4096, 10**6, 2**31, 2**40, 2**62, 2**63 - 1)
TEXTS = ("", "..", "../../x", "/etc/passwd", "S", "O", "SS", "R", "float64", "bfloat16", "state", "big", "\x00")


@pytest.fixture
def step(tmp_path) -> Path:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    ks.save(tmp_path / "step", {"model": model, "optimizer": optimizer, "note": {"a": (1, {2.5}), "b": b"x"}})
    return tmp_path / "step"


def test_every_flipped_bit_is_found(step):
    files = sorted(path for path in step.rglob("*") if path.is_file())
    rng = random.Random(SEED)
    missed = []
    for _ in range(80):
        file = rng.choice(files)
        good = file.read_bytes()
        at, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
        bad = bytearray(good)
        bad[at] ^= bit
        file.write_bytes(bad)
        if list(verify(LocalStorage(step)))[-1].ok:
            missed.append((file.name, at, bit))
        file.write_bytes(good)
    assert not missed
    assert list(verify(LocalStorage(step)))[-1].ok


def test_every_cut_is_found(step):
    rng = random.Random(SEED)
    for file in [path for path in step.rglob("*") if path.is_file()]:
        good = file.read_bytes()
        for size in (0, 1, 7, 8, rng.randrange(len(good)), len(good) - 1):
            file.write_bytes(good[:size])
            assert not list(verify(LocalStorage(step)))[-1].ok, (file, size)
        file.write_bytes(good)


@pytest.mark.slow
def test_a_manifest_with_other_numbers_is_refused_or_found_wrong_in_time(step):
    """Signed again, so that the digest is right: what a hostile writer would do."""
    path = step / MANIFEST_NAME
    good = json.loads(path.read_bytes())
    spots = [spot for name in good if name not in ("digest", "created") for spot in leaves(good[name], (name,))]
    rng = random.Random(SEED)
    accepted = []
    for _ in range(300):
        manifest = json.loads(json.dumps(good))
        for spot in rng.sample(spots, rng.choice((1, 1, 1, 2, 3))):
            old = at(manifest, spot[:-1])[spot[-1]]
            at(manifest, spot[:-1])[spot[-1]] = rng.choice(TEXTS if isinstance(old, str) else NUMBERS)
        path.write_bytes(signed(manifest))
        began = time.perf_counter()
        try:
            if list(verify(LocalStorage(step)))[-1].ok:
                accepted.append(manifest)
        except CheckpointError:
            pass
        assert time.perf_counter() - began < 5, manifest
    # What describes a step without saying where its bytes are may be anything; of a tensor that is its rule.
    for name in ("step", "save_id", "layouts", "files"):
        assert all(manifest[name] == good[name] for manifest in accepted), name
    assert all([t[:4] for t in manifest["tensors"]] == [t[:4] for t in good["tensors"]] for manifest in accepted)
    assert len(accepted) < 200


def test_a_lost_folder_is_damage(step):
    shutil.rmtree(step / "model")
    assert [problem.kind for problem in list(verify(LocalStorage(step)))[-1].problems] == ["missing"]


def leaves(value, spot):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*spot, key))
    elif value is not None:
        yield spot


def at(value, spot):
    for key in spot:
        value = value[key]
    return value


def signed(manifest) -> bytes:
    fields = [f'"{name}": {json.dumps(value)}' for name, value in manifest.items() if name != "digest"]
    text = ("{\n" + ",\n".join(fields)).encode()
    return text + b',\n"digest": "%016x"\n}\n' % digest(text)
