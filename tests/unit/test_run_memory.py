"""The peak of what tensors take, against sizes known beforehand."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from piper_ray.run.rank import peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def mebibytes(count: float) -> torch.Tensor:
    return torch.empty(int(count * MIB / 4))


def test_the_peak_is_that_of_what_is_there_at_once() -> None:
    memory = peak_memory(CPU)
    with memory:
        first = mebibytes(4)
        second = mebibytes(8)
        del first
        third = mebibytes(2)
        del second, third
        fourth = mebibytes(11)
    assert memory.peak_bytes == 12 * MIB
    del fourth


def test_views_and_what_is_held_count_once() -> None:
    held = mebibytes(4)
    memory = peak_memory(CPU)
    with memory:
        memory.held([held, held[10:]])
        _ = held.view(-1, 2)
        held.add_(1.0)
        memory.held([held])
    assert memory.peak_bytes == 4 * MIB


def test_what_autograd_keeps_is_there_until_the_backward_pass() -> None:
    def peak_mib(*, recompute: bool) -> float:
        layers = nn.ModuleList(nn.Sequential(*(nn.Tanh() for _ in range(4))) for _ in range(4))
        x = torch.randn(MIB // 4, requires_grad=True)
        memory = peak_memory(CPU)
        with memory:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x.backward(torch.ones_like(x))
        return memory.peak_bytes / MIB

    # Each tanh keeps what it gives; with recomputation each layer what it gets, and one layer all of its own.
    assert 16 <= peak_mib(recompute=False) <= 19
    assert 7 <= peak_mib(recompute=True) <= 11
