"""Two roots of one run: a near one, where steps are committed, and a far one, to which they are copied after that.

The run's folder at the near root has two records more. The order says where to copy to, by which rules, and in whose name;
a start of the job writes it. The tally says what was found to be there; whoever copies writes it, and it may be lost: what
waits is what is committed here and not there. Rules and decisions only, no copying; imports no torch.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TypeVar

import msgspec

from keepstep.commit.catalog import Catalog, Found
from keepstep.commit.publish import INCARNATIONS, ORDER_NAME, TALLY_NAME, put_note
from keepstep.commit.retention import Keep, judge
from keepstep.errors import CorruptError, StorageError
from keepstep.storage.base import Storage, read_blob

__all__ = [
    "Tally",
    "UploadOrder",
    "foreign_starts",
    "read_order",
    "read_tally",
    "starts_at",
    "to_upload",
    "unsent_steps",
    "waiting_steps",
    "write_order",
    "write_tally",
]

MAX_RECORD_BYTES = 1 << 24
MAX_NOTE_BYTES = 1 << 16
_Record = TypeVar("_Record")


class UploadOrder(msgspec.Struct, frozen=True):
    """What a start of the job wants: copies at ``url``, as far as ``keep`` wants them there, in the name of ``incarnation``.

    ``by`` is who copies: ``"agent"`` or ``"trainer"``.
    """

    url: str
    keep: Keep
    incarnation: int
    by: str


class Tally(msgspec.Struct, frozen=True):
    """Save ids by step: of those that are at the far root, and of those that are not going there and why.

    ``incarnation`` is that of the order by which it was made; a start that reaches the far root begins with an empty tally.
    ``waiting`` lists (step, bytes) of the others, newest first, as it was when this was written. ``trouble`` says why they
    do not go on; empty while they do.
    """

    url: str = ""
    incarnation: int = 0
    there: dict[int, str] = {}
    passed: dict[int, tuple[str, str]] = {}
    waiting: tuple[tuple[int, int], ...] = ()
    trouble: str = ""


def write_order(near: Storage, order: UploadOrder) -> None:
    """Durable on return."""
    near.put(ORDER_NAME, msgspec.json.encode(order) + b"\n")


def read_order(near: Storage) -> UploadOrder | None:
    """The order; None where steps stay, or where it cannot be read."""
    return _read(near, ORDER_NAME, UploadOrder)


def write_tally(near: Storage, tally: Tally) -> None:
    """One writer at a time."""
    near.put(TALLY_NAME, msgspec.json.encode(tally) + b"\n")


def read_tally(near: Storage) -> Tally:
    """The tally; an empty one where there is none, or one that cannot be read."""
    return _read(near, TALLY_NAME, Tally) or Tally()


def to_upload(
    here: Catalog, there: Catalog, keep: Keep, pinned: AbstractSet[int], foreign: AbstractSet[int]
) -> tuple[tuple[Found, ...], dict[int, tuple[str, str]]]:
    """The steps to be copied, newest first; and those that are here, not there, and stay here, with the reason. Pure.

    What is copied is what the far root would keep if it had everything.

    Args:
        here: steps at the near root.
        there: steps at the far root.
        keep: the rules of the far root.
        pinned: steps pinned at either.
        foreign: incarnations that are another start of the job at the far root than here.
    """
    far = {found.step: found for found in there.steps}
    passed: dict[int, tuple[str, str]] = {}
    absent: dict[int, Found] = {}
    for found in here.steps:
        other = far.get(found.step)
        if found.damage:
            passed[found.step] = found.save_id, "it is damaged"
        elif found.incarnation in foreign:
            passed[found.step] = found.save_id, "the run has gone on elsewhere from an older step"
        elif other is None or (other.save_id != found.save_id and other.order <= found.order):
            absent[found.step] = found
        elif other.save_id != found.save_id:
            passed[found.step] = found.save_id, "a newer step of this number is there"
    every = sorted([*absent.values(), *(f for f in there.steps if f.step not in absent)], key=_order, reverse=True)
    unwanted = _unwanted(Catalog(tuple(every), ()), absent, keep, pinned)
    passed |= {step: (absent[step].save_id, "the rules for copies do not want it") for step in unwanted}
    return tuple(found for found in every if found.step in absent.keys() - unwanted), passed


def waiting_steps(here: Catalog, tally: Tally) -> tuple[Found, ...]:
    """The steps of which nobody has said yet that they are at the far root, or not wanted there; newest first."""
    return tuple(
        found
        for found in here.steps
        if not found.damage
        and tally.there.get(found.step) != found.save_id
        and tally.passed.get(found.step, ("",))[0] != found.save_id
    )


def unsent_steps(near: Storage, here: Catalog, keep: Keep, pinned: AbstractSet[int]) -> frozenset[int]:
    """The steps that must not leave the near root yet, because the far one wants them and they are not known to be there.

    Asks the near root alone: while the far one cannot be reached, saves go on.
    """
    waiting = {found.step: found for found in waiting_steps(here, read_tally(near))}
    if keep.every_s is not None:
        # Which ones that rule wants depends on what is there.
        return frozenset(waiting)
    return frozenset(waiting.keys() - _unwanted(here, waiting, keep, pinned))


def starts_at(root: Storage) -> set[int]:
    """All incarnations of a root."""
    return {int(name[-6:]) for name, _ in root.list(INCARNATIONS) if name[-6:].isdigit()}


def foreign_starts(near: Storage, far: Storage, used: Iterable[int]) -> frozenset[int]:
    """Incarnations at the near root that are somebody else's at the far one. Those nobody has there are taken there now.

    A start that could not reach the far root has taken its number here alone. When nobody has taken it there meanwhile, it
    is taken now. Else the run has gone on from what was there, and this start, with all that came from it, is not part of
    it: a number then names one start here and another one there.

    Args:
        near: where this job saves.
        far: where the run is the same for everybody.
        used: incarnations of steps at the near root.

    Raises:
        StorageError: one of them cannot be read or written; nothing else was changed.
    """
    here, there = starts_at(near), starts_at(far)
    top = max(there, default=0)
    # All that nobody else can have taken are later than the last one that both have; that one has to be the same.
    shared = {max((number for number in here if number <= top), default=0)} - {0}
    foreign: set[int] = set()
    for number in sorted((shared | {*used} | {number for number in here if number > top}) & here):
        note = _note(near, number)
        if number not in there and (number < top or foreign):
            # It was passed over by whoever took the next.
            foreign.add(number)
        elif number not in there and put_note(far, f"{INCARNATIONS}/{number:06d}", note):
            continue
        elif _note(far, number) != note:
            foreign.add(number)
    return frozenset(foreign)


def _order(found: Found) -> tuple[int, int]:
    return found.order


def _unwanted(every: Catalog, absent: dict[int, Found], keep: Keep, pinned: AbstractSet[int]) -> set[int]:
    """Those absent that would be removed where everything is."""
    gone = set()
    for run in {found.run for found in absent.values()}:
        for fate in judge(every, keep, run=run, resumed=frozenset(), pinned=pinned):
            if fate.goes and absent.get(fate.found.step) == fate.found:
                gone.add(fate.found.step)
    return gone


def _note(root: Storage, number: int) -> bytes:
    return read_blob(root, f"{INCARNATIONS}/{number:06d}", MAX_NOTE_BYTES)


def _read(near: Storage, name: str, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(read_blob(near, name, MAX_RECORD_BYTES), type=kind)
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, CorruptError, ValueError):
        return None
