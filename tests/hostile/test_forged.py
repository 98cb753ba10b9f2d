"""Steps made by somebody who wants something: every digest is right, and what they say is not to be believed.

Refused before anything outside the step is read and before memory is made by a number of theirs; all in the error tree.
"""

# ruff: noqa: E501  tables, a few to a line

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import CheckpointError, CorruptError, StorageError
from tests.helpers.forge import Forgery, at, memory_limit
from tests.helpers.same import assert_same

SAVED = {
    "model": {"w": torch.arange(8, dtype=torch.float32).reshape(4, 2), "b": torch.ones(5, dtype=torch.float64)},
    "mine": ks.per_rank({"t": torch.arange(3), "x": 5}),
    "lr": 0.1,
    "note": {"dtype": torch.float32, "size": torch.Size([2, 3]), "device": torch.device("cpu"), "a": [1, (2,)]},
}


def target() -> dict:
    return {
        "model": {"w": torch.full((4, 2), 7.0), "b": torch.zeros(5, dtype=torch.float64)},
        "mine": ks.per_rank({"t": torch.zeros(3, dtype=torch.int64), "x": 0}),
        "lr": 0.0,
        "note": None,
    }


def empty_target() -> dict:
    """One that has no tensors yet: everything is made anew, in the size the step says."""
    return {"model": {}, "mine": ks.per_rank({}), "lr": 0.0, "note": None}


@pytest.fixture(scope="module")
def step() -> Forgery:
    memory = ks.MemoryStorage()
    ks.save(memory, SAVED, step=3)
    return Forgery(memory)


def read_all(storage) -> None:
    """Every way to read a step."""
    opened = ks.open(storage)
    opened.describe()
    for key in opened:
        opened[key]
    for name in list(opened.manifest.components):
        opened.values_of(name)


def refused(storage, error=CheckpointError, match: str | None = None) -> None:
    """By a load into full and empty targets, which stay as they were in their plain values."""
    for make in (target, empty_target):
        into = make()
        with memory_limit(), pytest.raises(error, match=match):
            ks.load(storage, into)
        assert into["lr"] == 0.0
        assert into["note"] is None
    with memory_limit(), contextlib.suppress(CheckpointError):
        read_all(storage)


def test_a_forgery_that_changes_nothing_is_read(step):
    """The tools of these tests leave a step as good as it was."""
    forged = (
        step.copy().edit(lambda raw: None).edit_header("model", lambda table, notes: None).edit_tree(lambda tree: None)
    )
    into = target()
    with memory_limit():
        ks.load(forged.storage(), into)
        read_all(forged.storage())
    assert_same(into["model"], SAVED["model"])
    assert_same(into["note"], SAVED["note"])
    assert into["mine"].value["x"] == 5
    longer = step.copy().edit_tree(lambda tree: tree.update(lr="x" * 10_000))
    into = target()
    ks.load(longer.storage(), into)
    assert into["lr"] == "x" * 10_000


# --- the manifest ----------------------------------------------------------------------------------------------------


def _layout_of(raw: dict, key: str) -> list:
    return raw["layouts"][next(tensor for tensor in raw["tensors"] if tensor[0] == key)[2]]


def _boxes(*boxes):
    def change(raw):
        layout = _layout_of(raw, "model/w")
        layout[2:] = [[], [[0, [list(offsets), list(sizes)]] for offsets, sizes in boxes]]

    return change


def _own_layout(raw: dict, shape: list) -> None:
    """Gives one tensor a layout of its own with that shape."""
    tensor = next(tensor for tensor in raw["tensors"] if tensor[0] == "model/w")
    raw["layouts"].append([shape, *raw["layouts"][tensor[2]][1:]])
    tensor[2] = len(raw["layouts"]) - 1


def _dtype(name: str):
    def change(raw):
        next(tensor for tensor in raw["tensors"] if tensor[0] == "model/w")[1] = name

    return change


