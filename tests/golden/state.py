"""What the golden checkpoints hold: the same in every version, so that each can be compared with it."""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePosixPath

import numpy as np
import torch


def tensors() -> dict[str, torch.Tensor]:
    """Whole tensors by name."""
    made = {
        "float32": torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7,
        "bfloat16": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "float8_e4m3fn": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "complex128": torch.arange(3).to(torch.complex128) * (1 - 2j),
        "bool": torch.tensor([[True, False], [False, True]]),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "ü/~ 日本": torch.tensor([1, 2, 3], dtype=torch.int8),
    }
    generator = torch.Generator().manual_seed(0)
    made["large"] = torch.randint(0, 256, (300, 20), dtype=torch.uint8, generator=generator)
    return made


def values() -> dict:
    """One of every plain value that needs no class of the user's."""
    return {
        "none": None, "true": True, "int": -7, "big": 2**200, "float": 0.1, "special": [float("inf"), -0.0],
        "str": "ü\ud800", "bytes": b"\0\xff", "bytearray": bytearray(b"x"), "complex": 1 - 2j, "tuple": (1, (2,)),
        "set": {1, "a"}, "frozenset": frozenset({2}), "dict": {1: "a", "1": "b", None: (), (1, 2): 3}, "dollar": {"$": 1},
        "ordered": OrderedDict([("b", 1), ("a", 2)]), "counter": Counter("aab"), "default": defaultdict(list, {"x": [1]}),
        "deque": deque([1, 2], maxlen=3), "path": PurePosixPath("a/b"), "date": dt.date(2024, 2, 29),
        "datetime": dt.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        "timedelta": dt.timedelta(days=-1, microseconds=3), "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "numpy": np.float32(1.5), "text": np.str_(""), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }  # fmt: skip


def own(rank: int) -> dict:
    """What rank ``rank`` had for itself."""
    return {"stream": torch.full((3,), rank, dtype=torch.int32), "name": f"rank {rank}"}
