"""``keepstep gc``: removes what dead attempts have left, and never what a living one may need.

Who may still be alive is known of this machine only. So it goes by who took the newest incarnation: where that was a job of
this machine, which is not running any more, nothing older can commit, and what is left of it may go at once. Otherwise
attempts may be alive on other machines, and only what is old enough goes. In a bucket, uploads that were begun and never
ended go when they are old enough, whoever has begun them.
"""

from __future__ import annotations

import contextlib
import errno
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.agent.sole import sole_writer
from keepstep.cli.places import root_at
from keepstep.cli.words import age_words, plural, safe, size_words
from keepstep.commit.catalog import read_catalog
from keepstep.commit.garbage import Garbage, fence, find_garbage, newest_start, remove_garbage
from keepstep.errors import StorageError
from keepstep.storage.abandoned import abort_uploads, list_uploads, why_unseen
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage

__all__ = ["Collection", "GarbageLine", "UploadLine", "collect", "collect_garbage"]

OLDER_THAN_H = 24.0
FRESH_S = 60.0
"""Younger than that nothing goes: a save outside of any run, by a process of its own, is known to nobody."""
FAR_FRESH_S = 3600.0
"""The same of a store, whose clock is another one, and which may date an object from the beginning of its upload."""


@dataclass(frozen=True, slots=True)
class GarbageLine:
    """One attempt, or half-written record. ``why`` says why it stays; empty for one that goes."""

    kind: str
    folder: str
    attempt: str
    files: int
    bytes: int
    age_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class UploadLine:
    """An upload to a bucket that was begun and has not ended. ``why`` says why it stays; empty for one that goes."""

    name: str
    age_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Collection:
    """What is there before, and after; the fields are those of the JSON output. ``fence`` is the incarnation taken, if any.

    With ``dry_run`` nothing was changed, and what is after is what would be. ``uploads`` are those that no listing of a
    bucket shows; ``unseen`` says why they could not be looked for.
    """

    root: str
    dry_run: bool
    steps: int
    removed: tuple[GarbageLine, ...]
    kept: tuple[GarbageLine, ...]
    bytes_before: int
    bytes_after: int
    fence: int | None
    uploads: tuple[UploadLine, ...] = ()
    unseen: str = ""


def collect_garbage(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A run: its folder or URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than", metavar="HOURS", min=0.0, help="What other machines may be writing goes when it is older."
        ),
    ] = OLDER_THAN_H,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with the fields of docs/cli.md.")] = False,
) -> None:
    """Remove files of dead attempts: steps that were never committed, strays beside committed ones, half-written records.

    In a bucket also uploads that were begun long ago and never ended. Committed steps stay, damaged ones and those put
    aside too. Refuses while a job on this machine saves there.
    """
    collection = collect(root_at(root), older_than * 3600, dry_run=dry_run)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(collection), indent=2).decode())
    else:
        _print_collection(collection, Console(markup=False, highlight=False, emoji=False))


def collect(root: Storage, older_than_s: float, *, dry_run: bool) -> Collection:
    """Looks, fences, and removes; with ``dry_run`` only looks. Killed at any point, it is finished by the next call.

    Raises:
        RunOwnedError: a job on this machine saves there; nothing was changed.
        StorageError: something could not be removed; what is committed is untouched.
    """
    with contextlib.nullcontext() if dry_run else sole_writer(root.url):
        catalog = read_catalog(root)
        found = find_garbage(root, catalog)
        start = newest_start(root)
        settled = start is not None and (start.fence or start.host == platform.node())
        fresh_s = FRESH_S if isinstance(root, LocalStorage) else FAR_FRESH_S
        limit_s = min(fresh_s, older_than_s) if settled else older_than_s
        written = _written_at(root) if found else {}
        ages = {one: _age_s(written, one.names) for one in found}
        doomed = [one for one in found if ages[one] >= limit_s]
        # Whoever wakes up after its files are gone must not commit. But where a job may be alive elsewhere, a new
        # incarnation would end its saves: there the age has to do, which is far beyond the deadline of any save.
        asleep = settled or _age_s(written, written) >= older_than_s
        taken = None
        if doomed and asleep and not dry_run and start is not None and not start.fence:
            taken = fence(root, platform.node())
        gone = set(doomed) if dry_run else set(remove_garbage(root, doomed))
        uploads, unseen = _uploads(root, older_than_s, dry_run=dry_run)
        elsewhere = "a job on another machine may be writing it"
        why = f"younger than {age_words(limit_s)}" + ("" if settled else f", and {elsewhere}")
        lines = [_line(one, ages[one], "" if one in gone else why) for one in found]
        before = sum(one.bytes for one in found)
        return Collection(
            root.url,
            dry_run,
            len(catalog.steps),
            tuple(line for line in lines if not line.why),
            tuple(line for line in lines if line.why),
            before,
            before - sum(one.bytes for one in gone),
            taken,
            uploads,
            unseen,
        )