MANIFESTS = {
    **{f"shape {shape}": (lambda raw, shape=shape: _own_layout(raw, shape)) for shape in (
        [10**18], [10**9, 10**9], [2**62, 2**62], [-4, 2], [0, 2**61], [0, 2**61, 2**61], [8, 2], [4, 1], [2**40, 2], [])},
    "a region twice and one not at all": _boxes(([0, 0], [2, 2]), ([0, 0], [2, 2])),
    "a hole": _boxes(([0, 0], [2, 2]), ([3, 0], [1, 2])),
    "pieces the file does not have": _boxes(([0, 0], [2, 2]), ([2, 0], [2, 2])),
    "wider elements": _dtype("complex128"),
    "narrower elements": _dtype("uint8"),
    "others of the same size": _dtype("int32"),
    "a tensor gone": lambda raw: raw["tensors"].pop(0),
    "a tensor under another name": lambda raw: raw["tensors"][0].__setitem__(0, "model/other"),
    "a tensor twice": lambda raw: raw["tensors"].append(raw["tensors"][0]),
    "two tensors in each other's place": lambda raw: (raw["tensors"][0].__setitem__(0, "model/b"), raw["tensors"][1].__setitem__(0, "model/w")),
    "a tie to itself": at("aliases", {"model/w": "model/w"}),
    "a tie to nothing": at("aliases", {"model/x": "model/gone"}),
    "no files of the model": lambda raw: raw["files"].pop("model"),
    "no state file": lambda raw: raw["files"].pop("state"),
    "files of another rank": lambda raw: (raw.update(world_size=2), raw["files"]["state"][0].__setitem__(0, 1)),
    "a huge world": at("world_size", 1 << 20),
    "a world beyond": at("world_size", 10**18),
    "sizes of exabytes": lambda raw: raw["files"]["model"][0].__setitem__(slice(1, 3), [10**18, 10**18 - 4096]),
    "negative sizes": lambda raw: raw["files"]["model"][0].__setitem__(slice(1, 3), [-1, -1]),
    "more data than the file": lambda raw: raw["files"]["model"][0].__setitem__(2, 10**6),
    "another header digest": lambda raw: raw["files"]["model"][0].__setitem__(3, "0" * 16),
    "a huge mesh": lambda raw: raw["meshes"].append([[10**9, 10**9], 0]),
    "many layouts": lambda raw: raw.update(layouts=raw["layouts"] * 20_000, tensors=[[t[0], t[1], -1, t[3]] for t in raw["tensors"]]),
    "deep nesting": lambda raw: raw.update(extra=json.loads("[" * 400 + "]" * 400), tensors=json.loads("[" * 400 + "]" * 400)),
    "not a number": at("step", float("nan")),
    "infinity": at("metrics", {"loss": float("inf")}),
    "a save id that climbs": at("save_id", "../../0123abcd"),
}  # fmt: skip


@pytest.mark.case(162)
@pytest.mark.parametrize("name", [name for name in MANIFESTS if name != "a huge world"])
def test_forged_manifests_are_refused(step, name):
    refused(step.copy().edit(MANIFESTS[name]).storage())


def test_a_world_larger_than_it_was_is_read_or_refused_without_its_memory(step):
    with memory_limit(), contextlib.suppress(CheckpointError):
        ks.load(step.copy().edit(MANIFESTS["a huge world"]).storage(), target())


@pytest.mark.case(162)
@pytest.mark.parametrize("folder", ["../../outside", "/outside", "..", "model/../../outside", "a\\b", ".", "a/b", ""])
def test_names_that_leave_the_step_reach_nothing(step, tmp_path, folder):
    """Although a file lies exactly where the manifest points, with every byte right."""
    home = step.to(tmp_path / "runs" / "step")
    name = step.file("model")

    def change(raw):
        raw["files"][folder] = raw["files"].pop("model")
        for tensor in raw["tensors"]:
            tensor[3] = folder if tensor[3] == "model" else tensor[3]

    forged = step.copy().edit(change)
    (home / ".metadata").write_bytes(forged.blobs[".metadata"])
    for place in (tmp_path / "outside", home / "a" / "b", home / "a\\b", home):
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(home / name, place / name.split("/")[1])
    refused(home, CorruptError, match="not a folder name")


@pytest.mark.case(162)
@pytest.mark.parametrize("what", ["file", "folder", "manifest", "circle", "pipe"])
def test_links_out_of_the_step_are_not_followed(step, tmp_path, what):
    home = step.to(tmp_path / "runs" / "step")
    outside = step.to(tmp_path / "outside")
    shard = home / step.file("model")
    if what == "file":
        shard.unlink()
        shard.symlink_to(outside / step.file("model"))
    elif what == "folder":
        shutil.rmtree(shard.parent)
        shard.parent.symlink_to(outside / "model", target_is_directory=True)
    elif what == "manifest":
        (home / ".metadata").unlink()
        (home / ".metadata").symlink_to(outside / ".metadata")
    elif what == "circle":
        shard.unlink()
        shard.symlink_to(shard)
    else:
        shard.unlink()
        os.mkfifo(shard)
    refused(home)


# --- shard files -----------------------------------------------------------------------------------------------------

