"""What ranks must agree on before a byte is written: the call, the step, the path, the structure, the shared values.

An unchanged job sends a fingerprint and gets one answer. Ranks with another structure or other values than the rest send
theirs once, and only one rank of each kind does.
"""

from __future__ import annotations

import errno
import secrets
from dataclasses import dataclass

import msgspec

from keepstep.errors import MismatchError, StepExistsError, StorageError
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.format.objects import decode, encode
from keepstep.format.shardfile import digest
from keepstep.format.structure import Structure, fingerprint
from keepstep.plan.save_plan import assign_writers, merge_structures, world_fingerprint
from keepstep.ranks import Phase, Ranks
from keepstep.state.capture import Snapshot
from keepstep.state.merge import merge_trees
from keepstep.storage.base import Storage

__all__ = ["Agreement", "agree"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plan all ranks follow. ``live_index`` is None when stored and live tensors have the same order."""

    save_id: str
    fingerprint: str
    stored: Structure
    tree: bytes
    live_index: dict[str, int] | None


class _Entry(msgspec.Struct):
    url: str
    step: int
    fingerprint: str
    values: str


class _Answer(msgspec.Struct):
    save_id: str
    fingerprint: str
    speakers: tuple[int, ...] = ()


class _Told(msgspec.Struct):
    structure: Structure
    tree: bytes


def agree(
    phase: Phase,
    ranks: Ranks,
    storage: Storage,
    snapshot: Snapshot,
    *,
    step: int,
    replace: bool,
    known: tuple[str, Structure] | None,
) -> Agreement:
    """The plan for this save. Collective: one gather and one answer, and another pair when ranks differ.

    Raises:
        MismatchError: ranks differ in path or step, or in values nobody declared per rank; lists all.
        StepExistsError: a step is committed there and may not be replaced.
    """
    mine = fingerprint(snapshot.structure)
    entry = _Entry(storage.url, step, mine, f"{digest(snapshot.tree):016x}")
    posted = phase.gather(msgspec.msgpack.encode(entry))
    answer = b""
    if posted is not None:
        entries = [msgspec.msgpack.decode(raw, type=_Entry) for raw in posted]
        _compare(entries)
        if not replace and _committed(storage):
            raise StepExistsError(f"{storage.url} is already committed; it was left as it is, nothing was written")
        answer = msgspec.msgpack.encode(_answer(entries))
    reply = msgspec.msgpack.decode(phase.broadcast(answer), type=_Answer)
    if known is not None and known[0] == reply.fingerprint and not reply.speakers:
        return Agreement(reply.save_id, reply.fingerprint, known[1], snapshot.tree, _index(known[1], snapshot))
    if not reply.speakers:
        stored = assign_writers(snapshot.structure, ranks.world)
        return Agreement(reply.save_id, reply.fingerprint, stored, snapshot.tree, None)
    stored, tree = _speak(ranks, snapshot, reply, mine)
    return Agreement(reply.save_id, reply.fingerprint, stored, tree, _index(stored, snapshot))


def _compare(entries: list[_Entry]) -> None:
    """Path and step must be the same everywhere: a rank that computed its own would be missed only at the next restore."""
    problems = []
    for rank, entry in enumerate(entries):
        if (entry.url, entry.step) != (entries[0].url, entries[0].step):
            problems.append(f"rank {rank}: step {entry.step} in {entry.url}")
    if problems:
        first = f"rank 0: step {entries[0].step} in {entries[0].url}"
        raise MismatchError(
            "ranks save different steps or to different places; nothing was written:", [first, *problems]
        )


def _committed(storage: Storage) -> bool:
    try:
        storage.open(MANIFEST_NAME).close()
    except StorageError as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    return True


def _answer(entries: list[_Entry]) -> _Answer:
    """Who has to speak: the first rank of each kind, when there is more than one kind."""
    speakers: dict[tuple[str, str], int] = {}
    for rank, entry in enumerate(entries):
        speakers.setdefault((entry.fingerprint, entry.values), rank)
    chosen = tuple(speakers.values()) if len(speakers) > 1 else ()
    return _Answer(secrets.token_hex(4), world_fingerprint([entry.fingerprint for entry in entries]), chosen)


def _speak(ranks: Ranks, snapshot: Snapshot, reply: _Answer, mine: str) -> tuple[Structure, bytes]:
    """Ranks that differ send what they have; the coordinator puts it together and tells everybody."""
    with ranks.phase("compare structures") as phase:
        kind = f"{mine}{digest(snapshot.tree):016x}".encode()
        told = msgspec.msgpack.encode(_Told(snapshot.structure, snapshot.tree)) if ranks.rank in reply.speakers else b""
        posted = phase.gather(kind + told)
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
            merged = msgspec.msgpack.encode(_Told(assign_writers(live, ranks.world), encode(tree)))
        both = msgspec.msgpack.decode(phase.broadcast(merged), type=_Told)
    return both.structure, both.tree


def _index(stored: Structure, snapshot: Snapshot) -> dict[str, int] | None:
    """Where each stored tensor is in this rank's own list; None when the order is the same."""
    live = snapshot.structure.tensors
    if len(live) == len(stored.tensors) and all(a.key == b.key for a, b in zip(live, stored.tensors, strict=True)):
        return None
    return {spec.key: index for index, spec in enumerate(live)}
