"""Prices of a traced module's steps: the same roofline, links and launches as those of known layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from piper_ray.model.figures import time_text
from piper_ray.workloads.estimate.costs import Setting
from piper_ray.workloads.estimate.roofline import MatrixProducts, product_s, traffic_s
from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph, Step
from piper_ray.workloads.schemes.prices import StackPrices, StepPrice
from piper_ray.workloads.schemes.rules import Strategy, strategies

_ATTENTION_BACK = 2.5
"""Times the products of a forward pass: fused attention recomputes its scores."""


@dataclass(frozen=True)
class TracedWork:
    """products: whole. columns, depth: axes of these sides; all others are of rows. opaque: the operator, where no rule
    divides it. free: done with the product before it."""

    products: tuple[MatrixProducts, ...] = ()
    columns: tuple[object, ...] = ()
    depth: tuple[object, ...] = ()
    on_chip: bool = False
    opaque: str = ""
    free: bool = False

    def named(self, names: Callable[[Iterable[int | None]], tuple[str, ...]]) -> TracedWork:
        """The step with names of axes instead of numbers."""
        return replace(self, columns=names(self.columns), depth=names(self.depth))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TracedGraph:
    """A module, and the work of its steps by name."""

    graph: OperatorGraph
    works: Mapping[str, TracedWork]

    def unruled(self, setting: Setting) -> Iterator[str]:
        """Operators that no rule divides, and what they cost."""
        prices = TracedPrices(1, setting, self)
        found: dict[str, list[tuple[str, float]]] = {}
        for step in self.graph.steps:
            if operator := self.works[step.name].opaque:
                price = prices.step(step, strategies(step, self.graph, 1)[0])
                assert price is not None
                found.setdefault(operator, []).append((step.name, price.forward_s + price.backward_s))
        for operator, steps in found.items():
            cost = time_text(sum(seconds for _, seconds in steps), 3)
            names = steps[0][0] if len(steps) == 1 else f"{steps[0][0]} and {len(steps) - 1} more"
            yield f"{self.graph.name}: no rule divides {operator} ({names}): each device does all of it, {cost}"


@dataclass(frozen=True)
class TracedPrices(StackPrices):
    """The prices of a traced module."""

    of: TracedGraph

    def step(self, step: Step, strategy: Strategy) -> StepPrice | None:
        """The price of a step. A device's share of the work goes along the strategy's axis."""
        work, gpu, stack = self.of.works[step.name], self.setting.gpu, self.setting.stack
        if work.free:
            return StepPrice(0.0, 0.0)
        values = self.of.graph.values

        def share(name: str) -> float:
            return values[name].bytes / (self.degree if strategy.placements[name].axis else 1)

        read = sum(share(name) for name in step.inputs if not values[name].parameters)
        made = sum(share(name) for name in step.outputs)
        products_s = sum(
            product_s(self._shape(one, work, strategy.axis), gpu, work.on_chip) + gpu.kernel_s for one in work.products
        )
        is_product = step.family is OperatorFamily.CONTRACTION and bool(work.products)
        moved_s = 0.0 if is_product else traffic_s(read + made, gpu) + gpu.kernel_s
        back_s = 0.0 if is_product else traffic_s(2.0 * read + made, gpu) + gpu.kernel_s
        learned = sum(1 for name in step.inputs if values[name].has_gradient)
        factor = _ATTENTION_BACK if work.on_chip else float(learned)
        weights_s = products_s if is_product and any(values[name].parameters for name in step.inputs) else 0.0
        launch_s = stack.launch_s(self.degree)
        return StepPrice(
            (products_s + moved_s) / stack.efficiency,
            (factor * products_s + back_s) / stack.efficiency,
            launch_s,
            launch_s * (2.0 if is_product else 1.0),
            launch_s,
            weights_s / stack.efficiency,
        )

    def _shape(self, one: MatrixProducts, work: TracedWork, axis: str) -> MatrixProducts:
        if not axis:
            return one
        side = "columns" if axis in work.columns else "depth" if axis in work.depth else "rows"
        return replace(one, **{side: getattr(one, side) / self.degree})
