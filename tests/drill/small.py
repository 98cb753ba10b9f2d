"""A small training run as a user writes it, on any number of ranks, without anything random on a rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep as ks
from keepstep.data import ResumableBatchSampler

SAMPLES, GLOBAL_BATCH, STEPS = 48, 12, 10


def main() -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    sampler = ResumableBatchSampler(inputs, global_batch_size=GLOBAL_BATCH, seed=3)
    state = ks.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)
    with ks.Checkpointer(sys.argv[1], state, every=ks.Every(steps=2)) as ckpt:
        ckpt.restore()
        while ckpt.progress.step < STEPS:
            for ids in sampler:
                loss = (model(inputs[ids]) - targets[ids]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                ckpt.step(samples=GLOBAL_BATCH, loss=loss.detach(), grad_norm=norm)
                if ckpt.progress.step == STEPS:
                    break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
