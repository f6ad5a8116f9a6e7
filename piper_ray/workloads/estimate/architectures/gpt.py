"""Decoders in GPT's line: layer norms with biases, a feed-forward part without a gate, learned or other positions.

What each config ``differs`` in is what its class in Hugging Face's transformers has otherwise than Llama's.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import (
    BIASED,
    LAYER_NORM,
    DecoderConfig,
    DecoderPaths,
    but,
    family,
    like,
)
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Described
from piper_ray.workloads.estimate.families import Config, Count, Flag, Ratio, Share, Text, Window, key

_GPT_PATHS = DecoderPaths("transformer.wte", "transformer.h")
_GPT = but(
    norm=LAYER_NORM, gated=False, query_bias=True, output_bias=True, inner_bias=True, rotary=False, paths=_GPT_PATHS
)
"""What GPT-2's rules have otherwise than Llama's, but for its positions."""

_POSITIONS = attrgetter("max_position_embeddings")
_ROTARY = but(_GPT, rotary=True, paths=DecoderPaths("model.embed_tokens", "model.layers"))
_WORDS = but(_GPT, paths=DecoderPaths("transformer.word_embeddings", "transformer.h"))


def _biased(bias: Any, *others: str) -> dict[str, Any]:
    """The same of all biases of a layer, and of others."""
    return dict.fromkeys(("query_bias", "output_bias", "inner_bias", *others), bias)


def _above_zero(name: str) -> Callable[[Any], bool]:
    """Whether a key says more than 0."""
    return lambda config: getattr(config, name) > 0


def _if(name: str, then: object, otherwise: object) -> Callable[[Any], object]:
    """The one or the other by a key."""
    return lambda config: then if getattr(config, name) else otherwise


class _OwnKeysConfig(DecoderConfig):
    """Decoders in which each head has its own keys and values, whatever else the config says."""

    @property
    def key_heads(self) -> int:
        return self.num_attention_heads


class Gpt2Config(_OwnKeysConfig):
    """``gpt2`` and its likes with learned positions."""

    max_position_embeddings: Count = key("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    resid_pdrop: Share = 0.1
    tie_word_embeddings: Flag = True

    differs = but(_GPT, positions=_POSITIONS, dropout=_above_zero("resid_pdrop"))


class BigCodeConfig(Gpt2Config):
    """``gpt_bigcode``: GPT-2 with one head of keys and values."""

    multi_query: Flag = True

    @property
    def key_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


class GptNeoConfig(_OwnKeysConfig):
    """``gpt_neo``: every other layer looks at a window; queries, keys and values have no bias."""

    max_position_embeddings: Count = 2048
    window_size: Window = 256
    attention_layers: Annotated[list[str], Field(description="a list of global and local")] | None = None
    resid_dropout: Share = 0.0
    tie_word_embeddings: Flag = True

    differs = but(_GPT, positions=_POSITIONS, query_bias=False, dropout=_above_zero("resid_dropout"))

    def window(self, layer: int) -> int | None:
        kinds = self.attention_layers or ["global", "local"]
        return self.window_size if kinds[layer % len(kinds)] == "local" else None


class GptjConfig(_OwnKeysConfig):
    """``gptj`` and ``codegen``: attention, without biases, and feed-forward part side by side behind one norm."""

    max_position_embeddings: Count = key("n_positions", "max_position_embeddings", "n_ctx", default=2048)
    resid_pdrop: Share = 0.0

    differs = but(
        _GPT, query_bias=False, output_bias=False, head_bias=True, rotary=True, parallel_norms=1,
        dropout=_above_zero("resid_pdrop"),
    )  # fmt: skip


class NeoxConfig(_OwnKeysConfig):
    """``gpt_neox``: side by side, with a norm each."""

    hidden_dropout: Share = 0.0
    use_parallel_residual: Flag = True
    attention_bias: Flag = True

    differs = but(
        _GPT, rotary=True, query_bias=BIASED, output_bias=BIASED, parallel_norms=_if("use_parallel_residual", 2, 0),
        dropout=_above_zero("hidden_dropout"), paths=DecoderPaths("gpt_neox.embed_in", "gpt_neox.layers", "embed_out"),
    )  # fmt: skip


class BloomConfig(_OwnKeysConfig):
    """``bloom``: linear biases for positions (ALiBi), a norm after the embedding."""

    max_position_embeddings: Count = key("seq_length", "max_position_embeddings", default=2048)
    hidden_dropout: Share = 0.0
    tie_word_embeddings: Flag = True

    differs = but(_WORDS, embedding_norm=True, dropout=_above_zero("hidden_dropout"))


class OptConfig(_OwnKeysConfig):
    """``opt``: two positions more than tokens."""

    max_position_embeddings: Count = 2048
    dropout: Share = 0.1
    enable_bias: Flag = True
    layer_norm_elementwise_affine: Flag = True
    tie_word_embeddings: Flag = True

    differs = but(
        _GPT, _biased(attrgetter("enable_bias")), norm=_if("layer_norm_elementwise_affine", LAYER_NORM, "0"),
        positions=lambda config: config.max_position_embeddings + 2, dropout=_above_zero("dropout"),
        paths=DecoderPaths("model.decoder.embed_tokens", "model.decoder.layers"),
    )  # fmt: skip


class FalconConfig(DecoderConfig):
    """``falcon``: side by side, behind one norm or, in the new architecture, one each; keys and values shared."""

    bias: Flag = False
    alibi: Flag = False
    multi_query: Flag = True
    parallel_attn: Flag = True
    new_decoder_architecture: Flag = False
    num_ln_in_parallel_attn: Count | None = None
    hidden_dropout: Share = 0.0
    tie_word_embeddings: Flag = True

    @property
    def key_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_key_value_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def parallel_norms(self) -> int:
        """As in ``Rules``."""
        if self.new_decoder_architecture:
            return 2 if (self.num_ln_in_parallel_attn or 2) == 2 else 1
        return int(self.parallel_attn)

    differs = but(
        _WORDS, _biased(attrgetter("bias")), rotary=_if("alibi", False, True),
        parallel_norms=attrgetter("parallel_norms"), dropout=_above_zero("hidden_dropout"),
    )  # fmt: skip


class _MptAttention(Config):
    """``attn_config`` of ``mpt``."""

    alibi: Flag = True
    kv_n_heads: Count | None = None
    attn_type: Text = "multihead_attention"


class MptConfig(DecoderConfig):
    """``mpt``: no biases anywhere, norms have none either; positions are learned without ALiBi."""

    expansion_ratio: Ratio = 4
    attn_config: _MptAttention = Field(default=_MptAttention(), description="an object")
    no_bias: Flag = True
    tie_word_embeddings: Flag = True

    @property
    def key_heads(self) -> int:
        if self.attn_config.attn_type == "multiquery_attention":
            return 1
        return self.attn_config.kv_n_heads or self.num_attention_heads

    @property
    def inner(self) -> int:
        return int(self.expansion_ratio * self.hidden_size)

    differs = but(
        _GPT, _biased(_if("no_bias", False, True)), norm=_if("no_bias", "h", LAYER_NORM),
        positions=lambda config: 0 if config.attn_config.alibi else config.max_position_embeddings,
        paths=DecoderPaths("transformer.wte", "transformer.blocks"),
    )  # fmt: skip


class PhiConfig(DecoderConfig):
    """``phi``: side by side behind one norm, biases everywhere."""

    qk_layernorm: Flag = False
    resid_pdrop: Share = 0.0

    differs = but(
        _ROTARY, head_bias=True, parallel_norms=1, query_norm=_if("qk_layernorm", "4 d", ""),
        dropout=_above_zero("resid_pdrop"),
    )  # fmt: skip


class PersimmonConfig(_OwnKeysConfig):
    """``persimmon``: squared ReLU, norms of queries and keys."""

    qk_layernorm: Flag = True

    differs = but(_ROTARY, query_norm=_if("qk_layernorm", "4 d", ""))


class Starcoder2Config(DecoderConfig):
    """``starcoder2``."""

    use_bias: Flag = True
    residual_dropout: Share = 0.0
    tie_word_embeddings: Flag = True

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        return True

    differs = but(_ROTARY, _biased(attrgetter("use_bias")), dropout=_above_zero("residual_dropout"))


class StablelmConfig(DecoderConfig):
    """``stablelm``: layer norms around Llama's parts."""

    use_qkv_bias: Flag = False
    qk_layernorm: Flag = False
    use_parallel_residual: Flag = False

    differs = but(
        norm=LAYER_NORM, query_bias=attrgetter("use_qkv_bias"), parallel_norms=_if("use_parallel_residual", 1, 0),
        query_norm=_if("qk_layernorm", "a d + g d", ""),
    )  # fmt: skip


