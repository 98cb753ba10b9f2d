"""Local disk, and any file system mounted like one.

Large aligned writes go past the page cache (direct I/O) where the file system takes them, so that a save neither evicts
the user's data nor waits for write-back; whatever it refuses is written through the page cache, write by write. Durable
means: data fsynced, then the name put in place, then the folder fsynced, and every new folder's parent as well.

Nothing here rests on locks, on clocks, or on what a client of a network file system has cached: sizes are those of open
files, names are taken by calls that the server decides.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.shared import PARTIAL, is_folder, prune_empty, take_name
from keepstep.storage.shared import reserve as _reserve

__all__ = ["PARTIAL", "LocalStorage", "Place", "check_name", "make_folders", "storage_of", "sync_folder"]

ALIGNMENT_BYTES = 4096
Place = str | os.PathLike[str] | Storage
RESERVE_BYTES = 1 << 20
TRIES = 8
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_READ = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
"""Without O_NONBLOCK the open of a pipe would wait for somebody to write to it."""
_STILL_OPEN = re.compile(r"\.(nfs|fuse_hidden)[0-9a-fA-F]{8,}")
"""What a client of NFS, or of FUSE, makes of a file that is removed while a process of its machine has it open."""


class LocalStorage(Storage):
    """Blobs as files below one folder, which is made on the first write; a load waits ``late_s`` for new ones."""

    def __init__(self, root: str | os.PathLike[str], *, late_s: float = 0.0) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)
        self.late_s = late_s
        self._lasting: set[Path] = set()
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{str(self.root)!r} is a file, not a folder; nothing was written")

    def create(self, name: str, size_hint_bytes: int) -> _LocalUpload:
        """Opens ``<name>.<random>.partial`` for writing; ``commit`` gives it its name."""
        path = self._path(name)
        for left in reversed(range(TRIES)):
            try:
                make_folders(path.parent, self._lasting)
                return _LocalUpload(path, size_hint_bytes)
            except OSError as err:
                # Whoever removes an old step drops folders that are empty, as this one was. (Stale: another machine did.)
                if not left or err.errno not in (errno.ENOENT, errno.ESTALE):
                    raise StorageError("create", name, err) from err
        raise AssertionError  # the last try returns or raises

    def open(self, name: str) -> Blob:
        """Opens the file; its size is taken once, from the open file, since what a path says may be old."""
        path = self._path(name)
        for left in (1, 0):
            try:
                return _LocalBlob(path, name)
            except NotADirectoryError as err:
                reason = FileNotFoundError(errno.ENOENT, "a file stands where a folder should")
                raise StorageError("open", name, reason) from err
            except OSError as err:
                # Replaced by another machine between the look at its name and the open: the name is looked up once more.
                if not left or err.errno != errno.ESTALE:
                    raise StorageError("open", name, err) from err
        raise AssertionError  # (as above)

    def put(self, name: str, data: bytes) -> None:
        """Writes a temporary file, fsyncs it, renames it over ``name``, fsyncs the folder."""
        with contextlib.closing(self.create(name, len(data))) as upload:
            upload.write_at(0, memoryview(data))
            upload.commit(len(data))

    def put_new(self, name: str, data: bytes) -> bool:
        """Like ``put``, but by a hard link, which fails when the name is taken."""
        with contextlib.closing(self.create(name, len(data))) as upload:
            upload.write_at(0, memoryview(data))
            try:
                upload.commit(len(data), unless_taken=True)
            except FileExistsError:
                return False
            return True

    def append_line(self, name: str, line: bytes) -> None:
        """At the end of the file; a line before it that a crash or a full disk has cut off stays a line of its own."""
        path = self._path(name)
        try:
            make_folders(path.parent, self._lasting)
            descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                size = os.fstat(descriptor).st_size
                left = line if not size or os.pread(descriptor, 1, size - 1) == b"\n" else b"\n" + line
                while left:
                    left = left[os.write(descriptor, left) :]
            finally:
                os.close(descriptor)
        except OSError as err:
            raise StorageError("append", name, err) from err

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Walks the folder; unfinished files (``.partial``) too. Sizes may be old where files are shared: ``open`` knows."""
        # (Of a name below it, so that the folder itself is no link either.)
        pending = [self._path(f"{prefix}/x").parent if prefix else self.root]
        while pending and (folder := pending.pop()):
            try:
                with os.scandir(folder) as items:
                    for item in items:
                        if item.is_dir(follow_symlinks=False):
                            pending.append(Path(item.path))
                            continue
                        if _STILL_OPEN.fullmatch(item.name):
                            continue
                        size = 0  # (A name that is listed counts, also where it is remembered that there was none.)
                        with contextlib.suppress(FileNotFoundError):
                            size = item.stat(follow_symlinks=False).st_size
                        yield Path(item.path).relative_to(self.root).as_posix(), size
            except OSError as err:
                gone = err.errno in (errno.ENOENT, errno.ENOTDIR)  # (Another machine's removal makes a folder stale.)
                if not gone and (err.errno != errno.ESTALE or folder == self.root):
                    raise StorageError("list", prefix or ".", err) from err

    def folders(self) -> Sequence[str]:
        """Folders directly below the root; links are not followed."""
        try:
            with os.scandir(self.root) as items:
                return [item.name for item in items if item.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as err:
            raise StorageError("list", ".", err) from err

    def delete(self, names: Sequence[str]) -> None:
        """Unlinks the files, then removes folders that became empty, up to the root.

        On return all entries of the folders of these names are durable, whether there was such a file or not.
        """
        folders = set()
        for name in names:
            path = self._path(name)
            try:
                path.unlink(missing_ok=True)
            except OSError as err:
                raise StorageError("delete", name, err) from err
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            try:
                # Durable before the caller goes on: a step must lose its manifest before it loses data.
                sync_folder(folder)
            except FileNotFoundError:
                continue
            except OSError as err:
                raise StorageError("delete", folder.name, err) from err
            prune_empty(folder, self.root)

    def free_bytes(self) -> int | None:
        """What a user without privileges may still write."""
        place = next(folder for folder in (self.root, *self.root.parents) if folder.is_dir())
        try:
            found = os.statvfs(place)
        except OSError as err:
            raise StorageError("measure", ".", err) from err
        return found.f_bavail * found.f_frsize

    def written_at(self, prefix: str) -> Mapping[str, float]:
        """By the clock of whoever keeps the files."""
        found = {}
        for name, _ in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):
                found[name] = (self.root / name).lstat().st_mtime
        return found

    def _path(self, name: str) -> Path:
        path = self.root / check_name(name)
        # A link out of the root is not followed: names come from manifests, and manifests from anywhere. Nor is it
        # written through, or what was saved could not be read. (Path.resolve would raise for links in a circle.)
        if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(self.root)):
            raise StorageError("use", name, OSError(errno.ELOOP, "a link leads out of the folder"))
        return path


