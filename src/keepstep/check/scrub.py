"""Steps at rest, read again from time to time: bits that have rotted are told before anybody needs them.

In: the root of a run. Out: one result a step, the one that was looked at longest ago first. What was found when is
remembered in ``scrub.json`` beside the steps, which are only read. Any number of jobs may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from keepstep.check.verify import Problem, Verified, verify
from keepstep.commit.catalog import Catalog, Found, read_catalog, step_storage
from keepstep.commit.garbage import SCRUBBED_NAME
from keepstep.commit.records import now_text
from keepstep.errors import CorruptError, StepNotFoundError, StorageError
from keepstep.format.manifest import step_name
from keepstep.storage.base import Storage, read_blob

__all__ = ["Pace", "Scrubbed", "lower_priority", "read_scrubbed", "scrub"]

MAX_BYTES = 1 << 26
REMEMBERED_PROBLEMS = 5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a step when it was last read whole. ``save_id`` tells it from one that took its place since."""

    step: int
    save_id: str
    at: str
    ok: bool
    bytes: int
    seconds: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to read: at most so many bytes a second on average, 0 for no limit; and when to stop."""

    bytes_per_s: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def keep(self, began: float, done_bytes: int) -> bool:
        """Waits until so many bytes are due since ``began`` (``time.monotonic``). False when it is time to stop."""
        due = began + done_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return not self.stop.wait(max(0.0, due - time.monotonic()))


def scrub(root: Storage, pace: Pace, *, older_than_s: float = 0.0) -> Iterator[tuple[Scrubbed, tuple[Problem, ...]]]:
    """Verifies every committed step once, the one that was looked at longest ago first, and remembers what it found.

    A step that retention takes meanwhile is left out; so is the rest when ``pace`` says to stop. Killed at any point, the
    next call goes on where this one was.

    Args:
        root: of the run.
        pace: how fast.
        older_than_s: steps looked at less than so many seconds ago are left out.

    Raises:
        StorageError: the storage refused to list or to remember.
    """
    for found in _due(read_catalog(root), read_scrubbed(root), older_than_s):
        began = time.monotonic()
        verified = Verified(None)
        try:
            for verified in verify(step_storage(root, found.step)):
                if not pace.keep(began, verified.bytes):
                    return
        except StepNotFoundError:
            continue
        result = Scrubbed(
            step=found.step,
            save_id=found.save_id,
            at=now_text(),
            ok=verified.ok,
            bytes=verified.bytes,
            seconds=time.monotonic() - began,
            problems=tuple(f"{one.kind}: {one.text}" for one in verified.problems[:REMEMBERED_PROBLEMS]),
        )
        _remember(root, result)
        yield result, verified.problems


def read_scrubbed(root: Storage) -> dict[str, Scrubbed]:
    """What is remembered, by the name of the step's folder. Whatever cannot be read was not looked at."""
    try:
        return msgspec.json.decode(read_blob(root, SCRUBBED_NAME, MAX_BYTES), type=dict[str, Scrubbed])
    except StorageError as err:
        if err.errno != errno.ENOENT:
            raise
    except (CorruptError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return {}


def lower_priority() -> None:
    """Lets everybody else go first, to the processor and to the disk. The calling thread, and those it starts from now on.

    Where the system does not offer that, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine()) if platform.system() == "Linux" else None
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IDLE)


def _due(catalog: Catalog, known: dict[str, Scrubbed], older_than_s: float) -> list[Found]:
    now = datetime.now(UTC)

    def age_s(found: Found) -> float:
        last = known.get(step_name(found.step))
        if last is None or last.save_id != found.save_id:
            return float("inf")
        try:
            return (now - datetime.fromisoformat(last.at)).total_seconds()
        except (ValueError, TypeError):
            return float("inf")

    aged = [(age_s(found), found) for found in catalog.steps]
    due = [(age, found) for age, found in aged if age >= older_than_s]
    return [found for _, found in sorted(due, key=lambda each: (-each[0], each[1].order))]


def _remember(root: Storage, result: Scrubbed) -> None:
    known = read_scrubbed(root)
    known[step_name(result.step)] = result
    there = set(root.folders())
    data = msgspec.json.encode({name: one for name, one in sorted(known.items()) if name in there})
    root.put(SCRUBBED_NAME, msgspec.json.format(data, indent=1) + b"\n")