class NemotronConfig(DecoderConfig):
    """``nemotron``: squared ReLU without a gate, layer norms, no other biases."""

    attention_bias: Flag = False
    mlp_bias: Flag = False
    max_position_embeddings: Count = 4096

    differs = but(
        norm=LAYER_NORM, gated=False, query_bias=BIASED, output_bias=BIASED, inner_bias=attrgetter("mlp_bias")
    )


class CohereConfig(DecoderConfig):
    """``cohere``: side by side behind one norm without biases."""

    attention_bias: Flag = False
    use_qk_norm: Flag = False
    max_position_embeddings: Count = 8192
    tie_word_embeddings: Flag = True

    differs = but(
        parallel_norms=1, query_bias=BIASED, output_bias=BIASED, query_norm=_if("use_qk_norm", "a d + g d", "")
    )


class _DbrxAttention(Config):
    """``attn_config`` of ``dbrx``."""

    kv_n_heads: Count = 1


class _DbrxExperts(Config):
    """``ffn_config`` of ``dbrx``."""

    ffn_hidden_size: Count = 3584
    moe_num_experts: Count = 4
    moe_top_k: Count = 1


class DbrxConfig(DecoderConfig):
    """``dbrx``: experts in every layer, norms without biases."""

    attn_config: _DbrxAttention = Field(default=_DbrxAttention(), description="an object")
    ffn_config: _DbrxExperts = Field(default=_DbrxExperts(), description="an object")

    @property
    def key_heads(self) -> int:
        return self.attn_config.kv_n_heads

    differs = but(paths=DecoderPaths("transformer.wte", "transformer.blocks"))

    def feeding(self, layer: int) -> Described:  # noqa: ARG002
        own = self.ffn_config
        return Experts(own.moe_num_experts, own.moe_top_k, own.ffn_hidden_size)


