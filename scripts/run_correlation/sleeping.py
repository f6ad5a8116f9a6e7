"""A model whose layers sleep for as long as others were measured to work: more ranks than there are cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

_WIDTH = 8


class _Nap(torch.autograd.Function):
    """Hands on what it gets, and sleeps in both passes."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        context.backward_s = backward_s
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """Half of its backward pass is for the gradient of its weight, as simulations assume."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.half_s = forward_s, backward_s / 2.0
        self.weight = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = _Nap.apply(self.weight, 0.0, self.half_s)
        rested: torch.Tensor = _Nap.apply(x, self.forward_s, self.half_s)
        return rested + weight


def sleepers(microbatch: int, passes_s: tuple[tuple[float, float], ...]) -> tuple[nn.Module, torch.Tensor]:
    """passes_s: forward and backward of each layer. Its first layer has no gradient to send: half a backward pass."""
    model = nn.Sequential(*(Sleeper(forward_s, backward_s) for forward_s, backward_s in passes_s))
    return model, torch.randn(microbatch, _WIDTH)
