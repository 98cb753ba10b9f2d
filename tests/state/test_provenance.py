"""What a run was made with: recorded in the manifest, shown, compared at a load, never given back."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.state import provenance


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Optim:
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)


def saved_config(step: Path) -> object:
    return json.loads((step / ".metadata").read_text())["config"]


@pytest.mark.parametrize(
    ("config", "recorded"),
    [
        (None, None),
        ("small.yaml", "small.yaml"),
        ({"lr": 0.1, "layers": [1, 2], "deep": {"on": True, "none": None}}, None),
        (Optim(0.1), {"lr": 0.1, "betas": [0.9, 0.99]}),
        (argparse.Namespace(lr=0.1, name="a", path=Path("data/x")), {"lr": 0.1, "name": "a", "path": "data/x"}),
        ({"optim": Optim(float("inf")), "nan": float("nan")}, {"optim": {"lr": "inf", "betas": [0.9, 0.99]}, "nan": "nan"}),
        ({1: 2**70, (1, 2): -(2**63), None: {3, 1}}, {"1": str(2**70), "[1,2]": -(2**63), "null": [1, 3]}),
        ({"dtype": torch.bfloat16, "device": torch.device("cpu")}, {"dtype": "torch.bfloat16", "device": "cpu"}),
        ({"bytes": b"ab", "odd": "\ud800", "colour": Colour.RED}, {"bytes": "b'ab'", "odd": "?", "colour": "RED"}),
        ({"act": torch.relu, "kind": dict}, {"act": "builtins.relu", "kind": "builtins.dict"}),
    ],
)  # fmt: skip
def test_a_configuration_is_json_in_the_manifest(config, recorded, tmp_path):
    ks.save(tmp_path / "step", ks.TrainState(config=config))
    expected = config if recorded is None else recorded
    if isinstance(expected, dict) and "act" in expected:
        found = saved_config(tmp_path / "step")
        assert found["kind"] == "builtins.dict"
        assert "relu" in found["act"]
        assert "0x" not in found["act"]
    else:
        assert saved_config(tmp_path / "step") == expected
        assert ks.open(tmp_path / "step").describe()["config"] == expected


def test_what_has_no_form_in_json_reads_the_same_in_every_process():
    first, second = (provenance.config_record({"fn": lambda: 1, "object": object()}) for _ in range(2))
    assert first == second
    assert b"0x" not in first


def test_a_configuration_that_contains_itself_ends_somewhere():
    config: dict[str, object] = {"a": 1}
    config["self"] = config
    assert len(provenance.config_record(config)) < 1 << 12


def test_a_configuration_of_more_than_64_kib_is_refused_with_its_largest_entries():
    assert len(provenance.config_record({"a": "x" * 65_500})) < 1 << 16
    with pytest.raises(
        ks.errors.UsageError, match=r"70,0\d\d bytes as JSON.*65,536 are the limit. Largest: a \(60,002\), b"
    ):
        ks.TrainState(config={"b": "x" * 10_000, "a": "x" * 60_000})
    with pytest.raises(ks.errors.UsageError, match="it is one value"):
        ks.TrainState(config="x" * 70_000)


def test_a_load_says_what_changed_and_gives_nothing_back(tmp_path):
    config = {"optim": Optim(0.1), "seed": 1, "gone": "x" * 100}
    ks.save(tmp_path / "step", ks.TrainState(config=config, n=1))
    now = {"optim": Optim(0.2), "seed": 1, "new": [1]}
    state = ks.TrainState(config=now, n=0)
    report = ks.load(tmp_path / "step", into=state)
    assert report.changed == (
        "config: optim.lr: 0.1 when saved, 0.2 now",
        f'config: gone: "{"x" * 58}… when saved, absent now',
        "config: new: absent when saved, [1] now",
    )
    assert "  changed config: optim.lr: 0.1 when saved, 0.2 now" in str(report).splitlines()
    assert now == {"optim": Optim(0.2), "seed": 1, "new": [1]}
    assert list(state) == ["n", "rng", "progress"]
    assert ks.load(tmp_path / "step", into=ks.TrainState(config=config, n=0)).changed == ()
    assert ks.load(tmp_path / "step", into=ks.TrainState(n=0)).changed == ()
    assert ks.load(tmp_path / "step", into={"n": 0}, only=["n"]).changed == ()
    many = {f"k{i}": i for i in range(20)}
    ks.save(tmp_path / "many", ks.TrainState(config=many))
    changed = ks.load(tmp_path / "many", into=ks.TrainState(config={})).changed
    assert (len(changed), changed[-1]) == (11, "config: and 10 more")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit and a tag; its script stands for the main script of this process."""
    folder = tmp_path / "code"
    (folder / "inside").mkdir(parents=True)
    script = folder / "inside" / "train.py"
    script.write_text("x = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    git(folder, "tag", "-a", "v1", "-m", "v1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    provenance._revision_at.cache_clear()
    yield folder
    provenance._revision_at.cache_clear()


@pytest.mark.slow
def test_the_revision_of_the_main_script_is_part_of_every_step(repository, tmp_path):
    head = git(repository, "rev-parse", "HEAD")
    ks.save(tmp_path / "clean", ks.TrainState())
    assert ks.open(tmp_path / "clean").manifest.versions.code == head
    (repository / "inside" / "train.py").write_text("x = 2\n")
    ks.save(tmp_path / "once", ks.TrainState())
    assert ks.open(tmp_path / "once").manifest.versions.code == head, "asked for once in a process"
    (repository / "untracked").write_text("")
    provenance._revision_at.cache_clear()
    report = ks.load(tmp_path / "clean", into=ks.TrainState())
    assert report.changed == (f"code: {head} when saved, {head}-dirty now",)
    git(repository, "commit", "-qam", "second")
    provenance._revision_at.cache_clear()
    assert provenance.code_revision() == git(repository, "rev-parse", "HEAD") != head
    (repository / "inside" / "train.py").touch()
    before = sorted((path, path.stat().st_mtime_ns) for path in repository.rglob("*"))
    provenance._revision_at.cache_clear()
    assert not provenance.code_revision().endswith("-dirty"), "written again, and no other"
    assert sorted((path, path.stat().st_mtime_ns) for path in repository.rglob("*")) == before


def test_without_an_answer_there_is_no_revision_and_no_error(tmp_path, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "train.py"), raising=False)
    provenance._revision_at.cache_clear()
    assert provenance.code_revision() == ""  # no repository there
    monkeypatch.setenv("PATH", str(tmp_path))
    provenance._revision_at.cache_clear()
    assert provenance.code_revision() == ""  # no git
    monkeypatch.setattr(provenance, "GIT_LIMIT_S", 0.05)
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o700)
    provenance._revision_at.cache_clear()
    assert provenance.code_revision() == ""  # no answer in time
    monkeypatch.delattr(main, "__file__")
    assert provenance.code_revision() == ""  # an interactive session
    provenance._revision_at.cache_clear()
    ks.save(tmp_path / "step", ks.TrainState())
    assert ks.open(tmp_path / "step").manifest.versions.code == ""


def differing(rank, path):
    state = ks.TrainState(config={"rank": rank})
    ks.save(path, state)
    return ks.load(path, into=state).changed


def test_ranks_may_differ_and_the_first_ones_word_is_kept(rank_pool, tmp_path):
    changed = rank_pool(2)(differing, str(tmp_path / "step"))
    assert saved_config(tmp_path / "step") == {"rank": 0}
    assert changed == [(), ("config: rank: 0 when saved, 1 now",)]


def test_the_keywords_are_no_components(tmp_path):
    with pytest.raises(ks.errors.UsageError, match="rng, progress: part of every TrainState"):
        ks.TrainState(rng=1, progress=2, config={"lr": 1})
    state = ks.TrainState(config={"lr": 1}, non_persistent_buffers=True, files={}, n=1)
    assert list(state) == ["n", "rng", "progress"]
