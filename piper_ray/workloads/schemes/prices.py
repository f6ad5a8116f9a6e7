"""What steps and moves of a scheme cost: the estimator's own roofline, links, launches and host.

A device's part of a step is what the estimator has for it in one of three modes: on one device, as one of t that share
the tokens, or as one of t of tensor parallelism. Exchanges cost what those of tensor parallelism do.
Steps of a traced module have the same roofline, links and launches as those of known layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from piper_ray.model.figures import time_text
from piper_ray.workloads.estimate import exchanges
from piper_ray.workloads.estimate.costs import Setting, is_captured, routing_host_s
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Operator
from piper_ray.workloads.estimate.roofline import (
    MatrixProducts,
    backward_s,
    expert_launches,
    forward_s,
    launches,
    product_s,
    traffic_s,
    weight_gradients_s,
)
from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph, Step, TensorPlacement, Value
from piper_ray.workloads.schemes.layers import EXPERTS, TOKENS, KindGraph
from piper_ray.workloads.schemes.rules import RING, Strategy, strategies


class PassPhase(Enum):
    """FORWARD: also done again in the backward pass; KEPT: a value that is kept, where it is needed in the backward
    pass; GRADIENT: of a value."""

    FORWARD = "forward"
    KEPT = "kept"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step on each device for a microbatch, and those that its launches take the host; again: of its
    forward pass, done again. weight_s: of the backward pass, gradients of weights."""

    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    again_host_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a parameter on a device: of the whole state, and of the part of its gradient that replicas reduce."""

    state: float
    synchronised: float


class SchemePrices(Protocol):
    """What the program asks."""

    @property
    def weight(self) -> WeightBytes: ...

    def step(self, step: Step, strategy: Strategy) -> StepPrice | None:
        """The price of a step; None where it is not offered with this strategy."""

    def move_s(self, value: Value, source: TensorPlacement, target: TensorPlacement, phase: PassPhase) -> float | None:
        """Seconds to bring a value from one placement to another; None where that is not offered."""

    def once_s(self, value: Value) -> float:
        """Seconds for each microbatch to sum, once a batch, the gradients of a weight that all devices hold."""


@dataclass(frozen=True)
class StackPrices:
    """Prices of moves and of weights on the stack of ``setting``."""

    degree: int
    setting: Setting

    @property
    def weight(self) -> WeightBytes:
        training, stack = self.setting.training, self.setting.stack
        state = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
        return WeightBytes(state, stack.software.reduced_bytes(stack.precision, training))

    def move_s(self, value: Value, source: TensorPlacement, target: TensorPlacement, phase: PassPhase) -> float | None:
        """Collectives around a ring; what one device has already is free."""
        if target.partial:
            # A gradient that all have, or shards of it, is its own partial sum: with noughts elsewhere.
            return 0.0 if phase is PassPhase.GRADIENT and not source.partial else None
        if target.axis and not (source.axis or source.partial):
            return 0.0
        stack, degree = self.setting.stack, self.degree
        software, group = stack.software, exchanges.Group(degree)
        if source.partial and not target.axis:
            once_s = software.tensor_slowdown * exchanges.all_reduce_s(value.bytes, group, stack.gpu, stack.domain)
        elif source.axis and target.axis:
            once_s = exchanges.all_to_all_s(value.bytes / degree, group, stack.gpu, stack.domain)
        else:
            once_s = software.tensor_slowdown * exchanges.all_gather_s(value.bytes, group, stack.gpu, stack.domain)
        if phase is PassPhase.FORWARD:
            return (once_s + software.message_s) * (1.0 - software.forward_overlap)
        if phase is PassPhase.KEPT and not target.axis:
            # Asked for before the product that needs it, during another one, as sequence parallelism does.
            once_s = exchanges.all_gather_s(value.bytes, group, stack.gpu, stack.domain) - software.message_s
        return (once_s + software.message_s) * (1.0 - software.backward_overlap)

    def once_s(self, value: Value) -> float:
        """As of context parallelism's replicas."""
        reduced = exchanges.Reduced(value.parameters * self.weight.synchronised, self.degree, 1)
        return reduced.ring_s(1, self.setting.stack) / self.setting.microbatches


@dataclass(frozen=True)
class EstimatedPrices(StackPrices):
    """The prices of a kind's graph."""

    of: KindGraph

    def step(self, step: Step, strategy: Strategy) -> StepPrice | None:
        """The price that the estimator has for the operator where the axis's side is divided."""
        work = self.of.works[step.name]
        side = work.sides.get(strategy.axis) if strategy.axis else "whole"
        if side is None:
            return None
        if work.operator is None:
            return StepPrice(0.0, 0.0)
        operator, mode = work.operator, self._mode(side)
        kind, stack = self.of.kind, self.setting.stack
        launch_s = 0.0 if is_captured(operator, stack) else stack.launch_s(self.of.degree)
        there, back = (launch_s * count for count in launches(operator, kind, mode, stack))
        each_s = stack.launch_s(self.of.degree) * stack.software.expert_launches
        routed = [each_s * count for count in expert_launches(operator, kind, mode)]
        routing = routing_host_s(stack) if operator.name == "router" else (0.0, 0.0)
        forward, backward = (of(operator, kind, mode, stack) / stack.efficiency for of in (forward_s, backward_s))
        ring = self._ring_s(operator) if strategy.exchange == RING else (0.0, 0.0)
        return StepPrice(
            forward + ring[0],
            backward + ring[1],
            there + routed[0] + routing[0],
            back + routed[1] + routing[1],
            there + routed[0] + routing[0],
            weight_gradients_s(operator, kind, mode, stack) / stack.efficiency,
        )

    def _mode(self, side: str) -> LayerMode:
        """The estimator's mode in which a device does its part."""
        degree = self.of.degree
        return {
            "whole": LayerMode(),
            "tokens": LayerMode(context=degree),
            "own": LayerMode(degree=degree),
            "inner": LayerMode(degree=degree, experts=1, expert_tensor=degree),
        }[side]

    def _ring_s(self, operator: Operator) -> tuple[float, float]:
        """What does not hide behind attention of keys and values that go around, and of their gradients."""
        kind, stack, mode = self.of.kind, self.setting.stack, LayerMode(context=self.of.degree)
        moved_s, hiding_s = exchanges.context_s(kind, mode, stack), forward_s(operator, kind, mode, stack)
        return max(0.0, moved_s - hiding_s), max(0.0, 2.0 * moved_s - 2.0 * hiding_s)

    def move_s(self, value: Value, source: TensorPlacement, target: TensorPlacement, phase: PassPhase) -> float | None:
        """Copies of tokens go to experts by their own exchange."""
        moved_s = super().move_s(value, source, target, phase)
        if moved_s and value.sent_to_experts and TOKENS in (source.axis, target.axis):
            return self._to_experts_s(1 if EXPERTS in (source.axis, target.axis) else self.of.degree)
        return moved_s

    def _to_experts_s(self, expert_tensor: int) -> float:
        """One way of the two that the estimator's exchange has. expert_tensor: devices that share an expert."""
        (exchange,) = (one for one in self.of.kind.exchanges if one.expert_bytes)
        degree = self.of.degree
        mode = LayerMode(degree=degree, sequence_parallel=True)
        if expert_tensor > 1:
            mode = replace(mode, experts=degree // expert_tensor, expert_tensor=expert_tensor)
        return 0.5 * exchanges.exchange_s(exchange, self.of.kind, mode, self.setting.stack)


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
