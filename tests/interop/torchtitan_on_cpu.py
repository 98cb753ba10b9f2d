"""torchtitan insists on a device: this lets its Trainer run on the host. Import it before anything of torchtitan.

    python -m tests.interop.torchtitan_on_cpu --module train_torchtitan --config small ...

is then ``python -m torchtitan.train`` with the same arguments. What is put in the place of a device does nothing and tells
numbers that nobody uses; attention is computed by a function that hosts have.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._utils

ROOT = Path(__file__).resolve().parents[2]


class Nothing(types.ModuleType):
    """A module in which every name is there, and None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def stand_in() -> None:
    """Puts the host in the place of the device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # Masks are made by a function that it takes seconds to compile.
    torch._dynamo.config.disable = True
    host: Any = torch.cpu
    host.get_device_name = lambda *_: "host"
    host.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    host.memory_stats = lambda *_: {}
    host.reset_peak_memory_stats = host.empty_cache = lambda: None
    if importlib.util.find_spec("triton") is None:
        # Kernels for devices.
        name = "torchtitan.distributed.minimal_async_ep.kernels"
        sys.modules[name] = Nothing(name)


stand_in()

import torch.nn.functional as F  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.pipelining import schedules  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan import trainer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.train import main  # noqa: E402


def attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
    """That of FlexAttention, which has no backward pass on hosts."""
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], "cpu")
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


FlexAttention._compiled_flex_attn = staticmethod(attention)
divide = FSDPModule.set_gradient_divide_factor


def divide_as_gloo_can(module: FSDPModule, factor: float) -> None:
    """It cannot multiply while it adds."""
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = divide_as_gloo_can


def step_of_a_pipeline(
    schedule: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
) -> None:
    """As torch 2.14 has it: microbatches come apart."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs or None, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


schedules.PipelineScheduleSingle.step = schedules.PipelineScheduleMulti.step = step_of_a_pipeline
# A barrier of nccl names its device by number.
utils.set_pg_timeouts = lambda **_: None
# At the end it sleeps for the others.
trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def prepare() -> None:
    """As under torchrun, with every stream of random numbers seeded: torchtitan seeds that of torch alone."""
    os.environ |= {name: os.environ.get(name, value) for name, value in ALONE.items()}
    sys.path.insert(0, str(ROOT / "examples"))
    random.seed(1)
    np.random.seed(1)


if __name__ == "__main__":
    prepare()
    main()
