"""Checks that need Megatron-Core in the process; each is one rank's part, on gloo."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import keepstep as ks
from keepstep.errors import CheckpointError, MismatchError, UnsafeValueError, UsageError
from tests.helpers.same import assert_same

STATS = [[1, 2.5, None], {"deep": (True, "x")}]


class Model:
    """A few layers of Megatron-Core as a program has them: stacked, factories, a vocabulary that may be padded."""

    def __init__(self, tensor_parallel: int, *, vocabulary: int = 12, seed: int | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import parallel_state
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.tensor_parallel import RowParallelLinear, VocabParallelEmbedding
            from megatron.core.transformer.spec_utils import build_module
            from megatron.core.transformer.transformer_config import TransformerConfig

            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
            self.groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            self.place = parallel_state.get_tensor_model_parallel_rank(), tensor_parallel
            self.replica = parallel_state.get_data_parallel_rank()
            config = TransformerConfig(
                num_layers=1,
                hidden_size=8,
                ffn_hidden_size=32,
                num_attention_heads=2,
                use_cpu_initialization=True,
                gated_linear_unit=True,
            )
            options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.xavier_uniform_}
            spec = get_gpt_layer_local_spec().submodules.mlp
            self.parts = {
                "embedding": VocabParallelEmbedding(vocabulary, 8, **options),
                "mlp": build_module(spec, config=config),
                "stack.0": _row(RowParallelLinear, options),
                "stack.1": _row(RowParallelLinear, options),
            }
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.fill_(-1.0)
                if seed is not None:
                    # Replicas are alike, parts of one tensor are not.
                    split = getattr(parameter, "tensor_model_parallel", False)
                    at = torch.Generator().manual_seed(seed + 100 * number + (self.place[0] if split else 0))
                    parameter.copy_(torch.randn(parameter.shape, generator=at))

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def sharded(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            # Layers of one kind are one tensor with a dimension in front.
            layer = ((0, int(name[-1]), 2),) if name.startswith("stack") else ()
            for key, value in part.sharded_state_dict(f"{name.split('.')[0]}.", layer, self.groups).items():
                found[f"{name}.{key.partition('.')[2]}"] = value
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            part.load_state_dict(own)


def _row(kind: Any, options: dict[str, Any]) -> Any:
    return kind(16, 8, bias=True, input_is_parallel=True, skip_bias_add=False, **options)


def state_of(model: Model, fill: float | None = None) -> dict[str, Any]:
    """What a training script saves: the model, the state of an optimizer in uneven parts, objects, plain values."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    held = torch.arange(7.0) + 7 * rank if fill is None else torch.full((7,), fill)
    bucket = [
        ShardedTensor("optimizer.bucket", part, part.dtype, (len(part),), (7 * world,), (7 * rank + at,), None)
        for part, at in ((held[:3], 0), (held[3:], 3))
    ]
    state = OrderedDict({"torch": torch.arange(9, dtype=torch.uint8) + rank, "half": torch.ones(2).bfloat16()})
    random = [{"state": state, "python": (3, (1, 2), None), "empty": torch.zeros(0, 2), "raw": io.BytesIO(b"\x00te")}]
    return {
        "model": model.sharded(),
        "optimizer": {
            "buckets": bucket,
            "groups": LocalNonpersistentObject(["mine", rank]),
            "lr": 0.25 if fill is None else 0,
        },
        "rng": ShardedObject("rng", random if fill is None else None, (world,), (rank,)),
        "iteration": 7 if fill is None else 0,
        "stats": STATS if fill is None else [],
    }


