"""A run put in order again: lost manifests, damaged steps, and the records beside the steps.

In: the root of a run that nobody writes to meanwhile. Out: what was done about each thing that was wrong, one after another.
Deletes no data. Each change is one atomic write, or one whose repetition does no harm: killed at any point, do it again.

An attempt becomes a step only by a manifest that its files prove completely, and only with evidence that it was committed:
files that are all durable prove no commit. They may be of a save that failed on another rank, or was given up.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.check.rebuild import Rebuilt, attempts_in, rebuild
from keepstep.check.verify import Problem, verify
from keepstep.commit.aside import bring_back, put_aside, set_aside
from keepstep.commit.catalog import (
    MAX_MANIFEST_BYTES,
    Catalog,
    check_files,
    read_catalog,
    read_manifest,
    step_storage,
)
from keepstep.commit.publish import INCARNATIONS, LATEST_NAME, RUN_NAME, point_latest, put_note, read_hint, run_of
from keepstep.commit.records import now_text, read_records
from keepstep.errors import CorruptError, FormatError, StepNotFoundError, StorageError
from keepstep.format.manifest import FORMAT_MAJOR, MANIFEST_NAME, VERSION, Manifest, parse_step_name, step_name
from keepstep.format.shardfile import digest
from keepstep.storage.base import Storage, read_blob

__all__ = ["Action", "Wish", "repair", "repair_alone", "undo"]

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that was wrong, and what became of it.

    ``kind`` is ``manifest``, ``quarantine``, ``run``, ``incarnation``, ``latest`` or ``undo``; ``target`` the file or
    folder, relative to the root. ``outcome`` is ``done``, ``would`` (with ``dry_run``), ``left`` (it is damaged and was left
    as it is), or ``none`` (nothing is known to be damaged; only said).
    """

    kind: str
    target: str
    outcome: str
    text: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What may be done.

    ``uncommitted`` makes whole attempts steps that nothing says were committed, ``quarantine`` verifies every step and puts
    damaged ones aside. ``steps`` limits both to some steps; empty for all.
    """

    steps: frozenset[int] = frozenset()
    uncommitted: bool = False
    quarantine: bool = False
    dry_run: bool = False

    def wants(self, step: int) -> bool:
        """Whether it is about this step."""
        return not self.steps or step in self.steps


def repair(root: Storage, wish: Wish) -> Iterator[Action]:
    """Repairs a run; yields each thing as soon as it is dealt with. Changes nothing with ``wish.dry_run``.

    Call only while no job writes to the run.

    Raises:
        StorageError: the storage refused; what was yielded is done.
    """
    catalog = read_catalog(root)
    left = set()
    for name in sorted(root.folders()):
        step = parse_step_name(name)
        if step is not None and wish.wants(step):
            for action in _manifest(root, step, catalog, wish):
                left |= {name} if action.outcome == "left" else set()
                yield action
    if wish.quarantine:
        for found in read_catalog(root).steps:
            if wish.wants(found.step):
                yield from _quarantine(root, found.step, wish)
    catalog = read_catalog(root)
    yield from _records(root, catalog, wish)
    # What could not be read just now may be a step, and the hint all there is to say so.
    if not left.intersection(catalog.unfinished):
        yield from _hint(root, catalog, wish)


def repair_alone(storage: Storage, wish: Wish) -> Iterator[Action]:
    """The same for one step outside of any run: only its manifest can be made again.

    Raises:
        StorageError: the storage refused.
    """
    raw, wrong = _manifest_there(storage)
    if wrong or raw is None:
        yield from _rebuilt(storage, MANIFEST_NAME, raw, _Evidence(raw), wish)


def undo(root: Storage, step: int) -> Action:
    """Gives a step that was put aside its manifest back. See ``bring_back`` for what it raises."""
    note = bring_back(root, step)
    text = f"is a step again; it was put aside at {note.at} because {'; '.join(note.problems[:SHOWN])}"
    return Action("undo", step_name(step), "done", text)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What is known of commits in one folder, whatever is left in it. ``raw`` is a damaged manifest; None for none.

    ``aside`` are names of files that were put aside: they stay what they are until somebody brings them back. ``replaced``
    are attempts in whose place another one was committed later, whatever has become of that.
    """

    raw: bytes | None
    saves: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()
    parents: frozenset[tuple[str, int]] = frozenset()
    failed: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()

    def attempts(self, storage: Storage) -> dict[str, dict[tuple[str, int], str]]:
        """The attempts that have files there, but for those that were put aside."""
        return {
            save_id: names for save_id, names in attempts_in(storage).items() if self.aside.isdisjoint(names.values())
        }

    def of(self, rebuilt: Rebuilt, *, alone: bool) -> str:
        """Why this attempt is known to have been committed; empty when nothing says so. ``alone``: there is no other."""
        manifest = rebuilt.manifest
        if manifest is None:
            return ""
        if self.raw and manifest.save_id.encode() in self.raw:
            return "what is left of its manifest names the attempt"
        if manifest.save_id in self.saves:
            return "saves.jsonl says that it was committed"
        if f"{digest(rebuilt.data):016x}" in self.digests:
            return "the hint names this very manifest"
        if (manifest.lineage.run, manifest.lineage.incarnation) in self.parents:
            return "a later start of the run was restored from it"
        if self.raw is not None and alone:
            return "there was a manifest, and no other attempt has files there"
        return ""


