"""What ranks that save through torch's calls tell the coordinator, and what it makes of that: a manifest."""

from __future__ import annotations

import dataclasses
import datetime as dt
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from keepstep.errors import CorruptError, MismatchError, UsageError
from keepstep.foreign.dcp.metadata import Directory, SavedValue
from keepstep.foreign.paths import Path, key_of, place
from keepstep.format.box import Box
from keepstep.format.layout import Layout, Mesh, Structure, TensorSpec
from keepstep.format.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    STATE_FOLDER,
    VERSION,
    Component,
    Lineage,
    Manifest,
    Receipt,
    Versions,
    safe_folder,
)
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, decode, encode, join
from keepstep.format.shardfile import digest

__all__ = [
    "LOOSE",
    "Inside",
    "Names",
    "Notes",
    "Part",
    "Saved",
    "Told",
    "Written",
    "below",
    "components_of",
    "folders_of",
    "key_of",
    "manifest_of",
    "names_in",
    "names_noted",
    "notes_of",
    "part_name",
    "parts_apart",
    "place",
    "seen_by",
    "tree_of",
]

LOOSE = "tensors"
"""The folder of tensors at the top of a state. (The state file is written last, when all values are known.)"""
MAX_FOLDERS = 12


class Told(msgspec.Struct, frozen=True):
    """What the coordinator tells each rank with its plan: the save id and the folder of each component."""

    save_id: str
    rank: int
    folders: dict[str, str]


class Saved(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that a rank has written."""

    key: str
    dtype: str
    folder: str
    shape: tuple[int, ...]
    box: Box


class Inside(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tensor, in row-major bytes, that a stream extension was given."""

    dtype: str
    shape: tuple[int, ...]


class Written(msgspec.Struct, frozen=True):
    """What one rank has written. ``values`` is its tree of plain values by torch's names, in the form of a state file.

    ``raw`` are those that its planner gave as bytes of its own making. ``seen`` has digests of the plain values that the
    rank has under each name, whoever writes them. ``inside`` has the tensors among what went through extensions.
    """

    receipt: Receipt
    saved: tuple[Saved, ...]
    names: dict[str, str]
    values: bytes
    seen: dict[str, int]
    raw: tuple[str, ...] = ()
    inside: dict[str, Inside] = {}


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tensor ``name`` of a global ``shape``, which is stored as a tensor of its own, ``part_name``."""

    name: str
    shape: tuple[int, ...]
    box: Box


class Notes(msgspec.Struct, frozen=True):
    """Torch's names, where they do not follow from the tree: where each stood in it, and which are plain values.

    ``raw`` are values that a planner gave as bytes of its own making. ``parts`` are stored as tensors of their own: what a
    rank alone has of them, or what went through extensions. Of those ``through`` has the descriptors, first the one to be
    undone first, and ``inside`` the tensors; what is not in it is a value.
    """

    paths: dict[str, tuple[str | int, ...]]
    values: tuple[str, ...]
    raw: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    through: tuple[str, ...] = ()
    inside: dict[str, Inside] = {}


def seen_by(planner: SavePlanner) -> dict[str, int]:
    """Digests of all plain values that this rank has, as far as its planner shows them."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict):
        return {}
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) or not isinstance(name, str):
            continue
        refused: list[str] = []
        raw = encode(value, refused=refused)
        # Of what has no form, such as tensors in a tuple, its type at least.
        found[name] = digest("\n".join(refused).encode() if refused else raw)
    return found


