"""How a trainer ends, or is asked to, while a save is in progress; and what children it forks may not hold on to."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import keepstep as ks
from keepstep.checkpointer import pending as pendings
from keepstep.checkpointer.history import History
from keepstep.checkpointer.preemption import what_fits
from tests.helpers.agents import agent_of, is_alive, wait_until
from tests.helpers.gates import Gate, slow_copies
from tests.helpers.runs import latest, restored, run, steps_in, train
from tests.helpers.storages import Watched, failing

SEED = 50
SLOW_AGENT = [pytest.param("agent", marks=pytest.mark.slow), "thread"]

# --- the end of the process -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch, torch.distributed as dist
import keepstep as ks
from keepstep.errors import StorageError
from tests.helpers.storages import Watched

root, background, storage, api, end = sys.argv[1:]

def before(operation, name):
    if operation == "commit" and "rank-" in name:
        time.sleep(0.3)
        if storage == "failing":
            raise StorageError("commit", name, OSError(28, "no space"))

if api == "group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(300, 300)
torch.nn.init.constant_(model.weight, 7.0)
state = ks.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
place = root if storage == "plain" else Watched(root, before)
if api == "single":
    step = root + "/step-00000001"
    pending = ks.async_save(step if storage == "plain" else Watched(step, before), state, background=background)
else:
    ckpt = ks.Checkpointer(place, state, every=ks.Every(steps=1), background=background)
    pending = ckpt.step()
if api == "group":
    dist.destroy_process_group()
print("committed" if pending.committed.done() else "in progress")
if end == "exit":
    sys.exit(0)
if end == "raise":
    raise ZeroDivisionError("the loop failed")
"""
ENDS = [
    ("agent", "plain", "group", "return"),
    ("agent", "plain", "single", "exit"),
    ("agent", "plain", "loop", "raise"),
    ("thread", "slow", "single", "return"),
    ("thread", "slow", "group", "exit"),
    ("thread", "slow", "loop", "raise"),
    ("thread", "failing", "loop", "return"),
    ("thread", "failing", "single", "raise"),
]


@pytest.mark.case(94)
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_whatever_ends_the_script_the_save_is_finished_or_said_to_have_failed(tmp_path):
    jobs = []
    for number, how in enumerate(ENDS):
        root = tmp_path / str(number)
        command = [sys.executable, "-c", SCRIPT, str(root), *how]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        jobs.append((root, how, subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment)))
    for root, (background, storage, api, end), process in jobs:
        out, err = process.communicate(timeout=200)
        assert process.returncode == (1 if end == "raise" else 0), err
        assert ("ZeroDivisionError: the loop failed" in err) == (end == "raise")
        if background == "thread":
            assert out == "in progress\n"
        said = [line for line in err.splitlines() if "failed" in line and "the loop" not in line]
        if storage == "failing":
            assert len(said) == 1, err
            assert f"the save of step {0 if api == 'single' else 1} to {root}" in said[0]
            assert "errno 28" in said[0]
            assert steps_in(root) == []
            continue
        assert said == []
        assert steps_in(root) == [1]
        with ks.open(root / "step-00000001") as step:
            assert torch.equal(step["model/weight"], torch.full((300, 300), 7.0))


# --- forked children ------------------------------------------------------------------------------------------------


def fork(fn):
    """Runs ``fn()`` in a forked child; its exit status is 0 when that returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fn()
            status = 0
        finally:
            os._exit(status)
    return pid


def status_of(pid, timeout_s=20.0):
    """The exit status of a child; one that does not end in time is killed and fails the test."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {timeout_s:g} s")


