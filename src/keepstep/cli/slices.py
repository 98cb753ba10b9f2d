"""``KEY[0:2, -1]``: the part of a tensor that a slice on the command line means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keepstep.errors import UsageError
from keepstep.format.box import Box

__all__ = ["Part", "cut_out", "slices_of", "split_key"]

_SLICED = re.compile(r"(.+?)\[([^\[\]]*)\]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and the shape of what is in it: a dimension of which one index was asked for is not there."""

    box: Box
    shape: tuple[int, ...]


def split_key(text: str) -> tuple[str, str | None]:
    """The key, and what is in the brackets at its end; None without any."""
    found = _SLICED.fullmatch(text)
    return (found[1], found[2]) if found else (text, None)


def cut_out(text: str, key: str, shape: tuple[int, ...]) -> Part:
    """The part of a tensor of this shape that the text in brackets means, as Python has it: without steps.

    Raises:
        UsageError: it is no slice, goes beyond the tensor, or has a step.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if items.count("...") > 1 or len(items) - items.count("...") > len(shape):
        raise UsageError(f"[{text}]: {key} has {len(shape)} dimensions, {list(shape)}")
    if "..." not in items:
        items.append("...")
    at = items.index("...")
    items[at : at + 1] = [":"] * (len(shape) - len(items) + 1)
    offsets, sizes, left = [], [], []
    for item, size in zip(items, shape, strict=True):
        start, stop = _range(item, size, f"[{text}] of {key}, which is {list(shape)}")
        offsets.append(start)
        sizes.append(stop - start)
        left.extend([stop - start] if ":" in item else [])
    return Part(Box(tuple(offsets), tuple(sizes)), tuple(left))


def slices_of(part: Part | None) -> tuple[slice, ...]:
    """What to index a tensor with, to have that part of it."""
    ends = zip(part.box.offsets, part.box.sizes, strict=True) if part else ()
    return tuple(slice(start, start + size) for start, size in ends)


def _range(item: str, size: int, where: str) -> tuple[int, int]:
    ends = [end.strip() for end in item.split(":")]
    if len(ends) > 3 or any(end and not _NUMBER.fullmatch(end) for end in ends) or (len(ends) == 1 and not ends[0]):
        raise UsageError(f"{where}: {item!r} is neither an index nor a slice such as 0:2, :10, -1 or ...")
    if len(ends) == 3 and ends[2] not in ("", "1"):
        raise UsageError(f"{where}: {item!r} has a step, which cannot be read; ask for all of it")
    if len(ends) == 1:
        index = int(ends[0])
        if not -size <= index < size:
            raise UsageError(f"{where}: there is no index {index} in a dimension of {size:,}")
        return index % size, index % size + 1
    start, stop, _ = slice(int(ends[0]) if ends[0] else None, int(ends[1]) if ends[1] else None).indices(size)
    return start, max(start, stop)
