"""What a load would do, found out without reading a tensor or changing anything."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from keepstep.checkpointer.options import LoadReport
from keepstep.format.dtypes import ITEM_BYTES
from keepstep.format.layout import Structure
from keepstep.format.manifest import STATE_FOLDER, Manifest, file_name
from keepstep.plan.load_plan import find_pieces
from keepstep.ranks import Ranks
from keepstep.state.restore import Binder
from keepstep.storage.base import Storage

__all__ = ["both", "foresee"]


def foresee(ranks: Ranks, storage: Storage, manifest: Manifest, binder: Binder, deadline_s: float) -> LoadReport:
    """The report of a load that has bound everything and fits; the same files and bytes on every rank. Collective."""
    with ranks.phase(f"look at step {manifest.step}", deadline_s) as phase:
        stored = Structure(manifest.meshes, manifest.layouts, manifest.tensors)
        sizes = {spec.key: ITEM_BYTES[spec.dtype] for spec in manifest.tensors}
        mine: dict[str, int] = {}
        for piece in find_pieces(stored, binder.wants, ranks.rank):
            name = file_name(piece.folder, piece.rank, manifest.save_id)
            mine[name] = mine.get(name, 0) + math.prod(piece.overlap.sizes) * sizes[piece.key]
        for owner, targets in binder.own_targets.items():
            name = file_name(STATE_FOLDER, owner, manifest.save_id)
            mine[name] = mine.get(name, 0) + sum(each.numel() * each.element_size() for each in targets.values())
        posted = phase.gather(msgspec.msgpack.encode(mine))
        each = [msgspec.msgpack.decode(raw, type=dict[str, int]) for raw in posted or ()]
        files: dict[str, int] = {}
        for counts in each:
            for name, count in counts.items():
                files[name] = files.get(name, 0) + count
        answer = msgspec.msgpack.encode((files, [sum(counts.values()) for counts in each]))
        told = phase.broadcast(answer if posted is not None else None)
    files, needed = msgspec.msgpack.decode(told, type=tuple[dict[str, int], tuple[int, ...]])
    return LoadReport(
        step=manifest.step,
        url=storage.url,
        saved_world=manifest.world_size,
        world=ranks.world,
        bytes_needed=needed[ranks.rank],
        components=binder.reports,
        notes=tuple(binder.notes),
        dry=True,
        files=dict(sorted(files.items())),
        rank_bytes=needed,
        base=binder.mark or "",
    )


def both(report: LoadReport, source: LoadReport) -> LoadReport:
    """What a load of a step and of what was left out of it did, or would do. Files of the other begin with its place."""
    renamed = set(source.notes)
    notes = [note for note in report.notes if not note.startswith("rename=") or note in renamed]
    comes = "comes" if report.dry else "came"
    return replace(
        report,
        bytes_read=report.bytes_read + source.bytes_read,
        bytes_received=report.bytes_received + source.bytes_received,
        bytes_needed=report.bytes_needed + source.bytes_needed,
        files={**report.files, **{f"{source.url}/{name}": count for name, count in source.files.items()}},
        rank_bytes=tuple(a + b for a, b in zip(report.rank_bytes, source.rank_bytes, strict=True)),
        notes=(*notes, f"what was left out {comes} from {source.url}"),
    )
