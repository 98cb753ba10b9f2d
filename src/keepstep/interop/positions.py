"""What of a training loader goes into a state: whoever knows which samples were consumed, and how it is told.

In: a loader as a trainer was given it. Out: the component that keeps its position, and how many samples a batch has. And
what becomes of a trainer's own numbers on another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from keepstep.data import ResumableBatchSampler, ResumableLoader, ResumableSampler, StreamReader, stateful_loader
from keepstep.errors import UsageError
from keepstep.state import Coordinates

__all__ = ["DataPlace", "data_place", "own_or_first"]


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where a loader's position is kept: ``component`` goes into the state; ``counted`` has to be told of every batch."""

    component: Any
    counted: Any = None

    def samples(self) -> int:
        """Samples of all ranks together in the batch that the loop got last; 0 where nobody needs to know."""
        if isinstance(self.counted, ResumableLoader):
            return self.counted.batch_samples
        return self.counted.global_batch_size if self.counted is not None else 0


def data_place(loader: Any) -> DataPlace:
    """Who keeps the position of a training loader.

    Raises:
        UsageError: nobody does; says what to take instead.
    """
    if isinstance(loader, ResumableLoader):
        return DataPlace(loader, loader)
    if isinstance(loader, StreamReader):
        return DataPlace(loader.per_rank())
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ResumableBatchSampler):
        return DataPlace(sampler, sampler)
    # Loaders of Accelerate always have these methods, and say so when there is nothing behind them.
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if stateful and getattr(loader, "use_stateful_dataloader", True):
        return DataPlace(stateful_loader(loader))
    if isinstance(getattr(loader, "sampler", None), ResumableSampler):
        raise UsageError(
            "a ResumableSampler under a loader of a trainer does not know the size of its batches: take"
            " DataLoader(dataset, batch_sampler=ResumableBatchSampler(dataset, batch_size=...))"
        )
    kind = "a DataLoader" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
    raise UsageError(
        f"the training loader is {kind}, which does not know which of its batches were used. Take a ResumableLoader, a"
        " StreamReader, or a DataLoader with batch_sampler=ResumableBatchSampler(...) (all in keepstep.data), or a"
        " StatefulDataLoader. data=None goes on without its position: a resumed run then sees other samples"
    )


def own_or_first(saved: list[tuple[Coordinates, Any]], here: Coordinates) -> Any:
    """The rule for another number of ranks: old ranks get theirs, new ones that of the first."""
    return next((value for where, value in saved if where["rank"] == here["rank"]), saved[0][1])
