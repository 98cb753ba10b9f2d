"""Facts as a person reads them: sizes, ages, layouts; and text from files made safe for a terminal."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

import msgspec

from keepstep.foreign.kinds import TORCH_NOTES
from keepstep.format.box import whole
from keepstep.format.globs import near
from keepstep.format.layout import Layout, Mesh, parts

__all__ = [
    "PIPED_COLUMNS",
    "age_s",
    "age_words",
    "config_words",
    "layout_words",
    "metric_words",
    "near_pattern",
    "number_words",
    "piece_count",
    "plural",
    "safe",
    "share_words",
    "size_words",
    "time_words",
]

PIPED_COLUMNS = 10_000
"""How wide a table may be where it is piped: then nothing is folded."""
SHOWN_CONFIG = 40
MAX_DEPTH = 32
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def safe(text: str) -> str:
    """The text without anything that could move the cursor or change colours: keys and names come from files."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def size_words(size_bytes: int) -> str:
    """``1.25 GiB``; whole bytes below a KiB."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    amount = float(size_bytes)
    for unit in _UNITS:
        amount /= 1024
        if amount < 999.5 or unit == _UNITS[-1]:
            return f"{amount:.3g} {unit}"
    raise AssertionError  # the last unit returns


def share_words(share: float) -> str:
    """``12.5 %``; a part that is smaller than one can see is ``0 %`` only when it is nothing."""
    return f"{100 * share:.1f} %" if share >= 0.0005 else "<0.1 %" if share else "0 %"


def age_s(created: str, now: dt.datetime | None = None) -> float | None:
    """Seconds since ``created`` (ISO 8601), or None when that cannot be told."""
    try:
        then = dt.datetime.fromisoformat(created)
        return ((now or dt.datetime.now(dt.UTC)) - then).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


def age_words(seconds: float | None) -> str:
    """``42 s``, ``3 min``, ``5 h``, ``12 d``; 0 for what a clock elsewhere puts into the future."""
    if seconds is None:
        return "?"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / length))} {unit}"
    return f"{int(seconds / 86_400)} d"


def time_words(seconds: float) -> str:
    """``0.83 ms``, ``24.1 ms``, ``1.25 s``, ``107 s``: three digits."""
    amount, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    return f"{amount:.{2 if amount < 9.995 else 1 if amount < 99.95 else 0}f} {unit}"


def metric_words(metrics: Mapping[str, float | None]) -> str:
    """``loss=1.25 accuracy=0.5``; what was not a finite number is ``nan``."""
    return " ".join(f"{safe(name)}={'nan' if value is None else f'{value:.4g}'}" for name, value in metrics.items())


def config_words(config: bytes | msgspec.Raw) -> str:
    """``lr=0.1 model.depth=12``: a configuration's entries by their path; empty where there is none."""
    value = msgspec.json.decode(config)
    if isinstance(value, dict) and value.pop(TORCH_NOTES, None) is not None:
        value = value or None
    entries = list(_entries(value, ""))
    more = f" and {len(entries) - SHOWN_CONFIG} more (--json lists all)" if len(entries) > SHOWN_CONFIG else ""
    return " ".join(entries[:SHOWN_CONFIG]) + more


def _entries(value: object, path: str, depth: int = 0) -> Iterator[str]:
    if isinstance(value, dict) and value and depth < MAX_DEPTH:
        for key, item in value.items():
            yield from _entries(item, f"{path}.{key}" if path else key, depth + 1)
    elif value is not None or path:
        text = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
        yield f"{path}={text}" if path else text


def plural(count: int, thing: str) -> str:
    """``1 file``, ``1,200 files``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def near_pattern(pattern: str, keys: Sequence[str]) -> str:
    """Words about what looks most like a pattern: whole keys, or what they begin with, up to where it has a wildcard."""
    head, tail = re.fullmatch(r"([^*?\[]*)(.*)", pattern, re.DOTALL).groups()  # type: ignore[union-attr]
    heads = dict.fromkeys(key[: found.end()] for key in keys for found in re.finditer(r"[/.]", key))
    if not tail or not head:
        return near(pattern, [*(each[:-1] for each in heads), *keys])
    wanted = head if head[-1] in "/." else f"{head}/"
    close = get_close_matches(wanted, list(heads), n=1, cutoff=0.6)
    found = "" if not close else close[0] if wanted == head else close[0][:-1]
    return f"; did you mean {found + tail!r}?" if close else near(pattern, keys)


def number_words(numbers: Iterable[int]) -> str:
    """``0, 3, 7–12``: rising numbers, rows of them by their ends."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][1] + 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in rows)


def layout_words(layout: Layout, meshes: tuple[Mesh, ...]) -> str:
    """How a tensor is cut: ``whole on rank 3``, ``dim 0 in 4 (S)``, ``dim 0 in 2 (S), dim 1 in 2 (B)``."""
    if layout.boxes is not None:
        if len(layout.boxes) == 1 and layout.boxes[0][1] == whole(layout.shape):
            return f"whole on rank {layout.boxes[0][0]}"
        return plural(len(layout.boxes), "box").replace("boxs", "boxes") + " (listed)"
    mesh = meshes[layout.mesh]
    cuts = []
    index = [0] * len(mesh.shape)
    for cut in layout.cuts:
        if cut.kind == "O":
            index[cut.axis] = cut.arg
        else:
            kind = f"SS of {cut.arg}" if cut.kind == "SS" else cut.kind
            cuts.append(f"dim {cut.dim} in {mesh.shape[cut.axis]} ({kind})")
    if cuts:
        return ", ".join(cuts)
    position = 0
    for size, at in zip(mesh.shape, index, strict=True):
        position = position * size + at
    return f"whole on rank {mesh.members()[position]}"


def piece_count(layout: Layout, meshes: tuple[Mesh, ...]) -> int:
    """The number of pieces that hold anything."""
    if layout.boxes is not None:
        return sum(1 for _, box in layout.boxes if box.elements)
    return sum(len(parts(layout, list(meshes), rank)) for rank in meshes[layout.mesh].members())
