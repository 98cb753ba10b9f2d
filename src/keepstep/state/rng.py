"""Random number streams of this process: python, numpy, torch on the host and on every device it has touched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from keepstep.format.shardfile import digest

__all__ = ["RngStreams"]


class RngStreams:
    """The global generators as one object with a state_dict. Every rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """The states, as copies. Device generators are asked for only where the device is in use already."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": dict(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [item.numpy().tobytes() for item in torch.cuda.get_rng_state_all()]
        if torch.backends.mps.is_available():
            state["mps"] = torch.mps.get_rng_state().numpy().tobytes()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the generators back. Streams of devices that are not here are left alone."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            for index, item in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_bytes_tensor(item), index)
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(_bytes_tensor(state["mps"]))

    def derive(self, state: dict[str, Any], rank: int, world: int) -> None:
        """Seeds new streams for a rank that had none: distinct by rank, the same at every load of the same state."""
        seed = digest(state["torch"] + rank.to_bytes(8, "little") + world.to_bytes(8, "little"))
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed % (1 << 63))


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
