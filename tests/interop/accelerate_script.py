"""A training and checks with Accelerate: ``accelerate_script.py KIND [BATCH]``, which kills itself in that batch."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep as ks
from keepstep.data import ResumableBatchSampler
from keepstep.errors import UsageError
from keepstep.interop.accelerate import Checkpointer

DATA = TensorDataset(torch.linspace(-1, 1, 40).unsqueeze(1))


class Counted:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(kind: str, die_in: int = -1) -> None:
    set_seed(2)
    stateful = kind == "stateful"
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config, rng_types=[])
    sampler = ResumableBatchSampler(DATA, batch_size=4, seed=3)
    # A loader of torch draws a number whenever it is begun: a resumed run does so once more.
    options = {"batch_size": 4} if stateful else {"batch_sampler": sampler}
    loader = DataLoader(DATA, generator=torch.Generator(), **options)
    nets = [nn.Linear(1, 4), nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    counted, batches = Counted(), torch.zeros(())
    *prepared, loader = accelerator.prepare(*nets, *optimizers, loader)
    first, second, *optimizers = prepared
    accelerator.register_for_checkpointing(counted)
    every = ks.Every(seconds=1e-9)
    extra = {"batches": batches}
    with Checkpointer("none", accelerator, data=loader, extra=extra, every=every, background="off") as checkpoints:
        checkpoints.restore()
        while checkpoints.progress.step < 10:
            for (x,) in loader:
                if batches == die_in:
                    os.kill(os.getpid(), signal.SIGKILL)
                batches += 1
                with accelerator.accumulate(first, second):
                    loss = F.mse_loss(second(first(x)), x)
                    accelerator.backward(loss)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                counted.count += 1
                checkpoints.passed(loss=loss.detach())
                if checkpoints.progress.step == 10:
                    break
    assert counted.count == batches == 20


def refusals() -> None:
    accelerator = Accelerator(cpu=True)
    net, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(DATA))
    with pytest.raises(UsageError, match="does not know which of its batches were used"):
        Checkpointer("a", accelerator, data=loader)
    with Checkpointer("a", accelerator, data=None) as checkpoints:
        assert checkpoints.restore().fresh
        checkpoints.step(loss=1.0)
        checkpoints.save()
    with ks.open("a/step-00000001") as step:
        assert sorted(step.manifest.components) == ["accelerator", "model", "progress", "rng"]
        assert torch.equal(step["model/weight"], net.weight)


if __name__ == "__main__":
    refusals() if sys.argv[1] == "refusals" else train(sys.argv[1], *map(int, sys.argv[2:]))
