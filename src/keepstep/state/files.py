"""Files that a run was made with, such as its tokenizer: their bytes are part of every step.

In: names and paths. Out: one uint8 tensor for each file, under the path it has below what was attached. A restore touches no
file: it says what the disk holds beside what was saved, and ``write`` puts what was saved into a new folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import CorruptError, StorageError, UsageError
from keepstep.storage.local import sync_folder

__all__ = ["FILES", "Files"]

FILES = "files"
MAX_BYTES = 1 << 30
"""Of all attached files together: each step holds them again, and a save copies them."""
SHOWN = 5

Tree = dict[str, Any]
"""A folder: names to tensors, and to the trees of the folders inside."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What tells a file from one that was written since, and its bytes."""

    signature: tuple[int, int, int]
    content: torch.Tensor


@dataclass(slots=True)
class _Reading:
    """One look at everything that is attached: what was found, and what is wrong with it."""

    known: Mapping[str, _Look]
    found: dict[str, _Look] = field(default_factory=dict)
    size_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Files:
    """The attached files of a state. A part of the state like any other; ``TrainState.files`` is this object.

    Links are followed: what they lead to is stored. A file is read again only when its size or its time has changed. What
    was attached and cannot be read any more, because it has gone, keeps the content it had.

    Args:
        paths: name → file or folder.

    Raises:
        UsageError: lists every path that is not there, everything that is neither file nor folder, what cannot be read,
            and files that are too large to be kept in every step.
    """

    def __init__(self, paths: Mapping[str, str | os.PathLike[str]]) -> None:
        self._paths = {name: Path(path).absolute() for name, path in paths.items()}
        self._looks: dict[str, _Look] = {}
        self._trees: dict[str, Tree] = {}
        self._restored: dict[str, Tree] | None = None
        wrong = [f"{name!r}: not a name" for name in paths if type(name) is not str or not name]
        wrong = wrong or self._look()
        if wrong:
            raise UsageError("files= attaches files and folders by name; it cannot attach\n  " + "\n  ".join(wrong))

    @property
    def size_bytes(self) -> int:
        """The bytes of all files, as they were last read."""
        return sum(look.content.numel() for look in self._looks.values())

    def state_dict(self) -> dict[str, Tree]:
        """Name → path below it → bytes; a file that was attached alone has its own name as that path."""
        self._look()
        return dict(self._trees)

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Keeps what a step holds for ``write``. Nothing on the disk is touched."""
        self._restored = state

    def differences(self) -> list[str]:
        """For each name, one line: whether the disk holds what the restored step holds."""
        saved, lines = self._restored or {}, []
        for name in dict.fromkeys([*saved, *self._paths]):
            if name not in saved:
                lines.append(f"{name}: attached now, not in the step")
            elif name not in self._paths:
                lines.append(f"{name}: in the step, not attached now")
            elif not self._paths[name].exists():
                lines.append(f"{name}: absent from the disk")
            else:
                lines.append(f"{name}: {self._beside(saved[name], name)}")
        return lines

    def write(self, name: str, to: str | os.PathLike[str]) -> Path:
        """Writes what the restored step holds under a name into the new folder ``to``, and returns that folder.

        Not collective: one rank of those that share the disk is enough. The folder is there whole or not at all, and
        durable on return.

        Raises:
            UsageError: no step was restored, it has no such name, or something is in the place of the folder.
            CorruptError: a saved path would lead out of the folder. Nothing was written.
            StorageError: the disk refuses.
        """
        saved, target = self._restored or {}, Path(to).absolute()
        if name not in saved:
            held = ", ".join(map(repr, saved)) or "none"
            raise UsageError(
                f"no files {name!r} to write: the restored step holds {held}; restore a step that has them"
            )
        if target.is_symlink() or target.exists():
            raise UsageError(f"{target} exists; files are written into a folder of their own, nothing was overwritten")
        _prove_inside(saved[name], name)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            _write_tree(saved[name], partial)
            partial.rename(target)
            sync_folder(target.parent)
        except OSError as err:
            shutil.rmtree(partial, ignore_errors=True)
            raise StorageError("write", str(target), err) from err
        return target

    def _look(self) -> list[str]:
        """Reads what has changed, and returns what could not be read: it keeps the content it had."""
        reading = _Reading(self._looks)
        for name, path in self._paths.items():
            before = len(reading.problems)
            tree = _read(path, reading, ())
            if len(reading.problems) == before:
                self._trees[name] = tree if path.is_dir() else {path.name: tree}
        self._looks = {**self._looks, **reading.found} if reading.problems else reading.found
        return reading.problems

    def _beside(self, saved: Tree, name: str) -> str:
        """The disk beside the step, in words. What cannot be read counts as differing."""
        self._look()
        then, now = dict(_flat(saved)), dict(_flat(self._trees.get(name, {})))
        gone = [f"{path} absent" for path in then if path not in now]
        new = [f"{path} new" for path in now if path not in then]
        other = [f"{path} changed" for path in then if path in now and not torch.equal(then[path], now[path])]
        notes = [*other, *gone, *new]
        if not notes:
            return "the same on the disk"
        return f"differs on the disk ({', '.join(notes[:SHOWN])}{', …' if len(notes) > SHOWN else ''})"


def _read(path: Path, reading: _Reading, above: tuple[Path, ...]) -> Any:
    """The content of a file, or the tree of a folder; ``above`` are the real folders it lies in."""
    try:
        if path.is_dir():
            real = path.resolve()
            if real in above:
                reading.problems.append(f"{path}: a link to a folder that it lies in")
                return {}
            return {part.name: _read(part, reading, (*above, real)) for part in sorted(path.iterdir())}
        if path.is_file():
            return _read_file(path, reading)
    except OSError as err:
        reading.problems.append(f"{path}: {err.strerror or err}")
        return None
    if not os.path.lexists(path):
        reading.problems.append(f"{path}: not there")
    elif path.is_symlink():
        reading.problems.append(f"{path}: a link to nothing")
    else:
        reading.problems.append(f"{path}: neither a file nor a folder")
    return None


def _read_file(path: Path, reading: _Reading) -> torch.Tensor:
    found = path.stat()
    signature = found.st_ino, found.st_size, found.st_mtime_ns
    room, reading.size_bytes = MAX_BYTES - reading.size_bytes, reading.size_bytes + found.st_size
    if found.st_size > room:
        # Told once, for the file that is too much; nothing after it is read.
        if room >= 0:
            reading.problems.append(f"{path}: with it more than {MAX_BYTES:,} bytes, which every step would hold")
        return torch.empty(0, dtype=torch.uint8)
    look = reading.found.get(str(path)) or reading.known.get(str(path))
    if look is None or look.signature != signature:
        data = bytearray(path.read_bytes())
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        look = _Look(signature, content)
    reading.found[str(path)] = look
    return look.content


def _flat(tree: Tree, below: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, item in tree.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{below}{name}/")
        else:
            yield f"{below}{name}", item


def _prove_inside(tree: Tree, path: str) -> None:
    """Every part of every path is the name of something in its folder, and nothing else."""
    for name, item in tree.items():
        plain = type(name) is str and name not in ("", ".", "..") and not {"/", "\0", os.sep} & set(name)
        if not plain or not isinstance(item, dict | torch.Tensor):
            raise CorruptError(f"files/{path}: {name!r} is no name of a file; nothing was written")
        if isinstance(item, dict):
            _prove_inside(item, f"{path}/{name}")


def _write_tree(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, item in tree.items():
        if isinstance(item, dict):
            _write_tree(item, folder / name)
            continue
        with (folder / name).open("xb") as file:
            file.write(item.numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)
