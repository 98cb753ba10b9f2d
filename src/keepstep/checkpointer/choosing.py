"""What a load is asked to take, under which names, and what may be missing: patterns against saved trees and the target.

``chosen`` comes before the binding of components and makes a tree that has what is wanted; ``settle`` comes after it and
takes from what did not fit all that was allowed. Every pattern has to fit something: one that does not is a mistake.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from keepstep.checkpointer.options import Demanded, Selection
from keepstep.checkpointer.rename import renamed_tree
from keepstep.errors import UsageError
from keepstep.format.globs import Globs, near
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, join
from keepstep.state.capture import names_of
from keepstep.state.casting import Casts
from keepstep.state.chosen import ChosenBinder
from keepstep.state.module import module_state, parameter_names
from keepstep.state.optimizer import OptimizerView
from keepstep.state.restore import Binder
from keepstep.state.values import objects_in

__all__ = ["GONE", "casts_of", "chosen", "chosen_keys", "left_out_keys", "settle"]

SHOWN = 3
GONE = "its files were let go by retention, to keep the weights alone"
_UNCHANGED = "Nothing was changed"
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict)


def chosen(
    selection: Selection, tree: dict[str, Any], binder: Binder, dropped: Sequence[str]
) -> tuple[dict[str, Any], Binder]:
    """The saved tree under its new names and with other values, and a binder that takes the chosen keys of it.

    Raises:
        UsageError: options that mean nothing, and patterns that fit no key of the step.
    """
    if not binder.strict and (selection.allow_missing or selection.allow_extra):
        raise UsageError(f"strict=False allows everything: leave out allow_missing= and allow_extra=. {_UNCHANGED}")
    found, gone = (tree, []) if selection.rename is None else renamed_tree(tree, selection.rename)
    binder.saved = found
    found = _with_names(found, binder)
    takes = binder
    if selection.only is not None:
        globs = Globs(_spelt(selection.only, found, binder.state), "only")
        keys = [key for key, _ in _nodes(found)]
        away = Globs(selection.completed, "leave_out") if selection.completed else None
        keys += left_out_keys(binder.state, away) if away is not None else ()
        demanded = type(selection.only) is Demanded
        if not demanded:
            _check_only(globs, keys, tree, dropped)
        touched = {above for key in (*selection.only, *keys) if globs.takes(key) for above in _above(key)}
        takes = ChosenBinder(binder, globs.takes, touched)
        if demanded:
            nowhere = [key for key in selection.only if key.partition("/")[0] not in {join("", n) for n in found}]
            takes.mismatches.extend(f"{key}: not in the checkpoint, which has {', '.join(tree)}" for key in nowhere)
        keys_of = {name: join("", name) for name in (*found, *binder.state)}
        takes.left_out |= {name for name, key in keys_of.items() if key not in touched and not globs.takes(key)}
    if isinstance(selection.rename, Mapping):
        saved = [key for key, _ in _nodes(tree)]
        idle = [pattern for pattern in selection.rename if not any(re.search(pattern, key) for key in saved)]
        takes.notes.extend(f"rename={pattern!r}: found in no key of the checkpoint" for pattern in idle)
    if gone:
        some = f"{', '.join(gone[:SHOWN])}{', …' if len(gone) > SHOWN else ''}"
        takes.notes.append(f"{len(gone)} keys have no name by rename=, and are not loaded: {some}")
    if selection.allow_resized:
        takes.resized = Globs(selection.allow_resized, "allow_resized")
    if selection.override:
        found = _overridden(selection.override, found, takes.left_out)
    return found, takes


def _with_names(tree: dict[str, Any], binder: Binder) -> dict[str, Any]:
    """The tree whose optimizers have the names that the target has for its parameters."""
    made = dict(tree)
    for name, target in binder.state.items():
        node = made.get(name)
        inner = node.tree if type(node) is ObjectNode else node
        if (
            isinstance(target, torch.optim.Optimizer)
            and isinstance(inner, dict)
            and {"state", "param_groups"} <= {*inner}
        ):
            named = binder.named(OptimizerView(target, names_of(binder.state)), inner)
            made[name] = ObjectNode(node.kind, node.type_name, named) if type(node) is ObjectNode else named
    return made


def casts_of(cast: object, tree: dict[str, Any], selection: Selection | None, binder: Binder) -> Casts:
    """What ``cast`` says of the tensors of a saved tree. Of two steps that complete each other, one may have them.

    Raises:
        UsageError: it says nothing that can be done, or a pattern fits no tensor.
    """
    casts = Casts(cast)
    if selection is None or type(selection.only) is not Demanded:
        named = _with_names(tree, binder)
        found = {key: node for key, node in _nodes(named) if type(node) in (TensorRef, RankRef)}
        away = selection.completed if selection is not None else ()
        others = dict.fromkeys(left_out_keys(binder.state, Globs(away, "leave_out")) if away else ())
        casts.check({**others, **{key: node if type(node) is TensorRef else None for key, node in found.items()}})
    return casts


def left_out_keys(state: Mapping[str, Any], away: Globs) -> list[str]:
    """The keys of the modules of a state which these patterns take."""
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    keys = (join(join("", name), key) for name, module in modules.items() for key in module_state(module))
    return [key for key in keys if away.takes(key)]


def settle(selection: Selection, tree: Mapping[str, Any], binder: Binder, away: Sequence[str]) -> None:
    """Takes from what a binder has found wrong all that may be so, and lists patterns that fit nothing anywhere.

    ``away`` are the patterns of what was left out when the step was saved.
    """
    left_out: Globs | None = getattr(binder.state, "leave_out", None)
    if type(selection.only) is Demanded:
        binder.base = list(selection.only)
    elif left_out is not None:
        binder.base = left_out_keys(binder.state, left_out)
    missing = Globs(selection.allow_missing, "allow_missing")
    extra = Globs(selection.allow_extra, "allow_extra")
    _demand(binder, Globs(away, "leave_out"), Globs(selection.completed, "leave_out"))
    fresh = _fresh_states(binder, missing)
    for report in binder.reports.values():
        begun = [key for key in report.missing if key in fresh]
        report.reset.extend(f"{key}: begins anew" for key in begun)
        report.missing = [key for key in report.missing if key not in fresh]
        allowed = {binder.lacks[key] for key in (*begun, *report.missing) if key in fresh or missing.takes(key)}
        if allowed:
            binder.mismatches[:] = [line for line in binder.mismatches if line not in allowed]
        binder.spared |= {key for key in report.unexpected if extra.takes(key)}
    if selection.allow_missing or selection.allow_resized:
        keys = list(_target_keys(binder))
        for option, globs in (("allow_missing", missing), ("allow_resized", binder.resized)):
            for pattern in globs.idle(keys) if globs is not None else ():
                # Like a key without a place: another rank may have what fits.
                binder.surplus[f"{option}={pattern!r}"] = f"no key of the target fits{near(pattern, keys)}"
    if selection.allow_extra:
        keys = [key for key, _ in _nodes(tree)]
        for pattern in extra.idle(keys):
            binder.notes.append(f"allow_extra={pattern!r}: no key of the checkpoint fits{near(pattern, keys)}")
    for pattern in selection.override or ():
        fits = Globs([pattern], "override", below=False)
        for name, report in binder.reports.items():
            here = {name: tree[name]} if name in tree and name not in binder.left_out else {}
            report.overridden.extend(key for key, _ in _nodes(here) if fits.takes(key))


def _demand(binder: Binder, away: Globs, completed: Globs) -> None:
    """Says of what was left out that it was, and takes from what is missing all that has come from elsewhere."""
    for report in binder.reports.values():
        here = {key for key in report.missing if completed.takes(key)}
        if here:
            report.missing = [key for key in report.missing if key not in here]
            report.noted.append(f"{len(here)} left out when it was saved, taken from another step")
            lines = {binder.lacks.get(key) for key in here}
            binder.mismatches[:] = [line for line in binder.mismatches if line not in lines]
        for key in report.missing:
            line = binder.lacks.get(key)
            if away.takes(key) and line in binder.mismatches:
                binder.lacks[key] = f"{key}: left out when it was saved; left_out= names the step that has it"
                binder.mismatches[binder.mismatches.index(line)] = binder.lacks[key]


def chosen_keys(only: Sequence[str] | None, keys: Sequence[str], state: Mapping[str, Any]) -> list[str]:
    """Those of the keys which ``only`` takes."""
    if only is None:
        return list(keys)
    globs = Globs(_spelt(only, state), "only")
    return [key for key in keys if globs.takes(key)]


def _spelt(only: Sequence[str], *named: Mapping[str, Any]) -> Sequence[str]:
    """The patterns, of which a component's own name stands for its key, however that is spelt."""
    if isinstance(only, str):
        return only
    names = {name for each in named for name in each}
    return [join("", each) if isinstance(each, str) and each in names else each for each in only]


