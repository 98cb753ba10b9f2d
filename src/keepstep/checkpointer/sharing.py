"""Ranks that need the same bytes of a step read them once and pass them on: whether they do, who needs what, and how.

All of it is decided alike on all ranks. What they tell each other first is one digest a rank, and one description of where
things go for each kind of rank: its size is that of the layouts and the keys, not of tensors times ranks.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from keepstep.errors import RankFailedError, listed
from keepstep.format.manifest import STATE_FOLDER, Manifest, file_name
from keepstep.format.shardfile import digest
from keepstep.move.reader import open_shard
from keepstep.move.sharing import Told, read_shared
from keepstep.plan.share_plan import Needs, Placed
from keepstep.ranks import Exchange, Phase, Ranks
from keepstep.state.binding import TreeBinder
from keepstep.storage.base import Closing, Storage

__all__ = ["Sharing", "agree_to_share", "with_values"]

TOLD_BYTES = 1 << 22
"""A state file up to this size is told to all ranks through the store, where every rank asks for it."""
WAIT = 0.8
MOST_RANKS = 512
"""Every rank connects to every other one: for more ranks it has to be asked for."""
LEAST_GAIN = 1.1
_log = logging.getLogger("keepstep")


class _Kinds(msgspec.Struct, frozen=True):
    """The ranks of each kind, and a new name for their connections."""

    name: str
    members: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Sharing(Closing):
    """One load in which ranks pass on what they read. ``received`` counts the bytes that others have read for this one."""

    needs: Needs
    wire: Exchange
    received: int = 0

    def fill(self, phase: Phase, storage: Storage, manifest: Manifest, binder: TreeBinder) -> int:
        """Reads every tensor; returns the bytes read from the storage. Collective.

        Raises:
            CorruptError, StorageError: what this rank has read, or was given, is damaged, or it cannot be read.
            CheckpointError: what another rank says of its failure.
        """
        try:
            counts = read_shared(
                self.wire, storage, manifest, needs=self.needs, wants=binder.wants, targets=binder.targets
            )
        except RankFailedError as err:
            self.close()
            # Why is for that rank to say, so this is no report of an error: the first of those would end the phase.
            self.check(phase.gather(str(err).encode()))
            phase.broadcast()
            raise
        except BaseException:
            # Nobody waits for what this rank will not send.
            self.close()
            raise
        self.received = counts.received
        return counts.read

    def check(self, answers: Sequence[bytes] | None) -> None:
        """What ranks have noticed of a failure that no rank has reported, such as a connection that was lost.

        Raises:
            RankFailedError: there is any. None of it is damage to the step: an older one would not fare better.
        """
        failures = {rank: text.decode(errors="replace") for rank, text in enumerate(answers or ()) if text}
        if failures:
            codes = dict.fromkeys(failures, RankFailedError.code)
            raise RankFailedError("the load failed; tensors may hold part of the step", failures, codes)

    def close(self) -> None:
        """Ends the connections of this rank: after a failure, or when all ranks are done."""
        self.wire.close()


def with_values(ranks: Ranks, storage: Storage, manifest: Manifest, deadline_s: float) -> Storage:
    """The storage of a step whose shared values rank 0 has read for all. Collective.

    The ranks are given the file as it is, so each of them proves what it takes from it.
    """
    with ranks.phase(f"share the values of step {manifest.step}", deadline_s) as phase:
        posted, raw = phase.gather(b""), b""
        records = {record.rank: record for record in manifest.files.get(STATE_FOLDER, ())}
        if posted is not None and 0 in records and records[0].size_bytes <= TOLD_BYTES:
            with contextlib.closing(open_shard(storage, manifest, STATE_FOLDER, 0, records).blob) as blob:
                data = bytearray(blob.size_bytes)
                blob.read_into(0, memoryview(data))
                raw = bytes(data)
        raw = phase.broadcast(raw)
    return Told(storage, {file_name(STATE_FOLDER, 0, manifest.save_id): (len(raw), raw)}) if raw else storage


def agree_to_share(
    ranks: Ranks, manifest: Manifest, binder: TreeBinder, share_reads: bool | None, deadline_s: float
) -> Sharing | None:
    """What is needed to share the reads of a step; None when every rank reads for itself. Collective.

    Args:
        ranks: of the job.
        manifest: of the step.
        binder: which has bound everything.
        share_reads: None where it has to be worth it.
        deadline_s: how long to wait for other ranks.
    """
    name, kinds = _kinds(ranks, manifest, binder, deadline_s)
    needs = Needs(manifest.structure, kinds)
    if share_reads is None:
        needed, different = needs.totals()
        if ranks.world > MOST_RANKS or needed < LEAST_GAIN * different:
            return None
    with contextlib.ExitStack() as held, ranks.phase(f"connect for step {manifest.step}", deadline_s) as phase:
        trouble, wire = b"", None
        try:
            # Some of the time is left to say afterwards who has not been heard of.
            wire = ranks.exchange(name, deadline_s * WAIT)
            held.callback(wire.close)
        except RuntimeError as err:
            trouble = str(err).encode() or b"?"
        posted = phase.gather(trouble)
        told = [f"rank {rank}: {text.decode(errors='replace')}" for rank, text in enumerate(posted or ()) if text]
        trouble = phase.broadcast(listed(told).encode())
        if wire is not None and not trouble:
            held.pop_all()
            return Sharing(needs, wire)
    if ranks.leads:
        _log.warning("ranks cannot reach each other, so each reads for itself:%s", trouble.decode())
    return None


def _kinds(
    ranks: Ranks, manifest: Manifest, binder: TreeBinder, deadline_s: float
) -> tuple[str, list[tuple[tuple[int, ...], Placed]]]:
    """The kinds of ranks, each with its members; those of one kind put the same keys into the same layouts."""
    mine = Placed(tuple(binder.table.meshes), tuple(binder.table.layouts), tuple(binder.placed))
    raw = msgspec.msgpack.encode(mine)
    with ranks.phase(f"share the reads of step {manifest.step}", deadline_s) as phase:
        posted, answer = phase.gather(f"{digest(raw):016x}".encode()), b""
        if posted is not None:
            members: dict[bytes, list[int]] = {}
            for rank, mark in enumerate(posted):
                members.setdefault(mark, []).append(rank)
            answer = msgspec.msgpack.encode(_Kinds(secrets.token_hex(8), tuple(map(tuple, members.values()))))
        found = msgspec.msgpack.decode(phase.broadcast(answer), type=_Kinds)
    if len(found.members) == 1:
        return found.name, [(found.members[0], mine)]
    with ranks.phase(f"compare the reads of step {manifest.step}", deadline_s) as phase:
        speakers = [members[0] for members in found.members]
        posted, answer = phase.gather(raw if ranks.rank in speakers else b""), b""
        if posted is not None:
            answer = msgspec.msgpack.encode([msgspec.Raw(posted[rank]) for rank in speakers])
        placed = msgspec.msgpack.decode(phase.broadcast(answer), type=list[Placed])
    return found.name, list(zip(found.members, placed, strict=True))
