"""Why a run may differ from the one it should have been: likely causes, from what differs first. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep.check.trace import Stepped

__all__ = ["Evidence", "explain"]

Place = tuple[int, int]

_NAMES = {"model": "parameters or buffers", "optimizer": "the optimizer's state", "scaler": "the loss scaler"}
_AHEAD = " A batch that is fetched ahead of the step it is for belongs into the state as well."


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a difference: see ``Difference``. ``reference`` are all steps of the same rank in the reference.

    ``alike`` are the components that stood before the step as in the reference.
    """

    what: str
    others: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    after_restore: bool = False
    found: Stepped | None = None
    wanted: Stepped | None = None
    reference: Mapping[Place, Stepped] = field(default_factory=dict)
    place: Place = (0, 0)
    other_world: bool = False


def explain(seen: Evidence) -> tuple[str, ...]:
    """Likely causes, the most likely first, each a sentence."""
    kind = seen.what.partition("/")[0]
    known = {
        "progress": _progress,
        "samples": _data,
        "batch": _data,
        "lr": _learning_rate,
        "loss": _loss,
        "norm": _norm,
        "metrics": _metric,
        "model": _update,
        "optimizer": _update,
    }
    return tuple(known.get(kind, _component)(seen))


def _progress(seen: Evidence) -> list[str]:
    return [
        "The loop counts its steps by itself: let it go on from `ckpt.progress.step` after `ckpt.restore()`, and call"
        " `ckpt.step()` once after every optimizer step."
    ]


def _data(seen: Evidence) -> list[str]:
    causes = []
    if seen.other_world:
        return [
            "The data was dealt anew over the ranks from another position, or in another order: use a sampler of"
            " keepstep.data, which has one order for any number of ranks, and give it to TrainState."
        ]
    if (there := _same_elsewhere(seen)) is not None:
        off = there - seen.place[0]
        causes.append(
            f"This is what the reference was given at step {there}: the data's position is {abs(off)}"
            f" {'step' if abs(off) == 1 else 'steps'} too {'far' if off > 0 else 'early'}. Give a sampler or loader of"
            " keepstep.data to TrainState(data=...); what was prefetched is not what was consumed."
            + (_AHEAD if off > 0 else "")
        )
    elif seen.wanted and seen.found and seen.wanted.samples and seen.found.samples:
        if sorted(seen.wanted.samples) == sorted(seen.found.samples):
            causes.append(
                "The same samples in another order: the order is drawn from a stream that is not in the state."
            )
        else:
            causes.append(
                "Other samples than at any step of the reference: the order itself is another one. Is it drawn anew at"
                " each start, from a seed or generator that is not in the state, or for another epoch?"
            )
    else:
        causes.append(
            f"The data's position or order: give a sampler or loader of keepstep.data to TrainState(data=...).{_AHEAD}"
        )
    if _random(seen.before):
        causes.append(
            f"{_listed(_random(seen.before))} differed before this step, so what is drawn from it differs too."
        )
    return causes + _drawn(seen)


def _same_elsewhere(seen: Evidence) -> int | None:
    """The step at which the reference was given what was found here: the nearest, of those before it if there are any.

    Data that comes in one order again and again is rather begun anew than ahead.
    """
    if seen.found is None:
        return None
    mine = seen.found.samples or seen.found.batch
    near = sorted(seen.reference, key=lambda place: (place > seen.place, abs(place[0] - seen.place[0])))
    for place in near:
        step = seen.reference[place]
        if mine and place != seen.place and (step.samples or step.batch) == mine:
            return place[0]
    return None


def _learning_rate(seen: Evidence) -> list[str]:
    causes = []
    name = seen.what.partition("/")[2]
    mine = seen.found.lr.get(name) if seen.found else None
    near = sorted(seen.reference, key=lambda place: abs(place[0] - seen.place[0]))
    same = [p[0] for p in near if p[0] != seen.place[0] and mine and seen.reference[p].lr.get(name) == mine]
    if same:
        causes.append(
            f"It is the reference's learning rate of step {same[0]}: the scheduler stands at another position."
        )
    if seen.after_restore and seen.alike and all(name.startswith("rng/") for name in seen.before):
        causes.append(
            "All came back as it stood at the boundary before, so the rate is changed after a boundary and not before it:"
            " `scheduler.step()` at the end of an epoch belongs before the last `ckpt.step()` of that epoch."
        )
        return causes
    causes.append(
        "The scheduler: is it in TrainState(scheduler=...), and is it made before `ckpt.restore()`? Does its length depend"
        " on something that is another number in the resumed run?"
    )
    if "scheduler" not in seen.before and seen.before:
        causes.append(f"{_listed(seen.before)} differed before this step.")
    return causes


