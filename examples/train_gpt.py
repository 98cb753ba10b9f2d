"""Train a small byte-level GPT on Python's own source code, and never lose more than a few steps.

    python examples/train_gpt.py                                                # one process
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --parallel fsdp

Stop it however you like, with Ctrl-C or with `kill -9`, and start it again: on the same number of processes, on
another one, or with another --parallel. It goes on from the newest step that was saved. A scheduler that sends SIGTERM
or SIGUSR1 before it kills loses nothing: the step at hand is saved first, and the exit status is 75, "try again"
(under torchrun, whatever torchrun makes of it).

By default it is small, for a laptop. `--n-layer 10 --n-head 8 --d-model 512` makes 32 million parameters of it, whose
state is 380 MB: then the saves are worth watching, with `keepstep stats runs/gpt`.

Read it from top to bottom: data, model, one step, the loop. All that has to do with checkpoints is in `main`, between
the lines marked (1) to (4).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep as ks
from keepstep.data import ResumableLoader

# --- the data -------------------------------------------------------------------------------------------------------


def python_sources(limit_bytes: int) -> Tensor:
    """The text of the standard library, as bytes: real text that every machine with Python has."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The text cut into samples of ``block`` bytes: inputs and targets, where a target is the byte after its input."""

    def __init__(self, text: Tensor, block: int) -> None:
        self.text = text
        self.block = block

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.text[index * self.block : (index + 1) * self.block + 1].long()
        return row[:-1], row[1:]


