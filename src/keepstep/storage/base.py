"""The storage contract: seven methods (a few more that may be done better, or answered), no rename, no flags.

``keepstep.check.contract`` tests any implementation of it.

Names are relative, ``/``-separated, and never leave the root (``check_name``). A blob is absent or whole: what was not
committed is not visible under its name. What ``commit``, ``put`` and ``put_new`` wrote is durable when they return.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from keepstep.errors import CorruptError, StorageError

__all__ = ["Blob", "Closing", "Storage", "Subfolder", "Upload", "read_blob"]

Buffer = memoryview
MAX_LINES_BYTES = 1 << 28


class Closing(ABC):
    """What holds something that has to be given back: ``close`` it, or use it in a with-block."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held. Idempotent."""

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()


class Upload(Closing):
    """A blob being written. Leaving the with-block without ``commit`` leaves nothing under the name.

    ``in_order``: it goes on its way from its beginning to its end, so what comes before its turn is held in memory.
    """

    in_order: bool = False

    @abstractmethod
    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes all of ``data`` at ``offset`` bytes. Any thread; several at once for ranges that do not overlap.

        The buffer is the caller's again when this returns.
        """

    def lend_at(self, offset: int, data: Buffer) -> None:
        """Like ``write_at``, but the buffer is lent: it stays as it is until ``commit`` or ``close`` returns.

        So what sends it may do so without a copy.
        """
        self.write_at(offset, data)

    @abstractmethod
    def commit(self, size_bytes: int) -> None:
        """Makes the blob durable and visible with exactly ``size_bytes``; bytes written beyond are cut off."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what was not committed. Idempotent; never raises for a blob that was committed."""


class Blob(Closing):
    """A committed blob, open for reading."""

    size_bytes: int

    @abstractmethod
    def read_into(self, offset: int, buffer: Buffer) -> None:
        """Fills all of ``buffer`` from ``offset`` bytes. Any thread, several at once.

        Raises:
            CorruptError: the blob ends before the buffer is full.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases what the blob holds. Idempotent."""


class Storage(ABC):
    """A place for blobs below one root. Every method may be called from any thread; errors are StorageError.

    ``url`` is what a person would call this place, for messages and for comparison between ranks. ``late_s`` is how long a
    blob that another machine has committed may stay out of sight here. ``exclusive`` says whether a name goes to one writer
    only, of all that there are: False for a store that overlooks the condition of a create. ``swaps`` says the same of
    ``put_over``. ``sealed`` says whether the files of a step in it have the digests of their blocks; False for what other
    programs have saved, which is shown as a step. ``far`` says that every byte read comes over a wire, so that ranks do
    well to read it once among them. Where asking costs more than a few bytes do, ``request_bytes`` is how much one read
    should be of, and ``requests_at_once`` how many of them should be on their way; 0 where it makes no difference.
    """

    url: str
    late_s: float = 0.0
    far: bool = False
    sealed: bool = True
    exclusive: bool = True
    swaps: bool = False
    request_bytes: int = 0
    requests_at_once: int = 0

    @abstractmethod
    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """Starts writing a new blob under a name that nobody else writes."""

    @abstractmethod
    def open(self, name: str) -> Blob:
        """Opens a committed blob. Raises StorageError with errno ENOENT when it is absent."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Writes a small blob whole, replacing what was there: readers see the old or the new one, never a mixture."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a small blob whole unless the name is taken; False when it is. Of many callers exactly one gets True."""

    def put_over(self, name: str, data: bytes, expected: bytes) -> bool:
        """Like ``put``, but only over exactly the bytes ``expected``; False when the blob holds others, or is absent.

        ``data`` must be bytes that nobody else writes. Of callers at one moment that expect the same, exactly one gets True
        where the storage ``swaps``. Elsewhere it looks before it writes, as this does, and several may.
        """
        try:
            found = read_blob(self, name, len(expected))
        except CorruptError:
            return False
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
            return False
        if found == expected:
            self.put(name, data)
        return found == expected

    def append_line(self, name: str, line: bytes) -> None:
        """Adds a line, with its newline, to a blob of lines that only one process writes; makes the blob when it is absent.

        It may be lost or cut off in a crash; the lines before and after it are not. A reader sees whole lines before it. A
        storage that can append does better than this, which writes the blob anew.
        """
        try:
            before = read_blob(self, name, MAX_LINES_BYTES)
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
            before = b""
        self.put(name, before + (b"\n" if before and not before.endswith(b"\n") else b"") + line)

    @abstractmethod
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(name, size in bytes) of every blob below the folder ``prefix`` ("" for all), in any order."""

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """The names of the folders directly below the root, in any order; cheap even when they hold many blobs."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Removes blobs; those already gone are no error. Folders left empty may go too."""

    def free_bytes(self) -> int | None:
        """How much more may be written here; None where that cannot be told."""
        return None

    def written_at(self, prefix: str) -> Mapping[str, float]:
        """When each blob below the folder ``prefix`` was written, in seconds since 1970, by the clock of the storage.

        Without those of which that cannot be told, which here are all.
        """
        return {}


