"""Models whose plans are exported for torch: what happens in them between the modules that are their layers.

Each function is a factory for ``profile``; ``LOSSES`` has the loss of each, and ``batch`` makes its microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)

HERE = "tests.export_models"
WIDTH, TOKENS, WORDS = 8, 6, 16


def relus(microbatch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Activations of a Sequential are no layers of their own."""
    parts: list[nn.Module] = []
    for _ in range(5):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 2), nn.Tanh()), (torch.zeros(microbatch, WIDTH),)


class Residuals(nn.Module):
    """Sums and functional calls over all stages, an input that several layers read, and a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("even", torch.arange(WIDTH) % 2 == 0)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        first = x = functional.gelu(self.enter(x)) * scale
        for layer in self.layers:
            x = functional.layer_norm(torch.tanh(layer(x)) + first * scale, (WIDTH,))
        return {"out": self.leave(x).masked_fill(self.even, 0.0), "first": first}


def residuals(microbatch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Residuals(), {"x": torch.zeros(microbatch, WIDTH), "scale": torch.ones(microbatch, 1)}


class Tied(nn.Module):
    """Two layers behind each other have one weight; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.other.weight = self.one.weight
        self.again, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.one(self.first(x)).relu())
        x = self.again(self.again(x).relu()) + x
        result: torch.Tensor = self.last(x.sigmoid())
        return result


def tied(microbatch: int) -> tuple[nn.Module, torch.Tensor]:
    return Tied(), torch.zeros(microbatch, WIDTH)


class Mixture(nn.Module):
    """Each sample goes to one of its experts: which of these get any differs between microbatches, and replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, chosen = x.clone(), x.argmax(dim=-1)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                result[chosen == number] += expert(x[chosen == number]).tanh()
        return result


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.leave(x)
        return result


def mixtures(microbatch: int) -> tuple[nn.Module, torch.Tensor]:
    return Mixtures(), torch.randn(microbatch, WIDTH)


class Rotary(nn.Module):
    """Cosines and sines of positions, which every block gets; it has no parameters."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (100.0 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self.frequencies
        twice = torch.cat([angles, angles], dim=-1)
        return twice.cos().to(x.dtype), twice.sin().to(x.dtype)


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor]:
        queries, keys, values = self.qkv(self.input_layernorm(hidden_states)).chunk(3, dim=-1)
        queries, keys = _turned(queries, *position_embeddings), _turned(keys, *position_embeddings)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=attention_mask)
        x = hidden_states + self.out(mixed)
        return (x + self.down(functional.silu(self.up(self.post_attention_layernorm(x)))),)


class RotaryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(4))
        self.norm, self.rotary_emb = RmsNorm(), Rotary()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = self.rotary_emb(x, positions)
        causal = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device))
        mask = causal[None] & attention_mask.bool()[:, None, :]
        for layer in self.layers:
            (x,) = layer(x, attention_mask=mask, position_embeddings=embeddings)
        result: torch.Tensor = self.norm(x)
        return result


class Scores:
    """What such models return: an object with tensors, and without."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.loss = logits, None


class RotaryForCausalLM(nn.Module):
    """As such models are commonly made: modules within modules, masks and rotations passed to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.model = RotaryModel()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool = True) -> Scores:
        if use_cache:
            raise ValueError("this model is trained without a cache")
        return Scores(self.lm_head(self.model(input_ids, attention_mask)))


def rotary(microbatch: int) -> tuple[nn.Module, dict[str, object]]:
    words = torch.zeros(microbatch, TOKENS, dtype=torch.int64)
    return RotaryForCausalLM(), {"input_ids": words, "attention_mask": torch.ones_like(words), "use_cache": False}


def _squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def _both(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output["out"], target) + output["first"].abs().mean()


def _next_word(output: Scores, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "relus": _squares, "residuals": _both, "tied": _squares, "mixtures": _squares, "rotary": _next_word,
}  # fmt: skip


def batch(name: str, samples: int) -> tuple[dict[str, Any], Any]:
    """Inputs by the names of the model's arguments, and targets, of a number of samples."""
    if name == "rotary":
        words = torch.randint(WORDS, (samples, TOKENS))
        kept = torch.rand(samples, TOKENS) < 0.8
        kept[:, 0] = True
        return {"input_ids": words, "attention_mask": kept.long(), "use_cache": False}, words.roll(-1, 1)
    x = torch.randn(samples, WIDTH)
    if name == "residuals":
        return {"x": x, "scale": torch.rand(samples, 1) + 0.5}, torch.randn(samples, WIDTH)
    return {"input" if name == "relus" else "x": x}, torch.randn(samples, 2 if name == "relus" else WIDTH)
