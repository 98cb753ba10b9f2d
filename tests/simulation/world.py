"""One seeded scheduler with simulated time, in which the real protocol runs: no threads, no sockets, no disk, no clock.

Processes live on nodes and consist of actors, which are greenlets. An actor gives way at every storage call, message, lock
and sleep; the scheduler decides who goes next and how long everything takes, by one random generator. What modules of
keepstep know as ``threading``, ``time``, ``socket`` and ``secrets`` is replaced by what is here for as long as a world runs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import greenlet

Exit = greenlet.GreenletExit
QUANTUM_S = 0.004
"""Nobody sleeps for less: whoever looks again and again would only cost time."""


class Violation(AssertionError):
    """A promise was broken. ``kind`` is a short name of the promise."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Fault:
    """What goes wrong: at the ``at``-th breath (storage call or message) of the process with the name ``who``.

    Kinds: ``crash`` and ``power`` (the process, all processes of its node); ``freeze`` and ``stall`` (likewise, for
    ``seconds``); ``slow`` (the storage call takes ``seconds``), ``fail`` (it raises). ``how`` says what becomes of the
    storage call in hand: ``never``, ``now`` or ``later`` for one that dies; ``before`` or ``after`` its effect. With ``on``
    it waits for a storage call about a name that ends like that.
    """

    kind: str
    who: str
    at: int
    how: str = "never"
    seconds: float = 0.0
    on: str = ""


@dataclass(eq=False)
class Process:
    """Something that dies as a whole. ``breaths`` counts its storage calls and messages."""

    name: str
    node: str
    alive: bool = True
    frozen_until: float = 0.0
    breaths: int = 0
    actors: list[Actor] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    at_death: list[Callable[[], None]] = field(default_factory=list)
    disturbed: bool = False
    start: int = 0
    held: list[Callable[[], None]] = field(default_factory=list)


class Actor(greenlet.greenlet):
    """One thread of a process. ``looked`` says that its last storage call was the look for a later start of the job."""

    def __init__(self, world: World, process: Process, name: str, run: Callable[[], None]) -> None:
        super().__init__(self._live, parent=world.main)
        self.world, self.process, self.name = world, process, name
        self.turn = 0
        self.looked = False
        self.began = self.ended = False
        self._work = run
        self.end = Signal(world)

    def _live(self, *_: Any) -> None:
        try:
            self._work()
        except Exit:
            pass
        except BaseException as err:
            self.world.broken = self.world.broken or err
        finally:
            self.ended = True
            self.end.notify()


