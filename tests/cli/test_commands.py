"""The command line: what people see, what scripts read, and what each fault is called."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.formats import found_at
from keepstep.cli.main import app
from keepstep.cli.showing import Wanted, print_step, read_step
from keepstep.cli.verifying import verify_step
from keepstep.storage.local import LocalStorage
from tests.architecture.source import ROOT

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of three steps, of which the second failed in the middle, and restored once."""
    root = tmp_path_factory.mktemp("cli") / "run"
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[1].twin = model[1].bias
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = ks.TrainState(model=model, optimizer=optimizer)
    with ks.Checkpointer(root, state) as checkpointer:
        checkpointer.restore()
        checkpointer.step(loss=2.5, samples=8)
        checkpointer.save()
    with ks.Checkpointer(root, state) as checkpointer:
        checkpointer.restore()
        checkpointer.step(loss=1.25)
        checkpointer.step(loss=0.5)
        checkpointer.save()
    left = root / "step-00000002" / "model" / "rank-00000.0badc0de.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(1000))
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def call(*args: object, status: int = 0):
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, f"{result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def flip(step: Path, folder: str = "model") -> Path:
    (file,) = (step / folder).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


# --- ls -------------------------------------------------------------------------------------------------------------


def test_ls_shows_steps_newest_first_and_marks_the_latest_and_the_unfinished(saved):
    lines = call("ls", saved).stdout.splitlines()
    assert lines[0].split() == ["step", "incarnation", "age", "size", "ranks", "metrics"]
    third, first, second = lines[1:4]
    assert third.split()[:2] == ["3", "2"]
    assert third.rstrip().endswith("latest")
    assert "loss=0.5" in third
    assert first.split()[:2] == ["1", "1"]
    assert "loss=2.5" in first
    assert second.split() == ["2", "–", "–", "1000", "B", "–", "never", "committed"]
    assert max(map(len, lines)) <= 80


def test_ls_json_has_the_documented_fields(saved):
    listing = json.loads(call("ls", saved, "--json").stdout)
    assert set(listing) == documented("ls")
    assert (listing["root"], listing["hint"]) == (str(saved), 3)
    third, first, second = listing["steps"]
    for line in listing["steps"]:
        assert set(line) == documented("ls", "steps")
    assert (third["step"], third["name"], third["status"], third["latest"]) == (3, "step-00000003", "committed", True)
    assert (third["incarnation"], third["world_size"], third["metrics"]) == (2, 1, {"loss": 0.5})
    assert third["run"] == first["run"]
    assert third["bytes"] == sum(f.stat().st_size for f in (saved / "step-00000003").rglob("*.safetensors"))
    assert third["files"] == 3
    assert 0 <= third["age_s"] < 600
    assert (first["status"], first["latest"]) == ("committed", False)
    assert (second["status"], second["bytes"], second["files"], second["latest"]) == ("unfinished", 1000, 1, False)


def test_ls_shows_what_is_damaged_and_which_step_is_the_latest_then(root):
    flip(root / "step-00000003").unlink()
    out = call("ls", root).stdout
    assert re.search(r"^ *3 .* damaged *$", out, re.M)
    assert re.search(r"^ *1 .* latest *$", out, re.M)
    assert "step 3 is damaged" in out
    assert "is missing" in out
    assert "the hint 'latest' names step 3" in out
    (root / "step-00000001" / ".metadata").write_text("{}")
    out = call("ls", root).stdout
    assert "step 1 is damaged" in out
    assert "no step here can be restored" in out
    damaged = [line for line in json.loads(call("ls", root, "--json").stdout)["steps"] if line["status"] == "damaged"]
    assert [line["step"] for line in damaged] == [3, 1]
    assert all(line["damage"] for line in damaged)


def test_ls_without_a_hint_or_with_a_broken_one_lists_the_same(root):
    (root / "latest").write_bytes(b"\x00{")
    listing = json.loads(call("ls", root, "--json").stdout)
    assert listing["hint"] is None
    assert [line["step"] for line in listing["steps"]] == [3, 1, 2]


def test_ls_of_a_root_without_steps_is_no_error(tmp_path):
    assert call("ls", tmp_path).stdout.strip() == f"no steps in {tmp_path}"
    assert json.loads(call("ls", tmp_path, "--json").stdout)["steps"] == []


