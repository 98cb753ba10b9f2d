"""What processes of a simulated world share: the storage of the run, the store through which ranks talk, and the network."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from keepstep import ranks
from keepstep.agent import board, hub, links
from keepstep.checkpointer import agree, decisions, restoring, saving
from keepstep.commit import publish
from keepstep.errors import CorruptError, StorageError
from keepstep.storage.base import Blob, Storage, Upload
from keepstep.storage.local import PARTIAL
from tests.simulation import world as sim
from tests.simulation.world import Process, Signal, World

KEEP_ALIVE_S = 4.0
"""So long after a loss of power the other end of a connection hears of it."""


class SharedStorage(Storage):
    """Blobs in a dictionary; each call takes its time and has its effect at one instant. Not all who call live that long.

    ``changed(operation, name)`` is called after every effect.
    """

    def __init__(self, world: World) -> None:
        self.url = "sim://run"
        self.blobs: dict[str, bytes] = {}
        self.changed: Callable[[str, str], None] = lambda operation, name: None
        self.under_way = 0
        self._world = world

    def create(self, name: str, size_hint_bytes: int) -> Upload:
        partial_name = f"{name}.{self._world.rng.randbytes(4).hex()}{PARTIAL}"
        self._call("create", name, lambda: self.blobs.__setitem__(partial_name, b""))
        return _Upload(self, name, partial_name)

    def open(self, name: str) -> Blob:
        data = self._call("open", name, lambda: self.blobs.get(name))
        if data is None:
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such blob"))
        return _Blob(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._call("put", name, lambda: self.blobs.__setitem__(name, data))

    def put_new(self, name: str, data: bytes) -> bool:
        def effect() -> bool:
            return self.blobs.setdefault(name, data) is data

        return bool(self._call("put_new", name, effect))

    def append_line(self, name: str, line: bytes) -> None:
        self._call("append", name, lambda: self.blobs.__setitem__(name, self.blobs.get(name, b"") + line))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        start = f"{prefix}/" if prefix else ""

        def effect() -> Any:
            return [(name, len(data)) for name, data in self.blobs.items() if name.startswith(start)]

        found = self._call("list", prefix, effect)
        self._world.me().looked = prefix == publish.INCARNATIONS
        return iter(found)

    def folders(self) -> list[str]:
        return self._call("folders", "", lambda: _folders(self.blobs))

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._call("delete", name, lambda name=name: self.blobs.pop(name, None))

    def _call(self, operation: str, name: str, effect: Callable[[], Any]) -> Any:
        self.under_way += 1
        try:
            return self._carry_out(operation, name, effect)
        finally:
            self.under_way -= 1

    def _carry_out(self, operation: str, name: str, effect: Callable[[], Any]) -> Any:
        world, actor = self._world, self._world.me()
        starts = operation == "put_new" and name.startswith(publish.INCARNATIONS)
        if starts:
            actor.looked = False
        changes = operation in ("put", "delete", "commit", "create")
        fault = world.breath(name, changes=changes)
        if fault is None:
            world.pause(world.lag())
        elif fault.kind in ("crash", "power"):
            self._die(fault, operation, name, effect)
        elif fault.kind == "fail":
            if fault.how == "after":
                self._have(operation, name, effect)
            world.note(f"{operation} FAILS ({fault.how} its effect)", name)
            actor.looked = False
            raise StorageError(operation, name, OSError(errno.EIO, "as the plan wants it"))
        else:
            world.note(f"{operation} takes {fault.seconds:.1f} s", name)
            actor.process.disturbed = True
            world.pause(fault.seconds if fault.how == "before" else 0.01)
        while starts and self._somebody_looked():
            # No later start falls between a look for one and the call after it: what is assumed, see docs.
            world.pause(sim.QUANTUM_S)
        done = self._have(operation, name, effect)
        if fault is not None and fault.kind == "slow" and fault.how == "after" and name != publish.INCARNATIONS:
            world.pause(fault.seconds)
        actor.looked = False
        return done

    def _have(self, operation: str, name: str, effect: Callable[[], Any], who: str = "") -> Any:
        done = effect()
        self._world.note(operation, name + (" (taken)" if done is False else ""), who)
        if operation in ("put", "put_new", "delete", "commit"):
            self.changed(operation, name)
        return done

    def _die(self, fault: sim.Fault, operation: str, name: str, effect: Callable[[], Any]) -> None:
        """The caller dies within the call: it had its effect, will have it, or never has."""
        world, who = self._world, self._world.me().process.name
        world.note(f"{operation} …", name)
        world.strike(fault)
        if fault.how == "now":
            self._have_late(operation, name, effect, who)
        elif fault.how == "later":
            self.under_way += 1
            world.at(world.rng.random() * 3.0, lambda: self._have_late(operation, name, effect, f"{who} (dead)", 1))
        elif operation in ("put", "put_new"):
            self.blobs[f"{name}.{world.rng.randbytes(4).hex()}{PARTIAL}"] = b"half"
        raise sim.Exit

    def _have_late(self, operation: str, name: str, effect: Callable[[], Any], who: str, calls: int = 0) -> None:
        self.under_way -= calls
        with contextlib.suppress(StorageError):
            self._have(operation, name, effect, who)

    def _somebody_looked(self) -> bool:
        return any(
            actor.looked and not actor.dead
            for process in self._world.processes.values()
            if process.alive
            for actor in process.actors
        )


class _Upload(Upload):
    def __init__(self, storage: SharedStorage, name: str, partial_name: str) -> None:
        self._storage, self._name, self._partial, self._data = storage, name, partial_name, b""

    def write_at(self, offset: int, data: memoryview) -> None:
        self._data = bytes(data)

    def commit(self, size_bytes: int) -> None:
        blobs = self._storage.blobs

        def effect() -> None:
            if blobs.pop(self._partial, None) is None:
                # Somebody took it away: a rename of nothing.
                raise StorageError("commit", self._name, FileNotFoundError(errno.ENOENT, "it was removed"))
            blobs[self._name] = self._data

        self._storage._call("commit", self._name, effect)

    def close(self) -> None:
        actor = self._storage._world.actor
        if actor is not None and actor.process.alive:
            self._storage.blobs.pop(self._partial, None)


class _Blob(Blob):
    def __init__(self, name: str, data: bytes) -> None:
        self._name, self._data, self.size_bytes = name, data, len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.size_bytes:
            raise CorruptError(f"{self._name} ends at byte {self.size_bytes}")
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class Snapshot(Storage):
    """The same blobs, seen at this very instant by nobody who takes part."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self.url, self.blobs = "sim://run", blobs

    def open(self, name: str) -> Blob:
        if name not in self.blobs:
            raise StorageError("open", name, FileNotFoundError(errno.ENOENT, "no such blob"))
        return _Blob(name, self.blobs[name])

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        start = f"{prefix}/" if prefix else ""
        return iter([(name, len(data)) for name, data in self.blobs.items() if name.startswith(start)])

    def folders(self) -> list[str]:
        return _folders(self.blobs)

    create = put = put_new = delete = None  # type: ignore[assignment]


