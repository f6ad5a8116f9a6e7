"""A layer from its parts: what mixes tokens and what feeds each of them forward, each between norms and a residual sum.

A part is described by plain numbers (``Attention``, ``Dense`` and their likes in other modules) and made of operators
by ``part``; symbols of a part belong to its kind of layer alone, so kinds of one model may differ in them.

Tensor parallelism is Megatron's (Shoeybi et al. 2019; Narayanan et al. 2021). Symbols: s tokens of a sample, b samples
of a microbatch, h width, a heads, g key-value heads, d size of a head, f inner width of the feed-forward part, z tokens
of another tensor that attention looks at, W tokens of a sliding window and u the share of its scores that a causal mask
leaves. Activations have 2 bytes a number, dropout masks 1. With GPT's shape (f = 4h, a d = h, g = a) what is saved sums
to s b h (34 + 5 a s / h), the published figure (Korthikanti et al. 2022, equation 1); its parts are named there.

``LatentAttention`` is DeepSeek's (DeepSeek-V2, 2024, section 2.1): its queries, keys and values come from narrow latent
vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from piper_ray.model.mode import CHEAP
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.operators import (
    LOSS,
    SOFTMAX,
    TOKEN_EMBEDDING,
    Exchange,
    KeptBytes,
    LayerKind,
    Operator,
    Product,
    Split,
    linear,
    pointwise,
)

_CORE = "core_attn"
"""Megatron's name for scores, softmax and weighted values."""

HIDDEN = "2 s b h"
"""Bytes of the activations between layers."""

Symbols = Mapping[str, float]

Norms = Literal["before", "after", "both"]
"""The place of a part's norms: before it, as in most models; after it (OLMo 2); or both (Gemma 2)."""


@dataclass(frozen=True)
class BlockStyle:
    """How the layers of a model are made.

    fused: attention as one kernel that keeps no scores (FlashAttention); selective recomputation then makes the outputs
    of norms and activation functions again. Otherwise it is that of Korthikanti et al.: the attention core. norm:
    parameters of one norm of width h. query_bias: whether queries, keys and values have biases, but keys only with
    key_bias. output_bias: whether attention's output has one. inner_bias: whether the feed-forward part has them, in
    and out. gated: SwiGLU and the like, with two inner projections. query_norm: parameters of the norms of queries and
    keys, "" where they have none. window: a sliding one. sinks: a learned one for each head. gate: of attention's
    output, as wide as the queries.
    """

    fused: bool = True
    causal: bool = True
    norm: str = "2 h"
    query_bias: bool = True
    key_bias: bool = True
    output_bias: bool = True
    inner_bias: bool = True
    gated: bool = False
    dropout: bool = False
    rotary: bool = False
    query_norm: str = ""
    window: bool = False
    sinks: bool = False
    gate: bool = False

    def cheap(self, *parts: str) -> tuple[str, ...]:
        """Returns these parts, and CHEAP if selective recomputation repeats norms and activation functions."""
        return (CHEAP, *parts) if self.fused else parts


@dataclass(frozen=True)
class Part:
    """A part of a layer. name: norms and residual sums are named after it. biases: added with the residual sum.
    norm_again: parts (``model.mode``) whose recomputation repeats the norm before it."""

    name: str
    operators: tuple[Operator, ...]
    exchanges: tuple[Exchange, ...]
    heads: tuple[int, ...] = ()
    key_heads: int = 0
    symbols: Symbols = field(default_factory=dict)
    biases: str = "0"
    norm_again: tuple[str, ...] = ()


class Described(Protocol):
    """A part as numbers. ``word`` distinguishes its layer from others of the model; empty for the usual part."""

    @property
    def word(self) -> str: ...

    def part(self, style: BlockStyle, symbols: Symbols) -> Part: ...


