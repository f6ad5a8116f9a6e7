"""Models with an encoder: BERT and its like, trained on masked words, and those whose decoder reads the encoder's
output in every layer: T5, and Whisper and BART, which have biases and learned positions.

Each config's rules are those of its class in Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from piper_ray.workloads.estimate.architectures import layers
from piper_ray.workloads.estimate.families import Config, Count, Family, Flag, Layers, Microbatch, Share, legend
from piper_ray.workloads.estimate.operators import (
    Architecture,
    KeptBytes,
    LayerKind,
    LayerNode,
    Operator,
    Product,
    Split,
    chain,
    stack,
)


class BertConfig(Config):
    """``bert``, with the heads of its pretraining: masked words and the next sentence."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count = 512
    type_vocab_size: Count = 2
    hidden_dropout_prob: Share = 0.1

    multiples = (("hidden_size", "num_attention_heads"),)

    @property
    def most_tokens(self) -> int:
        return self.max_position_embeddings


class RobertaConfig(BertConfig):
    """``roberta``: masked words only."""


def build_bert(config: BertConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, layers, and the head for masked words, which looks at every position."""
    tokens, width, heads = microbatch.tokens or 1, config.hidden_size, config.num_attention_heads
    symbols = layers.block_symbols(microbatch.samples, tokens, width, heads, config.intermediate_size)
    symbols |= {"V": config.vocab_size, "P": config.max_position_embeddings, "T": config.type_vocab_size}
    style = layers.BlockStyle(fused=microbatch.fused, causal=False, dropout=config.hidden_dropout_prob > 0)
    next_sentence = not isinstance(config, RobertaConfig)
    layer = layers.block("block", "encoder layer", symbols, style)
    root, head_path = ("bert", "cls") if next_sentence else ("roberta", "lm_head")
    embedding = layers.embedding_kind(symbols, style, tables=[layers.POSITIONS, ("type embedding", "T h")], normed=True)
    head = layers.head_kind(symbols, style, tied=True, before=_before_projection(style, next_sentence))
    nodes = chain(
        LayerNode(embedding, path=f"{root}.embeddings"),
        *stack([layer] * config.num_hidden_layers, f"{root}.encoder.layer"),
        LayerNode(head, path=head_path),
    )
    return Architecture(name, nodes, layers.sequences_text(microbatch), legend("bert"))


def _before_projection(style: layers.BlockStyle, next_sentence: bool) -> list[Operator]:
    """The dense layer and the norm before the projection, its bias, and the classifier of the next sentence."""
    dense = Operator(
        "dense layer before the projection",
        (Product("s b", "h", "h", divided="tokens"),),
        "4 s b h",
        "6 s b h",
        Split.SEQUENCE,
        "h h + h + V",
        Split.WHOLE,
        (KeptBytes("4 s b h", Split.SEQUENCE),),
    )
    products, parameters = (Product("b", "h", "h"),), "h h + h + 2 h + 2"
    pooler = layers.undivided("pooler and next sentence", products, parameters=parameters, saved="4 b h")
    return [*([pooler] if next_sentence else []), dense, layers.norm(style)]


TARGETS_PER_TOKEN = 114 / 512
"""Decoder tokens for each encoder token: T5's span corruption (Raffel et al. 2020, section 3.1.4)."""


class T5Config(Config):
    """``t5`` and ``mt5``. n_positions: the positions of the published training; relative positions know no end."""

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

    @property
    def most_tokens(self) -> int:
        """The most tokens; a longer sample would be a mistake."""
        return 2**20


def build_t5(config: T5Config, microbatch: Microbatch, name: str) -> Architecture:
    """Encoder, its last norm, decoder; the norm feeds each layer of the decoder."""
    tokens = microbatch.tokens or 1
    targets = max(1, round(tokens * TARGETS_PER_TOKEN))
    own = layers.block_symbols(microbatch.samples, tokens, config.d_model, config.num_heads, config.d_ff)
    inside = {"s": tokens, "z": tokens, **own, "d": config.d_kv, "V": config.vocab_size}
    inside["R"] = config.relative_attention_num_buckets
    outside = {**inside, "s": targets}
    style = layers.BlockStyle(
        fused=microbatch.fused,
        causal=False,
        norm="h",
        query_bias=False,
        output_bias=False,
        inner_bias=False,
        gated=config.feed_forward_proj.startswith("gated"),
        dropout=config.dropout_rate > 0,
    )
    relative = [("relative positions", "R a")]
    closing = _encoder_norm(inside, layers.norm(style), *([layers.dropout()] if style.dropout else []))
    first = layers.embedding_kind(inside, style, tables=relative, half="encoder")
    second = layers.embedding_kind(outside, style, tables=relative, half="decoder", tied="V h")
    encoder = layers.block("encoder-block", "encoder layer", inside, style)
    causal = replace(style, causal=True)
    parts = [
        layers.attention_part(causal, config.num_heads),
        layers.cross_attention(causal),
        layers.feed_forward_part(causal, layers.MLP),
    ]
    decoder = layers.layer_kind("decoder-block", "decoder layer", outside, causal, parts)
    nodes = _encoder_decoder(
        [
            LayerNode(first, path="encoder.embed_tokens"),
            *stack([encoder] * config.num_layers, "encoder.block"),
            LayerNode(closing, path="encoder.final_layer_norm"),
        ],
        LayerNode(second, path="decoder.embed_tokens"),
        stack([_reading_both(decoder)] * (config.num_decoder_layers or config.num_layers), "decoder.block"),
        LayerNode(layers.head_kind(outside, style, tied=config.tie_word_embeddings), path="lm_head"),
    )
    sample = f"{microbatch.samples:,} x {tokens:,} tokens in the encoder and {targets:,} in the decoder"
    return Architecture(name, nodes, sample, legend("t5"))


def _encoder_norm(symbols: dict[str, float], *operators: Operator) -> LayerKind:
    return LayerKind("encoder-norm", "encoder norm", symbols, operators, output=layers.HIDDEN, checkpoint=layers.HIDDEN)


def _reading_both(decoder: LayerKind) -> LayerKind:
    """A layer that reads the encoder's output, too."""
    return replace(decoder, checkpoint=f"{layers.HIDDEN} + {layers.OTHER_TOKENS}")


def _encoder_decoder(
    encoder: Sequence[LayerNode], embedding: LayerNode, decoder: Sequence[LayerNode], head: LayerNode
) -> tuple[LayerNode, ...]:
    """Two chains and the head; each layer of the decoder except its embedding also reads the encoder's output."""
    nodes = [*chain(*encoder), embedding]
    for node in decoder:
        nodes.append(replace(node, inputs=(len(nodes) - 1, len(encoder) - 1)))
    return (*nodes, replace(head, inputs=(len(nodes) - 1,)))


class Seq2SeqConfig(Config):
    """What ``whisper`` and ``bart`` share. normed_before: norms before each part and after each half, not after each
    part."""

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

    normed_before: ClassVar[bool] = True
    multiples = (("d_model", "encoder_attention_heads"), ("d_model", "decoder_attention_heads"))


class WhisperConfig(Seq2SeqConfig):
    """``whisper``: 30 seconds of sound, twice as many frames as the encoder has positions."""

    num_mel_bins: Count = 80
    max_source_positions: Count = 1500
    max_target_positions: Count = 448


class BartConfig(Seq2SeqConfig):
    """``bart``: text to text, with two positions more than tokens."""

    max_position_embeddings: Count = 1024

    normed_before: ClassVar[bool] = False

    @property
    def most_tokens(self) -> int:
        return self.max_position_embeddings


class MbartConfig(BartConfig):
    """``mbart``."""

    normed_before: ClassVar[bool] = True


@dataclass(frozen=True)
class _Halves:
    """Both halves of a model. sources, targets: tokens of the encoder and of the decoder."""

    config: Seq2SeqConfig
    style: layers.BlockStyle
    samples: int
    sources: int
    targets: int

    @property
    def inside(self) -> dict[str, float]:
        """The encoder's symbols."""
        width, vocabulary = self.config.d_model, self.config.vocab_size
        return {"s": self.sources, "z": self.sources, "b": self.samples, "h": width, "V": vocabulary}

    @property
    def outside(self) -> dict[str, float]:
        """The decoder's symbols."""
        return {**self.inside, "s": self.targets}

    def nodes(self, first: LayerKind, second: LayerKind, head_path: str) -> tuple[LayerNode, ...]:
        """All layers. first, second: the embeddings of both halves."""
        config, style, causal = self.config, self.style, replace(self.style, causal=True)
        inside, outside = self.inside, self.outside
        norms: layers.Norms = "before" if config.normed_before else "after"
        parts = [
            self._attention(config.encoder_attention_heads).part(style, inside),
            layers.Dense(config.encoder_ffn_dim).part(style, inside),
        ]
        encoder = layers.layer_kind("encoder-block", "encoder layer", inside, style, parts, norms)
        parts = [
            self._attention(config.decoder_attention_heads).part(causal, outside),
            layers.cross_attention(style),
            layers.Dense(config.decoder_ffn_dim).part(causal, outside),
        ]
        decoder = _reading_both(layers.layer_kind("decoder-block", "decoder layer", outside, causal, parts, norms))
        inner = [
            LayerNode(first, path="model.encoder"),
            *stack([encoder] * config.encoder_layers, "model.encoder.layers"),
        ]
        if config.normed_before:
            inner.append(LayerNode(_encoder_norm(inside, layers.norm(style)), path="model.encoder.layer_norm"))
        before: list[Operator] | None = None if config.normed_before else []
        head = layers.head_kind(outside, causal, tied=config.tie_word_embeddings, before=before)
        return _encoder_decoder(
            inner,
            LayerNode(second, path="model.decoder.embed_tokens"),
            stack([decoder] * config.decoder_layers, "model.decoder.layers"),
            LayerNode(head, path=head_path),
        )

    def _attention(self, heads: int) -> layers.Attention:
        return layers.Attention(heads, heads, self.config.d_model // heads)


def build_whisper(config: WhisperConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Convolutions over the spectrogram, encoder, its last norm, decoder."""
    style = layers.BlockStyle(fused=microbatch.fused, causal=False, key_bias=False, dropout=config.dropout > 0)
    sources, targets = config.max_source_positions, config.max_target_positions
    halves = _Halves(config, style, microbatch.samples, sources, targets)
    operators = (
        _convolution("convolution of the spectrogram", "2 s b", "p", 1.0),
        _convolution("convolution that halves it", "s b", "h", 2.0),
        layers.table(*layers.POSITIONS),
    )
    inside = {**halves.inside, "p": config.num_mel_bins, "P": sources}
    sound = LayerKind("encoder-embedding", "encoder embedding", inside, operators, layers.HIDDEN)
    text = layers.embedding_kind({**halves.outside, "P": targets}, style, tables=[layers.POSITIONS], half="decoder")
    sample = f"{microbatch.samples:,} x {sources:,} frames of sound and {targets:,} tokens"
    return Architecture(name, halves.nodes(sound, text, "proj_out"), sample, legend("seq2seq"))


def build_bart(config: BartConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Encoder and decoder of as many tokens."""
    style = layers.BlockStyle(fused=microbatch.fused, causal=False, dropout=config.dropout > 0)
    tokens = microbatch.tokens or 1
    halves = _Halves(config, style, microbatch.samples, tokens, tokens)
    positions = {"P": config.max_position_embeddings + 2}
    first, second = (
        layers.embedding_kind(
            {**symbols, **positions}, style, tables=[layers.POSITIONS], normed=True, half=half, tied=tied
        )
        for half, symbols, tied in (("encoder", halves.inside, "0"), ("decoder", halves.outside, "V h"))
    )
    sample = f"{microbatch.samples:,} x {tokens:,} tokens in the encoder and as many in the decoder"
    return Architecture(name, halves.nodes(first, second, "lm_head"), sample, legend("seq2seq"))


def _convolution(name: str, rows: str, depth: str, backward: float) -> Operator:
    """A convolution over three neighbours."""
    return layers.undivided(
        name,
        (Product(rows, "h", f"3 {depth}"),),
        forward_bytes=f"4 {rows} h",
        backward_bytes=f"8 {rows} h",
        parameters=f"3 {depth} h + h",
        saved=f"2 {rows} {depth} + 2 {rows} h",
        backward_products=backward,
    )


_ROBERTA, _T5 = Family(RobertaConfig, build_bert), Family(T5Config, build_t5, tokens=512)

FAMILIES = {
    "bert": Family(BertConfig, build_bert),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "t5": _T5,
    "mt5": _T5,
    "whisper": Family(WhisperConfig, build_whisper, samples=16, batch=256),
    "bart": Family(BartConfig, build_bart, tokens=512),
    "mbart": Family(MbartConfig, build_bart, tokens=512),
}
