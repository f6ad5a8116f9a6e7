"""The rules of rows in the table of families beyond keys: functions whose parameters are keys and facts by name.
``layer`` is the number of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

LAYER_NORM = "2 h"
"""Parameters of a layer norm: weights and biases."""

RMS_NORM = "h"

_RMS = {"rms_norm_eps", "rms_norm_epsilon", "rms_norm", "use_rms_norm"}
_ROTARY = {"rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "rotary_dim", "partial_rotary_factor"}
_LAYER = {"layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon"}
_POSITIONS = {"n_positions", "n_ctx"}
_UNGATED = ("relu", "relu2", "squared_relu", "relu_squared")


# Widths.


def inner_adjusted_if_said(
    said_inner: int, block_auto_adjust_ff_dim: bool, block_ffn_dim_multiplier: float, block_multiple_of: int
) -> int:
    """The width as LFM2 rounds two thirds of it."""
    if not block_auto_adjust_ff_dim:
        return said_inner
    inner = int(block_ffn_dim_multiplier * int(2 * said_inner / 3))
    return block_multiple_of * math.ceil(inner / block_multiple_of)


def inner_with_or_of_shared_expert(
    num_experts: int, intermediate_size: int | None, shared_intermediate_size: int, width: int
) -> int:
    """The width of the dense part, which is the shared expert if there are no others."""
    return (intermediate_size or 4 * width) if num_experts else shared_intermediate_size


def inner_of_shared_experts(
    shared_expert_intermediate_size: int | None, n_shared_experts: int | None, expert_inner: int
) -> int:
    """The width of all shared experts together."""
    return shared_expert_intermediate_size or (n_shared_experts or 0) * expert_inner


def width_of_a_head(hidden_size: int, num_attention_heads: int) -> int:
    return hidden_size // num_attention_heads


def time_step_width(time_step_rank: int | str, hidden_size: int) -> int:
    return time_step_rank if isinstance(time_step_rank, int) else math.ceil(hidden_size / 16)


def size_of_mixer_heads(mixer_head_dim: int | str | None, mixer_inner: int, mixer_heads: int) -> int:
    return mixer_head_dim if isinstance(mixer_head_dim, int) else mixer_inner // mixer_heads


def size_of_mixer_heads_or_64(mixer_head_dim: int | str) -> int:
    return mixer_head_dim if isinstance(mixer_head_dim, int) else 64


# Heads of keys and values.


def falcon_key_heads(
    new_decoder_architecture: bool, multi_query: bool, num_key_value_heads: int | None, num_attention_heads: int
) -> int:
    if new_decoder_architecture:
        return num_key_value_heads or num_attention_heads
    return 1 if multi_query else num_attention_heads


def mpt_key_heads(attention_type: str, said_key_heads: int | None, num_attention_heads: int) -> int:
    return 1 if attention_type == "multiquery_attention" else said_key_heads or num_attention_heads


def chatglm_key_heads(multi_query_attention: bool, num_key_value_heads: int | None, num_attention_heads: int) -> int:
    return (multi_query_attention and num_key_value_heads) or num_attention_heads


# Norms, of the width h, the size of a head d, and all heads a d and g d; and what is around parts.


def falcon_parallel_norms(
    new_decoder_architecture: bool, num_ln_in_parallel_attn: int | None, parallel_attn: bool
) -> int:
    if not new_decoder_architecture:
        return int(parallel_attn)
    return 2 if (num_ln_in_parallel_attn or 2) == 2 else 1


def norm_of_type(norm_type: str) -> str:
    return LAYER_NORM if norm_type == "layer_norm" else RMS_NORM


# Positions.


# Which layers have the sliding window, and how many tokens a layer sees by it.


def said_sliding(layer: int, layer_types: Sequence[str] | None, slides: bool) -> bool:
    said = _said(layer, layer_types)
    return slides if said is None else "sliding" in said


def said_sliding_if_used(layer: int, layer_types: Sequence[str] | None, slides: bool, use_sliding_window: bool) -> bool:
    return use_sliding_window and said_sliding(layer, layer_types, slides)


def window_where_local(layer: int, attention_layers: Sequence[str] | None, window_size: int) -> int | None:
    """The window, from a list that repeats; without a list every other layer has one."""
    kinds = attention_layers or ["global", "local"]
    return window_size if kinds[layer % len(kinds)] == "local" else None


def chunk_where_rotary(
    layer: int, no_rope_layers: Sequence[int] | None, no_rope_layer_interval: int, attention_chunk_size: int | None
) -> int | None:
    if no_rope_layers and layer < len(no_rope_layers):
        rotary = bool(no_rope_layers[layer])
    else:
        rotary = (layer + 1) % no_rope_layer_interval != 0
    return attention_chunk_size if rotary else None


def by_pattern(layer: int, sliding_window_pattern: str | int | None, num_hidden_layers: int) -> bool:
    """Whether a layer has the window: all but each n-th layer have it, or those with an L in a repeating text, except
    the last layer."""
    pattern = sliding_window_pattern
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L" and layer < num_hidden_layers - 1 if pattern else False
    return bool(pattern) and (layer + 1) % int(pattern or 1) != 0


def in_last_layers(layer: int, max_window_layers: int) -> bool:
    return layer >= max_window_layers


# Which layers have no experts.


def in_first_layers(layer: int, first_k_dense_replace: int) -> bool:
    return layer < first_k_dense_replace


def said_or_first_layers(layer: int, mlp_layer_types: Sequence[str] | None, first_k_dense_replace: int) -> bool:
    if mlp_layer_types is not None:
        return _said(layer, mlp_layer_types) == "dense"
    return layer < first_k_dense_replace


def off_the_steps(layer: int, decoder_sparse_step: int, mlp_only_layers: Sequence[int]) -> bool:
    return layer in mlp_only_layers or (layer + 1) % decoder_sparse_step != 0


def unlisted_or_off_the_steps(layer: int, moe_layers: Sequence[int] | None, interleave_moe_layer_step: int) -> bool:
    return (layer + 1) % interleave_moe_layer_step != 0 if moe_layers is None else layer not in moe_layers


def first_or_off_the_steps(layer: int, first_k_dense_replace: int, moe_layer_freq: int | Sequence[int]) -> bool:
    if not isinstance(moe_layer_freq, int):
        return layer >= len(moe_layer_freq) or not moe_layer_freq[layer]
    return layer < first_k_dense_replace or (moe_layer_freq > 0 and layer % moe_layer_freq != 0)


def outside_or_off_the_steps(
    layer: int,
    moe_layer_start_index: int,
    moe_layer_end_index: int,
    moe_layer_interval: int,
    num_hidden_layers: int,
) -> bool:
    last = num_hidden_layers - 1 if moe_layer_end_index < 0 else moe_layer_end_index
    return not moe_layer_start_index <= layer <= last or (layer + 1) % moe_layer_interval != 0


def off_the_beat_of_experts(layer: int, num_experts: int, expert_layer_period: int, expert_layer_offset: int) -> bool:
    return num_experts == 1 or layer % expert_layer_period != expert_layer_offset


# Which part (`decoder.PARTS`) mixes tokens in a layer, and which feeds forward.


def dense_or_experts(num_experts: int, dense: bool) -> str:
    return "experts" if num_experts and not dense else "dense"


def attention_on_the_beat(layer: int, attn_layer_period: int, attn_layer_offset: int) -> str:
    return "attention" if layer % attn_layer_period == attn_layer_offset else "mamba"


def attention_where_listed(layer: int, attn_layer_indices: Sequence[int] | None) -> str:
    return "attention" if layer in (attn_layer_indices or ()) else "mamba2"


def attention_where_said(layer: int, layer_types: Sequence[str] | None) -> str:
    return "attention" if _said(layer, layer_types) == "attention" else "mamba2"


def attention_at_the_interval(layer: int, layer_types: Sequence[str] | None, full_attention_interval: int) -> str:
    said = _said(layer, layer_types)
    full = (layer + 1) % full_attention_interval == 0 if said is None else said == "full_attention"
    return "attention" if full else "delta_net"


def attention_where_full(layer: int, layer_types: Sequence[str] | None, full_attn_idxs: Sequence[int] | None) -> str:
    said = _said(layer, layer_types)
    listed = full_attn_idxs is None or layer in full_attn_idxs
    full = listed if said is None else said == "full_attention"
    return "attention" if full else "short_convolution"


def mixing_by_letter(layer: int, hybrid_override_pattern: str) -> str | None:
    return {"M": "mamba2", "*": "attention"}.get(_letter(layer, hybrid_override_pattern))


def feeding_by_letter(layer: int, hybrid_override_pattern: str) -> str | None:
    return {"-": "dense", "E": "experts"}.get(_letter(layer, hybrid_override_pattern))


def _letter(layer: int, pattern: str) -> str:
    return pattern[layer % len(pattern)]


def _said(layer: int, types: Sequence[str] | None) -> str | None:
    """The kind that the list gives for this layer; None if it says nothing about it."""
    return types[layer] if types and layer < len(types) else None


# Projectors between a tower and a decoder: biases, and how many of the tower's tokens become one.


def unless_said_false(multimodal_projector_bias: bool | None) -> bool:
    return multimodal_projector_bias is not False


def if_said_true(multimodal_projector_bias: bool | None) -> bool:
    return multimodal_projector_bias is True


def square_of_towers_merged_side(vision_config: Mapping[str, object]) -> int:
    side = vision_config.get("spatial_merge_size", 2)
    return side**2 if isinstance(side, int) else 4


def square_of_shuffled_side(downsample_ratio: float) -> int:
    return round(1 / downsample_ratio) ** 2


def further_layers_seen(vision_config: Mapping[str, object]) -> int:
    """The number of the tower's layers that the decoder reads besides the last one."""
    seen = vision_config.get("deepstack_visual_indexes", [8, 16, 24])
    return len(seen) if isinstance(seen, list) else 3


# What the keys of an unknown family show.


def says_layer_norm(given: AbstractSet[str]) -> bool:
    """Whether the model has layer norms, as GPT's family has, rather than RMS norms."""
    return bool(given & _LAYER) and not given & _RMS


def positions_as_told(
    layer_norm: bool, given: AbstractSet[str], position_embedding_type: str | None, max_position_embeddings: int
) -> int:
    """The number of learned positions, if the config says so, or describes only positions like GPT-2's."""
    learned = layer_norm and bool(given & _POSITIONS) and not given & _ROTARY
    if position_embedding_type is not None:
        learned = position_embedding_type in ("absolute", "learned", "learned_absolute")
    return max_position_embeddings if learned else 0


def says_gate(layer_norm: bool, hidden_act: str) -> bool:
    return not (layer_norm and "gelu" in hidden_act) and hidden_act not in _UNGATED
