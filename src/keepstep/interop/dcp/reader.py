"""``Reader``: steps under ``dcp.load``, whoever wrote them: ``Writer``, ``ks.save``, or torch itself.

torch asks for boxes of tensors; all that one rank asks for is read together, straight into its tensors, every block proved.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from keepstep.checkpointer.saving import no_collection
from keepstep.commit.catalog import MAX_MANIFEST_BYTES
from keepstep.errors import CheckpointError, MismatchError, UsageError, listed
from keepstep.format.manifest import MANIFEST_NAME
from keepstep.interop.dcp.named import NamedStep
from keepstep.interop.dcp.writer import alone_at, is_place
from keepstep.state.shard import torch_dtype, writable
from keepstep.storage.base import read_blob
from keepstep.storage.local import Place, storage_of

__all__ = ["Reader"]

_log = logging.getLogger("keepstep")


class Reader(StorageReader):
    """In the place of ``FileSystemReader``. Reads steps that ``Writer`` or ``ks.save`` wrote, and torch's own directories.

    Args:
        path: the folder of the step, or a URL; ``checkpoint_id`` of a call takes its place.
        cast: whether tensors may be converted to the dtype of the state. (torch does it without a word.)
        strict: whether a key of the step that no rank asks for is an error; else it is logged.
        _extension_registry: what knows the extensions that a checkpoint of torch's was written through, as for torch's.

    Raises:
        MismatchError: from a load, dtypes differ and ``cast`` is False; or keys that are not asked for, with ``strict``.
            Lists all; no tensor was changed. (As all of these, inside of what torch raises.)
        StepNotFoundError: no step is committed there.
        CorruptError: a block is not what was written. Tensors may hold part of the step.
    """

    def __init__(
        self,
        path: Place | None = None,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        cast: bool = False,
        strict: bool = False,
    ) -> None:
        self.path = path
        self._registry = _extension_registry
        self.load_id = secrets.token_hex(8)
        self._cast = cast
        self._strict = strict
        self._step: NamedStep | None = None
        self._failed: CheckpointError | None = None

    @property
    def checkpoint_id(self) -> Any:
        """Where the next load comes from."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, at another place where one is given."""
        if checkpoint_id:
            self.path = cast(Place, checkpoint_id)
        self._step = self._failed = None
        self.load_id = secrets.token_hex(8)

    @no_collection()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The step in torch's words: each tensor as one chunk, whatever pieces it lies in.

        Raises:
            StepNotFoundError, CorruptError: see the class.
        """
        rank = kwargs.get("rank")
        try:
            self._step = self._found(rank)
        except CheckpointError as err:
            if rank is None or self._failed is None:
                self._failed = err
                raise
            # torch asks twice, and some versions of it say of neither error more than that there was one.
            return Metadata({})
        self._failed = None
        cast(StorageMeta, self._step.metadata.storage_meta).load_id = self.load_id
        return self._step.metadata

    def _found(self, rank: int | None) -> NamedStep:
        if self.path is None:
            raise UsageError("Reader() was given no path, and the call no checkpoint_id")
        storage, raw = storage_of(self.path), b""
        if rank is not None:
            own = f"__{rank}{MANIFEST_NAME}"
            if any(name == own for name, _ in storage.list("")):
                raw = read_blob(storage, own, MAX_MANIFEST_BYTES)
            else:
                storage = storage_of(alone_at(self.path, int(rank)))
        return NamedStep(storage, raw, self._registry)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes the metadata that was read; reads it where another reader did that.

        Raises:
            StepNotFoundError, CorruptError: see the class.
        """
        if self._failed is not None:
            raise self._failed
        if self._step is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are, once it is known what nobody asks for.

        Raises:
            MismatchError: see the class.
        """
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        step = self._opened()
        empty = {name for name, ref in step.refs.items() if 0 in ref.shape}
        unread = [name for name in step.metadata.state_dict_metadata if name not in asked and name not in empty]
        if unread and self._strict:
            raise MismatchError(f"{step.storage.url} has keys that the state has not; nothing was changed:", unread)
        if unread:
            _log.warning("%s: not asked for, and not loaded:%s", step.storage.url, listed(unread))
        return plans

    @no_collection()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what this rank asks for. All of it is there on return.

        Raises:
            MismatchError, CorruptError: see the class.
        """
        step = self._opened()
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        held = [planner.resolve_tensor(item) for item in items]
        targets, given = self._targets(step, items, held)
        if step.through:
            step.undo_into(items, targets)
        else:
            step.read_into(items, targets)
        for give in given:
            give()
        # Only now, when every byte was proved.
        for item, tensor in zip(items, held, strict=True):
            planner.commit_tensor(item, tensor)
        made = dict(step.undone(item.storage_index.fqn for item in values))
        for item in values:
            name = item.storage_index.fqn
            planner.load_bytes(item, step.saved_value(name, made.get(name), unpickles=_unpickles(planner)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether that may be the name of a place."""
        return is_place(checkpoint_id)

    def _opened(self) -> NamedStep:
        if self._step is None:
            raise UsageError("set_up_storage_reader comes first")
        return self._step

    def _targets(
        self, step: NamedStep, items: list[ReadItem], held: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Callable[[], object]]]:
        """The memory to fill for each item, and what is left to do afterwards where that is not the state's own."""
        targets, given, wrong = [], [], {}
        for item, tensor in zip(items, held, strict=True):
            name = item.storage_index.fqn
            target, dtype = tensor.detach(), torch_dtype(step.ref_of(item).dtype)
            if target.shape != item.lengths:
                wrong[name] = f"{name}: {list(item.lengths)} of it into a tensor of shape {list(target.shape)}"
            elif target.dtype != dtype and not self._cast:
                wrong[name] = f"{name}: saved as {dtype}, the state has {target.dtype} (Reader(cast=True) converts)"
            if target.dtype != dtype or not writable(target):
                made = torch.empty(target.shape, dtype=dtype, device=target.device)
                given.append(_copy(target, made))
                target = made
            targets.append(target)
        if wrong:
            raise MismatchError(f"{step.storage.url} does not fit the state; nothing was changed:", wrong.values())
        return targets, given


def _unpickles(planner: LoadPlanner) -> bool:
    """Whether it does with the bytes of a value what torch's own planner does."""
    own = DefaultLoadPlanner
    return isinstance(planner, own) and type(planner).load_bytes is own.load_bytes


def _copy(target: torch.Tensor, made: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(made)
