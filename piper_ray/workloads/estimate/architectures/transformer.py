"""The parts of transformer layers, with Megatron's tensor parallelism (Shoeybi et al. 2019; Narayanan et al. 2021).

Symbols: s tokens of a sample, b samples of a microbatch, h width, a heads, g key-value heads, d size of a head, f inner
width of the feed-forward part, z tokens of another tensor that attention looks at, W tokens of a sliding window and u
the share of its scores that a causal mask leaves. Activations have 2 bytes a number, dropout masks 1. With GPT's shape
(f = 4h, a d = h, g = a) what is saved sums to s b h (34 + 5 a s / h), the published figure (Korthikanti et al. 2022,
equation 1); its parts are named there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper_ray.model.mode import CHEAP
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, LayerKind, Operator, Product, Split

_CORE = "core_attn"
"""Megatron's name of scores, softmax and weighted values."""

BLOCK_LEGEND = {
    "b": "samples of a microbatch",
    "h": "width",
    "a": "attention heads",
    "g": "key-value heads",
    "d": "size of a head",
    "f": "inner width of the feed-forward part",
}
"""What the symbols of each transformer layer stand for."""

HIDDEN = "2 s b h"
"""Bytes of the activations between layers."""


@dataclass(frozen=True)
class BlockStyle:
    """How the layers of a model are made.

    fused: attention as one kernel that keeps no scores (FlashAttention); selective recomputation then makes the
    outputs of norms and activation functions again. Otherwise it is that of Korthikanti et al.: the attention core.
    norm_parameters: of one norm. query_bias: of queries, keys and values, but of keys only with key_bias;
    output_bias: of attention's output; inner_bias: of the feed-forward part, in and out. gated: SwiGLU and the like,
    with two inner projections.
    query_norm: parameters of the norms of queries and keys, "" where they have none. window: a sliding one. sinks: a
    learned one for each head. gate: of attention's output, as wide as the queries.
    """

    fused: bool = True
    causal: bool = True
    norm_parameters: str = "2 h"
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


def cheap(style: BlockStyle, *parts: str) -> tuple[str, ...]:
    """These parts, and CHEAP where selective recomputation makes outputs of norms and activation functions again."""
    return (CHEAP, *parts) if style.fused else parts


def norm(style: BlockStyle, name: str = "norm", *parts: str) -> Operator:
    """Layer norm or RMS norm of the hidden activations. parts: whose recomputation does it again."""
    return Operator(
        name,
        forward_bytes="4 s b h",
        backward_bytes="6 s b h",
        split=Split.SEQUENCE,
        parameters=style.norm_parameters,
        parameters_split=Split.WHOLE,
        saved=(KeptBytes(HIDDEN, Split.SEQUENCE),),
        again=cheap(style, *parts),
    )


def residual(style: BlockStyle, name: str, biases: str = "0") -> Operator:
    """Biases of the parts before it, dropout and the sum with the residual stream."""
    return Operator(
        name,
        forward_bytes="7 s b h" if style.dropout else "6 s b h",
        backward_bytes="5 s b h" if style.dropout else "4 s b h",
        split=Split.SEQUENCE,
        parameters=biases,
        parameters_split=Split.WHOLE,
        saved=(KeptBytes("s b h", Split.SEQUENCE),) if style.dropout else (),
    )


def attention(style: BlockStyle) -> tuple[Operator, ...]:
    """Attention of s tokens to themselves, without its norm and residual."""
    queries = "2 a d" if style.gate else "a d"
    query = Operator(
        "queries, keys, values",
        products=(Product("s b", f"{queries} + 2 g d", "h", divided="columns"),),
        matrices=3,
        parameters=f"h {queries} + 2 h g d" + (f" + {queries} + {_key_biases(style)}" if style.query_bias else ""),
        saved=(
            KeptBytes(HIDDEN, Split.SEQUENCE, again=cheap(style)),
            KeptBytes(f"2 s b {queries} + 4 s b g d", Split.TENSOR),
        ),
    )
    turned = []
    if style.rotary or style.query_norm:
        turned = [
            Operator(
                "rotary positions" if style.rotary else "query and key norms",
                forward_bytes="4 s b a d + 4 s b g d",
                backward_bytes="4 s b a d + 4 s b g d",
                parameters=style.query_norm or "0",
                parameters_split=Split.WHOLE,
            )
        ]
    gate = Operator(
        "gate of the output",
        forward_bytes="6 s b a d",
        backward_bytes="10 s b a d",
        saved=(KeptBytes("2 s b a d", Split.TENSOR),),
    )
    return (query, *turned, *core(style), *((gate,) if style.gate else ()), attention_output())


