"""Two traces beside each other: the first step at which a run is not the one it should have been, and what differs first.

On the same ranks, equal means equal to the last bit, of everything that was traced. On another number of ranks it means
the same samples over all ranks together, and the same loss within a tolerance. Imports no torch; changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from keepstep.check.causes import Evidence, explain
from keepstep.check.trace import Run, Stepped, Trace

__all__ = ["Comparison", "Difference", "Lost", "compare"]

SHOWN = 60
_RELEVANCE = ("model", "optimizer", "scheduler", "scaler", "data")
_RANDOM = "rng/"
_OTHER_SIZE = "a step has another number of samples on these ranks: their order was compared, losses were not"
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that is not as in the reference.

    ``start`` counts the starts of the compared run from 1; ``rank`` is None for what concerns all ranks together. ``what``
    is ``samples``, ``batch``, ``lr/<optimizer>``, ``loss``, ``norm``, ``metrics/<name>`` or ``<component>`` of the state.
    ``others`` are what else differs in the same step, in the order of cause and effect; ``before`` those components that
    already differed when the step began.
    """

    step: int
    micro: int
    rank: int | None
    start: int
    what: str
    expected: str
    found: str
    others: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Where it is, in one line."""
        micro = f", part {self.micro} of the next" if self.micro else ""
        rank = "all ranks together" if self.rank is None else f"rank {self.rank}"
        return f"step {self.step}{micro}, {rank}, start {self.start}: {self.what} is {self.found}, not {self.expected}"


@dataclass(frozen=True, slots=True)
class Lost:
    """A loss that is another one: of another number of ranks, so equal bits are not expected. ``apart`` is relative."""

    step: int
    expected: float
    found: float
    apart: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it. ``steps`` counts the steps that were compared, each as often as it was made.

    ``differing`` counts those that were not as they should have been; ``first`` is what to look at. ``worst`` is the loss
    that is furthest from the reference's, where losses were compared within a tolerance. ``notes`` say what was not judged,
    and why. ``names`` are all that differs anywhere, on the same ranks.
    """

    steps: int
    differing: int
    first: Difference | None
    worst: Lost | None = None
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs that must not. True of nothing at all: look at ``steps`` too."""
        return self.first is None


def compare(
    reference: Trace, other: Trace, *, exact: bool, tolerance: float, ignore: Collection[str] = ()
) -> Comparison:
    """Every step that ``other`` made, in each of its starts, beside the same step of ``reference``.

    Args:
        reference: a run without interruption.
        other: what is to be judged; steps that were made again after a crash count each time.
        exact: everything on the same rank to the last bit; otherwise samples over all ranks, and losses in tolerance.
        tolerance: of losses when not exact, relative. Losses are judged up to the first step for which a random stream of
            the reference has moved: on other ranks such a step is another one by right.
        ignore: names that may differ on the same ranks, such as ``metrics/seconds``.
    """
    return _compare_exactly(reference, other, ignore) if exact else _compare_worlds(reference, other, tolerance)


# --- the same ranks -------------------------------------------------------------------------------------------------


def _compare_exactly(reference: Trace, other: Trace, ignore: Collection[str]) -> Comparison:
    known = {(rank, step.place): step for rank, runs in reference.ranks.items() for run in runs for step in run.steps}
    found: list[Difference] = []
    steps: set[tuple[int, Place]] = set()
    wrong: set[tuple[int, Place]] = set()
    names: set[str] = set()
    for number, start in enumerate(other.starts(), 1):
        for run in start.values():
            for difference, place in _of_run(known, run, number, ignore):
                if not place[1]:
                    steps.add((number, place))
                if difference is not None:
                    found.append(difference)
                    wrong.add((number, place))
                    names |= {difference.what, *difference.others}
    if not found:
        return Comparison(len(steps), 0, None)
    first = min(found, key=lambda one: (one.start, one.step, one.micro, _order(one.what), one.rank or 0))
    lookup = {place: step for (rank, place), step in known.items() if rank == first.rank}
    its_run = other.starts()[first.start - 1].get(first.rank or 0)
    return Comparison(len(steps), len(wrong), _explained(first, lookup, its_run, ignore), names=tuple(sorted(names)))


def _of_run(
    known: Mapping[tuple[int, Place], Stepped], run: Run, number: int, ignore: Collection[str]
) -> Iterator[tuple[Difference | None, Place]]:
    """Each step of one rank's run, with what differs first in it."""
    rank = run.began.rank
    expected_step = run.began.step + 1
    for step in run.steps:
        place = (step.step, step.micro)
        if not step.micro and step.step != expected_step:
            skipped = Difference(step.step, 0, rank, number, "progress", f"step {expected_step}", f"step {step.step}")
            yield skipped, place
        if not step.micro:
            expected_step = step.step + 1
        wanted = known.get((rank, place))
        if wanted is None:
            yield Difference(*place, rank, number, "progress", "made by the reference", "a step beyond it"), place
            continue
        names = [name for name in differing(wanted, step) if name not in ignore]
        if not names:
            yield None, place
            continue
        sides = _shown(wanted, names[0]), _shown(step, names[0])
        yield Difference(*place, rank, number, names[0], *sides, others=tuple(names[1:])), place


