"""The commands on URLs: as on a path, with a store's own errors in words, and what only a bucket has."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.storage.abandoned import list_uploads, why_unseen
from keepstep.storage.base import read_blob
from keepstep.storage.remote import RemoteStorage
from tests.cli.test_commands import documented
from tests.helpers.agents import wait_until
from tests.helpers.proxy import proxy_before

RUNNER = CliRunner()
OF_THE_PLACE = {"path", "root", "age_s", "free_bytes", "at", "seconds", "text"}


def train(root, steps, **options):
    """Goes on for so many steps, and saves each."""
    torch.manual_seed(0)
    state = ks.TrainState(model=torch.nn.Linear(6, 4))
    with ks.Checkpointer(root, state, keep=ks.Keep(last=None), background="off", **options) as checkpointer:
        checkpointer.restore()
        for _ in range(steps):
            checkpointer.step(loss=1.0)
            checkpointer.save()


def call(*args, status=0):
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def answer(*args, status=0):
    return json.loads(call(*args, "--json", status=status).stdout)


def damage(root: RemoteStorage, folder: str) -> None:
    (name,) = [name for name, _ in root.list(folder)]
    data = bytearray(read_blob(root, name, 1 << 20))
    data[-1] ^= 1
    root.put(name, bytes(data))


@pytest.fixture
def url():
    """A run in the memory of this process: three steps, and what a dead attempt has left."""
    place = f"memory://{secrets.token_hex(4)}/run"
    train(place, 3)
    RemoteStorage(place).put("step-00000004/model/rank-00000.0badc0de.safetensors", bytes(1000))
    return place


@pytest.fixture
def folder(url, tmp_path):
    """The same on the disk."""
    root = RemoteStorage(url)
    for name, _ in root.list(""):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(read_blob(root, name, 1 << 20))
    return tmp_path / "run"


def without_place(facts):
    """An answer without what differs between two places of the same run."""
    if isinstance(facts, dict):
        return {key: without_place(value) for key, value in facts.items() if key not in OF_THE_PLACE}
    return [without_place(one) for one in facts] if isinstance(facts, list) else facts


# --- as on a path -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("ls", ""), 0),
        (("show", "/step-00000002"), 0),
        (("show", "/step-00000002", "--tensors", "model/*"), 0),
        (("verify", ""), 0),
        (("verify", "/step-00000003"), 0),
        (("verify", "/step-00000004"), 3),
        (("show", ""), 2),
        (("ls", "/step-00000001"), 2),
        (("show", "/incarnations"), 3),
        (("stats", ""), 0),
        (("prune", "", "--keep-last", "1", "--dry-run"), 0),
        (("repair", "", "--dry-run"), 0),
        (("repair", "/step-00000001", "--dry-run"), 0),
        (("scrub", ""), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_command_says_the_same_of_a_url_and_of_a_path(command, status, url, folder):
    there, here = ([command[0], f"{place}{command[1]}", *command[2:]] for place in (url, folder))
    if status:
        # (An example of what to name is made of the path, or URL, as it was given.)
        said = [
            call(*each, status=status).stderr.replace(str(place), "") for each, place in ((there, url), (here, folder))
        ]
        assert said[0] == said[1] != ""
        return
    told, expected = answer(*there), answer(*here)
    assert without_place(told) == without_place(expected)
    assert told.get("root", told.get("path")).startswith(url)
    assert call(*there).stdout


def test_what_a_command_changes_is_changed(url):
    """Pinned, pruned, damaged, found by a scrub, put aside, brought back: a day in the life of a bucket."""
    root = RemoteStorage(url)
    assert "step-00000001 is pinned" in call("pin", f"{url}/step-00000001", "--note", "good").stdout
    pruned = answer("prune", f"{url}/", "--keep-last", "1")
    assert [line["step"] for line in pruned["steps"] if line["action"] == "remove"] == [2]
    assert sorted(root.folders()) == ["incarnations", "pins", "step-00000001", "step-00000003", "step-00000004"]
    assert "no longer pinned" in call("unpin", f"{url}/step-00000001").stdout
    assert "is not pinned" in call("unpin", f"{url}/step-00000002", status=3).stderr
    damage(root, "step-00000001/model")
    assert "DAMAGED" in call("scrub", url, status=7).stdout
    assert [line["status"] for line in answer("ls", url)["steps"]] == ["committed", "damaged", "unfinished"]
    assert answer("verify", url, status=7)["steps"][1]["problems"][0]["kind"] == "blocks"
    done = answer("repair", url, "--quarantine")["actions"]
    assert [one["target"] for one in done if one["outcome"] == "done"] == ["step-00000001"]
    assert [line["status"] for line in answer("ls", url)["steps"]] == ["committed", "unfinished", "aside"]
    call("repair", f"{url}/step-00000001", "--undo")
    root.delete(["step-00000003/.metadata"])
    mended = answer("repair", url)
    assert [(one["kind"], one["outcome"]) for one in mended["actions"]][:2] == [
        ("manifest", "done"),
        ("manifest", "none"),
    ]
    assert answer("verify", f"{url}/step-00000003")["ok"]


def test_garbage_goes_by_the_clock_of_the_store(url):
    """What nobody writes any more stays for an hour: clocks may differ, and a date be that of an upload's beginning."""
    root = RemoteStorage(url)
    kept = answer("gc", url)
    assert (kept["removed"], kept["fence"], kept["unseen"], kept["uploads"]) == ([], None, "", [])
    assert "younger than 60 min" in kept["kept"][0]["why"]
    assert set(kept) == documented("gc")
    gone = answer("gc", url, "--older-than", "0")
    assert [line["attempt"] for line in gone["removed"]] == ["0badc0de"]
    assert gone["fence"] == 2
    assert "step-00000004" not in root.folders()


