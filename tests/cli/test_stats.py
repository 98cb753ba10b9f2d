"""``keepstep stats``: what the saves of a run have cost, read from the records they left."""

from __future__ import annotations

import json
import re
import resource
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import keepstep as ks
from keepstep.cli.stats import print_stats, read_stats
from keepstep.cli.words import time_words
from keepstep.commit.records import RankTimes, SaveRecord, append_record, tails_of
from keepstep.storage.local import LocalStorage
from tests.cli.test_commands import call, documented
from tests.helpers.agents import agent_of, stop_agents


def record(step: int, **changes) -> SaveRecord:
    ranks = {rank: RankTimes({"capture": 0.001, "stage": 0.02, "write": 0.1 * (rank + 1)}) for rank in range(4)}
    facts = {
        "step": step, "save_id": f"{step:08x}", "ended": "2026-01-01T00:00:00.000+00:00", "outcome": "committed",
        "world": 4, "bytes": 3 << 28, "stall_s": 0.01, "staged_s": 0.02, "durable_s": 0.5, "commit_s": 0.004,
        "bytes_per_s": 1.5 * 2**30, "ranks": tails_of(ranks),
    }  # fmt: skip
    return SaveRecord(**facts | changes)


def recorded(root: Path, *records: SaveRecord) -> Path:
    for one in records:
        append_record(LocalStorage(root), one)
    return root


def test_a_line_for_each_save_then_percentiles_then_failures(tmp_path):
    saves = [record(100 * i, stall_s=i / 1000, first=i == 1) for i in range(1, 12)]
    failed = [
        record(1200, outcome="failed", code="storage", error="disk full"),
        record(1300, outcome="failed", code="agent", error="it died"),
        record(1400, outcome="failed", code="storage", error="disk still full\x1b[2J"),
    ]
    out = call("stats", recorded(tmp_path, *saves, *failed)).stdout
    lines = out.splitlines()
    assert lines[0].split() == [
        "step", "size", "stall", "staged", "durable", "write", "commit", "slowest", "rate",
    ]  # fmt: skip
    row = ["20.0", "ms", "500", "ms", "400", "ms", "4.00", "ms", "rank", "3", "1.5", "GiB/s"]
    assert lines[1].split() == ["100", "first", "768", "MiB", "1.00", "ms", *row]
    assert lines[11].split() == ["1100", "768", "MiB", "11.0", "ms", *row]
    assert lines[12].split()[:3] == ["1200", "FAILED", "–"]
    assert "14 saves: 11 committed, 3 failed" in lines
    # The first save, of 1 ms, is apart: of 2 to 11 ms the smallest is 2.
    assert re.search(r"^stall +2\.00 ms +6\.50 ms +10\.1 ms +10\.9 ms +11\.0 ms +1\.00 ms$", out, re.M)
    assert "2 failed with storage, the last one at step 1400: disk still full\\x1b[2J" in out
    assert "1 failed with agent, the last one at step 1300: it died" in out
    assert out.index("with storage") < out.index("with agent")


def test_percentiles_are_those_of_numpy(tmp_path):
    stalls = np.random.default_rng(0).exponential(size=37)
    stats = read_stats(
        LocalStorage(recorded(tmp_path, *(record(i, stall_s=float(s)) for i, s in enumerate(stalls)))), None
    )
    spread = stats.percentiles["stall_s"]
    found = [spread.min, spread.median, spread.p90, spread.p99, spread.max]
    assert found == pytest.approx(np.percentile(stalls, [0, 50, 90, 99, 100]))


def test_last_looks_at_the_newest_only(tmp_path):
    recorded(tmp_path, *(record(step, stall_s=step / 100) for step in range(1, 21)))
    out = call("stats", tmp_path, "--last", 2).stdout
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["19", "20"]
    assert "2 saves, the newest of 20: 2 committed, 0 failed" in out
    stats = json.loads(call("stats", tmp_path, "--last", 5, "--json").stdout)
    assert (stats["recorded"], stats["committed"]) == (20, 5)
    assert [save["step"] for save in stats["saves"]] == [16, 17, 18, 19, 20]
    assert stats["percentiles"]["stall_s"]["min"] == 0.16
    assert len(json.loads(call("stats", tmp_path, "--last", 99, "--json").stdout)["saves"]) == 20
    assert "--last" in call("stats", tmp_path, "--last", 0, status=2).stderr


def test_several_first_saves_are_told_apart(tmp_path):
    recorded(tmp_path, *(record(step, first=step % 2 == 1, staged_s=step / 10) for step in range(1, 7)))
    out = call("stats", tmp_path).stdout
    assert re.search(r"^staged +200 ms +400 ms .* 300 ms$", out, re.M)
    assert "first: the median of 3 saves, each the first of its agent" in out


def test_a_line_that_a_crash_has_cut_off_harms_no_other(tmp_path):
    recorded(tmp_path, record(1), record(2))
    path = tmp_path / "saves.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    recorded(tmp_path, record(3))
    assert [save["step"] for save in json.loads(call("stats", tmp_path, "--json").stdout)["saves"]] == [1, 3]


