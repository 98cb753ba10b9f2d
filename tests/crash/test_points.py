"""Every named point: it is reached where its name says, and whatever is raised there leaves one whole step or the other."""

from __future__ import annotations

import ast
import timeit

import pytest

import keepstep as ks
from keepstep.failpoints import POINTS, reach
from tests.architecture.source import modules
from tests.crash.work import advanced, made, whole
from tests.helpers.points import Planted, failing_at, watching

IN_A_SAVE = [
    "capture",
    "plan",
    "copy",
    "write",
    "commit",
    "receipts",
    "publish",
    "published",
    "latest",
    "tidy",
    "remove",
]
IN_A_RESTORE = ["choose", "plan", "read", "agree", "finish"]
IN_THE_BACKGROUND = [
    "wait",
    "capture",
    "plan",
    "copy",
    "submit",
    "receipts",
    "publish",
    "published",
    "latest",
    "tidy",
    "remove",
]
AFTER_THE_COMMIT = {"published", "latest", "tidy", "remove"}


def test_the_list_names_the_points_that_are_there():
    """A span is a point of its name."""
    found = {
        node.args[0].value
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        if ast.unparse(node.func).rpartition(".")[2] in ("reach", "span")
    }
    assert found == set(POINTS)


def test_a_point_costs_nothing_worth_measuring():
    """A save reaches some twenty of them."""
    assert min(timeit.repeat(lambda: reach("plan"), number=1000, repeat=5)) / 1000 < 20e-6


def prepared(steps=3):
    memory = ks.MemoryStorage()
    state = made(0, 1)
    with ks.Checkpointer(memory, state, keep=ks.Keep(last=None), background="thread") as checkpointer:
        checkpointer.restore()
        for step in range(1, steps + 1):
            advanced(state, step)
            checkpointer.save().wait_committed(60)
    return memory


def restored(memory):
    state = made(0, 1)
    with ks.Checkpointer(memory, state, keep=ks.Keep(last=2), background="thread") as checkpointer:
        report = checkpointer.restore()
        assert whole(state) == report.step
        assert report.skipped == ()
    return report.step


@pytest.mark.slow
def test_points_come_in_the_order_of_the_protocol():
    for background, expected in (("off", IN_A_SAVE), ("thread", IN_THE_BACKGROUND)):
        memory, seen = prepared(), []
        state = made(0, 1)
        with ks.Checkpointer(memory, state, keep=ks.Keep(last=1), background=background) as checkpointer:
            with watching(seen.append):
                checkpointer.restore()
            assert list(dict.fromkeys(seen)) == IN_A_RESTORE
            seen.clear()
            advanced(state, 4)
            with watching(seen.append):
                checkpointer.save().wait_committed(60)
                checkpointer.close()
        assert list(dict.fromkeys(point for point in seen if point != "compare")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("background", ["off", "thread"])
def test_what_is_raised_at_a_point_of_a_save(background):
    """Before the manifest nothing is committed; after it the step exists; the trainer and its next save go on."""
    for point in IN_A_SAVE if background == "off" else IN_THE_BACKGROUND:
        memory = prepared()
        state = made(0, 1)
        with ks.Checkpointer(memory, state, keep=ks.Keep(last=2), background=background) as checkpointer:
            checkpointer.restore()
            failed = None
            advanced(state, 4)
            with failing_at(point) as seen:
                try:
                    checkpointer.save().wait_committed(60)
                except (ks.errors.CheckpointError, Planted) as err:
                    failed = err
                if background == "thread":
                    checkpointer._settle()
            assert point in seen
            there = {name.split("/")[0] for name, _ in memory.list("") if name.endswith("/.metadata")}
            assert ("step-00000004" in there) == (point in AFTER_THE_COMMIT), point
            assert f"planted at {point}" in str(failed) or (failed is None and point in AFTER_THE_COMMIT), failed
            assert "step-00000003" in there
            advanced(state, 5)
            assert checkpointer.save().wait_committed(60).step == 5
        assert restored(memory) == 5


@pytest.mark.slow
def test_what_is_raised_at_a_point_of_a_restore():
    """Plain values are as before, or, once they began to change, the next restore makes them right."""
    memory = prepared()
    for point in IN_A_RESTORE:
        state = made(0, 1)
        with ks.Checkpointer(memory, state, background="thread") as checkpointer:
            with failing_at(point) as seen, pytest.raises(Planted, match=f"planted at {point}"):
                checkpointer.restore()
            assert point in seen
            assert state.progress.step == 0
            assert state["mine"].value == {"step": 0}
            assert checkpointer.restore().step == 3
            assert whole(state) == 3
