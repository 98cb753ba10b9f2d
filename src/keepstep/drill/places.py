"""Roots of a drill as they lie on disk: which steps are committed, copies of them, and damage done to the copies."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from keepstep.commit.catalog import read_catalog
from keepstep.drill.jobs import stop_agent
from keepstep.drill.runs import Site
from keepstep.errors import UnprovenError, UsageError
from keepstep.format.manifest import step_name
from keepstep.storage.local import LocalStorage

__all__ = ["committed_steps", "cut_file", "flip_byte", "keep_only", "make_work", "newest_committed", "site"]


def make_work(folder: Path) -> None:
    """An empty folder for a drill.

    Raises:
        UsageError: something is in it already: a drill touches nothing that it has not made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; a drill works in one of its own")
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def site(work: Path, name: str, *, like: Site | None = None) -> Iterator[Site]:
    """The folders of one scenario, with a copy of another one's root where it shall go on from there.

    Its agent has left when this ends.
    """
    made = Site(work / name)
    made.folder.mkdir()
    if like is not None:
        shutil.copytree(like.root, made.root)
    try:
        yield made
    finally:
        stop_agent(str(made.root), now=True)


def committed_steps(root: Path) -> list[int]:
    """The steps that exist below a root, newest first."""
    if not root.is_dir():
        return []
    return [found.step for found in read_catalog(LocalStorage(root)).steps if not found.damage]


def newest_committed(root: Path) -> int:
    """The newest step that exists; -1 for none."""
    return next(iter(committed_steps(root)), -1)


def keep_only(root: Path, step: int) -> None:
    """Removes all other steps of a root that the drill has made."""
    for path in root.glob("step-*"):
        if path.name != step_name(step):
            shutil.rmtree(path)


def flip_byte(root: Path, step: int, rng: random.Random) -> str:
    """Changes one bit in the data of one file of a step; says where."""
    path = _some_file(root, step, rng)
    size = path.stat().st_size
    with path.open("r+b") as stream:
        # The last byte is of a tensor, or of values: what lies between tensors would be no damage.
        stream.seek(size - 1)
        byte = stream.read(1)[0]
        stream.seek(size - 1)
        stream.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return f"one bit of byte {size - 1:,} of {path.relative_to(root)}"


def cut_file(root: Path, step: int, rng: random.Random) -> str:
    """Cuts one file of a step short; says where."""
    path = _some_file(root, step, rng)
    size = rng.randrange(path.stat().st_size)
    with path.open("r+b") as stream:
        stream.truncate(size)
    return f"{path.relative_to(root)}, cut to {size:,} bytes"


def _some_file(root: Path, step: int, rng: random.Random) -> Path:
    files = sorted(path for path in (root / step_name(step)).rglob("*.safetensors") if path.stat().st_size)
    if not files:
        raise UnprovenError(f"step {step} below {root} has no file that could be damaged")
    return rng.choice(files)
