"""Random number streams: of the process and its devices, and of generators that a program has made for itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["GENERATOR", "OwnStream", "RngStreams", "as_stateful", "is_generator", "new_generator", "stream_for"]

GENERATOR = "generator"
"""The kind of a saved object that was a generator."""
Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_DEVICES = ("cuda", "xpu")
_BITS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.MT19937, np.random.SFC64)
}
# Added to a seed for all generators of a rank: what is seeded alike and works alike would give the same numbers.
_PYTHON, _NUMPY = 0x9F86D081884C7D65, 0x2CF24DBA5FB0A30E


class RngStreams:
    """The global generators as one object with a state_dict. Every rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """The states, as copies. Device generators are asked for only where the device is in use already."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": dict(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        for name in _DEVICES:
            if _in_use(name):
                state[name] = [item.numpy().tobytes() for item in getattr(torch, name).get_rng_state_all()]
        if torch.backends.mps.is_available():
            state["mps"] = torch.mps.get_rng_state().numpy().tobytes()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the generators back. Streams of devices that are not here are left alone; ``lacking`` says which."""
        _check_numpy(state["numpy"], np.random.get_state(legacy=False))
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        for name in _DEVICES:
            for index, item in enumerate(state.get(name, ())[: _devices(name)]):
                getattr(torch, name).set_rng_state(_bytes_tensor(item), index)
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(_bytes_tensor(state["mps"]))

    def lacking(self, state: dict[str, Any]) -> list[str]:
        """What a state has for devices that are not here, and what devices that are here miss in it."""
        found = []
        counts = [(name, len(state.get(name, ())), _devices(name), _in_use(name)) for name in _DEVICES]
        mps = torch.backends.mps.is_available()
        for name, saved, here, used in (*counts, ("mps", int("mps" in state), int(mps), mps)):
            if saved > here:
                found.append(f"{name}:{_span(here, saved)} saved, no such device here; left out")
            elif here > saved and (saved or used):
                found.append(f"{name}:{_span(saved, here)} not saved; as before the load")
        return found

    def derive(self, state: object, seed: int) -> None:
        """Seeds new streams for a rank that had none."""
        random.seed(seed ^ _PYTHON)
        np.random.seed((seed ^ _NUMPY) % (1 << 32))
        torch.manual_seed(seed)


