"""T5: an encoder whose output every layer of the decoder reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.text import dropout, embedding_kind, encoder_decoder, head_kind, stack
from piper_ray.workloads.estimate.architectures.transformer import (
    BLOCK_LEGEND,
    HIDDEN,
    BlockStyle,
    all_reduce,
    attention,
    block,
    cross_attention,
    feed_forward,
    norm,
    residual,
)
from piper_ray.workloads.estimate.families import Count, Family, Flag, Layers, Microbatch, Share, no_check
from piper_ray.workloads.estimate.operators import Architecture, Exchange, LayerKind, LayerNode
from piper_ray.workloads.formats.fields import Open

OTHER_TOKENS = "2 z b h"
"""Bytes of the encoder's output."""

TARGETS_PER_TOKEN = 114 / 512
"""Tokens of the decoder for each of the encoder: T5's span corruption (Raffel et al. 2020, section 3.1.4)."""

LEGEND = {
    "s": "tokens of a sample, in this layer's half of the model",
    "z": "tokens of a sample in the encoder",
    **BLOCK_LEGEND,
    "V": "size of the vocabulary",
    "R": "buckets of relative positions",
}


class T5Config(Open):
    """``t5`` and ``mt5``. n_positions: of the published training; relative positions know no end."""

    d_model: Count
    d_kv: Count
    d_ff: Count
    num_layers: Layers
    num_heads: Count
    vocab_size: Count
    num_decoder_layers: Layers | None = None
    relative_attention_num_buckets: Count = 32
    dropout_rate: Share = 0.1
    feed_forward_proj: Annotated[str, Field(description="a text, such as relu or gated-gelu")] = "relu"
    tie_word_embeddings: Flag = True


def build(config: T5Config, microbatch: Microbatch, name: str) -> Architecture:
    """Encoder, its last norm, decoder; the norm feeds each layer of the decoder."""
    tokens = microbatch.tokens or 1
    targets = max(1, round(tokens * TARGETS_PER_TOKEN))
    inside: dict[str, float] = {
        "s": tokens, "z": tokens, "b": microbatch.samples, "h": config.d_model, "a": config.num_heads,
        "g": config.num_heads, "d": config.d_kv, "f": config.d_ff, "V": config.vocab_size,
        "R": config.relative_attention_num_buckets,
    }  # fmt: skip
    outside = {**inside, "s": targets}
    style = BlockStyle(
        fused=microbatch.fused,
        causal=False,
        norm_parameters="h",
        query_bias=False,
        output_bias=False,
        inner_bias=False,
        gated=config.feed_forward_proj.startswith("gated"),
        dropout=config.dropout_rate > 0,
    )
    table = [("relative positions", "R a")]
    normed = LayerKind(
        "encoder-norm",
        "encoder norm",
        inside,
        (norm(style), *([dropout()] if style.dropout else [])),
        output=HIDDEN,
        checkpoint=HIDDEN,
    )
    first, second = (
        embedding_kind(symbols, style, tables=table, key=f"{half}-embedding", name=f"{half} embedding", tied=tied)
        for half, symbols, tied in (("encoder", inside, "0"), ("decoder", outside, "V h"))
    )
    encoder = block("encoder-block", "encoder layer", inside, style, config.num_heads)
    decoder = _decoder_layer(config, outside, replace(style, causal=True))
    nodes = encoder_decoder(
        [
            LayerNode(first, path="encoder.embed_tokens"),
            *stack([encoder] * config.num_layers, "encoder.block"),
            LayerNode(normed, path="encoder.final_layer_norm"),
        ],
        [
            LayerNode(second, path="decoder.embed_tokens"),
            *stack([decoder] * (config.num_decoder_layers or config.num_layers), "decoder.block"),
        ],
        LayerNode(head_kind(outside, style, tied=config.tie_word_embeddings), path="lm_head"),
    )
    sample = f"{microbatch.samples:,} x {tokens:,} tokens in the encoder and {targets:,} in the decoder"
    return Architecture(name, nodes, sample, LEGEND)


def _decoder_layer(config: T5Config, symbols: dict[str, float], style: BlockStyle) -> LayerKind:
    operators = (
        norm(style, "norm before attention"),
        *attention(style),
        residual(style, "residual after attention"),
        norm(style, "norm before cross attention"),
        *cross_attention(style),
        residual(style, "residual after cross attention"),
        norm(style, "norm before feed-forward"),
        *feed_forward(style),
        residual(style, "residual after feed-forward"),
    )
    return LayerKind(
        "decoder-block",
        "decoder layer",
        symbols,
        operators,
        output=HIDDEN,
        checkpoint=f"{HIDDEN} + {OTHER_TOKENS}",
        exchanges=(
            all_reduce("attention"),
            all_reduce("cross attention"),
            Exchange("gradient of the encoder's output", OTHER_TOKENS, forward=0.0),
            all_reduce("feed-forward"),
        ),
        heads=(config.num_heads,),
        recomputable=True,
    )


def _any_length(_config: T5Config) -> int:
    """Relative positions know no end; a sample longer than this would be a mistake."""
    return 2**20


FAMILIES = {
    "t5": Family(T5Config, build, no_check, _any_length, tokens=512),
    "mt5": Family(T5Config, build, no_check, _any_length, tokens=512),
}
