"""What must be true of a root after any crash: seen by a reader, and compared with what the program had said by then."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.checkpointer.decisions import choose_step
from keepstep.commit.catalog import read_catalog, step_storage
from keepstep.commit.publish import LATEST_NAME
from keepstep.commit.records import read_records
from keepstep.errors import CheckpointError, StepNotFoundError
from keepstep.format.manifest import MANIFEST_NAME, parse_manifest, parse_step_name
from keepstep.storage.base import Blob, Storage, read_blob
from keepstep.storage.local import PARTIAL
from keepstep.storage.memory import MemoryStorage
from tests.crash.recorder import Op
from tests.crash.states import Image

__all__ = ["Broken", "Claims", "ImageStorage", "Inspector", "advanced", "found_value", "small"]

LENGTH = 900


class Broken(AssertionError):
    """The promise does not hold on this disk."""


class ImageStorage(MemoryStorage):
    """What a crash has left, in memory, to be read and to go on from. Behaves as LocalStorage on the same files would.

    ``opened`` are the names that somebody has read.
    """

    def __init__(self, image: Image | None = None, root: str = "") -> None:
        super().__init__("image")
        start = f"{root}/" if root else ""
        given = image or Image({}, frozenset())
        self._blobs = {path[len(start) :]: data for path, data in given.files.items() if path.startswith(start)}
        self._folders = {path[len(start) :] for path in given.folders if path.startswith(start)}
        self.opened: set[str] = set()

    def open(self, name: str) -> Blob:
        self.opened.add(name)
        return super().open(name)

    def folders(self) -> Sequence[str]:
        """Empty ones too, as a disk has them, until somebody deletes something in them."""
        return sorted({*super().folders(), *(path for path in self._folders if "/" not in path)})

    def delete(self, names: Sequence[str]) -> None:
        super().delete(names)
        left = {name.split("/", 1)[0] for name, _ in self.list("")}
        gone = {name.split("/", 1)[0] for name in names} - left
        self._folders = {path for path in self._folders if path.split("/", 1)[0] not in gone}


# --- a training that is small enough ---------------------------------------------------------------------------------


class Small(ks.TrainState):
    """A state without random streams: their twenty kilobytes would only multiply the states of the disk."""

    def __iter__(self):
        return (name for name in super().__iter__() if name != "rng")

    def __len__(self) -> int:
        return super().__len__() - 1


def small(length: int = LENGTH, rank: int = 0, world: int = 1, *, optimizer: bool = False) -> Small:
    share = length // world
    shard = ks.sharded(torch.zeros(share), global_shape=(length,), offsets=(share * rank,))
    more = {}
    if optimizer:
        more["model"] = torch.nn.Linear(3, 3)
        more["optimizer"] = torch.optim.SGD(more["model"].parameters(), lr=0.1, momentum=0.9)
        more["model"](torch.ones(1, 3)).sum().backward()
        more["optimizer"].step()
    return Small(w={"w": shard, "value": 0.0}, **more)


def advanced(state: Small, step: int, value: float) -> None:
    state.progress.step = step
    state["w"]["w"].local.fill_(value)
    state["w"]["value"] = value


def found_value(state: Small) -> float:
    """The value that all parts of the state have.

    Raises:
        Broken: they have different ones.
    """
    value = state["w"]["value"]
    if not torch.all(state["w"]["w"].local == value):
        raise Broken(f"parts of two saves: {state['w']}")
    return value


# --- what a reader finds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is found in an image, whatever was said before: the steps, newest first, and what is wrong already."""

    steps: dict[int, tuple[tuple[int, int], str]]
    value: float | None
    problems: tuple[str, ...] = ()

    @property
    def newest(self) -> tuple[int, int]:
        return next(iter(self.steps.values()))[0] if self.steps else (0, 0)


@dataclass(slots=True)
class Claims:
    """What the program has said so far, and what it has begun that may take something back.

    ``must`` are steps that nobody may lose, with the save that they have to be of; "" when one is being replaced.
    """

    keep: int
    root: str
    must: dict[int, str] = field(default_factory=dict)
    newest: tuple[int, int] = (0, 0)
    values: dict[str, float] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)

    def hear(self, op: Op) -> None:
        """Follows the recording."""
        if op.kind == "begin" and op.step in self.must:
            self.must[op.step] = ""
        elif op.kind in ("returned", "restored"):
            self.must[op.step] = op.save_id
            self.newest = max(self.newest, op.order)
            self.values[op.save_id] = op.value
            self.told.add(op.step)
        elif op.kind == "unlink" and op.path.endswith(f"/{MANIFEST_NAME}"):
            # From here on this step may go; that enough others stay is checked by their number.
            self.must.pop(parse_step_name(op.path.split("/")[-2]) or -1, None)

    def key(self) -> tuple[Any, ...]:
        return tuple(self.must.items()), self.newest, len(self.told), tuple(self.values.items())

    def broken_by(self, found: Outlook) -> list[str]:
        """What was said and is not true of what is found."""
        problems = []
        if found.newest < self.newest:
            problems.append(f"the newest step is {found.newest}, but {self.newest} (incarnation, step) was reported")
        for step, save_id in self.must.items():
            if step not in found.steps:
                problems.append(f"step {step} is lost; there are {list(found.steps)}")
            elif save_id and found.steps[step][1] != save_id:
                problems.append(f"step {step} is of save {found.steps[step][1]}; {save_id} was reported")
        if len(found.steps) < min(self.keep, len(self.told)):
            problems.append(f"only steps {list(found.steps)} are left of {sorted(self.told)}; {self.keep} should be")
        newest_id = next(iter(found.steps.values()))[1] if found.steps else ""
        if not found.problems and found.value != self.values.get(newest_id, found.value):
            problems.append(f"save {newest_id} gives {found.value}; {self.values[newest_id]} was saved")
        return problems


