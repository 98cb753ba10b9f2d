"""One save, from the live state to a committed step. Every line names a room; the order is the protocol.

capture     -> Snapshot                     local
agree       -> the plan, the save id        one gather and one answer; one more when structures differ
fill, write -> Receipt                      local; durable files that no reader looks at yet
commit      -> Manifest                     one gather and one answer; the coordinator publishes
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import gc
import platform
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from keepstep.checkpointer.agree import Agreement, Attempt, KnownPlan, agree
from keepstep.checkpointer.replicas import replica_details, replica_digests, replicas_differ
from keepstep.commit.conclude import Order, tidy
from keepstep.commit.publish import commit_step, point_latest
from keepstep.commit.retention import warn_untidy
from keepstep.errors import CheckpointError, UsageError
from keepstep.format.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    OWN_NAME,
    STATE_FOLDER,
    TREE_NAME,
    VERSION,
    Component,
    Lineage,
    Manifest,
    Receipt,
    Versions,
    pack_manifest,
)
from keepstep.format.shardfile import pack_header
from keepstep.move.arena import ONCE_BYTES, Arena
from keepstep.move.staging import fill
from keepstep.move.writer import FileHead, Origin, ShardWriter
from keepstep.plan.save_plan import Extra, FilePlan, rank_files
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.capture import Snapshot, capture
from keepstep.state.provenance import NO_CONFIG, code_revision
from keepstep.state.train_state import TrainState
from keepstep.storage.local import Place, storage_of
from keepstep.timeline import Timeline

__all__ = ["Saved", "file_heads", "no_collection", "order_of", "planned_files", "save", "save_step"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed step. ``seconds`` splits the time of this rank: capture, plan, copy, write, commit."""

    url: str
    step: int
    save_id: str
    total_bytes: int
    bytes_written: int
    seconds: Mapping[str, float] = field(default_factory=dict)


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
    attempt = Attempt(number, Lineage(run=secrets.token_hex(8)), replace=overwrite, deadline_s=deadline_s)
    with contextlib.closing(Arena(ONCE_BYTES, warm=False)) as arena:
        return save_step(ranks, path, state, attempt, arena)[0]


def save_step(
    ranks: Ranks, path: Place, state: Mapping[str, Any], attempt: Attempt, arena: Arena
) -> tuple[Saved, KnownPlan]:
    """One save on all ranks; see ``save`` for what it raises. Also returns the plan, to be ``known`` at the next save."""
    timeline = Timeline()
    with no_collection(), ranks.phase(f"save step {attempt.step}", attempt.deadline_s) as phase:
        storage = storage_of(path)
        with timeline.span("capture"):
            if attempt.refused or attempt.step < 0:
                raise UsageError(attempt.refused or f"step {attempt.step} is negative")
            snapshot = capture(state, rank=ranks.rank, world=ranks.world)
        with timeline.span("plan"):
            agreed = agree(phase, ranks, storage, snapshot, attempt)
            order = order_of(snapshot, agreed, attempt, ranks.world) if ranks.rank == 0 else None
    with no_collection(), ranks.phase(f"write step {attempt.step}", attempt.deadline_s) as phase:
        with timeline.span("plan"):
            files, extras = planned_files(snapshot, agreed, ranks.rank)
            origin = Origin(agreed.save_id, agreed.step, ranks.rank)
            heads = file_heads(files, origin, order)
        with contextlib.closing(ShardWriter(storage, heads, origin=origin, arena=arena)) as writer:
            with timeline.span("copy"):
                for chunk in fill(files, snapshot.locals, extras, arena, timeline) if writer.seals_first else ():
                    writer.seal(chunk)
                for chunk in fill(files, snapshot.locals, extras, arena, timeline):
                    writer.submit(chunk)
            with timeline.span("compare"):
                digests = replica_digests(snapshot, agreed.plan.stored, ranks.rank) if ranks.world > 1 else {}
            with timeline.span("write"):
                receipt = msgspec.structs.replace(writer.finish(), replica_digests=digests)
        with timeline.span("commit"):
            posted = phase.gather(msgspec.json.encode(receipt))
            answer = b""
            if posted is not None and order is not None:
                receipts = [msgspec.json.decode(raw, type=Receipt) for raw in posted]
                answer = replicas_differ(receipts) if ranks.world > 1 else b""
                if not answer:
                    manifest, manifest_digest = commit_step(
                        storage,
                        order.manifest,
                        receipts,
                        replace=order.replace,
                        run=attempt.root,
                        leftovers=order.leftovers,
                    )
                    total = sum(record.size_bytes for one in receipts for record in one.files.values())
                    answer = msgspec.json.encode(Saved(storage.url, attempt.step, agreed.save_id, total, 0))
            answer = phase.broadcast(answer)
    if not answer.startswith(b"{"):
        with ranks.phase(f"compare step {attempt.step}", attempt.deadline_s) as phase:
            replica_details(phase, snapshot, agreed.plan.stored, answer.decode())
    if attempt.root is not None and order is not None:
        try:
            point_latest(attempt.root, manifest, manifest_digest)
            tidy(attempt.root, order, manifest)
        except CheckpointError as err:
            # Whatever it is, the step exists.
            warn_untidy(err)
    saved = msgspec.json.decode(answer, type=Saved)
    written = sum(record.size_bytes for record in receipt.files.values())
    plan = msgspec.structs.replace(agreed.plan, files=files)
    return dataclasses.replace(saved, bytes_written=written, seconds=timeline.seconds), plan


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector: small records by the ten thousand would set it off again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def file_heads(files: tuple[FilePlan, ...], origin: Origin, order: Order | None) -> tuple[FileHead, ...]:
    """How the files of one rank begin. With an order, the coordinator's, its state file keeps a copy of the manifest."""
    copy = b"" if order is None else pack_manifest(order.manifest)
    heads = []
    for plan in files:
        header = pack_header(
            tuple(slot.entry for slot in plan.slots),
            plan.data_bytes,
            save_id=origin.save_id,
            step=origin.step,
            rank=origin.rank,
            manifest=copy if plan.folder == STATE_FOLDER else b"",
        )
        heads.append(FileHead(plan.folder, header, plan.data_bytes))
    return tuple(heads)


