"""Back into the live objects. First everything is bound and compared, then tensors are read, then small values go back.

``bind`` changes nothing the user can see: it finds, for each saved tensor, the memory it belongs to (allocating what a
fresh object does not have yet), and lists every difference. ``finish`` gives back what is not a tensor in place. What was
saved decides, not what a fresh object happens to contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepstep.format.objects import ObjectNode, TensorRef, join
from keepstep.state.accumulation import Accumulation
from keepstep.state.binding import Place, TreeBinder
from keepstep.state.capture import names_of, wrapped
from keepstep.state.memory import fits, pointer, state_like
from keepstep.state.module import is_extra_state, module_state, passing_hint, restore_module, unwrap
from keepstep.state.optimizer import (
    OptimizerView,
    apply_groups,
    at_names,
    load_packed,
    match_groups,
    position_names,
    set_state,
)
from keepstep.state.report import ComponentReport
from keepstep.state.rng import GENERATOR, RngStreams, stream_for
from keepstep.state.scheduler import other_groups
from keepstep.state.shard import torch_dtype
from keepstep.state.values import ABSENT, is_live

__all__ = ["Binder"]


@dataclass(slots=True)
class Binder(TreeBinder):
    """Binds objects: modules, optimizers, generators, and whatever else has a state_dict."""

    def lack_component(self, name: str, text: str) -> None:
        """Notes that the checkpoint has nothing for a component of the state."""
        self._report = self.reports.setdefault(name, ComponentReport())
        self._component = name
        value = self.state[name]
        if isinstance(value, Accumulation):
            # What was saved stands between two updates: the one that has begun here begins anew.
            self._report.reset.append(f"{name}: the gradients of {value.micro} microbatches")
            self._then(value.drop)
        else:
            self._miss(join("", name), text)

    def _bind_object(self, target: Any, node: ObjectNode, path: str) -> Any:
        if isinstance(target, nn.Module):
            return self._bind_module(target, node.tree, path)
        if isinstance(target, torch.optim.Optimizer) and isinstance(node.tree, dict) and "param_groups" in node.tree:
            return self._bind_optimizer(target, node.tree, path)
        if node.kind == "wrapper" and isinstance(target, torch.Tensor):
            inner = wrapped(target) or {}
            for name in {**inner, **node.tree}:
                if name not in inner or name not in node.tree:
                    self.mismatches.append(f"{path}: {node.type_name} has other parts in the checkpoint ({name})")
                else:
                    self._bind_tensor(inner[name], node.tree[name], join(path, name))
            return target
        if isinstance(target, Accumulation):
            return self._bind_accumulation(target, node.tree, path)
        if node.kind == GENERATOR:
            return self._bind_stream(target, node, path)
        if hasattr(target, "load_state_dict"):
            self.mismatches.extend(other_groups(target, node.tree, path))
            live = target.state_dict() if is_live(node.tree) and hasattr(target, "state_dict") else ABSENT
            tree = self._plain(node.tree, path, live)
            self._report.restored += not is_live(node.tree)
            if isinstance(target, RngStreams):
                self._report.reset.extend(f"{path}: {text}" for text in target.lacking(node.tree))
            self._then(lambda: target.load_state_dict(self.value_of(tree)))
            return target
        if node.kind in ("module", "optimizer") and isinstance(target, dict):
            return self._bind(target, node.tree, path)
        if target is ABSENT or isinstance(target, dict):
            return self._plain(node.tree, path)
        self.mismatches.append(
            f"{path}: saved from a {node.type_name} ({node.kind}), the target is a {type(target).__name__}"
        )
        return target

    def _bind_part(self, target: Any, node: ObjectNode, path: str, place: Place | None) -> Any:
        if node.kind == GENERATOR:
            return self._bind_stream(target, node, path)
        return self._plain(node.tree, path, target, place)

    def _bind_stream(self, target: Any, node: ObjectNode, path: str) -> Any:
        """The generator that takes a saved state, or a new one where the target has none."""
        holder, problem = stream_for(None if target is ABSENT else target, node.tree)
        if holder is None:
            self.mismatches.append(f"{path}: {problem}")
            return target
        self._report.restored += 1
        self._then(lambda: holder.load_state_dict(node.tree))
        return holder.generator

    def _bind_accumulation(self, target: Accumulation, tree: dict[str, Any], path: str) -> Any:
        own = self.origin.own.get(join(path, "own"), {})
        into = target.prepared(tree, own)
        for part, saved, here in (("gradients", tree["gradients"], into["gradients"]), ("own", own, into["own"].value)):
            for name in (name for name in saved if name not in here):
                self._surplus(join(join(path, part), name), "a gradient, and no parameter of that name in the target")
        state = self._bind(into, tree, path)
        self._then(lambda: target.load_state_dict(self.value_of(state)))
        return target

    def _bind_module(self, target: nn.Module, tree: dict[str, Any], path: str) -> Any:
        module = unwrap(target)
        live = module_state(module, every_buffer=getattr(self.state, "non_persistent_buffers", False))
        memory = {pointer(t) for t in (*module.parameters(), *module.buffers())}
        values: dict[str, Any] = {}
        filled: set[str] = set()
        absent = [n for n in live if n not in tree and (isinstance(live[n], torch.Tensor) or is_extra_state(n))]
        given = [live[n] for n in tree if absent and isinstance(live.get(n), torch.Tensor)]
        there = {(pointer(t), t.shape, t.stride()) for t in given if t.numel()}
        for name in absent:
            value = live[name]
            if isinstance(value, torch.Tensor) and (pointer(value), value.shape, value.stride()) in there:
                # Tied to what comes under its other name, which is all that some programs keep of the two.
                self._report.restored += 1
            else:
                hint = passing_hint(module, name)
                self._miss(join(path, name), f"in the target module, not in the checkpoint{hint}")
        for name, node in tree.items():
            below = join(path, name)
            value = live.get(name, ABSENT)
            if value is ABSENT:
                self._surplus(below, f"in the checkpoint, not in the target module{passing_hint(module, name)}")
            elif isinstance(value, torch.Tensor) and not is_extra_state(name):
                values[name] = self._bind(value, node, below)
                if pointer(value) in memory or not value.numel():
                    filled.add(name)
            else:
                values[name] = self._plain(node, below)
        kept = {name: value for name, value in live.items() if name not in values}
        self._then(lambda: restore_module(module, {**kept, **self.value_of(values)}, filled | kept.keys()))
        return target

    def _bind_optimizer(self, optimizer: torch.optim.Optimizer, tree: dict[str, Any], path: str) -> Any:
        view = OptimizerView(optimizer, names_of(self.state))
        tree, shapes = self.named(view, tree), self.saved_parameters()
        below = join(path, "state")
        fields, problems = match_groups(view, tree["param_groups"], path)
        self.mismatches.extend(problems)
        saved = dict.fromkeys(name for group in tree["param_groups"] for name in group["params"])
        for name in (name for name in view.parameters if name not in saved):
            self._miss(join(below, name), "a parameter of the target's groups, in no group of the checkpoint")
        for name in (name for name in saved if name not in view.parameters):
            self._surplus(join(below, name), "a parameter of the checkpoint's groups, in no group of the target")
        states: dict[Any, Any] = {}
        groups = {name: group for names, group in zip(view.group_names, fields, strict=True) for name in names}
        for name, node in tree["state"].items():
            if name in view.parameters:
                at = join(below, name)
                made = self._bind_parameter_state(view, name, node, at, group=groups[name], shape=shapes.get(name))
                if made is not ABSENT:
                    states[name] = made
            elif name not in saved:
                states[name] = self._plain(node, join(below, name))
        bound = [self._plain(group, join(join(path, "param_groups"), i)) for i, group in enumerate(fields)]
        rest = {k: self._plain(v, join(path, k)) for k, v in tree.items() if k not in ("state", "param_groups")}
        self._report.restored += len(fields)

        def finish() -> None:
            values = self.value_of(states)
            groups = self.value_of(bound)
            if view.plain:
                set_state(view, values)
                apply_groups(view, groups)
            else:
                load_packed(view, {"state": values, **self.value_of(rest)}, groups)

        self._then(finish)
        return optimizer

    def _bind_resized_state(
        self,
        parameter: torch.Tensor,
        name: str,
        saved: dict[str, Any],
        path: str,
        *,
        shape: tuple[int, ...],
        place: Place,
    ) -> Any:
        """State of a parameter that has another shape than it had: an error, or what both have, and zeros beside it.

        State of other shapes than the parameter's is an optimizer's own affair.
        """
        whole = [key for key, item in saved.items() if type(item) is TensorRef and item.shape == shape]
        if self.resized is None or not self.resized.takes(self._module_key(name)):
            text = f"the state of a parameter that had the shape {list(shape)}, and has {list(parameter.shape)} now"
            self.mismatches.extend(f"{join(path, key)}: {text}" for key in whole)
            return ABSENT if whole else self._plain(saved, path, place=place)
        if any(type(item) is TensorRef and item.shape not in ((), shape) for item in saved.values()):
            self._report.reset.append(f"{path}: begins anew, as its parameter has another shape")
            return ABSENT
        made = {}
        for key, item in saved.items():
            below = join(path, key)
            if key in whole:
                self._cut.add(below)
                dtype = torch_dtype(self._made(below, item).dtype)
                self._report.restored += self._add(
                    below, torch.zeros_like(parameter.detach(), dtype=dtype), item, fresh=True
                )
                made[key] = item
            else:
                made[key] = self._plain(item, below, place=place)
        return made

    def _module_key(self, name: str) -> str:
        """The key of a parameter in its module, by the name that optimizers have for it."""
        modules = [component for component, value in self.state.items() if isinstance(value, nn.Module)]
        if len(modules) == 1:
            return join(join("", modules[0]), name)
        component = next((component for component in modules if name.startswith(f"{component}.")), "")
        return join(join("", component), name.removeprefix(f"{component}."))

    def named(self, view: OptimizerView, tree: dict[str, Any]) -> dict[str, Any]:
        """The saved state of an optimizer under the names that the target has for parameters.

        Other programs have positions. And names begin with their component where a state has several modules: when one joins
        or leaves, those of the others change.
        """
        tree = at_names(tree, position_names(view, tree, self.saved_parameters()))
        before = [name for name, node in self.saved.items() if type(node) is ObjectNode and node.kind == "module"]
        now = [name for name, value in self.state.items() if isinstance(value, nn.Module)]
        if (len(before) > 1) is (len(now) > 1) or len(before) == 0 or len(now) == 0:
            return tree

        def new(name: Any) -> Any:
            other = f"{before[0]}.{name}" if len(before) == 1 else str(name).removeprefix(f"{now[0]}.")
            return other if name not in view.parameters and other in view.parameters else name

        state = {new(name): node for name, node in tree["state"].items()}
        groups = [{**group, "params": [new(name) for name in group["params"]]} for group in tree["param_groups"]]
        return {**tree, "state": state, "param_groups": groups}

    def saved_parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what was saved of the target's modules, by the names that optimizers have for parameters."""
        modules = [name for name, value in self.state.items() if isinstance(value, nn.Module)]
        found: dict[str, tuple[int, ...]] = {}
        for component in modules:
            node = self.saved.get(component)
            tree = node.tree if type(node) is ObjectNode else node
            prefix = f"{component}." if len(modules) > 1 else ""
            if isinstance(tree, dict):
                found.update((f"{prefix}{name}", ref.shape) for name, ref in tree.items() if type(ref) is TensorRef)
        return found

    def _bind_parameter_state(
        self,
        view: OptimizerView,
        name: str,
        node: Any,
        path: str,
        *,
        group: dict[str, Any],
        shape: tuple[int, ...] | None,
    ) -> Any:
        """State of one parameter: into the tensors that are there, or into new ones placed like the parameter."""
        parameter = view.parameters[name]
        live = view.optimizer.state.get(parameter, {}) if view.plain else {}
        siblings = node if isinstance(node, dict) else {}

        def place(ref: TensorRef) -> torch.Tensor:
            return state_like(parameter, ref, view.placed(name, ref, group, siblings))

        if shape is not None and shape != tuple(parameter.shape):
            return self._bind_resized_state(parameter, name, siblings, path, shape=shape, place=place)
        if not siblings:
            return self._plain(node, path, place=place)
        made = {}
        for key, item in node.items():
            below, there = join(path, key), live.get(key)
            if type(item) is TensorRef and isinstance(there, torch.Tensor):
                placed = view.placed(name, item, group, siblings)
                if fits(there, self._made(below, item), parameter, placed):
                    made[key] = self._bind_tensor(there, item, below)
                    continue
            made[key] = self._plain(item, below, place=place)
        return made
