"""Random number streams: of the process and its devices, and of generators that a program has made for itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from keepstep.format.objects import encode
from keepstep.format.shardfile import digest

__all__ = ["OwnStream", "RngStreams", "as_stateful"]


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


class OwnStream:
    """A generator of the program's own as an object with a state_dict; the generator keeps its identity."""

    def __init__(
        self, generator: random.Random | np.random.Generator | np.random.RandomState | torch.Generator
    ) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The state as a copy."""
        match self._generator:
            case torch.Generator() as own:
                return {"state": own.get_state().numpy().tobytes()}
            case np.random.Generator() as own:
                return {"state": dict(own.bit_generator.state)}
            case np.random.RandomState() as own:
                return {"state": dict(own.get_state(legacy=False))}
            case own:
                return {"state": own.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the generator where it was. One of another algorithm or device refuses, each with an error of its own."""
        match self._generator:
            case torch.Generator() as own:
                own.set_state(_bytes_tensor(state["state"]))
            case np.random.Generator() as own:
                own.bit_generator.state = state["state"]
            case np.random.RandomState() as own:
                own.set_state(state["state"])
            case own:
                own.setstate(state["state"])

    def derive(self, state: dict[str, Any], rank: int, world: int) -> None:
        """Seeds a new stream for a rank that had none: distinct by rank, the same at every load of the same state."""
        seed = digest(encode(state) + rank.to_bytes(8, "little") + world.to_bytes(8, "little"))
        match self._generator:
            case torch.Generator() as own:
                own.manual_seed(seed % (1 << 63))
            case np.random.Generator() as own:
                own.bit_generator.state = type(own.bit_generator)(seed).state
            case np.random.RandomState() as own:
                own.seed(seed % (1 << 32))
            case own:
                own.seed(seed)


def as_stateful(value: Any) -> Any:
    """A generator as an object with a state_dict; anything else as it is. What the system draws from has no state."""
    own = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
    return OwnStream(value) if isinstance(value, own) and not isinstance(value, random.SystemRandom) else value


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
