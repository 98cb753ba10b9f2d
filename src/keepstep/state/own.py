"""Values that belong to one rank, loaded on any number of ranks.

In: the places for such values, found while a state was bound. Out: the ranks whose values they need; then, given these,
values bound like any others. What a user's rule makes of them is asked when every tensor was read, and before anything
that is not a tensor in place is given back.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from keepstep.errors import CheckpointError, CorruptError, MismatchError
from keepstep.format.objects import ObjectNode, TensorRef, join
from keepstep.state.choice import Choice, choose, seed_of
from keepstep.state.marks import PerRank
from keepstep.state.memory import host
from keepstep.state.restore import Binder
from keepstep.state.rng import as_stateful, is_generator, stream_for
from keepstep.state.values import ABSENT, Slot, child, materialise, references

__all__ = ["OwnValues"]

_MAPPINGS = (dict, OrderedDict, defaultdict)
_AGAIN = "Tensors hold the restored state: load again before going on."


@dataclass(frozen=True, slots=True)
class _Call:
    """A rule to be called, with the values of ``choice.owners`` and the tensors that are read for each of them."""

    slot: Slot
    choice: Choice
    trees: list[Any]
    tensors: list[dict[str, torch.Tensor]]


@dataclass(slots=True)
class OwnValues:
    """What is left to do for the values of single ranks once every component was bound.

    One use: ``choose``, ``bind``, read, ``call_rules``.
    """

    binder: Binder
    _choices: list[tuple[Slot, Choice]] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    def choose(self) -> list[int]:
        """Chooses whose value belongs where, and lists what cannot be loaded; the ranks whose own values are needed."""
        table, origin = self.binder.table, self.binder.origin
        for slot in self.binder.slots:
            choice = choose(slot.ref, slot.target, saved_world=origin.world, rank=table.rank, world=table.world)
            slot.value = _inner(slot.target) if slot.fresh else slot.target
            if choice.problem:
                self.binder.mismatches.append(f"{slot.path}: {choice.problem}")
            else:
                self._choices.append((slot, choice))
        return sorted({owner for _, choice in self._choices for owner in choice.owners})

    def bind(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Binds the values, given those of every rank that ``choose`` named, by key; changes nothing yet.

        Raises:
            CorruptError: a rank has no value where there should be one.
        """
        for slot, choice in self._choices:
            lacking = [owner for owner in choice.owners if slot.ref.key not in saved[owner]]
            if lacking:
                raise CorruptError(f"{slot.ref.key!r} has no value in the file of rank {', '.join(map(str, lacking))}")
            trees = [saved[owner][slot.ref.key] for owner in choice.owners]
            report = self.binder.reports[slot.component]
            if choice.gone:
                report.noted.append(f"{slot.path}: nothing here stands for {choice.gone}")
            if choice.new:
                self._note_new(slot, choice)
            if choice.action == "take":
                self._take(slot, trees[0], choice.owners[0])
            elif choice.action == "derive":
                self._derive(slot, choice, trees[0])
            elif choice.action == "call":
                report.rederived.append(f"{slot.path}: by its rule, on every rank, from {len(trees)} saved values")
                read = [self._read_all(tree, owner) for tree, owner in zip(trees, choice.owners, strict=True)]
                self._calls.append(_Call(slot, choice, trees, read))

    def call_rules(self) -> None:
        """Asks the user's rules for this rank's values; they are given back with everything else.

        Raises:
            MismatchError: rules that failed, or values that do not fit; lists all.
        """
        problems: list[str] = []
        for call in self._calls:
            slot, choice = call.slot, call.choice
            values = [materialise(tree, tensors) for tree, tensors in zip(call.trees, call.tensors, strict=True)]
            try:
                assert callable(choice.rule)  # noqa: S101  only rules that are functions are called
                made = choice.rule(list(zip(choice.saved, values, strict=True)), choice.here)
            except CheckpointError:
                raise
            except Exception as err:
                text = f"{slot.path}: its on_world_change rule failed: {type(err).__name__}: {err}"
                raise MismatchError(text, then=_AGAIN) from err
            if slot.fresh:
                slot.value = made
                continue
            found = list(_misfits(slot.target.value, made, slot.path))
            problems.extend(found)
            if not found:
                self.binder.then_own(slot, partial(_fill_mark, slot.target, made))
        if problems:
            raise MismatchError("what on_world_change rules have made does not fit the target:", problems, _AGAIN)

    def _note_new(self, slot: Slot, choice: Choice) -> None:
        """What becomes of the value on ranks that had none: streams are derived, all else stays as it is."""
        report = self.binder.reports[slot.component]
        parts = list(_parts(_inner(slot.target), None, slot.path)) if choice.rule == "derive" else []
        streams = [path for path, live, _ in parts if hasattr(as_stateful(live), "derive")]
        rest = [path for path, *_ in parts if path not in streams] if streams else [slot.path]
        report.rederived.extend(f"{path}: new on {choice.new}" for path in streams)
        report.reset.extend(f"{path}: as before the load on {choice.new}" for path in rest)

    def _take(self, slot: Slot, tree: Any, owner: int) -> None:
        inner = _inner(slot.target)
        value = self.binder.bind_own(slot, inner, tree, owner)
        if slot.fresh or type(slot.target) is not PerRank:
            slot.value = value
        elif value is not inner:
            self.binder.then_own(slot, lambda: setattr(slot.target, "value", self.binder.value_of(value)))

    def _derive(self, slot: Slot, choice: Choice, tree: Any) -> None:
        """New streams for this rank, wherever the value has any."""
        owner, step = choice.owners[0], self.binder.origin.step
        for path, live, node in _parts(_inner(slot.target), tree, slot.path):
            holder = as_stateful(live)
            if hasattr(holder, "derive"):
                part = node.tree if type(node) is ObjectNode else node
                seed, tensors = seed_of(tree, path, step, choice.here), self._read_all(part, owner)
                self.binder.then_own(slot, partial(_derive_later, holder, part, tensors, seed))

    def _read_all(self, tree: Any, owner: int) -> dict[str, torch.Tensor]:
        """New memory on the host for all tensors of one rank's value, by key; to be read with everything else."""
        made = {ref.key: host(ref) for ref in references(tree) if type(ref) is TensorRef}
        if made:
            self.binder.own_targets.setdefault(owner, {}).update(made)
        return made


