"""The agent as a process. Started by a trainer (``agent/client.py``), it outlives it.

It owns the arenas, as shared memory that trainers map, so a job that was submitted is finished whatever becomes of the
trainer. It leaves by itself when no trainer is connected, nothing is left to do, and its linger time is over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import logging.handlers
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.agent.board import Place, memory_bytes
from keepstep.agent.hub import Hub
from keepstep.agent.node import Door, agent_log, lock, settle_in
from keepstep.agent.protocol import (
    Abort,
    ArenaGiven,
    Begin,
    Done,
    Drain,
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
    ToTrainer,
    recv_frame,
    send_frame,
)
from keepstep.agent.scrubber import Scrubber
from keepstep.agent.uploader import Uploader
from keepstep.errors import AgentError, CheckpointError, StagingError, UsageError
from keepstep.format.failure import failure_of
from keepstep.format.shardfile import block_size
from keepstep.move.arena import Arena, bases_of, check_budget, shared_memory
from keepstep.storage.base import Storage, Subfolder
from keepstep.storage.local import LocalStorage, storage_of

__all__ = ["Agent", "main"]

PAUSE_S = 0.2
_log = logging.getLogger("keepstep")


@dataclass(slots=True)
class _SharedArena:
    number: int
    descriptor: int
    arena: Arena


@dataclass(slots=True)
class _Trainer:
    """One connection. ``parts`` are the attempts it has begun and not submitted."""

    connection: socket.socket
    pid: int = 0
    rank: int = 0
    parts: dict[str, Begin] = field(default_factory=dict)
    arenas: dict[int, _SharedArena] = field(default_factory=dict)
    busy: dict[int, str] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)
    is_trainer: bool = False

    def send(self, number: int, body: ToTrainer, descriptor: int = -1) -> None:
        """Sends one reply; a trainer that is gone is noticed by whoever reads from it."""
        with contextlib.suppress(OSError), self.sending:
            send_frame(self.connection, Reply(number, body), descriptor)


class Agent:
    """The agent of one root on this machine."""

    def __init__(self, root: str, linger_s: float) -> None:
        self._root = root
        self._linger_s = linger_s
        self._hub = Hub()
        self._scrubber = Scrubber(root)
        self._uploader = None if "://" in root else Uploader(LocalStorage(root), "agent")
        # Remote ones are kept, for their connections. Credentials are those of whoever has started this process.
        self._remote = functools.lru_cache(maxsize=16)(storage_of)
        self._trainers: list[_Trainer] = []
        self._spare: list[_SharedArena] = []
        self._lock = threading.Lock()
        self._connected = 0
        self._numbers = 0
        self._coming_bytes = 0
        self._started = time.time()
        self._last_seen = time.monotonic()
        self._leaving = threading.Event()
        # Whoever starts an agent holds the lock, and nobody answered: what is there was left by one that died.
        self._door = Door(root)

    def run(self) -> None:
        """Serves until it is told to leave, or nobody needs it any more."""
        threading.Thread(target=self._accept, name="keepstep-accept", daemon=True).start()
        while not self._leaving.wait(min(1.0, self._linger_s / 2)):
            if self._uploader is not None:
                self._uploader.look()
            with self._lock:
                if self._trainers or self._hub.open_parts() or (self._uploader is not None and self._uploader.busy):
                    self._last_seen = time.monotonic()
            self._scrubber.look(idle=not self._hub.open_parts())
            # Nobody will come to where nobody finds it.
            linger_s = self._linger_s if self._door.is_found() else 0.0
            if time.monotonic() - self._last_seen > linger_s and self._may_leave():
                break
        self._door.take_down()
        self._scrubber.close()
        _log.info("leaving: %d saves committed, %d failed", self._hub.board.committed, self._hub.board.failed)

    def _may_leave(self) -> bool:
        """Nobody can be about to connect: trainers connect under the lock, and find the socket gone after it."""
        with lock(), self._lock:
            if self._connected or self._door.knocked():
                return False
            self._door.take_down()
            return True

    def _accept(self) -> None:
        while True:
            select.select([self._door.socket], [], [])
            try:
                with self._lock:
                    connection, _ = self._door.socket.accept()
                    self._connected += 1
            except OSError as err:
                _log.warning("a trainer could not be let in: %s", err)
                time.sleep(PAUSE_S)
                continue
            uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid != os.getuid():
                _log.warning("a process of user %d was refused", uid)
                connection.close()
                with self._lock:
                    self._connected -= 1
                continue
            trainer = _Trainer(connection)
            threading.Thread(target=self._serve, args=(trainer,), daemon=True).start()

    def _serve(self, trainer: _Trainer) -> None:
        with trainer.connection:
            try:
                while True:
                    request, _ = recv_frame(trainer.connection, Request)
                    self._answer(trainer, request)
            except EOFError as gone:
                self._gone(trainer, str(gone))
            finally:
                with self._lock:
                    self._connected -= 1

    def _answer(self, trainer: _Trainer, request: Request) -> None:
        try:
            body = self._carry_out(trainer, request)
        except Exception as err:  # noqa: BLE001  one request must not end the agent
            body = _refused(err)
        if body is not None:
            trainer.send(request.number, body)

    def _carry_out(self, trainer: _Trainer, request: Request) -> ToTrainer | None:
        """What to answer now; None when the answer comes by itself."""
        body = request.body
        if not trainer.is_trainer and not isinstance(body, Hello | Drain | Status | Stop):
            raise UsageError("whoever wants to save says first who it is")
        match body:
            case Hello():
                if not trainer.is_trainer:
                    trainer.pid, trainer.rank, trainer.is_trainer = body.pid, body.rank, True
                    with self._lock:
                        self._trainers.append(trainer)
                    self._hub.enter(id(trainer))
                    self._scrubber.ask(body.scrub_s)
                return self._report()
            case NeedArena():
                self._later(trainer, request.number, functools.partial(self._give_arena, trainer, body))
                return None
            case Begin():
                trainer.parts[body.attempt] = body
                decided = self._hub.begin(body, self._storage(body.root) if body.root else None)
                decided.add_done_callback(lambda done: trainer.send(0, done.result()))
                return Done()
            case Submit():
                self._submit(trainer, body)
                return Done()
            case Abort():
                trainer.parts.pop(body.attempt, None)
                self._hub.abort(body)
                return Done()
            case Listen():
                return Listening(self._hub.listen(body.secret, body.hosts))
            case Drain():
                self._later(trainer, request.number, lambda: Done(self._hub.settle(body.timeout_s)))
                return None
            case Status():
                return self._report()
            case Stop():
                self._later(trainer, request.number, functools.partial(self._stop, now=body.now))
                return None

    def _later(self, trainer: _Trainer, number: int, work: Callable[[], ToTrainer | tuple[ToTrainer, int]]) -> None:
        """Answers when the work is done, on a thread of its own: other requests go on meanwhile."""

        def run() -> None:
            try:
                done = work()
                body, descriptor = done if isinstance(done, tuple) else (done, -1)
            except Exception as err:  # noqa: BLE001  thread entry: whoever waits for the answer gets one
                body, descriptor = _refused(err), -1
            trainer.send(number, body, descriptor)

        threading.Thread(target=run, daemon=True).start()

    def _stop(self, *, now: bool) -> ToTrainer:
        left = 0 if now else self._hub.settle(600.0)
        _log.info("told to leave%s", " at once" if now else "")
        threading.Timer(0.05, self._leaving.set).start()
        return Done(left)

    def _storage(self, root: str) -> Storage:
        return self._remote(root) if "://" in root else LocalStorage(root)

    def _give_arena(self, trainer: _Trainer, need: NeedArena) -> tuple[ToTrainer, int]:
        with self._lock:
            if trainer not in self._trainers:
                raise AgentError("the trainer has left")
            dropped = trainer.arenas.pop(need.drop, None)
            if dropped is not None:
                _free(dropped)
            fitting = [arena for arena in self._spare if arena.arena.size_bytes >= need.size_bytes]
            chosen = min(fitting, key=lambda arena: arena.arena.size_bytes, default=None)
            if chosen is not None:
                self._spare.remove(chosen)
                trainer.arenas[chosen.number] = chosen
                return ArenaGiven(chosen.number, chosen.arena.size_bytes), chosen.descriptor
            while self._spare:
                _free(self._spare.pop())
            held = sum(arena.arena.size_bytes for one in self._trainers for arena in one.arenas.values())
            check_budget(need.size_bytes, need.budget_bytes, held + self._coming_bytes)
            self._coming_bytes += need.size_bytes
            self._numbers += 1
            number = self._numbers
        shared = None
        try:
            shared = _make(number, need.size_bytes)
        finally:
            with self._lock:
                self._coming_bytes -= need.size_bytes
                if shared is not None and trainer in self._trainers:
                    trainer.arenas[number] = shared
                elif shared is not None:
                    # It died meanwhile; the next one may have it.
                    self._spare.append(shared)
        return ArenaGiven(number, shared.arena.size_bytes), shared.descriptor

    def _submit(self, trainer: _Trainer, submit: Submit) -> None:
        shared = trainer.arenas.get(submit.write.arena)
        begin = trainer.parts.get(submit.attempt)
        if shared is None or begin is None:
            raise UsageError(
                f"attempt {submit.attempt} was not begun here, or arena {submit.write.arena} is not its own"
            )
        sizes = [head.data_bytes for head in submit.write.heads]
        if min(sizes, default=0) < 0 or bases_of(sizes)[1] > shared.arena.size_bytes:
            raise UsageError(f"files of {sizes} bytes are not in an arena of {shared.arena.size_bytes:,} bytes")
        given = [len(each) for each in submit.write.digests]
        if given and given != [8 * -(-size // block_size(size)) for size in sizes]:
            raise UsageError(f"digests of {given} bytes are not those of files of {sizes} bytes")
        root = self._storage(submit.write.root)
        place = Place(Subfolder(root, submit.write.folder) if submit.write.folder else root, root)
        self._hub.submit(submit, place, shared.arena)
        # From here on the trainer may die.
        del trainer.parts[submit.attempt]
        trainer.busy[shared.number] = submit.attempt

    def _gone(self, trainer: _Trainer, why: str) -> None:
        """A trainer has left or died: what it had begun fails, what it had submitted goes on."""
        if not trainer.is_trainer:
            return
        for attempt, begin in list(trainer.parts.items()):
            lost = AgentError(f"the trainer of rank {begin.rank} (process {trainer.pid}) ended while it was copying")
            self._hub.abort(Abort(attempt, begin.rank, failure_of(lost)))
        self._hub.leave(id(trainer))
        while any(self._hub.is_writing(attempt, trainer.rank) for attempt in trainer.busy.values()):
            time.sleep(0.01)
        _log.info("trainer %d (rank %d) has left: %s", trainer.pid, trainer.rank, why)
        with self._lock:
            self._trainers.remove(trainer)
            self._spare.extend(trainer.arenas.values())
            trainer.arenas.clear()
            self._last_seen = time.monotonic()

    def _report(self) -> StatusReport:
        with self._lock:
            arenas = [arena for trainer in self._trainers for arena in trainer.arenas.values()] + self._spare
            return StatusReport(
                pid=os.getpid(),
                name=self._hub.name,
                root=self._root,
                started=self._started,
                trainers=tuple(trainer.pid for trainer in self._trainers),
                jobs=self._hub.status(),
                arenas_bytes=sum(arena.arena.size_bytes for arena in arenas),
                memory_bytes=memory_bytes(),
                committed=self._hub.board.committed,
                failed=self._hub.board.failed,
                linger_s=self._linger_s,
                copies=None if self._uploader is None else self._uploader.tally,
            )


def _refused(error: Exception) -> Refused:
    if not isinstance(error, CheckpointError):
        _log.error("a request failed", exc_info=error)
        error = AgentError(f"{type(error).__name__}: {error}")
    return Refused(failure_of(error))


def _make(number: int, size_bytes: int) -> _SharedArena:
    descriptor = shared_memory(size_bytes)
    try:
        return _SharedArena(number, descriptor, Arena(size_bytes, ring=False, descriptor=descriptor))
    except StagingError:
        os.close(descriptor)
        raise


def _free(shared: _SharedArena) -> None:
    shared.arena.close()
    os.close(shared.descriptor)


def main(arguments: list[str]) -> None:
    """Runs an agent in the background: the process that was started ends at once.

    Args:
        arguments: the root, for how many seconds to linger, and a descriptor to write to when it listens.
    """
    root, linger_s, ready = arguments[0], float(arguments[1]), int(arguments[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        # What is meant for the job is not meant for whoever has to finish its last save.
        signal.signal(name, signal.SIG_IGN)
    settle_in()
    handler = logging.handlers.RotatingFileHandler(agent_log(root), maxBytes=1 << 20, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    try:
        if _has_no_reader(ready):
            # The lock has gone with whoever held it, and another agent may have come meanwhile.
            _log.warning("process %d leaves: whoever wanted an agent has died", os.getpid())
        else:
            agent = Agent(root, linger_s)
            _log.info("agent of %s listens, process %d", root, os.getpid())
            with contextlib.suppress(BrokenPipeError):
                os.write(ready, b"ready")
            os.close(ready)
            os.chdir("/")
            agent.run()
    except Exception:
        _log.exception("the agent ends")
        raise
    finally:
        with contextlib.suppress(OSError):
            logging.shutdown()
    # Threads that a storage never returns to would otherwise keep the process alive.
    os._exit(0)


def _has_no_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))
