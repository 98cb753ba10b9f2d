"""A training script for drills that starts in a tenth of a second: no torch, all ranks in one loop, one number to learn.

It keeps what a Checkpointer keeps, obeys a drill's orders, and can be told to break one promise: ``--wrong NAME``.
Run as a script; ``command()`` says how.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import xxhash

BATCH, SAMPLES = 12, 60


def command(*options: object) -> tuple[str, ...]:
    """The command line that runs this script."""
    return (sys.executable, "-E", str(Path(__file__).resolve()), *map(str, options))


def left_running(folder: Path) -> list[int]:
    """Processes that a drill in this folder has started, and that run."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            environment = (path / "environ").read_bytes() if path.name.isdigit() else b""
            alive = environment and (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (OSError, IndexError):
            continue
        if alive and b"KEEPSTEP_DRILL=" in environment and str(folder).encode() in environment:
            found.append(int(path.name))
    return found


class Run:
    """The state, what becomes of it, and where it is kept."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.state = {"step": 0, "w": 5.0, "m": 0.0, "decay": 0.01, "turn": 0, "position": 0}
        self.state["rng"] = [random.Random(rank).random() for rank in range(options.world)]
        if options.wrong == "random":
            self.state["w"] += int.from_bytes(os.urandom(4)) * 2**-32

    def order(self, epoch: int) -> list[int]:
        return random.Random(1000 + epoch).sample(range(SAMPLES), SAMPLES)

    def update(self) -> list[dict]:
        """One step of all ranks; what each of them would trace."""
        state, world = self.state, self.options.world
        epoch, begin = divmod(state["position"], SAMPLES)
        ids = self.order(epoch)[begin : begin + BATCH]
        lr = 0.1 / (1 + state["turn"])
        shares = [ids[rank * BATCH // world : (rank + 1) * BATCH // world] for rank in range(world)]
        if self.options.wrong == "dealing" and world != 2:
            shares[0] = shares[-1]
        gradients, losses = [], []
        for rank, share in enumerate(shares):
            errors = [state["w"] - sample / SAMPLES for sample in share]
            if self.options.dropout:
                state["rng"][rank] = random.Random(state["rng"][rank]).random()
                errors = [error * (0.5 + state["rng"][rank]) for error in errors]
            gradients.append(2 * sum(errors) / len(errors))
            losses.append(sum(error * error for error in errors) / len(errors))
        loss, gradient = sum(losses) / world, sum(gradients) / world + state["decay"] * state["w"]
        state["m"] = 0.9 * state["m"] + gradient
        state["w"] -= lr * state["m"]
        state["turn"] += 1
        state["position"] += BATCH
        state["step"] += 1
        traced = {"loss": loss.hex(), "norm": abs(gradient).hex(), "lr": {"optimizer": (lr.hex(),)}}
        if self.options.wrong == "metric":
            traced["metrics"] = {"seconds": time.time().hex()}
        return [{"samples": tuple(share), "parts": self.parts(rank), **traced} for rank, share in enumerate(shares)]

    def parts(self, rank: int) -> dict[str, str]:
        state = self.state
        pieces = {"model": state["w"], "optimizer": (state["m"], state["decay"]), "scheduler": state["turn"]}
        pieces |= {"data": state["position"], "rng/torch": state["rng"][rank]}
        return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in pieces.items()}

    # --- what is kept ---

    def write(self, step: int) -> Path:
        """The file of a step, which is not committed yet."""
        folder = self.root / f"step-{step:08d}"
        (folder / "state").mkdir(parents=True, exist_ok=True)
        path = folder / "state" / f"rank-00000.{os.getpid():08x}.safetensors"
        path.write_text(json.dumps(self.state))
        return path

    def commit(self, step: int, path: Path, incarnation: int) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lineage = {"run": "fake", "incarnation": incarnation, "parent": None}
        head = {"format": [1, 0], "step": step, "save_id": "0badc0de", "created": "", "lineage": lineage, "metrics": {}}
        manifest = path.parents[1] / ".metadata"
        partial = manifest.with_suffix(".partial")
        # The head ends where the number of ranks begins: that much of it a catalog reads.
        rest = json.dumps({"world_size": self.options.world, "file": path.name, "sha256": digest})
        text = json.dumps(head)[:-1] + ",\n" + rest[1:-1]
        # Its last field proves it, as in every manifest.
        partial.write_text(f'{text},\n"digest": "{xxhash.xxh3_64_hexdigest(text.encode())}"\n}}\n')
        partial.rename(manifest)

    def committed(self) -> list[int]:
        return sorted((int(path.parent.name[5:]) for path in self.root.glob("step-*/.metadata")), reverse=True)

    def restore(self) -> tuple[bool, list[str]]:
        """Whether anything was brought back, and which steps were damaged."""
        wrong = self.options.wrong
        steps, skipped = self.committed(), []
        if wrong == "lost" and len(steps) > 1:
            steps = steps[1:]
        for step in steps if wrong != "zero" else []:
            folder = self.root / f"step-{step:08d}"
            manifest = json.loads((folder / ".metadata").read_text())
            data = (folder / "state" / manifest["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
                skipped.append(f"{folder.name}: not what was written")
                continue
            saved = json.loads(data)
            if len(saved["rng"]) != self.options.world:
                saved["rng"] = self.state["rng"]
            self.state = saved
            self.forget()
            return True, [] if wrong == "hushed" else skipped
        if skipped and wrong != "damage-zero":
            raise SystemExit(f"error: nothing usable: {skipped}")
        return False, skipped

    def forget(self) -> None:
        """What breaks when a kind of state does not come back."""
        state = self.state
        changes = {
            "data": {"position": 0},
            "repeat": {"position": state["position"] - BATCH},
            "lr": {"turn": 0},
            "model": {"w": state["w"] + 2**-20},
            "moment": {"m": 0.0},
            "decay": {"decay": 0.0},
            "rng": {"rng": [value / 2 for value in state["rng"]]},
        }
        state |= changes.get(self.options.wrong, {})


def main() -> None:
    options = arguments()
    wrong = options.wrong
    if options.launched:
        launch()
    if wrong == "crash":
        raise SystemExit("no module named 'treining'")
    from keepstep.check.trace import Began, Ended, Saved, Stepped, TraceWriter, drill_orders

    orders = drill_orders()
    if wrong == "silent" or orders is None:
        return
    root = Path(orders.root)
    starts = root / "incarnations"
    starts.mkdir(parents=True, exist_ok=True)
    incarnation = len(list(starts.iterdir())) + 1
    (starts / f"{incarnation:06d}").touch()
    run = Run(options, root)
    restored, skipped = run.restore()
    if restored and wrong == "crash-resumed":
        raise SystemExit("size mismatch for head.weight")
    if wrong == "hang" or (restored and wrong == "hang-resumed"):
        time.sleep(3600)
    writers = [TraceWriter(orders.trace, rank) for rank in range(options.world)]

    def tell(record_of) -> None:
        for rank, writer in enumerate(writers):
            writer.write(record_of(rank))

    begin = run.state["step"]
    common = {"world": options.world, "incarnation": incarnation, "step": begin, "restored": restored}
    tell(lambda rank: Began(rank=rank, **common, skipped=tuple(skipped), parts=run.parts(rank)))
    while run.state["step"] < options.steps:
        records = run.update()
        step = run.state["step"]
        time.sleep(options.pace_s)
        tell(lambda rank, records=records, step=step: Stepped(step=step, **records[rank]))
        stopping = step == orders.stop_at
        if step % options.every == 0 or stopping:
            tell(lambda _, step=step: Saved(step=step, event="due"))
            path = run.write(step)
            tell(lambda _, step=step: Saved(step=step, event="staged"))
            time.sleep(options.pace_s)
            if wrong != "uncommitted":
                run.commit(step, path, incarnation)
                tell(lambda _, step=step: Saved(step=step, event="committed"))
        if stopping and wrong != "deaf":
            tell(lambda _, step=step: Ended(step=step, why="stopped"))
            return
    tell(lambda _: Ended(step=run.state["step"], why="closed"))


def launch() -> None:
    """As launchers do: the script itself in a session of its own, while this waits for it."""
    rest = [option for option in sys.argv[1:] if option != "--launched"]
    child = subprocess.Popen(command(*rest), start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(child.wait())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--pace-s", type=float, default=0.001)
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--launched", action="store_true")
    parser.add_argument("--wrong", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