class Subfolder(Storage):
    """A folder of another storage as a storage of its own."""

    def __init__(self, parent: Storage, folder: str) -> None:
        self._parent = parent
        self._prefix = f"{folder}/"
        self.url = f"{parent.url}/{folder}"
        self.late_s = parent.late_s
        self.far = parent.far
        self.request_bytes, self.requests_at_once = parent.request_bytes, parent.requests_at_once

    @property
    def exclusive(self) -> bool:  # type: ignore[override]
        """See Storage."""
        return self._parent.exclusive

    @property
    def swaps(self) -> bool:  # type: ignore[override]
        """See Storage."""
        return self._parent.swaps

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """See Storage."""
        return self._parent.create(self._prefix + name, size_hint_bytes)

    def open(self, name: str) -> Blob:
        """See Storage."""
        return self._parent.open(self._prefix + name)

    def put(self, name: str, data: bytes) -> None:
        """See Storage."""
        self._parent.put(self._prefix + name, data)

    def put_new(self, name: str, data: bytes) -> bool:
        """See Storage."""
        return self._parent.put_new(self._prefix + name, data)

    def put_over(self, name: str, data: bytes, expected: bytes) -> bool:
        """See Storage."""
        return self._parent.put_over(self._prefix + name, data, expected)

    def append_line(self, name: str, line: bytes) -> None:
        """See Storage."""
        self._parent.append_line(self._prefix + name, line)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See Storage."""
        cut = len(self._prefix)
        return ((name[cut:], size) for name, size in self._parent.list((self._prefix + prefix).rstrip("/")))

    def folders(self) -> Sequence[str]:
        """See Storage."""
        return sorted({name.split("/", 1)[0] for name, _ in self.list("") if "/" in name})

    def delete(self, names: Sequence[str]) -> None:
        """See Storage."""
        self._parent.delete([self._prefix + name for name in names])

    def free_bytes(self) -> int | None:
        """See Storage."""
        return self._parent.free_bytes()

    def written_at(self, prefix: str) -> Mapping[str, float]:
        """See Storage."""
        cut = len(self._prefix)
        found = self._parent.written_at((self._prefix + prefix).rstrip("/"))
        return {name[cut:]: at for name, at in found.items()}


def read_blob(storage: Storage, name: str, limit_bytes: int) -> bytes:
    """All of a small blob.

    Raises:
        CorruptError: it is larger than ``limit_bytes``, so it cannot be what is looked for; nothing was allocated.
        StorageError: it is absent or cannot be read.
    """
    for left in (1, 0):
        with contextlib.closing(storage.open(name)) as blob:
            if blob.size_bytes > limit_bytes:
                raise CorruptError(f"{name} has {blob.size_bytes:,} bytes; at most {limit_bytes:,} are possible")
            data = bytearray(blob.size_bytes)
            try:
                if data:
                    blob.read_into(0, memoryview(data))
            except StorageError as err:
                # Another machine has replaced it while it was read: the new one is read, from its beginning.
                if not left or err.errno != errno.ESTALE:
                    raise
                continue
            return bytes(data)
    raise AssertionError  # the last try returns or raises
