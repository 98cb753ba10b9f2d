"""Stream extensions of torch's under ``Writer`` and ``Reader``: what they make is a step, with digests and a commit."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.cli.main import app
from keepstep.errors import MismatchError, UnsafeFileError
from keepstep.interop.dcp import Reader, Writer, named
from keepstep.move import reader
from keepstep.storage.local import storage_of
from tests.helpers.same import assert_same
from tests.interop import dcp_checks as checks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    # torch's own writer leaves its wrapper to be closed after what is inside; Python 3.13 tells of it.
    pytest.mark.filterwarnings("ignore:.*NoCloseWriter.*:pytest.PytestUnraisableExceptionWarning"),
]


class Own(StreamTransformExtension):
    """An extension that makes all of its output when it is closed, and closes what it writes to."""

    @classmethod
    def from_descriptor(cls, version: str) -> Own:  # type: ignore[override]
        assert version == "1"
        return cls()

    @classmethod
    def registry_name(cls) -> str:  # type: ignore[override]
        return f"test.{cls.__name__.lower()}"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def make(self, data: bytes) -> bytes:
        raise NotImplementedError

    def undo(self, data: bytes) -> bytes:
        raise NotImplementedError

    def transform_to(self, output: Any) -> Any:
        make = self.make

        class Out(io.RawIOBase):
            def __init__(self) -> None:
                self.kept = bytearray()

            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                self.kept += data
                return len(data)

            def close(self) -> None:
                if not self.closed:
                    super().close()
                    output.write(make(bytes(self.kept)))
                    output.close()

        return Out()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(self.undo(input.read(-1)))


class Turned(Own):
    """Every byte the other way round: as good as encrypted."""

    def make(self, data: bytes) -> bytes:
        return bytes(255 - byte for byte in data)

    undo = make


class Smaller(Own):
    """Compressed. It does not commute with the other one."""

    def make(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def undo(self, data: bytes) -> bytes:
        return zlib.decompress(data)


class Broken(Own):
    """Fails."""

    def make(self, data: bytes) -> bytes:
        raise KeyError("no key")


class Longer(Own):
    """Gives back other bytes than it was given."""

    def make(self, data: bytes) -> bytes:
        return data

    def undo(self, data: bytes) -> bytes:
        return data + b"!"


def registry(*extensions: type[Own]) -> Any:
    found = ExtensionRegistry()
    for each in extensions or (Turned, Smaller, Longer):
        found.register(each)
    return found


def save(path: Path | str, state: dict[str, Any], *extensions: Own, **options: Any) -> None:
    writer = Writer(path, _extensions=list(extensions))
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized(), **options)


def load(path: Path | str, state: dict[str, Any], *known: type[Own], **options: Any) -> dict[str, Any]:
    ours = Reader(path, _extension_registry=registry(*known), **options)
    dcp.load(state, storage_reader=ours, no_dist=not dist.is_initialized())
    return state


def emptied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: emptied(item) for key, item in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_everything_comes_back_and_is_a_step_like_others(tmp_path, where):
    path = tmp_path / "step-7" if where == "disk" else f"memory://{tmp_path.name}/step-7"
    state = {
        "model": {**checks.every_dtype(), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)},
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "values": {"lr": 0.1, "text": "secret words", "pair": (1, None), "list": [1, {"x": torch.ones(2)}]},
    }
    save(path, state, Turned())
    storage = storage_of(path)
    *_, verified = verify(storage)
    assert verified.ok, verified.problems
    assert not verified.strays
    assert ks.open(path).manifest.step == 7
    if where == "disk":
        kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert b"secret words" not in kept
        assert torch.arange(6.0).numpy().tobytes() not in kept
    target = emptied({**state, "values": {**state["values"], "list": [None, {"x": torch.zeros(2)}]}})
    target["values"]["list"] = [None, {"x": torch.zeros(2)}]
    assert_same(load(path, target), state)


def test_show_tells_what_it_went_through_and_not_what_is_noted_for_torch(tmp_path):
    save(tmp_path / "s", {"w": torch.arange(6.0)}, Turned())
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "s")])
    assert shown.exit_code == 0
    assert "through test.turned/1" in shown.output
    assert "config" not in shown.output


def test_the_last_extension_is_undone_last(tmp_path):
    """torch undoes two of them in the wrong order: what it has written through both, it cannot read."""
    state = {"w": torch.arange(600.0), "v": "text"}
    both = (Smaller(), Turned())
    theirs = checks.write(tmp_path / "torchs", state, _extensions=list(both))
    with pytest.raises(CheckpointException):
        dcp.load(
            emptied(state),
            storage_reader=dcp.FileSystemReader(theirs, _extension_registry=registry()),
            no_dist=True,
        )
    save(tmp_path / "ours", state, *both)
    assert_same(load(tmp_path / "ours", emptied(state)), state)
    with ks.open(tmp_path / "ours") as step:
        (key,) = (spec.key for spec in step.manifest.tensors if "/w/" in spec.key)
        assert step[key].numel() < 2400


def test_without_the_extension_nothing_is_read_and_that_is_told(tmp_path):
    state = {"w": torch.arange(6.0), "v": [1, "two"]}
    save(tmp_path / "s", state, Turned())
    with pytest.raises(CheckpointException, match=r"w\[0:6\]: written through test\.turned/1"):
        load(tmp_path / "s", emptied(state), Smaller)
    with pytest.raises(MismatchError, match=r"through test\.turned/1"):
        ks.load(tmp_path / "s", into={"w": torch.zeros(6), "v": None})
    with pytest.raises(CheckpointException, match=r"w: saved as torch\.float32"):
        load(tmp_path / "s", {"w": torch.zeros(6, dtype=torch.float64), "v": None})
    wide = load(tmp_path / "s", {"w": torch.zeros(6, dtype=torch.float64), "v": None}, cast=True)
    assert wide["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_an_extension_that_fails_leaves_what_was_there(tmp_path):
    state = {"w": torch.arange(6.0)}
    save(tmp_path / "s", state, Turned())
    with pytest.raises(CheckpointException, match=r"w\[0:6\]: through test\.broken/1: KeyError.*nothing was committed"):
        save(tmp_path / "s", {"w": torch.zeros(6)}, Broken())
    assert_same(load(tmp_path / "s", emptied(state)), state)
    save(tmp_path / "long", state, Longer())
    with pytest.raises(CheckpointException, match=r"w\[0:6\]: extensions gave back 25 bytes of 24"):
        load(tmp_path / "long", emptied(state))


def test_a_spoilt_byte_is_found_before_an_extension_sees_it(tmp_path):
    state = {"w": torch.arange(600.0)}
    save(tmp_path / "s", state, Turned())
    (file,) = (tmp_path / "s" / "tensors").iterdir()
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointException, match="does not match its digest"):
        load(tmp_path / "s", emptied(state))


def test_many_entries_are_read_together(tmp_path, monkeypatch):
    """Each by itself would open the file and read its header again for every tensor and every value."""
    state = {**{f"w{number}": torch.full((3,), float(number)) for number in range(40)}, **dict.fromkeys("abcdef", 1)}
    save(tmp_path / "s", state, Smaller())
    opened: list[str] = []
    opens = reader.open_shard
    monkeypatch.setattr(reader, "open_shard", lambda *args: opened.append(args[2]) or opens(*args))
    assert_same(load(tmp_path / "s", emptied(state)), state)
    assert opened.count("tensors") == 2  # for the tensors, and for the values
    monkeypatch.setattr(named, "TOGETHER_BYTES", 300)
    assert_same(load(tmp_path / "s", emptied(state)), state)
    assert opened.count("tensors") > 4


def test_what_torch_wrote_through_an_extension_is_read(tmp_path):
    state = {"w": torch.arange(6.0), "v": {"x": [1, "two"]}}
    checks.write(tmp_path / "d", state, _extensions=[Turned()])
    target = load(tmp_path / "d", {"w": torch.zeros(6), "v": {"x": None}})
    assert_same(target, state)
    with pytest.raises(UnsafeFileError, match=r"test\.turned"):
        ks.load(tmp_path / "d", into=target)


def test_values_that_could_not_be_read_again_are_refused(tmp_path):
    with pytest.raises(CheckpointException, match=r"a: builtins\.object"):
        save(tmp_path / "s", {"w": torch.ones(2), "a": object()}, Turned())
    assert not (tmp_path / "s" / ".metadata").exists()


class Pickled(dcp.DefaultSavePlanner):
    """Makes a pickle of each value, as a planner may."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(pickle.dumps(object))


