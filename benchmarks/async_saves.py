"""What saves cost a training run that goes on while they are made, and how soon they are durable.

A GPT of about 30 M parameters is trained on the CPU (see training.py), on one rank and on two with FSDP2. In each
round every contestant begins as a new job does, and saves every few steps; loops without saves stand before and
after it, and what they take is subtracted.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from async_contestants import AsyncContestant, DcpAsync, KeepstepAsync, peers
from contestants import local_tensor
from harness import MIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question
from memory import reset_high_water, status
from rawio import RawLimit
from training import Step, Trainer, process_group

SAVES, OWN_SAVES = 3, 10  # in a loop among peers; in one of keepstep's own, where the tenth save is wanted
EVERY = {1: 5, 2: 2}  # steps from one save to the next, by ranks: about as long as the slowest peer's saves take
OWN_EVERY = {1: 2, 2: 1}
SETTLE = 2  # steps after `open` and before the loop, without a save: at the boundary between them all is made ready
SLACK_MIB = 32


@dataclass(frozen=True)
class Loop:
    """What one loop with saves showed; of several ranks the slowest."""

    wall_s: float
    blocked_s: list[float]
    """For each save: the training thread stood still, at boundaries and before updates, until the next save."""
    durable_s: list[float]
    """For each save: from the call to the moment it was durable on all ranks."""
    writing: list[float]
    """Seconds of the steps during which a save was being written."""
    stalls: list[float]
    """What keepstep's own records say about the time for which training stood still."""


# --------------------------------------------------------------------------- among the peers


