"""A storage that fails as it is told to, for tests of storages and of what is built on them.

Wrap any storage, say which calls go wrong and how, and use it in the other's place:

    full = FaultyStorage(MyStorage(folder), [Fault("write_at", "short", nth=3, code=errno.ENOSPC)])
    with pytest.raises(StorageError):
        keepstep.save(full, state)

To fail every call in turn, count ``nth`` up until ``fired`` stays empty: then the operation needs no call that was not
tried. Nothing is left to chance: the same calls in the same order meet the same faults. Without a plan it does what the
storage inside does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import Blob, Storage, Upload, read_blob

__all__ = ["KINDS", "OPERATIONS", "Fault", "FaultyStorage", "Fired"]

_WRITES = frozenset({"put", "put_new", "append_line"})
OPERATIONS = frozenset({"create", "write_at", "commit", "open", "read_into", "list", "folders", "delete"}) | _WRITES
"""The calls of a storage, of its uploads and of its blobs. ``close`` is not among them: it may not fail."""
KINDS: dict[str, frozenset[str]] = {
    "error": OPERATIONS,
    "late": OPERATIONS,
    "slow": OPERATIONS,
    "block": OPERATIONS,
    "short": frozenset({"write_at", "read_into", "append_line", "delete"}),
    "flip": _WRITES | {"write_at", "read_into"},
    "cut": _WRITES | {"commit", "open"},
    "stale": frozenset({"list", "folders", "open"}),
    "lost": _WRITES | {"write_at", "commit", "delete"},
    "forgotten": _WRITES | {"commit", "delete"},
}
"""What can happen to which calls: see ``Fault``."""
MAX_BLOB_BYTES = 1 << 30
_ANY = "*"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, at which calls. Numbers that a kind does not need are not looked at.

    Honest faults, after which the caller has heard of an error:
        error       nothing was done
        late        all was done, and only the answer was lost
        short       half was done: of the bytes written or read, of the line, of the names deleted
        slow        it takes ``wait_s`` longer
        block       it waits for ``release``
    Lies, which report success:
        flip        one bit is another one in what is read or written: bit ``bit`` of byte ``at`` (modulo the length)
        cut         ``missing_bytes`` are missing at the end of what was committed, put or opened
        stale       the listing is the one of ``ago`` changes before; a blob made since then cannot be opened
        lost        nothing was done
        forgotten   it was done, and is undone by ``crash``

    Args:
        operation: one of OPERATIONS, or ``"*"`` for any.
        kind: one of KINDS that this operation knows.
        nth: the first call that it happens to, counted from one among those that ``operation`` and ``name`` fit.
        times: how many calls in a row; None for all that follow.
        name: only calls for names that contain this are counted.
        code: the errno of the error.
        at: see ``flip``.
        bit: see ``flip``.
        missing_bytes: see ``cut``.
        wait_s: see ``slow``.
        ago: see ``stale``.

    Raises:
        UsageError: an operation or a kind that is not known, or a kind that this operation does not know.
    """

    operation: str
    kind: str = "error"
    nth: int = 1
    times: int | None = 1
    name: str = ""
    code: int = errno.EIO
    at: int = 0
    bit: int = 0
    missing_bytes: int = 1
    wait_s: float = 0.05
    ago: int = 1

    def __post_init__(self) -> None:
        """Refuses what means nothing."""
        known = OPERATIONS if self.operation == _ANY else {self.operation}
        if not known <= OPERATIONS:
            raise UsageError(f"Fault: no operation {self.operation!r}; there are {', '.join(sorted(OPERATIONS))}, '*'")
        if not known <= KINDS.get(self.kind, frozenset()):
            possible = sorted(kind for kind, operations in KINDS.items() if known <= operations)
            raise UsageError(f"Fault: {self.operation!r} cannot be {self.kind!r}; it can be {', '.join(possible)}")
        if self.nth < 1 or (self.times is not None and self.times < 1) or not 0 <= self.bit < 8:
            raise UsageError("Fault: nth and times count from 1, bit from 0 to 7")

    def error(self, operation: str, name: str) -> StorageError:
        """What the caller is told."""
        return StorageError(operation, name, OSError(self.code, os.strerror(self.code)))


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened: to which call."""

    fault: Fault
    operation: str
    name: str


class FaultyStorage(Storage):
    """Another storage, some of whose calls go wrong. Any thread; calls are counted in the order in which they come.

    ``calls`` are the operations and names so far, ``fired`` the faults that happened.

    Args:
        inner: what the calls are passed on to.
        plan: the faults. Of several that hit one call, all waits happen, and of the others the first.
    """

    def __init__(self, inner: Storage, plan: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: list[tuple[str, str]] = []
        self.fired: list[Fired] = []
        self._plan = tuple(plan)
        self._met: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._blocked, self._released = threading.Event(), threading.Event()
        self._may_be_stale = any(fault.kind == "stale" for fault in plan)
        self._changes: list[tuple[str, int | None]] = []
        self._undo: list[tuple[str, bytes | None]] = []

    @property
    def exclusive(self) -> bool:  # type: ignore[override]
        """See Storage."""
        return self.inner.exclusive

    def release(self) -> None:
        """Lets calls that are blocked go on, and those that come."""
        self._released.set()

    def wait_blocked(self, limit_s: float) -> bool:
        """Waits until a call is blocked; whether one is."""
        return self._blocked.wait(limit_s)

    def crash(self) -> None:
        """Takes back what was ``forgotten``, as a loss of power does with what was never made durable."""
        with self._lock:
            while self._undo:
                name, data = self._undo.pop()
                if data is None:
                    self.inner.delete([name])
                else:
                    self.inner.put(name, data)

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """See Storage."""
        fault = self.meet("create", name)
        upload = self.inner.create(name, size_hint_bytes)
        if fault is not None:
            upload.close()
            raise fault.error("create", name)
        return _FaultyUpload(self, name, upload)

    def open(self, name: str) -> Blob:
        """See Storage."""
        fault = self.meet("open", name)
        if fault is not None and fault.kind == "stale" and name in self._appeared(fault.ago):
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such blob"))
        blob = self.inner.open(name)
        if fault is not None and fault.kind == "late":
            blob.close()
            raise fault.error("open", name)
        return _FaultyBlob(self, name, blob, fault)

    def put(self, name: str, data: bytes) -> None:
        """See Storage."""
        fault = self.meet("put", name)
        with self.changing(fault, "put", name) as happens:
            if happens:
                self.inner.put(name, _spoilt(data, fault))

    def put_new(self, name: str, data: bytes) -> bool:
        """See Storage."""
        fault = self.meet("put_new", name)
        made = True
        with self.changing(fault, "put_new", name) as happens:
            if happens:
                made = self.inner.put_new(name, _spoilt(data, fault))
        return made

    def append_line(self, name: str, line: bytes) -> None:
        """See Storage."""
        fault = self.meet("append_line", name)
        short = fault is not None and fault.kind == "short"
        with self.changing(fault, "append_line", name) as happens:
            if happens:
                self.inner.append_line(name, line[: len(line) // 2] if short else _spoilt(line, fault))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See Storage."""
        fault = self.meet("list", prefix)
        found = self._listed(prefix, fault)
        if fault is not None and fault.kind == "late":
            raise fault.error("list", prefix)
        return iter(found.items())

    def folders(self) -> Sequence[str]:
        """See Storage."""
        fault = self.meet("folders", "")
        if fault is not None and fault.kind == "late":
            raise fault.error("folders", "")
        if fault is not None and fault.kind == "stale":
            return sorted({name.split("/", 1)[0] for name in self._listed("", fault) if "/" in name})
        return self.inner.folders()

    def delete(self, names: Sequence[str]) -> None:
        """See Storage."""
        fault = self.meet("delete", ", ".join(names[:3]))
        gone = names[: len(names) // 2] if fault is not None and fault.kind == "short" else names
        with self.changing(fault, "delete", *gone) as happens:
            if happens:
                self.inner.delete(gone)

    def meet(self, operation: str, name: str) -> Fault | None:
        """Counts a call, waits if it has to, and raises if it fails at once. Returns what else happens to it."""
        with self._lock:
            self.calls.append((operation, name))
            hits = []
            for index, fault in enumerate(self._plan):
                if fault.operation in (operation, _ANY) and fault.name in name:
                    self._met[index] += 1
                    since = self._met[index] - fault.nth
                    if since >= 0 and (fault.times is None or since < fault.times):
                        hits.append(fault)
                        self.fired.append(Fired(fault, operation, name))
        left = []
        for fault in hits:
            if fault.kind == "block":
                self._blocked.set()
                self._released.wait()
            elif fault.kind == "slow":
                time.sleep(fault.wait_s)
            else:
                left.append(fault)
        if left and left[0].kind == "error":
            raise left[0].error(operation, name)
        return left[0] if left else None

    @contextlib.contextmanager
    def changing(self, fault: Fault | None, operation: str, *names: str) -> Iterator[bool]:
        """Around a change of these blobs; yields whether it happens. Raises afterwards when the caller has to hear so."""
        kind = "" if fault is None else fault.kind
        if kind == "lost":
            yield False
            return
        if not self._may_be_stale and kind != "forgotten":
            yield True
        else:
            with self._lock:
                before = [(name, self._content(name)) for name in names]
                yield True
                self._changes.extend((name, None if data is None else len(data)) for name, data in before)
                if kind == "forgotten":
                    self._undo.extend(before)
        if fault is not None and kind in ("late", "short"):
            raise fault.error(operation, ", ".join(names[:3]))

    def _content(self, name: str) -> bytes | None:
        try:
            return read_blob(self.inner, name, MAX_BLOB_BYTES)
        except StorageError as err:
            if err.errno != errno.ENOENT:
                raise
            return None

    def _appeared(self, ago: int) -> set[str]:
        """Names that were not there so many changes before."""
        with self._lock:
            first = {name: size for name, size in reversed(self._changes[-ago:])}
        return {name for name, size in first.items() if size is None}

    def _listed(self, prefix: str, fault: Fault | None) -> dict[str, int]:
        found = dict(self.inner.list(prefix))
        if fault is not None and fault.kind == "stale":
            with self._lock:
                changes = self._changes[-fault.ago :]
            for name, size in reversed(changes):
                if size is None:
                    found.pop(name, None)
                elif not prefix or name.startswith(f"{prefix}/"):
                    found[name] = size
        return found


class _FaultyUpload(Upload):
    def __init__(self, storage: FaultyStorage, name: str, inner: Upload) -> None:
        self._storage, self._name, self._inner = storage, name, inner

    def write_at(self, offset: int, data: memoryview) -> None:
        fault = self._storage.meet("write_at", self._name)
        kind = "" if fault is None else fault.kind
        if kind == "short":
            self._inner.write_at(offset, data[: len(data) // 2])
        elif kind == "flip":
            self._inner.write_at(offset, memoryview(_spoilt(bytes(data), fault)))
        elif kind != "lost":
            self._inner.write_at(offset, data)
        if fault is not None and kind in ("short", "late"):
            raise fault.error("write_at", self._name)

    def commit(self, size_bytes: int) -> None:
        fault = self._storage.meet("commit", self._name)
        missing = fault.missing_bytes if fault is not None and fault.kind == "cut" else 0
        with self._storage.changing(fault, "commit", self._name) as happens:
            if happens:
                self._inner.commit(max(0, size_bytes - missing))

    def close(self) -> None:
        self._inner.close()


class _FaultyBlob(Blob):
    def __init__(self, storage: FaultyStorage, name: str, inner: Blob, fault: Fault | None) -> None:
        self._storage, self._name, self._inner = storage, name, inner
        missing = fault.missing_bytes if fault is not None and fault.kind == "cut" else 0
        self.size_bytes = max(0, inner.size_bytes - missing)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        fault = self._storage.meet("read_into", self._name)
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{self._name} ends at byte {self.size_bytes:,}; {offset + len(buffer):,} expected")
        if fault is None:
            self._inner.read_into(offset, buffer)
            return
        half = len(buffer) // 2
        self._inner.read_into(offset, buffer[:half] if fault.kind == "short" else buffer)
        if fault.kind == "late":
            raise fault.error("read_into", self._name)
        if fault.kind == "short":
            raise CorruptError(f"{self._name} ends at byte {offset + half:,}; {offset + len(buffer):,} expected")
        if buffer:
            buffer[fault.at % len(buffer)] ^= 1 << fault.bit

    def close(self) -> None:
        self._inner.close()


def _spoilt(data: bytes, fault: Fault | None) -> bytes:
    """The data as they arrive: with a bit that is another one, or without their end."""
    if fault is not None and fault.kind == "cut":
        return data[: max(0, len(data) - fault.missing_bytes)]
    if fault is not None and fault.kind == "flip" and data:
        changed = bytearray(data)
        changed[fault.at % len(changed)] ^= 1 << fault.bit
        return bytes(changed)
    return data
