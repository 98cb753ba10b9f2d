"""What a load has to say when state and step do not fit, or fit and are not of the same code."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep.errors import MismatchError
from keepstep.format.manifest import Manifest
from keepstep.ranks import Ranks
from keepstep.state.files import FILES, Files
from keepstep.state.provenance import NO_CONFIG, code_revision, differences
from keepstep.state.restore import Binder
from keepstep.state.train_state import TrainState

__all__ = ["changed_since", "mismatch_of", "note_after", "put_together"]

SHOWN_HINTS = 20


def put_together(posted: list[bytes]) -> bytes:
    """What every rank hears of the differences that any of them found: as lines, and keys that no rank has a place for.

    A key that one rank has no place for may have one on another: a stage of a pipeline holds a part of the model.
    """
    each = [msgspec.msgpack.decode(raw, type=tuple[list[str], list[str]]) for raw in posted]
    found: dict[str, list[int]] = {}
    for rank, (mismatches, _) in enumerate(each):
        for text in mismatches:
            found.setdefault(text, []).append(rank)
    lines = [
        text if len(ranks) == len(each) else f"{text} (on rank {', '.join(map(str, ranks))})"
        for text, ranks in found.items()
    ]
    everywhere = set(each[0][1]).intersection(*(surplus for _, surplus in each))
    return msgspec.msgpack.encode((lines, [key for key in each[0][1] if key in everywhere]))


def mismatch_of(manifest: Manifest, url: str, binder: Binder) -> MismatchError:
    """The error that lists all that does not fit, with what may have been meant."""
    worlds = f"(ranks: {manifest.world_size} when saved, {binder.table.world} now)"
    return MismatchError(
        f"step {manifest.step} in {url} {worlds} does not fit the target: {len(binder.mismatches)} differences",
        [*binder.mismatches, *_hints(binder), *binder.notes],
        "Nothing was changed.",
    )


def note_after(into: Mapping[str, Any], binder: Binder) -> None:
    """After everything was given back: which base a state has now, and how the files on the disk differ from the step's."""
    if binder.mark is not None and isinstance(into, TrainState):
        into.left_out_from = binder.mark
    files = into.get(FILES)
    if isinstance(files, Files) and binder.reports[FILES].restored:
        binder.reports[FILES].noted.extend(files.differences())


def changed_since(ranks: Ranks, manifest: Manifest, state: TrainState) -> tuple[str, ...]:
    """How code and configuration differ from those of the step; a side that does not know its own says nothing."""
    code, saved = code_revision() if ranks.leads else "", manifest.versions.code
    notes = [f"code: {saved} when saved, {code} now"] if code and saved and code != saved else []
    if NO_CONFIG not in (state.config_record, bytes(manifest.config)):
        notes.extend(f"config: {text}" for text in differences(bytes(manifest.config), state.config_record))
    return tuple(notes)


def _hints(binder: Binder) -> list[str]:
    """For keys that are missing, the surplus keys that look most like them."""
    surplus = [key for report in binder.reports.values() for key in report.unexpected]
    hints = []
    for report in binder.reports.values():
        for key in report.missing[:SHOWN_HINTS]:
            close = difflib.get_close_matches(key, surplus, n=1, cutoff=0.6)
            if close:
                hints.append(f"{key} may be {close[0]} under another name (rename= maps keys)")
    return hints
