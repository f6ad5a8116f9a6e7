"""Models with an encoder whose output every layer of the decoder reads: T5, and Whisper and BART, which have biases and
learned positions.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import key
from piper_ray.workloads.estimate.architectures.layers import Attention, Dense, Norms, Part, layer_kind
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
    table,
    undivided,
)
from piper_ray.workloads.estimate.families import (
    Config,
    Count,
    Family,
    Flag,
    Layers,
    Microbatch,
    Share,
    no_check,
    no_length,
)
from piper_ray.workloads.estimate.operators import Architecture, Exchange, LayerKind, LayerNode, Operator, Product
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Open

OTHER_TOKENS = "2 z b h"
"""Bytes of the encoder's output."""

TARGETS_PER_TOKEN = 114 / 512
"""Tokens of the decoder for each of the encoder: T5's span corruption (Raffel et al. 2020, section 3.1.4)."""

T5_LEGEND = {
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


def build_t5(config: T5Config, microbatch: Microbatch, name: str) -> Architecture:
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
    return Architecture(name, nodes, sample, T5_LEGEND)


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


LEGEND = {
    "s": "tokens of a sample, in this layer's half of the model",
    "z": "tokens of a sample in the encoder",
    **BLOCK_LEGEND,
    "V": "size of the vocabulary",
    "P": "learned positions",
    "p": "bands of the spectrogram",
}


class Seq2SeqConfig(Config):
    """What ``whisper`` and ``bart`` share."""

    d_model: Count
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Count
    decoder_attention_heads: Count
    encoder_ffn_dim: Count
    decoder_ffn_dim: Count
    vocab_size: Count
    dropout: Share = 0.0
    tie_word_embeddings: Flag = True


class WhisperConfig(Seq2SeqConfig):
    """``whisper``: 30 seconds of sound, twice as many frames as the encoder has positions."""

    num_mel_bins: Count = 80
    max_source_positions: Count = 1500
    max_target_positions: Count = 448


class BartConfig(Seq2SeqConfig):
    """``bart`` and ``mbart``: text to text, with two positions more than tokens."""

    max_position_embeddings: Count = key("max_position_embeddings", default=1024)


@dataclass(frozen=True)
class _Halves:
    """What is around the layers. norms: of each part. closing: a norm after the last layer of each half."""

    style: BlockStyle
    norms: Norms
    closing: bool
    sources: int
    targets: int


def build_whisper(config: WhisperConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Convolutions over the spectrogram, encoder, its last norm, decoder."""
    style = BlockStyle(fused=microbatch.fused, causal=False, key_bias=False, dropout=config.dropout > 0)
    halves = _Halves(style, "before", True, config.max_source_positions, config.max_target_positions)
    inside, outside = _symbols(config, microbatch, halves)
    inside |= {"p": config.num_mel_bins, "P": config.max_source_positions}
    outside |= {"P": config.max_target_positions}
    sound = LayerKind(
        "encoder-embedding",
        "encoder embedding",
        inside,
        (
            _convolution("convolution of the spectrogram", "2 s b", "p", 1.0),
            _convolution("convolution that halves it", "s b", "h", 2.0),
            table("position embedding", "P h"),
        ),
        HIDDEN,
    )
    text = embedding_kind(
        outside, style, tables=[("position embedding", "P h")], key="decoder-embedding", name="decoder embedding"
    )
    sample = f"{microbatch.samples:,} x {halves.sources:,} frames of sound and {halves.targets:,} tokens"
    return Architecture(name, _nodes(config, halves, inside, outside, sound, text), sample, LEGEND)


def build_bart(config: BartConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Encoder and decoder of as many tokens."""
    style = BlockStyle(fused=microbatch.fused, causal=False, dropout=config.dropout > 0)
    tokens = microbatch.tokens or 1
    halves = _Halves(style, "after", False, tokens, tokens)
    inside, outside = _symbols(config, microbatch, halves)
    positions = {"P": config.max_position_embeddings + 2}
    tables = [("position embedding", "P h")]
    first, second = (
        embedding_kind(
            {**symbols, **positions}, style, tables=tables, normed=True, key=f"{half}-embedding",
            name=f"{half} embedding", tied=tied,
        )
        for half, symbols, tied in (("encoder", inside, "0"), ("decoder", outside, "V h"))
    )  # fmt: skip
    sample = f"{microbatch.samples:,} x {tokens:,} tokens in the encoder and as many in the decoder"
    return Architecture(name, _nodes(config, halves, inside, outside, first, second), sample, LEGEND)


def build_mbart(config: BartConfig, microbatch: Microbatch, name: str) -> Architecture:
    """As BART, with norms before each part and after each half."""
    bart = build_bart(config, microbatch, name)
    style = BlockStyle(fused=microbatch.fused, causal=False, dropout=config.dropout > 0)
    tokens = microbatch.tokens or 1
    halves = _Halves(style, "before", True, tokens, tokens)
    inside, outside = _symbols(config, microbatch, halves)
    first, second = (node.kind for node in bart.nodes if node.kind.key.endswith("-embedding"))
    return replace(bart, nodes=_nodes(config, halves, inside, outside, first, second))


def _convolution(name: str, rows: str, depth: str, backward: float) -> Operator:
    """Of three neighbours."""
    return undivided(
        name,
        products=(Product(rows, "h", f"3 {depth}"),),
        forward_bytes=f"4 {rows} h",
        backward_bytes=f"8 {rows} h",
        parameters=f"3 {depth} h + h",
        saved=f"2 {rows} {depth} + 2 {rows} h",
        backward_products=backward,
    )


def _symbols(
    config: Seq2SeqConfig, microbatch: Microbatch, halves: _Halves
) -> tuple[dict[str, float], dict[str, float]]:
    inside: dict[str, float] = {
        "s": halves.sources, "z": halves.sources, "b": microbatch.samples, "h": config.d_model, "V": config.vocab_size,
    }  # fmt: skip
    return inside, {**inside, "s": halves.targets}


def _nodes(
    config: Seq2SeqConfig,
    halves: _Halves,
    inside: dict[str, float],
    outside: dict[str, float],
    first: LayerKind,
    second: LayerKind,
) -> tuple[LayerNode, ...]:
    style, causal = halves.style, replace(halves.style, causal=True)

    def attending(heads: int) -> Attention:
        return Attention(heads, heads, config.d_model // heads)

    encoder = layer_kind(
        "encoder-block",
        "encoder layer",
        inside,
        style,
        [
            attending(config.encoder_attention_heads).part(style, inside),
            Dense(config.encoder_ffn_dim).part(style, inside),
        ],
        halves.norms,
    )
    cross = Part(
        "cross attention",
        cross_attention(style),
        (all_reduce("cross attention"), Exchange("gradient of the encoder's output", OTHER_TOKENS, forward=0.0)),
        biases="h",
    )
    decoder = replace(
        layer_kind(
            "decoder-block",
            "decoder layer",
            outside,
            causal,
            [
                attending(config.decoder_attention_heads).part(causal, outside),
                cross,
                Dense(config.decoder_ffn_dim).part(causal, outside),
            ],
            halves.norms,
        ),
        checkpoint=f"{HIDDEN} + {OTHER_TOKENS}",
    )
    inner = [LayerNode(first, path="model.encoder"), *stack([encoder] * config.encoder_layers, "model.encoder.layers")]
    if halves.closing:
        closing = LayerKind("encoder-norm", "encoder norm", inside, (norm(style),), output=HIDDEN, checkpoint=HIDDEN)
        inner.append(LayerNode(closing, path="model.encoder.layer_norm"))
    outer = stack([decoder] * config.decoder_layers, "model.decoder.layers")
    before: list[Operator] | None = None if halves.closing else []
    head = head_kind(outside, causal, tied=config.tie_word_embeddings, before=before)
    return encoder_decoder(
        inner,
        [LayerNode(second, path="model.decoder.embed_tokens"), *outer],
        LayerNode(head, path="proj_out" if isinstance(config, WhisperConfig) else "lm_head"),
    )


def check(config: Seq2SeqConfig, faults: Faults) -> None:
    """Heads divide the width."""
    for field in ("encoder_attention_heads", "decoder_attention_heads"):
        heads = getattr(config, field)
        if config.d_model % heads:
            faults.at("d_model", f"{config.d_model} is no multiple of {field} = {heads}; expected one")


def _positions(config: BartConfig) -> int:
    return config.max_position_embeddings


FAMILIES = {
    "t5": Family(T5Config, build_t5, no_check, _any_length, tokens=512),
    "mt5": Family(T5Config, build_t5, no_check, _any_length, tokens=512),
    "whisper": Family(WhisperConfig, build_whisper, check, no_length, samples=16, batch=256),
    "bart": Family(BartConfig, build_bart, check, _positions, tokens=512),
    "mbart": Family(BartConfig, build_mbart, check, _positions, tokens=512),
}
