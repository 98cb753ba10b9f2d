"""Trainings whose file operations are recorded, and every disk that a crash in one of them may leave."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import io
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import keepstep as ks
from keepstep.checkpointer import decisions, saving
from keepstep.commit.catalog import read_catalog
from keepstep.commit.records import read_records
from keepstep.move import arena
from keepstep.storage.local import LocalStorage
from tests.crash.promise import Broken, Claims, Inspector, advanced, found_value, small
from tests.crash.recorder import Op, Recorder
from tests.crash.states import MODELS, Disk, Image

__all__ = [
    "Count", "crashed", "enumerate_crashes", "go_through", "merged", "put_down", "record", "repeatable", "taken", "train",
]  # fmt: skip

ROOT = "run"
NOTHING = Image({}, frozenset())


@contextlib.contextmanager
def repeatable(seed: int):
    """Names, times and dates that are the same in every run; and no 64 MiB of memory for every small save."""
    rng, then = random.Random(seed), dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    patched = {
        (secrets, "token_hex"): lambda count=32: rng.randbytes(count).hex(),
        (decisions, "time"): SimpleNamespace(time=lambda: 0.0),
        (saving, "dt"): SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda zone: then)),
        (arena, "_fault_in"): lambda *_args, **_options: None,
    }  # fmt: skip
    real = {where: getattr(*where) for where in patched}
    for (module, name), value in patched.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in real.items():
            setattr(module, name, value)


def record(base: Path, *sessions: Callable[[Path, Recorder], None], seed: int = 1) -> list[Op]:
    """What these sessions do below ``base``, one after another; proves that nothing was missed.

    What is in ``base`` already is taken for known: whoever follows the recording begins with it.
    """
    before = taken(base)
    with repeatable(seed), Recorder(base) as log:
        for session in sessions:
            session(base / ROOT, log)
    return merged(base, [log.ops], before)


def train(
    *saves: tuple[int, float], length: int = 900, optimizer: bool = False, **options: Any
) -> Callable[[Path, Recorder], None]:
    """A start of a job: restores the newest step (or the one given), then saves these (step, value)."""

    def session(root: Path, log: Recorder) -> None:
        go_through(root, log, saves, small(length, optimizer=optimizer), **options)

    return session


def go_through(
    root: Path,
    log: Recorder,
    saves: Sequence[tuple[int, float]],
    state: Any,
    *,
    restore: int | bool = False,
    keep: int = 1,
    background: str = "off",
    rules: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """The same on one rank of some. ``rules`` are those of ``Keep`` besides how many of the last steps stay."""
    storage = LocalStorage(root)
    records = len(read_records(storage))
    quiet = contextlib.redirect_stderr(io.StringIO())
    made = ks.Checkpointer(root, state, keep=ks.Keep(last=keep, **rules), background=background, **options)
    with quiet, made as checkpointer:
        if restore is not False:
            there = bool(read_catalog(storage).steps)
            report = checkpointer.restore(step=None if restore is True else restore, allow_fresh=not there)
            if not report.fresh:
                _mark(log, "restored", root, report.step, found_value(state))
        for step, value in saves:
            advanced(state, step, value)
            log.mark("begin", step)
            checkpointer.save().wait_committed(30)
            _mark(log, "returned", root, step, value)
        if background != "off":
            # Old steps go, and the record is written, when everybody has been told already.
            until = time.monotonic() + 30
            while len(read_records(storage)) < records + len(saves):
                assert time.monotonic() < until, "the last save was never recorded"
                time.sleep(0.001)


def _mark(log: Recorder, kind: str, root: Path, step: int, value: float) -> None:
    found = next(found for found in read_catalog(LocalStorage(root)).steps if found.step == step)
    log.mark(kind, step, order=found.order, save_id=found.save_id, value=value)


def merged(base: Path, recordings: Sequence[Sequence[Op]], before: Image = NOTHING) -> list[Op]:
    """What some processes did below a folder, in the order of time; proves that nothing was missed."""
    ops = sorted((op for ops in recordings for op in ops), key=lambda op: op.at)
    disk = Disk.of(before)
    for op in ops:
        disk.do(op)
    assert disk.now() == taken(base), "the recording does not lead to what is on the disk"
    return ops


def taken(base: Path) -> Image:
    """What is below a folder of the disk."""
    paths = list(base.rglob("*"))
    files = {path.relative_to(base).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    return Image(files, frozenset(path.relative_to(base).as_posix() for path in paths if path.is_dir()))


def put_down(image: Image, base: Path) -> None:
    """Makes it so."""
    for folder in sorted(image.folders):
        (base / folder).mkdir(parents=True)
    for name, data in image.files.items():
        (base / name).write_bytes(data)


@dataclass(slots=True)
class Count:
    """How much was looked at. ``moments`` between two operations; ``images`` of the disk, and how many of them differ."""

    seed: int
    moments: int = 0
    images: int = 0
    complete: bool = True
    different: set[int] = field(default_factory=set)
    views: set[int] = field(default_factory=set)
    _fine: set[Any] = field(default_factory=set)

    def look(self, image: Image, inspector: Inspector, claims: Claims) -> list[str]:
        """What is wrong with an image, after what was said."""
        self.images += 1
        self.different.add(hash(image.key()))
        view, found = inspector.look(image)
        self.views.add(view)
        if (view, claims.key()) in self._fine:
            return []
        problems = [*found.problems, *claims.broken_by(found)]
        if not problems:
            self._fine.add((view, claims.key()))
        return problems

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.images:,} states at {self.moments:,} moments, {len(self.different):,} of them"
            f" different, {len(self.views):,} to a reader; {'all there are' if self.complete else 'a sample'}"
        )


def enumerate_crashes(
    ops: Sequence[Op],
    inspector: Inspector,
    count: Count,
    *,
    most: int,
    models: Sequence[str] = MODELS,
    start: int = 0,
    before: tuple[Image, Claims] | None = None,
) -> None:
    """Checks every state that a crash may leave at each moment from the ``start``-th operation on.

    Args:
        ops: what was recorded.
        inspector: looks at the images.
        count: is added to; has the seed.
        most: how many images to look at in one moment, if there are more.
        models: of the disk.
        start: the first moment; what is before it was looked at already.
        before: what was there at first, and what had been said by then; an empty disk if None.

    Raises:
        Broken: the first of them in which the promise does not hold.
    """
    rng = random.Random(count.seed)
    image, claims = before or (NOTHING, Claims(inspector.keep, inspector.root))
    disk, claims = Disk.of(image), copy.deepcopy(claims)
    with repeatable(count.seed):
        for index, op in enumerate([*ops, None]):
            if index >= start:
                count.moments += 1
                for model in models:
                    for image in disk.images(model, most, rng):
                        problems = count.look(image, inspector, claims)
                        if problems:
                            raise Broken(_told(model, index, ops, image, problems))
            if op is not None:
                disk.do(op)
                claims.hear(op)
    count.complete &= disk.complete


def crashed(ops: Sequence[Op], keep: int, model: str, rng: random.Random) -> tuple[Image, Claims]:
    """One state that a crash at some moment may leave, and what had been said by then."""
    disk, claims = Disk(), Claims(keep, ROOT)
    for op in ops[: rng.randrange(len(ops) + 1)]:
        disk.do(op)
        claims.hear(op)
    return rng.choice(list(disk.images(model, 50, rng))), claims


def _told(model: str, index: int, ops: Sequence[Op], image: Image, problems: Sequence[str]) -> str:
    last = [f"  {at}: {op.kind} {op.path or op.inode} {op.to}" for at, op in enumerate(ops[:index])][-8:]
    there = [f"  {name} ({len(data):,} bytes)" for name, data in sorted(image.files.items())]
    return "\n".join(
        (
            f"{model}: a crash after operation {index}",
            *(f"- {text}" for text in problems),
            "did:",
            *last,
            "has:",
            *there,
        )
    )
