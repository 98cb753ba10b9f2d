"""Data that comes in a row: shards, and the logical streams they are dealt to.

A run has a fixed number of logical streams. A stream reads its shards, one after the other, mixes what it reads, packs it
if asked to, and gives batches. Everything it does depends on its own state alone: not on ranks, not on workers, not on the
other streams. So it may stop in one process and go on in another one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from keepstep.data.holding import joined, parted
from keepstep.data.order import Order, mix
from keepstep.data.packing import PackingCollator
from keepstep.data.seeding import seed_streams
from keepstep.errors import UsageError

__all__ = ["Recipe", "ShardedSource", "Stream"]

_ROUNDS = 20
_SHUFFLE = -3
"""Stands in the place of an epoch for what a shuffle buffer draws."""


class ShardedSource(Protocol):
    """Where a StreamReader reads: a row of shards, each with a row of items. Bring your own; workers get copies of it.

    Everything must come in the same order whenever it is read.
    """

    def shards(self) -> Sequence[str]:
        """The names of all shards: the same on every rank, and in every run that goes on with this one."""
        ...

    def open(self, shard: str) -> Iterator[Any]:
        """The items of a shard, from its beginning.

        An iterator that also has ``state_dict()`` and ``load_state_dict(state)`` is brought to a saved place by them, right
        after it was opened. Others are read again up to that place.
        """
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all streams of a run have in common. ``names`` are those of the shards; ``buffer`` counts items."""

    source: ShardedSource
    names: tuple[str, ...]
    streams: int
    batch_size: int
    seed: int
    shuffle: bool
    buffer: int
    repeat: bool
    pack: PackingCollator | None


@dataclass(slots=True)
class Stream:
    """One logical stream. ``epoch``, ``shard`` (which of its own in that epoch) and ``read`` (items of it) are its place."""

    recipe: Recipe
    number: int
    epoch: int = 0
    shard: int = 0
    read: int = 0
    drawn: int = 0
    batches: int = 0
    buffer: list[Any] = field(default_factory=list)
    packer: PackingCollator | None = None
    _items: Iterator[Any] | None = None
    _since: int = 0
    _idle: int = 0
    _dealt: tuple[int, list[int]] = (-1, [])

    def __post_init__(self) -> None:
        if self.recipe.pack is not None:
            self.packer = self.recipe.pack.fresh()

    @classmethod
    def at(cls, recipe: Recipe, number: int, snapshot: dict[str, Any] | None, skip: int = 0) -> Stream:
        """The stream of that number where a snapshot was taken, and ``skip`` batches behind it."""
        stream = cls(recipe, number)
        if snapshot is not None:
            for name in ("epoch", "shard", "read", "drawn", "batches"):
                setattr(stream, name, snapshot[name])
            stream.buffer = parted(snapshot["buffer"])
            if stream.packer is not None:
                stream.packer.load_state_dict(snapshot["pack"])
            if stream.read:
                stream._items = stream._reopen(snapshot["at"])
        for _ in range(skip):
            stream.next_batch(stream.epoch)
        stream._since = skip
        return stream

    def next_batch(self, epoch: int) -> list[Any] | None:
        """The next items, or blocks where they are packed; None when this stream has come to the end of that epoch.

        Fewer than ``batch_size`` come at the end of an epoch that is not repeated; the stream then stands in the next one.
        Left-over tokens of a packer are no item: they wait for the next epoch. Call it inside of ``own_streams``.
        """
        seed_streams(mix(self.recipe.seed, self.number, self.batches))
        batch: list[Any] = []
        while len(batch) < self.recipe.batch_size and (self.recipe.repeat or self.epoch == epoch):
            if self._make_ready():
                batch.append(self._take())
            else:
                self.epoch, self.shard = self.epoch + 1, 0
        if batch:
            self.batches += 1
            self._since += 1
            # Found out now, so that the end of an epoch and the beginning of the next are one place.
            if self.epoch == epoch and not self.recipe.repeat and not self._make_ready():
                self.epoch, self.shard = self.epoch + 1, 0
        return batch or None

    def snapshot_due(self) -> bool:
        """Whether it is time for a snapshot: as often as it costs no more than handing over each item a second time."""
        return self._since * self.recipe.batch_size >= self.recipe.buffer

    def snapshot(self) -> dict[str, Any]:
        """Where the stream stands, with all that it has read and not yet given."""
        self._since = 0
        at = None
        if self._items is not None and hasattr(self._items, "state_dict"):
            at = copy.deepcopy(self._items.state_dict())
        return {
            "epoch": self.epoch,
            "shard": self.shard,
            "read": self.read,
            "at": at,
            "drawn": self.drawn,
            "batches": self.batches,
            "buffer": joined(self.buffer),
            "pack": None if self.packer is None else self.packer.state_dict(),
        }

    def _make_ready(self) -> bool:
        """Reads until there is an item or block to take; whether there is one in this epoch."""
        if self.packer is None:
            return self._fill_buffer()
        while not self.packer.ready:
            if not self._fill_buffer():
                return False
            self.packer.add(self._draw())
        return True

    def _take(self) -> Any:
        return self._draw() if self.packer is None else self.packer.take()

    def _fill_buffer(self) -> bool:
        """Reads as many items as the buffer is to hold; whether it holds any."""
        while len(self.buffer) < max(self.recipe.buffer, 1):
            if self.shard < len(self._mine()):
                self._read_one()
            elif self.recipe.repeat:
                self._go_round()
            else:
                break
        return bool(self.buffer)

    def _draw(self) -> Any:
        """One of the items in the buffer."""
        place = 0
        if self.recipe.buffer:
            # Counted, not drawn from a generator: so its state is one number.
            place = mix(self.recipe.seed, _SHUFFLE, self.number, self.drawn) % len(self.buffer)
            self.drawn += 1
        self.buffer[place], self.buffer[-1] = self.buffer[-1], self.buffer[place]
        return self.buffer.pop()

    def _go_round(self) -> None:
        self._idle += 1
        if self._idle > _ROUNDS * len(self.recipe.names):
            raise UsageError(f"stream {self.number} finds no item in its shards, whatever epoch it tries")
        self.epoch, self.shard = self.epoch + 1, 0

    def _mine(self) -> list[int]:
        """The shards of this stream in this epoch: every shard belongs to one stream, in each epoch to another one."""
        epoch, mine = self._dealt
        if epoch != self.epoch:
            shards = len(self.recipe.names)
            order = Order(shards, self.recipe.seed, self.recipe.shuffle)
            mine = order.ids(self.epoch, range(self.number, shards, self.recipe.streams))
            self._dealt = self.epoch, mine
        return mine

    def _read_one(self) -> None:
        """Reads one item into the buffer, or goes on to the next shard."""
        if self._items is None:
            self._items = iter(self._open())
        try:
            self.buffer.append(next(self._items))
        except StopIteration:
            self.shard, self.read, self._items = self.shard + 1, 0, None
        else:
            self.read += 1
            self._idle = 0

    def _open(self) -> Iterator[Any]:
        return self.recipe.source.open(self.recipe.names[self._mine()[self.shard]])

    def _reopen(self, at: Any) -> Iterator[Any]:
        """The items of the shard at hand behind those that were read already."""
        opened = self._open()
        if at is not None:
            opened.load_state_dict(at)  # type: ignore[attr-defined]  # what has given a state takes one
            return iter(opened)
        items = iter(opened)
        for _ in range(self.read):
            next(items)
        return items