def folders_of(names: Sequence[str]) -> dict[str, str]:
    """The folder of each component that has tensors below it, in order; ``LOOSE`` for those that have none of their own."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for name in names:
        if name not in found:
            fit = safe_folder(name) and name not in (STATE_FOLDER, LOOSE) and len(used) < MAX_FOLDERS
            found[name] = name if fit else LOOSE
            used.add(found[name])
    return found


def manifest_of(
    written: Sequence[Written], metadata: Metadata, *, save_id: str, step: int, exclusive: bool
) -> tuple[Manifest, dict[str, TensorRef]]:
    """The manifest of all that was written, but for its files, and what refers to each tensor by torch's name.

    Raises:
        MismatchError: ranks have different plain values under one name, or tensors of different dtypes; lists all.
        CorruptError: torch's plan has a tensor that nobody wrote.
    """
    _check_values(written)
    boxes: dict[str, list[tuple[int, Box]]] = {}
    first: dict[str, Saved] = {}
    names: dict[str, str] = {}
    wrong = []
    for rank, each in enumerate(written):
        names.update(each.names)
        for saved in each.saved:
            known = first.setdefault(saved.key, saved)
            if (known.dtype, known.shape) != (saved.dtype, saved.shape):
                wrong.append(f"{saved.key}: {known.dtype} {list(known.shape)}, and on rank {rank} {saved.dtype}")
            boxes.setdefault(saved.key, []).append((rank, saved.box))
    if wrong:
        raise MismatchError("ranks disagree about tensors; nothing was committed:", wrong)
    missing = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name not in names
    ]
    if missing:
        raise CorruptError(f"nobody wrote {', '.join(missing[:20])}; nothing was committed")
    table: dict[Layout, int] = {}
    specs = []
    for key, saved in first.items():
        layout = Layout(saved.shape, 0, (), tuple(boxes[key]))
        specs.append(TensorSpec(key, saved.dtype, table.setdefault(layout, len(table)), saved.folder))
    refs = {name: TensorRef(key, first[key].dtype, first[key].shape) for name, key in names.items()}
    structure = Structure((Mesh((len(written),)),), tuple(table), tuple(specs))
    manifest = Manifest(
        format=(FORMAT_MAJOR, FORMAT_MINOR),
        step=step,
        save_id=save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        lineage=Lineage(save_id, exclusive=exclusive),
        world_size=len(written),
        versions=Versions(VERSION, str(torch.__version__), platform.python_version()),
        components={},
        meshes=structure.meshes,
        layouts=structure.layouts,
        tensors=structure.tensors,
        files={},
    )
    return manifest, refs


def _check_values(written: Sequence[Written]) -> None:
    """One name has one value: torch would take one field of it from this rank, and another from that."""
    first: dict[str, tuple[int, int]] = {}
    wrong = []
    for rank, each in enumerate(written):
        for name, value in each.seen.items():
            other, known = first.setdefault(name, (rank, value))
            if known != value:
                wrong.append(f"{name}: rank {rank} has another value than rank {other}")
    if wrong:
        raise MismatchError(
            "ranks have values of their own under one name, of which a checkpoint can hold one; nothing was committed. Give"
            " each rank a name of its own:",
            wrong,
        )


def part_name(name: str, box: Box) -> str:
    """The name under which a part of a tensor is stored by itself."""
    return f"{name}{box}"


def parts_apart(metadata: Metadata, *, all_of_them: bool = False) -> tuple[Metadata, tuple[Part, ...]]:
    """The metadata with a tensor for each part of one; and what those are parts of.

    A tensor that is whole keeps its name, which one rank alone can tell of what it has; ``all_of_them``: none does.
    """
    paths = dict(metadata.planner_data) if isinstance(metadata.planner_data, Mapping) else {}
    entries: dict[str, Any] = {}
    parts = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or (
            not all_of_them and [chunk.sizes for chunk in entry.chunks] == [entry.size]
        ):
            entries[name] = entry
            continue
        path = paths.pop(name, (name,))
        for chunk in entry.chunks:
            part = Part(name, tuple(entry.size), Box(tuple(chunk.offsets), tuple(chunk.sizes)))
            parts.append(part)
            stored = part_name(name, part.box)
            entries[stored] = TensorStorageMetadata(entry.properties, chunk.sizes, [chunk])
            paths[stored] = (*path, str(part.box))
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=paths), tuple(parts)


def below(metadata: Metadata, top: str) -> Metadata:
    """The metadata with everything below one more component."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    moved = {name: (top, *paths.get(name, (name,))) for name in metadata.state_dict_metadata}
    return dataclasses.replace(metadata, planner_data=moved)


def notes_of(directory: Directory) -> Notes:
    """The names in what torch has written for one rank, whose parts of tensors are shown apart."""
    paths: dict[str, tuple[str | int, ...]] = {}
    parts = []
    for entry in directory.entries:
        if isinstance(entry, SavedValue) or [chunk.box.sizes for chunk in entry.chunks] == [entry.shape]:
            paths[entry.name] = entry.path
            continue
        for chunk in entry.chunks:
            parts.append(Part(entry.name, entry.shape, chunk.box))
            paths[part_name(entry.name, chunk.box)] = (*entry.path, str(chunk.box))
    return Notes(paths, tuple(entry.name for entry in directory.values), (), tuple(parts))