class LegacyQwenConfig(DecoderConfig):
    """``qwen``, the first of them: the width that its config gives is that of gate and values together."""

    max_position_embeddings: Count = key("seq_length", "max_position_embeddings", default=8192)
    no_bias: Flag = True

    @property
    def inner(self) -> int:
        return super().inner // 2

    differs = but(_biased(_if("no_bias", False, True)), query_bias=True, paths=_GPT_PATHS)


class ChatglmConfig(DecoderConfig):
    """``chatglm``: groups of keys and values, biases of those alone."""

    multi_query_attention: Flag = False
    add_qkv_bias: Flag = False
    add_bias_linear: Flag = False
    max_position_embeddings: Count = key("seq_length", "max_position_embeddings", default=2048)

    @property
    def key_heads(self) -> int:
        return super().key_heads if self.multi_query_attention else self.num_attention_heads

    differs = but(
        _biased(attrgetter("add_bias_linear")), query_bias=lambda config: config.add_qkv_bias or config.add_bias_linear,
        paths=DecoderPaths("transformer.embedding", "transformer.encoder.layers", "transformer.output_layer"),
    )  # fmt: skip


_CONFIGS: dict[str, type[DecoderConfig]] = {
    "gpt2": Gpt2Config, "gpt_bigcode": BigCodeConfig, "gpt_neo": GptNeoConfig, "gptj": GptjConfig,
    "codegen": GptjConfig, "gpt_neox": NeoxConfig, "bloom": BloomConfig, "opt": OptConfig, "falcon": FalconConfig,
    "RefinedWebModel": FalconConfig, "RefinedWeb": FalconConfig,
    "mpt": MptConfig, "phi": PhiConfig, "persimmon": PersimmonConfig, "starcoder2": Starcoder2Config,
    "stablelm": StablelmConfig, "nemotron": NemotronConfig, "cohere": CohereConfig,
    "cohere2": like(  # three of four layers have a sliding window
        CohereConfig, slides=lambda config, layer: (layer + 1) % config.sliding_window_pattern != 0,
        keys={"sliding_window": (Window | None, 4096), "sliding_window_pattern": (Count, 4)},
    ),
    "dbrx": DbrxConfig, "qwen": LegacyQwenConfig, "chatglm": ChatglmConfig,
}  # fmt: skip

FAMILIES = {name: family(config) for name, config in _CONFIGS.items()}
