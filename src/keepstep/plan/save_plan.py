"""Who writes which bytes.

In: the structure of the state as each rank sees it. Out: the *stored* structure, in which every element belongs to exactly
one rank, and from it the files of one rank. Ranks that see the same structure compute the same plan by themselves, so an
ordinary job exchanges fingerprints and nothing else.

Replicas are written once. A large tensor is split evenly among the ranks that hold it; a smaller one goes whole to the rank
with the least to write so far; a tiny one goes to the state file of the first, which every rank reads anyway.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from keepstep.errors import MismatchError
from keepstep.format.box import Box, check_partition
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Cut, Layout, Mesh, Part, Structure, TensorSpec, parts, rank_elements
from keepstep.format.manifest import STATE_FOLDER
from keepstep.format.shardfile import Entry

__all__ = [
    "Extra",
    "FilePlan",
    "Slot",
    "assign_writers",
    "expected_bytes",
    "merge_structures",
    "rank_files",
]

SPLIT_BYTES = 1 << 18
"""A replicated part is split among its replicas when each gets at least this much."""
TINY_BYTES = 1 << 10


class Slot(msgspec.Struct, frozen=True, gc=False):
    """One entry of a file and where its bytes come from: tensor ``tensor`` of the live structure, at ``local`` (elements).

    ``piece`` is the index of the local tensor, for layouts that list boxes. ``tensor`` is -1 for bytes given directly.
    """

    entry: Entry
    tensor: int
    local: tuple[int, ...]
    piece: int = 0


class Extra(msgspec.Struct, frozen=True):
    """Bytes or a tensor that belong to this rank's state file alone: name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class FilePlan(msgspec.Struct, frozen=True):
    """One shard file of one rank: its entries in order and the bytes of its data section."""

    folder: str
    slots: tuple[Slot, ...]
    data_bytes: int


def merge_structures(seen: list[tuple[tuple[int, ...], Structure]], world: int) -> Structure:
    """One structure from those of several groups of ranks, each given with the ranks that see it.

    A plain tensor that only some groups have is held by just their ranks; shards that follow no mesh are put together;
    the same tensor on several meshes is several replicas, of which one is written.

    Raises:
        MismatchError: lists every key whose dtype or global shape differs between ranks.
    """
    if len(seen) == 1 and len(seen[0][0]) == world:
        return seen[0][1]
    meshes = [Mesh((world,))]
    layouts: dict[Layout, int] = {}
    holders: dict[str, list[tuple[tuple[int, ...], TensorSpec, Layout]]] = {}
    for ranks, structure in seen:
        moved = [_add_mesh(meshes, mesh) for mesh in structure.meshes]
        for spec in structure.tensors:
            layout = structure.layouts[spec.layout]
            held = msgspec.structs.replace(layout, mesh=moved[layout.mesh])
            holders.setdefault(spec.key, []).append((ranks, spec, held))
    problems: list[str] = []
    load = [0] * len(meshes)
    written = [0] * world
    specs = []
    for key, held_by in holders.items():
        spec = held_by[0][1]
        problem = _disagreement(key, held_by)
        if problem:
            problems.append(problem)
            continue
        layout = _joined(held_by, meshes, load, written)
        specs.append(msgspec.structs.replace(spec, layout=layouts.setdefault(layout, len(layouts))))
    if problems:
        raise MismatchError("ranks disagree about the state; nothing was written:", problems)
    return Structure(tuple(meshes), tuple(layouts), tuple(specs))


def assign_writers(live: Structure, world: int) -> Structure:
    """The stored structure: for every tensor, layouts without replicas, balanced in bytes over the ranks.

    Raises:
        CorruptError: shards that follow no mesh leave a hole or overlap.
    """
    meshes = list(live.meshes)
    table: dict[Layout, int] = {}
    load = np.zeros(world, dtype=np.int64)
    stored: list[TensorSpec | None] = [None] * len(live.tensors)
    whole_to_one: list[tuple[int, int]] = []
    resolved: dict[tuple[int, int, str], tuple[int, bool]] = {}
    per_layout: dict[int, npt.NDArray[np.int64]] = {}
    weights: dict[int, int] = {}
    for index, spec in enumerate(live.tensors):
        layout = live.layouts[spec.layout]
        item = ITEM_BYTES[spec.dtype]
        settled = resolved.get((spec.layout, item, spec.rule))
        if settled is None:
            chosen, tiny = _settle(spec, layout, meshes)
            if chosen is None:
                whole_to_one.append((math.prod(layout.shape) * item, index))
                continue
            settled = resolved[spec.layout, item, spec.rule] = table.setdefault(chosen, len(table)), tiny
            per_layout[settled[0]] = rank_elements(chosen, meshes, world)
        known, tiny = settled
        weights[known] = weights.get(known, 0) + item
        folder = STATE_FOLDER if tiny else spec.folder
        stored[index] = TensorSpec(spec.key, spec.dtype, known, folder, spec.rule)
    for layout_index, weight in weights.items():
        load += per_layout[layout_index] * weight
    for _, index in sorted(whole_to_one, key=lambda item: (-item[0], item[1])):
        spec = live.tensors[index]
        layout = live.layouts[spec.layout]
        owned = _least_loaded(layout, meshes, load)
        known = table.setdefault(owned, len(table))
        if known not in per_layout:
            per_layout[known] = rank_elements(owned, meshes, world)
        load += per_layout[known] * ITEM_BYTES[spec.dtype]
        stored[index] = msgspec.structs.replace(spec, layout=known)
    return Structure(tuple(meshes), tuple(table), tuple(spec for spec in stored if spec is not None))


