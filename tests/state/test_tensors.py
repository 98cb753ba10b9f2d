"""Tensors of every kind: dtypes, shapes, strides, views, ties; and those that are refused."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import keepstep as ks
from keepstep.errors import MismatchError
from keepstep.format.dtypes import ITEM_BYTES
from tests.helpers.same import assert_same, bits

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}


def filled(shape, dtype, seed=0):
    """A tensor of random bits, whatever its dtype."""
    size = int(np.prod(shape)) * ITEM_BYTES[str(dtype).removeprefix("torch.")]
    raw = np.random.RandomState(seed).randint(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def stored_bytes(path):
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


@pytest.mark.case(51)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name, tmp_path):
    dtype = DTYPES[name]
    shapes = {"matrix": (5, 7), "scalar": (), "one": (1,), "empty": (0,), "flat": (2, 0, 3)}
    state = {key: filled(shape, dtype, seed) for seed, (key, shape) in enumerate(shapes.items())}
    state["list"] = [filled((3,), dtype, 9), {"t": filled((4, 2), dtype, 10)}]
    ks.save(tmp_path / "s", state)
    into = {key: filled(value.shape, dtype, 99) for key, value in state.items() if key != "list"}
    held = dict(into)
    target = {**into, "list": []}
    ks.load(tmp_path / "s", target)
    assert_same(target, state)
    assert all(target[key] is held[key] for key in held)
    opened = ks.open(tmp_path / "s")
    assert_same({key: opened[key] for key in shapes}, {key: state[key] for key in shapes})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_dtypes_of_this_torch_are_stored_or_refused(tmp_path):
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        if name in ITEM_BYTES:
            continue
        try:
            tensor = torch.empty(3, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            continue
        with pytest.raises(ks.errors.UnsafeValueError, match=f"t: dtype {dtype} has no fixed element size"):
            ks.save(tmp_path / name, {"t": tensor})


@pytest.mark.case(41)
def test_no_dimension_and_one_element_stay_apart(tmp_path):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.vector = nn.Parameter(torch.tensor([3.0]))

        def forward(self, x):
            return self.linear(x) * self.scale * self.vector

    def build(seed):
        torch.manual_seed(seed)
        model = Small()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def step(state):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1, 1)).sum().backward()
        state["optimizer"].step()

    state = build(0)
    step(state)
    ks.save(tmp_path / "s", state)
    fresh = build(1)
    ks.load(tmp_path / "s", fresh)
    assert fresh["model"].scale.shape == ()
    assert fresh["model"].vector.shape == (1,)
    assert fresh["optimizer"].state[fresh["model"].scale]["exp_avg"].shape == ()
    step(state)
    step(fresh)
    assert_same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
    with pytest.raises(ks.errors.MismatchError, match=r"t: saved with shape \[\], the target has \[1\]"):
        ks.save(tmp_path / "t", {"t": torch.tensor(1.0)})
        ks.load(tmp_path / "t", {"t": torch.zeros(1)})


def layouts():
    """Tensors whose memory is not in order, with the same values as their contiguous copies."""
    base = torch.arange(240.0)
    return {
        "transposed": base[:12].view(3, 4).t(),
        "channels last": base.view(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "expanded to nothing": torch.tensor(4.0).expand(0, 3),
        "every second": base[::2],
        "middle columns": base.view(12, 20)[:, 3:9],
        "permuted": base.view(2, 3, 40).permute(2, 0, 1),
        "overlapping": base.as_strided((5, 3), (1, 1)),
        "diagonal": base[:225].view(15, 15).diagonal(),
        "conjugate": torch.complex(base[:6], base[6:12]).conj(),
        "negative": torch.complex(base[:6], base[6:12]).conj().imag,
        "one element, odd stride": base[::100][:1],
    }


@pytest.mark.case(48)
@pytest.mark.parametrize("name", layouts())
def test_values_do_not_depend_on_how_memory_lies(name, tmp_path):
    tensor = layouts()[name]
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    ks.save(tmp_path / "s", {"t": tensor})
    opened = ks.open(tmp_path / "s")["t"]
    assert (opened.shape, opened.dtype, bits(opened)) == (plain.shape, plain.dtype, bits(plain))
    # Into memory in order, and into memory that is not.
    dense = {"t": torch.zeros_like(plain)}
    ks.load(tmp_path / "s", dense)
    assert_same(dense["t"], plain)
    if plain.dim():
        wide = torch.zeros(*plain.shape, 2, dtype=plain.dtype)
        gaps = {"t": wide[..., 1]}
        held = gaps["t"]
        ks.load(tmp_path / "s", gaps)
        assert gaps["t"] is held
        assert torch.equal(wide[..., 1], plain)
        assert not wide[..., 0].any()


@pytest.mark.case(48)
def test_a_target_keeps_its_memory_format(tmp_path):
    tensor = torch.randn(2, 3, 4, 4)
    ks.save(tmp_path / "s", {"t": tensor})
    target = {"t": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)}
    ks.load(tmp_path / "s", target)
    assert torch.equal(target["t"], tensor)
    assert target["t"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("target", [torch.zeros(1).expand(3), torch.zeros(3, dtype=torch.complex64).conj()])
def test_targets_whose_elements_cannot_be_written_are_refused(target, tmp_path):
    ks.save(tmp_path / "s", {"t": torch.ones(3, dtype=target.dtype)})
    with pytest.raises(ks.errors.MismatchError, match="t: the target's elements share memory"):
        ks.load(tmp_path / "s", {"t": target})


@pytest.mark.case(47)
def test_a_slice_costs_its_own_size(tmp_path):
    x = torch.zeros(10_000_000)[:1000]
    x += 1
    ks.save(tmp_path / "s", {"x": x})
    assert stored_bytes(tmp_path / "s") < 100_000
    target = {"x": torch.zeros(1000)}
    ks.load(tmp_path / "s", target)
    assert torch.equal(target["x"], x)


@pytest.mark.case(47)
def test_views_into_one_flat_buffer_cost_the_sum_of_the_views(tmp_path):
    flat = torch.arange(30_000.0)
    model = nn.ParameterDict({f"p{i}": nn.Parameter(flat[i * 1000 : (i + 1) * 1000].view(20, 50)) for i in range(10)})
    ks.save(tmp_path / "s", {"model": model})
    assert stored_bytes(tmp_path / "s") < 10 * 1000 * 4 + 20_000
    empty = torch.zeros(30_000)
    fresh = nn.ParameterDict({f"p{i}": nn.Parameter(empty[i * 1000 : (i + 1) * 1000].view(20, 50)) for i in range(10)})
    ks.load(tmp_path / "s", {"model": fresh})
    assert torch.equal(empty[:10_000], flat[:10_000])
    assert not empty[10_000:].any()


def test_overlapping_views_are_separate_tensors(tmp_path):
    base = torch.arange(10.0)
    state = {"a": base[:6], "b": base[4:], "c": base[:6].view(2, 3), "d": base[:6], "e": base.view(torch.int32)[:6]}
    ks.save(tmp_path / "s", state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ks.load(tmp_path / "s", target)
    assert_same(target, {name: tensor.clone() for name, tensor in state.items()})
    opened = ks.open(tmp_path / "s")
    assert_same({name: opened[name] for name in state}, {name: tensor.clone() for name, tensor in state.items()})


@pytest.mark.case(51)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
def test_kinds_without_bytes_of_their_own_are_refused_all_at_once(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "good": torch.ones(2),
        "rows": [torch.eye(3).to_sparse_csr()],
        "nested": nested,
        "meta": torch.empty(2, device="meta"),
        "opaque": Opaque(torch.ones(3)),
    }
    with pytest.raises(ks.errors.UnsafeValueError) as caught:
        ks.save(tmp_path / "s", state)
    text = str(caught.value)
    for name in ("sparse: ", "rows/0: ", "nested: ", "meta: ", "opaque: "):
        assert name in text
    assert len(caught.value.refused) == 5
    assert not (tmp_path / "s").exists()


class Opaque(torch.Tensor):
    """A wrapper with no memory of its own that does not say what it holds."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func} of an Opaque")

    __torch_function__ = torch._C._disabled_torch_function_impl