class Unpickled(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = pickle.loads(value.read())


@pytest.mark.parametrize("extensions", [(), (Turned(),)], ids=["plain", "through"])
def test_bytes_of_a_planner_go_to_no_planner_that_unpickles_what_it_is_given(tmp_path, extensions):
    """A pickle runs what it likes; torch's own planner would let it."""
    state = {"w": torch.ones(2), "v": {1}}
    save(tmp_path / "s", state, *extensions, planner=Pickled(flatten_state_dict=False))
    with pytest.raises(CheckpointException, match="v: bytes that another planner has made"):
        load(tmp_path / "s", {"w": torch.zeros(2), "v": None})
    target = {"w": torch.zeros(2), "v": None}
    ours = Reader(tmp_path / "s", _extension_registry=registry())
    dcp.load(target, storage_reader=ours, planner=Unpickled(flatten_state_dict=False), no_dist=True)
    assert_same(target, state)


def _save_sharded(rank: int, path: str) -> None:
    save(path, {"t": checks.sharded(), "lr": 0.5}, Smaller(), Turned())
    alone = f"{path}-alone"
    writer = Writer(alone, _extensions=[Turned()])
    dcp.save({"t": checks.sharded()}, storage_writer=writer, use_collectives=False)
    ours = Reader(alone, _extension_registry=registry())
    found = checks.sharded(empty=True)
    dcp.load({"t": found}, storage_reader=ours)
    _assert_sharded(found)


def _load_sharded(rank: int, path: str) -> None:
    found = {"t": checks.sharded(empty=True, turned=True), "lr": None}
    load(path, found)
    assert found["lr"] == 0.5
    _assert_sharded(found["t"])


def _assert_sharded(found: dict[str, Any]) -> None:
    expected = checks.whole_tensors()
    assert_same(
        {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()}, expected
    )


@pytest.mark.ranks
def test_other_ranks_read_any_part_of_it(tmp_path, rank_pool):
    rank_pool(3)(_save_sharded, str(tmp_path / "s"))
    *_, verified = verify(storage_of(tmp_path / "s"))
    assert verified.ok, verified.problems
    rank_pool(2)(_load_sharded, str(tmp_path / "s"))
    assert_same(
        load(tmp_path / "s", {"t": {name: torch.zeros_like(v) for name, v in checks.whole_tensors().items()}, "lr": 0}),
        {"t": checks.whole_tensors(), "lr": 0.5},
    )
