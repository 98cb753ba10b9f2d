"""The start of a job: whose root it is, who works in the background, which start of which run this is."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import msgspec

from keepstep.check.trace import DrillOrders
from keepstep.checkpointer.background import BackgroundSaves, Manner, is_plain
from keepstep.checkpointer.decisions import Start, begin_run, own_root
from keepstep.commit.retention import Keep
from keepstep.errors import UsageError
from keepstep.format.manifest import Lineage
from keepstep.move.arena import Arena
from keepstep.ranks import Ranks
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Storage
from keepstep.storage.local import Place, storage_of

__all__ = ["Started", "Wish", "start_job"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the job asked for; ``drill`` when one has started it: then root and trace are where that says."""

    root: Place
    state: object
    manner: Manner
    trace: bool | Place
    drill: DrillOrders | None
    deadline_s: float
    keep: Keep


@dataclass(frozen=True, slots=True)
class Started:
    """What it got. Saves go through ``arena`` on the training thread when there are no ``saves`` in the background."""

    root: Storage
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
        root = storage_of(wish.root if wish.drill is None else wish.drill.root)
        trace = _trace_folder(wish, root)
        posted = phase.gather(root.url.encode())
        if posted is not None:
            own_root(root, posted, held)
            _check_space(root, wish.keep)
        phase.broadcast(b"" if posted is not None else None)
    arena, saves = None, None
    if wish.manner.background == "off":
        arena = held.enter_context(contextlib.closing(Arena()))
    else:
        saves = held.enter_context(BackgroundSaves(ranks, root, wish.manner, wish.deadline_s))
        saves.connect()
    with ranks.phase("begin", wish.deadline_s) as phase:
        if saves is not None:
            # What an earlier start of this job has left to the agent is committed before this one begins.
            saves.settle(wish.deadline_s)
        posted = phase.gather(b"")
        answer = b"" if posted is None else msgspec.json.encode(begin_run(root, ranks.world))
        start = msgspec.json.decode(phase.broadcast(answer), type=Start)
    return Started(root, trace, Lineage(start.run, start.incarnation), saves, arena)


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


def _check_space(root: Storage, keep: Keep) -> None:
    """Tells the user of a rule that cannot be followed here."""
    if keep.min_free_bytes and root.free_bytes() is None:
        text = f"Keep(min_free_bytes={keep.min_free_bytes}) means nothing at {root.url}: it cannot tell what is free"
        warnings.warn(text, stacklevel=5)
