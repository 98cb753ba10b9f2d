"""The state of a training run as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keepstep.errors import UsageError
from keepstep.state.fence import fence
from keepstep.state.marks import PerRank
from keepstep.state.progress import Progress
from keepstep.state.rng import RngStreams

__all__ = ["TrainState"]

_OWN = ("rng", "progress")


class TrainState(Mapping[str, Any]):
    """Everything the next update depends on, by component.

    ``rng`` (python, numpy, torch on the host and every device; per rank) and ``progress`` (step, samples, tokens, epoch)
    are always part of it. Names are free; ``model``, ``optimizer``, ``scheduler``, ``scaler`` and ``data`` are customary.

    Args:
        components: modules, optimizers, schedulers, objects with state_dict/load_state_dict, plain values, dicts, tensors.
            None is left out, so that ``scaler=scaler if amp else None`` works.

    Raises:
        UsageError: a component is called ``rng`` or ``progress``.
    """

    def __init__(self, **components: Any) -> None:
        taken = [name for name in _OWN if name in components]
        if taken:
            raise UsageError(f"{', '.join(taken)}: part of every TrainState; give the component another name")
        self.progress = Progress()
        self.fenced_by_hand = False
        self._components = {name: value for name, value in components.items() if value is not None}
        self._components["rng"] = PerRank(RngStreams(), "derive")
        self._components["progress"] = self.progress

    def __getitem__(self, name: str) -> Any:
        """The component of that name."""
        return self._components[name]

    def __iter__(self) -> Iterator[str]:
        """Component names, in the order given."""
        return iter(self._components)

    def __len__(self) -> int:
        """The number of components, ``rng`` and ``progress`` included."""
        return len(self._components)

    def fence(self) -> None:
        """Call it before changing tensors by hand: waits until a save in progress has copied what it needs.

        Optimizers of ``torch.optim`` do so by themselves before their step. From the first call on, the parameters of all
        modules are copied while training goes on, not only those of the state's optimizers: every change by hand must
        then come after such a call.
        """
        self.fenced_by_hand = True
        fence()

    def replace_value(self, name: str, value: Any) -> None:
        """Puts another plain value in the place of a component that is one; a load uses it."""
        self._components[name] = value

    def __repr__(self) -> str:
        """Component names and types."""
        inside = ", ".join(f"{name}={type(value).__name__}" for name, value in self._components.items())
        return f"TrainState({inside})"