HEADERS = {
    "offset beyond the end": lambda table, notes: table["model/w"].update(data_offsets=[40, 10**18]),
    "negative offset": lambda table, notes: table["model/w"].update(data_offsets=[-32, 0]),
    "an overlap": lambda table, notes: table["model/w"].update(data_offsets=[0, 32]),
    "huge shape": lambda table, notes: table["model/w"].update(shape=[10**18, 2]),
    "negative shape": lambda table, notes: table["model/w"].update(shape=[-4, -2]),
    "another shape of that size": lambda table, notes: table["model/w"].update(shape=[2, 4]),
    "another dtype of that size": lambda table, notes: table["model/w"].update(dtype="I32"),
    "wider elements, fewer of them": lambda table, notes: table["model/w"].update(dtype="F64", shape=[2, 2]),
    "claims of a larger tensor": lambda table, notes: notes.update(pieces={"model/w": ["model/w", [100, 2], [96, 0]]}),
    "another place in the tensor": lambda table, notes: notes.update(pieces={"model/w": ["model/w", [8, 2], [4, 0]]}),
    "another key": lambda table, notes: notes.update(pieces={"model/w": ["model/x", [4, 2], [0, 0]]}),
    "a name that is gone": lambda table, notes: table.__setitem__("model/y", table.pop("model/w")),
    "true dtype of another size": lambda table, notes: notes.update(dtypes={"model/w": "uint8"}),
    "no digests": lambda table, notes: notes.update(digests=""),
    "other digests": lambda table, notes: notes.update(digests="AAAAAAAAAAA="),
    "tiny blocks": lambda table, notes: notes.update(block_bytes=1),
    "huge blocks": lambda table, notes: notes.update(block_bytes=1 << 60),
    "blocks of nothing": lambda table, notes: notes.update(block_bytes=0),
    "negative blocks": lambda table, notes: notes.update(block_bytes=-65536),
}


@pytest.mark.case(162)
@pytest.mark.parametrize("name", HEADERS)
def test_forged_headers_are_refused(step, name):
    refused(step.copy().edit_header("model", HEADERS[name]).storage(), CorruptError)


@pytest.mark.case(162)
@pytest.mark.parametrize("length", [0, 1, 4088, 4095, 4096, 8184, 10**6, 10**18, 2**63, 2**64 - 1])
def test_header_lengths_that_lie_are_refused(step, length):
    raw = step.blobs[step.file("model")]
    refused(
        step.copy().replace("model", length.to_bytes(8, "little") + raw[8:] + b" " * (length == 4088)).storage(),
        CorruptError,
    )


# --- plain values ----------------------------------------------------------------------------------------------------


def _ref(**changes):
    """A reference to a tensor in the place of a plain value."""
    return {"$": "tensor", "key": "model/w", "dtype": "float32", "shape": [4, 2]} | changes


def _model_ref(**changes):
    return lambda tree: tree["model"]["w"].update(changes)


