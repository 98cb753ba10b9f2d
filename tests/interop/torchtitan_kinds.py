"""Configurations and checks of torchtitan: a module for ``--module``, and ``torchtitan_kinds.py CHECK``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.interop import torchtitan_on_cpu

torchtitan_on_cpu.prepare()

from safetensors import safe_open  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import ParamGroupConfig  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from train_torchtitan import small  # noqa: E402

import keepstep as ks  # noqa: E402
from keepstep.errors import CheckpointError, MismatchError, StepNotFoundError, UsageError  # noqa: E402
from keepstep.interop.torchtitan import Checkpointer  # noqa: E402
from keepstep.interop.torchtitan.parts import LoaderPlace  # noqa: E402


def validated() -> Trainer.Config:
    """Validation behind saves, updates of several batches, a worker for the data, a save behind the first step."""
    config = small()
    config.training.global_batch_size = 4 * 2
    config.training.steps = 20
    config.dataloader.num_workers = 1
    config.validator = Validator.Config(
        enable=True, freq=5, steps=1, dataloader=HuggingFaceTextDataLoader.Config(dataset="sums", infinite=True)
    )
    config.checkpoint.enable_first_step_checkpoint = True
    return config


def run(
    steps: int,
    folder: str = "a",
    kind: type = Checkpointer,
    change: Callable[[Any], None] | None = None,
    **options: Any,
) -> Trainer:
    """A training of so many steps, saved every two."""
    trainer = built(steps, folder, kind, change, **options)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def built(
    steps: int,
    folder: str,
    kind: type = Checkpointer,
    change: Callable[[Any], None] | None = None,
    **options: Any,
) -> Trainer:
    config = small()
    config.training.steps = steps
    # The learning rate does not follow the number of steps.
    config.lr_scheduler.total_steps = 100
    config.training.seq_len = 16
    config.dump_folder = "out"
    config.checkpoint = kind.Config(enable=True, folder=folder, interval=2, **{"last_save_model_only": False} | options)
    if change is not None:
        change(config)
    return config.build()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer.model_parts[0].state_dict()
    return {name: whole_of(value) for name, value in state.items()}


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", tensor.clone)().detach()


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def there(folder: str = "a") -> list[str]:
    return sorted(path.name for path in Path("out", folder).glob("step-*"))


def goes_on() -> None:
    """Steps that are kept, a step by number, and one that is not there."""
    whole = run(8, "whole")
    assert len(there("whole")) == 4
    run(5, keep_latest_k=2)
    assert there() == ["step-00000004", "step-00000005"]
    more = run(8, keep_latest_k=2, async_mode="disabled")
    assert (more.step, more.ntokens_seen) == (8, 8 * 2 * 16)
    assert same(weights(more), weights(whole))
    assert more.lr_schedulers.schedulers[0].last_epoch == whole.lr_schedulers.schedulers[0].last_epoch == 8
    # The place in the data in words of its own, not as torchtitan's pickle.
    [raw] = [path.read_bytes() for path in Path("out/a/step-00000008/state").iterdir()]
    assert b'"sample_idx"' in raw
    assert b"dp_rank_0" not in raw
    earlier = run(8, "whole", load_step=4)
    assert same(weights(earlier), weights(whole))
    with pytest.raises(StepNotFoundError, match="7"):
        run(9, "whole", load_step=7)
    with pytest.raises(FileNotFoundError):
        run(9, "nowhere", load_step=7)
    # A run that is over, started again.
    assert run(8, "whole").step == 8


def taken_over() -> None:
    """A folder of torchtitan's own manager: the run in it goes on, data and moments included."""
    whole = run(6, "theirs", CheckpointManager)
    run(4, "a", CheckpointManager)
    assert [path.name for path in sorted(Path("out/a").iterdir())] == ["step-2", "step-4"]
    more = run(6)
    assert more.step == 6
    assert same(weights(more), weights(whole))
    assert there() == ["step-00000006", "step-2", "step-4"]
    # From now on the folder's own steps count.
    assert same(weights(run(6)), weights(whole))
    assert same(weights(run(6, load_step=2, load_only=True)), weights(whole))