def among_peers(context: Context) -> list[Result]:
    """All contestants in turn, with loops without saves in between."""
    with process_group(context):
        trainer = Trainer(context)
        others = peers(context)
        ours = [] if context.peers_only else [KeepstepAsync(context)]
        everyone: list[AsyncContestant] = [*ours, *others]
        seen: dict[str, list[Loop]] = {each.name: [] for each in everyone}
        added: dict[str, list[float]] = {each.name: [] for each in everyone}
        inflation: dict[str, list[float]] = {each.name: [] for each in everyone}
        base_steps: list[float] = []
        every = EVERY[context.world]
        half = -(-SAVES * every // 2)
        for turn in range(context.rounds):
            before = _plain_loop(trainer, half)
            for each in everyone:
                loop = _loop_with(trainer, each, saves=SAVES, every=every)
                after = _plain_loop(trainer, half)
                seen[each.name].append(loop)
                added[each.name].append(loop.wall_s / SAVES - every * statistics.mean(before + after))
                usual = statistics.median(before + after)
                if loop.writing:
                    inflation[each.name].append(statistics.median(loop.writing) / usual - 1)
                context.note(
                    f"    {each.name}: {SAVES * every} steps in {loop.wall_s:.2f} s, usually {usual:.3f} s each"
                )
                base_steps += after
                before = after
            told = "  ".join(f"{name} +{added[name][-1]:.3f}s" for name in added)
            context.note(f"  round {turn + 1}: added per save: {told}")
        what = f"train on {context.world} rank" + ("s" if context.world > 1 else "")
        size = sum(context.gather(trainer.state_bytes))  # type: ignore[arg-type]
        return [
            result(f"{what}, {size / MIB:.0f} MiB of state: a step without saves", statistics.median(base_steps), "s"),
            *_added_rows(context, what, added, others),
            *_durable_rows(what, seen, others),
            *_blocked_rows(what, seen),
            *_inflation_rows(what, inflation, others),
        ]


def _added_rows(
    context: Context, what: str, added: dict[str, list[float]], others: Sequence[AsyncContestant]
) -> list[Result]:
    best = min((each.name for each in others), key=lambda name: statistics.median(added[name]))
    bar = Bar("<=", 0.2) if context.world == 1 else Bar("<=", 0.333)
    return [
        result(
            f"{what}: wall time added per save: {name}",
            statistics.median(own),
            "s",
            against=f"best peer ({best})",
            ratio=median_ratio(own, added[best]),
            bar=bar if name == "keepstep" else None,
        )
        for name, own in added.items()
    ]


def _durable_rows(what: str, seen: dict[str, list[Loop]], others: Sequence[AsyncContestant]) -> list[Result]:
    medians = {name: [statistics.median(loop.durable_s) for loop in loops] for name, loops in seen.items()}
    best = min((each.name for each in others if each.background), key=lambda name: statistics.median(medians[name]))
    return [
        result(
            f"{what}: time to durable: {name}",
            statistics.median(own),
            "s",
            against=f"best asynchronous peer ({best})",
            ratio=median_ratio(own, medians[best]),
            bar=Bar("<=", 0.333) if name == "keepstep" else None,
        )
        for name, own in medians.items()
    ]


def _blocked_rows(what: str, seen: dict[str, list[Loop]]) -> list[Result]:
    rows = []
    for name, loops in seen.items():
        later = [statistics.median(loop.blocked_s[1:]) for loop in loops]
        first = [loop.blocked_s[0] for loop in loops]
        rows.append(result(f"{what}: training thread blocked, later saves: {name}", statistics.median(later), "s"))
        rows.append(
            result(
                f"{what}: training thread blocked, first save: {name}",
                statistics.median(first),
                "s",
                against="later saves",
                ratio=median_ratio(first, later),
            )
        )
    return rows


def _inflation_rows(what: str, inflation: dict[str, list[float]], others: Sequence[AsyncContestant]) -> list[Result]:
    synchronous = {each.name for each in others if not each.background}
    return [
        result(
            f"{what}: steps longer while it writes: {name}",
            100 * statistics.median(own),
            "%",
            bar=Bar("<=", 5, "%") if name == "keepstep" else None,
        )
        for name, own in inflation.items()
        if own and name not in synchronous
    ]


# ------------------------------------------------------------------------------- keepstep alone


def alone(context: Context) -> list[Result]:
    """What has limits of its own: a copy in memory, the storage, the first save against the tenth, the agent."""
    with process_group(context):
        trainer = Trainer(context)
        what = f"train on {context.world} rank" + ("s" if context.world > 1 else "")
        copy = WarmCopy(trainer)
        rows = []
        if context.peers_only:
            copies = [copy.seconds(context) for _ in range(context.rounds)]
            rows.append(result(f"{what}: warm copy of the state in memory", statistics.median(copies), "s"))
        else:
            rows += _agent_rows(context, what)
            rows += _staging_rows(context, what, trainer, copy)
        rows += _idle_rows(context, what, trainer)
        return rows


class WarmCopy:
    """The state copied into memory that is already there, by all cores that the rank has or by one."""

    def __init__(self, trainer: Trainer) -> None:
        """Allocate and touch the memory."""
        self.source = [local_tensor(tensor).detach() for tensor in trainer.tensors().values()]
        self.target = [torch.zeros_like(tensor) for tensor in self.source]

    def seconds(self, context: Context, threads: int | None = None) -> float:
        """The time of one copy of the whole state; the slowest rank's."""
        usual = torch.get_num_threads()
        torch.set_num_threads(threads or usual)
        self.copy()
        context.barrier()
        began = time.perf_counter()
        self.copy()
        torch.set_num_threads(usual)
        return max(context.gather(time.perf_counter() - began))  # type: ignore[type-var]

    def copy(self) -> None:
        """Copy everything."""
        for source, target in zip(self.source, self.target, strict=True):
            target.copy_(source)


def _staging_rows(context: Context, what: str, trainer: Trainer, copy: WarmCopy) -> list[Result]:
    """Blocked time of both ways of staging, and the first save against the tenth."""
    modes = {mode: KeepstepAsync(context, staging=mode, name=f"keepstep {mode}") for mode in ("block", "overlap")}
    copies: list[float] = []
    single: list[float] = []
    steps: list[float] = []
    loops: dict[str, list[Loop]] = {mode: [] for mode in modes}
    for _ in range(max(2, context.rounds - 1)):  # each has twenty saves
        copies.append(copy.seconds(context))
        single.append(copy.seconds(context, threads=1))
        for mode, each in modes.items():
            loops[mode].append(_loop_with(trainer, each, saves=OWN_SAVES, every=OWN_EVERY[context.world]))
        steps.append(statistics.median(_plain_loop(trainer, EVERY[context.world])))
        context.note(
            f"  copy {copies[-1]:.4f}s  "
            + "  ".join(f"{mode} {statistics.median(own[-1].blocked_s):.4f}s" for mode, own in loops.items())
        )
    blocked = {mode: [statistics.median(loop.blocked_s) for loop in own] for mode, own in loops.items()}
    block, overlap = blocked["block"], blocked["overlap"]
    rows = [
        result(f"{what}: warm copy of the state in memory", statistics.median(copies), "s"),
        result(f"{what}: warm copy of the state in memory, one thread", statistics.median(single), "s"),
        _ratio_row(f"{what}: training thread blocked: keepstep, block", block, single, "warm copy, one thread"),
        _ratio_row(f"{what}: training thread blocked: keepstep, block", block, copies, "warm copy", Bar("<=", 1.3)),
        _ratio_row(f"{what}: training thread blocked: keepstep, overlap", overlap, block, "block", Bar("<=", 0.1)),
        _ratio_row(f"{what}: training thread blocked: keepstep, overlap", overlap, steps, "a step", Bar("<=", 0.02)),
    ]
    for mode, own in loops.items():
        recorded = [statistics.median(loop.stalls) for loop in own]
        name = f"{what}: training thread blocked: keepstep, {mode}, by its records"
        rows.append(_ratio_row(name, recorded, blocked[mode], "seen from outside"))
    for mode, own in loops.items():
        for kind in ("blocked_s", "durable_s"):
            first, tenth = ([getattr(loop, kind)[index] for loop in own] for index in (0, -1))
            name = f"{what}: first save, {kind.removesuffix('_s')}: keepstep, {mode}"
            rows.append(_ratio_row(name, first, tenth, "tenth save", Bar("<=", 1.2)))
    return rows


def _idle_rows(context: Context, what: str, trainer: Trainer) -> list[Result]:
    """Time to durable while nobody trains, against the raw limit."""
    raw = RawLimit(context, trainer.state_bytes)
    raw.calibrate_write(context.directory, rounds=1)
    root = context.directory / "idle"
    entries = [_raw_entry(context, raw)]
    ours = None if context.peers_only else KeepstepAsync(context)
    if ours:
        ours.open(trainer, root)
        entries.append(Entry(ours.name, lambda: (ours.boundary(True), ours.finish()), after=_flush(context)))
    seconds = play(context, entries)
    if ours:
        ours.close()
        # Not before everybody has read what is in it.
    context.barrier()
    context.alone(lambda: remove(root))
    limit = seconds[raw.name]
    size = sum(context.gather(trainer.state_bytes)) / MIB  # type: ignore[arg-type]
    name = f"{what}, idle: {raw.name}, {size:.0f} MiB ({raw.writing})"
    rows = [result(name, statistics.median(limit), "s")]
    if ours:
        name = f"{what}, idle: time to durable: keepstep"
        rows.append(_ratio_row(name, seconds[ours.name], limit, raw.name, Bar("<=", 1.5)))
    return rows


def _raw_entry(context: Context, raw: RawLimit) -> Entry:
    path = context.directory / "raw"
    return Entry(raw.name, lambda: raw.save(path), after=lambda: context.alone(lambda: remove(path)))


def _agent_rows(context: Context, what: str) -> list[Result]:
    """From no agent at all to the first job in its hands: everything a Checkpointer does at its start is counted."""
    import keepstep as ks

    layer = torch.nn.Linear(8, 8)
    seconds = []
    for turn in range(context.rounds):
        each = KeepstepAsync(context)
        each.root = context.directory / f"agent-{turn}"
        context.barrier()
        began = time.perf_counter()
        each.checkpointer = ks.Checkpointer(each.root, ks.TrainState(layer=layer))
        pending = each.checkpointer.save()
        pending.wait_staged(timeout_s=60)
        seconds.append(max(context.gather(time.perf_counter() - began)))  # type: ignore[type-var]
        pending.wait_committed(timeout_s=60)
        each.close()
        context.alone(lambda root=each.root: remove(root))
    name = f"{what}: agent start to first job accepted"
    return [result(name, statistics.median(seconds), "s", bar=Bar("<", 0.5, "s"))]


def _ratio_row(name: str, ours: list[float], theirs: list[float], against: str, bar: Bar | None = None) -> Result:
    return result(name, statistics.median(ours), "s", against=against, ratio=median_ratio(ours, theirs), bar=bar)


# --------------------------------------------------------------------------------------- memory


MEMORY: dict[str, Callable[[Context], AsyncContestant]] = {
    "keepstep": KeepstepAsync,
    "DCP-process": functools.partial(DcpAsync, process=True),
}


def memory(who: str, context: Context) -> list[Result]:
    """The peak of the trainer's resident memory with saves, less the peak without."""
    if who == "keepstep" and context.peers_only:
        return []
    with process_group(context):
        trainer = Trainer(context)
        each = MEMORY[who](context)
        reset_high_water()
        trainer.loop(EVERY[1])
        usual = status("VmHWM")
        reset_high_water()
        _loop_with(trainer, each, saves=2, every=EVERY[1])
        extra = (status("VmHWM") - usual) / MIB
        bar = Bar("<=", round(trainer.state_bytes / MIB + SLACK_MIB), "MiB") if who == "keepstep" else None
        return [result(f"trainer's memory beyond training, 1 rank: {each.name}", extra, "MiB", bar=bar)]


# ---------------------------------------------------------------------------------------- loops


def _plain_loop(trainer: Trainer, steps: int) -> list[float]:
    """Seconds of every step of a loop without saves, on the slowest rank."""
    trainer.context.barrier()
    own = [step.ended - step.began for step in trainer.loop(steps)]
    return [max(each) for each in zip(*trainer.context.gather(own), strict=True)]  # type: ignore[arg-type]


def _loop_with(trainer: Trainer, each: AsyncContestant, *, saves: int, every: int) -> Loop:
    """A job that saves `saves` times; waiting for the last one belongs to it."""
    context = trainer.context
    root = context.directory / each.name.replace(" ", "-")
    with trainer.fence_timed(lambda: each.open(trainer, root)):
        trainer.loop(SETTLE, each.boundary)
        context.barrier()
        steps = trainer.loop(saves * every, each.boundary, every)
        each.finish()
        ended = time.perf_counter()
        while len(each.durable) < saves:  # a future wakes who waits for it before it calls who asked to be told
            time.sleep(0.001)
        loop = _merge(context, each, steps, ended, every)
        each.close()
        if isinstance(each, KeepstepAsync):
            loop = replace(loop, stalls=[record["stall_s"] for record in each.records()])
    # Not before everybody has read what is in it.
    context.barrier()
    context.alone(lambda: remove(root))
    return loop


def _merge(context: Context, each: AsyncContestant, steps: list[Step], ended: float, every: int) -> Loop:
    """What the ranks saw, as one loop."""
    told = context.gather((steps, each.staged[-len(steps) // every :], each.durable, ended))
    all_steps, all_staged, all_durable, all_ended = zip(*told, strict=True)  # type: ignore[arg-type]
    saves = len(steps) // every
    blocked, durable, writing = [], [], []
    for save in range(saves):
        window = slice(save * every, (save + 1) * every)
        blocked.append(max(sum(step.blocked_s for step in own[window]) for own in all_steps))
        done = max(own[save] for own in all_durable)
        durable.append(done - min(own[save * every].began for own in all_steps))
        writing += _steps_within(all_steps[0], max(own[save] for own in all_staged), done)
    return Loop(max(all_ended) - min(own[0].began for own in all_steps), blocked, durable, writing, [])


def _steps_within(steps: list[Step], begin: float, end: float) -> list[float]:
    """Seconds of the steps that lie at least half in a span of time, or of the one that lies deepest in it."""
    inside = [(min(end, step.ended) - max(begin, step.began), step.ended - step.began) for step in steps]
    inside = [(overlap, length) for overlap, length in inside if overlap > 0]
    return [length for overlap, length in inside if overlap >= length / 2] or [max(inside)[1]] if inside else []


def _flush(context: Context) -> Callable[[], None]:
    return lambda: context.alone(os.sync)


if __name__ == "__main__":
    run_question(
        {
            "peers-1-rank": (1, among_peers),
            "peers-2-ranks": (2, among_peers),
            "alone-1-rank": (1, alone),
            "alone-2-ranks": (2, alone),
            **{f"memory-{who}": (1, functools.partial(memory, who)) for who in MEMORY},
        },
        rounds=3,
    )
