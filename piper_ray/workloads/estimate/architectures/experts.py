"""Mixtures of experts as feed-forward parts: expert parallelism over the t devices of a node.

Each of t devices has 1/t of the experts. Without sequence parallelism every device has every token, computes what its
experts say, and an all-reduce sums up, as after a dense feed-forward part; with it tokens go to their experts and back
by all-to-all. Experts are taken to get equal shares of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.workloads.estimate.architectures import layers
from piper_ray.workloads.estimate.operators import (
    Exchange,
    KeptBytes,
    Operator,
    Product,
    Split,
    linear,
    pointwise,
)

_NORM, _ACTIVATION, _WHOLE = ("layernorm",), ("moe_act",), ("moe",)
_SHARED = ("shared_experts", *_WHOLE)
"""Megatron's names of parts that can be recomputed: the separate norm before router and experts, the experts'
activation function, the whole part, and the shared experts."""


_TO_EXPERTS = Exchange("experts", layers.HIDDEN, expert_bytes="4 s b e h", again=_WHOLE)
"""The exchange of tokens with the experts: two all-to-alls, or one all-reduce without sequence parallelism."""


@dataclass(frozen=True)
class Experts:
    """A router and ``count`` experts, of which each token uses ``per_token``. shared: the inner width of experts that
    all tokens use, 0 for none, with a gate or without."""

    count: int
    per_token: int
    inner: int
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    word: str = "experts"

    def part(self, style: layers.BlockStyle, symbols: layers.Symbols) -> layers.Part:  # noqa: ARG002
        own = {"E": self.count, "e": self.per_token, "m": self.inner, "S": self.shared}
        operators, exchanges = list[Operator](), [_TO_EXPERTS]
        if self.shared:
            feeding = layers.feed_forward(replace(style, inner_bias=self.bias), "S", input_saved=False, again=_SHARED)
            operators += [replace(part, name=f"shared expert: {part.name}") for part in feeding]
            exchanges.append(layers.all_reduce("shared experts", _SHARED))
        if self.shared_gate:
            # How much of the shared experts' word each token takes (Qwen2-MoE).
            gate = linear("shared expert: gate", "1", "h", "tokens", "h", kept_again=_SHARED, again=_SHARED)
            operators.append(replace(gate, forward_bytes="4 s b h", backward_bytes="6 s b h"))
        operators += routed(style, self)
        return layers.Part(
            "feed-forward", tuple(operators), tuple(exchanges), (self.count,), symbols=own, norm_again=_NORM
        )


def routed(style: layers.BlockStyle, experts: Experts) -> tuple[Operator, ...]:
    """The operators: router, tokens sorted by expert, the experts' products, and the weighted sum of their results.

    For each token and expert the router keeps 19 bytes: probabilities and those of the balancing loss in fp32, the
    former also in bf16, a mask, and a map with rows of 2 E + 1 numbers of 4 bytes (Megatron-Core, TransformerEngine).
    The weights of experts multiply before the second product, so that the sum keeps nothing.
    """
    cheap = style.cheap(*_ACTIVATION, *_WHOLE)
    return (
        linear(
            "router",
            "E",
            "h",
            "tokens",
            "h E + E" if experts.router_bias else "h E",
            kept_again=style.cheap(*_NORM),
            results=(KeptBytes("19 s b E", Split.SEQUENCE, _WHOLE),),
            forward_bytes="8 s b E",
            backward_bytes="8 s b E",
            again=_WHOLE,
        ),
        # Sorted by expert, sent, and sorted again by those that are here.
        pointwise("tokens to experts", "s b e h", (8, 8), 2, Split.COPIES, kept_again=_WHOLE, again=_WHOLE),
        Operator(
            "experts in",
            (Product("s b e / E", "2 m", "h", "E", divided="count"),),
            matrices=2,
            parameters="2 h m E + 2 m E" if experts.bias else "2 h m E",
            again=_WHOLE,
        ),
        layers.activation("experts' activation function", "s b e m", True, kept_again=_WHOLE, again=cheap),
        Operator(
            "experts out",
            (Product("s b e / E", "h", "m", "E", divided="count"),),
            parameters="h m E + h E" if experts.bias else "h m E",
            saved=(KeptBytes("2 s b e m", Split.TENSOR, cheap),),
            again=_WHOLE,
        ),
        # Sorted back twice, weighted, added up.
        Operator(
            "sum over experts",
            forward_bytes="14 s b e h + 2 s b h",
            backward_bytes="14 s b e h",
            split=Split.COPIES,
            again=_WHOLE,
        ),
    )
