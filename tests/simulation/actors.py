"""Who acts in a simulated world: trainers, agents, the launcher that starts jobs, and people who look at the root.

What a trainer does between the calls of the protocol is as the Checkpointer does it; what an agent does around its hub is as
its server does it. The protocol itself (ranks, agreement, hub, board, links, commit, catalog, retention, choice of a step)
is the real one.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from keepstep.agent.board import Place
from keepstep.agent.hub import Hub
from keepstep.agent.protocol import Abort, Begin, Decided, Join, Submit, WriteOrder
from keepstep.checkpointer import restoring, saving
from keepstep.checkpointer.agree import Attempt, agree
from keepstep.checkpointer.background import GRACE_S
from keepstep.checkpointer.course import Course, tidy_after_restore
from keepstep.checkpointer.decisions import Start, begin_run
from keepstep.checkpointer.history import History
from keepstep.checkpointer.loading import LoadReport, Options
from keepstep.checkpointer.pending import Pending
from keepstep.checkpointer.restoring import Wanted
from keepstep.checkpointer.saving import Saved, order_of
from keepstep.cli.listing import read_listing
from keepstep.commit.catalog import step_storage
from keepstep.commit.records import RankTimes
from keepstep.commit.retention import Keep
from keepstep.errors import AgentError, CheckpointError, CommitTimeoutError, CorruptError, StagingError
from keepstep.format.failure import failure_of
from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec
from keepstep.format.manifest import Lineage, Manifest, Receipt, file_name
from keepstep.ranks import Ranks
from keepstep.state.snapshot import Snapshot
from keepstep.storage.base import Storage, read_blob
from tests.simulation.places import Connection, Network, SharedStorage, Store
from tests.simulation.promises import DATA_BYTES, FOLDER, PATIENCE_S, Acked, Promises, content_of, record_of
from tests.simulation.world import Process, World, result_of

DEADLINE_S = 2.0
STEPS = 10
"""Between two saves."""
KEEP_LAST = 2
TOLERATED = 3


@dataclass(frozen=True)
class Job:
    """One start of the job. ``mode`` is ``off``, ``thread`` or ``agent``; ``abandoned``: the launcher loses sight of it."""

    world: int = 2
    nodes: int = 1
    saves: int = 2
    mode: str = "off"
    arenas: int = 1
    rollback: bool = False
    back: bool = False
    abandoned: bool = False
    again: bool = False
    staging_fails: int = -1


@dataclass
class Scene:
    """Everything that is there."""

    world: World
    network: Network
    storage: SharedStorage
    promises: Promises
    agents: dict[str, Process] = field(default_factory=dict)
    doors: dict[str, tuple[str, int]] = field(default_factory=dict)
    started: int = 0


# --- what is written and read: a few bytes that say whose they are ----------------------------------------------------


def snapshot_of(world: int) -> Snapshot:
    """One small tensor, split evenly over the ranks."""
    layout = Layout((world * DATA_BYTES // 4,), 0, (Cut(0, "S"),))
    structure = Structure((Mesh((world,)),), (layout,), (TensorSpec(f"{FOLDER}/w", "float32", 0, FOLDER, "same"),))
    return Snapshot(b"", b"", structure, (), (), {}, {}, frozenset())


def write_file(storage: Storage, save_id: str, step: int, rank: int) -> Receipt:
    """This rank's only file."""
    data = content_of(save_id, step, rank)
    with storage.create(file_name(FOLDER, rank, save_id), len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit(len(data))
    return Receipt(rank, save_id, {FOLDER: record_of(save_id, step, rank)})


class FileWriter:
    """In the place of what writes a rank's files on the training thread."""

    seals_first = False

    def __init__(self, storage: Storage, heads: Any, *, origin: Any, arena: Any) -> None:
        self._storage, self._origin = storage, origin

    def finish(self) -> Receipt:
        return write_file(self._storage, self._origin.save_id, self._origin.step, self._origin.rank)

    def close(self) -> None:
        pass


def load_now(ranks: Ranks, storage: Storage, manifest: Manifest, into: Any, **options: Any) -> LoadReport:
    """In the place of what loads a step: every rank reads and proves every file, all ranks together."""
    with ranks.phase(f"load step {manifest.step}", options["deadline_s"]) as phase:
        for rank in range(manifest.world_size):
            name = manifest.file_name(FOLDER, rank)
            if read_blob(storage, name, 1 << 10) != content_of(manifest.save_id, manifest.step, rank):
                raise CorruptError(f"{name} is not what was written")
        answers = phase.gather(b"")
        phase.broadcast(b"" if answers is not None else None)
    return LoadReport(manifest.step, storage.url)


# --- agents -----------------------------------------------------------------------------------------------------------


class SimulatedHub(Hub):
    """The real one, but for the bytes: files are written without an arena."""

    def _write_files(self, part: Any, submit: Submit, place: Place, arena: Any) -> Receipt:
        return write_file(place.step, submit.attempt, part.begin.step, submit.rank)


class Agent:
    """The agent of a node: answers its trainers as the server does."""

    def __init__(self, scene: Scene, node: str) -> None:
        self.scene = scene
        number = sum(name.startswith(f"agent.{node}.") for name in scene.world.processes)
        self.process = scene.world.process(f"agent.{node}.{number}", node)
        scene.agents[node] = self.process
        scene.world.spawn(self.process, "main", self._run)

    def _run(self) -> None:
        self.hub = SimulatedHub()
        listening = self.scene.network.listen()
        self.scene.doors[self.process.node] = listening.getsockname()
        self.scene.world.note("listens")
        while True:
            connection, _ = listening.accept()
            self.scene.world.spawn(self.process, "serve", partial(self._serve, connection))

    def _serve(self, connection: Connection) -> None:
        parts: dict[str, Begin] = {}
        self.hub.enter(id(connection))
        connection.send((0, self.hub.name))
        try:
            while True:
                number, body = connection.recv()
                self._answer(connection, parts, number, body)
        except (EOFError, BrokenPipeError):
            for attempt, begin in parts.items():
                lost = AgentError(f"the trainer of rank {begin.rank} ended while it was copying")
                self.hub.abort(Abort(attempt, begin.rank, failure_of(lost)))
            self.hub.leave(id(connection))

    def _answer(self, connection: Connection, parts: dict[str, Begin], number: int, body: Any) -> None:
        if isinstance(body, Begin):
            parts[body.attempt] = body
            decided = self.hub.begin(body, self.scene.storage)
            decided.add_done_callback(lambda done: _say(connection, (0, done.result())))
        elif isinstance(body, Submit):
            self.hub.submit(body, Place(step_storage(self.scene.storage, body.write.step), self.scene.storage), None)
            del parts[body.attempt]
        elif isinstance(body, Abort):
            parts.pop(body.attempt, None)
            self.hub.abort(body)
        elif isinstance(body, str):
            _say(connection, (number, self.hub.listen(body, ())))
            return
        else:
            drain = partial(self._drain, connection, number, body)
            self.scene.world.spawn(self.process, "drain", drain)
            return
        _say(connection, (number, None))

    def _drain(self, connection: Connection, number: int, timeout_s: float) -> None:
        _say(connection, (number, self.hub.settle(timeout_s)))


def _say(connection: Connection, message: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)


class AgentClient:
    """The trainer's end of the connection to its node's agent, which is started when there is none."""

    kind = "agent"

    def __init__(self, scene: Scene) -> None:
        self._world = scene.world
        node = scene.world.me().process.node
        agent = scene.agents.get(node)
        if agent is None or not agent.alive:
            scene.doors.pop(node, None)
            Agent(scene, node)
        for _ in range(500):
            if node in scene.doors:
                break
            scene.world.sleep(0.01)
        try:
            self._connection = scene.network.connect(scene.doors[node], wild=False)
            self.name = self._connection.recv()[1]
        except (OSError, EOFError, KeyError) as err:
            raise AgentError(f"no agent: {err}") from err
        self._replies: dict[int, Future[Any]] = {}
        self._decisions: dict[str, Future[Decided]] = {}
        self._numbers = 0
        scene.world.spawn(scene.world.me().process, "hears", self._listen)

    @property
    def alive(self) -> bool:
        return not self._connection.closed

    def begin(self, begin: Begin, run: Storage) -> Future[Decided]:
        decided = self._decisions[begin.attempt] = Future()
        self._send(begin)
        return decided

    def submit(self, submit: Submit, place: Place, lent: Any) -> None:
        self._ask(submit)

    def abort(self, abort: Abort) -> None:
        with contextlib.suppress(CheckpointError):
            self._ask(abort)

    def listen(self, secret: str, hosts: Any) -> Any:
        return self._ask(secret)

    def drain(self, timeout_s: float) -> int:
        return int(self._ask(timeout_s))

    def close(self) -> None:
        self._connection.close()

    def _ask(self, body: Any) -> Any:
        reply = result_of(self._world, self._send(body), 60.0)
        if isinstance(reply, AgentError):
            raise reply
        return reply

    def _send(self, body: Any) -> Future[Any]:
        self._numbers += 1
        answer = self._replies[self._numbers] = Future()
        try:
            self._connection.send((self._numbers, body))
        except BrokenPipeError:
            self._bury()
        return answer

    def _listen(self) -> None:
        try:
            while True:
                number, body = self._connection.recv()
                if isinstance(body, Decided):
                    self._hear(body)
                elif number in self._replies:
                    self._replies.pop(number).set_result(body)
        except EOFError:
            self._bury()

    def _bury(self) -> None:
        self._connection.close()
        replies, self._replies = self._replies, {}
        for answer in replies.values():
            answer.set_result(AgentError("the agent is gone"))
        for attempt in list(self._decisions):
            self._hear(Decided(attempt, failure_of(AgentError("the agent is gone"))))

    def _hear(self, decided: Decided) -> None:
        waiting = self._decisions.pop(decided.attempt, None)
        if waiting is not None:
            waiting.set_result(decided)


class InProcess:
    """The same without an agent: a hub in the trainer's process."""

    kind = "thread"
    alive = True

    def __init__(self, scene: Scene) -> None:
        self._hub = SimulatedHub()
        self.name = self._hub.name
        self.listen, self.abort, self.begin = self._hub.listen, self._hub.abort, self._hub.begin
        self.submit, self.drain = self._hub.submit, self._hub.settle

    def close(self) -> None:
        self._hub.close()


# --- trainers ---------------------------------------------------------------------------------------------------------


class Trainer:
    """One rank of one start of the job: starts, restores, trains and saves, as the Checkpointer does."""

    def __init__(self, scene: Scene, job: Job, ranks: Ranks, wanted: int | None) -> None:
        self.scene, self.job, self.ranks, self.wanted = scene, job, ranks, wanted
        self.world, self.root = scene.world, scene.storage
        self.process = scene.world.me().process
        self.history = History()
        self.background: Any = None
        self.join, self.names = Join(), ()
        self.slots: list[Pending] = []
        self.step = self.first = self.turn = 0
        self.failed = False

    def run(self) -> None:
        """The whole life."""
        try:
            self._start()
            for number in range(self.job.saves):
                self.world.sleep(self.world.rng.random() * 0.2)
                self.step += STEPS
                self._save()
                if self.job.again:
                    self._settle()
                    if self.failed:
                        self._save()
                if self.job.back and number == 1:
                    self._restore(self.first or self.step)
            self._settle()
        except CheckpointError as err:
            self.world.note("ends with an error", str(err).splitlines()[0][:160])
        if self.background is not None:
            self.background.close()

    def _start(self) -> None:
        ranks = self.ranks
        with ranks.phase("start", DEADLINE_S) as phase:
            posted = phase.gather(self.root.url.encode())
            phase.broadcast(b"" if posted is not None else None)
        if self.job.mode != "off":
            self._connect()
        with ranks.phase("begin", DEADLINE_S) as phase:
            if self.background is not None:
                self.background.drain(DEADLINE_S)
            posted = phase.gather(b"")
            answer = b"" if posted is None else msgspec.json.encode(begin_run(self.root, ranks.world))
            start = msgspec.json.decode(phase.broadcast(answer), type=Start)
        self.course = Course(Lineage(start.run, start.incarnation), overwrite=False)
        self._restore(self.wanted)

    def _restore(self, step: int | None) -> None:
        """As ``Checkpointer.restore``."""
        self._settle()
        ranks, incarnation = self.ranks, self.course.lineage.incarnation
        self.process.start = incarnation
        unused = self.course.unused
        wanted = Wanted(step, "fall_back", True, incarnation)
        report, manifest, *_ = restoring.restore_step(
            ranks, self.root, {}, wanted, options=Options(), deadline_s=DEADLINE_S
        )
        self.turn += 1
        if manifest is not None:
            self.course.adopt(manifest, report.incarnation)
        self.process.start = self.course.lineage.incarnation
        self.scene.promises.restored(incarnation, self.turn, manifest, self.process.start)
        self.world.note("restored", f"step {report.step} in start {self.process.start}")
        self.step, self.first = report.step, report.step
        if ranks.leads and unused:
            tidy_after_restore(self.root, self.process.start)

    def _connect(self) -> None:
        with self.ranks.phase("connect agents", DEADLINE_S) as phase:
            background = self._working()
            posted = phase.gather(background.name.encode())
            answer = b""
            if posted is not None:
                names = tuple(name.decode() for name in posted)
                join = Join(names[0])
                if len(set(names)) > 1:
                    secret = self.world.rng.randbytes(8).hex()
                    join = Join(names[0], background.listen(secret, ()), secret)
                answer = msgspec.msgpack.encode((join, names))
            told = msgspec.msgpack.decode(phase.broadcast(answer), type=tuple[Join, tuple[str, ...]])
            self.join, self.names = told

    def _working(self) -> Any:
        if self.background is None or not self.background.alive:
            self.background = (AgentClient if self.job.mode == "agent" else InProcess)(self.scene)
        return self.background

    def _save(self) -> None:
        """As ``Checkpointer.save``; training goes on after a save that failed, unless too many have."""
        began, self.process.disturbed = self.world.now, self.process.frozen_until > self.world.now
        try:
            self._notice()
            if self.course.saved == self.step:
                self._settle()
            attempt = Attempt(
                self.step,
                self.course.lineage,
                {"loss": 1.0},
                self.course.may_replace(self.step, inside=self.job.again),
                self.root,
                deadline_s=DEADLINE_S,
                failed_step=self.course.failed,
                keep=Keep(last=KEEP_LAST),
                protect=self.course.protected,
                ready=self.history.ready(TOLERATED),
            )
            place = step_storage(self.root, self.step)
            if self.job.mode == "off":
                self._save_now(place, attempt)
            else:
                self._save_later(place, attempt)
        except CheckpointError as err:
            self.world.note("save failed", f"step {self.step}: {str(err).splitlines()[0][:160]}")
            if self.ranks.world > 1 and not isinstance(err, CommitTimeoutError) and "in a row" in str(err):
                raise
        finally:
            took = self.world.now - began
            if took > 5 * (DEADLINE_S + PATIENCE_S) and not self.process.disturbed and self.process.alive:
                self.world.violate(
                    "deadline", f"{self.process.name} was in the save of step {self.step} for {took:.1f} s"
                )

    def _save_now(self, place: Storage, attempt: Attempt) -> None:
        self.course.failed = attempt.step
        saved, _ = saving.save_step(self.ranks, place, snapshot_of(self.ranks.world), attempt, None)
        self.course.failed, self.course.saved = -1, attempt.step
        self._told(saved.save_id, attempt.step)

    def _save_later(self, place: Storage, attempt: Attempt) -> None:
        self._wait_for_slot()
        ranks = self.ranks
        with ranks.phase(f"save step {attempt.step}", attempt.deadline_s) as phase:
            background = self._working()
            attempt = replace(attempt, ready=msgspec.structs.replace(attempt.ready, agent=background.name))
            snapshot = snapshot_of(ranks.world)
            agreed = agree(phase, ranks, place, snapshot, attempt)
        if agreed.agents != self.names:
            self._connect()
        background = self.background
        pending = Pending(attempt.step, place.url)
        begin = Begin(
            agreed.save_id, attempt.step, ranks.rank, ranks.world, place.url, DEADLINE_S, self.join, self.root.url
        )
        self.world.note("begins", f"step {attempt.step}, attempt {agreed.save_id}")
        decided = background.begin(begin, self.root)
        decided.add_done_callback(lambda done: self._decided(pending, done.result(), begin))
        self.slots.append(pending)
        self.history.add(pending)
        self.course.failed, self.course.saved = -1, attempt.step
        self.world.at(DEADLINE_S + PATIENCE_S, partial(self._check_decided, pending, begin, self.world.now))
        order = order_of(snapshot, agreed, attempt, ranks.world) if ranks.rank == 0 else None
        write = WriteOrder((), attempt.step)
        submit = Submit(agreed.save_id, ranks.rank, write, RankTimes(), {}, order, background.kind)
        self.world.spawn(self.process, "copies", partial(self._stage, background, submit, place, pending))

    def _stage(self, background: Any, submit: Submit, place: Storage, pending: Pending) -> None:
        try:
            self.world.sleep(self.world.rng.random() * self.world.rng.choice((0.1, 0.1, 0.1, 1.2)))
            if (
                self.job.staging_fails == submit.write.step // STEPS
                and not self.failed
                and self.ranks.rank == self.ranks.world - 1
            ):
                raise StagingError("no memory")
            background.submit(submit, Place(place, self.root), None)
            pending.copied()
        except CheckpointError as err:
            background.abort(Abort(submit.attempt, self.ranks.rank, failure_of(err)))
            if not background.alive:
                pending.fail(err)

    def _decided(self, pending: Pending, decided: Decided, begin: Begin) -> None:
        if not self.process.alive or pending.committed.done():
            return
        if decided.failure is None:
            pending.succeed(Saved(pending.url, pending.step, begin.attempt, decided.total_bytes, 0))
            self._told(begin.attempt, begin.step)
        else:
            pending.fail(decided.failure.error())
            self.world.note(
                "hears", f"the save of step {begin.step} failed: {decided.failure.text[:120]}", self.process.name
            )

    def _check_decided(self, pending: Pending, begin: Begin, since: float) -> None:
        agent = self.scene.agents.get(self.process.node)
        asleep = [one for one in (self.process, agent) if one is not None and one.frozen_until > since]
        if self.process.alive and not pending.committed.done() and not asleep:
            self.scene.promises.undecided(begin, self.process)

    def _told(self, save_id: str, step: int) -> None:
        self.world.note("hears", f"step {step} is committed (attempt {save_id})", self.process.name)
        lineage = self.course.lineage
        self.scene.promises.told(Acked(lineage.run, lineage.incarnation, step, save_id))

    def _wait_for_slot(self) -> None:
        self.slots = [pending for pending in self.slots if not pending.committed.done()]
        if len(self.slots) >= self.job.arenas:
            self._wait_for(self.slots[0])

    def _wait_for(self, pending: Pending) -> None:
        try:
            with contextlib.suppress(CheckpointError):
                result_of(self.world, pending.committed, DEADLINE_S + GRACE_S)
        except TimeoutError:
            pending.fail(CommitTimeoutError("the agent has said nothing", ()))
            self.background.close()
            self.background = None

    def _settle(self) -> None:
        for pending in self.slots:
            if not pending.committed.done():
                self._wait_for(pending)
        if self.slots and self.background is not None:
            with contextlib.suppress(AgentError):
                self.background.drain(DEADLINE_S)
        self._notice()

    def _notice(self) -> None:
        for pending, error in self.history.ended():
            self.failed = error is not None
            if error is not None:
                self.course.failed = -1 if pending.may_appear else pending.step


def start_job(scene: Scene, job: Job, nodes: list[str], *, wanted: int | None) -> list[Process]:
    """One more start of the job on these nodes."""
    scene.started += 1
    store = Store(scene.world)
    processes = []
    for rank in range(job.world):
        node = nodes[rank * len(nodes) // job.world]
        process = scene.world.process(f"job{scene.started}.rank{rank}", node)
        ranks = Ranks(rank, job.world, store)

        def live(ranks: Ranks = ranks) -> None:
            Trainer(scene, job, ranks, wanted).run()

        scene.world.spawn(process, "training", live)
        processes.append(process)
    return processes


def look(scene: Scene, process: Process) -> None:
    """Somebody who calls ``keepstep ls`` now and then."""
    while True:
        scene.world.sleep(0.3 + scene.world.rng.random())
        at_start = scene.promises.newest
        listing = read_listing(scene.storage)
        latest = next((line.step for line in listing.steps if line.latest), None)
        damaged = [line.damage for line in listing.steps if line.status == "damaged"]
        scene.promises.listed(latest, damaged, at_start)
