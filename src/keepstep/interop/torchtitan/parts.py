"""What a torchtitan Trainer has beside its optimizers, as components of a state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchtitan.components.dataloader import ParallelAwareDataloader

from keepstep.data import ResumableLoader, StreamReader, stateful_loader
from keepstep.errors import MismatchError
from keepstep.interop.positions import DataPlace, data_place
from keepstep.state import Coordinates, per_rank

__all__ = ["CopiedState", "Feed", "Listener", "LoaderPlace", "ModelParts", "Progress", "place_of"]


class Listener(Protocol):
    """Who wants to know what the loop does."""

    def begin_batches(self) -> None:
        """No batch was asked for yet."""

    def end_step(self) -> None:
        """A batch is asked for: everything before is done."""


class Feed:
    """The Trainer's loader, which tells when a batch is asked for. Everything else is asked of the loader itself."""

    def __init__(self, loader: Any, place: DataPlace, listener: Listener) -> None:
        self.loader = loader
        self._place = place
        self._listener = listener
        self._samples = 0

    def take_samples(self) -> int:
        """How many samples all ranks were given since the last call, where the loader knows."""
        samples, self._samples = self._samples, 0
        return samples

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        batches = iter(self.loader)
        self._listener.begin_batches()
        while True:
            self._listener.end_step()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._samples += self._place.samples()
            yield batch

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class Progress:
    """The Trainer's counts as they were when the step ended: with the next batch they are those of the next step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._taken: dict[str, Any] = dict(trainer.state_dict())

    @property
    def step(self) -> int:
        """The last step that is done."""
        return int(self._taken.get("step", 0))

    def take(self) -> None:
        """Now."""
        self._taken = dict(self._trainer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What was taken last."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives them to the Trainer."""
        self._trainer.load_state_dict(state)
        self._taken = dict(state)


class LoaderPlace:
    """The place in the data of one data-parallel rank, as plain values: torchtitan would give a pickle."""

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self._loader = loader
        self.num_workers, self.dataset = loader.num_workers, loader.dataset
        if self.num_workers and hasattr(self.dataset, "state_dict"):
            self.dataset.state_dict = CopiedState(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Which rank of how many, and where it stands."""
        loader = self._loader
        return {
            "dp_rank": loader.dp_rank,
            "dp_world_size": loader.dp_world_size,
            "place": StatefulDataLoader.state_dict(loader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes there.

        Raises:
            MismatchError: it is the place of another rank, or of one among another number.
        """
        if not self._is_of(state):
            raise MismatchError(
                "a loader of torchtitan has one place for each data-parallel rank:",
                [f"saved by {_rank_of(state)}, here is {self._rank}"],
                "Take as many as there were, or a ResumableLoader or StreamReader (keepstep.data), which go on with any"
                " number; or begin with the data anew: --checkpoint.exclude_from_loading dataloader",
            )
        StatefulDataLoader.load_state_dict(self._loader, state["place"])

    def choose(self, saved: list[tuple[Coordinates, Any]], here: Coordinates) -> Any:
        """The rule for another number of ranks: whoever had this rank's place among the data-parallel ones."""
        return next((value for _, value in saved if self._is_of(value["loader"])), saved[0][1])

    @property
    def _rank(self) -> str:
        return _rank_of({"dp_rank": self._loader.dp_rank, "dp_world_size": self._loader.dp_world_size})

    def _is_of(self, state: dict[str, Any]) -> bool:
        return _rank_of(state) == self._rank


class CopiedState:
    """A data set's state_dict in a worker, which is sent by a thread while the data set goes on.

    torchtitan's data sets give the lists that they fill: what arrived could be of a later batch, and a run resumed from
    there saw samples twice.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> Any:
        """As it is now."""
        return copy.deepcopy(type(self._dataset).state_dict(self._dataset))


class ModelParts(nn.Module):
    """The stages of a pipeline that one rank has, as one module: their names are those of the whole model already."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = parts

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of all parts."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """That of all parts."""
        return {name: value for part in self.parts for name, value in part.state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Gives each part what is its own."""
        for part in self.parts:
            own = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            part.load_state_dict(own, strict, assign)


def place_of(loader: Any) -> DataPlace:
    """Who keeps the place in the data."""
    if isinstance(loader, ParallelAwareDataloader):
        place = LoaderPlace(loader)
        return DataPlace(per_rank(stateful_loader(place).value, place.choose))
    if isinstance(loader, ResumableLoader | StreamReader | DataLoader):
        return data_place(loader)
    return DataPlace(None if loader is None else per_rank(loader))


def _rank_of(state: dict[str, Any]) -> str:
    return f"data-parallel rank {state['dp_rank']} of {state['dp_world_size']}"
