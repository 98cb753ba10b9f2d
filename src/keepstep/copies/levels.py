"""The one or two roots of a run. Steps are committed at the near one; where there is a far one, they are copied to it.

The far root is the run: its id and its incarnations are what counts, and a start of the job takes the next one there. The
near root holds the same records. All of this is the coordinator's; the other ranks are told. Imports no torch.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field

from keepstep.commit.catalog import Catalog, Found, read_catalog
from keepstep.commit.publish import INCARNATIONS, RUN_NAME, new_incarnation, newest_incarnation, put_note, run_of
from keepstep.commit.retention import Keep
from keepstep.commit.uploads import Tally, UploadOrder, foreign_starts, write_order, write_tally
from keepstep.errors import MismatchError, StorageError
from keepstep.format.manifest import step_name
from keepstep.storage.base import Storage, read_blob

__all__ = ["Copy", "Levels", "Survey", "levels_of"]

MAX_RECORD_BYTES = 1 << 16
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.ENODEV, errno.EINVAL, errno.EDQUOT})
"""What does not pass by itself: no bucket, no right to it."""
_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Copy:
    """A committed step as it is at one level, 0 for the near root. ``label`` tells it from other copies in messages.

    ``again`` says that there is another copy of it, farther away. ``why`` is set when it is not part of the run any more.
    """

    found: Found
    level: int
    label: str
    again: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What is there: copies of committed steps, the newest step first, then the nearest copy; and the catalogs by URL."""

    copies: tuple[Copy, ...]
    catalogs: tuple[tuple[str, Catalog], ...]

    @property
    def inventory(self) -> str:
        """All of it in one line."""
        if len(self.catalogs) == 1:
            return self.catalogs[0][1].inventory()
        return "; ".join(f"{url}: {catalog.inventory()}" for url, catalog in self.catalogs)

    @property
    def is_empty(self) -> bool:
        """Whether no step is anywhere: committed, unfinished or put aside."""
        return not any(catalog.steps or catalog.unfinished or catalog.aside for _, catalog in self.catalogs)


@dataclass(frozen=True, slots=True)
class Levels:
    """The roots. ``keep`` are the rules of the far one; ``by`` is who copies, ``"agent"`` or ``"trainer"``.

    ``away`` says that the far root could not be reached as the job started: then it goes on with what is near.
    """

    near: Storage
    far: Storage | None = None
    keep: Keep = field(default_factory=Keep)
    by: str = "trainer"
    away: bool = False

    @property
    def url(self) -> str:
        """What a person would call all of it."""
        return self.near.url if self.far is None else f"{self.near.url} and {self.far.url}"

    @property
    def places(self) -> tuple[Storage, ...]:
        """The roots that can be read, nearest first."""
        return (self.near,) if self.far is None or self.away else (self.near, self.far)

    def is_away(self) -> bool:
        """Whether the far root cannot be reached now, and there is something near to go on with.

        Raises:
            StorageError: it cannot be reached, and nothing is near; or there is none, or these credentials may not read it.
        """
        if self.far is None:
            return False
        try:
            run_of(self.far)
        except StorageError as err:
            if err.errno in _LASTING or run_of(self.near) is None or not read_catalog(self.near).steps:
                raise
            _log.warning(
                "%s cannot be reached; the run goes on with the steps in %s. Should it have gone on elsewhere meanwhile,"
                " what this start saves stays there: %s",
                self.far.url,
                self.near.url,
                err,
            )
            return True
        return False

    def join_run(self, about: bytes) -> str:
        """The id of the run that is here. Where none is yet, ``about`` is its record.

        Raises:
            MismatchError: the roots hold two runs.
        """
        places = self.places[::-1]
        runs = [run_of(place) for place in places]
        if len({*runs} - {None}) > 1:
            lines = [f"{place.url}: run {run}" for place, run in zip(places, runs, strict=True)]
            raise MismatchError("one run needs a local folder of its own; nothing was changed:", lines)
        if None in runs:
            known = [place for place, run in zip(places, runs, strict=True) if run is not None]
            record = read_blob(known[0], RUN_NAME, MAX_RECORD_BYTES) if known else about
            # (Of two that come at once, one is faster; then both are the same run.)
            taken = [put_note(place, RUN_NAME, record) for place, run in zip(places, runs, strict=True) if run is None]
            if not all(taken):
                return self.join_run(about)
        return run_of(self.near) or ""

    def has_steps(self) -> bool:
        """Whether any step is committed at either root."""
        return any(read_catalog(place).steps for place in self.places)

    def take_incarnation(self, note: bytes) -> int:
        """The next incarnation, at both roots; at the near one alone while the far one is away. ``note`` has a random id.

        From then on nothing of an earlier start appears at the far root.
        """
        if self.far is None:
            return new_incarnation(self.near, note)
        if self.away:
            number = new_incarnation(self.near, note)
        else:
            # Numbers that starts before this one have taken here alone become theirs there, before this one takes the next.
            foreign_starts(self.near, self.far, ())
            number = new_incarnation(self.far, note, above=newest_incarnation(self.near))
            put_note(self.near, f"{INCARNATIONS}/{number:06d}", note)
        write_order(self.near, UploadOrder(self.far.url, self.keep, number, self.by))
        if not self.away:
            # What was found there before this start may be gone since.
            write_tally(self.near, Tally())
        return number

    def note_of(self, incarnation: int) -> bytes:
        """What the start of that incarnation has left at the near root; empty where it is not known."""
        try:
            return read_blob(self.near, f"{INCARNATIONS}/{incarnation:06d}", MAX_RECORD_BYTES)
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
            return b""

    def survey(self) -> Survey:
        """Looks at every level. Starts that could not reach the far root get their numbers there; nothing else changes."""
        catalogs = tuple((place.url, read_catalog(place)) for place in self.places)
        near = catalogs[0][1]
        if len(catalogs) == 1:
            return Survey(tuple(Copy(found, 0, step_name(found.step)) for found in near.steps), catalogs)
        far = catalogs[1][1]
        there = {found.step: found.save_id for found in far.steps if not found.damage}
        foreign = self._foreign(near)
        found = [
            Copy(
                one,
                0,
                f"{step_name(one.step)} (local)",
                again=one.step in there and (bool(one.damage) or there[one.step] == one.save_id),
                why="the run has gone on elsewhere from an older step" if one.incarnation in foreign else "",
            )
            for one in near.steps
        ]
        found += [Copy(one, 1, f"{step_name(one.step)} (remote)") for one in far.steps]
        return Survey(tuple(sorted(found, key=lambda copy: (*copy.found.order, -copy.level), reverse=True)), catalogs)

    def _foreign(self, near: Catalog) -> frozenset[int]:
        if self.far is None:
            return frozenset()
        return foreign_starts(self.near, self.far, {found.incarnation for found in near.steps})


def levels_of(root: Storage | Levels) -> Levels:
    """A root alone is one level."""
    return root if isinstance(root, Levels) else Levels(root)
