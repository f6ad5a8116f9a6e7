"""One way to run a layer on t devices, in full, as plain data; and the name that it has, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.workloads.schemes.graph import OperatorGraph, TensorPlacement
from piper_ray.workloads.schemes.prices import SchemePrices


@dataclass(frozen=True)
class PricedGraph:
    """What a scheme belongs to."""

    graph: OperatorGraph
    prices: SchemePrices


@dataclass(frozen=True)
class StepScheme:
    """How a step is divided: the axis of its forward pass, of its backward pass, and of its recomputed forward pass;
    None where the pass is not divided or not recomputed."""

    name: str
    forward: str
    backward: str
    again: str | None


@dataclass(frozen=True)
class Move:
    """A value, or its gradient, brought from one placement to another. when: ``forward``, ``again`` (a recomputed
    value), ``kept`` (a kept value), ``gradient``, ``part`` (one reader's part of a gradient), or ``weight`` (its
    gradient)."""

    when: str
    value: str
    source: TensorPlacement
    target: TensorPlacement


@dataclass(frozen=True)
class SchemeFigures:
    """Figures of each device, in s per microbatch and bytes. forward_s, backward_s: both passes, with recomputation and
    waits. once_s: the part for weights' gradients that are summed once a batch. weight_s: the part of the backward pass
    for gradients of weights. activation_bytes: a; state_bytes: of b; weights_bytes: w. again_bytes: recomputed in a
    backward pass. copied: parameters that all of the devices hold."""

    forward_s: float
    backward_s: float
    weight_s: float
    once_s: float
    activation_bytes: float
    state_bytes: float
    weights_bytes: float
    again_bytes: float
    copied: float

    @property
    def time_s(self) -> float:
        """p, including what is summed once a batch."""
        return self.forward_s + self.backward_s + self.once_s

    def held_bytes(self, in_flight: float) -> float:
        """The bytes with a number of microbatches in flight."""
        return in_flight * self.activation_bytes + self.state_bytes

    def as_good_as(self, other: SchemeFigures) -> bool:
        """Whether it is as fast in both passes and holds no more in any respect."""
        return (
            self.time_s <= other.time_s
            and self.activation_bytes <= other.activation_bytes
            and self.state_bytes <= other.state_bytes
            and self.weights_bytes <= other.weights_bytes
        )


@dataclass(frozen=True)
class Scheme:
    """border: the placement of the values between layers. weights: the placement of each. kept: values and their
    placements."""

    kind: str
    degree: int
    border: TensorPlacement
    steps: tuple[StepScheme, ...]
    weights: Mapping[str, TensorPlacement]
    kept: tuple[tuple[str, TensorPlacement], ...]
    moves: tuple[Move, ...]
    figures: SchemeFigures

    @property
    def again(self) -> tuple[str, ...]:
        """The steps that are recomputed."""
        return tuple(step.name for step in self.steps if step.again is not None)
