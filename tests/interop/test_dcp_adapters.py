"""``Writer``, ``Reader`` and ``Stager`` in the place of torch's: what torch's do with files, on one process and on many."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import keepstep as ks
from keepstep.check.verify import verify
from keepstep.cli.main import app
from keepstep.errors import UsageError
from keepstep.interop.dcp import Reader, Stager, Writer
from keepstep.storage.local import storage_of
from tests.helpers.same import assert_same
from tests.interop import dcp_checks as checks

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def save(path: Path | str, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path), no_dist=not dist.is_initialized(), **options)


def load(path: Path | str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=Reader(path), no_dist=not dist.is_initialized(), **options)
    return state


def empty(state: Any) -> Any:
    """The same state with nothing in it."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: empty(item) for key, item in state.items()}
    return [empty(item) for item in state] if type(state) is list else None


def check_sound(path: Path | str) -> None:
    *_, verified = verify(storage_of(path))
    assert verified.ok, verified.problems
    assert not verified.strays


def test_every_dtype_and_value_goes_there_and_back(tmp_path):
    state = {
        "all": checks.every_dtype(),
        "values": checks.plain_values(),
        "list": [torch.ones(2), {"deep": torch.zeros(1), "text": "x"}],
        "bare": torch.arange(3.0),
        "pair": (torch.ones(2), 5),
        "nothing": torch.zeros(0, 4),
    }
    path = tmp_path / "step-00000012"
    save(path, state)
    assert_same(load(path, empty(state)), state)
    check_sound(path)
    with ks.open(path) as step:
        assert step.step == 12
        for name, value in state["all"].items():
            assert_same(step[f"all/{name}"], value, name)
        for name in ("values", "list", "bare", "pair"):
            assert_same(step.values_of(name), state[name])
    target = empty({"all": state["all"], "bare": state["bare"]})
    ks.load(path, into=target, only=["all", "bare"])
    assert_same(target, {"all": state["all"], "bare": state["bare"]})


def test_a_model_and_its_optimizer_go_on(tmp_path):
    model, optimizer = checks.small_model()
    weights, moments = get_state_dict(model, optimizer)
    save(tmp_path / "s", {"model": weights, "optimizer": moments})
    other, moved = checks.small_model(seed=1)
    there = dict(zip(("model", "optimizer"), get_state_dict(other, moved), strict=True))
    load(tmp_path / "s", there)
    set_state_dict(other, moved, model_state_dict=there["model"], optim_state_dict=there["optimizer"])
    third, last = checks.small_model(seed=2)
    ks.load(tmp_path / "s", into={"model": third, "optimizer": last})
    for made, moving in ((other, moved), (third, last)):
        assert_same(dict(made.state_dict()), dict(model.state_dict()))
        for mine, theirs in zip(made.parameters(), model.parameters(), strict=True):
            assert_same(moving.state[mine], optimizer.state[theirs])


