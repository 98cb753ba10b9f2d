"""A reader of streamed data: logical streams dealt to ranks and workers, with the position of what was consumed.

The loader underneath is torch's, over tickets: the n-th batch of a rank comes from the n-th of its streams, in turn. A
worker keeps the streams it is asked for, and sends back with each batch where the stream stands behind it, as far as that
is not known already. So the position that is saved is that of the batches which the loop has got, however far the workers
are ahead, and batches do not depend on their number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, default_collate

from keepstep.data.loader import check_options
from keepstep.data.order import mix
from keepstep.data.packing import PackingCollator
from keepstep.data.position import OVER, current_ranks
from keepstep.data.seeding import own_streams
from keepstep.data.streams import Recipe, ShardedSource, Stream
from keepstep.errors import MismatchError, PositionWarning, UsageError
from keepstep.state.marks import PerRank, per_rank

__all__ = ["StreamReader"]

_NONE_OF_IT = "a StreamReader makes whole batches of streams"
_OURS = {name: _NONE_OF_IT for name in ("sampler", "batch_sampler", "drop_last")} | {
    "generator": "random numbers come from seed="
}
_WORKERS = -2
"""Stands in the place of a stream's number for what torch's workers are seeded with."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stream stands: ``skip`` batches behind a snapshot, or behind its very beginning."""

    snapshot: dict[str, Any] | None = None
    skip: int = 0


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A request for the next batch of a stream; with ``start`` the stream is opened there first."""

    stream: int
    epoch: int
    start: _Place | None


@dataclass(frozen=True, slots=True)
class _Reply:
    """What came of a ticket. ``given`` says whether a batch came with it; ``ended`` that the stream's epoch is over."""

    stream: int
    given: bool
    ended: bool
    snapshot: dict[str, Any] | None


