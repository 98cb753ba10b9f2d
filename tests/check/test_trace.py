"""Traces: what is written is read, what a kill tears is not, and what a drill orders is understood or refused."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from keepstep.check.trace import (
    DRILL_VARIABLE,
    Began,
    DrillOrders,
    Ended,
    Saved,
    Stepped,
    TraceWriter,
    drill_orders,
    encode_orders,
    read_trace,
)
from keepstep.errors import ClosedError, CorruptError, UsageError

FIRST = Began(rank=0, world=2, incarnation=1, step=0, restored=False, torch="2.9", python="3.12", cpu="avx2", time=1.0)
SECOND = Began(rank=0, world=2, incarnation=2, step=1, restored=True, skipped=("step-00000002: torn",), time=5.0)
STEPPED = Stepped(
    step=1,
    samples=(4, 0),
    loss=(0.1).hex(),
    metrics={"accuracy": (0.5).hex()},
    lr={"optimizer": ((1e-3).hex(), (0.0).hex())},
    norm=float("inf").hex(),
    parts={"model": "0" * 16, "rng/torch": "f" * 16},
    time=2.0,
)


def test_what_every_rank_wrote_is_read_start_by_start(tmp_path):
    for rank in (0, 1):
        with TraceWriter(tmp_path / "trace", rank) as writer:
            writer.write(msgspec.structs.replace(FIRST, rank=rank))
            writer.write(STEPPED)
            for event in ("due", "staged", "committed"):
                writer.write(Saved(step=1, event=event, time=3.0))
            writer.write(Stepped(step=1, micro=1, batch="ab", time=4.0))
    with TraceWriter(tmp_path / "trace", 0) as writer:
        writer.write(SECOND)
        writer.write(Ended(step=1, why="stopped", time=6.0))
    trace = read_trace(tmp_path / "trace")
    assert sorted(trace.ranks) == [0, 1]
    first, second = trace.starts()
    assert sorted(first) == [0, 1]
    assert sorted(second) == [0]
    assert first[1].began.rank == 1
    assert first[0].steps == (STEPPED, Stepped(step=1, micro=1, batch="ab", time=4.0))
    assert first[0].last_step == 1
    assert [first[0].saved(event) for event in ("due", "staged", "committed", "failed")] == [1, 1, 1, -1]
    assert second[0].began == SECOND
    assert second[0].records == (Ended(step=1, why="stopped", time=6.0),)


def test_the_lines_are_json_with_a_word_for_what_they_are(tmp_path):
    with TraceWriter(tmp_path, 3) as writer:
        writer.write(msgspec.structs.replace(FIRST, rank=3))
        writer.write(STEPPED)
    lines = [json.loads(line) for line in (tmp_path / "rank-00003.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["began", "stepped"]
    assert lines[1]["lr"] == {"optimizer": [(1e-3).hex(), (0.0).hex()]}
    assert lines[1]["norm"] == "inf"


def test_a_torn_last_line_is_not_read_and_does_not_harm_the_next_start(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    with TraceWriter(tmp_path, 0) as writer:
        writer.write(FIRST)
        writer.write(STEPPED)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1]), 17):
        path.write_bytes(whole[:-cut])
        assert read_trace(tmp_path).ranks[0][0].records == ()
    path.write_bytes(whole[:-7])
    with TraceWriter(tmp_path, 0) as writer:
        writer.write(SECOND)
    assert [run.began for run in read_trace(tmp_path).ranks[0]] == [FIRST, SECOND]


def test_nothing_written_is_no_rank(tmp_path):
    assert read_trace(tmp_path / "nowhere").ranks == {}
    (tmp_path / "rank-00000.jsonl").write_bytes(b'{"what":"began"')
    trace = read_trace(tmp_path)
    assert trace.ranks == {0: ()}
    assert trace.starts() == []


def test_damage_in_the_middle_is_an_error_that_lists_every_file(tmp_path):
    began = msgspec.json.encode(FIRST) + b"\n"
    (tmp_path / "rank-00000.jsonl").write_bytes(began + b'{"what":"stepped"}\n' + began)
    (tmp_path / "rank-00001.jsonl").write_bytes(msgspec.json.encode(STEPPED) + b"\n")
    (tmp_path / "rank-abc.jsonl").write_bytes(began)
    with pytest.raises(CorruptError) as caught:
        read_trace(tmp_path)
    said = str(caught.value)
    assert "rank-00000.jsonl: line 2 is no record" in said
    assert "rank-00001.jsonl: line 1 comes before anything began" in said
    assert "rank-abc.jsonl" in said


def test_a_record_has_left_the_process_when_write_returns(tmp_path):
    script = (
        "import os, sys\n"
        "from keepstep.check.trace import Began, Saved, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1], 0)\n"
        "writer.write(Began(rank=0, world=1, incarnation=1, step=0, restored=False))\n"
        "writer.write(Saved(step=1, event='due'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert ran.returncode == -9
    assert read_trace(tmp_path).ranks[0][0].saved("due") == 1


def test_a_closed_writer_says_so(tmp_path):
    writer = TraceWriter(tmp_path, 0)
    writer.close()
    writer.close()
    with pytest.raises(ClosedError):
        writer.write(FIRST)


def test_orders_reach_the_script_through_one_variable(monkeypatch):
    monkeypatch.delenv(DRILL_VARIABLE, raising=False)
    assert drill_orders() is None
    for orders in (DrillOrders("/r", "/t"), DrillOrders("/r ä", "/t", stop_at=7)):
        monkeypatch.setenv(DRILL_VARIABLE, encode_orders(orders))
        assert drill_orders() == orders


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "{",
        '{"root": "/r"}',
        '{"root": "/r", "trace": 3}',
        '{"root": "", "trace": "/t"}',
        '{"root": "/r", "trace": "/t", "stop_at": 0}',
        '{"root": "/r", "trace": "/t", "stop_att": 3}',
    ],
)
def test_orders_that_no_drill_writes_are_refused(text, monkeypatch):
    monkeypatch.setenv(DRILL_VARIABLE, text)
    with pytest.raises(UsageError, match=r"KEEPSTEP_DRILL is set to .*unset it"):
        drill_orders()
