"""Copies from devices: on streams of our own, into registered memory, ordered after the work that made the tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping

import torch

from keepstep.move.arena import Arena

__all__ = ["DeviceLanes", "Held", "HostMemory", "cloned_on_device", "compute_marks", "side_streams"]

CLONED_BYTES = 1 << 26
Held = tuple[torch.Tensor, ...]
"""The local tensors of one tensor of the state: one, or one for each of its boxes."""


class HostMemory:
    """An arena as torch sees it, registered with the device's driver from the first device copy on.

    Registered (pinned) memory is what makes copies from a device asynchronous; without it they are merely slower. Close it
    before the arena.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._host: torch.Tensor | None = None
        self._registered = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        """All of the arena as bytes, to be copied into from ``device``."""
        if self._host is None:
            memory = (ctypes.c_char * self.arena.size_bytes).from_address(self.arena.address)
            self._host = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda" and not self._registered:
            status = torch.cuda.cudart().cudaHostRegister(self.arena.address, self.arena.size_bytes, 0)
            self._registered = int(status) == 0
        return self._host

    def close(self) -> None:
        """Unregisters the memory. Idempotent."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.arena.address)
            self._registered = False
        self._host = None


def compute_marks(tensors: Iterable[Held]) -> dict[torch.device, torch.cuda.Event]:
    """For each CUDA device of these tensors, an event after everything the training thread has asked of it so far."""
    marks: dict[torch.device, torch.cuda.Event] = {}
    if not torch.cuda.is_initialized():
        return marks
    for device in {local.device for held in tensors for local in held}:
        if device.type == "cuda":
            with torch.cuda.device(device):
                marks[device] = torch.cuda.Event()
                marks[device].record(torch.cuda.current_stream(device))
    return marks


def cloned_on_device(tensors: tuple[Held, ...], late: frozenset[int]) -> tuple[tuple[Held, ...], frozenset[int]]:
    """Small device tensors that cannot wait, as copies on their device, which can: so nobody waits for the device.

    Returns the tensors with these copies among them, and ``late`` with their indices. Where they are too many bytes for
    the device, nothing is cloned.
    """
    early = [i for i, held in enumerate(tensors) if i not in late and any(local.is_cuda for local in held)]
    total = sum(local.numel() * local.element_size() for i in early for local in tensors[i])
    if not early or total > CLONED_BYTES:
        return tensors, late
    copies = list(tensors)
    for i in early:
        copies[i] = tuple(local.clone() if local.is_cuda else local for local in tensors[i])
    return tuple(copies), late | frozenset(i for i in early if all(local.is_cuda for local in tensors[i]))


@contextlib.contextmanager
def side_streams(marks: Mapping[torch.device, torch.cuda.Event]) -> Iterator[None]:
    """What this thread asks of these devices runs beside the training, from the marks on."""
    with contextlib.ExitStack() as entered:
        for device, mark in marks.items():
            stream = torch.cuda.Stream(device)
            stream.wait_event(mark)
            entered.enter_context(torch.cuda.stream(stream))
        yield


class DeviceLanes:
    """Copies from devices on streams of our own, ordered after the work that made the tensors. Any thread."""

    def __init__(self, memory: HostMemory, marks: Mapping[torch.device, torch.cuda.Event]) -> None:
        self._memory = memory
        self._marks = marks
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._touched: set[torch.device] = set()

    def copy(self, at: int, run: torch.Tensor, done: int, step: int) -> None:
        """Starts the copy of ``step`` bytes from byte ``done`` of ``run`` to byte ``at`` of the arena."""
        target = self._memory.tensor(run.device)[at : at + step]
        # A dimension of size 1 may have any stride, which a view as bytes would not take.
        source = run.as_strided((run.numel(),), (1,)).view(torch.uint8)[done : done + step]
        if run.device.type != "cuda":
            target.copy_(source)
            return
        with torch.cuda.device(run.device):
            stream = self._streams.get(run.device)
            if stream is None:
                stream = self._streams[run.device] = torch.cuda.Stream(run.device)
                if run.device in self._marks:
                    stream.wait_event(self._marks[run.device])
            # What made the tensor contiguous is queued on this thread's own stream.
            stream.wait_stream(torch.cuda.current_stream(run.device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            # A temporary made by contiguous() belongs to that stream; it must not be reused before this copy.
            source.record_stream(stream)
        self._touched.add(run.device)

    def wait(self) -> None:
        """Waits for all copies in flight."""
        for stream in self._streams.values():
            stream.synchronize()
