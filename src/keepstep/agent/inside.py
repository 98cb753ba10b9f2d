"""A hub in the trainer's own process, where no agent can run. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from keepstep.agent.board import Place
from keepstep.agent.client import Background, Lent
from keepstep.agent.hub import Hub
from keepstep.agent.protocol import Abort, Begin, Decided, Submit
from keepstep.move.arena import Arena, check_budget
from keepstep.storage.base import Storage

__all__ = ["InProcess"]


class InProcess(Background):
    """A hub in this process: works everywhere, and ends with the trainer."""

    kind = "thread"

    def __init__(self) -> None:
        self._hub = Hub()
        self.name = self._hub.name
        self.alive_now = True
        self._lent: dict[int, int] = {}
        self._numbers = 0
        self._lending = threading.Lock()

    @property
    def alive(self) -> bool:
        """See Background."""
        return self.alive_now

    def lend(self, size_bytes: int, budget_bytes: int, instead_of: Lent | None) -> Lent:
        """See Background."""
        with self._lending:
            if instead_of is not None:
                instead_of.arena.close()
                self._lent.pop(instead_of.number, None)
            check_budget(size_bytes, budget_bytes, sum(self._lent.values()))
            arena = Arena(size_bytes, ring=False)
            self._numbers += 1
            self._lent[self._numbers] = arena.size_bytes
            return Lent(self._numbers, arena)

    def begin(self, begin: Begin, run: Storage | None = None) -> Future[Decided]:
        """See Background."""
        return self._hub.begin(begin, run)

    def submit(self, submit: Submit, place: Place, lent: Lent) -> None:
        """See Background."""
        self._hub.submit(submit, place, lent.arena)

    def abort(self, abort: Abort) -> None:
        """See Background."""
        self._hub.abort(abort)

    def listen(self, secret: str, hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """See Background."""
        return self._hub.listen(secret, hosts)

    def drain(self, timeout_s: float) -> int:
        """See Background."""
        return self._hub.settle(timeout_s)

    def close(self) -> None:
        """See Background."""
        self.alive_now = False
        self._hub.close()
