"""Token sequences of any length, packed into blocks of one length; what is left over is state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from keepstep.errors import MismatchError, UsageError
from keepstep.state.marks import PerRank, per_rank

__all__ = ["PackingCollator"]


class PackingCollator:
    """Puts token sequences one after the other and cuts them into blocks; tokens that fill no block wait for the next ones.

    As the ``pack`` of a StreamReader it packs each stream by itself, in the workers, and its left-over tokens are part of
    the reader's state. As the ``collate_fn`` of a loader in the training process it is a component of its own:
    ``TrainState(data=loader, packing=collator.per_rank())``. A batch then has as many blocks as its samples fill, which may
    be none.

    Args:
        block: tokens in a block.
        separator: a token put behind every sequence; none when left out.

    Raises:
        UsageError: a block of no tokens.
    """

    def __init__(self, block: int, *, separator: int | None = None) -> None:
        if block < 1:
            raise UsageError(f"block={block}: a block has at least one token")
        self.block = block
        self.separator = separator
        self._left = torch.empty(0, dtype=torch.long)
        self._added: list[torch.Tensor] = []
        self._waiting = 0

    def add(self, tokens: Sequence[int] | torch.Tensor) -> None:
        """Puts one sequence behind those that wait. Tokens become int64."""
        sequence = torch.as_tensor(tokens, dtype=torch.long).flatten()
        if self.separator is not None:
            sequence = torch.cat([sequence, torch.tensor([self.separator])])
        self._added.append(sequence)
        self._waiting += sequence.numel()

    @property
    def ready(self) -> bool:
        """Whether enough tokens wait for a block."""
        return self._waiting >= self.block

    def take(self) -> torch.Tensor:
        """The next block, of shape [block]; only when one is ready."""
        left = self._all_left()
        self._left, self._waiting = left[self.block :].clone(), left.numel() - self.block
        return left[: self.block]

    def __call__(self, sequences: Iterable[Sequence[int] | torch.Tensor]) -> torch.Tensor:
        """All blocks that these sequences fill, together with what was left over before, of shape [blocks, block].

        Raises:
            UsageError: in a worker of a loader, whose left-over tokens nobody would save.
        """
        if get_worker_info() is not None:
            raise UsageError(
                "a PackingCollator as collate_fn of a loader with workers would leave its left-over tokens in them, where"
                " nobody saves them: use num_workers=0, or a StreamReader with pack=, which packs in its workers"
            )
        for tokens in sequences:
            self.add(tokens)
        left = self._all_left()
        blocks = left.numel() // self.block
        packed, rest = left[: blocks * self.block], left[blocks * self.block :]
        # Not a view of what was packed: that would be kept for as long as these few tokens are.
        self._left, self._waiting = rest.clone(), rest.numel()
        return packed.view(blocks, self.block)

    def _all_left(self) -> torch.Tensor:
        if self._added:
            self._left, self._added = torch.cat([self._left, *self._added]), []
        return self._left

    def fresh(self) -> PackingCollator:
        """Another one of the same kind, with nothing left over."""
        return PackingCollator(self.block, separator=self.separator)

    def per_rank(self) -> PerRank:
        """This collator as a component of a TrainState: every rank has left-over tokens of its own.

        On another number of ranks they are dealt anew: none is lost, none comes twice.
        """
        return per_rank(self, on_world_change=self.redeal)

    def redeal(self, saved: Sequence[tuple[Mapping[str, int], Any]], here: Mapping[str, int]) -> dict[str, Any]:
        """This rank's part of the left-over tokens of all ranks. Changes nothing."""
        mine = [state["left"] for coords, state in saved if coords["rank"] % here["world"] == here["rank"]]
        (first, *_) = (state for _, state in saved)
        return {**first, "left": torch.cat([*mine, torch.empty(0, dtype=torch.long)])}

    def state_dict(self) -> dict[str, Any]:
        """The tokens that are left over, of shape [tokens], and how they are packed."""
        return {"block": self.block, "separator": self.separator, "left": self._all_left().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the left-over tokens.

        Raises:
            MismatchError: blocks or separators are other ones now.
        """
        now = {"block": self.block, "separator": self.separator}
        different = [
            f"{name}: saved {state[name]!r}, now {value!r}" for name, value in now.items() if state[name] != value
        ]
        if different:
            raise MismatchError("tokens were packed in another way:", different)
        self._left, self._added = state["left"].clone(), []
        self._waiting = self._left.numel()