def test_a_storage_that_tells_no_times_loses_nothing(url, monkeypatch):
    monkeypatch.setattr(RemoteStorage, "written_at", lambda self, prefix: {})
    said = call("gc", url, "--older-than", "0", status=8).stderr
    assert "does not say when its files were written" in said
    assert "step-00000004" in RemoteStorage(url).folders()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("memory://{token}/none", "there is nothing at memory://{token}/none"),
        ("memory://{token}/none/step-00000007", "there is nothing at memory://{token}/none/step-00000007"),
        ("s3://key:secret@bucket/run", "credentials do not belong in a URL"),
        ("s3://bucket/run?region=x", "options do not belong in a URL"),
        ("s3://", "it names no bucket"),
        ("nothing-known://x/run", "nothing-known://x/run"),
    ],
)
@pytest.mark.case(168)
def test_a_url_that_is_none_is_told_in_words(place, text):
    token = secrets.token_hex(4)
    for command in ("ls", "show", "verify", "stats", "gc", "repair", "scrub", "pin", "unpin"):
        at = f"{place.format(token=token)}/step-00000001" if command == "unpin" else place.format(token=token)
        result = RUNNER.invoke(app, [command, at])
        assert result.exit_code in (2, 3), f"{command}: {result.output}"
        assert "secret" not in result.output
        first, last = result.stderr.strip().splitlines()[0], result.stderr.strip().splitlines()[-1]
        assert re.match(r"error\[(usage|step-not-found)\]: ", first), first
        assert last.startswith("what to do: ")
        if command in ("ls", "show", "verify", "stats", "gc", "scrub", "pin"):
            assert text.format(token=token) in result.stderr


# --- a store over a socket ----------------------------------------------------------------------------------------------


@pytest.fixture
def far(moto, monkeypatch):
    """A run in a bucket, reached as a user reaches it: by its URL, and what the environment says."""
    for key, value in moto.environment().items():
        monkeypatch.setenv(key, value)
    place = f"s3://{moto.make_bucket('commands')}/{secrets.token_hex(4)}/run"
    train(place, 2)
    return place


@pytest.mark.slow
def test_as_a_process_it_needs_no_torch_and_answers(far):
    """Real processes: a run, a step, one that is not there, a bucket that is not there."""
    script = (
        "import sys\nfrom keepstep.cli.main import app\ntry: app()\n"
        "finally: print('torch' in sys.modules, 'boto3' in sys.modules, file=sys.stderr)"
    )

    def run(*args):
        done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1] == "False False"
        return done

    assert [line["step"] for line in json.loads(run("ls", far, "--json").stdout)["steps"]] == [2, 1]
    shown = json.loads(run("show", f"{far}/step-00000002", "--json").stdout)
    assert (shown["step"], shown["lineage"]["exclusive"]) == (2, True)
    gone = run("verify", f"{far}-gone")
    assert (gone.returncode, gone.stdout) == (3, "")
    assert f"there is nothing at {far}-gone" in gone.stderr
    missing = run("ls", "s3://no-such-bucket-anywhere/run")
    assert (missing.returncode, missing.stdout) == (8, "")
    assert "error[storage]: " in missing.stderr
    assert "the bucket does not exist" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "verify", "stats", "prune", "repair", "gc", "scrub"])
