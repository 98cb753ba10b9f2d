"""Which steps may go, and how they go. Runs in one process, after a commit, on committed steps of one run only."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from keepstep.commit.aside import QUARANTINE, Note, read_notes, set_aside
from keepstep.commit.catalog import Catalog, Found, read_manifest, step_storage
from keepstep.commit.pins import PINS
from keepstep.commit.publish import INCARNATIONS, LATEST_NAME, ORDER_NAME, RUN_NAME, TALLY_NAME, is_overtaken
from keepstep.errors import CheckpointError, CorruptError, FormatError, StorageError, UsageError
from keepstep.failpoints import reach
from keepstep.format.manifest import MANIFEST_NAME, parse_step_name, step_name
from keepstep.storage.base import Storage
from keepstep.storage.local import PARTIAL

__all__ = [
    "Fate",
    "Keep",
    "for_space",
    "judge",
    "make_room",
    "remove_step",
    "strays",
    "sweep_failed",
    "sweep_leftovers",
    "warn_untidy",
]

_NOTHING = ".nothing"
"""A name that no blob has. Removing it lets a storage drop a folder that a killed attempt made and never filled, and makes
durable what is seen in one: whoever put a manifest there, or took it away, may have been killed before it was."""
_BLOBS = tuple(f"{name}." for name in (LATEST_NAME, RUN_NAME, ORDER_NAME, TALLY_NAME))
_RECORDS = (*_BLOBS, f"{INCARNATIONS}/", f"{PINS}/", f"{QUARANTINE}/")


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep: a step stays when any of the rules wants it. All that is None, or 0, wants nothing.

    Whatever the rules say, these stay: the newest good step, the one this run was resumed from, pinned ones, those of
    other runs, and damaged ones.

    Args:
        last: the newest this many; None removes no step at all, but for lack of space.
        every: every step whose number is a multiple of this.
        best: this many with the best ``metric`` (as given to ``step``).
        metric: which metric ``best`` looks at.
        mode: ``"min"`` or ``"max"``.
        every_s: the oldest step, and from there always the next that was made at least this many seconds after the last
            one that this rule keeps.
        weights_only_after: of the steps that stay, only so many of the newest keep the files of their optimizers; older ones
            lose them. They can be loaded, but ``restore`` passes them over unless it is asked for one of them.
        min_free_bytes: while the storage has less space than this after a save, the oldest step goes, whichever rule
            wants it.
    """

    last: int | None = 3
    every: int | None = None
    best: int = 0
    metric: str = "loss"
    mode: str = "min"
    every_s: float | None = None
    weights_only_after: int | None = None
    min_free_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuses rules that mean nothing.

        Raises:
            UsageError: lists every count below one, negative number and unknown mode.
        """
        counts = {"last": self.last, "every": self.every, "weights_only_after": self.weights_only_after}
        bad = [f"{name}={count}" for name, count in counts.items() if count is not None and count < 1]
        if self.every_s is not None and not 0 < self.every_s < math.inf:
            bad.append(f"every_s={self.every_s}")
        sizes = {"best": self.best, "min_free_bytes": self.min_free_bytes}
        bad += [f"{name}={count}" for name, count in sizes.items() if count < 0]
        if self.mode not in ("min", "max"):
            bad.append(f"mode={self.mode!r}")
        if bad:
            raise UsageError(f"Keep: {', '.join(bad)} means nothing")


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a step: ``held`` says why it stays whatever the rules say, ``wanted`` which rules want it.

    With neither it goes. ``strip`` says that it stays without the files of its optimizer.
    """

    found: Found
    held: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    strip: bool = False

    @property
    def goes(self) -> bool:
        """Whether nothing keeps it."""
        return not self.held and not self.wanted


