"""The raw limits: what this machine's storage and memory allow a minimal, honest program.

Writing: page-aligned memory that is already there, direct I/O, the best of several numbers of
threads and block sizes, with and without fallocate, then fsync of the file and of its directory.
Reading: the same memory as the target, from the page cache (warm) or from the device (cold, the
best of direct and buffered readers). The best setting is found once, at the start of a run, with
all ranks working at the same time; that setting then runs in every round.
"""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from harness import GIB, MIB, Context, drop_from_page_cache, fsync_directory, remove


@dataclass(frozen=True)
class Setting:
    """How to move the bytes."""

    threads: int
    block: int
    direct: bool = True
    fallocate: bool = False

    def __str__(self) -> str:
        way = "direct" if self.direct else "buffered"
        extra = " + fallocate" if self.fallocate else ""
        return f"{self.threads} threads x {self.block // MIB} MiB {way}{extra}"


WRITE_SETTINGS = [
    Setting(threads, block * MIB, fallocate=fallocate)
    for threads, block, fallocate in itertools.product((1, 2, 4), (4, 16, 64), (False, True))
]
WARM_SETTINGS = [
    Setting(threads, block * MIB, direct=False) for threads, block in itertools.product((1, 2, 4), (1, 4, 16))
]
COLD_SETTINGS = [
    *(Setting(threads, block * MIB) for threads, block in ((2, 4), (2, 16), (4, 4), (8, 4), (8, 16))),
    *(Setting(threads, block * MIB, direct=False) for threads, block in ((1, 1), (1, 16), (2, 1), (4, 1))),
]


CALIBRATION_BYTES = 512 * MIB
BLOCK_BYTES, CACHED_BYTES = 64 * 1024, 512 * 1024


class RawLimit:
    """A contestant that moves as many bytes as the state has, and nothing else."""

    name = "raw limit"

    def __init__(self, context: Context, size: int) -> None:
        """Allocate and touch the memory; `size` is this rank's number of bytes."""
        self.context = context
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = memoryview(mmap.mmap(-1, self.size))
        pattern = os.urandom(MIB)
        for start in range(0, self.size, MIB):
            stop = min(start + MIB, self.size)
            self.memory[start:stop] = pattern[: stop - start]
        self._digests = [0] * -(-self.size // BLOCK_BYTES)
        self.writing = WRITE_SETTINGS[0]
        self.reading = WARM_SETTINGS[0]

    def save(self, path: Path, _state: object = None) -> None:
        """Write this rank's bytes, durably, in the calibrated way."""
        self._save(path, self.memory)

    def _save(self, path: Path, memory: memoryview) -> None:
        path.mkdir(parents=True, exist_ok=True)
        _write(self._file(path), memory, self.writing)
        fsync_directory(path)

    def load(self, path: Path, _state: object = None) -> None:
        """Read this rank's bytes in the calibrated way."""
        _read(self._file(path), self.memory, self.reading)

    def load_proved(self, path: Path) -> None:
        """Read this rank's bytes and take the digest of every block of 64 KiB, while the cache has it."""
        digests = self._digests

        def prove(start: int, stop: int) -> None:
            for at in range(start, stop, BLOCK_BYTES):
                digests[at // BLOCK_BYTES] = xxhash.xxh3_64_intdigest(self.memory[at : min(at + BLOCK_BYTES, stop)])

        setting = Setting(self.reading.threads, CACHED_BYTES, direct=self.reading.direct)
        _read(self._file(path), self.memory, setting, prove)

    def calibrate_write(self, directory: Path, rounds: int = 3) -> None:
        """Choose the fastest way to write, by writing a part of the bytes."""
        path = directory / "raw-calibration"
        part = self._part(CALIBRATION_BYTES)

        def attempt(setting: Setting) -> float:
            self.writing = setting
            seconds = self.context.timed(lambda: self._save(path, part))
            self._tidy(path)
            return seconds

        self.writing = self._best("write", WRITE_SETTINGS, attempt, rounds, len(part))

    def calibrate_read(self, path: Path, *, cold: bool, rounds: int = 3) -> Setting:
        """Choose the fastest way to read what `save` left at `path`."""

        def attempt(setting: Setting) -> float:
            if cold:
                drop_from_page_cache(self._file(path))
            return self.context.timed(lambda: _read(self._file(path), part, setting))

        part = self._part(CALIBRATION_BYTES if cold else self.size)
        settings = COLD_SETTINGS if cold else WARM_SETTINGS
        return self._best("cold read" if cold else "warm read", settings, attempt, rounds, len(part))

    def _part(self, size: int) -> memoryview:
        """This rank's share of `size` bytes, in whole pages: direct I/O takes nothing else."""
        return self.memory[: size // self.context.world // mmap.PAGESIZE * mmap.PAGESIZE]

    def _best(
        self,
        what: str,
        settings: Sequence[Setting],
        attempt: Callable[[Setting], float],
        rounds: int,
        size: int,
    ) -> Setting:
        seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(rounds):
            for setting in settings:
                seconds[setting].append(attempt(setting))
        medians = {setting: statistics.median(each) for setting, each in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        rate = self.context.world * size / medians[best] / GIB
        self.context.note(f"  raw {what}: {rate:.2f} GiB/s with {best}")
        return best

    def _file(self, path: Path) -> Path:
        return path / f"rank-{self.context.rank}.raw"

    def _tidy(self, path: Path) -> None:
        self.context.barrier()
        if self.context.rank == 0:
            remove(path)
        self.context.barrier()


def _write(file: Path, memory: memoryview, setting: Setting) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if setting.direct else 0)
    fd = os.open(file, flags, 0o644)
    try:
        if setting.fallocate:
            os.posix_fallocate(fd, 0, len(memory))
        _in_blocks(setting, len(memory), lambda a, b: os.pwrite(fd, memory[a:b], a))
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(
    file: Path, memory: memoryview, setting: Setting, then: Callable[[int, int], None] = lambda start, stop: None
) -> None:
    fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if setting.direct else 0))

    def move(start: int, stop: int) -> int:
        got = os.preadv(fd, [memory[start:stop]], start)
        then(start, start + got)
        return got

    try:
        _in_blocks(setting, len(memory), move)
    finally:
        os.close(fd)


def _in_blocks(setting: Setting, size: int, move: Callable[[int, int], int]) -> None:
    """Hand out blocks to threads until all `size` bytes have moved."""
    starts = iter(range(0, size, setting.block))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            stop = min(start + setting.block, size)
            while start < stop:
                start += move(start, stop)

    threads = [threading.Thread(target=work) for _ in range(setting.threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
