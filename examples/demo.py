"""A training run that is killed twice, and what becomes of it. `make demo` runs this; it takes about two minutes.

1. Trains a small GPT on 2 ranks without interruption: the reference.
2. Trains it again, and kills everything with SIGKILL while a checkpoint is half written: the job, and the agent that
   writes in the background. Nothing of that checkpoint exists; the one before it does.
3. Resumes on 2 ranks. Losses and parameters must equal the reference bit for bit.
4. Trains it once more, and kills the whole job with SIGKILL when a checkpoint is copied and not yet written. Every
   trainer is gone, and the agent writes and commits that checkpoint nevertheless.
5. Resumes on 2 ranks from exactly that step. Losses and parameters must equal the reference bit for bit.
6. Resumes on 1 rank and on 3. Samples must be the same, and losses equal within rounding.

Everything happens in a temporary folder. The exit status is 0 only if all of this holds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.check.trace import read_trace

STEPS, SAVE_EVERY = 12, 4
MODEL = ["--n-layer", "6", "--n-head", "6", "--d-model", "192"]
ROUNDING = 1e-4  # relative; sums over another number of ranks are taken in another order
ATTEMPTS = 4
LEG_TIMEOUT_S = 120
COMMIT_TIMEOUT_S = 30
NO_AGENT = 3  # the exit status of `keepstep agent stop` where there is none
SCRIPT = Path(__file__).with_name("train_gpt.py")
KEEPSTEP = [sys.executable, "-m", "keepstep.cli.main"]

console = Console(highlight=False)


# --- one training run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """One run of the training script: on how many ranks, and in which folder."""

    ranks: int
    run: Path
    dropout: float = 0.1

    def start(self) -> subprocess.Popen[str]:
        """Starts it under torchrun, on a port that torchrun finds itself."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        options = ["--parallel", "fsdp", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), *MODEL]
        options += ["--checkpoints", str(self.run), "--trace", "--dropout", str(self.dropout)]
        return subprocess.Popen(
            [sys.executable, *launcher, str(SCRIPT), *options],
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
        trace = steps_of(self.run)
        console.print(f"  [green]done[/] {what}: steps {min(trace)} to {max(trace)}, {time.monotonic() - began:.0f} s")
        return trace


def steps_of(run: Path) -> dict[int, dict]:
    """What the newest start of a run did, step by step: samples over all ranks, loss, and digests of the parameters.

    Only steps that every rank has finished.
    """
    found: dict[int, dict] = {}
    starts = read_trace(run / "trace").starts()
    ranks = list(starts[-1].values()) if starts else []
    for step in ranks[0].steps if ranks else ():
        others = [[one for one in rank.steps if one.step == step.step and not one.micro] for rank in ranks]
        if all(others):
            found[step.step] = {
                "samples": sorted(sample for same in others for sample in same[-1].samples or ()),
                "loss": step.loss,
                "parameters": [same[-1].parts["model"] for same in others],
            }
    return found


# --- the agent ------------------------------------------------------------------------------------------------------


def agents(folder: Path) -> dict[Path, int]:
    """Runs in this folder, and the process of the agent that works for each of them."""
    asked = subprocess.run([*KEEPSTEP, "agent", "status", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(asked.stdout)["agents"]
    return {Path(one["root"]): one["pid"] for one in found if Path(one["root"]).is_relative_to(folder.resolve())}


def stop_agents(folder: Path) -> None:
    """Has all agents of runs in this folder leave, which by themselves they do a minute after the last trainer.

    One may do so between the question and the request: then the command says that there is none, with a status of its own.
    """
    for run in agents(folder):
        ended = subprocess.run([*KEEPSTEP, "agent", "stop", str(run)], capture_output=True, text=True, check=False)
        if ended.returncode not in (0, NO_AGENT):
            raise SystemExit(f"the agent of {run} could not be stopped:\n{ended.stdout}{ended.stderr}")


# --- the kills ------------------------------------------------------------------------------------------------------


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


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def committed(run: Path) -> list[int]:
    """The steps that exist: those whose manifest is in place."""
    return sorted(int(manifest.parent.name.removeprefix("step-")) for manifest in run.glob("step-*/.metadata"))


def half_written(run: Path) -> tuple[Path, int, int] | None:
    """A step with files but no manifest, the number of its files and their bytes; or None."""
    for step in sorted(run.glob("step-*"), reverse=True):
        sizes = [size for path in step.rglob("*") if (size := size_bytes(path))]
        if sizes and not (step / ".metadata").exists():
            return step, len(sizes), sum(sizes)
    return None


def size_bytes(path: Path) -> int:
    """The size of a file; 0 for a folder, and for a file that was renamed at this moment."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Killed:
    """A run that was killed, while which step was being saved, at what time (of ``time.time``)."""

    leg: Leg
    agent: int
    step: int
    at: float


def kill_inside_a_save(leg: Leg) -> Killed | None:
    """Trains, and kills job and agent while a checkpoint is being written. None if no moment was the right one."""
    process = leg.start()
    job: list[int] = []
    agent = 0
    while process.poll() is None:
        if not committed(leg.run):
            time.sleep(0.01)
        elif not job:
            job, agent = [*descendants(process.pid), process.pid], agents(leg.run.parent)[leg.run.resolve()]
        elif half_written(leg.run):
            # Hold it for a moment: was the checkpoint still half written when it stopped?
            os.kill(agent, signal.SIGSTOP)
            if half_written(leg.run):
                kill([agent, *job])
                break
            os.kill(agent, signal.SIGCONT)
    at = time.time()
    left = half_written(leg.run)
    if not was_killed(process) or left is None:
        return None
    return Killed(leg, agent, int(left[0].name.removeprefix("step-")), at)


def kill_once_staged(leg: Leg) -> Killed | None:
    """Trains, and kills the job when a second checkpoint is copied on all ranks.

    None if the agent had committed it by then, as it does after a few hundredths of a second.
    """
    process = leg.start()
    job: list[int] = []
    agent = step = 0
    while process.poll() is None:
        if not committed(leg.run):
            time.sleep(0.01)
        elif not job:
            job, agent = [*descendants(process.pid), process.pid], agents(leg.run.parent)[leg.run.resolve()]
        elif (step := newest_staged(leg)) > committed(leg.run)[-1]:
            kill(job)
            break
        else:
            time.sleep(0.0002)
    at, in_time = time.time(), step not in committed(leg.run)
    if not was_killed(process) or not in_time:
        return None
    if any(is_alive(pid) for pid in job):
        raise SystemExit("some process of the job survived SIGKILL")
    return Killed(leg, agent, step, at)


def newest_staged(leg: Leg) -> int:
    """The newest step that every rank has copied."""
    starts = read_trace(leg.run / "trace").starts()
    ranks = starts[-1].values() if starts else ()
    return min((rank.saved("staged") for rank in ranks), default=0) if len(ranks) == leg.ranks else 0


def was_killed(process: subprocess.Popen[str]) -> bool:
    """Waits for the job's end; whether it was the kill, and not the end of the training."""
    output, _ = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        console.print(output, markup=False)
        raise SystemExit(f"the run that was to be killed failed by itself (status {process.returncode})")
    return process.returncode != 0


# --- the comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One row of the table at the end."""

    run: str
    steps: str
    newest: str
    against: str
    samples: str
    losses: str
    parameters: str
    holds: bool


def compare(
    name: str, trace: dict[int, dict], against: str, reference: dict[int, dict], *, first: int, exact: bool
) -> Verdict:
    """This trace, from step ``first`` to the end, beside the same steps of another. Says nothing of what is on disk."""
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
        newest="",
        against=against,
        samples="same" if same_samples else "DIFFER",
        losses="same bits" if same_bits else f"within {apart:.0e}",
        parameters=("same bits" if same_parameters else "DIFFER") if exact else "-",
        holds=holds,
    )


def on_disk(verdict: Verdict, run: Path, expected: int) -> Verdict:
    """The same verdict, which holds only if the newest step in the run's folder is the expected one too."""
    newest = max(committed(run), default=0)
    return replace(verdict, newest=str(newest), holds=verdict.holds and newest == expected)


def show(verdicts: list[Verdict]) -> None:
    table = Table(title="Killed twice, and resumed", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("run", "steps", "newest", "against", "samples", "losses", "parameters", ""):
        table.add_column(column)
    for v in verdicts:
        mark = "[green]holds[/]" if v.holds else "[bold red]FAILS[/]"
        table.add_row(v.run, v.steps, v.newest, v.against, v.samples, v.losses, v.parameters, mark)
    console.print(table)


# --- the story ------------------------------------------------------------------------------------------------------


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        try:
            verdicts = story(Path(folder))
        finally:
            stop_agents(Path(folder))
    show(verdicts)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(v.holds for v in verdicts) else 1


def story(folder: Path) -> list[Verdict]:
    console.print(f"[bold]1[/]  The reference: {STEPS} steps on 2 ranks, a checkpoint every {SAVE_EVERY}")
    reference = Leg(2, folder / "reference").finish("the reference")

    def judge(name: str, trace: dict[int, dict], run: Path, *, first: int, newest: int) -> Verdict:
        return on_disk(compare(name, trace, "reference", reference, first=first, exact=True), run, newest)

    def resume(killed: Path, ranks: int, name: str, dropout: float = 0.1) -> tuple[dict[int, dict], Path]:
        run = folder / name
        shutil.copytree(killed, run)
        off = ", dropout off" if dropout == 0 else ""
        title = f"resumed on {ranks} rank{'s' if ranks > 1 else ''}{off}"
        return Leg(ranks, run, dropout).finish(title), run

    console.print("[bold]2[/]  The same again; job and agent are killed with SIGKILL inside a save")
    killed = killed_run(folder, "inside", kill_inside_a_save)
    inside, start = killed.leg.run, committed(killed.leg.run)[-1]
    folder_left, files, size = half_written(inside) or (inside, 0, 0)
    console.print(f"  left behind: {folder_left.name} with {size / 2**20:.1f} MiB in {files} file(s), and no manifest")
    console.print(f"  so it does not exist; the newest step that does is {start}")
    trace = steps_of(killed.leg.run)
    verdicts = [judge("killed mid-save", trace, inside, first=min(trace), newest=start)]
    console.print("[bold]3[/]  Resumed on the same number of ranks")
    verdicts.append(judge("- on 2 ranks", *resume(inside, 2, "two"), first=start + 1, newest=STEPS))

    console.print("[bold]4[/]  Once more; the job is killed with SIGKILL when a save is copied on all ranks")
    killed = killed_run(folder, "staged", kill_once_staged)
    staged, step = killed.leg.run, killed.step
    console.print(f"  every trainer is gone, and step {step} did not exist yet; agent {killed.agent} goes on")
    console.print(f"  it committed step {step} by itself, {1000 * wait_for_commit(killed):.0f} ms after the kill")
    trace = steps_of(killed.leg.run)
    verdicts.append(judge("killed at staged", trace, staged, first=min(trace), newest=step))
    console.print("[bold]5[/]  Resumed from that step")
    verdicts.append(judge("- on 2 ranks", *resume(staged, 2, "staged-two"), first=step + 1, newest=STEPS))

    console.print(f"[bold]6[/]  Resumed on other numbers of ranks, from step {start}")
    console.print("   Dropout draws from each rank's own random numbers, which another number of")
    console.print("   ranks cannot repeat; so it is off here, and 2 ranks run once more to compare.")
    base, _ = resume(inside, 2, "two-plain", 0)
    for ranks, name in ((1, "one"), (3, "three")):
        trace, run = resume(inside, ranks, name, 0)
        samples = compare("", trace, "", reference, first=start + 1, exact=False).samples
        title = f"- on {ranks} rank{'s' if ranks > 1 else ''}"
        row = on_disk(compare(title, trace, "2 ranks", base, first=start + 1, exact=False), run, STEPS)
        verdicts.append(row if samples == "same" else replace(row, samples=samples, holds=False))
    return verdicts


def killed_run(folder: Path, name: str, attack: Callable[[Leg], Killed | None]) -> Killed:
    """A run that was killed in the right moment; its trace goes up to there."""
    for attempt in range(1, ATTEMPTS + 1):
        with console.status("training until the moment has come ..."):
            killed = attack(Leg(2, folder / f"{name}-{attempt}"))
        if killed:
            console.print(f"  [green]done[/] killed while step {killed.step} was being saved")
            return killed
        console.print("  the kill came a moment too late: that checkpoint was already complete. Once more.")
    raise SystemExit(f"{ATTEMPTS} kills in a row came too late; this disk is too fast for this model")


def wait_for_commit(killed: Killed) -> float:
    """Waits until the step exists; how long after the kill that was, in seconds."""
    manifest = killed.leg.run / f"step-{killed.step:08d}" / ".metadata"
    while not manifest.exists():
        if time.time() - killed.at > COMMIT_TIMEOUT_S:
            raise SystemExit(f"nobody committed step {killed.step} within {COMMIT_TIMEOUT_S} s, although it was staged")
        time.sleep(0.001)
    return manifest.stat().st_mtime - killed.at


if __name__ == "__main__":
    sys.exit(main())
