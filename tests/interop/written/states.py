"""The states in the checkpoints beside this file: the same numbers under every torch, with nothing random in them.

Runs under any torch since 2.3, without keepstep.
"""

from __future__ import annotations

import collections
import io
from typing import Any

import torch


def tensors(*, unsigned: bool) -> dict[str, torch.Tensor]:
    """One of each dtype, and shapes and memory that are not plain; ``unsigned`` too, which torch 2.3 cannot save."""
    found: dict[str, torch.Tensor] = {}
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"):
        found[name] = (torch.arange(12) - (0 if name == "uint8" else 5)).to(getattr(torch, name)).reshape(3, 4)
    found["bool"] = torch.tensor([True, False, True])
    found["complex64"] = torch.tensor([1 + 2j, -0.5j])
    found["complex128"] = torch.tensor([1e300 - 1j, float("inf")], dtype=torch.complex128)
    for name in ("float8_e4m3fn", "float8_e5m2", *(("uint16", "uint32", "uint64") if unsigned else ())):
        size = 1 if name.startswith("float8") else int(name[4:]) // 8
        found[name] = torch.arange(4 * size, dtype=torch.uint8).view(getattr(torch, name))
    found["scalar"] = torch.tensor(2.5)
    found["nothing"] = torch.zeros(0, 3)
    found["nan"] = torch.tensor([float("nan"), -0.0, float("-inf")])
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    found["turned"] = base.permute(2, 0, 3, 1)
    found["view"] = base[1, 1:]
    found["wide"] = torch.ones(1).expand(3, 4)
    return found


def values() -> dict[str, Any]:
    """Plain values that torch's checkpoints and its weights-only reader both know."""
    return {
        "none": None,
        "huge": 1 << 90,
        "float": 0.1,
        "text": "ä/b~",
        "bytes": b"\x00\xff",
        "truth": True,
        "int": 7,
        "list": [1, True, -0.0, float("inf"), "two", None, [3.0]],
        "pair": (1, ("x", None)),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "empty": {"list": []},
        "rng": torch.arange(64, dtype=torch.uint8),
    }


def containers() -> dict[str, Any]:
    """Values that a weights-only reader does not know, and that torch's checkpoints hold all the same."""
    file = io.BytesIO(b"in memory")
    file.seek(3)
    return {
        "default": (collections.defaultdict(list, a=[1]),),
        "deque": collections.deque([1, 2], 5),
        "file": file,
        "python_rng": (3, tuple(range(20)), None),
    }


def whole() -> dict[str, torch.Tensor]:
    """What the two ranks have parts of."""
    return {
        "rows": torch.arange(60.0).reshape(10, 6),
        "uneven": torch.arange(21.0).reshape(7, 3),
        "less": torch.arange(4.0).reshape(1, 4),
        "columns": torch.arange(36.0).reshape(4, 9).bfloat16(),
        "same": torch.arange(5),
        "table": torch.arange(24.0).reshape(8, 3),
    }