def saved_and_loaded(rank: int, folder: str) -> dict[str, Any]:
    """Two parts of every matrix: the same comes back, as Megatron's own load has it; what cannot be stored is named."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from keepstep.interop import megatron

    model = Model(2, seed=3)
    megatron.save(f"{folder}/ck", state_of(model), step=7)
    fresh = Model(2)
    wanted = state_of(fresh, fill=0.0)
    loaded = megatron.load(f"{folder}/ck", wanted)
    assert torch.equal(wanted["optimizer"]["buckets"][1].data, torch.arange(3.0, 7.0) + 7 * rank)
    fresh.load_state_dict(loaded["model"])
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert_same(ours.detach(), theirs.detach())
    assert loaded["optimizer"]["groups"] == ["mine", rank]
    assert (loaded["iteration"], loaded["optimizer"]["lr"], loaded["stats"]) == (7, 0.25, STATS)
    [random], [expected] = loaded["rng"], state_of(model)["rng"].data
    assert random.pop("raw").getvalue() == expected.pop("raw").getvalue()
    assert_same(random, expected)
    theirs = load_by_megatron(model, Path(folder) / "own")
    ours = megatron.load(f"{folder}/ck", state_of(Model(2), fill=0.0))
    for state in (ours, theirs):
        state["rng"][0]["raw"] = state["rng"][0]["raw"].getvalue()
        state.pop("content_metadata", None)
    assert_same(sorted(ours), sorted(theirs))
    assert_same(plain(ours), plain(theirs))

    bad = {"a": ShardedObject("a", {"f": print}, (1,), (0,), rank), "n": {"f": print}}
    with pytest.raises(UnsafeValueError, match=r"objects/a.*/f|a/shard"):
        megatron.save(f"{folder}/bad", {"a": bad["a"]})
    with pytest.raises(UnsafeValueError, match="common/n/f"):
        megatron.save(f"{folder}/bad", {"n": bad["n"]})
    hole = ShardedTensor("h", torch.ones(2), torch.float32, (2,), (5,), (2 * rank,), None)
    with pytest.raises(CheckpointError, match=r"tensors/h.*4 of 5"):
        megatron.save(f"{folder}/bad", {"h": hole})
    outside = ShardedTensor("o", torch.ones(2), torch.float32, (2,), (3,), (2,), None)
    with pytest.raises(UsageError, match=r"o: a part of shape \[2\] at \[2\]"):
        megatron.save(f"{folder}/bad", {"o": outside})

    changed = state_of(Model(2), fill=0.0)
    changed["extra"] = ShardedTensor("extra", torch.ones(2), torch.float32, (2,), (2,), (0,), None)
    del changed["rng"], changed["model"]["embedding.weight"]
    with pytest.raises(MismatchError) as caught:
        megatron.load(f"{folder}/ck", changed)
    said = "\n".join(caught.value.mismatches)
    assert all(text in said for text in ("tensors/extra", "tensors/embedding.weight", "objects/rng"))
    assert not changed["optimizer"]["buckets"][0].data.any()
    return {name: value.detach() for name, value in fresh.parts["mlp"].named_parameters()}


def load_by_megatron(model: Model, folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    # Its save and load ask for the device whether there is one or not.
    devices = mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, current_device=lambda: "cpu")
    with warnings.catch_warnings(), devices:
        warnings.simplefilter("ignore")
        dist_checkpointing.save(state_of(model), str(folder))
        dist.barrier()
        return dist_checkpointing.load(state_of(Model(2), fill=0.0), str(folder))


def plain(value: Any) -> Any:
    """Parameters as the tensors they are."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def loaded_whole(rank: int, folder: str, halves: list[dict[str, torch.Tensor]]) -> None:
    """The same step where every rank has whole matrices, and a larger vocabulary; then through a Checkpointer."""
    from keepstep.interop import megatron

    whole = Model(1, vocabulary=16)
    wanted = {"model": whole.sharded(), "iteration": 0}
    elsewhere = ["tensors/optimizer*", "objects/rng*"]
    loaded = megatron.load(f"{folder}/ck", wanted, allow_extra=elsewhere)
    assert loaded["iteration"] == 7
    whole.load_state_dict(loaded["model"])
    gates, ups = zip(*(half["linear_fc1.weight"].chunk(2) for half in halves), strict=True)
    assert torch.equal(whole.parts["mlp"].linear_fc1.weight, torch.cat([*gates, *ups]))
    assert torch.equal(whole.parts["mlp"].linear_fc2.weight, torch.cat([h["linear_fc2.weight"] for h in halves], 1))
    embedding = whole.parts["embedding"].weight
    assert (embedding[:12] != -1).all()
    assert (embedding[12:] == -1).all()
    with ks.open(f"{folder}/ck") as step:
        assert torch.equal(step["tensors/embedding.weight"], embedding[:12])
        assert torch.equal(step["tensors/stack.weight"][1], whole.parts["stack.1"].weight)
        assert torch.equal(step["tensors/optimizer.bucket"], torch.arange(14.0))

    state = ks.TrainState(model=megatron.ShardedState(whole.sharded, whole.load_state_dict))
    with ks.Checkpointer(f"{folder}/run", state, every=ks.Every(steps=1), background="thread") as checkpointer:
        assert checkpointer.restore().fresh
        checkpointer.step()
    with ks.open(f"{folder}/run/step-00000001") as step:
        assert all(file.data_bytes > 1000 for file in step.manifest.files["model"])
        assert len(step.manifest.files["model"]) == 2
    again = Model(1, vocabulary=16)
    state = ks.TrainState(model=megatron.ShardedState(again.sharded, again.load_state_dict))
    with ks.Checkpointer(f"{folder}/run", state, every=ks.Every(steps=1), background="thread") as checkpointer:
        assert checkpointer.restore().step == 1
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert_same(ours.detach(), theirs.detach())


