"""Back into the live objects. First everything is bound and compared, then tensors are read, then small values go back.

``bind`` changes nothing the user can see: it finds, for each saved tensor, the memory it belongs to (allocating what a
fresh object does not have yet), and lists every difference. ``finish`` gives back what is not a tensor in place. What was
saved decides, not what a fresh object happens to contain.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from keepstep.errors import CheckpointError, MismatchError, UsageError
from keepstep.format.layout import Part, Want, parts
from keepstep.format.objects import ObjectNode, RankRef, TensorRef, join
from keepstep.state.accumulation import Accumulation
from keepstep.state.capture import names_of, wrapped
from keepstep.state.marks import PerRank, Sharded
from keepstep.state.memory import fits, host, pointer, state_like
from keepstep.state.module import is_extra_state, module_state, passing_hint, restore_module, unwrap
from keepstep.state.optimizer import OptimizerView, apply_groups, load_packed, match_groups, set_state
from keepstep.state.report import ComponentReport, Origin
from keepstep.state.rng import as_stateful
from keepstep.state.shard import LayoutTable, torch_dtype, writable
from keepstep.state.values import ABSENT, assign, child, has_tensors, materialise, objects_in

__all__ = ["Binder"]

Finish = Callable[[], None]
Place = Callable[[TensorRef], torch.Tensor]


@dataclass(slots=True)
class Binder:
    """Collects what to read into which memory. One use: bind every component, read, ``finish``.

    ``wants`` and ``targets`` go together: the box of a stored tensor, and the tensor of that shape to fill. ``own_targets``
    are tensors of this rank alone, by key. ``mismatches`` lists every difference found; ``surplus`` maps saved keys that
    have no place on this rank to what to say of them, should no other rank have one either.
    """

    table: LayoutTable
    state: Mapping[str, Any]
    origin: Origin
    strict: bool = True
    cast: bool = False
    wants: list[Want] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    own_targets: dict[str, torch.Tensor] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    surplus: dict[str, str] = field(default_factory=dict)
    reports: dict[str, ComponentReport] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)
    _finish: list[tuple[str, Finish]] = field(default_factory=list)
    _component: str = ""
    _claimed: dict[Any, str] = field(default_factory=dict)
    _held: dict[int, list[Part]] = field(default_factory=dict)
    _report: ComponentReport = field(default_factory=ComponentReport)
    _casts: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def bind_component(self, name: str, node: Any) -> None:
        """Binds one component of the state to its saved tree; changes nothing yet."""
        self._report = self.reports.setdefault(name, ComponentReport())
        self._component = name
        path = join("", name)
        target = self.state[name]
        if type(target) is PerRank and type(node) is not RankRef:
            self.mismatches.append(f"{path}: the target is per_rank, the checkpoint has one value for all ranks")
            return
        value = self._bind(target, node, path)
        if value is not target:
            self._then(lambda: assign(self.state, name, materialise(value, self._values)))

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

    def reject(self, mismatches: list[str], unplaced: list[str]) -> None:
        """Takes over what any rank found, and surplus keys that no rank has a place for as differences."""
        self.mismatches[:] = mismatches
        nowhere = set(unplaced)
        for report in self.reports.values():
            report.unexpected = [key for key in report.unexpected if key in nowhere]
        if self.strict:
            self.mismatches.extend(f"{key}: {self.surplus[key]}" for key in unplaced if key in self.surplus)

    def finish(self) -> None:
        """Gives back everything that was not read in place. Only after every byte was read and proved, on all ranks."""
        for target, temporary in self._casts.values():
            with torch.no_grad():
                target.copy_(temporary)
        for name, finish in self._finish:
            try:
                finish()
            except CheckpointError:
                raise
            except Exception as err:
                raise MismatchError(
                    f"component {name!r} refused what was saved for it: {type(err).__name__}: {err}",
                    then="Tensors and the components before it hold the restored state: load again before going on.",
                ) from err

    def _then(self, finish: Finish) -> None:
        """Notes what is left to do for the component at hand once everything was read."""
        self._finish.append((self._component, finish))

    def _bind(self, target: Any, node: Any, path: str) -> Any:
        """The value that belongs in the target's place: the target itself where it is filled or updated in place."""
        if type(node) is TensorRef:
            return self._bind_tensor(target, node, path)
        if type(node) is RankRef:
            return self._bind_rank(target, node, path)
        if type(node) is ObjectNode:
            return self._bind_object(target, node, path)
        if type(target) is dict or type(target) in (OrderedDict, defaultdict):
            if isinstance(node, dict):
                return self._bind_dict(target, node, path)
        elif type(target) is list and type(node) is list:
            return self._bind_list(target, node, path)
        self._lose(target, path)
        self._report.restored += 1
        return self._plain(node, path, target)

    def _bind_dict(self, target: dict[Any, Any], node: dict[Any, Any], path: str) -> Any:
        kept = {key: item for key, item in target.items() if key not in node and self._lose(item, join(path, key))}
        made = {key: self._bind(target.get(key, ABSENT), item, join(path, key)) for key, item in node.items()}

        def finish() -> None:
            values = {key: materialise(value, self._values) for key, value in made.items()}
            target.clear()
            target.update(values)
            target.update(kept)

        self._then(finish)
        return target

    def _bind_list(self, target: list[Any], node: list[Any], path: str) -> Any:
        kept = [
            item for index, item in enumerate(target[len(node) :], len(node)) if self._lose(item, join(path, index))
        ]
        made = [
            self._bind(target[index] if index < len(target) else ABSENT, item, join(path, index))
            for index, item in enumerate(node)
        ]

        def finish() -> None:
            target[:] = [*(materialise(value, self._values) for value in made), *kept]

        self._then(finish)
        return target

    def _lose(self, target: Any, path: str) -> bool:
        """Notes tensors and objects of the target that the checkpoint has nothing for; whether there are any."""
        found = objects_in(target, path)
        for where, kind in found:
            self._miss(where, f"{kind} in the target, nothing of that name in the checkpoint")
        return bool(found)

    def _miss(self, path: str, text: str) -> None:
        self._report.missing.append(path)
        if self.strict:
            self.mismatches.append(f"{path}: {text}")

    def _surplus(self, path: str, text: str) -> None:
        self._report.unexpected.append(path)
        self.surplus[path] = text

    def _plain(self, node: Any, path: str, target: Any = ABSENT, place: Place | None = None) -> Any:
        """A saved tree whose tensors get memory of their own.

        ``target`` shows how, where it has them too; ``place`` makes the memory instead, where it is given.
        """
        if type(node) is TensorRef:
            if place is not None:
                if self._add(path, place(node), node, fresh=True):
                    self._report.restored += 1
                return node
            like = target if isinstance(target, torch.Tensor) else None
            return self._bind_tensor(ABSENT if like is None else like, node, path, fresh=True)
        if type(node) in (dict, OrderedDict, defaultdict):
            items = ((k, self._plain(v, join(path, k), child(target, k), place)) for k, v in node.items())
            return defaultdict(node.default_factory, items) if type(node) is defaultdict else type(node)(items)
        if type(node) in (list, tuple, deque):
            walked = [self._plain(item, join(path, i), child(target, i), place) for i, item in enumerate(node)]
            return deque(walked, node.maxlen) if type(node) is deque else type(node)(walked)
        if type(node) is ObjectNode:
            return self._plain(node.tree, path, target, place)
        return node

    def _bind_tensor(self, target: Any, ref: TensorRef, path: str, *, fresh: bool = False) -> Any:
        """Where the bytes of a saved tensor go; returns the live tensor, or the reference to a new one."""
        if ref.form == "array":
            self._add(path, host(ref), ref, fresh=True)
            return ref
        live = isinstance(target, torch.Tensor) or type(target) is Sharded
        if not live:
            if target is not ABSENT and not fresh:
                self.mismatches.append(f"{path}: a {type(target).__name__} in the target, a tensor in the checkpoint")
            elif self._add(path, host(ref), ref, fresh=True):
                self._report.restored += 1
            return ref
        if fresh:
            made = torch.empty_like(target, dtype=torch_dtype(ref.dtype)) if tuple(target.shape) == ref.shape else None
            made = made if made is not None else host(ref).to(target.device)
            self._add(path, made, ref, fresh=True)
            self._report.restored += 1
            return ref
        if self._add(path, target, ref, fresh=False):
            self._report.restored += 1
        return target

    def _add(self, path: str, target: Any, ref: TensorRef, *, fresh: bool) -> bool:
        """Adds one tensor to what is read, after comparing dtype, shape and ties."""
        try:
            shard = self.table.describe(target)
        except UsageError as err:
            self.mismatches.append(f"{path}: the target is {err}")
            return False
        if shard.shape != ref.shape:
            self.mismatches.append(f"{path}: saved with shape {list(ref.shape)}, the target has {list(shard.shape)}")
            return False
        if shard.dtype != ref.dtype:
            if not self.cast:
                self.mismatches.append(
                    f"{path}: saved as {ref.dtype}, the target is {shard.dtype} (cast=True converts)"
                )
                return False
            temporary = torch.empty_like(target, dtype=torch_dtype(ref.dtype))
            self._casts[path] = (target, temporary)
            self._report.cast.append(path)
            shard = self.table.describe(temporary)
        if not all(map(writable, shard.locals)):
            self.mismatches.append(f"{path}: the target's elements share memory (an expanded or conjugated view)")
            return False
        if fresh:
            self._values[ref.key] = target
        if ref.own:
            self.own_targets[ref.key] = shard.locals[0] if shard.locals else target
            return True
        key = self.origin.aliases.get(ref.key, ref.key)
        if len(shard.locals) == 1 and shard.locals[0].numel():
            local = shard.locals[0]
            memory = (local.data_ptr(), local.stride(), shard.layout, shard.dtype)
            first = self._claimed.setdefault(memory, key)
            if first != key:
                self.mismatches.append(f"{path}: tied to {first} in the target, but saved as two separate tensors")
                return False
        layout = self.table.layouts[shard.layout]
        held = self._held.get(shard.layout)
        if held is None:
            held = self._held[shard.layout] = parts(layout, self.table.meshes, self.table.rank)
        for index, part in enumerate(held):
            view = shard.locals[index] if layout.boxes is not None else shard.locals[0]
            if layout.boxes is None and view.shape != part.box.sizes:
                for dim, (start, size) in enumerate(zip(part.local, part.box.sizes, strict=True)):
                    view = view.narrow(dim, start, size)
            self.wants.append(Want(key, part.box, view.is_contiguous()))
            self.targets.append(view)
        return True

    def _bind_rank(self, target: Any, node: RankRef, path: str) -> Any:
        """This rank's own value, by the rule that was saved with it."""
        world, rank = self.table.world, self.table.rank
        inner = target.value if type(target) is PerRank else target
        changed = world != self.origin.world
        if changed and node.rule == "error":
            self.mismatches.append(
                f"{path}: saved per rank on {self.origin.world} ranks, now there are {world};"
                " give per_rank an on_world_change rule, or leave the component out with only="
            )
            return target
        if rank >= self.origin.world:
            self._new_rank(inner, node, path)
            return target
        if changed:
            self._report.reset.append(f"{path}: ranks 0..{min(world, self.origin.world) - 1} as saved")
        value = self._bind(inner, self.origin.own.get(path), path)
        if value is not inner and type(target) is PerRank:
            self._then(lambda: setattr(target, "value", materialise(value, self._values)))
            return target
        return target if type(target) is PerRank else value

    def _new_rank(self, inner: Any, node: RankRef, path: str) -> None:
        inner = as_stateful(inner)
        if node.rule != "derive" or not hasattr(inner, "derive"):
            self._report.reset.append(f"{path}: rank {self.table.rank} is new and keeps what it has")
            return
        self._report.rederived.append(f"{path}: rank {self.table.rank} is new")
        saved = self.origin.own.get(path)
        tree = saved.tree if type(saved) is ObjectNode else saved
        self._then(lambda: inner.derive(tree, self.table.rank, self.table.world))

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
        holder = as_stateful(target)
        if hasattr(holder, "load_state_dict"):
            live = holder.state_dict() if has_tensors(node.tree) and hasattr(holder, "state_dict") else ABSENT
            tree = self._plain(node.tree, path, live)
            self._report.restored += not has_tensors(node.tree)
            self._then(lambda: holder.load_state_dict(materialise(tree, self._values)))
            return target
        if target is ABSENT or isinstance(target, dict):
            return self._plain(node.tree, path)
        self.mismatches.append(
            f"{path}: saved from a {node.type_name} ({node.kind}), the target is a {type(target).__name__}"
        )
        return target

    def _bind_accumulation(self, target: Accumulation, tree: dict[str, Any], path: str) -> Any:
        into = target.prepared(tree, self.origin.own.get(join(path, "own")))
        state = self._bind(into, tree, path)
        self._then(lambda: target.load_state_dict(materialise(state, self._values)))
        return target

    def _bind_module(self, target: nn.Module, tree: dict[str, Any], path: str) -> Any:
        module = unwrap(target)
        live = module_state(module, every_buffer=getattr(self.state, "non_persistent_buffers", False))
        memory = {pointer(t) for t in (*module.parameters(), *module.buffers())}
        values: dict[str, Any] = {}
        filled: set[str] = set()
        for name in live:
            if name not in tree and (isinstance(live[name], torch.Tensor) or is_extra_state(name)):
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
        self._then(lambda: restore_module(module, {**kept, **materialise(values, self._values)}, filled | kept.keys()))
        return target

    def _bind_optimizer(self, optimizer: torch.optim.Optimizer, tree: dict[str, Any], path: str) -> Any:
        view = OptimizerView(optimizer, names_of(self.state))
        fields, problems = match_groups(view, tree["param_groups"], path)
        self.mismatches.extend(problems)
        saved = dict.fromkeys(name for group in tree["param_groups"] for name in group["params"])
        for name in (name for name in view.parameters if name not in saved):
            self._miss(join(path, name), "a parameter of the target's groups, in no group of the checkpoint")
        for name in (name for name in saved if name not in view.parameters):
            self._surplus(join(path, name), "a parameter of the checkpoint's groups, in no group of the target")
        states: dict[Any, Any] = {}
        groups = {name: group for names, group in zip(view.group_names, fields, strict=True) for name in names}
        for name, node in tree["state"].items():
            if name in view.parameters:
                states[name] = self._bind_parameter_state(
                    view, name, node, groups[name], join(join(path, "state"), name)
                )
            elif name not in saved:
                states[name] = self._plain(node, join(join(path, "state"), name))
        bound = [self._plain(group, join(join(path, "param_groups"), i)) for i, group in enumerate(fields)]
        rest = {k: self._plain(v, join(path, k)) for k, v in tree.items() if k not in ("state", "param_groups")}
        self._report.restored += len(fields)

        def finish() -> None:
            values = materialise(states, self._values)
            groups = materialise(bound, self._values)
            if view.plain:
                set_state(view, values)
                apply_groups(view, groups)
            else:
                load_packed(view, {"state": values, **materialise(rest, self._values)}, groups)

        self._then(finish)
        return optimizer

    def _bind_parameter_state(self, view: OptimizerView, name: str, node: Any, group: dict[str, Any], path: str) -> Any:
        """State of one parameter: into the tensors that are there, or into new ones placed like the parameter."""
        parameter = view.parameters[name]
        live = view.optimizer.state.get(parameter, {}) if view.plain else {}
        siblings = node if isinstance(node, dict) else {}

        def place(ref: TensorRef) -> torch.Tensor:
            return state_like(parameter, ref, view.placed(name, ref, group, siblings))

        if not siblings:
            return self._plain(node, path, place=place)
        made = {}
        for key, item in node.items():
            below, there = join(path, key), live.get(key)
            held = there if type(item) is TensorRef and isinstance(there, torch.Tensor) else None
            if held is not None and fits(held, item, parameter, view.placed(name, item, group, siblings)):
                made[key] = self._bind_tensor(held, item, below)
            else:
                made[key] = self._plain(item, below, place=place)
        return made
