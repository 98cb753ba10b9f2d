"""Histories by seed: what happens in one, how it is run, and the shortest one found that breaks the same promise.

``python -m tests.simulation.search 1234`` tells the history of a seed, made as short as possible when a promise is broken;
``python -m tests.simulation.search 0 10000`` tries a range and prints the seeds that break one.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from keepstep.checkpointer import restoring
from keepstep.checkpointer.decisions import Choice
from keepstep.checkpointer.pending import SAVES
from tests.simulation.actors import KEEP_LAST, FileWriter, Job, Scene, load_now, look, start_job
from tests.simulation.places import Network, SharedStorage, on_stage
from tests.simulation.promises import Promises
from tests.simulation.world import Fault, Process, Violation, World

JOB_LIMIT_S = 90.0


@dataclass(frozen=True)
class Plan:
    """A history to be: starts of the job one after another, faults, how wild the network is, who looks on.

    ``noise`` decides the rest.
    """

    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...] = ()
    wild: bool = False
    readers: int = 0
    noise: int = 0

    @property
    def size(self) -> tuple[int, ...]:
        """How much there is in it: the smaller the better to read."""
        return (
            len(self.faults),
            len(self.jobs),
            sum(job.world + job.saves for job in self.jobs),
            sum(job.mode != "off" for job in self.jobs) + self.wild + self.readers,
        )


@dataclass(frozen=True)
class End:
    """What became of a history."""

    violation: Violation | None
    history: tuple[tuple[float, str, str, str], ...]
    counts: Counter[str]


def plan_of(seed: int) -> Plan:
    """The history of a seed."""
    rng = random.Random(seed)
    jobs = tuple(_job(rng) for _ in range(rng.choice((1, 2, 2, 3))))
    faults = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        number = rng.randrange(len(jobs))
        job = jobs[number]
        coordinator = rng.random() < 0.6
        rank = 0 if coordinator else rng.randrange(job.world)
        who = f"job{number + 1}.rank{rank}"
        if job.mode == "agent" and rng.random() < 0.6:
            who = f"agent.node{0 if coordinator else rng.randrange(job.nodes)}.0"
        faults.append(_fault(rng, who))
    return Plan(jobs, tuple(faults), rng.random() < 0.3, int(rng.random() < 0.3), seed)


def _job(rng: random.Random) -> Job:
    world = rng.choice((1, 2, 2, 3))
    return Job(
        world=world,
        nodes=rng.randint(1, min(world, 2)),
        saves=rng.choice((1, 2, 2, 3)),
        mode=rng.choice(("off", "thread", "agent", "agent")),
        arenas=rng.choice((1, 1, 2)),
        rollback=rng.random() < 0.25,
        back=rng.random() < 0.15,
        abandoned=rng.random() < 0.2,
        again=rng.random() < 0.35,
        staging_fails=rng.choice((-1, -1, 1, 2)),
    )


def _fault(rng: random.Random, who: str) -> Fault:
    kind = rng.choice(("crash", "crash", "power", "freeze", "freeze", "stall", "slow", "slow", "fail"))
    at = rng.randint(1, 60) if rng.random() < 0.7 else rng.randint(60, 160)
    seconds = rng.uniform(0.2, 1.5) if rng.random() < 0.4 else rng.uniform(1.5, 12.0)
    hows = ("never", "now", "later") if kind in ("crash", "power") else ("before", "after")
    if rng.random() < 0.4:
        # Where it matters most: around the manifest, or the files of a rank.
        return Fault(
            kind, who, rng.randint(1, 40), rng.choice(hows), seconds, rng.choice((".metadata", ".safetensors"))
        )
    return Fault(kind, who, at, rng.choice(hows), seconds)


# --- running one --------------------------------------------------------------------------------------------------------


def run(plan: Plan) -> End:
    """Lets it happen."""
    world = World(plan.noise, plan.faults)
    storage = SharedStorage(world)
    promises = Promises(world, storage, KEEP_LAST)
    network = Network(world, wild=plan.wild)
    scene = Scene(world, network, storage, promises)
    violation = None
    counts: Counter[str] = Counter()
    choose = restoring.choose_step

    def chosen(*args: Any) -> Choice:
        choice = choose(*args)
        as_asked = args[1] is None and not choice.skipped
        promises.chosen(choice.incarnation or world.me().process.start, choice.step if as_asked else None)
        return choice

    collecting = gc.isenabled()
    gc.disable()
    try:
        with on_stage(world, network, writer=FileWriter, load_step=load_now, choose_step=chosen):
            try:
                _launch(scene, plan)
            except Violation as broken:
                violation = broken
            finally:
                world.close()
    finally:
        SAVES.clear()
        if collecting:
            gc.enable()
    counts["commits"], counts["checks"], counts["events"] = promises.commits, promises.checks, len(world.history)
    return End(violation, tuple(world.history), counts)


def _launch(scene: Scene, plan: Plan) -> None:
    """As a launcher does: starts the job, again when it fails or is lost from sight, then once more without faults."""
    world, taken = scene.world, Counter[str]()
    for number in range(plan.readers):
        process = world.process(f"reader{number}", "elsewhere")
        world.spawn(process, "ls", lambda process=process: look(scene, process))
    for job in plan.jobs:
        # A node that sleeps is not used again, nor one of a job that may live on.
        free = [f"node{n}" for n in range(12) if not taken[f"node{n}"] and not _asleep(world, f"node{n}")]
        nodes = free[: job.nodes]
        processes = start_job(scene, job, nodes, wanted=_older(scene) if job.rollback else None)
        world.note("starts", f"{job.world} ranks on {', '.join(nodes)}, {job.mode}", "launcher")
        if job.abandoned:
            taken.update(nodes)
            world.run(lambda: False, world.rng.uniform(0.1, 3.0))
            world.note("has lost sight of the job", "", "launcher")
            continue
        _watch(scene, processes)
    world.heal()
    world.note("no more faults", "", "launcher")
    _come_to_rest(scene)
    _last_start(scene, world.rng.choice(("off", "thread", "agent")))


def _watch(scene: Scene, processes: list[Process]) -> None:
    """Until all trainers have ended; when one dies or sleeps, the others are ended after a while."""
    world = scene.world

    def over() -> bool:
        return all(_ended(process) for process in processes) or any(
            not process.alive or process.frozen_until > world.now for process in processes
        )

    if not world.run(over, JOB_LIMIT_S):
        world.violate("hang", f"the job did not end within {JOB_LIMIT_S:g} s")
    if not all(_ended(process) for process in processes):
        world.run(lambda: all(_ended(p) for p in processes), world.rng.uniform(0.1, 4.0))
        for process in processes:
            if process.alive and process.frozen_until <= world.now and not _ended(process):
                world.note("is ended by the launcher", "", process.name)
                world.kill(process)
        world.reap()


def _come_to_rest(scene: Scene) -> None:
    """Whoever was asleep or out of sight comes to its end."""
    world = scene.world
    trainers = [process for name, process in world.processes.items() if name.startswith("job")]
    world.run(lambda: all(_ended(process) for process in trainers), JOB_LIMIT_S)
    for process in trainers:
        if process.alive and not _ended(process):
            world.violate("hang", f"{process.name} did not come to an end")
    # Calls of the dead that are still on their way, and agents with something in hand.
    world.run(lambda: False, 3.0)
    if not world.run(lambda: scene.storage.under_way == 0, JOB_LIMIT_S):
        world.violate("hang", "storage calls without end")
    world.run(lambda: False, 3.0)


def _last_start(scene: Scene, mode: str) -> None:
    world, promises = scene.world, scene.promises
    before = promises.newest
    job = Job(world=2, nodes=1, saves=2, mode=mode)
    world.note("starts", f"the last time, undisturbed, {mode}", "launcher")
    processes = start_job(scene, job, ["last"], wanted=None)
    if not world.run(lambda: all(_ended(process) for process in processes), JOB_LIMIT_S):
        world.violate("hang", "the last, undisturbed start did not end")
    world.run(lambda: False, 3.0)
    if promises.newest <= before or promises.newest[0] != max(promises.starts()):
        world.violate("progress", f"the last, undisturbed start committed nothing: still {promises.newest}")
    promises.check()
    promises.check_tidy()


def _older(scene: Scene) -> int | None:
    """The step before the newest, for a job that wants to go back."""
    names = sorted(name.partition("/")[0] for name in scene.storage.blobs if name.endswith("/.metadata"))
    return int(names[-2].removeprefix("step-")) if len(names) > 1 else None


def _ended(process: Process) -> bool:
    return not process.alive or process.actors[0].ended


def _asleep(world: World, node: str) -> bool:
    return any(process.frozen_until > world.now for process in world.node_of(node))


# --- making it smaller ----------------------------------------------------------------------------------------------------


def shrink(plan: Plan, kind: str, tries: int = 600) -> Plan:
    """A smaller plan that breaks the same promise: fewer faults, starts, ranks, saves, then the quietest noise."""
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(plan):
            for noise in (candidate.noise, *range(4)):
                left -= 1
                tried = replace(candidate, noise=noise)
                if _breaks(tried, kind):
                    plan, smaller = tried, True
                    break
            if smaller or left <= 0:
                break
    best, length = plan, len(run(plan).history)
    for noise in range(40):
        tried = replace(plan, noise=noise)
        end = run(tried)
        if end.violation is not None and end.violation.kind == kind and len(end.history) < length:
            best, length = tried, len(end.history)
    return best


def _breaks(plan: Plan, kind: str) -> bool:
    violation = run(plan).violation
    return violation is not None and violation.kind == kind


def _smaller(plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
    for at in range(len(plan.jobs) - 1, -1, -1):
        if len(plan.jobs) > 1:
            yield replace(plan, jobs=plan.jobs[:at] + plan.jobs[at + 1 :])
    if plan.wild or plan.readers:
        yield replace(plan, wild=False, readers=0)
    for at, job in enumerate(plan.jobs):
        for one in _simpler(job):
            yield replace(plan, jobs=(*plan.jobs[:at], one, *plan.jobs[at + 1 :]))


def _simpler(job: Job) -> Iterator[Job]:
    if job.world > 1:
        yield replace(job, world=job.world - 1, nodes=1)
    if job.saves > 1:
        yield replace(job, saves=job.saves - 1)
    if job.mode != "off":
        yield replace(job, mode="thread" if job.mode == "agent" else "off")
    plain = replace(job, arenas=1, rollback=False, back=False, abandoned=False, again=False, staging_fails=-1)
    for name in ("arenas", "rollback", "back", "abandoned", "again", "staging_fails"):
        if getattr(job, name) != getattr(plain, name):
            yield replace(job, **{name: getattr(plain, name)})


def story(plan: Plan, end: End) -> str:
    """A history for people: what was planned, then line by line what happened."""
    lines = [
        f"broken promise: {end.violation}",
        "",
        *(f"  {job}" for job in plan.jobs),
        *(f"  {one}" for one in plan.faults),
    ]
    lines.append(f"  noise {plan.noise}, wild={plan.wild}, readers={plan.readers}")
    lines.extend(f"{at:9.3f} s  {who:16} {what} {about}".rstrip() for at, who, what, about in end.history)
    return "\n".join(lines)


def broken(first: int, last: int) -> dict[int, str]:
    """The seeds from first up to, not including, last that break a promise, and which."""
    ends = ((seed, run(plan_of(seed)).violation) for seed in range(first, last))
    return {seed: violation.kind for seed, violation in ends if violation is not None}


def told(seed: int) -> str:
    """What happens with a seed; when a promise is broken, the shortest history found that breaks it."""
    plan = plan_of(seed)
    end = run(plan)
    if end.violation is not None:
        plan = shrink(plan, end.violation.kind)
        end = run(plan)
    return story(plan, end)


if __name__ == "__main__":
    seeds = [int(text) for text in sys.argv[1:]]
    if len(seeds) == 1:
        print(told(seeds[0]))
    else:
        found = broken(*seeds)
        print(" ".join(map(str, found)))