def core(style: BlockStyle, keys: str = "s", value_size: str = "d", prefix: str = "") -> tuple[Operator, ...]:
    """Scores of s queries and ``keys``, softmax, the weighted sum of values (whose size may not be that of keys)."""
    scores = f"a s {keys} b"
    if style.fused:
        seen, share = ("W", "u ") if style.window else (keys, "0.5 " if style.causal else "")
        return (
            Operator(
                f"{prefix}attention core, fused",
                products=(
                    Product("s", seen, "d", f"{share}b a", "count"),
                    Product("s", value_size, seen, f"{share}b a", "count"),
                ),
                backward_products=2.5,  # the scores are made again
                forward_bytes=f"4 s b a d + 4 {keys} b g d",
                backward_bytes=f"8 s b a d + 8 {keys} b g d",
                on_chip=True,
                parameters="a" if style.sinks else "0",
                saved=(KeptBytes("4 s b a", Split.TENSOR, again=(_CORE,)),),  # the softmax's denominators
                again=(_CORE,),
            ),
        )
    dropped = (
        Operator(
            f"{prefix}dropout of scores",
            forward_bytes=f"5 {scores}",
            backward_bytes=f"5 {scores}",
            saved=(KeptBytes(f"3 {scores}", Split.TENSOR, again=(CHEAP, _CORE)),),
            again=(CHEAP, _CORE),
        ),
    )
    return (
        Operator(f"{prefix}scores", products=(Product("s", keys, "d", "b a", "count"),), again=(CHEAP, _CORE)),
        Operator(
            f"{prefix}softmax",
            parameters="a" if style.sinks else "0",
            forward_bytes=f"4 {scores}",
            backward_bytes=f"6 {scores}",
            saved=(KeptBytes(f"2 {scores}", Split.TENSOR, again=(CHEAP, _CORE)),),
            again=(CHEAP, _CORE),
        ),
        *(dropped if style.dropout else ()),
        Operator(
            f"{prefix}weighted values",
            products=(Product("s", value_size, keys, "b a", "count"),),
            again=(CHEAP, _CORE),
        ),
    )


def cross_attention(style: BlockStyle) -> tuple[Operator, ...]:
    """Attention of s tokens to the z tokens of another tensor, without its norm and residual."""
    style = replace(style, causal=False)
    return (
        Operator(
            "cross queries",
            products=(Product("s b", "a d", "h", divided="columns"),),
            parameters="h a d + a d" if style.query_bias else "h a d",
            saved=(KeptBytes(HIDDEN, Split.SEQUENCE, again=cheap(style)), KeptBytes("2 s b a d", Split.TENSOR)),
        ),
        Operator(
            "cross keys and values",
            products=(Product("z b", "2 g d", "h", divided="columns"),),
            matrices=2,
            parameters="2 h g d" + (f" + {_key_biases(style)}" if style.query_bias else ""),
            saved=(KeptBytes("2 z b h", Split.SEQUENCE), KeptBytes("4 z b g d", Split.TENSOR)),
        ),
        *core(style, keys="z", prefix="cross "),
        attention_output("cross "),
    )


def _key_biases(style: BlockStyle) -> str:
    return "2 g d" if style.key_bias else "g d"


def attention_output(prefix: str = "", value_size: str = "d") -> Operator:
    """The projection of the heads' values back to the width."""
    return Operator(
        f"{prefix}attention output",
        products=(Product("s b", "h", f"a {value_size}", divided="depth"),),
        parameters=f"h a {value_size}",
        saved=(KeptBytes(f"2 s b a {value_size}", Split.TENSOR),),
    )


