"""Agents of several hosts: one on each, receipts over TCP, and an end in time whatever becomes of a host or the network."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import keepstep as ks
from keepstep.agent import links
from keepstep.agent.hub import Hub
from keepstep.agent.node import socket_path
from keepstep.agent.protocol import Abort, Begin, Decided, Deliver, Join, accept_peer, greet_peer
from keepstep.errors import AgentError
from keepstep.format.failure import Failure
from tests.agent.gate import WRITING, Gate
from tests.helpers.agents import agent_of, is_alive, wait_until
from tests.helpers.hosts import ADDRESSES, Hosts, connections, cut, mend, on_hosts
from tests.helpers.jobs import alone, run_job
from tests.ranks.calls import attempt, group_works

PATIENCE_S = 30.0


@pytest.fixture
def hosts():
    with Hosts() as pair:
        yield pair


def state_of(rank, value=0.0):
    model = nn.Sequential(*(nn.Linear(128, 160) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return ks.TrainState(model=model, optimizer=optimizer, mine=ks.per_rank({"rank": rank}, "same_rank"))


def saved(ckpt, step):
    ckpt.progress.step = step
    return ckpt.save().wait_committed(PATIENCE_S)


def steps_in(root):
    return sorted(int(path.parent.name[5:]) for path in Path(root).glob("step-*/.metadata"))


def all_ranks(value):
    """Everybody's value, by rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def agent_pids(ckpt, folder):
    """The agents' processes, by rank."""
    return all_ranks(agent_of(folder).pid)


def launch(rank_pool, hosts, world, fn, *args):
    """The results of the ranks of a job on these hosts, by rank."""
    folder = Path(args[0]).parent
    return rank_pool(1)(alone, run_job, folder / "job", world, on_hosts, hosts.names, fn, *args)[0]


# --- one step over two hosts ----------------------------------------------------------------------------------------


def over_the_cable(rank, folder):
    state = state_of(rank, 1.0)
    with ks.Checkpointer(folder, state, deadline_s=20) as ckpt:
        saved(ckpt, 1)
        with torch.no_grad():
            state["model"][0].weight.fill_(2.0)
        saved(ckpt, 2)
        report = agent_of(folder)
        peers = {there[0] for _, there in connections(report.pid, "01")}
        dist.barrier()
    target = state_of(rank)
    with ks.Checkpointer(folder, target, deadline_s=20) as ckpt:
        assert ckpt.restore().step == 2
    assert torch.all(target["model"][0].weight == 2.0)
    assert torch.all(target["model"][1].weight == 1.0)
    assert target["mine"].value == {"rank": rank}
    return report.name, report.pid, peers


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_two_hosts_commit_one_step(rank_pool, hosts, tmp_path, world):
    root = tmp_path / "run"
    results = launch(rank_pool, hosts, world, over_the_cable, str(root))
    half = world // 2
    names = [name for name, *_ in results]
    assert names == [names[0]] * half + [names[-1]] * half
    assert names[0] != names[-1]
    assert [name.startswith(host) for name, host in zip((names[0], names[-1]), hosts.names, strict=True)] == [True] * 2
    assert len({pid for _, pid, _ in results}) == 2
    # What ranks of the second host wrote was told to the coordinator's agent over the cable.
    assert results[0][2] == {ADDRESSES[1]}
    assert results[-1][2] == {ADDRESSES[0]}
    lines = [json.loads(line) for line in (root / "saves.jsonl").read_text().splitlines()]
    assert [(one["step"], one["outcome"], one["world"]) for one in lines] == [
        (1, "committed", world),
        (2, "committed", world),
    ]
    writers = {path.name.partition(".")[0] for path in root.glob("step-00000002/*/*.safetensors")}
    assert writers == {f"rank-{rank:05d}" for rank in range(world)}
    assert sorted(path.name for path in root.glob("agent.*.log")) == sorted(f"agent.{name}.log" for name in hosts.names)


# --- what can go wrong ----------------------------------------------------------------------------------------------