def differing(wanted: Stepped, found: Stepped) -> list[str]:
    """The names of all that differs between two records of one step, causes before effects."""
    names = [name for name in ("samples", "batch", "loss", "norm") if getattr(wanted, name) != getattr(found, name)]
    for group, prefix in (("lr", "lr/"), ("metrics", "metrics/"), ("parts", "")):
        ours, theirs = getattr(wanted, group), getattr(found, group)
        names += [f"{prefix}{name}" for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    return sorted(names, key=_order)


def _order(name: str) -> tuple[int, int, str]:
    """In which order things of one step depend on each other."""
    kinds = ("progress", "world", "samples", "batch", "lr", "loss", "norm", "metrics")
    kind = name.partition("/")[0]
    if kind in kinds:
        return kinds.index(kind), 0, name
    if kind in _RELEVANCE:
        return len(kinds), _RELEVANCE.index(kind), name
    # Components of other names come after those whose part in an update is known.
    return len(kinds) + (name.startswith(_RANDOM)), len(_RELEVANCE), name


def _explained(
    first: Difference, known: Mapping[Place, Stepped], run: Run | None, ignore: Collection[str]
) -> Difference:
    """The same difference, with what had already differed before it, and what may have caused it."""
    place = (first.step, first.micro)
    mine = [step for step in run.steps if step.place < place] if run else []
    found = next((step for step in (run.steps if run else ()) if step.place == place), None)
    before: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    if run is not None:
        was = mine[-1].parts if mine else run.began.parts
        at = mine[-1].place if mine else (run.began.step, 0)
        should = known[at].parts if at in known else {}
        # Only what both sides have traced says anything.
        both = (was.keys() & should.keys()).difference(ignore)
        before = tuple(sorted((n for n in both if was[n] != should[n]), key=_order))
        alike = tuple(sorted(both.difference(before)))
    evidence = Evidence(
        what=first.what,
        others=first.others,
        before=before,
        alike=alike,
        after_restore=bool(run and run.began.restored and not mine),
        found=found,
        wanted=known.get(place),
        reference=known,
        place=place,
    )
    return replace(first, before=before, causes=explain(evidence))


def _shown(step: Stepped, name: str) -> str:
    """One value of a record, as people read it."""
    if name == "samples":
        return "not traced" if step.samples is None else _cut(", ".join(map(str, step.samples)) or "none")
    if name in ("batch", "loss", "norm"):
        value = getattr(step, name)
        return "not traced" if value is None else str(value) if name == "batch" else _number(value)
    kind, _, rest = name.partition("/")
    if kind == "lr":
        values = step.lr.get(rest)
        return "not traced" if values is None else _cut(", ".join(map(_number, values)))
    value = step.metrics.get(rest) if kind == "metrics" else step.parts.get(name)
    return "not traced" if value is None else _number(value) if kind == "metrics" else value


def _number(text: str) -> str:
    return repr(float.fromhex(text))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


# --- another number of ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Whole:
    """One step over all ranks: its samples with how often each was seen (None: not traced), its loss, its random state.

    ``drawn`` counts samples on every rank, also on ranks that compute one share together.
    """

    samples: Counter[int] | None
    drawn: int
    loss: float | None
    random: tuple[str, ...]


def _compare_worlds(reference: Trace, other: Trace, tolerance: float) -> Comparison:
    known = _wholes([run for runs in reference.ranks.values() for run in runs])
    found: list[Difference] = []
    wrong: set[tuple[int, int]] = set()
    steps = 0
    worst: Lost | None = None
    notes: dict[str, None] = {}
    for number, start in enumerate(other.starts(), 1):
        wholes = _wholes(list(start.values()))
        steps += len(wholes)
        differences = [*_samples(known, wholes, number, notes)]
        if _OTHER_SIZE not in notes:
            # With other batches an epoch has another number of steps.
            differences += _missing(known, wholes, number)
        judged = _judged(known, sorted(wholes.keys() & known.keys()), notes)
        for lost in _losses(known, wholes, notes):
            if worst is None or lost.apart > worst.apart:
                worst = lost
            if lost.step in judged and not lost.apart <= tolerance:
                sides = repr(lost.expected), f"{lost.found!r} ({lost.apart:.1e} apart)"
                differences.append(Difference(lost.step, 0, None, number, "loss", *sides))
        found += differences
        wrong |= {(number, one.step) for one in differences}
    first = min(found, key=lambda one: (one.start, one.step, _order(one.what)), default=None)
    if first is not None:
        first = replace(first, causes=explain(Evidence(first.what, place=(first.step, 0), other_world=True)))
    return Comparison(steps, len(wrong), first, worst, tuple(notes))


def _wholes(runs: list[Run]) -> dict[int, _Whole]:
    """Step -> what all ranks did in it. Parts of a step count with the step that they end in."""
    ranks: dict[int, dict[int, list[Stepped]]] = {}
    for run in runs:
        parts: list[Stepped] = []
        for step in run.steps:
            parts.append(step)
            if not step.micro:
                ranks.setdefault(step.step, {})[run.began.rank] = parts
                parts = []
    return {step: _whole(by_rank) for step, by_rank in sorted(ranks.items())}


def _whole(by_rank: Mapping[int, list[Stepped]]) -> _Whole:
    # Ranks that were given the same samples in the same order compute one share together: they count once.
    shares: dict[object, tuple[tuple[int, ...] | None, str | None]] = {}
    for rank, parts in by_rank.items():
        ids = [part.samples for part in parts]
        known = tuple(one for some in ids if some is not None for one in some)
        samples = None if any(some is None for some in ids) else known
        shares.setdefault(samples or rank, (samples, parts[-1].loss))
    counted = [samples for samples, _ in shares.values()]
    whole = None if any(samples is None for samples in counted) else Counter(i for s in counted for i in s or ())
    random = tuple(
        f"{rank} {name} {digest}"
        for rank, parts in sorted(by_rank.items())
        for name, digest in sorted(parts[-1].parts.items())
        if name.startswith(_RANDOM)
    )
    drawn = sum(len(part.samples or ()) for parts in by_rank.values() for part in parts)
    return _Whole(whole, drawn, _mean(list(shares.values())), random)


def _mean(shares: list[tuple[tuple[int, ...] | None, str | None]]) -> float | None:
    """The loss over all samples, from that of each share; the loss itself where every share has the same."""
    losses = [None if loss is None else float.fromhex(loss) for _, loss in shares]
    if not losses or any(loss is None for loss in losses):
        return None
    values = [loss for loss in losses if loss is not None]
    if all(loss == values[0] for loss in values):
        return values[0]
    weights = [len(samples) if samples is not None else 1 for samples, _ in shares]
    total = sum(weights)
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total if total else None


def _missing(known: Mapping[int, _Whole], wholes: Mapping[int, _Whole], start: int) -> list[Difference]:
    beyond = [step for step in wholes if step not in known]
    return [Difference(s, 0, None, start, "progress", "made by the reference", "a step beyond it") for s in beyond]


def _samples(
    known: Mapping[int, _Whole], wholes: Mapping[int, _Whole], start: int, notes: dict[str, None]
) -> list[Difference]:
    """Steps whose samples are not those of the reference; with batches of another size, not a part of its order."""
    steps = sorted(wholes.keys() & known.keys())
    pairs = [(step, known[step].samples, wholes[step].samples) for step in steps]
    complete = [(step, a, b) for step, a, b in pairs if a is not None and b is not None]
    if len(complete) < len(pairs):
        notes["samples were not compared: the script's data has no sample ids"] = None
        return []
    alike = [a.total() == b.total() or known[s].drawn == wholes[s].drawn for s, a, b in complete]
    if 2 * sum(alike) >= len(alike):
        # A step with another number is one that lacks some, or has too many.
        return [_unequal(step, start, a, b) for step, a, b in complete if a != b]
    notes[_OTHER_SIZE] = None
    seen: Counter[int] = Counter()
    for step, _, mine in complete:
        seen += mine
        less: Counter[int] = Counter()
        more: Counter[int] = Counter()
        for at in sorted(step for step in known if step >= steps[0]):
            more += known[at].samples or Counter()
            if more.total() >= seen.total():
                break
            less += known[at].samples or Counter()
        if more.total() < seen.total():
            break
        if more.total() == seen.total():
            less = more
        if not (less <= seen <= more):
            return [_unequal(step, start, more, seen)]
    return []


def _unequal(step: int, start: int, expected: Counter[int], found: Counter[int]) -> Difference:
    lacking, extra = expected - found, found - expected
    said = [
        f"{count} {word}: {_cut(', '.join(map(str, sorted(ids))))}"
        for count, word, ids in ((lacking.total(), "skipped", lacking), (extra.total(), "not expected", extra))
        if count
    ]
    return Difference(step, 0, None, start, "samples", f"{expected.total()} samples", "; ".join(said))


def _judged(known: Mapping[int, _Whole], steps: list[int], notes: dict[str, None]) -> set[int]:
    """The steps before the first one for which the reference has drawn random numbers on its ranks."""
    judged: set[int] = set()
    for step in steps:
        before = known.get(step - 1)
        if before is None or not before.random or before.random != known[step].random:
            why = "random numbers were drawn on the ranks" if known[step].random else "random streams were not traced"
            notes[f"losses from step {step} on were compared, not judged: {why}"] = None
            break
        judged.add(step)
    return judged


def _losses(known: Mapping[int, _Whole], wholes: Mapping[int, _Whole], notes: dict[str, None]) -> Iterator[Lost]:
    for step in sorted(wholes.keys() & known.keys()):
        (a, b), (ours, theirs) = (known[step].loss, wholes[step].loss), (known[step].samples, wholes[step].samples)
        if ours is not None and theirs is not None and ours.total() != theirs.total():
            return
        if a is None or b is None:
            notes["losses were not compared: the script gives none to step(loss=...)"] = None
            return
        yield Lost(step, a, b, _apart(a, b))


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(apart) else apart