Snapshot.__abstractmethods__ = frozenset()


def _folders(blobs: dict[str, bytes]) -> list[str]:
    return [*{name.partition("/")[0]: None for name in blobs if "/" in name}]


class Store:
    """In the place of the store of torch's process group, which the launcher keeps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._values: dict[str, bytes] = {}
        self._changed = Signal(world)

    def set(self, key: str, value: bytes) -> None:
        self._world.breath()
        self._world.sleep(self._world.rng.random() * 0.01)
        self._values[key] = value
        self._changed.notify()

    def get(self, key: str) -> bytes:
        self._world.me()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._world.me()
        return all(key in self._values for key in keys)

    def add(self, key: str, more: int) -> int:
        self._world.me()
        value = int(self._values.get(key, b"0")) + more
        self._values[key] = str(value).encode()
        return value

    def wait(self, keys: list[str], timeout: Any) -> None:
        end = self._world.now + timeout.total_seconds()
        while not self.check(keys):
            left = end - self._world.now
            if left <= 0:
                raise RuntimeError("wait timeout")
            self._changed.wait(left)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]


@dataclass(eq=False)
class Connection:
    """One end of a connection. Messages are delayed; they come in order and once, unless the network is told otherwise."""

    world: World
    process: Process
    wild: bool = False
    peer: Connection | None = None
    inbox: deque[Any] = field(default_factory=deque)
    closed: bool = False
    last: float = 0.0
    arrived: Signal = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = Signal(self.world)
        self.process.at_death.append(self._lost)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Any) -> None:
        world, peer = self.world, self.peer
        world.breath()
        if self.closed or peer is None:
            raise BrokenPipeError(errno.EPIPE, "the connection is closed")
        at = world.now + world.lag()
        at = at if self.wild and world.rng.random() < 0.5 else max(at, self.last)
        self.last = max(at, self.last)
        world.at(at - world.now, partial(peer._take, message))
        if self.wild and world.rng.random() < 0.3:
            world.at(at - world.now + world.rng.random() * 4.0, partial(peer._take, message))

    def recv(self, timeout_s: float | None = None) -> Any:
        while not self.inbox:
            if self.closed:
                raise EOFError("the other end hung up")
            if not self.arrived.wait(timeout_s) and timeout_s is not None:
                raise EOFError("nothing came in time")
        return self.inbox.popleft()

    def shutdown(self, how: int) -> None:
        self.close()

    def setsockopt(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self._end()
            if self.peer is not None:
                self.world.at(max(self.last - self.world.now, 0.0) + self.world.lag(), self.peer._end)

    def _take(self, message: Any) -> None:
        if self.process.alive and not self.closed:
            self.inbox.append(message)
            self.arrived.notify()

    def _end(self) -> None:
        self.closed = True
        self.arrived.notify()

    def _lost(self) -> None:
        if not self.closed and self.peer is not None:
            # A process that dies is missed at once, a node only when it does not answer.
            gone = not any(one.alive for one in self.world.node_of(self.process.node))
            self.world.at(self.world.lag() + (KEEP_ALIVE_S if gone else 0.0), self.peer._end)


class Network:
    """Who listens where."""

    def __init__(self, world: World, *, wild: bool) -> None:
        self.world, self.wild = world, wild
        self._listeners: dict[tuple[str, int], _Listening] = {}
        self._ports = 0

    def listen(self) -> _Listening:
        process = self.world.me().process
        self._ports += 1
        listening = self._listeners[process.node, self._ports] = _Listening(self, process, self._ports)
        return listening

    def connect(self, address: tuple[str, int], wild: bool | None = None) -> Connection:
        self.world.sleep(self.world.lag())
        listening = self._listeners.get(address)
        if listening is None or not listening.process.alive or listening.closed:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        wild = self.wild if wild is None else wild
        mine = Connection(self.world, self.world.me().process, wild)
        mine.peer = Connection(self.world, listening.process, wild, mine)
        listening.calls.append(mine.peer)
        listening.called.notify()
        return mine


class _Listening:
    def __init__(self, network: Network, process: Process, port: int) -> None:
        self.process, self._port, self.closed = process, port, False
        self.calls: deque[Connection] = deque()
        self.called = Signal(network.world)

    def getsockname(self) -> tuple[str, int]:
        return self.process.node, self._port

    def accept(self) -> tuple[Connection, tuple[str, int]]:
        while not self.calls:
            if self.closed:
                raise OSError(errno.EBADF, "closed")
            self.called.wait()
        call = self.calls.popleft()
        return call, (call.peer.process.node if call.peer else "", 0)

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        self.called.notify()


def _accept_peer(connection: Connection, secret: str) -> bool:
    known = connection.recv(links.CONNECT_S) == secret
    connection.send(known)
    return known


def _greet_peer(connection: Connection, secret: str) -> bool:
    connection.send(secret)
    return bool(connection.recv(links.CONNECT_S))


@contextlib.contextmanager
def on_stage(world: World, network: Network, **more: Any) -> Iterator[None]:
    """For as long as it lasts, the modules of the protocol see this world instead of the real one."""
    clock, secrets, threads = sim.Clock(world), sim.Secrets(world), sim.Threading(world)
    futures = sim.future_class(world)

    class Attempt(board._Attempt):  # type: ignore[misc]
        def __init__(self, begin: Any) -> None:
            super().__init__(begin, world.now, far=futures(), decided=futures())

    class Phase(ranks.Phase):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._began = world.now

    sockets = SimpleNamespace(
        create_server=lambda *_, **__: network.listen(),
        create_connection=lambda address, timeout: network.connect(tuple(address)),
        **{
            name: getattr(socket, name)
            for name in ("AF_INET", "SHUT_RDWR", "SOL_SOCKET", "SO_KEEPALIVE", "IPPROTO_TCP")
        },
        TCP_NODELAY=1,
    )
    places: list[tuple[Any, dict[str, Any]]] = [
        (board, {"threading": threads, "time": clock, "memory_bytes": lambda: 0, "_Attempt": Attempt}),
        (
            hub,
            {
                "threading": threads,
                "time": clock,
                "secrets": secrets,
                "Future": futures,
                "_own_addresses": lambda hosts: [world.me().process.node],
            },
        ),
        (
            links,
            {
                "threading": threads,
                "time": clock,
                "socket": sockets,
                "accept_peer": _accept_peer,
                "greet_peer": _greet_peer,
                "send_frame": lambda connection, message: connection.send(message),
                "recv_frame": lambda connection, kind: (connection.recv(), -1),
            },
        ),
        (ranks, {"time": clock, "Phase": Phase}),
        (agree, {"secrets": secrets}),
        (decisions, {"secrets": secrets, "time": clock}),
        (publish, {"time": clock}),
        (restoring, {"load_step": more["load_step"], "choose_step": more["choose_step"]}),
        (
            saving,
            {
                "capture": lambda state, **_: state,
                "fill": lambda *_: (),
                "replica_digests": lambda *_: {},
                "ShardWriter": more["writer"],
                "no_collection": contextlib.nullcontext,
            },
        ),
    ]
    before = [(module, {name: getattr(module, name) for name in names}) for module, names in places]
    level = logging.getLogger("keepstep").level
    logging.getLogger("keepstep").setLevel(logging.CRITICAL + 1)
    try:
        for module, names in places:
            for name, value in names.items():
                setattr(module, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, names in before:
            for name, value in names.items():
                setattr(module, name, value)
        logging.getLogger("keepstep").setLevel(level)