def feed_forward(
    style: BlockStyle, inner: str = "f", input_saved: bool = True, parts: tuple[str, ...] = ()
) -> tuple[Operator, ...]:
    """The feed-forward part without its norm and residual; ``inner``: the symbol of its inner width.

    parts: whose recomputation does all of it again.
    """
    f = inner
    into = "2" if style.gated else "1"
    return (
        Operator(
            "feed-forward in",
            products=(Product("s b", f"{into} {f}", "h", divided="columns"),),
            matrices=int(into),
            parameters=f"{into} h {f}" + (f" + {into} {f}" if style.inner_bias else ""),
            saved=(KeptBytes(HIDDEN, Split.SEQUENCE, again=cheap(style, *parts)),) if input_saved else (),
            again=parts,
        ),
        Operator(
            "activation function",
            forward_bytes=f"6 s b {f}" if style.gated else f"4 s b {f}",
            backward_bytes=f"10 s b {f}" if style.gated else f"6 s b {f}",
            saved=(KeptBytes(f"{'4' if style.gated else '2'} s b {f}", Split.TENSOR, again=parts),),
            again=cheap(style, *parts),
        ),
        Operator(
            "feed-forward out",
            products=(Product("s b", "h", f, divided="depth"),),
            parameters=f"h {f}",
            saved=(KeptBytes(f"2 s b {f}", Split.TENSOR, again=cheap(style, *parts)),),
            again=parts,
        ),
    )


def all_reduce(name: str, again: tuple[str, ...] = ()) -> Exchange:
    """After a part whose last product is divided by depth forwards, and before its first one backwards."""
    return Exchange(name, HIDDEN, again=again)


def table(name: str, parameters: str) -> Operator:
    """What is added to each token out of a small table that every device has."""
    return Operator(
        name,
        forward_bytes="4 s b h",
        backward_bytes="2 s b h",
        split=Split.SEQUENCE,
        parameters=parameters,
        parameters_split=Split.WHOLE,
    )


def undivided(
    name: str,
    products: tuple[Product, ...] = (),
    *,
    parameters: str = "0",
    saved: str = "",
    forward_bytes: str = "0",
    backward_bytes: str = "0",
    backward_products: float = 2.0,
) -> Operator:
    """A step that each of t devices does as a whole, with all of its parameters. saved: bytes kept, if any."""
    return Operator(
        name,
        products,
        forward_bytes,
        backward_bytes,
        Split.WHOLE,
        parameters,
        Split.WHOLE,
        (KeptBytes(saved, Split.WHOLE),) if saved else (),
        backward_products,
    )


def block(
    key: str, name: str, symbols: Mapping[str, float], style: BlockStyle, heads: int, *, parallel: bool = False
) -> LayerKind:
    """A whole layer: norm, attention, residual, norm, feed-forward, residual. parallel: as in ``_parallel``."""
    operators, exchanges = _parallel(style) if parallel else _in_a_row(style)
    return LayerKind(
        key,
        name,
        symbols,
        operators,
        output=HIDDEN,
        checkpoint=HIDDEN,
        exchanges=exchanges,
        heads=(heads,),
        recomputable=True,
    )


def _in_a_row(style: BlockStyle) -> tuple[tuple[Operator, ...], tuple[Exchange, ...]]:
    operators = (
        norm(style, "norm before attention"),
        *attention(style),
        residual(style, "residual after attention", "h" if style.output_bias else "0"),
        norm(style, "norm before feed-forward"),
        *feed_forward(style),
        residual(style, "residual after feed-forward", "h" if style.inner_bias else "0"),
    )
    return operators, (all_reduce("attention"), all_reduce("feed-forward"))


def _parallel(style: BlockStyle) -> tuple[tuple[Operator, ...], tuple[Exchange, ...]]:
    """Attention and feed-forward part side by side, on the outputs of one norm; one sum, one exchange (ViT-22B,
    Dehghani et al. 2023)."""
    biases = [bias for bias in (style.output_bias, style.inner_bias) if bias]
    operators = (
        norm(style, "norm"),
        *attention(style),
        *feed_forward(style, input_saved=False),
        residual(style, "residual", biases=f"{len(biases)} h"),
    )
    return operators, (all_reduce("attention and feed-forward"),)
