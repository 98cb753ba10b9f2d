"""Where a run stands among the steps of its root: its lineage, the step it was restored from, the last one it saved."""

from __future__ import annotations

from keepstep.commit.catalog import Found, read_catalog
from keepstep.commit.retention import sweep_leftovers, warn_untidy
from keepstep.errors import StorageError
from keepstep.format.manifest import Lineage, Manifest, Parent
from keepstep.storage.base import Storage

__all__ = ["Course", "tidy_after_restore"]


class Course:
    """The course of one start of a run. ``failed`` is the step of the last save when that one failed; -1 stands for none."""

    def __init__(self, lineage: Lineage, *, overwrite: bool) -> None:
        self.lineage = lineage
        self.saved = self.failed = -1
        self._overwrite = overwrite
        self._restored_from: Found | None = None

    @property
    def protected(self) -> tuple[int, ...]:
        """Steps that stay whatever the rules say: the one resumed from."""
        return () if self._restored_from is None else (self._restored_from.step,)

    @property
    def unused(self) -> bool:
        """Whether this start has neither restored nor begun to save anything yet.

        Only then is everything unfinished of older ones: a save of its own that was given up may still be committed.
        """
        return self.saved < 0 and self.failed < 0

    def adopt(self, manifest: Manifest, incarnation: int = 0) -> None:
        """Goes on with the run of the restored step; in this incarnation, when it is another than before."""
        lineage = manifest.lineage
        self._restored_from = Found(manifest.step, lineage.run, lineage.incarnation)
        parent = Parent(lineage.run, lineage.incarnation, manifest.step)
        self.lineage = Lineage(lineage.run, incarnation or self.lineage.incarnation, parent)
        self.saved = manifest.step

    def behind(self, step: int) -> str:
        """Why this step cannot be saved now; empty when it can: within one start of the job the larger number is newer."""
        restored = self._restored_from
        if step >= self.saved or (restored is not None and restored.step == self.saved):
            return ""
        return (
            f"step {step} comes before step {self.saved}, which this start of the job has saved: it would never be the"
            " newest, and would go before that one does. To go back, call restore(step=...)"
        )

    def may_replace(self, step: int, *, inside: bool) -> bool:
        """Whether a committed step of this number may be replaced: one that this run has left behind by a rollback.

        ``inside`` the update after it, the step itself is behind, saved or restored.
        """
        restored = self._restored_from
        if self._overwrite:
            return True
        if self.saved == step:
            return inside or restored is None or restored.step != step
        return restored is not None and step > restored.step


def tidy_after_restore(root: Storage, incarnation: int) -> None:
    """Removes what older starts left unfinished: the incarnation of this one fences them. On the coordinator."""
    try:
        sweep_leftovers(root, read_catalog(root), incarnation)
    except StorageError as err:
        warn_untidy(err)
