"""One way to run a layer on t devices, in full, as plain data; and the name that it has, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ray.workloads.schemes.graph import OperatorGraph, TensorPlacement
from piper_ray.workloads.schemes.prices import SchemePrices


@dataclass(frozen=True)
class PricedGraph:
    """What schemes are of."""

    graph: OperatorGraph
    prices: SchemePrices


@dataclass(frozen=True)
class StepScheme:
    """How a step is divided: the axis of its forward pass, of its backward pass, and of its forward pass done again;
    None where it is not."""

    name: str
    forward: str
    backward: str
    again: str | None


@dataclass(frozen=True)
class Move:
    """A value, or its gradient, brought from one placement to another. when: ``forward``, ``again`` (of what was made
    again), ``kept`` (of what was kept), ``gradient``, ``part`` (of one reader's part of a gradient), or ``weight``
    (its gradient)."""

    when: str
    value: str
    source: TensorPlacement
    target: TensorPlacement


@dataclass(frozen=True)
class SchemeFigures:
    """On each device, in s per microbatch and bytes. forward_s, backward_s: both passes, with what is computed again
    and what waits. once_s: what weights' gradients that are summed once a batch take of it. weight_s: of the backward
    pass, gradients of weights. activation_bytes: a; state_bytes: of b; weights_bytes: w. again_bytes: made again in a
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
        """p, with what is summed once a batch."""
        return self.forward_s + self.backward_s + self.once_s

    def held_bytes(self, in_flight: float) -> float:
        """With a number of microbatches in flight."""
        return in_flight * self.activation_bytes + self.state_bytes

    def as_good_as(self, other: SchemeFigures) -> bool:
        """Whether it is as fast in both passes and holds no more of anything."""
        return (
            self.time_s <= other.time_s
            and self.activation_bytes <= other.activation_bytes
            and self.state_bytes <= other.state_bytes
            and self.weights_bytes <= other.weights_bytes
        )


@dataclass(frozen=True)
class Scheme:
    """border: where the values between layers lie. weights: where each lies. kept: values, and where."""

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
        """The steps that are done again."""
        return tuple(step.name for step in self.steps if step.again is not None)
