"""Bytes of a layer in a mode on each device: parameters, what a microbatch in flight keeps, and what its passes need.

A backward pass holds gradients that are being computed and inputs that were gathered again, besides what its microbatch
kept. The functions here go through the layer backwards, operator by operator, as autograd does: the gradient of an
operator's input exists before that of its output is freed, and what the operator kept is freed when it is done. The
largest sum on the way counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from piper_ray.model.mode import ALL_REPLICAS, EVERY_SECOND_PRODUCT, Recomputation, Sharding
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.modes import LayerMode, worked_out_once
from piper_ray.workloads.estimate.operators import LOSS, KeptBytes, LayerKind, Operator, Product, Split
from piper_ray.workloads.estimate.runtimes import DEFAULT, Loss, Traits

_NUMBER_BYTES = 2.0

_LOGIT_COPIES, _DIVIDED_LOGIT_COPIES = 2.0, 3.0
"""PyTorch's cross_entropy keeps a softmax of the logits in fp32. Its backward pass makes two more tensors of that size,
the gradients of the loss and of the softmax, and a third where loss_parallel divides the vocabulary (PyTorch 2.6)."""

_DISPATCHED_COPIES = 2.0
_INNER_COPIES = 6.0
"""For experts: copies of the dispatched tokens' gradients and of the inner activations' gradients, besides those in
use, while the weighted activation function is differentiated. Fitted to the peaks of layers with 160 and 256 experts
(SimuMax)."""


@partial(worked_out_once, made_again=False)
def backward_bytes(kind: LayerKind, mode: LayerMode, loss: Loss = Loss.IN_PLACE) -> float:
    """The most bytes that a layer's backward pass holds beyond all that the layer had kept when it began."""
    residual = kind.value(kind.output) / mode.parts(Split.SEQUENCE)
    # What goes along the residual stream stays to the end; it is counted once while it is an operator's gradient, too.
    arriving, beyond_residual, freed, most = residual, 0.0, 0.0, residual
    logits = 0.0
    for operator in reversed(kind.operators):
        kept = saved_bytes(operator, kind, mode)
        if operator.name == LOSS:
            # Kept in fp32, or in half precision where the gradient takes that place until the projection is through.
            handed = 0.0 if loss is Loss.FUSED else kept / 2.0
            copies = _DIVIDED_LOGIT_COPIES if mode.degree > 1 else _LOGIT_COPIES
            extra = copies * kept - handed if loss is Loss.SEPARATE else 0.0
            kept, logits = (0.0, kept / 2.0) if loss is Loss.FUSED else (kept, 0.0)
        else:
            handed, extra = _gradient_bytes(operator, kind, mode, arriving)
            kept, logits = (kept + logits, 0.0) if operator.products else (kept, logits)
        most = max(most, residual + beyond_residual + handed + extra - freed)
        freed += kept
        if handed:
            arriving = beyond_residual = handed
    return most


def saved_bytes(operator: Operator, kind: LayerKind, mode: LayerMode) -> float:
    """The bytes that an operator keeps of a microbatch for its backward pass, on each device."""
    return sum(kind.value(saved.bytes) / mode.parts(saved.split) for saved in operator.saved)


def result_bytes(operator: Operator, kind: LayerKind, mode: LayerMode) -> float:
    """The bytes of the results of an operator's products, in half precision, on each device."""
    total = 0.0
    for product in operator.products:
        sides = kind.value(product.rows) * kind.value(product.columns) * kind.value(product.count)
        divided = product.divided in ("columns", "count") or (product.divided == "tokens" and mode.sequence_parallel)
        after = product.divided == "depth" and mode.sequence_parallel
        total += _NUMBER_BYTES * sides / mode.context / (mode.degree if divided or after else 1)
    return total


def _gradient_bytes(operator: Operator, kind: LayerKind, mode: LayerMode, arriving: float) -> tuple[float, float]:
    """The bytes of the gradient of an operator's input, 0 if it is that of its output; and the bytes of everything that
    exists at the same time."""
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
    handed = extra = 0.0
    for product in products:
        rows, columns, depth, count = (
            kind.value(side) for side in (product.rows, product.columns, product.depth, product.count)
        )
        numbers = _NUMBER_BYTES * count / mode.context
        if product.divided == "columns":
            handed += numbers * rows * depth
            if mode.sequence_parallel and mode.degree > 1:
                gathered = 0.0 if mode.gathered else numbers * rows * depth
                extra += gathered + numbers * rows * depth / mode.degree
        elif product.divided == "depth":
            handed += numbers * rows * depth / mode.degree
            if mode.sequence_parallel and mode.degree > 1:
                extra += numbers * rows * columns
        elif product.divided == "count":
            learned = kind.value(operator.parameters) > 0.0
            copied = mode.expert_tensor if operator.routed and depth == kind.value("h") else 1
            handed += numbers * (copied * rows * depth + (0.0 if learned else depth * columns)) / mode.degree
        else:
            shared = mode.degree if product.divided == "tokens" and mode.sequence_parallel else 1
            handed += numbers * rows * depth / shared
    return handed, extra


