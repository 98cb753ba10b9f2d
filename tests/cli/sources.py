"""One state in every format that the commands read."""

from __future__ import annotations

import safetensors.torch
import torch

import keepstep as ks
from tests.interop import dcp_checks


def write_all(root, state, tied=()):
    """``step``, ``dcp``, ``file.pt`` and ``hub`` in the folder; the last has the model alone, without what is tied."""
    ks.save(root / "step", state)
    dcp_checks.write(root / "dcp", state)
    torch.save(state, root / "file.pt")
    (root / "hub").mkdir()
    model = {key: value.clone() for key, value in state["model"].items() if key not in tied}
    safetensors.torch.save_file(model, root / "hub" / "model.safetensors")