def test_a_metric_that_is_not_a_number_does_not_harm_the_step(tmp_path):
    state = ks.TrainState(weight=torch.ones(2))
    with ks.Checkpointer(tmp_path, state, keep=ks.Keep(last=1, best=1)) as checkpointer:
        checkpointer.restore()
        for loss in (1.0, float("inf"), 2.0, float("nan")):
            checkpointer.step(loss=loss)
            checkpointer.save()
    with ks.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore().step == 4
    steps = json.loads(call("ls", tmp_path, "--json").stdout)["steps"]
    assert [(line["step"], line["metrics"]) for line in steps] == [(4, {"loss": None}), (1, {"loss": 1.0})]
    assert "loss=nan" in call("ls", tmp_path).stdout
    assert "loss=nan" in call("show", tmp_path / "step-00000004").stdout


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_tells_what_is_in_a_step(saved):
    out = call("show", saved / "step-00000003").stdout
    assert re.search(r"^step +3, saved 20.* \(\d+ s ago\)", out, re.M)
    assert "incarnation 2, from step 1 of incarnation 1" in out
    assert re.search(rf"^written by +keepstep {re.escape(ks.__version__)}, torch {torch.__version__[:4]}", out, re.M)
    assert re.search(r"^model +module +Sequential +4 ", out, re.M)
    assert re.search(r"^optimizer +optimizer +AdamW +12 ", out, re.M)
    assert re.search(r"^rng +per_rank", out, re.M)
    assert re.search(r"^\[3, 4\] +whole on rank 0 +1 +3$", out, re.M)
    assert max(map(len, out.splitlines())) <= 80 or str(saved) in out


@pytest.mark.case(24)
def test_a_scheduler_that_was_not_saved_is_visibly_absent(saved, tmp_path):
    step = saved / "step-00000003"
    assert "not saved with it: scheduler, data position" in call("show", step).stdout
    names = [part["name"] for part in json.loads(call("show", step, "--json").stdout)["components"]]
    assert names == ["model", "optimizer", "rng", "progress"]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    state = ks.TrainState(model=model, optimizer=optimizer, warmup=scheduler)
    with ks.Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.save()
    out = call("show", tmp_path / "step-00000001").stdout
    assert re.search(r"^warmup +stateful +LambdaLR", out, re.M)
    assert "not saved with it: data position" in out


def test_show_json_has_the_documented_fields(saved):
    facts = json.loads(call("show", saved / "step-00000003", "--json").stdout)
    assert set(facts) == documented("show")
    assert (facts["step"], facts["world_size"], facts["format"]) == (3, 1, "1.2")
    assert facts["lineage"]["parent"] == {"run": facts["lineage"]["run"], "incarnation": 1, "step": 1}
    assert set(facts["versions"]) == {"keepstep", "torch", "python", "cpu", "code"}
    assert facts["tensor_list"] is None
    assert facts["damage"] is None
    assert facts["tensors"] == 17
    for name in ("components", "layouts"):
        for item in facts[name]:
            assert set(item) == documented("show", name)
    model = facts["components"][0]
    assert (model["name"], model["kind"], model["type"], model["tensors"]) == ("model", "module", "Sequential", 4)


def test_show_lists_tensors_that_fit_a_pattern_and_tied_ones(saved):
    step = saved / "step-00000003"
    listed = json.loads(call("show", step, "--tensors", "model/*", "--json").stdout)["tensor_list"]
    assert all(set(line) == documented("show", "tensor_list") for line in listed)
    assert [line["key"] for line in listed][:2] == ["model/0.weight", "model/0.bias"]
    assert listed[0] | {"folder": ""} == {
        "key": "model/0.weight", "dtype": "float32", "shape": [3, 4], "layout": "whole on rank 0", "pieces": 1,
        "folder": "", "same_as": None, "bytes": 48, "ranks": 1,
    }  # fmt: skip
    out = call("show", step, "--tensors").stdout
    assert re.search(r"^optimizer/state/0\.weight/exp_avg +float32 +\[3, 4\] +whole on rank 0 +1 *$", out, re.M)
    assert len(out.splitlines()) == 1 + 17


@pytest.mark.case(133)
def test_the_listing_shows_what_a_failed_load_did_not_find(tmp_path):
    def model(**parts):
        return torch.nn.ModuleDict(
            {
                name: torch.nn.ModuleDict({str(i): torch.nn.Linear(2, 1, bias=False) for i in n})
                for name, n in parts.items()
            }
        )

    ks.save(tmp_path / "step", {"model": model(layers=range(10))})
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "step", into={"model": model(blocks=range(3), layers=range(3, 10))})
    message = str(caught.value)
    assert str(tmp_path / "step") in message
    assert "ranks: 1 when saved, 1 now" in message
    for i in range(3):
        assert f"model/layers.{i}.weight" in message
        assert f"model/blocks.{i}.weight may be model/layers.{i}.weight" in message
    assert "layers.3" not in message
    listed = json.loads(call("show", tmp_path / "step", "--tensors", "--json").stdout)["tensor_list"]
    assert [line["key"] for line in listed] == [f"model/layers.{i}.weight" for i in range(10)]
    unknown = call("show", tmp_path / "step", "--tensors", "model/blocks.*", status=2).stderr
    assert "no key fits 'model/blocks.*'; there are 10 keys, such as model/layers.0.weight" in unknown


