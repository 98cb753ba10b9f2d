"""How far the copies are behind, for whoever trains; and the copying itself, where no agent can do it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from keepstep.agent.uploader import Uploader
from keepstep.commit.catalog import read_catalog, read_manifest, step_storage
from keepstep.commit.uploads import read_tally, waiting_steps
from keepstep.copies.levels import Levels
from keepstep.errors import CheckpointError, CommitTimeoutError
from keepstep.storage.base import Closing

__all__ = ["Behind", "Uploads"]

LOOK_S = 0.05
CLOSE_S = 60.0
"""How long ``close`` waits for copies that this process makes."""
_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Behind:
    """The steps that are committed locally and not copied yet, newest first. ``trouble`` says what went wrong last."""

    steps: tuple[int, ...]
    bytes: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        """One line for a log."""
        if not self.steps:
            return "every step is copied"
        shown = ", ".join(map(str, self.steps[:5])) + (", …" if len(self.steps) > 5 else "")
        why = f"; the last try: {self.trouble}" if self.trouble else ""
        return f"{len(self.steps)} steps ({self.bytes:,} bytes) are not copied yet: {shown}{why}"


class Uploads(Closing):
    """The copies of a run's steps from its local root to the other one. Not collective; any thread.

    What is known of them is on the local disk: asking costs no request.

    Args:
        levels: both roots.
        copies: whether this process makes the copies.
    """

    def __init__(self, levels: Levels, *, copies: bool) -> None:
        self._near = levels.near
        self._url = levels.url if levels.far is None else levels.far.url
        self._uploader = Uploader(levels.near, "trainer", levels.far) if copies else None
        if self._uploader is not None:
            self._uploader.look()

    def behind(self) -> Behind:
        """What is not copied yet, of the steps committed so far.

        Raises:
            StorageError: the local root cannot be read.
        """
        tally = read_tally(self._near)
        waiting = tuple(found.step for found in waiting_steps(read_catalog(self._near), tally))
        sizes = dict(tally.waiting)
        total = sum(sizes.get(step) or self._size(step) for step in waiting)
        return Behind(waiting, total, tally.trouble if waiting else "")

    def wait(self, timeout_s: float = 600.0) -> None:
        """Waits until every step that is committed locally is copied, as far as the rules for copies want it.

        Raises:
            CommitTimeoutError: that has taken longer; says what is left, and why. It goes on.
        """
        end = time.monotonic() + timeout_s
        while (behind := self.behind()).steps:
            if time.monotonic() >= end:
                raise CommitTimeoutError(
                    f"after {timeout_s:g} s, {behind} (to {self._url}). Nothing is lost: they are in {self._near.url}, and"
                    " are copied as soon as that is possible",
                    (),
                )
            time.sleep(LOOK_S)

    def _size(self, step: int) -> int:
        try:
            return read_manifest(step_storage(self._near, step)).total_bytes
        except CheckpointError:
            # It has just been removed, or is damaged.
            return 0

    def close(self) -> None:
        """Where this process makes the copies: waits for a minute at most, and tells what is left. Idempotent."""
        if self._uploader is None:
            return
        uploader, self._uploader = self._uploader, None
        try:
            self.wait(CLOSE_S)
        except CheckpointError as err:
            _log.warning("%s; the next start of the job goes on with it", err)
        finally:
            uploader.close()
