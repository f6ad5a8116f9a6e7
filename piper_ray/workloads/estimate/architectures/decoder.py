"""Decoders of text: embedding, layers, and the vocabulary projection as a layer of its own.

A family is a row of the table (``families.toml``): the keys of Hugging Face's config, and the layers by their
definition there: their ``rules``, and the parts that mix tokens (``mixing``) and feed forward (``feeding``) in each
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper_ray.workloads.estimate import operators
from piper_ray.workloads.estimate.architectures import experts, state_space
from piper_ray.workloads.estimate.architectures.layers import (
    HIDDEN,
    POSITIONS,
    Attention,
    BlockStyle,
    Dense,
    Described,
    LatentAttention,
    LayerShape,
    Norms,
    all_reduce,
    embedding_kind,
    head_kind,
    layer_kinds,
    norm,
    sequences_text,
)
from piper_ray.workloads.estimate.architectures.rows import RowConfig, config_when_asked, table
from piper_ray.workloads.estimate.families import Count, Family, Layers, Microbatch, legend
from piper_ray.workloads.formats.faults import Faults


@dataclass(frozen=True)
class DecoderPaths:
    """The names of a decoder's modules: embedding, list of layers, head."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    head: str = "lm_head"


@dataclass(frozen=True)
class Rules(BlockStyle):
    """What all layers of a decoder share, and what is around them. Defaults are Llama's.

    parallel_norms: the norms of a layer that runs attention and feed-forward part side by side; 0: one part after the
    other. positions: learned positions, 0 for none. head_bias: whether the vocabulary projection has a bias.
    embedding_norm: whether a norm follows the embedding.
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


PARTS: Mapping[str, Callable[..., Described]] = {
    "attention": Attention,
    "latent_attention": LatentAttention,
    "mamba": state_space.Mamba,
    "mamba2": state_space.Mamba2,
    "delta_net": state_space.DeltaNet,
    "short_convolution": state_space.ShortConvolution,
    "dense": Dense,
    "experts": experts.Experts,
}
"""The names of layers' parts in the table of families."""


class DecoderConfig(RowConfig):
    """A decoder's config, as its row describes it."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    vocab_size: Count

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def most_tokens(self) -> int:
        return int(self.named("max_position_embeddings"))

    @property
    def predictors(self) -> int:
        """The number of layers that training adds after the last one to predict further tokens."""
        return int(self.named("predictors"))

    @property
    def key_heads(self) -> int:
        return int(self.named("key_heads"))

    @property
    def head_size(self) -> int:
        return int(self.named("head_size"))

    @property
    def inner(self) -> int:
        """The width of the dense feed-forward part."""
        return int(self.named("inner"))

    @property
    def tied(self) -> bool:
        """Whether embedding and vocabulary projection share one matrix."""
        return bool(self.named("tied"))

    def rules(self) -> Rules:
        """The rules of all its layers."""
        return self.rules_of(Rules, paths=DecoderPaths(**self.row["paths"]))

    @cached_property
    def mixing(self) -> tuple[Described | None, ...]:
        """What mixes tokens in each layer."""
        return tuple(self._part("mixing", layer) for layer in range(self.layers))

    @cached_property
    def feeding(self) -> tuple[Described | None, ...]:
        """What feeds forward in each layer."""
        return tuple(self._part("feeding", layer) for layer in range(self.layers))

    def _part(self, fact: str, layer: int) -> Described | None:
        part = self.named(fact, layer)
        if part is None:
            return None
        return PARTS[part](**{name: self.value(said, layer) for name, said in table()["parts"][part].items()})

    def check(self, faults: Faults, inside: str = "") -> None:
        """Checks that heads divide the width if their size is not given, that groups of keys divide the heads, and that
        a token has no more experts than there are, as far as the row states these."""
        if self.named("heads_checked"):
            if self.named("head_dim") is None:
                self.check_multiple("hidden_size", "num_attention_heads", faults, inside)
            heads, key_heads = self.num_attention_heads, self.named("num_key_value_heads")
            if key_heads is not None and heads % key_heads:
                names = self.called("num_key_value_heads"), self.called("num_attention_heads")
                faults.at(f"{inside}{names[0]}", f"{key_heads} does not divide {names[1]} = {heads}")
        sparse = any(self.named("feeding", layer) == "experts" for layer in range(self.layers))
        if sparse and not self.named("num_experts"):
            faults.at(f"{inside}{self.called('num_experts')}", "missing or zero, and some layers have experts")
        least = self.named("experts_checked_from")
        if least and self.named("num_experts_per_tok") > self.named("num_experts") >= least:
            faults.at(
                f"{inside}{self.called('num_experts_per_tok')}",
                f"{self.named('num_experts_per_tok')}, more than {self.called('num_experts')}; expected fewer",
            )


@dataclass(frozen=True)
class Decoder:
    """A decoder's layers at a given microbatch. predictors: of further tokens."""

    embedding: operators.LayerKind
    layers: Sequence[operators.LayerKind]
    predictors: Sequence[operators.LayerKind]
    head: operators.LayerKind
    paths: DecoderPaths

    @property
    def nodes(self) -> tuple[operators.LayerNode, ...]:
        """Embedding, layers, head, one after the other."""
        return operators.chain(
            operators.LayerNode(self.embedding, path=self.paths.embedding), *self.after_embedding(self.paths)
        )

    def after_embedding(self, paths: DecoderPaths) -> list[operators.LayerNode]:
        """All layers but the embedding, to be chained."""
        count = len(self.layers)
        further = [
            operators.LayerNode(kind, path=f"{paths.layers}.{count + index}", predictor=True)
            for index, kind in enumerate(self.predictors)
        ]
        return [*operators.stack(self.layers, paths.layers), *further, operators.LayerNode(self.head, path=paths.head)]


