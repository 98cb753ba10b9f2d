"""Memory for saved tensors in a live state: what can be filled in place, and what a new tensor must look like."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from keepstep.format.objects import TensorRef
from keepstep.state.shard import is_dtensor, torch_dtype

__all__ = ["fits", "host", "pointer", "state_like"]


def host(ref: TensorRef) -> torch.Tensor:
    """New memory on the host for a saved tensor, whatever default device the user has set."""
    return torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device="cpu")


def state_like(parameter: torch.Tensor, ref: TensorRef, device: torch.device) -> torch.Tensor:
    """New memory for a state tensor: shaped like the parameter where it has its shape, whole otherwise."""
    dtype = torch_dtype(ref.dtype)
    if tuple(parameter.shape) == ref.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype, requires_grad=False)
    if is_dtensor(parameter) and ref.form == "dtensor":
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        whole = torch.empty(ref.shape, dtype=dtype, device=device)
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(ref.shape, dtype=dtype, device=device)


def fits(live: torch.Tensor, ref: TensorRef, parameter: torch.Tensor, device: torch.device) -> bool:
    """Whether a live state tensor can take a saved one as it is, kind of tensor included."""
    same = tuple(live.shape) == ref.shape and live.dtype == torch_dtype(ref.dtype) and live.device == device
    return same and (is_dtensor(live) or not is_dtensor(parameter) or tuple(parameter.shape) != ref.shape)


def pointer(tensor: torch.Tensor) -> int:
    """Where the tensor's local memory begins; -1 for one without memory."""
    # (to_local is a function of autograd, and many times slower.)
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    try:
        return int(local.data_ptr())
    except (RuntimeError, ValueError):
        return -1
