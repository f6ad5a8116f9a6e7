"""Decoders in Llama's line: RMS norms, rotary positions, a gated feed-forward part, keys and values shared by groups.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import DecoderConfig, Paths, Rules, Window, family, key
from piper_ray.workloads.estimate.families import Count, Flag


class LlamaConfig(DecoderConfig):
    """``llama``."""

    intermediate_size: Count | None = key("intermediate_size", "ffn_hidden_size", "mlp_hidden_size", "d_ff")
    attention_bias: Flag = False
    mlp_bias: Flag = False

    def rules(self) -> Rules:
        return Rules(query_bias=self.attention_bias, output_bias=self.attention_bias, inner_bias=self.mlp_bias)


class MistralConfig(LlamaConfig):
    """``mistral`` and ``phi3``: every layer has the sliding window, if there is one."""

    def rules(self) -> Rules:
        return Rules()

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        return True


class TiedConfig(LlamaConfig):
    """As Llama, with one matrix for embedding and projection."""

    tie_word_embeddings: Flag = True


class Qwen2Config(LlamaConfig):
    """``qwen2``: as Llama, with a bias on queries, keys and values."""

    use_sliding_window: Flag = False
    max_window_layers: Annotated[int, Field(strict=True, ge=0, description="a whole number >= 0")] = 28

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.use_sliding_window else None

    def rules(self) -> Rules:
        return Rules(query_bias=True)


class Qwen3Config(Qwen2Config):
    """``qwen3``: as Llama, with norms of queries and keys."""

    def rules(self) -> Rules:
        bias = self.attention_bias
        return Rules(query_norm="2 d", query_bias=bias, output_bias=bias)


class GemmaConfig(LlamaConfig):
    """``gemma``."""

    tie_word_embeddings: Flag = True


class Gemma2Config(GemmaConfig):
    """``gemma2``: norms before and after each part, every other layer with a sliding window."""

    sliding_window: Window | None = 4096

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def rules(self) -> Rules:
        return replace(super().rules(), norms="both")


class Gemma3Config(Gemma2Config):
    """``gemma3_text``: five of six layers with a sliding window, norms of queries and keys."""

    sliding_window_pattern: Count = 6

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    def rules(self) -> Rules:
        return replace(super().rules(), query_norm="2 d")


class OlmoConfig(LlamaConfig):
    """``olmo``: norms without parameters."""

    def rules(self) -> Rules:
        return replace(super().rules(), norm="0")


class Olmo2Config(LlamaConfig):
    """``olmo2``: norms after each part, and of queries and keys over all heads."""

    def rules(self) -> Rules:
        return replace(super().rules(), norms="after", query_norm="a d + g d")


class Olmo3Config(Olmo2Config):
    """``olmo3``: three of four layers with a sliding window."""

    sliding_window: Window | None = 4096

    def slides(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0


class GlmConfig(LlamaConfig):
    """``glm``: biases of queries, keys and values."""

    attention_bias: Flag = True

    def rules(self) -> Rules:
        return Rules(query_bias=self.attention_bias)


class Glm4Config(GlmConfig):
    """``glm4``: norms before and after each part."""

    def rules(self) -> Rules:
        return replace(super().rules(), norms="both")


class SeedConfig(LlamaConfig):
    """``seed_oss``: biases of queries, keys and values."""

    attention_bias: Flag = True
    attention_out_bias: Flag = False

    def rules(self) -> Rules:
        return replace(super().rules(), output_bias=self.attention_out_bias)


class SmolConfig(TiedConfig):
    """``smollm3``."""

    use_sliding_window: Flag = False

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        return self.use_sliding_window


class ExaoneConfig(LlamaConfig):
    """``exaone4``: norms after each part, and of queries and keys; three of four layers with a sliding window."""

    sliding_window_pattern: Annotated[str | int, Field(description="a text or a whole number")] | None = 4

    def slides(self, layer: int) -> bool:
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L" and layer < self.layers - 1 if pattern else False
        return bool(pattern) and (layer + 1) % int(pattern or 1) != 0

    def rules(self) -> Rules:
        return Rules(norms="after", query_norm="2 d")


class UngatedConfig(LlamaConfig):
    """``arcee``: squared ReLU without a gate."""

    def rules(self) -> Rules:
        return replace(super().rules(), gated=False)


class ApertusConfig(UngatedConfig):
    """``apertus``: without a gate, norms of queries and keys; its activation function has two numbers left out here."""

    def rules(self) -> Rules:
        return replace(super().rules(), query_norm="2 d")


class HunyuanConfig(LlamaConfig):
    """``hunyuan_v1_dense``: norms of queries and keys."""

    def rules(self) -> Rules:
        return replace(super().rules(), query_norm="2 d")


class ErnieConfig(LlamaConfig):
    """``ernie4_5``."""

    use_bias: Flag = False
    tie_word_embeddings: Flag = True

    def rules(self) -> Rules:
        bias = self.use_bias
        return Rules(query_bias=bias, output_bias=bias, inner_bias=bias)


class InternConfig(LlamaConfig):
    """``internlm`` and ``internlm2``: a bias of all that attention multiplies, or none."""

    bias: Flag = False

    def rules(self) -> Rules:
        paths = Paths("model.tok_embeddings", "model.layers", "output")
        return Rules(query_bias=self.bias, output_bias=self.bias, paths=paths)


_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig, "mistral": MistralConfig, "ministral": MistralConfig, "phi3": MistralConfig,
    "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma": GemmaConfig, "gemma2": Gemma2Config,
    "gemma3_text": Gemma3Config, "granite": LlamaConfig, "olmo": OlmoConfig, "olmo2": Olmo2Config,
    "olmo3": Olmo3Config, "glm": GlmConfig, "glm4": Glm4Config, "seed_oss": SeedConfig, "smollm3": SmolConfig,
    "exaone4": ExaoneConfig, "arcee": UngatedConfig, "apertus": ApertusConfig, "hunyuan_v1_dense": HunyuanConfig,
    "ernie4_5": ErnieConfig, "helium": LlamaConfig, "internlm": InternConfig, "internlm2": InternConfig,
    "internlm3": LlamaConfig, "baichuan": LlamaConfig, "minicpm": TiedConfig, "Yi": LlamaConfig,
}  # fmt: skip

FAMILIES = {name: family(config) for name, config in _CONFIGS.items()}
