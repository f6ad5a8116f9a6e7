"""Decoders of text: embedding, layers, and the vocabulary projection as a layer of its own.

A family is a config, read from the keys of Hugging Face's, and what its layers are by their definition there: its
``rules``, and what mixes tokens (``mixing``) and feeds forward (``feeding``) in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from pydantic import create_model

from piper_ray.workloads.estimate.architectures import experts, state_space
from piper_ray.workloads.estimate.architectures.layers import (
    HIDDEN,
    LATENT_LEGEND,
    POSITIONS,
    Attention,
    BlockStyle,
    Dense,
    Described,
    LayerShape,
    Norms,
    all_reduce,
    embedding_kind,
    head_kind,
    layer_kinds,
    norm,
    sequences_text,
)
from piper_ray.workloads.estimate.families import (
    Config,
    Count,
    Family,
    Flag,
    Layers,
    Microbatch,
    Texts,
    Window,
    key,
)
from piper_ray.workloads.estimate.operators import (
    Architecture,
    Exchange,
    KeptBytes,
    LayerKind,
    LayerNode,
    Operator,
    Product,
    Split,
    chain,
    stack,
)
from piper_ray.workloads.formats.faults import Faults

LEGEND = {
    "s": "tokens of a sample",
    "b": "samples of a microbatch",
    "h": "width",
    "a": "attention heads",
    "g": "key-value heads",
    "d": "size of a head",
    "W": "tokens of the sliding window",
    "u": "share of the window's scores that the causal mask leaves",
    "f": "inner width of the feed-forward part",
    "V": "size of the vocabulary",
    "P": "learned positions",
    "M": "tokens that each one predicts",
    **experts.LEGEND,
    **LATENT_LEGEND,
    **state_space.LEGEND,
}


@dataclass(frozen=True)
class DecoderPaths:
    """The names of a decoder's modules: embedding, list of layers, head."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    head: str = "lm_head"


@dataclass(frozen=True)
class Rules(BlockStyle):
    """What is the same in all layers of a decoder, and what is around them. Defaults are Llama's.

    parallel_norms: of a layer that runs attention and feed-forward part side by side; 0 for one after the other.
    positions: learned ones, 0 for none. head_bias: of the vocabulary projection. embedding_norm: after the embedding.
    """

    norm: str = "h"
    query_bias: bool = False
    output_bias: bool = False
    inner_bias: bool = False
    gated: bool = True
    rotary: bool = True
    norms: Norms = "before"
    parallel_norms: int = 0
    head_bias: bool = False
    positions: int = 0
    embedding_norm: bool = False
    paths: DecoderPaths = DecoderPaths()


LAYER_NORM = "2 h"
"""Parameters of a layer norm: weights and biases; an RMS norm has h."""


