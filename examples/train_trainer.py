"""A Hugging Face Trainer that goes on where it was killed, bit for bit.

    python examples/train_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/train_trainer.py

A small GPT-2 learns to count. Everything that has to do with checkpoints is the one line marked (1). Kill it as you like,
and start it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import keepstep as ks
from keepstep.interop.transformers import attach


class Counting(Dataset[dict[str, Tensor]]):
    """Numbers in a row, some of them replaced at random each time a row is made."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.arange(index, index + 12) % 64
        noise = torch.rand(12) < 0.1
        return {"input_ids": torch.where(noise, torch.randint(64, (12,)), row), "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=3)
    options = parser.parse_args()

    set_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir="runs/trainer-output",
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=1e-3,
            logging_steps=5,
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
    )
    # (1) Whole steps, kept below one folder. train() goes on from the newest good one by itself.
    attach(trainer, options.checkpoints, every=ks.Every(steps=5), keep=ks.Keep(last=2))
    trainer.train()


if __name__ == "__main__":
    main()
