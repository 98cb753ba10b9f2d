"""Parts of training programs that have a state of their own."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Scaled(nn.Module):
    """Eight-bit products with a scale from a history of largest magnitudes, kept as ``keeper`` says."""

    def __init__(self, keeper):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        if keeper == "extra_state":
            self.history, self.scale = torch.zeros(3), torch.ones(())
        else:
            self.register_buffer("history", torch.zeros(3), persistent=keeper == "buffers")
            self.register_buffer("scale", torch.ones(()), persistent=keeper == "buffers")

    def forward(self, x):
        scale = self.scale.clone()
        with torch.no_grad():
            self.history.copy_(self.history.roll(1))
            self.history[0] = x.abs().max()
            self.scale.copy_(13.0 / self.history.max())
        rounded = (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return rounded @ self.weight.T


class ScaledInExtraState(Scaled):
    def get_extra_state(self):
        return {"history": self.history.clone(), "scale": self.scale.numpy().tobytes()}

    def set_extra_state(self, state):
        self.history = state["history"].clone()
        self.scale = torch.frombuffer(bytearray(state["scale"]), dtype=torch.float32).reshape(())


class WarmUp:
    """A rule with a state of its own: it counts how often it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, step):
        self.asked += 1
        return 1 / (1 + self.asked % 5)


class Shuffled:
    """A sampler that knows where it is: an order for each epoch, and how much of it was handed out."""

    def __init__(self, seed):
        self.seed, self.epoch, self.position = seed, 0, 0

    def __iter__(self):
        while True:
            order = np.random.RandomState(self.seed + self.epoch).permutation(12)
            while self.position < len(order):
                self.position += 2
                yield order[self.position - 2 : self.position].tolist()
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)
