"""Checkpoints of every released format version are read for ever, and give what was put into them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.errors import FormatError
from keepstep.format.manifest import FORMAT_MAJOR, FORMAT_MINOR
from tests.golden.state import own, tensors, values
from tests.helpers.forge import Forgery, at
from tests.helpers.same import assert_same

VERSIONS = sorted(path.parent for path in Path(__file__).parent.glob("*/checksums.txt"))


def test_the_version_that_is_written_has_a_golden_checkpoint():
    assert f"{FORMAT_MAJOR}.{FORMAT_MINOR}" in [folder.name for folder in VERSIONS]


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def version(request):
    return request.param


def test_the_files_are_those_that_were_written(version):
    lines = (version / "checksums.txt").read_text().splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    found = {path.relative_to(version).as_posix() for path in (version / "step").rglob("*") if path.is_file()}
    assert found == set(listed)
    for name, checksum in listed.items():
        assert hashlib.sha256((version / name).read_bytes()).hexdigest() == checksum, name


@pytest.mark.case(125)
def test_a_golden_checkpoint_is_loaded(version):
    """On one rank, although two had written it."""
    whole = tensors()
    model = {key: torch.zeros_like(value, dtype=torch.float32).to(value.dtype) for key, value in whole.items()}
    model["tied"] = model["complex128"]
    state = {"model": model, "values": {}, "own": ks.per_rank(own(7), on_world_change="same_rank")}
    report = ks.load(version / "step", state)
    assert (report.step, report.saved_world, report.world) == (1200, 2, 1)
    assert model.pop("tied") is model["complex128"]
    assert_same(model, whole)
    assert_same(state["values"], values())
    assert_same(state["own"].value, own(0))


@pytest.mark.case(125)
def test_a_golden_checkpoint_is_opened_and_verified(version):
    opened = ks.open(version / "step")
    whole = tensors()
    assert len(opened) == len(whole) + 1
    for key, value in whole.items():
        assert_same(opened["model/" + key.replace("~", "~0").replace("/", "~1")], value)
    assert_same(opened["model/tied"], whole["complex128"])
    assert_same(opened.values_of("values"), values())
    *_, last = verify(ks.LocalStorage(version / "step"))
    assert last.ok


@pytest.mark.case(125)
def test_a_newer_format_is_refused_with_its_version_and_what_to_do(version):
    newer = Forgery(ks.LocalStorage(version / "step")).edit(at("format", [FORMAT_MAJOR + 1, 3])).storage()
    for call in (lambda: ks.open(newer), lambda: ks.load(newer, {"model": {}})):
        with pytest.raises(
            FormatError, match=rf"format {FORMAT_MAJOR + 1}\.3; this keepstep reads format {FORMAT_MAJOR}"
        ) as caught:
            call()
        assert "Install a keepstep that knows this version" in caught.value.remedy