def cut_in_a_save(rank, folder, gates):
    """The cable is cut while the second host writes: both ends are told in time; when it is back, saves work again."""
    gate = Gate(Path(gates, str(rank))).install()
    with ks.Checkpointer(folder, state_of(rank), deadline_s=20) as ckpt:
        gate.remove()
        saved(ckpt, 1)
    with ks.Checkpointer(folder, state_of(rank), deadline_s=2.0, overwrite=True) as ckpt:
        if rank == 1:
            gate.shut(WRITING)
        ckpt.progress.step = 2
        pending = ckpt.save()
        if rank == 1:
            gate.wait_reached(WRITING)
            cut()
            gate.open(WRITING)
        outcome = attempt(pending.wait_committed, PATIENCE_S)
        present = steps_in(folder)
        if rank == 1:
            mend()
        works = group_works()
    with ks.Checkpointer(folder, state_of(rank), deadline_s=20, overwrite=True) as ckpt:
        saved(ckpt, 3)
    return outcome, present, works


@pytest.mark.slow
@pytest.mark.case(60)
def test_a_cable_that_is_cut_in_a_save_fails_it_on_both_ends_in_time(rank_pool, hosts, tmp_path):
    (tmp_path / "gates").mkdir()
    results = launch(rank_pool, hosts, 2, cut_in_a_save, str(tmp_path / "run"), str(tmp_path / "gates"))
    (here, present, _), (there, _, _) = results
    assert present == [1]
    assert all(works for *_, works in results)
    assert here.kind == "CommitTimeoutError"
    assert here.missing == (1,)
    assert "nothing came from rank 1 within 2 s" in here.text
    assert there.kind == "CommitTimeoutError"
    assert there.missing == (0,)
    assert "the coordinator's agent has said nothing for 2 s" in there.text
    assert max(here.seconds, there.seconds) < 2.0 + 5
    assert steps_in(tmp_path / "run") == [1, 3]


def agents_die(rank, folder, gates):
    """The agent of one host dies: between saves, then while it writes; then the other host's."""
    told = {}
    gate = Gate(Path(gates, str(rank))).install()
    with ks.Checkpointer(folder, state_of(rank), deadline_s=20, keep=ks.Keep(last=None)) as ckpt:
        saved(ckpt, 1)
        for step, victim in ((2, 1), (4, 0)):
            pids = agent_pids(ckpt, folder)
            if rank == victim:
                gate.shut(WRITING)
            ckpt.progress.step = step
            pending = ckpt.save()
            if rank == victim:
                gate.wait_reached(WRITING)
                os.kill(pids[rank], signal.SIGKILL)
            told[victim] = attempt(pending.wait_committed, PATIENCE_S)
            if rank == victim:
                wait_until(lambda pid=pids[rank]: not is_alive(pid))
                gate.open(WRITING)
            assert group_works()
            saved(ckpt, step + 1)
            after = agent_pids(ckpt, folder)
            assert [old == new for old, new in zip(pids, after, strict=True)] == [victim == 1, victim == 0]
        gate.remove()
    return told


@pytest.mark.slow
@pytest.mark.case(60)
@pytest.mark.case(69)
def test_an_agent_that_dies_is_told_on_both_hosts_and_replaced(rank_pool, hosts, tmp_path):
    (tmp_path / "gates").mkdir()
    results = launch(rank_pool, hosts, 2, agents_die, str(tmp_path / "run"), str(tmp_path / "gates"))
    for told in results:
        assert all(outcome.seconds < 10 for outcome in told.values())
    # The second host's dies: its own trainer knows, the coordinator hears that it is gone.
    assert results[0][1].kind == "RankFailedError"
    assert set(results[0][1].failures) == {1}
    assert f"the agent of rank 1 at {ADDRESSES[1]} is gone" in results[0][1].text
    assert results[1][1].kind == "AgentError"
    assert "died or was stopped" in results[1][1].text
    # The coordinator's dies.
    assert results[0][0].kind == results[1][0].kind == "AgentError"
    assert "died or was stopped" in results[0][0].text
    assert "the coordinator's agent is gone" in results[1][0].text
    assert steps_in(tmp_path / "run") == [1, 3, 5]


