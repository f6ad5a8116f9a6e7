"""How long operators and exchanges take: the slower of arithmetic and memory traffic, and rings between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.workloads.estimate.hardware import Gpu
from piper_ray.workloads.estimate.operators import Exchange, LayerKind, Operator, Product

_NUMBER_BYTES = 2


@dataclass(frozen=True)
class MatrixProducts:
    """The products that one device does: ``count`` of rows x depth by depth x columns."""

    rows: float
    columns: float
    depth: float
    count: float

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth * self.count

    @property
    def operand_bytes(self) -> float:
        rows, columns, depth = self.rows, self.columns, self.depth
        return _NUMBER_BYTES * self.count * (rows * depth + depth * columns + rows * columns)


def shape_on(product: Product, kind: LayerKind, degree: int, sequence_parallel: bool) -> MatrixProducts:
    """The share of one of ``degree`` devices."""
    divided: str | None = product.divided
    if divided == "tokens":
        divided = "rows" if sequence_parallel else None
    sides = {
        side: kind.value(getattr(product, side)) / (degree if divided == side else 1)
        for side in ("rows", "columns", "depth", "count")
    }
    return MatrixProducts(**sides)


def achieved_fraction(shape: MatrixProducts, gpu: Gpu) -> float:
    """The share of the peak rate at which a product of this shape runs, if memory does not hold it up."""
    return (
        gpu.matrix_fraction
        * (shape.rows / (shape.rows + gpu.edge))
        * (shape.columns / (shape.columns + gpu.edge))
        * (shape.depth / (shape.depth + gpu.depth_edge))
    )


def product_s(shape: MatrixProducts, gpu: Gpu, on_chip: bool = False) -> float:
    """Roofline: FLOP at the fraction of the shape, or operands and result once through memory, whichever is longer."""
    arithmetic_s = shape.flop / (gpu.matrix_flop_per_s * achieved_fraction(shape, gpu))
    return arithmetic_s if on_chip else max(arithmetic_s, traffic_s(shape.operand_bytes, gpu))


def traffic_s(size_bytes: float, gpu: Gpu) -> float:
    """Bytes through the GPU's own memory."""
    return size_bytes / (gpu.memory_bytes_per_s * gpu.memory_fraction)


def forward_s(operator: Operator, kind: LayerKind, gpu: Gpu, degree: int, sequence_parallel: bool) -> float:
    """One operator's forward pass on each of ``degree`` devices."""
    size_bytes = kind.value(operator.forward_bytes) / operator.split.parts(degree, sequence_parallel)
    return _products_s(operator, kind, gpu, degree, sequence_parallel) + traffic_s(size_bytes, gpu)


def backward_s(operator: Operator, kind: LayerKind, gpu: Gpu, degree: int, sequence_parallel: bool) -> float:
    """The same for the backward pass: the gradients of a product are products of the same three sides."""
    size_bytes = kind.value(operator.backward_bytes) / operator.split.parts(degree, sequence_parallel)
    products = _products_s(operator, kind, gpu, degree, sequence_parallel)
    return operator.backward_products * products + traffic_s(size_bytes, gpu)


def weight_gradients_s(operator: Operator, kind: LayerKind, gpu: Gpu, degree: int, sequence_parallel: bool) -> float:
    """Of the backward pass, the products that give gradients of weights: as many as in the forward pass."""
    learns = kind.value(operator.parameters) > 0.0 and not operator.frozen
    return _products_s(operator, kind, gpu, degree, sequence_parallel) if learns else 0.0


def _products_s(operator: Operator, kind: LayerKind, gpu: Gpu, degree: int, sequence_parallel: bool) -> float:
    shapes = [shape_on(product, kind, degree, sequence_parallel) for product in operator.products]
    return sum(product_s(shape, gpu, operator.on_chip) for shape in shapes)


def all_reduce_s(size_bytes: float, gpu: Gpu, degree: int) -> float:
    """Ring: 2 (t - 1) steps, each of 1/t of the tensor. A reduce-scatter and an all-gather take half of it each."""
    steps = 2 * (degree - 1)
    return steps * (size_bytes / degree / gpu.ring_bytes_per_s(degree) + gpu.link_latency_s)


def all_to_all_s(size_bytes: float, gpu: Gpu, degree: int) -> float:
    """Each device sends 1/t of its own share of ``size_bytes`` to each of the t - 1 others."""
    steps = degree - 1
    return steps * (size_bytes / degree / degree / gpu.ring_bytes_per_s(degree) + gpu.link_latency_s)


def exchange_s(exchange: Exchange, kind: LayerKind, gpu: Gpu, degree: int, sequence_parallel: bool) -> float:
    """One exchange, once."""
    if sequence_parallel and exchange.expert_bytes:
        return all_to_all_s(kind.value(exchange.expert_bytes), gpu, degree)
    return all_reduce_s(kind.value(exchange.bytes), gpu, degree)
