"""A file system that a program serves, and what such ones do to their users: a real mount, without any package.

``served(folder, at, **habits)`` mounts the folder at ``at`` through the kernel's FUSE, by a process of its own. Two mounts
of one folder are two machines that share it: each has the kernel's caches of its own, for as long as ``cached_s`` says.
"""
# A server of system calls is written in system calls:
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH110, PTH116, PTH120

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers.mounts import may

HEADER, ANSWER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTRIBUTES, ENTRY = struct.Struct("<6Q10I"), struct.Struct("<4Q2I")
MAX_WRITE = 1 << 20
HERE = Path(__file__).parents[2]
DETACH = 2
ROOT = 1
FORGET, INTERRUPT, FORGET_MANY, DESTROY = 2, 36, 42, 38
HABITS = {"cached_s": 0, "absent_s": 0, "fresh_open": False, "refuse": {}, "stale": [], "keeps_open": False}


def can_serve() -> bool:
    """Whether this process may mount such a file system."""
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        return False
    os.close(descriptor)
    return os.geteuid() == 0 and may("true")


@contextlib.contextmanager
def served(folder: Path, at: Path, **habits: Any) -> Iterator[Path]:
    """The folder, mounted at ``at`` until the with-block ends.

    Habits:
        cached_s: seconds for which attributes and names that were found are believed.
        absent_s: the same for names that were looked for and not there.
        fresh_open: an open asks for the attributes anew, as with NFS.
        refuse: errno by operation, such as ``{"link": errno.EPERM}``: link, fsync, fsyncdir, fallocate, flush (the close
            of a file that was written), direct (the open), direct_write.
        stale: operations ("open", "read") that say ESTALE once for each file, after the kernel's own second try.
        keeps_open: a file that is removed while it is open gets a name ``.nfs…`` until it is closed.
    """
    unknown = habits.keys() - HABITS.keys()
    assert not unknown, unknown
    folder.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.helpers.fuse", str(folder), str(at), json.dumps({**HABITS, **habits})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == b"mounted\n"
            yield at
        finally:
            process.stdin.close()
            assert process.wait(10) == 0


class Refused(OSError):
    """What the kernel is told instead of an answer."""


