"""What planning a save costs for jobs of 1,856 and 16,384 ranks, simulated in one process.

The state is that of a 70-billion-parameter Llama trained with Adam: 723 parameters, their two moments (2,169 sharded
tensors) and 723 step counters that every rank holds. It is sharded once over all ranks, and once over groups of ranks that
are replicas of each other. What runs is the coordinator's own code: the other ranks answer what an ordinary job's ranks
answer, and their receipts carry what the plan gave them to write.

The coordinator's first plan is everything it computes from the structure to the bytes of the manifest: the fingerprint, the
writers, its own files, all receipts against the plan. Nothing is sent and nothing is written.
"""

from __future__ import annotations

import datetime as dt
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
from harness import MIB, Bar, Context, Result, median_ratio, result, run_question

# world size -> bars: seconds of the first plan, MiB of the manifest, seconds to read it
BARS = {
    1_856: (Bar("<", 2, "s"), Bar("<", 2, "MiB"), Bar("<", 0.2, "s")),
    16_384: (Bar("<", 15, "s"), Bar("<", 20, "MiB"), Bar("<", 2, "s")),
}
REPLICAS = {1_856: 8, 16_384: 64}
LAYERS = 80
BLOCK = {
    "attention.wq": (8192, 8192),
    "attention.wk": (1024, 8192),
    "attention.wv": (1024, 8192),
    "attention.wo": (8192, 8192),
    "feed_forward.w1": (28672, 8192),
    "feed_forward.w2": (8192, 28672),
    "feed_forward.w3": (28672, 8192),
    "attention_norm": (8192,),
    "ffn_norm": (8192,),
}
OWN_BYTES = 8192
"""What each rank has of its own, in its state file: random number streams, progress."""


# ---------------------------------------------------------------------------------------- the job


