"""Jobs that are killed again and again, and what must be true of their folder after every single death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

import keepstep as ks
from keepstep.agent.client import call_agent
from keepstep.agent.node import listener_at, socket_path
from keepstep.agent.protocol import Drain
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.errors import AgentError
from keepstep.failpoints import EVENT
from keepstep.storage.local import LocalStorage
from tests.crash.work import advanced, made, newest, whole
from tests.helpers.agents import agents_running, stop_agents, wait_until
from tests.helpers.jobs import Job, run_job

TIMES = int(os.environ.get("KEEPSTEP_TEST_TIMES", "1"))
"""How many times as many random kills as usual."""
DEADLINE_S = 2.0
ALONE_S = 30.0
STARTS_S = 5.0
"""An agent that starts listens by then."""


@contextlib.contextmanager
def quick_folder():
    """A folder in memory where there is one: a process that is killed leaves its files as they are, synced or not."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kills-", dir=place) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            stop_agents(folder)


class AtPoint:
    """Kills this process when it comes to a named point for the ``nth`` time; without a name it only counts."""

    def __init__(self, point="", nth=0):
        self.point, self.nth = point, nth
        self.counts = Counter()
        sys.addaudithook(self.hear)

    def hear(self, event, args):
        if event == EVENT:
            self.counts[args[0]] += 1
            if args[0] == self.point and self.counts[self.point] == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)


def note(path, value):
    """Durable enough for a test: whole or not at all, also for whoever looks at all notes of a kind."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def keep_saving(rank, root, notes, background, steps, fuse, deadline_s=DEADLINE_S):
    """Restores the newest step and saves one after the other; notes what it was told: restored, committed.

    ``fuse`` is (rank, point, nth): where one of them ends itself.
    """
    at_point = AtPoint(*fuse[1:]) if fuse and fuse[0] == rank else AtPoint()
    notes = Path(notes)
    state = made(rank, dist.get_world_size())
    options = {"deadline_s": deadline_s, "background": background, "staging": "block", "tolerate_failures": 1000}
    with ks.Checkpointer(root, state, keep=ks.Keep(last=2), **options) as ckpt:
        report = ckpt.restore(allow_fresh=not [*notes.glob("committed-*")])
        if not report.fresh:
            assert whole(state) == report.step
        note(notes / f"restored-{rank}", report.step)
        waiting = []
        for _ in range(steps):
            advanced(state, state.progress.step + 1)
            pending = ckpt.save()
            waiting.append(pending)
            for done in [one for one in waiting if one.committed.done()]:
                waiting.remove(done)
                if done.committed.exception() is None:
                    note(notes / f"committed-{rank}", done.step)
        for pending in waiting:
            pending.wait_committed(deadline_s + 5)
            note(notes / f"committed-{rank}", pending.step)
    return dict(at_point.counts)


class Campaign:
    """One folder, and the deaths in it. ``kills`` counts them; ``check`` proves what must be true after each."""

    def __init__(self, folder, world, background):
        folder.mkdir(parents=True)
        self.folder, self.world, self.background = folder, world, background
        self.root, self.notes = folder / "run", folder / "notes"
        self.notes.mkdir()
        self.kills = self.rounds = 0
        self.last = 0

    def start(self, steps, fuse=None):
        """A start of the job, which goes on where the one before it ended."""
        self.rounds += 1
        for left in self.notes.glob("restored-*"):
            left.unlink()
        job = self.folder / f"job{self.rounds}"
        arguments = (str(self.root), str(self.notes), self.background, steps, fuse)
        return Job(job, self.world, keep_saving, *arguments)

    def counts(self, steps, victim):
        """How often the victim comes to each point, in a run that is left alone."""
        self.rounds += 1
        # Nobody dies in it, so nobody waits for its deadline, which an agent on a busy machine may need to start.
        arguments = (str(self.root), str(self.notes), self.background, steps, None, ALONE_S)
        ends = run_job(self.folder / f"job{self.rounds}", self.world, keep_saving, *arguments)
        self.check()
        return ends[victim]

    def settle(self):
        """An agent that is alive finishes what it was given. One that was just started for a trainer that died ends."""
        path, alone = socket_path(str(self.root)), time.monotonic()

        def is_settled():
            nonlocal alone
            if not listener_at(path):
                # One that does not listen yet may be given something when it does; one that never will is given nothing.
                return not agents_running(self.root) or time.monotonic() - alone > STARTS_S
            alone = time.monotonic()
            with contextlib.suppress(AgentError):
                return call_agent(path, Drain(20.0), 30.0).left == 0
            return False

        wait_until(is_settled, what="the agent's rest")

    def check(self):
        """Newest good, the one before it still there, all ranks agreed, and the next start cleans up."""
        self.settle()
        restored = {json.loads(path.read_text()) for path in self.notes.glob("restored-*")}
        assert len(restored) <= 1, f"ranks restored different steps: {restored}"
        assert restored <= {self.last}, (restored, self.last)
        promised = max((json.loads(path.read_text()) for path in self.notes.glob("committed-*")), default=0)
        storage = LocalStorage(self.root)
        steps = [found.step for found in read_catalog(storage).steps]
        # (The newest is restored below.)
        for step in steps[1:]:
            target = made(0, 1)
            ks.load(step_storage(storage, step), into=target)
            assert whole(target) == step
        newest_step = steps[0] if steps else 0
        assert newest_step >= max(promised, self.last), (steps, promised, self.last)
        assert len(steps) >= min(newest_step, 2), steps
        if steps:
            assert newest(self.root) == newest_step
        self.last = newest_step
        return newest_step

    def died(self, ends, *victims):
        """Counts the deaths of a round; each victim must have died of a kill."""
        for victim in victims:
            assert ends[victim].status == -signal.SIGKILL, ends[victim]
        self.kills += bool(victims)