def rank_files(
    stored: Structure,
    rank: int,
    *,
    live_index: dict[str, int] | None,
    extras: tuple[Extra, ...],
    known: tuple[FilePlan, ...] = (),
    own: Structure | None = None,
) -> tuple[FilePlan, ...]:
    """The files that ``rank`` writes, in the order of the state's folders, the state file last.

    Args:
        stored: the structure with writers assigned.
        rank: whose files.
        live_index: from key to index in the rank's own structure; None when the two have the same order.
        extras: what goes into this rank's state file besides tensors of the structure.
        known: the files of the save before, when the structure is the same: only the state file is planned anew.
        own: the structure as the rank itself sees it: of the boxes it lists, some may be written by others.
    """
    meshes = list(stored.meshes)
    held = [parts(layout, meshes, rank) for layout in stored.layouts]
    pending: dict[str, list[tuple[int, str, str, tuple[int, ...], int, int, Part]]] = {}
    for index, spec in enumerate(stored.tensors):
        if held[spec.layout] and (not known or spec.folder == STATE_FOLDER):
            live = index if live_index is None else live_index[spec.key]
            shape = stored.layouts[spec.layout].shape
            items = pending.setdefault(spec.folder, [])
            here = None if own is None else own.layouts[own.tensors[live].layout].boxes
            at = None if here is None else {box: piece for piece, (_, box) in enumerate(here)}
            for number, part in enumerate(held[spec.layout]):
                piece = number if at is None else at[part.box]
                items.append((-ITEM_BYTES[spec.dtype], spec.dtype, spec.key, shape, live, piece, part))
    for extra in extras:
        part = Part(Box((0,) * len(extra.shape), extra.shape), ())
        row = (-ITEM_BYTES[extra.dtype], extra.dtype, extra.name, extra.shape, -1, 0, part)
        pending.setdefault(STATE_FOLDER, []).append(row)
    files = [plan for plan in known if plan.folder != STATE_FOLDER]
    for folder in sorted(pending, key=lambda folder: folder == STATE_FOLDER):
        slots, start = [], 0
        # Largest element first, so that every tensor is aligned to its own element size without holes.
        for item, dtype, key, shape, live, piece, part in sorted(pending[folder], key=lambda row: row[:2]):
            stop = start - math.prod(part.box.sizes) * item
            name = key if part.box.sizes == shape else f"{key}~{part.box}"
            slots.append(Slot(Entry(name, key, dtype, shape, part.box, start, stop), live, part.local, piece))
            start = stop
        files.append(FilePlan(folder, tuple(slots), start))
    return tuple(files)


def expected_bytes(stored: Structure, world: int) -> dict[str, npt.NDArray[np.int64]]:
    """Bytes of tensor data that each rank must have written, by folder: what receipts are checked against."""
    elements = [rank_elements(layout, list(stored.meshes), world) for layout in stored.layouts]
    weights: dict[str, dict[int, int]] = {}
    for spec in stored.tensors:
        here = weights.setdefault(spec.folder, {})
        here[spec.layout] = here.get(spec.layout, 0) + ITEM_BYTES[spec.dtype]
    return {
        folder: sum((elements[layout] * weight for layout, weight in here.items()), np.zeros(world, dtype=np.int64))
        for folder, here in weights.items()
    }


def _add_mesh(meshes: list[Mesh], mesh: Mesh) -> int:
    if mesh not in meshes:
        meshes.append(mesh)
    return meshes.index(mesh)


