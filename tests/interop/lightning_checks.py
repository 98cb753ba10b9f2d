"""Checks that need Lightning in the process: ``lightning_checks.py NAME``, in a folder of their own."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep as ks
from keepstep.data import ResumableBatchSampler, ResumableLoader, ResumableSampler
from keepstep.errors import CorruptError, StepNotFoundError, UnsafeValueError, UsageError
from keepstep.interop.lightning import StepCallback, StepIO, fabric_state
from tests.helpers.same import assert_same

DATA = TensorDataset(torch.linspace(0, 1, 80).reshape(40, 2))


class Net(LightningModule):
    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4)


def own_checkpoints() -> None:
    """What Lightning writes through the plugin is what it would have written, in committed steps."""
    seed_everything(1, verbose=False)
    best = ModelCheckpoint(
        "ckpt", "{step}", save_top_k=2, monitor="step", mode="max", save_last=True, every_n_train_steps=2
    )
    first = trainer(plugins=[StepIO()], callbacks=[best], max_steps=7)
    first.fit(Net(size=(2, None)), loader())
    kept = sorted(path.name for path in Path("ckpt").iterdir())
    assert kept == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    with ks.open("ckpt/step=4.ckpt") as step:
        assert step.step == 4
        assert step.manifest.components["state_dict"].tensors == 2
    second = trainer(plugins=[StepIO()], enable_checkpointing=False, max_steps=9)
    net = Net()
    second.fit(net, loader(), ckpt_path="ckpt/last.ckpt")
    assert second.global_step == 9

    checkpoint = first._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoint["state_dict"] = {key: value.clone() for key, value in checkpoint["state_dict"].items()}
    io, files = StepIO(), TorchCheckpointIO()
    for _ in range(2):
        # The second replaces the first.
        io.save_checkpoint(checkpoint, "both/step")
    files.save_checkpoint(checkpoint, "both/file")
    assert_same(sorted_keys(io.load_checkpoint("both/step")), sorted_keys(files.load_checkpoint("both/file")))
    assert_same(sorted_keys(io.load_checkpoint("both/file")), sorted_keys(io.load_checkpoint("both/step")))
    meta = io.load_checkpoint("both/step", map_location="meta")
    assert meta["state_dict"]["layer.weight"].is_meta

    refused = Net(size=3, activation=lambda x: x, path=Path())
    bad = dict(checkpoint, hyper_parameters=dict(refused.hparams))
    with pytest.raises(UnsafeValueError, match=r"hyper_parameters/activation: builtins\.function") as caught:
        io.save_checkpoint(bad, "both/step")
    assert "save_hyperparameters(ignore=" in caught.value.__notes__[0]
    assert io.load_checkpoint("both/step")["global_step"] == 7
    with pytest.raises(UsageError, match="storage_options"):
        io.save_checkpoint(checkpoint, "both/step", storage_options={})
    (shard,) = Path("both/step/state_dict").iterdir()
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError):
        io.load_checkpoint("both/step")
    for name in ("both/step", "both/file"):
        io.remove_checkpoint(name)
        assert not Path(name).exists()
    with pytest.raises(StepNotFoundError):
        io.load_checkpoint("both/step")


def sorted_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(checkpoint.items()))


def refusals() -> None:
    """What cannot be kept exactly is refused before anything is trained, with what to do."""
    sampled = DataLoader(DATA, sampler=ResumableSampler(DATA))
    for data, words in (
        (loader(), "does not know which of its batches were used"),
        (sampled, "ResumableBatchSampler"),
        (CombinedLoader([loader()]), "Make one"),
        ([loader(), loader()], "Make one"),
    ):
        with pytest.raises(UsageError, match=words):
            trainer(callbacks=[StepCallback("a")], max_epochs=1, enable_checkpointing=False).fit(Net(), data)
    with pytest.raises(UsageError, match="reload_dataloaders_every_n_epochs"):
        trainer(
            callbacks=[StepCallback("a")], max_epochs=1, enable_checkpointing=False, reload_dataloaders_every_n_epochs=1
        ).fit(Net(), ResumableLoader(DATA, batch_size=4))

    class Endless(Net):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            raise AssertionError

    with pytest.raises(UsageError, match="limit_train_batches"):
        trainer(callbacks=[StepCallback("a")], max_epochs=1, enable_checkpointing=False).fit(
            Endless(), ResumableLoader(DATA, batch_size=4)
        )

    # A checkpoint of Lightning is where a new run may begin, and not where one that has steps goes on.
    plain = trainer(max_epochs=1, enable_checkpointing=False)
    plain.fit(Net(), loader())
    plain.save_checkpoint("old.ckpt")
    for fresh in (True, False):
        steps = StepCallback("b", every=ks.Every(steps=4), data=None)
        more = trainer(callbacks=[steps], max_epochs=2, enable_checkpointing=False)
        if fresh:
            more.fit(Net(), loader(), ckpt_path="old.ckpt")
            assert more.global_step == 20
            assert steps.checkpointer is None
            continue
        with pytest.raises(UsageError, match="has step 20"):
            more.fit(Net(), loader(), ckpt_path="old.ckpt")
    # Nothing is left to do: nothing is done.
    steps = StepCallback("b", data=None)
    done = trainer(callbacks=[steps], max_epochs=2, enable_checkpointing=False)
    done.fit(Net(), loader())
    assert done.global_step == 20


def fabric() -> None:
    """Five steps, and five more in another start, are ten steps."""

    def train(root: str, steps: int, until: int) -> Tensor:
        seed_everything(3, verbose=False)
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters())
        sampler = ResumableBatchSampler(DATA, batch_size=4, seed=1)
        # A loader of torch draws a number whenever it is begun: a resumed run does so once more.
        loader = DataLoader(DATA, batch_sampler=sampler, generator=torch.Generator())
        batches = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        net, optimizer = fabric.setup(model, optimizer)
        state = fabric_state(fabric, model=net, optimizer=optimizer, data=batches)
        assert state["model"] is model
        with ks.Checkpointer(root, state, every=ks.Every(steps=5), background="off") as ckpt:
            ckpt.restore()
            while ckpt.progress.step < until:
                for (x,) in batches:
                    loss = F.mse_loss(net(x), x)
                    fabric.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    ckpt.step(samples=len(x), loss=loss)
                    if ckpt.progress.step == until:
                        break
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = train("whole", 10, 13)
    train("parts", 5, 5)
    assert torch.equal(train("parts", 5, 13), whole)


def asked_to_stop() -> None:
    """A SIGTERM ends training with the step at hand saved, although Lightning listens to signals too."""

    class Asked(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    steps = StepCallback("c", preempt=ks.Preempt(grace_s=60))
    one = trainer(callbacks=[steps], max_epochs=1, enable_checkpointing=False)
    with pytest.raises(ks.Preempted, match="asked to stop at step 4; it is committed"):
        one.fit(Asked(), ResumableLoader(DATA, batch_size=4))
    assert [path.name for path in Path("c").glob("step-*")] == ["step-00000004"]
    more = trainer(callbacks=[StepCallback("c")], max_epochs=1, enable_checkpointing=False)
    more.fit(Net(), ResumableLoader(DATA, batch_size=4))
    assert more.global_step == 10


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    checks = {
        "own checkpoints": own_checkpoints,
        "refusals": refusals,
        "fabric": fabric,
        "asked to stop": asked_to_stop,
    }
    checks[sys.argv[1]]()
