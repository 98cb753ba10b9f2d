"""Scripts of heavy trainers, run again and again at the price of a fork: one process imports the trainer, once.

``Warm("lightning.pytorch")`` starts that process; ``run`` forks one child for each rank, which runs a script as if it had
been started by hand, or by torchrun. A drill's variable tells its Checkpointer where to put steps and trace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.check.compare import compare
from keepstep.check.trace import DRILL_VARIABLE, DrillOrders, Run, encode_orders, read_trace

ROOT = Path(__file__).resolve().parents[2]
NEVER = 10**9


class Warm:
    """A process that has imported ``modules``, and forks."""

    def __init__(self, *modules: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.scripts", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def run(self, script: Path, *argv: object, folder: Path, name: str, **orders: Any) -> list[int]:
        """Runs a script on ``ranks`` processes; its root and trace are ``folder/name``. Exit statuses by rank.

        ``drill=False``: it is on its own. ``launched``: as by torchrun, also where there is one process. ``stop_at``: of a
        drill. ``kill_at``: all ranks are killed as soon as the trace of the first has that step.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {"script": str(script), "argv": list(map(str, argv)), "folder": str(folder), "name": name, **orders}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has died"
        statuses = json.loads(answer)
        expected = -signal.SIGKILL if orders.get("kill_at") else 0
        if any(status != expected for status in statuses):
            logs = [path.read_text()[-3000:] for path in sorted(folder.glob(f"{name}.*.log"))]
            raise AssertionError(f"{name}: ended with {statuses}\n" + "\n".join(logs))
        return statuses

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextlib.contextmanager
def warm(*modules: str) -> Iterator[Warm]:
    """A Warm that is closed in the end."""
    process = Warm(*modules)
    try:
        yield process
    finally:
        process.close()


def campaign(
    process: Warm, script: Path, *argv: object, folder: Path, moves: list[dict[str, int]], ranks: int = 1
) -> list[Run]:
    """A run without interruption, and one with each of ``moves`` in turn that is then left alone. Both have the same bits.

    A move is a ``stop_at``, a ``kill_at``, or a ``die_in``: a further argument with which the script kills itself. Returns
    the starts of the run with moves, of the first rank.
    """
    process.run(script, *argv, folder=folder, name="whole", ranks=ranks)
    for move in [*moves, {}]:
        last = [move["die_in"]] if "die_in" in move else []
        orders = {"kill_at": NEVER} if last else move
        process.run(script, *argv, *last, folder=folder, name="parts", ranks=ranks, **orders)
    wanted, found = (read_trace(folder / name / "trace") for name in ("whole", "parts"))
    assert list(wanted.ranks) == list(found.ranks) == list(range(ranks))
    for trace in (wanted, found):
        assert all(runs[-1].steps[-1].step == wanted.ranks[0][0].steps[-1].step for runs in trace.ranks.values())
        assert all(
            step.loss is not None
            for runs in trace.ranks.values()
            for run in runs
            for step in run.steps
            if not step.micro
        )
    comparison = compare(wanted, found, exact=True, tolerance=0)
    assert comparison.equal, comparison.first
    starts = list(found.ranks[0])
    for start, move in zip(starts[1:], moves, strict=True):
        at = move.get("stop_at")
        assert start.began.step == at if at else start.began.step < move.get("kill_at", NEVER)
        assert start.began.restored or start.began.step == 0
    return starts


def page_runs(process: Warm, page: str, folder: Path, *, only: str) -> None:
    """The blocks of code of a page that name ``only`` run, and run again when everything is there."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if only in block]
    script = folder / "block.py"
    script.write_text(block)
    for _ in range(2):
        process.run(script, folder=folder, name="page", drill=False)
    assert list((folder / "page/runs").rglob(".metadata"))


# --- the process that forks -----------------------------------------------------------------------------------------


def main() -> None:
    # Answers alone go where the test reads.
    with contextlib.redirect_stdout(sys.stderr):
        for module in sys.argv[1:]:
            __import__(module)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def serve(order: dict[str, Any]) -> list[int]:
    folder, name, ranks = Path(order["folder"]), order["name"], order.get("ranks", 1)
    trace = folder / name / "trace"
    orders = DrillOrders(str(folder / name / "root"), str(trace), order.get("stop_at"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            if order.get("drill", True):
                os.environ[DRILL_VARIABLE] = encode_orders(orders)
            if ranks > 1 or order.get("launched"):
                launched(rank, ranks, port)
            live(order, folder / f"{name}.{rank}.log")
        pids.append(pid)
    ends: dict[int, int] = {}
    deadline = time.monotonic() + 100
    while len(ends) < ranks:
        for rank, pid in enumerate(pids):
            if rank not in ends and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                ends[rank] = os.waitstatus_to_exitcode(ended[1])
        late = time.monotonic() > deadline
        # As under a launcher: when one has failed, the others are ended.
        failed = any(ends.values())
        if late or failed or (order.get("kill_at") and reached(trace, order["kill_at"])):
            for rank, pid in enumerate(pids):
                if rank not in ends:
                    os.kill(pid, signal.SIGKILL)
                    ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)
    return [ends[rank] for rank in range(ranks)]


def reached(trace: Path, step: int) -> bool:
    path = trace / "rank-00000.jsonl"
    return path.exists() and f'"what":"stepped","step":{step},' in path.read_text()


def launched(rank: int, ranks: int, port: str) -> None:
    """What torchrun puts into the environment."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
    }


def live(order: dict[str, Any], log: Path) -> None:
    status = 1
    try:
        with log.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        import torch

        if order.get("kill_at"):
            # Whoever watches is to see the step before the script is far beyond it, on a busy machine too.
            os.nice(10)
        torch.set_num_threads(1)
        place = log.parent / order["name"]
        place.mkdir(exist_ok=True)
        os.chdir(place)
        sys.argv = [order["script"], *order["argv"]]
        runpy.run_path(order["script"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
