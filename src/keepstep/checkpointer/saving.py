"""One save, from the live state to a committed step. Every line names a room; the order is the protocol.

capture     -> Snapshot                     local
agree       -> the plan, the save id        one gather and one answer; one more when structures differ
fill, write -> Receipt                      local; durable files that no reader looks at yet
commit      -> Manifest                     one gather and one answer; the coordinator publishes
"""

from __future__ import annotations

import datetime as dt
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

import keepstep
from keepstep.checkpointer.agree import Agreement, agree
from keepstep.checkpointer.place import Place, storage_of
from keepstep.checkpointer.replicas import replica_details, replica_digests, replicas_differ
from keepstep.commit.publish import collect_receipts, newest_incarnation, publish
from keepstep.commit.retention import sweep_step
from keepstep.errors import RankFailedError, UsageError
from keepstep.format.manifest import FORMAT_MAJOR, FORMAT_MINOR, Component, Lineage, Manifest, Receipt, Versions
from keepstep.format.structure import Structure
from keepstep.move.arena import Arena
from keepstep.move.staging import fill
from keepstep.move.writer import Origin, ShardWriter
from keepstep.plan.save_plan import Extra, rank_files
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.capture import Snapshot, capture
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Storage
from keepstep.timeline import Timeline

__all__ = ["OWN_NAME", "TREE_NAME", "Attempt", "Saved", "save", "save_step"]

TREE_NAME = "~tree"
OWN_NAME = "~own"


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed step. ``seconds`` splits the time of this rank: capture, plan, copy, write, commit."""

    url: str
    step: int
    save_id: str
    total_bytes: int
    bytes_written: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a save is about, apart from the state. ``root`` is set when the step lies in a run's folder."""

    step: int
    lineage: Lineage
    metrics: Mapping[str, float] = field(default_factory=dict)
    replace: bool = False
    root: Storage | None = None


