"""Models as safetensors: out of a step of any layout, into one, and read where they lie; and what is refused."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import keepstep as ks
from keepstep.cli.main import app
from keepstep.errors import (
    CorruptError,
    MismatchError,
    RankFailedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from keepstep.interop.huggingface import export
from keepstep.interop.huggingface import exporting as module
from keepstep.interop.huggingface.planning import INDEX_NAME
from keepstep.interop.runs import boxes_of_run
from tests.architecture.source import ROOT

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
]
DTYPES += ["float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def network(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 7))
    model[2].twin = model[0].bias
    return model


def written(folder):
    """Everything that the files of a folder hold, by name, through the library of the format."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


@pytest.fixture
def step(tmp_path):
    ks.save(tmp_path / "step", {"model": network(), "other": {"a": torch.arange(3.0)}, "epoch": 3}, step=12)
    return tmp_path / "step"


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_a_run_of_elements_is_its_boxes_in_order(shape):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = list(boxes_of_run(shape, start, stop))
            parts = []
            for box in boxes:
                cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                parts.extend(whole[cut].reshape(-1).tolist())
            assert parts == list(range(start, stop))
            assert len(boxes) <= 2 * max(len(shape), 1)


def test_files_and_index_hold_the_model_to_the_last_bit(step, tmp_path):
    exported = export(step, tmp_path / "out", max_shard_bytes=600)
    state = network().state_dict()
    tied = {"2.twin"}
    assert same(written(tmp_path / "out"), {name: t for name, t in state.items() if name not in tied})
    assert exported.tied == {"2.twin": "0.bias"}
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert {name: (tmp_path / "out" / file).exists() for name, file in index["weight_map"].items()} == dict.fromkeys(
        state.keys() - tied, True
    )
    assert index["metadata"]["total_size"] == sum(t.nbytes for name, t in state.items() if name not in tied)
    assert exported.files == {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert len(exported.files) == 3
    assert names_in(tmp_path / "out") == sorted([*exported.files, INDEX_NAME])


def test_a_single_file_has_no_index_and_a_model_that_is_there_is_kept(step, tmp_path):
    out = tmp_path / "out"
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    (config / "pytorch_model.bin").write_bytes(b"weights")
    (config / "model.safetensors.index.json").write_text("{}")
    exported = export(step, out, config_from=config)
    assert names_in(out) == ["config.json", "model.safetensors"]
    assert exported.copied == ("config.json",)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(StepExistsError, match=r"model\.safetensors"):
        export(step, out, component="other")
    assert (out / "model.safetensors").read_bytes() == before
    export(step, out, max_shard_bytes=1000, overwrite=True)
    assert "model.safetensors" not in names_in(out)
    export(step, out, component="other", overwrite=True)
    assert names_in(out) == ["config.json", "model.safetensors"]
    assert same(written(out), {"a": torch.arange(3.0)})


def test_every_dtype_and_shape_goes_out_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 12)
    model = {}
    for name in DTYPES:
        kind = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 100, (3001 * kind.itemsize,), dtype=torch.uint8)
        model[name] = raw.view(kind)
        model[f"{name}.part"] = raw.view(kind)[:2500].reshape(50, 5, 10)
    model |= {"scalar": torch.tensor(2.5), "none": torch.empty(3, 0), "column": torch.randn(900, 3).t()}
    model = {name: tensor.clone() if name.endswith("part") else tensor for name, tensor in model.items()}
    ks.save(tmp_path / "step", {"model": model})
    export(tmp_path / "step", tmp_path / "out", max_shard_bytes=100_000)
    assert same(written(tmp_path / "out"), model)
    with ks.open(tmp_path / "out") as opened:
        assert same({key.removeprefix("model/"): opened[key] for key in opened}, model)
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}
    ks.load(tmp_path / "out", into)
    assert same(into["model"], model)


def test_what_safetensors_has_no_name_for_is_refused_by_name(tmp_path):
    ks.save(tmp_path / "step", {"model": {"a": torch.zeros(2, dtype=torch.complex128), "b": torch.zeros(2)}})
    with pytest.raises(MismatchError, match="a: complex128") as caught:
        export(tmp_path / "step", tmp_path / "out")
    assert len(caught.value.mismatches) == 1
    assert not (tmp_path / "out").exists()


