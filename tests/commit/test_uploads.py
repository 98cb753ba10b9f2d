"""Which steps of a near root go to the far one, which of them may leave before that, and whose starts are whose."""

from __future__ import annotations

import logging

import pytest

import keepstep as ks
from keepstep.commit.catalog import Catalog, Found, read_catalog
from keepstep.commit.garbage import find_garbage
from keepstep.commit.publish import ORDER_NAME, TALLY_NAME, newest_incarnation
from keepstep.commit.retention import Keep, sweep_leftovers
from keepstep.commit.uploads import (
    Tally,
    UploadOrder,
    foreign_starts,
    read_order,
    read_tally,
    to_upload,
    unsent_steps,
    waiting_steps,
    write_order,
    write_tally,
)
from keepstep.storage.memory import MemoryStorage
from tests.helpers.storages import Watched

NOBODY = frozenset()


def step(number, incarnation=1, *, run="r", save_id="", damage="", loss=None):
    metrics = {} if loss is None else {"loss": loss}
    return Found(number, run, incarnation, save_id or f"id{number}-{incarnation}", metrics=metrics, damage=damage)


def catalog(*steps):
    return Catalog(tuple(sorted(steps, key=lambda found: found.order, reverse=True)), ())


def decided(here, there, keep, *, pinned=NOBODY, foreign=NOBODY):
    todo, passed = to_upload(catalog(*here), catalog(*there), keep, pinned, foreign)
    return [found.step for found in todo], {number: why for number, (_, why) in passed.items()}


# --- what goes, and in which order ------------------------------------------------------------------------------------


def test_the_newest_goes_first_and_what_the_far_root_would_remove_stays():
    here = [step(n) for n in (4, 5, 6, 7)]
    assert decided(here, [], Keep(last=2)) == (
        [7, 6],
        {5: "the rules for copies do not want it", 4: "the rules for copies do not want it"},
    )
    assert decided(here, [], Keep(last=None))[0] == [7, 6, 5, 4]
    assert decided(here, [], Keep(last=1, every=5))[0] == [7, 5]
    assert decided(here, [], Keep(last=1), pinned={4})[0] == [7, 4]
    # With everything in view: step 7 is there already, and so are better ones than 4 and 5.
    rated = [step(4, loss=4.0), step(5, loss=1.0), step(6, loss=5.0)]
    there = [step(7), step(2, loss=2.0), step(3, loss=3.0)]
    assert decided(rated, there, Keep(last=1, best=2))[0] == [5]
    assert decided([step(6), step(7)], [step(6), step(7)], Keep())[0] == []


def test_an_older_line_never_takes_the_place_of_a_newer_one():
    here, there = [step(5, 2), step(6, 2)], [step(5, 3), step(6, 1)]
    assert decided(here, there, Keep(last=9)) == ([6], {5: "a newer step of this number is there"})
    # Saved twice within one start: what is near came later. And what is damaged over there is no step.
    assert decided([step(5, save_id="b")], [step(5, save_id="a")], Keep())[0] == [5]
    assert decided([step(5)], [step(5, 0, save_id="", damage="torn")], Keep())[0] == [5]


def test_steps_that_are_damaged_or_of_somebody_elses_start_stay():
    here = [step(4, damage="torn"), step(5, 2), step(6, 3)]
    assert decided(here, [], Keep(last=9), foreign={2}) == (
        [6],
        {4: "it is damaged", 5: "the run has gone on elsewhere from an older step"},
    )


def test_rules_judge_each_run_by_itself():
    here = [step(1, 1), step(2, 1), step(3, 2, run="s"), step(4, 2, run="s")]
    assert decided(here, [], Keep(last=1))[0] == [4, 2]


# --- what may leave ---------------------------------------------------------------------------------------------------


def test_a_step_may_leave_once_it_is_there_or_not_wanted_there():
    near = MemoryStorage()
    here = catalog(*(step(n) for n in range(1, 7)))
    assert unsent_steps(near, here, Keep(last=3), NOBODY) == {4, 5, 6}
    write_tally(near, Tally(there={6: "id6-1", 5: "another"}, passed={4: ("id4-1", "damaged")}))
    assert unsent_steps(near, here, Keep(last=3), NOBODY) == {5}
    assert [found.step for found in waiting_steps(here, read_tally(near))] == [5, 3, 2, 1]
    # Which ones a rule of times wants depends on what is there: then all wait.
    assert unsent_steps(near, here, Keep(last=1, every_s=60.0), NOBODY) == {1, 2, 3, 5}


