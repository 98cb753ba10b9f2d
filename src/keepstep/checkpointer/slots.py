"""Arenas of this trainer: what each is busy with, and when it may be filled again."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from keepstep.agent.client import Background, Lent
from keepstep.checkpointer.pending import Pending
from keepstep.move.arena import whole_chunks
from keepstep.move.device import HostMemory
from keepstep.state.size import SLACK_BYTES

__all__ = ["ArenaSlot"]


@dataclass(slots=True)
class ArenaSlot:
    """An arena and what it is busy with."""

    lent: Lent | None = None
    memory: HostMemory | None = None
    owner: Background | None = None
    warming: threading.Thread | None = None
    copying: Future[None] | None = None
    pending: Pending | None = None

    @property
    def free(self) -> bool:
        """Whether the arena may be filled again."""
        done = self.pending is None or self.pending.committed.done()
        return done and (self.copying is None or self.copying.done())

    def fit(self, background: Background, size_bytes: int, budget_bytes: int) -> tuple[Lent, HostMemory]:
        """The arena, after exchanging one that is too small or was the property of an agent that is gone.

        A new one is a little larger than what is asked for, so that a state which grows a little still fits.

        Raises:
            StagingError: the memory is not there.
            AgentError: the agent is gone.
        """
        if self.lent is not None and self.owner is not background:
            self.close()
        if self.lent is None or self.lent.arena.size_bytes < size_bytes:
            old, self.lent = self.lent, None
            if self.memory is not None:
                self.memory.close()
            self.lent = background.lend(whole_chunks(size_bytes + SLACK_BYTES), budget_bytes, old)
            self.memory, self.owner = None, background
        if self.memory is None:
            self.memory = HostMemory(self.lent.arena)
        return self.lent, self.memory

    def close(self) -> None:
        """Lets go of the arena."""
        if self.memory is not None:
            self.memory.close()
        if self.lent is not None:
            self.lent.arena.close()
        self.lent = self.memory = None
