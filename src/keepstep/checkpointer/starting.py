"""The start of a job: whose root it is, who works in the background, which start of which run this is."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from keepstep.check.trace import DrillOrders
from keepstep.checkpointer.background import BackgroundSaves, Manner, is_openable, is_plain
from keepstep.checkpointer.decisions import Start, begin_run, own_root
from keepstep.commit.retention import Keep
from keepstep.copies.levels import Levels
from keepstep.copies.uploads import Uploads
from keepstep.errors import UsageError
from keepstep.format.manifest import Lineage
from keepstep.move.arena import Arena
from keepstep.ranks import Ranks
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Storage
from keepstep.storage.local import Place, storage_of

__all__ = ["Started", "Wish", "start_job"]

KEEP_LOCAL = 2
"""How many steps stay at a local root, unless ``keep_local`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the job asked for; ``drill`` when one has started it: then the one root and the trace are where that says."""

    root: Place
    state: object
    manner: Manner
    trace: bool | Place
    drill: DrillOrders | None
    deadline_s: float
    keep: Keep
    local: Place | None = None
    keep_local: Keep | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """What it got. Saves go through ``arena`` on the training thread when there are no ``saves`` in the background.

    ``root`` is where steps are committed, and ``keep`` its rules; ``upload`` are those of the root they are copied to.
    """

    root: Storage
    levels: Levels
    keep: Keep
    upload: Keep | None
    uploads: Uploads | None
    trace: Path | None
    lineage: Lineage
    saves: BackgroundSaves | None
    arena: Arena | None


def start_job(ranks: Ranks, wish: Wish, held: contextlib.ExitStack) -> Started:
    """Takes the root, finds or starts agents, and begins a new incarnation. Collective.

    Args:
        ranks: of the job.
        wish: the same on every rank.
        held: closes what was opened.

    Raises:
        UsageError, MismatchError, RunOwnedError, AgentError: see ``Checkpointer``.
    """
    with ranks.phase("start", wish.deadline_s) as phase:
        wish.manner.check()
        if not isinstance(wish.state, TrainState):
            raise UsageError(
                f"a Checkpointer keeps a TrainState, not a {type(wish.state).__name__}: TrainState(**state)"
            )
        levels = _levels(wish)
        root = levels.near
        trace = _trace_folder(wish, root)
        posted = phase.gather(levels.url.encode())
        keep = wish.keep if levels.far is None else wish.keep_local or Keep(last=KEEP_LOCAL)
        if posted is not None:
            own_root(levels, posted, held)
            _check_space(root, keep)
        phase.broadcast(b"" if posted is not None else None)
    arena, saves = None, None
    if wish.manner.background == "off":
        arena = held.enter_context(contextlib.closing(Arena()))
    else:
        saves = held.enter_context(BackgroundSaves(ranks, root, wish.manner, wish.deadline_s))
        saves.connect()
        if saves.kind == "agent" and levels.far is not None and is_openable(levels.far):
            levels = replace(levels, by="agent")
    with ranks.phase("begin", wish.deadline_s) as phase:
        if saves is not None:
            # What an earlier start of this job has left to the agent is committed before this one begins.
            saves.settle(wish.deadline_s)
        posted = phase.gather(b"")
        answer = b"" if posted is None else msgspec.json.encode(begin_run(levels, ranks.world))
        start = msgspec.json.decode(phase.broadcast(answer), type=Start)
    lineage = Lineage(start.run, start.incarnation)
    if levels.far is None:
        return Started(root, levels, keep, None, None, trace, lineage, saves, arena)
    levels = replace(levels, away=start.away)
    _check_shared(ranks, levels, lineage, wish.deadline_s)
    uploads = held.enter_context(Uploads(levels, copies=ranks.leads and levels.by == "trainer"))
    return Started(root, levels, keep, wish.keep, uploads, trace, lineage, saves, arena)


def _levels(wish: Wish) -> Levels:
    """The roots that were asked for.

    Raises:
        UsageError: both are the same, or there are rules for a local one that is none.
    """
    if wish.drill is not None:
        return Levels(storage_of(wish.drill.root))
    root = storage_of(wish.root)
    if wish.local is None:
        if wish.keep_local is not None:
            raise UsageError(f"keep_local={wish.keep_local!r} means nothing without local=")
        return Levels(root)
    near = storage_of(wish.local)
    if near.url == root.url:
        raise UsageError(
            f"{root.url} is both the root and local=: the local folder is another one, on a disk of this machine"
        )
    return Levels(near, root, wish.keep)


def _trace_folder(wish: Wish, root: Storage) -> Path | None:
    """Where the trace goes: a folder of a file system. It is appended to at every boundary, as no object can be.

    Raises:
        UsageError: there is none beside the steps, or another place was named.
    """
    if wish.drill is not None:
        return Path(wish.drill.trace)
    if not wish.trace:
        return None
    place = root if wish.trace is True else storage_of(wish.trace)
    if not is_plain(place):
        raise UsageError(
            f"a trace goes to a folder of a file system, not to {place.url}: trace='some/folder' says which one"
        )
    return Path(root.url, "trace") if wish.trace is True else Path(place.url)


def _check_shared(ranks: Ranks, levels: Levels, lineage: Lineage, deadline_s: float) -> None:
    """The local folder is the same one for all ranks. Collective.

    Raises:
        UsageError: it is not.
    """
    with ranks.phase("local", deadline_s) as phase:
        posted = phase.gather(levels.note_of(lineage.incarnation))
        others = [] if posted is None else [rank for rank, note in enumerate(posted) if note != posted[0]]
        if others:
            raise UsageError(
                f"{levels.near.url} is another folder on rank {', '.join(map(str, others[:20]))} than on rank 0: local="
                " needs one that all ranks see. Where ranks run on several machines, each with a disk of its own, leave"
                " local= out"
            )
        phase.broadcast(b"" if posted is not None else None)


def _check_space(root: Storage, keep: Keep) -> None:
    """Tells the user of a rule that cannot be followed here."""
    if keep.min_free_bytes and root.free_bytes() is None:
        text = f"Keep(min_free_bytes={keep.min_free_bytes}) means nothing at {root.url}: it cannot tell what is free"
        warnings.warn(text, stacklevel=5)
