"""Draw one asynchronous save: who did what when, in which process.

    python benchmarks/trace_one_save.py [--quick] [--dir DIRECTORY] [--out PICTURE.svg]

A short training run on one rank saves a few times. The steps are timed by the loop itself, from outside; what the
training thread did for the save, the copy thread, the agent and the coordinator is read from the save's record in the
run's saves.jsonl. Both count from the boundary at which the save was asked for.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training import Step

PICTURE = Path(__file__).resolve().parent / "results" / "one_save.svg"
SAVES, EVERY, DRAWN = 5, 4, 3  # saves of the run, steps from one to the next, and which of them is drawn
LANES = {
    "loop": "training thread, seen by the loop",
    "training": "training thread, by the record",
    "copy": "copy thread, trainer",
    "agent": "agent process: writing",
    "coordinator": "agent process: coordinator",
}
COLOURS = {
    "forward, backward": "#c3cedd",
    "update": "#93a7c3",
    "at the boundary": "#c0392b",
    "fence": "#e67e22",
    "wait": "#7f8c8d",
    "capture": "#d35454",
    "plan": "#f1c40f",
    "copy": "#27ae60",
    "stage": "#1e8449",
    "write": "#2980b9",
    "receipts": "#a569bd",
    "commit": "#6c3483",
}
OTHER = "#555555"
SHORT_S = 20e-6  # what takes less is not drawn
LEFT, WIDTH, ROW, TOP = 230, 900, 40, 56


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds since the boundary at which the save was asked for."""

    lane: str
    what: str
    begin_s: float
    end_s: float


def spans_of(record: dict[str, Any], steps: Sequence[Step], boundary_s: float) -> list[Span]:
    """What a record and the loop's own steps tell, until a step after the save became durable."""
    spans = [Span(*span) for span in record["spans"]]
    end = max(span.end_s for span in spans)
    for step in steps:
        moments = [at - boundary_s for at in (step.began, step.trained, step.fenced, step.freed, step.ended)]
        if moments[-1] < -0.9 * (step.ended - step.began) or moments[0] > end:
            continue
        kinds = ("at the boundary", "forward, backward", "fence", "update")
        spans += [
            Span("loop", kind, begin, end) for kind, begin, end in zip(kinds, moments[:-1], moments[1:], strict=True)
        ]
    return [span for span in spans if span.end_s - span.begin_s > SHORT_S]


def draw(spans: Sequence[Span], title: str) -> str:
    """The picture as SVG: a lane for each thread, time to the right."""
    begin = min(span.begin_s for span in spans)
    end = max(span.end_s for span in spans)
    scale = WIDTH / (end - begin)
    bottom = TOP + ROW * len(LANES)
    height = bottom + 72

    def x(seconds: float) -> float:
        return LEFT + (seconds - begin) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="26" font-size="15">{escape(title)}</text>',
    ]
    parts += _axis(begin, end, x, bottom)
    for row, (lane, label) in enumerate(LANES.items()):
        y = TOP + row * ROW
        parts.append(f'<text x="12" y="{y + ROW / 2 + 4}">{escape(label)}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y + ROW}" y2="{y + ROW}" stroke="#ddd"/>')
        parts += [_box(span, x, y) for span in spans if span.lane == lane]
    kinds = {span.what for span in spans}
    parts += _legend([*(what for what in COLOURS if what in kinds), *sorted(kinds - COLOURS.keys())], bottom + 52)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, x: Callable[[float], float], y: float) -> str:
    wide = max(1.5, x(span.end_s) - x(span.begin_s))
    tip = f"{span.what}: {1000 * (span.end_s - span.begin_s):.2f} ms"
    return (
        f'<rect x="{x(span.begin_s):.1f}" y="{y + 8}" width="{wide:.1f}" height="{ROW - 16}" '
        f'fill="{COLOURS.get(span.what, OTHER)}"><title>{escape(tip)}</title></rect>'
    )


def _axis(begin: float, end: float, x: Callable[[float], float], bottom: float) -> list[str]:
    """A line every 50 or 100 or ... ms, counted from the boundary."""
    every = next(each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60) if (end - begin) / each <= 14)
    parts = []
    for index in range(math.ceil(begin / every), math.floor(end / every) + 1):
        at = x(index * every)
        colour = "#888" if index == 0 else "#eee"
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{1000 * index * every:.0f}</text>')
    parts.append(f'<text x="12" y="{bottom + 18}">ms since the boundary</text>')
    return parts


def _legend(kinds: Sequence[str], y: float) -> list[str]:
    parts, x = [], 12
    for kind in kinds:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS.get(kind, OTHER)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(kind)}</text>')
        x += 40 + 7 * len(kind)
    return parts


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--dir", type=Path, default=PICTURE.parents[2], help="where the run is kept meanwhile")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    args = parser.parse_args()

    from async_contestants import KeepstepAsync
    from harness import MIB, Context
    from training import Trainer

    with tempfile.TemporaryDirectory(prefix=".bench-", dir=args.dir) as directory:
        context = Context(Path(directory), args.quick, 1)
        trainer = Trainer(context)
        keepstep = KeepstepAsync(context)
        with trainer.fence_timed(lambda: keepstep.open(trainer, context.directory / "run")):
            trainer.loop(2, keepstep.boundary)
            steps = trainer.loop(SAVES * EVERY, keepstep.boundary, EVERY)
            keepstep.finish()
            keepstep.close()
        record = keepstep.records()[DRAWN]
    spans = spans_of(record, steps, steps[DRAWN * EVERY].began)
    blocked_s = sum(step.blocked_s for step in steps[DRAWN * EVERY : (DRAWN + 1) * EVERY])
    title = (
        f"One save of {record['bytes'] / MIB:.0f} MiB while training goes on: "
        f"training stood still for {1000 * blocked_s:.1f} ms, durable after {1000 * record['durable_s']:.0f} ms"
    )
    args.out.write_text(draw(spans, title))
    print(f"{title}\nwrote {args.out}")


if __name__ == "__main__":
    main()
