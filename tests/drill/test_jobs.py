"""One start of a command: with orders, in a session of its own, and nothing of it left when it is closed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from keepstep.check.trace import DrillOrders
from keepstep.drill.jobs import Job, agent_pid, kill_agent, log_tail, stop_agent
from keepstep.errors import UsageError
from tests.helpers.agents import is_alive, wait_until

TREE = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper, start_new_session=True)
orphan = subprocess.Popen([sys.executable, "-S", "-c",
    f"import subprocess; p = subprocess.Popen({sleeper!r}, start_new_session=True); print(p.pid, flush=True)"],
    stdout=subprocess.PIPE, text=True)
below = orphan.stdout.readline().strip()
orphan.wait()
agent = subprocess.Popen([*sleeper, "keepstep.agent.server"], start_new_session=True)
print(agent.pid, os.getpid(), child.pid, below, os.environ["KEEPSTEP_DRILL"], flush=True)
time.sleep(600)
"""


def job(tmp_path, *command: str, **orders) -> Job:
    wanted = DrillOrders(str(tmp_path / "root"), str(tmp_path / "trace"), **orders)
    return Job(command, wanted, environment=dict(os.environ), log=tmp_path / "log")


def test_all_that_a_job_has_started_ends_with_it_but_its_agent_and_nothing_else(tmp_path):
    (tmp_path / "other").mkdir()
    with job(tmp_path / "other", sys.executable, "-S", "-c", "import time; time.sleep(600)") as other:
        with job(tmp_path, sys.executable, "-S", "-c", TREE, stop_at=3) as running:
            wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"), what="the line")
            agent, *pids, orders = (tmp_path / "log").read_text().split(maxsplit=4)
            assert all(is_alive(int(pid)) for pid in (agent, *pids))
            assert '"stop_at":3' in orders
            assert running.poll() is None
        try:
            assert not any(is_alive(int(pid)) for pid in pids)
            assert running.poll() == -9
            assert other.poll() is None
            assert is_alive(int(agent))
        finally:
            os.kill(int(agent), signal.SIGKILL)
        running.close()
    assert other.poll() == -9


def test_what_a_launcher_leaves_behind_ends_too(tmp_path):
    script = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True).pid)\n"
    )
    with job(tmp_path, sys.executable, "-S", "-c", script) as running:
        wait_until(lambda: running.poll() is not None, what="the launcher's end")
        assert running.poll() == 0
        pid = int((tmp_path / "log").read_text())
    assert not is_alive(pid)


def test_a_command_that_is_none_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="'no-such-command' cannot be started: No such file"):
        job(tmp_path, "no-such-command")


def test_where_no_agent_is_nothing_is_stopped(tmp_path):
    root = str(tmp_path / "root")
    assert agent_pid(root) == 0
    assert kill_agent(root) == 0
    stop_agent(root, now=True)


def test_the_end_of_a_log_shows_the_errors_that_a_launcher_buries(tmp_path):
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {number}\n" for number in range(5)))
    assert log_tail(log).splitlines() == [f"line {number}" for number in range(5)]
    log.write_text("[rank1]: keepstep.errors.StepNotFoundError: nothing\n" + "words\n" * 30 + "end\n")
    lines = log_tail(log).splitlines()
    assert lines[:2] == ["[rank1]: keepstep.errors.StepNotFoundError: nothing", "…"]
    assert (len(lines), lines[-1]) == (14, "end")
    listed = [
        "[rank0]: keepstep.errors.MismatchError: values differ:",
        "[rank0]:   - best: 1 and 2",
        "[rank0]:   - worst: 3",
    ]
    log.write_text("\n".join([*listed, "[rank0]: (on rank 0)", *["words"] * 30]))
    assert log_tail(log).splitlines()[:4] == [*listed, "…"]
    log.write_bytes(b"\xff\xfe" * 100_000)
    assert len(log_tail(log)) <= 1 << 16
