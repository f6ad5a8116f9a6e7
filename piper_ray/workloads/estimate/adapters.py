"""LoRA (Hu et al. 2021): the model's own parameters are frozen, and each matrix of its layers gets an adapter of low
rank.

As in PEFT with ``target_modules="all-linear"``: every matrix of attention, mixers, feed-forward parts, experts and
routers has one; embedding and vocabulary projection have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from piper_ray.workloads.estimate.operators import Architecture, KeptBytes, LayerKind, Operator, Product, Split


def with_adapters(architecture: Architecture, rank: int) -> Architecture:
    """The architecture with adapters of this rank; everything else is frozen."""
    made = {kind.key: _adapted(kind, rank) for kind in architecture.kinds}
    nodes = tuple(replace(node, kind=made[node.kind.key]) for node in architecture.nodes)
    return replace(architecture, nodes=nodes)


def _adapted(kind: LayerKind, rank: int) -> LayerKind:
    operators = tuple(part for operator in kind.operators for part in _parts(operator, kind))
    return replace(kind, operators=operators, symbols={**kind.symbols, "L": rank})


def _parts(operator: Operator, kind: LayerKind) -> Iterator[Operator]:
    """The operator, frozen, and the adapter of its matrices."""
    learns = operator.products and kind.value(operator.parameters) > 0.0 and not operator.on_chip
    backward = operator.backward_products - 1.0 if learns else operator.backward_products
    yield replace(operator, frozen=True, backward_products=backward)
    if learns and kind.recomputable:
        for index, product in enumerate(operator.products):
            number = f" {index + 1}" if len(operator.products) > 1 else ""
            yield _adapter(operator, product, f"LoRA of {operator.name}{number}")


def _adapter(operator: Operator, product: Product, name: str) -> Operator:
    inner, copies = f"{operator.matrices} L", "" if product.count == "1" else f"{product.count} "
    sides = [f"{copies}{inner} {part}" for part in product.depth.split(" + ")]
    sides += [f"{copies}L {part}" for part in product.columns.split(" + ")]
    moved = " + ".join(f"4 {product.rows} {copies}{part}" for part in product.columns.split(" + "))
    within = product.divided if product.divided == "count" else "tokens"
    return Operator(
        name,
        products=(
            replace(product, columns=inner, divided=within),
            replace(product, depth="L", divided=within if product.divided == "depth" else product.divided),
        ),
        forward_bytes=moved,
        backward_bytes=moved,
        split=operator.split,
        parameters=" + ".join(sides),
        parameters_split=operator.parameters_split,
        saved=(KeptBytes(f"2 {product.rows} {copies}{inner}", Split.SEQUENCE),),
    )
