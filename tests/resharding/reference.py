"""Which part of a tensor each rank of a mesh holds, by torch's own rules for placements; shares no code with keepstep."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def chunk(tensor, dim, pieces):
    """Equal chunks of ceil(n / pieces), the last ones short or empty."""
    length = tensor.shape[dim]
    size = -(-length // pieces)
    starts = [min(i * size, length) for i in range(pieces + 1)]
    return [tensor.narrow(dim, a, b - a) for a, b in pairwise(starts)]


def part_of(whole, mesh_shape, coordinate, placements):
    """The local tensor at this coordinate: placements are applied from left to right."""
    local = whole
    for ranks, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            outer = chunk(local, placement.dim, placement.split_factor)
            local = torch.cat([chunk(piece, placement.dim, ranks)[index] for piece in outer], placement.dim)
        elif not isinstance(placement, Replicate):
            local = chunk(local, placement.dim, ranks)[index]
    return local


def placed(whole, mesh, placements, *, transposed=False):
    """The DTensor of a whole tensor; on ranks outside of the mesh one that holds nothing."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # from_local would take the global shape () for none at all.
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = part_of(whole, tuple(mesh.mesh.shape), coordinate, placements).clone(memory_format=torch.contiguous_format)
    if transposed:
        local = local.t().contiguous().t()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def raw(tensor):
    """The bytes of a tensor, to compare also what is not equal to itself."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
