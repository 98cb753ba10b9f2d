"""Local disk, and any file system mounted like one.

Large aligned writes go past the page cache (direct I/O) where the file system takes them, so that a save neither evicts
the user's data nor waits for write-back; whatever it refuses is written through the page cache, write by write. Durable
means: data fsynced, then the name put in place, then the folder fsynced, and every new folder's parent as well.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.base import Blob, Storage, Upload, check_name

__all__ = ["LocalStorage"]

ALIGNMENT_BYTES = 4096
PARTIAL = ".partial"
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class LocalStorage(Storage):
    """Blobs as files below one folder, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{str(self.root)!r} is a file, not a folder; nothing was written")

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self.root)

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        """Opens ``<name>.partial`` for writing; ``commit`` gives it its name."""
        path = self._path(name)
        try:
            _make_folders(path.parent)
            return _LocalUpload(path)
        except OSError as err:
            raise StorageError("create", name, err) from err

    def open(self, name: str) -> Blob:
        """Opens the file; its size is taken once."""
        path = self._path(name)
        try:
            # A link out of the root is not followed: names come from manifests, and manifests from anywhere.
            if not path.parent.resolve().is_relative_to(self.root.resolve()):
                raise OSError(errno.ELOOP, "a link leads out of the folder")
            return _LocalBlob(path, name)
        except OSError as err:
            raise StorageError("open", name, err) from err

    def put(self, name: str, data: bytes) -> None:
        """Writes a temporary file, fsyncs it, renames it over ``name``, fsyncs the folder."""
        path = self._path(name)
        try:
            temporary = _write_temporary(path, data)
            try:
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(path.parent)
        except OSError as err:
            raise StorageError("put", name, err) from err

    def put_new(self, name: str, data: bytes) -> bool:
        """Like ``put``, but by a hard link, which fails when the name is taken."""
        path = self._path(name)
        try:
            temporary = _write_temporary(path, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as err:
            raise StorageError("put", name, err) from err
        return True

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Walks the folder; unfinished files (``.partial``) are listed too, so that they can be swept."""
        start = self._path(prefix) if prefix else self.root
        try:
            yield from self._walk(start)
        except OSError as err:
            raise StorageError("list", prefix or ".", err) from err

    def folders(self) -> list[str]:
        """Folders directly below the root; links are not followed."""
        try:
            return [item.name for item in os.scandir(self.root) if item.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as err:
            raise StorageError("list", ".", err) from err

    def delete(self, names: list[str]) -> None:
        """Unlinks the files, then removes folders that became empty, up to the root."""
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
                _sync_folder(folder)
            except FileNotFoundError:
                continue
            except OSError as err:
                raise StorageError("delete", folder.name, err) from err
            _prune_empty(folder, self.root)

    def _walk(self, folder: Path) -> Iterator[tuple[str, int]]:
        try:
            found = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in found:
            if item.is_dir(follow_symlinks=False):
                yield from self._walk(Path(item.path))
            else:
                try:
                    size = item.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                yield Path(item.path).relative_to(self.root).as_posix(), size

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)


class _LocalUpload(Upload):
    def __init__(self, path: Path) -> None:
        self._final = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._direct = -1
        self._buffered = os.open(self._partial, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o666)
        direct_flag = getattr(os, "O_DIRECT", 0)
        if direct_flag:
            try:
                self._direct = os.open(self._partial, os.O_RDWR | direct_flag)
            except OSError as err:
                if err.errno not in _NO_DIRECT:
                    raise

    def write_at(self, offset: int, data: memoryview) -> None:
        """Direct where offset and length allow it and the file system agrees; through the page cache otherwise."""
        try:
            if self._direct >= 0 and offset % ALIGNMENT_BYTES == 0 and len(data) % ALIGNMENT_BYTES == 0:
                try:
                    _write_all(self._direct, offset, data)
                except OSError as err:
                    if err.errno not in _NO_DIRECT:
                        raise
                else:
                    return
            _write_all(self._buffered, offset, data)
        except OSError as err:
            raise StorageError("write", self._final.name, err) from err

    def commit(self, size_bytes: int) -> None:
        """Cut to size, fsync the data, give the file its name, fsync the folder: in this order."""
        try:
            os.ftruncate(self._buffered, size_bytes)
            os.fsync(self._buffered)
            self._partial.rename(self._final)
            _sync_folder(self._final.parent)
        except OSError as err:
            raise StorageError("commit", self._final.name, err) from err
        self._close_files()

    def close(self) -> None:
        """Removes the partial file when it was not committed."""
        if self._buffered >= 0:
            self._close_files()
            self._partial.unlink(missing_ok=True)

    def _close_files(self) -> None:
        for descriptor in (self._direct, self._buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._buffered = -1


class _LocalBlob(Blob):
    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Reads through the page cache, which here is faster than direct reads, warm and cold."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._descriptor, [buffer[done:] if done else buffer], offset + done)
            except OSError as err:
                raise StorageError("read", self._name, err) from err
            if not got:
                raise CorruptError(f"{self._name} ends at byte {offset + done:,}; {offset + len(buffer):,} expected")
            done += got

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_all(descriptor: int, offset: int, data: memoryview) -> None:
    """A single pwrite moves at most 2 GiB, and fewer when the disk fills; go on until all is written."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:] if done else data, offset + done)


def _write_temporary(path: Path, data: bytes) -> Path:
    _make_folders(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        _write_all(descriptor, 0, memoryview(data))
        os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary


def _make_folders(folder: Path) -> None:
    """Makes the folder and what is missing above it; each new entry is durable in its parent."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune_empty(folder: Path, root: Path) -> None:
    while folder != root and root in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