def elsewhere() -> None:
    """initial_load_path: a checkpoint of torchtitan, a run, a step; weights alone, or all of it."""
    theirs, ours = run(2, "theirs", CheckpointManager), run(4, "ours")
    path = str(Path("out").resolve())
    for number, (source, where) in enumerate(
        ((theirs, "theirs/step-2"), (ours, "ours"), (ours, "ours/step-00000004"), (ours, "ours"))
    ):
        begun = run(0, f"begun-{number}", load_only=number == 3, initial_load_path=f"{path}/{where}")
        assert same(weights(begun), weights(source))
        assert (begun.step, len(begun.optimizers.optimizers[0].state)) == (0, 0)
    assert not Path("out/begun-3").exists()
    whole = run(6, "ours")
    all_of_it = {"initial_load_model_only": False, "initial_load_path": f"{path}/ours/step-00000004"}
    assert same(weights(run(6, "all", **all_of_it)), weights(whole))
    assert there("all") == ["step-00000006"]
    # What is in the folder comes first, whatever was begun from.
    assert same(weights(run(6, "all", **all_of_it)), weights(whole))
    left = run(0, "left", exclude_from_loading=["optimizer", "dataloader"], **all_of_it)
    assert (left.step, len(left.optimizers.optimizers[0].state)) == (4, 0)


def last_steps() -> None:
    """Of the last step also the model alone: in a dtype, as safetensors for others, and begun from those."""
    last = run(2, last_save_model_only=True, export_dtype="bfloat16")
    with ks.open("out/a/model-2") as model, ks.open("out/a/step-00000002") as step:
        assert {key.split("/")[0] for key in model} == {"model"}
        for key in model:
            assert torch.equal(model[key], step[key].bfloat16()), key
    again = run(0, "again", initial_load_path=str(Path("out/a/step-00000002").resolve()))
    assert same(weights(again), weights(last))
    hub = run(2, "hub", last_save_model_only=True, last_save_in_hf=True)
    assert there("hub") == ["step-00000002", "step-2"]
    with safe_open("out/hub/step-2/model-00001-of-00001.safetensors", "pt") as file:
        assert "model.layers.0.self_attn.q_proj.weight" in set(file.keys())
    from_hub = {"initial_load_in_hf": True, "initial_load_path": str(Path("out/hub/step-2").resolve())}
    assert same(weights(run(0, "from_hub", **from_hub)), weights(hub))
    # The folder with both goes on with the whole step.
    assert run(3, "hub").step == 3


def seeds() -> None:
    """A step 0 made by one process gives its weights and nothing else."""
    config = small()
    config.dump_folder = "out"
    config.checkpoint = Checkpointer.Config(enable=True, folder="a", create_seed_checkpoint=True)
    config.debug.seed = 7
    seed = config.build()
    seed.checkpointer.save(curr_step=0, last_step=True)
    seed.close()
    assert there() == ["step-00000000"]
    begun = run(0)
    assert same(weights(begun), weights(seed))
    assert begun.step == 0
    assert run(3).step == 3
    assert there() == ["step-00000000", "step-00000002", "step-00000003"]
    assert run(0, load_step=0, load_only=True).step == 0


def refusals() -> None:
    run(2)
    with pytest.raises(UsageError, match="no optimiser in TrainState"):
        run(2, exclude_from_loading=["optimiser"])
    with pytest.raises(UsageError, match="counted from 0 again in a folder that has later ones"):
        run(2, exclude_from_loading=["train_state"])
    anew = run(3, exclude_from_loading=["lr_scheduler", "dataloader"])
    assert anew.lr_schedulers.schedulers[0].last_epoch == 1
    # A disabled one does nothing.
    assert run(1, "none", change=lambda config: setattr(config.checkpoint, "enable", False)).step == 1
    assert not Path("out/none").exists()
    # Attempts that never ended are no fresh start.
    Path("out/cut/step-00000002/model").mkdir(parents=True)
    Path("out/cut/step-00000002/model/rank-00000.5f3a91c2.safetensors").write_bytes(b"part")
    with pytest.raises(StepNotFoundError, match="step-00000002"):
        run(1, "cut")
    begins = {"initial_load_path": str(Path("out/a").resolve())}
    assert run(1, "cut", **begins).step == 1
    # Nor are damaged steps, wherever a run has begun.
    path = Path("out/cut/step-00000001/.metadata")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StepNotFoundError, match="holds no step that can be restored"):
        run(1, "cut", **begins)
    # Looking only leaves no trace.
    before = sorted(Path("out/a").rglob("*"))
    assert run(4, load_only=True).step == 4
    assert sorted(Path("out/a").rglob("*")) == before