def _disagreement(key: str, held_by: list[tuple[tuple[int, ...], TensorSpec, Layout]]) -> str | None:
    first_ranks, first, layout = held_by[0]
    for ranks, spec, other in held_by[1:]:
        if (spec.dtype, other.shape) != (first.dtype, layout.shape):
            return (
                f"{key}: rank {first_ranks[0]} has {first.dtype} {list(layout.shape)},"
                f" rank {ranks[0]} has {spec.dtype} {list(other.shape)}; declare it with per_rank, or sharded"
            )
        if (other.boxes is None) != (layout.boxes is None):
            return f"{key}: rank {first_ranks[0]} and rank {ranks[0]} describe its shards in different ways"
    return None


def _joined(
    held_by: list[tuple[tuple[int, ...], TensorSpec, Layout]], meshes: list[Mesh], load: list[int], written: list[int]
) -> Layout:
    """One layout for a tensor that several groups of ranks hold.

    Of a listed box the rank among its holders becomes the writer that has least to write so far; ``written`` counts it.
    """
    layout = held_by[0][2]
    if layout.boxes is not None:
        holders: dict[Box, list[int]] = {}
        for _, _, other in held_by:
            for rank, box in other.boxes or ():
                holders.setdefault(box, []).append(rank)
        listed = []
        for box, having in holders.items():
            writer = min(having, key=written.__getitem__)
            written[writer] += box.elements * ITEM_BYTES[held_by[0][1].dtype]
            listed.append((writer, box))
        return Layout(layout.shape, 0, (), tuple(listed))
    plain = [ranks for ranks, _, other in held_by if other.mesh == 0 and all(cut.kind == "R" for cut in other.cuts)]
    if len(plain) == len(held_by):
        ranks = tuple(sorted(rank for group in plain for rank in group))
        where = _add_mesh(meshes, Mesh.of((len(ranks),), ranks))
        load.extend([0] * (len(meshes) - len(load)))
        return Layout(layout.shape, where, (Cut(0, "R"),) if len(ranks) > 1 else ())
    chosen = min((other for _, _, other in held_by if other.mesh or not plain), key=lambda other: load[other.mesh])
    load[chosen.mesh] += math.prod(layout.shape)
    return chosen


def _settle(spec: TensorSpec, layout: Layout, meshes: list[Mesh]) -> tuple[Layout | None, bool]:
    """The stored layout where it does not depend on what else there is; None for "whole, to whoever has least".

    Also says whether it is a tiny replica: those lie with the first rank, whose state file every rank opens anyway.
    """
    if layout.boxes is not None:
        check_partition(spec.key, layout.shape, [box for _, box in layout.boxes])
        return layout, False
    mesh = meshes[layout.mesh]
    replicas = [cut for cut in layout.cuts if cut.kind == "R"]
    if not replicas:
        return layout, False
    size = math.prod(layout.shape) * ITEM_BYTES[spec.dtype]
    kept = tuple(cut for cut in layout.cuts if cut.kind != "R")
    tiny = not kept and size < TINY_BYTES
    if spec.rule == "first" or tiny:
        return Layout(layout.shape, layout.mesh, (*kept, *(Cut(cut.axis, "O") for cut in replicas))), tiny
    shards = math.prod(mesh.shape[cut.axis] for cut in kept)
    copies = math.prod(mesh.shape[cut.axis] for cut in replicas)
    if size // (shards * copies) < SPLIT_BYTES:
        return None, False
    lengths = list(layout.shape)
    for cut in kept:
        lengths[cut.dim] //= mesh.shape[cut.axis]
    dim = next((d for d, length in enumerate(lengths) if length >= copies), None)
    if dim is None:
        return None, False
    return Layout(layout.shape, layout.mesh, (*kept, *(Cut(cut.axis, "B", dim) for cut in replicas))), False


def _least_loaded(layout: Layout, meshes: list[Mesh], load: npt.NDArray[np.int64]) -> Layout:
    """Gives a replicated tensor whole to the replica whose busiest rank has the least to write."""
    mesh = meshes[layout.mesh]
    axes = [cut.axis for cut in layout.cuts if cut.kind == "R"]
    members = load[mesh.first : mesh.first + mesh.size] if mesh.ranks is None else load[list(mesh.ranks)]
    grid = members.reshape(mesh.shape)
    others = tuple(axis for axis in range(len(mesh.shape)) if axis not in axes)
    busiest = grid.max(axis=others) if others else grid
    chosen = np.unravel_index(int(busiest.argmin()), busiest.shape)
    index = dict(zip(sorted(axes), (int(i) for i in chosen), strict=True))
    cuts = [Cut(cut.axis, "O", 0, index[cut.axis]) if cut.kind == "R" else cut for cut in layout.cuts]
    return Layout(layout.shape, layout.mesh, tuple(cuts))