def test_a_cast_is_that_of_torch_and_never_makes_an_infinity(step, tmp_path):
    export(step, tmp_path / "half", dtype=torch.bfloat16)
    state = network().state_dict()
    del state["2.twin"]
    expected = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in state.items()}
    assert same(written(tmp_path / "half"), expected)
    model = {"a": torch.tensor([1.0, 70_000.0, math.inf, math.nan]), "b": torch.ones(2)}
    ks.save(tmp_path / "large", {"model": model})
    with pytest.raises(MismatchError, match=r"elements of a do not fit into float16[\s\S]*70000"):
        export(tmp_path / "large", tmp_path / "out", dtype="float16")
    assert not list((tmp_path / "out").glob("*"))
    for wrong in ("int8", "float", "complex64"):
        with pytest.raises(UsageError, match="bfloat16"):
            export(step, tmp_path / "out", dtype=wrong)


def test_names_follow_rules_and_every_rule_has_to_do_something(step, tmp_path):
    export(step, tmp_path / "a", rename={r"^0\.": "first.", r"^2\.(weight|bias)": r"last.\1"})
    names = set(written(tmp_path / "a"))
    assert {"first.weight", "first.bias", "last.weight", "1.weight"} <= names
    export(step, tmp_path / "b", rename=lambda name: None if name.startswith(("1.", "0.bias")) else f"m.{name}")
    assert set(written(tmp_path / "b")) == {"m.0.weight", "m.2.weight", "m.2.bias", "m.2.twin"}
    for rules, message in (
        ({"^9": "x", r"\.": "_"}, "nothing is left for '\\^9'"),
        ({r".*(weight|bias)": r"\1"}, "one name to several"),
        ({"(": ""}, "regular expression"),
        ({"0": r"\9"}, "regular expression"),
        (lambda name: "", "none"),
    ):
        with pytest.raises(UsageError, match=message):
            export(step, tmp_path / "c", rename=rules)
    assert not (tmp_path / "c").exists()


def test_what_is_not_there_is_named(step, tmp_path):
    with pytest.raises(StepNotFoundError, match="model, other, epoch"):
        export(step, tmp_path / "out", component="modle")
    with pytest.raises(UsageError, match="no tensors"):
        export(step, tmp_path / "out", component="epoch")
    with pytest.raises(StepNotFoundError):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(UsageError, match="max_shard_bytes"):
        export(step, tmp_path / "out", max_shard_bytes=0)


def test_a_failure_leaves_no_file_and_what_was_there(step, tmp_path):
    out = tmp_path / "out"
    export(step, out, max_shard_bytes=1000)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    victim = next((step / "model").iterdir())
    raw = bytearray(victim.read_bytes())
    raw[-3] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(CorruptError):
        export(step, out, max_shard_bytes=1000, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    going = module.exporting(step, tmp_path / "given up", module.Wish("other"))
    next(going)
    going.close()
    assert not list((tmp_path / "given up").iterdir())


def test_a_folder_of_the_hub_loads_as_a_step(step, tmp_path):
    """With an index, as one file, as a series without an index, and in the hub's cache, whose files are links."""
    state = network().state_dict()
    export(step, tmp_path / "indexed", max_shard_bytes=1000)
    export(step, tmp_path / "series", max_shard_bytes=1000)
    (tmp_path / "series" / INDEX_NAME).unlink()
    export(step, tmp_path / "single")
    cache = tmp_path / "models--some--model"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0a1b")
    (cache / "snapshots/0a1b").mkdir(parents=True)
    (cache / "snapshots/ffff").mkdir(parents=True)
    (cache / "blobs/77").write_bytes((tmp_path / "single/model.safetensors").read_bytes())
    (cache / "snapshots/0a1b/model.safetensors").symlink_to("../../blobs/77")
    for folder in (tmp_path / "indexed", tmp_path / "series", tmp_path / "single", cache, cache / "snapshots/0a1b"):
        model = network(1)
        report = ks.load(folder, {"model": model})
        assert same(model.state_dict(), state)
        assert report.components["model"].restored == len(state)
    other = torch.nn.ModuleDict({"inner": network(1)})
    ks.load(tmp_path / "indexed", {"model": other}, rename={"^model/": "model/inner."})
    assert same(other.inner.state_dict(), state)
    exported = export(tmp_path / "indexed", tmp_path / "again", dtype="float64")
    assert exported.total_bytes > 0
    with pytest.raises(MismatchError, match=r"1\.weight"):
        ks.load(tmp_path / "indexed", {"model": torch.nn.Linear(2, 2)})


def make_header(entries, data=b"", length=None):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "too few"),
        (make_header({}, length=1 << 60), "not possible"),
        (make_header({}, length=1 << 20), "not possible"),
        (struct.pack("<Q", 4) + b"\xff\xfe[]", "header"),
        (make_header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, bytes(4)), "shape"),
        (make_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "shape"),
        (make_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "expected"),
        (make_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "expected"),
        (make_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)), "describes"),
        (make_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)), "describes"),
        (make_header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "F99"),
        (make_header({"a": [1]}), "header"),
        (make_header({"__metadata__": {"keepstep": "{}"}}), "folder"),
    ],
)
def test_a_hostile_file_is_refused_before_anything_is_made_of_its_numbers(tmp_path, raw, message):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CorruptError, match=message):
        ks.open(tmp_path)


