"""``keepstep ls``: which steps exist below a root, which are damaged, and which were never committed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from keepstep.check.scrub import Scrubbed, read_scrubbed
from keepstep.cli.words import age_s, age_words, metric_words, safe, size_words
from keepstep.commit.catalog import MOST_LOOKS, Catalog, Found, check_files, read_catalog, read_manifest, step_storage
from keepstep.commit.pins import pinned_steps
from keepstep.commit.publish import read_hint
from keepstep.errors import CheckpointError, CorruptError, FormatError, StorageError
from keepstep.format.manifest import parse_step_name, step_name
from keepstep.storage.base import Storage

__all__ = ["Listing", "StepLine", "print_listing", "read_listing"]


@dataclass(frozen=True, slots=True)
class StepLine:
    """One folder of a step; the fields are those of the JSON output.

    ``status`` is committed, damaged, unfinished or aside (damaged, and put aside). ``scrubbed`` is when it was last read
    whole by a scrub.
    """

    step: int
    name: str
    status: str
    latest: bool = False
    incarnation: int | None = None
    run: str | None = None
    created: str | None = None
    age_s: float | None = None
    world_size: int | None = None
    bytes: int | None = None
    files: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    damage: str | None = None
    dropped: tuple[str, ...] = ()
    pinned: bool = False
    scrubbed: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A root and its steps: committed and damaged ones newest first, then attempts that were never committed.

    ``hint`` is the step that the file ``latest`` names; readers go by manifests.
    """

    root: str
    hint: int | None
    steps: tuple[StepLine, ...]


def read_listing(root: Storage) -> Listing:
    """Looks at every step once: its manifest and the sizes of its files, not their contents.

    Again where something is missing and steps have come or gone meanwhile: what a save or retention is at is no damage.
    """
    catalog = read_catalog(root)
    for _ in range(MOST_LOOKS):
        listing = _look(root, catalog)
        before = catalog
        if all(line.status != "damaged" for line in listing.steps) or (catalog := read_catalog(root)) == before:
            break
    return listing


def _look(root: Storage, catalog: Catalog) -> Listing:
    lines: list[StepLine] = []
    pinned, scrubbed = pinned_steps(root), read_scrubbed(root)
    for found in catalog.steps:
        line = _marked(_line(root, found), found, scrubbed)
        newest = line.status == "committed" and not line.dropped and not any(other.latest for other in lines)
        lines.append(replace(line, latest=newest, pinned=found.step in pinned))
    for name in reversed(catalog.unfinished):
        sizes = [size for _, size in root.list(name)]
        lines.append(StepLine(parse_step_name(name) or 0, name, "unfinished", bytes=sum(sizes), files=len(sizes)))
    lines.extend(
        StepLine(note.step, step_name(note.step), "aside", damage="; ".join(note.problems))
        for note in reversed(catalog.aside)
    )
    return Listing(root.url, _hint(root), tuple(lines))


def print_listing(listing: Listing, console: Console) -> None:
    """A table for people, 80 columns and more."""
    if not listing.steps:
        console.print(f"no steps in {safe(listing.root)}", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("incarnation", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("metrics", overflow="fold")
    table.add_column("", no_wrap=True)
    for line in listing.steps:
        known = line.incarnation is not None
        table.add_row(
            str(line.step),
            str(line.incarnation) if known else "–",
            age_words(line.age_s) if known else "–",
            "–" if line.bytes is None else size_words(line.bytes),
            "–" if line.world_size is None else str(line.world_size),
            metric_words(line.metrics),
            _remark(line),
        )
    console.print(table)
    for line in listing.steps:
        if line.damage is not None:
            what = "was put aside" if line.status == "aside" else "is damaged"
            console.print(f"\nstep {line.step} {what}: {safe(line.damage)}", soft_wrap=True)
    newest = next((line.step for line in listing.steps if line.latest), None)
    if newest is None:
        console.print("\nno step here can be restored", soft_wrap=True)
    elif listing.hint is not None and listing.hint != newest:
        console.print(f"\nthe hint 'latest' names step {listing.hint}; restore() goes by manifests", soft_wrap=True)


def _remark(line: StepLine) -> str:
    if line.status == "committed":
        notes = ["latest"] * line.latest + ["pinned"] * line.pinned
        return ", ".join([*notes, f"without {', '.join(line.dropped)}"] if line.dropped else notes)
    return {"unfinished": "never committed", "aside": "put aside"}.get(line.status, "damaged")


def _marked(line: StepLine, found: Found, scrubbed: dict[str, Scrubbed]) -> StepLine:
    """The line with what the last scrub found: of a step that is there in full it may know more."""
    last = scrubbed.get(line.name)
    if last is None or last.save_id != found.save_id:
        return line
    line = replace(line, scrubbed=last.at)
    if last.ok or line.status != "committed":
        return line
    return replace(line, status="damaged", damage=f"found by a scrub at {last.at}: {'; '.join(last.problems)}")


def _line(root: Storage, found: Found) -> StepLine:
    name = step_name(found.step)
    storage = step_storage(root, found.step)
    try:
        if found.damage:
            raise CorruptError(found.damage)
        manifest = read_manifest(storage)
        check_files(storage, manifest)
    except (CorruptError, FormatError, StorageError) as err:
        return StepLine(
            found.step,
            name,
            "damaged",
            incarnation=None if found.damage else found.incarnation,
            run=found.run or None,
            created=found.created or None,
            age_s=age_s(found.created),
            metrics=dict(found.metrics or {}),
            damage=str(err),
        )
    return StepLine(
        found.step,
        name,
        "committed",
        incarnation=found.incarnation,
        run=found.run,
        created=found.created,
        age_s=age_s(found.created),
        world_size=manifest.world_size,
        bytes=manifest.total_bytes,
        files=sum(len(records) for records in manifest.files.values()),
        metrics=dict(manifest.metrics),
        dropped=manifest.dropped,
    )


def _hint(root: Storage) -> int | None:
    """The step that ``latest`` names; None when it is absent or not readable, which harms nobody."""
    try:
        hint = read_hint(root)
    except CheckpointError:
        return None
    return None if hint is None else hint.step