def _uploads(root: Storage, older_than_s: float, *, dry_run: bool) -> tuple[tuple[UploadLine, ...], str]:
    """Ends the uploads that are old enough; what it has found, and why it could not look.

    A job that is alive has some on their way, too. An old one is none of those: a save is given up long before that.
    """
    if isinstance(root, LocalStorage):
        return (), ""
    try:
        found, unseen = list_uploads(root.url), why_unseen(root.url)
    except StorageError as err:
        return (), f"unfinished uploads could not be listed: {err}"
    now = time.time()
    doomed = [one for one in found if now - one.began >= older_than_s]
    if doomed and not dry_run:
        abort_uploads(root.url, doomed)
    why = f"younger than {age_words(older_than_s)}: it may be on its way"
    lines = [UploadLine(one.name, now - one.began, "" if one in doomed else why) for one in found]
    return tuple(lines), unseen


def _written_at(root: Storage) -> Mapping[str, float]:
    """When everything below the root was written.

    Raises:
        StorageError: the storage does not tell.
    """
    written = root.written_at("")
    if not written and not isinstance(root, LocalStorage):
        unknown = OSError(
            errno.ENOTSUP, "the storage does not say when its files were written, so nothing can be removed"
        )
        raise StorageError("date", root.url, unknown)
    return written


def _age_s(written: Mapping[str, float], names: Iterable[str]) -> float:
    """Seconds since the newest of these files was changed; infinite without any."""
    return time.time() - max((written[name] for name in names if name in written), default=float("-inf"))


def _line(one: Garbage, age_s: float, why: str) -> GarbageLine:
    return GarbageLine(one.kind, one.folder, one.attempt, len(one.names), one.bytes, age_s, why)


def _print_collection(collection: Collection, console: Console) -> None:
    found = len(collection.removed) + len(collection.kept)
    before, after = size_words(collection.bytes_before), size_words(collection.bytes_after)
    console.print(
        f"before: {plural(collection.steps, 'step')}, and {before} of {plural(found, 'dead attempt')}", soft_wrap=True
    )
    verb = "would remove" if collection.dry_run else "removed"
    for line in (*collection.removed, *collection.kept):
        what = f"{line.folder} {line.kind}" + (f", attempt {line.attempt}" if line.attempt else "")
        facts = f"{plural(line.files, 'file')}, {size_words(line.bytes)}, {age_words(line.age_s)} old"
        said = f"kept: {line.why}" if line.why else verb
        console.print(f"  {safe(what)} ({facts}): {said}", soft_wrap=True)
    for upload in collection.uploads:
        said = f"kept: {upload.why}" if upload.why else verb
        console.print(f"  upload of {safe(upload.name)}, {age_words(upload.age_s)} old: {said}", soft_wrap=True)
    if collection.unseen:
        console.print(f"note: {safe(collection.unseen)}", soft_wrap=True)
    if collection.fence is not None:
        text = f"took incarnation {collection.fence}: no start of the job before it can commit any more"
        console.print(text, soft_wrap=True)
    word = "after, if it were done" if collection.dry_run else "after"
    console.print(f"{word}: {plural(collection.steps, 'step')}, and {after} of dead attempts", soft_wrap=True)