def _inner(target: Any) -> Any:
    return target.value if type(target) is PerRank else target


def _parts(target: Any, node: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The things inside a live value, each with its key and what was saved for it, or ABSENT."""
    items: Any = None
    if type(target) in _MAPPINGS:
        items = target.items()
    elif type(target) in (list, tuple, deque):
        items = enumerate(target)
    if items is None:
        yield path, target, node
        return
    for key, item in items:
        yield from _parts(item, child(node, key), join(path, key))


def _misfits(target: Any, made: Any, path: str) -> Iterator[str]:
    """Why a value that a rule has made cannot take the target's place."""
    if is_generator(target):
        state = as_stateful(made).state_dict() if is_generator(made) else made
        if problem := stream_for(target, state)[1]:
            yield f"{path}: {problem}"
    elif isinstance(target, torch.Tensor):
        what = (made.dtype, tuple(made.shape)) if isinstance(made, torch.Tensor) else type(made).__name__
        if what != (target.dtype, tuple(target.shape)):
            yield f"{path}: the rule gives {what}, the target has {(target.dtype, tuple(target.shape))}"
    elif type(target) in _MAPPINGS and isinstance(made, dict):
        for key in made.keys() & target.keys():
            yield from _misfits(target[key], made[key], join(path, key))
    elif type(target) is list and isinstance(made, list):
        for index, (here, item) in enumerate(zip(target, made, strict=False)):
            yield from _misfits(here, item, join(path, index))


def _derive_later(holder: Any, tree: Any, tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    holder.derive(materialise(tree, tensors), seed)


def _fill_mark(mark: PerRank, made: Any) -> None:
    mark.value = _fill(mark.value, made)


def _fill(target: Any, made: Any) -> Any:
    """Puts a value in the place of a live one as a load does; returns what belongs there."""
    if is_generator(target):
        as_stateful(target).load_state_dict(as_stateful(made).state_dict() if is_generator(made) else made)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(made)
    elif isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(made)
    elif type(target) in _MAPPINGS and isinstance(made, dict):
        values = {key: _fill(target.get(key, ABSENT), item) for key, item in made.items()}
        target.clear()
        target.update(values)
    elif type(target) is list and isinstance(made, list):
        target[:] = [_fill(child(target, index), item) for index, item in enumerate(made)]
    else:
        return made
    return target
