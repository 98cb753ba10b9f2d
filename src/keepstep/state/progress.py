"""How far the run is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Progress"]


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
