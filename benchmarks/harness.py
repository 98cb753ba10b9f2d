"""What every benchmark script shares: rounds, ranks, files, results.

The method, in one place. All contestants of one question run in the same processes, one after
another, in rounds (A B C, A B C, ...), so that whatever the machine does meanwhile hits all of
them. A ratio is formed within each round, and the median over the rounds is reported. The first
round warms up and is not counted. Only the call itself is timed: preparing, deleting and
flushing happen outside.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
REPOSITORY = Path(__file__).resolve().parent.parent


# --------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Bar:
    """A limit that a ratio (or, without a ratio, the value itself) has to keep."""

    relation: str
    limit: float
    unit: str = "x"

    def holds(self, measured: float) -> bool:
        """Whether `measured` keeps the limit."""
        return {
            "<=": measured <= self.limit,
            "<": measured < self.limit,
            ">=": measured >= self.limit,
            "==": measured == self.limit,
        }[self.relation]

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g} {self.unit}"


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    bar: str | None = None
    holds: bool | None = None


def result(
    name: str,
    value: float,
    unit: str,
    *,
    against: str | None = None,
    ratio: float | None = None,
    bar: Bar | None = None,
) -> Result:
    """A line of the table, judged by its bar if it has one."""
    measured = value if ratio is None else ratio
    return Result(
        name=name,
        value=round(value, 4),
        unit=unit,
        against=against,
        ratio=None if ratio is None else round(ratio, 3),
        bar=None if bar is None else str(bar),
        holds=None if bar is None else bar.holds(measured),
    )


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# --------------------------------------------------------------------------------- the question


@dataclass
class Context:
    """What a stage of a question gets: its directory, its ranks, its size."""

    directory: Path
    quick: bool
    rounds: int
    peers_only: bool = False
    rank: int = 0
    world: int = 1

    def note(self, text: str) -> None:
        """Say something on stderr, once for all ranks."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def alone(self, work: Callable[[], object]) -> None:
        """Let rank 0 do something while the others wait."""
        if self.rank == 0:
            work()
        self.barrier()

    def gather(self, value: object) -> list[object]:
        """The values of all ranks, on all ranks."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        values: list[object] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds from the first rank's start to the last rank's end of `work`."""
        self.barrier()
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        spans = self.gather((start, end))
        return max(s[1] for s in spans) - min(s[0] for s in spans)  # type: ignore[index]


Stage = Callable[[Context], list[Result]]


@dataclass(frozen=True)
class Entry:
    """One contestant of a round: `before` and `after` are not timed."""

    name: str
    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def play(context: Context, entries: Iterable[Entry]) -> dict[str, list[float]]:
    """Seconds of every entry in every counted round."""
    entries = list(entries)
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for turn in range(context.rounds + 1):
        for entry in entries:
            entry.before()
            # A full collection takes as long as a small save, and into whose call it falls is chance.
            gc.collect()
            elapsed = context.timed(entry.work)
            context.barrier()
            entry.after()
            context.barrier()
            if turn > 0:
                seconds[entry.name].append(elapsed)
        context.note(
            f"  round {turn or 'warm-up'}: "
            + "  ".join(f"{name} {all_[-1]:.3f}s" for name, all_ in seconds.items() if all_)
        )
    return seconds


def run_question(
    stages: Mapping[str, tuple[int, Stage]], argv: Sequence[str] | None = None, *, rounds: int = 5
) -> None:
    """The main program of a script.

    `stages` maps a name to (number of ranks, function). Stages run in order, each in fresh
    processes, and share one directory; later stages find there what earlier ones left.
    `rounds` is how many are counted unless asked for otherwise.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; not for bars")
    parser.add_argument("--rounds", type=int, default=0, help=f"counted rounds (default {rounds}; quick 3)")
    parser.add_argument("--dir", type=Path, default=REPOSITORY, help="where files are written")
    parser.add_argument("--peers-only", action="store_true", help="leave keepstep out")
    parser.add_argument("--only", action="append", choices=list(stages), help="only this stage")
    parser.add_argument("--stage", choices=list(stages), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or min(rounds, 3 if args.quick else rounds)
    if args.stage:
        _run_stage(stages[args.stage][1], args)
        return
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=args.dir) as directory:
        for name, (ranks, _) in stages.items():
            if not args.only or name in args.only:
                found += _launch(name, ranks, Path(directory), args)
    if args.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        print_table(found)


def _launch(name: str, ranks: int, directory: Path, args: argparse.Namespace) -> list[Result]:
    """Run one stage in fresh processes and read what it found."""
    print(f"{Path(sys.argv[0]).stem}: {name}", file=sys.stderr, flush=True)
    out = directory / f"{name}.json"
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(sys.argv[0]).resolve()), "--stage", name, "--out", str(out)]
    command += ["--dir", str(directory), "--rounds", str(args.rounds)]
    command += ["--quick"] * args.quick + ["--peers-only"] * args.peers_only
    # Processes that the contestants start would else warn, each anew, of packages that torch finds deprecated.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}
    environment = os.environ | quiet | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    return [Result(**each) for each in json.loads(out.read_text())]


def _run_stage(stage: Stage, args: argparse.Namespace) -> None:
    """Inside a stage's process: join the ranks, work, and leave the results in a file."""
    warnings.simplefilter("ignore")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    context = Context(args.dir, args.quick, args.rounds, args.peers_only, rank, world)
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    found = stage(context)
    context.barrier()
    if rank == 0:
        args.out.write_text(json.dumps([asdict(each) for each in found]))
    if world > 1:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------- files


def files_under(path: Path) -> list[Path]:
    """All regular files at or under `path`."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def drop_from_page_cache(path: Path) -> None:
    """Make the next read of everything under `path` a read from the device."""
    for file in files_under(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bring_into_page_cache(path: Path) -> None:
    """Read everything under `path` once."""
    scratch = bytearray(4 * MIB)
    for file in files_under(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(scratch):
                pass


def remove(path: Path) -> None:
    """Delete what is at `path` and wait until the file system has digested it."""
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


def fsync_directory(path: Path) -> None:
    """Make names created in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# ---------------------------------------------------------------------------------------- output


def print_table(results: Sequence[Result]) -> None:
    """Show the results with their bars."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("what", "value", "unit", "against", "ratio", "bar", "holds"):
        table.add_column(heading, justify="right" if heading in ("value", "ratio") else "left")
    for row in table_rows(results):
        table.add_row(*row)
    Console(width=150).print(table)


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """The results as text, one list of cells a line."""
    verdict = {True: "yes", False: "NO", None: ""}
    return [
        [
            each.name,
            f"{each.value:.4g}",
            each.unit,
            each.against or "",
            "" if each.ratio is None else f"{each.ratio:.2f}",
            each.bar or "",
            verdict[each.holds],
        ]
        for each in results
    ]