class _LocalUpload(Upload):
    def __init__(self, path: Path, size_bytes: int) -> None:
        self._final = path
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        self._direct = -1
        self._buffered = os.open(self._partial, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o666)
        self._is_there = True
        direct_flag = getattr(os, "O_DIRECT", 0)
        if direct_flag:
            # (Whatever a file system says to this, the file is open, and can be written through the cache.)
            with contextlib.suppress(OSError):
                self._direct = os.open(self._partial, os.O_RDWR | direct_flag)
        if self._direct >= 0 and size_bytes >= RESERVE_BYTES:
            try:
                _reserve(self._buffered, size_bytes)
            except OSError:
                self.close()
                raise

    def write_at(self, offset: int, data: memoryview) -> None:
        """Direct where offset and length allow it and the file system agrees; through the page cache otherwise."""
        aligned = offset % ALIGNMENT_BYTES == 0 and len(data) % ALIGNMENT_BYTES == 0
        descriptor = self._direct if aligned and self._direct >= 0 else self._buffered
        done = 0
        # A single pwrite moves at most 2 GiB, and fewer when the disk fills; go on until all is written.
        while done < len(data):
            try:
                moved = os.pwrite(descriptor, data[done:] if done else data, offset + done)
            except OSError as err:
                if descriptor == self._buffered or err.errno not in _NO_DIRECT:
                    raise StorageError("write", self._final.name, err) from err
                descriptor = self._buffered
                continue
            if not moved:
                reason = OSError(errno.EIO, "the file system takes no more bytes and says no reason")
                raise StorageError("write", self._final.name, reason)
            done += moved

    def commit(self, size_bytes: int, *, unless_taken: bool = False) -> None:
        """Cut to size, fsync the data, close the file, give it its name, fsync the folder: in this order.

        A close may be the first to tell that a quota is used up or that the server is gone: so it comes before the name.

        Raises:
            FileExistsError: with ``unless_taken``, the name is taken.
        """
        try:
            if self._direct >= 0:
                descriptor, self._direct = self._direct, -1
                os.close(descriptor)
            os.ftruncate(self._buffered, size_bytes)
            os.fsync(self._buffered)
            descriptor, self._buffered = self._buffered, -1
            os.close(descriptor)
            if unless_taken:
                try:
                    os.link(self._partial, self._final)
                except OSError as err:
                    take_name(self._partial, self._final, err)
            else:
                self._partial.replace(self._final)
                self._is_there = False
            sync_folder(self._final.parent)
        except OSError as err:
            if unless_taken and isinstance(err, FileExistsError):
                raise
            raise StorageError("commit", self._final.name, err) from err

    def close(self) -> None:
        """Closes the files and removes the partial one, which is gone already when it was committed.

        What cannot be removed only takes space, until the next start; and what was committed was fsynced before.
        """
        descriptors = [each for each in (self._direct, self._buffered) if each >= 0]
        self._direct = self._buffered = -1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._is_there:
            self._is_there = False
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)


