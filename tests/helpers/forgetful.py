"""keepstep with one kind of state forgotten at a restore: what a test of completeness must notice.

Each mutation leaves out one thing where the code gives it back; everything else comes back as ever, and nothing complains.

As a launcher, the script runs in this process under the mutation: ``python tests/helpers/forgetful.py KIND train.py ...``
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import keepstep as ks
from keepstep.format.objects import ObjectNode, RankRef, TensorRef
from keepstep.state import restore
from keepstep.state.module import unwrap
from keepstep.state.progress import Progress
from keepstep.state.restore import Binder
from keepstep.state.rng import OwnStream, RngStreams


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make(what it was)``; afterwards it is what it was."""
    was = getattr(owner, name)
    setattr(owner, name, make(was))
    try:
        yield
    finally:
        setattr(owner, name, was)


# --- modules --------------------------------------------------------------------------------------------------------


def module_tensors(chosen: Callable[[nn.Module], list[torch.Tensor]]):
    """The chosen tensors of every module keep what they had before the restore."""

    def make(bind):
        def forgetful(self, target, tree, path):
            kept = [(tensor, tensor.detach().clone()) for tensor in chosen(unwrap(target))]
            bound = bind(self, target, tree, path)
            self._then(lambda: [tensor.detach().copy_(was) for tensor, was in kept])
            return bound

        return forgetful

    return replaced(Binder, "_bind_module", make)


def parameters_of(module):
    return [] if isinstance(module, AveragedModel) else list(module.parameters())


def buffers_of(module, persistent=True):
    if isinstance(module, AveragedModel):
        return []
    return [
        buffer
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and (name not in part._non_persistent_buffers_set) is persistent
    ]


def average_of(module):
    return list(module.module.parameters()) if isinstance(module, AveragedModel) else []


def counter_of(module):
    return [module.n_averaged] if isinstance(module, AveragedModel) else []


def extra_state():
    """The extra state of every module stays as it was."""

    def make(bind):
        def forgetful(self, target, tree, path):
            parts = () if isinstance(unwrap(target), AveragedModel) else target.modules()
            own = [m for m in parts if type(m).get_extra_state is not nn.Module.get_extra_state]
            kept = [(module, module.get_extra_state()) for module in own]
            bound = bind(self, target, tree, path)
            self._then(lambda: [module.set_extra_state(was) for module, was in kept])
            return bound

        return forgetful

    return replaced(Binder, "_bind_module", make)


# --- optimizers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def optimizer_state():
    """Moments, step counters and whatever else an optimizer keeps for a parameter."""

    def without_state(bind):
        return lambda self, optimizer, tree, path: bind(self, optimizer, {**tree, "state": {}}, path)

    with (
        replaced(Binder, "_bind_optimizer", without_state),
        replaced(restore, "set_state", lambda _: lambda view, values: None),
    ):
        yield


@contextlib.contextmanager
def group_fields(is_kept: Callable[[str, dict[str, Any]], bool] = lambda key, live: False):
    """Fields of the parameter groups, or those of them that ``is_kept`` does not let through."""

    def filtered(view, fields):
        return [
            {key: value for key, value in saved.items() if is_kept(key, live)}
            for saved, live in zip(fields, view.optimizer.param_groups, strict=True)
        ]

    def for_packed(load):
        def forgetful(view, tree, fields):
            live = [{k: v for k, v in group.items() if k != "params"} for group in view.optimizer.param_groups]
            load(view, tree, [own | some for own, some in zip(live, filtered(view, fields), strict=True)])

        return forgetful

    with (
        replaced(restore, "apply_groups", lambda apply: lambda view, fields: apply(view, filtered(view, fields))),
        replaced(restore, "load_packed", for_packed),
    ):
        yield


# --- objects with a state_dict --------------------------------------------------------------------------------------


def objects(is_forgotten: Callable[[Any], bool]):
    """Objects that are not given back what was saved for them."""

    def make(bind):
        return lambda self, target, node, path: target if is_forgotten(target) else bind(self, target, node, path)

    return replaced(Binder, "_bind_object", make)


def entry(kind: type, change: Callable[[dict[str, Any]], dict[str, Any]]):
    """Objects of a kind that are given back something else for a part of it."""

    def make(bind):
        def forgetful(self, target, node, path):
            if isinstance(target, kind):
                node = ObjectNode(node.kind, node.type_name, change(dict(node.tree)))
            return bind(self, target, node, path)

        return forgetful

    return replaced(Binder, "_bind_object", make)


def is_data(target):
    known = nn.Module | torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler | RngStreams | Progress
    return hasattr(target, "load_state_dict") and not isinstance(target, known)


def no_rules(state):
    return state | {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else state


# --- streams, progress, plain values --------------------------------------------------------------------------------


def stream(name: str):
    """One of the global generators goes on from where it is."""

    def make(load):
        return lambda self, state: load(self, {**state, name: self.state_dict()[name]})

    return replaced(RngStreams, "load_state_dict", make)


def plain_values():
    """Numbers, texts and containers of them, as user counters are."""

    def make(bind):
        def forgetful(self, name, node):
            if type(node) in (ObjectNode, RankRef, TensorRef):
                bind(self, name, node)

        return forgetful

    return replaced(Binder, "bind_component", make)


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "parameters": lambda: module_tensors(parameters_of),
    "buffers": lambda: module_tensors(buffers_of),
    "non_persistent_buffers": lambda: module_tensors(lambda module: buffers_of(module, persistent=False)),
    "extra_state": extra_state,
    "average": lambda: module_tensors(average_of),
    "average_count": lambda: module_tensors(counter_of),
    "optimizer_state": optimizer_state,
    "group_fields": group_fields,
    "added_group_fields": lambda: group_fields(lambda key, live: key in live),
    "scheduler": lambda: objects(lambda target: isinstance(target, LRScheduler)),
    "scheduler_rules": lambda: entry(LRScheduler, no_rules),
    "scaler": lambda: objects(lambda target: isinstance(target, torch.amp.GradScaler)),
    "growth_tracker": lambda: entry(torch.amp.GradScaler, lambda state: state | {"_growth_tracker": 0}),
    "data": lambda: objects(is_data),
    "generators": lambda: replaced(OwnStream, "load_state_dict", lambda _: lambda self, state: None),
    "rng_python": lambda: stream("python"),
    "rng_numpy": lambda: stream("numpy"),
    "rng_torch": lambda: stream("torch"),
    "progress": lambda: replaced(Progress, "load_state_dict", lambda _: lambda self, state: None),
    "counters": plain_values,
}


def forgetting(kind: str) -> contextlib.AbstractContextManager[None]:
    """Inside, restores of this process forget that kind of state."""
    return MUTATIONS[kind]()


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in MUTATIONS:
        raise SystemExit(f"usage: forgetful.py KIND script.py ...; KIND is one of {', '.join(MUTATIONS)}")
    kind, script = sys.argv[1:3]
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    assert ks.Checkpointer is not None  # what is patched has been imported
    with forgetting(kind):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
