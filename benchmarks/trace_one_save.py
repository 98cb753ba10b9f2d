"""Draw one asynchronous save: who did what when, in which process.

    python benchmarks/trace_one_save.py [--quick] [--dir DIRECTORY] [--out PICTURE.svg]

A short training run saves a few times. The steps were timed by the loop itself; what happened in the copy thread, in
the agent and at the coordinator is read from the save's record in the run's saves.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
LANES = {
    "trainer": "trainer: training thread",
    "copy": "trainer: copy thread",
    "writer": "agent: writers",
    "coordinator": "agent: coordinator",
}
COLOURS = {
    "forward, backward": "#b8c4d6",
    "update": "#8fa3bf",
    "save()": "#c0392b",
    "fence": "#e67e22",
    "copy": "#27ae60",
    "write": "#2980b9",
    "receipts": "#8e44ad",
    "commit": "#6c3483",
}
LEFT, WIDTH, ROW, TOP = 190, 900, 44, 64


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds since the save was asked for."""

    lane: str
    what: str
    begin_s: float
    end_s: float


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
    parts += _legend([what for what in COLOURS if any(span.what == what for span in spans)], bottom + 52)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, x, y: float) -> str:
    wide = max(1.5, x(span.end_s) - x(span.begin_s))
    tip = f"{span.what}: {1000 * (span.end_s - span.begin_s):.2f} ms"
    return (
        f'<rect x="{x(span.begin_s):.1f}" y="{y + 8}" width="{wide:.1f}" height="{ROW - 16}" '
        f'fill="{COLOURS[span.what]}"><title>{escape(tip)}</title></rect>'
    )


def _axis(begin: float, end: float, x, bottom: float) -> list[str]:
    """A line every 50 or 100 or ... ms, counted from the call of the save."""
    every = next(each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60) if (end - begin) / each <= 14)
    parts = []
    for index in range(int(begin / every), int(end / every) + 1):
        at = x(index * every)
        colour = "#888" if index == 0 else "#eee"
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{1000 * index * every:.0f}</text>')
    parts.append(f'<text x="12" y="{bottom + 18}">ms since the save was asked for</text>')
    return parts


def _legend(kinds: Sequence[str], y: float) -> list[str]:
    parts, x = [], 12
    for kind in kinds:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(kind)}</text>')
        x += 40 + 7 * len(kind)
    return parts
