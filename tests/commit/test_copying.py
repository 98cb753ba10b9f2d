"""A committed step is copied from one root to another: proved, resumable, and never a half of it."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

import msgspec
import pytest
import torch

import keepstep as ks
from keepstep.check.faults import Fault, FaultyStorage
from keepstep.check.run import read_hint, verify_run
from keepstep.check.verify import verify
from keepstep.commit.aside import put_aside
from keepstep.commit.catalog import read_catalog, read_manifest, step_storage
from keepstep.commit.copying import copy_step, copying
from keepstep.commit.garbage import fence
from keepstep.commit.pins import pin_step
from keepstep.commit.publish import new_incarnation, run_of
from keepstep.commit.retention import sweep_leftovers
from keepstep.commit.weights import drop_optimizers
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    MismatchError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.storage.base import read_blob
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched, failing

MANIFEST = ".metadata"
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/step"))


def train(root, steps, *, start=None, big=0, scale=1.0):
    """Goes on for so many steps and saves each; ``start`` restores that step first."""
    state = ks.TrainState(
        model={"weight": torch.arange(400.0) * scale, "big": torch.arange(big // 4, dtype=torch.float32)},
        free={"list": [1, 2], "text": "x"},
    )
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off") as checkpointer:
        checkpointer.restore(step=start)
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()


@pytest.fixture(scope="module")
def saved():
    """A run in memory with the steps 1 and 2; nobody changes it."""
    memory = ks.MemoryStorage("saved")
    train(memory, 2)
    return memory


def blobs(root, prefix=""):
    return {name: read_blob(root, name, 1 << 30) for name, _ in root.list(prefix)}


def clone(root, name="clone"):
    other = ks.MemoryStorage(name)
    for key, data in blobs(root).items():
        other.put(key, data)
    return other


def fresh(name="target"):
    return ks.MemoryStorage(name)


def loaded(root, step):
    with ks.open(step_storage(root, step)) as opened:
        return {key: opened[key] for key in opened}, {
            name: opened.values_of(name) for name in opened.manifest.components
        }


def check_whole(source, target, step):
    """The copy is the step, to the last byte, verifies, and loads as it does at the source."""
    assert blobs(target, f"step-{step:08d}") == blobs(source, f"step-{step:08d}")
    *_, verified = verify(step_storage(target, step))
    assert verified.ok, verified.problems
    assert not verified.strays
    assert_same(loaded(source, step), loaded(target, step))


def steps(root):
    return [found.step for found in read_catalog(root).steps]


def manifests(root):
    return [name for name, _ in root.list("") if name.endswith(MANIFEST)]


# --- whole copies -----------------------------------------------------------------------------------------------------


def test_a_copy_is_the_step_and_readers_order_it_alike(saved):
    target = fresh()
    for step in (1, 2):
        copied = copy_step(saved, target, step)
        manifest = read_manifest(step_storage(saved, step))
        assert (copied.outcome, copied.step, copied.save_id) == ("copied", step, manifest.save_id)
        assert (copied.files, copied.kept_files) == (copied.total_files, 0)
        assert copied.bytes == copied.total_bytes == manifest.total_bytes
        check_whole(saved, target, step)
    assert read_catalog(target) == read_catalog(saved)
    assert run_of(target) == run_of(saved)
    assert read_hint(target) == read_hint(saved)
    assert blobs(target, "incarnations") == blobs(saved, "incarnations")
    records = verify_run(target, read_catalog(target))
    assert (records.problems, records.notes) == ((), ())


def test_a_copy_of_an_older_step_does_not_move_the_hint(saved):
    target = fresh()
    copy_step(saved, target, 2)
    copy_step(saved, target, 1)
    assert read_hint(target).step == 2
    assert steps(target) == [2, 1]


def test_a_job_goes_on_at_the_target_as_it_would_have_at_the_source(saved):
    target = fresh()
    copy_step(saved, target, 2)
    train(target, 1)
    assert steps(target) == [3, 2]
    assert read_catalog(target).steps[0].incarnation == read_catalog(saved).steps[0].incarnation + 1
    assert {found.run for found in read_catalog(target).steps} == {run_of(saved)}
    # And what came after can be brought back.
    back = clone(saved)
    assert copy_step(target, back, 3).outcome == "copied"
    assert steps(back) == [3, 2, 1]


def test_a_step_outside_of_any_run_comes_into_a_root_of_its_own(saved):
    alone, target = fresh("alone"), fresh()
    ks.save(alone, {"weight": torch.arange(9.0)}, step=7)
    assert copy_step(alone, target, None).outcome == "copied"
    assert steps(target) == [7]
    assert blobs(target, "step-00000007") == {f"step-00000007/{name}": data for name, data in blobs(alone).items()}
    with pytest.raises(MismatchError, match="one run"):
        copy_step(alone, clone(saved), None)


@pytest.mark.parametrize("step", GOLDEN, ids=lambda step: step.parent.name)
def test_steps_of_two_ranks_in_every_format_are_copied_as_they_are(step):
    golden, target = ks.LocalStorage(step), fresh()
    copied = copy_step(golden, target, None, threads=2)
    manifest = read_manifest(golden)
    assert (copied.outcome, copied.files) == ("copied", sum(len(each) for each in manifest.files.values()))
    place = step_storage(target, manifest.step)
    assert blobs(place) == blobs(golden)
    *_, verified = verify(place)
    assert verified.ok, verified.problems


def test_once_more_does_nothing(saved):
    target = fresh()
    copy_step(saved, target, 2)
    before, watched = blobs(target), Watched(target)
    copied = copy_step(saved, watched, 2)
    assert (copied.outcome, copied.files, copied.bytes) == ("there", 0, 0)
    assert (copied.kept_files, copied.kept_bytes) == (copied.total_files, copied.total_bytes)
    assert blobs(target) == before
    assert watched.done["create"] == watched.done["put_new"] == 0
    assert watched.names["delete"] == ["step-00000002/.nothing"]


def test_progress_goes_up_to_the_whole(saved):
    seen = [*copying(saved, fresh(), 2, threads=1)]
    assert [one.bytes for one in seen] == sorted(one.bytes for one in seen)
    assert [one.outcome for one in seen[:-1]] == [""] * (len(seen) - 1)
    assert seen[-1].bytes == seen[-1].total_bytes
    assert seen[-1].outcome == "copied"


@pytest.mark.slow
def test_large_files_pass_in_memory_that_is_bounded(tmp_path):
    """Chunks of one file, from several threads at once: what was read and is not written yet is a chunk a thread."""
    folder, target, threads, chunk = tmp_path / "from", ks.LocalStorage(tmp_path / "to"), 2, 8 << 20
    train(folder, 1, big=(50 << 20) + 12)
    held = []

    def before(operation, _):
        if operation == "read":
            held.append(source.read_bytes - watched.written_bytes)

    source, watched = Watched(folder, before), Watched(target)
    copied = copy_step(source, watched, 1, threads=threads)
    check_whole(ks.LocalStorage(folder), target, 1)
    assert len(held) > copied.total_bytes // chunk
    assert chunk <= max(held) <= threads * chunk + (1 << 17)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_not_there_or_means_nothing_is_refused(saved):
    target = fresh()
    with pytest.raises(StepNotFoundError, match="no step is committed"):
        copy_step(saved, target, 9)
    with pytest.raises(UsageError, match="to itself"):
        copy_step(saved, saved, 1)
    assert not blobs(target)


def test_a_step_of_another_run_is_refused_with_both_ids(saved):
    target = fresh()
    train(target, 1)
    before = blobs(target)
    with pytest.raises(MismatchError) as caught:
        copy_step(saved, target, 2)
    assert run_of(saved) in str(caught.value)
    assert run_of(target) in str(caught.value)
    assert blobs(target) == before


def test_a_job_that_has_only_begun_has_the_target_for_itself(saved):
    target = fresh()
    train(target, 0)
    with pytest.raises(MismatchError, match=run_of(target)):
        copy_step(saved, target, 2)


def test_roots_that_have_gone_on_apart_are_not_mixed(saved):
    one, other = clone(saved, "one"), clone(saved, "other")
    train(one, 1)
    train(other, 2)
    before = blobs(one)
    with pytest.raises(MismatchError, match="gone on apart"):
        copy_step(other, one, 4)
    assert blobs(one) == before


def test_roots_that_were_only_tidied_are_told_apart_by_the_start_before(saved):
    """A number that a gc has taken says nothing of where a root comes from; the one below it does."""
    one, other = clone(saved, "one"), clone(saved, "other")
    for root in (one, other):
        fence(root, "here")
    assert copy_step(one, other, 2).outcome == "there"
    one.delete(["step-00000002/.metadata"])
    assert copy_step(other, one, 2).outcome == "copied"
    # And one that a job has taken at one of them is no gc at the other.
    train(third := clone(saved, "third"), 1)
    with pytest.raises(MismatchError, match="gone on apart"):
        copy_step(third, one, 3)
    one, other = clone(third, "one"), clone(saved, "other")
    train(other, 1)
    for root in (one, other):
        fence(root, "here")
    with pytest.raises(MismatchError, match="incarnation 2 is another start"):
        copy_step(one, other, 3)


def test_of_two_steps_of_one_number_the_newer_start_of_the_run_stays(saved):
    """A run that was rolled back to step 1 has saved another step 2; an older one never comes in its place."""
    rolled = clone(saved, "rolled")
    train(rolled, 1, start=1)
    assert read_manifest(step_storage(rolled, 2)).save_id != read_manifest(step_storage(saved, 2)).save_id
    target = clone(saved)
    assert copy_step(rolled, target, 2).outcome == "replaced"
    check_whole(rolled, target, 2)
    assert (read_hint(target).step, read_hint(target).incarnation) == (2, 2)
    with pytest.raises(StepExistsError, match="not older"):
        copy_step(saved, rolled, 2)
    assert blobs(rolled, "step-00000002") == blobs(target, "step-00000002")


def test_a_step_that_comes_meanwhile_is_not_replaced(saved):
    """Between the look at what is there and the manifest: in an empty place, and in that of an older step."""
    newest = clone(saved, "newest")
    for _ in range(2):
        train(newest, 1, start=1)
    rolled, kept = clone(saved, "rolled"), blobs(newest, "step-00000002")
    train(rolled, 1, start=1)
    for source, target in ((saved, fresh()), (rolled, clone(saved))):

        class Overtaken(Watched):
            def put_new(self, name, data):
                self.overtake(name)
                return super().put_new(name, data)

            def put_over(self, name, data, expected):
                self.overtake(name)
                return self.inner.put_over(name, data, expected)

            def overtake(self, name):
                for blob, data in kept.items() if name.endswith(MANIFEST) else ():
                    self.inner.put(blob, data)

        with pytest.raises(StepExistsError, match="meanwhile"):
            copy_step(source, Overtaken(target), 2)
        assert kept.items() <= blobs(target, "step-00000002").items()


def test_a_pinned_step_is_not_replaced(saved):
    rolled, target = clone(saved, "rolled"), clone(saved)
    train(rolled, 1, start=1)
    pin_step(target, 2)
    before = blobs(target)
    with pytest.raises(StepExistsError, match="pinned"):
        copy_step(rolled, target, 2)
    assert blobs(target) == before


def test_a_damaged_step_at_the_target_is_left_for_whoever_looks(saved):
    target = clone(saved)
    raw = read_blob(target, f"step-00000002/{MANIFEST}", 1 << 20)
    target.put(f"step-00000002/{MANIFEST}", raw.replace(b"world", b"wurld", 1))
    before = blobs(target)
    with pytest.raises(CorruptError, match="left as it is"):
        copy_step(saved, target, 2)
    assert blobs(target) == before


def test_what_does_not_fit_is_not_begun(saved):
    class Small(ks.MemoryStorage):
        def free_bytes(self):
            return 5000

    target = Small("small")
    with pytest.raises(StorageError, match="5,000 are free; nothing was copied") as caught:
        copy_step(saved, target, 2)
    assert caught.value.errno == errno.ENOSPC
    assert f"{read_manifest(step_storage(saved, 2)).total_bytes:,} bytes are needed" in str(caught.value)
    assert not blobs(target)


@pytest.mark.parametrize("place", ["header", "data"])
def test_a_damaged_file_is_not_passed_on(saved, place):
    source, target = clone(saved), fresh()
    name = next(name for name in blobs(source) if name.startswith("step-00000002/model/"))
    data = bytearray(read_blob(source, name, 1 << 20))
    data[40 if place == "header" else -1] ^= 1
    source.put(name, bytes(data))
    with pytest.raises(CorruptError, match=r"model/rank-00000.*digest"):
        copy_step(source, target, 2)
    assert manifests(target) == []
    assert not [found for found in blobs(target) if "/model/" in found]


# --- cut off, and gone on ---------------------------------------------------------------------------------------------


def test_a_copy_that_was_cut_off_sends_only_what_is_missing(saved):
    target = fresh()
    with pytest.raises(StorageError):
        copy_step(saved, FaultyStorage(target, [Fault("create", nth=2, times=None)]), 2, threads=1)
    (first,) = blobs(target)
    assert steps(target) == []
    watched = Watched(target)
    copied = copy_step(saved, watched, 2)
    assert (copied.files, copied.kept_files) == (copied.total_files - 1, 1)
    assert copied.kept_bytes == len(blobs(target)[first])
    assert first not in watched.names["create"]
    check_whole(saved, target, 2)


@pytest.mark.slow
def test_a_progress_that_nobody_wants_any_more_gives_up_what_is_not_whole(tmp_path):
    source, target = fresh(), ks.LocalStorage(tmp_path)
    train(source, 1, big=20 << 20)
    with contextlib.closing(copying(source, target, 1, threads=1)) as going:
        while next(going).bytes < 9 << 20:
            pass
    assert not [name for name, _ in target.list("") if name.endswith((MANIFEST, ".partial"))]


def test_what_is_there_is_looked_at_before_it_is_kept(saved):
    """Files of this very attempt, one of another size, one with another header, one with another block."""
    name = {
        part: next(n for n in blobs(saved) if n.startswith(f"step-00000002/{part}/")) for part in ("model", "state")
    }
    model = blobs(saved)[name["model"]]
    for reread, wrong in (
        (False, model[:-1]),
        (False, model[:100] + b"?" + model[101:]),
        (True, model[:-1] + bytes([model[-1] ^ 1])),
    ):
        target = fresh()
        target.put(name["model"], wrong)
        target.put(name["state"], blobs(saved)[name["state"]])
        copied = copy_step(saved, target, 2, reread=reread)
        assert (copied.kept_files, copied.kept_bytes) == (1, len(blobs(saved)[name["state"]]))
        check_whole(saved, target, 2)


def test_a_step_that_has_lost_a_file_is_mended(saved):
    target = clone(saved)
    name = next(name for name in blobs(target) if name.startswith("step-00000002/model/"))
    target.delete([name])
    copied = copy_step(saved, target, 2)
    assert (copied.outcome, copied.files) == ("mended", 1)
    check_whole(saved, target, 2)


def test_a_step_that_was_put_aside_comes_back_good(saved):
    """Of files that were put aside every byte is read: some of them were damaged."""
    target = clone(saved)
    name = next(name for name in blobs(target) if name.startswith("step-00000002/model/"))
    target.put(name, blobs(saved)[name][:-1] + b"?")
    put_aside(target, 2, ["a block is bad"], "2026-01-01T00:00:00+00:00")
    copied = copy_step(saved, target, 2)
    assert (copied.outcome, copied.files) == ("copied", 1)
    check_whole(saved, target, 2)


@pytest.mark.slow
def test_what_retention_has_let_go_at_the_target_does_not_come_back():
    source = fresh("source")
    model = torch.nn.Linear(3, 3)
    state = ks.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(3)).sum().backward()
    state["optimizer"].step()
    with ks.Checkpointer(source, state, background="off") as checkpointer:
        checkpointer.step()
        checkpointer.save()
    target = fresh()
    copy_step(source, target, 1)
    assert drop_optimizers(target, 1, 1) == ("optimizer",)
    before = blobs(target, "step-00000001")
    copied = copy_step(source, target, 1)
    assert (copied.outcome, copied.files) == ("there", 0)
    assert blobs(target, "step-00000001") == before
    assert read_hint(target).step == 1
    # And the other way round: the whole step stays whole.
    assert copy_step(target, source, 1).outcome == "there"
    assert any("/optimizer/" in name for name in blobs(source))


# --- others are at work meanwhile -------------------------------------------------------------------------------------


def starting(target, *, when):
    """Watches the target, where a job starts once in the middle of a copy: it takes an incarnation and sweeps."""
    started = threading.Event()

    def before(operation, name):
        if operation == "put_new" and name.startswith(when) and not started.is_set():
            started.set()
            note = msgspec.json.encode({"id": "another start"})
            sweep_leftovers(target, read_catalog(target), new_incarnation(target, note))

    return Watched(target, before)


def test_files_that_a_starting_job_sweeps_are_sent_again(saved):
    """After they were sent, and before there is a manifest."""
    target = clone(saved)
    target.delete([name for name in blobs(target) if name.startswith("step-00000001/")])
    watched = starting(target, when="incarnations/")
    copied = copy_step(saved, watched, 1)
    assert (copied.outcome, copied.files) == ("copied", copied.total_files)
    assert watched.done["commit"] == 2 * copied.total_files
    check_whole(saved, target, 1)


def test_a_job_that_starts_at_the_target_takes_the_number_of_the_start_that_is_copied(saved):
    """From then on the two roots are apart."""
    source, target = clone(saved, "source"), clone(saved)
    train(source, 1)
    with pytest.raises(MismatchError, match="gone on apart"):
        copy_step(source, starting(target, when="incarnations/000002"), 3)
    assert steps(target) == [2, 1]


@pytest.mark.parametrize("side", ["removed", "replaced"])
def test_a_source_that_changes_its_mind_is_told(saved, side):
    """The step goes, or another one comes in its place, after its manifest was read."""
    source, rolled, target = clone(saved, "source"), clone(saved, "rolled"), fresh()
    train(rolled, 1, start=1)

    def before(operation, name):
        if operation == "open" and "/state/" in name:
            source.delete([name for name in blobs(source) if name.startswith("step-00000002/")])
            if side == "replaced":
                copy_step(rolled, source, 2)

    with pytest.raises(StepNotFoundError, match=f"{side} while it was copied"):
        copy_step(Watched(source, before), target, 2, threads=1)
    assert manifests(target) == []


def test_a_manifest_whose_files_are_swept_in_the_last_moment_goes_again(saved):
    target = fresh()

    def sweep(operation, name):
        if operation == "put_new" and name.endswith(MANIFEST):
            target.delete([name for name in blobs(target) if "/model/" in name])

    with pytest.raises(CorruptError, match="removed while it was copied"):
        copy_step(saved, Watched(target, sweep), 2)
    assert manifests(target) == []
    assert copy_step(saved, target, 2).outcome == "copied"


def test_a_listing_that_is_older_than_the_files_takes_nothing_back(saved):
    class Behind(Watched):
        def list(self, prefix):
            return (item for item in self.inner.list(prefix) if not item[0].endswith(".safetensors"))

    target = fresh()
    assert copy_step(saved, Behind(target), 2).outcome == "copied"
    check_whole(saved, target, 2)


def test_two_who_copy_one_step_at_once_are_both_right(saved):
    target, outcomes = fresh(), []

    def copy():
        outcomes.append(copy_step(saved, target, 2).outcome)

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert set(outcomes) <= {"copied", "there"}
    check_whole(saved, target, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "late"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_whichever_call_fails_the_step_is_there_or_not_and_the_next_copy_ends_it(saved, kind, side):
    """Every call in turn, until there is none that was not tried."""
    rolled = clone(saved, "rolled")
    train(rolled, 1, start=1)
    for old, source in ((None, saved), (saved, rolled)):
        whole = blobs(source, "step-00000002")
        for nth in range(1, 200):
            target = fresh() if old is None else clone(old, "target")
            before = blobs(target, "step-00000002")
            faulty = FaultyStorage(source if side == "source" else target, [Fault("*", kind, nth=nth)])
            ends = (faulty, target) if side == "source" else (source, faulty)
            with contextlib.suppress(CheckpointError):
                copy_step(*ends, 2, threads=1)
            there = blobs(target, "step-00000002")
            if f"step-00000002/{MANIFEST}" in there and not before.items() <= there.items():
                assert whole.items() <= there.items(), nth
            copy_step(source, target, 2)
            # (What was replaced may be left beside it until the next start.)
            target.delete([name for name in before if name not in whole])
            check_whole(source, target, 2)
            if not faulty.fired:
                break
        assert 5 < nth < 199


def test_a_lie_of_the_target_does_not_become_a_step(saved):
    """A file that the storage took and does not have; a manifest that is another one."""
    target = fresh()
    with pytest.raises(CorruptError, match="removed while it was copied"):
        copy_step(saved, FaultyStorage(target, [Fault("commit", "lost", name="/model/")]), 2)
    assert manifests(target) == []


def test_a_full_target_says_so_and_the_next_copy_goes_on(saved):
    target = fresh()
    with pytest.raises(StorageError) as caught:
        copy_step(saved, Watched(target, failing("write", 3)), 2)
    assert caught.value.errno == errno.ENOSPC
    assert manifests(target) == []
    assert copy_step(saved, target, 2).outcome == "copied"