def parameters() -> dict[str, tuple[int, ...]]:
    """Names and global shapes of the 723 parameters."""
    blocks = {f"layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in BLOCK.items()}
    return {
        "tok_embeddings.weight": (128256, 8192),
        **blocks,
        "norm.weight": (8192,),
        "output.weight": (128256, 8192),
    }


def structure(world: int, *, replicas: int) -> Any:
    """The state's structure as every rank sees it; its records are new ones each time, as after a capture."""
    from keepstep.format.layout import Cut, Layout, Mesh, Structure, TensorSpec

    meshes = [Mesh((world,))]
    cuts: tuple[Cut, ...] = (Cut(0, "S", 0),)
    if replicas > 1:
        meshes.append(Mesh((replicas, world // replicas)))
        cuts = (Cut(0, "R"), Cut(1, "S", 0))
    table: dict[Layout, int] = {}
    specs = []

    def add(key: str, shape: tuple[int, ...], mesh: int, cuts: tuple[Cut, ...]) -> None:
        layout = table.setdefault(Layout(shape, mesh, cuts), len(table))
        specs.append(TensorSpec(key, "float32", layout, key.partition("/")[0], "same"))

    for name, shape in parameters().items():
        add(f"model/{name}", shape, len(meshes) - 1, cuts)
    for name, shape in parameters().items():
        add(f"optimizer/state/{name}/step", (), 0, (Cut(0, "R"),))
        for moment in ("exp_avg", "exp_avg_sq"):
            add(f"optimizer/state/{name}/{moment}", shape, len(meshes) - 1, cuts)
    return Structure(tuple(meshes), tuple(table), tuple(specs))


@dataclass
class Alike:
    """Stands for the other ranks, who all post what the coordinator posts."""

    world: int
    rank: int = 0

    def gather(self, data: bytes) -> list[bytes]:
        return [data] * self.world

    def broadcast(self, data: bytes) -> bytes:
        return data


def posted_receipts(stored: Any, live: Any, world: int, save_id: str) -> list[bytes]:
    """What all ranks post when their files are durable."""
    from keepstep.format.manifest import STATE_FOLDER, FileRecord, Receipt
    from keepstep.plan.save_plan import expected_bytes

    expected = {folder: sizes.tolist() for folder, sizes in expected_bytes(stored, world).items()}
    expected.setdefault(STATE_FOLDER, [0] * world)
    shards = live.meshes[-1].shape[-1]
    posted = []
    for rank in range(world):
        files = {}
        for folder, sizes in expected.items():
            size = sizes[rank] + (OWN_BYTES if folder == STATE_FOLDER else 0)
            if size:
                files[folder] = FileRecord(rank, size + 65_536, size, f"{rank * 0x9E3779B97F4A7C15 % (1 << 64):016x}")
        digests = {f"{1:016x}:*": f"{7:016x}"}
        if len(live.meshes) > 1:
            digests[f"{2:016x}:*,{rank % shards}"] = f"{rank % shards:016x}"
        posted.append(msgspec.json.encode(Receipt(rank, save_id, files, digests)))
    return posted


# ------------------------------------------------------------------------------------ the question


@dataclass
class Clock:
    """Seconds by the name of a part, one number a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


def plan(world: int, replicas: int, context: Context) -> list[Result]:
    """First plans and unchanged plans in turn; the first round warms up."""
    if context.peers_only:
        return []
    clock = Clock()
    for turn in range(context.rounds + 1):
        manifest_bytes, same_plan = _one_round(world, replicas, clock)
        if turn == 0:
            clock.seconds.clear()
    seconds = clock.seconds
    first = [sum(parts) for parts in zip(*(seconds[name] for name in FIRST), strict=True)]
    context.note("  " + "  ".join(f"{name} {statistics.median(each):.4f}s" for name, each in seconds.items()))
    kind = f"{replicas} replicas x {world // replicas:,} shards" if replicas > 1 else "shards"
    what = f"plan {world:,} ranks ({kind})"
    in_time, in_size, in_reading = BARS[world]
    again = seconds["unchanged"]
    return [
        result(f"{what}: first plan", statistics.median(first), "s", bar=in_time),
        result(f"{what}: manifest", manifest_bytes / MIB, "MiB", bar=in_size),
        result(f"{what}: manifest read", statistics.median(seconds["parse"]), "s", bar=in_reading),
        result(
            f"{what}: unchanged plan",
            statistics.median(again),
            "s",
            against="first plan",
            ratio=median_ratio(again, first),
        ),
        result(f"{what}: plans made while unchanged", 0 if same_plan else 1, "plans", bar=Bar("==", 0, "plans")),
    ]


FIRST = ("agree", "own files", "receipts", "manifest")


def _one_round(world: int, replicas: int, clock: Clock) -> tuple[int, bool]:
    """One first save and one unchanged one; the bytes of the manifest, and whether the plan was kept."""
    from keepstep.checkpointer.agree import Attempt, agree
    from keepstep.checkpointer.replicas import replicas_differ
    from keepstep.commit.publish import collect_receipts
    from keepstep.format.layout import fingerprint
    from keepstep.format.manifest import Lineage, Receipt, pack_manifest, parse_manifest
    from keepstep.plan.save_plan import rank_files
    from keepstep.storage.memory import MemoryStorage

    everyone, ranks = Alike(world), SimpleNamespace(rank=0, world=world)
    run = Lineage("0123456789abcdef", 1)
    ask: Callable[..., Any] = functools.partial(agree, everyone, ranks, MemoryStorage())
    snapshot = _snapshot(structure(world, replicas=replicas))
    with clock.part("agree"):
        agreed = ask(snapshot, Attempt(1000, run))
    with clock.part("own files"):
        files = rank_files(agreed.plan.stored, 0, live_index=agreed.live_index, extras=())
    posted = posted_receipts(agreed.plan.stored, snapshot.structure, world, agreed.save_id)
    _check_own_files(files, posted[0])
    with clock.part("receipts"):
        receipts = [msgspec.json.decode(raw, type=Receipt) for raw in posted]
        differing = replicas_differ(receipts)
        manifest = collect_receipts(receipts, _manifest(agreed, run, world))
    assert not differing
    with clock.part("manifest"):
        packed = pack_manifest(manifest)
    with clock.part("parse"):
        read = parse_manifest(packed, "the manifest")
    assert read.structure == agreed.plan.stored

    later = _snapshot(structure(world, replicas=replicas))
    with clock.part("unchanged"):
        again = ask(later, Attempt(1100, run, known=agreed.plan))
    with clock.part("fingerprint alone"):
        fingerprint(later.structure)
    return len(packed), again.plan is agreed.plan


def _snapshot(structure: Any) -> Any:
    """A captured state without its tensors, which planning never looks at."""
    from keepstep.state.capture import Snapshot

    return Snapshot(b"{}", b"", structure, locals=(), own=(), aliases={}, components={}, late=frozenset())


def _check_own_files(files: Any, posted: bytes) -> None:
    """The coordinator's files hold what its simulated receipt says."""
    from keepstep.format.manifest import STATE_FOLDER, Receipt

    said = {folder: record.data_bytes for folder, record in msgspec.json.decode(posted, type=Receipt).files.items()}
    said[STATE_FOLDER] -= OWN_BYTES
    planned = {plan.folder: plan.data_bytes for plan in files}
    assert planned == {folder: size for folder, size in said.items() if size}, (planned, said)


def _manifest(agreed: Any, run: Any, world: int) -> Any:
    """The manifest before the receipts are in."""
    from keepstep.format.manifest import FORMAT_MAJOR, FORMAT_MINOR, VERSION, Component, Manifest, Versions

    stored = agreed.plan.stored
    return Manifest(
        format=(FORMAT_MAJOR, FORMAT_MINOR),
        step=agreed.step,
        save_id=agreed.save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        lineage=run,
        world_size=world,
        versions=Versions(VERSION, "2", platform.python_version()),
        fingerprint=agreed.plan.fingerprint,
        components={
            "model": Component("module", "Transformer", 723, 0, "model"),
            "optimizer": Component("optimizer", "AdamW", 2169, 0, "optimizer"),
        },
        meshes=stored.meshes,
        layouts=stored.layouts,
        tensors=stored.tensors,
        files={},
    )


if __name__ == "__main__":
    run_question(
        {
            f"{world}-ranks-{kind}": (1, functools.partial(plan, world, replicas))
            for world in BARS
            for kind, replicas in (("sharded", 1), ("replicated", REPLICAS[world]))
        }
    )