class World:
    """The scheduler, the clock and the processes. ``history`` is what happened: (seconds, who, what, about what)."""

    def __init__(self, noise: int, faults: tuple[Fault, ...] = ()) -> None:
        self.rng = random.Random(noise)
        self.now = 0.0
        self.main = greenlet.getcurrent()
        self.actor: Actor | None = None
        self.broken: BaseException | None = None
        self.history: list[tuple[float, str, str, str]] = []
        self.processes: dict[str, Process] = {}
        self._faults: dict[str, list[Fault]] = {}
        for fault in sorted(faults, key=lambda one: one.at):
            self._faults.setdefault(fault.who, []).append(fault)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._doomed: list[Actor] = []

    # --- time ---

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls this in so many seconds. Nothing that yields."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, call))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Goes on until that is true; False when it is not by then. Raises what broke a promise, or an actor."""
        end = self.now + limit_s
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = max(self.now, end)
                return False
            self.now, _, call = heapq.heappop(self._events)
            call()
            self.reap()
            if self.broken is not None:
                raise self.broken
        return True

    def reap(self) -> None:
        """Ends the actors of processes that have died; whatever they still try has no effect."""
        while self._doomed:
            actor = self._doomed.pop()
            if not actor.dead:
                self.actor = actor
                actor.throw(Exit)
                self.actor = None

    def close(self) -> None:
        """The end of everything."""
        for process in self.processes.values():
            self.kill(process)
        self.reap()
        self._events.clear()

    def switch(self, timeout_s: float | None) -> bool:
        """Gives way, until somebody wakes the actor (True) or the time is over (False)."""
        actor = self.me()
        if timeout_s is not None:
            self.at(timeout_s, partial(self._wake, actor, actor.turn, False))
        woken = bool(self.main.switch())
        self.me()
        return woken

    def sleep(self, seconds: float) -> None:
        """Gives way for so long."""
        self.me().looked = False
        self.pause(max(seconds, QUANTUM_S))

    def pause(self, seconds: float) -> None:
        """Gives way for so long, in the middle of something."""
        self.me().turn += 1
        self.switch(seconds)

    def lag(self) -> float:
        """How long a call takes: mostly milliseconds, sometimes much longer."""
        roll = self.rng.random()
        return 0.001 + 0.01 * roll if roll < 0.95 else 0.02 + self.rng.random() * 0.15

    def _wake(self, actor: Actor, turn: int, woken: bool) -> None:
        if actor.turn != turn or actor.dead or not actor.process.alive:
            return
        if actor.process.frozen_until > self.now:
            actor.process.held.append(partial(self._wake, actor, turn, woken))
            return
        actor.turn += 1
        self.actor = actor
        actor.switch(woken)
        self.actor = None

    # --- processes ---

    def process(self, name: str, node: str) -> Process:
        """A new process, with the faults that wait for one of this name."""
        process = self.processes[name] = Process(name, node)
        process.faults = self._faults.pop(name, [])
        return process

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> Actor:
        """One more actor of a process."""
        actor = Actor(self, process, name, run)
        process.actors.append(actor)
        if len(process.actors) > 16:
            process.actors = [one for one in process.actors if not one.ended]
        self.at(self.rng.random() * 0.002, partial(self._wake, actor, 0, True))
        return actor

    def me(self) -> Actor:
        """Whoever asks; one whose process is dead gets no further."""
        if self.actor is None or not self.actor.process.alive:
            raise Exit
        return self.actor

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.alive:
            process.alive = False
            self._doomed.extend(process.actors)
            for call in process.at_death:
                call()

    def node_of(self, node: str) -> list[Process]:
        """The living processes of a node."""
        return [process for process in self.processes.values() if process.node == node and process.alive]

    def heal(self) -> None:
        """No more faults; who is frozen goes on."""
        self._faults.clear()
        for process in self.processes.values():
            process.faults.clear()
            if process.frozen_until > self.now:
                process.frozen_until = self.now
                self._thaw(process)

    def note(self, what: str, about: str = "", who: str = "") -> None:
        """One line of history."""
        self.history.append((self.now, who or (self.actor.process.name if self.actor else ""), what, about))

    def violate(self, kind: str, text: str) -> NoReturn:
        """A promise is broken: the end of this world, whoever would catch the exception."""
        self.note("BROKEN", f"{kind}: {text}")
        self.broken = self.broken or Violation(kind, text)
        raise self.broken

    def breath(self, name: str | None = None, *, changes: bool = False) -> Fault | None:
        """Counts a storage call (about a name) or a message; the fault that is due now. Who dies or freezes does so here."""
        process = self.me().process
        process.breaths += 1
        if not process.faults or process.faults[0].at > process.breaths:
            return None
        fault = process.faults[0]
        if fault.on and not (name or "").endswith(fault.on):
            return None
        if fault.how == "later" and (not changes or self.me().looked):
            # A call that has its effect after its caller's death has to be one that has an effect. What follows a look for
            # a later start is not put off, see below.
            return None
        if fault.kind in ("slow", "fail") or (name is not None and fault.kind in ("crash", "power")):
            if name is None:
                return None
            process.faults.pop(0)
            return fault
        if self.me().looked and fault.kind in ("freeze", "stall"):
            # Between the look for a later start and the call after it nobody falls asleep; see the page on failures.
            return None
        process.faults.pop(0)
        if fault.kind in ("crash", "power"):
            self.strike(fault)
            raise Exit
        self.freeze(fault)
        return None

    def strike(self, fault: Fault) -> None:
        """The process of whoever acts dies, or its whole node."""
        process = self.me().process
        self.note("DIES" if fault.kind == "crash" else "LOSES POWER", process.node if fault.kind == "power" else "")
        for one in self.node_of(process.node) if fault.kind == "power" else [process]:
            self.kill(one)

    def freeze(self, fault: Fault) -> None:
        """The process of whoever acts stands still, or its whole node."""
        process = self.me().process
        frozen = self.node_of(process.node) if fault.kind == "freeze" else [process]
        if any(actor.looked for one in frozen for actor in one.actors):
            process.faults.insert(0, fault)
            return
        self.note("STANDS STILL", f"{fault.seconds:.1f} s, {', '.join(one.name for one in frozen)}")
        for one in frozen:
            one.frozen_until, one.disturbed = self.now + fault.seconds, True
            self.at(fault.seconds, partial(self._thaw, one))
        self.sleep(0)

    def _thaw(self, process: Process) -> None:
        if process.frozen_until <= self.now and process.held:
            self.note("goes on", "", process.name)
            held, process.held = process.held, []
            for call in held:
                self.at(self.rng.random() * 0.01, call)


