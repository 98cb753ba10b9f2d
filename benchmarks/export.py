"""How fast a sharded model leaves as safetensors, against the raw limit of the same storage, and in how much memory.

2 GiB in 64 tensors, saved by two ranks as DTensors split by rows; then exported by one process and by both ranks, as it is
and cast to bfloat16 (whose raw limit writes half as much). The step is in the page cache, as after a save. Memory is the
kernel's high-water mark of resident memory over a whole export.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from contestants import make_state
from harness import GIB, MIB, Bar, Context, Entry, Result, median_ratio, play, remove, result, run_question
from memory import reset_high_water, status
from rawio import RawLimit

SPEED = Bar(">=", 0.7)
MEMORY = Bar("<=", 512, "MiB")


def save(context: Context) -> list[Result]:
    """The step that the other stages export."""
    import keepstep as ks

    state = make_state(context, tensors=8 if context.quick else 64)
    ks.save(_step(context), state)
    return []


def export(context: Context) -> list[Result]:
    """Write raw and export in turn; the ratio is that of speeds."""
    from keepstep.interop.huggingface import export as export_step

    total = _bytes(_step(context))
    found: list[Result] = []
    ranks = f"{context.world} rank" + ("s" if context.world > 1 else "")
    raws = {
        "as it is": RawLimit(context, total // context.world),
        "bfloat16": RawLimit(context, total // 2 // context.world),
    }
    for raw in raws.values():
        raw.calibrate_write(context.directory)
    entries = []
    for name, raw in raws.items():
        there, out = context.directory / f"raw {name}", context.directory / f"out {name}"
        clear = partial(context.alone, partial(remove, there))
        entries.append(Entry(f"raw {name}", partial(raw.save, there), before=clear, after=clear))
        clear = partial(context.alone, partial(remove, out))
        work = partial(export_step, _step(context), out, dtype=None if name == "as it is" else name)
        entries.append(Entry(name, work, before=clear, after=clear))
    seconds = play(context, entries)
    for name in raws:
        took, limit = seconds[name], seconds[f"raw {name}"]
        what = f"export {total / GIB:g} GiB, {ranks}, {name}"
        bar = SPEED if name == "as it is" else None
        ratio = median_ratio(limit, took)
        found.append(result(what, statistics.median(took), "s", against="raw limit (speed)", ratio=ratio, bar=bar))
    return found


def memory(name: str, context: Context) -> list[Result]:
    """The peak of one export, after a tiny one that has brought the code into memory."""
    import torch

    import keepstep as ks
    from keepstep.interop.huggingface import export as export_step

    dtype = None if name == "as it is" else name
    ks.save(context.directory / f"tiny {name}", {"model": {"w": torch.ones(10)}})
    export_step(context.directory / f"tiny {name}", context.directory / f"tiny out {name}", dtype=dtype)
    base = reset_high_water()
    out = context.directory / f"peak {name}"
    export_step(_step(context), out, dtype=dtype)
    peak = status("VmHWM") - base
    remove(out)
    what = f"memory of an export, {_bytes(_step(context)) / GIB:g} GiB, {name}"
    return [result(what, peak / MIB, "MiB", bar=MEMORY)]


def _step(context: Context) -> Path:
    return context.directory / "step"


def _bytes(step: Path) -> int:
    import keepstep as ks

    with ks.open(step) as opened:
        return sum(part["bytes"] for part in opened.describe()["components"].values())


if __name__ == "__main__":
    run_question(
        {
            "save": (2, save),
            "one process": (1, export),
            "both ranks": (2, export),
            "memory": (1, partial(memory, "as it is")),
            "memory, cast": (1, partial(memory, "bfloat16")),
        }
    )