@pytest.mark.case(73)
def test_a_kill_while_a_step_is_written_leaves_the_step_before_the_newest(tmp_path):
    state = run()
    train(state)
    with ks.Checkpointer(tmp_path, state, background="off") as ckpt:
        state.progress.step = 10
        ckpt.save()
    said, tell = os.pipe()

    def child():
        gate = Gate("commit", name="step-00000020")
        with ks.Checkpointer(Watched(tmp_path, gate), state, keep=ks.Keep(last=1)) as again:
            again.restore()
            state.progress.step = 20
            again.save().wait_staged(20)
            gate.wait_reached()
            os.write(tell, b"x")
            gate.stop()

    pid = fork(child)
    os.close(tell)
    assert os.read(said, 1) == b"x"
    assert (latest(tmp_path), steps_in(tmp_path)) == (10, [10])
    os.kill(pid, signal.SIGKILL)
    assert status_of(pid) == -signal.SIGKILL
    os.close(said)
    assert (latest(tmp_path), steps_in(tmp_path)) == (10, [10])
    found = restored(tmp_path)
    assert (found.progress.step, found["log"]) == (10, state["log"])
    assert not [path for path in tmp_path.glob("step-00000020/**/*") if path.is_file()]


@pytest.mark.parametrize("when", ["copying", "writing"])
def test_a_data_loader_forks_workers_during_a_save(when, monkeypatch, tmp_path):
    gate = Gate("commit", name="step-")
    state = run()
    train(state)
    with slow_copies(monkeypatch) as copies, ks.Checkpointer(Watched(tmp_path, gate), state) as ckpt:
        log = list(state["log"])
        pending = ckpt.save()
        if when == "copying":
            copies.wait_reached()
        else:
            copies.open()
            gate.wait_reached()
        loader = DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        workers = iter(loader)._workers  # a second epoch, left at its beginning
        for worker in workers:
            worker.terminate()
            worker.join(20)
            assert not worker.is_alive()
        assert not pending.committed.done()
        copies.open()
        gate.open()
        pending.wait_committed(30)
    assert restored(tmp_path)["log"] == log


@pytest.mark.parametrize("background", SLOW_AGENT)
def test_a_forked_child_waits_for_nothing_and_disturbs_nothing(background, monkeypatch, tmp_path):
    state = run()
    train(state)
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    small = torch.optim.SGD([weight], lr=1.0)
    with slow_copies(monkeypatch) as copies, ks.Checkpointer(tmp_path, state, background=background) as ckpt:
        pending = ckpt.save()
        copies.wait_reached()

        def child():
            state.fence()
            small.step()  # (PyTorch computes nothing large in a forked child: its threads are gone)
            ckpt.close()  # as leaving the with-block would
            pendings._at_exit()  # as the end of the interpreter would

        assert status_of(fork(child)) == 0
        assert not pending.staged.done()
        copies.open()
        assert pending.wait_committed(30).step == 0
        ckpt.step()
        assert ckpt.save().wait_committed(30).step == 1
    assert restored(tmp_path)["log"] == state["log"]


@pytest.mark.slow
def test_a_forked_child_holds_neither_the_agent_nor_the_root(tmp_path):
    state = run()
    hold, release = os.pipe()
    said, tell = os.pipe()
    with ks.Checkpointer(tmp_path, state, background="agent") as ckpt:
        pending = ckpt.save()
        mine = open_files()
        assert len([name for name in mine if name.endswith(".owner")]) == 1
        assert agent_of(tmp_path).trainers == (os.getpid(),)
        socket = f"socket:[{os.fstat(ckpt._saves._at_work._connection.fileno()).st_ino}]"
        assert socket in mine

        def child():
            os.close(release)
            os.write(tell, "\n".join(open_files()).encode())
            os.close(tell)
            os.read(hold, 1)

        pid = fork(child)
        os.close(tell)
        theirs = b"".join(iter(lambda: os.read(said, 1 << 16), b"")).decode().splitlines()
        assert not [name for name in theirs if name.endswith(".owner") or name == socket]
        pending.wait_committed(30)
    # Although the child lives, the agent knows that the trainer has left, and the root is free.
    wait_until(lambda: agent_of(tmp_path).trainers == ())
    assert is_alive(pid)
    restored(tmp_path)
    os.write(release, b"x")
    assert status_of(pid) == 0
    for descriptor in (hold, release, said):
        os.close(descriptor)


def open_files():
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except OSError:
            continue
    return found


