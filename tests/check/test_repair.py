"""A run that was damaged in every way that can be mended, mended; and what must not be mended, left."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import keepstep as ks
from keepstep.check.repair import Wish, repair, repair_alone, undo
from keepstep.check.run import verify_run
from keepstep.check.verify import verify
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.weights import drop_optimizers
from keepstep.errors import StepNotFoundError, StorageError
from keepstep.storage.base import read_blob
from tests.helpers.storages import Watched

LIMIT = 1 << 24


def state_of(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 4)
    model.twin = model.weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    return ks.TrainState(model=model, optimizer=optimizer, config={"lr": 0.1}, empty={"none": torch.zeros(0, 2)})


def train(root, steps, background="thread"):
    """Goes on for so many steps, and saves each. Returns the step it began at."""
    with ks.Checkpointer(root, state_of(), keep=ks.Keep(last=None), background=background) as checkpointer:
        begun = checkpointer.restore().step
        for _ in range(steps):
            checkpointer.step(loss=1.5)
            checkpointer.save()
    return begun


@pytest.fixture(scope="module")
def good():
    """Steps 1 and 2 of the first start, 3 of the second."""
    memory = ks.MemoryStorage()
    train(memory, 2)
    train(memory, 1)
    return blobs(memory)


def blobs(root):
    return {name: read_blob(root, name, LIMIT) for name, _ in root.list("")}


def filled(files):
    memory = ks.MemoryStorage()
    for name, data in files.items():
        memory.put(name, data)
    return memory


@pytest.fixture
def root(good):
    return filled(good)


def manifest_name(step):
    return f"step-{step:08d}/.metadata"


def file_in(root, step, folder):
    return next(name for name, _ in root.list(f"step-{step:08d}/{folder}"))


def flip(root, name, at=-1):
    data = bytearray(read_blob(root, name, LIMIT))
    data[at] ^= 1
    root.put(name, bytes(data))


def forget(root, *names):
    """Without records nothing says what was committed."""
    root.delete(["saves.jsonl", "latest", *names])


def mend(root, **wish):
    return [*repair(root, Wish(**wish))]


def outcomes(actions):
    return [(one.kind, one.target, one.outcome) for one in actions]


def in_order(root):
    catalog = read_catalog(root)
    assert verify_run(root, catalog).problems == ()
    for found in catalog.steps:
        *_, last = verify(step_storage(root, found.step))
        assert last.ok, last.problems


# --- manifests ------------------------------------------------------------------------------------------------------


def test_a_run_in_order_is_left_alone(root, good):
    assert mend(root, quarantine=True, uncommitted=True) == []
    assert blobs(root) == good


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("damage", ["gone", "empty", "flipped", "cut", "of another step"])
def test_a_manifest_is_made_again_byte_for_byte(step, damage, root, good):
    raw = good[manifest_name(step)]
    ways = {
        "empty": b"", "flipped": raw.replace(b'"loss":1.5', b'"loss":1.7'), "cut": raw[:-40],
        "of another step": good[manifest_name(2)],
    }  # fmt: skip
    if damage == "gone":
        root.delete([manifest_name(step)])
    else:
        root.put(manifest_name(step), ways[damage])
    actions = mend(root)
    assert outcomes(actions) == [("manifest", manifest_name(step), "done")]
    assert "saves.jsonl says that it was committed" in actions[0].text or "names the attempt" in actions[0].text
    assert blobs(root) == good
    assert train(root, 0) == 3


def save_on_two(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(30.0).reshape(10, 3)
    state = {
        "model": {
            "sharded": distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]),
            "split": torch.zeros(2**18),
            "boxes": ks.sharded(torch.ones(2, 3), global_shape=(4, 3), offsets=(2 * rank, 0)),
        },
        "mine": ks.per_rank({"noise": torch.full((5,), float(rank)), "text": f"rank {rank}"}),
    }
    ks.save(path, state, step=7)


def test_a_manifest_of_two_ranks_is_made_again_and_every_file_is_needed(rank_pool, tmp_path):
    rank_pool(2)(save_on_two, str(tmp_path / "step"))
    good = blobs(ks.LocalStorage(tmp_path / "step"))
    memory = filled(good)
    memory.delete([".metadata"])
    (left,) = repair_alone(memory, Wish())
    assert (left.outcome, "--uncommitted makes it a step" in left.text) == ("none", True)
    (done,) = repair_alone(memory, Wish(uncommitted=True))
    assert done.outcome == "done"
    assert "NOTHING says that it was committed" in done.text
    assert blobs(memory) == good
    assert [*repair_alone(memory, Wish(uncommitted=True))] == []
    for name in good:
        if name != ".metadata":
            lacking = filled({key: data for key, data in good.items() if key not in (name, ".metadata")})
            (left,) = repair_alone(lacking, Wish(uncommitted=True))
            assert left.outcome == "none", name
            assert "none can be made" in left.text
            assert ".metadata" not in blobs(lacking)


@pytest.mark.slow
def test_one_flipped_bit_anywhere_in_the_files_and_no_manifest_is_made(good):
    """With the manifest gone nothing vouches for the headers of files, but each of them for the others."""
    names = [name for name in good if name.startswith("step-00000001/") and name != manifest_name(1)]
    step = {name.partition("/")[2]: good[name] for name in names}
    tried = 0
    for name, data in step.items():
        for at in range(0, len(data), 7):
            changed = bytearray(data)
            changed[at] ^= 1 << (at % 8)
            (last,) = repair_alone(filled(step | {name: bytes(changed)}), Wish(uncommitted=True))
            assert last.outcome == "none", (name, at)
            tried += 1
    print(f"{tried} flipped bits")
    assert tried > 1000


def test_an_attempt_that_was_never_committed_becomes_no_step_by_itself(root, good):
    """Its files are all durable, and its manifest never came: as after a kill between the two."""
    forget(root, manifest_name(3))
    actions = mend(root)
    assert outcomes(actions) == [("manifest", manifest_name(3), "none"), ("latest", "latest", "done")]
    assert "nothing says that it was committed" in actions[0].text
    assert [found.step for found in read_catalog(root).steps] == [2, 1]
    assert outcomes(mend(root)) == [("manifest", manifest_name(3), "none")]
    done, moved = mend(root, uncommitted=True)
    assert "NOTHING says that it was committed" in done.text
    assert moved.target == "latest"
    assert blobs(root)[manifest_name(3)] == good[manifest_name(3)]
    assert train(root, 0) == 3


def test_a_save_that_failed_is_said_to_have_failed(root):
    lines = read_blob(root, "saves.jsonl", LIMIT).splitlines()
    failed = lines[2].replace(b'"outcome":"committed"', b'"outcome":"failed"')
    assert failed != lines[2]
    forget(root, manifest_name(3))
    root.put("saves.jsonl", b"\n".join([*lines[:2], failed]) + b"\n")
    assert "saves.jsonl says that it failed" in mend(root)[0].text


EVIDENCE = {
    "the hint": (3, ["saves.jsonl"], "the hint names this very manifest"),
    "a later start": (2, ["saves.jsonl", "latest"], "a later start of the run was restored from it"),
    "records": (1, ["latest"], "saves.jsonl says that it was committed"),
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_what_says_that_a_step_was_committed(name, root, good):
    step, gone, text = EVIDENCE[name]
    root.delete([manifest_name(step), *gone])
    action = mend(root)[0]
    assert (action.outcome, text in action.text) == ("done", True), action
    assert blobs(root)[manifest_name(step)] == good[manifest_name(step)]


def test_of_two_whole_attempts_the_one_that_was_committed_is_taken(root, good):
    """A step that was saved again: the files of both are there."""
    other = ks.MemoryStorage()
    train(other, 3)
    strays = {name: data for name, data in blobs(other).items() if name.startswith("step-00000003/")}
    root = filled(good | {name: data for name, data in strays.items() if name != manifest_name(3)})
    root.delete([manifest_name(3)])
    mend(root)
    assert blobs(root)[manifest_name(3)] == good[manifest_name(3)]


@pytest.mark.parametrize("later", ["damaged", "gone"])
def test_an_attempt_that_was_replaced_comes_not_back(later, root, good):
    """Step 3 was saved once more after a rollback; the files of the first attempt were still there when that was killed."""
    with ks.Checkpointer(root, state_of(), keep=ks.Keep(last=None), background="thread") as checkpointer:
        checkpointer.restore(step=2)
        checkpointer.step(loss=0.5)
        checkpointer.save()
    root.delete([manifest_name(3), *([file_in(root, 3, "model")] if later == "damaged" else names_in(root, 3))])
    for name, data in good.items():
        if name.startswith("step-00000003/") and name != manifest_name(3):
            root.put(name, data)
    action = mend(root)[0]
    assert (action.kind, action.outcome) == ("manifest", "none"), action
    assert "or was replaced" in action.text
    assert manifest_name(3) not in blobs(root)


def names_in(root, step):
    return [name for name, _ in root.list(f"step-{step:08d}")]


def test_a_manifest_cannot_be_made_without_the_file_that_keeps_it(root):
    root.delete([manifest_name(3), file_in(root, 3, "state")])
    (left, _) = mend(root, uncommitted=True)
    assert left.outcome == "none"
    assert "which would keep a copy of the manifest, cannot be read" in left.text
    root.put(manifest_name(1), b"{}")
    flip(root, file_in(root, 1, "model"))
    left = mend(root)[0]
    assert left.outcome == "left"
    assert "--quarantine puts the step aside" in left.text


def test_a_manifest_of_a_newer_format_is_nobodys_to_replace(root):
    raw = read_blob(root, manifest_name(3), LIMIT)
    root.put(manifest_name(3), raw.replace(b'"format": [1,', b'"format": [9,'))
    before = blobs(root)[manifest_name(3)]
    actions = mend(root, quarantine=True, uncommitted=True)
    assert [one.outcome for one in actions if one.kind == "quarantine"] == ["left"]
    assert blobs(root)[manifest_name(3)] == before


def test_a_step_that_keeps_its_weights_alone_is_made_again_as_that(root):
    drop_optimizers(root, 2, incarnation=2)
    before = read_blob(root, manifest_name(2), LIMIT)
    root.delete([manifest_name(2)])
    action = mend(root)[0]
    assert "without optimizer, whose files are not all there" in action.text
    assert read_blob(root, manifest_name(2), LIMIT) == before


# --- quarantine -----------------------------------------------------------------------------------------------------


def test_a_damaged_step_is_put_aside_and_brought_back(root, good):
    flip(root, file_in(root, 3, "model"))
    damaged = blobs(root)
    assert mend(root) == []
    assert outcomes(mend(root, quarantine=True)) == [
        ("quarantine", "step-00000003", "done"),
        ("latest", "latest", "done"),
    ]
    assert [found.step for found in read_catalog(root).steps] == [2, 1]
    assert mend(root, quarantine=True, uncommitted=True) == []
    in_order(root)
    assert train(root, 0) == 2
    action = undo(root, 3)
    assert "blocks:" in action.text
    again = blobs(root)
    assert {name: data for name, data in damaged.items() if name.startswith("step-")}.items() <= again.items()
    with pytest.raises(StepNotFoundError):
        undo(root, 3)


def test_what_is_beside_a_step_put_aside_is_mended_without_it(root):
    """Step 3 was put aside, saved again, and lost its manifest then."""
    flip(root, file_in(root, 3, "model"))
    mend(root, quarantine=True)
    assert train(root, 1) == 2
    again = read_blob(root, manifest_name(3), LIMIT)
    root.delete([manifest_name(3)])
    action = mend(root)[0]
    assert action.outcome == "done", action
    assert read_blob(root, manifest_name(3), LIMIT) == again
    assert len(read_catalog(root).aside) == 1


def test_only_the_steps_that_are_named_are_touched(root):
    for step in (1, 3):
        flip(root, file_in(root, step, "model"))
    mend(root, quarantine=True, steps=frozenset({1}))
    assert [found.step for found in read_catalog(root).steps] == [3, 2]


# --- records --------------------------------------------------------------------------------------------------------


def test_records_are_made_again(root, good):
    run = json.loads(good["run.json"])["run"]
    root.put("run.json", b"{")
    root.put("latest", b"\0")
    root.delete(["incarnations/000002"])
    actions = mend(root)
    assert outcomes(actions) == [
        ("run", "run.json", "done"),
        ("incarnation", "incarnations/000002", "done"),
        ("latest", "latest", "done"),
    ]
    now = blobs(root)
    assert json.loads(now["run.json"])["run"] == run
    assert now["latest"] == good["latest"]
    assert mend(root) == []
    in_order(root)
    assert train(root, 1) == 3
    assert max(name for name, _ in root.list("incarnations")) == "incarnations/000003"


def test_a_hint_without_any_step_goes(root):
    for step in (1, 2, 3):
        root.delete([name for name, _ in root.list(f"step-{step:08d}")])
    assert outcomes(mend(root)) == [("latest", "latest", "done")]
    assert "latest" not in blobs(root)


# --- interrupted ----------------------------------------------------------------------------------------------------


def wreck(files):
    """Everything at once."""
    root = filled(files)
    root.delete([manifest_name(1), "run.json", "incarnations/000001"])
    flip(root, file_in(root, 3, "model"))
    root.put("latest", b"{")
    return root


def test_a_dry_run_says_the_same_and_changes_nothing(good):
    root = wreck(good)
    before = blobs(root)
    said = mend(root, quarantine=True, dry_run=True)
    assert {one.outcome for one in said} == {"would"}
    assert blobs(root) == before
    done = mend(root, quarantine=True)
    assert [(one.kind, one.target) for one in said] == [(one.kind, one.target) for one in done]


@pytest.mark.slow
def test_failing_at_every_call_it_is_done_by_doing_it_again(good):
    """The 1st call of the storage fails, the 2nd, and so on until none does; before it takes effect, and after."""
    finished = wreck(good)
    mend(finished, quarantine=True)
    expected = steady(blobs(finished))
    tried = 0
    for late in (False, True):
        for nth in range(1, 1000):
            root = wreck(good)
            seen = Counter()

            def fail(operation, name, seen=seen, nth=nth):
                seen["calls"] += 1
                if seen["calls"] == nth:
                    raise StorageError(operation, name, OSError(5, "as the test wants it"))

            watched = (After if late else Watched)(root, fail)
            try:
                mend(watched, quarantine=True)
            except StorageError:
                tried += 1
                # Whatever is called a step is one, or was before.
                steps = {found.step for found in read_catalog(root).steps if not found.damage}
                assert steps <= {1, 2, 3}
                assert 2 in steps
            mend(root, quarantine=True)
            assert steady(blobs(root)) == expected, nth
            if seen["calls"] < nth:
                break
    print(f"{tried} calls failed")
    assert tried > 100


class After(Watched):
    """Fails writes after they took effect: what is reported as failed was done."""

    def put(self, name, data):
        self.inner.put(name, data)
        self.note("put", name)

    def put_new(self, name, data):
        done = self.inner.put_new(name, data)
        self.note("put_new", name)
        return done

    def delete(self, names):
        self.inner.delete(names)
        for name in names:
            self.note("delete", name)


def steady(files):
    """Contents without times."""
    fixed = {
        name: data for name, data in files.items() if not name.startswith(("quarantine/", "run.json", "incarnations/"))
    }
    return fixed | dict.fromkeys(name for name in files if name not in fixed)
