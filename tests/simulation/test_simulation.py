"""The protocol under one seeded scheduler: thousands of histories with deaths, sleepers, lags and late comers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.simulation import plants, search
from tests.simulation.world import Fault, World

QUICK, SOME, MANY = 100, 2_500, 10_000
FIRST = SEED * MANY
ROOT = Path(__file__).parents[2]


def failed(seeds):
    """What to say about seeds that break a promise: how to see them again, and the first one, as short as possible."""
    seed = min(seeds)
    return (
        f"{len(seeds)} seeds break a promise: {sorted(seeds)[:20]}\n"
        f"python -m tests.simulation.search {seed}\n{search.told(seed)}"
    )


def test_no_promise_is_broken_in_some_histories():
    print(f"seeds {FIRST} to {FIRST + QUICK - 1}")
    bad = search.broken(FIRST, FIRST + QUICK)
    assert not bad, failed(bad)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.soak)])
def test_no_promise_is_broken_in_thousands_of_histories(count):
    print(f"seeds {FIRST} to {FIRST + count - 1}")
    parts = min(4, os.cpu_count() or 1)
    size = -(-count // parts)
    command = [sys.executable, "-m", "tests.simulation.search"]
    searches = [
        subprocess.Popen(
            [*command, str(FIRST + part * size), str(FIRST + min(count, (part + 1) * size))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]
    bad = {int(seed) for one in searches for seed in one.communicate()[0].split()}
    assert [one.returncode for one in searches] == [0] * parts
    assert not bad, failed(bad)


def test_a_seed_is_the_same_history_again():
    for seed in range(3):
        plan = search.plan_of(seed)
        assert search.run(plan).history == search.run(plan).history


@pytest.mark.slow
def test_everything_that_may_happen_happens():
    """What the histories are made of; were any of it missing, the search would be for nothing."""
    seen = Counter()
    for seed in range(300):
        plan = search.plan_of(seed)
        end = search.run(plan)
        what = {entry[2] for entry in end.history} | {entry[2].split()[1] for entry in end.history if " " in entry[2]}
        text = {entry[3] for entry in end.history if entry[2] in ("save failed", "hears", "ends with an error")}
        seen.update(what)
        seen["refused"] += any("later incarnation" in one or "not committed" in one for one in text)
        seen["deadline"] += any("within 2 s" in one for one in text)
        seen["dead call"] += any(entry[1].endswith("(dead)") for entry in end.history)
        seen["other world"] += len({job.world for job in plan.jobs}) > 1
        seen["hint"] += any(entry[2:] == ("put", "latest") for entry in end.history)
        seen["retention"] += any(entry[2] == "delete" and entry[3].endswith(".metadata") for entry in end.history)
    wanted = {
        "DIES",
        "POWER",
        "STILL",
        "goes on",
        "FAILS",
        "takes",
        "save failed",
        "restored",
        "begins",
        "has lost sight of the job",
    }
    wanted |= {"refused", "deadline", "dead call", "other world", "hint", "retention"}
    assert not {name for name in wanted if seen[name] < 3}, seen


# --- bugs that are put in are found ------------------------------------------------------------------------------------

# Where each was found last: tried first, so that finding it again costs nothing.
FOUND_AT = {
    plants.no_look_before_a_sweep: 498,
    plants.failed_attempts_are_swept_while_alive: 1165,
    plants.receipts_of_another_attempt: 4587,
    plants.each_rank_chooses_for_itself: 496,
    plants.newest_by_number: 48,
    plants.nobody_watches_deadlines: 25,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    for seed in (FOUND_AT.get(plant, 0), *range(MANY)):
        plan = search.plan_of(seed)
        violation = search.run(plan).violation
        if violation is not None:
            print(f"found at seed {seed}: {violation}")
            assert violation.kind in plants.PLANTS[plant], violation
            monkeypatch.undo()
            assert search.run(plan).violation is None
            return
    pytest.fail(f"not found in {MANY} histories")


@pytest.mark.slow
def test_a_history_that_breaks_a_promise_is_told_as_short_as_possible(monkeypatch):
    """Of an old start that wakes up and commits, nothing is left but two starts and what lets the first one live on."""
    plants.no_look_before_the_commit(monkeypatch)
    plan, end = next(
        (plan, end)
        for plan in map(search.plan_of, range(MANY))
        if (end := search.run(plan)).violation is not None and end.violation.kind == "zombie"
    )
    smaller = search.shrink(plan, end.violation.kind)
    short = search.run(smaller)
    assert short.violation.kind == end.violation.kind
    assert smaller.size < plan.size
    assert len(short.history) < len(end.history)
    assert len(smaller.faults) <= 1
    assert len(smaller.jobs) == 2
    text = search.story(smaller, short)
    assert text.startswith("broken promise: zombie")
    assert "job1.rank0" in text
    assert text.count("\n") < 100


# --- the world itself ---------------------------------------------------------------------------------------------------


def test_a_process_that_dies_does_nothing_more():
    world = World(0, (Fault("crash", "one", 2),))
    process, done = world.process("one", "node0"), []

    def work():
        try:
            for number in range(5):
                world.breath()
                done.append(number)
                world.sleep(0.1)
        finally:
            world.sleep(0.1)
            done.append("still there")

    world.spawn(process, "main", work)
    assert world.run(lambda: not process.alive, 10.0)
    world.run(lambda: False, 10.0)
    assert done == [0]
    world.close()


def test_a_node_that_stands_still_goes_on_later():
    world = World(0, (Fault("freeze", "one", 1, seconds=5.0),))
    times = {}

    def work(name):
        def run():
            world.sleep(0.1)
            world.breath()
            world.sleep(0.1)
            times[name] = world.now

        return run

    for name, node in (("one", "node0"), ("two", "node0"), ("three", "node1")):
        world.spawn(world.process(name, node), "main", work(name))
    world.run(lambda: len(times) == 3, 60.0)
    assert times["three"] < 0.5
    assert times["one"] > 5.0
    assert times["two"] > 5.0
    world.close()
