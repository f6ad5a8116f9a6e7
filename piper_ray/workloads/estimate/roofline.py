"""How long the operators of a layer take on each device: the slower of arithmetic and memory traffic, and launches.

How much a model computes is counted as well: FLOP by the usual definitions, which utilisation is measured against.
Model FLOP (Chowdhery et al. 2022, appendix B): products of the forward and backward pass, of attention only what a
causal mask leaves. For a dense model: 6 a token for each parameter but those of the embedding, and 6 s a d a token and
layer for attention. MFU is the share of the peak rate that goes into these. Hardware FLOP are these and what is
recomputed, but for what fused attention makes again within its kernel; HFU is the share that goes into those
(Korthikanti et al. 2022, section 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.hardware import Gpu
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LOSS, SOFTMAX, Architecture, LayerKind, Operator, Product
from piper_ray.workloads.estimate.software import Precision, Stack

_NUMBER_BYTES = 2
_SUM_BYTES = 4
_SOFTMAX_STEPS = 5
"""The steps of a softmax that is not fused: two casts, scale, mask and softmax (Megatron-LM,
``FusedScaleMaskSoftmax``)."""

_SOFTMAX_TRAFFIC = 8.0
"""How many times the fused kernel's bytes these steps move: 36 a score forward and 40 backward in place of 4 and 6,
with a repeated forward pass."""

_HEAD_EDGE = 32
"""A fused attention kernel on heads of size d takes as long as one on heads of d + 32 at the best rate."""


@dataclass(frozen=True)
class MatrixProducts:
    """The products on one device: ``count`` products of a rows x depth with a depth x columns matrix. scan: within the
    kernels of a scan by chunks."""

    rows: float
    columns: float
    depth: float
    count: float
    scan: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth * self.count

    @property
    def operand_bytes(self) -> float:
        rows, columns, depth = self.rows, self.columns, self.depth
        return _NUMBER_BYTES * self.count * (rows * depth + depth * columns + rows * columns)


def shape_on(product: Product, kind: LayerKind, mode: LayerMode) -> MatrixProducts:
    """The share of one device. Context parallelism gives each device equally many rows, and equal shares of causal
    attention's work."""
    if product.count == "E":
        return experts_shape(product, kind, mode)
    divided: str | None = product.divided
    if divided == "tokens":
        divided = "rows" if mode.sequence_parallel else None
    sides = {
        side: kind.value(getattr(product, side)) / (mode.degree if divided == side else 1)
        for side in ("rows", "columns", "depth", "count")
    }
    return MatrixProducts(**{**sides, "rows": sides["rows"] / mode.context}, scan=product.scan)


def experts_shape(product: Product, kind: LayerKind, mode: LayerMode) -> MatrixProducts:
    """The products of one device's experts, on the average number of tokens of a device."""
    count = kind.value(product.count) / mode.expert_ranks
    whole = kind.value(product.rows) * kind.value(product.count)
    rows = whole / (mode.degree * mode.context) * mode.expert_tensor / count
    inner, outer = ("depth", "columns") if product.depth == "m" else ("columns", "depth")
    sides = {
        inner: kind.value(getattr(product, inner)) / mode.expert_tensor,
        outer: kind.value(getattr(product, outer)),
    }
    return MatrixProducts(rows, sides["columns"], sides["depth"], count)


def achieved_fraction(shape: MatrixProducts, gpu: Gpu, on_chip: bool = False, gain: float = 1.0) -> float:
    """The share of the peak rate that a product of this shape reaches, if memory does not limit it.

    on_chip: whether it is within a fused attention kernel, which has its own tiles. gain: how much faster than bf16 the
    arithmetic is. Filling tiles and pipelines takes the same time in 8 bits, so it costs a larger share of the higher
    rate.
    """
    if shape.scan:
        return gpu.scan_flop_per_s / gpu.matrix_flop_per_s
    if on_chip:
        head = min(shape.columns, shape.depth)
        return gpu.matrix_fraction * gpu.attention_fraction * head / (head + _HEAD_EDGE)
    edge, depth_edge = gpu.edge * gain, gpu.depth_edge * gain
    return (
        gpu.matrix_fraction
        * (shape.rows / (shape.rows + edge))
        * (shape.columns / (shape.columns + edge))
        * (shape.depth / (shape.depth + depth_edge))
    )


def product_s(shape: MatrixProducts, gpu: Gpu, on_chip: bool = False, gain: float = 1.0) -> float:
    """The seconds by the roofline: the longer of arithmetic at the shape's fraction of the peak rate, and operands and
    result once through memory. gain: how much faster than bf16 the arithmetic is."""
    arithmetic_s = shape.flop / (gain * gpu.matrix_flop_per_s * achieved_fraction(shape, gpu, on_chip, gain))
    return arithmetic_s if on_chip else max(arithmetic_s, traffic_s(shape.operand_bytes, gpu))


def traffic_s(size_bytes: float, gpu: Gpu) -> float:
    """The seconds for bytes through the GPU's own memory."""
    return size_bytes / (gpu.memory_bytes_per_s * gpu.memory_fraction)


