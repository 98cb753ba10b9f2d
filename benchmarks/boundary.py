"""What a step boundary costs the training thread: without a save, with one, and with a trace.

The example's GPT at its default size, with its loader and its accumulation, trained on one thread. What a save takes of the
boundary is by its own record: to capture is to walk the state, to copy what is small, and to look whether anything changed
its structure.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from harness import REPOSITORY, Bar, Context, Result, result, run_question

import keepstep as ks
from keepstep.data import ResumableLoader

sys.path.insert(0, str(REPOSITORY / "examples"))

import train_gpt

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 6, 96, 64, 12
EVERY = 5
CAPTURE_BAR = Bar("<", 2.0, "ms")


def boundaries(context: Context) -> list[Result]:
    """Milliseconds of `step`, by kind, and what a save's capture takes."""
    usual, due, captured = _run(context, "plain", trace=False)
    traced, _, _ = _run(context, "traced", trace=True)
    size = f"the example, {LAYERS} layers of {WIDTH}"
    return [
        result(f"{size}: a boundary without a save", usual, "ms"),
        result(f"{size}: a boundary at which a save begins", due, "ms"),
        result(f"{size}: capture at a boundary", captured, "ms", bar=CAPTURE_BAR),
        result(f"{size}: a boundary with a trace", traced, "ms"),
    ]


def _run(context: Context, name: str, *, trace: bool) -> tuple[float, float, float]:
    """Medians in milliseconds: of boundaries without a save, of those with one, and of what was captured there."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = train_gpt.GPT(LAYERS, HEADS, WIDTH, BLOCK, 0.1)
    optimizer = train_gpt.make_optimizer(model, 1e-3)
    scheduler = train_gpt.make_scheduler(optimizer, 10, 1000)
    windows = train_gpt.Windows(train_gpt.python_sources(500_000), BLOCK)
    loader = ResumableLoader(windows, global_batch_size=BATCH, tail="drop")
    ranks = train_gpt.Ranks(0, torch.device("cpu"), None, 0, 1)
    training = train_gpt.Training(model, optimizer, scheduler, ranks)
    state = ks.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, sums=training.sums)
    usual, due, captured = [], [], []
    with ks.Checkpointer(context.directory / name, state, every=ks.Every(steps=EVERY), trace=trace) as checkpoints:
        checkpoints.restore()
        batches = train_gpt.endless(loader)
        for _ in range(EVERY * (10 if context.quick else 40)):
            training.add(*next(batches), last=True)
            measured = training.update()
            began = time.perf_counter()
            pending = checkpoints.step(samples=loader.batch_samples, **measured)
            took = 1000 * (time.perf_counter() - began)
            (usual if pending is None else due).append(took)
            if pending is not None:
                captured.append(1000 * pending.wait_committed(60).seconds["capture"])
    return statistics.median(usual), statistics.median(due), statistics.median(captured)


if __name__ == "__main__":
    run_question({"one-rank": (1, boundaries)})
