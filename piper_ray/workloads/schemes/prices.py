"""What steps and moves of a scheme cost: the estimator's own roofline, links, launches and host.

A device's part of a step is what the estimator has for it in one of three modes: on one device, as one of t that share
the tokens, or as one of t of tensor parallelism. Exchanges cost what those of tensor parallelism do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from piper_ray.workloads.estimate.costs import Setting, is_captured, routing_host_s
from piper_ray.workloads.estimate.exchanges import (
    Group,
    Reduced,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    context_s,
    exchange_s,
)
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Operator
from piper_ray.workloads.estimate.roofline import (
    backward_s,
    expert_launches,
    forward_s,
    launches,
    weight_gradients_s,
)
from piper_ray.workloads.schemes.graph import Step, TensorPlacement, Value
from piper_ray.workloads.schemes.layers import EXPERTS, TOKENS, KindGraph
from piper_ray.workloads.schemes.rules import RING, Strategy


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
        software, group = stack.software, Group(degree)
        if source.partial and not target.axis:
            once_s = software.tensor_slowdown * all_reduce_s(value.bytes, group, stack.gpu, stack.domain)
        elif source.axis and target.axis:
            once_s = all_to_all_s(value.bytes / degree, group, stack.gpu, stack.domain)
        else:
            once_s = software.tensor_slowdown * all_gather_s(value.bytes, group, stack.gpu, stack.domain)
        if phase is PassPhase.FORWARD:
            return (once_s + software.message_s) * (1.0 - software.forward_overlap)
        if phase is PassPhase.KEPT and not target.axis:
            # Asked for before the product that needs it, during another one, as sequence parallelism does.
            once_s = all_gather_s(value.bytes, group, stack.gpu, stack.domain) - software.message_s
        return (once_s + software.message_s) * (1.0 - software.backward_overlap)

    def once_s(self, value: Value) -> float:
        """As of context parallelism's replicas."""
        reduced = Reduced(value.parameters * self.weight.synchronised, self.degree, 1)
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
        moved_s, hiding_s = context_s(kind, mode, stack), forward_s(operator, kind, mode, stack)
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
        return 0.5 * exchange_s(exchange, self.of.kind, mode, self.setting.stack)
