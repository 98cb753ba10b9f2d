"""Loaders of others that have a state of their own, such as torchdata's StatefulDataLoader, as a component of a state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from keepstep.data.seeding import own_streams
from keepstep.errors import MismatchError, PositionWarning, UsageError
from keepstep.state.marks import PerRank, per_rank

__all__ = ["stateful_loader"]

_PLACES = ("dataset_state", "dataset_iter_state")
"""Where a StatefulDataLoader has what its data set says of its own place."""


def stateful_loader(loader: Any, *, mesh: Any = None, dims: str | Sequence[str] | None = None) -> PerRank:
    """A StatefulDataLoader as a component: ``TrainState(data=stateful_loader(loader))``; iterate over the loader itself.

    Its position is that of the batches which the loop has got. It belongs to one rank and to one number of workers: a load
    on another number of either is refused, and says so before training goes on. To ask it for its state takes nothing from
    the random numbers of training.

    Args:
        loader: a StatefulDataLoader, or another loader with ``state_dict``, ``load_state_dict`` and ``num_workers``.
        mesh, dims: as for ``keepstep.per_rank``, where several ranks read the same data.

    Raises:
        UsageError: the loader has no state.
    """
    if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
        raise UsageError(
            f"a {type(loader).__name__} has no state: put a ResumableBatchSampler under it and into the state, or use a"
            " ResumableLoader or a StatefulDataLoader"
        )
    return per_rank(_StatefulLoader(loader), mesh=mesh, dims=dims)


class _StatefulLoader:
    """A loader's state together with the number of workers it is good for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, and its number of workers."""
        # A loader that was not iterated over yet begins to, for its state, and draws a seed for its workers.
        with own_streams():
            state = self._loader.state_dict()
        dataset = getattr(self._loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and not self._warned and not any(_places(state)):
            self._warned = True
            warnings.warn(
                f"neither {type(dataset).__name__} nor its iterator has a state_dict that says where it stands: a resume"
                " from here reads again all that was read before, and goes on rightly only if that is the same then."
                " Give it state_dict and load_state_dict",
                PositionWarning,
                stacklevel=2,
            )
        return {"workers": self._loader.num_workers, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the loader its state.

        Raises:
            MismatchError: it has another number of workers now.
        """
        if state["workers"] != self._loader.num_workers:
            raise MismatchError(
                f"the position of a {type(self._loader).__name__} is one for each worker:",
                [f"workers: saved with num_workers={state['workers']}, now {self._loader.num_workers}"],
                "Give the loader as many workers as it had. A ResumableLoader or a StreamReader goes on with any number.",
            )
        self._loader.load_state_dict(state["loader"])


def _places(state: Any) -> Iterator[Any]:
    """What the data set said of its place, in each worker."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in _PLACES:
                yield value
            else:
                yield from _places(value)