def _evidence(root: Storage, step: int, catalog: Catalog, raw: bytes | None) -> _Evidence:
    records = [one for one in read_records(root) if one.step == step]
    committed = [one.save_id for one in records if one.outcome == "committed"]
    saves = set(committed)
    failed = {one.save_id for one in records} - saves
    digests, parents = set(), set()
    try:
        hint = read_hint(root)
        if hint is not None and hint.step == step:
            digests.add(hint.manifest)
    except CorruptError:
        pass
    for found in catalog.steps:
        if not found.damage and found.parent == step:
            parent = read_manifest(step_storage(root, found.step)).lineage.parent
            if parent is not None:
                parents.add((parent.run, parent.incarnation))
    aside = set_aside(catalog.aside, step, [name for name, _ in step_storage(root, step).list("")])
    return _Evidence(
        raw=raw,
        saves=frozenset(saves),
        digests=frozenset(digests),
        parents=frozenset(parents),
        failed=frozenset(failed),
        aside=frozenset(aside),
        replaced=frozenset(saves - {*committed[-1:]}),
    )


def _manifest_there(storage: Storage) -> tuple[bytes | None, str]:
    """The bytes of a manifest, None without one, and what is wrong with it. One of a newer format is not wrong."""
    try:
        raw = read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return None, ""
    except CorruptError as err:
        return b"", str(err)
    try:
        read_manifest(storage)
    except CorruptError as err:
        return raw, str(err)
    except FormatError:
        return raw, ""
    return raw, ""


def _manifest(root: Storage, step: int, catalog: Catalog, wish: Wish) -> Iterator[Action]:
    """A step whose manifest is gone, damaged, or of another step."""
    storage, target = step_storage(root, step), f"{step_name(step)}/{MANIFEST_NAME}"
    raw, wrong = _manifest_there(storage)
    damage = next((found.damage for found in catalog.steps if found.step == step), "")
    if raw is not None and not wrong and not damage:
        return
    if raw is not None and not wrong and not _strange(storage, step):
        # Of a newer format, or of another step whose files are there: nobody's to replace.
        unable = "none" if wish.quarantine else "left"
        yield Action("manifest", target, unable, f"left as it is: {damage}")
        return
    evidence = _evidence(root, step, catalog, raw)
    if raw is None and evidence.aside and not evidence.attempts(storage):
        return
    yield from _rebuilt(storage, target, raw, evidence, wish, step)


def _strange(storage: Storage, step: int) -> bool:
    """Whether a good manifest is of another step, and has no files here: then it was copied from there."""
    try:
        manifest = read_manifest(storage)
    except FormatError:
        return False
    return manifest.step != step and manifest.save_id not in attempts_in(storage)


def _rebuilt(
    storage: Storage, target: str, raw: bytes | None, evidence: _Evidence, wish: Wish, step: int | None = None
) -> Iterator[Action]:
    """Makes a manifest again if the files of an attempt prove it, and something says that it was committed."""
    # (What can be put aside is dealt with after this.)
    unable = "none" if raw is None or wish.quarantine else "left"
    tried = [rebuild(storage, save_id, names) for save_id, names in sorted(evidence.attempts(storage).items())]
    whole = [one for one in tried if one.manifest is not None and step in (None, one.manifest.step)]
    whole = [one for one in whole if one.save_id not in evidence.replaced]
    unsure = any(problem.kind == "unreadable" for one in tried for problem in one.problems)
    if not whole or unsure:
        # (Of what cannot be read just now it is not known whether it is the one.)
        unable = "left" if unsure else unable
        yield Action("manifest", target, unable, _why_not(tried, committed=raw is not None, aside=wish.quarantine))
        return
    known = [(one, why) for one in whole if (why := evidence.of(one, alone=len(tried) == 1))]
    if not known and not wish.uncommitted:
        failed = any(one.save_id in evidence.failed for one in whole)
        says = "saves.jsonl says that it failed" if failed else "nothing says that it was committed"
        text = (
            f"all files of attempt {', '.join(one.save_id for one in whole)} are there and whole, but {says}: it may have"
            " failed on another rank, or have been given up. --uncommitted makes it a step"
        )
        yield Action("manifest", target, unable, text)
        return
    chosen, why = max(known or [(one, "") for one in whole], key=lambda each: _age(each[0].manifest))
    if not wish.dry_run:
        if raw is None:
            storage.put_new(MANIFEST_NAME, chosen.data)
        else:
            storage.put(MANIFEST_NAME, chosen.data)
    text = f"made again from {chosen.files} files of attempt {chosen.save_id}, which prove it: every byte was compared"
    text += f"; {why}" if why else "; NOTHING says that it was committed, it is a step now because you asked for it"
    if chosen.dropped:
        text += f"; without {', '.join(chosen.dropped)}, whose files are not all there"
    yield Action("manifest", target, "would" if wish.dry_run else "done", text)