class Signal:
    """What actors wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[Actor, int]] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Gives way until notified; False when the time is over."""
        actor = self._world.me()
        actor.turn += 1
        actor.looked = False
        self._waiting.append((actor, actor.turn))
        return self._world.switch(timeout_s)

    def notify(self) -> None:
        """Wakes all who wait, each at its own time."""
        waiting, self._waiting = self._waiting, []
        for actor, turn in waiting:
            self._world.at(self._world.rng.random() * 0.001, partial(self._world._wake, actor, turn, True))


# --- what stands in the place of modules ------------------------------------------------------------------------------


class Clock:
    """In the place of ``time``."""

    def __init__(self, world: World) -> None:
        self.sleep = world.sleep
        self.monotonic = self.perf_counter = self.time = lambda: world.now


class Secrets:
    """In the place of ``secrets``: random, and the same for the same seed."""

    def __init__(self, world: World) -> None:
        self._rng = world.rng

    def token_hex(self, size: int) -> str:
        return self._rng.randbytes(size).hex()


class Lock:
    """A lock and a condition. Actors give way only where they say so, so that mostly it is free."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._signal = Signal(world)
        self._held = False
        self._free = Signal(world)

    def __enter__(self) -> Lock:
        while self._held:
            self._free.wait()
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._free.notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        self.__exit__()
        woken = self._signal.wait(timeout_s)
        self.__enter__()
        return woken

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        end = None if timeout_s is None else self._world.now + timeout_s
        while not is_true():
            left = None if end is None else end - self._world.now
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify_all(self) -> None:
        self._signal.notify()


class Thread:
    """An actor in the process of whoever makes it."""

    def __init__(self, world: World, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "") -> None:
        self._world = world
        self._run = partial(target, *args)
        self._name = name or target.__name__
        self._actor: Actor | None = None

    def start(self) -> None:
        self._actor = self._world.spawn(self._world.me().process, self._name, self._run)


class Timer:
    """Calls something later, in the process of whoever makes it, unless it is cancelled."""

    def __init__(self, world: World, delay_s: float, call: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
        self.daemon = True
        self._world, self._delay_s, self._call, self._over = world, delay_s, partial(call, *args), False

    def start(self) -> None:
        process = self._world.me().process
        self._world.at(self._delay_s, lambda: self._over or (self._world.spawn(process, "timer", self._ring) and None))

    def _ring(self) -> None:
        if not self._over:
            self._call()

    def cancel(self) -> None:
        self._over = True


class Threading:
    """In the place of ``threading``."""

    def __init__(self, world: World) -> None:
        self.Lock = self.Condition = partial(Lock, world)
        self.Thread = lambda target, args=(), name="", daemon=False: Thread(world, target, args, name)
        self.Timer = partial(Timer, world)


def result_of(world: World, future: Future[Any], timeout_s: float | None = None) -> Any:
    """Waits for a future in simulated time.

    Raises:
        TimeoutError: it is not done by then. Or what it holds.
    """
    if not future.done():
        signal = Signal(world)
        future.add_done_callback(lambda _: signal.notify())
        signal.wait(timeout_s)
        if not future.done():
            raise TimeoutError
    return future.result(0)


def future_class(world: World) -> type[Future[Any]]:
    """Futures whose ``result`` waits in simulated time."""

    class SimulatedFuture(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            return super().result(0) if self.done() else result_of(world, self, timeout)

    return SimulatedFuture
