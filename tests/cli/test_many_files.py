"""A step of many ranks has more files than a process may have open: whatever reads it has a few of them open at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import keepstep as ks
from keepstep.foreign.shown import OpenFiles
from keepstep.storage.local import LocalStorage
from tests.cli.test_commands import call

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_step_of_a_hundred_ranks_is_read_with_64_open_files(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.cli.under_limit", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    assert {name: said for name, (status, said) in answers.items() if status} == {}
    assert len(answers) == 21


def test_an_export_into_more_files_than_may_be_open_writes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    ks.save(tmp_path / "step", {"model": {f"w{number}": torch.zeros(4) for number in range(17)}})
    said = call("export", tmp_path / "step", tmp_path / "hub", "--max-shard", 16, status=2).stderr
    assert "makes 17 files, 17 of them on one rank, which keeps no more than 16 open" in said
    assert "ulimit -n" in said
    assert not (tmp_path / "hub").exists()
    call("export", tmp_path / "step", tmp_path / "hub", "--max-shard", 32)
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) == 9


def test_files_of_others_are_opened_again_where_they_were_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.foreign.shown.MOST_OPEN", 3)
    for number in range(8):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 4)
    opened = []
    storage = LocalStorage(tmp_path)
    real = storage.open
    monkeypatch.setattr(storage, "open", lambda name: opened.append(name) or real(name))
    files = OpenFiles(storage)
    lent = [files.of(f"{number}") for number in range(8)]

    def read(number):
        buffer = bytearray(2)
        lent[number].read_into(1, memoryview(buffer))
        return bytes(buffer)

    assert [read(number) for number in range(8)] == [bytes([number]) * 2 for number in range(8)]
    assert len(files._open) == 3
    assert len(opened) == 16
    wrong = []

    def many(number):
        wrong.extend(one for one in range(200) if read((number + one) % 8) != bytes([(number + one) % 8]) * 2)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    with files.held("0"), files.held("1"), files.held("2"), files.held("3"):
        assert {"0", "1", "2", "3"} <= set(files._open)
    files.close()
    files.close()
    assert not files._open
