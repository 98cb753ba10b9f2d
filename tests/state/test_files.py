"""Files that belong to a run: their bytes in every step, the user's disk left alone, written out again when asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import keepstep as ks
from tests.helpers.storages import Watched


def tokenizer(folder: Path) -> Path:
    (folder / "merges").mkdir(parents=True)
    (folder / "vocab.json").write_bytes(b'{"a": 0}')
    (folder / "empty").write_bytes(b"")
    (folder / "merges" / "1").write_bytes(bytes(range(256)))
    (folder / "none").mkdir()
    return folder


def tree_of(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_every_file_is_a_tensor_of_the_step(tmp_path):
    folder = tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rules.txt").write_text("one\n")
    state = ks.TrainState(files={"tokenizer": folder, "rules": tmp_path / "rules.txt"}, weight=torch.ones(2))
    ks.save(tmp_path / "step", state)
    step = ks.open(tmp_path / "step")
    held = {key: step[key] for key in step if key.startswith("files/")}
    assert {key: value.numpy().tobytes() for key, value in held.items()} == {
        "files/tokenizer/vocab.json": b'{"a": 0}',
        "files/tokenizer/empty": b"",
        "files/tokenizer/merges/~s1": bytes(range(256)),
        "files/rules/rules.txt": b"one\n",
    }
    assert {value.dtype for value in held.values()} == {torch.uint8}


def test_a_restore_touches_no_file_and_says_how_the_disk_differs(tmp_path):
    folder, single = tokenizer(tmp_path / "tokenizer"), tmp_path / "rules.txt"
    single.write_text("one\n")
    (tmp_path / "same.txt").write_text("same\n")
    paths = {"tokenizer": folder, "rules": single, "same": tmp_path / "same.txt"}
    ks.save(tmp_path / "step", ks.TrainState(files=paths))
    (folder / "vocab.json").write_bytes(b'{"a": 1}')
    (folder / "empty").unlink()
    (folder / "more").write_text("more")
    before = tree_of(folder)
    state = ks.TrainState(files={**paths, "new": tmp_path / "same.txt"})
    single.unlink()
    report = ks.load(tmp_path / "step", into=state)
    assert report.components["files"].noted == [
        "tokenizer: differs on the disk (vocab.json changed, empty absent, more new)",
        "rules: absent from the disk",
        "same: the same on the disk",
        "new: attached now, not in the step",
    ]
    assert "    rules: absent from the disk" in str(report).splitlines()
    assert tree_of(folder) == before
    assert not single.exists()


def test_files_may_come_and_go_between_two_starts(tmp_path):
    (tmp_path / "a").write_text("a")
    ks.save(tmp_path / "with", ks.TrainState(files={"a": tmp_path / "a"}, count=1))
    ks.save(tmp_path / "without", ks.TrainState(count=2))
    state = ks.TrainState(count=0)
    report = ks.load(tmp_path / "with", into=state)
    assert (state["count"], report.components["files"].noted) == (1, ["in the step, none attached now"])
    state = ks.TrainState(files={"a": tmp_path / "a"}, count=0)
    report = ks.load(tmp_path / "without", into=state)
    assert (state["count"], report.components["files"].noted) == (2, ["attached now, none in the step"])


def test_what_the_step_holds_is_written_into_a_new_folder(tmp_path):
    folder = tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rules.txt").write_text("one\n")
    paths = {"tokenizer": folder, "rules": tmp_path / "rules.txt"}
    ks.save(tmp_path / "step", ks.TrainState(files=paths))
    was = tree_of(folder)
    (folder / "vocab.json").write_bytes(b"other")
    state = ks.TrainState(files=paths)
    with pytest.raises(ks.errors.UsageError, match="no files 'tokenizer' to write: the restored step holds none"):
        state.files.write("tokenizer", to=tmp_path / "out")
    ks.load(tmp_path / "step", into=state)
    assert state.files.write("tokenizer", to=tmp_path / "out") == tmp_path / "out"
    assert tree_of(tmp_path / "out") == was
    state.files.write("rules", to=tmp_path / "rules")
    assert tree_of(tmp_path / "rules") == {"rules.txt": b"one\n"}

    with pytest.raises(ks.errors.UsageError, match="the restored step holds 'tokenizer', 'rules'"):
        state.files.write("vocab", to=tmp_path / "other")
    for taken in (tmp_path / "out", tmp_path / "rules.txt"):
        with pytest.raises(ks.errors.UsageError, match="nothing was overwritten"):
            state.files.write("rules", to=taken)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ks.errors.UsageError, match="exists"):
        state.files.write("rules", to=tmp_path / "gone")
    with pytest.raises(ks.errors.StorageError, match="No such file"):
        state.files.write("rules", to=tmp_path / "no" / "folder")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../b", "/etc/x", "a\0b", 7])
def test_no_saved_path_leads_out_of_the_folder(name, tmp_path):
    data = torch.tensor([1], dtype=torch.uint8)
    ks.save(tmp_path / "step", {"files": Twin({"a": {"inside": {"fine": data, name: data}}})})
    (tmp_path / "a").write_text("a")
    state = ks.TrainState(files={"a": tmp_path / "a"})
    ks.load(tmp_path / "step", into=state, only=["files"])
    before = tree_of(tmp_path)
    with pytest.raises(ks.errors.CorruptError, match="is no name of a file; nothing was written"):
        state.files.write("a", to=tmp_path / "out")
    assert tree_of(tmp_path) == before


class Twin:
    """Saves what it is given in the place of attached files."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_everything_that_cannot_be_attached_is_listed_at_once(tmp_path):
    folder = tokenizer(tmp_path / "tokenizer")
    (folder / "loop").symlink_to(folder)
    (tmp_path / "hanging").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    paths = {"tokenizer": folder, "a": tmp_path / "a", "hanging": tmp_path / "hanging", "pipe": tmp_path / "pipe"}
    with pytest.raises(ks.errors.UsageError) as caught:
        ks.TrainState(files=paths)
    assert [line.strip().removeprefix(str(tmp_path)) for line in str(caught.value).splitlines()[1:]] == [
        "/tokenizer/loop: a link to a folder that it lies in",
        "/a: not there",
        "/hanging: a link to nothing",
        "/pipe: neither a file nor a folder",
    ]
    with pytest.raises(ks.errors.UsageError, match="'': not a name"):
        ks.TrainState(files={"": folder})
    with pytest.raises(ks.errors.UsageError, match="no files are attached"):
        _ = ks.TrainState().files