class _LocalBlob(Blob):
    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._descriptor = os.open(path, _READ)
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError:
            self.close()
            raise
        self.size_bytes, self._inode = found.st_size, found.st_ino

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Reads through the page cache, which here is faster than direct reads, warm and cold."""
        done, renewed = 0, False
        while done < len(buffer):
            try:
                got = os.preadv(self._descriptor, [buffer[done:] if done else buffer], offset + done)
            except OSError as err:
                if renewed or err.errno != errno.ESTALE or not self._renew():
                    raise StorageError("read", self._name, err) from err
                renewed = True
                continue
            if not got:
                raise CorruptError(f"{self._name} ends at byte {offset + done:,}; {offset + len(buffer):,} expected")
            done += got

    def _renew(self) -> bool:
        """Opens the file anew, under the same number, for other threads too. False when another one has its name by now."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            descriptor = os.open(self._path, _READ)
            held.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            if (found.st_size, found.st_ino) == (self.size_bytes, self._inode):
                os.dup2(descriptor, self._descriptor, inheritable=False)
                return True
        return False

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_name(name: str) -> str:
    """The name, proved to stay below the root.

    Raises:
        UsageError: an absolute name, ``..``, an empty segment, a backslash or a NUL.
    """
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"{name!r} is not a name inside the storage")
    return name


def make_folders(folder: Path, lasting: set[Path] | None = None) -> None:
    """Makes the folder and what is missing above it; the entry of each is durable in its parent on return.

    ``lasting`` are folders of which that is known, if they are there; those found and made here are added.

    Raises:
        OSError: a folder cannot be made or synced, or a file stands in its place.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    # That it is there does not say that it stays: whoever made it may have been killed before it was synced. Those above
    # it stay, since nobody puts a folder into one that may go.
    if lasting is None or folder not in lasting:
        # (A mount point is in no folder of its own file system; whoever may not open a folder has made nothing in it.)
        with contextlib.suppress(PermissionError):
            if folder.stat().st_dev == folder.parent.stat().st_dev:
                sync_folder(folder.parent)
    for path in reversed(missing):
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError as err:
            if not is_folder(path):
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file, not a folder") from err
        sync_folder(path.parent)
    if lasting is not None:
        lasting.update((folder, *missing))


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, as far as its file system can: some know no fsync of a folder.

    Raises:
        OSError: the folder is not there, or the disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        if err.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def storage_of(place: Place) -> Storage:
    """The storage for a path or a URL; a Storage is taken as it is.

    Raises:
        UsageError: a URL that no library here can reach, an empty path, or a path that is a file.
    """
    if isinstance(place, Storage):
        return place
    text = os.fspath(place)
    if not text:
        raise UsageError(f"{text!r} is not a path; pass a path, a URL or a Storage")
    if text.startswith("file://"):
        # The disk as it is: better than any library that makes an object store of it.
        return LocalStorage(text.removeprefix("file://"))
    if "://" in text:
        # Late, and by its name: it is built upon this module, and most runs never need it.
        remote: Storage = import_module("keepstep.storage.remote").RemoteStorage(text)
        return remote
    return LocalStorage(text)
