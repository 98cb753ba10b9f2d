"""Checks with DeepSpeed engines: ``deepspeed_script.py CHECK FOLDER [SOURCE] [KIND ...]``, on each of one or two ranks."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import keepstep as ks
from keepstep.errors import MismatchError, UsageError
from keepstep.interop.deepspeed import Checkpointer, engine_state

STEPS = 20
BATCH, ACCUMULATE = 4, 2
KINDS: dict[str, dict[str, Any]] = {
    "0 fp32": {},
    "1 fp32": {},
    "1 bf16+fp32": {},
    "2 bf16": {"round_robin_gradients": True},
    "2 fp16": {"parameter_alignment": True},
    # Small parameters stay whole on every rank; here some do, and some do not.
    "3 fp32": {"stage3_param_persistence_threshold": 8},
    "3 bf16": {"stage3_param_persistence_threshold": 0, "sub_group_size": 9},
}
"""Stage and type of parameters, and what else may change how buffers lie."""


class Net(nn.Module):
    """Sizes that nothing divides, one too small for all ranks, a tied and a frozen matrix, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(7, 5)
        self.inner.weight.requires_grad_(False)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return self.head(self.inner(self.norm(self.embed(x) + self.again(x)).tanh())) * self.scale

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def net(seed: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": trained[:1]},
        {"params": trained[1:4]},
        {"params": trained[4:], "weight_decay": 0.0, "lr": 0.02},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def engine_of(kind: str, *, seed: int = 1, optimizer: Any = None, **zero: Any) -> Any:
    """An engine of a kind, with other weights for each seed."""
    from tests.interop.deepspeed_host import deepspeed

    stage, dtype = kind.split()
    model, adam = net(seed)
    config = {
        "train_batch_size": BATCH * ACCUMULATE,
        "gradient_accumulation_steps": ACCUMULATE,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(stage), **KINDS.get(kind, {}), **zero},
        "bf16": {"enabled": dtype.startswith("bf16")},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 40, "loss_scale_window": 2, "hysteresis": 1},
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.02}},
    }
    if dtype == "bf16+fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model) if optimizer else adam, config=config)
    return made