def test_a_tally_or_an_order_that_cannot_be_read_is_none():
    near = MemoryStorage()
    assert (read_order(near), read_tally(near)) == (None, Tally())
    order = UploadOrder("s3://bucket/run", Keep(last=2, best=1), 7, "agent")
    write_order(near, order)
    assert read_order(near) == order
    for name in (ORDER_NAME, TALLY_NAME):
        for raw in (b"", b"{", b"\xff", b"[]", b'{"keep": {"last": 0}}'):
            near.put(name, raw)
            assert (read_order(near) in (None, order), read_tally(near)) == (True, Tally())


def test_records_that_were_half_written_are_swept():
    root = MemoryStorage()
    for name in (ORDER_NAME, TALLY_NAME):
        root.put(name, b"{}")
        root.put(f"{name}.12ab.partial", b"{")
    assert {each.folder for each in find_garbage(root, read_catalog(root))} == {
        f"{name}.12ab.partial" for name in (ORDER_NAME, TALLY_NAME)
    }
    sweep_leftovers(root, read_catalog(root), 1)
    assert sorted(name for name, _ in root.list("")) == sorted((ORDER_NAME, TALLY_NAME))


class Small(Watched):
    """A disk with so much room left."""

    free = 0

    def free_bytes(self):
        return self.free


@pytest.mark.slow
def test_on_a_full_disk_training_matters_more_than_copies_of_old_steps(tmp_path, caplog):
    state = ks.TrainState(values=list(range(100)))
    near = Small(tmp_path / "near")
    near.free = 1 << 40
    options = {"keep": Keep(last=9), "keep_local": Keep(last=2), "background": "off"}
    with ks.Checkpointer(MemoryStorage("far"), state, local=near, **options) as ckpt:
        ckpt.uploads.close()  # nobody copies
        for _ in range(5):
            ckpt.step()
            ckpt.save()
        assert [found.step for found in read_catalog(near).steps] == [5, 4, 3, 2, 1]
        near.free = 1000
        ckpt.step()
        with caplog.at_level(logging.WARNING):
            ckpt.save()
        assert [found.step for found in read_catalog(near).steps] == [6, 5]
        assert caplog.text.count("is removed although it was not copied yet: 1,000 bytes are free") == 4


# --- whose starts -----------------------------------------------------------------------------------------------------


def test_two_that_look_at_once_take_a_number_for_the_same_start():
    near, inner = started((1, b"a"), (2, b"b")), started((1, b"a"))
    far = Watched(inner, lambda operation, name: operation == "put_new" and inner.put(name, b"b"))
    assert foreign_starts(near, far, {1, 2}) == NOBODY


def started(*notes):
    root = MemoryStorage()
    for number, note in notes:
        root.put(f"incarnations/{number:06d}", note)
    return root


@pytest.mark.parametrize(
    ("here", "there", "foreign", "after"),
    [
        # All known to both; then two that were taken here alone, and are taken there now.
        ([(1, b"a")], [(1, b"a")], set(), 1),
        ([(1, b"a"), (2, b"b"), (3, b"c")], [(1, b"a")], set(), 3),
        # Somebody else has taken the second one meanwhile; and the third one, too.
        ([(1, b"a"), (2, b"b"), (3, b"c")], [(1, b"a"), (2, b"x")], {2, 3}, 2),
        ([(1, b"a"), (2, b"b"), (3, b"c")], [(1, b"a"), (2, b"x"), (3, b"y")], {2, 3}, 3),
        # After that this job has started once more, knowing both.
        ([(1, b"a"), (2, b"b"), (4, b"d")], [(1, b"a"), (2, b"x"), (3, b"y"), (4, b"d")], {2}, 4),
        # One that was passed over: whoever took the next has not seen it.
        ([(1, b"a"), (2, b"b"), (5, b"e")], [(1, b"a"), (5, b"e")], {2}, 5),
        # A new disk.
        ([(7, b"g")], [(1, b"a"), (7, b"g")], set(), 7),
        ([], [(1, b"a")], set(), 1),
        ([(1, b"a")], [], set(), 1),
    ],
)
def test_a_number_names_one_start_or_is_somebody_elses(here, there, foreign, after):
    near, far = started(*here), started(*there)
    for _ in range(2):
        assert foreign_starts(near, far, {number for number, _ in here}) == foreign
        assert newest_incarnation(far) == after