class OwnStream:
    """A generator of the program's own as an object with a state_dict; the generator keeps its identity."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The state as a copy. ``of`` says whose: those of one library do not fit into another."""
        match self.generator:
            case torch.Generator() as own:
                return {"of": "torch", "device": str(own.device), "state": own.get_state().numpy().tobytes()}
            case np.random.Generator() as own:
                return {"of": "numpy", "state": dict(own.bit_generator.state)}
            case np.random.RandomState() as own:
                return {"of": "numpy, legacy", "state": dict(own.get_state(legacy=False))}
            case own:
                return {"of": "python", "state": own.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the generator where it was.

        Raises:
            ValueError: see ``misfit``.
        """
        if problem := self.misfit(state):
            raise ValueError(problem)
        _set_state(self.generator, state["state"])

    def misfit(self, state: object) -> str:
        """Why the generator cannot take a saved state: another library, algorithm or device, or no state at all."""
        live = self.state_dict()
        if not isinstance(state, dict) or state.keys() != live.keys() or state["of"] != live["of"]:
            return f"no state of a generator of {live['of']}"
        if live["of"] == "torch" and _device_type(state["device"]) != _device_type(live["device"]):
            return f"saved from a generator on {state['device']}, this one is on {live['device']}"
        try:
            if live["of"].startswith("numpy"):
                _check_numpy(state["state"], live["state"])
            if type(self.generator) in (torch.Generator, random.Random):
                # Tried on another one: this one must not change before everything is known to fit.
                trial = new_generator(live)
                _set_state(trial, state["state"])
        except (LookupError, ValueError, TypeError, OverflowError, RuntimeError) as err:
            return f"not the state of such a generator: {err}"
        return ""

    def derive(self, state: object, seed: int) -> None:
        """Seeds a new stream for a rank that had none."""
        match self.generator:
            case torch.Generator() as own:
                own.manual_seed(seed)
            case np.random.Generator() as own:
                own.bit_generator.state = type(own.bit_generator)(seed).state
            case np.random.RandomState() as own:
                own.set_state(_BITS[own.get_state(legacy=False)["bit_generator"]](seed).state)
            case own:
                own.seed(seed)


def is_generator(value: object) -> bool:
    """Whether it is a generator with a state; one that draws from the system has none."""
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def as_stateful(value: Any) -> Any:
    """A generator as an object with a state_dict; anything else as it is."""
    return OwnStream(value) if is_generator(value) else value


def stream_for(target: Any, state: dict[str, Any]) -> tuple[OwnStream | None, str]:
    """The generator that a saved state belongs to, or a new one for None; or None and why there is none."""
    if target is None:
        try:
            return OwnStream(new_generator(state)), ""
        except (LookupError, ValueError, TypeError, OverflowError, RuntimeError) as err:
            return None, f"the generator in the checkpoint cannot be made here: {err}"
    if not is_generator(target):
        return None, f"a {type(target).__name__} in the target, a generator in the checkpoint"
    problem = OwnStream(target).misfit(state)
    return (None, problem) if problem else (OwnStream(target), "")


def new_generator(state: dict[str, Any]) -> Generator:
    """A new generator that stands where the saved one did.

    Raises:
        LookupError, ValueError, TypeError, OverflowError, RuntimeError: none can be made: an algorithm that is not known
            here, no such device, no such state.
    """
    made: Generator
    if state["of"] == "torch":
        made = torch.Generator(device=state["device"])
    elif state["of"] == "python":
        made = random.Random(0)
    else:
        bits = _BITS[state["state"]["bit_generator"]](0)
        made = np.random.Generator(bits) if state["of"] == "numpy" else np.random.RandomState(bits)
        live = OwnStream(made).state_dict()
        _check_numpy(state["state"], live["state"])
    _set_state(made, state["state"])
    return made


def _set_state(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator() as own:
            own.set_state(_bytes_tensor(state))
        case np.random.Generator() as own:
            own.bit_generator.state = state
        case np.random.RandomState() as own:
            own.set_state(state)
        case own:
            own.setstate(state)


def _check_numpy(state: Any, live: Any) -> None:
    """Compares a saved state with that of a live generator, which takes any and reads beyond the end of a short one."""
    if isinstance(live, dict):
        if not isinstance(state, dict) or state.keys() != live.keys():
            raise ValueError(f"it has {sorted(state) if isinstance(state, dict) else state!r}, not {sorted(live)}")
        for key, item in live.items():
            _check_numpy(state[key], item)
        for place, held in (("pos", "key"), ("buffer_pos", "buffer")):
            if place in live and held in live and not 0 <= state[place] <= len(live[held]):
                raise ValueError(f"{place} {state[place]} is not within {len(live[held])}")
    elif isinstance(live, np.ndarray):
        if not isinstance(state, np.ndarray) or (state.dtype, state.shape) != (live.dtype, live.shape):
            raise ValueError(f"{state!r} is no array of {live.shape} {live.dtype}")
    elif isinstance(live, str) and state != live:
        raise ValueError(f"saved from {state}, this one is {live}")
    elif type(state) is not type(live):
        raise ValueError(f"{state!r} is no {type(live).__name__}")


def _devices(name: str) -> int:
    """How many devices of a kind are here."""
    module = getattr(torch, name)
    return int(module.device_count()) if module.is_available() else 0


def _in_use(name: str) -> bool:
    module = getattr(torch, name)
    return bool(module.is_available() and module.is_initialized())


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}..{stop - 1}"


def _device_type(device: object) -> str:
    return str(device).partition(":")[0]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
