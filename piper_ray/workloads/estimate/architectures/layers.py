"""A layer from its parts: what mixes tokens and what feeds each of them forward, each between norms and a residual sum.

A part is described by plain numbers (``Attention``, ``Dense`` and their likes in other modules) and made of operators
by ``part``; symbols of a part belong to its kind of layer alone, so kinds of one model may differ in them.

``LatentAttention`` is DeepSeek's (DeepSeek-V2, 2024, section 2.1): its queries, keys and values come from narrow latent
vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from piper_ray.workloads.estimate.architectures.transformer import (
    HIDDEN,
    BlockStyle,
    all_reduce,
    attention,
    attention_output,
    cheap,
    core,
    feed_forward,
    norm,
    residual,
)
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, LayerKind, Operator, Product, Split

Symbols = Mapping[str, float]

Norms = Literal["before", "after", "both"]
"""Of a part: before it, as most have; after it (OLMo 2); both (Gemma 2)."""


@dataclass(frozen=True)
class Part:
    """A part of a layer. name: norms and residual sums are called after it. biases: added with the residual sum.

    norm_again: parts (``model.mode``) whose recomputation does the norm before it again.
    """

    name: str
    operators: tuple[Operator, ...]
    exchanges: tuple[Exchange, ...]
    heads: tuple[int, ...] = ()
    key_heads: int = 0
    symbols: Symbols = field(default_factory=dict)
    biases: str = "0"
    norm_again: tuple[str, ...] = ()


class Described(Protocol):
    """A part as numbers. ``word`` tells a layer with it from others of the same model; empty for what is usual."""

    @property
    def word(self) -> str: ...

    def part(self, style: BlockStyle, symbols: Symbols) -> Part: ...


@dataclass(frozen=True)
class Attention:
    """Attention of heads that share keys and values in groups. window: of how many tokens each sees, None for all.

    sinks: a learned one for each head (gpt-oss). output_gate: of the width of the queries (Qwen3-Next).
    """

    heads: int
    key_heads: int
    head_size: int
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False

    @property
    def word(self) -> str:
        return "sliding" if self.window else ""

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:
        tokens = symbols["s"]
        own: dict[str, float] = {"a": self.heads, "g": self.key_heads, "d": self.head_size}
        if self.window:
            seen = min(self.window, tokens)
            own |= {"W": seen, "u": 1.0 - seen / (2.0 * tokens) if style.causal else 1.0}
        operators = attention(replace(style, window=bool(self.window), sinks=self.sinks, gate=self.output_gate))
        biases = "h" if style.output_bias else "0"
        exchanges = (all_reduce("attention"),)
        return Part("attention", operators, exchanges, (self.heads,), self.key_heads, own, biases)


_MLP = ("mlp",)
"""Megatron's name of a dense feed-forward part with its norm, which TransformerEngine fuses with the first product."""


@dataclass(frozen=True)
class Dense:
    """A feed-forward part of two or, gated, three matrices. beside_experts: other layers of the model have experts."""

    inner: int
    beside_experts: bool = False

    @property
    def word(self) -> str:
        return "dense" if self.beside_experts else ""

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:  # noqa: ARG002
        biases = "h" if style.inner_bias else "0"
        exchanges = (all_reduce("feed-forward", _MLP),)
        operators = feed_forward(style, parts=_MLP)
        return Part("feed-forward", operators, exchanges, symbols={"f": self.inner}, biases=biases, norm_again=_MLP)


@dataclass(frozen=True)
class LayerShape:
    """A layer as numbers. feeding: None where a layer only mixes (Mamba), mixing: None where it only feeds forward."""

    mixing: Described | None
    feeding: Described | None

    @property
    def parts(self) -> tuple[Described, ...]:
        return tuple(part for part in (self.mixing, self.feeding) if part is not None)

    @property
    def words(self) -> tuple[str, ...]:
        if self.mixing is None:
            return ("feed-forward",)
        if self.feeding is None:
            return (self.mixing.word or "attention",)
        return tuple(part.word for part in self.parts if part.word)


def layer_kinds(
    shapes: Sequence[LayerShape], symbols: Symbols, style: BlockStyle, norms: Norms = "before", parallel_norms: int = 0
) -> list[LayerKind]:
    """The kinds of a model's layers, one for each distinct shape. parallel_norms: as in ``layer_kind``.

    Words that all shapes share are left out of their names.
    """
    distinct = list(dict.fromkeys(shapes))
    shared = set.intersection(*(set(shape.words) for shape in distinct)) if distinct else set()
    made: dict[LayerShape, LayerKind] = {}
    taken: dict[str, int] = {}
    for shape in distinct:
        words = [word for word in shape.words if word not in shared and word != "experts"]
        key = "-".join([*words, "block"])
        taken[key] = taken.get(key, 0) + 1
        number = "" if taken[key] == 1 else f"-{taken[key]}"
        with_experts = " with experts" if "experts" in shape.words else ""
        made[shape] = layer_kind(
            key + number,
            " ".join([*words, "decoder layer"]) + with_experts + number.replace("-", " "),
            symbols,
            style,
            [part.part(style, symbols) for part in shape.parts],
            norms,
            parallel_norms,
        )
    return [made[shape] for shape in shapes]


