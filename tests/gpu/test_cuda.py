"""State on a CUDA device: staged on a side stream, in order with the compute stream, restored where it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepstep as ks

pytestmark = pytest.mark.gpu

LARGE = 24 << 20  # elements; more than the arena holds, so that chunks are used again


def test_tensors_come_back_to_the_device(tmp_path):
    state = {
        "large": torch.randn(LARGE, device="cuda"),
        "half": torch.randn(1001, 33, device="cuda").bfloat16(),
        "turned": torch.randn(513, 257, device="cuda").t(),
        "scalar": torch.tensor(3.5, device="cuda"),
        "host": torch.arange(10),
    }
    ks.save(tmp_path / "step", state)
    target = {name: torch.empty_like(value) for name, value in state.items()}
    ks.load(tmp_path / "step", into=target)
    for name, value in state.items():
        assert target[name].device == value.device
        assert torch.equal(target[name], value), name


def test_a_save_sees_what_is_still_queued_on_the_compute_stream(tmp_path):
    value = torch.zeros(LARGE, device="cuda")
    factor = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        factor = factor @ factor.t() / 2048
    value += 1
    value.view(-1, 2).t().mul_(2)
    ks.save(tmp_path / "step", {"value": value})
    with ks.open(tmp_path / "step") as saved:
        assert torch.equal(saved["value"], torch.full((LARGE,), 2.0))


def test_a_change_right_after_the_save_is_not_seen(tmp_path):
    value = torch.ones(LARGE, device="cuda")
    ks.save(tmp_path / "step", {"value": value, "turned": value.view(2, -1).t()})
    value.zero_()
    with ks.open(tmp_path / "step") as saved:
        assert torch.equal(saved["value"], torch.ones(LARGE))
        assert torch.equal(saved["turned"], torch.ones(LARGE // 2, 2))


def test_a_run_resumes_exactly_with_its_device_streams(tmp_path):
    def start():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, ks.TrainState(model=model, optimizer=optimizer)

    def train(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 32, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer, state = start()
    with ks.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        train(model, optimizer, 3)
        ckpt.save()
        expected = train(model, optimizer, 5)
    model, optimizer, state = start()
    with ks.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        moments = [entry["exp_avg"] for entry in optimizer.state.values()]
        assert all(moment.device.type == "cuda" for moment in moments)
        assert train(model, optimizer, 5) == expected


@pytest.mark.case(100)
def test_a_step_saved_on_a_device_loads_on_the_host(tmp_path):
    model = nn.Linear(8, 4).cuda()
    ks.save(tmp_path / "step", {"model": model})
    host = nn.Linear(8, 4)
    before = torch.cuda.memory_allocated()
    ks.load(tmp_path / "step", into={"model": host})
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(host.weight, model.weight.cpu())


def test_loading_uses_little_memory_beyond_the_target(tmp_path):
    value = torch.randn(LARGE, device="cuda")
    ks.save(tmp_path / "step", {"value": value})
    target = {"value": torch.empty_like(value)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ks.load(tmp_path / "step", into=target)
    assert torch.cuda.max_memory_allocated() - before < 2 * target["value"].nbytes


def test_streams_of_the_device_go_on_where_they_were(tmp_path):
    """That of the program and one of its own; a new rank's differ from them."""

    def drawn(own):
        return torch.cat([torch.rand(3, device="cuda", generator=own), torch.rand(3, device="cuda")]).tolist()

    own = torch.Generator("cuda").manual_seed(3)
    torch.cuda.manual_seed_all(4)
    drawn(own)
    ks.save(tmp_path / "step", ks.TrainState(noise=ks.per_rank(own, "derive")))
    expected = drawn(own)
    other = torch.Generator("cuda").manual_seed(5)
    report = ks.load(tmp_path / "step", ks.TrainState(noise=ks.per_rank(other, "derive")))
    assert report.components["rng"].reset == []
    assert drawn(other) == expected
    with pytest.raises(ks.errors.MismatchError, match="noise: saved from a generator on cuda"):
        ks.load(tmp_path / "step", {"noise": ks.per_rank(torch.Generator())}, only=["noise"])
