"""What this rank does at every boundary, as records of a trace: who writes them, and the digests in them.

The digests are taken from the live state by a walk of their own, whatever saves and loads leave out: a state that came back
incomplete shows at the first boundary.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from keepstep.check.trace import Began, Ended, Saved, Stepped, TraceWriter
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.replicas import content
from keepstep.errors import ClosedError
from keepstep.format.objects import decode, encode, join
from keepstep.ranks import Ranks
from keepstep.state.capture import capture
from keepstep.state.marks import PerRank
from keepstep.state.module import unwrap
from keepstep.storage.base import Closing

__all__ = ["Tracing", "digests_of"]

_NORMS = ("grad_norm", "norm")


class Tracing(Closing):
    """Writes one rank's trace; without a folder, nothing. On the training thread.

    Args:
        folder: of the trace, or None.
        ranks: of the job.
        state: what is digested at every boundary.
        incarnation: which start of the job this is.
    """

    def __init__(self, folder: Path | None, ranks: Ranks, state: Mapping[str, Any], incarnation: int) -> None:
        self._writer = None if folder is None else TraceWriter(folder, ranks.rank)
        self._ranks = ranks
        self._state = state
        self._incarnation = incarnation
        self._begun = False

    def began(self, step: int, *, restored: bool = False, skipped: Sequence[str] = ()) -> None:
        """This rank stands where it begins; once more after every restore."""
        self._begun = True
        if self._writer is not None:
            for _ in _ids_of(self._state):
                pass  # (Those belong to what is left behind.)
            began = Began(
                rank=self._ranks.rank,
                world=self._ranks.world,
                incarnation=self._incarnation,
                step=step,
                restored=restored,
                skipped=tuple(skipped),
                torch=str(torch.__version__),
                python=platform.python_version(),
                cpu=torch.backends.cpu.get_cpu_capability(),
                parts=self._parts(),
            )
            self._writer.write(began)

    def stepped(self, step: int, metrics: Mapping[str, Any], *, micro: int = 0, batch: Any = None) -> None:
        """A boundary, or with ``micro`` the end of a microbatch, of which only the samples are noted."""
        if self._writer is None:
            return
        if not self._begun:
            # Nothing was restored: ids that were drawn belong to this step.
            self._begun = True
            world, rank = self._ranks.world, self._ranks.rank
            start = step if micro else step - 1
            self._writer.write(Began(rank=rank, world=world, incarnation=self._incarnation, step=start, restored=False))
        numbers = {name: float(value).hex() for name, value in metrics.items()}
        ids, text = _told(batch, self._ranks)
        drawn = tuple(_ids_of(self._state))
        stepped = Stepped(
            step=step,
            micro=micro,
            samples=drawn or ids,
            batch=text,
            loss=numbers.get("loss"),
            metrics=numbers,
            lr={} if micro else _rates(self._state),
            norm=next((numbers[name] for name in _NORMS if name in numbers), None),
            parts={} if micro else self._parts(),
        )
        self._writer.write(stepped)

    def saving(self, pending: Pending) -> None:
        """A save has begun; notes how far it comes."""
        if self._writer is not None:
            self._writer.write(Saved(step=pending.step, event="due"))
            pending.staged.add_done_callback(partial(self._done, self._writer, pending.step, "staged"))
            pending.committed.add_done_callback(partial(self._done, self._writer, pending.step, "committed"))

    def ended(self, step: int, why: Literal["stopped", "closed"]) -> None:
        """The end as it should be; the first one counts."""
        if self._writer is not None and self._begun:
            self._begun = False
            self._writer.write(Ended(step=step, why=why))

    def give_up(self) -> None:
        """There is no end as it should be."""
        self._begun = False

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._writer is not None:
            self._writer.close()

    @staticmethod
    def _done(writer: TraceWriter, step: int, event: Literal["staged", "committed"], done: Future[Any]) -> None:
        """On whatever thread hears of it."""
        failed = done.exception() is not None
        if not failed or event == "committed":
            with contextlib.suppress(ClosedError):
                writer.write(Saved(step=step, event="failed" if failed else event))

    def _parts(self) -> dict[str, str]:
        return digests_of(self._state, rank=self._ranks.rank, world=self._ranks.world)


def digests_of(state: Mapping[str, Any], *, rank: int, world: int) -> dict[str, str]:
    """A digest of this rank's live state for each component; the parts of ``rng`` have one each.

    Of every tensor the local bytes, of everything else the plain values; buffers that are not saved are included.

    Raises:
        UnsafeValueError: as for a save.
    """
    snapshot = capture(state, rank=rank, world=world)
    found: dict[str, xxhash.xxh3_64] = {join("", name): xxhash.xxh3_64() for name in state}
    rng: dict[str, str] = {}
    for name, node in decode(snapshot.tree).items():
        found[join("", name)].update(encode(node))
    for key, value in (decode(snapshot.own_tree) if snapshot.own_tree else {}).items():
        name = key.partition("/")[0]
        if name == "rng":
            rng = {f"rng/{stream}": xxhash.xxh3_64_hexdigest(encode(item)) for stream, item in value.tree.items()}
        found[name].update(encode(value))
    for spec, held in zip(snapshot.structure.tensors, snapshot.locals, strict=True):
        for local in held:
            _update(found[spec.key.partition("/")[0]], spec.key, local)
    for key, _, local in snapshot.own:
        _update(found[key.partition("/")[0]], key, local)
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            module = unwrap(value)
            kept = module.state_dict(keep_vars=True)
            for inner, buffer in module.named_buffers():
                if inner not in kept:
                    _update(found[join("", name)], inner, buffer)
    return {name: one.hexdigest() for name, one in found.items() if name != "rng" or not rng} | rng


def _update(hashed: xxhash.xxh3_64, key: str, tensor: torch.Tensor) -> None:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    hashed.update(key.encode(errors="surrogatepass"))
    hashed.update(content(local.cpu()).to_bytes(8, "little"))


def _rates(state: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Every group's learning rate, by optimizer."""
    return {
        name: tuple(float(group["lr"]).hex() for group in value.param_groups if "lr" in group)
        for name, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
    }


def _ids_of(state: Mapping[str, Any]) -> Iterator[int]:
    """Ids of the samples that this rank has consumed since it was asked last, from components that know."""
    for value in state.values():
        inner = value.value if isinstance(value, PerRank) else value
        take = None if isinstance(inner, type) else getattr(inner, "take_ids", None)
        if callable(take):
            yield from (int(one) for one in take() or ())


def _told(batch: Any, ranks: Ranks) -> tuple[tuple[int, ...] | None, str | None]:
    """The ids of a batch, when that is what it is made of, or else a digest of it."""
    if batch is None:
        return None, None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and all(type(one) is int for one in batch):
        return tuple(batch), None
    return None, digests_of({"batch": PerRank(batch)}, rank=ranks.rank, world=ranks.world)["batch"]