TREES = {
    **{f"a tensor of shape {shape}": _model_ref(shape=shape) for shape in ([10**18], [10**6, 10**6], [2**62, 2**62], [-4, 2], [0, 2**62], [8], [2**70])},
    "a tensor that is not stored": _model_ref(key="model/gone"),
    "a tensor of another type": _model_ref(dtype="float64"),
    "a tensor of no type": _model_ref(dtype="object"),
    "a tensor of a type of torch that is none": _model_ref(dtype="load"),
    "a tensor of its own that is not": _model_ref(own=True),
    "a tensor of its own that is huge": _model_ref(own=True, shape=[10**12], dtype="uint8", key="x"),
    "a tensor of its own that is negative": _model_ref(own=True, shape=[-1, -1]),
    "a tensor of its own that is empty and huge": _model_ref(own=True, shape=[0, 2**61, 2**61]),
    "an array of another size": _model_ref(form="array", shape=[10**12]),
    "a device that is none": lambda tree: tree["note"].update(device={"$": "torch.device", "v": "os.system"}),
    "a dtype that is a function": lambda tree: tree["note"].update(dtype={"$": "torch.dtype", "v": "load"}),
    "a size of words": lambda tree: tree["note"].update(size={"$": "torch.size", "v": "1,x"}),
    "a list": lambda tree: [tree],
    "a string": lambda tree: "tree",
    "nothing": lambda tree: {"$": "tuple", "v": []},
    "an unknown tag": lambda tree: tree.update(lr={"$": "pickle", "v": "gASVKAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU"}),
    "a class": lambda tree: tree.update(lr={"$": "class", "type": "os.system", "v": "true"}),
    "a dataclass": lambda tree: tree.update(lr={"$": "dataclass", "type": "subprocess.Popen", "v": {"args": "true"}}),
    "objects of numpy": lambda tree: tree.update(lr={"$": "ndarray", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="}),
    "a value of its own that is not": lambda tree: tree.update(lr={"$": "per_rank", "key": "nowhere", "rule": "error"}, note=_ref(key="x")),
    "deep nesting": lambda tree: tree.update(lr=json.loads("[" * 900 + "]" * 900), note={"$": "x"}),
}  # fmt: skip


@pytest.mark.case(162)
@pytest.mark.parametrize("name", TREES)
def test_forged_values_are_refused(step, name):
    refused(step.copy().edit_tree(TREES[name]).storage())


def test_a_tree_that_is_no_json_is_refused(step):
    for data in (b"", b"{", b"\xff", pickle.dumps({"lr": 1}), b"[" * 100_000):
        refused(step.copy().rewrite("state", "~tree", data).storage(), CorruptError)
        refused(step.copy().rewrite("state", "~own", data).storage(), CorruptError)


# --- a piece that is gone --------------------------------------------------------------------------------------------


def save_in_quarters(rank, folder):
    mine = torch.arange(rank * 6, rank * 6 + 6, dtype=torch.float32).reshape(2, 3)
    ks.save(folder, {"model": {"w": ks.sharded(mine, global_shape=(8, 3), offsets=(2 * rank, 0))}, "lr": 0.5})


@pytest.mark.case(121)
def test_one_of_four_pieces_is_gone(rank_pool, tmp_path):
    """From the storage, from its file, or from the manifest: the load names tensor and region; nothing stale stays."""
    rank_pool(4)(save_in_quarters, str(tmp_path / "step"))
    whole = torch.arange(24, dtype=torch.float32).reshape(8, 3)
    assert torch.equal(ks.open(tmp_path / "step")["model/w"], whole)
    good = Forgery(ks.LocalStorage(tmp_path / "step"))

    def refuses(forged: Forgery, match: str) -> None:
        into = {"model": {"w": torch.full((8, 3), -1.0)}, "lr": 0.0}
        with pytest.raises(CorruptError, match=match):
            ks.load(forged.storage(), into)
        assert into["lr"] == 0.0

    without_file = good.copy()
    gone = without_file.file("model", 2)
    del without_file.blobs[gone]
    refuses(without_file, f"{gone} is missing")

    def lose_box(raw):
        _layout_of(raw, "model/w")[3].pop(2)

    def lose_record(raw):
        raw["files"]["model"].pop(2)

    refuses(
        good.copy().edit(lose_box),
        r"'model/w': the pieces cover 18 of 24 elements; have \[0:2, 0:3\], \[2:4, 0:3\], \[6:8, 0:3\]",
    )
    refuses(good.copy().edit(lose_record), "'model' hold 24 bytes less than its tensors have")
    refuses(good.copy().edit(lambda raw: (lose_box(raw), lose_record(raw))), r"'model/w': the pieces cover 18 of 24")

    def moved(table, notes):
        name = next(iter(notes["pieces"]))
        notes["pieces"][name][2] = [0, 0]

    refuses(good.copy().edit_header("model", moved, rank=2), r"does not hold 'model/w'\[4:6, 0:3\]")

    into = {"model": {"w": torch.full((8, 3), -1.0)}, "lr": 0.0}
    ks.load(good.storage(), into)
    assert torch.equal(into["model"]["w"], whole)


# --- pickles ---------------------------------------------------------------------------------------------------------


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.slow
@pytest.mark.case(158)
def test_a_pickle_in_any_place_is_never_run(step, tmp_path):
    mark = tmp_path / "mark"
    bombs = [pickle.dumps(Trap(mark), protocol) for protocol in range(6)]
    pickle.loads(bombs[2])
    assert mark.is_dir()  # it would have run
    mark.rmdir()
    torch_file = tmp_path / "torch.pt"
    torch.save(Trap(mark), torch_file)
    bombs.append(torch_file.read_bytes())
    for bomb in bombs:
        for name, data in step.blobs.items():
            for place in (0, 8, 4096, len(data) - len(bomb)):
                storage = step.storage()
                changed = data[:place] + bomb + data[place + len(bomb) :] if place >= 0 else bomb
                storage.put(name, changed)
                with pytest.raises(CheckpointError):
                    ks.load(storage, target())
            storage.put(name, bomb)
            with pytest.raises(CheckpointError):
                ks.load(storage, target())
        refused(step.copy().replace("model", bomb).storage(), CorruptError)
        refused(step.copy().rewrite("state", "~tree", bomb).storage(), CorruptError)
        beside = step.storage()
        for name in (
            "model/__0_0.distcp",
            "state/data.pkl",
            "model.pt",
            "model/rank-00001.0123abcd.safetensors",
            ".metadata.bak",
        ):
            beside.put(name, bomb)
        into = target()
        ks.load(beside, into)
        assert_same(into["model"], SAVED["model"])
    root = tmp_path / "run"
    model = torch.nn.Linear(2, 2)
    with ks.Checkpointer(root, ks.TrainState(model=model)) as ckpt:
        ckpt.restore()
        ckpt.step()
        ckpt.save()
    for path in [path for path in root.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        path.write_bytes(bombs[4])
        with (
            contextlib.suppress(CheckpointError, ks.errors.DamageWarning),
            ks.Checkpointer(root, ks.TrainState(model=model)) as ckpt,
        ):
            ckpt.restore(on_damage="raise")
        path.write_bytes(good)
    kept = {"note": bombs[4]}
    ks.save(tmp_path / "bytes", kept)
    assert ks.open(tmp_path / "bytes").values_of("note") == bombs[4]
    assert not mark.exists()


# --- anything at all -------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from([10**18, 2**62, 2**63, 2**70, -(10**18), 1 << 20]),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4),
    st.sampled_from(["..", "../../x", "model", "state", "S", "SS", "B", "O", "R", "float32", "uint8", "model/w", "~tree",
                     "tensor", "tuple", "array", "per_rank", "object", "F64", "I8"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "v", "key", "shape", "dtype", "own", "form", "kind", "type", "rule", "a"]), inner, max_size=4),
    ),
    max_leaves=6,
)  # fmt: skip


