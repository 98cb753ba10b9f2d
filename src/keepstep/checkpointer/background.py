"""Saves in the background: the training thread captures and agrees, and copies what is small; the rest comes later.

capture     -> Snapshot                     training thread
agree       -> the plan, the save id        training thread; one gather and one answer
stage       -> arena filled                 training thread ("block"), or a thread of ours until the fence ("overlap")
submit      -> the agent's job              a thread of ours
decided     -> Pending                      whoever hears from the agent
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from keepstep.agent.client import AgentClient, Background
from keepstep.agent.inside import InProcess
from keepstep.agent.protocol import Join
from keepstep.checkpointer.agree import Attempt, KnownPlan, agree
from keepstep.checkpointer.every import Every
from keepstep.checkpointer.looking import Looks
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.saving import no_collection
from keepstep.checkpointer.slots import ArenaSlot
from keepstep.checkpointer.staged import COPY_THREADS, Desk, StagedSave
from keepstep.errors import AgentError, CheckpointError, CommitTimeoutError, RankFailedError, StorageError, UsageError
from keepstep.format.layout import fingerprint
from keepstep.plan.save_plan import assign_writers, rank_files
from keepstep.ranks import Ranks
from keepstep.state.capture import capture
from keepstep.state.recall import Recall
from keepstep.state.size import guessed_bytes
from keepstep.storage.base import Closing, Storage
from keepstep.storage.local import LocalStorage
from keepstep.storage.remote import RemoteStorage
from keepstep.timeline import Timeline

__all__ = ["BackgroundSaves", "Manner", "is_openable", "is_plain"]

GRACE_S = 10.0
"""How much longer than the agent's own deadline a trainer waits for the agent to say that it is over."""
_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Manner:
    """How saves go on in the background; see Checkpointer for what each means."""

    staging: str = "overlap"
    background: str | None = None
    arenas: int = 1
    when_busy: str = "wait"
    memory_budget_bytes: int | None = None
    tolerate_failures: int = 3
    check_staging: bool = False
    scrub: Every | None = None
    linger_s: float = 60.0

    @property
    def scrub_s(self) -> float:
        """How often the agent is to have each step read again, in seconds; 0 for never."""
        return 0.0 if self.scrub is None or self.scrub.seconds is None else self.scrub.seconds

    def check(self) -> None:
        """Refuses what means nothing. Within a phase, so that a rank where it fails tells the others.

        Raises:
            UsageError: lists everything that is wrong.
        """
        allowed: dict[str, tuple[Any, ...]] = {
            "staging": ("overlap", "block"),
            "background": ("agent", "thread", "off", None),
            "arenas": (1, 2),
            "when_busy": ("wait", "skip"),
        }
        wrong = [
            f"{name}={getattr(self, name)!r}: it is one of {', '.join(map(repr, choices))}"
            for name, choices in allowed.items()
            if getattr(self, name) not in choices
        ]
        for name in ("memory_budget_bytes", "tolerate_failures", "linger_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                wrong.append(f"{name}={value!r}: it is not negative")
        if self.scrub is not None and (self.scrub.seconds is None or self.scrub.steps is not None):
            wrong.append(f"scrub={self.scrub!r}: it goes by seconds alone")
        elif self.scrub is not None and self.background not in ("agent", None):
            wrong.append(f"scrub={self.scrub!r}: it needs an agent, not background={self.background!r}")
        if wrong:
            raise UsageError("; ".join(wrong))


class BackgroundSaves(Closing):
    """The saves of one root in the background. Use it on the training thread; see ``Manner``."""

    def __init__(self, ranks: Ranks, root: Storage, manner: Manner, deadline_s: float) -> None:
        self._ranks = ranks
        self._root = root
        self._manner = manner
        self._deadline_s = deadline_s
        self._looks = Looks()
        self._slots = [ArenaSlot() for _ in range(manner.arenas)]
        self._at_work: Background | None = None
        self._warm = False
        self._skipped = 0
        self._recall = Recall()
        self._reviving: threading.Thread | None = None
        self._failed_to_start: CheckpointError | None = None
        self._join = Join()
        self._names: tuple[str, ...] = ()
        self._pool = ThreadPoolExecutor(COPY_THREADS) if manner.staging == "block" else None
        self._copier = ThreadPoolExecutor(manner.arenas, thread_name_prefix="keepstep-copy")
        self._pid = os.getpid()

    def fits(self, ranks: Ranks, storage: Storage) -> bool:
        """Whether these are still the ranks it was made for, in the same process, and its kind of storage."""
        same_kind = (is_plain(storage), is_openable(storage)) == (is_plain(self._root), is_openable(self._root))
        return same_kind and self._pid == os.getpid() and self._ranks.is_same_group(ranks)

    @property
    def kind(self) -> str:
        """Who does the work: ``"agent"`` or ``"thread"``."""
        return self._working().kind

    @property
    def agent_pid(self) -> int:
        """The agent's process; this one when there is no agent."""
        background = self._working()
        return background.pid if isinstance(background, AgentClient) else os.getpid()

    def connect(self) -> None:
        """Finds or starts the agent, and lets all ranks know where the coordinator's is. Collective.

        Raises:
            AgentError: it cannot be started.
        """
        with self._ranks.phase("connect agents", self._deadline_s) as phase:
            background = self._working()
            posted = phase.gather(background.name.encode())
            answer = b""
            if posted is not None:
                names = tuple(name.decode() for name in posted)
                join = Join(names[0])
                if len(set(names)) > 1:
                    secret = secrets.token_hex(32)
                    join = Join(names[0], background.listen(secret, self._ranks.hosts()), secret)
                answer = msgspec.msgpack.encode((join, names))
            told = msgspec.msgpack.decode(phase.broadcast(answer), type=tuple[Join, tuple[str, ...]])
            self._join, self._names = told

    def warm_up(self, state: Mapping[str, Any]) -> None:
        """Has the arenas made ready while training goes on. Not collective; failing only makes the first save slower."""
        background = self._at_work
        if background is None or not background.alive:
            return
        size = guessed_bytes(state, self._ranks.world)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

        def warm(slot: ArenaSlot) -> None:
            try:
                slot.fit(background, size, self._manner.memory_budget_bytes or 0)
                if device is not None and slot.memory is not None:
                    with torch.cuda.device(device):
                        slot.memory.tensor(device)
            except CheckpointError as err:
                _log.warning("no arena yet: %s", err)

        for slot in self._slots:
            short = slot.lent is None or slot.lent.arena.size_bytes < size
            if short and slot.free and (slot.warming is None or not slot.warming.is_alive()):
                slot.warming = threading.Thread(target=warm, args=(slot,), name="keepstep-warm", daemon=True)
                slot.warming.start()

    def settle(self, timeout_s: float) -> int:
        """Waits for saves of this root that trainers before this one have submitted. Returns how many are left."""
        return self._working().drain(timeout_s)

    def save(
        self, storage: Storage, state: Mapping[str, Any], attempt: Attempt
    ) -> tuple[Pending | None, KnownPlan | None]:
        """Begins one save on all ranks. Returns when training may go on; None for a save that was skipped. Collective.

        Raises:
            UnsafeValueError, MismatchError, StepExistsError: nothing was begun; see ``keepstep.save``.
            RankFailedError: too many saves in a row have failed.
        """
        timeline, began = Timeline(), time.perf_counter()
        with timeline.span("wait"):
            slot = self._free_slot()
        try:
            with no_collection(), self._ranks.phase(f"save step {attempt.step}", attempt.deadline_s) as phase:
                # Within the phase, so that a rank that cannot start an agent tells the others.
                background = self._working()
                ready = msgspec.structs.replace(attempt.ready, busy=slot is None, agent=background.name)
                attempt = replace(attempt, ready=ready)
                with timeline.span("capture"):
                    if attempt.refused or attempt.step < 0:
                        raise UsageError(attempt.refused or f"step {attempt.step} is negative")
                    overlap = self._manner.staging == "overlap"
                    rank, world = self._ranks.rank, self._ranks.world
                    snapshot = capture(state, rank=rank, world=world, overlap=overlap, recall=self._recall)
                with timeline.span("plan"):
                    place, looking = self._looks.promptly(storage, attempt)
                    agreed = agree(phase, self._ranks, place, snapshot, looking)
        except (StorageError, RankFailedError) as err:
            if not self._looks.is_away(storage, err):
                raise
            # A store that is away fails this save, as it fails one that has begun: training goes on.
            pending = Pending(attempt.step, storage.url)
            pending.fail(err)
            return pending, attempt.known
        with no_collection():
            if agreed.skip or slot is None:
                self._skipped += 1
                if self._ranks.leads:
                    _log.warning(
                        "step %d was not saved: an earlier save is still in progress (%d skipped so far)",
                        attempt.step,
                        self._skipped,
                    )
                return None, attempt.known
            if agreed.agents != self._names:
                # Some rank's agent is not the one it was: all have to know where the coordinator's is now.
                self.connect()
            desk = Desk(self._ranks.rank, self._ranks.world, background, self._join, self._manner.check_staging)
            staged = StagedSave(desk, attempt, storage, snapshot, agreed, timeline, began)
            slot.pending = staged.begin()
            slot.copying = staged.stage(slot, self._manner.memory_budget_bytes or 0, self._copier, self._pool)
        return slot.pending, msgspec.structs.replace(agreed.plan, files=staged.files)

    def busy(self) -> list[Pending]:
        """The saves that are not decided yet, oldest first."""
        pending = [slot.pending for slot in self._slots if slot.pending is not None]
        return sorted((one for one in pending if not one.committed.done()), key=lambda one: one.step)

    def wait(self) -> None:
        """Waits until nothing is in progress, old steps that may go included. Never raises: each Pending knows its end."""
        if self._pid != os.getpid():
            return
        for pending in self.busy():
            self._wait_for(pending)
        if self._at_work is not None and any(slot.pending is not None for slot in self._slots):
            with contextlib.suppress(AgentError):
                self._at_work.drain(self._deadline_s)

    def close(self) -> None:
        """Lets go of arenas and agent; what was submitted goes on. Idempotent."""
        if self._pid != os.getpid():
            return
        for slot in self._slots:
            for thread in (slot.warming, self._reviving):
                if thread is not None:
                    thread.join()
            if slot.copying is not None:
                slot.copying.result()
            slot.close()
        self._copier.shutdown()
        if self._pool is not None:
            self._pool.shutdown()
        self._let_go()

    def keep_ready(self, state: Mapping[str, Any], known: KnownPlan | None) -> KnownPlan | None:
        """At a boundary: replaces an agent that died. At the first one, where the optimizer has its state, prepares saves.

        Then the arenas are made ready while training goes on, and what a save finds out about the structure is found out
        now. Returns the plan to be known at the next save. Not collective.
        """
        if not self._warm:
            self._warm = True
            self.warm_up(state)
            known = self._rehearsed(state, known)
        if self._at_work is not None and not self._at_work.alive and self._reviving is None:
            self._reviving = threading.Thread(target=self._start, name="keepstep-revive", daemon=True)
            self._reviving.start()
        return known

    def _rehearsed(self, state: Mapping[str, Any], known: KnownPlan | None) -> KnownPlan | None:
        """The plan of a save as it would be now, if all ranks see what this one sees."""
        rank, world = self._ranks.rank, self._ranks.world
        self._copier.submit(int).result()
        with no_collection(), contextlib.suppress(Exception):
            # (What is wrong with the state, or raised by code of its own, is for the save itself to say, on all ranks.)
            structure = capture(
                state, rank=rank, world=world, overlap=self._manner.staging == "overlap", recall=self._recall
            ).structure
            mine = fingerprint(structure)
            if known is None or known.fingerprint != mine:
                known = KnownPlan(mine, assign_writers(structure, world))
            stored = known.stored
            if not known.files and [spec.key for spec in stored.tensors] == [spec.key for spec in structure.tensors]:
                files = rank_files(stored, rank, live_index=None, extras=())
                known = msgspec.structs.replace(known, files=files)
        return known

    def _let_go(self) -> None:
        if self._at_work is not None:
            self._at_work.close()
            self._at_work = None

    def _working(self) -> Background:
        """Who does the work; started anew when it is gone."""
        if self._at_work is not None and self._at_work.alive:
            return self._at_work
        if self._reviving is not None:
            self._reviving.join()
            self._reviving = None
        if self._at_work is None or not self._at_work.alive:
            self._start()
        if self._failed_to_start is not None:
            raise self._failed_to_start
        if self._at_work is None:
            raise AgentError("no agent")
        return self._at_work

    def _start(self) -> None:
        """On any thread; what goes wrong is raised by whoever needs the agent."""
        self._failed_to_start = None
        asked = self._manner.background
        openable = is_openable(self._root)
        if asked == "agent" and not (openable and sys.platform == "linux"):
            self._failed_to_start = UsageError(
                "background='agent' needs Linux and a root given by path or by URL alone; use background='thread'"
            )
            return
        if asked != "thread" and openable and sys.platform == "linux":
            try:
                self._at_work = AgentClient(
                    self._root.url, self._ranks.rank, self._manner.linger_s, self._manner.scrub_s
                )
            except (AgentError, OSError) as err:
                if asked == "agent":
                    self._failed_to_start = err if isinstance(err, AgentError) else AgentError(str(err))
                    return
                _log.warning("saves go on in a thread of this process, because there is no agent: %s", err)
                self._at_work = InProcess()
        else:
            self._at_work = InProcess()

    def _free_slot(self) -> ArenaSlot | None:
        """An arena that may be filled; None when all are busy and busy means skip."""
        for slot in self._slots:
            if slot.free:
                return _warmed(slot)
        if self._manner.when_busy == "skip":
            return None
        # The oldest save ends first: saves are decided in the order in which they began.
        slot = min(self._slots, key=lambda one: one.pending.step if one.pending else -1)
        if slot.pending is not None:
            self._wait_for(slot.pending)
        if slot.copying is not None:
            slot.copying.result()
        return _warmed(slot)

    def _wait_for(self, pending: Pending) -> None:
        limit_s = self._deadline_s + GRACE_S
        try:
            pending.committed.exception(limit_s)
        except TimeoutError:
            pending.fail(CommitTimeoutError(f"step {pending.step}: the agent has said nothing for {limit_s:g} s", ()))
            # It may still read from its arenas: they are left to it, and what comes next gets others.
            self._let_go()


def is_plain(storage: Storage) -> bool:
    """Whether this is a folder of a file system and nothing more. One derived from it does more than its path says."""
    return type(storage) is LocalStorage


def is_openable(storage: Storage) -> bool:
    """Whether an agent can open this storage by its path or URL; what else a URL needs, both find in the environment."""
    return is_plain(storage) or (type(storage) is RemoteStorage and storage.is_plain)


def _warmed(slot: ArenaSlot) -> ArenaSlot:
    if slot.warming is not None:
        slot.warming.join()
    return slot
