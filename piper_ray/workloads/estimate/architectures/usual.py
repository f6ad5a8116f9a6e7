"""A decoder of a family that we do not know, as far as the usual keys of its config tell what it is."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.workloads.estimate.architectures.decoder import LAYER_NORM, Rules, family
from piper_ray.workloads.estimate.architectures.layers import Described, LatentAttention
from piper_ray.workloads.estimate.architectures.mixtures import ExpertsConfig
from piper_ray.workloads.estimate.families import Count, Flag, Number, Text, Texts, key

_RMS = {"rms_norm_eps", "rms_norm_epsilon", "rms_norm", "use_rms_norm"}
_ROTARY = {"rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "rotary_dim", "partial_rotary_factor"}
_LAYER = {"layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon"}
_POSITIONS = {"n_positions", "n_ctx"}
_UNGATED = ("relu", "relu2", "squared_relu", "relu_squared")


class UsualConfig(ExpertsConfig):
    """Llama's layers, but where the config's own keys tell of other norms, biases, gates, experts or attention."""

    intermediate_size: Count | None = key(
        "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_dim", "mlp_hidden_size",
        default=None,
    )  # fmt: skip
    vocab_size: Count = key("vocab_size", "padded_vocab_size", "n_vocab", default=32000)
    num_experts: Number = key(
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", default=0
    )
    tie_word_embeddings: Flag | None = None  # type: ignore[assignment]
    first_k_dense_replace: Number = key("first_k_dense_replace", "num_dense_layers", default=0)
    mlp_layer_types: Texts | None = None
    hidden_act: Text = key("hidden_act", "activation_function", "hidden_activation", "mlp_hidden_act", default="silu")
    position_embedding_type: Text | None = None
    attention_bias: Flag | None = key("attention_bias", "use_bias", "bias", default=None)  # type: ignore[assignment]
    qkv_bias: Flag | None = key("qkv_bias", "use_qkv_bias", "add_qkv_bias", default=None)
    mlp_bias: Flag | None = key("mlp_bias", "use_bias", "bias", default=None)  # type: ignore[assignment]
    qk_norm: Flag = key("use_qk_norm", "qk_layernorm", "qk_norm", default=False)
    parallel: Flag = key("use_parallel_residual", "parallel_attn", default=False)
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128

    @property
    def layer_norm(self) -> bool:
        """Layer norms, as GPT's line has them, and not RMS norms."""
        return bool(self.given & _LAYER) and not self.given & _RMS

    @property
    def tied(self) -> bool:
        """As the config says, or as GPT's line and Llama's have it."""
        return self.layer_norm if self.tie_word_embeddings is None else self.tie_word_embeddings

    @property
    def dense_layers(self) -> Sequence[int]:
        if self.mlp_layer_types is not None:
            return [layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "dense"]
        return range(self.first_k_dense_replace)

    @property
    def positions(self) -> int:
        """Learned ones: where the config says so, or speaks of positions as GPT-2 does and of no others."""
        learned = self.layer_norm and bool(self.given & _POSITIONS) and not self.given & _ROTARY
        if self.position_embedding_type is not None:
            learned = self.position_embedding_type in ("absolute", "learned", "learned_absolute")
        return self.max_position_embeddings if learned else 0

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        return True

    def rules(self) -> Rules:
        def said(*flags: bool | None) -> bool:
            """What a key says; GPT's line has biases where none does."""
            return next((flag for flag in flags if flag is not None), self.layer_norm)

        return Rules(
            norm=LAYER_NORM if self.layer_norm else "h",
            parallel_norms=1 if self.parallel else 0,
            gated=not (self.layer_norm and "gelu" in self.hidden_act) and self.hidden_act not in _UNGATED,
            query_bias=said(self.qkv_bias, self.attention_bias),
            output_bias=said(self.attention_bias),
            inner_bias=said(self.mlp_bias),
            query_norm="2 d" if self.qk_norm else "",
            positions=self.positions,
            rotary=not self.positions,
        )

    def mixing(self, layer: int) -> Described | None:
        if self.kv_lora_rank is None:
            return super().mixing(layer)
        plain, rotary, values = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return LatentAttention(self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank, rotary, plain, values)


USUAL = family(UsualConfig)