def endless(loader: ResumableLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch after batch, epoch after epoch, from wherever the loader stands."""
    while True:
        yield from loader


# --- the model ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention. Heads are counted from the width at hand: under tensor parallelism a rank holds a few."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, position, width] -> the same shape."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, position, width] -> the same shape."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    """Bytes in, a score for each possible next byte out. The output layer shares its weight with the input's."""

    def __init__(self, layers: int, heads: int, width: int, block: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[sample, position] of bytes -> [sample, position, 256] of scores."""
        x = self.dropout(self.embed(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- the ranks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. ``data`` ranks hold different samples; the ranks of one tensor mesh hold the same."""

    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    data_rank: int
    data_world: int

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all data-parallel ranks, the same on each of them."""
        if self.data_world > 1:
            dist.all_reduce(value)
            value /= self.data_world
        return value


@contextlib.contextmanager
def join(parallel: str) -> Iterator[Ranks]:
    """Joins the other processes that torchrun started, if it did; leaves them at the end."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if parallel == "none":
        if world > 1:
            raise SystemExit("several processes need --parallel ddp, fsdp or tp")
        yield Ranks(0, device, None, 0, 1)
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        mesh = init_device_mesh(device.type, (world,))
        yield Ranks(rank, device, mesh, *((0, 1) if parallel == "tp" else (rank, world)))
    finally:
        # A thread of gloo may still hold the last tensor; should Python end before it lets go, torch 2.13 aborts.
        time.sleep(0.2)
        dist.destroy_process_group()


def spread(model: GPT, parallel: str, ranks: Ranks) -> nn.Module:
    """The model, laid out over the ranks. All of them start from the same weights."""
    if parallel == "ddp":
        return DistributedDataParallel(model)
    if parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=ranks.mesh)
        return fully_shard(model, mesh=ranks.mesh)
    if parallel == "tp":
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {f"attention.{name}": columns for name in ("query", "key", "value")}
        plan |= {"attention.out": rows, "up": columns, "down": rows}
        for block in model.blocks:
            parallelize_module(block, ranks.mesh, plan)
    return model


# --- one step -------------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a shard; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> float:
    """Scales all gradients so that together they are no longer than ``limit``. Returns how long they were.

    Takes shards and plain tensors alike.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([whole(torch.linalg.vector_norm(g)) for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0).item())
    return norm.item()


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=False)


def make_scheduler(optimizer: torch.optim.Optimizer, warm_up: int, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A straight line up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@dataclass
class Training:
    """Everything a step needs, and everything that has to be kept. ``sums`` are of the microbatches of one update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ranks: Ranks
    bf16: bool = False
    accumulate: int = 1
    parameters: list[nn.Parameter] = field(init=False)
    sums: dict[str, float] = field(default_factory=lambda: {"loss": 0.0})

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    def add(self, tokens: Tensor, targets: Tensor, *, last: bool) -> None:
        """Adds the gradients of one microbatch; with the last one, ranks bring theirs together."""
        alone = isinstance(self.model, DistributedDataParallel) and not last
        device = self.ranks.device
        with self.model.no_sync() if alone else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                scores = self.model(tokens.to(device))
            loss = F.cross_entropy(scores.float().flatten(0, 1), targets.to(device).flatten()) / self.accumulate
            loss.backward()
        self.sums["loss"] += self.ranks.mean(loss.detach()).item()

    def update(self) -> dict[str, float]:
        """One update from the gradients of all microbatches. Returns the loss over all ranks, and the gradients' length."""
        norm = clip_gradients(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        loss, self.sums["loss"] = self.sums["loss"], 0.0
        return {"loss": loss, "grad_norm": norm}


# --- the loop -------------------------------------------------------------------------------------------------------


def main() -> None:
    options = arguments()
    with join(options.parallel) as ranks:
        if options.batch % (ranks.data_world * options.accumulate):
            raise SystemExit(
                f"--batch {options.batch} cannot be split evenly over {ranks.data_world} ranks and"
                f" {options.accumulate} microbatches"
            )
        torch.manual_seed(options.seed)  # the same weights on every rank ...
        plain = GPT(options.n_layer, options.n_head, options.d_model, options.block, options.dropout).to(ranks.device)
        model = spread(plain, options.parallel, ranks)
        random.seed(options.seed + ranks.data_rank)  # ... and dropout of its own on every data-parallel rank
        np.random.seed(options.seed + ranks.data_rank)
        torch.manual_seed(options.seed + ranks.data_rank)

        optimizer = make_optimizer(model, options.lr)
        scheduler = make_scheduler(optimizer, options.warm_up, options.steps)
        training = Training(model, optimizer, scheduler, ranks, options.bf16, options.accumulate)
        loader = ResumableLoader(
            Windows(python_sources(options.text_bytes), options.block),
            global_batch_size=options.batch // options.accumulate,
            rank=ranks.data_rank,
            world=ranks.data_world,
            seed=options.seed,
            tail="drop",
            num_workers=options.workers,
        )

        # (1) Say what the state is. Random numbers and progress are part of it without being named.
        state = ks.TrainState(
            model=model, optimizer=optimizer, scheduler=scheduler, data=loader, sums=training.sums, config=vars(options)
        )
        # (2) Say where it is kept, how often, how much of it, and what to do when the job is asked to stop.
        with ks.Checkpointer(
            options.checkpoints,
            state,
            every=ks.Every(steps=options.save_every),
            keep=ks.Keep(last=3),
            preempt=ks.Preempt(grace_s=25, exit_status=os.EX_TEMPFAIL),  # torchrun kills 30 s after it has asked
            trace=options.trace,
        ) as checkpoints:
            # (3) Go on from the newest good step. A fresh run starts at 0.
            checkpoints.restore()
            if ranks.rank == 0:
                print(f"starting at step {checkpoints.progress.step}", flush=True)

            batches = endless(loader)
            while checkpoints.progress.step < (options.stop_after or options.steps):
                last = checkpoints.micro == options.accumulate - 1
                training.add(*next(batches), last=last)
                # (4) Everything now stands in the middle of a step, or at its end: save if a save is due. The save goes on
                # while training does.
                if not last:
                    checkpoints.micro_step(samples=loader.batch_samples)
                    continue
                measured = training.update()
                checkpoints.step(samples=loader.batch_samples, epoch=loader.epoch, **measured)
                step = checkpoints.progress.step
                if ranks.rank == 0 and step % options.log_every == 0:
                    rate = scheduler.get_last_lr()[0]
                    print(f"step {step:>5}  loss {measured['loss']:.4f}  lr {rate:.2e}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoints", type=Path, default=Path("runs/gpt"), help="where checkpoints go")
    add("--parallel", choices=("none", "ddp", "fsdp", "tp"), default="none")
    add("--steps", type=int, default=200, help="how long the whole training is; the learning rate follows it")
    add("--stop-after", type=int, help="end this process earlier, as a job's time limit would")
    add("--save-every", type=int, default=50)
    add("--log-every", type=int, default=10)
    add("--trace", action="store_true", help="write samples, loss and digests of all state, a line a step and rank")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast finds it safe")
    add("--n-layer", type=int, default=4)
    add("--n-head", type=int, default=6)
    add("--d-model", type=int, default=96)
    add("--block", type=int, default=64, help="bytes a sample")
    add("--batch", type=int, default=12, help="samples a step, over all ranks together")
    add("--accumulate", type=int, default=1, help="microbatches a step")
    add("--workers", type=int, default=0, help="processes that load data, on each rank")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=1e-3)
    add("--warm-up", type=int, default=10, help="steps until the learning rate is at its highest")
    add("--seed", type=int, default=1)
    add("--text-bytes", type=int, default=2_000_000, help="how much text to train on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
