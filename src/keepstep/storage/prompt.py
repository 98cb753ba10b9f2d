"""A look at a storage that may be away, by whoever cannot wait for it: training goes on after a few seconds at most."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from keepstep.errors import StorageError
from keepstep.storage.base import Blob, Storage, Upload

__all__ = ["PromptStorage"]

_Answer = TypeVar("_Answer")


class PromptStorage(Storage):
    """Another storage, whose calls end within ``within_s`` seconds, all of them together, from the making of this one.

    What has not ended by then goes on by itself, on a thread that nobody waits for. Blobs are not written through this.
    """

    def __init__(self, inner: Storage, end_s: float, within_s: float) -> None:
        self._inner = inner
        self._end_s = end_s
        self._within_s = within_s
        self.url = inner.url
        self.late_s = inner.late_s

    @property
    def exclusive(self) -> bool:  # type: ignore[override]
        """See Storage."""
        return self._soon("put_new", ".", lambda: self._inner.exclusive)

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """See Storage."""
        return self._soon("create", name, lambda: self._inner.create(name, size_hint_bytes))

    def open(self, name: str) -> Blob:
        """See Storage."""
        return self._soon("open", name, lambda: self._inner.open(name))

    def put(self, name: str, data: bytes) -> None:
        """See Storage."""
        self._soon("put", name, lambda: self._inner.put(name, data))

    def put_new(self, name: str, data: bytes) -> bool:
        """See Storage."""
        return self._soon("put_new", name, lambda: self._inner.put_new(name, data))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See Storage."""
        return iter(self._soon("list", prefix or ".", lambda: [*self._inner.list(prefix)]))

    def folders(self) -> Sequence[str]:
        """See Storage."""
        return self._soon("list", ".", self._inner.folders)

    def delete(self, names: Sequence[str]) -> None:
        """See Storage."""
        self._soon("delete", names[0] if names else ".", lambda: self._inner.delete(names))

    def _soon(self, operation: str, name: str, act: Callable[[], _Answer]) -> _Answer:
        answer: Future[_Answer] = Future()

        def work() -> None:
            try:
                answer.set_result(act())
            except BaseException as err:  # noqa: BLE001  thread entry: raised by whoever waits for it
                answer.set_exception(err)

        left_s = max(0.0, self._end_s - time.monotonic())
        threading.Thread(target=work, name="keepstep-look", daemon=True).start()
        try:
            return answer.result(left_s)
        except TimeoutError as err:
            if isinstance(err, StorageError):
                raise
            text = f"{self.url} has not answered within {self._within_s:g} s, and training does not wait for it"
            raise StorageError(operation, name, OSError(errno.ETIMEDOUT, text)) from err