def trained(engine: Any, updates: int, *, microbatches: int = 0) -> list[float]:
    """Goes on by so many updates, and microbatches of the next one, with the batches that come then; the losses."""
    losses = []
    share, rank = BATCH // dist.get_world_size(), dist.get_rank()
    done = engine.global_steps * ACCUMULATE
    for number in range(done, done + updates * ACCUMULATE + microbatches):
        x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(number))
        x = x[rank * share : (rank + 1) * share]
        loss = (engine(x.to(engine.module.norm.weight.dtype)).float() - x.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def resume(folder: Path, *kinds: str) -> None:
    """Saved after three updates; a fresh engine that loads it goes on exactly as the first one does."""
    for kind in kinds:
        place = folder / kind.replace(" ", "-")
        first = engine_of(kind)
        trained(first, 3)
        ks.save(place, engine_state(first), step=3)
        wanted = trained(first, STEPS)
        second = engine_of(kind, seed=2)
        ks.load(place, into=engine_state(second))
        assert second.global_steps == 3
        assert trained(second, STEPS) == wanted, kind
        assert len(set(wanted)) == STEPS * ACCUMULATE
        ks.save(place / "first", engine_state(first))
        ks.save(place / "second", engine_state(second))
        same(place / "first", place / "second")
        # Into an engine that has gone elsewhere meanwhile: what is there already is filled.
        trained(second, 1)
        ks.load(place / "first", into=engine_state(second))
        assert trained(second, 1) == trained(first, 1)
        assert first.lr_scheduler.state_dict() == second.lr_scheduler.state_dict()
        assert first.module.seen == second.module.seen == int(second.module.calls)
        if kind.endswith(" fp16"):
            assert first.skipped_steps == second.skipped_steps > 3
            assert vars(first.optimizer.loss_scaler) == vars(second.optimizer.loss_scaler)


def change(folder: Path, source: str, *kinds: str) -> None:
    """Steps of another number of ranks, of the kind and of another, loaded and saved again: the same by name."""
    for number, kind in enumerate(kinds):
        for other in (kinds[number - 1], kind):
            # What is saved last is what an engine of this kind has, for whoever goes on with it.
            saved, again = Path(source) / other.replace(" ", "-"), folder / kind.replace(" ", "-")
            engine = engine_of(kind, seed=3)
            # A plain module, as stage 0 has it, asks before what is frozen changes its type.
            ks.load(saved, into=engine_state(engine), cast=kind.startswith("0"))
            ks.save(again, engine_state(engine), overwrite=True)
            same(saved, again)
            with ks.open(again) as step:
                for name, value in whole(engine).items():
                    assert torch.equal(value, step[f"model/{name}"].to(value.dtype)), (kind, other, name)
            losses = trained(engine, 2)
            assert all(math.isfinite(loss) for loss in losses), (kind, other, losses)


def plain(folder: Path, source: str) -> None:
    """Without DeepSpeed: a module and an optimizer of torch take the step, and an engine takes theirs."""
    model, adam = net(4)
    ks.load(source, into={"model": model, "optimizer": adam}, allow_extra=["engine", "scheduler", "progress", "rng"])
    ks.save(folder / "plain", {"model": model, "optimizer": adam})
    with ks.open(source) as theirs, ks.open(folder / "plain") as ours:
        assert set(ours) - set(theirs) == {"model/again.weight"}
        for key in set(theirs) & set(ours):
            assert torch.equal(ours[key], theirs[key].to(ours[key].dtype)), key
    assert torch.equal(model.again.weight, model.embed.weight)
    state = engine_state(engine_of("3 fp32"))
    ks.load(folder / "plain", into={"model": state["model"], "optimizer": state["optimizer"]})
    ks.save(folder / "again", {"model": state["model"], "optimizer": state["optimizer"]})
    same(folder / "again", Path(source))
    # The weights alone: what the next update starts from, too.
    other = engine_of("2 fp32")
    ks.load(source, into=engine_state(other), only=["model"])
    ks.save(folder / "model", {"model": engine_state(other)["model"]})
    with ks.open(folder / "model") as step:
        for name, value in whole(other).items():
            assert torch.equal(value, step[f"model/{name}"]), name
            assert torch.equal(value, dict(model.named_parameters())[name]), name


def same(one: Path, other: Path) -> None:
    with ks.open(one) as a, ks.open(other) as b:
        # Stage 0 has the tied matrix under both of its names.
        assert set(a) ^ set(b) <= {"model/again.weight"}
        assert {"model/embed.weight", "model/inner.weight", "model/calls", "optimizer/state/head.bias/step"} <= set(a)
        for key in set(a) & set(b):
            # What is frozen is as the module has it; all else is in fp32.
            assert a[key].dtype == b[key].dtype or key == "model/inner.weight", key
            assert torch.equal(a[key].to(b[key].dtype), b[key]), (one, other, key)


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """The parameters that are computed with."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def refuse(folder: Path) -> None:
    """What cannot be saved, or does not fit, is named; nothing is written, or changed."""
    engine = engine_of("2 fp32")
    trained(engine, 1, microbatches=1)
    with pytest.raises(UsageError, match="gradients of 1 microbatches"):
        ks.save(folder / "within", engine_state(engine))
    with pytest.raises(UsageError, match="an update has begun"):
        engine_state(engine)["engine"].load_state_dict({})
    trained(engine, 0, microbatches=1)
    ks.save(folder / "sgd", engine_state(trained_with_sgd("2 fp32")))
    ks.load(folder / "sgd", into=engine_state(engine_of("3 fp32", optimizer=sgd)))
    with pytest.raises(MismatchError, match=r"(?s)embed\.weight: saved with the state \['momentum_buffer'\]"):
        ks.load(folder / "sgd", into=engine_state(engine_of("1 bf16")))
    # Before the first update an optimizer has no state, and none is what comes back.
    ks.save(folder / "fresh", engine_state(engine_of("1 fp32")))
    ks.load(folder / "fresh", into=engine_state(engine))
    assert not any(engine.optimizer.optimizer.state.values())
    with pytest.raises(UsageError, match="without ZeRO: parameters in 16 bits need stage 1, 2 or 3"):
        engine_state(engine_of("0 bf16"))
    engine._config.zero_config.zero_hpz_partition_size = 2
    engine.has_moe_layers = True
    with pytest.raises(UsageError, match=r"(?s)mixtures of experts.*hpZ"):
        Checkpointer(folder / "run", engine, data=None)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def trained_with_sgd(kind: str) -> Any:
    engine = engine_of(kind, optimizer=sgd)
    trained(engine, 2)
    return engine


def by_hand(folder: Path) -> None:
    """A loop that says by hand where an update ends."""
    engine = engine_of("2 fp32")
    every = ks.Every(steps=1)
    with Checkpointer(folder / "by-hand", engine, data=None, every=every, background="off") as checkpoints:
        checkpoints.restore()
        for end in (False, False, True, False, True):
            engine.set_gradient_accumulation_boundary(end)
            trained(engine, 0, microbatches=1)
            assert (checkpoints.passed(loss=1.0) is not None) == end
        assert checkpoints.progress.step == engine.global_steps == 2


def offload(folder: Path) -> None:
    """Weights and moments on the host, and parameters too."""
    for kind, moved in (("2 bf16", ["offload_optimizer"]), ("3 bf16", ["offload_optimizer", "offload_param"])):
        zero = {part: {"device": "cpu"} for part in moved}
        first, second = engine_of(kind, **zero), engine_of(kind, seed=2, **zero)
        trained(first, 2)
        ks.save(folder / f"offload-{kind[0]}", engine_state(first))
        ks.load(folder / f"offload-{kind[0]}", into=engine_state(second))
        assert trained(second, STEPS) == trained(first, STEPS)


def main() -> None:
    check, folder, *rest = sys.argv[1:]
    if "RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from tests.interop.deepspeed_host import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    globals()[check](Path(folder), *rest)
    dist.barrier()  # The store of the group lives in one of the processes: it leaves when nobody reads there any more.


if __name__ == "__main__":
    main()
