"""A training run with one of the habits of scripts that were not written for keepstep; the second argument names it.

``drawn`` has none that matters: its batches are drawn from torch's own stream, and so is the noise of an evaluation at the
head of the loop. ``ahead`` draws each batch one step early. ``loader`` takes them from a plain DataLoader. ``evaluates
late`` and ``schedules late`` do behind a boundary what belongs before it. ``untold``, as a third one, gives no batch
to the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

import keepstep as ks

SAMPLES, BATCH, STEPS, EPOCH = 48, 8, 12, 6


def batches(habit: str, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    """Without an end. Nothing is drawn before the first one is asked for."""

    def draw() -> torch.Tensor:
        return inputs[torch.randint(SAMPLES, (BATCH,))]

    if habit == "loader":
        loader = DataLoader(inputs, batch_size=BATCH, shuffle=True)
        while True:
            yield from loader
    following = draw() if habit == "ahead" else None
    while True:
        batch, following = (draw(), None) if following is None else (following, draw())
        yield batch


def evaluate(model: nn.Module, inputs: torch.Tensor) -> float:
    """The loss on inputs with noise."""
    model.eval()
    with torch.no_grad():
        loss = model(inputs + 0.1 * torch.randn_like(inputs)).square().mean().item()
    model.train()
    return loss


def main() -> None:
    root, habit, *more = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs = torch.randn(SAMPLES, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = ks.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    with ks.Checkpointer(root, state, every=ks.Every(steps=3), background="off") as ckpt:
        ckpt.restore()
        for batch in batches(habit, inputs):
            if ckpt.progress.step % EPOCH == 0 and habit != "evaluates late":
                evaluate(model, inputs)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_last = ckpt.progress.step % EPOCH == EPOCH - 1
            if is_last and habit != "schedules late":
                scheduler.step()
            ckpt.step(loss=loss, samples=BATCH, batch=None if "untold" in more else batch)
            if is_last and habit == "schedules late":
                scheduler.step()
            if is_last and habit == "evaluates late":
                evaluate(model, inputs)
            if ckpt.progress.step == STEPS:
                break


if __name__ == "__main__":
    main()
