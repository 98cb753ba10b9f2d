"""A chunk of a file on its way: read from the step, cast, written. Nothing of it is kept but its memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from keepstep.errors import MismatchError
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Structure, Want
from keepstep.format.manifest import Manifest
from keepstep.interop.huggingface.planning import OutFile
from keepstep.interop.runs import boxes_of_run
from keepstep.move.reader import read_pieces
from keepstep.plan.load_plan import find_pieces
from keepstep.state.shard import torch_dtype
from keepstep.storage.base import Storage, Upload

__all__ = ["CHUNK_BYTES", "Buffer", "Chunk", "page_aligned"]

CHUNK_BYTES = 1 << 25
"""How much of a file is read, cast and written at once. A multiple of every page and of every element."""
CAST_ELEMENTS = 1 << 20
_COMPARED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of the data of one file."""

    source: Storage
    manifest: Manifest
    structure: Structure
    file: OutFile
    start: int
    stop: int

    def move(self, upload: Upload, data_offset: int, buffers: SimpleQueue[Buffer]) -> int:
        """Reads the chunk, proved, casts what is to be cast, writes it; returns its size. Any thread."""
        buffer = buffers.get_nowait()
        try:
            memory = buffer.memory[: self.stop - self.start]
            self._fill(memory, buffer)
            upload.write_at(data_offset + self.start, memory.numpy().data)
        finally:
            buffers.put(buffer)
        return self.stop - self.start

    def _fill(self, memory: torch.Tensor, buffer: Buffer) -> None:
        buffer.used = 0
        wants: list[Want] = []
        targets: list[torch.Tensor] = []
        casts: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for one, origin in zip(self.file.tensors, self.file.sources, strict=True):
            low, high = max(one.start, self.start), min(one.stop, self.stop)
            if low >= high:
                continue
            item = ITEM_BYTES[one.dtype]
            run = memory[low - self.start : high - self.start].view(torch_dtype(one.dtype))
            first, last = (low - one.start) // item, (high - one.start) // item
            into = run
            if one.dtype != origin.dtype:
                into = buffer.more((last - first) * ITEM_BYTES[origin.dtype]).view(torch_dtype(origin.dtype))
                casts.append((one.name, into, run))
            at = 0
            for box in boxes_of_run(one.shape, first, last):
                wants.append(Want(origin.key, box))
                targets.append(into[at : at + box.elements].view(box.sizes))
                at += box.elements
        pieces = find_pieces(self.structure, wants, -1)
        read_pieces(self.source, self.manifest, pieces, wants=wants, targets=targets)
        for name, stored, run in casts:
            _cast(name, stored, run)


@dataclass(slots=True)
class Buffer:
    """Memory of one thread that is used again for every chunk: fresh one would be faulted in each time."""

    memory: torch.Tensor
    used: int = 0
    _rest: list[torch.Tensor] = field(default_factory=list)

    def more(self, size: int) -> torch.Tensor:
        """Bytes for what is to be cast, until the next chunk."""
        if not self._rest or self.used + size > self._rest[0].numel():
            # (What was given before from the one that is too small stays with those who have it.)
            self._rest[:] = [page_aligned(max(2 * CHUNK_BYTES, 2 * size))]
            self.used = 0
        found = self._rest[0][self.used : self.used + size]
        self.used += -(-size // 64) * 64
        return found


def page_aligned(size: int) -> torch.Tensor:
    """Bytes at the beginning of a page: what goes past the page cache has to."""
    spare = torch.empty(size + 4096, dtype=torch.uint8, device="cpu")
    skip = -spare.data_ptr() % 4096
    return spare[skip : skip + size]


def _cast(name: str, stored: torch.Tensor, run: torch.Tensor) -> None:
    """Converts, and refuses to make infinities or nothings of numbers that were some. A little at a time: it stays near."""
    limit = torch.finfo(run.dtype).max
    for start in range(0, stored.numel(), CAST_ELEMENTS):
        before, after = stored[start : start + CAST_ELEMENTS], run[start : start + CAST_ELEMENTS]
        after.copy_(before)
        if before.dtype in _COMPARED:
            least, most = before.aminmax()
            if least.item() >= -limit and most.item() <= limit:
                continue
        lost = ~after.to(torch.promote_types(after.dtype, torch.float32)).isfinite()
        if bool(lost.any()) and bool((lost := lost & before.isfinite()).any()):
            largest, kind = float(before[lost].abs().max()), str(run.dtype).removeprefix("torch.")
            raise MismatchError(
                f"elements of {name} do not fit into {kind}:",
                [f"{name}: such as {largest:g}; the largest {kind} is {limit:g}"],
                then="Nothing was written. bfloat16 has the range of float32.",
            )
