"""One load, from a committed step into live objects, on any number of ranks.

manifest    decided once by the coordinator, the same bytes for everybody
bind        saved trees against the target: one error that lists every difference, before anything is changed
read        only the bytes this rank needs, every block proved
agree       all ranks read everything, or nobody gives anything back
finish      plain values, optimizer groups, random number streams, progress
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import torch

from keepstep.checkpointer.bases import away_from, check_base, mark_base, note_base
from keepstep.checkpointer.choosing import GONE, casts_of, chosen, chosen_keys, left_out_keys, settle
from keepstep.checkpointer.differences import changed_since, mismatch_of, note_after, put_together
from keepstep.checkpointer.foreign import show_to_all
from keepstep.checkpointer.foreseen import both, foresee
from keepstep.checkpointer.options import Cast, Demanded, LoadReport, Options, Selection
from keepstep.checkpointer.pending import SAVES
from keepstep.checkpointer.rename import Rename
from keepstep.checkpointer.saving import no_collection
from keepstep.checkpointer.sharing import agree_to_share, with_values
from keepstep.commit.catalog import MAX_MANIFEST_BYTES, check_files, size_of
from keepstep.errors import CorruptError, MismatchError, StepNotFoundError, StorageError
from keepstep.foreign.kinds import FOREIGN, find_foreign
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.globs import Globs
from keepstep.format.layout import Mesh, Structure
from keepstep.format.manifest import (
    MANIFEST_NAME,
    MAX_ELEMENTS,
    OWN_NAME,
    STATE_FOLDER,
    TREE_NAME,
    Manifest,
    parse_manifest,
)
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, TorchValue, decode
from keepstep.move.reader import read_named, read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.ranks import DEADLINE_S, Ranks
from keepstep.state.files import FILES, Files
from keepstep.state.own import OwnValues
from keepstep.state.report import ComponentReport, Origin
from keepstep.state.restore import Binder
from keepstep.state.shard import LayoutTable
from keepstep.state.train_state import TrainState
from keepstep.state.values import materialise
from keepstep.storage.base import Storage, read_blob
from keepstep.storage.local import Place, storage_of
from keepstep.timeline import Timeline

__all__ = ["LoadReport", "Options", "found_manifest", "load", "load_step", "read_trees"]

_NO_DIFFERENCES = msgspec.msgpack.encode(([], []))


def load(
    path: Place,
    into: Mapping[str, Any],
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    allow_resized: Sequence[str] = (),
    cast: Cast = False,
    rename: Rename | None = None,
    override: Mapping[str, Any] | None = None,
    left_out: Place | None = None,
    dry_run: bool = False,
    share_reads: bool | None = None,
    deadline_s: float = DEADLINE_S,
) -> LoadReport:
    """Loads a committed step into the objects of a state, whatever layout it was saved in. Collective.

    Saves of this process that are in progress end first.

    Args:
        path: the folder of the step, or a Storage.
        into: the target: a TrainState or a dict. Modules, optimizers and containers keep their identity.
        only: the components or keys to load, as patterns (``"model"``, ``"optimizer/state/**"``); everything else of the
            checkpoint and of the target is left alone.
        strict: whether keys that one side lacks are an error. With False they are listed in the report.
        allow_missing: patterns of keys of the target that the checkpoint may lack. They stay as they are; state that an
            optimizer would have of such a parameter starts fresh.
        allow_extra: patterns of keys of the checkpoint that the target may lack.
        allow_resized: patterns of keys of tensors that may have another shape, such as an embedding for more words. What
            both have, from the beginning of each dimension, is loaded, of the moments too; the rest stays as it is.
        cast: True converts tensors to the target's dtype; a dtype, to that one alone; by pattern, some of them, and others
            not: ``{"optimizer": None, "**/*.weight": torch.bfloat16}``. The first pattern that fits decides. Memory that the
            target does not have yet, such as moments, is made in the dtype that is named.
        rename: maps saved keys to the target's, as ``{regular expression: replacement}`` or a function; None for a key that
            is not to be loaded.
        override: plain values to set instead of the saved ones, by pattern: ``{"optimizer/param_groups/*/lr": 1e-4}``.
        left_out: the step that has what a TrainState left out of this one (``leave_out=``). It is loaded first.
        dry_run: find out what would be loaded, from which files; change nothing. Raises what the load would, as far as it
            can be known.
        share_reads: whether ranks that need the same bytes read them once and pass them on to each other; the same on every
            rank. None for wherever the storage is an object store or another far place, and it is worth it.
        deadline_s: how long to wait for other ranks, in seconds.

    Raises:
        StepNotFoundError: no step is committed there.
        UsageError: options that mean nothing, such as a pattern that fits no key; nothing was changed.
        MismatchError: state and checkpoint differ; lists everything; nothing was changed.
        CorruptError, FormatError, StorageError: the step is damaged or cannot be read. Tensors of the target may hold
            part of it: load again before using them. Plain values were not changed.
        RankFailedError, CommitTimeoutError: another rank failed or did not come.
    """
    wait([pending.committed for pending in SAVES])
    ranks = Ranks.current()
    selection = Selection(only, rename, allow_missing, allow_extra, override, left_out, allow_resized=allow_resized)
    options = Options(strict, cast, share_reads, dry_run, None if selection == Selection() else selection)
    with ranks.phase("load", deadline_s) as phase:
        storage = storage_of(path)
        posted = phase.gather(storage.url.encode())
        raw = b""
        if posted is not None:
            others = [f"rank {rank}: {url.decode()}" for rank, url in enumerate(posted) if url != posted[0]]
            if others:
                raise MismatchError("ranks load from different places:", [f"rank 0: {posted[0].decode()}", *others])
            raw = found_manifest(storage)
        raw = phase.broadcast(raw)
    if raw[:1] == FOREIGN:
        storage, raw = show_to_all(ranks, storage, raw, deadline_s)
    manifest = parse_manifest(raw, f"{storage.url}/{MANIFEST_NAME}")
    return load_step(ranks, storage, manifest, into, options=options, deadline_s=deadline_s)


def found_manifest(storage: Storage) -> bytes:
    """The manifest of a step whose files are all there, as it is stored; what stands in its place is another program's.

    Raises:
        StepNotFoundError: nothing is committed there; says what is.
    """
    raw, late = b"", storage.late_s > 0
    while True:
        before = raw
        try:
            raw = read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        except StorageError as err:
            if err.errno != errno.ENOENT:
                # It may well be there: "cannot be read" is not "does not exist".
                raise
            if late and size_of(storage, MANIFEST_NAME) is not None:
                late = False
                continue
            if raw := find_foreign(storage):
                return raw
            there = sum(1 for _ in storage.list(""))
            found = f"{there} files of an attempt that was never committed are" if there else "nothing is"
            raise StepNotFoundError(f"{storage.url}: no committed step ({found} there): {err}") from err
        if raw[:1] == FOREIGN:
            return raw
        try:
            check_files(storage, parse_manifest(raw, f"{storage.url}/{MANIFEST_NAME}"))
        except CorruptError:
            # It may have been replaced while its files were looked for: then they are not missing.
            if raw == before:
                raise
        else:
            return raw


def load_step(
    ranks: Ranks, storage: Storage, manifest: Manifest, into: Mapping[str, Any], *, options: Options, deadline_s: float
) -> LoadReport:
    """Loads a step whose manifest all ranks have. Collective; see ``load`` for what it raises."""
    if options.selection is not None and options.selection.left_out is not None:
        return load_completed(ranks, storage, manifest, into, options=options, deadline_s=deadline_s)
    timeline = Timeline()
    share = False if options.selection and options.selection.allow_resized else options.share_reads
    together = ranks.world > 1 and storage.sealed and (storage.far if share is None else share)
    storage = with_values(ranks, storage, manifest, deadline_s) if together else storage
    with no_collection(), ranks.phase(f"bind step {manifest.step}", deadline_s) as phase, timeline.span("plan"):
        binder, values = bind_step(ranks, storage, manifest, into, options=options)
        posted = phase.gather(msgspec.msgpack.encode((binder.mismatches, list(binder.surplus))))
        none = not posted or all(raw == _NO_DIFFERENCES for raw in posted)
        differences = phase.broadcast(_NO_DIFFERENCES if none else put_together(posted or []))
        if binder.surplus or differences != _NO_DIFFERENCES:
            binder.reject(*msgspec.msgpack.decode(differences, type=tuple[list[str], list[str]]))
        if binder.mismatches:
            raise mismatch_of(manifest, storage.url, binder)
    binder.mark = None if binder.base is None else mark_base(ranks, storage, manifest, binder, deadline_s)
    if options.dry_run:
        return foresee(ranks, storage, manifest, binder, deadline_s)
    sharing = agree_to_share(ranks, manifest, binder, share, deadline_s) if together else None
    with no_collection(), sharing or nullcontext(), ranks.phase(f"load step {manifest.step}", deadline_s) as phase:
        with timeline.span("read"):
            if sharing is None:
                structure = Structure(manifest.meshes, manifest.layouts, manifest.tensors)
                pieces = find_pieces(structure, binder.wants, ranks.rank)
                read = read_pieces(storage, manifest, pieces, wants=binder.wants, targets=binder.targets)
            else:
                read = sharing.fill(phase, storage, manifest, binder)
            for owner, targets in binder.own_targets.items():
                read += read_named(storage, manifest, STATE_FOLDER, rank=owner, targets=dict(targets))
            if binder.slots:
                values.call_rules()
        with timeline.span("agree"):
            answers = phase.gather(b"")
            if sharing is not None:
                sharing.check(answers)
            phase.broadcast(b"" if answers is not None else None)
    # Only now, when every byte was proved on every rank, are plain values given back.
    with ranks.phase(f"give back step {manifest.step}", deadline_s) as phase, timeline.span("finish"):
        binder.finish()
        if binder.mark is not None or FILES in into:
            note_after(into, binder)
        phase.broadcast(b"" if phase.gather(b"") is not None else None)
    own = [target for targets in binder.own_targets.values() for target in targets.values()]
    return LoadReport(
        step=manifest.step,
        url=storage.url,
        saved_world=manifest.world_size,
        world=ranks.world,
        bytes_read=read,
        bytes_received=0 if sharing is None else sharing.received,
        bytes_needed=sum(target.nbytes for target in (*binder.targets, *own)),
        components=binder.reports,
        notes=tuple(binder.notes),
        changed=changed_since(ranks, manifest, into) if isinstance(into, TrainState) else (),
        seconds=timeline.seconds,
        base=binder.mark or "",
    )


def load_completed(
    ranks: Ranks, storage: Storage, manifest: Manifest, into: Mapping[str, Any], *, options: Options, deadline_s: float
) -> LoadReport:
    """Loads a step, and before it what was left out of it, from the step that is named for that. Collective.

    Nothing is changed before both are known to fit.
    """
    wanted = options.selection or Selection()
    away = away_from(manifest)
    options = replace(options, selection=replace(wanted, left_out=None, completed=away))
    if not away or wanted.left_out is None:
        report = load_step(ranks, storage, manifest, into, options=options, deadline_s=deadline_s)
        return replace(report, notes=(*report.notes, "nothing was left out of this step"))
    look = replace(options, dry_run=True)
    report = load_step(ranks, storage, manifest, into, options=look, deadline_s=deadline_s)
    keys = left_out_keys(into, Globs(away, "leave_out"))
    asked = Demanded(chosen_keys(wanted.only, keys, into))
    known = any(part.left_out_from for part in manifest.components.values())
    how: dict[str, Any] = {"cast": options.cast, "rename": wanted.rename, "share_reads": options.share_reads}
    how |= {"allow_resized": wanted.allow_resized, "deadline_s": deadline_s}
    told = load(wanted.left_out, into, only=Demanded(keys) if known else asked, dry_run=True, **how)
    check_base(manifest, storage.url, told)
    if known and wanted.only is not None:
        told = replace(load(wanted.left_out, into, only=asked, dry_run=True, **how), base=told.base)
    if options.dry_run:
        return both(report, told)
    before = getattr(into, "left_out_from", "")
    source = load(wanted.left_out, into, only=asked, **how)
    report = load_step(ranks, storage, manifest, into, options=options, deadline_s=deadline_s)
    note_base(into, before, told.base, keys=keys, taken=asked)
    return both(report, source)


def bind_step(
    ranks: Ranks, storage: Storage, manifest: Manifest, into: Mapping[str, Any], *, options: Options
) -> tuple[Binder, OwnValues]:
    """Binds every component that is asked for, and notes all that one side lacks; changes nothing yet."""
    tree, own = read_trees(storage, manifest, ranks.rank)
    origin = Origin(manifest.world_size, manifest.aliases, own, manifest.step)
    table = LayoutTable(ranks.rank, ranks.world, [Mesh((ranks.world,))])
    binder = Binder(table, into, origin, options.strict, options.cast is True)
    if options.selection is not None:
        tree, binder = chosen(options.selection, tree, binder, manifest.dropped)
    binder.saved = tree
    if type(options.cast) is not bool:
        binder.cast = casts_of(options.cast, tree, options.selection, binder)
    for name, node in tree.items():
        if name in binder.left_out:
            binder.reports[name] = ComponentReport(skipped=True)
        elif name in into:
            binder.bind_component(name, node)
        elif name == FILES and type(node) is ObjectNode and node.type_name == Files.__name__:
            # Nothing of a run depends on getting them back: they may come and go.
            binder.reports[name] = ComponentReport(skipped=True, noted=["in the step, none attached now"])
        else:
            binder.reports[name] = ComponentReport(unexpected=[name])
            binder.surplus[name] = "in the checkpoint, not in the target (only=[...] leaves it out)"
    for name in into:
        if name not in tree and isinstance(into[name], Files):
            binder.reports[name] = ComponentReport(noted=["attached now, none in the step"])
        elif name not in tree and name not in binder.left_out:
            gone = f"{GONE}. Leave it out (only=[...]), or as it is (strict=False)" if name in manifest.dropped else ""
            lack = f"in the target, not in the checkpoint, which has {', '.join(tree)}"
            binder.lack_component(name, gone or lack)
    for name in manifest.dropped:
        binder.reports.setdefault(name, ComponentReport(skipped=True)).noted.append(GONE)
    values = OwnValues(binder)
    if binder.slots:
        values.bind(read_own(storage, manifest, values.choose(), {own_rank(manifest, ranks.rank): own}))
    away = [pattern for part in manifest.components.values() for pattern in part.left_out]
    if options.selection is not None or away or getattr(into, "leave_out", None) is not None:
        settle(options.selection or Selection(), tree, binder, away)
    return binder, values


def read_trees(storage: Storage, manifest: Manifest, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shared tree of plain values, and the values that rank (or rank 0, for a rank that is new) had of its own."""
    shared: dict[str, torch.Tensor | None] = {TREE_NAME: None, OWN_NAME: None}
    read_named(storage, manifest, STATE_FOLDER, rank=0, targets=shared)
    own = shared
    if 0 < rank < manifest.world_size and shared[OWN_NAME] is not None:
        own = {OWN_NAME: None}
        # A rank whose values another rank of its place stores may have stored nothing at all.
        if any(record.rank == rank for record in manifest.files.get(STATE_FOLDER, ())):
            read_named(storage, manifest, STATE_FOLDER, rank=rank, targets=own)
    saved, values_of_rank = shared[TREE_NAME], own[OWN_NAME]
    tree = decode(b"null" if saved is None else saved.numpy().tobytes())
    values = {} if values_of_rank is None else decode(values_of_rank.numpy().tobytes())
    if not isinstance(tree, dict) or not isinstance(values, dict):
        raise CorruptError(f"{storage.url}: the plain values are not a mapping")
    for name in manifest.dropped:
        tree.pop(name, None)
    _prove_references([tree], manifest)
    _prove_references([values], manifest, own=True)
    return tree, values


