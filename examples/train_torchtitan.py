"""A torchtitan run that goes on where it was killed, bit for bit: a module of configurations.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m torchtitan.train --module train_torchtitan --config small

Everything that has to do with checkpoints is marked (1). Kill it as you like, and start it again. Options keep their names:
``--checkpoint.interval 10``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from keepstep.interop.torchtitan import Checkpointer


class Letters(BaseTokenizer):
    """Every byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Tokens of a document, between its begin and its end."""
        return [0] * add_bos + list(text.encode()) + [1] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """The document."""
        return bytes(token for token in tokens if token > 1).decode()

    def get_vocab_size(self) -> int:
        """All bytes."""
        return 256


def sums(_: str) -> Dataset:
    """Documents about sums, of different length."""
    numbers = random.Random(1)
    texts = []
    for _ in range(60):
        pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(numbers.randrange(2, 12))]
        texts.append({"text": "; ".join(f"{a}+{b}={a + b}" for a, b in pairs)})
    return Dataset.from_list(texts)


DATASETS["sums"] = DatasetConfig(path="", loader=sums, sample_processor=lambda sample: sample["text"])


def small() -> Trainer.Config:
    """Two layers of the model that torchtitan has for tests."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.tokenizer = Letters.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="sums")
    config.training = TrainingConfig(local_batch_size=2, seq_len=64, steps=24, disable_cuda_graphs=True)
    # FSDP of torch 2.13 does not know the others.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.dump_folder = "runs/torchtitan"
    config.debug.seed = 1
    # (1) In the place of CheckpointManager.Config(enable=True, interval=5).
    config.checkpoint = Checkpointer.Config(enable=True, interval=5)
    return config
