"""Copies to a real store over a socket: through outages, and through the death of everybody who takes part."""

from __future__ import annotations

import contextlib
import io
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import keepstep as ks
from keepstep.cli.agents import Agents, print_agents, read_agents
from keepstep.cli.words import size_words
from keepstep.commit.retention import Keep
from keepstep.storage.remote import RemoteStorage
from keepstep.storage.retry import Patience
from tests.helpers.agents import agent_of, is_alive, kill_agent, wait_until
from tests.helpers.buckets import environment
from tests.helpers.proxy import DROP, STALL, proxy_before
from tests.helpers.runs import contents, run, steps_in, train

ROOT = Path(__file__).resolve().parents[2]
QUICK = Patience(tries=3, first_wait_s=0.002, longest_wait_s=0.02, request_s=20)

TRAINER = """
import sys
import keepstep as ks
from tests.helpers.runs import run, train

state = run()
ckpt = ks.Checkpointer(sys.argv[1], state, local=sys.argv[2], background=sys.argv[3])
print("restored", ckpt.restore().step, flush=True)
while True:
    train(state)
    ckpt.step()
    ckpt.save().wait_committed(60)
    print("committed", state.progress.step, flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def a_store(moto):
    """A run's URL on a server behind a proxy, and the same place by a way of its own."""
    url = f"s3://{moto.make_bucket('levels')}/run-{secrets.token_hex(4)}"
    with proxy_before(moto.address) as proxy, environment(moto, proxy.endpoint):
        yield url, proxy, RemoteStorage(url, options=moto.options())


def committed(storage):
    return sorted(int(name[5:13]) for name, _ in storage.list("") if name.endswith("/.metadata"))


def trained(ckpt, state, *, for_s=0.0, steps=0):
    """Trains and saves at each step, at least so long and so often. Returns how many steps, and the longest time at one."""
    end, count, longest = time.monotonic() + for_s, 0, 0.0
    while count < steps or time.monotonic() < end:
        began = time.monotonic()
        train(state)
        ckpt.step()
        pending = ckpt.save()
        longest, count = max(longest, time.monotonic() - began), count + 1
        pending.wait_committed(60)
    return count, longest


def outage(moto, near, background, outage_s):
    state = run()
    with a_store(moto) as (url, proxy, there):
        far = url if background == "agent" else RemoteStorage(url, options=moto.options(proxy.endpoint), patience=QUICK)
        ckpt = ks.Checkpointer(
            far, state, local=near, background=background, keep=Keep(last=6), keep_local=Keep(last=2)
        )
        with ckpt:
            ckpt.restore()
            trained(ckpt, state, steps=3)
            ckpt.uploads.wait(60)
            assert committed(there) == [1, 2, 3]
            proxy.fault = lambda asked: DROP
            count, longest = trained(ckpt, state, for_s=outage_s, steps=8)
            newest = 3 + count
            # Nothing has come through, and every step is durable here.
            assert committed(there) == [1, 2, 3]
            assert max(steps_in(near)) == newest
            wanted = list(range(newest - 5, newest + 1))
            # (What is removed goes after the newest is committed.)
            wait_until(lambda: len(steps_in(near)) <= len(wanted))
            assert steps_in(near) == wanted, "what the far root will want was let go"
            wait_until(lambda: proxy.done[DROP] > 0)
            assert ckpt.uploads.behind().steps == tuple(reversed(wanted))
            proxy.fault = lambda asked: None
            began = time.monotonic()
            ckpt.uploads.wait(60)
            print(
                f"{background}: {count} steps in {outage_s:g} s without a store, the longest boundary {longest:.3f} s,"
            )
            print(f"caught up {time.monotonic() - began:.2f} s after it, {proxy.done[DROP]} requests dropped")
            assert set(wanted) <= set(committed(there))
            wait_until(lambda: committed(there) == wanted)
        for step in wanted[-2:]:
            assert contents(RemoteStorage(f"{url}/step-{step:08d}", options=moto.options())) == contents(
                near / f"step-{step:08d}"
            )
        return longest


@pytest.mark.slow
def test_a_short_outage(moto, tmp_path):
    outage(moto, tmp_path / "near", "agent", 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("background", ["thread", "agent"])
def test_an_outage_of_a_minute(moto, tmp_path, background):
    assert outage(moto, tmp_path / "near", background, 60.0) < 10.0


def start(url, near, background):
    arguments = [sys.executable, "-c", TRAINER, url, str(near), background]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    "background", [pytest.param("agent", marks=pytest.mark.slow), pytest.param("thread", marks=pytest.mark.soak)]
)
def test_everybody_is_killed_in_the_middle_of_a_copy(moto, tmp_path, background):
    """The next start finds what is missing, sends that, and goes on from the newest step, which only the disk had."""
    near = tmp_path / "near"
    with a_store(moto) as (url, proxy, there):
        reached = []

        def hold(asked):
            # The first step comes through; of the second one, all but the file of its model.
            if asked.method in ("PUT", "POST") and "step-00000002/model/" in asked.path:
                reached.append(asked)
                return STALL
            return None

        proxy.fault = hold
        process = start(url, near, background)
        try:
            assert process.stdout.readline() == "restored 0\n"
            assert process.stdout.readline() == "committed 1\n"
            wait_until(lambda: committed(there) == [1])
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "committed 2\n"
            wait_until(lambda: reached, what="a copy under way")
        finally:
            if background == "agent":
                kill_agent(near)
            kill(process)
        assert committed(there) == [1]
        proxy.fault = lambda asked: None
        before = len(proxy.asked)
        state = run(9)
        with ks.Checkpointer(url, state, local=near, background=background) as ckpt:
            assert ckpt.restore().url == str(near / "step-00000002")
            ckpt.uploads.wait(60)
            assert committed(there) == [1, 2]
            if background == "agent":
                assert agent_of(near).copies.waiting == ()
        assert contents(RemoteStorage(f"{url}/step-00000002", options=moto.options())) == contents(
            near / "step-00000002"
        )
        assert any("step-00000002/model/" in one.path and one.method == "PUT" for one in proxy.asked[before:])


def status_of(near):
    """As the command sees it."""
    return next(line for line in read_agents().agents if line.root == str(near))


@pytest.mark.slow
def test_an_agent_without_trainers_finishes_the_copies(moto, tmp_path):
    """The job ends during the outage; nobody has to start it again for the copies."""
    near = tmp_path / "near"
    with a_store(moto) as (url, proxy, there):
        state = run()
        with ks.Checkpointer(url, state, local=near, background="agent") as ckpt:
            ckpt.restore()
            proxy.fault = lambda asked: DROP
            trained(ckpt, state, steps=2)
            wait_until(lambda: proxy.done[DROP] > 0)
        wait_until(lambda: agent_of(near).trainers == ())
        wait_until(lambda: status_of(near).copies.waiting == (2, 1))
        line = status_of(near)
        assert line.copies.url == url
        console = Console(file=io.StringIO(), width=200)
        print_agents(Agents((line,), (), ()), console)
        assert f"copies    2 steps ({size_words(line.copies.waiting_bytes)}) behind at {url}" in (
            console.file.getvalue()
        )
        assert committed(there) == []
        proxy.fault = lambda asked: None
        wait_until(lambda: committed(there) == [1, 2], timeout_s=60)
        wait_until(lambda: agent_of(near).copies.waiting == ())
        assert is_alive(agent_of(near).pid)
