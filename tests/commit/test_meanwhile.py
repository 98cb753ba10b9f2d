"""What changes while somebody looks or tidies up: a later start of the job begins, a step is saved anew, an old one goes."""

from __future__ import annotations

import pytest
import torch

import keepstep as ks
from keepstep.checkpointer.course import tidy_after_restore
from keepstep.checkpointer.loading import found_manifest
from keepstep.cli.listing import read_listing
from keepstep.commit.catalog import read_catalog, read_manifest, step_storage
from keepstep.commit.conclude import Order, tidy
from keepstep.commit.publish import commit_step, new_incarnation
from keepstep.commit.retention import Keep, sweep_failed
from keepstep.commit.weights import drop_optimizers
from keepstep.errors import CorruptError
from keepstep.format.manifest import Receipt, parse_manifest, step_name
from tests.helpers.storages import Watched


def state_at(step):
    model = torch.nn.Linear(2, 2)
    state = ks.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    model(torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    state.progress.step = step
    return state


def save(root, *steps, keep=None, back_to=None):
    """One start of the job that saves these steps."""
    state = state_at(0)
    with ks.Checkpointer(root, state, keep=keep or ks.Keep(last=None), background="off") as checkpointer:
        checkpointer.restore(step=back_to, allow_fresh=True)
        for step in steps:
            state.progress.step = step
            checkpointer.save()


def names_in(root):
    return sorted(name for name, _ in root.list(""))


class Meanwhile:
    """Does something once, ahead of the ``nth`` call of a kind on a name that ends like this."""

    def __init__(self, operation, name, what, nth=1):
        self.operation, self.name, self.what, self.left = operation, name, what, nth

    def __call__(self, operation, name):
        if operation == self.operation and name.endswith(self.name):
            self.left -= 1
            if self.left == 0:
                self.what()


@pytest.fixture
def run():
    memory = ks.MemoryStorage()
    save(memory, 1, 2, 3)
    return memory


# --- a start that a later one has followed takes nothing away ----------------------------------------------------------


def test_retention_of_a_start_that_was_followed_removes_nothing(run):
    """It stands still after its commit; the later start goes back to step 1, which the rules of the older one let go."""
    newest = read_manifest(step_storage(run, 3))
    before = names_in(run)
    slow = Watched(run, Meanwhile("open", ".metadata", lambda: new_incarnation(run, b"{}")))
    tidy(slow, Order(newest, in_run=True, keep=Keep(last=1, weights_only_after=1)), newest)
    assert [name for name in names_in(run) if not name.startswith("incarnations/")] == [
        name for name in before if not name.startswith("incarnations/")
    ]
    tidy(run, Order(newest, in_run=True, keep=Keep(last=1)), newest)
    assert [found.step for found in read_catalog(run).steps] == [3, 2, 1]


def test_a_sweep_of_a_start_that_was_followed_leaves_what_the_later_one_writes(run):
    """Between its two looks the later start has begun, and writes files of a step that is not committed yet."""
    name = f"{step_name(4)}/model/rank-00000.0123abcd.safetensors"

    def follow():
        new_incarnation(run, b"{}")
        run.put(name, b"of the later start")

    stray = f"{step_name(4)}/model/rank-00000.deadbeef.safetensors"
    run.put(stray, b"of an attempt that died")
    tidy_after_restore(Watched(run, Meanwhile("list", "", follow)), 1)
    assert {name, stray} <= {*names_in(run)}
    tidy_after_restore(run, 2)
    assert {name, stray}.isdisjoint(names_in(run))


def test_a_failed_attempt_of_a_start_that_was_followed_is_left_alone(run):
    """The later start saves the same step: its files are not those that failed."""
    name = f"{step_name(4)}/model/rank-00000.0123abcd.safetensors"
    run.put(name, b"whose?")
    new_incarnation(run, b"{}")
    sweep_failed(run, 4, 1)
    assert name in names_in(run)
    sweep_failed(run, 4, 2)
    assert name not in names_in(run)


def test_a_start_that_was_followed_drops_no_optimizer(run):
    new_incarnation(run, b"{}")
    before = names_in(run)
    assert drop_optimizers(run, 1, 1) == ()
    assert names_in(run) == before
    assert drop_optimizers(run, 1, 2) == ("optimizer",)


def test_a_start_that_restores_once_more_leaves_its_own_attempts_alone(run):
    """A save that was given up, because the storage was slow, may still be committed: its files have to be there then."""
    name = f"{step_name(5)}/model/rank-00000.0123abcd.safetensors"
    state = state_at(0)
    with ks.Checkpointer(run, state, background="off") as checkpointer:
        checkpointer.restore()
        state.progress.step = 4
        checkpointer.save()
        run.put(name, b"of an attempt of its own")
        checkpointer.restore()
        assert name in names_in(run)
    save(run)
    assert name not in names_in(run)


def test_a_commit_that_took_too_long_does_not_take_away_what_is_there_by_now(run, monkeypatch):
    """Its files were swept by a later start, which has saved the same step by the time the storage answers."""
    place = step_storage(run, 3)
    manifest = read_manifest(place)
    receipts = [Receipt(0, manifest.save_id, {folder: each[0] for folder, each in manifest.files.items()})]
    monkeypatch.setattr("keepstep.commit.publish.OVERTAKEN_S", -1.0)

    def replace():
        save(run, 3, back_to=2)

    place.delete([".metadata"])
    slow = step_storage(Watched(run, Meanwhile("list", step_name(3), replace)), 3)
    with pytest.raises(CorruptError, match="given up"):
        commit_step(slow, manifest, receipts, replace=False, run=None, leftovers=())
    newest = read_catalog(run).steps[0]
    assert (newest.step, newest.incarnation) == (3, 2)


# --- whoever looks while steps come and go sees what is there ----------------------------------------------------------


def test_a_newer_step_that_comes_while_an_older_one_goes_is_not_overlooked(run):
    """Steps 1 to 3 are listed; before 2 and 3 are read, a later start saves 4 and 5, and its retention removes them."""
    later = Watched(run, Meanwhile("open", f"{step_name(2)}/.metadata", lambda: save(run, 4, 5, keep=ks.Keep(last=1))))
    newest = read_catalog(later).steps[0]
    assert newest.step == 5
    again = ks.MemoryStorage()
    save(again, 1, 2, 3)
    later = Watched(
        again, Meanwhile("open", f"{step_name(2)}/.metadata", lambda: save(again, 4, 5, keep=ks.Keep(last=1)))
    )
    assert [(line.step, line.status) for line in read_listing(later).steps if line.latest] == [(5, "committed")]


def test_a_step_that_is_replaced_while_it_is_looked_at_is_not_damaged(run):
    """Its manifest is read, then it is saved anew after a rollback, then its files are looked for."""

    def replace():
        save(run, 3, back_to=2)

    listing = read_listing(Watched(run, Meanwhile("list", step_name(3), replace)))
    assert [(line.step, line.status) for line in listing.steps] == [
        (3, "committed"),
        (2, "committed"),
        (1, "committed"),
    ]
    assert listing.steps[0].incarnation == 2
    seen = Watched(run, Meanwhile("list", step_name(3), replace))
    raw = found_manifest(step_storage(seen, 3))
    assert parse_manifest(raw, "").lineage.incarnation == 3


def test_a_step_that_goes_while_it_is_looked_at_is_not_damaged(run):
    def go_on():
        save(run, 4, keep=ks.Keep(last=2))

    listing = read_listing(Watched(run, Meanwhile("list", step_name(1), go_on)))
    assert [(line.step, line.status) for line in listing.steps] == [(4, "committed"), (3, "committed")]
