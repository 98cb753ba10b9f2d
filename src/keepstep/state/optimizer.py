"""Optimizers: state under parameter names, groups with all their fields, restored into the same dictionaries.

A fresh optimizer has no moments and a scheduler may have added fields, so the restore is driven by what was saved: no
dummy step is taken, group dictionaries keep their identity, and a parameter that had no state gets none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.format.objects import TensorRef

__all__ = ["OptimizerView", "apply_groups", "at_names", "match_groups", "optimizer_state", "position_names"]


class OptimizerView:
    """An optimizer seen through parameter names."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.optimizer = optimizer
        self.parameters: dict[str, torch.Tensor] = {}
        self.group_names: list[list[str]] = []
        for g, group in enumerate(optimizer.param_groups):
            here = []
            for i, parameter in enumerate(group["params"]):
                # Without its module a parameter has the name its optimizer was given, or else its position.
                own = group.get("param_names")
                name = names.get(id(parameter)) or (own[i] if own else f"#{g}.{i}")
                if name in self.parameters:
                    raise UsageError(f"two parameters of {type(optimizer).__name__} have the name {name!r}")
                self.parameters[name] = parameter
                here.append(name)
            self.group_names.append(here)

    @property
    def plain(self) -> bool:
        """Whether state_dict and load_state_dict are PyTorch's own, with no hooks: then they can be done by name."""
        optimizer = self.optimizer
        own = type(optimizer)
        return (
            own.state_dict is torch.optim.Optimizer.state_dict
            and own.load_state_dict is torch.optim.Optimizer.load_state_dict
            and not optimizer._optimizer_load_state_dict_pre_hooks
            and not optimizer._optimizer_load_state_dict_post_hooks
        )

    def placed(self, name: str, value: TensorRef, group: dict[str, Any], siblings: dict[str, Any]) -> torch.device:
        """The device on which a state tensor of parameter ``name`` belongs.

        Most state lives with its parameter. A step counter stays on the host when it was there while other state of the
        same parameter was not, or when this optimizer would keep it there.
        """
        device = self.parameters[name].device
        if value.device == "cpu" and not value.shape:
            apart = any(type(other) is TensorRef and other.device != "cpu" for other in siblings.values())
            on_host = device.type != "cpu" and not (group.get("capturable") or group.get("fused"))
            if apart or on_host:
                return torch.device("cpu")
        return device


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """The optimizer's state_dict with names for positions: ``{"state": {name: ...}, "param_groups": [...], ...}``.

    Fields that equal ``params`` or hold parameter names are written as names; everything else stays as it is.
    """
    view = OptimizerView(optimizer, names)
    packed = optimizer.state_dict()
    order = list(view.parameters)
    state = {
        order[key] if type(key) is int and key < len(order) else key: value for key, value in packed["state"].items()
    }
    groups = []
    for saved, here in zip(packed["param_groups"], view.group_names, strict=True):
        group = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        groups.append({"params": here, **group})
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **rest}


def at_names(tree: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A state_dict of an optimizer with names for the positions that torch's own has; the same one where it has no such.

    ``names`` are those of all parameters, in the order of the groups.
    """
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(names))):
        return tree
    state = {
        names[key] if type(key) is int and key < len(names) else key: value for key, value in tree["state"].items()
    }
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in tree["param_groups"]]
    return {**tree, "state": state, "param_groups": groups}


def position_names(view: OptimizerView, tree: dict[str, Any], saved: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters of the target that the positions of a state_dict stand for, in their order.

    All of them; where a model has grown, those which its saved state has (``saved``, with shapes), if there are as many of
    these in each group as there were positions, and each position holds state of such a shape.
    """
    names = list(view.parameters)
    counts = [len(group["params"]) for group in tree["param_groups"]]
    known = [[name for name in group if name in saved] for group in view.group_names]
    if sum(counts) == len(names) or [len(group) for group in known if group] != [count for count in counts if count]:
        return names
    flat = [name for group in known for name in group]
    for position, name in enumerate(flat):
        held = tree["state"].get(position)
        tensors = [item.shape for item in held.values() if type(item) is TensorRef] if isinstance(held, dict) else []
        alike = [shape for shape in tensors if shape and len(shape) == len(saved[name])]
        if alike and saved[name] not in alike:
            return names
    return flat


def match_groups(view: OptimizerView, saved: list[dict[str, Any]], path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """For each live group the saved fields that belong to its parameters, found by name.

    Returns the fields in the order of the live groups, and what does not match: one live group whose parameters were
    saved with different fields. A parameter that was not saved has no say.
    """
    by_name = {name: group for group in saved for name in group["params"]}
    problems: list[str] = []
    matched = []
    empty = [group for group in saved if not group["params"]]
    for index, names in enumerate(view.group_names):
        where = f"{path}/param_groups/{index}"
        found = [by_name[name] for name in names if name in by_name]
        if not names:
            # A group without parameters has no names to go by: it is matched by its position.
            found = [saved[index]] if index < len(saved) and saved[index] in empty else []
        fields = [{key: value for key, value in group.items() if key != "params"} for group in found]
        differing = sorted({key for other in fields[1:] for key in other if other[key] != fields[0].get(key)})
        if differing:
            problems.append(f"{where}: its parameters were saved in groups with different {', '.join(differing)}")
        matched.append(fields[0] if fields else {})
    return matched, problems


def apply_groups(view: OptimizerView, fields: list[dict[str, Any]]) -> None:
    """Sets every saved field in the live group dictionaries, which keep their identity and their parameters.

    A learning rate that is a tensor on both sides is filled in place: schedulers and captured graphs hold that tensor.
    """
    filled: set[int] = set()
    for group, saved in zip(view.optimizer.param_groups, fields, strict=True):
        for key, value in saved.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) and (isinstance(value, int | float) or _same_kind(live, value)):
                if id(live) in filled and not bool((live == value).all()):
                    # PyTorch gives all groups the one tensor it was built with; values saved apart must stay apart.
                    live = group[key] = live.clone()
                filled.add(id(live))
                with torch.no_grad():
                    live.copy_(value) if isinstance(value, torch.Tensor) else live.fill_(value)
            else:
                group[key] = value


def set_state(view: OptimizerView, values: dict[Any, Any]) -> None:
    """Gives every parameter exactly the state that was saved for it, and none where none was."""
    state = view.optimizer.state
    for name, parameter in view.parameters.items():
        if name in values:
            if isinstance(values[name], dict) and isinstance(state.get(parameter), dict):
                state[parameter].clear()
                state[parameter].update(values[name])
            else:
                state[parameter] = values[name]
        else:
            state.pop(parameter, None)
    for key, value in values.items():
        if key not in view.parameters:
            state[key] = value


def load_packed(view: OptimizerView, tree: dict[str, Any], fields: list[dict[str, Any]]) -> None:
    """Restores an optimizer that has its own way of loading: one call of load_state_dict with complete data."""
    optimizer = view.optimizer
    holder = optimizer.param_groups
    groups = list(holder)
    order = {name: i for i, name in enumerate(view.parameters)}
    packed_groups = []
    for names, saved in zip(view.group_names, fields, strict=True):
        packed_groups.append({**saved, "params": [order[name] for name in names]})
    state = {order.get(key, key): value for key, value in tree["state"].items()}
    rest = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    optimizer.load_state_dict({"state": state, "param_groups": packed_groups, **rest})
    # load_state_dict makes a new list of new dictionaries; schedulers hold the old ones.
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    holder[:] = groups
    optimizer.param_groups = holder


def _same_kind(live: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == live.dtype and value.shape == live.shape
