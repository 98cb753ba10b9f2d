"""Flat buffers: slices of parameters in one padded tensor, stored by the parameters' names and given back to any layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.errors import MismatchError, UsageError
from tests.helpers.same import assert_same

SHAPES = {"w": (3, 4), "scale": (), "b": (5,), "none": (0, 2)}


def packed(start, elements, align=1):
    """A buffer and its pieces; every element of a parameter is its place among all, padding is -7."""
    row = []
    for shape in SHAPES.values():
        row += [-7.0] * (-len(row) % align)
        size = int(torch.Size(shape).numel())
        row += [float(len([x for x in row if x >= 0]) + i) for i in range(size)]
    row = torch.tensor(row + [-7.0] * max(start + elements - len(row), 0))
    return row[start : start + elements].clone(), ks.flat_pieces(SHAPES, start=start, elements=elements, align=align)


@settings(max_examples=40)
@given(st.integers(1, 6), st.sampled_from([1, 4, 8]))
def test_parts_of_any_length_hold_every_element_once(elements, align):
    seen = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    for start in range(0, 48, elements):
        buffer, pieces = packed(start, elements, align)
        for name, part in ks.flat(buffer, pieces).items():
            for local, at in zip(part.locals, part.starts, strict=True):
                there = seen[name][tuple(slice(o, o + s) for o, s in zip(at, local.shape, strict=True))]
                assert torch.all(there == -1)
                there.copy_(local)
    assert torch.equal(torch.cat([value.reshape(-1) for value in seen.values()]), torch.arange(18.0))


def test_a_buffer_is_filled_in_place_and_its_padding_left_alone(tmp_path):
    buffer, pieces = packed(0, 30, align=4)
    ks.save(tmp_path / "ck", {"master": ks.flat(buffer, pieces)})
    with ks.open(tmp_path / "ck") as checkpoint:
        assert torch.equal(checkpoint["master/w"], torch.arange(12.0).reshape(3, 4))
        assert torch.equal(checkpoint["master/scale"], torch.tensor(12.0))
    into, others = torch.full((20,), -3.0), ks.flat_pieces(SHAPES, start=0, elements=20)
    target = {"master": ks.flat(into, others)}
    ks.load(tmp_path / "ck", into=target)
    assert torch.equal(into, torch.tensor([*range(18), -3.0, -3.0]))
    plain = {"master": {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != "none"}}
    ks.load(tmp_path / "ck", into=plain)
    assert torch.equal(plain["master"]["b"], torch.arange(13.0, 18.0))


def test_another_dtype_is_refused_or_cast(tmp_path):
    buffer, pieces = packed(0, 18)
    ks.save(tmp_path / "ck", {"m": ks.flat(buffer, pieces)})
    into = torch.zeros(18, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match="m/w: saved as float32, the target is bfloat16"):
        ks.load(tmp_path / "ck", into={"m": ks.flat(into, pieces)})
    assert not into.any()
    ks.load(tmp_path / "ck", into={"m": ks.flat(into, pieces)}, cast=True)
    assert torch.equal(into, torch.arange(18).bfloat16())


def test_names_that_one_side_lacks_are_listed(tmp_path):
    buffer, pieces = packed(0, 18)
    ks.save(tmp_path / "ck", {"m": ks.flat(buffer, pieces)})
    others = [ks.FlatPiece("w", (3, 4), 0, 12, 0), ks.FlatPiece("extra", (2,), 0, 2, 12)]
    with pytest.raises(MismatchError) as caught:
        ks.load(tmp_path / "ck", into={"m": ks.flat(torch.zeros(18), others)})
    said = "\n".join(caught.value.mismatches)
    assert all(f"m/{name}" in said for name in ("extra", "b", "scale"))
    assert "m/w" not in said
    with pytest.raises(MismatchError, match="m/w"):
        ks.save(tmp_path / "other", {"m": {"x": torch.ones(1)}})
        ks.load(tmp_path / "other", into={"n": torch.ones(1), "m": ks.flat(buffer, pieces)})


def test_an_object_gets_new_memory_for_its_buffers_and_can_fill_them(tmp_path):
    class Owner:
        def __init__(self, fill):
            self.buffer, self.pieces = packed(0, 18)
            if fill is not None:
                self.buffer.fill_(fill)
            self.given = {}

        def state_dict(self):
            return {"m": ks.flat(self.buffer, self.pieces), "steps": 3}

        def load_state_dict(self, given):
            assert not self.buffer.any()
            self.given = given
            ks.flat(self.buffer, self.pieces).copy_(given["m"])

    ks.save(tmp_path / "ck", {"owner": Owner(None)})
    target = Owner(0.0)
    ks.load(tmp_path / "ck", into={"owner": target})
    assert target.given["steps"] == 3
    assert torch.equal(target.buffer, torch.arange(18.0))
    with pytest.raises(UsageError, match="'b'"):
        ks.flat(target.buffer, target.pieces).copy_({"w": None, "scale": None})


def test_an_object_may_have_its_buffers_filled_in_place(tmp_path):
    class Owner:
        def __init__(self, buffer):
            self.buffer, self.pieces = buffer, packed(0, 18)[1]

        def state_dict(self):
            return {"m": ks.flat(self.buffer, self.pieces, in_place=True)}

        def load_state_dict(self, given):
            self.given = {local.data_ptr() for part in given["m"].values() for local in part.locals}

    ks.save(tmp_path / "ck", {"owner": Owner(packed(0, 18)[0])})
    target = Owner(torch.full((18,), -1.0))
    ks.load(tmp_path / "ck", into={"owner": target})
    assert torch.equal(target.buffer, torch.arange(18.0))
    memory = range(target.buffer.data_ptr(), target.buffer.data_ptr() + 18 * 4)
    assert target.given
    assert all(at in memory for at in target.given)


def test_moments_of_a_torch_optimizer_go_into_flat_buffers_and_back(tmp_path):
    line = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(line.parameters(), lr=0.25)
    line(torch.ones(4, 3)).sum().backward()
    adam.step()
    ks.save(tmp_path / "ck", {"model": line, "optimizer": adam})
    pieces = ks.flat_pieces(dict(line.named_parameters()), start=0, elements=8)
    m, v = torch.zeros(8), torch.zeros(8)
    moments = ks.flat({"exp_avg": m, "exp_avg_sq": v}, pieces)
    for held in moments.values():
        held["step"] = torch.tensor(0.0)
    flat = {"state": moments, "param_groups": [{"params": ["weight", "bias"], "lr": 9.0}]}
    ks.load(tmp_path / "ck", into={"optimizer": flat}, only=["optimizer"])
    expected = [adam.state[p]["exp_avg"].reshape(-1) for p in line.parameters()]
    assert torch.equal(m, torch.cat(expected))
    assert float(moments["bias"]["step"]) == 1
    assert flat["param_groups"][0]["lr"] == 0.25

    ks.save(tmp_path / "back", {"model": line, "optimizer": flat})
    other = torch.nn.Linear(3, 2)
    fresh = torch.optim.Adam(other.parameters())
    ks.load(tmp_path / "back", into={"model": other, "optimizer": fresh})
    assert_same(fresh.state_dict()["state"], adam.state_dict()["state"])
    assert fresh.param_groups[0]["lr"] == 0.25


def test_everything_that_does_not_fit_is_said_at_once():
    pieces = [
        ks.FlatPiece("a", (2, 3), 4, 3, 0),
        ks.FlatPiece("b", (4,), 0, 4, 2),
        ks.FlatPiece("c", (4,), 0, 4, 8),
        ks.FlatPiece("d", (4,), 0, 1, 6, global_shape=(8,), offsets=(6,)),
        ks.FlatPiece("e", (2,), 0, 2, 0),
        ks.FlatPiece("e", (2,), 1, 1, 7),
        ks.FlatPiece("e", (3,), 0, 0, 0),
    ]
    with pytest.raises(UsageError) as caught:
        ks.flat(torch.zeros(10), pieces)
    said = str(caught.value)
    for text in (
        "a: elements [4, 7) of a parameter of shape [2, 3]",
        "c: at [8, 12) of a buffer of 10 elements",
        "d: a part [6:10] does not lie in a tensor of shape [8]",
        "a and b: both at 2",
        "e: element 1 is in two pieces",
        "e: given with the shapes [2] and [3]",
    ):
        assert text in said
    for buffers in (torch.zeros(2, 2), torch.zeros(8)[::2], {}, {"x": torch.zeros(2), "y": torch.zeros(3)}):
        with pytest.raises(UsageError, match="buffer"):
            ks.flat(buffers, [])
    with pytest.raises(UsageError, match="align=0"):
        ks.flat_pieces(SHAPES, start=0, elements=4, align=0)
