"""Which steps stay, by every rule and all of them together; and that what lets steps go may be killed anywhere."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import random
import re
import warnings
from pathlib import Path

import msgspec
import pytest
import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.commit.catalog import Catalog, Found, read_catalog, step_storage
from keepstep.commit.conclude import Order
from keepstep.commit.pins import pin_step, pinned_steps, unpin_step
from keepstep.commit.publish import new_incarnation
from keepstep.commit.retention import Keep, for_space, judge, sweep_leftovers
from keepstep.errors import MismatchError, StepNotFoundError, UsageError
from tests.conftest import SEED
from tests.helpers.storages import Watched

HOUR = 3600.0


def found(step, *, incarnation=1, run="mine", hours=None, damage="", dropped=(), **metrics):
    created = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=step if hours is None else hours)
    return Found(step, run, incarnation, f"{step:08x}", created.isoformat(), metrics, damage=damage, dropped=dropped)


def catalog(*steps):
    return Catalog(tuple(sorted(steps, key=lambda one: one.order, reverse=True)), ())


def kept(steps, keep, *, resumed=(), pinned=(), run="mine"):
    fates = judge(catalog(*steps), keep, run=run, resumed=set(resumed), pinned=set(pinned))
    return sorted(fate.found.step for fate in fates if not fate.goes)


def why(steps, keep, **options):
    fates = judge(catalog(*steps), keep, run="mine", resumed=set(), **options)
    return {fate.found.step: (*fate.held, *fate.wanted) for fate in fates}


# --- the rules ------------------------------------------------------------------------------------------------------


def test_each_rule_wants_what_it_says():
    ten = [found(step, loss=float(abs(step - 4))) for step in range(1, 11)]
    assert kept(ten, Keep(last=3)) == [8, 9, 10]
    assert kept(ten, Keep(last=None)) == list(range(1, 11))
    assert kept(ten, Keep(last=1, every=4)) == [4, 8, 10]
    assert kept(ten, Keep(last=1, best=2)) == [4, 5, 10]
    assert kept(ten, Keep(last=1, best=1, mode="max")) == [10]
    assert kept(ten, Keep(last=1, every_s=4 * HOUR)) == [1, 5, 9, 10]
    assert kept(ten, Keep(last=2, every=7, best=1, every_s=6 * HOUR)) == [1, 4, 7, 9, 10]
    assert kept([], Keep(last=1)) == []


def test_time_is_that_of_the_steps_and_what_stays_stays():
    """At each save the rules are applied to what they have left: a step they want once is not let go later."""
    dice = random.Random(SEED)
    for _ in range(50):
        keep = Keep(last=dice.randint(1, 3), every_s=dice.uniform(0.5, 20) * HOUR)
        hours, there, chosen = 0.0, [], set()
        for step in range(1, 40):
            hours += dice.uniform(0.1, 5)
            there.append(found(step, hours=hours))
            left = set(kept(there, keep))
            fates = judge(catalog(*there), keep, run="mine", resumed=set())
            timed = {fate.found.step for fate in fates if any("every" in text for text in fate.wanted)}
            assert chosen <= timed, (SEED, keep)
            chosen |= timed
            there = [one for one in there if one.step in left]
        # Where the steps are dense enough, no gap is longer than the rule says plus one step.
        times = sorted(dt.datetime.fromisoformat(one.created) for one in there)
        gaps = [(b - a).total_seconds() for a, b in itertools.pairwise(times)]
        assert max(gaps) <= keep.every_s + 5 * HOUR


def test_a_step_whose_time_cannot_be_told_stays_for_the_rule_of_times():
    odd = Found(2, "mine", 1, "00000002", "yesterday", {})
    assert kept([found(1), odd, found(3)], Keep(last=1, every_s=100 * HOUR)) == [1, 2, 3]


@pytest.mark.case(81)
@pytest.mark.case(82)
def test_what_no_rule_may_take():
    steps = [
        found(10, incarnation=1),
        found(5000, incarnation=1, run="other"),
        found(20, incarnation=2),
        found(30, incarnation=2, damage="no manifest"),
        found(15, incarnation=3),
        found(16, incarnation=3),
    ]
    assert kept(steps, Keep(last=1)) == [16, 30, 5000]
    assert kept(steps, Keep(last=1), resumed=[10]) == [10, 16, 30, 5000]
    assert kept(steps, Keep(last=1), pinned=[20]) == [16, 20, 30, 5000]
    assert kept(steps, Keep(last=1), run="other") == [10, 15, 16, 20, 30, 5000]
    reasons = why(steps, Keep(last=2, every=5), pinned={20})
    assert reasons == {
        16: ("newest", "last 2"),
        15: ("last 2", "every 5"),
        20: ("pinned", "every 5"),
        10: ("every 5",),
        30: ("damaged: somebody should look",),
        5000: ("of another run",),
    }


def test_any_catalog_keeps_its_newest_good_step_and_all_that_is_held():
    dice = random.Random(SEED)
    for _ in range(300):
        numbers = dice.sample(range(1, 60), dice.randint(1, 12))
        steps = [
            found(
                step,
                incarnation=dice.randint(1, 4),
                run=dice.choice(["mine", "mine", "mine", "other"]),
                damage=dice.choice(["", "", "", "bad"]),
                loss=dice.choice([None, 1.0, 2.0, 3.0]),
            )
            for step in numbers
        ]
        keep = Keep(
            last=dice.choice([None, 1, 2, 5]),
            every=dice.choice([None, 7]),
            best=dice.randint(0, 2),
            every_s=dice.choice([None, 5 * HOUR]),
            weights_only_after=dice.choice([None, 1, 3]),
        )
        resumed, pinned = set(dice.sample(numbers, 1)), set(dice.sample(numbers, min(2, len(numbers))))
        fates = judge(catalog(*steps), keep, run="mine", resumed=resumed, pinned=pinned)
        mine = [fate for fate in fates if fate.found.run == "mine" and not fate.found.damage]
        held = [fate for fate in fates if fate.found.step in resumed | pinned or fate not in mine]
        for fate in (*held, *mine[:1]):
            assert not fate.goes, (SEED, fate)
            assert not fate.strip, (SEED, fate)
            assert fate.found not in for_space(fates), (SEED, fate)
        # What has gone once is not needed to decide what stays.
        left = [fate.found for fate in fates if not fate.goes]
        again = judge(catalog(*left), keep, run="mine", resumed=resumed, pinned=pinned)
        if keep.best == 0:
            assert [fate.found for fate in again if not fate.goes] == left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_s": 0}, "every_s=0"),
        ({"every_s": float("nan")}, "every_s=nan"),
        ({"weights_only_after": 0}, "weights_only_after=0"),
        ({"min_free_bytes": -1}, "min_free_bytes=-1"),
        ({"last": 0, "best": -1, "mode": "up"}, "last=0, best=-1, mode='up'"),
    ],
)
def test_rules_that_mean_nothing_are_all_named(options, message):
    with pytest.raises(UsageError, match=f"^Keep: {re.escape(message)} means nothing"):
        Keep(**options)


def test_rules_travel_to_an_agent_as_json(tmp_path):
    state = run_of(1)
    ks.save(tmp_path / "step", state)
    keep = Keep(None, 5, 2, "score", "max", 3600.0, 4, 1 << 40)
    with ks.open(tmp_path / "step") as checkpoint:
        order = Order(checkpoint.manifest, keep=keep)
    assert msgspec.json.decode(msgspec.json.encode(order), type=Order).keep == keep


# --- in a run -------------------------------------------------------------------------------------------------------


def run_of(step, value=None):
    """A state that is large enough for its optimizer to have a file of its own, and says of which step it is."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    return moved(ks.TrainState(model=model, optimizer=optimizer, note={"step": 0}), step, value)