def judge(
    catalog: Catalog, keep: Keep, *, run: str, resumed: AbstractSet[int], pinned: AbstractSet[int] = frozenset()
) -> tuple[Fate, ...]:
    """What becomes of every committed step, newest first. Pure.

    Args:
        catalog: the steps that are there.
        keep: the rules.
        run: whose steps are judged; those of other runs stay.
        resumed: steps that this run was restored from.
        pinned: steps that somebody wants to stay.
    """
    mine = [found for found in catalog.steps if found.run == run and not found.damage]
    # (Where every step has lost its optimizer, the newest of them is the best there is.)
    newest = next((found.step for found in mine if not found.dropped), mine[0].step if mine else -1)
    wanted = _wanted(mine, keep)
    fates = []
    staying = 0
    for found in catalog.steps:
        held = [
            why
            for why, holds in (
                ("damaged: somebody should look", bool(found.damage)),
                ("of another run", not found.damage and found.run != run),
                ("newest", found.step == newest),
                ("resumed from", found.step in resumed),
                ("pinned", found.step in pinned),
            )
            if holds
        ]
        reasons = tuple(wanted.get(found.step, ())) if not found.damage and found.run == run else ()
        staying += found in mine and bool(held or reasons)
        late = keep.weights_only_after is not None and staying > keep.weights_only_after
        fates.append(Fate(found, tuple(held), reasons, late and bool(reasons) and not held and not found.dropped))
    return tuple(fates)


def _wanted(mine: Sequence[Found], keep: Keep) -> dict[int, list[str]]:
    """By step, which of the rules want it."""
    wanted: dict[int, list[str]] = {}

    def want(steps: Iterable[int], why: str) -> None:
        for step in steps:
            wanted.setdefault(step, []).append(why)

    if keep.last is None:
        want((found.step for found in mine), "all")
    else:
        want((found.step for found in mine[: keep.last]), f"last {keep.last}")
    if keep.every:
        want((found.step for found in mine if found.step % keep.every == 0), f"every {keep.every}")
    if keep.every_s is not None:
        want(_spaced(mine, keep.every_s), f"every {keep.every_s:g} s")
    if keep.best:
        rated = [(found, (found.metrics or {}).get(keep.metric)) for found in mine]
        sign = 1 if keep.mode == "min" else -1
        ranked = sorted((sign * value, -found.step, found.step) for found, value in rated if value is not None)
        want((step for _, _, step in ranked[: keep.best]), f"best {keep.best} by {keep.metric} ({keep.mode})")
    return wanted


def _spaced(mine: Sequence[Found], every_s: float) -> Iterator[int]:
    """Steps at least so many seconds apart, from the oldest on. One whose time cannot be told stays.

    What it chooses it chooses again once the others are gone.
    """
    times = []
    for found in mine:
        try:
            created = dt.datetime.fromisoformat(found.created)
        except ValueError:
            yield found.step
            continue
        times.append(((created if created.tzinfo else created.replace(tzinfo=dt.UTC)).timestamp(), found.step))
    last = -math.inf
    for created_s, step in sorted(times):
        if created_s - last >= every_s:
            last = created_s
            yield step


def for_space(fates: Sequence[Fate]) -> list[Found]:
    """The steps that may go for lack of space, oldest first: all that stay only because a rule wants them."""
    return [fate.found for fate in reversed(fates) if not fate.held and not fate.goes]


def make_room(root: Storage, steps: Sequence[Found], min_free_bytes: int, incarnation: int) -> int | None:
    """Removes steps, in this order, until so much is free. Returns what is free then; None when it cannot be told.

    ``incarnation``: see ``remove_step``.

    Raises:
        StorageError: a step could not be removed.
    """
    free = root.free_bytes()
    for found in steps:
        if free is None or free >= min_free_bytes:
            break
        remove_step(root, found, incarnation)
        free = root.free_bytes()
    return free


