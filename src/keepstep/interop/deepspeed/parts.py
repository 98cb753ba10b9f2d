"""The parts of an engine's state, each as plain PyTorch would show it: weights, optimizer, counts.

With ZeRO every rank holds a part of long flat buffers. Those are saved as they lie, without a gather, as slices of named
parameters. Keys are those of the module and of an optimizer of torch, so that any stage on any number of ranks takes them,
and so does a program without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.errors import MismatchError, UsageError
from keepstep.interop.deepspeed.buffers import Buffer, buffers, divided, frozen, microbatches
from keepstep.state import Flat, Sharded, flat
from keepstep.state.module import is_extra_state, module_state, parameter_names, unwrap
from keepstep.state.optimizer import OptimizerView, apply_groups, match_groups

__all__ = ["Counts", "Moments", "Weights"]

COUNTS = ("global_steps", "global_samples", "skipped_steps")
_AGAIN = "Weights, and state that the optimizer has already, hold what was saved: load again before going on."
SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Counts:
    """What the engine counts, and its loss scale where that changes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """The numbers.

        Raises:
            UsageError: an update is not done yet: its gradients lie where nobody else can name them.
        """
        if micro := microbatches(self._engine):
            raise UsageError(
                f"gradients of {micro} microbatches are accumulated: save where the engine has done an update"
            )
        scaler = self._scaler()
        scale = {name: getattr(scaler, name) for name in SCALES if hasattr(scaler, name)}
        return {**{name: getattr(self._engine, name) for name in COUNTS}, "loss_scaler": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets them; the next microbatch is the first one of an update.

        Raises:
            UsageError: gradients of an update are accumulated, which cannot be taken back.
        """
        if microbatches(self._engine):
            raise UsageError("an update has begun: restore before its first microbatch, or after its last one")
        for name in COUNTS:
            setattr(self._engine, name, state[name])
        self._engine.micro_steps = self._engine.global_steps * self._engine.gradient_accumulation_steps()
        scaler = self._scaler()
        for name, value in state["loss_scaler"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)

    def _scaler(self) -> Any:
        """The scaler; None where the scale is as it was configured."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None


class Weights:
    """The module: of parameters that are trained the fp32 weights, all else as it is there."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> Flat:
        """Every entry of the module's state_dict of which this rank holds something."""
        module = unwrap(self._engine.module)
        held: dict[str, Any] = {}
        known: set[str] = set()
        for buffer in buffers(self._engine):
            part = flat(buffer.weights.detach(), buffer.pieces, in_place=True)
            held.update(part)
            known |= part.names
        first = parameter_names(module)
        for name, value in module_state(module).items():
            own = first.get(id(value), name) == name
            # A tied parameter is stored under its first name alone.
            if own and name not in known:
                held.update(frozen(name, value) if hasattr(value, "ds_tensor") else {name: value})
            known.add(name)
        return Flat(held, frozenset(known))

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Fills the buffers, and makes of them the parameters that are computed with. Collective.

        Raises:
            UsageError: lists the names that are missing.
        """
        module = unwrap(self._engine.module)
        if divided(self._engine):
            self._engine.optimizer._partition_all_parameters()
        here = self.state_dict()
        values = {name for name in here if is_extra_state(name)}
        tensors = Flat({name: held for name, held in here.items() if name not in values}, here.names)
        tensors.copy_({name: value for name, value in given.items() if name not in values})
        for name in values & given.keys():
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(given[name])
        self._spread()

    def _spread(self) -> None:
        zero = self._engine.optimizer
        if not divided(self._engine):
            zero.update_lp_params()
            return
        with torch.no_grad():
            for low, high in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
                low.copy_(high)
        # Small parameters are whole on every rank between steps, too.
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()


class Moments:
    """The optimizer under ZeRO: its state by parameter, and its groups with their fields."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer: torch.optim.Optimizer = engine.optimizer.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Of the slices of this rank. Before the first update it is zeros in the right places, and ``begun`` is False.

        Raises:
            UsageError: a kind of state that has no element for each weight.
        """
        state: dict[str, Any] = {}
        known: set[str] = set()
        here = buffers(self._engine)
        begun = any(self._optimizer.state.get(buffer.weights) for buffer in here)
        for buffer in here:
            rows, numbers = self._kinds(buffer)
            held = flat(rows, buffer.pieces, in_place=True) if rows else {}
            # A number stands beside every parameter, as torch has it. Each is asked for once: it may be on a device.
            beside = {kind: float(value) for kind, value in numbers.items()}
            for kinds in held.values():
                kinds.update({kind: torch.tensor(value) for kind, value in beside.items()})
            state.update(held)
            known.update(piece.name for piece in buffer.pieces)
        groups = [
            {"params": names, **{key: value for key, value in group.items() if key not in ("params", "param_names")}}
            for names, group in zip(self._group_names(here), self._optimizer.param_groups, strict=True)
        ]
        tree = {"state": Flat(state, frozenset(known)), "param_groups": groups}
        return tree if begun else {**tree, "begun": False}

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Takes over what was read into the buffers, and sets the fields of groups.

        Raises:
            MismatchError: lists parameters, kinds of state and fields of groups that do not fit.
            UsageError: as for ``state_dict``.
        """
        here = buffers(self._engine)
        view = OptimizerView(self._optimizer, {})
        view.group_names = self._group_names(here)
        fields, problems = match_groups(view, given["param_groups"], "optimizer")
        saved = {name for group in given["param_groups"] for name in group["params"]}
        problems += [f"{name}: in no saved group" for names in view.group_names for name in names if name not in saved]
        begun = given.get("begun", True) and bool(given["state"])
        for buffer in here if begun else []:
            problems += _misfits(buffer, self._alike(buffer), given["state"])
        if problems:
            raise MismatchError("the optimizer was saved otherwise:", problems, _AGAIN)
        for buffer in here:
            if begun:
                self._take(buffer, given["state"])
            else:
                self._optimizer.state.pop(buffer.weights, None)
        apply_groups(view, fields)
        if hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            # Views of this state for the engine's own tools: made anew after the next update.
            self._engine.optimizer._link_all_hp_params()
            self._engine.optimizer._hp_optimizer_states_linked = False

    def _group_names(self, here: list[Buffer]) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in self._optimizer.param_groups]
        for buffer in here:
            names[buffer.group].extend(piece.name for piece in buffer.pieces)
        return names

    def _take(self, buffer: Buffer, given: Mapping[str, Any]) -> None:
        """Gives a buffer the state that was saved of its parameters; one of padding alone gets a state of zeros."""
        names = _held(buffer)
        saved = given[names[0]] if names else {}
        live: dict[str, Any] = self._optimizer.state.get(buffer.weights) or self._begin(buffer, saved)
        rows = {kind: live[kind] for kind, value in saved.items() if isinstance(value, Sharded)}
        if rows:
            # Nothing is copied of what was read in place.
            held = flat(rows, buffer.pieces)
            held.copy_({name: {kind: given[name][kind] for kind in rows} for name in held})
        for kind in saved.keys() - rows.keys():
            number, value = live[kind], float(saved[kind])
            live[kind] = number.fill_(value) if isinstance(number, torch.Tensor) else type(number)(value)
        if live:
            self._optimizer.state[buffer.weights] = live

    def _begin(self, buffer: Buffer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A first state for a buffer: of the memory that ``state_dict`` has made for it, where a load has filled that."""
        bases = {kind: part.locals[0]._base for kind, part in saved.items() if isinstance(part, Sharded)}
        filled = {kind: base for kind, base in bases.items() if base is not None and base.shape == buffer.weights.shape}
        if bases and len(filled) == len(bases):
            return {kind: filled.get(kind, value) for kind, value in self._alike(buffer).items()}
        rows, numbers = self._kinds(buffer)
        return {**rows, **numbers}

    def _alike(self, buffer: Buffer) -> dict[str, Any]:
        """The state of a buffer; before the first update that of a single weight, found out with an optimizer of its own."""
        live: dict[str, Any] | None = self._optimizer.state.get(buffer.weights)
        if not live:
            kind = type(self._optimizer)
            probe = torch.nn.Parameter(torch.zeros_like(buffer.weights[:1]))
            probe.grad = torch.zeros_like(probe)
            try:
                alone = kind([{**self._optimizer.param_groups[buffer.group], "params": [probe]}])  # type: ignore[call-arg]
                alone.step()
            except (TypeError, ValueError, RuntimeError, AttributeError) as err:
                raise UsageError(
                    f"{kind.__name__} has no state before its first update, and none could be foreseen: {err}"
                ) from err
            live = alone.state[probe]
        return {kind: value for kind, value in live.items() if value is not None}

    def _kinds(self, buffer: Buffer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The state of a buffer: what has an element for each weight, and what is one number, such as the step."""
        alike = self._alike(buffer)
        numbers = {kind: value for kind, value in alike.items() if _is_number(value)}
        rows = {kind: value for kind, value in alike.items() if kind not in numbers}
        if not self._optimizer.state.get(buffer.weights):
            rows = {kind: torch.zeros_like(buffer.weights, dtype=value.dtype) for kind, value in rows.items()}
            numbers = {kind: value * 0 for kind, value in numbers.items()}
        strange = [kind for kind, value in rows.items() if getattr(value, "shape", None) != buffer.weights.shape]
        if strange:
            name = type(self._optimizer).__name__
            raise UsageError(
                f"the state {', '.join(strange)} of {name} has no element for each weight: cannot be named"
            )
        return rows, numbers


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (isinstance(value, torch.Tensor) and not value.dim())


def _held(buffer: Buffer) -> list[str]:
    """The parameters that a buffer holds something of."""
    return list(dict.fromkeys(piece.name for piece in buffer.pieces if piece.elements))


def _misfits(buffer: Buffer, kinds: dict[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """What was saved otherwise than this buffer has it."""
    names = _held(buffer)
    for name in names:
        there = given.get(name, {}).keys()
        if there != kinds.keys():
            yield f"{name}: saved with the state {sorted(there)}, the optimizer has {sorted(kinds)}"
    for kind in (kind for kind, value in kinds.items() if _is_number(value)):
        values = {float(given[name][kind]) for name in names if kind in given.get(name, {})}
        if len(values) > 1:
            yield f"{kind}: {sorted(values)} in parameters that share one buffer: {', '.join(names)}"