class OnHost(TorchFunctionMode):
    """The distributed optimizer asks for tensors on a device by name, and whether they are there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and type(found) is str else found


def optimized(tensor_parallel: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """The distributed optimizer of a gated MLP under Megatron's data parallelism, and the MLP's sharded state dict."""
    model = Model(tensor_parallel, seed=11)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    mlp = model.parts["mlp"]
    wrapped = DistributedDataParallel(mlp.config, DistributedDataParallelConfig(use_distributed_optimizer=True), mlp)
    chained = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True), [wrapped]
    )
    for step in range(steps):
        wrapped.zero_grad_buffer()
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        sum(part.square().sum() for part in wrapped(batch) if part is not None).backward()
        wrapped.finish_grad_sync()
        chained.step()
    return chained, mlp.sharded_state_dict("mlp.", (), model.groups)


def optimizer_saved(rank: int, folder: str, tensor_parallel: int) -> None:
    """Each rank's slices under the parameters' names; and the optimizer's own form, in buckets."""
    from keepstep.interop import megatron

    devices = mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, current_device=lambda: torch.device("cpu"))
    with warnings.catch_warnings(), devices, OnHost():
        warnings.simplefilter("ignore")
        chained, sharded = optimized(tensor_parallel, steps=2)
        ks.save(f"{folder}/flat", {"optimizer": megatron.distributed_optimizer(chained, sharded)})
        form = {"distrib_optim_sharding_type": "dp_reshardable"}
        megatron.save(f"{folder}/buckets", chained.sharded_state_dict(sharded, metadata=form))
        # One step: what torch's own Adam has before its first, Megatron does not know how to name.
        again, other = optimized(tensor_parallel, steps=1)
        wanted = again.sharded_state_dict(other, is_loading=True, metadata=form)
        with torch.no_grad():
            again.load_state_dict(megatron.load(f"{folder}/buckets", wanted))
        moved = megatron.distributed_optimizer(again, other)
        for name, kinds in megatron.distributed_optimizer(chained, sharded).items():
            for kind, part in kinds.items():
                for ours, theirs in zip(moved[name][kind].locals, part.locals, strict=True):
                    assert_same(ours.detach(), theirs.detach(), f"{name}/{kind}")


def optimizer_loaded(rank: int, folder: str) -> None:
    """The same into whole matrices on other numbers of ranks; saved again, it is the same."""
    from keepstep.interop import megatron

    devices = mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, current_device=lambda: torch.device("cpu"))
    with warnings.catch_warnings(), devices, OnHost():
        warnings.simplefilter("ignore")
        chained, sharded = optimized(1, steps=1)
        state = {"optimizer": megatron.distributed_optimizer(chained, sharded)}
        ks.load(f"{folder}/flat", into=state)
        ks.save(f"{folder}/again-{dist.get_world_size()}", state)
        with pytest.raises(UsageError, match="not in the model's sharded state dict"):
            megatron.distributed_optimizer(chained, {})
