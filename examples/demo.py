"""A training run that is killed inside a save, and what becomes of it. `make demo` runs this; it takes a minute or two.

1. Trains a small GPT on 2 ranks without interruption: the reference.
2. Trains it again, and kills every process with SIGKILL while a checkpoint is half written.
3. Resumes on 2 ranks. Losses and parameters must equal the reference bit for bit.
4. Resumes the same step on 1 rank and on 3. Samples must be the same, and losses equal within rounding.

Everything happens in a temporary folder. The exit status is 0 only if all of this holds.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

STEPS, SAVE_EVERY = 18, 6
MODEL = ["--n-layer", "6", "--n-head", "6", "--d-model", "192"]
ROUNDING = 1e-4  # relative; sums over another number of ranks are taken in another order
ATTEMPTS = 4
LEG_TIMEOUT_S = 120
SCRIPT = Path(__file__).with_name("train_gpt.py")

console = Console(highlight=False)


# --- one training run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """One run of the training script: on how many ranks, where its checkpoints are, where its trace goes."""

    ranks: int
    run: Path
    trace: Path
    dropout: float = 0.1

    def start(self) -> subprocess.Popen[str]:
        """Starts it under torchrun, on a port that torchrun finds itself."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        options = ["--parallel", "fsdp", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), *MODEL]
        files = ["--checkpoints", str(self.run), "--trace", str(self.trace), "--dropout", str(self.dropout)]
        return subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), *options, *files],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, what: str) -> dict[int, dict]:
        """Runs it to its end and returns the trace by step."""
        began = time.monotonic()
        with console.status(f"{what} ..."):
            process = self.start()
            try:
                output, _ = process.communicate(timeout=LEG_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                kill([*descendants(process.pid), process.pid])
                output = (process.communicate()[0] or "") + f"\nstill running after {LEG_TIMEOUT_S} s"
            if process.returncode != 0:
                console.print(output, markup=False)
                raise SystemExit(f"{what}: the training failed (status {process.returncode})")
        trace = read_trace(self.trace)
        console.print(f"  [green]done[/] {what}: steps {min(trace)} to {max(trace)}, {time.monotonic() - began:.0f} s")
        return trace


def read_trace(path: Path) -> dict[int, dict]:
    """Step -> samples, loss and parameter digest. A last line that was cut off by a kill does not count."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


# --- the kill -------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """All processes below this one. torchrun gives each rank a session of its own, so a process group is not enough."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for child, parent in (map(int, line.split()) for line in listing.splitlines()):
        children.setdefault(parent, []).append(child)
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL: no handler runs, nothing is flushed, nobody says goodbye."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def committed(run: Path) -> list[int]:
    """The steps that exist: those whose manifest is in place."""
    return sorted(int(manifest.parent.name.removeprefix("step-")) for manifest in run.glob("step-*/.metadata"))


def half_written(run: Path) -> tuple[Path, int, int] | None:
    """A step with files but no manifest, the number of its files and their bytes; or None."""
    for step in sorted(run.glob("step-*"), reverse=True):
        files = [path for path in step.rglob("*") if path.is_file()]
        if files and not (step / ".metadata").exists():
            return step, len(files), sum(path.stat().st_size for path in files)
    return None


def size_bytes(path: Path) -> int:
    """The size of a file; 0 for a folder, and for a file that was renamed at this moment."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def kill_inside_a_save(leg: Leg) -> bool:
    """Trains, waits until a second checkpoint is being written, and kills. False if the kill came a moment too late."""
    process = leg.start()
    pids: list[int] = []
    done_before: list[int] = []
    while process.poll() is None:
        if not pids:
            done_before = committed(leg.run)
            if done_before:
                pids = [*descendants(process.pid), process.pid]
            time.sleep(0.01)
        elif being_written(leg.run, done_before):
            kill(pids)
            break
        else:
            time.sleep(0.0002)
    output, _ = process.communicate()
    if process.returncode != -signal.SIGKILL:
        if process.returncode:
            console.print(output, markup=False)
            raise SystemExit(f"the run that was to be killed failed by itself (status {process.returncode})")
        return False
    return half_written(leg.run) is not None


def being_written(run: Path, done_before: list[int]) -> bool:
    """Whether the first bytes of another step are there. Called thousands of times a second, so it looks at little."""
    known = {f"step-{step:08d}" for step in done_before}
    for step in run.glob("step-*"):
        if step.name not in known:
            if (step / ".metadata").exists():
                done_before.append(int(step.name.removeprefix("step-")))
            else:
                return any(size_bytes(path) for path in step.rglob("*"))
    return False


# --- the comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One row of the table at the end."""

    run: str
    steps: str
    against: str
    samples: str
    losses: str
    parameters: str
    holds: bool


def compare(
    name: str, trace: dict[int, dict], against: str, reference: dict[int, dict], *, first: int, exact: bool
) -> Verdict:
    """This trace, from step ``first`` to the end, beside the same steps of another."""
    steps = sorted(trace)
    ours, theirs = [trace[s] for s in steps], [reference[s] for s in steps if s in reference]
    whole = bool(steps) and steps == list(range(first, steps[-1] + 1)) and len(theirs) == len(ours)
    pairs = list(zip(ours, theirs, strict=False))
    same_samples = whole and all(a["samples"] == b["samples"] for a, b in pairs)
    same_bits = whole and all(a["loss"] == b["loss"] for a, b in pairs)
    same_parameters = whole and all(a["parameters"] == b["parameters"] for a, b in pairs)
    values = [(float.fromhex(a["loss"]), float.fromhex(b["loss"])) for a, b in pairs]
    apart = max((abs(a - b) / abs(b) for a, b in values), default=float("inf"))
    holds = same_samples and (same_bits and same_parameters if exact else apart <= ROUNDING)
    return Verdict(
        run=name,
        steps=f"{steps[0]}-{steps[-1]}" if steps else "none",
        against=against,
        samples="same" if same_samples else "DIFFER",
        losses="same bits" if same_bits else f"within {apart:.0e}",
        parameters=("same bits" if same_parameters else "DIFFER") if exact else "-",
        holds=holds,
    )


def show(verdicts: list[Verdict]) -> None:
    table = Table(title="Killed inside a save, and resumed", title_justify="left")
    for column in ("run", "steps", "against", "samples", "losses", "parameters", ""):
        table.add_column(column)
    for v in verdicts:
        mark = "[green]holds[/]" if v.holds else "[bold red]FAILS[/]"
        table.add_row(v.run, v.steps, v.against, v.samples, v.losses, v.parameters, mark)
    console.print(table)


# --- the story ------------------------------------------------------------------------------------------------------


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        verdicts = story(Path(folder))
    show(verdicts)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(v.holds for v in verdicts) else 1


def story(folder: Path) -> list[Verdict]:
    console.print(f"[bold]1[/]  The reference: {STEPS} steps on 2 ranks, a checkpoint every {SAVE_EVERY}")
    reference = Leg(2, folder / "reference", folder / "reference.jsonl").finish("the reference")

    console.print("[bold]2[/]  The same again, killed with SIGKILL inside a save")
    killed, killed_trace = killed_run(folder)
    step, files, size = half_written(killed) or (killed, 0, 0)
    start = committed(killed)[-1]
    console.print(f"  left behind: {step.name} with {size / 2**20:.1f} MiB in {files} file(s), and no manifest")
    console.print(f"  so it does not exist; the newest step that does is {start}")

    def resume(ranks: int, name: str, dropout: float = 0.1) -> dict[int, dict]:
        run = folder / name
        shutil.copytree(killed, run)
        off = ", dropout off" if dropout == 0 else ""
        title = f"resumed on {ranks} rank{'s' if ranks > 1 else ''}{off}"
        return Leg(ranks, run, folder / f"{name}.jsonl", dropout).finish(title)

    console.print("[bold]3[/]  Resumed on the same number of ranks")
    verdicts = [
        compare("killed", killed_trace, "reference", reference, first=min(killed_trace), exact=True),
        compare("on 2 ranks", resume(2, "two"), "reference", reference, first=start + 1, exact=True),
    ]
    console.print("[bold]4[/]  Resumed on other numbers of ranks, from the same step")
    console.print("   Dropout draws from each rank's own random numbers, which another number of")
    console.print("   ranks cannot repeat; so it is off here, and 2 ranks run once more to compare.")
    base = resume(2, "two-plain", 0)
    for ranks, name in ((1, "one"), (3, "three")):
        trace = resume(ranks, name, 0)
        samples = compare("", trace, "", reference, first=start + 1, exact=False).samples
        row = compare(
            f"on {ranks} rank{'s' if ranks > 1 else ''}", trace, "2 ranks", base, first=start + 1, exact=False
        )
        verdicts.append(row if samples == "same" else Verdict(**{**vars(row), "samples": samples, "holds": False}))
    return verdicts


def killed_run(folder: Path) -> tuple[Path, dict[int, dict]]:
    """A run that was killed between the first file of a checkpoint and its manifest, and the trace up to there."""
    for attempt in itertools.count(1):
        run, trace = folder / f"killed-{attempt}", folder / f"killed-{attempt}.jsonl"
        with console.status("training until a checkpoint is half written ..."):
            landed = kill_inside_a_save(Leg(2, run, trace))
        if landed:
            console.print(f"  [green]done[/] killed while step {committed(run)[-1] + SAVE_EVERY} was being written")
            return run, read_trace(trace)
        if attempt == ATTEMPTS:
            raise SystemExit(f"{ATTEMPTS} kills in a row came after the manifest; this disk is too fast for this model")
        console.print("  the kill came a moment too late: that checkpoint was already complete. Once more.")
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
