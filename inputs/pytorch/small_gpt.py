"""A small GPT as an example of what `piper-ray profile` takes: a function that returns a model and example inputs.

    piper-ray profile inputs/pytorch/small_gpt.py:small_gpt --microbatch-size 4 -o small-gpt.toml

Arguments with these names are filled in: `microbatch` with --microbatch, and `tensor_parallel` with a degree for which
the model is to be the part of one of so many devices. All others come from --arg KEY=VALUE.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention with ``heads / tensor_parallel`` of the heads."""

    def __init__(self, width: int, heads: int, tensor_parallel: int) -> None:
        super().__init__()
        if heads % tensor_parallel:
            raise ValueError(f"{heads} heads cannot be divided over {tensor_parallel} devices")
        self.heads = heads // tensor_parallel
        self.queries_keys_values = nn.Linear(width, 3 * width // tensor_parallel)
        self.output = nn.Linear(width // tensor_parallel, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        parts = self.queries_keys_values(x).view(samples, tokens, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return result


class Block(nn.Module):
    """A transformer layer. On several devices, outputs of attention and MLP are summed over them (not done here)."""

    def __init__(self, width: int, heads: int, tensor_parallel: int) -> None:
        super().__init__()
        inner = 4 * width // tensor_parallel
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, tensor_parallel)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class SmallGpt(nn.Module):
    """Embeddings, blocks, and a head that gives scores of all words."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, words: int, tensor_parallel: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.word_embedding = nn.Embedding(words, width)
        self.position_embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, tensor_parallel) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words // tensor_parallel, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if words.shape[1] > self.tokens:
            raise ValueError(f"{words.shape[1]} tokens; there are positions for {self.tokens}")
        x = self.word_embedding(words) + self.position_embedding(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def small_gpt(
    microbatch: int,
    tensor_parallel: int = 1,
    layers: int = 12,
    width: int = 256,
    heads: int = 8,
    tokens: int = 128,
    words: int = 8192,
) -> tuple[nn.Module, torch.Tensor]:
    """The model and one microbatch of its inputs."""
    model = SmallGpt(layers, width, heads, tokens, words, tensor_parallel)
    return model, torch.randint(words, (microbatch, tokens))
