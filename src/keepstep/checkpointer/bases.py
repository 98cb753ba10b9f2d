"""The values that a run leaves out of its steps: which they are, by a mark that is the same wherever they are kept.

In: the step that a load takes them from. Out: a mark of their names, dtypes, shapes and a sample of the bytes of each. It
does not depend on layouts or formats, so a base may be converted, copied, resharded; one of other values has another mark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from keepstep.checkpointer.choosing import left_out_keys
from keepstep.checkpointer.options import LoadReport
from keepstep.errors import MismatchError
from keepstep.format.box import Box
from keepstep.format.layout import Want
from keepstep.format.manifest import Manifest
from keepstep.format.objects import join
from keepstep.format.shardfile import digest
from keepstep.move.reader import read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.ranks import Ranks
from keepstep.state.memory import pointer
from keepstep.state.module import module_state
from keepstep.state.restore import Binder
from keepstep.state.shard import torch_dtype
from keepstep.state.train_state import TrainState
from keepstep.storage.base import Storage

__all__ = ["away_from", "check_base", "mark_base", "note_base"]

SAMPLE_ELEMENTS = 256
"""Of the beginning of a tensor's first row."""
MOST_SAMPLED = 2048


def away_from(manifest: Manifest) -> tuple[str, ...]:
    """The patterns of what was left out of a step."""
    return tuple(dict.fromkeys(pattern for part in manifest.components.values() for pattern in part.left_out))


def check_base(manifest: Manifest, url: str, told: LoadReport) -> None:
    """What was left out of a step is taken from where it came from, as far as that was written down.

    Raises:
        MismatchError: those are other values.
    """
    known = {part.left_out_from: None for part in manifest.components.values() if part.left_out_from}
    if known and told.base not in known:
        away = ", ".join(away_from(manifest))
        raise MismatchError(
            f"step {manifest.step} in {url} was saved without {away}: left_out= names another base than the one it had",
            [f"{told.url}: values with the mark {told.base}; the run had those with the mark {', '.join(known)}"],
            "Nothing was changed. Name the step those came from, or a copy or conversion of it. Where these values are meant"
            " all the same, load them for themselves (only=[...]), and then this step with allow_missing=[...].",
        )


def mark_base(ranks: Ranks, storage: Storage, manifest: Manifest, binder: Binder, deadline_s: float) -> str | None:
    """The mark of what a load is to take for values that the state leaves out, or of what was demanded. Collective.

    It is that of the keys of all ranks. None where the load takes none of them; empty where it takes some alone.
    """
    keys = binder.base or []
    with ranks.phase(f"look at the base in step {manifest.step}", deadline_s) as phase:
        here = {key: binder.stored[key] for key in keys if key in binder.stored}
        whole = len(here) == len(keys) or not _apart(binder.state, [key for key in keys if key not in here], here)
        posted, answer = phase.gather(msgspec.msgpack.encode((here, whole))), b""
        if posted is not None:
            each = [msgspec.msgpack.decode(raw, type=tuple[dict[str, str], bool]) for raw in posted]
            stored = {key: at for found, _ in each for key, at in found.items()}
            if not stored:
                answer = b"-"
            elif all(complete for _, complete in each):
                answer = _mark(storage, manifest, stored).encode()
        told = phase.broadcast(answer if posted is not None else None)
    return None if told == b"-" else told.decode()


def note_base(into: Mapping[str, Any], before: str, mark: str, *, keys: Sequence[str], taken: Sequence[str]) -> None:
    """Which base a state has that took some of the keys which were left out of a step from the one with this mark."""
    if isinstance(into, TrainState):
        own = [] if into.leave_out is None else left_out_keys(into, into.leave_out)
        if set(own) == set(taken) == set(keys):
            into.left_out_from = mark
        else:
            # Parts of two bases are neither.
            into.left_out_from = before if not taken or before == mark else ""


def _apart(state: Mapping[str, Any], absent: Sequence[str], here: Mapping[str, str]) -> bool:
    """Whether any of the absent keys has memory that none of those here has: it is not tied to one of them."""
    modules = {join("", name): value for name, value in state.items() if isinstance(value, nn.Module)}
    live = {join(path, name): item for path, module in modules.items() for name, item in module_state(module).items()}
    lie = {key: pointer(item) for key, item in live.items() if isinstance(item, torch.Tensor)}
    return not {lie.get(key, -1) for key in absent} <= {lie[key] for key in here if key in lie}


def _mark(storage: Storage, manifest: Manifest, stored: Mapping[str, str]) -> str:
    specs = {spec.key: spec for spec in manifest.tensors}
    keys = sorted(stored)
    shapes = {key: manifest.layouts[specs[stored[key]].layout].shape for key in keys}
    sampled = [key for key in keys if math.prod(shapes[key])][:: -(-len(keys) // MOST_SAMPLED)]
    boxes = [_beginning(shapes[key]) for key in sampled]
    targets = [
        torch.empty(box.sizes, dtype=torch_dtype(specs[stored[key]].dtype), device="cpu")
        for key, box in zip(sampled, boxes, strict=True)
    ]
    wants = [Want(stored[key], box) for key, box in zip(sampled, boxes, strict=True)]
    read_pieces(storage, manifest, find_pieces(manifest.structure, wants, -1), wants=wants, targets=targets)
    raw = [target.reshape(-1).view(torch.uint8).numpy().tobytes() for target in targets]
    told = [(key, specs[stored[key]].dtype, shapes[key]) for key in keys]
    return f"{digest(msgspec.msgpack.encode((told, raw))):016x}"


def _beginning(shape: tuple[int, ...]) -> Box:
    sizes = (*(1 for _ in shape[:-1]), *(min(size, SAMPLE_ELEMENTS) for size in shape[-1:]))
    return Box((0,) * len(shape), sizes)
