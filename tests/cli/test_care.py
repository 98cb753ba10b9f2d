"""The commands that take care of a run at rest: repair, gc and scrub, as an operator calls them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import keepstep as ks
from keepstep.agent.node import Owner
from keepstep.check.scrub import Pace, lower_priority, read_scrubbed, scrub
from keepstep.cli.listing import read_listing
from keepstep.cli.main import app
from keepstep.cli.verifying import verify_root
from keepstep.commit.catalog import read_catalog
from keepstep.commit.garbage import find_garbage, remove_garbage
from keepstep.errors import StorageError
from keepstep.storage.base import read_blob
from tests.cli.test_commands import documented
from tests.helpers.storages import Watched

RUNNER = CliRunner()
OLD_S = 3600.0


def train(root, steps, background="off", **options):
    """Goes on for so many steps, and saves each. Returns the step it began at."""
    torch.manual_seed(0)
    state = ks.TrainState(model=torch.nn.Linear(6, 4))
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background=background, **options) as checkpointer:
        begun = checkpointer.restore().step
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()
    return begun


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Three steps; an attempt at step 4 that was killed, and strays of another beside step 2."""
    root = tmp_path_factory.mktemp("care") / "run"
    train(root, 3)
    for name in (
        "step-00000004/model/rank-00000.0badc0de.safetensors",
        "step-00000002/state/rank-00000.00c0ffee.safetensors",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes(1000))
    (root / "latest.5a5a5a5a.partial").write_bytes(b"{")
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    age(folder, OLD_S)
    return folder


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def call(*args, status=0):
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def flip(root: Path, step: int) -> None:
    (file,) = (root / f"step-{step:08d}" / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def elsewhere(root: Path) -> None:
    """As if a job on another machine had taken the newest incarnation."""
    path = max((root / "incarnations").iterdir())
    path.write_text(path.read_text().replace(platform.node(), "another-machine"))


GARBAGE = {
    "latest.5a5a5a5a.partial",
    "step-00000002/state/rank-00000.00c0ffee.safetensors",
    "step-00000004/model/rank-00000.0badc0de.safetensors",
}

# --- gc -------------------------------------------------------------------------------------------------------------


def test_gc_removes_what_dead_attempts_left_and_nothing_else(root):
    before = files(root)
    said = json.loads(call("gc", root, "--dry-run", "--json").stdout)
    assert files(root) == before
    done = json.loads(call("gc", root, "--json").stdout)
    assert set(done) == documented("gc")
    assert all(set(line) == documented("gc", "removed") for line in done["removed"])
    same = ("kind", "folder", "attempt", "files", "bytes", "why")
    assert [[line[key] for key in same] for line in said["removed"]] == [
        [line[key] for key in same] for line in done["removed"]
    ]
    after = files(root)
    assert before.keys() - after.keys() == GARBAGE
    assert after.keys() - before.keys() == {"incarnations/000002"}
    assert (done["bytes_before"], done["bytes_after"], done["fence"]) == (2001, 0, 2)
    assert [(line["kind"], line["attempt"]) for line in done["removed"]] == [
        ("partial", ""), ("stray", "00c0ffee"), ("unfinished", "0badc0de"),
    ]  # fmt: skip
    assert not (root / "step-00000004").exists()
    assert "3 steps, and 0 B of dead attempts" in call("gc", root).stdout
    assert files(root) == after
    assert train(root, 1) == 3


def test_gc_leaves_what_is_young_and_what_another_machine_may_write(root):
    before = files(root)
    age(root, 5)
    assert "kept: younger than 60 s" in call("gc", root).stdout
    elsewhere(root)
    age(root, OLD_S)
    before = files(root)
    out = call("gc", root).stdout
    assert out.count("kept: younger than 24 h, and a job on another machine may be writing it") == 3
    assert files(root) == before
    # The job there is alive, by what it writes; its old attempts go, and it is not fenced.
    age(root / "step-00000004", 30 * OLD_S)
    done = json.loads(call("gc", root, "--json").stdout)
    assert done["fence"] is None
    assert before.keys() - files(root).keys() == {"step-00000004/model/rank-00000.0badc0de.safetensors"}
    # Nothing there was touched for a day: whoever wakes up after this cannot commit.
    age(root, 30 * OLD_S)
    assert json.loads(call("gc", root, "--json").stdout)["fence"] == 2


@pytest.mark.slow
def test_gc_and_repair_refuse_while_a_job_on_this_machine_is_alive(root):
    before = files(root)
    script = (
        "import sys; from keepstep.agent.node import Owner\n"
        f"owner = Owner({str(root)!r}); print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdin is not None
        assert job.stdout.readline() == b"mine\n"
        for command in ("gc", "repair"):
            refused = call(command, root, status=13)
            assert f'belongs to another job that is running: {{"pid": {job.pid}' in refused.stderr
            call(command, root, "--dry-run")
        job.stdin.close()
    assert files(root) == before
    call("gc", root)
    assert not GARBAGE & files(root).keys()
    Owner(str(root)).release()


def test_gc_finishes_after_failing_at_every_call(saved):
    expected = {name for name in files(saved) if name not in GARBAGE}
    tried = 0
    for nth in range(1, 200):
        memory = ks.MemoryStorage()
        for name, data in files(saved).items():
            memory.put(name, data)
        seen = Counter()

        def fail(operation, name, seen=seen, nth=nth):
            seen["calls"] += 1
            if seen["calls"] == nth:
                raise StorageError(operation, name, OSError(5, "as the test wants it"))

        watched = Watched(memory, fail)
        try:
            list(remove_garbage(watched, find_garbage(watched, read_catalog(watched))))
        except StorageError:
            tried += 1
        list(remove_garbage(memory, find_garbage(memory, read_catalog(memory))))
        assert {name for name, _ in memory.list("")} == expected, nth
        if seen["calls"] < nth:
            break
    assert tried > 20


def test_an_attempt_that_is_committed_after_it_was_found_stays(root):
    storage = ks.LocalStorage(root)
    doomed = find_garbage(storage, read_catalog(storage))
    manifest = read_blob(storage, "step-00000003/.metadata", 1 << 20)
    storage.put("step-00000004/.metadata", manifest)
    storage.put("step-00000002/.metadata", manifest.replace(b"{", b"", 1))
    before = files(root)
    gone = list(remove_garbage(storage, [one for one in doomed if one.kind == "unfinished"]))
    assert gone == []
    assert files(root) == before


def test_a_half_written_file_of_the_committed_attempt_is_garbage_too(root):
    (whole,) = (root / "step-00000003" / "model").glob("*.safetensors")
    half = whole.with_name(f"{whole.name}.5a5a5a5a.partial")
    half.write_bytes(b"half")
    age(root, OLD_S)
    name = half.relative_to(root / "step-00000003").as_posix()
    assert json.loads(call("verify", root, "--json").stdout)["steps"][0]["strays"] == [name]
    call("gc", root)
    assert whole.exists()
    assert not half.exists()


def test_verify_of_a_root_whose_steps_are_all_gone(root):
    (root / "saves.jsonl").write_text(
        '{"step":3,"save_id":"0badc0de","ended":"2026","outcome":"committed","incarnation":1}\n'
    )
    for step in (1, 2, 3):
        shutil.rmtree(root / f"step-{step:08d}")
    out = call("verify", root, status=7).stdout
    assert (
        "lost: step 3 (incarnation 1, attempt 0badc0de) was committed at 2026, and is not there; the newest is none"
        in out
    )
    (root / "saves.jsonl").unlink()
    (root / "latest").unlink()
    call("verify", root, status=3)


# --- repair ---------------------------------------------------------------------------------------------------------


def test_repair_says_what_is_true_before_and_after(root):
    (root / "step-00000003" / ".metadata").write_bytes(b"{")
    (root / "latest").unlink()
    flip(root, 1)
    done = json.loads(call("repair", root, "--quarantine", "--json", status=0).stdout)
    assert set(done) == documented("repair")
    for name in ("before", "after", "actions"):
        assert all(set(line) == documented("repair", name) for line in done[name])
    assert [(one["kind"], one["outcome"]) for one in done["actions"]] == [
        ("manifest", "done"), ("manifest", "none"), ("quarantine", "done"), ("latest", "done"),
    ]  # fmt: skip
    assert {one["name"]: one["status"] for one in done["after"]}["step-00000001"] == "aside"
    listed = call("ls", root).stdout
    assert "put aside" in listed
    assert "step 1 was put aside: blocks:" in listed


def test_repair_of_a_lost_manifest_by_hand(root, saved):
    (root / "step-00000002" / ".metadata").unlink()
    out = call("repair", root).stdout
    # (Saves of background="off" are not recorded, so nothing says that step 2 was committed.)
    assert "nothing says that it was committed" in out
    out = call("repair", root / "step-00000002", "--uncommitted").stdout
    assert "before: 2 committed (step-00000003, step-00000001); 2 unfinished" in out
    assert "after: 3 committed" in out
    assert (root / "step-00000002/.metadata").read_bytes() == (saved / "step-00000002/.metadata").read_bytes()


def test_repair_leaves_what_it_cannot_mend_and_says_so_by_its_status(root):
    (root / "step-00000003" / ".metadata").write_bytes(b"{")
    flip(root, 3)
    out = call("repair", root, status=7).stdout
    assert "LEFT AS IT IS: the manifest is damaged and cannot be made again" in out
    call("repair", root / "step-00000003", "--quarantine")
    assert "damaged and put aside: step-00000003" in call("verify", root).stdout
    call("repair", root / "step-00000003", "--undo")
    assert (root / "step-00000003" / ".metadata").read_bytes() == b"{"
    assert "step 3 was not put aside" in call("repair", root / "step-00000003", "--undo", status=3).stderr
    call("repair", root, "--undo", status=2)


def test_a_step_of_no_run_is_repaired_too(tmp_path):
    ks.save(tmp_path / "mine", {"weight": torch.ones(3)})
    good = files(tmp_path)
    (tmp_path / "mine" / ".metadata").unlink()
    assert "1 unfinished (mine)" in call("repair", tmp_path / "mine").stdout
    call("repair", tmp_path / "mine", "--uncommitted")
    assert files(tmp_path) == good
    call("repair", tmp_path / "mine", "--quarantine", status=2)


# --- scrub ----------------------------------------------------------------------------------------------------------


def test_scrub_finds_rotten_bits_remembers_and_ls_shows_it(root):
    flip(root, 2)
    done = json.loads(call("scrub", root, "--json", status=7).stdout)
    assert set(done) == documented("scrub")
    assert all(set(line) == documented("scrub", "steps") for line in done["steps"])
    assert [(one["step"], one["ok"]) for one in done["steps"]] == [(1, True), (2, False), (3, True)]
    lines = {line["step"]: line for line in json.loads(call("ls", root, "--json").stdout)["steps"]}
    assert {step: line["status"] for step, line in lines.items()} == {
        3: "committed", 2: "damaged", 1: "committed", 4: "unfinished",
    }  # fmt: skip
    assert lines[3]["scrubbed"] == done["steps"][2]["at"]
    assert "step 2 is damaged: found by a scrub at" in call("ls", root).stdout
    # Another step in its place is another step.
    assert train(root, 0) == 3
    shutil.rmtree(root / "step-00000003")
    with pytest.warns(ks.errors.DamageWarning):
        assert train(root, 1) == 1
    assert {line["step"]: line["status"] for line in json.loads(call("ls", root, "--json").stdout)["steps"]}[
        2
    ] == "committed"


def test_scrub_takes_what_was_read_longest_ago_first(root):
    storage = ks.LocalStorage(root)
    rounds = scrub(storage, Pace())
    assert next(rounds)[0].step == 1
    rounds.close()
    assert read_scrubbed(storage).keys() == {"step-00000001"}
    assert [result.step for result, _ in scrub(storage, Pace())] == [2, 3, 1]
    assert [result.step for result, _ in scrub(storage, Pace(), older_than_s=60.0)] == []
    shutil.rmtree(root / "step-00000001")
    (root / "scrub.json").write_bytes(b"\0")
    assert [result.step for result, _ in scrub(storage, Pace())] == [2, 3]
    assert read_scrubbed(storage).keys() == {"step-00000002", "step-00000003"}


def test_scrub_keeps_to_its_rate_and_stops_when_told(root):
    storage = ks.LocalStorage(root)
    waited = []

    class Stop:
        def wait(self, seconds):
            waited.append(seconds)
            return len(waited) == 5

    pace = Pace(1000, Stop())
    results = list(scrub(storage, pace))
    assert len(results) < 3
    assert max(waited) > 0.05
    assert [*read_scrubbed(storage)] == [f"step-{result.step:08d}" for result, _ in results]


def test_scrub_yields_to_everybody_else_on_its_own_thread_only(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1, initializer=lower_priority) as low:
        assert low.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_scrub_with_nothing_to_say(tmp_path):
    assert "no step is committed there" in call("scrub", tmp_path).stdout
    assert "without a pause" in call("scrub", tmp_path, "--every", "0", status=2).stderr


# --- while training goes on -----------------------------------------------------------------------------------------


def looked_at(root, look, nth, save):
    """``look`` at a storage that is saved to right before the ``nth`` of its calls. Whether there were so many."""
    seen = Counter()

    def before(operation, name):
        seen["calls"] += 1
        if seen["calls"] == nth:
            save()

    look(Watched(root, before))
    return seen["calls"] >= nth


def verified(storage):
    result = verify_root(storage, Console(quiet=True))
    assert result.ok, result


def scrubbed(storage):
    for _, problems in scrub(storage, Pace()):
        assert not problems


def listed(storage):
    assert all(line.status in ("committed", "unfinished") for line in read_listing(storage).steps)


@pytest.mark.slow
@pytest.mark.parametrize("look", [verified, scrubbed, listed])
@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_a_save_at_any_instant_is_taken_for_no_damage(look, again):
    """Retention takes the step before, or the step is replaced, between any two calls of whoever looks."""
    root = ks.MemoryStorage()
    state = ks.TrainState(model=torch.nn.Linear(3, 2))
    tried = 0
    with ks.Checkpointer(root, state, keep=ks.Keep(last=1), background="off") as checkpointer:
        checkpointer.restore()

        def save():
            checkpointer.micro_step() if again else checkpointer.step()
            checkpointer.save()

        checkpointer.step()
        checkpointer.save()
        while looked_at(root, look, tried + 1, save):
            tried += 1
    print(f"{tried} instants")
    assert tried > 5
