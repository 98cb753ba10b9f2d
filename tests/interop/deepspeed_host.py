"""DeepSpeed as a host has it that has no compiler: no kernels are built while tests run. And with float16, if slow."""

from __future__ import annotations

import importlib
import logging
from unittest import mock

import deepspeed
import deepspeed.ops

deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
deepspeed.get_accelerator().is_fp16_supported = lambda: True
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Imported by the first engine, for an optimizer that nobody takes here: to compile its steps brings in all of inductor.
with mock.patch("torch.compile", lambda step=None, **_: step or (lambda later: later)):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