class Scaled(torch.Tensor):
    """Bytes and a scale that together stand for numbers, as quantised weights do."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_bytes = data
        self.scale = scale

    def __tensor_flatten__(self):
        return ["data_bytes", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["data_bytes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_bytes, args[0].scale)
        raise NotImplementedError(f"{func} of a Scaled")


def scaled(seed):
    return Scaled(filled((4, 4), torch.uint8, seed), torch.tensor(0.5 + seed))


@pytest.mark.case(51)
def test_a_wrapper_that_names_its_parts_is_stored_by_them(tmp_path):
    class Quantised(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.weight = nn.Parameter(scaled(seed), requires_grad=False)

    for state, fresh in (({"t": scaled(0)}, {"t": scaled(1)}), ({"t": Quantised(0)}, {"t": Quantised(1)})):
        path = tmp_path / type(state["t"]).__name__
        ks.save(path, state)
        target = fresh["t"]
        ks.load(path, fresh)
        assert fresh["t"] is target
        for tensor, other in ((state["t"], target),):
            a, b = (item.weight if isinstance(item, nn.Module) else item for item in (tensor, other))
            assert_same((b.data_bytes, b.scale), (a.data_bytes, a.scale))


@pytest.mark.case(55)
@pytest.mark.case(168)
def test_other_dtypes_are_an_error_unless_asked_for(tmp_path):
    ks.save(tmp_path / "s", {"w": torch.tensor([0.1, 1.0]), "n": torch.tensor([16777217])})
    target = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1)}
    held = dict(target)
    with pytest.raises(ks.errors.MismatchError) as caught:
        ks.load(tmp_path / "s", target)
    assert caught.value.mismatches == (
        "w: saved as float32, the target is bfloat16 (cast=True converts)",
        "n: saved as int64, the target is float32 (cast=True converts)",
    )
    assert not any(tensor.any() for tensor in held.values())

    report = ks.load(tmp_path / "s", target, cast=True)
    assert torch.equal(target["w"], torch.tensor([0.1, 1.0]).bfloat16())
    assert target["n"].item() == 16777216.0
    assert all(target[key] is held[key] for key in held)
    assert (report.components["w"].cast, report.components["n"].cast) == (["w"], ["n"])
    assert "1 cast (w)" in str(report)

    same = {"w": torch.zeros(2), "n": torch.zeros(1, dtype=torch.int64)}
    report = ks.load(tmp_path / "s", same, cast=True)
    assert same["n"].item() == 16777217
    assert report.components["n"].cast == []


@pytest.mark.case(55)
def test_a_model_and_its_moments_in_another_precision(tmp_path):
    model = nn.Linear(3, 3)
    ks.save(tmp_path / "s", {"model": model})
    half = nn.Linear(3, 3).to(torch.bfloat16)
    with pytest.raises(ks.errors.MismatchError, match="model/weight: saved as float32, the target is bfloat16"):
        ks.load(tmp_path / "s", {"model": half})
    ks.load(tmp_path / "s", {"model": half}, cast=True)
    assert torch.equal(half.weight, model.weight.bfloat16())


@pytest.mark.case(100)
def test_tensors_saved_from_another_device_come_back_on_this_one(tmp_path, monkeypatch):
    """What a CUDA run leaves behind is the device's name beside each tensor: it must not decide where a load puts them."""
    from keepstep.state import capture

    original = capture.TensorRef

    def on_cuda(key, dtype, shape, device="cpu", form="tensor", own=False):
        return original(key, dtype, shape, "cuda", form, own)

    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = [torch.ones(2)]
    with monkeypatch.context() as patch:
        patch.setattr(capture, "TensorRef", on_cuda)
        ks.save(
            tmp_path / "s",
            {"model": model, "optimizer": optimizer, "tensors": tensors, "device": torch.device("cuda", 0)},
        )
    fresh = nn.Linear(3, 3)
    restored = torch.optim.AdamW(fresh.parameters())
    target = {"model": fresh, "optimizer": restored, "tensors": [], "device": None}
    ks.load(tmp_path / "s", target)
    assert_same(restored.state_dict(), optimizer.state_dict())
    assert {tensor.device.type for state in restored.state.values() for tensor in state.values()} == {"cpu"}
    assert target["tensors"][0].device.type == "cpu"
    assert target["device"] == torch.device("cuda", 0)
    assert ks.open(tmp_path / "s")["model/weight"].device.type == "cpu"