def own_rank(manifest: Manifest, rank: int) -> int:
    """The rank of the step whose own values ``read_trees`` gives to a rank."""
    return rank if rank < manifest.world_size else 0


def read_own(
    storage: Storage, manifest: Manifest, owners: Sequence[int], known: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The values that each of these ranks has saved for itself, by rank and key; those that are ``known`` are not read."""
    found = dict(known)
    for owner in owners:
        if owner not in found:
            raw: dict[str, torch.Tensor | None] = {OWN_NAME: None}
            read_named(storage, manifest, STATE_FOLDER, rank=owner, targets=raw)
            data = raw[OWN_NAME]
            values = {} if data is None else decode(data.numpy().tobytes())
            if not isinstance(values, dict):
                raise CorruptError(f"{storage.url}: the own values of rank {owner} are not a mapping")
            _prove_references([values], manifest, own=True)
            found[owner] = values
    return found


def _prove_references(pending: list[Any], manifest: Manifest, *, own: bool = False) -> None:
    """Tensors that the values name are those of the manifest, or fit into a state file: memory is made by their shape."""
    specs = {spec.key: spec for spec in manifest.tensors}
    largest = max((record.data_bytes for record in manifest.files.get(STATE_FOLDER, ())), default=0)
    while pending:
        node = pending.pop()
        if type(node) is ObjectNode:
            pending.append(node.tree)
        elif isinstance(node, dict):
            pending.extend(node.values())
        elif isinstance(node, list | tuple | deque):
            pending.extend(node)
        elif type(node) is TorchValue:
            # Made once for the sake of its error: nothing may be given back before everything is known to be right.
            materialise(node, {})
        elif type(node) is RankRef:
            if own or any(not 0 <= owner < manifest.world_size for owner in node.owners):
                raise CorruptError(f"{node.key!r} belongs to a rank that is not there, or to another value of a rank")
        elif type(node) is TensorRef and own != node.own:
            raise CorruptError(f"{node.key!r} belongs to all ranks in one place, and to one rank in another")
        elif type(node) is TensorRef and node.own:
            extent = math.prod(max(size, 1) for size in node.shape)
            possible = node.dtype in ITEM_BYTES and all(size >= 0 for size in node.shape) and extent <= MAX_ELEMENTS
            if not possible or math.prod(node.shape) * ITEM_BYTES[node.dtype] > largest:
                raise CorruptError(f"{node.key!r}, {node.dtype} {list(node.shape)}, does not fit into its file")
        elif type(node) is TensorRef:
            spec = specs.get(manifest.aliases.get(node.key, node.key))
            if spec is None or (spec.dtype, manifest.layouts[spec.layout].shape) != (node.dtype, node.shape):
                raise CorruptError(
                    f"the values name {node.key!r}, {node.dtype} {list(node.shape)}: no such tensor is stored"
                )