def test_a_folder_that_contradicts_itself_is_refused_with_all_of_it(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "x-00001-of-00003.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "x-00003-of-00003.safetensors")
    with pytest.raises(CorruptError, match="2 are missing"):
        ks.open(tmp_path)
    (tmp_path / "x-00003-of-00003.safetensors").rename(tmp_path / "y.safetensors")
    with pytest.raises(StepNotFoundError, match="no index"):
        ks.open(tmp_path)
    where = {"a": "x-00001-of-00003.safetensors", "c": "y.safetensors", "d": "y.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CorruptError, match=r"'c'.*'d'"):
        ks.open(tmp_path)
    for names in ({"a": "../../etc/passwd"}, {"a": "gone.safetensors"}):
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CorruptError, match="missing"):
            ks.open(tmp_path)
    (tmp_path / INDEX_NAME).write_text("[]")
    with pytest.raises(CorruptError, match="no index"):
        ks.open(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / "x-00001-of-00003.safetensors").unlink()
    (tmp_path / "y.safetensors").unlink()
    (tmp_path / "gone.safetensors").symlink_to("nowhere")
    with pytest.raises(StorageError):
        ks.open(tmp_path)


def test_the_files_of_a_step_of_whole_tensors_are_safetensors_already(step):
    (file,) = (step / "model").glob("rank-00000.*.safetensors")
    state = network().state_dict()
    del state["2.twin"]
    assert same(load_file(file), {f"model/{name}": tensor for name, tensor in state.items()})


def documented(command):
    """The names in the table of a command in the page on commands."""
    section = (ROOT / "docs/cli.md").read_text().split(f"### `{command} --json`\n")[1].split("\n#")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_commands_export_and_import(step, tmp_path):
    def call(*args, status=0):
        result = CliRunner().invoke(app, list(map(str, args)))
        assert result.exit_code == status, result.output
        return result.stdout

    out, root = tmp_path / "out", tmp_path / "run"
    said = call("export", step, out, "--max-shard", "0.6kB", "--dtype", "bfloat16", "--rename", "^0=first")
    assert "in 2 files" in said
    assert "2.twin is first.bias" in said
    facts = json.loads(call("export", step, out, "--component", "other", "--overwrite", "--json"))
    assert facts["files"] == {"model.safetensors": 4096 + 12}
    assert facts["step"] == 12
    assert set(facts) == documented("export")
    call("export", step, out, status=4)
    call("export", step, out, "--max-shard", "lots", status=2)
    call("export", step, out, "--rename", "lots", status=2)
    call("export", step, tmp_path / "model")
    facts = json.loads(call("import", tmp_path / "model", root, "--step", 7, "--json"))
    assert (facts["step"], facts["component"], facts["tensors"]) == (7, "model", 9)
    assert set(facts) == documented("import")
    call("import", tmp_path / "model", root, "--step", 7, status=4)
    call("import", tmp_path / "model/model.safetensors", root, "--step", 7, "--overwrite")
    assert [found["step"] for found in json.loads(call("ls", root, "--json"))["steps"]] == [7]
    call("verify", root)
    model = network(1)
    with ks.Checkpointer(root, ks.TrainState(model=model), background="off") as checkpointer:
        assert checkpointer.restore(only=["model"]).step == 7
    assert same(model.state_dict(), network().state_dict())


class Broken(ks.LocalStorage):
    """A folder whose disk takes no more of the second file that is begun here."""

    begun = 0

    def create(self, name, size_hint_bytes):
        self.begun += 1
        upload = super().create(name, size_hint_bytes)
        if self.begun == 2:

            def write_at(offset, data):
                raise StorageError("write", name, OSError(28, "no space left on device"))

            upload.write_at = write_at
        return upload


def spread(rank, folder, shapes):
    """Exports what four ranks have saved, then to a disk that is full on one of them."""
    mesh = init_device_mesh("cpu", (4,))
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in shapes.items()}
    placed = {
        name: distribute_tensor(tensor, mesh, [Shard(i % 2)] if tensor.dim() == 2 else [Replicate()])
        for i, (name, tensor) in enumerate(whole.items())
    }
    ks.save(folder / "step", {"model": placed})
    group = torch.distributed.group.WORLD
    before = group._get_sequence_number_for_group()
    torch.distributed.barrier()
    counted = group._get_sequence_number_for_group()
    assert counted > before  # it does count collectives
    for so_far in module.exporting(folder / "step", folder / "out", module.Wish(max_shard_bytes=40_000)):
        assert so_far.bytes_written <= so_far.total_bytes
    assert group._get_sequence_number_for_group() == counted
    names = names_in(folder / "out")
    full = Broken(folder / "full") if rank == 2 else folder / "full"
    with pytest.raises((StorageError, RankFailedError), match="no space left"):
        export(folder / "step", full, max_shard_bytes=20_000)
    loaded = {name: distribute_tensor(torch.zeros(t.shape), mesh, t.placements) for name, t in placed.items()}
    ks.load(folder / "out", {"model": loaded})
    equal = all(torch.equal(loaded[name].to_local(), placed[name].to_local()) for name in placed)
    return so_far.bytes_written, so_far.total_bytes, names, names_in(folder / "full"), equal, whole


