"""What trainers and agents say to each other, and how: length-prefixed typed JSON over sockets. Nothing is unpickled.

Trainer to agent, over a Unix socket: requests with a number, each answered by a reply with the same number; ``Decided``
comes by itself. An arena's descriptor travels beside the reply that names it. Agent to agent, over TCP: the same frames,
after each end has proved that it knows the secret which the trainers exchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
from typing import Any

import msgspec

from keepstep.commit.conclude import Order
from keepstep.commit.records import RankTimes
from keepstep.commit.uploads import Tally
from keepstep.errors import AgentError
from keepstep.format.failure import Failure
from keepstep.format.manifest import Receipt
from keepstep.move.writer import FileHead

__all__ = [
    "Abort",
    "ArenaGiven",
    "Begin",
    "BetweenAgents",
    "Decided",
    "Deliver",
    "Done",
    "Drain",
    "FromTrainer",
    "Hello",
    "JobStatus",
    "Join",
    "Listen",
    "Listening",
    "NeedArena",
    "Refused",
    "Reply",
    "Request",
    "Status",
    "StatusReport",
    "Stop",
    "Submit",
    "ToTrainer",
    "WriteOrder",
    "accept_peer",
    "greet_peer",
    "recv_frame",
    "send_frame",
]

MAX_FRAME_BYTES = 1 << 30
PART_BYTES = 1 << 20
HANDSHAKE_S = 5.0
_MAGIC = b"keepstep"
_LENGTH = struct.Struct("<I")


class Join(msgspec.Struct, frozen=True):
    """Where the coordinator's agent is: its name, and for other nodes where it listens and what proves a right to speak."""

    coordinator: str = ""
    addresses: tuple[tuple[str, int], ...] = ()
    secret: str = ""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A rank takes part in an attempt. From now on its trainer's death is the attempt's failure, until it has submitted.

    ``root`` is the run's folder, when the step lies in one.
    """

    attempt: str
    step: int
    rank: int
    world: int
    url: str
    deadline_s: float
    join: Join = Join()
    root: str = ""


class WriteOrder(msgspec.Struct, frozen=True):
    """What to write: the heads of the files, whose data lie in an arena one after another, and where to.

    ``root`` and ``folder`` name the step's storage for an agent that has to open it by itself. ``digests`` are those of the
    blocks, where they were made during the copy.
    """

    heads: tuple[FileHead, ...]
    step: int
    arena: int = -1
    root: str = ""
    folder: str = ""
    digests: tuple[bytes, ...] = ()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A rank's arena is filled. ``order`` comes from the coordinator's rank alone."""

    attempt: str
    rank: int
    write: WriteOrder
    times: RankTimes
    replicas: dict[str, dict[str, str]] = {}
    order: Order | None = None
    background: str = ""
    staging: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """A rank could not stage its part."""

    attempt: str
    rank: int
    failure: Failure


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """The end of an attempt: committed, or failed for every rank with the cause. Also said when it is known already."""

    attempt: str
    failure: Failure | None = None
    total_bytes: int = 0


class Deliver(msgspec.Struct, frozen=True, tag="deliver"):
    """From an agent to the coordinator's: what became of one rank's part."""

    attempt: str
    rank: int
    receipt: Receipt | None = None
    failure: Failure | None = None
    times: RankTimes | None = None
    replicas: dict[str, dict[str, str]] = {}
    order: Order | None = None
    url: str = ""
    background: str = ""
    staging: str = ""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A trainer introduces itself. ``scrub_s`` above 0: how often it wants each step of its root to be read again."""

    pid: int
    rank: int = 0
    scrub_s: float = 0.0


class NeedArena(msgspec.Struct, frozen=True, tag="arena"):
    """A trainer needs an arena of this size; ``drop`` is one it no longer needs. ``budget_bytes`` 0: what is sensible."""

    size_bytes: int
    budget_bytes: int = 0
    drop: int = -1


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """The coordinator's trainer asks its agent to be reachable for agents that know this secret."""

    secret: str
    hosts: tuple[str, ...] = ()


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Answered when everything that was submitted has been decided, or the time is over."""

    timeout_s: float


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What is going on?"""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave when what was submitted has been decided; ``now``: leave at once."""

    now: bool = False


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out. After a Drain, ``left`` is how many attempts are still open."""

    left: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not carried out."""

    failure: Failure


class ArenaGiven(msgspec.Struct, frozen=True, tag="given"):
    """An arena: its number, its size, and its descriptor beside this frame."""

    arena: int
    size_bytes: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Where the agent listens."""

    addresses: tuple[tuple[str, int], ...]