def _loss(seen: Evidence) -> list[str]:
    if seen.other_world:
        return [
            "The samples are the same and the loss is not: parameters or buffers came back otherwise on these ranks, the"
            " loss is not a mean over all samples of the step, or something is drawn at random that no stream tells of."
        ]
    causes = []
    whole = [name for name in seen.before if not name.startswith("rng/")]
    if whole:
        when = "after the restore" if seen.after_restore else "at the end of the step before"
        causes.append(f"{_listed(whole)} already differed {when}: the loss follows from that.")
    if _random(seen.before):
        causes.append(
            f"{_listed(_random(seen.before))} stood elsewhere before this step: dropout and the like drew other numbers. Is"
            " a generator made or seeded after `ckpt.restore()`?"
        )
    causes += _drawn(seen)
    if not whole and not _is_batch_known(seen):
        causes.append(
            "What the step was given is not in the trace, so it may have been another batch: data without a position in the"
            " state, or a batch that was fetched ahead of the step it is for, or before `ckpt.restore()`. Give it to"
            " `ckpt.step(batch=...)`, and the next drill tells."
        )
    if not causes:
        causes.append(
            "Batch and learning rate are the same, so the forward pass was another one: parameters, buffers (also those"
            " that are not persistent), a random stream that is not in the state, or the mode (train or eval)."
        )
    return causes


def _drawn(seen: Evidence) -> list[str]:
    """Streams that stood where they should, and have moved otherwise in this step."""
    names = [name for name in _random(seen.others) if name in seen.alike]
    if not names:
        return []
    return [
        f"{_listed(names)} stood as in the reference before this step, and elsewhere after it: this run draws more numbers,"
        " or fewer. Is something drawn whenever the script starts (a first batch, an order, the first loop over a DataLoader"
        " without a `generator=` of its own), or behind a boundary where a resumed run does not come by? An evaluation at"
        " the end of an epoch belongs before the last `ckpt.step()` of that epoch."
    ]


def _is_batch_known(seen: Evidence) -> bool:
    return seen.wanted is None or seen.wanted.samples is not None or seen.wanted.batch is not None


def _norm(seen: Evidence) -> list[str]:
    return [
        "The loss is the same and the gradient is not: gradients accumulated before the save, the loss scale, or another"
        " order of sums in the backward pass (operations that are not deterministic)."
    ]


def _metric(seen: Evidence) -> list[str]:
    return ["Batch and loss are the same: the number itself depends on something that is not in the state, or on time."]


def _update(seen: Evidence) -> list[str]:
    """The state differs after a step whose batch, learning rate and loss did not."""
    if seen.what.partition("/")[0] == "optimizer":
        causes = [
            "Parameters are the same and the optimizer's state is not: a moment, a step count, or a field of a parameter"
            " group, such as its weight decay, was not brought back."
        ]
    else:
        causes = [
            "Batch, learning rate and loss are the same, so the update was another one: the optimizer's state (moments, step"
            " counts), gradients accumulated before, the loss scale, or a field of a parameter group such as weight decay."
        ]
    if seen.before:
        causes.insert(0, f"{_listed(seen.before)} already differed before this step.")
    return causes


def _component(seen: Evidence) -> list[str]:
    kind = seen.what.partition("/")[0]
    if kind == "rng":
        return [
            f"Only random streams differ ({_listed((seen.what, *_random(seen.others)))}): something draws from them in one"
            " run and not in the other, or seeds them after `ckpt.restore()`. What is drawn later will differ."
        ]
    known = {
        "scheduler": "Only the scheduler's state differs; learning rates will differ later. Is it in TrainState?",
        "scaler": "Only the loss scaler differs: is it in TrainState(scaler=...), and is `update()` called before step()?",
        "data": "Only the data's own state differs; later batches may differ.",
    }
    causes = [f"{_listed(seen.before)} already differed before this step."] if seen.before else []
    if kind in known or all(name.startswith("rng/") for name in seen.others):
        causes.append(known.get(kind, f"Only {seen.what!r} differs: nothing that was traced depends on it yet."))
    elif not causes:
        causes.append(f"{_listed((seen.what, *seen.others))} differ: is all that they are computed from in TrainState?")
    return causes


def _random(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith("rng/"))


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(_NAMES.get(name, name) for name in names)
