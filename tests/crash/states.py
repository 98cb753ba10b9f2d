"""A disk, as it may be found after a loss of power at any moment, by two models of what a file system promises.

``STRICT`` is POSIX and no more: every block of 4 KiB that was not synced is old or new, each by itself, the last one torn at
512 bytes; a size is old or new; every entry of a folder that was not synced is old or new, each by itself. A rename leaves
the new name or what was there before it, never nothing, but the old name may stay beside the new one.

``ORDERED`` is a journal with ordered data, as ext4 has it by default: what happened to names survives up to some moment, and
nothing after it; a file never grows over blocks that were not written.

In both a file that was synced has its data, but not yet its name; a folder that was synced has its names.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash.recorder import Op

__all__ = ["MODELS", "ORDERED", "STRICT", "Disk", "Image"]

BLOCK = 4096
SECTOR = 512
STRICT, ORDERED = MODELS = ("strict", "ordered")

Pairs = tuple[tuple[str, "File | Folder | None"], ...]
View = dict["Folder", dict[str, "File | Folder"]]


@dataclass(frozen=True, slots=True)
class Image:
    """What is found: bytes by name, and every folder, the empty ones too."""

    files: dict[str, bytes]
    folders: frozenset[str]

    def key(self) -> frozenset[Any]:
        return frozenset((*self.files.items(), *self.folders))


class File:
    """Bytes as they are, as they were when last synced, and every version of a block and of the size since."""

    def __init__(self, data: bytes = b"") -> None:
        self.now = bytearray(data)
        self.durable = bytes(data)
        self.complete = True
        self._blocks: dict[int, list[bytes]] = {}
        self._sizes: list[int] = []
        self._known: dict[str, list[bytes]] = {}

    @property
    def is_synced(self) -> bool:
        return not self._blocks and not self._sizes

    def write(self, offset: int, data: bytes) -> None:
        self._known.clear()
        before, end = len(self.now), offset + len(data)
        if end > before:
            self.now.extend(bytes(end - before))
            self._sizes.append(end)
        self.now[offset:end] = data
        for block in range(offset // BLOCK, -(-end // BLOCK)):
            self._blocks.setdefault(block, [_block(self.durable, block)]).append(_block(self.now, block))

    def resize(self, size: int) -> None:
        self._known.clear()
        if size != len(self.now):
            self.now[size:] = bytes(max(0, size - len(self.now)))
            self._sizes.append(size)

    def sync(self) -> None:
        self._known.clear()
        self.durable = bytes(self.now)
        self._blocks.clear()
        self._sizes.clear()

    def contents(self, model: str, most: int, rng: random.Random) -> list[bytes]:
        """Everything it may hold now, each once; a sample with the extremes in it when that is more than ``most``."""
        if self.is_synced:
            return [self.durable]
        known = self._known.get(model)
        if known is None:
            sizes = _distinct([len(self.durable), *self._sizes])
            versions = [self._versions(block, max(sizes), torn=model == STRICT) for block in self._blocks]
            self.complete &= math.prod(map(len, versions)) * len(sizes) <= most
            found = {}
            for *choice, size in picked([*versions, sizes], most, rng):
                if model == ORDERED and size > len(self.durable):
                    size = min(size, max(len(self.durable), self._written(choice)))
                found[self._made(choice, size)] = None
            known = self._known[model] = list(found)
        return known

    def _versions(self, block: int, size: int, *, torn: bool) -> list[bytes]:
        versions = self._blocks[block]
        if torn and block == (size - 1) // BLOCK:
            cuts = range(SECTOR, BLOCK, SECTOR)
            mixed = [new[:cut] + old[cut:] for old, new in itertools.pairwise(versions) for cut in cuts]
            versions = [*versions, *mixed]
        return _distinct(versions)

    def _written(self, choice: Sequence[bytes]) -> int:
        """Where the last block ends that is new."""
        blocks = zip(self._blocks, choice, strict=True)
        return max(((block + 1) * BLOCK for block, data in blocks if data != self._blocks[block][0]), default=0)

    def _made(self, choice: Sequence[bytes], size: int) -> bytes:
        made = bytearray(self.durable.ljust(size, b"\0"))
        for block, data in zip(self._blocks, choice, strict=True):
            at = block * BLOCK
            if at < size:
                made[at : at + BLOCK] = data
        return bytes(made[:size].ljust(size, b"\0"))


class Folder:
    """Entries as they are, as they were when last synced, and what happened to them since.

    ``settled`` are those that a journal has for certain.
    """

    def __init__(self) -> None:
        self.now: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}
        self.settled: dict[str, File | Folder] = {}
        self.pending: list[Pairs] = []

    def ways(self) -> int:
        """In how many ways its changes may have reached the disk."""
        return math.prod(len(pairs) + 1 for pairs in self.pending)

    def options(self, most: int, rng: random.Random) -> list[dict[str, File | Folder]]:
        """The entries it may have now, each set once. Of a rename there is nothing, or the new name too, or it alone."""
        found = {}
        for choice in picked([[pairs[:n] for n in range(len(pairs) + 1)] for pairs in self.pending], most, rng):
            entries = _applied(self.durable, choice)
            found[frozenset(entries.items())] = entries
        return list(found.values())


@dataclass(slots=True)
class Disk:
    """Everything below one folder. ``do`` follows a recording; ``images`` are what a crash now may leave.

    ``complete`` as long as no images were left out because there were more of them than asked for.
    """

    root: Folder = field(default_factory=Folder)
    complete: bool = True
    _inodes: dict[int, File] = field(default_factory=dict)
    _folders: dict[int, Folder] = field(default_factory=dict)
    _journal: list[tuple[Folder, Pairs]] = field(default_factory=list)

    @classmethod
    def of(cls, image: Image) -> Disk:
        """A disk on which exactly this is durable."""
        disk = cls()
        for path in sorted(image.folders):
            disk._rename(path, Folder())
        for path, data in image.files.items():
            disk._rename(path, File(data))
        for folder in disk._all():
            disk._sync(folder)
        return disk

    def do(self, op: Op) -> None:
        """What the operation does, as whoever reads now sees it. Marks do nothing."""
        match op.kind:
            case "create":
                self._inodes[op.inode] = File()
                self._rename(op.path, self._inodes[op.inode])
            case "open":
                self._inodes[op.inode] = self._find(op.path)
            case "write":
                self._inodes[op.inode].write(op.offset, op.data)
            case "resize":
                self._inodes[op.inode].resize(op.offset)
            case "sync":
                self._inodes[op.inode].sync()
            case "sync folder":
                self._sync(self._at(op.path))
            case "mkdir":
                self._rename(op.path, Folder())
            case "link":
                self._rename(op.to, self._find(op.path))
            case "rename":
                self._rename(op.to, self._find(op.path), op.path)
            case "unlink" | "rmdir":
                self._rename(op.path, None)

    def now(self) -> Image:
        """What a reader sees while the machine is up: what is left when a process is killed."""
        files, folders = self._walked({})
        return Image({path: bytes(file.now) for path, file in files.items()}, folders)

    def images(self, model: str, most: int, rng: random.Random) -> Iterator[Image]:
        """Every state of the disk that the model allows after a crash at this moment; at most about ``most``."""
        views = self._views(model, most, rng)
        share = max(1, most // len(views))
        for view in views:
            files, folders = self._walked(view)
            held = list({id(file): file for file in files.values()}.values())
            contents = [file.contents(model, most, rng) for file in held]
            self.complete &= math.prod(map(len, contents)) <= share and all(file.complete for file in held)
            for choice in picked(contents, share, rng):
                by_file = {id(file): data for file, data in zip(held, choice, strict=True)}
                yield Image({path: by_file[id(file)] for path, file in files.items()}, folders)

    def _views(self, model: str, most: int, rng: random.Random) -> list[View]:
        """What all folders may hold, together."""
        if model == ORDERED:
            return [self._after(count) for count in range(len(self._journal) + 1)]
        waiting = [folder for folder in self._all() if folder.pending]
        options = [folder.options(most, rng) for folder in waiting]
        self.complete &= math.prod(map(len, options)) <= most and all(folder.ways() <= most for folder in waiting)
        return [
            {folder: folder.durable for folder in self._all()} | dict(zip(waiting, choice, strict=True))
            for choice in picked(options, most, rng)
        ]

    def _after(self, count: int) -> View:
        view = {folder: folder.settled for folder in self._all()}
        for folder, pairs in self._journal[:count]:
            view[folder] = _applied(view[folder], [pairs])
        return view

    def _all(self) -> list[Folder]:
        return [self.root, *self._folders.values()]

    def _walked(self, view: View) -> tuple[dict[str, File], frozenset[str]]:
        files, folders, pending = {}, [], [("", self.root)]
        while pending:
            above, folder = pending.pop()
            for name, node in view.get(folder, folder.now).items():
                path = f"{above}/{name}".lstrip("/")
                if isinstance(node, Folder):
                    folders.append(path)
                    pending.append((path, node))
                else:
                    files[path] = node
        return files, frozenset(folders)

    def _sync(self, folder: Folder) -> None:
        folder.durable = dict(folder.now)
        folder.pending.clear()
        # A journal is written in order: with the last change of this folder, everything before it.
        last = max((index for index, (one, _) in enumerate(self._journal) if one is folder), default=-1)
        for one, pairs in self._journal[: last + 1]:
            one.settled = _applied(one.settled, [pairs])
        del self._journal[: last + 1]

    def _rename(self, path: str, node: File | Folder | None, old: str = "") -> None:
        above, _, name = path.rpartition("/")
        folder = self._at(above)
        pairs: Pairs = ((name, node),)
        if old:
            assert old.rpartition("/")[0] == above, "a rename from one folder to another is not modelled"
            pairs = ((name, node), (old.rpartition("/")[2], None))
        if isinstance(node, Folder):
            self._folders[id(node)] = node
        folder.now = _applied(folder.now, [pairs])
        folder.pending.append(pairs)
        self._journal.append((folder, pairs))

    def _at(self, path: str) -> Folder:
        folder = self.root
        for name in path.split("/") if path else ():
            folder = folder.now[name]
        return folder

    def _find(self, path: str) -> File | Folder:
        above, _, name = path.rpartition("/")
        return self._at(above).now[name]


def picked(options: Sequence[Sequence[Any]], most: int, rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """One of each, in every combination; beyond ``most`` the two extremes, those one step from them, and random ones."""
    if math.prod(map(len, options)) <= most:
        yield from itertools.product(*options)
        return
    first, last = [each[0] for each in options], [each[-1] for each in options]
    nearby = [(*base[:at], each[-1 if base is first else 0], *base[at + 1 :])
              for at, each in enumerate(options) for base in (first, last)]  # fmt: skip
    rng.shuffle(nearby)
    yield from [tuple(first), tuple(last), *nearby[: most // 2]][:most]
    for _ in range(most - 2 - len(nearby[: most // 2])):
        yield tuple(rng.choice(each) for each in options)


def _block(data: bytes | bytearray, block: int) -> bytes:
    return bytes(data[block * BLOCK : (block + 1) * BLOCK]).ljust(BLOCK, b"\0")


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _applied(entries: dict[str, Any], changes: Sequence[Pairs]) -> dict[str, Any]:
    made = dict(entries)
    for name, node in itertools.chain.from_iterable(changes):
        if node is None:
            made.pop(name, None)
        else:
            made[name] = node
    return made