class JobStatus(msgspec.Struct, frozen=True):
    """One rank's part in one attempt: ``staging``, ``writing``, ``written``; ``done_bytes`` of ``total_bytes``."""

    attempt: str
    step: int
    rank: int
    state: str
    url: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    age_s: float = 0.0


class StatusReport(msgspec.Struct, frozen=True, tag="report"):
    """An agent as it is now. Sizes in bytes, times in seconds. ``copies``: of the root's steps, elsewhere."""

    pid: int
    name: str
    root: str
    started: float
    trainers: tuple[int, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    arenas_bytes: int = 0
    memory_bytes: int = 0
    committed: int = 0
    failed: int = 0
    linger_s: float = 0.0
    copies: Tally | None = None


FromTrainer = Hello | NeedArena | Begin | Submit | Abort | Listen | Drain | Status | Stop
ToTrainer = Done | Refused | ArenaGiven | Listening | StatusReport | Decided
BetweenAgents = Begin | Deliver | Decided


class Request(msgspec.Struct, frozen=True):
    """A frame between trainer and agent; ``number`` 0 for what nobody asked for."""

    number: int
    body: FromTrainer


class Reply(msgspec.Struct, frozen=True):
    """See Request."""

    number: int
    body: ToTrainer


def send_frame(connection: socket.socket, message: Any, descriptor: int = -1) -> None:
    """Sends one frame, and a descriptor beside it. One thread at a time."""
    data = msgspec.json.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise AgentError(f"a message of {len(data):,} bytes is longer than an agent takes ({MAX_FRAME_BYTES:,})")
    head = _LENGTH.pack(len(data))
    if descriptor >= 0:
        socket.send_fds(connection, [head], [descriptor])
    else:
        connection.sendall(head)
    connection.sendall(data)


def recv_frame(connection: socket.socket, kind: Any) -> tuple[Any, int]:
    """The next frame, and the descriptor that came with it or -1.

    Raises:
        EOFError: the other end has closed, or sent what is no frame of this kind.
    """
    head, descriptor = _recv_head(connection)
    try:
        size = _LENGTH.unpack(head)[0]
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {size:,} bytes")
        return msgspec.json.decode(_recv(connection, size), type=kind), descriptor
    except (EOFError, OSError, msgspec.MsgspecError, RecursionError) as err:
        if descriptor >= 0:
            os.close(descriptor)
        raise EOFError(str(err)) from err


def _recv_head(connection: socket.socket) -> tuple[bytes, int]:
    try:
        if connection.family == socket.AF_UNIX:
            head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
        else:
            head, descriptors = connection.recv(_LENGTH.size), []
        if head:
            head += _recv(connection, _LENGTH.size - len(head))
    except OSError as err:
        raise EOFError(str(err)) from err
    if not head:
        raise EOFError("closed")
    for extra in descriptors[1:]:
        os.close(extra)
    return head, descriptors[0] if descriptors else -1


def _recv(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        # Not all at once: what was announced need not come.
        part = connection.recv(min(size - len(data), PART_BYTES))
        if not part:
            raise EOFError("closed in the middle of a frame")
        data += part
    return bytes(data)


def accept_peer(connection: socket.socket, secret: str) -> bool:
    """The listening end: whether the caller knows the secret. Reads a few bytes and tells nothing before it does."""
    nonce = secrets.token_bytes(32)
    with _patience(connection):
        connection.sendall(_MAGIC + nonce)
        answer = _recv(connection, 64)
        if not hmac.compare_digest(answer[:32], _proof(secret, b"caller", nonce)):
            return False
        connection.sendall(_proof(secret, b"listener", answer[32:]))
        return True


def greet_peer(connection: socket.socket, secret: str) -> bool:
    """The calling end: whether the listener knows the secret too."""
    nonce = secrets.token_bytes(32)
    with _patience(connection):
        hello = _recv(connection, len(_MAGIC) + 32)
        if hello[: len(_MAGIC)] != _MAGIC:
            return False
        connection.sendall(_proof(secret, b"caller", hello[len(_MAGIC) :]) + nonce)
        return hmac.compare_digest(_recv(connection, 32), _proof(secret, b"listener", nonce))


@contextlib.contextmanager
def _patience(connection: socket.socket) -> Any:
    connection.settimeout(HANDSHAKE_S)
    yield
    connection.settimeout(None)


def _proof(secret: str, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), role + nonce, hashlib.sha256).digest()