class DecoderConfig(Config):
    """What nearly every decoder's config says, under the names that are in use for it."""

    hidden_size: Count = key("hidden_size", "n_embd", "d_model", "n_embed", "dim", "model_dim")
    num_hidden_layers: Layers = key("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_attention_heads: Count = key("num_attention_heads", "n_head", "n_heads", "num_heads")
    vocab_size: Count = key("vocab_size", "padded_vocab_size", "n_vocab")
    num_key_value_heads: Count | None = key(
        "num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups",
        default=None,
    )  # fmt: skip
    head_dim: Count | None = key("head_dim", "kv_channels", "attention_head_dim", "d_head", "head_size", default=None)
    intermediate_size: Count | None = key(
        "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_dim", "mlp_hidden_size",
        default=None,
    )  # fmt: skip
    max_position_embeddings: Count = key(
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
        default=2048,
    )  # fmt: skip
    tie_word_embeddings: Flag = False
    sliding_window: Window | None = None
    layer_types: Texts | None = None

    differs: ClassVar[Mapping[str, Any]] = {}
    """What its rules have otherwise than Llama's, by their fields; a function says it of the config."""

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def most_tokens(self) -> int:
        return self.max_position_embeddings

    @property
    def predictors(self) -> int:
        """Layers after the last one that training has to predict further tokens (DeepSeek-V3, 2024, section 2.2)."""
        return 0

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def inner(self) -> int:
        """Of the dense feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def tied(self) -> bool:
        """Whether embedding and vocabulary projection are one matrix."""
        return self.tie_word_embeddings

    def rules(self) -> Rules:
        """Those of all its layers."""
        said = {name: value(self) if callable(value) else value for name, value in self.differs.items()}
        return Rules(**said)

    def slides(self, layer: int) -> bool:  # noqa: ARG002
        """Whether a layer's attention has the sliding window where ``layer_types`` does not say it."""
        return False

    def window(self, layer: int) -> int | None:
        """How many tokens a layer's attention sees; None: all before."""
        if self.layer_types and layer < len(self.layer_types):
            return self.sliding_window if "sliding" in self.layer_types[layer] else None
        return self.sliding_window if self.slides(layer) else None

    def mixing(self, layer: int) -> Described | None:
        return Attention(self.num_attention_heads, self.key_heads, self.head_size, self.window(layer))

    def feeding(self, layer: int) -> Described | None:  # noqa: ARG002
        return Dense(self.inner)

    def check(self, faults: Faults) -> None:
        """Heads divide the width where their size is not given, and groups of keys divide the heads."""
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None:
            self.check_multiple("hidden_size", "num_attention_heads", faults)
        if key_heads is not None and heads % key_heads:
            names = self.called("num_key_value_heads"), self.called("num_attention_heads")
            faults.at(names[0], f"{key_heads} does not divide {names[1]} = {heads}")


@dataclass(frozen=True)
class Decoder:
    """A decoder's layers at a given microbatch. predictors: of further tokens."""

    embedding: LayerKind
    layers: Sequence[LayerKind]
    predictors: Sequence[LayerKind]
    head: LayerKind
    paths: DecoderPaths

    @property
    def nodes(self) -> tuple[LayerNode, ...]:
        """Embedding, layers, head, one after the other."""
        return chain(LayerNode(self.embedding, path=self.paths.embedding), *self.after_embedding(self.paths))

    def after_embedding(self, paths: DecoderPaths) -> list[LayerNode]:
        """All but the embedding, to be chained."""
        count = len(self.layers)
        further = [
            LayerNode(kind, path=f"{paths.layers}.{count + index}", predictor=True)
            for index, kind in enumerate(self.predictors)
        ]
        return [*stack(self.layers, paths.layers), *further, LayerNode(self.head, path=paths.head)]


def decoder_of(config: DecoderConfig, microbatch: Microbatch) -> Decoder:
    """The layers that a config describes."""
    rules = config.rules()
    style = replace(rules, fused=microbatch.fused)
    symbols: dict[str, float] = {
        "s": microbatch.tokens or 1, "b": microbatch.samples, "h": config.hidden_size,
        "V": config.vocab_size, "P": rules.positions,
    }  # fmt: skip
    shapes = [LayerShape(config.mixing(layer), config.feeding(layer)) for layer in range(config.layers)]
    tables = [POSITIONS] if rules.positions else []
    layers = layer_kinds(shapes, symbols, style, rules.norms, rules.parallel_norms)
    further = config.predictors
    return Decoder(
        embedding_kind(symbols, style, tables=tables, normed=rules.embedding_norm),
        layers,
        [_predictor(layers[-1], style, index + 2) for index in range(further)],
        head_kind(
            {**symbols, "M": 1 + further} if further else symbols,
            style,
            tied=config.tied,
            bias=rules.head_bias,
            tokens="M s b" if further else "s b",
        ),
        rules.paths,
    )


def _predictor(layer: LayerKind, style: BlockStyle, predicted: int) -> LayerKind:
    """One more layer, on the states of the last one and the embeddings of the next tokens; it hands both states on.

    predicted: tokens that each one predicts from here on. Embedding and projection are those of the model.
    """
    joined = Operator(
        "states and next tokens",
        (Product("s b", "h", "2 h", divided="columns"),),
        "4 s b h",
        "6 s b h",
        parameters="2 h h",
        saved=(KeptBytes("4 s b h", Split.SEQUENCE),),
    )
    embedded = embedding_kind(layer.symbols, style).operators
    return replace(
        layer,
        key=f"predictor-{predicted}",
        name="predictor" if predicted == 2 else f"predictor {predicted}",  # the first
        symbols={**layer.symbols, "M": predicted},
        operators=(
            *embedded,
            norm(style, "norm of states"),
            norm(style, "norm of next tokens"),
            joined,
            *layer.operators,
            norm(style, "last norm"),
        ),
        output="2 M s b h",
        checkpoint="2 M s b h",
        exchanges=(Exchange("embedding", HIDDEN, backward=0.0), all_reduce("states and next tokens"), *layer.exchanges),
        tied="V h",
    )


def build(config: DecoderConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Embedding, layers, head, one after the other."""
    return Architecture(name, decoder_of(config, microbatch).nodes, sequences_text(microbatch), LEGEND)


BIASED = attrgetter("attention_bias")
"""In ``differs``: as the config's own key says."""

Slides = Callable[[Any, int], bool]
"""Of a config, whether a layer has the sliding window."""


def always(_config: object, _layer: int) -> bool:
    """All layers have the sliding window."""
    return True


def but(*others: Mapping[str, Any], **rules: Any) -> Mapping[str, Any]:
    """What ``differs`` as in these, but for some rules."""
    return {name: value for one in (*others, rules) for name, value in one.items()}


def like(
    base: type[DecoderConfig],
    differs: Mapping[str, Any] | None = None,
    slides: Slides | None = None,
    keys: Mapping[str, tuple[Any, object]] | None = None,
) -> type[DecoderConfig]:
    """A config as another one but for these rules, layers with a sliding window, and keys with (type, default)."""
    own = {"differs": differs, "slides": slides}
    changed = {"__module__": __name__, **{name: value for name, value in own.items() if value is not None}}
    kind: Any = type(base)
    fields: dict[str, Any] = {**(keys or {})}
    made: type[DecoderConfig] = create_model(base.__name__, __base__=kind(base.__name__, (base,), changed), **fields)
    return made


def family(config: type[DecoderConfig]) -> Family:
    """The family of that config's models."""
    return Family(config, build)
