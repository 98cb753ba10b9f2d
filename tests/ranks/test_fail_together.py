"""Whatever becomes of one rank, at whatever point of whatever call: the others are told in time, with rank and cause.

Each line of the matrix is a job of three ranks. One of them raises, is killed, or is stopped at a named point. Then: every
other rank has raised within the deadline and two seconds, nothing was committed, and, where the rank is still there, the
group works and the next save does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.failpoints import EVENT
from keepstep.storage.base import Storage
from tests.crash.campaign import quick_folder
from tests.helpers.agents import wait_until
from tests.helpers.jobs import Job, alone
from tests.helpers.storages import Watched
from tests.ranks.calls import attempt, group_works, training_state

WORLD = 3
DEADLINE_S = 1.0
TOLD_S = 2.0
AT_ONCE = 5


@dataclass(frozen=True)
class Line:
    """One line of the matrix: what is called, how saves go on, who fails, how, and where."""

    call: str
    background: str
    victim: int
    kind: str
    point: str


def deadline_of(line):
    """Agents take a moment to start, and several jobs start at once."""
    return 3.0 if line.background == "agent" else DEADLINE_S


class Hook:
    """Makes something happen in this process at the next time it comes to a point."""

    def __init__(self):
        self.point, self.happens = "", None
        sys.addaudithook(self.hear)

    def hear(self, event, args):
        if event == EVENT and self.happens is not None and args[0] == self.point:
            happens, self.happens = self.happens, None
            happens()


REFUSED = "as the test wants it"


def refuse():
    raise OSError(REFUSED)


def stop():
    """This thread first: one to the process would let it go on for a moment."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


HAPPENS = {"raise": refuse, "die": lambda: os.kill(os.getpid(), signal.SIGKILL), "hang": stop}


def goes_wrong(rank, root, notes, line):
    """What the call said on this rank, whether the group works after it, and what the next save said."""
    warnings.simplefilter("ignore")
    hook = Hook()
    state = training_state(rank, 1.0)
    options = {
        "deadline_s": deadline_of(line),
        "background": line.background,
        "staging": "block",
        "keep": ks.Keep(last=None),
    }
    with contextlib.ExitStack() as held:
        ckpt = held.enter_context(ks.Checkpointer(root, state, **options))
        ckpt.restore()
        committed(ckpt, state, 1)
        if rank == line.victim:
            hook.point, hook.happens = line.point, HAPPENS[line.kind]
        outcome = attempt(called, line, ckpt, state, root, hook)
        hook.happens = None
        partial = notes / f"{rank}.new"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(notes / f"outcome-{rank}")
        if line.kind == "die":
            # The others are told, and end.
            held.pop_all()
            return outcome, False, None
        works = group_works()
        following = attempt(committed, ckpt, state, 5)
        fresh = training_state(rank)
        restored = ckpt.restore().step if following.kind == "ok" else None
        for path in sorted(manifest.parent for manifest in Path(root).glob("step-*/.metadata")):
            ks.load(path, into=fresh, deadline_s=20)
        whole = bool((fresh["model"].weight == 5.0).all()) and restored == 5
    return outcome, works and whole, following


def committed(ckpt, state, step):
    state.progress.step = step
    with torch.no_grad():
        state["model"].weight.fill_(float(step))
    pending = ckpt.save()
    if pending is not None:
        pending.wait_committed(20)


def called(line, ckpt, state, root, hook):
    if line.call == "save":
        committed(ckpt, state, 2)
    elif line.call == "restore":
        ckpt.restore()
    elif line.call == "load":
        ks.load(f"{root}/step-00000001", into=training_state(), deadline_s=DEADLINE_S)
    else:
        # Another start in the same process: there are no points on its way to the first meeting.
        staging = "block"
        if hook.happens is refuse:
            staging = REFUSED
        elif hook.happens is not None:
            hook.happens()
        ks.Checkpointer(root, state, deadline_s=DEADLINE_S, background="off", staging=staging).close()


def carried_out(folder, lines):
    """How the ranks of each line ended. A few jobs at once: most of their time is spent waiting for somebody."""
    found = {}
    for first in range(0, len(lines), AT_ONCE):
        jobs = []
        for number, line in enumerate(lines[first : first + AT_ONCE], first):
            notes = folder / f"notes{number}"
            notes.mkdir()
            jobs.append(
                (
                    line,
                    notes,
                    Job(folder / f"job{number}", WORLD, goes_wrong, str(folder / f"run{number}"), notes, line),
                )
            )
        for line, notes, job in jobs:
            if line.kind == "hang":
                others = [notes / f"outcome-{rank}" for rank in range(WORLD) if rank != line.victim]

                def are_told(job=job, others=others):
                    job.wait_ready()  # looks who has ended
                    return bool(job.ends) or all(path.exists() for path in others)

                try:
                    wait_until(are_told, 30, what=f"an end of {line}")
                finally:
                    if line.victim not in job.ends:
                        os.kill(job.pids[line.victim], signal.SIGCONT)
        for line, _, job in jobs:
            found[line] = job.wait(60)
    return found


def warmed(folder):
    ks.save(folder / "warm", training_state())
    ks.load(folder / "warm", into=training_state())


def all_lines(folder, lines):
    warmed(folder)
    return carried_out(folder, lines)


EVERYWHERE = {
    ("save", "off"): ("capture", "plan", "copy", "compare", "write", "commit"),
    ("save", "thread"): ("capture", "plan", "copy", "submit"),
    ("save", "agent"): ("capture", "plan", "copy", "submit"),
    ("restore", "off"): ("plan", "read", "agree", "finish"),
    ("load", "off"): ("plan", "read", "agree", "finish"),
    ("start", "off"): ("",),
}
COORDINATOR = {
    ("save", "off"): ("receipts", "publish"),
    ("save", "thread"): ("receipts", "publish"),
    ("restore", "off"): ("choose",),
}


