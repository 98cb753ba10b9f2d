"""The training run that asynchronous saves disturb: the GPT of examples/train_gpt.py, at about 30 M parameters.

AdamW in float32, so about 360 MiB of state; on several ranks with FSDP2. Every step is timed from outside: how long
the loop stood at the boundary (where saves are asked for), and how long in front of the optimizer's update (where a
save that copies in the background has to be waited for). The latter is the time between two step pre-hooks of the
optimizer, one registered before the contestant's own and one after it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from contestants import local_tensor
from harness import REPOSITORY, Context
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(REPOSITORY / "examples"))

import train_gpt

LAYERS, HEADS, WIDTH, BLOCK = 10, 8, 512, 64
QUICK_LAYERS = 2
SAMPLES = 2  # a step, over all ranks together


@dataclass(frozen=True)
class Step:
    """One step of the loop on one rank, in moments of time.perf_counter(), which all processes share."""

    began: float
    """Standing at the boundary: saves are asked for here."""
    trained: float
    """The boundary is left: forward and backward begin."""
    fenced: float
    """The optimizer is about to update; it may have to wait."""
    freed: float
    """The wait is over."""
    ended: float

    @property
    def blocked_s(self) -> float:
        """Seconds in which the training thread did something for the saves, or waited for them."""
        return self.trained - self.began + self.freed - self.fenced


class Trainer:
    """A model, its optimizer, and a loop that can be run as often as wanted."""

    def __init__(self, context: Context) -> None:
        """The same weights on every rank; all cores are used, shared evenly by the ranks."""
        self.context = context
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.world))
        torch.manual_seed(1)
        plain = train_gpt.GPT(QUICK_LAYERS if context.quick else LAYERS, HEADS, WIDTH, BLOCK, 0.0)
        mesh = init_device_mesh("cpu", (context.world,)) if context.world > 1 else None
        ranks = train_gpt.Ranks(context.rank, torch.device("cpu"), mesh, context.rank, context.world)
        self.model = train_gpt.spread(plain, "fsdp", ranks) if mesh else plain
        self.optimizer = train_gpt.make_optimizer(self.model, 1e-3)
        self.scheduler = train_gpt.make_scheduler(self.optimizer, 10, 100_000)
        self.windows = train_gpt.Windows(train_gpt.python_sources(500_000), BLOCK)
        self.share = range(context.rank, SAMPLES, context.world)
        self.training = train_gpt.Training(self.model, self.optimizer, self.scheduler, ranks)
        # Hooks of all optimizers run before those of one: this comes first of all, since it is registered first.
        register_optimizer_step_pre_hook(self._reach)
        self.steps = 0
        self._fenced = self._freed = 0.0
        self.loop(3)

    @contextmanager
    def fence_timed(self, register: Callable[[], None]) -> Iterator[None]:
        """Time what the hooks do that `register` puts in front of the optimizer's update."""
        register()
        inner = self.optimizer.register_step_pre_hook(self._leave)
        try:
            yield
        finally:
            inner.remove()

    def loop(self, steps: int, boundary: Callable[[bool], None] | None = None, every: int = 0) -> list[Step]:
        """Train. `boundary` is called before each step, and told whether a save is due: first at once."""
        seen = []
        for index in range(steps):
            began = time.perf_counter()
            if boundary:
                boundary(every > 0 and index % every == 0)
            trained = time.perf_counter()
            ids = [(self.steps * SAMPLES + mine) % len(self.windows) for mine in self.share]
            tokens, targets = (torch.stack(part) for part in zip(*(self.windows[i] for i in ids), strict=True))
            self.training.add(tokens, targets, last=True)
            self.training.update()
            self.steps += 1
            seen.append(Step(began, trained, self._fenced, self._freed, time.perf_counter()))
        return seen

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as one flat dictionary, named alike in every save. Nothing is copied."""
        # The output layer shares its weight with the input's.
        model = {f"model.{name}": t for name, t in self.model.state_dict().items() if name != "head.weight"}
        moments = self.optimizer.state_dict()["state"]
        return model | {f"optimizer.{i}.{name}": t for i, of in moments.items() for name, t in of.items()}

    def plain(self) -> dict[str, object]:
        """What else belongs to the state."""
        return {"scheduler": self.scheduler.state_dict(), "step": self.steps}

    @property
    def state_bytes(self) -> int:
        """What this rank has to keep."""
        return sum(local_tensor(tensor).nbytes for tensor in self.tensors().values())

    def _reach(self, *_: object) -> None:
        self._fenced = self._freed = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._freed = time.perf_counter()


@contextmanager
def process_group(context: Context) -> Iterator[None]:
    """A process group also where there is one rank: some contestants ask for one."""
    if context.world > 1:
        yield
        # A thread of gloo may still hold the last tensor; should Python end before it lets go, torch 2.13 aborts.
        time.sleep(0.2)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