def mutate(data, raw) -> None:
    """Replaces, removes or doubles something somewhere below."""
    for _ in range(data.draw(st.integers(1, 3))):
        where, parent, key = raw, None, None
        for _ in range(data.draw(st.integers(1, 6))):
            keys = (
                list(where) if isinstance(where, dict) else list(range(len(where))) if isinstance(where, list) else []
            )
            if not keys:
                break
            parent, key = where, data.draw(st.sampled_from(keys))
            where = parent[key]
        action = data.draw(st.sampled_from(["set", "set", "set", "delete", "double"])) if parent is not None else ""
        if action == "set":
            parent[key] = data.draw(values)
        elif action == "delete":
            del parent[key]
        elif action == "double" and isinstance(parent, list):
            parent.insert(key, parent[key])


def nothing_escapes(forged: Forgery) -> None:
    storage = forged.storage()
    with memory_limit():
        for make in (target, empty_target):
            with contextlib.suppress(CheckpointError):
                ks.load(storage, make())
        with contextlib.suppress(CheckpointError):
            read_all(storage)


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=400)
@given(data=st.data())
def test_nothing_escapes_from_a_changed_manifest(step, data):
    nothing_escapes(step.copy().edit(lambda raw: mutate(data, raw)))


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=300)
@given(data=st.data())
def test_nothing_escapes_from_a_changed_header(step, data):
    folder = data.draw(st.sampled_from(["model", "state"]))
    nothing_escapes(
        step.copy().edit_header(folder, lambda table, notes: mutate(data, data.draw(st.sampled_from([table, notes]))))
    )


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=300)
@given(data=st.data())
def test_nothing_escapes_from_changed_values(step, data):
    nothing_escapes(step.copy().edit_tree(lambda tree: mutate(data, tree)))


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=200)
@given(
    name=st.integers(0, 2),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_nothing_escapes_from_changed_bytes(step, name, changes):
    forged = step.copy()
    file = sorted(forged.blobs)[name]
    raw = bytearray(forged.blobs[file])
    for place, value in changes:
        raw[place % len(raw)] = value
    forged.blobs[file] = bytes(raw)
    nothing_escapes(forged)
    if name:
        nothing_escapes(step.copy().replace(file.split("/")[0], bytes(raw)))


def test_errors_of_the_storage_are_told_as_such(step):
    """A manifest that cannot be read is not the same as none."""

    class Broken(ks.MemoryStorage):
        def open(self, name):
            raise StorageError("open", name, OSError(5, "Input/output error"))

    for call in (lambda: ks.open(Broken()), lambda: ks.load(Broken(), target())):
        with pytest.raises(StorageError, match="Input/output error"):
            call()
