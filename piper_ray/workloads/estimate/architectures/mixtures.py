"""Decoders whose feed-forward parts are mixtures of experts, in all layers or in some.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import (
    BIASED,
    LAYER_NORM,
    DecoderConfig,
    but,
    family,
    like,
)
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Attention, Dense, Described, LatentAttention
from piper_ray.workloads.estimate.architectures.llama import LlamaConfig, Qwen2Config
from piper_ray.workloads.estimate.families import Count, Flag, Number, Numbers, Window, key
from piper_ray.workloads.formats.faults import Faults


class ExpertsConfig(LlamaConfig):
    """What nearly every config of experts says, under the names that are in use for it."""

    num_experts: Number = key(
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", default=8
    )
    num_experts_per_tok: Count = key(
        "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk", "top_k_experts",
        default=2,
    )  # fmt: skip
    moe_intermediate_size: Count | None = key(
        "moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", default=None
    )
    n_shared_experts: Number | None = key(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", default=None
    )
    shared_expert_intermediate_size: Number | None = key(
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
        default=None,
    )  # fmt: skip

    @property
    def expert_inner(self) -> int:
        return self.moe_intermediate_size or self.inner

    @property
    def shared_inner(self) -> int:
        """Of the shared experts together."""
        return self.shared_expert_intermediate_size or (self.n_shared_experts or 0) * self.expert_inner

    @property
    def dense_layers(self) -> Sequence[int]:
        """Layers without experts."""
        return ()

    def experts(self) -> Experts:
        return Experts(self.num_experts, self.num_experts_per_tok, self.expert_inner, self.shared_inner)

    def feeding(self, layer: int) -> Described:
        if not self.num_experts:
            return Dense(self.inner)
        return Dense(self.inner, beside_experts=True) if layer in self.dense_layers else self.experts()

    def check(self, faults: Faults) -> None:
        """A token has no more experts than there are."""
        super().check(faults)
        if self.num_experts > 1 and self.num_experts_per_tok > self.num_experts:
            faults.at(
                self.called("num_experts_per_tok"),
                f"{self.num_experts_per_tok}, more than {self.called('num_experts')}; expected fewer",
            )


class MixtralConfig(ExpertsConfig):
    """``mixtral``."""

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        return True


class PhimoeConfig(MixtralConfig):
    """``phimoe``: layer norms, and a bias of the vocabulary projection if it says so."""

    num_experts: Number = key("num_local_experts", default=16)
    lm_head_bias: Flag = False

    differs = but(LlamaConfig.differs, norm=LAYER_NORM, head_bias=attrgetter("lm_head_bias"))


class SparseStepConfig(ExpertsConfig):
    """Experts in every so many layers, but not in those that are listed."""

    decoder_sparse_step: Count = 1
    mlp_only_layers: Numbers = Field(default=[])

    @property
    def dense_layers(self) -> Sequence[int]:
        return [
            layer
            for layer in range(self.layers)
            if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step
        ]


class Qwen2MoeConfig(SparseStepConfig, Qwen2Config):
    """``qwen2_moe``: a shared expert with a gate."""

    num_experts: Number = key("num_experts", default=60)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=4)
    moe_intermediate_size: Count | None = 1408
    shared_expert_intermediate_size: Number | None = 5632
    qkv_bias: Flag = True

    differs = but(query_bias=attrgetter("qkv_bias"))

    def experts(self) -> Experts:
        return replace(super().experts(), shared_gate=bool(self.shared_inner))


class Qwen3MoeConfig(SparseStepConfig, Qwen2Config):
    """``qwen3_moe``: norms of queries and keys, no shared expert."""

    num_experts: Number = key("num_experts", "num_local_experts", default=128)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=8)
    moe_intermediate_size: Count | None = 768

    differs = but(query_norm="2 d", query_bias=BIASED, output_bias=BIASED)


class GptOssConfig(ExpertsConfig):
    """``gpt_oss``: biases everywhere, also of router and experts; a sink for each head; every other layer slides."""

    num_experts: Number = key("num_local_experts", "num_experts", default=128)
    num_experts_per_tok: Count = key("num_experts_per_tok", "experts_per_token", default=4)
    attention_bias: Flag = True
    sliding_window: Window | None = 128

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def mixing(self, layer: int) -> Described:
        return Attention(self.num_attention_heads, self.key_heads, self.head_size, self.window(layer), sinks=True)

    def experts(self) -> Experts:
        return replace(super().experts(), router_bias=True, bias=True)


class Llama4Config(ExpertsConfig):
    """``llama4_text``: experts in every so many layers with a shared one; most layers see a chunk of tokens."""

    num_experts: Number = key("num_local_experts", default=16)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=1)
    intermediate_size: Count | None = 8192
    intermediate_size_mlp: Count = 16384
    interleave_moe_layer_step: Count = 1
    moe_layers: Numbers | None = None
    attention_chunk_size: Window | None = 8192
    no_rope_layers: Numbers | None = None
    no_rope_layer_interval: Count = 4
    use_qk_norm: Flag = True

    @property
    def inner(self) -> int:
        return self.intermediate_size_mlp

    @property
    def expert_inner(self) -> int:
        return self.intermediate_size or 8192

    @property
    def shared_inner(self) -> int:
        return self.expert_inner

    @property
    def dense_layers(self) -> Sequence[int]:
        if self.moe_layers is not None:
            return [layer for layer in range(self.layers) if layer not in self.moe_layers]
        return [layer for layer in range(self.layers) if (layer + 1) % self.interleave_moe_layer_step]

    def window(self, layer: int) -> int | None:
        if self.no_rope_layers and layer < len(self.no_rope_layers):
            rotary = bool(self.no_rope_layers[layer])
        else:
            rotary = (layer + 1) % self.no_rope_layer_interval != 0
        return self.attention_chunk_size if rotary else None


class DeepseekConfig(ExpertsConfig):
    """``deepseek_v2`` and ``deepseek_v3``: latent attention, shared experts, dense layers first."""

    num_experts: Number = key("n_routed_experts", "num_experts", default=256)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=8)
    n_shared_experts: Number | None = 1
    first_k_dense_replace: Number = 1
    moe_layer_freq: Annotated[int | list[int], Field(description="a whole number or a list of 0 and 1")] = 1
    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = None
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128

    num_nextn_predict_layers: Number = 0

    @property
    def predictors(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def dense_layers(self) -> Sequence[int]:
        every = self.moe_layer_freq
        if isinstance(every, list):
            return [layer for layer in range(self.layers) if layer >= len(every) or not every[layer]]
        dense = {layer for layer in range(self.layers) if every > 0 and layer % every}
        return sorted({*range(self.first_k_dense_replace), *dense})

    def mixing(self, layer: int) -> Described:  # noqa: ARG002
        return LatentAttention(
            self.num_attention_heads,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
        )

    def check(self, faults: Faults) -> None:
        """A token has no more experts than there are; widths of heads are the config's own."""
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            faults.at(
                self.called("num_experts_per_tok"),
                f"{self.num_experts_per_tok}, more than {self.called('num_experts')}; expected fewer",
            )


