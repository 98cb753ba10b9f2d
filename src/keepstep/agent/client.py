"""The trainer's end: where the parts of a save go after the copy. To the agent, or to a hub in this process (``inside``).

Both have the same methods, and both outlive an error of theirs: what was pending fails with the cause, what comes next
starts anew. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from keepstep.agent.board import Place
from keepstep.agent.node import agent_log, lock, socket_path
from keepstep.agent.protocol import (
    Abort,
    ArenaGiven,
    Begin,
    Decided,
    Done,
    Drain,
    FromTrainer,
    Hello,
    Listen,
    Listening,
    NeedArena,
    Refused,
    Reply,
    Request,
    Status,
    StatusReport,
    Stop,
    Submit,
    recv_frame,
    send_frame,
)
from keepstep.errors import AgentError, CheckpointError, CommitTimeoutError
from keepstep.format.failure import Failure
from keepstep.move.arena import Arena
from keepstep.storage.base import Closing, Storage

__all__ = ["AgentClient", "Background", "Lent", "call_agent"]

_Answer = TypeVar("_Answer")
START_S = 40.0
ANSWER_S = 5.0
REPLY_S = 120.0


@dataclass(frozen=True, slots=True)
class Lent:
    """An arena and the number under which the other end knows it."""

    number: int
    arena: Arena


class Background(Closing):
    """Where parts go. ``name`` tells one from another; ``kind`` is what the user calls it. Any thread."""

    name: str
    kind: str

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether parts may still be handed to it."""

    @abstractmethod
    def lend(self, size_bytes: int, budget_bytes: int, instead_of: Lent | None) -> Lent:
        """An arena of at least this size, faulted in, in exchange for one that is too small.

        Raises:
            StagingError: the memory is not there; says what was asked for, the budget, and what is free.
            AgentError: the agent is gone.
        """

    @abstractmethod
    def begin(self, begin: Begin, run: Storage | None = None) -> Future[Decided]:
        """A rank takes part in an attempt. The future holds the decision, never an error. ``run`` is its run's storage."""

    @abstractmethod
    def submit(self, submit: Submit, place: Place, lent: Lent) -> None:
        """The arena is filled.

        Raises:
            AgentError: the agent is gone.
        """

    @abstractmethod
    def abort(self, abort: Abort) -> None:
        """The arena will not be filled. Never raises."""

    @abstractmethod
    def listen(self, secret: str, hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Makes it reachable for others that know the secret; returns where."""

    @abstractmethod
    def drain(self, timeout_s: float) -> int:
        """Waits until everything submitted, also by trainers before this one, is decided; returns how much is left."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of it. What was submitted goes on. Idempotent."""


class AgentClient(Background):
    """A connection to the agent of a root on this machine, which is started when there is none.

    Args:
        root: the run's folder; its agent is found again by every trainer of the run.
        rank: of this trainer.
        linger_s: how long an agent that has to be started stays when nobody needs it any more.
        scrub_s: how often each step is to be read again while there is nothing to save; 0 for never.

    Raises:
        AgentError: it cannot be started or does not answer; says what its log says.
    """

    kind = "agent"
    _all: ClassVar[weakref.WeakSet[AgentClient]] = weakref.WeakSet()

    def __init__(self, root: str, rank: int, linger_s: float, scrub_s: float = 0.0) -> None:
        self._root = root
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = 0
        self._replies: dict[int, Future[tuple[Any, int]]] = {}
        self._decisions: dict[str, Future[Decided]] = {}
        self._dead = ""
        self._connection = _connect_or_start(root, linger_s)
        self._pid = 0
        self._owner = os.getpid()
        self._all.add(self)
        threading.Thread(target=self._listen, name="keepstep-agent", daemon=True).start()
        report = self._ask(Hello(os.getpid(), rank, scrub_s), StatusReport)
        self.name, self._pid = report.name, report.pid

    @property
    def alive(self) -> bool:
        """See Background. Asks the kernel too: whoever listens may not have been told yet."""
        try:
            return not self._dead and self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._pid

    def lend(self, size_bytes: int, budget_bytes: int, instead_of: Lent | None) -> Lent:
        """See Background."""
        drop = -1
        if instead_of is not None:
            instead_of.arena.close()
            drop = instead_of.number
        given, descriptor = self._ask_both(NeedArena(size_bytes, budget_bytes, drop), ArenaGiven)
        try:
            return Lent(given.arena, Arena(given.size_bytes, ring=False, descriptor=descriptor))
        finally:
            os.close(descriptor)

    def begin(self, begin: Begin, run: Storage | None = None) -> Future[Decided]:
        """See Background."""
        decided: Future[Decided] = Future()
        with self._lock:
            self._decisions[begin.attempt] = decided
        # Nobody waits for the reply: should it be a refusal, that is the decision.
        self._send(begin).add_done_callback(lambda reply: self._refused(begin.attempt, reply.result()[0]))
        return decided

    def submit(self, submit: Submit, place: Place, lent: Lent) -> None:
        """See Background."""
        self._ask(submit, Done)

    def abort(self, abort: Abort) -> None:
        """See Background."""
        with contextlib.suppress(CheckpointError):
            self._ask(abort, Done)

    def listen(self, secret: str, hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """See Background."""
        return self._ask(Listen(secret, tuple(hosts)), Listening).addresses

    def drain(self, timeout_s: float) -> int:
        """See Background."""
        return self._ask(Drain(timeout_s), Done, timeout_s + REPLY_S).left

    def close(self) -> None:
        """See Background."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, body: FromTrainer, kind: type[_Answer], timeout_s: float = REPLY_S) -> _Answer:
        return self._ask_both(body, kind, timeout_s)[0]

    def _ask_both(self, body: FromTrainer, kind: type[_Answer], timeout_s: float = REPLY_S) -> tuple[_Answer, int]:
        """One request and its reply, with the descriptor that came along."""
        try:
            reply, descriptor = self._send(body).result(timeout_s)
        except TimeoutError as err:
            silent = f"the agent (process {self._pid}) did not answer within {timeout_s:g} s"
            # It may be stopped, or its machine out of memory: whoever waits for it hears of that, and gets another.
            self._bury(silent, CommitTimeoutError.code)
            raise AgentError(silent) from err
        if isinstance(reply, Refused):
            raise reply.failure.error()
        if not isinstance(reply, kind):
            raise AgentError(f"the agent answered {type(reply).__name__} where {kind.__name__} was expected")
        return reply, descriptor

    def _send(self, body: FromTrainer) -> Future[tuple[Any, int]]:
        """Sends one request. The reply comes by itself; a Refused when the agent is gone."""
        answer: Future[tuple[Any, int]] = Future()
        with self._lock:
            dead = self._dead
            self._numbers += 1
            number = self._numbers
            if not dead:
                self._replies[number] = answer
        if dead:
            answer.set_result((Refused(Failure(AgentError.code, dead)), -1))
            return answer
        try:
            with self._sending:
                send_frame(self._connection, Request(number, body))
        except OSError as err:
            self._bury(f"the agent (process {self._pid}) is gone: {err}")
        return answer

    def _refused(self, attempt: str, reply: Any) -> None:
        if isinstance(reply, Refused):
            self._hear(Decided(attempt, reply.failure))

    def _listen(self) -> None:
        try:
            while True:
                reply, descriptor = recv_frame(self._connection, Reply)
                if isinstance(reply.body, Decided):
                    self._hear(reply.body)
                    continue
                with self._lock:
                    answer = self._replies.pop(reply.number, None)
                if answer is not None:
                    answer.set_result((reply.body, descriptor))
                elif descriptor >= 0:
                    os.close(descriptor)
        except EOFError as gone:
            self._bury(f"the agent (process {self._pid}) died or was stopped: {gone}")

    def _bury(self, why: str, code: str = AgentError.code) -> None:
        """The agent is gone: everybody who waits for it hears of it now. One that is only silent may still commit."""
        with self._lock:
            self._dead = self._dead or why
            replies, self._replies = self._replies, {}
            attempts = list(self._decisions)
        with contextlib.suppress(OSError):
            # Wakes the thread that listens, should it not be the one that says this.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        for answer in replies.values():
            answer.set_result((Refused(Failure(AgentError.code, why)), -1))
        text = f"{why}. Whether the step was committed is not known here; only committed steps exist"
        for attempt in attempts:
            self._hear(Decided(attempt, Failure(code, text)))

    def _hear(self, decided: Decided) -> None:
        with self._lock:
            waiting = self._decisions.pop(decided.attempt, None)
        if waiting is not None:
            waiting.set_result(decided)

    @classmethod
    def _forget(cls) -> None:
        """In a forked child: a connection of the parent's that stays open here would hide the parent's death."""
        for client in cls._all:
            with contextlib.suppress(OSError):
                client._connection.close()


os.register_at_fork(after_in_child=AgentClient._forget)


def call_agent(path: Path, body: Status | Drain | Stop, timeout_s: float = 10.0) -> Any:
    """One request to the agent behind a socket, from whoever is not its trainer.

    Raises:
        AgentError: nobody answers.
    """
    connection = _connect(path)
    if connection is None:
        raise AgentError(f"no agent answers at {path}")
    with connection:
        connection.settimeout(timeout_s)
        try:
            send_frame(connection, Request(1, body))
            reply = recv_frame(connection, Reply)[0]
        except (OSError, EOFError) as err:
            raise AgentError(f"the agent at {path} did not answer: {err}") from err
    return reply.body


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _connect_or_start(root: str, linger_s: float) -> socket.socket:
    path = socket_path(root)
    # Under the lock, so that an agent that is about to leave is either found or gone.
    with lock():
        connection = _connect(path)
        if connection is not None and not _answers(connection):
            connection.close()
            connection = None
        if connection is None:
            _start(root, linger_s)
            connection = _connect(path)
    if connection is None:
        raise AgentError(f"the agent of {root} was started but does not answer; see {agent_log(root)}")
    return connection


def _answers(connection: socket.socket) -> bool:
    """Whether somebody is there: for an agent that is being killed the kernel still takes calls, and hangs up."""
    connection.settimeout(ANSWER_S)
    try:
        send_frame(connection, Request(0, Status()))
        recv_frame(connection, Reply)
    except EOFError as gone:
        # One that is slow to answer is there.
        return isinstance(gone.__cause__, TimeoutError)
    except OSError:
        return False
    finally:
        connection.settimeout(None)
    return True


def _start(root: str, linger_s: float) -> None:
    ours, theirs = os.pipe()
    log = agent_log(root)
    # The package may come from a path that only this process knows; numerical libraries need no threads there.
    paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    script = f"import sys; sys.path[:0] = {paths!r}; from keepstep.agent.server import main; main(sys.argv[1:])"
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", script, root, str(linger_s), str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        os.close(theirs)
        theirs = -1
        # It listens, or has ended: then nobody holds the other end any more. (The agent is the child of this process.)
        heard = bool(select.select([ours], [], [], START_S)[0])
        if heard and os.read(ours, 5):
            process.wait(START_S)
            return
        process.kill()
        process.wait(START_S)
        reason = "it ended at once" if heard else f"it did not listen within {START_S:g} s"
    except (OSError, subprocess.TimeoutExpired) as err:
        reason = str(err)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    raise AgentError(f"the agent of {root} could not be started: {reason}; see {log}")
