"""The newest good step, brought back: decided by the coordinator, loaded by all; a damaged one is passed over together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from keepstep.checkpointer.decisions import Choice, choose_step, warn_damaged
from keepstep.checkpointer.loading import LoadReport, Options, load_step
from keepstep.commit.catalog import step_storage
from keepstep.copies.levels import Levels, levels_of
from keepstep.errors import CheckpointError, MismatchError, RankFailedError, UsageError
from keepstep.format.manifest import MANIFEST_NAME, Manifest, parse_manifest, step_name
from keepstep.ranks import Ranks
from keepstep.storage.base import Storage

__all__ = ["Wanted", "restore_step"]

_DAMAGE = frozenset({"corrupt", "format", "storage"})


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Which step to restore (None for the newest good one), and what to do about damage and about a root without one.

    ``incarnation`` is the one that this start of the job is in.

    Raises:
        UsageError: ``on_damage`` is neither "fall_back" nor "raise".
    """

    step: int | None = None
    on_damage: str = "fall_back"
    allow_fresh: bool = False
    incarnation: int = 0

    def __post_init__(self) -> None:
        """Refuses what means nothing."""
        if self.on_damage not in ("fall_back", "raise"):
            raise UsageError(f"on_damage={self.on_damage!r}; it is 'fall_back' or 'raise'")


def restore_step(
    ranks: Ranks,
    root: Storage | Levels,
    state: Mapping[str, Any],
    wanted: Wanted,
    *,
    options: Options,
    deadline_s: float,
) -> tuple[LoadReport, Manifest | None]:
    """Loads the step that is wanted; without a manifest on a fresh root. Collective; see ``Checkpointer.restore``."""
    skipped: tuple[str, ...] = ()
    while True:
        with ranks.phase("restore", deadline_s) as phase:
            posted = phase.gather(msgspec.json.encode(wanted))
            answer = b""
            if posted is not None:
                if len(set(posted)) > 1:
                    raise MismatchError("ranks call restore with different arguments:", map(bytes.decode, posted))
                choice = choose_step(
                    root, wanted.step, wanted.on_damage, wanted.allow_fresh, skipped, wanted.incarnation
                )
                answer = msgspec.msgpack.encode(choice)
            choice = msgspec.msgpack.decode(phase.broadcast(answer), type=Choice)
        skipped = choice.skipped
        if not choice.manifest:
            return LoadReport(0, root.url, True, world=ranks.world, skipped=skipped), None
        manifest = parse_manifest(choice.manifest, f"{step_name(choice.step)}/{MANIFEST_NAME}")
        try:
            storage = step_storage(levels_of(root).places[choice.level], manifest.step)
            report = load_step(ranks, storage, manifest, state, options=options, deadline_s=deadline_s)
        except CheckpointError as err:
            # What made one rank fail was told to the others, so all of them decide alike.
            codes = err.codes.values() if isinstance(err, RankFailedError) else (err.code,)
            final = (wanted.on_damage == "raise" or wanted.step is not None) and not choice.again
            if final or not _DAMAGE.issuperset(codes):
                raise
            skipped = (*skipped, f"{choice.label}: {err}")
            if ranks.leads:
                warn_damaged(skipped[-1])
            continue
        incarnation = choice.incarnation or wanted.incarnation
        return replace(report, skipped=skipped, incarnation=incarnation), manifest