WAITS = {"plan", "commit", "submit", "read", "finish", ""}
"""Where the others wait for a rank that has stopped: each wait once, since each takes as long as the deadline."""


def matrix(kind):
    lines = [
        Line(call, background, victim, kind, point)
        for (call, background), points in EVERYWHERE.items()
        for victim in (0, 1)
        for point in points
        if kind != "hang" or (point in WAITS and (call, point) != ("load", "plan"))
    ]
    lines += [Line(*which, 0, kind, point) for which, points in COORDINATOR.items() for point in points]
    return lines


@pytest.mark.case(60)
@pytest.mark.case(69)
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["raise", "die", "hang"])
def test_all_hear_of_one(rank_pool, kind):
    lines = matrix(kind)
    with quick_folder() as folder:
        (found,) = rank_pool(1)(alone, all_lines, folder, lines, timeout_s=220)
        steps = {
            line: sorted(int(path.parent.name[5:]) for path in (folder / f"run{number}").glob("step-*/.metadata"))
            for number, line in enumerate(lines)
        }
    problems = [f"{line}: {problem}" for line in lines for problem in problems_of(line, found[line], steps[line])]
    assert not problems, "\n".join(problems)
    assert len(lines) > (20 if kind == "hang" else 40)


def problems_of(line, ends, steps):
    """Everything that is not as it should be after one line of the matrix."""
    if line.kind == "die":
        if ends[line.victim].status != -signal.SIGKILL:
            yield f"the victim ended with {ends[line.victim]}"
        if steps != [1]:
            yield f"steps {steps} are there, and only 1 should be"
    elif steps != [1, 5] and not (steps == [1, 2, 5] and is_unknown(line)):
        yield f"steps {steps} are there; 1 and 5 should be"
    for rank, end in enumerate(ends):
        if rank == line.victim and line.kind == "die":
            continue
        if end.error or end.status != 0:
            yield f"rank {rank} ended with {end.status}: {end.error}"
            continue
        outcome, works, following = end.value
        if line.kind != "die" and (not works or following.kind != "ok"):
            yield f"rank {rank}: the group works: {works}; the next save: {following}"
        if rank == line.victim:
            if line.kind == "raise" and REFUSED not in outcome.text:
                yield f"the victim itself was told {outcome}"
            continue
        if outcome.kind == "ok":
            yield f"rank {rank} was not told"
        elif outcome.seconds > deadline_of(line) + TOLD_S:
            yield f"rank {rank} was told after {outcome.seconds:.2f} s: {outcome}"
        elif not names_victim(line, outcome):
            yield f"rank {rank} was not told who and why: {outcome}"


def is_unknown(line):
    """The coordinator has all receipts and stops: it commits when it goes on. The others were told that they cannot know."""
    return line.kind == "hang" and line.point in COORDINATOR.get((line.call, line.background), ())


def names_victim(line, outcome):
    if is_unknown(line) and "not known here; only committed steps exist" not in outcome.text:
        return False
    # A call that is wrong is wrong, whoever made it.
    who = f"rank {line.victim}" in outcome.text or outcome.kind == "UsageError"
    return who and (line.kind != "raise" or REFUSED in outcome.text)


# --- another view of the file system --------------------------------------------------------------------------------


class Lagging(Watched):
    """Shows nothing that lies in a folder of this name: another machine's changes have not come here yet."""

    hidden = ""

    def open(self, name):
        if self.hidden and name.startswith(self.hidden):
            return super().open(f"{name}.not-yet")
        return super().open(name)

    def list(self, prefix):
        return (item for item in super().list(prefix) if not self.hidden or not item[0].startswith(self.hidden))

    def folders(self):
        return [name for name in super().folders() if name != self.hidden]


def views(rank, folder):
    told = {}
    for victim in (0, 1, 2):
        root = f"{folder}/run{victim}"
        storage: Storage = Lagging(root)
        state = training_state(rank, 1.0)
        with ks.Checkpointer(storage, state, deadline_s=20, background="off", keep=ks.Keep(last=None)) as ckpt:
            for step in (1, 2):
                committed(ckpt, state, step)
            storage.hidden = "step-00000002" if rank == victim else ""

            def seen(call, *args, ckpt=ckpt, **kwargs):
                outcome = attempt(call, *args, **kwargs)
                return outcome.kind if outcome.kind != "ok" else ckpt.report.step

            told[victim] = [seen(ckpt.restore), seen(ckpt.restore, step=2)]
            told[victim].append(attempt(ks.load, Lagging(f"{root}/step-00000001"), into=state, deadline_s=20).kind)
            state.progress.step = 7
            told[victim].append(attempt(committed, ckpt, state, 7).kind)
            storage.hidden = ""
            told[victim].append(seen(ckpt.restore))
        assert group_works()
    return told


@pytest.mark.case(16)
@pytest.mark.case(62)
def test_a_rank_that_sees_another_file_system_sets_nobody_apart(rank_pool, tmp_path):
    results = rank_pool(WORLD)(views, str(tmp_path))
    for victim in (0, 1, 2):
        restored, asked, loaded, saved, again = zip(*(told[victim] for told in results), strict=True)
        # The coordinator decides what is there. A file that another rank cannot open is damage for all of them.
        assert restored == (1, 1, 1), (victim, restored)
        if victim == 0:
            assert asked == ("StepNotFoundError",) * WORLD
        else:
            assert set(asked) <= {"StorageError", "CorruptError", "RankFailedError", "StepNotFoundError"}
        assert loaded == saved == ("ok",) * WORLD
        assert again == (7,) * WORLD