def _routed_copies_bytes(operator: Operator, kind: LayerKind, mode: LayerMode, arriving: float) -> float:
    """The bytes between the two products of experts, for their activation function."""
    places = [place for place, one in enumerate(kind.operators) if one.routed]
    if not places or not places[0] < kind.place_of(operator) < places[-1]:
        return 0.0
    dispatched, _ = _gradient_bytes(kind.operators[places[0]], kind, mode, 0.0)
    return _DISPATCHED_COPIES * dispatched + _INNER_COPIES * arriving


@dataclass(frozen=True)
class Numbers:
    """Parameters on a device, dense ones or experts', and how many of them have gradients and optimizer state."""

    routed: bool
    held: float
    trained: float


@partial(worked_out_once, made_again=False)
def numbers_on_device(kind: LayerKind, mode: LayerMode) -> tuple[Numbers, Numbers]:
    """The dense parameters on a device, and the experts' parameters."""
    held, trained = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for operator in kind.operators:
        numbers = kind.value(operator.parameters) / mode.parameter_parts(operator)
        held[operator.routed] += numbers
        trained[operator.routed] += 0.0 if operator.frozen else numbers
    return Numbers(False, held[False], trained[False]), Numbers(True, held[True], trained[True])


def parameters_on_device(kind: LayerKind, mode: LayerMode) -> float:
    """The number of parameters that each device holds."""
    return sum(numbers.held for numbers in numbers_on_device(kind, mode))


def trained_on_device(kind: LayerKind, mode: LayerMode) -> float:
    """The number of parameters on a device that have gradients and optimizer state."""
    return sum(numbers.trained for numbers in numbers_on_device(kind, mode))


def state_bytes(kind: LayerKind, mode: LayerMode, training: Training) -> float:
    """The bytes of weights, gradients and optimizer state, less those that all replicas share (``shared_bytes``)."""
    total = 0.0
    for numbers in numbers_on_device(kind, mode):
        shards = mode.state_parts(numbers.routed)
        weights = training.weight_bytes / (shards if mode.sharding >= Sharding.WEIGHTS else 1.0)
        gradients = training.gradient_bytes / (shards if mode.sharding >= Sharding.GRADIENTS else 1.0)
        optimizer = 0.0 if mode.optimizer_shards == ALL_REPLICAS else training.optimizer_bytes / shards
        total += numbers.held * weights + numbers.trained * (gradients + optimizer)
    return total


def shared_bytes(kind: LayerKind, mode: LayerMode, training: Training) -> float:
    """The bytes of the optimizer state that all d replicas of a stage share; each holds a d-th of them."""
    if mode.optimizer_shards != ALL_REPLICAS:
        return 0.0
    return training.optimizer_bytes * sum(
        numbers.trained / mode.replicas(numbers.routed) for numbers in numbers_on_device(kind, mode) if numbers.trained
    )


def gathered_bytes(kind: LayerKind, mode: LayerMode, training: Training) -> float:
    """The bytes that a layer with sharded weights (FSDP) adds while its passes run: half-precision weights of it and of
    the next layer, and its gradients in half precision and as they are reduced."""
    if mode.sharding < Sharding.WEIGHTS:
        return 0.0
    held, trained = parameters_on_device(kind, mode), trained_on_device(kind, mode)
    return 2.0 * training.weight_bytes * held + (training.weight_bytes + training.gradient_bytes) * trained


@worked_out_once
def kept_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits = DEFAULT) -> float:
    """The bytes that a microbatch keeps between its forward and its backward pass, on the device or the host.

    Full recomputation keeps the layer's checkpoint, usually its inputs. Selective recomputation keeps everything but
    what the recomputed parts would keep.
    """
    checkpoint = kind.value(kind.checkpoint) / mode.parts(Split.SEQUENCE)
    if mode.recomputation == Recomputation.FULL:
        return checkpoint
    if EVERY_SECOND_PRODUCT in mode.recomputation.parts:
        return checkpoint + _alternate_bytes(kind, mode)
    return needed_bytes(kind, mode, runtime, made_again=False)


