"""What must hold at every instant of a simulated world, whoever dies, sleeps, lags or comes back."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.agent.protocol import Begin
from keepstep.commit.catalog import Found, read_catalog
from keepstep.commit.publish import INCARNATIONS, LATEST_NAME, RUN_NAME
from keepstep.commit.records import RECORDS_NAME
from keepstep.format.manifest import MANIFEST_NAME, FileRecord, Manifest, file_name, parse_manifest, step_name
from keepstep.format.shardfile import digest
from tests.simulation.places import SharedStorage, Snapshot
from tests.simulation.world import Process, World

FOLDER = "model"
DATA_BYTES = 16
PATIENCE_S = 4.0
"""Beyond a save's deadline, for its decision to be known everywhere."""


def content_of(save_id: str, step: int, rank: int) -> bytes:
    """What a rank writes in an attempt: the bytes tell whose they are."""
    return f"{save_id} step {step} rank {rank}".encode().ljust(64)


def record_of(save_id: str, step: int, rank: int) -> FileRecord:
    """The record of that file."""
    data = content_of(save_id, step, rank)
    return FileRecord(rank, len(data), DATA_BYTES, f"{digest(data):016x}")


@dataclass(frozen=True)
class Acked:
    """A step that a living trainer was told is committed."""

    run: str
    incarnation: int
    step: int
    save_id: str

    @property
    def order(self) -> tuple[int, int]:
        return self.incarnation, self.step


