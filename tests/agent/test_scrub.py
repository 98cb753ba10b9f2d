"""An agent that has nothing to save reads old steps again, when a trainer has asked for that."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.agent.client import call_agent
from keepstep.agent.node import agent_log, socket_path
from keepstep.agent.protocol import Stop
from keepstep.check.scrub import read_scrubbed
from keepstep.cli.listing import read_listing
from keepstep.errors import UsageError
from keepstep.storage.base import read_blob
from keepstep.storage.remote import RemoteStorage
from tests.helpers.agents import wait_until


def train(root, steps, **options):
    state = ks.TrainState(model=torch.nn.Linear(6, 4))
    with ks.Checkpointer(root, state, **options) as checkpointer:
        checkpointer.restore()
        for _ in range(steps):
            checkpointer.step()
            checkpointer.save()


@pytest.mark.slow
def test_an_idle_agent_finds_rotten_bits_and_says_so(tmp_path):
    train(tmp_path, 2, background="off")
    (file,) = (tmp_path / "step-00000001" / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    remembered = tmp_path / "scrub.json"
    log = agent_log(str(tmp_path))
    train(tmp_path, 1, background="agent")
    assert not remembered.exists()
    train(tmp_path, 0, background="agent", scrub=ks.Every(seconds=3600))
    wait_until(lambda: "scrub: " in log.read_text() and len(json.loads(remembered.read_text())) == 3, 60.0, "a scrub")
    wait_until(lambda: "step-00000001  DAMAGED" in log.read_text(), what="the log")
    assert "exit status 7" in log.read_text()
    statuses = {line.step: line.status for line in read_listing(ks.LocalStorage(tmp_path)).steps}
    assert statuses == {1: "damaged", 2: "committed", 3: "committed"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scrub": ks.Every(steps=5)}, "it goes by seconds alone"),
        ({"scrub": ks.Every(seconds=5), "background": "off"}, "it needs an agent"),
        ({"scrub": ks.Every(seconds=5), "background": "thread"}, "it needs an agent"),
    ],
)
def test_what_no_agent_can_do_is_refused(tmp_path: Path, options, text):
    with pytest.raises(UsageError, match=text):
        ks.Checkpointer(tmp_path, ks.TrainState(weight=torch.ones(1)), **options)


@pytest.mark.slow
def test_an_idle_agent_reads_a_bucket_too_and_slower(moto, monkeypatch):
    """The scrub reaches the store as the agent does; what it has found is beside the steps, and in the log."""
    for key, value in moto.environment().items():
        monkeypatch.setenv(key, value)
    url = f"s3://{moto.make_bucket('scrubbed')}/{secrets.token_hex(4)}"
    root = RemoteStorage(url)
    train(url, 2, background="off")
    (name,) = [name for name, _ in root.list("step-00000001/model")]
    data = bytearray(read_blob(root, name, 1 << 20))
    data[-1] ^= 1
    root.put(name, bytes(data))
    try:
        train(url, 0, background="agent", scrub=ks.Every(seconds=3600))
        # (The process that reads is the agent's child; its rate is on its command line.)
        wait_until(lambda: rates_of(url) or "scrub: " in agent_log(url).read_text(), what="the scrub's process")
        assert rates_of(url) <= {"16"}
        wait_until(lambda: len(read_scrubbed(root)) == 2, 60.0, "a scrub")
        wait_until(lambda: "step-00000001  DAMAGED" in agent_log(url).read_text(), what="the log")
    finally:
        call_agent(socket_path(url), Stop(now=True))
    assert {name: one.ok for name, one in read_scrubbed(root).items()} == {
        "step-00000001": False,
        "step-00000002": True,
    }
    agent_log(url).unlink()


def rates_of(url: str) -> set[str]:
    """How fast the scrubs of this root that run now may read, in MiB a second."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "scrub" in words and url in words:
                found.add(words[words.index("--rate") + 1])
    return found
