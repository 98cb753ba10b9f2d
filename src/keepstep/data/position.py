"""Where a run stands in its data: an epoch, and the samples of it that all ranks together have consumed.

``Position`` is what both samplers and the loader keep. What was handed out runs ahead of what was consumed, because data is
fetched in advance; it is remembered here until it is known to be consumed, and forgotten when a new iteration begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch.distributed as dist

from keepstep.data.order import Cut, GlobalBatch, Order, Tail
from keepstep.errors import MismatchError, UsageError, listed

__all__ = ["OVER", "Dealing", "Dealt", "Position", "current_ranks"]

MOST_IDS = 1 << 17
"""So many consumed samples are remembered for whoever asks which they were: nobody may ever ask."""
AT_ONCE = 32
OVER = (
    "this iteration is over: a new one was begun, set_epoch was called or a state was loaded since. Call restore() before"
    " iter(), and iterate over a loader in one place at a time"
)


def current_ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and number of ranks as given, or those of torch's default process group; one rank alone without it.

    Raises:
        UsageError: only one of the two was given, or the rank is outside of the world.
    """
    if (rank is None) != (world is None):
        raise UsageError("rank= and world= go together: give both, or neither for those of the process group")
    if rank is None or world is None:
        ready = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    if not 0 <= rank < world:
        raise UsageError(f"rank={rank} is outside of world={world}")
    return rank, world