def _age(manifest: Manifest | None) -> tuple[int, str]:
    return (manifest.lineage.incarnation, manifest.created) if manifest is not None else (-1, "")


def _why_not(tried: Sequence[Rebuilt], *, committed: bool, aside: bool) -> str:
    reasons = [f"attempt {one.save_id}: {_told(one.problems)}" for one in tried if one.problems]
    reasons += [
        f"attempt {one.save_id} is of another step, or was replaced" for one in tried if one.manifest is not None
    ]
    found = "; ".join(reasons[:SHOWN]) or "no shard files are there"
    if committed:
        advice = "" if aside else "; --quarantine puts the step aside"
        return f"the manifest is damaged and cannot be made again ({found}){advice}"
    if any(problem.kind == "unreadable" for one in tried for problem in one.problems):
        return f"no manifest, and what would tell whether it was a step cannot be read now ({found}): try again"
    return f"no manifest, and none can be made ({found}): not a step. `keepstep gc` removes what dead attempts left"


def _told(problems: Sequence[Problem]) -> str:
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(f"{one.kind}: {one.text}" for one in problems[:SHOWN]) + more


def _quarantine(root: Storage, step: int, wish: Wish) -> Iterator[Action]:
    try:
        *_, verified = verify(step_storage(root, step))
    except StepNotFoundError:
        return
    kinds = {problem.kind for problem in verified.problems}
    if not verified.problems and verified.step == step:
        return
    if kinds and kinds <= {"unreadable", "version"}:
        text = f"not put aside, it may be good: {_told(verified.problems)}"
        yield Action("quarantine", step_name(step), "left", text)
        return
    reasons = [f"{problem.kind}: {problem.text}" for problem in verified.problems] or [f"holds step {verified.step}"]
    if not wish.dry_run:
        put_aside(root, step, reasons, now_text())
    text = (
        f"put aside; nothing of it was deleted, `keepstep repair --undo` brings it back: {'; '.join(reasons[:SHOWN])}"
    )
    yield Action("quarantine", step_name(step), "would" if wish.dry_run else "done", text)


def _records(root: Storage, catalog: Catalog, wish: Wish) -> Iterator[Action]:
    """``run.json`` and the files of incarnations, as far as steps tell what they were."""
    good = [found for found in catalog.steps if not found.damage and found.incarnation]
    outcome = "would" if wish.dry_run else "done"
    try:
        run, wrong = run_of(root), ""
    except CorruptError as err:
        run, wrong = None, str(err)
    if good and not run:
        about = {"run": good[0].run, "format": FORMAT_MAJOR, "rebuilt": now_text(), "keepstep": VERSION}
        if not wish.dry_run:
            root.put(RUN_NAME, msgspec.json.encode(about) + b"\n")
        text = f"{wrong or 'it was missing'}; it names the run {good[0].run} again, as the newest step does"
        yield Action("run", RUN_NAME, outcome, text)
    elif wrong:
        if not wish.dry_run:
            root.delete([RUN_NAME])
        yield Action(
            "run", RUN_NAME, outcome, f"{wrong}; there is no step to take it from, the next start makes another"
        )
    there = {name.rpartition("/")[2] for name, _ in root.list(INCARNATIONS)}
    for number in sorted({found.incarnation for found in good}):
        name = f"{INCARNATIONS}/{number:06d}"
        if f"{number:06d}" not in there:
            if not wish.dry_run:
                put_note(root, name, msgspec.json.encode({"rebuilt": now_text(), "keepstep": VERSION}) + b"\n")
            yield Action("incarnation", name, outcome, "made again: steps were saved by that start of the job")


def _hint(root: Storage, catalog: Catalog, wish: Wish) -> Iterator[Action]:
    """The hint, which is to name the newest step that can be restored."""
    outcome = "would" if wish.dry_run else "done"
    try:
        hint, wrong = read_hint(root), "it was missing"
    except CorruptError as err:
        hint, wrong = None, str(err)
    for found in catalog.steps:
        storage = step_storage(root, found.step)
        try:
            if found.damage or found.dropped or not found.incarnation:
                # (A step without its optimizer is none that restore() would take.)
                continue
            manifest = read_manifest(storage)
            check_files(storage, manifest)
        except (CorruptError, FormatError):
            continue
        mark = f"{digest(read_blob(storage, MANIFEST_NAME, MAX_MANIFEST_BYTES)):016x}"
        if hint is not None and (hint.step, hint.incarnation, hint.manifest) == (*found.order[::-1], mark):
            return
        if not wish.dry_run:
            point_latest(root, manifest, mark, back=True)
        was = f"it named step {hint.step}" if hint is not None else wrong
        yield Action("latest", LATEST_NAME, outcome, f"{was}; it names step {found.step}, the newest that is good")
        return
    if hint is not None or wrong != "it was missing":
        if not wish.dry_run:
            root.delete([LATEST_NAME])
        yield Action("latest", LATEST_NAME, outcome, "removed: there is no step that it could name")
