"""A small run in a bucket, looked at from the side."""

from __future__ import annotations

import contextlib
import os
import secrets

import torch

import keepstep as ks
from keepstep.agent.client import call_agent
from keepstep.agent.node import socket_path
from keepstep.agent.protocol import Stop
from keepstep.errors import AgentError
from keepstep.storage.parts import PartLimits
from keepstep.storage.retry import Patience

PAGE = 4096
QUICK = Patience(tries=10, first_wait_s=0.002, longest_wait_s=0.02, request_s=20)
SMALL_PARTS = PartLimits(usual_bytes=16 * PAGE, least_bytes=PAGE)


def a_run(server, name=""):
    """A URL that nobody else uses, in a bucket that is there."""
    return f"{server.scheme}://{server.make_bucket('runs')}/{name or 'run'}-{secrets.token_hex(4)}"


def training(seed=0, width=64):
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return ks.TrainState(model=model, optimizer=optimizer)


def advance(state, steps=1):
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(steps):
        model(torch.ones(4, model.in_features)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(state):
    return {key: value.clone() for key, value in state["model"].state_dict().items()}


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


def committed(root):
    """Steps that have a folder; after retention and sweeping these are those that are committed."""
    return sorted(int(name[5:]) for name in root.folders() if name.startswith("step-"))


@contextlib.contextmanager
def environment(server, endpoint=""):
    """As a user's shell has it: the URL says nothing of where the store is and who may enter."""
    before = dict(os.environ)
    os.environ.update(server.environment(endpoint))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def agents_end(url):
    """No agent of this root is left."""
    try:
        yield
    finally:
        with contextlib.suppress(AgentError):
            call_agent(socket_path(url), Stop(now=True))
