"""Copies the steps of a run from the near root, where they are committed, to the far one. In whatever process; no torch.

What there is to do is read from the two roots each time, so whoever is killed loses nothing: the next one sees the same
difference. The newest step goes first. What fails is tried again, further and further apart, for as long as it takes;
nobody who saves waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from keepstep.commit.catalog import Catalog, Found, read_catalog, read_manifest, step_storage
from keepstep.commit.conclude import Order, tidy
from keepstep.commit.copying import Copied, copying
from keepstep.commit.pins import pinned_steps
from keepstep.commit.publish import LATEST_NAME, newest_incarnation
from keepstep.commit.retention import sweep_leftovers
from keepstep.commit.uploads import (
    Tally,
    UploadOrder,
    foreign_starts,
    read_order,
    read_tally,
    to_upload,
    waiting_steps,
    write_tally,
)
from keepstep.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    RunOwnedError,
    StepExistsError,
    StepNotFoundError,
)
from keepstep.storage.base import Closing, Storage, read_blob
from keepstep.storage.local import storage_of

__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "Uploader"]

TICK_S = 0.2
CLOSE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
TRIES = 3
"""Of a step that seems to be damaged, or to be in another one's way."""
PATIENCE_S = 86400.0
"""For how long an agent without trainers stays for copies that do not go on."""
MAX_HINT_BYTES = 1 << 16
_log = logging.getLogger("keepstep")


@dataclass(slots=True)
class _Course:
    """What one order has come to. ``seen`` is the hint at the near root when everything was found to be copied.

    ``failed`` counts by save id; steps that fail for good are ``refused``.
    """

    order: UploadOrder
    far: Storage | None
    seen: bytes | None = None
    pause_s: float = 0.0
    due: float = 0.0
    swept: bool = False
    failed: Counter[str] = field(default_factory=Counter)
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)