@pytest.mark.slow
@pytest.mark.case(114)
def test_four_ranks_share_the_work_by_bytes_and_a_full_disk_leaves_nothing(rank_pool, tmp_path):
    """Names that no parser expects; every rank writes about a quarter, and all or nothing gets its name."""
    odd = ("a-00001-of-00009.w", "model/with~slash", "rank-00000.x", "layers.10.é", "layers.9.ü", "..", " ", "x" * 200)
    shapes = {f"{name}.{n}": (40, 20 + n) for n in range(4) for name in odd} | {"bias": (100,), "one": ()}
    results = rank_pool(4)(spread, tmp_path, shapes)
    total = results[0][1]
    for written_here, _, _, left, equal, _ in results:
        assert total / 4 * 0.7 < written_here < total / 4 * 1.3
        assert equal
        assert left == []
    assert sum(result[0] for result in results) == total
    assert same(written(tmp_path / "out"), results[0][5])
    assert INDEX_NAME in results[0][2]
    assert not [name for name in results[0][2] if "partial" in name]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_transformers_loads_what_was_exported_and_its_files_load_here(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    ks.save(tmp_path / "step", {"model": model})
    config.save_pretrained(tmp_path / "config")
    exported = export(tmp_path / "step", tmp_path / "out", max_shard_bytes=8_000, config_from=tmp_path / "config")
    assert exported.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert len(exported.files) > 3
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    torch.manual_seed(4)
    fresh = transformers.GPT2LMHeadModel(config)
    ks.load(tmp_path / "theirs", {"model": fresh})
    assert same(fresh.state_dict(), model.state_dict())
    half = export(tmp_path / "step", tmp_path / "half", dtype="bfloat16", config_from=tmp_path / "config")
    assert half.total_bytes * 2 == exported.total_bytes
    small = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    assert same(small.state_dict(), model.to(torch.bfloat16).state_dict())
