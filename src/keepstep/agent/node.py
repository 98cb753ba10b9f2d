"""What one machine knows of agents and owners: where an agent of a run is reached, and which job a run belongs to.

All of it lies in one folder that only this user can enter. A machine is told apart by its network, so that two containers
which share a temporary folder are two machines. Names are made from the run's root, so every trainer of a run finds the
same agent, and nobody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import select
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from keepstep.errors import AgentError, RunOwnedError
from keepstep.storage.local import make_folders

__all__ = [
    "Door",
    "Owner",
    "agent_log",
    "agent_names",
    "listener_at",
    "lock",
    "runtime_folder",
    "settle_in",
    "socket_path",
]

OWNER_PATIENCE_S = 10.0
NICE = 5


def runtime_folder() -> Path:
    """The private folder of this user on this machine, made when it is missing.

    Raises:
        AgentError: it belongs to somebody else, or others can enter it.
    """
    base = Path(f"/run/user/{os.getuid()}")
    folder = base / "keepstep" if base.is_dir() and os.access(base, os.W_OK) else None
    folder = folder or Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise AgentError(f"{folder} must be a folder of this user that nobody else can enter (mode 0700)")
    return folder


def socket_path(root: str) -> Path:
    """Where the agent of this root listens on this machine."""
    return runtime_folder() / f"{_mark(root)}.sock"


def agent_names() -> list[Path]:
    """The sockets of all agents of this user on this machine, living or left behind."""
    return sorted(runtime_folder().glob(f"{_network()}-*.sock"))


def listener_at(path: Path) -> int:
    """The process that listens at a socket, whether it answers or not; 0 when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return 0
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


class Door:
    """The socket at which the agent of a root is found. Whoever opens one takes the place of what is there."""

    def __init__(self, root: str) -> None:
        self._path = socket_path(root)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(self._path))
        self._file = self._path.stat()
        self._path.chmod(0o600)
        self.socket.listen(64)

    def is_found(self) -> bool:
        """Whether callers still come here: the file may have been tidied away, or be another agent's by now."""
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except OSError:
            return False

    def knocked(self) -> bool:
        """Whether somebody waits to be let in."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def take_down(self) -> None:
        """Nobody finds it any more. Another agent's stays where it is."""
        if self.is_found():
            self._path.unlink(missing_ok=True)


def agent_log(root: str, *, make: bool = True) -> Path:
    """The agent's log, beside the run; in the private folder when the run's folder cannot be written, or is a URL.

    With ``make`` a run's folder that is missing is made, for whoever is about to write there.
    """
    if "://" in root:
        return runtime_folder() / f"{_mark(root)}.log"
    folder = Path(root)
    with contextlib.suppress(OSError):
        if make:
            # The run will lie in it: it must not go with the power, although nobody waits for a log.
            make_folders(folder)
        if os.access(folder, os.W_OK):
            return folder / f"agent.{platform.node()}.log"
    return runtime_folder() / f"{_mark(root)}.log"


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Held by whoever starts an agent, and by one that is about to leave: whoever comes finds it, or finds it gone."""
    descriptor = os.open(runtime_folder() / f"{_network()}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def settle_in() -> None:
    """A name of its own among the processes, the cores of the whole machine, and the second place on each."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, b"keepstep-agent", 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        # Its trainer may be bound to a few cores; it serves all trainers of the machine.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(NICE)


class Owner:
    """The right of one job to write to a root, on this machine. Ends with the process, however that ends.

    Jobs on other machines are kept apart by their incarnations: the older one cannot commit any more.

    Raises:
        RunOwnedError: another living process has it, after a few seconds of patience for one that is dying.
    """

    _held: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init__(self, root: str, patience_s: float = OWNER_PATIENCE_S) -> None:
        self._root = root
        self._path = runtime_folder() / f"{_mark(root)}.owner"
        owner = ""
        held = self._held.get(root)
        if held is not None and held[1] == os.getpid():
            # The same process again: it does not stand in its own way.
            self._descriptor = held[0]
            return
        end = time.monotonic() + patience_s
        while (descriptor := self._try()) is None:
            if time.monotonic() >= end:
                with contextlib.suppress(OSError):
                    owner = self._path.read_text(errors="replace").strip()
                raise RunOwnedError(f"{root} belongs to another job that is running: {owner or 'unknown'}")
            time.sleep(0.05)
        note = json.dumps({"pid": os.getpid(), "host": platform.node(), "started": time.time()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)
        self._descriptor = descriptor
        self._held[root] = (descriptor, os.getpid())

    def _try(self) -> int | None:
        """The lock, or None while somebody else has it."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed the file since it was opened: then this is a lock on nothing.
            if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Gives the right up. Idempotent."""
        held = self._held.get(self._root)
        if held is not None and held == (self._descriptor, os.getpid()):
            del self._held[self._root]
            # A file that stays behind says nothing: the lock on it is what counts, and goes with the descriptor.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)

    @classmethod
    def forget(cls) -> None:
        """In a forked child: lets go of the parent's rights without taking them from it."""
        for descriptor, _ in cls._held.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        cls._held.clear()


os.register_at_fork(after_in_child=Owner.forget)


def _mark(root: str) -> str:
    place = root if "://" in root else os.path.realpath(root)
    return f"{_network()}-{hashlib.blake2s(place.encode(), digest_size=8).hexdigest()}"


def _network() -> str:
    try:
        return f"{Path('/proc/self/ns/net').stat().st_ino:x}"
    except OSError:
        return "0"
