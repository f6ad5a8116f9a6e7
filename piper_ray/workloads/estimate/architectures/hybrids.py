"""Decoders that mix tokens by state spaces, alone or beside layers of attention.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import DecoderConfig, DecoderPaths, but, family
from piper_ray.workloads.estimate.architectures.experts import Experts
from piper_ray.workloads.estimate.architectures.layers import Attention, Dense, Described
from piper_ray.workloads.estimate.architectures.llama import LlamaConfig
from piper_ray.workloads.estimate.architectures.mixtures import ExpertsConfig, SparseStepConfig
from piper_ray.workloads.estimate.architectures.state_space import DeltaNet, Mamba, Mamba2, ShortConvolution
from piper_ray.workloads.estimate.families import Config, Count, Flag, Number, Numbers, Ratio, Texts, key
from piper_ray.workloads.formats.faults import Faults

_Rank = Annotated[int | str, Field(description='a whole number or "auto"')]
_BACKBONE = DecoderPaths("backbone.embeddings", "backbone.layers")


class MambaConfig(DecoderConfig):
    """``mamba`` and ``falcon_mamba``: nothing but mixers."""

    num_attention_heads: Count = 1
    state_size: Count = 16
    conv_kernel: Count = 4
    expand: Ratio = 2
    time_step_rank: _Rank = "auto"
    use_bias: Flag = False
    use_conv_bias: Flag = True
    tie_word_embeddings: Flag = True
    max_position_embeddings: Count = 2**20

    @property
    def inner(self) -> int:
        return self.intermediate_size or int(self.expand * self.hidden_size)

    differs = but(paths=_BACKBONE)

    def mixing(self, layer: int) -> Described:  # noqa: ARG002
        rank = _rank(self.time_step_rank, self.hidden_size)
        return Mamba(self.inner, self.state_size, self.conv_kernel, rank, self.use_bias, self.use_conv_bias)

    def feeding(self, layer: int) -> Described | None:  # noqa: ARG002
        return None

    def check(self, faults: Faults) -> None:
        """There are no heads to check."""


class Mamba2Config(MambaConfig):
    """``mamba2``: heads of one size."""

    num_attention_heads: Count = key("num_heads", default=128)
    head_dim: Count | None = 64
    state_size: Count = 128
    n_groups: Count = 8
    chunk_size: Count = 256

    def mixing(self, layer: int) -> Described:  # noqa: ARG002
        inner = int(self.expand * self.hidden_size)
        return Mamba2(
            inner, self.num_attention_heads, self.head_dim or inner // self.num_attention_heads, self.n_groups,
            self.state_size, self.conv_kernel, self.chunk_size, self.use_bias, self.use_conv_bias,
        )  # fmt: skip


class JambaConfig(ExpertsConfig):
    """``jamba``: attention in one of eight layers, experts in every other one."""

    num_experts: Number = key("num_experts", default=16)
    attn_layer_period: Count = 8
    attn_layer_offset: Number = 4
    expert_layer_period: Count = 2
    expert_layer_offset: Number = 1
    mamba_d_state: Count = 16
    mamba_d_conv: Count = 4
    mamba_expand: Ratio = 2
    mamba_dt_rank: _Rank = "auto"
    mamba_conv_bias: Flag = True
    mamba_proj_bias: Flag = False

    @property
    def dense_layers(self) -> Sequence[int]:
        period, offset = self.expert_layer_period, self.expert_layer_offset
        return [layer for layer in range(self.layers) if self.num_experts == 1 or layer % period != offset]

    differs = but(rotary=False)

    def mixing(self, layer: int) -> Described | None:
        if layer % self.attn_layer_period == self.attn_layer_offset:
            return super().mixing(layer)
        inner = int(self.mamba_expand * self.hidden_size)
        rank = _rank(self.mamba_dt_rank, self.hidden_size)
        return Mamba(
            inner, self.mamba_d_state, self.mamba_d_conv, rank, self.mamba_proj_bias, self.mamba_conv_bias,
            parameter_norms=True,
        )  # fmt: skip


class _Mamba2Keys(Config):
    """Mamba-2's shape as hybrids name it."""

    mamba_n_heads: Count = key("mamba_n_heads", "mamba_num_heads", default=128)
    mamba_d_head: Annotated[int | str, Field(description='a whole number or "auto"')] = key(
        "mamba_d_head", "mamba_head_dim", default="auto"
    )
    mamba_n_groups: Count = key("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    mamba_d_state: Count = key("mamba_d_state", "ssm_state_size", default=256)
    mamba_d_conv: Count = key("mamba_d_conv", "conv_kernel", default=4)
    mamba_expand: Ratio = key("mamba_expand", "expand", default=2)
    mamba_chunk_size: Count = key("mamba_chunk_size", "chunk_size", default=256)
    mamba_conv_bias: Flag = key("mamba_conv_bias", "use_conv_bias", default=True)
    mamba_proj_bias: Flag = key("mamba_proj_bias", default=False)

    def mixer(self, inner: int, normed: bool = True) -> Mamba2:
        size = self.mamba_d_head if isinstance(self.mamba_d_head, int) else inner // self.mamba_n_heads
        return Mamba2(
            inner, self.mamba_n_heads, size, self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv,
            self.mamba_chunk_size, self.mamba_proj_bias, self.mamba_conv_bias, normed,
        )  # fmt: skip


class BambaConfig(LlamaConfig, _Mamba2Keys):
    """``bamba``: Mamba-2, and attention in the layers that are listed."""

    attn_layer_indices: Numbers | None = None

    def mixing(self, layer: int) -> Described | None:
        if layer in (self.attn_layer_indices or ()):
            return super().mixing(layer)
        return self.mixer(int(self.mamba_expand * self.hidden_size))


class GraniteHybridConfig(ExpertsConfig, _Mamba2Keys):
    """``granitemoehybrid``: Mamba-2 or attention by ``layer_types``, a shared expert beside the others or alone."""

    shared_intermediate_size: Number = 1024
    num_experts: Number = key("num_local_experts", default=8)

    @property
    def shared_inner(self) -> int:
        return self.shared_intermediate_size

    @property
    def inner(self) -> int:
        return super().inner if self.num_experts else self.shared_intermediate_size

    @property
    def expert_inner(self) -> int:
        return self.intermediate_size or 1

    def mixing(self, layer: int) -> Described | None:
        if self.layer_types and layer < len(self.layer_types) and self.layer_types[layer] == "attention":
            return super().mixing(layer)
        return self.mixer(int(self.mamba_expand * self.hidden_size))


class NemotronHybridConfig(LlamaConfig, _Mamba2Keys):
    """``nemotron_h``: each layer is a mixer (M), attention (*) or a feed-forward part (-), by a pattern."""

    hybrid_override_pattern: Annotated[str, Field(pattern=r"^[M*-]+$", description="a text of M, * and -")]
    attention_head_dim: Count | None = key("attention_head_dim", "head_dim", default=None)

    @property
    def head_size(self) -> int:
        return self.attention_head_dim or super().head_size

    differs = but(LlamaConfig.differs, gated=False, rotary=False, paths=_BACKBONE)

    def _letter(self, layer: int) -> str:
        return self.hybrid_override_pattern[layer % len(self.hybrid_override_pattern)]

    def mixing(self, layer: int) -> Described | None:
        letter = self._letter(layer)
        if letter == "M":
            size = self.mamba_d_head if isinstance(self.mamba_d_head, int) else 64
            return self.mixer(self.mamba_n_heads * size)
        return super().mixing(layer) if letter == "*" else None

    def feeding(self, layer: int) -> Described | None:
        return Dense(self.inner) if self._letter(layer) == "-" else None


class Qwen3NextConfig(SparseStepConfig):
    """``qwen3_next``: gated delta nets, and attention with a gate in one of four layers."""

    num_experts: Number = key("num_experts", default=512)
    num_experts_per_tok: Count = key("num_experts_per_tok", default=10)
    linear_num_key_heads: Count = 16
    linear_key_head_dim: Count = 128
    linear_num_value_heads: Count = 32
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4
    full_attention_interval: Count = 4

    differs = but(LlamaConfig.differs, query_norm="2 d")

    def mixing(self, layer: int) -> Described:
        full = (layer + 1) % self.full_attention_interval == 0
        if self.layer_types and layer < len(self.layer_types):
            full = self.layer_types[layer] == "full_attention"
        if full:
            return Attention(self.num_attention_heads, self.key_heads, self.head_size, output_gate=True)
        return DeltaNet(
            self.linear_num_key_heads, self.linear_key_head_dim, self.linear_num_value_heads,
            self.linear_value_head_dim, self.linear_conv_kernel_dim,
        )  # fmt: skip

    def experts(self) -> Experts:
        return replace(super().experts(), shared_gate=True)


class Lfm2Config(LlamaConfig):
    """``lfm2``: short convolutions, and attention with norms of queries and keys in some layers."""

    layer_types: Texts | None = None
    full_attn_idxs: Numbers | None = None
    conv_L_cache: Count = 3  # noqa: N815
    conv_bias: Flag = False
    block_auto_adjust_ff_dim: Flag = True
    block_multiple_of: Count = 256
    block_ffn_dim_multiplier: Ratio = 1.0
    intermediate_size: Count | None = key("intermediate_size", "block_ff_dim")
    tie_word_embeddings: Flag = key("tie_word_embeddings", "tie_embedding", default=True)

    @property
    def inner(self) -> int:
        if not self.block_auto_adjust_ff_dim:
            return super().inner
        inner = int(self.block_ffn_dim_multiplier * int(2 * super().inner / 3))
        return self.block_multiple_of * math.ceil(inner / self.block_multiple_of)

    differs = but(query_norm="2 d")

    def mixing(self, layer: int) -> Described | None:
        if self.layer_types and layer < len(self.layer_types):
            attends = self.layer_types[layer] == "full_attention"
        else:
            attends = self.full_attn_idxs is None or layer in self.full_attn_idxs
        convolution = ShortConvolution(self.hidden_size, self.conv_L_cache, self.conv_bias)
        return super().mixing(layer) if attends else convolution


def _rank(rank: int | str, width: int) -> int:
    return rank if isinstance(rank, int) else math.ceil(width / 16)


_CONFIGS: dict[str, type[DecoderConfig]] = {
    "mamba": MambaConfig, "falcon_mamba": MambaConfig, "mamba2": Mamba2Config, "jamba": JambaConfig,
    "bamba": BambaConfig, "granitemoehybrid": GraniteHybridConfig, "nemotron_h": NemotronHybridConfig,
    "qwen3_next": Qwen3NextConfig, "lfm2": Lfm2Config,
}  # fmt: skip

FAMILIES = {name: family(config) for name, config in _CONFIGS.items()}
