"""From tensors into the arena: copying a tensor into its place in the file is all the serialisation there is.

In: the plans of this rank's files and the live tensors. Out: filled chunks, in file order, one after another; the caller
hands each to the writer. Runs on the training thread: while it runs nothing changes the tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.format.shardfile import PAGE_BYTES
from keepstep.move.arena import CHUNK_BYTES, Arena
from keepstep.move.writer import Chunk
from keepstep.plan.save_plan import FilePlan, Slot
from keepstep.timeline import Timeline

__all__ = ["fill"]

GROUP_BYTES = 1 << 24
"""A tensor that is not contiguous is made so in groups of rows of about this size."""


def fill(
    plans: tuple[FilePlan, ...],
    tensors: tuple[tuple[torch.Tensor, ...], ...],
    extras: Mapping[str, bytes | torch.Tensor],
    arena: Arena,
    timeline: Timeline,
) -> Iterator[Chunk]:
    """Copies the bytes of every file into the arena.

    Args:
        plans: the files, whose slots name tensors by index and extras by name.
        tensors: the local tensors of this rank, by index; live, on any device; not changed and not kept.
        extras: bytes and tensors that go into the state file.
        arena: where to; each chunk handed out must be released by whoever wrote it.
        timeline: waiting for a free place in the arena is booked as "write": the storage is what it waits for.
    """
    lanes: _DeviceLanes | None = None
    slot = -1
    try:
        for file, plan in enumerate(plans):
            offset = filled = 0
            for piece in plan.slots:
                view = _source(piece, tensors, extras)
                for run in (view,) if view.is_contiguous() else _runs(view):
                    size, done = run.numel() * run.element_size(), 0
                    source = run.data_ptr() if run.device.type == "cpu" else 0
                    while done < size:
                        if slot < 0:
                            with timeline.span("write"):
                                slot, filled = arena.free.get(), 0
                        step = min(CHUNK_BYTES - filled, size - done)
                        if source:
                            ctypes.memmove(arena.address + slot * CHUNK_BYTES + filled, source + done, step)
                        else:
                            lanes = lanes or _DeviceLanes(arena)
                            lanes.copy(slot * CHUNK_BYTES + filled, run, done, step)
                        filled += step
                        done += step
                        if filled == CHUNK_BYTES or offset + filled == plan.data_bytes:
                            ctypes.memset(arena.address + slot * CHUNK_BYTES + filled, 0, -filled % PAGE_BYTES)
                            chunk, slot = Chunk(file, offset, filled, slot), -1
                            offset += filled
                            if lanes is None:
                                yield chunk
                            else:
                                yield from lanes.ready(chunk)
        if lanes is not None:
            yield from lanes.drain()
    finally:
        if slot >= 0:
            arena.free.put(slot)
        if lanes is not None:
            lanes.close()


def _source(
    slot: Slot, tensors: tuple[tuple[torch.Tensor, ...], ...], extras: Mapping[str, bytes | torch.Tensor]
) -> torch.Tensor:
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


class _DeviceLanes:
    """Copies from devices on streams of our own, ordered after the work that made the tensors.

    A chunk with device copies in it is handed on when they are done; while the writer has some, others are in flight.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # At most half the arena waits here: the rest must be with the writer, or nobody could go on.
        self._in_flight = arena.chunks // 2 - 1
        self._host: torch.Tensor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._touched: set[torch.device] = set()
        self._waiting: list[tuple[Chunk, list[torch.cuda.Event]]] = []
        self._registered = False

    def copy(self, at: int, run: torch.Tensor, done: int, step: int) -> None:
        """Starts the copy of ``step`` bytes from byte ``done`` of ``run`` to byte ``at`` of the arena."""
        target = self._arena_tensor(run)[at : at + step]
        # A dimension of size 1 may have any stride, which a view as bytes would not take.
        source = run.as_strided((run.numel(),), (1,)).view(torch.uint8)[done : done + step]
        if run.device.type != "cuda":
            target.copy_(source)
            return
        stream = self._streams.get(run.device)
        if stream is None:
            stream = self._streams[run.device] = torch.cuda.Stream(run.device)
        # The tensor's last change, or the copy that made it contiguous, may still be queued on the compute stream.
        stream.wait_stream(torch.cuda.current_stream(run.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # A temporary made by contiguous() belongs to the compute stream; it must not be reused before this copy.
        source.record_stream(stream)
        self._touched.add(run.device)

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
        for stream in self._streams.values():
            stream.synchronize()
        for chunk, _ in self._waiting:
            self._arena.free.put(chunk.slot)
        self._waiting = []
        if self._registered:
            _cudart().cudaHostUnregister(self._arena.address)
            self._registered = False
        self._host = None

    def _take(self) -> Chunk:
        chunk, events = self._waiting.pop(0)
        for event in events:
            event.synchronize()
        return chunk

    def _arena_tensor(self, run: torch.Tensor) -> torch.Tensor:
        if self._host is None:
            memory = (ctypes.c_char * self._arena.size_bytes).from_address(self._arena.address)
            self._host = torch.frombuffer(memory, dtype=torch.uint8)
            if run.device.type == "cuda":
                # Pinned memory is what makes the copies asynchronous; without it they are merely slower.
                status = _cudart().cudaHostRegister(self._arena.address, self._arena.size_bytes, 0)
                self._registered = int(status) == 0
        return self._host


def _cudart() -> Any:
    return torch.cuda.cudart()
