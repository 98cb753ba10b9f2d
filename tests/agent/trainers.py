"""What the trainers of these tests run: a training whose every step can be told from what was saved of it."""

from __future__ import annotations

import torch

import keepstep as ks

MIB = 1 << 20


def made(step=0, size_bytes=MIB, world=1, rank=0):
    """A state that says of which step it is, in parameters, moments, a shard and plain values; ``size_bytes`` a third."""
    torch.manual_seed(0)
    width = size_bytes // 4
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(width))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model["w"].grad = torch.ones(width)
    optimizer.step()
    share = width // world
    shard = ks.sharded(torch.empty(share), global_shape=(share * world,), offsets=(share * rank,))
    state = ks.TrainState(model=model, optimizer=optimizer, parts={"shard": shard}, note={"step": 0})
    return advanced(state, step)


def advanced(state, step):
    """The state as it is at this step."""
    state.fence()
    state.progress.step = step
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(step)
            state["optimizer"].state[parameter]["momentum_buffer"].fill_(step + 0.5)
    state["parts"]["shard"].local.fill_(step + 0.25)
    state["note"]["step"] = step
    return state


def whole(state):
    """The step that every part of the state is of."""
    step = state.progress.step
    for parameter in state["model"].parameters():
        assert torch.all(parameter == step), step
        assert torch.all(state["optimizer"].state[parameter]["momentum_buffer"] == step + 0.5), step
    assert torch.all(state["parts"]["shard"].local == step + 0.25), step
    assert state["note"] == {"step": step}
    return step