class Uploader(Closing):
    """Keeps the far root of one near root up to date, on a thread of its own. Any thread may call.

    Args:
        near: the root where steps are committed.
        by: of the orders found there, whose are followed: ``"agent"`` or ``"trainer"``.
        far: the far root, where it cannot be opened by the URL in the order.
    """

    def __init__(self, near: Storage, by: str, far: Storage | None = None) -> None:
        self._near = near
        self._by = by
        self._far = far
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved = time.monotonic()
        self._tally = Tally()

    def look(self) -> None:
        """Begins as soon as there is an order. Never raises."""
        if self._thread is None and self._order() is not None:
            self._thread = threading.Thread(target=self._run, name="keepstep-upload", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something waits, and there is hope: it has moved within a day."""
        waits = bool(self._tally.waiting) and self._thread is not None
        return waits and time.monotonic() - self._moved < PATIENCE_S

    @property
    def tally(self) -> Tally | None:
        """What is known; None where nothing is copied."""
        return None if self._thread is None else self._tally

    def close(self) -> None:
        """Stops between two parts of a step; what was sent of it stays, and is not sent again. Idempotent."""
        self._over.set()
        if self._thread is not None:
            # (A request that hangs is left alone: the thread ends with the process.)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        course: _Course | None = None
        while not self._over.wait(TICK_S):
            order = self._order()
            if order is None:
                continue
            if course is None or course.order != order:
                course = _Course(
                    order, course.far if course is not None and course.order.url == order.url else self._far
                )
            if time.monotonic() < course.due:
                continue
            try:
                hint = self._hint()
                if course.pause_s or hint != course.seen:
                    while self._advance(course) and not self._over.is_set():
                        pass
                    course.seen, course.pause_s = hint, 0.0
            except Exception as err:  # noqa: BLE001  thread entry: whatever it is, it is tried again
                self._put_off(course, err)

    def _advance(self, course: _Course) -> bool:
        """Copies one step, the newest that waits. False when nothing is left to do."""
        order, near = course.order, self._near
        if course.far is None:
            course.far = storage_of(order.url)
        far = course.far
        here = read_catalog(near)
        self._count(order, here)
        foreign = foreign_starts(near, far, {found.incarnation for found in here.steps} | {order.incarnation})
        if order.incarnation in foreign:
            raise _overtaken(order)
        _check_not_overtaken(far, order)
        there = read_catalog(far)
        todo, passed = to_upload(here, there, order.keep, pinned_steps(near) | pinned_steps(far), foreign)
        refused = {step: why for step, why in course.refused.items() if self._is_here(here, step, why[0])}
        todo = tuple(found for found in todo if found.step not in refused)
        self._note(order, here, there, passed | refused, todo)
        if not todo:
            if not course.swept:
                # Not before: what a copy that was cut off has left is not to be sent again.
                sweep_leftovers(far, there, order.incarnation)
                course.swept = True
            return False
        try:
            copied = self._copy(order, far, todo[0])
        except (CorruptError, FormatError, StepExistsError) as err:
            course.failed[todo[0].save_id] += 1
            if course.failed[todo[0].save_id] < TRIES:
                # It may be the far root that was in disorder for a moment.
                raise
            course.refused[todo[0].step] = todo[0].save_id, str(err)
            _log.warning("step %d is not copied to %s: %s", todo[0].step, far.url, err)
            return True
        except StepNotFoundError as err:
            _log.info("%s", err)
            return True
        if copied is not None:
            self._conclude(order, far, todo, copied)
        return copied is not None

    def _copy(self, order: UploadOrder, far: Storage, found: Found) -> Copied | None:
        """One step; None when this has to stop.

        Raises:
            RunOwnedError: another start of the job has begun meanwhile; the step was not committed there.
            See ``copying`` for the rest.
        """
        copied = None
        with contextlib.closing(copying(self._near, far, found.step)) as parts:
            for copied in parts:
                self._moved = time.monotonic()
                if self._over.is_set() and not copied.outcome:
                    return None
                if copied.files + copied.kept_files == copied.total_files and not copied.outcome:
                    # The manifest is next.
                    _check_not_overtaken(far, order)
        return copied

    def _conclude(self, order: UploadOrder, far: Storage, todo: tuple[Found, ...], copied: Copied) -> None:
        """Notes that the step is there, and lets old ones go by the far root's rules."""
        tally = self._tally
        waiting = tuple(one for one in tally.waiting if one[0] != copied.step)
        there = {**tally.there, copied.step: copied.save_id}
        self._tell(Tally(order.url, order.incarnation, there, tally.passed, waiting))
        _log.info(
            "step %d copied to %s: %s bytes, %.2f s; %d steps (%s bytes) still to go",
            copied.step,
            far.url,
            f"{copied.bytes:,}",
            copied.seconds,
            len(waiting),
            f"{sum(size for _, size in waiting):,}",
        )
        manifest = read_manifest(step_storage(far, copied.step))
        parent = todo[0].parent
        try:
            tidy(far, Order(manifest, in_run=True, keep=order.keep, protect=(parent,) if parent >= 0 else ()), manifest)
        except CheckpointError as err:
            _log.warning("tidying up %s failed; committed steps are untouched: %s", far.url, err)

    def _note(
        self,
        order: UploadOrder,
        here: Catalog,
        there: Catalog,
        passed: dict[int, tuple[str, str]],
        todo: tuple[Found, ...],
    ) -> None:
        ids = {found.step: found.save_id for found in there.steps}
        same = {found.step: found.save_id for found in here.steps if ids.get(found.step) == found.save_id}
        sizes = dict(self._tally.waiting)
        waiting = tuple((found.step, sizes.get(found.step) or self._size(found.step)) for found in todo)
        self._tell(Tally(order.url, order.incarnation, same, passed, waiting))

    def _size(self, step: int) -> int:
        try:
            return read_manifest(step_storage(self._near, step)).total_bytes
        except CheckpointError:
            return 0

    def _tell(self, tally: Tally) -> None:
        if tally != self._tally:
            write_tally(self._near, tally)
            self._tally = tally

    def _count(self, order: UploadOrder, here: Catalog, trouble: str = "") -> None:
        """What waits as far as is known here, before the far root is asked; it may not answer for long."""
        before = read_tally(self._near)
        sizes = dict(before.waiting)
        waiting = waiting_steps(here, before)
        counted = tuple((found.step, sizes.get(found.step) or self._size(found.step)) for found in waiting)
        why = trouble or (before.trouble if waiting else "")
        self._tell(Tally(order.url, order.incarnation, before.there, before.passed, counted, why))

    def _put_off(self, course: _Course, err: Exception) -> None:
        """The next try is later."""
        course.pause_s = min(LONGEST_PAUSE_S, 2 * course.pause_s) or FIRST_PAUSE_S
        course.due = time.monotonic() + course.pause_s * random.uniform(0.75, 1.0)
        try:
            known = self._tally.trouble
            self._count(course.order, read_catalog(self._near), str(err))
            if known != str(err):
                waiting = len(self._tally.waiting)
                _log.warning("copies to %s wait (%d steps), and are tried again: %s", course.order.url, waiting, err)
        except CheckpointError as again:
            _log.warning("%s: %s", self._near.url, again)

    def _order(self) -> UploadOrder | None:
        """The order, if it is for whoever this is."""
        try:
            order = read_order(self._near)
        except CheckpointError:
            return None
        return order if order is not None and order.by == self._by else None

    def _hint(self) -> bytes:
        """What changes with each commit at the near root."""
        try:
            return read_blob(self._near, LATEST_NAME, MAX_HINT_BYTES)
        except CheckpointError:
            return b""

    @staticmethod
    def _is_here(here: Catalog, step: int, save_id: str) -> bool:
        return any((found.step, found.save_id) == (step, save_id) for found in here.steps)


def _check_not_overtaken(far: Storage, order: UploadOrder) -> None:
    """Whoever starts takes the next incarnation at the far root: from then on nothing of this one may appear there."""
    if newest_incarnation(far) > order.incarnation:
        raise _overtaken(order)


def _overtaken(order: UploadOrder) -> RunOwnedError:
    return RunOwnedError(
        f"{order.url}: the run has gone on elsewhere since this start of the job (incarnation {order.incarnation}) began;"
        " what it has saved since is not copied"
    )