def planned_files(
    snapshot: Snapshot, agreed: Agreement, rank: int
) -> tuple[tuple[FilePlan, ...], dict[str, bytes | torch.Tensor]]:
    """The files of this rank, and the bytes and tensors that go into them besides those of the structure."""
    extras: dict[str, bytes | torch.Tensor] = {key: tensor for key, _, tensor in snapshot.own}
    described = [Extra(key, dtype, tuple(tensor.shape)) for key, dtype, tensor in snapshot.own]
    for name, data in ((TREE_NAME, agreed.tree if rank == 0 else b""), (OWN_NAME, snapshot.own_tree)):
        if data:
            extras[name] = data
            described.append(Extra(name, "uint8", (len(data),)))
    stored, index, known = agreed.plan.stored, agreed.live_index, agreed.plan.files
    extra, own = tuple(described), snapshot.structure
    return rank_files(stored, rank, live_index=index, extras=extra, known=known, own=own), extras


def order_of(snapshot: Snapshot, agreed: Agreement, attempt: Attempt, world: int) -> Order:
    """What the coordinator needs to commit this attempt, besides receipts."""
    stored = agreed.plan.stored
    named = {spec.key.partition("/")[0]: spec.folder for spec in stored.tensors}
    elsewhere = {name: Component("", "", 0, 0, folder) for name, folder in named.items()}
    manifest = Manifest(
        format=(FORMAT_MAJOR, FORMAT_MINOR),
        step=attempt.step,
        save_id=agreed.save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        lineage=msgspec.structs.replace(attempt.lineage, exclusive=agreed.exclusive),
        metrics=dict(attempt.metrics),
        world_size=world,
        versions=Versions(
            VERSION,
            str(torch.__version__),
            platform.python_version(),
            torch.backends.cpu.get_cpu_capability(),
            code_revision() if snapshot.config else "",
        ),
        config=msgspec.Raw(snapshot.config or NO_CONFIG),
        fingerprint=agreed.plan.fingerprint,
        components={**elsewhere, **snapshot.components},
        aliases=dict(agreed.aliases),
        meshes=stored.meshes,
        layouts=stored.layouts,
        tensors=stored.tensors,
        files={},
    )
    in_run = attempt.root is not None
    return Order(manifest, attempt.replace, agreed.leftovers, in_run, attempt.keep, attempt.protect, attempt.upload)