def tree_of(
    written: Sequence[Written], metadata: Metadata, refs: Mapping[str, TensorRef], parts: tuple[Part, ...] = ()
) -> tuple[dict[str, Any], Notes | None]:
    """The state as one tree, in the order of torch's metadata; and notes, where its names do not follow from that."""
    values: dict[str, Any] = {}
    for each in written:
        values.update(decode(each.values))
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    tree: dict[str, Any] = {}
    kept: dict[str, Path] = {}
    plain = []
    for name in metadata.state_dict_metadata:
        path = paths.get(name, (name,))
        kept[name] = path if isinstance(path, tuple) else (name,)
        if name not in refs:
            plain.append(name)
            if name not in values:
                raise CorruptError(f"nobody wrote {name}; nothing was committed")
        place(tree, kept[name], refs.get(name) or values[name], len(metadata.state_dict_metadata))
    raw = tuple(name for each in written for name in each.raw)
    found = names_in(tree)
    if not raw and not parts and found.paths == kept and found.values.keys() == set(plain):
        return tree, None
    return tree, Notes(kept, tuple(plain), raw, parts)


@dataclass(frozen=True, slots=True)
class Names:
    """Torch's names: where each stood in the state, and what is stored under it."""

    paths: Mapping[str, Path]
    refs: Mapping[str, TensorRef]
    values: Mapping[str, Any]


def names_in(tree: dict[str, Any]) -> Names:
    """The names that torch gives to a state of this form; values of one rank alone have none.

    Raises:
        UsageError: two keys are one for torch.
    """
    marks: dict[int, tuple[torch.Tensor, TensorRef]] = {}

    def lowered(node: Any) -> Any:
        if type(node) is TensorRef and node.form != "array":
            mark = torch.empty(0, device="meta")
            marks[id(mark)] = mark, node
            return mark
        if type(node) is ObjectNode:
            return lowered(node.tree)
        if isinstance(node, dict):
            return {key: lowered(item) for key, item in node.items() if type(item) is not RankRef}
        return [lowered(item) for item in node] if type(node) is list else node

    try:
        flat, paths = flatten_state_dict(lowered(tree))
    except ValueError as err:
        raise UsageError(f"two keys of the step are one for torch, which joins them with dots: {err}") from err
    refs = {name: marks[id(value)][1] for name, value in flat.items() if id(value) in marks}
    return Names(dict(paths), refs, {name: value for name, value in flat.items() if name not in refs})


def names_noted(tree: dict[str, Any], notes: Notes) -> Names:
    """The names that were noted.

    Raises:
        CorruptError: the tree does not have what they name.
    """
    found: dict[str, Any] = {}
    for name, path in notes.paths.items():
        here: Any = tree
        try:
            for part in path:
                here = here[part]
        except (LookupError, TypeError) as err:
            raise CorruptError(f"{name}: noted at {path!r}, where the state has nothing") from err
        found[name] = here
    plain = set(notes.values)
    refs = {name: node for name, node in found.items() if name not in plain and type(node) is TensorRef}
    return Names(notes.paths, refs, {name: node for name, node in found.items() if name not in refs})


def components_of(tree: Mapping[str, Any], structure: Structure) -> dict[str, Component]:
    """What there is at the top of the state, with counts and bytes."""
    counts: dict[str, tuple[int, int, str]] = {}
    for spec in structure.tensors:
        name = spec.key.partition("/")[0]
        tensors, size, _ = counts.get(name, (0, 0, ""))
        counts[name] = tensors + 1, size + structure.tensor_bytes(spec), spec.folder
    found = {}
    for name, value in tree.items():
        tensors, size, folder = counts.get(join("", name), (0, 0, STATE_FOLDER))
        kind = "tensor" if type(value) is TensorRef else "values"
        shown = value.type_name if type(value) is ObjectNode else "Tensor" if kind == "tensor" else type(value).__name__
        found[name] = Component(kind, shown, tensors, size, folder)
    return found
