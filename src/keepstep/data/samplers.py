"""Samplers for map-style data under any loader, with a position that survives a change of world size.

They hand out samples, and learn from the Checkpointer how many of them were consumed: a loader fetches ahead, so what was
handed out says little about what was used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from keepstep.data.order import Order, Tail
from keepstep.data.position import Dealing, Position
from keepstep.errors import UsageError

__all__ = ["ResumableBatchSampler", "ResumableSampler"]


class ResumableBatchSampler(Sampler[list[int]]):
    """Batches of samples for ``DataLoader(dataset, batch_sampler=...)``. Put it into the state: ``data=sampler``.

    All ranks follow one order for each epoch. A global batch is a stretch of it, and each rank gets its share of that. The
    position is one number, the samples that all ranks together have consumed, so a run may go on with other ranks,
    workers and sizes of batches, and the order of what is left stays as it was. ``ckpt.step(samples=n)`` moves it on: tell
    it what all ranks together have consumed since the last boundary.

    Args:
        dataset: a map-style data set, or anything with its length. Its length is taken once, here.
        batch_size: samples in a batch of one rank. Or
        global_batch_size: samples in a batch of all ranks together, divided over them as evenly as possible. With it the
            batches stay the same on any number of ranks.
        seed: of the order.
        shuffle: whether each epoch has an order of its own, or all of them that of the data set.
        tail: ``"short"``, ``"drop"`` or ``"pad"``: what becomes of the samples that fill no global batch, see ``Cut``.
        rank, world: this rank and the number of ranks among which data is divided; those of torch's default process group
            when they are left out. Where several ranks compute the same samples (tensor, pipeline or context
            parallelism), give those of the data-parallel dimension of the mesh.

    Raises:
        UsageError: the data cannot be dealt like that.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "short",
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        order = Order(len(dataset), seed, shuffle)
        self._position = Position(Dealing(order, tail, batch_size, global_batch_size, rank, world))

    @property
    def epoch(self) -> int:
        """The epoch of the next sample that will be consumed."""
        return self._position.standing()[0]

    @property
    def global_batch_size(self) -> int:
        """Samples in a batch of all ranks together, the last one of an epoch apart."""
        return self._position.dealing.cut()[0].size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of that epoch. In that epoch already, also after a resume in its middle, it does nothing.

        Raises:
            UsageError: the epoch lies before the one that a resume has led to.
        """
        self._position.go_to(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the consumed position to the end of the epoch."""
        for dealt in self._position.deal():
            yield list(dealt.ids)

    def __len__(self) -> int:
        """Batches in a whole epoch, the same for all ranks."""
        return self._position.dealing.cut()[0].count()

    def consumed(self, samples: int) -> None:
        """So many samples were consumed by all ranks together since the last call. ``Checkpointer.step`` calls it.

        Raises:
            UsageError: batches were handed out and nothing was ever said to be consumed, or the number is not that of
                whole batches.
        """
        self._position.consume(samples)

    def take_ids(self) -> list[int] | None:
        """The samples this rank has consumed since the last call, in order; None if nobody asked for too long."""
        return self._position.take_ids()

    def state_dict(self) -> dict[str, Any]:
        """The position and what the order depends on. The same on every rank.

        Raises:
            UsageError: batches were handed out and nothing was ever said to be consumed: the position is not known.
        """
        self._position.check_told()
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position; before ``iter()`` is called on the loader.

        Raises:
            MismatchError: data set, seed or shuffling are not those that were saved.
        """
        self._position.load_state_dict(state)


class ResumableSampler(Sampler[int]):
    """Single samples for ``DataLoader(dataset, batch_size=..., sampler=...)``; else like a ResumableBatchSampler.

    Rank r of M gets every M-th sample of the order. How many batches these make is the loader's affair, so shares are made
    equal: by ``tail="pad"``, which repeats up to M - 1 samples at the end of an epoch, or ``"drop"``, which leaves them out.

    Args:
        dataset: a map-style data set, or anything with its length.
        seed: of the order.
        shuffle: whether each epoch has an order of its own.
        tail: ``"pad"`` or ``"drop"``.
        rank, world: as for a ResumableBatchSampler.

    Raises:
        UsageError: the data cannot be dealt like that.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "pad",
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if tail == "short":
            raise UsageError(
                "tail='short' would give ranks unequal shares, and those with fewer batches would leave the others waiting:"
                " a ResumableBatchSampler knows the batches and can do it"
            )
        self._batches = ResumableBatchSampler(
            dataset, batch_size=1, seed=seed, shuffle=shuffle, tail=tail, rank=rank, world=world
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next sample that will be consumed."""
        return self._batches.epoch

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of that epoch; see ResumableBatchSampler."""
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from the consumed position to the end of the epoch."""
        for (number,) in self._batches:
            yield number

    def __len__(self) -> int:
        """Samples of a rank in a whole epoch, the same for all ranks."""
        return len(self._batches)

    def consumed(self, samples: int) -> None:
        """So many samples were consumed by all ranks together since the last call. ``Checkpointer.step`` calls it."""
        self._batches.consumed(samples)

    def take_ids(self) -> list[int] | None:
        """The samples this rank has consumed since the last call, in order; None if nobody asked for too long."""
        return self._batches.take_ids()

    def state_dict(self) -> dict[str, Any]:
        """The position and what the order depends on. The same on every rank."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position; before ``iter()`` is called on the loader."""
        self._batches.load_state_dict(state)
