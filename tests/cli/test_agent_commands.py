"""``keepstep agent``: what runs in the background on this machine, and how to have it leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.console import Console

import keepstep as ks
from keepstep.agent.board import Place
from keepstep.agent.client import AgentClient, call_agent
from keepstep.agent.node import agent_names, socket_path
from keepstep.agent.protocol import Abort, Begin, Drain, JobStatus, Submit, WriteOrder
from keepstep.cli import agents as commands
from keepstep.commit.records import RankTimes
from keepstep.format.failure import failure_of
from keepstep.storage.local import LocalStorage
from tests.cli.test_commands import call, documented, run_command
from tests.helpers.agents import agent_of, is_alive, kill_agent, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def only_agents_of_this_test(monkeypatch, tmp_path):
    """Other tests, and whoever works on this machine, have agents too: these commands must not see or stop them."""
    mine = {socket_path(str(tmp_path / name)) for name in ("run", "other")}
    monkeypatch.setattr(commands, "agent_names", lambda: [path for path in agent_names() if path in mine])


def trainer(root: Path, **options) -> ks.Checkpointer:
    return ks.Checkpointer(root, ks.TrainState(weight=torch.ones(1000)), background="agent", **options)


def save(checkpointer: ks.Checkpointer) -> ks.Pending:
    checkpointer.step()
    return checkpointer.save()


def status() -> dict:
    return json.loads(call("agent", "status", "--json").stdout)


@contextlib.contextmanager
def half_a_save(root: Path) -> Iterator[list[AgentClient]]:
    """A save of two ranks of which one has submitted its part, and the other is still copying. Ends with the block."""
    clients = [AgentClient(str(root), rank, 60.0) for rank in (0, 1)]
    try:
        place = Place(LocalStorage(root / "step-00000007"), LocalStorage(root))
        lent = clients[0].lend(1, 0, None)
        for rank, client in enumerate(clients):
            client.begin(Begin("0badc0de", 7, rank, 2, place.step.url, 60.0))
        order = WriteOrder((), 7, lent.number, str(root), "step-00000007")
        clients[0].submit(Submit("0badc0de", 0, order, RankTimes()), place, lent)
        wait_until(
            lambda: {job.rank: job.state for job in agent_of(root).jobs} == {0: "written", 1: "staging"},
            what="half of a save",
        )
        yield clients
    finally:
        lent.arena.close()
        for client in clients:
            client.close()


def test_status_tells_what_every_agent_does(tmp_path):
    assert call("agent", "status").stdout == "no agent of this user runs on this machine\n"
    assert status() == {"agents": [], "stale": [], "silent": []}
    root = tmp_path / "run"
    with trainer(root) as checkpointer:
        save(checkpointer).wait_committed(30)
        found = status()
        assert set(found) == documented("agent status")
        (line,) = found["agents"]
        assert set(line) == documented("agent status", "agents")
        assert (line["root"], line["trainers"], line["jobs"]) == (str(root), [os.getpid()], [])
        assert (line["committed"], line["failed"]) == (1, 0)
        assert line["pid"] != os.getpid()
        assert is_alive(line["pid"])
        assert 0 < line["uptime_s"] < 60
        assert line["arenas_bytes"] >= 4000
        assert 5 << 20 < line["memory_bytes"] < 60 << 20
        assert Path(line["log"]).read_text().startswith("20")
        out = call("agent", "status").stdout
        assert out.startswith(f"agent {line['pid']} of {root}\n")
        assert re.search(rf"^  trainers +{os.getpid()} *$", out, re.M)
        assert re.search(r"^  saves +1 committed, 0 failed *$", out, re.M)
    wait_until(lambda: not agent_of(root).trainers, what="the trainer has left")
    assert "none; it leaves 60 s after the last one" in call("agent", "status").stdout


def test_status_shows_a_save_in_progress(tmp_path):
    root = tmp_path / "run"
    with half_a_save(root):
        (line,) = status()["agents"]
        job, other = line["jobs"]
        assert (other["rank"], other["state"]) == (1, "staging")
        assert set(job) == documented("agent status", "agents", "jobs")
        assert (job["attempt"], job["step"], job["rank"], job["url"]) == ("0badc0de", 7, 0, f"{root}/step-00000007")
        assert (job["state"], job["done_bytes"], job["total_bytes"]) == ("written", 0, 0)
        assert re.search(r"^  step 7, rank 0: written, \d+ s$", call("agent", "status").stdout, re.M)
    wait_until(lambda: not agent_of(root).jobs, what="the decision")


def test_progress_is_told_in_bytes_and_percent(capsys):
    job = JobStatus("a", 300, 5, "writing", "/runs/x", 3 << 28, 3 << 30, 1.9)
    line = commands.AgentLine(1, "/runs/x\x1b[2J", 7000.0, (7, 8), (job,), 3 << 30, 30 << 20, 2, 1, 60.0, "/runs/x/log")
    commands.print_agents(commands.Agents((line,), (), ()), Console(markup=False, width=80))
    out = capsys.readouterr().out
    assert "  step 300, rank 5: writing, 768 MiB of 3 GiB (25 %), 1 s\n" in out
    assert out.startswith("agent 1 of /runs/x\\x1b[2J\n  up        116 min")
    assert re.search(r"^  trainers  7, 8 *$", out, re.M)
    assert max(map(len, out.splitlines())) <= 80


def test_a_socket_that_a_dead_agent_left_is_called_stale_and_a_stopped_one_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "STATUS_S", 0.2)
    dead, stuck = tmp_path / "run", tmp_path / "other"
    with trainer(dead) as first, trainer(stuck) as second:
        save(first).wait_committed(30)
        save(second).wait_committed(30)
        kill_agent(dead)
        agent = agent_of(stuck).pid
        os.kill(agent, signal.SIGSTOP)
        try:
            found = status()
            out = call("agent", "status").stdout
            stopping = call("agent", "stop", stuck, status=12).stdout
        finally:
            os.kill(agent, signal.SIGCONT)
        assert found["agents"] == []
        assert found["stale"] == [str(socket_path(str(dead)))]
        assert found["silent"] == [{"pid": agent, "socket": str(socket_path(str(stuck)))}]
        assert set(found["silent"][0]) == documented("agent status", "silent")
        assert f"stale: {socket_path(str(dead))}; its agent has died" in out
        assert f"process {agent} takes calls and does not answer" in out
        assert f"agent {agent} at {socket_path(str(stuck))} does not answer" in stopping
    assert "removed the stale socket" in call("agent", "stop", dead, status=3).stdout
    assert not socket_path(str(dead)).exists()
    assert status()["stale"] == []


def test_stop_waits_for_what_was_submitted(tmp_path):
    root = tmp_path / "run"
    with trainer(root) as checkpointer:
        save(checkpointer).wait_committed(30)
        agent = agent_of(root).pid
        pending = save(checkpointer)
        pending.wait_staged(30)
        stopping = json.loads(call("agent", "stop", root, "--json").stdout)
        assert set(stopping) == documented("agent stop")
        (stopped,) = stopping["stopped"]
        assert set(stopped) == documented("agent stop", "stopped")
        assert (stopped["pid"], stopped["root"], stopped["undecided"]) == (agent, str(root), 0)
        assert (stopped["trainers"], stopped["failed"], stopped["gone"]) == ([os.getpid()], 0, True)
        assert pending.wait_committed(30).step == 2
        wait_until(lambda: not is_alive(agent), what="the agent's end")
        # Training goes on, and so do its saves: with another agent. (One that began before this trainer noticed fails.)
        later = save(checkpointer)
        if later.committed.exception(30) is not None:
            later = save(checkpointer)
        assert later.wait_committed(30).step >= 3
        assert agent_of(root).pid != agent
        out = call("agent", "stop", root).stdout
        assert re.search(r"^stopped agent \d+ of .*/run\n  1 trainer used it; the next save starts another one\n$", out)
    assert call("agent", "stop", root, status=3).stdout == f"no agent of {root} runs here\n"


def test_stop_waits_for_the_other_ranks_and_says_by_its_status_that_a_save_failed(tmp_path, monkeypatch):
    root = tmp_path / "run"
    waiting = threading.Event()

    def noticed(path, body, timeout_s):
        if isinstance(body, Drain):
            waiting.set()
        return call_agent(path, body, timeout_s)

    monkeypatch.setattr(commands, "call_agent", noticed)
    with half_a_save(root) as clients, ThreadPoolExecutor(1) as pool:
        agent = agent_of(root).pid
        stopping = pool.submit(commands.stop_agents, str(root), everything=False, now=False)
        assert waiting.wait(30)
        assert not stopping.done()
        clients[1].abort(Abort("0badc0de", 1, failure_of(MemoryError("rank 1 has no room"))))
        result = stopping.result(30)
    assert result.exit_status == 12
    assert result.stopped == (commands.Stopped(agent, str(root), (os.getpid(), os.getpid()), 0, 1, 0, gone=True),)
    wait_until(lambda: not is_alive(agent), what="the agent's end")


def test_stop_now_gives_up_what_is_undecided_and_says_so(tmp_path):
    root = tmp_path / "run"
    with half_a_save(root) as clients:
        agent = agent_of(root).pid
        out = call("agent", "stop", root, "--now", status=12).stdout
        assert out.startswith(f"stopped agent {agent} of {root}; 2 parts of saves left undecided\n")
        wait_until(lambda: not any(client.alive for client in clients), what="the agent's end")
    assert not list(root.glob("step-*/.metadata"))


def test_stop_all_and_wrong_arguments(tmp_path):
    for name in ("run", "other"):
        with trainer(tmp_path / name) as checkpointer:
            save(checkpointer).wait_committed(30)
    error = call("agent", "stop", status=2).stderr
    assert "error[usage]: name the root of one agent, or give --all, not both" in error
    assert str(tmp_path / "run") in error
    assert "error[usage]" in call("agent", "stop", tmp_path / "run", "--all", status=2).stderr
    assert "error[usage]: s3://x/run cannot be used" in call("agent", "stop", "s3://me:pw@x/run", status=2).stderr
    assert "no agent of s3://x/run runs here" in call("agent", "stop", "s3://x/run", status=3).stdout
    assert len(status()["agents"]) == 2
    out = call("agent", "stop", "--all").stdout
    assert len(re.findall(r"^stopped agent \d+ of ", out, re.M)) == 2
    assert status()["agents"] == []
    assert call("agent", "stop", "--all").stdout == "no agent runs here\n"


def test_status_makes_no_folder_of_a_run_that_was_removed(tmp_path):
    root = tmp_path / "run"
    with trainer(root) as checkpointer:
        save(checkpointer).wait_committed(30)
    shutil.rmtree(root)
    assert status()["agents"][0]["root"] == str(root)
    assert not root.exists()
    call("agent", "stop", root)


@pytest.mark.parametrize("command", [("agent", "status"), ("stats", ".")])
def test_as_a_process_it_imports_no_torch(command, tmp_path):
    ran = run_command(*command[:-1], tmp_path if command[-1] == "." else command[-1])
    assert ran.returncode == 0, ran.stderr
    assert not {"torch", "torch.distributed"} & {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
