"""A box: a half-open hyper-rectangle in the index space of one global tensor."""

from __future__ import annotations

import math

import msgspec

from keepstep.errors import CorruptError

__all__ = ["Box", "check_partition", "range_boxes", "whole"]


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``[offset, offset + size)`` in every dimension, in elements of the global tensor. May be empty or 0-d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements inside; 1 for a 0-d box."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The part of the global tensor both boxes cover, or None when they share no element.

        Both boxes must belong to the same global tensor, so they have the same number of dimensions.
        """
        offsets = []
        sizes = []
        for mine, size, theirs, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(mine, theirs)
            stop = min(mine + size, theirs + other_size)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies in a tensor of this global shape, with no negative offset or size."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def __str__(self) -> str:
        """``[0:4, 8:16]``, as one would slice; works for impossible boxes too, so that an error can show them."""
        ranges = zip(self.offsets, self.sizes, strict=False)
        return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in ranges)}]"


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers all of a tensor with this global shape."""
    return Box((0,) * len(shape), shape)


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes that hold elements [start, stop) of a tensor of this shape, counted row by row, in that order.

    Each is one run of those elements. At most ``2 * len(shape) - 1`` boxes, for example the end of one row, whole rows
    and the beginning of another; one box where the range is whole rows or lies in a row.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, range_boxes(shape[1:], head, tail))
    found = _in_row(first, range_boxes(shape[1:], head, row)) if head else []
    first += bool(head)
    if first < last:
        zero = (0,) * (len(shape) - 1)
        found.append(Box((first, *zero), (last - first, *shape[1:])))
    return [*found, *_in_row(last, range_boxes(shape[1:], 0, tail))]


def _in_row(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes]


def check_partition(key: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Proves that the boxes cover every element of ``shape`` exactly once.

    A sweep along the dimension with the most distinct starts, so that a thousand shards cost a thousand comparisons and
    not a million. Equal volume and no overlap together mean no hole.

    Raises:
        CorruptError: a box outside the tensor, an overlap, or a hole; names the key and a region.
    """
    filled = [box for box in boxes if box.elements]
    for box in filled:
        if not box.inside(shape):
            raise CorruptError(f"{key!r}: piece {box} lies outside the tensor of shape {list(shape)}")
    axis = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in filled}), default=0)
    active: list[Box] = []
    for box in sorted(filled, key=lambda item: item.offsets[axis : axis + 1]):
        start = box.offsets[axis] if shape else 0
        active = [other for other in active if not shape or other.offsets[axis] + other.sizes[axis] > start]
        for other in active:
            if not shape or box.intersect(other) is not None:
                raise CorruptError(f"{key!r}: pieces {other} and {box} overlap")
        active.append(box)
    covered = sum(box.elements for box in filled)
    expected = math.prod(shape)
    if covered != expected:
        raise CorruptError(
            f"{key!r}: the pieces cover {covered:,} of {expected:,} elements; have {', '.join(map(str, filled[:6]))}"
        )