class Promises:
    """Looks at the storage whenever it changes, and is told what processes were told."""

    def __init__(self, world: World, storage: SharedStorage, keep_last: int) -> None:
        self._world, self._storage, self._keep_last = world, storage, keep_last
        self._blobs = storage.blobs
        self._parsed: dict[bytes, Manifest] = {}
        self._newest = (0, 0)
        self._acked: dict[int, Acked] = {}
        self._committed: set[str] = set()
        self._restored: dict[tuple[int, int], str] = {}
        self._last_start = 0
        self._at_restore = (0, 0)
        self._protected: int | None = None
        self.commits = self.checks = 0
        storage.changed = self.changed

    # --- what lies in the storage ---

    def changed(self, operation: str, name: str) -> None:
        """After every change: everything below must hold now."""
        if name == LATEST_NAME and operation == "put":
            self._check_hint()
        is_manifest = name.endswith(f"/{MANIFEST_NAME}")
        if operation != "delete" and not is_manifest:
            return
        folder = name.partition("/")[0]
        if not is_manifest and f"{folder}/{MANIFEST_NAME}" not in self._blobs:
            return
        if is_manifest and operation != "delete" and name in self._blobs:
            self.commits += 1
            self._committed.add(f"{digest(self._blobs[name]):016x}")
        appeared = operation != "delete" and is_manifest
        self.check(int(folder.removeprefix("step-")) if appeared else None)

    def check(self, appeared: int | None = None) -> None:
        """The newest step is whole and never an older one than before; nothing that was promised is lost."""
        self.checks += 1
        steps = read_catalog(Snapshot(self._blobs)).steps
        for found in steps:
            lacking = self._lacking(found)
            if lacking:
                place = "the newest step" if found is steps[0] else "a step"
                self._world.violate(
                    "whole", f"{place}, {found.step} of start {found.incarnation}, is not whole: {lacking}"
                )
        newest = steps[0].order if steps else (0, 0)
        if newest < self._newest:
            self._world.violate("newest", f"the newest step was {self._newest} and is {newest} now (start, step)")
        if newest[0] < self._last_start and newest != self._at_restore:
            self._world.violate(
                "zombie",
                f"start {self._last_start} has restored {self._at_restore}; then {newest} became the newest (start, step)",
            )
        if any(
            found.incarnation == newest[0] and found.order < self._newest for found in steps if found.step == appeared
        ):
            self._world.violate("order", f"step {appeared} appeared after {self._newest} (start, step)")
        self._newest = newest
        self._check_acked({found.step: found for found in steps})

    def _lacking(self, found: Found) -> str:
        if found.damage:
            return found.damage
        raw = self._blobs[f"{step_name(found.step)}/{MANIFEST_NAME}"]
        manifest = self._parsed.get(raw)
        if manifest is None:
            manifest = self._parsed[raw] = parse_manifest(raw, "")
        for rank in range(manifest.world_size):
            name = file_name(FOLDER, rank, manifest.save_id)
            data = self._blobs.get(f"{step_name(found.step)}/{name}")
            if data is None:
                return f"{name} is missing"
            if data != content_of(manifest.save_id, found.step, rank):
                return f"{name} is of another attempt"
        return ""

    def _check_acked(self, there: dict[int, Found]) -> None:
        for acked in list(self._acked.values()):
            found = there.get(acked.step)
            if found is not None and found.save_id == acked.save_id:
                continue
            del self._acked[acked.step]
            what = f"step {acked.step} of start {acked.incarnation}, reported as committed,"
            if found is not None:
                if found.incarnation < acked.incarnation:
                    self._world.violate("lost", f"{what} was replaced by one of the older start {found.incarnation}")
                continue
            newer = [one for one in there.values() if one.order > acked.order and one.run == acked.run]
            if len(newer) < self._keep_last:
                self._world.violate("lost", f"{what} is gone; only {len(newer)} newer ones are there")
            if acked.step == self._protected:
                self._world.violate("lost", f"{what} is gone, although start {self._last_start} was restored from it")

    def _check_hint(self) -> None:
        hint = self._blobs[LATEST_NAME].decode()
        if not any(one in hint for one in self._committed):
            self._world.violate("hint", f"latest names a step that was never committed: {hint}")

    # --- what processes are told ---

    def chosen(self, incarnation: int, step: int | None) -> None:
        """A start has decided what to restore, the newest (or None: what it was asked for).

        It is the newest indeed, and from now on nothing older may become that.
        """
        followed = max(self.starts()) > incarnation
        if step is not None and step != self._newest[1] and not followed:
            self._world.violate("newest", f"step {step} is to be restored; the newest is {self._newest} (start, step)")
        if incarnation > self._last_start:
            self._last_start, self._at_restore = incarnation, self._newest

    def restored(self, incarnation: int, turn: int, manifest: Manifest | None, now: int) -> None:
        """A rank has restored this, and is in the start ``now``; all ranks of a start restore the same."""
        mine = "nothing" if manifest is None else f"step {manifest.step} of attempt {manifest.save_id}"
        other = self._restored.setdefault((incarnation, turn), mine)
        if mine != other:
            self._world.violate("agreement", f"one rank of start {incarnation} restored {other}, another one {mine}")
        if now >= self._last_start:
            self._protected = None if manifest is None else manifest.step

    def told(self, acked: Acked) -> None:
        """A living trainer has heard that this is committed."""
        if self._acked.get(acked.step) != acked:
            before = self._acked.get(acked.step)
            if before is None or before.order <= acked.order:
                self._acked[acked.step] = acked
            self.check()

    def undecided(self, begin: Begin, process: Process) -> None:
        """A rank still waits for the decision about a save, although its deadline is long over."""
        self._world.violate(
            "deadline", f"{process.name} still waits for the save of step {begin.step} ({begin.attempt})"
        )

    def listed(self, latest: int | None, damaged: list[str | None], at_start: tuple[int, int]) -> None:
        """Somebody looked at the root: what was there when they began must be seen, or something newer."""
        there = {found.step: found.order for found in read_catalog(Snapshot(self._blobs)).steps}
        if damaged:
            self._world.violate("listing", f"what is whole was listed as damaged: {damaged}")
        if at_start > (0, 0) and latest is None:
            self._world.violate("listing", f"nothing was listed, although {at_start} was there (start, step)")
        if latest in there and there[latest] < at_start:
            self._world.violate("listing", f"step {latest} was listed as the newest, although {at_start} was there")

    def starts(self) -> list[int]:
        """The starts of the job so far."""
        names = [name for name in self._blobs if name.startswith(f"{INCARNATIONS}/") and name[-6:].isdigit()]
        return [int(name[-6:]) for name in names]

    @property
    def newest(self) -> tuple[int, int]:
        """The newest step now, as (start, step)."""
        return self._newest

    # --- at the end ---

    def check_tidy(self) -> None:
        """After the last, undisturbed start: nothing is left of dead attempts."""
        steps = read_catalog(Snapshot(self._blobs)).steps
        wanted = {LATEST_NAME, RUN_NAME, RECORDS_NAME}
        for found in steps:
            folder = step_name(found.step)
            manifest = parse_manifest(self._blobs[f"{folder}/{MANIFEST_NAME}"], "")
            names = (file_name(FOLDER, rank, found.save_id) for rank in range(manifest.world_size))
            wanted |= {f"{folder}/{MANIFEST_NAME}", *(f"{folder}/{name}" for name in names)}
        stray = [name for name in self._blobs if name not in wanted and not name.startswith(f"{INCARNATIONS}/0")]
        stray += [name for name in self._blobs if name.startswith(INCARNATIONS) and name.endswith(".partial")]
        if stray:
            self._world.violate("leftovers", f"left behind for ever: {', '.join(sorted(stray)[:8])}")
