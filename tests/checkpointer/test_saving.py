"""ks.save: what may be saved where, what is refused before a byte is written, and what a failure leaves."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import keepstep as ks
from tests.helpers.same import assert_same
from tests.helpers.storages import Watched, failing


def files(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.case(112)
def test_a_save_says_what_it_did_and_how_long_each_part_took(tmp_path):
    state = {"t": [torch.zeros(1000)], "note": "x"}
    saved = ks.save(tmp_path / "s", state, step=7)
    assert (saved.url, saved.step) == (str(tmp_path / "s"), 7)
    assert {"capture", "plan", "copy", "write", "commit"} <= set(saved.seconds)
    assert all(seconds >= 0 for seconds in saved.seconds.values())
    on_disk = sum((tmp_path / "s" / name).stat().st_size for name in files(tmp_path / "s") if name != ".metadata")
    assert saved.total_bytes == saved.bytes_written == on_disk


def test_the_step_of_a_train_state_is_its_progress(tmp_path):
    state = ks.TrainState(x=1)
    state.progress.step = 42
    state.progress.samples = 7
    assert ks.save(tmp_path / "a", state).step == 42
    assert ks.save(tmp_path / "b", state, step=3).step == 3
    fresh = ks.TrainState(x=0)
    assert ks.load(tmp_path / "a", fresh).step == 42
    assert (fresh.progress.step, fresh.progress.samples) == (42, 7)
    with pytest.raises(ks.errors.UsageError, match="step -1 is negative"):
        ks.save(tmp_path / "c", state, step=-1)


@pytest.mark.case(87)
def test_a_committed_step_is_not_replaced_unless_asked(tmp_path):
    ks.save(tmp_path / "s", {"x": 1}, step=5)
    before = {name: (tmp_path / "s" / name).read_bytes() for name in files(tmp_path / "s")}
    with pytest.raises(ks.errors.StepExistsError) as caught:
        ks.save(tmp_path / "s", {"x": 2}, step=5)
    assert str(tmp_path / "s") in str(caught.value)
    assert isinstance(caught.value, FileExistsError)
    assert before == {name: (tmp_path / "s" / name).read_bytes() for name in files(tmp_path / "s")}
    ks.save(tmp_path / "s", {"x": 2}, step=6, overwrite=True)
    target = {"x": 0}
    assert ks.load(tmp_path / "s", target).step == 6
    assert target == {"x": 2}
    assert len(files(tmp_path / "s")) == len(before)


COMPONENTS = [f"part{i}" for i in range(7)]


@pytest.mark.case(76)
@pytest.mark.parametrize("operation", ["create", "write", "commit"])
@pytest.mark.parametrize("nth", [1, 5, 8])
def test_a_save_that_fails_while_replacing_leaves_the_old_step_whole(operation, nth, tmp_path):
    def state(value):
        return {name: [torch.full((2000,), value)] for name in COMPONENTS}

    ks.save(tmp_path / "last", state(1.0), step=1)
    before = files(tmp_path / "last")
    assert len(before) == 9
    storage = Watched(tmp_path / "last", failing(operation, nth, name="rank-"))
    with pytest.raises(ks.errors.StorageError) as caught:
        ks.save(storage, state(2.0), step=2, overwrite=True)
    assert caught.value.errno == errno.ENOSPC
    target = state(0.0)
    assert ks.load(tmp_path / "last", target).step == 1
    assert_same(target, state(1.0))
    # What the attempt left goes with the next save.
    ks.save(tmp_path / "last", state(3.0), step=3, overwrite=True)
    assert len(files(tmp_path / "last")) == 9
    assert not files(tmp_path / "last") & before - {".metadata"}
    assert ks.load(tmp_path / "last", target).step == 3


@pytest.mark.case(79)
@pytest.mark.parametrize(("operation", "name"), [("put_new", ".metadata"), ("write", "state"), ("commit", "state")])
def test_a_save_that_fails_leaves_no_step(operation, name, tmp_path):
    storage = Watched(tmp_path / "s", failing(operation, name=name))
    with pytest.raises(ks.errors.StorageError, match=f"{operation} of .* failed: as the test wants it"):
        ks.save(storage, {"x": 1})
    with pytest.raises(ks.errors.StepNotFoundError):
        ks.load(tmp_path / "s", {"x": 0})
    ks.save(storage, {"x": 1})
    target = {"x": 0}
    ks.load(tmp_path / "s", target)
    assert target == {"x": 1}


@dataclasses.dataclass
class NotRegistered:
    x: int


class Anything:
    pass


@pytest.mark.case(168)
def test_everything_that_cannot_be_stored_is_listed_and_nothing_is_written(tmp_path):
    loop: list = [1]
    loop.append(loop)
    with socket.socket() as connection:
        state = {
            "good": 1,
            "thing": Anything(),
            "deep": {"list": [0, lambda: 1], 7: {"f": NotRegistered(1)}},
            "loop": loop,
            "code": print,
            "socket": [connection],
            "class": dict,
        }
        with pytest.raises(ks.errors.UnsafeValueError) as caught:
            ks.save(tmp_path / "s", state)
    text = str(caught.value)
    for place in ("thing: ", "deep/list/1: ", "deep/7/f: ", "loop/1: ", "code: ", "socket/0: ", "class: "):
        assert place in text, place
    assert "Anything" in text
    assert "NotRegistered (register its class with ks.register)" in text
    assert "a list that contains itself" in text
    assert len(caught.value.refused) == 7
    assert isinstance(caught.value, TypeError)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("state", [None, [1], 5, {1: 2}, {"": 1}, torch.zeros(2), "text"])
def test_a_state_is_a_mapping_with_names(state, tmp_path):
    with pytest.raises(ks.errors.UsageError, match="a state is a TrainState or a dict with non-empty string keys, not"):
        ks.save(tmp_path / "s", state)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("place", "text"), [("", "'' is not a path; pass a path, a URL or a Storage"), ("nonsense://x", "nonsense://x")]
)
def test_a_place_is_a_path_a_url_or_a_storage(place, text):
    with pytest.raises(ks.errors.UsageError, match=text):
        ks.save(place, {"x": 1})


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "s").write_text("mine")
    for call in (lambda: ks.save(tmp_path / "s", {"x": 1}), lambda: ks.load(tmp_path / "s", {"x": 1})):
        with pytest.raises(ks.errors.UsageError, match="is a file, not a folder"):
            call()
    assert (tmp_path / "s").read_text() == "mine"
    with pytest.raises(ks.errors.StorageError) as caught:
        ks.save(tmp_path / "s" / "below", {"x": 1})
    assert caught.value.errno == errno.ENOTDIR


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "s").mkdir(mode=0o500)
    with pytest.raises(ks.errors.StorageError) as caught:
        ks.save(tmp_path / "s", {"x": 1})
    assert caught.value.errno == errno.EACCES


def test_names_that_a_train_state_keeps_for_itself():
    with pytest.raises(ks.errors.UsageError, match="rng, progress: part of every TrainState"):
        ks.TrainState(rng=1, progress=2)
    assert list(ks.TrainState(model=None, x=1)) == ["x", "rng", "progress"]
    with pytest.raises(
        ks.errors.UsageError, match="on_world_change='sometimes'; it is one of 'error', 'same_rank', 'derive'"
    ):
        ks.per_rank(1, on_world_change="sometimes")
    with pytest.raises(ks.errors.UsageError, match=r"Anything is no dataclass or Enum and has no to_state/from_state"):
        ks.register(Anything)


KEYS = [
    "a/b", "a.b", "..", ".", "", " x", "x ", "ü/☃", "x" * 300, "con", "x%2Fy", "~", "~0", "~1", "~e", "a~1b", "$",
    "a\\b", "a\nb", "a\0b", "*", "-1", "1.0", "None", "True", "/etc/passwd", "../../x", "C:\\x", "__metadata__",
    "weight[0:1]", 1, "1", -1, 0, "0", True and 2, None, 1.5, (1, 2), "(1, 2)", b"x", "x",
]  # fmt: skip


@pytest.mark.case(129)
@pytest.mark.parametrize("tensors", [False, True])
def test_any_key_comes_back_and_none_is_a_path(tensors, tmp_path):
    def value(i):
        return torch.full((2,), float(i)) if tensors else i

    nested = {key: value(i) for i, key in enumerate(KEYS)}
    nested["a"] = {"b": value(900), "b/c": value(901)}
    tops = [key for key in KEYS if isinstance(key, str) and key not in ("", "__metadata__")]
    state = {"all": nested, **{key: {"t": value(1000 + i), key: value(2000 + i)} for i, key in enumerate(tops)}}
    root = tmp_path / "inner" / "s"
    ks.save(root, state)
    target = {key: {} for key in state}
    ks.load(root, target)
    assert_same(target, state)
    outside = files(tmp_path) - {f"inner/s/{name}" for name in files(root)}
    assert not outside
    assert all(len(part) < 100 for name in files(root) for part in Path(name).parts)
    if tensors:
        opened = ks.open(root)
        assert len(set(opened)) == len(opened) == len(nested) + 1 + 2 * len(tops)


@pytest.mark.case(36)
def test_folder_manifest_and_record_name_the_same_step(tmp_path):
    state = ks.TrainState(x=1)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=10)) as ckpt:
        done = [ckpt.step(loss=0.5) for _ in range(13)]
    assert [saved.step for saved in done if saved] == [10]
    hint = json.loads((tmp_path / "latest").read_text())
    manifest = json.loads((tmp_path / "step-00000010" / ".metadata").read_text())
    assert (hint["step"], hint["path"], manifest["step"]) == (10, "step-00000010", 10)
    assert hint["incarnation"] == manifest["lineage"]["incarnation"] == 1
    assert manifest["metrics"] == {"loss": 0.5}
    fresh = ks.TrainState(x=0)
    with ks.Checkpointer(tmp_path, fresh) as ckpt:
        assert ckpt.restore().step == 10
    assert fresh.progress.step == 10


def test_a_save_in_memory(tmp_path):
    storage = ks.MemoryStorage("here")
    model = nn.Linear(3, 3)
    saved = ks.save(storage, {"model": model})
    assert saved.url == "memory://here"
    fresh = nn.Linear(3, 3)
    assert ks.load(storage, {"model": fresh}).url == "memory://here"
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    with pytest.raises(ks.errors.StepExistsError):
        ks.save(storage, {"model": model})
    assert not list(tmp_path.iterdir())


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.case(97)
@pytest.mark.case(98)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ["save", "checkpointer"])
def test_twenty_saves_do_not_need_more_memory_than_three(how, tmp_path):
    tensor = torch.ones(50_000_000 // 4)
    state = ks.TrainState(t=[tensor])
    sizes = []
    with ks.Checkpointer(tmp_path / "run", state, keep=ks.Keep(last=1)) as ckpt:
        for step in range(20):
            tensor += 1
            if how == "save":
                ks.save(tmp_path / "s", state, step=step, overwrite=True)
            else:
                ckpt.step()
                ckpt.save()
            gc.collect()
            sizes.append(resident_bytes())
    assert sizes[-1] - sizes[2] < 20_000_000, [size // 1_000_000 for size in sizes]


@pytest.mark.case(57)
def test_what_changes_after_the_call_is_not_in_the_step(tmp_path):
    model = torch.nn.Linear(64, 64)
    history = {"losses": [1.0], "best": {"step": 3}}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ks.save(tmp_path / "step", {"model": model, "history": history})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    history["losses"].append(2.0)
    history["best"]["step"] = 4
    with ks.open(tmp_path / "step") as saved:
        assert all(torch.equal(saved[f"model/{name}"], value) for name, value in before.items())
        assert saved.values_of("history") == {"losses": [1.0], "best": {"step": 3}}