def test_without_records_it_says_so(tmp_path):
    assert call("stats", tmp_path).stdout == f"no save is recorded in {tmp_path}, and no step is committed there\n"
    assert json.loads(call("stats", tmp_path, "--json").stdout)["saves"] == []
    with ks.Checkpointer(tmp_path, ks.TrainState(weight=torch.ones(2)), background="off") as checkpointer:
        checkpointer.step()
        checkpointer.save()
    out = call("stats", tmp_path).stdout
    assert "no save is recorded in" in out
    assert (
        "although 1 step is committed there: saves.jsonl is written by background saves of a Checkpointer only" in out
    )


def test_a_wrong_root_is_told_as_by_ls(tmp_path):
    assert "error[step-not-found]" in call("stats", tmp_path / "gone", status=3).stderr
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / ".metadata").write_text("{}")
    assert "its root is" in call("stats", tmp_path / "step-00000001", status=2).stderr


@pytest.mark.parametrize("slowest", [3, 63])
def test_it_fits_a_terminal_of_80_columns(slowest, tmp_path):
    ranks = tails_of({slowest: RankTimes({"write": 888.8})})
    slow = {name: 888.8 for name in ("stall_s", "staged_s", "durable_s", "commit_s")}
    recorded(tmp_path, record(123_456, ranks=ranks, world=64, bytes=900 << 30, bytes_per_s=999 << 20, **slow))
    recorded(tmp_path, record(123_457, outcome="failed", code="storage", error="no", ranks=ranks))
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=80, markup=False)
    print_stats(read_stats(LocalStorage(tmp_path), None), console)
    assert "…" not in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.00 ms"), (0.000_83, "0.83 ms"), (0.0241, "24.1 ms"), (0.1, "100 ms"), (0.9996, "1.00 s"),
        (1.25, "1.25 s"), (12.34, "12.3 s"), (107.4, "107 s"),
    ],
)  # fmt: skip
def test_times_have_three_digits(seconds, words):
    assert time_words(seconds) == words


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with a real agent, whose second save failed because its files were not allowed to grow."""
    root = tmp_path_factory.mktemp("stats") / "run"
    state = ks.TrainState(weight=torch.zeros(100_000))
    with ks.Checkpointer(root, state, background="agent") as checkpointer:
        checkpointer.restore()
        for step in (1, 2, 3):
            checkpointer.step()
            agent = agent_of(root).pid
            before = resource.prlimit(agent, resource.RLIMIT_FSIZE)
            if step == 2:
                resource.prlimit(agent, resource.RLIMIT_FSIZE, (100_000, before[1]))
            pending = checkpointer.save()
            error = pending.committed.exception(30)
            assert (error is None) == (step != 2), error
            resource.prlimit(agent, resource.RLIMIT_FSIZE, before)
    stop_agents(root.parent)
    return root


@pytest.mark.slow
def test_every_save_of_a_real_run_has_a_line_in_it(trained):
    stats = json.loads(call("stats", trained, "--json").stdout)
    assert set(stats) == documented("stats")
    outcomes = [(save["step"], save["outcome"], save["first"]) for save in stats["saves"]]
    assert outcomes == [(1, "committed", True), (2, "failed", False), (3, "committed", False)]
    assert (stats["root"], stats["recorded"], stats["committed"], stats["failed"]) == (str(trained), 3, 2, 1)
    assert stats["steps"] == 2
    for save in stats["saves"]:
        assert set(save) == documented("stats", "saves")
        assert (save["world"], save["background"], save["staging"]) == (1, "agent", "overlap")
    good = stats["saves"][2]
    assert 400_000 < good["bytes"] < 430_000
    assert 0 < good["stall_s"] <= good["staged_s"] + 0.001 < good["durable_s"]
    assert 0 < good["ranks"]["write"]["most"] < good["durable_s"]
    assert set(good["ranks"]["write"]) == documented("stats", "saves", "ranks")
    assert {who for who, *_ in good["spans"]} >= {"training", "agent", "coordinator"}
    assert good["bytes_per_s"] == pytest.approx(good["bytes"] / good["durable_s"])
    for name in ("percentiles", "first"):
        assert set(stats[name]) == documented("stats", name)
        assert set(stats[name]["stall_s"]) == {"min", "median", "p90", "p99", "max"}
    (failure,) = stats["failures"]
    assert set(failure) == documented("stats", "failures")
    assert (failure["code"], failure["count"], failure["step"]) == ("storage", 1, 2)
    assert "File too large (errno 27)" in failure["error"]


@pytest.mark.slow
def test_the_table_of_a_real_run(trained):
    out = call("stats", trained).stdout
    assert "3 saves: 2 committed, 1 failed" in out
    assert re.search(r"^ +2 FAILED", out, re.M)
    assert re.search(r"1 failed with storage, the last one at step 2: .*File too large", out, re.S)
