"""Proof that ranks which should hold the same bytes do: a tensor nobody declared as a rank's own must not lose data."""

from __future__ import annotations

import ctypes

import msgspec
import torch

from keepstep.errors import MismatchError
from keepstep.format.layout import Layout, Mesh, Structure
from keepstep.format.manifest import Receipt
from keepstep.format.shardfile import digest
from keepstep.ranks import Phase
from keepstep.state.capture import Snapshot

__all__ = ["content", "each_replica", "replica_details", "replica_digests", "replicas_differ"]


def replica_digests(snapshot: Snapshot, stored: Structure, rank: int) -> dict[str, str]:
    """One digest for each group of ranks that should hold the same bytes; reads every replicated tensor once.

    Ranks may have their tensors in different orders, so each group's are taken by key.
    """
    groups: dict[str, list[tuple[str, int]]] = {}
    for key, group, value in each_replica(snapshot, stored, rank):
        groups.setdefault(group, []).append((key, value))
    return {group: f"{digest(repr(sorted(values)).encode()):016x}" for group, values in groups.items()}


def replicas_differ(receipts: list[Receipt]) -> bytes:
    """The groups whose ranks do not agree, as text; empty when all do."""
    seen: dict[str, str] = {}
    differing = set()
    for receipt in receipts:
        for group, value in receipt.replica_digests.items():
            if seen.setdefault(group, value) != value:
                differing.add(group)
    return "\n".join(sorted(differing)).encode()


def replica_details(phase: Phase, snapshot: Snapshot, stored: Structure, groups: str) -> None:
    """Finds the keys that differ. Collective; always raises.

    Raises:
        MismatchError: the keys, with the ranks that disagree with the first one.
    """
    wanted = set(groups.split("\n"))
    rank = phase.rank
    mine = [(key, group, value) for key, group, value in each_replica(snapshot, stored, rank) if group in wanted]
    posted = phase.gather(msgspec.msgpack.encode(mine))
    if posted is not None:
        values: dict[tuple[str, str], dict[int, int]] = {}
        members: dict[str, set[int]] = {}
        for owner, raw in enumerate(posted):
            for key, group, value in msgspec.msgpack.decode(raw, type=list[tuple[str, str, int]]):
                values.setdefault((key, group), {})[owner] = value
                members.setdefault(group, set()).add(owner)
        problems = []
        for (key, group), by_rank in values.items():
            first = min(by_rank)
            if lacking := members[group] - by_rank.keys():
                problems.append(f"{key}: rank {first} holds it as a replica, rank {min(lacking)} in another way")
            others = [str(owner) for owner, value in by_rank.items() if value != by_rank[first]]
            if others:
                problems.append(f"{key}: values differ across ranks: {', '.join(others)} from {first}")
        raise MismatchError(
            "nothing was committed: tensors that every rank should hold alike differ. Mark them with ks.per_rank if each"
            " rank has its own, or pass the DistributedDataParallel wrapper if its first rank's buffers are the truth:",
            problems,
        )
    phase.broadcast()


def each_replica(
    snapshot: Snapshot, stored: Structure, rank: int, *, late: bool | None = None
) -> list[tuple[str, str, int]]:
    """(key, group, digest) of every replicated tensor that must be the same within its group.

    ``late`` True looks at the late ones alone, False at the others, None at all.
    """
    structure = snapshot.structure
    holders = {spec.key: stored.meshes[stored.layouts[spec.layout].mesh] for spec in stored.tensors}
    names: dict[tuple[Mesh, int], str] = {}
    found = []
    for index, (spec, held) in enumerate(zip(structure.tensors, snapshot.locals, strict=True)):
        if late is not None and (index in snapshot.late) != late:
            continue
        layout = structure.layouts[spec.layout]
        if spec.rule != "same" or not any(cut.kind == "R" for cut in layout.cuts):
            continue
        mesh = structure.meshes[layout.mesh]
        if layout.mesh == 0 and all(cut.kind == "R" for cut in layout.cuts):
            # A plain tensor looks as if every rank had it; a stage of a pipeline shares it with fewer, or with nobody.
            mesh = holders[spec.key]
        if mesh.size == 1 or mesh.coordinate(rank) is None:
            continue
        group = names.get((mesh, spec.layout))
        if group is None:
            group = names[mesh, spec.layout] = _group(mesh, layout, rank)
        found.append((spec.key, group, content(held[0])))
    return found


def _group(mesh: Mesh, layout: Layout, rank: int) -> str:
    """A name for the ranks that hold the same part as this one: the mesh and this rank's place on its sharded axes."""
    where = mesh.coordinate(rank) or ()
    place = [
        "*" if any(c.axis == axis and c.kind == "R" for c in layout.cuts) else str(i) for axis, i in enumerate(where)
    ]
    return f"{digest(msgspec.json.encode(mesh)):016x}:{','.join(place)}"


def content(local: torch.Tensor) -> int:
    """A digest of the bytes of a local tensor; of one on a device, a sum that is made there."""
    if local.device.type != "cpu":
        # Summed where it lies: moving every replica to the host would cost more than the save.
        flat = local.reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4].view(torch.int32)
        return int(words.sum(dtype=torch.int64)) ^ int(flat[words.numel() * 4 :].sum(dtype=torch.int64))
    dense = local.contiguous()
    size = dense.numel() * dense.element_size()
    return digest(memoryview((ctypes.c_char * size).from_address(dense.data_ptr())).cast("B")) if size else 0
