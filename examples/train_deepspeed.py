"""A loop with a DeepSpeed engine that goes on where it was killed, bit for bit.

    torchrun --standalone --nproc-per-node 2 examples/train_deepspeed.py --stage 2
    deepspeed examples/train_deepspeed.py --stage 3

Everything that has to do with checkpoints is marked (1) to (3). Kill it as you like, and start it again, with another stage
or on another number of ranks too: then numbers are rounded otherwise, and nothing else differs.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import keepstep as ks
from keepstep.data import ResumableLoader
from keepstep.interop.deepspeed import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/deepspeed"))
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    options = parser.parse_args()

    deepspeed.init_distributed(None if torch.cuda.is_available() else "gloo", verbose=False)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 + dist.get_rank())
    x = torch.linspace(-3, 3, 160).unsqueeze(1)
    # (1) A loader that knows which samples were used.
    loader = ResumableLoader(TensorDataset(x, x.sin()), global_batch_size=8, seed=1)
    model = nn.Sequential(nn.Linear(1, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 1))
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.bf16},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = next(engine.module.parameters()).dtype

    # (2) Around the engine. restore() goes on from the newest good step.
    every, keep = ks.Every(steps=4), ks.Keep(last=2)
    with Checkpointer(options.checkpoints, engine, data=loader, every=every, keep=keep) as checkpoints:
        checkpoints.restore()
        for _ in range(loader.epoch, options.epochs):
            for inputs, targets in loader:
                inputs, targets = (part.to(engine.device, dtype) for part in (inputs, targets))
                loss = F.mse_loss(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                # (3) After every engine.step().
                checkpoints.passed(loss=loss.detach())


if __name__ == "__main__":
    main()