def layer_kind(
    key: str,
    name: str,
    symbols: Symbols,
    style: BlockStyle,
    parts: Sequence[Part],
    norms: Norms = "before",
    parallel_norms: int = 0,
) -> LayerKind:
    """One layer. parallel_norms: of parts side by side, on the outputs of one norm or of one each; 0: in a row."""
    operators: list[Operator] = []
    if parallel_norms and len(parts) > 1:
        names = ["norm"] if parallel_norms == 1 else [f"norm {index + 1}" for index in range(parallel_norms)]
        operators += [norm(style, one) for one in names]
        operators += [operator for part in parts for operator in part.operators]
        operators.append(residual(style, "residual", " + ".join(part.biases for part in parts)))
        exchanges: tuple[Exchange, ...] = (all_reduce(" and ".join(part.name for part in parts)),)
    else:
        for part in parts:
            operators += [norm(style, f"norm before {part.name}", *part.norm_again)] if norms != "after" else []
            operators += part.operators
            operators += [norm(style, f"norm after {part.name}")] if norms != "before" else []
            operators.append(residual(style, f"residual after {part.name}", part.biases))
        exchanges = tuple(exchange for part in parts for exchange in part.exchanges)
    own = {symbol: value for part in parts for symbol, value in part.symbols.items()}
    return LayerKind(
        key,
        name,
        {**symbols, **own},
        tuple(operators),
        output=HIDDEN,
        checkpoint=HIDDEN,
        exchanges=exchanges,
        heads=tuple(heads for part in parts for heads in part.heads),
        key_heads=max(part.key_heads for part in parts),
        recomputable=True,
    )


_NORM, _UP = ("layernorm",), ("mla_up_proj",)
"""Megatron's names of what can be computed again: the norm before the latent vectors, which stands by itself, and what
is made of these vectors, rotary positions included."""

LATENT_LEGEND = {
    "Q": "rank of the queries",
    "C": "rank of the keys and values",
    "r": "rotary part of a head",
    "n": "other part of a head",
    "v": "size of a head's values",
}


@dataclass(frozen=True)
class LatentAttention:
    """query_rank: None for queries of full rank. rotary_size, plain_size: parts of a head of queries and keys."""

    heads: int
    query_rank: int | None
    rank: int
    rotary_size: int
    plain_size: int
    value_size: int
    word: str = ""

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:  # noqa: ARG002
        own = {
            "a": self.heads, "g": self.heads, "d": self.rotary_size + self.plain_size, "Q": self.query_rank or 0,
            "C": self.rank, "r": self.rotary_size, "n": self.plain_size, "v": self.value_size,
        }  # fmt: skip
        operators = latent_attention(style, self.query_rank is not None)
        biases = "h" if style.output_bias else "0"
        exchanges = (all_reduce("attention"),)
        return Part("attention", operators, exchanges, (self.heads,), symbols=own, biases=biases, norm_again=_NORM)


def latent_attention(style: BlockStyle, low_rank_queries: bool) -> tuple[Operator, ...]:
    """Queries, keys and values from narrow latent vectors that have norms.

    Selective recomputation makes them again from those vectors (DeepSeek-V3, 2024, section 3.2.3).
    """
    bias = ""
    if style.query_bias:
        bias = " + Q + C + r" if low_rank_queries else " + C + r"
    queries = "Q" if low_rank_queries else "h"
    again = cheap(style, *_UP)
    down = "Q + C + r" if low_rank_queries else "C + r"
    kept = "2 s b Q + 2 s b C" if low_rank_queries else "2 s b C"
    return (
        Operator(
            "latent vectors",
            products=(Product("s b", down, "h", divided="tokens"),),
            matrices=2 if low_rank_queries else 1,
            split=Split.SEQUENCE,
            forward_bytes=f"4 s b C{' + 4 s b Q' if low_rank_queries else ''}",
            backward_bytes=f"6 s b C{' + 6 s b Q' if low_rank_queries else ''}",
            parameters=("h Q + Q + " if low_rank_queries else "") + "h C + h r + C" + bias,
            parameters_split=Split.WHOLE,
            saved=(
                KeptBytes(HIDDEN, Split.SEQUENCE, again=cheap(style, *_NORM)),
                KeptBytes(f"{kept} + 2 s b r", Split.SEQUENCE),
            ),
        ),
        Operator(
            "queries",
            products=(Product("s b", "a d", queries, divided="columns"),),
            parameters=f"{queries} a d",
            saved=(
                *((KeptBytes("2 s b Q", Split.SEQUENCE, again=again),) if low_rank_queries else ()),
                KeptBytes("2 s b a d", Split.TENSOR, again=again),
            ),
            again=again,
        ),
        Operator(
            "keys and values",
            products=(Product("s b", "a n + a v", "C", divided="columns"),),
            parameters="C a n + C a v",
            saved=(
                KeptBytes("2 s b C", Split.SEQUENCE, again=again),
                KeptBytes("2 s b a d + 2 s b a v", Split.TENSOR, again=again),
            ),
            again=again,
        ),
        Operator("rotary positions", forward_bytes="8 s b a r", backward_bytes="8 s b a r", again=_UP),
        *core(style, value_size="v"),
        attention_output(value_size="v"),
    )
