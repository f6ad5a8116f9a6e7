"""Five models of different kinds, each cut in two by a plan that was solved for, and run by two processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_WIDTH = 256


@dataclass(frozen=True)
class Subject:
    """A model to be profiled, planned and run. spec, arguments: of its factory."""

    name: str
    spec: str
    arguments: dict[str, object] = field(default_factory=dict)


_GPT = "inputs/pytorch/small_gpt.py:small_gpt"
_HERE = "scripts.run_correlation.models"

SUBJECTS = (
    Subject("GPT", _GPT, {"layers": 8, "width": 256, "heads": 8, "tokens": 128, "words": 2048}),
    Subject("GPT, wide, few tokens", _GPT, {"layers": 6, "width": 512, "heads": 8, "tokens": 32, "words": 8192}),
    Subject("convolutions", f"{_HERE}:convolutions"),
    Subject("mixer of MLPs", f"{_HERE}:mixer"),
    Subject("recurrent", f"{_HERE}:recurrent"),
)


class Residual(nn.Module):
    """x + f(x), on images with this number of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.second(torch.relu(self.first(x)))
        return found


def convolutions(microbatch: int) -> tuple[nn.Module, Any]:
    """Ever fewer pixels and more channels, so that layers differ."""
    stack: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for channels in (32, 64, 128):
        stack += [Residual(channels), Residual(channels), nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)]
    return nn.Sequential(*stack, nn.Flatten(), nn.Linear(256 * 6 * 6, 100)), torch.randn(microbatch, 3, 48, 48)


class Mixer(nn.Module):
    """An MLP over tokens, then one over channels."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        found: torch.Tensor = x + self.over_width(self.norms[1](x))
        return found


def mixer(microbatch: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(48, _WIDTH), *(Mixer(196) for _ in range(8))), torch.randn(microbatch, 196, 48)


class Recurrent(nn.Module):
    """A layer of gated recurrent units over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(_WIDTH, _WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.cells(x)[0]
        return found


def recurrent(microbatch: int) -> tuple[nn.Module, Any]:
    words = nn.Embedding(4096, _WIDTH)
    model = nn.Sequential(words, *(Recurrent() for _ in range(6)), nn.Linear(_WIDTH, 4096))
    return model, torch.randint(4096, (microbatch, 96))