def spread() -> None:
    """What two ranks have saved, with two places in the data, and with one."""
    run(4)
    run(4, "halves", change=halves)


def halves(config: Trainer.Config) -> None:
    config.parallelism.tensor_parallel_degree = 2


def gathered() -> None:
    """One rank goes on where two were: weights and moments fit, the place in the data is one of two."""
    with pytest.raises(MismatchError, match=r"saved by data-parallel rank 0 of 2, here is data-parallel rank 0 of 1"):
        run(6)
    more = run(6, exclude_from_loading=["dataloader"])
    assert (more.step, more.ntokens_seen) == (6, 6 * 2 * 16)
    run(4, "whole")
    places = [one.dataloader.dataset._sample_idx for one in (run(6, "halves"), run(6, "whole"))]
    assert places[0] == places[1] > 0


def stages(config: Trainer.Config) -> None:
    """Four stages on two ranks: each has two, which are not neighbours."""
    split(config)
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"


def split(config: Trainer.Config) -> None:
    """The same model and batch on one rank."""
    config.model_spec = llama3_debugmodel().model_spec
    del config.model_spec.model.layers[4:]
    config.training.local_batch_size = 4


def staged() -> None:
    whole = run(6, "whole", change=stages)
    assert len(whole.model_parts) == 2
    run(4, change=stages)
    more = run(6, change=stages)
    for one, other in zip(whole.model_parts, more.model_parts, strict=True):
        assert all(map(torch.equal, map(whole_of, one.parameters()), map(whole_of, other.parameters())))
    names = {name for part in more.model_parts for name, _ in part.named_parameters()}
    assert len(names) == sum(len(list(part.parameters())) for part in more.model_parts)


def unstaged() -> None:
    """One rank begins with what the stages of two have saved."""
    begun = run(0, "begun", change=split, initial_load_path=str(Path("out/a").resolve()))
    with ks.open("out/a/step-00000006") as step:
        assert same(weights(begun), {key.removeprefix("model/"): step[key] for key in step if key.startswith("model/")})


def paged() -> None:
    """What the page has, with less work and data that are there."""
    sys.path.insert(0, "..")
    config, less = importlib.import_module("page").mine(), small()
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (100, 3)
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 2, False
    for name in ("model_spec", "tokenizer", "dataloader", "parallelism"):
        setattr(config, name, getattr(less, name))
    config.training, config.dump_folder = replace(less.training, steps=5), "out"
    trainer = config.build()
    trainer.train()
    trainer.close()
    assert there("checkpoint") == ["step-00000002", "step-00000004", "step-00000005"]


def interrupted(trainer: Trainer, at: int, act: Callable[[], None]) -> None:
    """Trains, with something that happens inside of a step."""
    step = trainer.train_step

    def train_step(batches: Any) -> None:
        step(batches)
        if trainer.step == at:
            act()

    trainer.train_step = train_step
    try:
        trainer.train()
    finally:
        trainer.close()


def once(config: Trainer.Config) -> None:
    """The data one time, in few steps."""
    config.dataloader.infinite = False
    config.training.seq_len = 128


