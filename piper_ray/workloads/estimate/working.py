"""What a layer's backward pass holds beside what its microbatch kept: gradients on their way, inputs gathered again.

The layer is gone through backwards, operator by operator, as autograd does: the gradient of an operator's input is
there before that of its output goes, and what the operator kept goes when it is through. What counts is the largest
sum on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LOSS, LayerKind, Operator, Product, Split
from piper_ray.workloads.estimate.runtimes import Loss

_NUMBER_BYTES = 2.0

_DISPATCHED_COPIES = 2.0
_INNER_COPIES = 6.0
"""Experts: copies of the dispatched tokens' gradients, and of the inner activations', beside those in use while the
weighted activation function is differentiated; from the peaks of layers with 160 and with 256 experts (SimuMax)."""


def backward_bytes(kind: LayerKind, mode: LayerMode, loss: Loss = Loss.IN_PLACE) -> float:
    """The most that the backward pass of a layer holds beyond all that the layer had kept when it began."""
    residual = kind.value(kind.output) / mode.parts(Split.SEQUENCE)
    # What goes along the residual stream stays to the end; it is counted once while it is an operator's gradient, too.
    arriving, beyond_residual, freed, most = residual, 0.0, 0.0, residual
    logits = 0.0
    for operator in reversed(kind.operators):
        kept = saved_bytes(operator, kind, mode)
        if operator.name == LOSS:
            # Kept in fp32, or in half precision where the gradient takes that place until the projection is through.
            handed = 0.0 if loss is Loss.FUSED else kept / 2.0
            beside = kept if loss is Loss.SEPARATE else 0.0
            kept, logits = (0.0, kept / 2.0) if loss is Loss.FUSED else (kept, 0.0)
        else:
            handed, beside = _gradient_bytes(operator, kind, mode, arriving)
            kept, logits = (kept + logits, 0.0) if operator.products else (kept, logits)
        most = max(most, residual + beyond_residual + handed + beside - freed)
        freed += kept
        if handed:
            arriving = beyond_residual = handed
    return most


def saved_bytes(operator: Operator, kind: LayerKind, mode: LayerMode) -> float:
    """What an operator keeps of a microbatch for its backward pass, on each device."""
    return sum(kind.value(saved.bytes) / mode.parts(saved.split) for saved in operator.saved)


def result_bytes(operator: Operator, kind: LayerKind, mode: LayerMode) -> float:
    """Of an operator's products, in half precision, on each device."""
    total = 0.0
    for product in operator.products:
        sides = kind.value(product.rows) * kind.value(product.columns) * kind.value(product.count)
        divided = product.divided in ("columns", "count") or (product.divided == "tokens" and mode.sequence_parallel)
        after = product.divided == "depth" and mode.sequence_parallel
        total += _NUMBER_BYTES * sides / mode.context / (mode.degree if divided or after else 1)
    return total


def _gradient_bytes(operator: Operator, kind: LayerKind, mode: LayerMode, arriving: float) -> tuple[float, float]:
    """Of the gradient of an operator's input, 0 if it is that of its output; and of all else that is there with it."""
    if operator.on_chip:
        moved = kind.value(operator.forward_bytes) / mode.parts(operator.split)
        return max(0.0, moved - arriving), 0.0
    if operator.products:
        return _product_gradient_bytes(operator, operator.products, kind, mode)
    # Of weights that no product has, a table's above all: before it is added to that of other microbatches.
    numbers = 0.0 if operator.frozen else kind.value(operator.parameters) / mode.parameter_parts(operator)
    learned = _NUMBER_BYTES * numbers
    kept = saved_bytes(operator, kind, mode)
    if kept < arriving / 2.0:  # not even a mask of a byte a number: the gradient goes on as it is, or ends with a table
        return 0.0, learned
    inputs = max(1.0, kept // arriving) if arriving else 1.0  # tensors of that size; what is left is a mask
    return inputs * arriving, learned + _routed_copies_bytes(operator, kind, mode, arriving)


def _product_gradient_bytes(
    operator: Operator, products: Sequence[Product], kind: LayerKind, mode: LayerMode
) -> tuple[float, float]:
    handed = beside = 0.0
    for product in products:
        rows, columns, depth, count = (
            kind.value(side) for side in (product.rows, product.columns, product.depth, product.count)
        )
        numbers = _NUMBER_BYTES * count / mode.context
        if product.divided == "columns":
            handed += numbers * rows * depth
            if mode.sequence_parallel and mode.degree > 1:
                gathered = 0.0 if mode.gathered else numbers * rows * depth
                beside += gathered + numbers * rows * depth / mode.degree
        elif product.divided == "depth":
            handed += numbers * rows * depth / mode.degree
            if mode.sequence_parallel and mode.degree > 1:
                beside += numbers * rows * columns
        elif product.divided == "count":
            learned = kind.value(operator.parameters) > 0.0
            handed += numbers * (rows * depth + (0.0 if learned else depth * columns)) / mode.degree
        else:
            shared = mode.degree if product.divided == "tokens" and mode.sequence_parallel else 1
            handed += numbers * rows * depth / shared
    return handed, beside


def _routed_copies_bytes(operator: Operator, kind: LayerKind, mode: LayerMode, arriving: float) -> float:
    """Of an experts' activation function: what is between their two products."""
    places = [place for place, one in enumerate(kind.operators) if one.routed]
    if not places or not places[0] < kind.operators.index(operator) < places[-1]:
        return 0.0
    dispatched, _ = _gradient_bytes(kind.operators[places[0]], kind, mode, 0.0)
    return _DISPATCHED_COPIES * dispatched + _INNER_COPIES * arriving