class Inspector:
    """Reads images as a user would, and goes on from each; what was found in the same files before is remembered."""

    def __init__(self, keep: int, length: int = LENGTH, *, optimizer: bool = False, root: str = "run") -> None:
        self.keep = keep
        self.fresh = functools.partial(small, length, optimizer=optimizer)
        self.root = root
        self._outlooks: dict[frozenset[Any], Outlook] = {}
        self._verified: dict[frozenset[Any], str] = {}

    def look(self, image: Image) -> tuple[int, Outlook]:
        """The number of this view among all different ones, and what is found."""
        # Nobody reads unfinished files (which is checked), so what they hold makes no difference; that they are there does.
        key = frozenset(
            (
                *((path, b"" if path.endswith(PARTIAL) else data) for path, data in image.files.items()),
                *image.folders,
            )
        )
        if key not in self._outlooks:
            self._outlooks[key] = self._outlook(image)
        return hash(key), self._outlooks[key]

    def _outlook(self, image: Image) -> Outlook:
        storage = ImageStorage(image, self.root)
        problems: list[str] = []
        steps, value = {}, None
        try:
            steps = self._whole_steps(storage, problems)
            self._hint(storage, steps, problems)
            read_records(storage)
            self._decision(storage, steps, problems)
            value = self._go_on(storage, steps, problems)
        except (CheckpointError, Broken) as err:
            problems.append(f"{type(err).__name__}: {err}")
        if any(name.endswith(PARTIAL) for name in storage.opened):
            problems.append(f"unfinished files were read: {storage.opened}")
        return Outlook(steps, value, tuple(problems))

    def _whole_steps(self, storage: Storage, problems: list[str]) -> dict[int, tuple[tuple[int, int], str]]:
        """Every step that is reported, each digest of it proved."""
        catalog = read_catalog(storage)
        for found in catalog.steps:
            problem = found.damage or self._damage(storage, found.step)
            if problem:
                problems.append(f"step {found.step} is reported and damaged: {problem}")
        return {found.step: (found.order, found.save_id) for found in catalog.steps}

    def _damage(self, storage: Storage, step: int) -> str:
        place = step_storage(storage, step)
        key = frozenset((name, read_blob(place, name, 1 << 30)) for name, _ in place.list("") if PARTIAL not in name)
        if key not in self._verified:
            *_, last = verify(place)
            self._verified[key] = "; ".join(problem.text for problem in last.problems)
        return self._verified[key]

    def _hint(self, storage: Storage, steps: dict[int, Any], problems: list[str]) -> None:
        if LATEST_NAME in dict(storage.list("")):
            try:
                named = json.loads(read_blob(storage, LATEST_NAME, 1 << 16))["step"]
            except ValueError as err:
                problems.append(f"latest cannot be parsed: {err}")
            else:
                if named not in steps:
                    problems.append(f"latest names step {named}; there are {list(steps)}")

    def _decision(self, storage: Storage, steps: dict[int, Any], problems: list[str]) -> None:
        """What the coordinator tells all ranks to restore. Nothing usable is an error, unless nothing is there at all."""
        unfinished = read_catalog(storage).unfinished
        try:
            choice = choose_step(storage, None, "raise", False, ())
        except StepNotFoundError as err:
            if steps or not unfinished:
                problems.append(str(err))
            return
        if unfinished and not steps:
            problems.append(f"taken for a fresh run, with {unfinished}")
        elif steps:
            manifest = parse_manifest(choice.manifest, "the choice")
            if manifest.step != next(iter(steps)):
                problems.append(f"step {manifest.step} is restored; the newest is {next(iter(steps))}")

    def _go_on(self, storage: ImageStorage, steps: dict[int, Any], problems: list[str]) -> float | None:
        """Restores, as a job does that starts again; saves the next step; proves all there is then."""
        state = self.fresh()
        quiet = contextlib.redirect_stderr(io.StringIO())
        with quiet, ks.Checkpointer(storage, state, keep=ks.Keep(last=self.keep), background="off") as checkpointer:
            report = checkpointer.restore(allow_fresh=not steps)
            value = None if report.fresh else found_value(state)
            if report.step != next(iter(steps), 0):
                problems.append(f"restored step {report.step} of {list(steps)}")
            left = [name for name, _ in storage.list("") if name.endswith(PARTIAL)]
            if left:
                problems.append(f"left after a restore: {left}")
            advanced(state, report.step + 1, -1.0)
            checkpointer.save()
        after: list[str] = []
        there = self._whole_steps(storage, after)
        if next(iter(there), 0) != report.step + 1 or len(there) < min(self.keep, len(steps) + 1):
            after.append(f"steps {list(there)} after step {report.step + 1} was saved onto {list(steps)}")
        self._hint(storage, there, after)
        problems.extend(f"after one more save: {text}" for text in after)
        return value