def besieged(rank, folder):
    """Strangers call the coordinator's agent in every way while the second host's is replaced and has to call it too."""
    heard = {}
    with ks.Checkpointer(folder, state_of(rank), deadline_s=20) as ckpt, contextlib.ExitStack() as held:
        saved(ckpt, 1)
        report = agent_of(folder)
        ports = all_ranks([here[1] for here, _ in connections(report.pid, "0A")])
        assert ports[1] == []
        if rank == 1:
            [port] = ports[0]

            def call():
                return held.enter_context(socket.create_connection((ADDRESSES[0], port), 5))

            with pytest.raises(EOFError):
                greet_peer(call(), "another secret")
            for name, words in (("web", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 64), ("zeros", bytes(4096))):
                caller = call()
                heard[name] = b""
                with contextlib.suppress(OSError):
                    caller.sendall(words)
                    while got := caller.recv(4096):
                        heard[name] += got
            gone = call()
            gone.close()
            # More than may be there at once, and none says a word.
            for _ in range(3 * links.STRANGERS):
                call()
            os.kill(report.pid, signal.SIGKILL)
            wait_until(lambda: not is_alive(report.pid))
        dist.barrier()
        for step in (2, 3):
            ckpt.progress.step = step
            outcome = attempt(ckpt.save().wait_committed, PATIENCE_S)
        assert agent_of(folder).pid == report.pid or rank == 1
        dist.barrier()
    return outcome.kind, heard


@pytest.mark.slow
def test_strangers_are_refused_and_keep_nobody_out(rank_pool, hosts, tmp_path):
    results = launch(rank_pool, hosts, 2, besieged, str(tmp_path / "run"))
    assert [kind for kind, _ in results] == ["ok", "ok"]
    for said in results[1][1].values():
        # Its greeting is all that a stranger gets.
        assert len(said) <= len(b"keepstep") + 32
    log = (tmp_path / "run" / f"agent.{hosts.names[0]}.log").read_text()
    assert f"a caller from {ADDRESSES[1]} was refused: it does not know the secret" in log
    assert log.count(" was refused") >= 3 + 2 * links.STRANGERS
    assert "Traceback" not in log
    assert 3 in steps_in(tmp_path / "run")


def killed_at_any_moment(rank, folder, rounds):
    """The second host's agent is killed right before, in and after a boundary, as far as its trainer can tell."""
    told = []
    with ks.Checkpointer(folder, state_of(rank), deadline_s=60, keep=ks.Keep(last=None)) as ckpt:
        saved(ckpt, 1)
        for number in range(rounds):
            pid = agent_of(folder).pid
            ckpt.progress.step = 2 + 2 * number
            dist.barrier()
            if rank == 1:
                killer = threading.Timer(0.002 * number, os.kill, (pid, signal.SIGKILL))
                killer.start()
                if number == 0:
                    killer.join()
            told.append(attempt(ckpt.save().wait_committed, PATIENCE_S))
            if rank == 1:
                killer.join()
                wait_until(lambda pid=pid: not is_alive(pid))
            dist.barrier()
            saved(ckpt, ckpt.progress.step + 1)
    return told


@pytest.mark.slow
@pytest.mark.case(69)
def test_an_agent_that_is_killed_at_any_moment_keeps_nobody_waiting(rank_pool, hosts, tmp_path):
    for told in launch(rank_pool, hosts, 2, killed_at_any_moment, str(tmp_path / "run"), 6):
        for outcome in told:
            assert outcome.kind in ("ok", "AgentError", "RankFailedError"), told
            assert outcome.seconds < 10, told
    assert set(range(3, 14, 2)) <= set(steps_in(tmp_path / "run"))


# --- both ends, in one process --------------------------------------------------------------------------------------