class Server:
    """One mount. Requests are answered one after the other; files are those of ``folder``."""

    def __init__(self, folder: str, at: str, habits: dict[str, Any]) -> None:
        self.folder, self.at, self.habits = folder, at, habits
        self.nodes: dict[int, tuple[str, int]] = {ROOT: (folder, os.stat(folder).st_ino)}
        self.numbers = {folder: ROOT}
        self.handles: dict[int, tuple[int, str, int]] = {}
        self.last = ROOT
        self.stale: dict[tuple[str, int], int] = {}
        self.device = os.open("/dev/fuse", os.O_RDWR)
        libc = ctypes.CDLL(None, use_errno=True)
        data = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"keepstep-tests", at.encode(), b"fuse", 0, data.encode()):
            raise OSError(ctypes.get_errno(), "not mounted")

    def unmount(self) -> None:
        ctypes.CDLL(None).umount2(self.at.encode(), DETACH)

    def serve(self) -> None:
        operations: dict[int, Callable[..., bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir, 10: self.unlink, 11: self.rmdir,
            12: self.rename,
            13: self.link, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs, 18: self.release, 20: self.fsync,
            25: self.flush, 26: self.init, 27: self.opendir, 28: self.readdir, 29: self.release, 30: self.fsyncdir,
            35: self.create, 43: self.fallocate, 45: self.rename2,
        }  # fmt: skip
        while True:
            try:
                raw = os.read(self.device, MAX_WRITE + 8192)
            except OSError as err:
                if err.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # unmounted
            _, operation, unique, node, *_ = HEADER.unpack_from(raw)
            if operation in (FORGET, INTERRUPT, FORGET_MANY):
                continue
            code, answer = 0, b""
            try:
                if operation not in operations and operation != DESTROY:
                    raise Refused(errno.ENOSYS, "")
                if operation != DESTROY:
                    answer = operations[operation](node, raw[HEADER.size :])
            except OSError as err:
                code, answer = -(err.errno or errno.EIO), b""
            with contextlib.suppress(FileNotFoundError):  # interrupted meanwhile
                os.write(self.device, ANSWER.pack(ANSWER.size + len(answer), code, unique) + answer)

    # --- what it does to its users -----------------------------------------------------------------------------------

    def refuse(self, operation: str) -> None:
        if code := self.habits["refuse"].get(operation):
            raise Refused(code, operation)

    def be_stale(self, operation: str, inode: int, times: int) -> None:
        seen = self.stale.get((operation, inode), 0)
        if operation in self.habits["stale"] and seen < times:
            self.stale[operation, inode] = seen + 1
            raise Refused(errno.ESTALE, operation)

    # --- names -------------------------------------------------------------------------------------------------------

    def path(self, node: int) -> str:
        """Of a node whose file still has the name under which it was found; a stale one otherwise."""
        path, inode = self.nodes[node]
        try:
            if os.lstat(path).st_ino == inode:
                return path
        except FileNotFoundError:
            pass
        raise Refused(errno.ESTALE, path)

    def below(self, node: int, name: bytes) -> str:
        return f"{self.path(node)}/{os.fsdecode(name.rstrip(bytes(1)))}"

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        number = self.numbers.get(path)
        if number is None or self.nodes[number][1] != found.st_ino:
            self.last = number = self.last + 1
            self.numbers[path], self.nodes[number] = number, (path, found.st_ino)
        cached = self.habits["cached_s"]
        return ENTRY.pack(number, 0, cached, cached, 0, 0) + attributes(found)

    def lookup(self, node: int, body: bytes) -> bytes:
        path = self.below(node, body)
        try:
            return self.entry(path)
        except FileNotFoundError:
            if not self.habits["absent_s"]:
                raise
            return ENTRY.pack(0, 0, self.habits["absent_s"], 0, 0, 0) + bytes(ATTRIBUTES.size)

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self.below(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self.below(node, body)
        inode = os.lstat(path).st_ino
        if self.habits["keeps_open"] and any(opened == inode for _, _, opened in self.handles.values()):
            os.rename(path, f"{os.path.dirname(path)}/.nfs{inode:024x}")
        else:
            os.unlink(path)
        self.numbers.pop(path, None)
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        path = self.below(node, body)
        os.rmdir(path)
        self.numbers.pop(path, None)
        return b""

    def rename(self, node: int, body: bytes, skip: int = 8) -> bytes:
        old, new, *_ = body[skip:].split(bytes(1))
        before, after = self.below(node, old), self.below(struct.unpack_from("<Q", body)[0], new)
        os.rename(before, after)
        self.numbers.pop(after, None)
        for path in [each for each in self.numbers if each == before or each.startswith(f"{before}/")]:
            number = self.numbers.pop(path)
            moved = after + path.removeprefix(before)
            self.numbers[moved], self.nodes[number] = number, (moved, self.nodes[number][1])
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<QI", body)[1]:
            raise Refused(errno.EINVAL, "")
        return self.rename(node, body, 16)

    def link(self, node: int, body: bytes) -> bytes:
        self.refuse("link")
        path = self.below(node, body[8:])
        os.link(self.path(struct.unpack_from("<Q", body)[0]), path)
        return self.entry(path)

    # --- attributes --------------------------------------------------------------------------------------------------

    def getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        found = os.fstat(self.handles[handle][0]) if flags & 1 and handle in self.handles else os.lstat(self.path(node))
        return struct.pack("<QII", self.habits["cached_s"], 0, 0) + attributes(found)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, *_ = struct.unpack_from("<IIQQ", body)
        mode = struct.unpack_from("<I", body, 68)[0]
        path = self.path(node)
        if valid & 8:
            os.truncate(self.handles[handle][0] if valid & 64 else path, size)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        return struct.pack("<QII", self.habits["cached_s"], 0, 0) + attributes(os.lstat(path))

    def statfs(self, node: int, body: bytes) -> bytes:
        of = os.statvfs(self.folder)
        counts = of.f_blocks, of.f_bfree, of.f_bavail, of.f_files, of.f_ffree
        return struct.pack("<5Q4I24x", *counts, of.f_bsize, of.f_namemax, of.f_frsize, 0)

    # --- open files --------------------------------------------------------------------------------------------------

    def keep(self, path: str, flags: int) -> bytes:
        if flags & os.O_DIRECT:
            self.refuse("direct")
        descriptor = os.open(path, flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND))
        self.handles[descriptor] = (descriptor, path, os.fstat(descriptor).st_ino)
        return struct.pack("<QIi", descriptor, 0, 0)

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        path = self.path(node)
        if not flags & (os.O_WRONLY | os.O_RDWR):
            self.be_stale("open", self.nodes[node][1], 2)
        if self.habits["fresh_open"]:
            told = struct.pack("<Qqq", node, -1, 0)
            os.write(self.device, ANSWER.pack(ANSWER.size + len(told), 2, 0) + told)
        return self.keep(path, flags)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self.below(node, body[16:])
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | flags & os.O_EXCL, mode))
        return self.entry(path) + self.keep(path, flags)

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self.be_stale("read", self.handles[handle][2], 1)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size, _, _, flags = struct.unpack_from("<QQIIQI", body)
        if flags & os.O_DIRECT:
            self.refuse("direct_write")
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def flush(self, node: int, body: bytes) -> bytes:
        if self.is_written(struct.unpack_from("<Q", body)[0]):
            self.refuse("flush")
        return b""

    def is_written(self, handle: int) -> bool:
        import fcntl

        return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR))

    def fsync(self, node: int, body: bytes) -> bytes:
        self.refuse("fsync")
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def fallocate(self, node: int, body: bytes) -> bytes:
        self.refuse("fallocate")
        handle, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise Refused(errno.EOPNOTSUPP, "")
        os.posix_fallocate(handle, offset, length)
        return b""

    def release(self, node: int, body: bytes) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        _, path, inode = self.handles.pop(handle)
        os.close(handle)
        left = f"{os.path.dirname(path)}/.nfs{inode:024x}"
        if os.path.exists(left) and all(opened != inode for _, _, opened in self.handles.values()):
            os.unlink(left)
        return b""

    # --- folders -----------------------------------------------------------------------------------------------------

    def opendir(self, node: int, body: bytes) -> bytes:
        return self.keep(self.path(node), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        listed, found = b"", [(".", stat.S_IFDIR), ("..", stat.S_IFDIR)]
        with os.scandir(handle) as items:
            found += sorted((item.name, item.stat(follow_symlinks=False).st_mode) for item in items)
        for index, (name, mode) in enumerate(found[offset:], offset):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", index + 1, index + 1, len(raw), stat.S_IFMT(mode) >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def fsyncdir(self, node: int, body: bytes) -> bytes:
        self.refuse("fsyncdir")
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def init(self, node: int, body: bytes) -> bytes:
        readahead = struct.unpack_from("<III", body)[2]
        big_writes, max_pages = 1 << 5, 1 << 22
        told = struct.pack(
            "<IIIIHHIIHH", 7, 31, readahead, big_writes | max_pages, 16, 12, MAX_WRITE, 1, MAX_WRITE >> 12, 0
        )
        return told.ljust(64, bytes(1))


def attributes(found: os.stat_result) -> bytes:
    times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
    return ATTRIBUTES.pack(
        found.st_ino, found.st_size, found.st_blocks, *(each // 10**9 for each in times), *(each % 10**9 for each in times),
        found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
    )  # fmt: skip


def main(folder: str, at: str, habits: str) -> None:
    """Serves until whoever started this closes its end, by a with-block or by dying."""
    server = Server(folder, at, json.loads(habits))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    print("mounted", flush=True)
    sys.stdin.buffer.read()
    # (Leaving ends it for everybody, also where a copy of the mount is left.)
    server.unmount()


if __name__ == "__main__":
    main(*sys.argv[1:])
