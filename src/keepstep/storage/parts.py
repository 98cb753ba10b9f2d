"""A blob on its way to a store that takes objects from the beginning to the end, in parts of one size.

Writers come in any order, from several threads; a part is handed on when it is full and every one before it was. What is
held in memory: the parts on their way (one here, and as many more as the library sends at once), and what came before
its turn. So whoever writes the beginning last has everything held until then. What is lent is handed on as it is, without
a copy: then nothing is held.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keepstep.errors import StorageError
from keepstep.storage.base import Upload

__all__ = ["PartLimits", "PartUpload", "Taker", "part_size"]

ROUND_BYTES = 1 << 20
HELD_PARTS = 9
"""Eight that a library sends at once, and one that is put together."""
LET_GO_S = 0.02


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What a store takes: at most so many parts of an object, each but the last one between these sizes.

    ``usual_bytes`` is the size that is taken where nothing demands a larger one.
    """

    most_parts: int = 10_000
    usual_bytes: int = 8 << 20
    least_bytes: int = 5 << 20
    most_bytes: int = 5 << 30


def part_size(size_bytes: int, limits: PartLimits, name: str) -> int:
    """The size of the parts of an object of this size, known from the start: a part that was sent cannot grow.

    Raises:
        StorageError: no size would do; says which limit stands in the way.
    """
    needed = -(-size_bytes // limits.most_parts)
    if needed > limits.most_bytes:
        raise too_many_parts(name, size_bytes, limits.most_bytes, limits)
    usual = max(limits.usual_bytes, limits.least_bytes)
    return usual if needed <= usual else min(-(-needed // ROUND_BYTES) * ROUND_BYTES, limits.most_bytes)


def too_many_parts(name: str, size_bytes: int, part_bytes: int, limits: PartLimits) -> StorageError:
    """The error for an object that would need more parts than the store takes."""
    text = (
        f"{size_bytes:,} bytes are more than the store takes of one object: {limits.most_parts:,} parts of"
        f" {part_bytes:,} bytes"
    )
    return StorageError("create", name, OSError(errno.EFBIG, text))


class Taker(ABC):
    """Where an upload goes. Both methods may be called from any thread, and raise a StorageError when it is not there."""

    @abstractmethod
    def take_whole(self, name: str, data: memoryview) -> None:
        """One object in one request."""

    @abstractmethod
    def take_parts(self, name: str, parts: Iterator[memoryview], part_bytes: int) -> None:
        """One object from parts, in their order. Nothing is left when ``parts`` raises."""


class _GivenUpError(BaseException):
    """The upload was closed without a commit. No failure of a store: what is to be tried again does not catch it."""


class _Pages:
    """Memory for parts, used again when nobody looks at it any more: fresh pages cost more than a copy into them.

    The library keeps its view of a part until that was sent, and tells nobody; so the view itself is watched. It may let go
    of it late: beyond ``HELD_PARTS`` there is a moment's wait for it, and no more, for it may itself wait for a part.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._made_bytes = 0
        # One that may be put into from anywhere: a view may die in the middle of a get.
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def take(self, size: int) -> memoryview:
        """So much memory, with anything in it. One thread at a time. What is larger than a part is not used again."""
        if size > self._part_bytes:
            return memoryview(mmap.mmap(-1, size))
        full = self._made_bytes + size > HELD_PARTS * self._part_bytes
        try:
            pages = self._free.get(timeout=LET_GO_S if full else 0)
        except queue.Empty:
            pages = mmap.mmap(-1, self._part_bytes)
            self._made_bytes += size
        watched = np.frombuffer(pages, np.uint8)
        weakref.finalize(watched, self._free.put, pages).atexit = False
        return watched.data[:size]


class _Part:
    """Part of the blob: its bytes, and which of them were written."""

    __slots__ = ("data", "written")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.written: list[tuple[int, int]] = []

    def note(self, start: int, stop: int) -> None:
        """[start, stop) was written."""
        apart = []
        for low, high in self.written:
            if low > stop or high < start:
                apart.append((low, high))
            else:
                start, stop = min(low, start), max(high, stop)
        self.written = [*apart, (start, stop)]

    @property
    def is_full(self) -> bool:
        """Whether every byte was written."""
        return self.written == [(0, len(self.data))]


class PartUpload(Upload):
    """See the module. Parts are sent while it is written; what lies beyond the announced size waits for ``commit``."""

    in_order = True

    def __init__(self, taker: Taker, name: str, size_hint_bytes: int, limits: PartLimits) -> None:
        self._taker = taker
        self._name = name
        self._limits = limits
        self._part_bytes = part_size(size_hint_bytes, limits, name)
        # A part that ends beyond what was announced may have to be cut.
        self._whole_parts = size_hint_bytes // self._part_bytes
        self._pages = _Pages(self._part_bytes)
        self._parts: dict[int, _Part] = {}
        self._next = 0
        self._size_hint_bytes = size_hint_bytes
        # What was lent and waits for its turn, by its offset; and up to where everything was handed on.
        self._lent: dict[int, memoryview] = {}
        self._lent_to = 0
        self._lock = threading.Lock()
        self._handing = threading.Lock()
        self._copying = threading.Lock()
        self._stream: _Stream | None = None
        self._over = False

    def write_at(self, offset: int, data: memoryview) -> None:
        """Copies into parts, and waits when those on their way are too many."""
        size, done = self._part_bytes, 0
        self._check_end(offset + len(data))
        if self._lent or self._lent_to:
            # One at a time: whoever waits for its turn has not copied yet.
            with self._copying:
                copy = self._pages.take(len(data))
                copy[:] = data
                self.lend_at(offset, copy)
            return
        while done < len(data):
            index, start = divmod(offset + done, size)
            stop = min(size, start + len(data) - done)
            with self._lock:
                self._check_unsent(offset + done, self._next * size)
                part = self._parts.get(index)
                if part is None:
                    part = self._parts[index] = _Part(self._pages.take(size))
            part.data[start:stop] = data[done : done + stop - start]
            with self._lock:
                part.note(start, stop)
            done += stop - start
        if self._size_hint_bytes > size:
            self._hand_on()

    def lend_at(self, offset: int, data: memoryview) -> None:
        """Hands on as it is what has its turn, and waits when too much is on its way. All of an object, in any order."""
        self._check_end(offset + len(data))
        with self._lock:
            written = bool(self._parts or self._next)
            if not written:
                self._check_unsent(offset, self._lent_to)
                self._lent[offset] = data[:]
        if written:
            self.write_at(offset, data)
        elif self._size_hint_bytes > self._part_bytes:
            self._hand_on_lent()

    def commit(self, size_bytes: int) -> None:
        """Sends what is left; what was never written is zero. The object is there when this returns."""
        if self._over:
            raise StorageError("commit", self._name, OSError(errno.EINVAL, "it is committed or closed already"))
        sent = self._lent_to or self._next * self._part_bytes
        if size_bytes < sent:
            text = f"{sent:,} bytes were sent already, more than the {size_bytes:,} it is to have"
            raise StorageError("commit", self._name, OSError(errno.EINVAL, text))
        self._check_end(size_bytes)
        left = self._left(sent, size_bytes)
        if self._stream is None and size_bytes <= self._part_bytes:
            whole = [*left]
            self._taker.take_whole(self._name, whole[0] if len(whole) == 1 else memoryview(b"".join(whole)))
        else:
            stream = self._streaming()
            for part in left:
                stream.hand(part)
            stream.finish()
        self._over = True
        self._parts.clear()
        self._lent.clear()

    def close(self) -> None:
        """Gives up what was not committed: the store forgets the parts it has."""
        if not self._over:
            self._over = True
            if self._stream is not None:
                self._stream.give_up()
        self._parts.clear()
        self._lent.clear()

    def _check_end(self, end: int) -> None:
        if end > self._limits.most_parts * self._part_bytes:
            raise too_many_parts(self._name, end, self._part_bytes, self._limits)

    def _check_unsent(self, offset: int, sent: int) -> None:
        if offset < sent:
            text = f"byte {offset:,} was sent already; bytes are written once"
            raise StorageError("write", self._name, OSError(errno.EINVAL, text))

    def _left(self, sent: int, size_bytes: int) -> Iterator[memoryview]:
        """What is still to be handed on, in its order."""
        if not self._lent and not self._lent_to:
            for index in range(self._next, max(1, -(-size_bytes // self._part_bytes))):
                yield self._rest(index, size_bytes)
            return
        for offset in sorted(self._lent):
            if offset > sent:
                yield memoryview(bytes(min(offset, size_bytes) - sent))
            view = self._lent[offset][max(0, sent - offset) : max(0, size_bytes - offset)]
            sent = max(sent, min(offset + len(self._lent[offset]), size_bytes))
            if view:
                yield view
        if sent < size_bytes:
            yield memoryview(bytes(size_bytes - sent))

    def _rest(self, index: int, size_bytes: int) -> memoryview:
        """The bytes of a part of a blob that has this size."""
        wanted = min(self._part_bytes, size_bytes - index * self._part_bytes)
        part = self._parts.pop(index, None)
        if part is None:
            return memoryview(bytes(wanted))
        done = 0
        for start, stop in [*sorted(part.written), (wanted, wanted)]:
            if start > done:
                part.data[done:start] = bytes(start - done)
            done = max(done, stop)
        return part.data[:wanted]

    def _hand_on(self) -> None:
        # One thread hands on at a time, so that parts stay in their order; the others wait here instead of writing more.
        with self._handing:
            while True:
                with self._lock:
                    part = self._parts.get(self._next)
                    if part is None or not part.is_full or self._next >= self._whole_parts or self._over:
                        return
                    del self._parts[self._next]
                    self._next += 1
                self._streaming().hand(part.data)

    def _hand_on_lent(self) -> None:
        with self._handing:
            while True:
                with self._lock:
                    # What lies beyond the announced size may have to be cut.
                    room = self._size_hint_bytes - self._lent_to
                    if self._over or room <= 0 or self._lent_to not in self._lent:
                        return
                    view = self._lent.pop(self._lent_to)
                    if len(view) > room:
                        self._lent[self._size_hint_bytes] = view[room:]
                        view = view[:room]
                    self._lent_to += len(view)
                if view:
                    self._streaming().hand(view)

    def _streaming(self) -> _Stream:
        if self._stream is None:
            self._stream = _Stream(self._taker, self._name, self._part_bytes)
        return self._stream


class _Stream(Iterator[memoryview]):
    """The parts as the library takes them, one after another, on a thread of their own."""

    def __init__(self, taker: Taker, name: str, part_bytes: int) -> None:
        self._taker = taker
        self._name = name
        self._part_bytes = part_bytes
        self._waiting: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._ended = self._given_up = False
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="keepstep-upload", daemon=True)
        self._thread.start()

    def hand(self, part: memoryview) -> None:
        """Adds a part; waits until there is room for it. Raises what has gone wrong meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._failed is not None)
            if self._failed is not None:
                raise self._failed
            self._waiting.append(part)
            self._changed.notify_all()

    def finish(self) -> None:
        """No part comes any more. The object is there when this returns."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def give_up(self) -> None:
        """The object is not to be. Waits until the store has heard of it, or cannot be told."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._thread.join()

    def __next__(self) -> memoryview:
        """The next part, as soon as it comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._given_up)
            if self._given_up:
                raise _GivenUpError
            if not self._waiting:
                raise StopIteration
            part = self._waiting.popleft()
            self._changed.notify_all()
            return part

    def _send(self) -> None:
        with contextlib.suppress(_GivenUpError):
            try:
                self._taker.take_parts(self._name, self, self._part_bytes)
            except _GivenUpError:
                raise
            except Exception as err:  # noqa: BLE001  thread entry: raised by whoever hands on or finishes
                with self._changed:
                    self._failed = err
                    self._changed.notify_all()