@dataclass(frozen=True, slots=True)
class Dealing:
    """How data is dealt: an order, and the size of a batch. ``batch_size`` is a rank's; ``global_batch_size`` all ranks'."""

    order: Order
    tail: Tail
    batch_size: int | None
    global_batch_size: int | None
    rank: int | None = None
    world: int | None = None

    def __post_init__(self) -> None:
        sizes = {"batch_size": self.batch_size, "global_batch_size": self.global_batch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        if len(given) != 1:
            raise UsageError(
                f"give one of batch_size (of one rank) and global_batch_size (of all ranks), not {len(given)}"
            )
        if min(given.values()) < 1:
            raise UsageError(f"a batch has at least one sample: {given}")

    def cut(self) -> tuple[Cut, int]:
        """How the ranks of now cut an epoch, and which of them this one is.

        Asked for at every start of an iteration: a loader may be older than the process group.
        """
        rank, world = current_ranks(self.rank, self.world)
        size = self.global_batch_size if self.batch_size is None else self.batch_size * world
        return Cut(self.order.samples, size or 0, world, self.tail), rank


@dataclass(frozen=True, slots=True)
class Dealt:
    """One batch that was handed out: this rank's samples, and where the run stands once it is consumed.

    ``samples`` counts what all ranks compute in it; ``usual`` what they compute in one that is not the last of an epoch.
    """

    epoch: int
    ids: tuple[int, ...]
    stop: int
    samples: int
    usual: int


@dataclass(slots=True)
class Position:
    """The epoch and the samples consumed of it. Not safe for threads: it belongs to the training thread."""

    dealing: Dealing
    _epoch: int = 0
    _consumed: int = 0
    _told: int = 0
    _resumed: bool = False
    _ahead: deque[Dealt] = field(default_factory=deque)
    _ids: list[int] = field(default_factory=list)
    _too_many: bool = False
    _turn: object = None

    def __post_init__(self) -> None:
        # Not for its value, but for its errors.
        self.dealing.cut()

    def standing(self) -> tuple[int, int]:
        """Epoch and samples consumed of it. The end of an epoch and the beginning of the next are one place: the latter."""
        cut, _ = self.dealing.cut()
        if cut.next_batch(self._consumed) is None:
            return self._epoch + 1, 0
        return self._epoch, self._consumed

    def go_to(self, epoch: int) -> None:
        """Stands at the beginning of that epoch, or stays where it is inside of it.

        Raises:
            UsageError: the epoch is negative, or an earlier one than a resume has led to.
        """
        now, _ = self.standing()
        if epoch < 0:
            raise UsageError(f"epoch {epoch} is negative")
        if epoch == now:
            return
        if self._resumed and epoch < now:
            raise UsageError(
                f"set_epoch({epoch}) after a resume that led to epoch {now} would train on the same data again:"
                f" begin the loop over epochs at the loader's epoch, as in range(loader.epoch, epochs)"
            )
        self._begin(epoch, 0)

    def deal(self) -> Iterator[Dealt]:
        """This rank's batches from here to the end of the epoch. Another call, or a load, ends what came before.

        Raises:
            UsageError: while iterating, when another iteration has begun or a state was loaded.
        """
        epoch, start = self.standing()
        self._begin(epoch, start)
        return self._deal(epoch, start, self._turn)

    def _begin(self, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed = epoch, consumed
        self._ahead.clear()
        self._turn = object()

    def _deal(self, epoch: int, start: int, turn: object) -> Iterator[Dealt]:
        cut, rank = self.dealing.cut()
        for batch, ids in _with_ids(cut, rank, self.dealing.order, epoch, start):
            if self._turn is not turn:
                raise UsageError(OVER)
            self._resumed = False
            dealt = Dealt(epoch, tuple(ids), batch.stop, batch.size, cut.size)
            self._ahead.append(dealt)
            yield dealt

    def consume_next(self) -> Dealt:
        """The batch that was handed out longest ago is consumed.

        Raises:
            UsageError: the iteration that handed it out is over.
        """
        if not self._ahead:
            raise UsageError(OVER)
        dealt = self._ahead.popleft()
        self._epoch, self._consumed = dealt.epoch, dealt.stop
        if len(self._ids) + len(dealt.ids) > MOST_IDS:
            self._ids, self._too_many = [], True
        if not self._too_many:
            self._ids.extend(dealt.ids)
        return dealt

    def consume(self, samples: int) -> None:
        """So many samples were consumed, by all ranks together: the batches handed out longest ago, as many as that is.

        Raises:
            UsageError: samples were handed out and none was ever said to be consumed; or the number is not that of whole
                batches that were handed out. Nothing has changed.
        """
        self.check_told(samples)
        if not samples:
            return
        count = self._batches_of(samples)
        if count is None:
            raise UsageError(self._unlikely(samples))
        self._told += samples
        for _ in range(count):
            self.consume_next()

    def check_told(self, samples: int = 0) -> None:
        """Refuses a boundary at which it cannot be known what was consumed.

        Raises:
            UsageError: see ``consume``.
        """
        if samples < 0:
            raise UsageError(f"samples={samples} is negative")
        if samples == 0 and self._ahead and not self._told:
            raise UsageError(
                f"{len(self._ahead)} batches were handed out and none was said to be consumed. A sampler does not see which"
                " of them the loop has used: data is fetched ahead. Call ckpt.step(samples=n) (and micro_step(samples=n))"
                " with the number of samples of all ranks together, or sampler.consumed(n) where you save by hand, or use"
                " a ResumableLoader, which counts by itself"
            )

    def _batches_of(self, samples: int) -> int | None:
        """How many of the batches ahead have so many samples; None if that is no whole number of them.

        The last batch of an epoch may be counted as if it were as large as the others.
        """
        for number_of in ("samples", "usual"):
            total = 0
            for count, dealt in enumerate(self._ahead, 1):
                total += getattr(dealt, number_of)
                if total == samples:
                    return count
                if total > samples:
                    break
        return None

    def _unlikely(self, samples: int) -> str:
        sizes = [str(dealt.samples) for dealt in self._ahead]
        return (
            f"samples={samples} is not the size of whole batches that were handed out and not yet consumed: they have, over"
            f" all ranks,{listed(sizes) or ' no batches left'}\nsamples= counts all ranks together, since the last boundary."
        )

    def take_ids(self) -> list[int] | None:
        """The samples this rank has consumed since the last call, in order; None if they were too many to remember."""
        taken = None if self._too_many else self._ids
        self._ids, self._too_many = [], False
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, and what the order depends on. The same on every rank."""
        epoch, consumed = self.standing()
        order = self.dealing.order
        return {
            "epoch": epoch,
            "consumed": consumed,
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stands where the state says. Batches may have another size now, and ranks another number.

        Raises:
            MismatchError: the order is another one now; lists why. Nothing has changed.
        """
        order = self.dealing.order
        now = {"samples": order.samples, "seed": order.seed, "shuffle": order.shuffle}
        names = {"samples": "samples in the data set"}
        differences = [
            f"{names.get(name, name)}: saved {state.get(name)!r}, now {value!r}"
            for name, value in now.items()
            if state.get(name) != value
        ]
        if differences:
            raise MismatchError(
                "the order of the data is not the one that was saved, so the position in it means nothing:",
                differences,
                "Give the loader what it had, or load without this component and call set_epoch.",
            )
        self._begin(int(state["epoch"]), int(state["consumed"]))
        self._told, self._resumed, self._ids, self._too_many = 0, True, [], False


def _with_ids(cut: Cut, rank: int, order: Order, epoch: int, start: int) -> Iterator[tuple[GlobalBatch, list[int]]]:
    """A rank's samples of every global batch from that position on. Found for many batches at once: it costs the same."""
    batches = cut.batches(start)
    while some := list(islice(batches, AT_ONCE)):
        shares = [cut.share(batch, rank) for batch in some]
        ids = iter(order.ids(epoch, np.concatenate([np.array(share) for share in shares]) % cut.samples))
        for batch, share in zip(some, shares, strict=True):
            yield batch, list(islice(ids, len(share)))
