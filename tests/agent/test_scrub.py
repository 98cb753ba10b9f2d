"""An agent that has nothing to save reads old steps again, when a trainer has asked for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.agent.node import agent_log
from keepstep.cli.listing import read_listing
from keepstep.errors import UsageError
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
