"""Whisper and BART: an encoder whose output every layer of the decoder reads, with biases and learned positions.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.workloads.estimate.architectures.decoder import key
from piper_ray.workloads.estimate.architectures.layers import Attention, Dense, Norms, Part, layer_kind
from piper_ray.workloads.estimate.architectures.t5 import OTHER_TOKENS
from piper_ray.workloads.estimate.architectures.text import embedding_kind, encoder_decoder, head_kind, stack
from piper_ray.workloads.estimate.architectures.transformer import (
    BLOCK_LEGEND,
    HIDDEN,
    BlockStyle,
    all_reduce,
    cross_attention,
    norm,
    table,
    undivided,
)
from piper_ray.workloads.estimate.families import Config, Count, Family, Flag, Layers, Microbatch, Share, no_length
from piper_ray.workloads.estimate.operators import (
    Architecture,
    Exchange,
    LayerKind,
    LayerNode,
    Operator,
    Product,
)
from piper_ray.workloads.formats.faults import Faults

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
    "whisper": Family(WhisperConfig, build_whisper, check, no_length, samples=16, batch=256),
    "bart": Family(BartConfig, build_bart, check, _positions, tokens=512),
    "mbart": Family(BartConfig, build_mbart, check, _positions, tokens=512),
}
