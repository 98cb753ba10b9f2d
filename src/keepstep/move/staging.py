"""From tensors into the arena: copying a tensor into its place in the file is all the serialisation there is.

In: the plans of this rank's files and the live tensors. ``fill`` streams them through a ring, chunk by chunk in file order,
on the training thread. ``Stager`` puts each slot straight into its place in a whole arena, in any order and on any thread:
some of it at the step boundary, the rest while training goes on, until the fence.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

import torch

from keepstep.format.shardfile import PAGE_BYTES
from keepstep.move.arena import CHUNK_BYTES, Arena, bases_of
from keepstep.move.device import DeviceLanes, Held, HostMemory, compute_marks
from keepstep.move.seals import Seals
from keepstep.move.writer import Chunk
from keepstep.plan.save_plan import FilePlan, Slot
from keepstep.timeline import Timeline

__all__ = ["Extras", "Stager", "fill"]

GROUP_BYTES = 1 << 24
"""A tensor that is not contiguous is made so in groups of rows of about this size."""
SEALED_BYTES = 1 << 20
"""So much is copied, and then hashed while it is in the cache."""
SHARE_BYTES = 1 << 23
"""With several threads a tensor is copied in shares of at most this size."""

_Move = tuple[int, int, int, torch.Tensor]
"""To which address, from which, how many bytes, and the tensor that keeps the source alive until then."""
Extras = Mapping[str, bytes | torch.Tensor]


class Stager:
    """Copies slots into their places in an arena as large as the files. One for each save.

    Args:
        plans: the files, whose slots name tensors by index and extras by name.
        tensors: the local tensors of this rank, by index; live, on any device; not changed.
        extras: bytes and tensors that go into the state file.
        memory: where to.
        marks: for each device, an event after the work that made the tensors; see ``compute_marks``.
    """

    def __init__(
        self,
        plans: tuple[FilePlan, ...],
        tensors: tuple[Held, ...],
        extras: Extras,
        memory: HostMemory,
        marks: Mapping[torch.device, torch.cuda.Event],
    ) -> None:
        self._tensors, self._extras = tensors, extras
        self._arena = memory.arena
        self._lanes = DeviceLanes(memory, marks)
        self.marks = marks
        self._sizes = [plan.data_bytes for plan in plans]
        bases, self.size_bytes = bases_of(self._sizes)
        self._slots = [(base, slot) for base, plan in zip(bases, plans, strict=True) for slot in plan.slots]
        for base, plan in zip(bases, plans, strict=True):
            end = base + plan.data_bytes
            ctypes.memset(self._arena.address + end, 0, -end % PAGE_BYTES)

    def copy(self, chosen: Iterable[int] | None = None, *, others_than: frozenset[int] = frozenset()) -> int:
        """Copies the slots of the chosen tensors (by default of all, extras included) but not of ``others_than``.

        Returns the bytes copied from host memory; copies from devices are merely started, see ``finish``.
        """
        direct, odd = self._sorted(chosen, others_than)
        return _copied(direct) + _copied(self._runs_of(odd))

    def copy_sealed(self, chosen: Iterable[int]) -> tuple[bytes, ...]:
        """Copies the slots of the chosen tensors when all others are in place, and makes the digests of all files.

        Returns them, see ``Seals``; none when some tensors are odd or on a device: then whoever writes makes them.
        """
        direct, odd = self._sorted(chosen, frozenset())
        if odd:
            self.copy(chosen)
            return ()
        seals, start = Seals(self._arena, self._sizes), self._arena.address
        for target, source, size, _ in direct:
            for done in range(0, size, SEALED_BYTES):
                step = min(SEALED_BYTES, size - done)
                ctypes.memmove(target + done, source + done, step)
                seals.advance(target + done + step - start)
        return seals.finish()

    def copy_on(self, pool: Executor, threads: int) -> int:
        """Copies everything, on this thread and on ``threads - 1`` of a pool, each an equal share of the bytes."""
        direct, odd = self._sorted(None, frozenset())
        moves: deque[_Move] = deque()
        for target, source, size, held in direct:
            for done in range(0, size, SHARE_BYTES):
                moves.append((target + done, source + done, min(SHARE_BYTES, size - done), held))
        share = sum(size for _, _, size, _ in moves) // threads + 1
        waiting = []
        for _ in range(threads - 1):
            mine, taken = [], 0
            while moves and taken < share:
                mine.append(moves.popleft())
                taken += mine[-1][2]
            waiting.append(pool.submit(_copied, mine))
        return _copied(moves) + _copied(self._runs_of(odd)) + sum(future.result() for future in waiting)

    def finish(self) -> None:
        """Waits for copies from devices."""
        self._lanes.wait()

    def _sorted(
        self, chosen: Iterable[int] | None, others_than: frozenset[int]
    ) -> tuple[list[_Move], list[tuple[int, Slot]]]:
        """Slots that are one copy each, as such; and the others: parts of tensors, turned ones, those on devices."""
        wanted = None if chosen is None else frozenset(chosen)
        address, tensors = self._arena.address, self._tensors
        direct: list[_Move] = []
        odd = []
        for base, slot in self._slots:
            index = slot.tensor
            if index in others_than or (wanted is not None and index not in wanted):
                continue
            start, size = slot.entry.start, slot.entry.stop - slot.entry.start
            held = tensors[index] if index >= 0 else ()
            local = (held[slot.piece] if len(held) > 1 else held[0]) if held else None
            if local is None or not local.is_cpu or local.nbytes != size or not local.is_contiguous():
                odd.append((base, slot))
            elif size:
                direct.append((address + base + start, local.data_ptr(), size, local))
        return direct, odd

    def _runs_of(self, slots: Iterable[tuple[int, Slot]]) -> Iterator[_Move]:
        """The copies of other slots, a part at a time; those from devices are started on the way."""
        for device, mark in self.marks.items():
            # What makes a tensor contiguous runs on this thread's own stream, which knows nothing of the training's.
            torch.cuda.current_stream(device).wait_event(mark)
        for base, slot in slots:
            view = _source(slot, self._tensors, self._extras)
            at = base + slot.entry.start
            for run in (view,) if view.is_contiguous() else _runs(view):
                size = run.numel() * run.element_size()
                if run.device.type != "cpu":
                    self._lanes.copy(at, run, 0, size)
                elif size:
                    yield self._arena.address + at, run.data_ptr(), size, run
                at += size


def _copied(moves: Iterable[_Move]) -> int:
    total = 0
    for target, source, size, _ in moves:
        ctypes.memmove(target, source, size)
        total += size
    return total


def fill(
    plans: tuple[FilePlan, ...], tensors: tuple[Held, ...], extras: Extras, arena: Arena, timeline: Timeline
) -> Iterator[Chunk]:
    """Copies the bytes of every file into the ring.

    Args:
        plans: the files, whose slots name tensors by index and extras by name.
        tensors: the local tensors of this rank, by index; live, on any device; not changed and not kept.
        extras: bytes and tensors that go into the state file.
        arena: where to; each chunk handed out must be released by whoever wrote it.
        timeline: waiting for a free place in the arena is booked as "write": the storage is what it waits for.
    """
    lanes: _ChunkLanes | None = None
    free: Any = arena.free
    place = -1
    try:
        for file, plan in enumerate(plans):
            offset = filled = 0
            for slot in plan.slots:
                view = _source(slot, tensors, extras)
                for run in (view,) if view.is_contiguous() else _runs(view):
                    size, done = run.numel() * run.element_size(), 0
                    source = run.data_ptr() if run.device.type == "cpu" else 0
                    while done < size:
                        if place < 0:
                            with timeline.span("write"):
                                place, filled = free.get(), 0
                        step = min(CHUNK_BYTES - filled, size - done)
                        if source:
                            ctypes.memmove(arena.address + place + filled, source + done, step)
                        else:
                            lanes = lanes or _ChunkLanes(arena, tensors)
                            lanes.copy(place + filled, run, done, step)
                        filled += step
                        done += step
                        if filled == CHUNK_BYTES or offset + filled == plan.data_bytes:
                            ctypes.memset(arena.address + place + filled, 0, -filled % PAGE_BYTES)
                            chunk, place = Chunk(file, offset, filled, place), -1
                            offset += filled
                            if lanes is None:
                                yield chunk
                            else:
                                yield from lanes.ready(chunk)
        if lanes is not None:
            yield from lanes.drain()
    finally:
        if place >= 0:
            free.put(place)
        if lanes is not None:
            lanes.close()


def _source(slot: Slot, tensors: tuple[Held, ...], extras: Extras) -> torch.Tensor:
    """The part of a live tensor that a slot stores, as a view."""
    if slot.tensor < 0:
        value = extras[slot.entry.name]
        return value if isinstance(value, torch.Tensor) else torch.frombuffer(bytearray(value), dtype=torch.uint8)
    held = tensors[slot.tensor]
    view = held[slot.piece] if len(held) > 1 else held[0]
    sizes = slot.entry.box.sizes
    if view.shape != sizes:
        for dim, (start, size) in enumerate(zip(slot.local, sizes, strict=True)):
            if view.shape[dim] != size:
                view = view.narrow(dim, start, size)
    return view


def _runs(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a view that is not contiguous: groups of rows, made contiguous one at a time."""
    if view.numel() * view.element_size() <= GROUP_BYTES:
        yield view.contiguous()
        return
    if view.shape[0] == 1:
        yield from _runs(view[0])
        return
    row_bytes = view[0].numel() * view.element_size()
    rows = max(1, GROUP_BYTES // row_bytes)
    for start in range(0, view.shape[0], rows):
        yield from _runs(view[start : start + rows])


class _ChunkLanes(DeviceLanes):
    """A chunk with device copies in it is handed on when they are done; while the writer has some, others are in flight."""

    def __init__(self, arena: Arena, tensors: tuple[Held, ...]) -> None:
        super().__init__(HostMemory(arena), compute_marks(tensors))
        self._free: Any = arena.free
        # At most half the arena waits here: the rest must be with the writer, or nobody could go on.
        self._in_flight = arena.size_bytes // CHUNK_BYTES // 2 - 1
        self._waiting: list[tuple[Chunk, list[torch.cuda.Event]]] = []

    def ready(self, chunk: Chunk) -> Iterator[Chunk]:
        """Takes a filled chunk; hands on those whose copies are done."""
        events = []
        for device in self._touched:
            with torch.cuda.device(device):
                event = torch.cuda.Event()
                event.record(self._streams[device])
                events.append(event)
        self._touched.clear()
        self._waiting.append((chunk, events))
        while self._waiting and (not self._waiting[0][1] or len(self._waiting) > self._in_flight):
            yield self._take()

    def drain(self) -> Iterator[Chunk]:
        """Hands on the rest."""
        while self._waiting:
            yield self._take()

    def close(self) -> None:
        """Waits for copies in flight, gives back chunks nobody took, and unregisters the arena."""
        self.wait()
        for chunk, _ in self._waiting:
            self._free.put(chunk.at)
        self._waiting = []
        self._memory.close()

    def _take(self) -> Chunk:
        chunk, events = self._waiting.pop(0)
        for event in events:
            event.synchronize()
        return chunk
