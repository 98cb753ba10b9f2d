"""Steps changed by hand, with every digest made right again: so that a reader's deeper checks are reached."""

from __future__ import annotations

import base64
import contextlib
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import keepstep as ks
from keepstep.format.shardfile import BLOCK_BYTES, PAGE_BYTES, digest
from keepstep.storage.base import Storage, read_blob

Change = Callable[[dict[str, Any]], object]


class Forgery:
    """The blobs of one step, to be changed; ``storage()`` gives them as a storage, ``to(folder)`` writes them out."""

    def __init__(self, source: Storage | dict[str, bytes]) -> None:
        if isinstance(source, Storage):
            source = {name: read_blob(source, name, 1 << 30) for name, _ in source.list("")}
        self.blobs = dict(source)

    def copy(self) -> Forgery:
        return Forgery(self.blobs)

    def storage(self) -> ks.MemoryStorage:
        memory = ks.MemoryStorage()
        for name, data in self.blobs.items():
            memory.put(name, data)
        return memory

    def to(self, folder: Path) -> Path:
        for name, data in self.blobs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder

    def file(self, folder: str, rank: int = 0) -> str:
        """The name of a shard file."""
        return next(name for name in self.blobs if name.startswith(f"{folder}/rank-{rank:05d}."))

    # --- the manifest ---

    def manifest(self) -> dict[str, Any]:
        raw = json.loads(self.blobs[".metadata"])
        raw.pop("digest", None)
        return raw

    def edit(self, change: Change) -> Forgery:
        """Changes the manifest's JSON; its digest is right again."""
        raw = self.manifest()
        change(raw)
        self.blobs[".metadata"] = signed(raw)
        return self

    # --- shard files ---

    def edit_header(
        self, folder: str, change: Callable[[dict[str, Any], dict[str, Any]], object], rank: int = 0
    ) -> Forgery:
        """Changes the header's table and keepstep's notes in it; length, padding and the manifest's record fit again."""
        name = self.file(folder, rank)
        raw = self.blobs[name]
        length = int.from_bytes(raw[:8], "little") + 8
        table = json.loads(raw[8:length])
        notes = json.loads(table["__metadata__"]["keepstep"])
        change(table, notes)
        if isinstance(table.get("__metadata__"), dict) and isinstance(table["__metadata__"].get("keepstep"), str):
            table["__metadata__"]["keepstep"] = json.dumps(notes)
        return self.replace(folder, _framed(json.dumps(table).encode()) + raw[length:], rank)

    def replace(self, folder: str, data: bytes, rank: int = 0) -> Forgery:
        """Puts other bytes in a file's place; size and header digest in the manifest fit again."""
        self.blobs[self.file(folder, rank)] = data
        length = min(int.from_bytes(data[:8].ljust(8, b"\0"), "little") + 8, len(data))

        def record(raw: dict[str, Any]) -> None:
            for item in raw["files"][folder]:
                if item[0] == rank:
                    item[1:] = [len(data), max(len(data) - length, 0), f"{digest(data[:length]):016x}"]

        return self.edit(record)

    def entries(self, folder: str, rank: int = 0) -> dict[str, bytes]:
        """The bytes of every entry of a file."""
        raw = self.blobs[self.file(folder, rank)]
        length = int.from_bytes(raw[:8], "little") + 8
        table = json.loads(raw[8:length])
        table.pop("__metadata__")
        order = sorted(table, key=lambda key: table[key]["data_offsets"])
        return {key: raw[length + table[key]["data_offsets"][0] :][: _size(table[key])] for key in order}

    def rewrite(self, folder: str, name: str, data: bytes, rank: int = 0) -> Forgery:
        """Gives a byte entry other contents, longer or shorter; everything that depends on it is made anew."""
        parts = self.entries(folder, rank) | {name: data}
        section = b"".join(parts.values())

        def change(table: dict[str, Any], notes: dict[str, Any]) -> None:
            position = 0
            for key, part in parts.items():
                table[key]["data_offsets"] = [position, position + len(part)]
                position += len(part)
            table[name]["shape"] = [len(data)]
            blocks = [digest(section[start : start + BLOCK_BYTES]) for start in range(0, len(section), BLOCK_BYTES)]
            notes["digests"] = base64.b64encode(np.array(blocks, "<u8").tobytes()).decode()

        old = self.blobs[self.file(folder, rank)]
        self.blobs[self.file(folder, rank)] = old[: int.from_bytes(old[:8], "little") + 8] + section
        return self.edit_header(folder, change, rank)

    def edit_tree(self, change: Callable[[Any], Any]) -> Forgery:
        """Changes the plain values all ranks share, as JSON; ``change`` returns them or changes them in place."""
        tree = json.loads(self.entries("state")["~tree"])
        made = change(tree)
        return self.rewrite("state", "~tree", json.dumps(tree if made is None else made).encode())


def _size(item: dict[str, Any]) -> int:
    start, stop = item["data_offsets"]
    return stop - start


def signed(raw: dict[str, Any]) -> bytes:
    """A manifest from its JSON, with the digest that belongs to it."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in raw.items())
    text = ("{\n" + lines).encode()
    return text + b',\n"digest": "%016x"\n}\n' % digest(text)


def _framed(text: bytes) -> bytes:
    padded = -(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def at(*path: Any) -> Change:
    """A change: the last argument is the value for the place that the others lead to."""
    *inner, last, value = path

    def change(raw: Any) -> None:
        for part in inner:
            raw = raw[part]
        raw[last] = value

    return change


@contextlib.contextmanager
def memory_limit(more_bytes: int = 1 << 30) -> Iterator[None]:
    """Inside, the process cannot take more than so much address space beyond what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
