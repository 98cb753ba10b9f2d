"""Agents of different nodes: one listens for the others, each of which calls it. TCP, with proof of a shared secret."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keepstep.agent.board import Board
from keepstep.agent.protocol import (
    Begin,
    BetweenAgents,
    Decided,
    Deliver,
    Join,
    accept_peer,
    greet_peer,
    recv_frame,
    send_frame,
)
from keepstep.errors import AgentError
from keepstep.format.failure import Failure, failure_of

__all__ = ["Link", "Listener", "tell_instead"]

CONNECT_S = 5.0
STRANGERS = 32
"""At most this many callers at a time may still owe their proof; one more, and the first of them is turned away."""
PAUSE_S = 0.2
_log = logging.getLogger("keepstep")


class Listener:
    """The coordinator's end: takes in what other agents deliver, and tells them what was decided."""

    def __init__(self, board: Board, secret: str) -> None:
        self._board = board
        self._secret = secret
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.create_server(("", 0), family=socket.AF_INET)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="keepstep-listen", daemon=True).start()

    def close(self) -> None:
        """Stops listening; agents that are connected stay so."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as err:
                if self._closed:
                    return
                # A caller that hung up before it was heard, or a network that is down: others will call.
                _log.warning("a caller could not be heard: %s", err)
                time.sleep(PAUSE_S)
                continue
            with self._lock:
                first = next(iter(self._strangers)) if len(self._strangers) >= STRANGERS else None
                if first is not None:
                    # Whoever knows the secret proves it at once: those who come and say nothing keep nobody out.
                    del self._strangers[first]
                    _hang_up(first)
                self._strangers[connection] = None
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        """One agent, from its call to its end. What it announced and did not deliver fails when it goes."""
        with connection:
            try:
                known = accept_peer(connection, self._secret)
            except (OSError, EOFError) as err:
                known = False
                _log.warning("a caller from %s was refused: %s", address[0], err or "no proof in time")
            else:
                if not known:
                    _log.warning("a caller from %s was refused: it does not know the secret", address[0])
            finally:
                with self._lock:
                    self._strangers.pop(connection, None)
            if not known:
                return
            _keep_alive(connection)
            sending = threading.Lock()
            owed: dict[tuple[str, int], Begin] = {}
            try:
                while True:
                    message, _ = recv_frame(connection, BetweenAgents)
                    if isinstance(message, Begin):
                        owed[message.attempt, message.rank] = message
                        decided = self._board.open(message, far=True)
                        decided.add_done_callback(lambda done: _tell(connection, sending, done.result()))
                    elif isinstance(message, Deliver):
                        owed.pop((message.attempt, message.rank), None)
                        self._board.receive(message)
            except EOFError as gone:
                for attempt, rank in owed:
                    lost = AgentError(f"the agent of rank {rank} at {address[0]} is gone ({gone})")
                    self._board.receive(Deliver(attempt, rank, failure=failure_of(lost)))


def _tell(connection: socket.socket, sending: threading.Lock, decided: Decided) -> None:
    with contextlib.suppress(OSError), sending:
        send_frame(connection, decided)


class Link:
    """The other end: this agent's connection to the coordinator's. ``attempts`` are those that wait for their decision.

    Args:
        join: where the coordinator's agent is.
        decided: called on the link's own thread with every decision.
        lost: called once, when the connection is gone, with the attempts that were announced over it, and why.

    Raises:
        AgentError: no address answers, or what answers does not know the secret.
    """

    def __init__(
        self, join: Join, decided: Callable[[Decided], None], lost: Callable[[Sequence[str], str], None]
    ) -> None:
        self._sending = threading.Lock()
        self.alive = True
        self.attempts: set[str] = set()
        self._connection = _call(join.addresses, join.secret)
        _keep_alive(self._connection)
        threading.Thread(target=self._listen, args=(decided, lost), name="keepstep-link", daemon=True).start()

    def send(self, message: Begin | Deliver) -> None:
        """Sends one message.

        Raises:
            AgentError: the coordinator's agent is gone.
        """
        with self._sending:
            if not self.alive:
                raise AgentError("the coordinator's agent is gone: that of rank 0")
            if isinstance(message, Begin):
                self.attempts.add(message.attempt)
            try:
                send_frame(self._connection, message)
            except OSError as err:
                # Half a frame may be on its way: nothing can follow it.
                self.alive = False
                _hang_up(self._connection)
                raise AgentError(f"the coordinator's agent cannot be reached, that of rank 0: {err}") from err

    def close(self) -> None:
        """Hangs up."""
        _hang_up(self._connection)

    def _listen(self, decided: Callable[[Decided], None], lost: Callable[[Sequence[str], str], None]) -> None:
        why = ""
        while not why:
            try:
                message, _ = recv_frame(self._connection, BetweenAgents)
            except EOFError as gone:
                why = f"the coordinator's agent is gone ({gone}): that of rank 0"
            else:
                if isinstance(message, Decided):
                    self.attempts.discard(message.attempt)
                    decided(message)
        # Wakes whoever is stuck in sending. Only attempts of this link are lost: there may be another one by now.
        _hang_up(self._connection)
        with self._sending:
            self.alive = False
            self._connection.close()
            attempts = tuple(self.attempts)
        lost(attempts, why)


def tell_instead(begin: Begin, failure: Failure) -> None:
    """In place of an agent that has died: the coordinator's hears that this rank cannot do its part. Never raises.

    Without it the other ranks would wait for this one until the deadline, should its agent have died unannounced.
    """
    if not begin.join.addresses:
        return
    try:
        link = Link(begin.join, lambda _: None, lambda *_: None)
        link.send(begin)
        link.send(Deliver(begin.attempt, begin.rank, failure=failure))
        link.close()
    except AgentError as err:
        _log.warning("the other ranks could not be told of the failure on rank %d: %s", begin.rank, err)


def _call(addresses: Sequence[tuple[str, int]], secret: str) -> socket.socket:
    problems = []
    for address in addresses:
        try:
            connection = socket.create_connection(address, timeout=CONNECT_S)
        except OSError as err:
            problems.append(f"{address[0]}:{address[1]}: {err}")
            continue
        try:
            if greet_peer(connection, secret):
                return connection
            problems.append(f"{address[0]}:{address[1]}: whoever listens there does not know the secret")
        except (OSError, EOFError) as err:
            problems.append(f"{address[0]}:{address[1]}: {err}")
        connection.close()
    why = "; ".join(problems or ["it has no address"])
    raise AgentError(f"the coordinator's agent cannot be reached, that of rank 0: {why}")


def _keep_alive(connection: socket.socket) -> None:
    """A node that loses its power says nothing: ask every few seconds, so that its silence is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
