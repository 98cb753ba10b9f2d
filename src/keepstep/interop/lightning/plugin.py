"""Lightning's own checkpoints in keepstep's files: whole or not at all, every byte with a digest, no pickle."""

from __future__ import annotations

import contextlib
import secrets
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from keepstep.checkpointer import open as open_step
from keepstep.checkpointer.agree import Attempt
from keepstep.checkpointer.saving import save_step
from keepstep.errors import UnsafeValueError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, Lineage
from keepstep.move.arena import ONCE_BYTES, Arena
from keepstep.ranks import Ranks
from keepstep.storage.local import storage_of

__all__ = ["StepIO"]

_WHAT_TO_DO = (
    "The checkpoint was put together by Lightning. What stands under hyper_parameters can be left out with"
    " save_hyperparameters(ignore=[...]); what a callback, a hook or a module adds has to be made of plain values and"
    " tensors, or of classes given to keepstep.register. Nothing was written; older checkpoints are as they were."
)


class StepIO(CheckpointIO):
    """``Trainer(plugins=[StepIO()])``: what ModelCheckpoint or ``save_checkpoint`` write is a committed step each.

    Every checkpoint is a folder in the place of a file. ``fit(ckpt_path=...)`` reads it, and reads Lightning's own files as
    before. Random numbers and the position in the data are not in it, as they are not in Lightning's; a StepCallback
    keeps them.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Commits the checkpoint under a path; one that is there is replaced, whole. By one rank, as Lightning calls it.

        Raises:
            UsageError: ``storage_options``; the path is a file.
            UnsafeValueError: what is neither plain nor a tensor, all of it by name.
            StorageError: nothing was committed.
        """
        if storage_options is not None:
            raise UsageError("storage_options mean nothing to a StepIO")
        step = int(checkpoint.get("global_step", 0))
        attempt = Attempt(step, Lineage(run=secrets.token_hex(8)), replace=True)
        with contextlib.closing(Arena(ONCE_BYTES, warm=False)) as arena:
            try:
                save_step(Ranks(0, 1, None), path, checkpoint, attempt, arena)
            except UnsafeValueError as err:
                err.add_note(_WHAT_TO_DO)
                raise

    def load_checkpoint(
        self, path: str | PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as it was given; tensors on the host, or on ``map_location`` when that is a device.

        Raises:
            StepNotFoundError: no checkpoint was committed there.
            CorruptError: its bytes are not what was written.
        """
        if Path(path).is_file():
            return TorchCheckpointIO().load_checkpoint(Path(path), map_location, weights_only)
        with open_step(path) as step:
            checkpoint = {name: step.values_of(name) for name in step.manifest.components}
        if isinstance(map_location, str | torch.device):
            return dict(apply_to_collection(checkpoint, torch.Tensor, torch.Tensor.to, map_location))
        return checkpoint

    def remove_checkpoint(self, path: str | PathLike[str]) -> None:
        """Removes it, its manifest first: whoever looks meanwhile finds it whole or not at all."""
        if Path(path).is_file() or Path(path).is_symlink():
            Path(path).unlink()
            return
        storage = storage_of(path)
        storage.delete([MANIFEST_NAME])
        storage.delete([name for name, _ in storage.list("")])
        with contextlib.suppress(OSError):
            Path(path).rmdir()