@pytest.mark.case(49)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_two_gigabytes(tmp_path):
    size = 2**31 + 64
    pattern = torch.arange(64, dtype=torch.uint8)
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[:64] = pattern
    tensor[-64:] = pattern + 100
    ks.save(tmp_path / "s", {"t": tensor, "after": pattern})
    del tensor
    target = {"t": torch.zeros(size, dtype=torch.uint8), "after": torch.zeros(64, dtype=torch.uint8)}
    report = ks.load(tmp_path / "s", target)
    for file in (tmp_path / "s").rglob("*.safetensors"):
        file.unlink()
    assert torch.equal(target["t"][:64], pattern)
    assert torch.equal(target["t"][-64:], pattern + 100)
    assert torch.equal(target["after"], pattern)
    assert int(target["t"][64:-64].view(torch.int64).any()) == 0
    assert report.bytes_needed == size + 64


def test_tuples_and_deques_keep_the_tensors_of_the_target(tmp_path):
    saved = {"pair": (torch.ones(2), "x"), "window": deque([torch.ones(3), 1], maxlen=4)}
    ks.save(tmp_path / "s", saved)
    inner, last = torch.zeros(2), torch.zeros(3)
    target = {"pair": (inner, "y"), "window": deque([last], maxlen=9)}
    ks.load(tmp_path / "s", target)
    assert target["pair"] == (inner, "x")
    assert target["pair"][0] is inner
    assert (list(target["window"]), target["window"].maxlen) == ([last, 1], 4)
    assert target["window"][0] is last
    assert inner.tolist() + last.tolist() == [1.0] * 5
    with pytest.raises(MismatchError, match="pair/2: Tensor in the target, nothing of that name"):
        ks.load(tmp_path / "s", {**target, "pair": (inner, "y", torch.zeros(1))})


def test_nothing_in_a_step_is_a_pickle(tmp_path):
    model = nn.Linear(2, 2)
    state = ks.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), extra={"a": (1, np.float64(2))})
    ks.save(tmp_path / "s", state, step=1)
    for file in (tmp_path / "s").rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert raw[:2] != b"\x80\x04"
            assert raw[:4] != b"PK\x03\x04"
            assert b"GLOBAL" not in raw
            assert b"numpy." not in raw
