"""Mixtures of experts as feed-forward parts: expert parallelism over the t devices of a node.

Each of t devices has 1/t of the experts. Without sequence parallelism every device has every token, computes what its
experts say, and an all-reduce sums up, as after a dense feed-forward part; with it tokens go to their experts and back
by all-to-all. Experts are taken to get equal shares of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_ray.workloads.estimate.architectures import layers
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, Operator, Product, Split, linear, pointwise

_NORM, _ACTIVATION, _WHOLE = ("layernorm",), ("moe_act",), ("moe",)
_SHARED = ("shared_experts", *_WHOLE)
"""Megatron's names of parts that can be recomputed: the separate norm before router and experts, the experts'
activation function, the whole part, and the shared experts."""


@dataclass(frozen=True)
class Experts:
    """A router and ``count`` experts, of which each token uses ``per_token``. shared: the inner width of experts that
    all tokens use, 0 for none, with a gate or without. latent: the width that tokens are projected to before they are
    sent to experts, and back from afterwards; 0: experts work on the model's."""

    count: int
    per_token: int
    inner: int
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    latent: int = 0
    word: str = "experts"

    @property
    def width(self) -> str:
        """The symbol of the width that experts work on."""
        return "k" if self.latent else "h"

    def part(self, style: layers.BlockStyle, symbols: layers.Symbols) -> layers.Part:  # noqa: ARG002
        own = {"E": self.count, "e": self.per_token, "m": self.inner, "S": self.shared}
        own |= {"k": self.latent} if self.latent else {}
        # Two all-to-alls, or one all-reduce without sequence parallelism.
        sent = Exchange("experts", layers.HIDDEN, expert_bytes=f"4 s b e {self.width}", again=_WHOLE)
        operators, exchanges = list[Operator](), [sent]
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
    cheap, width, matrices = style.cheap(*_ACTIVATION, *_WHOLE), experts.width, 2 if style.gated else 1
    into = f"{matrices} m"
    latent = [
        linear(f"experts: {name}", columns, depth, "tokens", "h k", kept_again=_WHOLE, again=_WHOLE)
        for name, columns, depth in (("to latent width", "k", "h"), ("from latent width", "h", "k"))
        if experts.latent
    ]
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
        *latent[:1],
        # Sorted by expert, sent, and sorted again by those that are here.
        pointwise("tokens to experts", f"s b e {width}", (8, 8), 2, Split.COPIES, kept_again=_WHOLE, again=_WHOLE),
        Operator(
            "experts in",
            (Product("s b e / E", into, width, "E", divided="count"),),
            matrices=matrices,
            parameters=f"{matrices} {width} m E" + (f" + {into} E" if experts.bias else ""),
            again=_WHOLE,
        ),
        layers.activation("experts' activation function", "s b e m", style.gated, kept_again=_WHOLE, again=cheap),
        Operator(
            "experts out",
            (Product("s b e / E", width, "m", "E", divided="count"),),
            parameters=f"{width} m E" + (f" + {width} E" if experts.bias else ""),
            saved=(KeptBytes("2 s b e m", Split.TENSOR, cheap),),
            again=_WHOLE,
        ),
        # Sorted back twice, weighted, added up.
        Operator(
            "sum over experts",
            forward_bytes=f"14 s b e {width} + 2 s b {width}",
            backward_bytes=f"14 s b e {width}",
            split=Split.COPIES,
            again=_WHOLE,
        ),
        *latent[1:],
    )