# --- asked to stop --------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """Handlers of the user's own, which count what reaches them."""
    reached = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: reached.append(number)) for number in numbers}
    own = {number: signal.getsignal(number) for number in numbers}
    yield reached
    found = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert found == own, "the user's handlers were not given back"


@pytest.mark.parametrize("background", [*SLOW_AGENT, "off"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_job_at_the_next_boundary_with_that_step_saved(background, number, handlers, tmp_path):
    state = run()
    with ks.Checkpointer(
        tmp_path, state, every=ks.Every(steps=10), background=background, preempt=ks.Preempt()
    ) as ckpt:
        train(state)
        assert ckpt.step() is None
        os.kill(os.getpid(), number)
        train(state)  # goes on: the signal only sets a flag
        with pytest.raises(ks.Preempted, match="asked to stop at step 2; it is committed") as caught:
            ckpt.step(loss=1.0)
        assert (caught.value.step, caught.value.saved) == (2, 2)
        assert (latest(tmp_path), steps_in(tmp_path)) == (2, [2])
    assert not isinstance(caught.value, ks.errors.CheckpointError)
    assert handlers == []
    assert restored(tmp_path)["log"] == state["log"]


def test_a_job_may_leave_with_a_status_of_its_own(handlers, caplog, tmp_path):
    with (
        pytest.raises(SystemExit) as caught,
        ks.Checkpointer(tmp_path, run(), background="thread", preempt=ks.Preempt(("SIGUSR1",), exit_status=85)) as ckpt,
    ):
        os.kill(os.getpid(), signal.SIGTERM)  # not one of those it asked for
        assert ckpt.step() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        ckpt.step()
    assert caught.value.code == 85
    assert handlers == [signal.SIGTERM]
    assert steps_in(tmp_path) == [2]
    assert [record.getMessage() for record in caplog.records] == ["asked to stop at step 2; it is committed"]


def test_the_last_save_is_never_skipped_as_busy(handlers, tmp_path):
    gate = Gate("commit", name="step-00000001")
    state = run()
    options = {"every": ks.Every(steps=1), "when_busy": "skip", "preempt": ks.Preempt(), "keep": ks.Keep(last=None)}
    with ks.Checkpointer(Watched(tmp_path, gate), state, **options) as ckpt:
        ckpt.step()
        gate.wait_reached()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.05, gate.open).start()
        with pytest.raises(ks.Preempted) as caught:
            ckpt.step()
        assert caught.value.saved == 2
    assert steps_in(tmp_path) == [1, 2]


def test_a_last_save_that_fails_says_what_there_is_instead(handlers, tmp_path):
    state = run()
    storage = Watched(tmp_path)
    with ks.Checkpointer(storage, state, every=ks.Every(steps=1), preempt=ks.Preempt()) as ckpt:
        ckpt.step().wait_committed(30)
        os.kill(os.getpid(), signal.SIGTERM)
        storage.before = failing("write", name="step-")
        with pytest.raises(
            ks.Preempted, match=r"step 2; the save of it failed: .*errno 28.*newest on disk: step 1"
        ) as caught:
            ckpt.step()
        assert (caught.value.step, caught.value.saved) == (2, 1)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize(
    ("heard", "outlives", "expected"),
    [
        ([(None, 1.0, 9.0)], True, ("commit", None)),
        ([(None, 1.0, 9.0), (None, 2.0, 99.0)], False, ("commit", None)),
        ([(15.0, 1.0, 10.0)], True, ("commit", 15.0)),
        ([(14.9, 1.0, 10.0)], True, ("stage", 14.9)),
        ([(14.9, 1.0, 10.0)], False, ("leave", 14.9)),
        ([(1.5, 1.0, 10.0)], True, ("stage", 1.5)),
        ([(1.4, 1.0, 10.0)], True, ("leave", 1.4)),
        ([(20.0, 1.0, 2.0), (3.0, 1.0, 2.0)], True, ("commit", 3.0)),
        ([(20.0, 1.0, 2.0), (2.9, 1.0, 2.0)], True, ("stage", 2.9)),
        ([(20.0, 1.0, 2.0), (None, 1.0, 90.0)], True, ("stage", 20.0)),
        ([(20.0, 1.0, 2.0), (20.0, 15.0, 16.0)], True, ("leave", 20.0)),
        ([(-3.0, 1.0, 2.0)], True, ("leave", 0.0)),
        ([(5.0, 0.0, 0.0)], False, ("commit", 5.0)),
    ],
)
def test_what_fits_into_the_time_that_is_left(heard, outlives, expected):
    assert what_fits(heard, outlives) == expected


@pytest.mark.parametrize(
    ("background", "usual_s", "reason", "saved"),
    [
        pytest.param("agent", (0.0, 1e6), "it is copied, and the agent commits it", 2, marks=pytest.mark.slow),
        ("thread", (0.0, 1e6), "were too few for a save", 1),
        ("thread", (0.0, 0.1), "it is committed", 2),
    ],
)
def test_with_little_time_left_a_job_does_what_fits(
    background, usual_s, reason, saved, handlers, monkeypatch, tmp_path
):
    options = {"every": ks.Every(steps=1), "background": background, "keep": ks.Keep(last=None)}
    state = run()
    with ks.Checkpointer(tmp_path, state, preempt=ks.Preempt(grace_s=60.0), **options) as ckpt:
        ckpt.step().wait_committed(30)
        monkeypatch.setattr(History, "usual_s", lambda self: usual_s)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ks.Preempted, match=reason) as caught:
            ckpt.step()
        assert caught.value.saved == (saved if "committed" in reason else 1)
    assert steps_in(tmp_path) == [1, 2][:saved]