def _check_only(globs: Globs, keys: list[str], tree: Mapping[str, Any], dropped: Sequence[str]) -> None:
    idle = globs.idle(keys)
    if idle:
        why = f"; {', '.join(dropped)}: {GONE}" if dropped else ""
        hints = "".join(near(pattern, keys) for pattern in idle)
        raise UsageError(f"only={', '.join(idle)}: the checkpoint has {', '.join(tree)}{hints}{why}. {_UNCHANGED}")


def _nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a saved tree with what is saved there, containers before what they hold."""
    if path:
        yield path, tree
    inner = tree.tree if isinstance(tree, ObjectNode) else tree
    if isinstance(inner, Mapping):
        for key, item in inner.items():
            yield from _nodes(item, join(path, key))
    elif isinstance(inner, list | tuple | deque):
        for index, item in enumerate(inner):
            yield from _nodes(item, join(path, index))


def _above(key: str) -> Iterator[str]:
    """The key and all keys that it lies in."""
    while key:
        yield key
        key = key.rpartition("/")[0]


def _overridden(override: Mapping[str, Any], tree: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """The tree with other plain values.

    Raises:
        UsageError: a value that is not plain, a pattern that fits no plain value, or another kind of value.
    """
    there = {name: node for name, node in tree.items() if name not in left_out}
    for pattern, value in override.items():
        if not isinstance(value, _PLAIN):
            raise UsageError(f"override={pattern!r}: a {type(value).__name__}; it sets plain values. {_UNCHANGED}")
        globs = Globs([pattern], "override", below=False)
        if globs.idle(key for key, _ in _nodes(there)):
            hint = near(pattern, [key for key, _ in _nodes(there)])
            raise UsageError(f"override={pattern!r}: no value of the checkpoint fits{hint}. {_UNCHANGED}")
        there = {name: _replaced(node, join("", name), globs, value) for name, node in there.items()}
    return {name: there.get(name, node) for name, node in tree.items()}


def _replaced(node: Any, path: str, globs: Globs, value: Any) -> Any:
    if globs.takes(path):
        _check_alike(node, path, value)
        return value
    if isinstance(node, ObjectNode):
        return ObjectNode(node.kind, node.type_name, _replaced(node.tree, path, globs, value))
    if type(node) is dict:
        return {key: _replaced(item, join(path, key), globs, value) for key, item in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_replaced(item, join(path, index), globs, value) for index, item in enumerate(node))
    return node


def _check_alike(node: Any, path: str, value: Any) -> None:
    """A learning rate may be saved as a tensor of no dimensions: a number takes its place."""
    number = isinstance(value, int | float)
    if isinstance(node, TensorRef) and number and not node.shape and "/param_groups/" in path:
        return
    if any(isinstance(each, TensorRef | RankRef | ObjectNode) for _, each in _nodes({"": node})):
        raise UsageError(f"override={path!r}: it sets plain values, and tensors or objects are there. {_UNCHANGED}")
    if isinstance(node, int | float) and not number:
        raise UsageError(f"override={path!r}: {value!r}, in the place of the number {node!r}. {_UNCHANGED}")


def _fresh_states(binder: Binder, missing: Globs) -> set[str]:
    """Keys of the optimizers' state of parameters which the checkpoint may lack, and does."""
    modules = [name for name, value in binder.state.items() if isinstance(value, nn.Module)]
    lacking = {key for report in binder.reports.values() for key in report.missing if missing.takes(key)}
    new = {
        identity
        for component in modules
        for identity, name in parameter_names(binder.state[component]).items()
        if join(join("", component), name) in lacking or join("", component) in lacking
    }
    names = {name for identity, name in names_of(binder.state).items() if identity in new}
    optimizers = [name for name, value in binder.state.items() if isinstance(value, torch.optim.Optimizer)]
    return {join(join(join("", optimizer), "state"), name) for optimizer in optimizers for name in names}


def _target_keys(binder: Binder) -> Iterator[str]:
    for component, value in binder.state.items():
        path = join("", component)
        yield path
        if isinstance(value, nn.Module):
            yield from (join(path, name) for name in module_state(value, every_buffer=True))
        elif isinstance(value, torch.optim.Optimizer):
            view = OptimizerView(value, names_of(binder.state))
            yield from (join(join(path, "state"), name) for name in view.parameters)
        else:
            yield from (key for key, _ in objects_in(value, path))