class Glm4MoeConfig(ExpertsConfig):
    """``glm4_moe`` and ``dots1``: DeepSeek's experts behind attention of groups."""

    num_experts: Number = key("n_routed_experts", default=128)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=8)
    moe_intermediate_size: Count | None = 1408
    n_shared_experts: Number | None = 1
    first_k_dense_replace: Number = 1
    use_qk_norm: Flag = False

    num_nextn_predict_layers: Number = 0

    differs = but(query_bias=BIASED, query_norm=lambda config: "2 d" if config.use_qk_norm else "")

    @property
    def predictors(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def dense_layers(self) -> Sequence[int]:
        return range(self.first_k_dense_replace)


class ErnieMoeConfig(ExpertsConfig):
    """``ernie4_5_moe``: experts between two layers, in every so many."""

    num_experts: Number = key("moe_num_experts", default=64)
    num_experts_per_tok: Count = key("moe_k", default=6)
    moe_intermediate_size: Count | None = 1536
    n_shared_experts: Number | None = key("moe_num_shared_experts", default=2)
    moe_layer_start_index: Number = 1
    moe_layer_end_index: Annotated[int, Field(strict=True, description="a whole number")] = -1
    moe_layer_interval: Count = 1
    use_bias: Flag = False
    tie_word_embeddings: Flag = True

    @property
    def dense_layers(self) -> Sequence[int]:
        last = self.layers - 1 if self.moe_layer_end_index < 0 else self.moe_layer_end_index
        return [
            layer
            for layer in range(self.layers)
            if not self.moe_layer_start_index <= layer <= last or (layer + 1) % self.moe_layer_interval
        ]

    def experts(self) -> Experts:
        return replace(super().experts(), bias=self.use_bias)

    differs = but(dict.fromkeys(("query_bias", "output_bias", "inner_bias", "head_bias"), attrgetter("use_bias")))


_CONFIGS: dict[str, type[DecoderConfig]] = {
    "mixtral": MixtralConfig, "phimoe": PhimoeConfig, "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig,
    "olmoe": like(  # norms of queries and keys go over all heads
        ExpertsConfig, but(LlamaConfig.differs, query_norm="a d + g d"),
        keys={
            "num_experts": (Number, key("num_experts", default=64)),
            "num_experts_per_tok": (Count, key("num_experts_per_tok", default=8)),
        },
    ),
    "granitemoe": ExpertsConfig, "granitemoeshared": ExpertsConfig,
    "gpt_oss": GptOssConfig, "llama4_text": Llama4Config, "deepseek_v2": DeepseekConfig,
    "deepseek_v3": DeepseekConfig, "kimi_k2": DeepseekConfig, "glm4_moe": Glm4MoeConfig,
    "dots1": like(Glm4MoeConfig, but(Glm4MoeConfig.differs, output_bias=BIASED), keys={"use_qk_norm": (Flag, True)}),
    "ernie4_5_moe": ErnieMoeConfig,
}  # fmt: skip

FAMILIES = {name: family(config) for name, config in _CONFIGS.items()}
