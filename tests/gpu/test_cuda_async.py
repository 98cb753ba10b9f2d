"""Saves in the background of state that lives on a GPU: copied on a stream of their own, behind the fence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepstep as ks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WIDTH = 2048


def run(device="cuda"):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).to(device)
    return ks.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def train(state, steps=1):
    for _ in range(steps):
        loss = state["model"](torch.randn(64, WIDTH, device="cuda")).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def values(state):
    moments = [value for each in state["optimizer"].state.values() for value in each.values()]
    return [value.detach().cpu().clone() for value in (*state["model"].state_dict().values(), *moments)]


@pytest.mark.parametrize("background", ["agent", "thread"])
@pytest.mark.parametrize("staging", ["overlap", "block"])
def test_what_is_saved_is_what_was_there_at_the_boundary(tmp_path, background, staging):
    state = run()
    train(state, 2)
    with ks.Checkpointer(
        tmp_path, state, background=background, staging=staging, check_staging=staging == "overlap"
    ) as ckpt:
        ckpt.restore()
        expected = []
        for _ in range(3):
            train(state)
            ckpt.step()
            expected = values(state)
            pending = ckpt.save()
            # Queued at once, behind the fence: the copy must not see any of it.
            train(state, 2)
        pending.wait_committed()
    other = run()
    ks.load(tmp_path / "step-00000003", into=other)
    for saved, true in zip(values(other), expected, strict=True):
        assert torch.equal(saved, true)


def test_work_on_another_stream_is_waited_for(tmp_path):
    """The boundary is where the training thread stands on its own stream, whichever that is."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(1 << 26, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(3.0)
        pending = ks.async_save(tmp_path / "step-00000001", {"w": tensor, "part": tensor.view(8192, -1)[:, ::2]})
    pending.wait_committed()
    loaded = {"w": torch.zeros(1 << 26), "part": torch.zeros(8192, (1 << 26) // 8192 // 2)}
    ks.load(tmp_path / "step-00000001", into=loaded)
    assert loaded["w"].eq(3.0).all()
    assert loaded["part"].eq(3.0).all()


def test_the_arena_is_registered_once_and_given_back(tmp_path):
    state = run()
    train(state)
    with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1), staging="overlap") as ckpt:
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            train(state)
            ckpt.step().wait_committed()
        assert torch.cuda.memory_allocated() <= before + (1 << 26)
    for _ in range(2):
        # Were it still registered, a second registration of new arenas could fail or leak.
        with ks.Checkpointer(tmp_path, state, every=ks.Every(steps=1)) as ckpt:
            ckpt.restore()
            train(state)
            ckpt.step().wait_committed()