def forward_s(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds of one operator's forward pass on each device."""
    return _products_s(operator, kind, mode, stack) + _traffic_s(operator.forward_bytes, operator, kind, mode, stack)


def backward_s(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds of the backward pass: the gradients of a product are products with the same three sides."""
    products = operator.backward_products * _products_s(operator, kind, mode, stack)
    products += summed_gradients_s(operator, kind, mode, stack)
    return products + _traffic_s(operator.backward_bytes, operator, kind, mode, stack)


def summed_gradients_s(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds in which each microbatch reads and writes the sums of experts' gradients; experts have many weights
    for their work."""
    if not operator.routed or operator.frozen:
        return 0.0
    weights = kind.value(operator.parameters) / mode.parameter_parts(operator)
    return traffic_s(2.0 * weights * _SUM_BYTES, stack.gpu)


def weight_gradients_s(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds of the backward pass in products that give gradients of weights: as many products as in the forward
    pass."""
    learns = kind.value(operator.parameters) > 0.0 and not operator.frozen
    if not learns:
        return 0.0
    return _products_s(operator, kind, mode, stack) + summed_gradients_s(operator, kind, mode, stack)


def launches(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> tuple[int, int]:
    """The numbers of launches in the forward and in the backward pass, which for a product is two products."""
    if is_in_steps(operator, kind, mode, stack):
        return _SOFTMAX_STEPS, _SOFTMAX_STEPS
    return 1, 2 if operator.products and not operator.on_chip else 1


def is_in_steps(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> bool:
    """Whether it is a softmax over a number of matrices that the software's fused kernel does not take."""
    return operator.name.endswith(SOFTMAX) and kind.value("b a") / mode.degree % stack.software.fused_matrices != 0.0


def expert_launches(operator: Operator, kind: LayerKind, mode: LayerMode) -> tuple[float, float]:
    """The numbers of launches of grouped products, forward and backward, which the host launches one by one for a
    device's experts."""
    if not operator.routed:
        return 0.0, 0.0
    count = kind.value("E") / mode.expert_ranks
    return count, operator.backward_products * count


def in_fp8(operator: Operator, stack: Stack) -> bool:
    """Whether its products are in 8 bits: those of linear layers, except the vocabulary projection and the router."""
    linear = any(product.columns not in ("V", "E") and product.divided != "count" for product in operator.products)
    return stack.precision is Precision.FP8 and (linear or operator.routed) and operator.parameters != "0"


def gain_of(operator: Operator, stack: Stack) -> float:
    """How much faster its products run than in bf16."""
    return stack.gpu.fp8_gain if in_fp8(operator, stack) else 1.0


def _products_s(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    total_s = 0.0
    for product in operator.products:
        shape = shape_on(product, kind, mode)
        once_s = product_s(shape, stack.gpu, operator.on_chip, gain_of(operator, stack))
        total_s += once_s * (stack.imbalance if operator.routed and mode.expert_ranks > 1 else 1.0) + stack.gpu.kernel_s
        if in_fp8(operator, stack):
            total_s += traffic_s(stack.software.cast_bytes * shape.rows * shape.depth * shape.count, stack.gpu)
    return total_s


def moved_times(operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The factor on the bytes of its formulas, without those of products."""
    if operator.name == LOSS:
        return stack.software.unfused * stack.software.loss_traffic
    if is_in_steps(operator, kind, mode, stack):
        return _SOFTMAX_TRAFFIC
    return 1.0 if operator.on_chip else stack.software.unfused


def _traffic_s(formula: str, operator: Operator, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    size_bytes = kind.value(formula) / mode.parts(operator.split) * moved_times(operator, kind, mode, stack)
    return traffic_s(size_bytes, stack.gpu) + (stack.gpu.kernel_s if size_bytes else 0.0)


_BACKWARD = 2.0
"""The products of a backward pass for each one of the forward pass: one for the gradient of each operand."""


def forward_flop(operator: Operator, kind: LayerKind) -> float:
    """The FLOP of one operator's products, for a microbatch on all devices together."""
    return sum(
        2.0 * kind.value(product.rows) * kind.value(product.columns) * kind.value(product.depth)
        * kind.value(product.count)
        for product in operator.products
    )  # fmt: skip


def model_flop(kind: LayerKind) -> float:
    """The FLOP of a layer's forward and backward pass."""
    return sum(
        (1.0 + min(_BACKWARD, operator.backward_products)) * forward_flop(operator, kind) for operator in kind.operators
    )


def hardware_flop(kind: LayerKind, recomputation: Recomputation) -> float:
    """The hardware's FLOP: the model's, and those of this recomputation."""
    if not kind.recomputable:
        return model_flop(kind)
    mode = LayerMode(degree=1, recomputation=recomputation)
    again = (mode.share_again(operator) * forward_flop(operator, kind) for operator in kind.operators)
    return model_flop(kind) + sum(again)


def step_flop(architecture: Architecture, microbatches: int, recomputation: Recomputation | None = None) -> float:
    """The FLOP of a step with this number of microbatches: the model's, or the hardware's if each layer recomputes."""
    return microbatches * sum(
        model_flop(node.kind) if recomputation is None else hardware_flop(node.kind, recomputation)
        for node in architecture.nodes
    )
