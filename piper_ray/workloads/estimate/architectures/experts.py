"""Decoders with mixtures of experts, Mixtral and DeepSeek style: expert parallelism over the t devices of a node.

Each of t devices has 1/t of the experts. Without sequence parallelism every device has every token, computes what its
experts say, and an all-reduce sums up, as after a dense feed-forward part; with it tokens go to their experts and back
by all-to-all. Experts are taken to get equal shares of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import LEGEND, LlamaConfig, check_llama, decoder_nodes
from piper_ray.workloads.estimate.architectures.text import embedding_kind, head_kind, sequences_text
from piper_ray.workloads.estimate.architectures.transformer import (
    HIDDEN,
    BlockStyle,
    all_reduce,
    attention,
    attention_output,
    core,
    feed_forward,
    norm,
    residual,
)
from piper_ray.workloads.estimate.families import Count, Family, Microbatch
from piper_ray.workloads.estimate.operators import (
    Architecture,
    Exchange,
    KeptBytes,
    LayerKind,
    Operator,
    Product,
    Split,
)
from piper_ray.workloads.formats.faults import Faults

LEGEND_EXPERTS = {
    **LEGEND,
    "E": "experts",
    "e": "experts that a token goes to",
    "m": "inner width of an expert",
    "S": "inner width of the shared experts together",
    "Q": "rank of the queries",
    "C": "rank of the keys and values",
    "r": "rotary part of a head",
    "n": "other part of a head",
    "v": "size of a head's values",
}


class MixtralConfig(LlamaConfig):
    """``mixtral``: every layer's feed-forward part is a mixture of experts."""

    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


class DeepseekConfig(LlamaConfig):
    """``deepseek_v2`` and ``deepseek_v3``: latent attention, shared experts, dense layers first."""

    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    n_shared_experts: Count = 1
    first_k_dense_replace: Annotated[int, Field(strict=True, ge=0, description="a whole number >= 0")] = 1
    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = None
    qk_rope_head_dim: Count = 64
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128


def routed(style: BlockStyle) -> tuple[Operator, ...]:
    """Router, tokens sorted by expert, the experts' products, and the weighted sum of what they say."""
    return (
        Operator(
            "router",
            products=(Product("s b", "E", "h", divided="tokens"),),
            split=Split.SEQUENCE,
            forward_bytes="8 s b E",
            backward_bytes="8 s b E",
            parameters="h E",
            parameters_split=Split.WHOLE,
            saved=(KeptBytes(HIDDEN, Split.SEQUENCE, cheap=style.fused), KeptBytes("4 s b E", Split.SEQUENCE)),
        ),
        Operator(
            "tokens to experts",
            forward_bytes="8 s b e h",  # sorted by expert, sent, and sorted again by those that are here
            backward_bytes="8 s b e h",
            saved=(KeptBytes("2 s b e h", Split.TENSOR),),
        ),
        Operator(
            "experts in",
            products=(Product("s b e / E", "2 m", "h", "E", divided="count"),),
            parameters="2 h m E",
        ),
        Operator(
            "experts' activation function",
            forward_bytes="6 s b e m",
            backward_bytes="10 s b e m",
            saved=(KeptBytes("4 s b e m", Split.TENSOR),),
            cheap=style.fused,
        ),
        Operator(
            "experts out",
            products=(Product("s b e / E", "h", "m", "E", divided="count"),),
            parameters="h m E",
            saved=(KeptBytes("2 s b e m", Split.TENSOR, cheap=style.fused),),
        ),
        Operator(
            "sum over experts",
            forward_bytes="14 s b e h + 2 s b h",  # sorted back twice, weighted, added up
            backward_bytes="14 s b e h",
            saved=(KeptBytes("2 s b e h", Split.TENSOR),),
        ),
    )


def to_experts() -> Exchange:
    """To the experts and back: two all-to-alls, or one all-reduce without sequence parallelism."""
    return Exchange("experts", HIDDEN, expert_bytes="4 s b e h")


def latent_attention(style: BlockStyle, low_rank_queries: bool) -> tuple[Operator, ...]:
    """DeepSeek's attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values from narrow latent vectors."""
    queries = "Q" if low_rank_queries else "h"
    down = "Q + C + r" if low_rank_queries else "C + r"
    kept = "2 s b Q + 2 s b C" if low_rank_queries else "2 s b C"
    return (
        Operator(
            "latent vectors",
            products=(Product("s b", down, "h", divided="tokens"),),
            split=Split.SEQUENCE,
            forward_bytes=f"4 s b C{' + 4 s b Q' if low_rank_queries else ''}",
            backward_bytes=f"6 s b C{' + 6 s b Q' if low_rank_queries else ''}",
            parameters=("h Q + Q + " if low_rank_queries else "") + "h C + h r + C",
            parameters_split=Split.WHOLE,
            saved=(
                KeptBytes(HIDDEN, Split.SEQUENCE, cheap=style.fused),
                KeptBytes(f"{kept} + 2 s b r", Split.SEQUENCE),
            ),
        ),
        Operator(
            "queries",
            products=(Product("s b", "a d", queries, divided="columns"),),
            parameters=f"{queries} a d",
            saved=(
                *((KeptBytes("2 s b Q", Split.SEQUENCE, cheap=style.fused),) if low_rank_queries else ()),
                KeptBytes("2 s b a d", Split.TENSOR),
            ),
        ),
        Operator(
            "keys and values",
            products=(Product("s b", "a n + a v", "C", divided="columns"),),
            parameters="C a n + C a v",
            saved=(
                KeptBytes("2 s b C", Split.SEQUENCE, cheap=style.fused),
                KeptBytes("2 s b a d + 2 s b a v", Split.TENSOR),
            ),
        ),
        Operator("rotary positions", forward_bytes="8 s b a r", backward_bytes="8 s b a r"),
        *core(style, value_size="v"),
        attention_output(value_size="v"),
    )


