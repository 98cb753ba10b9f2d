"""What a program does to the files below one folder, call by call and with its bytes: the beginning of every crash state."""

from __future__ import annotations

import os
import stat
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.storage import local

WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Op:
    """One change of the file system, or a mark: what the program had said by then (see ``Recorder.mark``).

    Paths are relative to the folder. Files are told apart by inode, since descriptors outlive names; ``at`` is on the
    monotonic clock, which the processes of a machine share, in nanoseconds.
    """

    kind: str
    at: int
    path: str = ""
    to: str = ""
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    step: int = -1
    order: tuple[int, int] = (0, 0)
    save_id: str = ""
    value: float = 0.0


class Recorder:
    """Wraps the calls of ``os`` that change files, in this process, while it is entered. ``ops`` are in the order of time.

    A new name is noted as of when its making began, since another process may see it before that returns; an fsync too,
    since it makes durable what was there by then; everything else when it is done.
    """

    def __init__(self, base: Path) -> None:
        self.base = str(base)
        self.ops: list[Op] = []
        self._descriptors: dict[int, tuple[str, int, bool]] = {}
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in ("open", "close", "pwrite", "write", "ftruncate", "fsync")}
        self._real |= {name: getattr(os, name) for name in ("mkdir", "rmdir", "unlink", "link", "rename", "replace")}
        self._reserve = local._reserve

    def __enter__(self) -> Recorder:
        for name in self._real:
            setattr(os, name, getattr(self, name))
        local._reserve = self.reserve
        return self

    def __exit__(self, *_: object) -> None:
        local._reserve = self._reserve
        for name, real in self._real.items():
            setattr(os, name, real)
        self.ops.sort(key=lambda op: op.at)

    def mark(self, kind: str, step: int, **known: Any) -> None:
        """What the program says: that it will ``begin`` a save, has ``returned`` from one, has ``restored`` a step."""
        self._note(Op(kind, 0, step=step, **known))

    def _note(self, op: Op, at: int = 0) -> None:
        with self._lock:
            self.ops.append(replace(op, at=at or time.monotonic_ns()))

    def _inside(self, path: Any) -> str | None:
        """The path below the folder ("" for itself), or None for one that is elsewhere."""
        text = "" if isinstance(path, int) else os.fsdecode(path)
        if text == self.base:
            return ""
        return text.removeprefix(f"{self.base}/") if text.startswith(f"{self.base}/") else None

    # --- descriptors -------------------------------------------------------------------------------------------------

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        inside = self._inside(path)
        began = time.monotonic_ns()
        missing = inside is not None and not os.path.lexists(path)
        descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if inside is not None:
            found = os.fstat(descriptor)
            is_folder = stat.S_ISDIR(found.st_mode)
            self._descriptors[descriptor] = (inside, found.st_ino, is_folder)
            if missing:
                self._note(Op("create", 0, inside, inode=found.st_ino), began)
            elif not is_folder and flags & WRITING:
                self._note(Op("open", 0, inside, inode=found.st_ino))
                if flags & os.O_TRUNC:
                    self._note(Op("resize", 0, inode=found.st_ino))
        return descriptor

    def close(self, descriptor):
        self._descriptors.pop(descriptor, None)
        self._real["close"](descriptor)

    def pwrite(self, descriptor, data, offset):
        count = self._real["pwrite"](descriptor, data, offset)
        if descriptor in self._descriptors:
            inode = self._descriptors[descriptor][1]
            self._note(Op("write", 0, inode=inode, offset=offset, data=bytes(memoryview(data)[:count])))
        return count

    def write(self, descriptor, data):
        count = self._real["write"](descriptor, data)
        if descriptor in self._descriptors:
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            inode = self._descriptors[descriptor][1]
            self._note(Op("write", 0, inode=inode, offset=end - count, data=bytes(memoryview(data)[:count])))
        return count

    def ftruncate(self, descriptor, size):
        self._real["ftruncate"](descriptor, size)
        if descriptor in self._descriptors:
            self._note(Op("resize", 0, inode=self._descriptors[descriptor][1], offset=size))

    def reserve(self, descriptor, size_bytes):
        self._reserve(descriptor, size_bytes)
        if descriptor in self._descriptors:
            size = os.fstat(descriptor).st_size
            self._note(Op("resize", 0, inode=self._descriptors[descriptor][1], offset=size))

    def fsync(self, descriptor):
        began = time.monotonic_ns()
        if descriptor not in self._descriptors:
            self._real["fsync"](descriptor)
        else:
            # It is noted and not made: this power stays on, and what is made of the recording knows what it means.
            path, inode, is_folder = self._descriptors[descriptor]
            self._note(Op("sync folder", 0, path) if is_folder else Op("sync", 0, inode=inode), began)

    # --- names -------------------------------------------------------------------------------------------------------

    def mkdir(self, path, *args, **options):
        began = time.monotonic_ns()
        self._real["mkdir"](path, *args, **options)
        self._named("mkdir", path, at=began)

    def link(self, path, to, **options):
        began = time.monotonic_ns()
        self._real["link"](path, to, **options)
        self._named("link", path, to, at=began)

    def rename(self, path, to, **options):
        began = time.monotonic_ns()
        self._real["rename"](path, to, **options)
        self._named("rename", path, to, at=began)

    def replace(self, path, to, **options):
        began = time.monotonic_ns()
        self._real["replace"](path, to, **options)
        self._named("rename", path, to, at=began)

    def unlink(self, path, **options):
        self._real["unlink"](path, **options)
        self._named("unlink", path)

    def rmdir(self, path, **options):
        self._real["rmdir"](path, **options)
        self._named("rmdir", path)

    def _named(self, kind: str, path: Any, to: Any = "", *, at: int = 0) -> None:
        inside = self._inside(path)
        if inside is not None:
            self._note(Op(kind, 0, inside, self._inside(to) or ""), at)