@pytest.mark.parametrize("flat", [True, False])
def test_steps_of_keepstep_and_directories_of_torch_are_read(tmp_path, flat):
    state = {"w": {"a": torch.randn(3, 4), "b": torch.ones(2).bfloat16()}, "lr": 0.1, "pair": (torch.ones(1), "x")}
    ks.save(tmp_path / "keepstep", {**state, "mine": ks.per_rank(1)})
    checks.write(tmp_path / "torch", state)
    for name in ("keepstep", "torch"):
        if flat:
            assert_same(load(tmp_path / name, empty(state)), state)
        else:
            target = {"w.a": torch.zeros(3, 4)}
            load(tmp_path / name, target, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
            assert_same(target, {"w.a": state["w"]["a"]})


def test_the_place_may_be_named_by_the_call_and_one_writer_saves_often(tmp_path):
    writer, reader = Writer(), Reader()
    for number in (1, 2):
        path = tmp_path / f"step-{number}"
        dcp.save({"w": torch.full((2,), float(number))}, checkpoint_id=path, storage_writer=writer, no_dist=True)
        target = {"w": torch.zeros(2)}
        dcp.load(target, checkpoint_id=path, storage_reader=reader, no_dist=True)
        assert target["w"][0] == number
        assert ks.open(path).step == number


def test_a_committed_step_is_replaced_whole_or_refused(tmp_path):
    """As with torch's own writer, whose tuning is taken and means nothing."""
    save(tmp_path / "s", {"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="is already committed"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path / "s", overwrite=False), no_dist=True)
    assert torch.equal(ks.open(tmp_path / "s")["w"], torch.ones(2))
    dcp.save({"v": torch.zeros(2)}, storage_writer=Writer(path=tmp_path / "s", thread_count=2), no_dist=True)
    assert list(ks.open(tmp_path / "s")) == ["v"]
    check_sound(tmp_path / "s")
    with pytest.raises(UsageError, match="compression"):
        Writer(tmp_path / "s", compression="zstd")


def test_values_that_cannot_be_stored_are_refused_by_name(tmp_path):
    state = {"w": torch.ones(2), "a": object(), "b": {"c": (1, lambda: None)}}
    with pytest.raises(CheckpointException, match=r"a: builtins\.object"):
        save(tmp_path / "s", state)
    assert not (tmp_path / "s" / ".metadata").exists()


def test_a_conversion_of_dtypes_is_asked_for(tmp_path):
    save(tmp_path / "s", {"a": torch.tensor([1.5, 2.25]), "b": torch.ones(2)})
    target = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(CheckpointException, match=r"(?s)a: saved as torch\.float32.*b: saved as torch\.float32"):
        load(tmp_path / "s", target)
    assert not target["a"].any()
    dcp.load(target, storage_reader=Reader(tmp_path / "s", cast=True), no_dist=True)
    assert target["a"].tolist() == [1.5, 2.25]


def test_keys_that_nobody_asks_for_are_told(tmp_path, caplog):
    save(tmp_path / "s", {"w": {"a": torch.ones(2), "b": torch.ones(2)}, "lr": 0.1})
    with caplog.at_level(logging.WARNING, "keepstep"):
        load(tmp_path / "s", {"w": {"a": torch.zeros(2)}})
    assert "w.b" in caplog.text
    assert "lr" in caplog.text
    with pytest.raises(CheckpointException, match=r"(?s)has keys that the state has not.*w\.b"):
        dcp.load({"w": {"a": torch.zeros(2)}}, storage_reader=Reader(tmp_path / "s", strict=True), no_dist=True)


class Halves(dcp.DefaultSavePlanner):
    """Saves every floating tensor in another dtype, and values in a form of its own."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object.half()
        return io.BytesIO(repr(object).encode())


class Texts(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_planners_that_change_what_is_saved_work(tmp_path):
    save(tmp_path / "s", {"w": torch.tensor([1.5]), "v": {"x": 2}}, planner=Halves(flatten_state_dict=False))
    target = {"w": torch.zeros(1, dtype=torch.float16), "v": None}
    load(tmp_path / "s", target, planner=Texts(flatten_state_dict=False))
    assert_same(target, {"w": torch.tensor([1.5]).half(), "v": b"{'x': 2}"})
    check_sound(tmp_path / "s")


def test_a_state_that_is_not_flattened_comes_back_as_it_was(tmp_path):
    state = {"w": torch.ones(2), "tree": {"x": [1, {"y": torch.ones(3)}], 2: "int key"}}
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    save(tmp_path / "s", state, planner=dcp.DefaultSavePlanner(**options))
    target = {"w": torch.zeros(2), "tree": None}
    load(tmp_path / "s", target, planner=dcp.DefaultLoadPlanner(**options))
    assert_same(target, state)


def test_plans_that_are_kept_from_save_to_save_are_used_again(tmp_path, monkeypatch):
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(dcp.SavePlanner, f"_cached_{name}", {})
    for number in range(4):
        path = tmp_path / ("same" if number > 2 else str(number))
        state = {"w": torch.full((3,), float(number)), "n": number}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(path), planner=planner, no_dist=True)
        assert_same(load(path, empty(state)), state)
        check_sound(path)
    again = {"w": torch.full((3,), 9.0), "n": 9}
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(again, storage_writer=Writer(path), planner=planner, no_dist=True)
    assert_same(load(path, empty(again)), again)
    check_sound(path)


def test_a_save_in_the_background_is_of_the_moment_it_was_begun(tmp_path):
    tensor, values = torch.ones(1000), {"list": [1, 2], "deep": {"x": [torch.ones(2)]}}
    stager = Stager()
    for number in range(2):
        pending = dcp.async_save(
            {"w": tensor, "v": values}, storage_writer=Writer(tmp_path / str(number)), async_stager=stager, no_dist=True
        )
        tensor.add_(1)
        values["list"].append(number)
        values["deep"]["x"][0].add_(1)
        pending.result()
    stager.close()
    for number in range(2):
        target = load(tmp_path / str(number), {"w": torch.zeros(1000), "v": empty(values)})
        assert torch.equal(target["w"], torch.full((1000,), 1.0 + number))
        assert target["v"]["list"] == [1, 2, *range(number)]
        assert target["v"]["deep"]["x"][0][0] == 1 + number


def test_a_block_that_was_changed_is_noticed(tmp_path):
    save(tmp_path / "s", {"w": {"a": torch.ones(64)}})
    (file,) = (tmp_path / "s" / "w").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match="does not match its digest"):
        load(tmp_path / "s", {"w": {"a": torch.zeros(64)}})


def test_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "coming-from-dcp.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "coming-from-dcp.md", "exec"), {})
    for number in (200, 300):
        check_sound(tmp_path / f"runs/step-{number:08d}")
    for line in re.findall(r"^    keepstep (convert .*?)\s*(?:#.*)?$", page, re.MULTILINE):
        ran = CliRunner().invoke(app, line.split())
        assert ran.exit_code == 0, ran.output
    assert_same(dict(ks.open("new/100")), dict(ks.open("old/100")))


# --- ranks ----------------------------------------------------------------------------------------------------------


def _there_and_back(_rank: int, root: str) -> None:
    """Layouts, saved with ``Writer`` and loaded with ``Reader`` and ``ks.load`` in the same and in turned placements."""
    save(f"{root}/layouts", {"app": checks.sharded(), "step": 3})
    for turned in (False, True):
        for read in (load, lambda path, state: ks.load(path, into=state)):
            state = {"app": checks.sharded(empty=True, turned=turned), "step": 0}
            read(f"{root}/layouts", state)
            checks.check_sharded(state["app"])
            assert state["step"] == 3
    _two_dimensions(root)
    _sharded_tensor(root)
    _stateful(root)
    _not_together(root)


def _two_dimensions(root: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1) if dist.get_world_size() == 2 else (2, 2))
    whole = torch.arange(60.0).reshape(6, 10)
    for number, placements in enumerate(
        ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(0), Shard(0)))
    ):
        save(f"{root}/mesh-{number}", {"w": distribute_tensor(whole, mesh, placements, src_data_rank=None)})
        for others in ((Replicate(), Replicate()), (Shard(1), Shard(0))):
            target = {"w": distribute_tensor(torch.zeros(6, 10), mesh, others, src_data_rank=None)}
            load(f"{root}/mesh-{number}", target)
            assert torch.equal(target["w"].full_tensor(), whole)


def _sharded_tensor(root: str) -> None:
    from torch.distributed._shard.sharded_tensor import Shard as Local
    from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards

    rank, world = dist.get_rank(), dist.get_world_size()

    def made(value: float) -> ShardedTensor:
        rows = [
            Local.from_tensor_and_offsets(torch.full((2, 3), value + at), [at, 0], rank)
            for at in (4 * rank, 4 * rank + 2)
        ]
        return init_from_local_shards(rows, (4 * world, 3))

    save(f"{root}/sharded", {"table": made(10.0), "plain": torch.ones(2)})
    target = {"table": made(0.0), "plain": torch.zeros(2)}
    load(f"{root}/sharded", target)
    for shard in target["table"].local_shards():
        assert torch.equal(shard.tensor, torch.full((2, 3), 10.0 + shard.metadata.shard_offsets[0]))
    assert torch.equal(ks.open(f"{root}/sharded")["table"][::2, 0], torch.arange(10.0, 10.0 + 4 * world, 2))


class Counter:
    """What torch calls stateful."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "t": torch.full((2,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["t"][0] == state["count"]
        self.count = state["count"]


def _stateful(root: str) -> None:
    save(
        f"{root}/stateful", {"counter": Counter(7), f"mine-{dist.get_rank()}": torch.full((1,), float(dist.get_rank()))}
    )
    target = {"counter": Counter(), f"mine-{dist.get_rank()}": torch.zeros(1)}
    load(f"{root}/stateful", target)
    assert target["counter"].count == 7
    assert target[f"mine-{dist.get_rank()}"].item() == dist.get_rank()


def _not_together(root: str) -> None:
    state = {"w": torch.full((2,), float(dist.get_rank())), "n": dist.get_rank()}
    dcp.save(state, storage_writer=Writer(f"{root}/alone"), use_collectives=False)
    target = load(f"{root}/alone", {"w": torch.zeros(2), "n": None})
    assert_same(target, state)
    # Of a tensor that is distributed each rank has its part only; from ours, and from torch's own.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3)
    parted = {"a": {"d": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}, **state}
    for name, writer in (("mine", Writer(f"{root}/mine")), ("torchs", dcp.FileSystemWriter(f"{root}/torchs"))):
        dcp.save(parted, storage_writer=writer, use_collectives=False)
        dist.barrier()
        empty_one = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)], src_data_rank=None)
        target = load(f"{root}/{name}", {"a": {"d": empty_one}, "w": torch.zeros(2), "n": None})
        assert torch.equal(target["a"]["d"].full_tensor(), whole)
        assert_same({"w": target["w"], "n": target["n"]}, state)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_save_and_load_in_any_layout(tmp_path, rank_pool, world):
    rank_pool(world)(_there_and_back, str(tmp_path))
    check_sound(tmp_path / "layouts")
    with ks.open(tmp_path / "layouts") as step:
        assert step.manifest.world_size == world
        for name, value in checks.whole_tensors().items():
            assert_same(step[f"app/{name}"], value, name)


