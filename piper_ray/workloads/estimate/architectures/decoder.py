"""GPT and Llama-style decoders: embedding, equal layers, and the vocabulary projection as a layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.workloads.estimate.architectures.text import chain, embedding_kind, head_kind, sequences_text, stack
from piper_ray.workloads.estimate.architectures.transformer import HIDDEN, BlockStyle, block, parallel_block
from piper_ray.workloads.estimate.families import Count, Family, Flag, Layers, Microbatch, Share
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, LayerNode
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Open

LEGEND = {
    "s": "tokens of a sample",
    "b": "samples of a microbatch",
    "h": "width",
    "a": "attention heads",
    "g": "key-value heads",
    "d": "size of a head",
    "f": "inner width of the feed-forward part",
    "V": "size of the vocabulary",
    "P": "learned positions",
}


@dataclass(frozen=True)
class Paths:
    """The names of a decoder's modules: embedding, list of layers, head."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    head: str = "lm_head"


@dataclass(frozen=True)
class Decoder:
    """A decoder's shape. positions: learned ones, 0 if positions are rotary. parallel_norms: of a layer that runs
    attention and feed-forward part side by side; 0 for one after the other. tied: the vocabulary projection uses the
    embedding's weights.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    head_size: int
    inner: int
    vocabulary: int
    positions: int
    tied: bool
    style: BlockStyle
    parallel_norms: int = 0
    paths: Paths = Paths()

    def symbols(self, microbatch: Microbatch) -> dict[str, float]:
        tokens = microbatch.tokens or 1
        return {
            "s": tokens, "b": microbatch.samples, "h": self.width, "a": self.heads, "g": self.key_heads,
            "d": self.head_size, "f": self.inner, "V": self.vocabulary, "P": self.positions,
        }  # fmt: skip


def block_kind(decoder: Decoder, symbols: dict[str, float], style: BlockStyle) -> LayerKind:
    """One layer of a decoder."""
    if decoder.parallel_norms:
        operators, exchanges = parallel_block(style, decoder.parallel_norms)
    else:
        operators, exchanges = block(style)
    return LayerKind(
        "block",
        "decoder layer",
        symbols,
        operators,
        output=HIDDEN,
        checkpoint=HIDDEN,
        exchanges=exchanges,
        heads=(decoder.heads, decoder.key_heads),
        recomputable=True,
    )


def decoder_nodes(
    decoder: Decoder, embedding: LayerKind, layers: Sequence[LayerKind], head: LayerKind
) -> tuple[LayerNode, ...]:
    """Embedding, layers, head, one after the other."""
    paths = decoder.paths
    return chain(
        LayerNode(embedding, path=paths.embedding), *stack(layers, paths.layers), LayerNode(head, path=paths.head)
    )


def build_decoder(decoder: Decoder, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, layers, head, one after the other."""
    symbols = decoder.symbols(microbatch)
    style = replace(decoder.style, fused=microbatch.fused)
    layer = block_kind(decoder, symbols, style)
    tables = [("position embedding", "P h")] if decoder.positions else []
    nodes = decoder_nodes(
        decoder,
        embedding_kind(symbols, style, tables=tables),
        [layer] * decoder.layers,
        head_kind(symbols, style, tied=decoder.tied),
    )
    return Architecture(name, nodes, sequences_text(microbatch), LEGEND)


class Gpt2Config(Open):
    """``gpt2``."""

    n_embd: Count
    n_layer: Layers
    n_head: Count
    vocab_size: Count
    n_positions: Count = 1024
    n_inner: Count | None = None
    resid_pdrop: Share = 0.1
    tie_word_embeddings: Flag = True

    def decoder(self) -> Decoder:
        return Decoder(
            layers=self.n_layer,
            width=self.n_embd,
            heads=self.n_head,
            key_heads=self.n_head,
            head_size=self.n_embd // self.n_head,
            inner=self.n_inner or 4 * self.n_embd,
            vocabulary=self.vocab_size,
            positions=self.n_positions,
            tied=self.tie_word_embeddings,
            style=BlockStyle(dropout=self.resid_pdrop > 0),
            paths=Paths("transformer.wte", "transformer.h"),
        )


