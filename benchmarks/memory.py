"""How much memory a save and a load take on top of the state.

One contestant a process. The kernel's high-water mark of resident memory is reset when the state
is there (and a tiny step has been saved and loaded, so that the code is in memory), and read
afterwards. Steps are deleted by the parent; no page cache is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from contestants import Contestant, Dcp, Keepstep, TorchCheckpointing, TorchSave, make_state, size_of
from harness import GIB, MIB, Bar, Context, Result, result, run_question

CONTESTANTS: dict[str, Callable[[Context], Contestant]] = {
    "keepstep": Keepstep,
    "DCP": Dcp,
    "torch_checkpointing": TorchCheckpointing,
    "torch.save": TorchSave,
}


def measure(who: str, context: Context) -> list[Result]:
    """Save and load one state and report the peaks."""
    if who == "keepstep" and context.peers_only:
        return []
    contestant = CONTESTANTS[who](context)
    tiny = make_state(context, tensors=2, rows=8, columns=128)
    path = context.directory / who / "step-00000001"
    contestant.save(path, tiny)
    contestant.load(path, tiny)
    state = make_state(context, tensors=8 if context.quick else 32)
    size = size_of(state)
    arena = _arena_bytes() if who == "keepstep" else 0
    path = context.directory / who / "step-00000002"
    found = []
    for kind, work, bar in (
        ("save", lambda: contestant.save(path, state), Bar("<=", arena / MIB + 64, "MiB")),
        ("load", lambda: contestant.load(path, state), Bar("<=", 256, "MiB")),
    ):
        base = reset_high_water()
        work()
        peak = status("VmHWM") - base
        found.append(
            result(
                f"memory beyond the state, {kind} {size / GIB:g} GiB: {who}",
                peak / MIB,
                "MiB",
                bar=bar if who == "keepstep" else None,
            )
        )
    return found


def _arena_bytes() -> int:
    """The memory through which a save of ours passes; 64 MiB more is allowed."""
    from keepstep.move.arena import ARENA_BYTES

    return ARENA_BYTES


def reset_high_water() -> int:
    """Start a new high-water mark; the resident bytes it starts from."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


if __name__ == "__main__":
    run_question({name: (1, functools.partial(measure, name)) for name in CONTESTANTS})
