"""The look at a store that the training thread takes when a save is due: short, and shorter while the store is away."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from keepstep.checkpointer.agree import Attempt
from keepstep.errors import CheckpointError, RankFailedError, StorageError
from keepstep.storage.base import Storage
from keepstep.storage.prompt import PromptStorage

__all__ = ["Looks"]

LONGEST_S = 5.0
"""How long training waits for a look, at most. Requests that are tried again take longer."""
LEAST_S = 0.5
SHARE = 1 / 20


class Looks:
    """Limits the looks of one run. After one that failed, the next may take a twentieth of the time in between.

    Storages that are not far away are looked at as they are.
    """

    def __init__(self) -> None:
        self._failed_s = -math.inf

    def promptly(self, storage: Storage, attempt: Attempt) -> tuple[Storage, Attempt]:
        """The same, for one look: its calls end in time."""
        if not storage.far:
            return storage, attempt
        now = time.monotonic()
        within_s = min(LONGEST_S, max(LEAST_S, (now - self._failed_s) * SHARE))
        root = attempt.root and PromptStorage(attempt.root, now + within_s, within_s)
        return PromptStorage(storage, now + within_s, within_s), replace(attempt, root=root)

    def is_away(self, storage: Storage, error: CheckpointError) -> bool:
        """Whether it is only the store that failed, here or on the rank that has looked."""
        codes = {*error.codes.values()} if isinstance(error, RankFailedError) else {error.code}
        if not storage.far or codes != {StorageError.code}:
            return False
        self._failed_s = time.monotonic()
        return True