@dataclass(frozen=True)
class Attention:
    """Attention of heads that share keys and values in groups.

    window: how many tokens each token sees; None: all. sinks: a learned one for each head (gpt-oss). output_gate:
    whether there is a gate as wide as the queries (Qwen3-Next).
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
        style = replace(style, window=bool(self.window), sinks=self.sinks, gate=self.output_gate)
        return replace(attention_part(style, self.heads), key_heads=self.key_heads, symbols=own)


MLP = ("mlp",)
"""Megatron's name for a dense feed-forward part with its norm, which TransformerEngine fuses with the first product."""


@dataclass(frozen=True)
class Dense:
    """A feed-forward part of two matrices, or three if gated. in_mixture: other layers of the model have experts."""

    inner: int
    in_mixture: bool = False

    @property
    def word(self) -> str:
        return "dense" if self.in_mixture else ""

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:  # noqa: ARG002
        return replace(feed_forward_part(style, MLP), symbols={"f": self.inner})


def attention_part(style: BlockStyle, heads: int) -> Part:
    """Attention among s tokens."""
    biases = "h" if style.output_bias else "0"
    return Part("attention", attention(style), (all_reduce("attention"),), (heads,), biases=biases)


def feed_forward_part(style: BlockStyle, again: tuple[str, ...] = (), input_saved: bool = True) -> Part:
    """Two matrices of inner width f, or three if gated. again: parts whose recomputation repeats all of it."""
    operators = feed_forward(style, input_saved=input_saved, again=again)
    biases = "h" if style.inner_bias else "0"
    return Part("feed-forward", operators, (all_reduce("feed-forward", again),), biases=biases, norm_again=again)


@dataclass(frozen=True)
class LayerShape:
    """A layer as numbers. feeding: None if it only mixes tokens (Mamba). mixing: None if it only feeds forward."""

    mixing: Described | None
    feeding: Described | None

    @property
    def parts(self) -> tuple[Described, ...]:
        return tuple(part for part in (self.mixing, self.feeding) if part is not None)

    @property
    def words(self) -> tuple[str, ...]:
        if self.mixing is None:
            return ("feed-forward", *(part.word for part in self.parts if part.word))
        if self.feeding is None:
            return (self.mixing.word or "attention",)
        return tuple(part.word for part in self.parts if part.word)


def layer_kinds(
    shapes: Sequence[LayerShape], symbols: Symbols, style: BlockStyle, norms: Norms = "before", parallel_norms: int = 0
) -> list[LayerKind]:
    """The kinds of a model's layers, one for each distinct shape. parallel_norms: as in ``layer_kind``. Names leave out
    words that all shapes share."""
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
        name = " ".join([*words, "decoder layer"]) + with_experts + number.replace("-", " ")
        parts = [part.part(style, symbols) for part in shape.parts]
        made[shape] = layer_kind(key + number, name, symbols, style, parts, norms, parallel_norms)
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
    """One kind of layer. parallel_norms: for parts side by side, the number of norms whose outputs they read: one for
    all, or one each; 0: one part after the other."""
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


def block(key: str, name: str, symbols: Symbols, style: BlockStyle, *, parallel: bool = False) -> LayerKind:
    """Attention of ``symbols["a"]`` heads and a feed-forward part: in a row, or side by side on the outputs of one norm
    (ViT-22B, Dehghani et al. 2023)."""
    again = () if parallel else MLP  # side by side they have a norm in common
    parts = [attention_part(style, int(symbols["a"])), feed_forward_part(style, again, input_saved=not parallel)]
    return layer_kind(key, name, symbols, style, parts, parallel_norms=int(parallel))