class StreamReader:
    """Batches of streamed data, from wherever the run stands. Put it into the state: ``data=reader.per_rank()``.

    The shards of the source are dealt to logical streams, as many for the whole run as you say, and the streams to the
    ranks that there are: rank r of M reads streams r, r + M, … in turn. On another number of ranks they are dealt anew, each
    where it stands: its shard, the item in it, what its shuffle buffer holds, its left-over tokens. No item is lost, none
    comes twice. A batch is of one stream; its content depends neither on ranks nor on workers. A batch counts as consumed
    when the loop gets it.

    Args:
        source: the shards and what is in them.
        streams: logical streams, fixed for the run: at least as many as there will ever be ranks, and a multiple of
            ranks × workers where possible. At most as many as there are shards.
        batch_size: items (or blocks) in a batch of this rank.
        shuffle_buffer: items among which each next one is drawn, in each stream; 0 for the order in the shards.
        seed: of the order of shards, of the shuffle buffers, and of whatever source and collate function draw.
        shuffle: whether every epoch has the shards in another order and deals them to other streams.
        repeat: whether streams go round without end, each at its own pace. Without it an epoch ends on each rank when its
            own streams do, so that ranks may end at different times.
        pack: packs the items, which are then token sequences, into blocks.
        rank, world: as for a ResumableBatchSampler.
        collate_fn: makes a batch of a list of items or blocks; torch's own when left out.
        num_workers: processes that read. As many as divide the streams of this rank evenly are started, at most this many.
        options: any other argument of torch's DataLoader, such as ``pin_memory``, ``prefetch_factor``,
            ``persistent_workers``.

    Raises:
        UsageError: the streams cannot be dealt like that, or an option contradicts what the reader does itself.
    """

    def __init__(
        self,
        source: ShardedSource,
        *,
        streams: int,
        batch_size: int,
        shuffle_buffer: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        repeat: bool = True,
        pack: PackingCollator | None = None,
        rank: int | None = None,
        world: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        names = tuple(source.shards())
        wrong = [
            *([f"streams={streams}, and there are {len(names)} shards"] if not 1 <= streams <= len(names) else []),
            *(
                [f"{len(names) - len(set(names))} shards have the name of another"]
                if len(set(names)) < len(names)
                else []
            ),
            *([f"batch_size={batch_size}"] if batch_size < 1 else []),
            *([f"shuffle_buffer={shuffle_buffer}"] if shuffle_buffer < 0 else []),
        ]
        if wrong:
            raise UsageError("these streams cannot be read: " + "; ".join(wrong))
        check_options(options, _OURS)
        self._recipe = Recipe(source, names, streams, batch_size, seed, shuffle, shuffle_buffer, repeat, pack)
        self._ranks = rank, world
        self._workers, self._options = num_workers, options
        self._lanes = _Lanes(self._recipe, collate_fn or default_collate)
        self._places: dict[int, _Place] = {}
        self._next = 0
        self._waits: int | None = None
        self._turn: object = None
        self._loader: DataLoader[Any] | None = None
        self._tickets = _Tickets()
        self._generator = torch.Generator()
        self._warned = False
        self._own()

    @property
    def epoch(self) -> int:
        """The epoch of the stream that is furthest behind: of this rank's, or right after a new deal, of all."""
        return self._waits if self._waits is not None else min(self._epoch_of(number) for number in self._own())

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from where the run stands; to the end of the epoch, unless it repeats."""
        own = self._own()
        epoch = self.epoch
        self._turn = turn = object()
        self._tickets.streams = [*own[self._next :], *own[: self._next]]
        self._tickets.places = {number: self._places.get(number, _Place()) for number in own}
        self._tickets.epoch, self._tickets.running = (
            epoch,
            {n for n in own if self._epoch_of(n) == epoch or self._recipe.repeat},
        )
        self._generator.manual_seed(mix(self._recipe.seed, epoch, _WORKERS) >> 1)
        return self._counted(iter(self._made(len(own))), own, turn)

    def _counted(self, replies: Iterator[tuple[_Reply, Any]], own: range, turn: object) -> Iterator[Any]:
        for reply, batch in replies:
            if self._turn is not turn:
                raise UsageError(OVER)
            place = self._places.get(reply.stream, _Place())
            if reply.snapshot is not None:
                self._places[reply.stream] = _Place(reply.snapshot)
            elif reply.given:
                self._places[reply.stream] = _Place(place.snapshot, place.skip + 1)
            if reply.ended:
                self._tickets.running.discard(reply.stream)
            if reply.given:
                self._next = (own.index(reply.stream) + 1) % len(own)
                yield batch
        self._waits = None

    def _made(self, streams: int) -> DataLoader[Any]:
        """The loader for so many streams; kept, with its workers where they are to persist, as long as that is so."""
        workers = max((n for n in range(1, min(self._workers, streams) + 1) if streams % n == 0), default=0)
        if self._loader is None or self._loader.num_workers != workers:
            self._loader = DataLoader(
                self._lanes,  # type: ignore[arg-type]  # it is asked for batches only
                batch_sampler=self._tickets,  # type: ignore[arg-type]  # torch hands on whatever this gives
                num_workers=workers,
                collate_fn=_as_it_is,
                generator=self._generator,
                **self._options,
            )
        return self._loader

    def _own(self) -> range:
        """The streams of this rank, of those there are now.

        Raises:
            UsageError: fewer streams than ranks.
        """
        rank, world = current_ranks(*self._ranks)
        if self._recipe.streams < world:
            raise UsageError(
                f"{self._recipe.streams} streams leave some of {world} ranks without one. Their number is fixed for the run:"
                f" run on {self._recipe.streams} ranks at most, or begin a new run with more streams"
            )
        return range(rank, self._recipe.streams, world)

    def _epoch_of(self, number: int) -> int:
        return _epoch_at(self._places.get(number, _Place()).snapshot)

    def per_rank(self, *, mesh: Any = None, dims: str | Sequence[str] | None = None) -> PerRank:
        """This reader as a component of a TrainState: each rank stores its own streams, and they are dealt anew.

        Args:
            mesh, dims: as for ``keepstep.per_rank``, where several ranks read the same streams (``rank=`` and ``world=``
                of the reader are then those along ``dims``).
        """
        return per_rank(self, on_world_change=self.redeal, mesh=mesh, dims=dims)

    def redeal(self, saved: Sequence[tuple[Mapping[str, int], Any]], here: Mapping[str, int]) -> dict[str, Any]:
        """This rank's streams, out of those that all ranks have saved. A rule for ``on_world_change``; changes nothing.

        Raises:
            MismatchError: a stream is missing.
        """
        (first, *_) = (state for _, state in saved)
        places = {number: place for _, state in saved for number, place in state["places"].items()}
        own = self._own()
        if missing := [f"stream {number}" for number in own if number not in places]:
            raise MismatchError(f"no rank has saved the place of streams that rank {dict(here)} is to read:", missing)
        # An epoch that has ended for all streams that this rank is given has not yet for others: it sits the rest out.
        waits = None
        if not self._recipe.repeat:
            begun = [_least_epoch(state["places"].values(), state["waits"]) for _, state in saved]
            waits = min(begun) if min(begun) < _least_epoch([places[number] for number in own]) else None
        return {**first, "next": 0, "waits": waits, "places": {number: places[number] for number in own}}

    def take_ids(self) -> list[int] | None:
        """None: what comes in a row has no numbers."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Where the streams of this rank stand, with what they hold. Not the same on every rank."""
        own = self._own()
        places = {number: self._places.get(number, _Place()) for number in own}
        again = sum(
            place.snapshot["read"] for place in places.values() if place.snapshot and place.snapshot["at"] is None
        )
        if again and not self._warned:
            self._warned = True
            warnings.warn(
                f"the iterators that {type(self._recipe.source).__name__}.open gives have no state_dict: a resume from here"
                f" reads {again} items of this rank again to come to where it was, and goes on rightly only if they are the"
                " same then. Give them state_dict and load_state_dict",
                PositionWarning,
                stacklevel=2,
            )
        return {
            **self._header(),
            "next": self._next,
            "waits": self._waits,
            "places": {number: {"snapshot": place.snapshot, "skip": place.skip} for number, place in places.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where streams stood; before ``iter()`` is called.

        Raises:
            MismatchError: streams, shards, seed or the way of packing are other ones now, or these are the streams of
                another rank; lists everything. Nothing has changed.
        """
        wrong = [
            f"{name}: saved {state.get(name)!r}, now {value!r}"
            for name, value in self._header().items()
            if state.get(name) != value
        ]
        if set(state["places"]) != set(self._own()):
            wrong.append(
                f"streams of this rank: saved {sorted(state['places'])}, now {list(self._own())}; as data=reader.per_rank()"
                " in the state they are dealt anew"
            )
        if wrong:
            raise MismatchError("the streams are not those that were saved, so their places mean nothing:", wrong)
        self._places = {number: _Place(place["snapshot"], place["skip"]) for number, place in state["places"].items()}
        self._next, self._waits, self._turn = state["next"], state["waits"], object()

    def _header(self) -> dict[str, Any]:
        """What must be the same for a place to mean the same."""
        recipe = self._recipe
        return {
            "streams": recipe.streams,
            "shards": xxhash.xxh3_64_hexdigest("\0".join(recipe.names).encode(errors="surrogatepass")),
            "seed": recipe.seed,
            "shuffle": recipe.shuffle,
            "shuffle_buffer": recipe.buffer,
            "batch_size": recipe.batch_size,
            "repeat": recipe.repeat,
            "block": None if recipe.pack is None else recipe.pack.block,
        }


@dataclass(slots=True)
class _Tickets:
    """Requests for batches of ``streams`` in turn, until none of them is ``running`` any more."""

    streams: list[int] = field(default_factory=list)
    places: dict[int, _Place] = field(default_factory=dict)
    epoch: int = 0
    running: set[int] = field(default_factory=set)

    def __iter__(self) -> Iterator[_Ticket]:
        places = dict(self.places)
        while self.running:
            for number in self.streams:
                yield _Ticket(number, self.epoch, places.pop(number, None))


class _Lanes:
    """Makes the batches that tickets ask for; a worker has a copy of its own."""

    def __init__(self, recipe: Recipe, collate: Callable[[Any], Any]) -> None:
        self._recipe = recipe
        self._collate = collate
        self._open: dict[int, Stream] = {}

    def __getitems__(self, ticket: _Ticket) -> tuple[_Reply, Any]:
        with own_streams():
            if ticket.start is not None:
                self._open[ticket.stream] = Stream.at(
                    self._recipe, ticket.stream, ticket.start.snapshot, ticket.start.skip
                )
            stream = self._open[ticket.stream]
            items = stream.next_batch(ticket.epoch)
            batch = None if items is None else self._collate(items)
        ended = not self._recipe.repeat and stream.epoch != ticket.epoch
        snapshot = stream.snapshot() if ended or stream.snapshot_due() else None
        return _Reply(ticket.stream, items is not None, ended, snapshot), batch


def _epoch_at(snapshot: dict[str, Any] | None) -> int:
    return 0 if snapshot is None else int(snapshot["epoch"])


def _least_epoch(places: Iterable[dict[str, Any]], waits: int | None = None) -> int:
    """The epoch of the stream furthest behind, of saved places; or that which their rank sits out."""
    return waits if waits is not None else min(_epoch_at(place["snapshot"]) for place in places)


def _as_it_is(made: Any) -> Any:
    return made
