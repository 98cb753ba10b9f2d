"""A DataLoader for map-style data that knows by itself what was consumed.

It hands a batch to the loop and counts it; whatever the loop had got before a step boundary belongs to that step. Workers,
prefetching and pinning are those of torch's DataLoader underneath and run ahead as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from keepstep.data.order import Order, Tail, mix
from keepstep.data.position import Dealing, Position
from keepstep.data.seeding import Draw, SeededCollate, SeededDataset
from keepstep.errors import UsageError

__all__ = ["ResumableLoader", "check_options"]

_OURS = {
    "sampler": "the loader has its own; a ResumableBatchSampler goes under a DataLoader of yours",
    "batch_sampler": "the loader has its own; a ResumableBatchSampler goes under a DataLoader of yours",
    "drop_last": "tail='drop' is drop_last=True, tail='short' is drop_last=False, tail='pad' fills the last batch up",
    "generator": "random numbers come from seed=",
}
_WORKERS = -2
"""Stands in the place of a sample's number for what torch's workers are seeded with."""


class ResumableLoader:
    """Batches of a map-style data set, from wherever the run stands. Put it into the state: ``data=loader``.

    ``for batch in loader`` goes to the end of the epoch, from its middle after a resume; the next loop is the next epoch.
    A batch counts as consumed when the loop gets it. The order is that of a ResumableBatchSampler, and so is everything that
    holds for other numbers of ranks and for the end of an epoch.

    Random numbers that the data set or the collate function draw (python, numpy, torch on the host) depend on the seed, the
    epoch and the samples alone: not on workers, not on where the run was resumed. The generators of the training process
    stay where they are.

    Args:
        dataset: a map-style data set with a length.
        batch_size, global_batch_size, seed, shuffle, tail, rank, world: as for a ResumableBatchSampler.
        collate_fn: makes a batch of a list of samples; torch's own when left out.
        num_workers: processes that make batches; 0 for the training process itself.
        options: any other argument of torch's DataLoader, such as ``pin_memory``, ``prefetch_factor``,
            ``persistent_workers``, ``worker_init_fn``, ``multiprocessing_context``, ``timeout``.

    Raises:
        UsageError: the data cannot be dealt like that, or an option contradicts what the loader does itself.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "short",
        rank: int | None = None,
        world: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"a {type(dataset).__name__} has no samples by number: a StreamReader reads what comes in a row"
            )
        check_options(options, _OURS)
        order = Order(len(dataset), seed, shuffle)
        self._position = Position(Dealing(order, tail, batch_size, global_batch_size, rank, world))
        self._dataset = dataset
        self._yielded = self._batch_samples = 0
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset),  # type: ignore[arg-type]  # it is asked for batches only
            batch_sampler=_Draws(self._position),  # type: ignore[arg-type]  # torch hands on whatever this gives
            num_workers=num_workers,
            collate_fn=SeededCollate(collate_fn or default_collate),  # type: ignore[arg-type]  # as above
            generator=self._generator,
            **options,
        )

    @property
    def dataset(self) -> Any:
        """The data set it was made with, as of torch's DataLoader: loops print its length."""
        return self._dataset

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: from the moment on when the loop has got the last batch of one, the one after."""
        return self._position.standing()[0]

    @property
    def global_batch_size(self) -> int:
        """Samples in a batch of all ranks together, the last one of an epoch apart."""
        return self._position.dealing.cut()[0].size

    @property
    def batch_samples(self) -> int:
        """Samples of all ranks together in the batch that the loop got last: ``ckpt.step(samples=loader.batch_samples)``."""
        return self._batch_samples

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of that epoch. In that epoch already, also after a resume in its middle, it does nothing.

        Raises:
            UsageError: the epoch lies before the one that a resume has led to.
        """
        self._position.go_to(epoch)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches from where the run stands to the end of the epoch."""
        # So that neither starting workers nor anything they draw takes from the random numbers of training.
        self._generator.manual_seed(mix(self._position.dealing.order.seed, self.epoch, _WORKERS) >> 1)
        return self._counted(iter(self._loader))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            dealt = self._position.consume_next()
            self._batch_samples = dealt.samples
            # The last batch of an epoch may be counted as if it were as large as the others.
            self._yielded += min(dealt.samples, dealt.usual)
            yield batch

    def __len__(self) -> int:
        """Batches in a whole epoch, the same for all ranks. After a resume in the middle of one, fewer are left of it."""
        return self._position.dealing.cut()[0].count()

    def consumed(self, samples: int) -> None:
        """Checks what a boundary was told against what the loop has got; the loader counts by itself.

        Raises:
            UsageError: the loop is said to have consumed less than it got.
        """
        yielded, self._yielded = self._yielded, 0
        if 0 < samples < yielded:
            raise UsageError(
                f"samples={samples}, but since the last boundary the loop has got {yielded} samples, over all ranks."
                " samples= counts all ranks together (loader.batch_samples says how many the last batch has). If something"
                " between loader and loop fetches batches ahead, put a ResumableBatchSampler under it instead. A loader that"
                " is not for training does not belong in the state"
            )

    def take_ids(self) -> list[int] | None:
        """The samples this rank has consumed since the last call, in order; None if nobody asked for too long."""
        return self._position.take_ids()

    def state_dict(self) -> dict[str, Any]:
        """The position and what the order depends on. The same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position; before ``iter()`` is called.

        Raises:
            MismatchError: data set, seed or shuffling are not those that were saved.
        """
        self._position.load_state_dict(state)
        self._yielded = self._batch_samples = 0


class _Draws:
    """The position's batches as requests for a SeededDataset."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def __iter__(self) -> Iterator[Draw]:
        seed = self._position.dealing.order.seed
        for dealt in self._position.deal():
            yield Draw(dealt.ids, mix(seed, dealt.epoch))


def check_options(options: dict[str, Any], ours: dict[str, str]) -> None:
    """Refuses arguments of a DataLoader that contradict what is done here.

    Raises:
        UsageError: lists all of them, each with what to do instead.
    """
    wrong = [f"{name}=: {ours[name]}" for name in options if name in ours]
    if options.get("in_order") is False:
        wrong.append("in_order=False: batches in the order in which workers finish come in another order at each run")
    if wrong:
        raise UsageError("; ".join(wrong))
