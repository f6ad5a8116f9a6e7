"""A small GPT that learns to count: what each schedule's late weights do to training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from inputs.pytorch.small_gpt import SmallGpt

_TOKENS, _WORDS = 16, 64


def counting(microbatch: int) -> tuple[nn.Module, Iterator[torch.Tensor], object]:
    """Each sequence counts on from a word of chance, in steps of 1 or 3."""
    return SmallGpt(4, 64, 4, _TOKENS, _WORDS, 1), _sequences(microbatch), _loss


def _sequences(microbatch: int) -> Iterator[torch.Tensor]:
    while True:
        first, step = torch.randint(_WORDS, (microbatch, 1)), 1 + 2 * torch.randint(2, (microbatch, 1))
        yield (first + step * torch.arange(_TOKENS)) % _WORDS


def _loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())
