"""Equal to the last bit and in every type: what a test means when it says that something came back."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

__all__ = ["assert_same", "bits", "rng_state"]


def assert_same(a: object, b: object, path: str = "") -> None:
    """Fails unless both are equal in type, structure, order of keys, dtype, shape and bits, all the way down."""
    assert type(a) is type(b), f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), path
        assert bits(a) == bits(b), f"{path}: {a} and {b}"
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{path}: {list(a)} and {list(b)}"
        assert [type(key) for key in a] == [type(key) for key in b], path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{path}: {len(a)} and {len(b)} items"
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{index}")
    elif isinstance(a, float):
        assert np.float64(a).tobytes() == np.float64(b).tobytes(), f"{path}: {a} and {b}"
    elif dataclasses.is_dataclass(a) and not isinstance(a, type):
        assert_same(vars(a), vars(b), path)
    else:
        assert a == b, f"{path}: {a!r} and {b!r}"


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order, as bytes."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def rng_state() -> tuple[object, ...]:
    """Where the global generators of python, numpy and torch stand."""
    numpy = np.random.get_state(legacy=False)
    return random.getstate(), numpy["state"]["key"].tobytes(), numpy["state"]["pos"], torch.get_rng_state().tolist()