@worked_out_once
def needed_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits = DEFAULT, made_again: bool = True) -> float:
    """The bytes that a microbatch's backward pass through the layer reads: what is kept and, if ``made_again``, what is
    recomputed."""
    kept = sum(
        size_bytes / kept_parts(operator, saved, mode)
        for operator, saved, size_bytes in _kept_of_tokens(kind, runtime)
        if made_again or not mode.does_again(saved)
    )
    return kept + _sent_attention_bytes(kind, mode, runtime)


def _kept_of_tokens(kind: LayerKind, runtime: Traits) -> list[tuple[Operator, KeptBytes, float]]:
    """What each operator keeps of all tokens, and its bytes. Worked out once for all modes."""
    key = "kept of tokens", runtime
    if key not in kind.known:
        kind.known[key] = [
            (operator, saved, share_kept(operator, saved, kind, runtime) * kind.value(saved.bytes))
            for operator in kind.operators
            for saved in operator.saved
        ]
    found: list[tuple[Operator, KeptBytes, float]] = kind.known[key]
    return found


def transient_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits = DEFAULT) -> float:
    """The bytes that the layer's backward pass needs beyond what is kept, once per device, not per microbatch.

    Recomputation: everything that was not kept; full recomputation also computes what it kept again, the layer's
    result. Offload: a layer's activations in use while those of the next layer arrive.
    """
    kept = kept_bytes(kind, mode, runtime)
    again = 0.0
    if mode.recomputation == Recomputation.FULL:
        again = needed_bytes(kind, mode, runtime)
    elif mode.recomputation.selective:
        again = max(0.0, needed_bytes(kind, mode, runtime) - kept)
    return again + (2.0 * kept if mode.offload else 0.0)


def working_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits = DEFAULT) -> float:
    """``transient_bytes``, plus the gradients that exist at the worst moment of the backward pass."""
    return transient_bytes(kind, mode, runtime) + backward_bytes(kind, mode, runtime.loss)


def activation_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits = DEFAULT) -> float:
    """The bytes that each microbatch in flight keeps on the device: 0 if it is offloaded."""
    return 0.0 if mode.offload else kept_bytes(kind, mode, runtime)


def kept_parts(operator: Operator, saved: KeptBytes, mode: LayerMode) -> float:
    """The number of parts into which an operator's kept bytes are divided; inputs of products may be kept as they were
    gathered."""
    whole = mode.gathered and operator.products and operator.products[0].divided == "columns"
    return mode.parts(Split.WHOLE if whole and saved.split is Split.SEQUENCE else saved.split)


def share_kept(operator: Operator, saved: KeptBytes, kind: LayerKind, runtime: Traits) -> float:
    """The kept share of the formula's bytes: half for fp32 logits if bf16 ones are kept, and half for a product's fp8
    input. Attention keeps its own result in half precision; the projection's fp8 copy comes on top."""
    if operator.name == LOSS:
        return 0.5 if runtime.loss is Loss.FUSED else 1.0
    if not (runtime.fp8 and kind.recomputable):
        return 1.0
    place = kind.place_of(operator)
    after = kind.operators[place + 1] if place + 1 < len(kind.operators) else operator
    # Experts' first product reads what the dispatch before it keeps.
    reader = after if after.routed and not operator.products else operator
    if not reader.products or not kind.value(reader.parameters):
        return 1.0
    product = reader.products[0]
    inputs = 2.0 * kind.value(product.rows) * kind.value(product.depth) * kind.value(product.count)
    if kind.value(saved.bytes) != inputs:
        return 1.0
    return 1.5 if place and kind.operators[place - 1].on_chip else 0.5


def _sent_attention_bytes(kind: LayerKind, mode: LayerMode, runtime: Traits) -> float:
    """The further bytes of context parallelism by all-to-all: attention keeps its result, and the projection keeps a
    copy sorted by tokens."""
    if mode.context == 1 or not runtime.context_all_to_all:
        return 0.0
    return sum(_attention_result_bytes(kind, mode))


def _attention_result_bytes(kind: LayerKind, mode: LayerMode) -> list[float]:
    """The bytes that the operator behind each attention core keeps."""
    pairs = zip(kind.operators, kind.operators[1:], strict=False)
    return [
        sum(kind.value(saved.bytes) / mode.parts(saved.split) for saved in reader.saved)
        for core, reader in pairs
        if core.on_chip
    ]


def _alternate_bytes(kind: LayerKind, mode: LayerMode) -> float:
    """The bytes of the results of attention and of every second product. The last result is added up at once; compiled
    layers do not keep it."""
    products = [operator for operator in kind.operators if operator.products and not operator.on_chip]
    results = sum(result_bytes(operator, kind, mode) for operator in products[:-1])
    return results / 2.0 + sum(_attention_result_bytes(kind, mode))
