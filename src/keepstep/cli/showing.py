"""``keepstep show``: what is in one step: its parts, how tensors lie on the ranks, who wrote it, with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from keepstep.cli.formats import FORMAT_WORDS, Found
from keepstep.cli.tensors import TensorLine, holders_of, tensor_lines
from keepstep.cli.trees import TreeLine, grow, print_tree
from keepstep.cli.words import (
    PIPED_COLUMNS,
    age_s,
    age_words,
    config_words,
    layout_words,
    metric_words,
    piece_count,
    plural,
    safe,
    share_words,
    size_words,
)
from keepstep.commit.catalog import check_files
from keepstep.errors import CorruptError
from keepstep.format.manifest import Component, Lineage, Manifest, Versions

__all__ = ["DEEPEST", "ComponentLine", "LayoutLine", "StepFacts", "Wanted", "print_step", "read_step"]

DEEPEST = 1000
"""A depth below which no key goes."""
SHOWN_LAYOUTS = 12
SHOWN_MESHES = 4
# Parts that most training states have, and what their names or types contain: worth a word when one is not there.
_USUAL = {
    "scheduler": ("sched", "lr"),
    "data position": ("data", "load", "sampl"),
    "random numbers": ("rng",),
    "progress": ("progress",),
}


@dataclass(frozen=True, slots=True)
class ComponentLine:
    """One part of the state. ``folder`` is where the bytes of its tensors are; ``left_out`` are keys that were not saved."""

    name: str
    kind: str
    type: str
    tensors: int
    bytes: int
    folder: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """A global shape and how it is cut, how many pieces that makes, and how many tensors share it."""

    shape: tuple[int, ...]
    layout: str
    pieces: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to show: ``depth`` levels of the tree, or the tensors themselves; of ``components``, by ``pattern``."""

    pattern: str = "*"
    components: tuple[str, ...] = ()
    depth: int | None = None
    tensors: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Everything about a step that its manifest says; the fields are those of the JSON output.

    ``made`` is what has written it, see ``FORMAT_WORDS``. ``damage`` says which files are missing or of another size;
    contents are for ``verify``.
    """

    path: str
    made: str
    step: int
    save_id: str
    created: str
    format: str
    lineage: Lineage
    metrics: dict[str, float | None]
    world_size: int
    meshes: tuple[tuple[int, ...], ...]
    versions: Versions
    config: msgspec.Raw
    files: int
    bytes: int
    tensors: int
    components: tuple[ComponentLine, ...]
    layouts: tuple[LayoutLine, ...]
    damage: str | None = None
    tensor_list: tuple[TensorLine, ...] | None = None
    tree: tuple[TreeLine, ...] | None = None


def read_step(found: Found, wanted: Wanted) -> StepFacts:
    """What the manifest of a checkpoint says.

    Raises:
        UsageError: a component that is not there, or no key fits the pattern.
        StorageError: it cannot be read.
    """
    storage, manifest = found.step, found.manifest
    damage = None
    try:
        check_files(storage, manifest)
    except CorruptError as err:
        damage = str(err)
    chosen = wanted.tensors or wanted.depth is not None
    lines = tensor_lines(manifest, wanted.pattern, wanted.components) if chosen else ()
    return StepFacts(
        path=storage.url,
        made=found.format,
        step=manifest.step,
        save_id=manifest.save_id,
        created=manifest.created,
        format=".".join(map(str, manifest.format)),
        lineage=manifest.lineage,
        metrics=dict(manifest.metrics),
        world_size=manifest.world_size,
        meshes=tuple(mesh.shape for mesh in manifest.meshes),
        versions=manifest.versions,
        config=manifest.config,
        files=sum(len(records) for records in manifest.files.values()),
        bytes=manifest.total_bytes,
        tensors=len(manifest.tensors) + len(manifest.aliases),
        components=tuple(_component(name, part) for name, part in manifest.components.items()),
        layouts=_layout_lines(manifest),
        damage=damage,
        tensor_list=lines if wanted.tensors else None,
        tree=_tree(manifest, lines, wanted, wanted.depth) if wanted.depth is not None else None,
    )


def _tree(manifest: Manifest, lines: Sequence[TensorLine], wanted: Wanted, depth: int) -> tuple[TreeLine, ...]:
    """Components without tensors are in it where tensors are not chosen by their keys."""
    empty = [name for name, part in manifest.components.items() if not part.tensors and wanted.pattern == "*"]
    return grow(
        lines,
        holders_of(manifest),
        empty=[name for name in empty if not wanted.components or name in wanted.components],
        total_bytes=sum(map(manifest.structure.tensor_bytes, manifest.tensors)),
        depth=depth,
    )


def print_step(facts: StepFacts, console: Console) -> None:
    """Everything for people, 80 columns and more."""
    if facts.tree is not None:
        print_tree(facts.tree, console)
        return
    if facts.tensor_list is not None:
        _print_tensors(facts.tensor_list, console)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _rows(facts).items():
        if text:
            grid.add_row(name, text)
    console.print(grid)
    console.print()
    _print_components(facts.components, console)
    if facts.layouts:
        console.print()
        _print_layouts(facts.layouts, console)
    if facts.damage is not None:
        console.print(f"\ndamaged: {safe(facts.damage)}", soft_wrap=True)


def _rows(facts: StepFacts) -> dict[str, str]:
    """What is known of it, by name; empty where nothing is."""
    lineage, versions = facts.lineage, facts.versions
    if facts.made != "keepstep":
        return {
            "format": f"{FORMAT_WORDS[facts.made]}; it has no digests",
            "path": safe(facts.path),
            "size": f"{size_words(sum(part.bytes for part in facts.components))} in {plural(facts.tensors, 'tensor')}",
            "world": plural(facts.world_size, "rank") if facts.made == "dcp" else "",
        }
    shapes = [shape for shape in dict.fromkeys(facts.meshes) if shape != (facts.world_size,)]
    meshes = ", ".join(" × ".join(map(str, shape)) for shape in shapes[:SHOWN_MESHES])
    came = f", from step {lineage.parent.step} of incarnation {lineage.parent.incarnation}" if lineage.parent else ""
    other = f" of run {safe(lineage.parent.run)}" if lineage.parent and lineage.parent.run != lineage.run else ""
    return {
        "step": f"{facts.step}, saved {safe(facts.created)} ({age_words(age_s(facts.created))} ago)",
        "path": safe(facts.path),
        "size": f"{size_words(facts.bytes)} in {plural(facts.files, 'file')}, {plural(facts.tensors, 'tensor')}",
        "world": f"{plural(facts.world_size, 'rank')}" + (f", mesh {meshes}" if meshes else ""),
        "run": f"{safe(lineage.run)}, incarnation {lineage.incarnation}{came}{other}",
        "written by": safe(f"keepstep {versions.keepstep}, torch {versions.torch}, python {versions.python}"),
        "processor": safe(versions.cpu),
        "code": safe(versions.code),
        "config": safe(config_words(facts.config)),
        "format": f"{facts.format}, attempt {safe(facts.save_id)}",
        "store": _store_words(lineage.exclusive),
        "metrics": metric_words(facts.metrics),
    }


def _store_words(exclusive: bool | msgspec.UnsetType) -> str:
    """Nothing of a place that does what it should."""
    return (
        "" if exclusive is not False else "gives a name to more than one writer: only one job at a time may save there"
    )


def _print_components(components: tuple[ComponentLine, ...], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("component", overflow="fold")
    table.add_column("kind", no_wrap=True)
    table.add_column("type", overflow="fold")
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    whole = max(1, sum(part.bytes for part in components))
    for part in components:
        sizes = f"{part.tensors:,}", size_words(part.bytes), share_words(part.bytes / whole)
        table.add_row(safe(part.name), safe(part.kind), safe(part.type), *sizes)
    console.print(table)
    left_out = dict.fromkeys(pattern for part in components for pattern in part.left_out)
    if left_out:
        console.print(f"left out when it was saved: {', '.join(map(safe, left_out))}", soft_wrap=True)
    absent = [usual for usual in _USUAL if not any(_is_usual(part, usual) for part in components)]
    if absent and any(part.kind == "optimizer" for part in components):
        console.print(f"not saved with it: {', '.join(absent)}", soft_wrap=True)


def _is_usual(part: ComponentLine, usual: str) -> bool:
    text = f"{part.name} {part.type}".lower()
    return any(hint in text for hint in _USUAL[usual])


def _print_layouts(layouts: tuple[LayoutLine, ...], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape", overflow="fold")
    table.add_column("layout", overflow="fold")
    table.add_column("pieces", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    for line in layouts[:SHOWN_LAYOUTS]:
        table.add_row(str(list(line.shape)), line.layout, f"{line.pieces:,}", f"{line.tensors:,}")
    console.print(table)
    if len(layouts) > SHOWN_LAYOUTS:
        console.print(f"and {len(layouts) - SHOWN_LAYOUTS} more layouts; --json lists all", soft_wrap=True)


def _print_tensors(lines: tuple[TensorLine, ...], console: Console) -> None:
    """One line a tensor, as long as it has to be where it is piped; folded to fit a terminal."""
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold", ratio=3)
    table.add_column("dtype", no_wrap=True)
    table.add_column("shape", overflow="fold", ratio=1)
    table.add_column("layout", overflow="fold", ratio=2)
    table.add_column("pieces", justify="right", no_wrap=True)
    for line in lines:
        layout = line.layout if line.same_as is None else f"same as {safe(line.same_as)}"
        table.add_row(safe(line.key), line.dtype, str(list(line.shape)), layout, f"{line.pieces:,}")
    console.print(table)


def _component(name: str, part: Component) -> ComponentLine:
    return ComponentLine(name, part.kind, part.type, part.tensors, part.bytes, part.folder, part.left_out)


def _layout_lines(manifest: Manifest) -> tuple[LayoutLine, ...]:
    """Layouts by how many tensors share them."""
    shared = Counter(spec.layout for spec in manifest.tensors)
    return tuple(
        LayoutLine(layout.shape, layout_words(layout, manifest.meshes), piece_count(layout, manifest.meshes), count)
        for layout, count in ((manifest.layouts[index], count) for index, count in shared.most_common())
    )
