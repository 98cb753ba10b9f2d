"""Where an engine keeps what it trains: flat buffers, and which slice of which parameter lies where in them.

In: a DeepSpeedEngine. Out: records that ``keepstep.flat`` understands, alike for all stages of ZeRO; and what there is about
an engine that is not understood. Nothing is imported from deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from keepstep.state import Flat, FlatPiece, flat, flat_pieces
from keepstep.state.module import parameter_names, unwrap

__all__ = ["Buffer", "buffers", "divided", "frozen", "microbatches", "refusals"]

ZERO, ZERO_BF16, ZERO_3 = "DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Weights of this rank in one flat tensor, what lies where in it, and the number of the param group that it belongs to.

    They are in fp32 also where a model computes with 16 bits. What lies in no piece is padding.
    """

    weights: torch.Tensor
    pieces: list[FlatPiece]
    group: int


def divided(engine: Any) -> bool:
    """Whether the parameters themselves are divided among ranks, as in stage 3."""
    return type(engine.optimizer).__name__ == ZERO_3


def buffers(engine: Any) -> list[Buffer]:
    """The flat buffers of this rank. Not collective."""
    zero, names = engine.optimizer, parameter_names(unwrap(engine.module))
    if divided(engine):
        return [_partitions(zero, index, names) for index in range(len(zero.fp16_groups))]
    if type(zero).__name__ == ZERO_BF16:
        groups, masters = zero.bf16_groups, zero.fp32_groups_flat_partition
        gaps = [[0] * len(group) for group in groups]
    else:
        groups, masters = zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups
        gaps = zero.round_robin_bit16_padding
    made = []
    for index, (group, weights) in enumerate(zip(groups, masters, strict=True)):
        # Where this part begins, counted from the parameter at hand.
        start, pieces = dist.get_rank(zero.real_dp_process_group[index]) * weights.numel(), []
        for parameter, gap in zip(group, gaps[index], strict=True):
            shapes = {names[id(parameter)]: parameter.shape}
            pieces += flat_pieces(shapes, start=start, elements=weights.numel())
            start -= parameter.numel() + gap
        made.append(Buffer(weights, pieces, index))
    return made


def _partitions(zero: Any, index: int, names: Mapping[int, str]) -> Buffer:
    """A sub-group of stage 3: a slice of each of its parameters, one after another."""
    pieces: list[FlatPiece] = []
    at = 0
    for parameter in zero.fp16_groups[index]:
        elements = parameter.partition_numel()
        start = dist.get_rank(parameter.ds_process_group) * elements
        [piece] = flat_pieces({names[id(parameter)]: parameter.ds_shape}, start=start, elements=elements)
        pieces.append(replace(piece, at=at) if piece.elements else piece)
        at += elements
    return Buffer(zero.fp32_partitioned_groups_flat[index], pieces, zero.sub_group_to_group_id[index])


def frozen(name: str, parameter: Any) -> Flat:
    """This rank's slice of a parameter that is divided and not trained."""
    held = parameter.ds_tensor.detach()
    start = dist.get_rank(parameter.ds_process_group) * held.numel()
    return flat(held, flat_pieces({name: parameter.ds_shape}, start=start, elements=held.numel()))


def microbatches(engine: Any) -> int:
    """How many microbatches of the update at hand are done; 1 for some, where the loop says by hand when an update ends."""
    by_hand = engine._is_gradient_accumulation_boundary
    if by_hand is not None:
        return 0 if by_hand else 1
    if not engine.managed_gradient_accumulation():
        return int(engine._unmanaged_backward_count)
    return int(engine.micro_steps % engine.gradient_accumulation_steps())


def refusals(engine: Any) -> Iterator[str]:
    """Whatever about an engine is no part of its state here, or lies where it is not known."""
    zero = engine.optimizer
    kind, stage = type(zero).__name__, engine.zero_optimization_stage()
    if type(engine).__name__ != "DeepSpeedEngine":
        yield f"a {type(engine).__name__}; only a DeepSpeedEngine is known"
        return
    if stage and kind not in (ZERO, ZERO_BF16, ZERO_3):
        yield f"ZeRO stage {stage} in a {kind}, whose buffers are not known"
    if not stage and not isinstance(zero, torch.optim.Optimizer):
        yield f"a {kind} without ZeRO: parameters in 16 bits need stage 1, 2 or 3"
    config = engine._config.zero_config
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("a 1-bit optimizer", lambda: "onebit" in _home(engine)),
        ("Muon", lambda: "muon" in _home(engine)),
        ("mixtures of experts", lambda: engine.has_moe_layers),
        ("tensor parallelism", lambda: engine.mp_world_size > 1),
        ("a second division of parameters (hpZ)", lambda: config.zero_hpz_partition_size > 1),
        ("quantised frozen parameters", lambda: config.zero_quantized_nontrainable_weights),
        ("offload of the optimizer to NVMe", lambda: _moved(config.offload_optimizer) == "nvme"),
        ("offload of parameters to NVMe", lambda: _moved(config.offload_param) == "nvme"),
        ("offload of a part of the optimizer (ratio)", lambda: getattr(config.offload_optimizer, "ratio", 1.0) != 1.0),
        ("what offload_states() has moved away", lambda: getattr(zero, "offloaded_states", None)),
        ("float16 under torch_autocast", lambda: engine.torch_autocast_enabled() and _half(engine)),
        ("random-LTD", engine.random_ltd_enabled),
        ("curriculum learning in DeepSpeed's data sampler", engine.curriculum_learning_enabled),
    ]
    for text, there in checks:
        if there():
            yield text


def _home(engine: Any) -> str:
    """The module of the optimizer's class."""
    return type(engine.basic_optimizer).__module__


def _moved(offload: Any) -> str:
    """Where something is moved to: ``none``, ``cpu`` or ``nvme``."""
    return str(getattr(getattr(offload, "device", None), "value", "none"))


def _half(engine: Any) -> bool:
    return bool(engine.torch_autocast_dtype() == torch.float16)