def moved(state, step, value=None):
    value = step if value is None else value
    state.progress.step, state["note"]["step"] = step, step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(value)
            state["optimizer"].state[parameter]["exp_avg"].fill_(value + 0.5)
    return state


def is_whole(state, step):
    model = all(bool((parameter == step).all()) for parameter in state["model"].parameters())
    moments = all(bool((moment["exp_avg"] == step + 0.5).all()) for moment in state["optimizer"].state.values())
    return state.progress.step == step and model and moments and state["note"] == {"step": step}


def saved(storage, *steps, keep=None, **options):
    state = run_of(0)
    with ks.Checkpointer(storage, state, keep=keep or Keep(last=None), background="off", **options) as ckpt:
        ckpt.restore(allow_fresh=True)
        for step in steps:
            moved(state, step)
            ckpt.save()


def committed(storage):
    return sorted(found.step for found in read_catalog(storage).steps)


def restored(storage, **options):
    state = run_of(0)
    with ks.Checkpointer(storage, state, background="off") as ckpt:
        step = ckpt.restore(**options).step
    assert is_whole(state, step)
    return step


def test_pinned_steps_stay_until_they_are_unpinned():
    root = ks.MemoryStorage()
    saved(root, 1, 2, 3)
    assert pin_step(root, 2, "for the paper")
    assert not pin_step(root, 2)
    assert pinned_steps(root) == {2}
    assert json.loads(bytes(root._blobs["pins/step-00000002"]))["note"] == "for the paper"
    saved(root, 4, 5, keep=Keep(last=1))
    assert committed(root) == [2, 3, 5]  # 3 is the one that was resumed from
    assert unpin_step(root, 2)
    assert not unpin_step(root, 2)
    saved(root, 6, keep=Keep(last=1))
    assert committed(root) == [5, 6]
    with pytest.raises(StepNotFoundError, match="no committed step 2; nothing was pinned"):
        pin_step(root, 2)
    assert pinned_steps(root) == frozenset()
    assert restored(root) == 6


