"""What Lightning iterates over in the place of the training loader: it knows when a step is really over.

Between the hook after a batch and the request for the next one, Lightning still runs hooks of the module, validation, and
schedulers. Whoever saves in the hook saves in the midst of that. The request itself comes after all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["Feed", "Listener"]


class Listener(Protocol):
    """Who wants to know what the loop does."""

    def epoch_begins(self) -> None:
        """The loop stands between two epochs: nothing of the next one has happened."""

    def batches_begin(self) -> None:
        """An iteration over the loader has begun, and no batch was asked for."""

    def batch_wanted(self) -> None:
        """The next batch is asked for: everything that belongs to the one before is done."""


class Feed:
    """The training loader, with somebody who listens. Everything else is asked of the loader itself.

    An iteration over the loader begins with the request for the first batch, not with ``iter``: Lightning calls that at
    other moments in a resumed run than in one that never stopped, and a torch loader draws a random number then.
    """

    def __init__(self, loader: Any, listener: Listener) -> None:
        self.loader = loader
        self._listener = listener

    @property
    def sampler(self) -> Feed:
        """Lightning tells the sampler of each new epoch: this object."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins; told to the loader and its samplers."""
        self._listener.epoch_begins()
        batches = getattr(self.loader, "batch_sampler", None)
        parts: list[Any] = [
            self.loader,
            getattr(self.loader, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
        ]
        for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """The batches. A loader that stands at the end of an epoch and has nothing left of it is begun anew."""
        for _ in range(2):
            iterator = iter(self.loader)
            self._listener.batches_begin()
            given = False
            while True:
                self._listener.batch_wanted()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                given = True
                yield batch
            if given:
                return

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