def save(
    path: Place,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    overwrite: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Saved:
    """Saves the state under a path. Collective, on the training thread; the step is durable and committed on return.

    Args:
        path: the folder of this one step, the same on every rank; a Storage works too.
        state: a TrainState, or a dict of modules, optimizers, schedulers, tensors, DTensors and plain values.
        step: the number to record; by default the TrainState's progress, else 0.
        overwrite: whether a step that is committed there may be replaced. Readers see the old or the new one, whole.
        deadline_s: how long to wait for other ranks, in seconds.

    Raises:
        UnsafeValueError: values or tensors that cannot be stored; nothing was written.
        MismatchError: ranks differ in path, step or undeclared values; nothing was committed.
        StepExistsError: a step is committed there and ``overwrite`` is False.
        StorageError, RankFailedError, CommitTimeoutError: nothing was committed.
    """
    ranks = Ranks.current()
    number = step if step is not None else state.progress.step if isinstance(state, TrainState) else 0
    lineage = Lineage(run=secrets.token_hex(8))
    attempt = Attempt(number, lineage, replace=overwrite)
    with Arena() as arena:
        return save_step(ranks, path, state, attempt, arena=arena, known=None, deadline_s=deadline_s)[0]


def save_step(
    ranks: Ranks,
    path: Place,
    state: Mapping[str, Any],
    attempt: Attempt,
    *,
    arena: Arena,
    known: tuple[str, Structure] | None,
    deadline_s: float,
) -> tuple[Saved, tuple[str, Structure]]:
    """One save on all ranks. Also returns the structure and its fingerprint: pass them as ``known`` to the next save."""
    timeline = Timeline()
    call = f"save step {attempt.step}"
    with ranks.phase(call, deadline_s) as phase:
        storage = storage_of(path)
        with timeline.span("capture"):
            if attempt.step < 0:
                raise UsageError(f"step {attempt.step} is negative")
            snapshot = capture(state, rank=ranks.rank, world=ranks.world)
        with timeline.span("plan"):
            agreed = agree(phase, ranks, storage, snapshot, step=attempt.step, replace=attempt.replace, known=known)
    with ranks.phase(f"write step {attempt.step}", deadline_s) as phase:
        receipt = _write(storage, snapshot, agreed, attempt.step, ranks=ranks, arena=arena, timeline=timeline)
        with timeline.span("commit"):
            posted = phase.gather(msgspec.json.encode(receipt))
            answer = b""
            if posted is not None:
                receipts = [msgspec.json.decode(raw, type=Receipt) for raw in posted]
                answer = replicas_differ(receipts) or _commit(storage, snapshot, agreed, attempt, receipts)
            answer = phase.broadcast(answer)
    if not answer.startswith(b"{"):
        with ranks.phase(f"compare step {attempt.step}", deadline_s) as phase:
            replica_details(phase, snapshot, answer.decode())
    saved = msgspec.json.decode(answer, type=Saved)
    written = sum(record.size_bytes for record in receipt.files.values())
    saved = Saved(saved.url, saved.step, saved.save_id, saved.total_bytes, written, timeline.seconds)
    return saved, (agreed.fingerprint, agreed.stored)


def _write(
    storage: Storage,
    snapshot: Snapshot,
    agreed: Agreement,
    step: int,
    *,
    ranks: Ranks,
    arena: Arena,
    timeline: Timeline,
) -> Receipt:
    """This rank's files, durable, and the receipt for them."""
    extras: dict[str, bytes | torch.Tensor] = {key: tensor for key, _, tensor in snapshot.own}
    described = [Extra(key, dtype, tuple(tensor.shape)) for key, dtype, tensor in snapshot.own]
    for name, data in ((TREE_NAME, agreed.tree if ranks.leads else b""), (OWN_NAME, snapshot.own_tree)):
        if data:
            extras[name] = data
            described.append(Extra(name, "uint8", (len(data),)))
    with timeline.span("plan"):
        plans = rank_files(agreed.stored, ranks.rank, live_index=agreed.live_index, extras=tuple(described))
    origin = Origin(agreed.save_id, step, ranks.rank)
    with ShardWriter(storage, plans, origin=origin, arena=arena, timeline=timeline) as writer:
        with timeline.span("copy"):
            for chunk in fill(plans, snapshot.locals, extras, arena):
                writer.submit(chunk)
        digests = replica_digests(snapshot, ranks.rank) if ranks.world > 1 else {}
        with timeline.span("write"):
            receipt = writer.finish()
    return msgspec.structs.replace(receipt, replica_digests=digests)


def _commit(
    storage: Storage, snapshot: Snapshot, agreed: Agreement, attempt: Attempt, receipts: list[Receipt]
) -> bytes:
    """The coordinator's part: from receipts to a step that exists."""
    manifest = Manifest(
        format=(FORMAT_MAJOR, FORMAT_MINOR),
        step=attempt.step,
        save_id=agreed.save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        lineage=attempt.lineage,
        metrics=dict(attempt.metrics),
        world_size=len(receipts),
        versions=Versions(
            keepstep.__version__,
            str(torch.__version__),
            platform.python_version(),
            torch.backends.cpu.get_cpu_capability(),
        ),
        fingerprint=agreed.fingerprint,
        components=_components(snapshot.components, agreed.stored),
        aliases=snapshot.aliases,
        meshes=agreed.stored.meshes,
        layouts=agreed.stored.layouts,
        tensors=agreed.stored.tensors,
        files={},
    )
    manifest = collect_receipts(receipts, manifest)
    if attempt.root is not None and newest_incarnation(attempt.root) > attempt.lineage.incarnation:
        # A later start of the job has taken over; what this one still has in hand must not appear beside its steps.
        raise RankFailedError("not committed", {0: "a later incarnation of this run has started"})
    publish(storage, manifest, replace=attempt.replace)
    # Only now may anything else in the folder go: an earlier attempt's files, or those of the step just replaced.
    sweep_step(storage, manifest.save_id)
    total = manifest.total_bytes
    return msgspec.json.encode(Saved(storage.url, manifest.step, manifest.save_id, total, 0))


def _components(seen: dict[str, Component], stored: Structure) -> dict[str, Component]:
    """Adds components that only other ranks have."""
    folders = {spec.key.split("/", 1)[0]: spec.folder for spec in stored.tensors}
    others = {name: Component("unknown", "", 0, 0, folder) for name, folder in folders.items() if name not in seen}
    return {**seen, **others}
