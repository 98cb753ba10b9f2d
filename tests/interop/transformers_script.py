"""Trainings and checks under ``attach``: ``transformers_script.py KIND``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import keepstep as ks
from keepstep.errors import UsageError
from keepstep.interop.transformers import attach

ALL_ROWS = 90


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return ALL_ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + 8) % 32


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.arange(8)


def masked(rows: list[Tensor]) -> dict[str, Tensor]:
    """As for masked language models: what is hidden is drawn when a batch is made."""
    labels = torch.stack(rows)
    return {"input_ids": torch.where(torch.rand(labels.shape) < 0.2, 31, labels), "labels": labels}


class Draws(TrainerCallback):
    """Random numbers in hooks: whoever calls them once more, or once less, gets another run."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        torch.rand(1)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        torch.rand(1)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.rand(1)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        torch.rand(1)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        torch.rand(1)


def trainer(dataset: Any = None, callbacks: Any = (), **options: Any) -> Trainer:
    set_seed(1)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    defaults = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 3, "save_strategy": "no"}
    args = TrainingArguments("out", report_to="none", use_cpu=True, disable_tqdm=True, **(defaults | options))
    return Trainer(
        GPT2LMHeadModel(config),
        args,
        masked,
        train_dataset=dataset or Rows(),
        eval_dataset=Rows(),
        callbacks=[*callbacks],
    )


def evaluated() -> None:
    """23 batches an epoch, 6 updates; evaluation every 4; ends inside of an epoch."""
    stop = EarlyStoppingCallback(early_stopping_patience=50)
    options = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    one = trainer(
        callbacks=[stop, Draws()],
        gradient_accumulation_steps=4,
        max_steps=21,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        dataloader_num_workers=1,
        include_num_input_tokens_seen="all",
        **options,
    )
    attach(one, "none", every=ks.Every(steps=3), keep=ks.Keep(last=2, best=1, metric="eval_loss"))
    result = one.train()
    assert one.state.global_step == result.global_step == 21
    assert [entry["step"] for entry in one.state.log_history if "eval_loss" in entry] == [4, 8, 12, 16, 20, 21]
    logged = [entry for entry in one.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [3, 6, 9, 12, 15, 18, 21]
    assert one.state.best_metric == min(entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry)


def spread(accumulate: int) -> None:
    """24 samples an update, by whichever number of ranks."""
    one = trainer(gradient_accumulation_steps=accumulate, num_train_epochs=3)
    attach(one, "none", every=ks.Every(steps=3))
    one.train()
    assert one.state.global_step == 12


def refusals() -> None:
    with pytest.raises(UsageError, match="no _inner_training_loop, _prepare"):
        attach(object(), "a")
    with pytest.raises(UsageError, match=r"auto_find_batch_size: .*; train_sampling_strategy='group_by_length'"):
        attach(trainer(auto_find_batch_size=True, train_sampling_strategy="group_by_length"), "a")
    one = trainer(Endless(), max_steps=3)
    attach(one, "a")
    with pytest.raises(UsageError, match="Endless has no samples by number"):
        one.train()
    one = trainer(max_steps=3)
    attach(one, "a", every=ks.Every(steps=3))
    with pytest.raises(UsageError, match=r"train\(resume_from_checkpoint='out/checkpoint-3'\)"):
        one.train(resume_from_checkpoint="out/checkpoint-3")
    assert one.train().global_step == 3
    assert [path.name for path in Path("a").glob("step-*")] == ["step-00000003"]
    # An update of the same batches in another cut: three batches are not one and a half updates.
    other = trainer(max_steps=6, gradient_accumulation_steps=2)
    attach(other, "a")
    with pytest.raises(UsageError, match="behind 3 batches"):
        other.train()
    # What is done is done: a run that is started again after its end trains nothing, and one that is longer goes on.
    again = trainer(max_steps=3)
    keeper = attach(again, "a")
    before = [p.clone() for p in again.model.parameters()]
    assert again.train().global_step == 3
    assert keeper.checkpointer is None
    assert not all(torch.equal(p, q) for p, q in zip(before, again.model.parameters(), strict=True))
    longer = trainer(max_steps=5)
    attach(longer, "a")
    assert longer.train().global_step == 5


class Asks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def asked_to_stop() -> None:
    """A SIGTERM ends training with the step at hand saved."""
    one = trainer(max_steps=5, callbacks=[Asks()])
    attach(one, "b", preempt=ks.Preempt(grace_s=60))
    with pytest.raises(ks.Preempted, match="asked to stop at step 2; it is committed"):
        one.train()
    assert [path.name for path in Path("b").glob("step-*")] == ["step-00000002"]
    more = trainer(max_steps=5)
    attach(more, "b")
    assert more.train().global_step == 5


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    kinds: dict[str, Any] = {
        "evaluated": evaluated,
        "spread": spread,
        "refusals": refusals,
        "asked to stop": asked_to_stop,
    }
    kinds[sys.argv[1]](*map(int, sys.argv[2:]))
