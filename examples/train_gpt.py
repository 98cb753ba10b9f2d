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
import json
import math
import os
import random
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import keepstep as ks

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


@dataclass(frozen=True)
class Batches:
    """Which samples belong to which step: a function of (seed, step) alone.

    Nothing here changes while training, so nothing has to be saved; and because the batch of a step is cut into equal
    parts only after it is drawn, 1, 2 or 3 data-parallel ranks see the same samples.
    """

    text: Tensor
    block: int
    batch: int
    seed: int

    def sample_ids(self, step: int) -> list[int]:
        """The samples of the whole batch of this step. Every epoch is a new permutation of the text's windows."""
        windows = (len(self.text) - 1) // self.block
        epoch, position = divmod(step * self.batch, windows - windows % self.batch)
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        return order[position : position + self.batch].tolist()

    def tokens(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, both [sample, position]; a target is the byte after its input."""
        rows = torch.stack([self.text[i * self.block : (i + 1) * self.block + 1] for i in ids]).long()
        return rows[:, :-1], rows[:, 1:]


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


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Scales all gradients so that together they are no longer than ``limit``. Takes shards and plain tensors alike."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([whole(torch.linalg.vector_norm(g)) for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0).item())


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
    """Everything a step needs, and everything that has to be kept."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    ranks: Ranks
    bf16: bool
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    def step(self, ids: list[int]) -> float:
        """One update from these samples, of which this rank computes its part. Returns the loss over all of them."""
        ranks, share = self.ranks, len(ids) // self.ranks.data_world
        mine = ids[ranks.data_rank * share : (ranks.data_rank + 1) * share]
        tokens, targets = (part.to(ranks.device) for part in self.batches.tokens(mine))
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=self.bf16):
            scores = self.model(tokens)
        loss = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
        loss.backward()
        clip_gradients(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return ranks.mean(loss.detach()).item()

    def digest(self) -> str:
        """One number for all parameters of the model, whole, in order: equal only if every bit is."""
        digest = xxhash.xxh3_128()
        for parameter in self.parameters:
            digest.update(whole(parameter.detach()).cpu().numpy())
        return digest.hexdigest()


def write_trace(trace: TextIO | None, record: dict[str, object]) -> None:
    """One line of JSON for one step. Floats travel as hex, so that no bit is lost."""
    if trace:
        print(json.dumps(record), file=trace, flush=True)


def note_staged(path: Path, step: int, rank: int, staged: Future[None]) -> None:
    """One line when a rank's part of a save is copied: from here on that rank may be killed, and the step is still saved."""
    if staged.exception() is None:
        with path.open("a") as lines:
            print(step, rank, file=lines)


# --- the loop -------------------------------------------------------------------------------------------------------


def main() -> None:
    options = arguments()
    with join(options.parallel) as ranks, contextlib.ExitStack() as stack:
        if options.batch % ranks.data_world:
            raise SystemExit(f"--batch {options.batch} cannot be split evenly over {ranks.data_world} ranks")
        torch.manual_seed(options.seed)  # the same weights on every rank ...
        plain = GPT(options.n_layer, options.n_head, options.d_model, options.block, options.dropout).to(ranks.device)
        model = spread(plain, options.parallel, ranks)
        random.seed(options.seed + ranks.data_rank)  # ... and dropout of its own on every data-parallel rank
        np.random.seed(options.seed + ranks.data_rank)
        torch.manual_seed(options.seed + ranks.data_rank)

        optimizer = make_optimizer(model, options.lr)
        scheduler = make_scheduler(optimizer, options.warm_up, options.steps)
        batches = Batches(python_sources(options.text_bytes), options.block, options.batch, options.seed)
        training = Training(model, optimizer, scheduler, batches, ranks, options.bf16)
        trace = stack.enter_context(options.trace.open("w")) if options.trace and ranks.rank == 0 else None

        # (1) Say what the state is. Random numbers and progress are part of it without being named.
        state = ks.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
        # (2) Say where it is kept, how often, how much of it, and what to do when the job is asked to stop.
        with ks.Checkpointer(
            options.checkpoints,
            state,
            every=ks.Every(steps=options.save_every),
            keep=ks.Keep(last=3),
            preempt=ks.Preempt(grace_s=25, exit_status=os.EX_TEMPFAIL),  # torchrun kills 30 s after it has asked
        ) as checkpoints:
            # (3) Go on from the newest good step. A fresh run starts at 0.
            checkpoints.restore()
            if ranks.rank == 0:
                print(f"starting at step {checkpoints.progress.step}", flush=True)

            for step in range(checkpoints.progress.step, options.stop_after or options.steps):
                ids = batches.sample_ids(step)
                loss = training.step(ids)
                if options.trace:
                    record = {"step": step + 1, "samples": ids, "loss": loss.hex(), "parameters": training.digest()}
                    write_trace(trace, record)
                if ranks.rank == 0 and (step + 1) % options.log_every == 0:
                    print(f"step {step + 1:>5}  loss {loss:.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
                # (4) Everything now stands at one step: save if one is due. The save goes on while training does.
                pending = checkpoints.step(loss=loss, samples=options.batch)
                if pending and options.staged:
                    pending.staged.add_done_callback(partial(note_staged, options.staged, step + 1, ranks.rank))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoints", type=Path, default=Path("runs/gpt"), help="where checkpoints go")
    add("--parallel", choices=("none", "ddp", "fsdp", "tp"), default="none")
    add("--steps", type=int, default=200, help="how long the whole training is; the learning rate follows it")
    add("--stop-after", type=int, help="end this process earlier, as a job's time limit would")
    add("--save-every", type=int, default=50)
    add("--log-every", type=int, default=10)
    add("--trace", type=Path, help="write step, samples, loss and a digest of all parameters, a line a step")
    add("--staged", type=Path, help="write step and rank, a line for each rank's part of a save that is copied")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast finds it safe")
    add("--n-layer", type=int, default=4)
    add("--n-head", type=int, default=6)
    add("--d-model", type=int, default=96)
    add("--block", type=int, default=64, help="bytes a sample")
    add("--batch", type=int, default=12, help="samples a step, over all ranks together")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=1e-3)
    add("--warm-up", type=int, default=10, help="steps until the learning rate is at its highest")
    add("--seed", type=int, default=1)
    add("--text-bytes", type=int, default=2_000_000, help="how much text to train on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
