"""An update in the making: gradients of the microbatches so far, while their optimizer has not stepped yet.

Part of a state only between the first microbatch of an update and the update itself. A gradient that is a DTensor is kept
like its parameter. Any other is this rank's own: without synchronisation every data-parallel rank has summed up other ones.
On another number of ranks each gets the mean of all, which is what data-parallel ranks make of them before the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.state.capture import names_of
from keepstep.state.marks import Coordinates, PerRank
from keepstep.state.shard import is_dtensor

__all__ = ["ACCUMULATION", "Accumulation"]

ACCUMULATION = "accumulation"
"""The name of the component."""


class Accumulation:
    """How many microbatches of the next update are done, and the gradients they have left in the parameters.

    Args:
        components: of the state; the modules among them have the parameters.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.micro = 0
        self._components = components

    def state_dict(self) -> dict[str, Any]:
        """The count and the live gradients by parameter name; ``own`` are those of this rank alone.

        Raises:
            UsageError: gradients that are out of reach.
        """
        sharded: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters().items():
            if parameter.grad is not None:
                (sharded if is_dtensor(parameter.grad) else own)[name] = parameter.grad
        hidden = [name for name, module in self._modules().items() if _holds_unreduced(module)]
        if hidden:
            raise UsageError(
                f"{', '.join(hidden)}: FSDP2 holds gradients that were not reduced (set_requires_gradient_sync(False));"
                " they cannot be saved. Save at a step boundary, or let every microbatch reduce its gradients"
            )
        return {"micro": self.micro, "gradients": sharded, "own": PerRank(own, mean_of_gradients)}

    def prepared(self, tree: Mapping[str, Any], own: Any) -> dict[str, Any]:
        """Memory for saved gradients, placed like their parameters; names that are not here have none.

        Args:
            tree: what was saved for all ranks.
            own: what was saved for this rank alone, by name.
        """
        parameters = self._parameters()

        def like(names: Any) -> dict[str, torch.Tensor]:
            known = [name for name in names or () if name in parameters]
            return {name: torch.empty_like(parameters[name], requires_grad=False) for name in known}

        return {"micro": 0, "gradients": like(tree.get("gradients")), "own": PerRank(like(own), mean_of_gradients)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the parameters their gradients, and none where none was."""
        self.micro = int(state["micro"])
        own = state["own"]
        found = {**state["gradients"], **(own.value if isinstance(own, PerRank) else own)}
        for name, parameter in self._parameters().items():
            gradient = found.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def drop(self) -> None:
        """The update begins anew: what was accumulated for it is gone."""
        if self.micro:
            self.load_state_dict({"micro": 0, "gradients": {}, "own": {}})

    def _modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self._components.items() if isinstance(value, nn.Module)}

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by the name it has in the state."""
        names = names_of(self._components)
        live = {id(p): p for module in self._modules().values() for p in module.parameters()}
        return {names[key]: parameter for key, parameter in live.items() if key in names}


def mean_of_gradients(saved: list[tuple[Coordinates, dict[str, torch.Tensor]]], here: Coordinates) -> dict[str, Any]:
    """The rule for another number of ranks: of every gradient the mean over the ranks that had one. On the host."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for _, gradients in saved:
        for name, gradient in gradients.items():
            by_name.setdefault(name, []).append(gradient)
    return {name: torch.stack(each).to(torch.float64).mean(0).to(each[0].dtype) for name, each in by_name.items()}


def _holds_unreduced(module: nn.Module) -> bool:
    """Whether FSDP2 keeps whole gradients inside, because it was told not to reduce them yet."""
    for child in module.modules():
        find: Any = getattr(child, "_get_fsdp_state", None)
        state = find() if find is not None else None
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            for held in getattr(group, "fsdp_params", ()):
                whole = getattr(held, "_unsharded_param", None)
                if held.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None:
                    return True
    return False