class Filling(ks.MemoryStorage):
    """A place of a fixed size."""

    def __init__(self, size):
        super().__init__("filling")
        self.size = size

    def free_bytes(self):
        return self.size - sum(map(len, self._blobs.values()))


def test_the_oldest_go_until_so_much_is_free_but_never_the_last_ones():
    one = ks.MemoryStorage()
    saved(one, 1)
    step_bytes = sum(size for _, size in one.list("step-00000001"))
    root = Filling(5 * step_bytes)
    saved(root, 1, 2, 3, 4, keep=Keep(last=None, min_free_bytes=2 * step_bytes))
    assert committed(root) == [3, 4] or committed(root) == [2, 3, 4]
    assert root.free_bytes() >= 2 * step_bytes
    # More is wanted than can be had: the newest and the one resumed from stay, and it is said.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved(root, 5, 6, keep=Keep(last=2, min_free_bytes=50 * step_bytes))
    assert committed(root) == [4, 6]
    assert "no more steps may go" in str(caught[-1].message)
    assert restored(root) == 6


def test_a_storage_that_cannot_tell_its_free_space_is_told_of():
    root = ks.MemoryStorage("cloud")
    with pytest.warns(UserWarning, match=r"Keep\(min_free_bytes=1000000000\) means nothing at memory://cloud"):
        saved(root, 1, 2, keep=Keep(last=None, min_free_bytes=10**9))
    assert committed(root) == [1, 2]


def test_free_space_of_a_disk_is_that_of_its_file_system(tmp_path):
    root = ks.LocalStorage(tmp_path / "not" / "there" / "yet")
    there = os.statvfs(tmp_path)
    assert abs(root.free_bytes() - there.f_bavail * there.f_frsize) < 1 << 30
    assert step_storage(root, 3).free_bytes() is not None


# --- weights alone --------------------------------------------------------------------------------------------------


def optimizer_files(root, step):
    return [name for name, _ in root.list(f"step-{step:08d}/optimizer")]


def test_old_steps_lose_their_optimizers_and_stay_good_steps():
    root = ks.MemoryStorage()
    saved(root, 1, 2, 3, 4, keep=Keep(last=None, weights_only_after=2))
    assert [bool(optimizer_files(root, step)) for step in (1, 2, 3, 4)] == [False, False, True, True]
    assert [found.dropped for found in read_catalog(root).steps] == [(), (), ("optimizer",), ("optimizer",)]
    for step in (1, 2, 3, 4):
        assert [*verify(step_storage(root, step))][-1].problems == ()
    old = step_storage(root, 1)
    target = run_of(9)
    report = ks.load(old, into=target, only=["model", "note"])
    assert (target["note"], bool((target["model"].weight == 1).all())) == ({"step": 1}, True)
    assert "let go by retention" in report.components["optimizer"].noted[0]
    with ks.open(old) as checkpoint:
        assert checkpoint.describe()["dropped"] == ["optimizer"]
        assert checkpoint.manifest.format >= (1, 1)
        with pytest.raises(StepNotFoundError, match="holds no 'optimizer' any more"):
            checkpoint.values_of("optimizer")
    with pytest.raises(MismatchError, match="optimizer: its files were let go by retention, to keep the weights alone"):
        ks.load(old, into=run_of(9))
    with pytest.raises(UsageError, match=r"only=optimizer: the checkpoint has .*let go by retention"):
        ks.load(old, into=run_of(9), only=["optimizer"])
    assert restored(root) == 4


def test_nobody_resumes_from_weights_alone_without_asking_for_it():
    root = ks.MemoryStorage()
    saved(root, 1, 2, keep=Keep(last=None, weights_only_after=1))
    for name, _ in [*root.list("step-00000002")]:
        root.delete([name])
    state = run_of(7)
    with ks.Checkpointer(root, state, background="off") as ckpt:
        with pytest.raises(
            StepNotFoundError, match=r"step-00000001: kept without optimizer; restore\(step=1, strict=F"
        ):
            ckpt.restore()
        with pytest.raises(MismatchError, match="let go by retention"):
            ckpt.restore(step=1)
        report = ckpt.restore(step=1, strict=False)
        assert report.components["optimizer"].missing == ["optimizer"]
        assert bool((state["model"].weight == 1).all())
        assert state["optimizer"].state[state["model"].weight]["exp_avg"][0, 0] == 7.5
        # What is saved from here on has its optimizer again.
        moved(state, 2)
        ckpt.save()
    assert restored(root) == 2


