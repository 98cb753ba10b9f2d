"""Whose value a rank gets of those that every rank has of its own, when it is loaded on any number of ranks. Pure.

In: what was saved, by how many ranks; what the target says; which rank this is. Out: a ``Choice``. Every rank comes to the
same words about all ranks, so that the report of one tells of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np

from keepstep.format.objects import RankRef, encode
from keepstep.format.shardfile import digest
from keepstep.state.marks import PLAIN, RULES, Coordinates, PerRank, Rule, Scope

__all__ = ["Choice", "choose", "rank_ref", "seed_of"]

FUNCTION = "function"
"""What is stored of a rule that is a function."""
SHOWN_PLACES = 8
_STRIDE = 0x9E3779B97F4A7C15
"""Odd: so seeds of different places differ, even in their lower 32 bits alone, which is all that some generators use."""

_NOWHERE = Coordinates((), (), ())


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of one value on one rank.

    ``action`` is ``take`` (that of the one rank in ``owners``), ``call`` (the rule, with the values of all owners),
    ``derive`` (new streams), or ``keep`` (what the target has). ``new`` says which places have no saved value, ``gone``
    which saved values have no place; ``problem`` why nothing can be loaded. ``here`` is where this rank is and ``saved``
    where the owners were.
    """

    action: str = "keep"
    owners: tuple[int, ...] = ()
    new: str = ""
    gone: str = ""
    problem: str = ""
    rule: Rule = "error"
    here: Coordinates = _NOWHERE
    saved: tuple[Coordinates, ...] = ()


def rank_ref(path: str, mark: PerRank) -> RankRef:
    """What is stored in the place of a value that ranks have of their own."""
    rule = mark.on_world_change if isinstance(mark.on_world_change, str) else FUNCTION
    scope = mark.scope
    return RankRef(path, rule) if scope is None else RankRef(path, rule, scope.names, scope.sizes, scope.owners())


def choose(ref: RankRef, target: Any, *, saved_world: int, rank: int, world: int) -> Choice:
    """What becomes of the value of ``ref`` on this rank. The rule of the target decides, else the one that was saved."""
    mark = target if type(target) is PerRank else None
    names, sizes = ref.names or PLAIN, ref.sizes or (saved_world,)
    if mark is None and ref.names:
        what = " and ".join(ref.names)
        return Choice(problem=f"saved once for each {what}; mark the target with ks.per_rank(..., mesh=..., dims=...)")
    scope = (mark.scope if mark is not None else None) or Scope(PLAIN, (world,), tuple(range(world)))
    if len(scope.places) != world:
        return Choice(problem=f"the mesh of the target's per_rank holds {len(scope.places)} ranks, there are {world}")
    owners = ref.owners or tuple(range(saved_world))
    here = _coordinates(scope.names, scope.sizes, scope.places[rank])
    rule = mark.on_world_change if mark is not None else ref.rule
    translatable = set(names) == set(scope.names)
    now = tuple(here.size(name) for name in names) if translatable else ()
    if now == sizes:
        return Choice("take", (owners[_place(here, names, sizes)],))
    if callable(rule):
        saved = tuple(_coordinates(names, sizes, place) for place in range(len(owners)))
        return Choice("call", owners, rule=rule, here=here, saved=saved)
    before, after = _grid(names, sizes), _grid(scope.names, scope.sizes)
    if not translatable:
        text = (
            f"saved per rank on {before}, the target is per rank on {after}; only a function as its rule can tell more"
        )
        return Choice(problem=text)
    if rule == "error" or rule not in RULES:
        return Choice(problem=_refusal(rule, before, f"there are {world}" if scope.names == PLAIN else after))
    new, gone = _beyond(names, now, sizes), _beyond(names, sizes, now)
    if all(here[name] < size for name, size in zip(names, sizes, strict=True)):
        return Choice("take", (owners[_place(here, names, sizes)],), new, gone, rule=rule, here=here)
    return Choice("keep" if rule == "same_rank" else rule, owners[:1], new, gone, rule=rule, here=here)


def seed_of(value: Any, key: str, step: int, here: Coordinates) -> int:
    """64 bits for a new stream: the same at every load of a step, and others for every place, key, step and size.

    So a world that shrinks and grows again does not go over the streams that it had before.
    """
    # By name, so that the order in which a mesh lists its dimensions does not matter.
    names = tuple(sorted(here.names))
    sizes = tuple(here.size(name) for name in names)
    base = digest(encode([key, step, names, sizes, value], refused=[]))
    return (base + _place(here, names, sizes) * _STRIDE) % (1 << 64)


def _coordinates(names: tuple[str, ...], sizes: tuple[int, ...], place: int) -> Coordinates:
    return Coordinates(names, tuple(map(int, np.unravel_index(place, sizes))), sizes)


def _place(here: Coordinates, names: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    """The number of these coordinates in a grid, row-major."""
    place = 0
    for name, size in zip(names, sizes, strict=True):
        place = place * size + here[name]
    return place


def _refusal(rule: Rule, before: str, now: str) -> str:
    text = f"saved per rank on {before}, now {now}"
    if rule == FUNCTION:
        return (
            f"{text}; its rule was a function, which is not stored: mark the target with ks.per_rank and that function"
        )
    if rule not in RULES:
        return f"{text}; its rule {rule!r} is not known here: mark the target with ks.per_rank and another one"
    return f"{text}; give per_rank an on_world_change rule, or leave the component out with only="


def _grid(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    if names == PLAIN:
        return f"{sizes[0]} ranks"
    return " × ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def _beyond(names: tuple[str, ...], sizes: tuple[int, ...], known: tuple[int, ...]) -> str:
    """The places of one grid that another does not have, in words; empty when it has all."""
    if len(names) == 1:
        first, last = known[0], sizes[0] - 1
        word = names[0] if names != PLAIN else "ranks" if last > first else "rank"
        return "" if last < first else f"{word} {first if last == first else f'{first}..{last}'}"
    beyond = (at for at in product(*map(range, sizes)) if any(i >= size for i, size in zip(at, known, strict=True)))
    shown = [" ".join(f"{name}={i}" for name, i in zip(names, at, strict=True)) for at in islice(beyond, SHOWN_PLACES)]
    more = math.prod(sizes) - math.prod(map(min, sizes, known)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