class Cable:
    """A relay in front of a port, to be cut. ``calls`` counts who has come, ``carried`` the bytes that were passed on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.calls = self.carried = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self.calls += 1
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                self.carried += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Coordinator:
    """A hub that others can call over a cable; ``join`` is what they are told."""

    def __init__(self, secret: str = "ours") -> None:
        self.hub = Hub()
        port = self.hub.listen(secret, ("127.0.0.1",))[0][1]
        self.cable = Cable(port)
        self.join = Join(self.hub.name, (("127.0.0.1", self.cable.port),), secret)

    def begins(self, attempt_name: str, rank: int = 0, world: int = 2) -> Future[Decided]:
        return self.hub.begin(begin(attempt_name, self.join, rank, world), None)

    def fails(self, attempt_name: str, text: str) -> None:
        """The coordinator's own rank cannot do its part, which decides the attempt."""
        self.hub.abort(Abort(attempt_name, 0, Failure(AgentError.code, text)))

    def close(self) -> None:
        self.cable.close()
        self.hub.close()


GREETINGS_BYTES = len(b"keepstep") + 32 + 64 + 32
"""What both ends say before a caller is known."""


def begin(attempt_name, join, rank=1, world=2, deadline_s=20.0):
    return Begin(attempt_name, 7, rank, world, "somewhere", deadline_s, join)


def text_of(decided: Future[Decided]) -> str:
    return str(decided.result(10).failure.error())


@pytest.fixture
def closing():
    with contextlib.ExitStack() as stack:

        def close_later(thing):
            stack.callback(thing.close)
            return thing

        yield close_later


def test_a_decision_reaches_every_rank_of_another_host_even_late(closing):
    coordinator, hub = closing(Coordinator()), closing(Hub())
    first = hub.begin(begin("a", coordinator.join, 1, 3), None)
    own = coordinator.begins("a", world=3)
    coordinator.fails("a", "no memory")
    assert "no memory" in text_of(first)
    assert "rank 0" in text_of(own)
    # Its other rank comes after the decision.
    assert "no memory" in text_of(hub.begin(begin("a", coordinator.join, 2, 3), None))
    assert coordinator.cable.calls == 1


def test_a_lost_link_fails_its_own_attempts_and_no_others(closing):
    old, new, hub = closing(Coordinator()), closing(Coordinator()), closing(Hub())
    lost = hub.begin(begin("old", old.join), None)
    kept = hub.begin(begin("new", new.join), None)
    on_old, on_new = old.begins("old"), new.begins("new")
    for one in (old, new):
        wait_until(lambda one=one: one.cable.carried > GREETINGS_BYTES, what="the announcement")
    old.cable.cut()
    assert "the coordinator's agent is gone" in text_of(lost)
    assert "only committed steps exist" in text_of(lost)
    # The other end knows as well, and whose part it was.
    assert "the agent of rank 1 at 127.0.0.1 is gone" in text_of(on_old)
    assert not kept.done()
    new.fails("new", "as told")
    assert "as told" in text_of(kept)
    assert "as told" in text_of(on_new)


def test_ranks_that_begin_at_once_share_one_link_which_is_made_anew_after_a_loss(closing):
    coordinator, hub = closing(Coordinator()), closing(Hub())
    for calls, name in ((1, "a"), (2, "b")):
        together, decided = threading.Barrier(6), {}

        def one(rank, name=name, together=together, decided=decided):
            together.wait()
            decided[rank] = hub.begin(begin(name, coordinator.join, rank, 7), None)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        coordinator.begins(name, world=7)
        coordinator.fails(name, "as told")
        assert all("as told" in text_of(one) for one in decided.values())
        assert coordinator.cable.calls == calls
        link = hub._links[coordinator.hub.name]
        coordinator.cable.cut()
        wait_until(lambda link=link: not link.alive)


def test_messages_about_attempts_that_nobody_knows_change_nothing(closing):
    coordinator, hub = closing(Coordinator()), closing(Hub())
    hub.begin(begin("a", coordinator.join), None)
    link = hub._link(coordinator.join)
    link.send(Deliver("never begun", 1, failure=Failure(AgentError.code, "lost")))
    hub.abort(Abort("never begun here", 1, Failure(AgentError.code, "lost")))
    decided = hub.begin(begin("b", coordinator.join), None)
    coordinator.begins("b")
    coordinator.fails("b", "as told")
    assert "as told" in text_of(decided)
    assert hub._link(coordinator.join) is link


