"""What the coordinator alone decides and all ranks are told: whose root it is, which start of the run, which step to use."""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
import warnings
from collections.abc import Sequence

import msgspec

from keepstep.agent.node import Owner
from keepstep.checkpointer.loading import found_manifest
from keepstep.commit.catalog import Found, read_catalog, step_storage
from keepstep.commit.publish import RUN_NAME, new_incarnation, run_of
from keepstep.errors import (
    CorruptError,
    DamageWarning,
    FormatError,
    MismatchError,
    StepNotFoundError,
    StorageError,
)
from keepstep.failpoints import reach
from keepstep.format.manifest import FORMAT_MAJOR, step_name
from keepstep.storage.base import Storage
from keepstep.storage.local import LocalStorage
from keepstep.storage.remote import RemoteStorage

__all__ = ["Choice", "Start", "begin_run", "choose_step", "own_root", "warn_damaged"]


class Start(msgspec.Struct):
    """What the coordinator tells all ranks about this start of the job."""

    run: str
    incarnation: int


class Choice(msgspec.Struct):
    """The step to restore: its manifest, or nothing on a fresh run. ``skipped`` says what was wrong with newer ones.

    ``incarnation`` is the one to go on in, when it is another than before.
    """

    manifest: bytes = b""
    skipped: tuple[str, ...] = ()
    step: int = 0
    incarnation: int = 0


def own_root(root: Storage, posted: list[bytes], held: contextlib.ExitStack) -> None:
    """One root for all ranks, which on this machine is nobody else's until ``held`` is closed.

    Raises:
        MismatchError: ranks were given different roots.
        RunOwnedError: another job that is alive has it.
    """
    if len(set(posted)) > 1:
        lines = [f"rank {rank}: {url.decode()}" for rank, url in enumerate(posted)]
        raise MismatchError("ranks were given different roots; nothing was written:", lines)
    # (A store with options of its own may be another one than the next job's with the same URL.)
    if isinstance(root, LocalStorage) or (isinstance(root, RemoteStorage) and root.is_plain):
        held.callback(Owner(root.url).release)


def begin_run(root: Storage, world: int) -> Start:
    """One run, and a new incarnation of it."""
    fresh = secrets.token_hex(8)
    if run_of(root) is None:
        about = {"run": fresh, "created": time.time(), "format": FORMAT_MAJOR}
        root.put_new(RUN_NAME, msgspec.json.encode(about) + b"\n")
    # A start that does not restore what is there is another run: it neither replaces nor removes those steps.
    run = fresh if read_catalog(root).steps else run_of(root) or fresh
    # (The id: whoever has lost the answer to its create knows its own note by it.)
    note = {"host": platform.node(), "world_size": world, "started": time.time(), "id": secrets.token_hex(8)}
    return Start(run, new_incarnation(root, msgspec.json.encode(note) + b"\n"))


def choose_step(
    root: Storage, step: int | None, on_damage: str, allow_fresh: bool, skipped: tuple[str, ...], incarnation: int = 0
) -> Choice:
    """The coordinator's decision, told to all: the newest step that is not known to be damaged.

    ``incarnation`` is the one that this start of the job is in.
    """
    reach("choose")
    catalog = read_catalog(root)
    weights_only = []
    if step is not None and step not in {found.step for found in catalog.steps}:
        raise StepNotFoundError(f"{root.url} has no committed step {step}; {catalog.inventory()}")
    bad = {text.partition(":")[0] for text in skipped}
    for index, found in enumerate(catalog.steps):
        name = step_name(found.step)
        if name in bad or (step is not None and found.step != step):
            continue
        if found.dropped and step is None:
            # A run that went on without its optimizer's state would be another run: only who asks for that gets it.
            weights_only.append(
                f"{name}: kept without {', '.join(found.dropped)}; restore(step={found.step}, strict=False)"
            )
            continue
        try:
            if found.damage:
                raise CorruptError(found.damage)
            manifest = found_manifest(step_storage(root, found.step))
            return Choice(manifest, skipped, found.step, _line_after(root, catalog.steps[:index], incarnation))
        except (CorruptError, FormatError, StorageError, StepNotFoundError) as err:
            if on_damage == "raise" or step is not None:
                raise
            skipped = (*skipped, f"{name}: {err}")
            warn_damaged(skipped[-1])
    if (catalog.steps or catalog.unfinished or catalog.aside) and not allow_fresh:
        raise StepNotFoundError(
            f"{root.url} holds no step that can be restored: {catalog.inventory()}"
            + "".join(f"\n  - {text}" for text in (*skipped, *weights_only))
            + "\nNothing was changed. restore(allow_fresh=True) starts from zero beside what is there"
        )
    return Choice(skipped=skipped)


def _line_after(root: Storage, newer: Sequence[Found], incarnation: int) -> int:
    """A new incarnation, when this start of the job has itself saved steps that it now goes back behind; else 0.

    Newer means a higher incarnation, then a higher step: without a new one, what comes next would be older than what is
    left behind.
    """
    if not any(found.incarnation >= incarnation > 0 for found in newer):
        return 0
    note = {"host": platform.node(), "after": incarnation, "started": time.time(), "id": secrets.token_hex(8)}
    return new_incarnation(root, msgspec.json.encode(note) + b"\n")


def warn_damaged(text: str) -> None:
    """Tells the user that a step was passed over."""
    warnings.warn(f"a damaged step was skipped: {text}", DamageWarning, stacklevel=4)