def decoder_of(config: DecoderConfig, microbatch: Microbatch) -> Decoder:
    """The layers that a config describes."""
    rules = config.rules()
    style = replace(rules, fused=microbatch.fused)
    symbols: dict[str, float] = {
        "s": microbatch.tokens or 1, "b": microbatch.samples, "h": config.hidden_size,
        "V": config.vocab_size, "P": rules.positions,
    }  # fmt: skip
    shapes = [LayerShape(*parts) for parts in zip(config.mixing, config.feeding, strict=True)]
    tables = [POSITIONS] if rules.positions else []
    layers = layer_kinds(shapes, symbols, style, rules.norms, rules.parallel_norms)
    further = config.predictors
    return Decoder(
        embedding_kind(symbols, style, tables=tables, normed=rules.embedding_norm),
        layers,
        [_predictor(_whole_block(shapes, symbols, style, rules), style, index + 2) for index in range(further)],
        head_kind(
            {**symbols, "M": 1 + further} if further else symbols,
            style,
            tied=config.tied,
            bias=rules.head_bias,
            tokens="M s b" if further else "s b",
        ),
        rules.paths,
    )


def _whole_block(
    shapes: Sequence[LayerShape], symbols: Mapping[str, float], style: BlockStyle, rules: Rules
) -> operators.LayerKind:
    """A layer with attention and a feed-forward part, as the last layers that have these; in a hybrid none has both."""
    attention = [shape.mixing for shape in shapes if isinstance(shape.mixing, (Attention, LatentAttention))]
    feeding = [shape.feeding for shape in shapes if shape.feeding is not None]
    block = LayerShape(attention[-1], feeding[-1])
    return layer_kinds([block], symbols, style, rules.norms, rules.parallel_norms)[0]


def _predictor(layer: operators.LayerKind, style: BlockStyle, predicted: int) -> operators.LayerKind:
    """A further layer on the states of the last one and the embeddings of the next tokens; it outputs both states.

    predicted: the number of tokens that each such layer predicts from here on. Embedding and projection are the
    model's.
    """
    joined = operators.Operator(
        "states and next tokens",
        (operators.Product("s b", "h", "2 h", divided="columns"),),
        "4 s b h",
        "6 s b h",
        parameters="2 h h",
        saved=(operators.KeptBytes("4 s b h", operators.Split.SEQUENCE),),
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
        exchanges=(
            operators.Exchange("embedding", HIDDEN, backward=0.0),
            all_reduce("states and next tokens"),
            *layer.exchanges,
        ),
        tied="V h",
    )


def build(config: DecoderConfig, microbatch: Microbatch, name: str) -> operators.Architecture:
    """Embedding, layers, head, one after the other."""
    return operators.Architecture(name, decoder_of(config, microbatch).nodes, sequences_text(microbatch), legend("all"))


FAMILIES = {name: Family(config_when_asked(DecoderConfig, "decoders", name), build) for name in table()["decoders"]}

USUAL = Family(config_when_asked(DecoderConfig, "bases", "usual"), build)
"""The family for an unknown ``model_type``."""