def _load_turned(_rank: int, path: str) -> None:
    state = {"app": checks.sharded(empty=True, turned=True)}
    load(path, state)
    checks.check_sharded(state["app"])


def _fail_on_one(rank: int, path: str) -> None:
    """One rank has a value that cannot be stored: all of them are told, and nothing is there."""
    state = {"app": checks.sharded(), f"mine-{rank}": {"x": object() if rank == 1 else 1}}
    with pytest.raises(CheckpointException) as caught:
        save(path, state)
    assert list(caught.value.failures) == [1]
    assert "UnsafeValueError" in str(caught.value)
    assert not Path(path, ".metadata").exists()
    # And the next save in this place is a good one.
    dist.barrier()
    save(path, {"app": checks.sharded()})
    dist.barrier()
    target = {"app": checks.sharded(empty=True)}
    load(path, target)
    checks.check_sharded(target["app"])


def _fsdp(_rank: int, path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
        states.append((model, optimizer, dict(zip(("m", "o"), get_state_dict(model, optimizer), strict=True))))
    (_, _, saved), (model, optimizer, target) = states
    pending = dcp.async_save(saved, storage_writer=Writer(path), async_stager=Stager())
    pending.result()
    load(path, target)
    set_state_dict(model, optimizer, model_state_dict=target["m"], optim_state_dict=target["o"])
    now = dict(zip(("m", "o"), get_state_dict(model, optimizer), strict=True))
    for name, value in saved["m"].items():
        assert torch.equal(now["m"][name].full_tensor(), value.full_tensor()), name
    for name, values in saved["o"]["state"].items():
        for key, value in values.items():
            found = now["o"]["state"][name][key]
            value, found = (t.full_tensor() if isinstance(t, DTensor) else t for t in (value, found))
            assert torch.equal(found, value), (name, key)
    assert now["o"]["param_groups"][0]["lr"] == 0.01


@pytest.mark.slow
def test_other_ranks_go_on_and_one_that_fails_fails_all(tmp_path, rank_pool):
    rank_pool(3)(_fail_on_one, str(tmp_path / "failed"))
    check_sound(tmp_path / "failed")
    rank_pool(2)(_load_turned, str(tmp_path / "failed"))
    rank_pool(2)(_fsdp, str(tmp_path / "fsdp"))
    check_sound(tmp_path / "fsdp")


@pytest.mark.slow
def test_a_process_of_its_own_saves_too(tmp_path, rank_pool):
    rank_pool(1)(_in_a_process, str(tmp_path / "s"), timeout_s=120)
    check_sound(tmp_path / "s")


def _in_a_process(_rank: int, path: str) -> None:
    tensor = torch.arange(10.0)
    pending = dcp.async_save(
        {"w": tensor, "n": 3},
        storage_writer=Writer(path),
        async_stager=Stager(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    tensor.zero_()
    pending.result()
    target = load(path, {"w": torch.zeros(10), "n": 0})
    assert torch.equal(target["w"], torch.arange(10.0))
    assert target["n"] == 3