def test_what_the_store_refuses_is_told_in_words(command, far, moto, monkeypatch):
    refused = (403, b"<Error><Code>ExpiredToken</Code><Message>AKIDKEEPSTEPTESTS</Message></Error>")
    more = ["--keep-last", "1"] if command == "prune" else []
    with proxy_before(moto.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.fault = lambda asked: refused
        result = call(command, far, *more, status=8)
        assert "error[storage]: " in result.stderr
        assert "the credentials have expired" in result.stderr
        assert "AKID" not in result.output


@pytest.mark.slow
def test_a_job_that_is_alive_is_left_alone(far):
    """By whatever would change the run, on the machine of the job."""
    with ks.Checkpointer(far, ks.TrainState(weight=torch.ones(1)), background="off"):
        for command in (("prune", far, "--keep-last", "1"), ("gc", far), ("repair", far)):
            done = subprocess.run(
                [sys.executable, "-m", "keepstep.cli.main", *command], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 13, done.stderr
            assert "belongs to another job that is running" in done.stderr
    assert call("gc", far)


@pytest.mark.slow
def test_one_tensor_by_url_costs_its_header_and_itself(far, moto, monkeypatch):
    """Opening reads the manifest, and lists; a tensor costs a request for the header of its file, and one for its bytes."""
    state = {"model": {f"w{i}": torch.full((256, 256), float(i)) for i in range(16)}, "note": "small"}
    ks.save(f"{far}/one", state)
    with proxy_before(moto.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def asked():
            found = [(one.method, one.path.rpartition("/")[2].partition(".")[0]) for one in proxy.asked]
            proxy.asked.clear()
            return found

        with ks.open(f"{far}/one") as opened:
            manifest, listing = asked()
            assert manifest == ("GET", "")
            assert "list-type=2" in listing[1]
            assert "model/w3" in opened
            assert len(opened.keys()) == 16
            assert opened.describe()["tensors"] == 16
            assert asked() == []
            assert torch.equal(opened["model/w3"], state["model"]["w3"])
            assert asked() == [("GET", "rank-00000")] * 2
            assert torch.equal(opened["model/w9"], state["model"]["w9"])
            assert len(asked()) <= 2
        target = {"model": {"w5": torch.zeros(256, 256)}}
        ks.load(f"{far}/one", target, only=["model"], strict=False)
        assert torch.equal(target["model"]["w5"], state["model"]["w5"])
        names = [name for _, name in asked()]
        assert names.count("rank-00000") <= 4


# --- uploads that never ended -------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from keepstep.storage.remote import RemoteStorage

root = RemoteStorage(sys.argv[1])
upload = root.create(sys.argv[2], 64 << 20)
part = memoryview(bytes(8 << 20))
for number in range(3):
    upload.write_at(number * len(part), part)
print("begun", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_the_uploads_of_a_killed_process_are_ended(far, moto):
    """Parts that no listing shows: found, kept while they may be on their way, and ended; not those of others."""
    name = "step-00000003/model/rank-00000.0badc0de.safetensors"
    beside = far.replace("/run", "/run-2")
    process = subprocess.Popen([sys.executable, "-c", KILLED, far, name], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        client, bucket = moto.client(), far.split("/")[2]
        client.create_multipart_upload(Bucket=bucket, Key=f"{beside.split('/', 3)[3]}/x")
        wait_until(lambda: list_uploads(far), what="an upload")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert name not in dict(RemoteStorage(far).list(""))
    (kept,) = answer("gc", far, "--older-than", "1e6")["uploads"]
    assert (kept["name"], "it may be on its way" in kept["why"]) == (name, True)
    assert set(kept) == documented("gc", "uploads")
    (would,) = answer("gc", far, "--dry-run")["uploads"]
    assert (would["name"], would["why"]) == (name, "")
    assert len(list_uploads(far)) == 1
    assert f"upload of {name}" in call("gc", far).stdout
    assert list_uploads(far) == ()
    assert len(list_uploads(beside)) == 1
    assert [line["step"] for line in answer("ls", far)["steps"]] == [2, 1]


def test_where_uploads_cannot_be_listed_it_is_said_what_to_do(monkeypatch):
    assert why_unseen("memory://x/run") == ""
    assert why_unseen("s3://x/run") == ""
    assert "set the bucket's rule" in why_unseen("gs://x/run")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert "pip install boto3" in why_unseen("s3://x/run")
    assert list_uploads("s3://x/run") == ()
