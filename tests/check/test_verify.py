"""Every way a step at rest can be wrong, and what verify says about it."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import keepstep as ks
from keepstep.check.verify import KINDS, Problem, exit_status, verify
from keepstep.errors import StepNotFoundError, StorageError
from keepstep.format.box import Box
from keepstep.format.layout import Cut, Layout, Mesh
from keepstep.format.manifest import MANIFEST_NAME, Lineage, pack_manifest, parse_manifest
from keepstep.format.shardfile import digest, pack_header, parse_header, seal_header
from keepstep.storage.local import LocalStorage
from tests.helpers.storages import Watched

# --- good steps -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    rates: tuple[float, ...]


def save_one(path: Path) -> Path:
    ks.register(Recipe, name="test.Recipe")
    model = torch.nn.Linear(8, 4)
    model.twin = model.weight  # tied: stored once
    big = torch.arange(9 * 2**18, dtype=torch.int32).reshape(-1, 4)  # 9 MiB: more chunks than one
    state = {"model": model, "big": {"table": big}, "recipe": Recipe("a", (0.1,)), "table": {Recipe("b", ()): {1, "x"}}}
    ks.save(path, state, step=7)
    return path


def save_on_two(rank: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    whole = torch.arange(30.0).reshape(10, 3)
    state = {
        "model": {
            "sharded": distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]),
            "split": torch.zeros(2**18, dtype=torch.float32),  # large enough to be split among its replicas
            "alone": torch.ones(512),
            "boxes": ks.sharded(torch.ones(2, 3), global_shape=(4, 3), offsets=(2 * rank, 0)),
            "nothing": torch.zeros(0, 5),
            "scalar": torch.tensor(3.0),
        },
        "mine": ks.per_rank({"noise": torch.full((5,), float(rank)), "text": f"rank {rank}"}),
    }
    ks.save(path, state, step=7)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return save_one(tmp_path_factory.mktemp("one") / "step-00000007")


@pytest.fixture(scope="module")
def two(tmp_path_factory, rank_pool) -> Path:
    path = tmp_path_factory.mktemp("two") / "step-00000007"
    rank_pool(2)(save_on_two, str(path))
    return path


@pytest.fixture
def step(one, tmp_path) -> Path:
    return Path(shutil.copytree(one, tmp_path / one.name))


@pytest.fixture
def step_of_two(two, tmp_path) -> Path:
    return Path(shutil.copytree(two, tmp_path / two.name))


def result(path):
    return list(verify(path if not isinstance(path, Path) else LocalStorage(path)))[-1]


def data_bytes(path: Path) -> int:
    return sum(header_of(file)[1].data_bytes for file in path.rglob("*.safetensors"))


def header_of(file: Path):
    raw = file.read_bytes()
    return raw, parse_header(raw, len(raw), file.name)


def test_a_good_step_has_no_problems_and_every_byte_was_read(one):
    seen = list(verify(LocalStorage(one)))
    last = seen[-1]
    assert last.ok
    assert (last.step, last.files) == (7, 3)
    assert last.bytes == last.total_bytes == data_bytes(one)
    assert last.blocks == sum(len(header_of(file)[1].digests) for file in one.rglob("*.safetensors"))
    assert len(seen) > 4
    assert [v.bytes for v in seen] == sorted(v.bytes for v in seen)


def test_a_good_step_of_two_ranks_has_no_problems(two):
    last = result(two)
    assert last.problems == ()
    assert last.files == 4
    assert last.bytes == last.total_bytes == data_bytes(two)
    assert exit_status(last.problems) == 0


def test_files_of_other_attempts_are_no_fault(step):
    (step / "model" / "rank-00000.0badc0de.safetensors").write_bytes(b"left over")
    (step / "model" / "rank-00000.0badc0de.safetensors.partial").write_bytes(b"left over")
    assert result(step).ok
    assert [name.rpartition(".")[2] for name in result(step).strays] == ["safetensors", "partial"]


# --- one fault each -------------------------------------------------------------------------------------------------


def file_of(step: Path, folder: str, rank: int = 0) -> Path:
    (file,) = (step / folder).glob(f"rank-{rank:05d}.*.safetensors")
    return file


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit(step: Path, **changes) -> None:
    """The manifest with other fields, and with a digest that is right for them."""
    path = step / MANIFEST_NAME
    manifest = parse_manifest(path.read_bytes(), path.name)
    path.write_bytes(pack_manifest(msgspec.structs.replace(manifest, **changes)))


def manifest_of(step: Path):
    return parse_manifest((step / MANIFEST_NAME).read_bytes(), MANIFEST_NAME)


def rewrite(step: Path, folder: str, change) -> None:
    """A shard file whose entries and data are ``change(entries, data)``, sealed again, and its record in the manifest."""
    file = file_of(step, folder)
    raw, header = header_of(file)
    entries, data = change(list(header.entries), bytearray(raw[header.data_offset :]))
    digests = [digest(bytes(data[at : at + header.block_bytes])) for at in range(0, len(data), header.block_bytes)]
    packed = pack_header(tuple(entries), len(data), save_id=header.save_id, step=header.step, rank=header.rank)
    sealed = seal_header(packed, np.array(digests, np.uint64))
    file.write_bytes(sealed + data)
    files = dict(manifest_of(step).files)
    record = files[folder][0]
    files[folder] = (
        msgspec.structs.replace(
            record, size_bytes=len(sealed) + len(data), data_bytes=len(data), header_digest=f"{digest(sealed):016x}"
        ),
    )
    edit(step, files=files)


def retyped(entries, data):
    return [msgspec.structs.replace(e, dtype="int32") if e.name == "model/bias" else e for e in entries], data


def renamed(entries, data):
    return [
        msgspec.structs.replace(e, name="other", key="other") if e.name == "model/bias" else e for e in entries
    ], data


def untagged(entries, data):
    tree = next(entry for entry in entries if entry.name == "~tree")
    data[tree.start : tree.stop] = data[tree.start : tree.stop].replace(b'"$":"object"', b'"$":"pickle"')
    return entries, data


def dangling(entries, data):
    tree = next(entry for entry in entries if entry.name == "~tree")
    data[tree.start : tree.stop] = data[tree.start : tree.stop].replace(b'"key":"model/bias"', b'"key":"model/gone"')
    return entries, data


def first_data_byte(file: Path) -> int:
    return header_of(file)[1].data_offset


FAULTS = {
    "flipped bit": (
        lambda step: flip(file_of(step, "model"), first_data_byte(file_of(step, "model")) + 5),
        "blocks", "model/rank-00000.", ["1 of 1 blocks", "at byte 4,096", "'model/weight'"],
    ),
    "flipped bit deep in a large file": (
        lambda step: flip(file_of(step, "big"), first_data_byte(file_of(step, "big")) + 5 * 2**20 + 1),
        "blocks", "big/rank-00000.", ["1 of 144 blocks", f"{5 * 2**20 + 4096:,}", "'big/table'"],
    ),
    "cut file": (
        lambda step: file_of(step, "model").write_bytes(file_of(step, "model").read_bytes()[:-1]),
        "size", "model/rank-00000.", ["4,239 bytes", "4,240 were written"],
    ),
    "lost file": (lambda step: file_of(step, "model").unlink(), "missing", "model/rank-00000.", ["is missing"]),
    "changed header": (
        lambda step: flip(file_of(step, "model"), 40), "header", "model/rank-00000.", ["header is not the one"],
    ),
    "changed manifest": (lambda step: flip(step / MANIFEST_NAME, 60), "manifest", MANIFEST_NAME, ["its own digest"]),
    "newer format": (
        lambda step: edit(step, format=(9, 1)), "version", MANIFEST_NAME, ["format 9.1", "reads format 1"],
    ),
    "hole": (
        lambda step: edit(
            step, layouts=(Layout((4, 8), 0, (), ((0, Box((0, 0), (3, 8))),)), *manifest_of(step).layouts[1:])
        ),
        "coverage", MANIFEST_NAME, ["'model/weight'", "24 of 32 elements"],
    ),
    "overlap": (
        lambda step: edit(
            step,
            layouts=(
                Layout((4, 8), 0, (), ((0, Box((0, 0), (4, 8))), (0, Box((3, 0), (1, 8))))),
                *manifest_of(step).layouts[1:],
            ),
        ),
        "coverage", MANIFEST_NAME, ["'model/weight'", "[0:4, 0:8] and [3:4, 0:8] overlap"],
    ),
    "another dtype": (
        lambda step: rewrite(step, "model", retyped), "entries", "model/", ["'model/bias' holds int32", "expected float32"],
    ),
    "another name": (
        lambda step: rewrite(step, "model", renamed), "entries", "model/", ["'model/bias' is missing", "'other' is there"],
    ),
    "a tensor the manifest lacks": (
        lambda step: edit(step, tensors=tuple(t for t in manifest_of(step).tensors if t.key != "model/bias")),
        "entries", "model/", ["'model/bias' is there"],
    ),
    "unknown tag": (lambda step: rewrite(step, "state", untagged), "values", "state/", ["unknown tag 'pickle'"]),
    "dangling reference": (
        lambda step: rewrite(step, "state", dangling), "values", "state/", ["'model/gone' is stored nowhere"],
    ),
    "a component without values": (
        lambda step: edit(step, components={**manifest_of(step).components, "ghost": manifest_of(step).components["model"]}),
        "values", "state/", ["component 'ghost'"],
    ),
    "a file that is not listed": (
        lambda step: edit(step, files={**manifest_of(step).files, "big": ()}),
        "missing", "big/", ["lists no file of rank 0"],
    ),
    "a key tied to nothing": (
        lambda step: edit(step, aliases={**manifest_of(step).aliases, "model/ghost": "model/gone"}),
        "coverage", MANIFEST_NAME, ["'model/ghost' is tied to 'model/gone'"],
    ),
    "another time than the files say": (
        lambda step: edit(step, created="2020-01-01T00:00:00.000+00:00"),
        "header", "state/", ["its copy of the manifest is of another one", "created 20"],
    ),
    "another origin than the files say": (
        lambda step: edit(step, lineage=Lineage("other", 3)),
        "header", "state/", ["its copy of the manifest is of another one", "run='other'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_kind_and_its_file(name, step):
    damage, kind, file, texts = FAULTS[name]
    damage(step)
    problems = [problem for problem in result(step).problems if problem.kind == kind]
    assert problems, result(step)
    assert problems[0].file.startswith(file)
    for text in texts:
        assert text in problems[0].text
    assert "{" not in problems[0].text
    assert exit_status(result(step).problems) == KINDS[kind].exit_status


def test_a_rank_whose_own_values_are_not_listed_is_missed(step_of_two):
    """Its tensors may all be with other ranks."""
    manifest = manifest_of(step_of_two)
    gone = next(record for record in manifest.files["state"] if record.rank == 1)
    files = manifest.files | {"state": tuple(one for one in manifest.files["state"] if one is not gone)}
    edit(step_of_two, files=files)
    problems = result(step_of_two).problems
    assert [problem.kind for problem in problems] == ["values"]
    assert "has no value on rank 1" in problems[0].text
    assert result(step_of_two).strays == (file_of(step_of_two, "state", 1).relative_to(step_of_two).as_posix(),)


def test_files_of_two_ranks_that_were_exchanged_are_noticed(step_of_two):
    first, second = file_of(step_of_two, "model", 0), file_of(step_of_two, "model", 1)
    files = dict(manifest_of(step_of_two).files)
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    zero, other = sorted(files["model"], key=lambda record: record.rank)
    files["model"] = (
        msgspec.structs.replace(other, rank=0),
        msgspec.structs.replace(zero, rank=1),
    )
    edit(step_of_two, files=files)
    problems = result(step_of_two).problems
    assert [(p.kind, p.file) for p in problems] == [
        ("header", first.relative_to(step_of_two).as_posix()),
        ("header", second.relative_to(step_of_two).as_posix()),
    ]
    assert "rank 1" in problems[0].text


def test_a_layout_that_gives_a_tensor_to_both_ranks_overlaps(step_of_two):
    manifest = manifest_of(step_of_two)
    where = next(spec.layout for spec in manifest.tensors if spec.key == "model/sharded")
    layouts = list(manifest.layouts)
    layouts[where] = Layout((10, 3), len(manifest.meshes), ())
    edit(step_of_two, layouts=tuple(layouts), meshes=(*manifest.meshes, Mesh((2,))))
    assert any(p.kind == "coverage" and "overlap" in p.text for p in result(step_of_two).problems)
    # The same with a cut that leaves the second half to nobody.
    layouts[where] = Layout((10, 3), len(manifest.meshes), (Cut(0, "O", 0, 1), Cut(0, "S", 0)))
    edit(step_of_two, layouts=tuple(layouts), meshes=(*manifest.meshes, Mesh((2,))))
    assert any(p.kind == "coverage" and "15 of 30" in p.text for p in result(step_of_two).problems)


def test_all_faults_are_found_and_the_worst_decides(step):
    file_of(step, "model").unlink()
    flip(file_of(step, "big"), first_data_byte(file_of(step, "big")))
    flip(file_of(step, "state"), first_data_byte(file_of(step, "state")))
    last = result(step)
    assert sorted(problem.kind for problem in last.problems) == ["blocks", "blocks", "missing"]
    assert exit_status(last.problems) == 7
    assert exit_status((Problem("unreadable", "a", "b"), Problem("version", "a", "b"))) == 8
    assert exit_status((Problem("version", "a", "b"),)) == 6


def test_a_file_that_cannot_be_read_is_not_called_damaged(one):
    def refuse(operation, name):
        if operation == "read" and name.startswith("big/"):
            raise StorageError("read", name, OSError(errno.EIO, "Input/output error"))

    last = result(Watched(one, refuse))
    assert [problem.kind for problem in last.problems] == ["unreadable"]
    assert "Input/output error" in last.problems[0].text
    assert exit_status(last.problems) == 8


def test_a_step_that_goes_while_it_is_verified_is_not_called_damaged(step):
    running = verify(LocalStorage(step))
    next(running)
    shutil.rmtree(step)
    with pytest.raises(StepNotFoundError, match="step 7 was removed or replaced"):
        list(running)


def test_nothing_committed_is_an_error_of_its_own(tmp_path):
    with pytest.raises(StepNotFoundError, match="no committed step"):
        list(verify(LocalStorage(tmp_path)))


def test_a_manifest_that_cannot_be_read_is_a_storage_error(one):
    def refuse(operation, name):
        if operation == "open" and name == MANIFEST_NAME:
            raise StorageError("open", name, OSError(errno.EACCES, "Permission denied"))

    with pytest.raises(StorageError, match="Permission denied"):
        list(verify(Watched(one, refuse)))