def test_a_coordinator_that_falls_silent_is_given_up_after_the_deadline(closing, monkeypatch):
    monkeypatch.setattr("keepstep.agent.hub.PATIENCE_S", 0.05)
    secret = "ours"
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls = []

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    assert accept_peer(caller, secret)
                    calls.append(caller)

        threading.Thread(target=answer, daemon=True).start()
        hub, join = closing(Hub()), Join("silent", (server.getsockname()[:2],), secret)
        for count in (1, 2):
            decided = hub.begin(begin(f"{count}", join, deadline_s=0.1), None).result(10)
            assert decided.failure.code == "commit-timeout"
            assert decided.failure.missing == (0,)
            assert "has said nothing for 0.1 s" in decided.failure.text
            # The next attempt does not wait behind what nobody has read.
            assert len(calls) == count
            wait_until(lambda: not hub._links["silent"].alive)
        assert hub.settle(1) == hub.open_parts() == 0
        for caller in calls:
            caller.close()


def test_who_does_not_know_the_secret_is_left_by_either_end(closing, caplog):
    coordinator, hub = closing(Coordinator()), closing(Hub())
    wrong = Join(coordinator.hub.name, coordinator.join.addresses, "another")
    assert "cannot be reached" in text_of(hub.begin(begin("a", wrong), None))
    wait_until(lambda: "it does not know the secret" in caplog.text)

    told = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            """Knows how to greet, and not the secret."""
            caller, _ = server.accept()
            with caller:
                caller.sendall(b"keepstep" + bytes(32))
                told.append(caller.recv(64))
                caller.sendall(bytes(32))
                told.append(caller.recv(4096))

        thread = threading.Thread(target=pretend)
        thread.start()
        # It is left, and the next address is tried.
        addresses = (server.getsockname()[:2], *coordinator.join.addresses)
        decided = hub.begin(begin("b", Join(coordinator.hub.name, addresses, "ours")), None)
        thread.join()
    coordinator.begins("b")
    coordinator.fails("b", "as told")
    assert "as told" in text_of(decided)
    proof, after = told
    assert len(proof) == 64
    assert b"ours" not in proof
    assert after == b""


def test_callers_that_say_nothing_keep_nobody_out(closing, caplog):
    coordinator, hub = closing(Coordinator()), closing(Hub())
    strangers = [socket.create_connection(coordinator.join.addresses[0]) for _ in range(links.STRANGERS + 8)]
    wait_until(lambda: caplog.text.count("was refused") >= 8)
    decided = hub.begin(begin("a", coordinator.join), None)
    coordinator.begins("a")
    coordinator.fails("a", "as told")
    assert "as told" in text_of(decided)
    for stranger in strangers:
        stranger.close()


def test_a_listener_survives_a_network_that_fails_for_a_while(closing, monkeypatch, caplog):
    real, failures = socket.socket.accept, [OSError(100, "Network is down"), ConnectionAbortedError(103, "aborted")]

    def accept(self):
        connection = real(self)
        if failures and self.getsockname()[1] == listener.port:
            connection[0].close()
            raise failures.pop()
        return connection

    listener = closing(links.Listener(closing(Hub()).board, "ours"))
    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(links, "PAUSE_S", 0.01)
    while failures:
        with socket.create_connection(("127.0.0.1", listener.port)) as caller:
            assert caller.recv(1) in (b"", b"k")
    with socket.create_connection(("127.0.0.1", listener.port)) as caller:
        assert greet_peer(caller, "ours")
    assert "Network is down" in caplog.text


def test_an_agent_that_is_being_killed_is_not_taken_for_a_living_one(tmp_path):
    """The kernel takes calls for a dying process until its sockets are closed, and then hangs up."""
    root = tmp_path / "run"
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(socket_path(str(root))))
        dying.listen()

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    dying.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with ks.Checkpointer(root, state_of(0), background="agent") as ckpt:
            saved(ckpt, 1)
            assert agent_of(root).trainers == (os.getpid(),)
        dying.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert steps_in(root) == [1]