def test_everything_fits_a_narrow_terminal(tmp_path):
    deep = {f"decoder.layers.{i}.attention.projection.weight": torch.zeros(16, 4, 4, 4) for i in range(3)}
    ks.save(tmp_path / "step", {"model": deep, "a component with a rather long name " * 3: 1})
    for wanted, width in itertools.product((Wanted(), Wanted(tensors=True), Wanted(depth=9)), (80, 60)):
        shown = StringIO()
        facts = dataclasses.replace(read_step(found_at(str(tmp_path / "step")), wanted), path="run/step")
        print_step(facts, Console(file=shown, force_terminal=True, color_system=None, width=width))
        assert max(map(len, shown.getvalue().splitlines())) <= width
        assert not wanted.tensors or width < 80 or "model/decoder.layers.2" in shown.getvalue()
    piped = call("show", tmp_path / "step", "--tensors").stdout.splitlines()
    assert len(piped) == 4
    assert all(f"model/{key} " in line for key, line in zip(deep, piped[1:], strict=True))


def test_show_of_tied_tensors_says_where_they_are_stored(tmp_path):
    weight = torch.ones(3, 2)
    ks.save(tmp_path / "step", {"a": {"one": weight, "two": weight}})
    listed = json.loads(call("show", tmp_path / "step", "a/two", "--json").stdout)["tensor_list"]
    assert [(line["key"], line["same_as"]) for line in listed] == [("a/two", "a/one")]
    assert re.search(r"same as a/one", call("show", tmp_path / "step", "--tensors").stdout)


def test_show_of_a_damaged_step_still_shows_it_and_says_so(root):
    flip(root / "step-00000003").unlink()
    out = call("show", root / "step-00000003").stdout
    assert re.search(r"^model +module", out, re.M)
    assert "damaged: " in out
    assert "is missing" in out
    assert "is missing" in json.loads(call("show", root / "step-00000003", "--json").stdout)["damage"]


def show_two(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {
        "model": {
            "rows": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]),
            "large": torch.zeros(2**18),
            "small": torch.zeros(300),
            "parts": ks.sharded(torch.ones(2), global_shape=(4,), offsets=(2 * rank,)),
        }
    }
    ks.save(path, state)


def test_layouts_are_told_in_words(rank_pool, tmp_path):
    path = tmp_path / "step-00000000"
    rank_pool(2)(show_two, str(path))
    listed = json.loads(call("show", path, "--tensors", "--json").stdout)["tensor_list"]
    words = {line["key"]: (line["layout"], line["pieces"]) for line in listed}
    assert words["model/rows"] == ("dim 0 in 2 (S)", 2)
    assert words["model/large"] == ("dim 0 in 2 (B)", 2)
    assert words["model/parts"] == ("2 boxes (listed)", 2)
    assert words["model/small"][0].startswith("whole on rank ")
    tree = {line["key"]: line for line in json.loads(call("show", path, "--depth", 2, "--json").stdout)["tree"]}
    held = {key.removeprefix("model/"): line["ranks"] for key, line in tree.items()}
    assert held == {"model": 2, "rows": 2, "large": 2, "parts": 2, "small": 1}
    shown = [line.rstrip() for line in call("show", path, "--depth", 2).stdout.splitlines()]
    assert any(line.endswith(" 2  float32 [5, 2], dim 0 in 2 (S)") for line in shown)
    assert any(line.endswith(" 1  float32 [300]") for line in shown)
    assert re.search(r"^world +2 ranks *$", call("show", path).stdout, re.M)
    assert call("verify", path).stdout.startswith("step-00000000  ok  (3 files")


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_of_a_good_step_and_a_good_root(saved):
    one = json.loads(call("verify", saved / "step-00000003", "--json").stdout)
    assert set(one) == documented("verify")
    assert (one["ok"], one["exit_status"], [step["name"] for step in one["steps"]]) == (True, 0, ["step-00000003"])
    assert set(one["steps"][0]) == documented("verify", "steps")
    everything = json.loads(call("verify", saved, "--json").stdout)
    assert [step["step"] for step in everything["steps"]] == [3, 1]
    assert everything["unfinished"] == ["step-00000002"]
    out = call("verify", saved).stdout.splitlines()
    assert out[0].startswith("step-00000003  ok  (3 files, ")
    assert out[2] == "never committed, not looked at: step-00000002"


