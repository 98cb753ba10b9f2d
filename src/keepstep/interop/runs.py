"""Runs of elements: part of a tensor's row-major order, as the boxes it consists of."""

from __future__ import annotations

import math
from collections.abc import Iterator

from keepstep.format.box import Box

__all__ = ["boxes_of_run"]


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that hold elements [start, stop) of a tensor of this shape, each dense, in row-major order.

    No more than two for each dimension and one: whole rows are taken together.
    """
    if start >= stop:
        return
    if not shape or math.prod(shape) == stop - start:
        yield Box((0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _below(last, shape, start % row, stop % row)
        return
    if start % row:
        yield from _below(first - 1, shape, start % row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if stop % row:
        yield from _below(last, shape, 0, stop % row)


def _below(index: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))