def remove_step(root: Storage, found: Found, incarnation: int) -> None:
    """Removes a step: first its manifest, so that at no instant a step exists whose data is partly gone.

    Nothing happens when a start of the job after ``incarnation``, in whose name this is done, has begun: the step may be the
    one that it has resumed from, or there may be one of its own in this place by now.

    Of the files in its folder only its own go: another attempt may be writing there, after a rollback, and what is nobody's
    is swept at the next start.
    """
    storage = step_storage(root, found.step)
    if is_overtaken(root, incarnation):
        return
    storage.delete([MANIFEST_NAME])
    reach("remove")
    storage.delete([name for name, _ in storage.list("") if f".{found.save_id}." in name])


def sweep_leftovers(root: Storage, catalog: Catalog, incarnation: int) -> None:
    """Removes what killed attempts left: steps never committed, strays beside committed ones, half-written records.

    Call only after taking ``incarnation``, a new one, which fences whoever wrote them. What a start after that one writes is
    not touched: once there is one, this does nothing. Damaged steps stay as they are. On return what the catalog says is
    durable, too: an older start may have been killed between a manifest and its fsync.
    """
    if is_overtaken(root, incarnation):
        return
    committed = {step_name(found.step): found for found in catalog.steps if not found.damage}
    # Ahead of everything else: after a loss of power a manifest that was replaced or removed could be back, its data not.
    root.delete([f"{folder}/{_NOTHING}" for folder in root.folders() if parse_step_name(folder) is not None])
    doomed = []
    beside: dict[str, list[str]] = {}
    there = [name for name, _ in root.list("")]
    # (The catalog may have been read where a machine still remembered that there was none.)
    unfinished = set(catalog.unfinished) - {
        name.partition("/")[0] for name in there if name.endswith(f"/{MANIFEST_NAME}")
    }
    for name in there:
        folder, _, inside = name.partition("/")
        found = committed.get(folder)
        if found is not None:
            own = f".{found.save_id}." in inside and inside.partition("/")[0] not in found.dropped
            if inside != MANIFEST_NAME and not (own and not inside.endswith(PARTIAL)):
                beside.setdefault(folder, []).append(inside)
        elif folder in unfinished or (name.startswith(_RECORDS) and name.endswith(PARTIAL)):
            doomed.append(name)
    for folder, names in sorted(beside.items()):
        # A manifest that does not prove itself says nothing about what may go: its save id may be what is damaged.
        with contextlib.suppress(CorruptError, FormatError):
            doomed.extend(f"{folder}/{name}" for name in strays(root, committed[folder].step, names, catalog.aside))
    # Asked after the look at what is there: then nothing of it was written by a later start.
    if doomed and not is_overtaken(root, incarnation):
        root.delete(doomed)


def strays(root: Storage, step: int, names: Sequence[str], aside: Sequence[Note]) -> list[str]:
    """Those names in the folder of a committed step that belong neither to it nor to one that was put aside.

    Raises:
        CorruptError, FormatError: its manifest does not prove itself.
    """
    manifest = read_manifest(step_storage(root, step))
    kept = {MANIFEST_NAME} | set_aside(aside, step, names)
    own = {name for name in names if f".{manifest.save_id}." in name and name.partition("/")[0] not in manifest.dropped}
    return [name for name in names if name not in kept and (name not in own or name.endswith(PARTIAL))]


def sweep_failed(root: Storage, step: int, incarnation: int) -> None:
    """Removes what a failed attempt left, unless the step is committed after all. Failing here loses nothing: only warns.

    Nor when a start of the job after ``incarnation`` has begun: the files may be of an attempt of its own.
    """
    try:
        names = [name for name, _ in step_storage(root, step).list("")]
        kept = set_aside(read_notes(root), step, names)
        if MANIFEST_NAME not in names and not is_overtaken(root, incarnation):
            # As in sweep_leftovers: first that there is no manifest, then the data.
            step_storage(root, step).delete([_NOTHING])
            step_storage(root, step).delete([name for name in names if name not in kept])
    except StorageError as err:
        warn_untidy(err)


def warn_untidy(err: CheckpointError) -> None:
    """What is kept is safe; what could not be removed only takes space."""
    warnings.warn(f"tidying up failed; committed steps are untouched: {err}", stacklevel=4)
