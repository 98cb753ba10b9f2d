"""How far the run is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keepstep.errors import UsageError

__all__ = ["Progress", "metric"]


@dataclass(slots=True)
class Progress:
    """Optimizer steps finished, samples and tokens consumed by all ranks, and the epoch. Part of every TrainState."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The four numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the four numbers; unknown ones from a later version are ignored."""
        for name in ("step", "samples", "tokens", "epoch"):
            setattr(self, name, int(state.get(name, 0)))


def metric(name: str, value: Any) -> Any:
    """A metric as a float. A tensor on a device stays one until a save is due: reading it would wait for the device."""
    value = value.detach() if hasattr(value, "detach") else value
    if getattr(value, "is_cuda", False) and value.numel() == 1:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise UsageError(f"metrics are numbers, one each; {name} is a {type(value).__name__}: {err}") from err