def test_an_optimizer_that_others_lean_on_stays():
    """A tensor that two components share is stored once, in the folder of the first."""
    root = ks.MemoryStorage()
    state = run_of(0)
    optimizer = state["optimizer"]
    moment = optimizer.state[state["model"].weight]["exp_avg"]
    tied = ks.TrainState(optimizer=optimizer, model=state["model"], average={"moment": moment})
    with ks.Checkpointer(root, tied, keep=Keep(last=None, weights_only_after=1), background="off") as ckpt:
        for step in (1, 2):
            tied.progress.step = step
            ckpt.save()
    assert optimizer_files(root, 1)
    assert [*verify(step_storage(root, 1))][-1].problems == ()


# --- killed at every call -------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def copied(root):
    other = ks.MemoryStorage()
    other._blobs = dict(root._blobs)
    return other


def killer(at):
    """Ahead of the ``at``-th change since the step was committed, and of all that follow."""
    changes = []

    def before(operation, name):
        if operation in ("create", "commit", "put", "put_new", "delete"):
            changes.append((operation, name))
            if "step-00000006/.metadata" in {name for _, name in changes[:-1]}:
                before.done += 1
                if before.done >= at:
                    raise Killed

    before.done = 0
    return before


KEEPS = {
    "remove": Keep(last=1),
    "strip": Keep(last=None, weights_only_after=1),
    "both": Keep(last=1, every=2, weights_only_after=1),
}


@pytest.mark.case(79)
@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPS)
def test_a_kill_at_any_call_of_retention_is_finished_later(name):
    base = ks.MemoryStorage()
    saved(base, 1, 2, 3, 4, 5)
    reference = copied(base)
    saved(reference, 6, keep=KEEPS[name])
    wanted = {step: bool(optimizer_files(reference, step)) for step in committed(reference)}
    at, seen = 0, set()
    while True:
        at += 1
        root = copied(base)
        storage = Watched(root)
        state = run_of(0)
        killed = False
        with ks.Checkpointer(storage, state, keep=KEEPS[name], background="off") as ckpt:
            ckpt.restore()
            moved(state, 6)
            storage.before = killer(at)
            try:
                ckpt.save()
            except Killed:
                killed = True
            storage.before = None
        there = committed(root)
        optimizers = {step: bool(optimizer_files(root, step)) for step in there}
        seen.add(tuple(optimizers.items()))
        if not killed:
            assert optimizers == wanted
            break
        newest = 6 if 6 in there else 5
        assert {5, newest} <= set(there), (at, there)
        for step in there:
            assert [*verify(step_storage(root, step))][-1].problems == (), (at, step)
        # The next start finds the newest, and finishes what was begun; the next save what was not.
        assert restored(root) == newest
        for one in read_catalog(root).steps:
            folders = {file.split("/")[1] for file, _ in root.list(f"step-{one.step:08d}")}
            assert not folders & set(one.dropped), (at, one.step)
        assert read_catalog(root).unfinished == ()
        if newest == 6:
            moved(state, 6)
            saved(root, 7, keep=KEEPS[name])
            assert set(committed(root)) == {*kept_after(wanted, name), 7}
    assert at > 5
    assert len(seen) > 1


def kept_after(wanted, name):
    """What the rules keep once step 7 is saved by a start that has resumed from step 6."""
    return {"remove": {6}, "strip": set(wanted) | {6}, "both": {2, 4, 6}}[name]


@pytest.fixture
def swept_between(monkeypatch):
    """What the start ``number`` of the job sweeps comes between the file of the next note and its name."""
    link = os.link

    def sweep_at_next(root, number):
        def linked(source, target):
            monkeypatch.setattr(os, "link", link)
            sweep_leftovers(root, read_catalog(root), number)
            assert not Path(source).exists()
            link(source, target)

        monkeypatch.setattr(os, "link", linked)

    return sweep_at_next


def test_a_start_that_takes_its_number_while_another_sweeps_gets_it(tmp_path, swept_between):
    root = ks.LocalStorage(tmp_path)
    first = new_incarnation(root, b"first\n")
    left = tmp_path / "incarnations" / f"{first + 7:06d}.5f3a91c2.partial"
    left.write_bytes(b"fir")
    swept_between(root, first)
    assert new_incarnation(root, b"second\n") == first + 1
    assert sorted(path.name for path in (tmp_path / "incarnations").iterdir()) == [f"{first:06d}", f"{first + 1:06d}"]


def test_a_step_is_pinned_while_a_start_sweeps(tmp_path, swept_between):
    saved(ks.LocalStorage(tmp_path), 10)
    root = ks.LocalStorage(tmp_path)
    swept_between(root, new_incarnation(root, b"next\n"))
    assert pin_step(root, 10)
    assert pinned_steps(root) == {10}
    assert [path.name for path in (tmp_path / "pins").iterdir()] == ["step-00000010"]