def build_mixtral(config: MixtralConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, equal layers, head."""
    decoder = config.decoder()
    style = replace(decoder.style, fused=microbatch.fused)
    symbols = {
        **decoder.symbols(microbatch),
        "E": config.num_local_experts, "e": config.num_experts_per_tok, "m": config.intermediate_size,
    }  # fmt: skip
    heads = (decoder.heads, decoder.key_heads, config.num_local_experts)
    layer = _layer(
        "block",
        "decoder layer with experts",
        symbols,
        style,
        attention(style),
        routed(style),
        exchanges=(to_experts(),),
        heads=heads,
    )
    head = head_kind(symbols, style, tied=decoder.tied)
    nodes = decoder_nodes(decoder, embedding_kind(symbols, style), [layer] * decoder.layers, head)
    return Architecture(name, nodes, sequences_text(microbatch), LEGEND_EXPERTS)


def build_deepseek(config: DeepseekConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, dense layers, layers with experts, head."""
    decoder = config.decoder()
    style = replace(decoder.style, fused=microbatch.fused)
    symbols = {
        **decoder.symbols(microbatch),
        "g": decoder.heads,
        "d": config.qk_rope_head_dim + config.qk_nope_head_dim,
        "E": config.n_routed_experts, "e": config.num_experts_per_tok, "m": config.moe_intermediate_size,
        "S": config.n_shared_experts * config.moe_intermediate_size, "C": config.kv_lora_rank,
        "Q": config.q_lora_rank or 0, "r": config.qk_rope_head_dim, "n": config.qk_nope_head_dim,
        "v": config.v_head_dim,
    }  # fmt: skip
    latent = latent_attention(style, config.q_lora_rank is not None)
    dense = _layer(
        "dense-block",
        "dense decoder layer",
        symbols,
        style,
        latent,
        feed_forward(style),
        exchanges=(all_reduce("feed-forward"),),
        heads=(decoder.heads,),
    )
    shared = [replace(part, name=f"shared expert: {part.name}") for part in feed_forward(style, "S", False)]
    sparse = _layer(
        "block",
        "decoder layer with experts",
        symbols,
        style,
        latent,
        (*routed(style), *shared),
        exchanges=(to_experts(), all_reduce("shared experts")),
        heads=(decoder.heads, config.n_routed_experts),
    )
    first = min(config.first_k_dense_replace, decoder.layers)
    layers = [dense] * first + [sparse] * (decoder.layers - first)
    head = head_kind(symbols, style, tied=decoder.tied)
    nodes = decoder_nodes(decoder, embedding_kind(symbols, style), layers, head)
    return Architecture(name, nodes, sequences_text(microbatch), LEGEND_EXPERTS)


def _layer(
    key: str,
    name: str,
    symbols: Mapping[str, float],
    style: BlockStyle,
    attending: tuple[Operator, ...],
    feeding: tuple[Operator, ...],
    exchanges: tuple[Exchange, ...],
    heads: tuple[int, ...],
) -> LayerKind:
    return LayerKind(
        key,
        name,
        symbols,
        (
            norm(style, "norm before attention"),
            *attending,
            residual(style, "residual after attention"),
            norm(style, "norm before feed-forward"),
            *feeding,
            residual(style, "residual after feed-forward"),
        ),
        output=HIDDEN,
        checkpoint=HIDDEN,
        exchanges=(all_reduce("attention"), *exchanges),
        heads=heads,
        recomputable=True,
    )


def check_deepseek(config: DeepseekConfig, faults: Faults) -> None:
    """A token has no more experts than there are."""
    if config.num_experts_per_tok > config.n_routed_experts:
        faults.at("num_experts_per_tok", f"{config.num_experts_per_tok}, more than n_routed_experts; expected fewer")


def check_mixtral(config: MixtralConfig, faults: Faults) -> None:
    """As ``check_llama``; and a token has no more experts than there are."""
    check_llama(config, faults)
    if config.num_experts_per_tok > config.num_local_experts:
        faults.at("num_experts_per_tok", f"{config.num_experts_per_tok}, more than num_local_experts; expected fewer")


def _positions(config: LlamaConfig) -> int:
    return config.max_position_embeddings


FAMILIES = {
    "mixtral": Family(MixtralConfig, build_mixtral, check_mixtral, _positions),
    "deepseek_v2": Family(DeepseekConfig, build_deepseek, check_deepseek, _positions),
    "deepseek_v3": Family(DeepseekConfig, build_deepseek, check_deepseek, _positions),
}
