"""Decoders in Llama's line: RMS norms, rotary positions, a gated feed-forward part, keys and values shared by groups.

Each family is a row of ``_CONFIGS``: what its config's class in Hugging Face's transformers has otherwise than another.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from piper_ray.workloads.estimate.architectures.decoder import (
    BIASED,
    DecoderConfig,
    DecoderPaths,
    always,
    but,
    family,
    like,
)
from piper_ray.workloads.estimate.families import Count, Flag, Number, Window, key
from piper_ray.workloads.formats.faults import Words


class LlamaConfig(DecoderConfig):
    """``llama``."""

    intermediate_size: Count | None = key("intermediate_size", "ffn_hidden_size", "mlp_hidden_size", "d_ff")
    attention_bias: Flag = False
    mlp_bias: Flag = False

    differs = but(query_bias=BIASED, output_bias=BIASED, inner_bias=attrgetter("mlp_bias"))


class Qwen2Config(LlamaConfig):
    """``qwen2``: as Llama, with a bias on queries, keys and values."""

    use_sliding_window: Flag = False
    max_window_layers: Number = 28

    differs = but(query_bias=True)

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.use_sliding_window else None


_WINDOW = {"sliding_window": (Window | None, 4096)}
_TIED = {"tie_word_embeddings": (Flag, True)}
_BIASED = {"attention_bias": (Flag, True)}
_PATTERN = Annotated[str | int, Words("a text or a whole number")]
_LLAMA = LlamaConfig.differs
_NORMED = but(query_norm="2 d")
_AFTER = but(_LLAMA, norms="after", query_norm="a d + g d")
_USE_BIAS, _BIAS = attrgetter("use_bias"), attrgetter("bias")
_INTERN_PATHS = DecoderPaths("model.tok_embeddings", "model.layers", "output")


def _even(_config: object, layer: int) -> bool:
    """Every other layer, the first one too."""
    return layer % 2 == 0


def _by_pattern(config: Any, layer: int) -> bool:
    """All layers but each so manieth, or the L of a text that is gone through again and again, but for the last."""
    pattern = config.sliding_window_pattern
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L" and layer < config.layers - 1 if pattern else False
    return bool(pattern) and (layer + 1) % int(pattern or 1) != 0


_MISTRAL = like(LlamaConfig, {}, always)  # every layer has the sliding window, if there is one
_MINICPM = like(LlamaConfig, keys=_TIED)
_INTERNLM = like(
    LlamaConfig, but(query_bias=_BIAS, output_bias=_BIAS, paths=_INTERN_PATHS), keys={"bias": (Flag, False)}
)

_CONFIGS: dict[str, type[DecoderConfig]] = {
    "llama": LlamaConfig, "mistral": _MISTRAL, "ministral": _MISTRAL, "phi3": _MISTRAL,
    "qwen2": Qwen2Config,
    "qwen3": like(Qwen2Config, but(_NORMED, query_bias=BIASED, output_bias=BIASED)),
    "gemma": _MINICPM,
    "gemma2": like(LlamaConfig, but(_LLAMA, norms="both"), _even, {**_TIED, **_WINDOW}),
    "gemma3_text": like(  # five of six layers have the window
        LlamaConfig, but(_LLAMA, _NORMED, norms="both"), _by_pattern,
        {**_TIED, **_WINDOW, "sliding_window_pattern": (Count, 6)},
    ),
    "granite": LlamaConfig,
    "olmo": like(LlamaConfig, but(_LLAMA, norm="0")),  # norms without parameters
    "olmo2": like(LlamaConfig, _AFTER),  # norms of queries and keys go over all heads
    "olmo3": like(LlamaConfig, _AFTER, lambda _config, layer: (layer + 1) % 4 != 0, _WINDOW),
    "glm": like(LlamaConfig, but(query_bias=BIASED), keys=_BIASED),
    "glm4": like(LlamaConfig, but(query_bias=BIASED, norms="both"), keys=_BIASED),
    "seed_oss": like(
        LlamaConfig, but(_LLAMA, output_bias=attrgetter("attention_out_bias")),
        keys={**_BIASED, "attention_out_bias": (Flag, False)},
    ),
    "smollm3": like(
        LlamaConfig, slides=lambda config, _layer: config.use_sliding_window,
        keys={**_TIED, "use_sliding_window": (Flag, False)},
    ),
    "exaone4": like(
        LlamaConfig, but(_NORMED, norms="after"), _by_pattern, {"sliding_window_pattern": (_PATTERN | None, 4)}
    ),
    "arcee": like(LlamaConfig, but(_LLAMA, gated=False)),  # squared ReLU without a gate
    # Its activation function has two numbers that are left out here.
    "apertus": like(LlamaConfig, but(_LLAMA, _NORMED, gated=False)),
    "hunyuan_v1_dense": like(LlamaConfig, but(_LLAMA, _NORMED)),
    "ernie4_5": like(
        LlamaConfig, but(query_bias=_USE_BIAS, output_bias=_USE_BIAS, inner_bias=_USE_BIAS),
        keys={**_TIED, "use_bias": (Flag, False)},
    ),
    "helium": LlamaConfig, "internlm": _INTERNLM, "internlm2": _INTERNLM, "internlm3": LlamaConfig,
    "baichuan": LlamaConfig, "minicpm": _MINICPM, "Yi": LlamaConfig,
}  # fmt: skip

FAMILIES = {name: family(config) for name, config in _CONFIGS.items()}
