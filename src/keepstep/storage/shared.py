"""What file systems that several machines share, or that a program serves, do otherwise than a disk.

Beside ``local``, which comes here when a file is large, when something was refused, and when something is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

__all__ = ["PARTIAL", "is_folder", "prune_empty", "reserve", "take_name"]

PARTIAL = ".partial"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Gives the file its blocks: then writes need not wait for each other, and a disk that is too full says so at once.

    The C library's own ``posix_fallocate`` is not used: where the file system cannot do it, that one writes every block.

    Raises:
        OSError: the disk or the quota has not so much left. Whatever else keeps it from being done is no matter.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, size_bytes) and (code := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(code, f"{os.strerror(code)} for {size_bytes:,} bytes")


def take_name(partial: Path, final: Path, refused: OSError) -> None:
    """Gives a file its name unless that is taken, after a hard link was ``refused``.

    A client of NFS that heard no answer asks again, and is told that the name is taken: by itself. Where there are no hard
    links, whoever makes a file ``.claim``, which only one can, looks and renames; a claim that a killed process has left
    holds the name until it is swept, as every ``.partial`` file is at the next start.

    Raises:
        FileExistsError: the name is taken, or is being taken.
        OSError: the file system refuses.
    """
    if isinstance(refused, FileExistsError):
        with contextlib.suppress(FileNotFoundError):
            if partial.samefile(final):
                return
    if refused.errno not in _NO_LINKS:
        raise refused
    claim = final.with_name(f"{final.name}.claim{PARTIAL}")
    os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        try:
            os.close(os.open(final, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)))
        except FileNotFoundError:
            partial.replace(final)
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    finally:
        with contextlib.suppress(OSError):
            claim.unlink()


def is_folder(path: Path) -> bool:
    """Whether a folder can be opened there: that is asked of the server, not of what this machine remembers."""
    try:
        os.close(os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)))
    except OSError:
        return False
    return True


def prune_empty(folder: Path, root: Path) -> None:
    """Removes the folder with the empty ones in it, and those above it, as far as nothing is left in them.

    What cannot be removed stays: a process on this machine may still have a file of it open, which then has another name.
    """
    if folder == root:
        return
    # A save that was killed leaves folders into which no file has come yet.
    for inner, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            Path(inner).rmdir()
    folder = folder.parent
    while folder != root and root in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
