"""The records beside the steps of a run, each made wrong in turn, and what verify says about it."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

import keepstep as ks
from keepstep.check.run import verify_run
from keepstep.check.verify import KINDS
from keepstep.commit.aside import put_aside
from keepstep.commit.catalog import read_catalog
from keepstep.format.manifest import Lineage, Parent, pack_manifest, parse_manifest
from keepstep.format.shardfile import digest
from keepstep.storage.base import read_blob


def train(root, steps, step=None):
    state = ks.TrainState(weight=torch.arange(4.0))
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="thread") as checkpointer:
        checkpointer.restore(step=step)
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()


@pytest.fixture(scope="module")
def good():
    """Steps 1 and 2 of the first start, 3 and 4 of the second."""
    memory = ks.MemoryStorage()
    train(memory, 2)
    train(memory, 2)
    return {name: read_blob(memory, name, 1 << 20) for name, _ in memory.list("")}


@pytest.fixture
def root(good):
    memory = ks.MemoryStorage()
    for name, data in good.items():
        memory.put(name, data)
    return memory


def told(root):
    return verify_run(root, read_catalog(root))


def edit(root, step, **changes):
    """The manifest with other fields, and digests that are right, those of the hint included."""
    name = f"step-{step:08d}/.metadata"
    manifest = parse_manifest(read_blob(root, name, 1 << 20), name)
    root.put(name, pack_manifest(msgspec.structs.replace(manifest, **changes)))


def hint(root, **changes):
    fields = json.loads(read_blob(root, "latest", 1 << 20))
    root.put("latest", json.dumps(fields | changes).encode())


def remove(root, step):
    root.delete([name for name, _ in root.list(f"step-{step:08d}")])


def test_a_run_that_was_resumed_and_rolled_back_is_in_order(root):
    assert told(root).problems == ()
    assert told(root).notes == ()
    remove(root, 1)
    assert told(root).problems == ()
    train(root, 1, step=3)  # back to step 3: step 4 is replaced
    assert told(root).problems == ()
    remove(root, 3)
    assert told(root).problems == ()
    assert told(root).notes == ("steps that others came from are gone, as retention lets them: 3",)


FAULTS = {
    "hint is no JSON": (lambda root: root.put("latest", b"{"), "latest", "latest", "cannot be read"),
    "hint names what is not there": (
        lambda root: hint(root, step=7, path="step-00000007"), "latest", "latest", "names step 7, which is not there",
    ),
    "hint contradicts itself": (
        lambda root: hint(root, path="step-00000003"), "latest", "latest", "step 4 and the path 'step-00000003'",
    ),
    "hint of a start that was later": (
        lambda root: hint(root, manifest="0" * 16, incarnation=7),
        "latest", "latest", "names step 4 of incarnation 7; the one there is older, of 2",
    ),
    "hint names a step put aside": (
        lambda root: put_aside(root, 4, ["it"], "now"), "latest", "latest", "names step 4, which was put aside",
    ),
    "no run.json": (lambda root: root.delete(["run.json"]), "run", "run.json", "is missing, but there are steps of run"),
    "run.json is no JSON": (lambda root: root.put("run.json", b"\xff"), "run", "run.json", "is not valid"),
    "run.json names nothing": (lambda root: root.put("run.json", b"{}"), "run", "run.json", "names no run"),
    "an incarnation is gone": (
        lambda root: root.delete(["incarnations/000002"]),
        "incarnation", "incarnations/000002", "step-00000003 was saved by that start",
    ),
    "a step came from its own start": (
        lambda root: edit(root, 3, lineage=Lineage("r", 2, Parent("r", 2, 2))),
        "lineage", "step-00000003/.metadata", "incarnation 2 came from incarnation 2",
    ),
    "a step came from a later one": (
        lambda root: edit(root, 3, lineage=Lineage("r", 2, Parent("r", 1, 9))),
        "lineage", "step-00000003/.metadata", "came from incarnation 1, step 9",
    ),
    "the parent is an older one than it was": (
        lambda root: (
            edit(root, 2, lineage=Lineage("r", 1)), edit(root, 4, lineage=Lineage("r", 3, Parent("r", 2, 2))),
        ),
        "lineage", "step-00000004/.metadata", "the one there is older, of incarnation 1",
    ),
    "the newest step was taken away": (
        lambda root: remove(root, 4), "lost", "saves.jsonl", "step 4 (incarnation 2, attempt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_records_is_named_with_its_kind_and_its_file(name, root):
    damage, kind, file, text = FAULTS[name]
    damage(root)
    problems = [problem for problem in told(root).problems if problem.kind == kind]
    assert problems, told(root)
    assert problems[0].file == file
    assert text in problems[0].text
    assert KINDS[kind].exit_status == 7


def test_what_a_kill_leaves_is_no_fault(root):
    """Between a commit and its hint, and between the hint and the removal of old steps."""
    fields = json.loads(read_blob(root, "latest", 1 << 20))
    root.delete(["latest"])
    assert told(root).problems == ()
    assert "latest is not there" in told(root).notes[0]
    hint_before = json.dumps(fields | {"manifest": "0" * 16}).encode()
    root.put("latest", hint_before)
    assert told(root).problems == ()
    assert "as after a kill right after a step was saved again" in told(root).notes[0]
    edit(root, 3)
    third = {"step": 3, "incarnation": 2, "path": "step-00000003", "manifest": ""}
    third["manifest"] = f"{digest(read_blob(root, 'step-00000003/.metadata', 1 << 20)):016x}"
    root.put("latest", json.dumps(third).encode())
    assert told(root).problems == ()
    assert told(root).notes == ("latest names step 3, the newest is 4; restore() goes by manifests",)
    assert fields["step"] == 4


def test_a_step_that_was_damaged_or_put_aside_is_not_called_lost(root):
    put_aside(root, 4, ["it"], "now")
    assert [problem.kind for problem in told(root).problems] == ["latest"]
    root.put("step-00000004/.metadata", b"{")
    assert "lost" not in [problem.kind for problem in told(root).problems]