def block_symbols(samples: int, tokens: int, width: int, heads: int, inner: int) -> dict[str, float]:
    """The symbols of a layer whose heads have their own keys and divide the width."""
    return {"s": tokens, "b": samples, "h": width, "a": heads, "g": heads, "d": width // heads, "f": inner}


def norm(style: BlockStyle, name: str = "norm", *parts: str) -> Operator:
    """A layer norm or RMS norm of the hidden activations. parts: those whose recomputation repeats it."""
    return pointwise(name, "s b h", (4, 6), 2, Split.SEQUENCE, parameters=style.norm, again=style.cheap(*parts))


def residual(style: BlockStyle, name: str, biases: str = "0") -> Operator:
    """Biases of the parts before it, dropout and the sum with the residual stream."""
    if style.dropout:
        return pointwise(name, "s b h", (7, 5), 1, Split.SEQUENCE, parameters=biases)
    return pointwise(name, "s b h", (6, 4), split=Split.SEQUENCE, parameters=biases)


def table(name: str, parameters: str) -> Operator:
    """A vector from a small table, which every device has, added to each token."""
    return pointwise(name, "s b h", (4, 2), split=Split.SEQUENCE, parameters=parameters)


def dropout() -> Operator:
    """Dropout of the hidden activations by itself."""
    return pointwise("dropout", "s b h", (5, 5), 1, Split.SEQUENCE)


def attention(style: BlockStyle) -> tuple[Operator, ...]:
    """Attention among s tokens, without its norm and residual sum."""
    queries = "2 a d" if style.gate else "a d"
    operators = [
        linear(
            "queries, keys, values",
            f"{queries} + 2 g d",
            "h",
            "columns",
            f"h {queries} + 2 h g d" + (f" + {queries} + {_key_biases(style)}" if style.query_bias else ""),
            kept_again=style.cheap(),
            results=(KeptBytes(f"2 s b {queries} + 4 s b g d", Split.TENSOR),),
            matrices=3,
        )
    ]
    if style.rotary or style.query_norm:
        name = "rotary positions" if style.rotary else "query and key norms"
        turned = pointwise(name, "s b a d + s b g d", (4, 4), parameters=style.query_norm or "0")
        operators.append(replace(turned, parameters_split=Split.WHOLE))
    operators += core(style)
    if style.gate:
        operators.append(pointwise("gate of the output", "s b a d", (6, 10), 2))
    return (*operators, attention_output())


def core(style: BlockStyle, keys: str = "s", value_size: str = "d", prefix: str = "") -> tuple[Operator, ...]:
    """Scores of s queries and ``keys``, softmax, the weighted sum of values (whose size may not be that of keys)."""
    sinks = "a" if style.sinks else "0"
    if style.fused:
        seen, share = ("W", "u ") if style.window else (keys, "0.5 " if style.causal else "")
        kernel = Operator(
            f"{prefix}attention core, fused",
            (
                Product("s", seen, "d", f"{share}b a", "count"),
                Product("s", value_size, seen, f"{share}b a", "count"),
            ),
            forward_bytes=f"4 s b a d + 4 {keys} b g d",
            backward_bytes=f"8 s b a d + 8 {keys} b g d",
            backward_products=2.5,  # the scores are made again
            on_chip=True,
            parameters=sinks,
            saved=(KeptBytes("4 s b a", Split.TENSOR, again=(_CORE,)),),  # the softmax's denominators
            again=(_CORE,),
        )
        return (kernel,)
    scores, again = f"a s {keys} b", (CHEAP, _CORE)
    dropped = pointwise(f"{prefix}dropout of scores", scores, (5, 5), 3, kept_again=again, again=again)
    return (
        Operator(f"{prefix}scores", (Product("s", keys, "d", "b a", "count"),), again=again),
        pointwise(f"{prefix}{SOFTMAX}", scores, (4, 6), 2, kept_again=again, again=again, parameters=sinks),
        *((dropped,) if style.dropout else ()),
        Operator(f"{prefix}weighted values", (Product("s", value_size, keys, "b a", "count"),), again=again),
    )


OTHER_TOKENS = "2 z b h"
"""Bytes of the tensor that cross attention reads: the encoder's output."""


def cross_attention(style: BlockStyle) -> Part:
    """Attention of s tokens to the z tokens of an encoder's output."""
    style = replace(style, causal=False)
    queries = linear(
        "cross queries",
        "a d",
        "h",
        "columns",
        "h a d + a d" if style.query_bias else "h a d",
        kept_again=style.cheap(),
        results=(KeptBytes("2 s b a d", Split.TENSOR),),
    )
    keys = linear(
        "cross keys and values",
        "2 g d",
        "h",
        "columns",
        "2 h g d" + (f" + {_key_biases(style)}" if style.query_bias else ""),
        rows="z b",
        results=(KeptBytes("4 z b g d", Split.TENSOR),),
        matrices=2,
    )
    operators = (queries, keys, *core(style, keys="z", prefix="cross "), attention_output("cross "))
    backwards = Exchange("gradient of the encoder's output", OTHER_TOKENS, forward=0.0)
    biases = "h" if style.output_bias else "0"
    return Part("cross attention", operators, (all_reduce("cross attention"), backwards), biases=biases)


def _key_biases(style: BlockStyle) -> str:
    return "2 g d" if style.key_bias else "g d"


def attention_output(prefix: str = "", value_size: str = "d") -> Operator:
    """The projection of the heads' values back to the width."""
    return linear(f"{prefix}attention output", "h", f"a {value_size}", "depth", f"h a {value_size}")


def feed_forward(
    style: BlockStyle, inner: str = "f", input_saved: bool = True, again: tuple[str, ...] = ()
) -> tuple[Operator, ...]:
    """The feed-forward part without its norm and residual sum; ``inner``: the symbol of its inner width. again: parts
    whose recomputation repeats all of it."""
    cheap, matrices = style.cheap(*again), 2 if style.gated else 1
    into = f"{matrices} {inner}"
    parameters = f"{matrices} h {inner}" + (f" + {into}" if style.inner_bias else "")
    first = linear(
        "feed-forward in", into, "h", "columns", parameters, kept_again=cheap, again=again, matrices=matrices
    )
    return (
        first if input_saved else replace(first, saved=()),
        activation("activation function", f"s b {inner}", style.gated, kept_again=again, again=cheap),
        linear("feed-forward out", "h", inner, "depth", f"h {inner}", kept_again=cheap, again=again),
    )


def activation(
    name: str, numbers: str, gated: bool, *, kept_again: tuple[str, ...], again: tuple[str, ...]
) -> Operator:
    """The activation function between two matrices. numbers: its inner numbers. gated: whether it multiplies two
    products."""
    moved, kept = ((6, 10), 4) if gated else ((4, 6), 2)
    return pointwise(name, numbers, moved, kept, kept_again=kept_again, again=again)


def all_reduce(name: str, again: tuple[str, ...] = ()) -> Exchange:
    """The all-reduce after a part whose last product is divided by depth forwards, and before its first one
    backwards."""
    return Exchange(name, HIDDEN, again=again)


def undivided(name: str, products: tuple[Product, ...] = (), *, saved: str = "", **others: str | float) -> Operator:
    """A step that each of t devices runs as a whole, with all of its parameters. saved: kept bytes, if any. others:
    fields of ``Operator``."""
    kept = (KeptBytes(saved, Split.WHOLE),) if saved else ()
    fields: dict[str, Any] = {**others, "split": Split.WHOLE, "parameters_split": Split.WHOLE, "saved": kept}
    return Operator(name, products, **fields)


_NORM, _UP = ("layernorm",), ("mla_up_proj",)
"""Megatron's names of parts that can be recomputed: the separate norm before the latent vectors, and everything that is
made from these vectors, including rotary positions."""


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
        operators = _latent_attention(style, self.query_rank is not None)
        whole = attention_part(style, self.heads)
        return replace(whole, operators=operators, symbols=own, norm_again=_NORM)


def _latent_attention(style: BlockStyle, low_rank_queries: bool) -> tuple[Operator, ...]:
    """Queries, keys and values from narrow latent vectors that have norms.

    Selective recomputation makes them again from those vectors (DeepSeek-V3, 2024, section 3.2.3).
    """
    again = style.cheap(*_UP)
    vectors, queries = ("Q + C", "Q") if low_rank_queries else ("C", "h")
    bias = f" + {vectors} + r" if style.query_bias else ""
    made = linear(
        "queries", "a d", queries, "columns", f"{queries} a d", kept_again=again, again=again,
        results=(KeptBytes("2 s b a d", Split.TENSOR, again),),
    )  # fmt: skip
    return (
        linear(
            "latent vectors",
            f"{vectors} + r",
            "h",
            "tokens",
            ("h Q + Q + " if low_rank_queries else "") + "h C + h r + C" + bias,
            kept_again=style.cheap(*_NORM),
            results=(KeptBytes(("2 s b Q + " if low_rank_queries else "") + "2 s b C + 2 s b r", Split.SEQUENCE),),
            matrices=2 if low_rank_queries else 1,
            forward_bytes="4 s b C" + (" + 4 s b Q" if low_rank_queries else ""),
            backward_bytes="6 s b C" + (" + 6 s b Q" if low_rank_queries else ""),
        ),
        made if low_rank_queries else replace(made, saved=made.saved[1:]),  # what they read is kept already
        linear(
            "keys and values", "a n + a v", "C", "columns", "C a n + C a v", kept_again=again, again=again,
            results=(KeptBytes("2 s b a d + 2 s b a v", Split.TENSOR, again),),
        ),
        pointwise("rotary positions", "s b a r", (8, 8), again=_UP),
        *core(style, value_size="v"),
        attention_output(value_size="v"),
    )  # fmt: skip


POSITIONS = ("position embedding", "P h")
"""The table of learned positions."""


def embedding_kind(
    symbols: Symbols,
    style: BlockStyle,
    *,
    tables: Sequence[tuple[str, str]] = (),
    normed: bool = False,
    half: str = "",
    tied: str = "0",
) -> LayerKind:
    """Rows of the vocabulary over devices, each looking up its own, summed (Megatron).

    tables: further ones that each device has, as (name, parameters). normed: a norm follows. half: the half of the
    model, where it has several embeddings. tied: as in LayerKind.
    """
    operators = [
        Operator(
            TOKEN_EMBEDDING,
            forward_bytes="4 s b h",
            backward_bytes="6 s b h",
            split=Split.SEQUENCE,
            parameters="V h",
            saved=(KeptBytes("8 s b", Split.WHOLE),),
        ),
        *(table(label, parameters) for label, parameters in tables),
    ]
    if normed:
        operators.append(norm(style))
    if style.dropout:
        operators.append(dropout())
    words = [half, "embedding"] if half else ["embedding"]
    exchange = Exchange("embedding", HIDDEN, backward=0.0)
    return LayerKind(
        "-".join(words), " ".join(words), symbols, tuple(operators), HIDDEN, exchanges=(exchange,), tied=tied
    )


def head_kind(
    symbols: Symbols,
    style: BlockStyle,
    *,
    tied: bool,
    bias: bool = False,
    before: Sequence[Operator] | None = None,
    tokens: str = "s b",
) -> LayerKind:
    """Vocabulary projection divided by columns, and the loss on logits in fp32; ``before`` it: a norm if not said.

    tied: the projection's weights are the embedding's; its bias is its own. tokens: those that are projected, by
    formula.
    """
    operators = (
        *([norm(style, "last norm")] if before is None else before),
        linear("vocabulary projection", "V", "h", "columns", "h V + V" if bias else "h V", rows=tokens),
        pointwise(LOSS, f"{tokens} V", (8, 6), 4),
    )
    return LayerKind(
        "head",
        "vocabulary projection",
        symbols,
        operators,
        output="0",
        exchanges=(Exchange("input of the projection", f"2 {tokens} h", forward=0.0),),
        tied="h V" if tied else "0",
    )


def sequences_text(microbatch: Microbatch) -> str:
    """A microbatch in words."""
    return f"{microbatch.samples:,} sequence{'s' if microbatch.samples > 1 else ''} of {microbatch.tokens:,} tokens"
