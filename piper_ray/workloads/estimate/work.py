"""How much a model computes: FLOP by the usual definitions, which utilisation is measured against.

Model FLOP (Chowdhery et al. 2022, appendix B): products of the forward and backward pass, of attention only what a
causal mask leaves. For a dense model: 6 a token for each parameter but those of the embedding, and 6 s a d a token and
layer for attention. MFU is the share of the peak rate that goes into these. Hardware FLOP are these and what is
recomputed, but for what fused attention makes again within its kernel; HFU is the share that goes into those
(Korthikanti et al. 2022, section 6.3).
"""

from __future__ import annotations

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, Operator

_BACKWARD = 2.0
"""Products of a backward pass for each one of the forward pass: gradients of both operands."""


def forward_flop(operator: Operator, kind: LayerKind) -> float:
    """Of one operator's products, for a microbatch on all devices together."""
    return sum(
        2.0 * kind.value(product.rows) * kind.value(product.columns) * kind.value(product.depth)
        * kind.value(product.count)
        for product in operator.products
    )  # fmt: skip


def model_flop(kind: LayerKind) -> float:
    """Of a layer's forward and backward pass."""
    return sum(
        (1.0 + min(_BACKWARD, operator.backward_products)) * forward_flop(operator, kind) for operator in kind.operators
    )


def hardware_flop(kind: LayerKind, recomputation: Recomputation) -> float:
    """These, and what such recomputation does again."""
    if not kind.recomputable:
        return model_flop(kind)
    mode = LayerMode(degree=1, recomputation=recomputation)
    again = (mode.share_again(operator) * forward_flop(operator, kind) for operator in kind.operators)
    return model_flop(kind) + sum(again)


def step_flop(architecture: Architecture, microbatches: int, recomputation: Recomputation | None = None) -> float:
    """Of a step of so many microbatches: of the model, or of hardware that recomputes in every layer."""
    return microbatches * sum(
        model_flop(node.kind) if recomputation is None else hardware_flop(node.kind, recomputation)
        for node in architecture.nodes
    )
