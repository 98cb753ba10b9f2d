"""What ranks must agree on before a byte is written: the call, the step, the path, the structure, the shared values.

An unchanged job sends a fingerprint and gets one answer. Ranks with another structure or other values than the rest send
theirs once, and only one rank of each kind does.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from keepstep.checkpointer.replicas import content
from keepstep.commit.aside import read_notes, set_aside
from keepstep.commit.retention import Keep, sweep_failed
from keepstep.errors import MismatchError, RankFailedError, StepExistsError
from keepstep.format.layout import Structure, fingerprint
from keepstep.format.manifest import MANIFEST_NAME, Lineage
from keepstep.format.objects import decode, encode
from keepstep.format.shardfile import digest
from keepstep.plan.save_plan import FilePlan, assign_writers, merge_structures
from keepstep.ranks import DEADLINE_S, Phase, Ranks
from keepstep.state.capture import SharedValue, Snapshot
from keepstep.state.merge import merge_trees
from keepstep.storage.base import Storage

__all__ = ["Agreement", "Attempt", "KnownPlan", "Ready", "agree"]


class KnownPlan(msgspec.Struct, frozen=True):
    """A plan and the fingerprint of the structure it is for: while that does not change, neither does the plan.

    ``files`` are those of this rank in the last save; empty when the plan comes from a manifest.
    """

    fingerprint: str
    stored: Structure
    files: tuple[FilePlan, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """What a rank says of its saves in the background: whether it can take one more, who does its work, what has failed.

    ``failed`` counts failures in a row and ``failure`` is the last one; more than ``tolerated`` end the training.
    """

    busy: bool = False
    agent: str = ""
    failed: int = 0
    failure: str = ""
    tolerated: int = -1


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a save is about, apart from the state. ``root`` is set when the step lies in a run's folder.

    There ``keep`` says which steps stay after it, and ``protect`` names some that stay whatever the rules say. ``upload``
    are the rules of the root to which they are copied, when there is one.
    ``failed_step`` is the step of the attempt before this one when that one failed, else -1. ``refused`` says why this rank
    cannot save now.
    """

    step: int
    lineage: Lineage
    metrics: Mapping[str, float] = field(default_factory=dict)
    replace: bool = False
    root: Storage | None = None
    known: KnownPlan | None = None
    deadline_s: float = DEADLINE_S
    failed_step: int = -1
    keep: Keep | None = None
    protect: tuple[int, ...] = ()
    upload: Keep | None = None
    ready: Ready = field(default_factory=Ready)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plan all ranks follow. ``live_index`` is None when stored and live tensors have the same order.

    ``skip`` says that some rank is busy, so that nobody saves; ``agents`` are the names of those at work, by rank.
    ``leftovers`` (on the coordinator) are names that were in the step's folder before this attempt, ``exclusive`` is whether
    its storage gives a name to one writer only.
    """

    save_id: str
    step: int
    plan: KnownPlan
    tree: bytes
    aliases: Mapping[str, str]
    live_index: dict[str, int] | None
    leftovers: tuple[str, ...]
    skip: bool = False
    agents: tuple[str, ...] = ()
    exclusive: bool = True


class _Entry(msgspec.Struct):
    url: str
    step: int
    fingerprint: str
    values: str
    ready: Ready
    shared: list[tuple[str, int, int]] = []


class _Answer(msgspec.Struct):
    save_id: str
    fingerprint: str
    speakers: tuple[int, ...] = ()
    skip: bool = False
    agents: tuple[str, ...] = ()


class _Told(msgspec.Struct):
    structure: Structure
    tree: bytes
    aliases: dict[str, str]


def agree(phase: Phase, ranks: Ranks, storage: Storage, snapshot: Snapshot, attempt: Attempt) -> Agreement:
    """The plan for this save. Collective: one gather and one answer, and another pair when ranks differ.

    Raises:
        MismatchError: ranks differ in path or step, or in values nobody declared per rank; lists all.
        StepExistsError: a step is committed there and may not be replaced.
    """
    mine = fingerprint(snapshot.structure)
    shared = [(one.key, one.place, _shared_digest(one)) for one in snapshot.shared]
    entry = _Entry(storage.url, attempt.step, mine, f"{digest(snapshot.tree):016x}", attempt.ready, shared)
    posted = phase.gather(msgspec.msgpack.encode(entry))
    answer = b""
    leftovers: tuple[str, ...] = ()
    exclusive = True
    if posted is not None:
        decided = _decide([msgspec.msgpack.decode(raw, type=_Entry) for raw in posted])
        if attempt.root is not None and attempt.failed_step >= 0 and not decided.skip:
            # Only now: every rank is here, so none still writes for the attempt that failed.
            sweep_failed(attempt.root, attempt.failed_step, attempt.lineage.incarnation)
        there = [name for name, _ in storage.list("") if name != MANIFEST_NAME or not attempt.replace]
        aside = set() if attempt.root is None else set_aside(read_notes(attempt.root), attempt.step, there)
        leftovers = tuple(name for name in there if name not in aside)
        if MANIFEST_NAME in leftovers:
            raise StepExistsError(f"{storage.url} is already committed; it was left as it is, nothing was written")
        exclusive = storage.exclusive
        answer = msgspec.msgpack.encode(decided)
    reply = msgspec.msgpack.decode(phase.broadcast(answer), type=_Answer)
    known, told = attempt.known, _Told(snapshot.structure, snapshot.tree, snapshot.aliases)
    if reply.speakers and not reply.skip:
        told = _speak(ranks, told, reply, mine, attempt.deadline_s)
        known = KnownPlan(reply.fingerprint, told.structure)
    elif known is None or known.fingerprint != reply.fingerprint:
        known = KnownPlan(reply.fingerprint, assign_writers(snapshot.structure, ranks.world))
    live = snapshot.structure.tensors
    index = None
    if len(live) != len(known.stored.tensors) or any(
        a.key != b.key for a, b in zip(live, known.stored.tensors, strict=True)
    ):
        index = {spec.key: position for position, spec in enumerate(live)}
    return Agreement(
        reply.save_id,
        attempt.step,
        known,
        told.tree,
        told.aliases,
        index,
        leftovers,
        reply.skip,
        reply.agents,
        exclusive,
    )


def _decide(entries: list[_Entry]) -> _Answer:
    """The answer to all ranks, and who has to speak: the first rank of each kind, when there is more than one kind.

    Path and step must be the same everywhere: a rank that computed its own would be missed only at the next restore.
    """
    first = entries[0]
    others = [
        f"rank {rank}: step {entry.step} in {entry.url}"
        for rank, entry in enumerate(entries)
        if (entry.url, entry.step) != (first.url, first.step)
    ]
    if others:
        lines = [f"rank 0: step {first.step} in {first.url}", *others]
        raise MismatchError("ranks save different steps or to different places; nothing was written:", lines)
    if any(entry.shared for entry in entries):
        _check_shared(entries)
    speakers: dict[tuple[str, str], int] = {}
    for rank, entry in enumerate(entries):
        speakers.setdefault((entry.fingerprint, entry.values), rank)
    chosen = tuple(speakers.values()) if len(speakers) > 1 else ()
    same = len({entry.fingerprint for entry in entries}) == 1
    world = first.fingerprint if same else f"{digest(''.join(e.fingerprint for e in entries).encode()):016x}"
    worst = max((entry.ready for entry in entries), key=lambda ready: ready.failed)
    if worst.failed > worst.tolerated >= 0:
        raise RankFailedError(f"{worst.failed} saves in a row have failed; the last one: {worst.failure}", {})
    busy = any(entry.ready.busy for entry in entries)
    agents = tuple(entry.ready.agent for entry in entries) if first.ready.agent else ()
    return _Answer(secrets.token_hex(4), world, chosen, busy, agents)


def _shared_digest(one: SharedValue) -> int:
    """Of everything in a value: what one rank stores for others must be what they have."""
    return digest(encode([one.value, list(map(content, one.tensors))], refused=[]))


def _check_shared(entries: list[_Entry]) -> None:
    """Ranks at the same place of a mesh share one value, and only the first of them stores it."""
    first: dict[tuple[str, int], tuple[int, int]] = {}
    differing = []
    for rank, entry in enumerate(entries):
        for key, place, value in entry.shared:
            other, known = first.setdefault((key, place), (rank, value))
            if value != known:
                differing.append(
                    f"{key}: rank {rank} has another value than rank {other}, at the same place of its mesh"
                )
    if differing:
        raise MismatchError(
            "nothing was written: ranks that share a value differ. Name in dims= every dimension along which it differs:",
            differing,
        )


def _speak(ranks: Ranks, mine: _Told, reply: _Answer, own_fingerprint: str, deadline_s: float) -> _Told:
    """Ranks that differ send what they have; the coordinator puts it together and tells everybody."""
    with ranks.phase("compare structures", deadline_s) as phase:
        kind = f"{own_fingerprint}{digest(mine.tree):016x}".encode()
        posted = phase.gather(kind + (msgspec.msgpack.encode(mine) if ranks.rank in reply.speakers else b""))
        merged = b""
        if posted is not None:
            members: dict[bytes, list[int]] = {}
            for rank, raw in enumerate(posted):
                members.setdefault(raw[:32], []).append(rank)
            groups = []
            for rank in reply.speakers:
                item = msgspec.msgpack.decode(posted[rank][32:], type=_Told)
                groups.append((tuple(members[posted[rank][:32]]), item))
            live = merge_structures([(members, item.structure) for members, item in groups], ranks.world)
            tree = merge_trees([(members, decode(item.tree)) for members, item in groups])
            aliases = {key: first for _, item in groups for key, first in item.aliases.items()}
            torn = sorted(aliases.keys() & {spec.key for spec in live.tensors})
            if torn:
                lines = [f"{key}: tied to {aliases[key]} on some ranks, a tensor of its own on others" for key in torn]
                raise MismatchError("ranks disagree about the state; nothing was written:", lines)
            merged = msgspec.msgpack.encode(_Told(assign_writers(live, ranks.world), encode(tree), aliases))
        return msgspec.msgpack.decode(phase.broadcast(merged), type=_Told)
