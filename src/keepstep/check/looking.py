"""What the tests of the storage contract look with: known bytes, what is there, what was raised, many threads at once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable

from keepstep.errors import CheckpointError, StorageError
from keepstep.storage.base import Storage, read_blob

__all__ = ["Stop", "content", "expect", "is_absent", "listed", "pattern", "raised", "together"]

LIMIT = 1 << 26


class Stop(Exception):
    """What goes wrong in the middle of a write."""


def pattern(size: int) -> bytes:
    """Bytes in which every page differs from every other."""
    block = bytes(range(251))
    return (block * (size // len(block) + 1))[:size]


def expect(found: bytes, written: bytes) -> None:
    """Fails with a line, not with a comparison of megabytes."""
    if found != written:
        raise AssertionError(f"{len(found):,} bytes that are not the {len(written):,} bytes written")


def content(storage: Storage, name: str) -> bytes:
    """All of a blob."""
    return read_blob(storage, name, LIMIT)


def listed(storage: Storage, prefix: str = "") -> dict[str, int]:
    """Names and sizes below a folder, each listed once."""
    found = list(storage.list(prefix))
    if len(found) != len(dict(found)):
        raise AssertionError(f"listed twice: {found}")
    return dict(found)


def is_absent(storage: Storage, name: str) -> bool:
    """Whether nobody sees the blob."""
    error = raised(storage.open, name)
    return isinstance(error, StorageError) and error.errno == errno.ENOENT and name not in listed(storage)


def raised(call: Callable[..., object], *args: object) -> Exception | None:
    """What the call raised; None when it did not."""
    try:
        call(*args)
    except (CheckpointError, Stop) as err:
        return err
    return None


def together(work: Callable[[int], None], count: int) -> None:
    """Runs ``work(0..count-1)`` at the same time; raises the first error any of them raised."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except BaseException as err:  # noqa: BLE001  raised again in the caller's thread
            errors.append(err)

    threads: Iterable[threading.Thread] = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