class NeoxConfig(Open):
    """``gpt_neox``."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count = 2048
    hidden_dropout: Share = 0.0
    use_parallel_residual: Flag = True
    attention_bias: Flag = True
    tie_word_embeddings: Flag = False

    def decoder(self) -> Decoder:
        return Decoder(
            layers=self.num_hidden_layers,
            width=self.hidden_size,
            heads=self.num_attention_heads,
            key_heads=self.num_attention_heads,
            head_size=self.hidden_size // self.num_attention_heads,
            inner=self.intermediate_size,
            vocabulary=self.vocab_size,
            positions=0,
            tied=self.tie_word_embeddings,
            style=BlockStyle(dropout=self.hidden_dropout > 0, rotary=True, query_bias=self.attention_bias),
            parallel_norms=2 if self.use_parallel_residual else 0,
            paths=Paths("gpt_neox.embed_in", "gpt_neox.layers", "embed_out"),
        )


class LlamaConfig(Open):
    """``llama`` and its likes: RMS norm, rotary positions, SwiGLU, grouped-query attention."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    attention_bias: Flag = False
    tie_word_embeddings: Flag = False

    def style(self) -> BlockStyle:
        return BlockStyle(norm_parameters="h", bias=False, query_bias=self.attention_bias, gated=True, rotary=True)

    def decoder(self) -> Decoder:
        return Decoder(
            layers=self.num_hidden_layers,
            width=self.hidden_size,
            heads=self.num_attention_heads,
            key_heads=self.num_key_value_heads or self.num_attention_heads,
            head_size=self.head_dim or self.hidden_size // self.num_attention_heads,
            inner=self.intermediate_size,
            vocabulary=self.vocab_size,
            positions=0,
            tied=self.tie_word_embeddings,
            style=self.style(),
        )


class Qwen2Config(LlamaConfig):
    """``qwen2``: as Llama, with a bias on queries, keys and values."""

    attention_bias: Flag = True


class Qwen3Config(LlamaConfig):
    """``qwen3``: as Llama, with norms of queries and keys."""

    head_dim: Count | None = 128

    def style(self) -> BlockStyle:
        return replace(super().style(), query_norm="2 d")


def check_heads(width_key: str, width: int, heads_key: str, heads: int, faults: Faults) -> None:
    """Heads must divide the width."""
    if width % heads:
        faults.at(width_key, f"{width} is no multiple of {heads_key} = {heads}; expected one")


def check_groups(heads: int, key_heads: int | None, faults: Faults) -> None:
    """Key-value heads must divide the heads."""
    if key_heads is not None and heads % key_heads:
        faults.at("num_key_value_heads", f"{key_heads} does not divide num_attention_heads = {heads}")


def check_gpt2(config: Gpt2Config, faults: Faults) -> None:
    """Heads divide the width."""
    check_heads("n_embd", config.n_embd, "n_head", config.n_head, faults)


def check_neox(config: NeoxConfig, faults: Faults) -> None:
    """Heads divide the width."""
    check_heads("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads, faults)


def check_llama(config: LlamaConfig, faults: Faults) -> None:
    """Heads divide the width where their size is not given, and groups of keys divide the heads."""
    if config.head_dim is None:
        check_heads("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads, faults)
    check_groups(config.num_attention_heads, config.num_key_value_heads, faults)


def _build(config: Gpt2Config | NeoxConfig | LlamaConfig, microbatch: Microbatch, name: str) -> Architecture:
    return build_decoder(config.decoder(), microbatch, name)


def _positions(config: LlamaConfig | NeoxConfig) -> int:
    return config.max_position_embeddings


FAMILIES = {
    "gpt2": Family(Gpt2Config, _build, check_gpt2, lambda config: config.n_positions),
    "gpt_neox": Family(NeoxConfig, _build, check_neox, _positions),
    "llama": Family(LlamaConfig, _build, check_llama, _positions),
    "mistral": Family(LlamaConfig, _build, check_llama, _positions),
    "qwen2": Family(Qwen2Config, _build, check_llama, _positions),
    "qwen3": Family(Qwen3Config, _build, check_llama, _positions),
}
