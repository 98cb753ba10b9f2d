"""What a load is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from keepstep.checkpointer.rename import Rename
from keepstep.state.casting import Cast
from keepstep.state.report import ComponentReport
from keepstep.storage.local import Place

__all__ = ["Cast", "Demanded", "LoadReport", "Options", "Selected", "Selection", "selection_of"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. ``step`` is the step restored, 0 on a fresh run (``fresh`` is True then).

    ``bytes_read``, ``bytes_received`` and ``bytes_needed`` are of this rank: from storage, from ranks that have read them
    for it too (see ``share_reads``), and of the tensors it asked for. ``components`` says for each part what was restored,
    cast, missing, unexpected, reset or re-derived; ``seconds`` where the time went.
    ``notes`` are what else a person should know, such as patterns that fit nothing. Of a dry run (``dry``) nothing was read:
    ``files`` are those that would be, with the bytes of them that are needed, and ``rank_bytes`` how many each rank needs.
    ``base`` stands for the values of what the state leaves out of its steps, when all of them are from this step.
    ``changed`` says how code (on rank 0) and configuration differ from those that the step was saved with. ``incarnation``
    (of a ``restore``) is the one in which the run goes on.
    """

    step: int
    url: str = ""
    fresh: bool = False
    saved_world: int = 1
    world: int = 1
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_needed: int = 0
    components: Mapping[str, ComponentReport] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    incarnation: int = 0
    notes: tuple[str, ...] = ()
    dry: bool = False
    files: Mapping[str, int] = field(default_factory=dict)
    rank_bytes: tuple[int, ...] = ()
    base: str = ""

    def __str__(self) -> str:
        """A few lines for a log."""
        if self.fresh:
            return "fresh run: no step to restore"
        did = "a dry run: would restore" if self.dry else "restored"
        lines = [f"{did} step {self.step} from {self.url} (ranks: {self.saved_world} when saved, {self.world} now)"]
        for name, part in self.components.items():
            notes = [f"{part.restored} restored"] if not part.skipped else ["left out"]
            for label in ("cast", "resized", "overridden", "missing", "unexpected", "reset", "rederived"):
                listed: list[str] = getattr(part, label)
                if listed:
                    notes.append(f"{len(listed)} {label} ({', '.join(listed[:3])}{', …' if len(listed) > 3 else ''})")
            lines.append(f"  {name}: {', '.join(notes)}")
            lines.extend(f"    {count} {kind}" for kind, count in part.conversions.items())
            lines.extend(f"    {note}" for note in part.noted)
        if self.dry:
            needed = (f"{count:,} bytes (rank {rank})" for rank, count in enumerate(self.rank_bytes))
            lines.append(f"  reads {', '.join(needed)}")
            lines.extend(f"    {count:,} bytes of {name}" for name, count in self.files.items())
        lines.extend(f"  note: {text}" for text in self.notes)
        lines.extend(f"  changed {text}" for text in self.changed)
        lines.extend(f"  skipped {text}" for text in self.skipped)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which keys to load, under which names, what may differ, and values to set instead of saved ones.

    Patterns are as in ``format.globs``. ``left_out`` is the step that has what was left out of this one, and ``completed``
    are the patterns of what has come from it.
    """

    only: Sequence[str] | None = None
    rename: Rename | None = None
    allow_missing: Sequence[str] = ()
    allow_extra: Sequence[str] = ()
    override: Mapping[str, Any] | None = None
    left_out: Place | None = None
    completed: tuple[str, ...] = ()
    allow_resized: Sequence[str] = ()


class Demanded(tuple[str, ...]):
    """Keys to load because another step has left them out: every one of them has to be there."""

    __slots__ = ()


class Selected(TypedDict, total=False):
    """The fields of a Selection, as keywords."""

    only: Sequence[str] | None
    rename: Rename | None
    allow_missing: Sequence[str]
    allow_extra: Sequence[str]
    allow_resized: Sequence[str]
    override: Mapping[str, Any] | None
    left_out: Place | None


def selection_of(fields: Selected) -> Selection | None:
    """These fields; None when there are none."""
    return Selection(**fields) if fields else None


@dataclass(frozen=True, slots=True)
class Options:
    """How to load: how strict, whether dtypes may be converted, shared reads, a look alone; None selects everything."""

    strict: bool = True
    cast: Cast = False
    share_reads: bool | None = None
    dry_run: bool = False
    selection: Selection | None = None