def test_verify_names_the_fault_and_exits_by_its_kind(root):
    file = flip(root / "step-00000003")
    result = call("verify", root / "step-00000003", status=7)
    assert "step-00000003  DAMAGED, 1 problem" in result.stdout
    assert f"blocks: {file.relative_to(root / 'step-00000003')}: 1 of 1 blocks" in result.stdout
    found = json.loads(call("verify", root, "--json", status=7).stdout)
    assert (found["ok"], found["exit_status"]) == (False, 7)
    (problem,) = found["steps"][0]["problems"]
    assert set(problem) == documented("verify", "steps", "problems")
    assert (problem["kind"], problem["file"]) == ("blocks", file.relative_to(root / "step-00000003").as_posix())
    assert found["steps"][1]["ok"]


def test_verify_of_a_newer_format_exits_with_its_status(root):
    path = root / "step-00000003" / ".metadata"
    path.write_text(path.read_text().replace('"format": [1,', '"format": [2,'))
    assert "written in format 2.2; this keepstep reads format 1" in call("verify", path.parent, status=6).stdout
    result = call("show", path.parent, status=6)
    assert result.stderr.startswith("error[format]: ")
    assert str(path) in result.stderr


def test_the_progress_bar_is_on_standard_error_and_only_on_a_terminal(saved):
    shown, hidden = StringIO(), StringIO()
    storage = LocalStorage(saved / "step-00000003")
    assert verify_step(storage, "step-00000003", Console(file=shown, force_terminal=True, width=80)).ok
    assert "step-00000003" in shown.getvalue()
    assert "bytes" in shown.getvalue() or "iB" in shown.getvalue()
    assert verify_step(storage, "step-00000003", Console(file=hidden, force_terminal=False)).ok
    assert hidden.getvalue() == ""
    assert call("verify", saved / "step-00000003").stderr == ""


# --- what is wrong with the arguments -------------------------------------------------------------------------------


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


WRONG = {
    "ls of nothing": (lambda root: ("ls", root / "no" / "such"), 3, "step-not-found", "the path exists as far as {root}"),
    "ls of a file": (lambda root: ("ls", root / "run.json"), 2, "usage", "{root}/run.json' is a file, not a folder"),
    "ls of a step": (lambda root: ("ls", root / "step-00000003"), 2, "usage", "its root is {root}"),
    "ls of a URL with a password": (
        lambda root: ("ls", "s3://me:secret@bucket/run"), 2, "usage", "credentials do not belong in a URL",
    ),
    "ls of an empty place": (
        lambda root: ("ls", "memory://empty/run"), 3, "step-not-found", "there is nothing at memory://empty/run",
    ),
    "ls of a path that is too long": (lambda root: ("ls", root / ("x" * 300)), 8, "storage", "File name too long"),
    "ls of steps under other names": (
        lambda root: ("ls", (root / "step-00000003").rename(root.parent / "mine" / "final").parent),
        3, "step-not-found", "names of their own: final",
    ),
    "show of nothing": (lambda root: ("show", root / "step-00000099"), 3, "step-not-found", "{root}/step-00000099"),
    "show of a root": (
        lambda root: ("show", root), 2, "usage", "holds 2 steps; name one, such as {root}/step-00000003",
    ),
    "show of an attempt": (
        lambda root: ("show", root / "step-00000002"), 3, "step-not-found", "was never committed: 1 file of an attempt",
    ),
    "show of something else": (
        lambda root: ("show", root / "incarnations"), 3, "step-not-found", "{root}/incarnations is not a step",
    ),
    "show of a file": (lambda root: ("show", root / "latest"), 2, "usage", "is a file, not a folder"),
    "show with a pattern that fits nothing": (
        lambda root: ("show", root / "step-00000003", "--tensors", "modle/*"),
        2, "usage", "no key fits 'modle/*'; there are 17 keys, such as model/0.weight",
    ),
    "show of a damaged manifest": (
        lambda root: ("show", write(root / "step-00000003" / ".metadata", '{"format": [1,0]}').parent),
        7, "corrupt", "{root}/step-00000003/.metadata: the manifest does not match its own digest",
    ),
    "verify of nothing": (lambda root: ("verify", root / "gone"), 3, "step-not-found", "there is nothing at {root}/gone"),
    "verify of a root without steps": (
        lambda root: ("verify", root / "incarnations"), 3, "step-not-found", "no step is committed below {root}",
    ),
    "verify of an attempt": (
        lambda root: ("verify", root / "step-00000002"), 3, "step-not-found", "was never committed",
    ),
    "verify of a file": (lambda root: ("verify", root / "run.json"), 2, "usage", "is a file, not a folder"),
    "verify of a URL without a bucket": (lambda root: ("verify", "gs:///x"), 2, "usage", "it names no bucket"),
}  # fmt: skip


