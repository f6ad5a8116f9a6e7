"""DeepSeek's attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values come from narrow latent vectors."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.workloads.estimate.architectures.layers import Part, Symbols
from piper_ray.workloads.estimate.architectures.transformer import (
    HIDDEN,
    BlockStyle,
    all_reduce,
    attention_output,
    cheap,
    core,
)
from piper_ray.workloads.estimate.operators import KeptBytes, Operator, Product, Split

_NORM, _UP = ("layernorm",), ("mla_up_proj",)
"""Megatron's names of what can be computed again: the norm before the latent vectors, which stands by itself, and what
is made of these vectors, rotary positions included."""

LEGEND = {
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
