"""What the coordinator alone decides and all ranks are told: whose root it is, which start of the run, which step to use."""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from keepstep.agent.node import Owner
from keepstep.checkpointer.loading import found_manifest
from keepstep.commit.catalog import step_storage
from keepstep.copies.levels import Copy, Levels, levels_of
from keepstep.errors import (
    CorruptError,
    DamageWarning,
    FormatError,
    MismatchError,
    StepNotFoundError,
    StorageError,
)
from keepstep.failpoints import reach
from keepstep.format.manifest import FORMAT_MAJOR
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage
from keepstep.storage.remote import RemoteStorage

__all__ = ["Choice", "Start", "begin_run", "choose_step", "own_root", "warn_damaged"]

_log = logging.getLogger("keepstep")


class Start(msgspec.Struct):
    """What the coordinator tells all ranks about this start of the job; ``away``: see Levels."""

    run: str
    incarnation: int
    away: bool = False


class Choice(msgspec.Struct):
    """The step to restore: its manifest, or nothing on a fresh run. ``skipped`` says what was wrong with newer ones.

    ``incarnation`` is the one to go on in, when it is another than before. ``level``, ``label`` and ``again`` say which copy
    of the step it is; see ``Copy``.
    """

    manifest: bytes = b""
    skipped: tuple[str, ...] = ()
    step: int = 0
    incarnation: int = 0
    level: int = 0
    label: str = ""
    again: bool = False


def own_root(root: Storage | Levels, posted: list[bytes], held: contextlib.ExitStack) -> None:
    """One root for all ranks, which on this machine is nobody else's until ``held`` is closed.

    Raises:
        MismatchError: ranks were given different roots.
        RunOwnedError: another job that is alive has it.
    """
    if len(set(posted)) > 1:
        lines = [f"rank {rank}: {url.decode()}" for rank, url in enumerate(posted)]
        raise MismatchError("ranks were given different roots; nothing was written:", lines)
    for place in levels_of(root).places:
        # (A store with options of its own may be another one than the next job's with the same URL.)
        if isinstance(place, LocalStorage) or (isinstance(place, RemoteStorage) and place.is_plain):
            held.callback(Owner(place.url).release)


def begin_run(root: Storage | Levels, world: int) -> Start:
    """One run, and a new incarnation of it."""
    levels = levels_of(root)
    if levels.is_away():
        levels = replace(levels, away=True)
    fresh = secrets.token_hex(8)
    about = {"run": fresh, "created": time.time(), "format": FORMAT_MAJOR}
    known = levels.join_run(msgspec.json.encode(about) + b"\n")
    # A start that does not restore what is there is another run: it neither replaces nor removes those steps.
    run = fresh if levels.has_steps() else known or fresh
    # (The id: whoever has lost the answer to its create knows its own note by it.)
    note = {"host": platform.node(), "world_size": world, "started": time.time(), "id": secrets.token_hex(8)}
    return Start(run, levels.take_incarnation(msgspec.json.encode(note) + b"\n"), levels.away)


def choose_step(
    root: Storage | Levels,
    step: int | None,
    on_damage: str,
    allow_fresh: bool,
    skipped: tuple[str, ...],
    incarnation: int = 0,
) -> Choice:
    """The coordinator's decision, told to all: the newest step that is not known to be damaged, and its nearest good copy.

    ``incarnation`` is the one that this start of the job is in.
    """
    reach("choose")
    levels = levels_of(root)
    survey = levels.survey()
    weights_only = []
    if step is not None and step not in {copy.found.step for copy in survey.copies}:
        raise StepNotFoundError(f"{levels.url} has no committed step {step}; {survey.inventory}")
    bad = {text.partition(": ")[0] for text in skipped}
    for index, copy in enumerate(survey.copies):
        found = copy.found
        if copy.label in bad or (step is not None and found.step != step):
            continue
        if found.dropped and step is None:
            # A run that went on without its optimizer's state would be another run: only who asks for that gets it.
            weights_only.append(
                f"{copy.label}: kept without {', '.join(found.dropped)}; restore(step={found.step}, strict=False)"
            )
            continue
        if copy.why:
            skipped = (*skipped, f"{copy.label}: {copy.why}")
            _log.warning("a step was passed over: %s", skipped[-1])
            continue
        try:
            if found.damage:
                raise CorruptError(found.damage)
            manifest = found_manifest(step_storage(levels.places[copy.level], found.step))
        except (CorruptError, FormatError, StorageError, StepNotFoundError) as err:
            if (on_damage == "raise" or step is not None) and not copy.again:
                raise
            skipped = (*skipped, f"{copy.label}: {err}")
            warn_damaged(skipped[-1])
            continue
        line = _line_after(levels, survey.copies[:index], incarnation)
        return Choice(manifest, skipped, found.step, line, copy.level, copy.label, copy.again)
    if step is not None or not (survey.is_empty or allow_fresh):
        raise StepNotFoundError(
            f"{levels.url} holds no step that can be restored: {survey.inventory}"
            + "".join(f"\n  - {text}" for text in (*skipped, *weights_only))
            + "\nNothing was changed. restore(allow_fresh=True) starts from zero beside what is there"
        )
    return Choice(skipped=skipped)


def _line_after(levels: Levels, newer: Sequence[Copy], incarnation: int) -> int:
    """A new incarnation, when this start of the job has itself saved steps that it now goes back behind; else 0.

    Newer means a higher incarnation, then a higher step: without a new one, what comes next would be older than what is
    left behind.
    """
    if not any(copy.found.incarnation >= incarnation > 0 for copy in newer if not copy.why):
        return 0
    note = {"host": platform.node(), "after": incarnation, "started": time.time(), "id": secrets.token_hex(8)}
    return levels.take_incarnation(msgspec.json.encode(note) + b"\n")


def warn_damaged(text: str) -> None:
    """Tells the user that a step was passed over."""
    warnings.warn(f"a damaged step was skipped: {text}", DamageWarning, stacklevel=4)