def ends() -> None:
    """A job that is asked to stop, one that fails, a save that fails, and data that end."""
    whole = run(6, "whole")
    asked = built(6, "a", preempt_grace_s=60.0)
    with pytest.raises(ks.Preempted, match="asked to stop at step 3; it is committed"):
        interrupted(asked, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert there() == ["step-00000002", "step-00000003"]
    assert same(weights(run(6)), weights(whole))

    def fail() -> None:
        raise ArithmeticError("of the model")

    with pytest.raises(ArithmeticError, match="of the model"):
        interrupted(built(6, "b"), 3, fail)
    assert there("b") == ["step-00000002"]

    # The folder of step 2 cannot be made: training goes on, and the next save is good.
    def put_in_the_way() -> None:
        Path("out/c/step-00000002").write_text("")

    interrupted(built(4, "c", async_mode="async"), 1, put_in_the_way)
    assert "step-00000004" in there("c")
    with pytest.raises(CheckpointError, match="step-00000002 is a file"):
        interrupted(built(2, "d"), 1, lambda: Path("out/d/step-00000002").write_text(""))

    few = run(1000, "few", change=once)
    assert few.step < 100
    assert there("few")[-1] == f"step-{(few.step - 1) // 2 * 2:08d}"


def of_two_kinds(config: Trainer.Config) -> None:
    groups = config.optimizer.param_groups
    groups.insert(0, ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3}))


def parts() -> None:
    """Optimizers of two kinds, and a loop that is not the Trainer's: there a step is saved when it is told."""
    whole = run(6, "whole", change=of_two_kinds)
    run(4, change=of_two_kinds)
    assert same(weights(run(6, change=of_two_kinds)), weights(whole))
    with ks.open("out/a/step-00000006") as step:
        assert {key.split("/")[0] for key in step} == {"model", "optimizer_0", "optimizer_1"}

    class Loop:
        def __init__(self) -> None:
            self.step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    given = {
        "model_parts": whole.model_parts,
        "optimizers": whole.optimizers,
        "lr_schedulers": whole.lr_schedulers,
        "sd_adapter": None,
        "base_folder": "out",
    }
    config = Checkpointer.Config(enable=True, folder="loop", interval=2, last_save_model_only=False)
    for first, last in ((0, 3), (3, 5)):
        loop = Loop()
        mine = config.build(dataloader=None, states={"train_state": loop}, **given)
        assert mine.load() == (first > 0)
        assert loop.step == first
        for loop.step in range(first + 1, last + 1):
            assert mine.save(loop.step, last_step=loop.step == last) == (loop.step % 2 == 0 or loop.step == last)
            mine.maybe_wait_for_staging()
            mine.maybe_wait_for_saving()
        mine.close()
        mine.close()
    assert there("loop") == [f"step-{step:08d}" for step in (2, 3, 4, 5)]


class Late:
    """Something in a batch that is sent only when the data set has gone on, and its state after it."""

    def __init__(self, gone_on: threading.Event) -> None:
        self._gone_on = gone_on

    def __reduce__(self) -> Any:
        assert self._gone_on.wait(60)
        return (int, ())


class Filling(IterableDataset[Any]):
    """It gives the list that it fills, as those of torchtitan do."""

    def __init__(self) -> None:
        self.buffer: list[int] = []

    def __iter__(self) -> Any:
        gone_on = threading.Event()
        for number in range(4):
            self.buffer.extend([number, number])
            gone_on.set()
            gone_on = threading.Event()
            self.buffer = self.buffer[1:]
            yield number, Late(gone_on)
        gone_on.set()

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = state["buffer"]


def sent_late() -> None:
    """A worker's state is that of its batch, however late it is sent; without a copy it is that of a later one."""
    found = {}
    for kept in (False, True):
        loader = ParallelAwareDataloader(Filling(), 0, 1, num_workers=1, batch_size=None, prefetch_factor=2)
        if kept:
            LoaderPlace(loader)
        batches = iter(loader)
        assert next(batches)[0] == 0
        state = StatefulDataLoader.state_dict(loader)
        [worker] = state["_snapshot"]["_worker_snapshots"].values()
        found[kept] = worker["dataset_state"]["buffer"]
        loader._iterator._shutdown_workers()
    assert found == {False: [0, 1, 1], True: [0]}


ALONE = (goes_on, taken_over, elsewhere, last_steps, seeds, refusals, ends, parts, paged, sent_late)
CHECKS = {one.__name__: one for one in (*ALONE, spread, gathered, staged, unstaged)}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