@pytest.mark.parametrize(
    "options", [{"signals": ("SIGNOTHING",)}, {"signals": ()}, {"grace_s": 0.0}, {"grace_s": -1.0}]
)
def test_requests_that_mean_nothing(options):
    with pytest.raises(ks.errors.UsageError, match="mean nothing"):
        ks.Preempt(**options)


def test_signals_are_for_the_main_thread(handlers, tmp_path):
    errors = []

    def elsewhere():
        try:
            ks.Checkpointer(tmp_path, run(), background="thread", preempt=ks.Preempt())
        except ks.errors.UsageError as err:
            errors.append(str(err))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(30)
    assert errors == ["preempt= needs a Checkpointer that is made on the main thread: others get no signals"]


def job(root, state, background, points=()):
    """A job of four steps, with a signal at each of these calls of a function. How it ended, and how many calls it made."""
    calls, wanted = 0, set(points)

    def signal_at_points(frame, event, argument):
        nonlocal calls
        calls += 1
        if calls in wanted:
            signal.raise_signal(random.choice((signal.SIGTERM, signal.SIGUSR1)))

    stop = None
    sys.setprofile(signal_at_points)
    try:
        with ks.Checkpointer(
            root, state, every=ks.Every(steps=2), keep=ks.Keep(last=None), background=background, preempt=ks.Preempt()
        ) as ckpt:
            for _ in range(4):
                train(state)
                ckpt.step()
    except ks.Preempted as preempted:
        stop = preempted
    finally:
        sys.setprofile(None)
    return stop, calls


@pytest.mark.slow
@pytest.mark.parametrize("background", ["agent", "thread"])
def test_fifty_signals_at_random_points_do_no_harm(background, handlers, tmp_path):
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    jobs = 5 if background == "agent" else 10
    whole, calls = job(tmp_path / "whole", run(), background)
    assert whole is None
    stopped = 0
    for number in range(jobs):
        root, state = tmp_path / str(number), run()
        stop, _ = job(root, state, background, [dice.randrange(calls) for _ in range(50 // jobs)])
        done = state.progress.step
        assert len(state["log"]) == done
        if stop is not None:
            stopped += 1
            assert (stop.step, stop.saved) == (done, done), stop
            assert steps_in(root) == sorted({*range(2, done, 2), done})
        else:
            assert (done, steps_in(root)) == (4, [2, 4])
        assert latest(root) == done
        again = restored(root)
        assert (again["log"], again.progress.step) == (state["log"], done)
    print(f"{stopped} of {jobs} jobs stopped early")
    assert stopped > 0