@pytest.mark.case(168)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_told_in_words_with_the_real_values(name, root):
    (root.parent / "mine").mkdir()
    arguments, status, code, text = WRONG[name]
    args = arguments(root)
    for more in ([], ["--json"]):
        result = call(*args, *more, status=status)
        assert result.stdout == ""
        first, last = result.stderr.strip().splitlines()[0], result.stderr.strip().splitlines()[-1]
        assert first.startswith(f"error[{code}]: ")
        assert text.replace("{root}", str(root)) in result.stderr
        assert last.startswith("what to do: ")
        assert not re.search(r"[{}]|Traceback|%s", result.stderr)


def test_debug_adds_the_traceback_and_keeps_the_status(root):
    result = call("--debug", "show", root, status=2)
    assert "Traceback (most recent call last)" in result.stderr
    assert "error[usage]: " in result.stderr


def test_the_command_line_itself(root):
    assert call("--version").stdout.strip() == f"keepstep {ks.__version__}"
    assert "verify" in call("--help").stdout
    assert call("show", status=2).stdout == ""
    assert "No such command" in call("lss", root, status=2).stderr
    assert "--tensors" in call("show", "--help").stdout


@pytest.mark.case(168)
def test_keys_cannot_move_the_cursor(tmp_path):
    key = "we\x1b[2Jird\r[bold]:smile:{x}\u202e"
    ks.save(tmp_path / "step", {"values": {key: torch.ones(2)}})
    out = call("show", tmp_path / "step", "--tensors").stdout
    assert not set(out) & {"\x1b", "\r", "\u202e"}
    assert "values/we\\x1b[2Jird\\r[bold]:smile:{x}\\u202e" in out


# --- the real command -----------------------------------------------------------------------------------------------


def run_command(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-W", "error", "-m", "keepstep.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "path", "expected"),
    [("ls", ".", "loss=0.5"), ("show", "step-00000003", "AdamW"), ("verify", ".", "step-00000001  ok")],
)
def test_each_command_runs_as_a_process_and_imports_no_torch(command, path, expected, saved):
    ran = run_command(command, saved / path)
    assert ran.returncode == 0, ran.stderr
    assert expected in ran.stdout
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "keepstep.commit.catalog" in imported
    assert not {"torch", "torch.distributed"} & imported


@pytest.mark.slow
def test_the_installed_command_reports_faults_by_its_exit_status(root):
    flip(root / "step-00000003")
    command = Path(sys.executable).with_name("keepstep")
    ran = subprocess.run([command, "verify", root, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 7, ran.stderr
    assert json.loads(ran.stdout)["exit_status"] == 7
    assert ran.stderr == ""
    gone = subprocess.run([command, "ls", root / "gone"], capture_output=True, text=True, timeout=60, check=False)
    assert gone.returncode == 3
    assert gone.stderr.startswith("error[step-not-found]: there is nothing at ")


# --- the fields that docs/cli.md promises ---------------------------------------------------------------------------


def documented(command: str, *inside: str) -> set[str]:
    """The names in the table below ``### command [inside]`` of docs/cli.md."""
    page = (ROOT / "docs/cli.md").read_text()
    title = " ".join([f"`{command} --json`", *(f"`{part}`" for part in inside)])
    section = page.split(f"### {title}\n")[1].split("\n#")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    assert names, title
    return names


def test_show_prints_the_configuration_and_the_code(tmp_path):
    ks.save(
        tmp_path / "step", ks.TrainState(config={"lr": 0.1, "model": {"depth": 2, "name": "a\x1b[1m"}, "none": None})
    )
    shown = call("show", tmp_path / "step").output
    assert "lr=0.1 model.depth=2" in " ".join(shown.split())
    assert "\x1b" not in shown
    assert json.loads(call("show", tmp_path / "step", "--json").output)["config"]["model"]["depth"] == 2
