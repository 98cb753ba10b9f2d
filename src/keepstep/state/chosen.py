"""Binding of chosen keys alone: what was not chosen stays in the target as it is, and is not missed.

Modules are taken by parameter and buffer, optimizers by the state of a parameter and by the field of a group, dictionaries
by entry. Everything else is one thing: it is taken whole or left.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from keepstep.format.objects import ObjectNode, RankRef, join
from keepstep.state.binding import TreeBinder
from keepstep.state.capture import names_of
from keepstep.state.module import unwrap
from keepstep.state.optimizer import OptimizerView
from keepstep.state.restore import Binder
from keepstep.state.values import ABSENT

__all__ = ["ChosenBinder"]


class ChosenBinder(Binder):
    """Binds those saved keys that ``takes`` says; ``touched`` are the keys with something taken at or below them.

    One use, in the place of the binder it is made from, which has bound nothing yet.
    """

    __slots__ = ("_takes", "_touched")

    def __init__(self, binder: TreeBinder, takes: Callable[[str], bool], touched: Set[str]) -> None:
        super().__init__(binder.table, binder.state, binder.origin, binder.strict, binder.cast)
        self._takes = takes
        self._touched = touched

    def _miss(self, path: str, text: str) -> None:
        if self._takes(path):
            super()._miss(path, text)

    def _surplus(self, path: str, text: str) -> None:
        if self._takes(path):
            super()._surplus(path, text)

    def _bind(self, target: Any, node: Any, path: str) -> Any:
        inside = isinstance(node, dict) and (isinstance(target, dict) or hasattr(target, "load_state_dict"))
        if self._takes(path) or inside:
            return super()._bind(target, node, path)
        if isinstance(node, ObjectNode):
            return self._bind_object(target, node, path)
        return self._refuse(target, node, path)

    def _bind_object(self, target: Any, node: ObjectNode, path: str) -> Any:
        if self._takes(path):
            return super()._bind_object(target, node, path)
        parts = isinstance(node.tree, dict) and (
            isinstance(target, nn.Module) or (isinstance(target, torch.optim.Optimizer) and "param_groups" in node.tree)
        )
        return super()._bind_object(target, node, path) if parts else self._refuse(target, node, path)

    def _refuse(self, target: Any, node: Any, path: str) -> Any:
        kind = node.type_name if isinstance(node, ObjectNode) else type(node).__name__
        kind = "value of each rank" if isinstance(node, RankRef) else kind
        self.mismatches.append(f"{path}: only= takes a {kind} whole or not at all")
        return target

    def _bind_dict(self, target: dict[Any, Any], node: dict[Any, Any], path: str) -> Any:
        if self._takes(path):
            return super()._bind_dict(target, node, path)
        there = {key: item for key, item in node.items() if join(path, key) in self._touched}
        for key, item in target.items():
            if key not in node:
                self._lose(item, join(path, key))
        made = {key: self._bind(target[key], item, join(path, key)) for key, item in there.items() if key in target}
        for key, item in there.items():
            if key not in target:
                made[key] = self._plain(self._pruned(item, join(path, key)), join(path, key))
        self._then(lambda: target.update(self.value_of(made)))
        return target

    def _bind_module(self, target: nn.Module, tree: dict[str, Any], path: str) -> Any:
        if self._takes(path):
            return super()._bind_module(target, tree, path)
        return super()._bind_module(
            unwrap(target), {name: node for name, node in tree.items() if self._takes(join(path, name))}, path
        )

    def _bind_optimizer(self, optimizer: torch.optim.Optimizer, tree: dict[str, Any], path: str) -> Any:
        """The parts that were chosen; after the optimizer has got these, the others are put back as they were."""
        if self._takes(path):
            return super()._bind_optimizer(optimizer, tree, path)
        below, groups = join(path, "state"), join(path, "param_groups")
        chosen: dict[str, Any] = {
            "state": {name: self._parts(node, join(below, name)) for name, node in tree["state"].items()},
            "param_groups": [
                {"params": group["params"], **self._parts(group, join(groups, index))}
                for index, group in enumerate(tree["param_groups"])
            ],
        }
        chosen["state"] = {name: node for name, node in chosen["state"].items() if node}
        chosen |= {key: node for key, node in tree.items() if key not in chosen and self._takes(join(path, key))}
        super()._bind_optimizer(optimizer, chosen, path)
        component, late, finish = self._finish.pop()
        view = OptimizerView(optimizer, names_of(self.state))
        named = {id(parameter): name for name, parameter in view.parameters.items()}

        def finish_and_put_back() -> None:
            state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
            fields = [dict(group) for group in optimizer.param_groups]
            finish()
            for parameter, values in state.items():
                at = join(below, named.get(id(parameter), ""))
                kept = {key: value for key, value in values.items() if not self._takes(join(at, key))}
                if kept:
                    optimizer.state[parameter] = {**kept, **optimizer.state.get(parameter, {})}
            for group, before in zip(optimizer.param_groups, fields, strict=True):
                for key, value in before.items():
                    group.setdefault(key, value)

        self._finish.append((component, late, finish_and_put_back))
        return optimizer

    def _parts(self, node: Any, path: str) -> dict[Any, Any]:
        """The chosen entries of a dictionary of saved values."""
        if not isinstance(node, dict):
            return {}
        return {key: item for key, item in node.items() if self._takes(join(path, key))}

    def _pruned(self, node: Any, path: str) -> Any:
        """A saved tree without what was not chosen."""
        if self._takes(path):
            return node
        if not isinstance(node, dict):
            return self._refuse(ABSENT, node, path)
        below = {key: join(path, key) for key in node}
        return {key: self._pruned(node[key], at) for key, at in below.items() if at in self._touched}