def test_files_that_are_too_large_for_every_step_are_refused(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "folder").mkdir()
    for name in ("a", "b", "c"):
        with (tmp_path / "blobs" / name).open("wb") as file:
            file.truncate((1 << 30) + 1 if name != "a" else 5)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "blobs")
    with pytest.raises(ks.errors.UsageError) as caught:
        ks.TrainState(files={"large": tmp_path / "folder"})
    (line,) = str(caught.value).splitlines()[1:]
    assert line.endswith("link/b: with it more than 1,073,741,824 bytes, which every step would hold")


def test_links_are_followed_and_what_they_lead_to_is_stored(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    tokenizer(blobs)
    folder.mkdir()
    (folder / "vocab.json").symlink_to("../blobs/vocab.json")
    (folder / "merges").symlink_to(blobs / "merges")
    state = ks.TrainState(files={"tokenizer": folder})
    ks.save(tmp_path / "step", state)
    ks.load(tmp_path / "step", into=state)
    out = state.files.write("tokenizer", to=tmp_path / "out")
    assert tree_of(out) == {"vocab.json": b'{"a": 0}', "merges": None, "merges/1": bytes(range(256))}
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_a_file_is_read_again_only_when_it_was_written(tmp_path, monkeypatch):
    folder = tokenizer(tmp_path / "tokenizer")
    state = ks.TrainState(files={"tokenizer": folder})
    read = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))
    with ks.Checkpointer(tmp_path / "run", state, background="off") as checkpointer:
        for content in (None, b'{"a": 2}', None):
            if content is not None:
                (folder / "vocab.json").write_bytes(content)
                os.utime(folder / "vocab.json", ns=(1, 1))
            read.clear()
            checkpointer.step()
            checkpointer.save()
            assert read == ([] if content is None else ["vocab.json"])
    for step, content in ((1, b'{"a": 0}'), (2, b'{"a": 2}'), (3, b'{"a": 2}')):
        held = ks.open(tmp_path / "run" / f"step-{step:08d}")["files/tokenizer/vocab.json"]
        assert held.numpy().tobytes() == content


def test_files_that_have_gone_since_keep_their_content(tmp_path):
    (tmp_path / "rules.txt").write_text("one\n")
    state = ks.TrainState(files={"rules": tmp_path / "rules.txt"})
    (tmp_path / "rules.txt").unlink()
    ks.save(tmp_path / "step", state)
    assert ks.open(tmp_path / "step")["files/rules/rules.txt"].numpy().tobytes() == b"one\n"


def test_a_file_that_is_damaged_in_the_step_is_noticed(tmp_path):
    (tmp_path / "rules.txt").write_text("one\n" * 100)
    ks.save(tmp_path / "step", ks.TrainState(files={"rules": tmp_path / "rules.txt"}))
    (stored,) = (tmp_path / "step" / "files").glob("*.safetensors")
    raw = bytearray(stored.read_bytes())
    raw[-1] ^= 1
    stored.write_bytes(raw)
    with pytest.raises(ks.errors.CorruptError):
        ks.load(tmp_path / "step", into=ks.TrainState(files={"rules": tmp_path / "rules.txt"}))


def attach(rank, folder, path, own):
    """Saves a state with attached files, the rank's own ones or those of all; what this rank has written."""
    storage = Watched(ks.LocalStorage(path))
    state = ks.TrainState(files={"rules": Path(folder) / (f"rules-{rank}" if own else "rules")})
    try:
        ks.save(storage, state)
    except ks.errors.MismatchError as err:
        return str(err)
    report = ks.load(storage, into=state)
    return storage.written_bytes, report.components["files"].noted


def test_ranks_write_a_file_once_and_must_have_the_same_one(rank_pool, tmp_path):
    (tmp_path / "rules").write_bytes(os.urandom(1 << 20))
    ended = rank_pool(2)(attach, str(tmp_path), str(tmp_path / "step"), False)
    assert sum(written for written, _ in ended) < 1.2 * (1 << 20)
    assert {notes[0] for _, notes in ended} == {"rules: the same on the disk"}
    for rank in range(2):
        (tmp_path / f"rules-{rank}").mkdir()
        (tmp_path / f"rules-{rank}" / "a").write_text(f"of rank {rank}")
    for message in rank_pool(2)(attach, str(tmp_path), str(tmp_path / "other"), True):
        assert "files/rules/a" in message
